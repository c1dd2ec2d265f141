"""Run `kvflash bench` in this process, for the tests of its commands."""

import io
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from support import commands

from pyllama_kvflash.cli import main
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt

FILES = {f"results.{kind}" for kind in ("md", "csv", "json", "jsonl", "png")}  # what a bench writes
ONE_THREAD = {"n_threads": 1}
FORGETFUL = "qk/prefill=pool/replay=0/share=0/tail=9"  # has few blocks for what it brings back


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path, *argv: str) -> None:
    """Nothing of the caller's settings, nothing written outside a folder of the test, and this command line."""
    commands.forget_settings(monkeypatch)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["kvflash", *argv])


def ignore(*_: object) -> None:
    """No progress."""


def invoke(*args: str) -> Result:
    """Run a bench."""
    return commands.invoke("bench", *args)


def good(*args: str) -> Result:
    """The same, where nothing goes wrong."""
    return commands.good("bench", *args)


def refused(*args: str, code: int = 2) -> str:
    """The sentence that a bench is refused with: the last line, the only one that is an error."""
    res = invoke(*args)
    assert res.exit_code == code, res.output
    assert res.stdout == ""
    *before, last = res.stderr.splitlines()
    assert last.lower().startswith(("kvflash: error: ", "error: ")), res.stderr
    assert sum("error" in line.lower() for line in before) == 0
    return last


def type_examples(name: str) -> tuple[list[str], click.Command]:
    """Parse, but do not run, the commands that a bench's help shows: these, and the bench's own command."""
    text = good(name, "--help").stdout
    assert text.startswith("Usage: ")
    lines = [line.strip() for line in text.splitlines()]
    shown = [line.split("  ")[0] for line in lines if line.startswith(f"kvflash bench {name}")]
    with main.make_context("kvflash", ["bench"]) as ctx:
        bench = main.get_command(ctx, "bench")
        assert isinstance(bench, click.Group)
        command = bench.commands[name]
        for line in shown:
            command.make_context(name, line.split()[3:])
    return shown, command


#
# what they measure
#


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the caller's settings, and nothing written outside a folder of the test."""
    isolate(monkeypatch, tmp_path, "bench")


@pytest.fixture(scope="module")
def count() -> Iterator[Callable[[str], int]]:
    """Tokens of a text by the bundled model."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        yield lambda text: len(model.tokenize(text, add_special=False))


@pytest.fixture(scope="module")
def book(count: Callable[[str], int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a person, nearly 1,100 tokens."""
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(make_prompt(1100, count, n_needles=1, seed=5, drop=True).text, encoding="utf-8")
    return path


def stored(folder: Path) -> list[str]:
    return (folder / "results.jsonl").read_text("utf-8").splitlines()


def result(found: list[bool], **more: Any) -> dict[str, Any]:
    """As run_cell gives it."""
    figures = ("kv_device_bytes", "kv_full_bytes", "summary_bytes", "prefill_s", "answer_s", "score_ms")
    return {
        **dict.fromkeys(figures, 1.0), "found": found, "resident": found, "lost": {}, "session": {}, "machine": "M", "warnings": [], **more
    }  # fmt: skip


def png(data: bytes) -> Any:
    """Pixels (height, width, 4) of a PNG that can be read to its end."""
    image = pytest.importorskip("matplotlib.image")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    pixels = image.imread(io.BytesIO(data))
    assert pixels.shape == (height, width, 4)
    return pixels
