"""Relevance on the command line."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, needles
from support.changes import BENCHES, CLI, ENGINE
from support.commands import POOLED, good, summary

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli import main
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.options import Options

pytestmark = pytest.mark.native

environment = commands.environment
long_file = commands.long_file


#
# relevance
#


@pytest.fixture(autouse=True)
def through_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read through the pool, where the policy decides between their batches."""
    monkeypatch.setenv("KVFLASH_PREFILL", "pool")


Give = Callable[..., None]
QK = ("--kvflash-policy", "qk")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Options that only Python has, for what the command line loads."""

    def give(**more: Any) -> None:
        load = KVFlash.from_file.__func__  # type: ignore[attr-defined]
        monkeypatch.setattr(KVFlash, "from_file", classmethod(lambda cls, path, **o: load(cls, path, **{**o, **more})))

    return give


@pytest.mark.nightly(CLI, ENGINE, BENCHES)
def test_trace_and_plot(long_file: Path, tmp_path: Path, given: Give) -> None:
    """What a run writes is what it did, and can be drawn."""
    pytest.importorskip("matplotlib")
    trace = tmp_path / "run.jsonl"
    given(tau=16, share=0)
    args = ("-f", str(long_file), *POOLED, *QK, "-n", "40", "--temp", "0")
    plain = good("run", *args)
    res = good("run", *args, "--trace", str(trace), "--jsonl")
    assert good("run", *args, "--trace", str(trace)).stdout == plain.stdout, "it changes nothing"
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    start = lines[0]
    assert start.pop("event") == "start"
    assert start == {
        "model": str(BUNDLED_MODEL), "policy": "qk", "n_ctx": 4096, "n_pool": 768, "chunk": 64, "tau": 16
    }  # fmt: skip
    shown = [json.loads(line)["event"] for line in res.stdout.splitlines()]
    assert Counter(line["event"] for line in lines[1:]) == Counter(shown)
    chosen = [line for line in lines[1:] if line["event"] == "reselect"]
    assert {line["reason"] for line in chosen} == {"question", "decode"}
    assert all(line["scores"][0] is None for line in chosen)  # the sink
    assert all(isinstance(line["scores"][3], float) for line in chosen)

    picture = tmp_path / "run.png"
    assert f"wrote {picture}" in good("plot", str(trace)).stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert good("plot", str(trace), "-o", str(tmp_path / "x.svg")).exit_code == 0


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_defaults_are_those_of_the_library(command: str) -> None:
    """Of every option that has one, but how many sequences there are."""
    own, differ = Options(), {}
    with click.Context(main.commands[command]) as ctx:  # type: ignore[attr-defined]
        for param in ctx.command.params:
            if param.name in {field.name for field in fields(Options)} and param.name != "n_parallel":
                found = param.type_cast_value(ctx, param.get_default(ctx))
                if str(found) != str(getattr(own, param.name)):
                    differ[param.name] = found, getattr(own, param.name)
    assert differ == {}


@pytest.mark.nightly(CLI, ENGINE)
def test_a_drafter_is_taken_at_its_word(long_file: Path, tmp_path: Path) -> None:
    """--set scorer_model means policy drafter, unless another one is typed; a bad one is a warning."""
    args = ("-f", str(long_file), *POOLED, "-n", "8")
    found = summary(*args, "--set", f"scorer_model={BUNDLED_MODEL}")
    assert (found["policy"], found["warnings"]) == ("drafter", [])
    assert summary(*args, "--set", f"scorer_model={BUNDLED_MODEL}", "--kvflash-policy", "qk")["policy"] == "qk"
    bad = tmp_path / "draft.gguf"
    bad.write_bytes(b"no model")
    res = good("run", *args, "--set", f"scorer_model={bad}", "--temp", "0", "-q")
    assert res.stderr.count("\n") == 1
    assert res.stderr.startswith(f"kvflash: warning: drafter cannot score: {bad} is not a GGUF model")
    assert (long_file.parent / "answer.txt").read_text() in res.stdout


@pytest.mark.nightly(CLI, ENGINE)
def test_pins_by_option(tmp_path: Path) -> None:
    """The chunks of --set pins are never dropped; without them they are."""
    trace, text = tmp_path / "run.jsonl", tmp_path / "text.txt"
    text.write_text(needles.document(1500).text)
    args = ("-f", str(text), "-c", "4K", "-b", "64", "--kvflash", "1K", "--kvflash-policy", "lru", "-n", "1")

    def gone(*more: str) -> set[int]:
        good("run", *args, "--trace", str(trace), *more)
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        return {c for line in lines for c in line.get("drops", ())}

    assert {1, 2, 5, 6, 7} <= gone()
    left = gone("--set", "pins=0:100,300:350,7:8,448:449")
    assert not {0, 1, 4, 5, 7} & left
    assert {2, 3, 6, 8} <= left
