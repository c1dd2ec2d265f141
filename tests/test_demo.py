"""`kvflash demo`: the pool's answers, and then the comparison."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import BENCHES
from support.commands import INTERRUPTED, good, invoke

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli import main
from pyllama_kvflash.errors import Interrupted

pytestmark = pytest.mark.native

module = sys.modules[main.commands["demo"].callback.__module__]
SMALL = ("--tokens", "1300", "--kvflash", "1K", "--needles", "3", "-t", "1")


@pytest.fixture
def args(tmp_path: Path) -> tuple[str, ...]:
    return ("demo", *SMALL, "-o", str(tmp_path / "prompt.txt"))


def announce(monkeypatch: pytest.MonkeyPatch, cut: str | None = None) -> None:
    """Have the runs write their names to stdout as they begin. One of them is cut short by Ctrl-C."""
    read = module.read

    def announced(kv: KVFlash, *args: Any) -> float:
        name = "full" if kv.n_pool is None else kv.policy
        click.echo(f"RUN {name}")
        if name == cut:
            raise Interrupted("interrupted")
        return read(kv, *args)

    monkeypatch.setattr(module, "read", announced)


def test_the_pool_comes_first(args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch)
    res = good(*args)
    nothing, first, lru, last = re.split(r"RUN \w+\n", res.stdout)
    assert re.findall(r"RUN (\w+)\n", res.stdout) == ["fresh", "lru", "full"]
    assert (nothing, lru) == ("", "")
    assert "pool, fresh" in first
    assert "full cache" not in first
    assert re.search(r"found[│ ]+3 of 3[│ ]+\n", first)
    assert re.search(r"full cache[┃ ]+pool, lru[┃ ]+pool, fresh", last)
    codes = re.findall(r"(\d{7}) ✓ │\n", first)
    assert len(codes) == 3
    for name in ("fresh", "lru", "full cache"):
        assert f"kvflash: {name} answers 1/3\n" in res.stderr
    assert re.findall(r"(\d{7}) ✓ │\n", last) == codes
    assert re.search(r"found[│ ]+3 of 3[│ ]+[012] of 3[│ ]+3 of 3", last), last
    assert "\x1b" not in res.output
    hint = res.stdout.splitlines()[-1]
    assert hint.startswith(f"Try it:  kvflash run -f {args[-1]} ")
    asked = good(*hint.removeprefix("Try it:  kvflash ").split(), "--kvflash", "off").stdout
    assert codes[0] in asked, "the first question is at the end of the file"


@pytest.mark.nightly(BENCHES)
@pytest.mark.parametrize("cut", ["lru", "full"])
def test_the_pool_s_answers_stay_after_an_interrupt(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    announce(monkeypatch, cut)
    Path(args[-1]).write_text("an old one")
    res = invoke(*args)
    assert res.exit_code == INTERRUPTED
    assert len(Path(args[-1]).read_text()) > 1000, "the text that was read stays, too"
    assert "found" in res.stdout
    assert len(re.findall(r"\d{7} ✓", res.stdout)) == 3
    assert "Ctrl-C" in res.stderr
    assert res.stderr.splitlines()[-1].endswith("interrupted")


@pytest.mark.nightly(BENCHES)
def test_json_is_written_at_the_end(args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch)
    *names, line = good(*args, "--json").stdout.splitlines()
    assert names == ["RUN fresh", "RUN lru", "RUN full"]
    found = json.loads(line)
    assert [run["name"] for run in found["runs"]] == ["full cache", "pool, lru", "pool, fresh"]
    assert (len(found["keys"]), len(found["expected"]), found["seed"]) == (3, 3, 1)
    full, _, recalled = found["runs"]
    assert (full["found"], recalled["found"]) == (3, 3)
    assert (full["stats"]["n_pool"], recalled["stats"]["n_pool"]) == (None, 1024)


def test_no_file_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_nothing(*_: Any) -> float:
        raise Interrupted("interrupted")

    monkeypatch.setattr(module, "read", read_nothing)
    monkeypatch.chdir(tmp_path)
    invoke("demo", *SMALL)
    assert list(tmp_path.iterdir()) == []
