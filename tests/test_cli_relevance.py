"""Relevance and the demo on the command line."""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.commands import NEEDLE_TOKEN_BYTES, POOLED, SHORT, good, invoke, process, summary

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


@pytest.mark.parametrize("what", ["model", "prompt", "output"])
def test_trace_over_something_in_use(tmp_path: Path, what: str) -> None:
    paths = {name: tmp_path / name for name in ("model", "prompt", "output")}
    for name, path in paths.items():
        path.write_bytes(BUNDLED_MODEL.read_bytes() if name == "model" else b"The code")
    before = paths[what].read_bytes()
    res = invoke(
        "run", str(paths["model"]), "-f", str(paths["prompt"]), "-o", str(paths["output"]), "-c", "1K", "-n", "2",
        "--trace", str(paths[what]),
    )  # fmt: skip
    assert res.exit_code == 2, res.output
    assert "--trace" in res.stderr
    assert "Traceback" not in res.stderr
    assert paths[what].read_bytes() == before


@pytest.mark.parametrize(("name", "words"), [("no/such/run.jsonl", "there is no folder"), (".", "is a directory")])
def test_trace_that_cannot_be_written(tmp_path: Path, name: str, words: str) -> None:
    res = invoke("run", *SHORT, "-n", "2", "--trace", str(tmp_path / name))
    assert res.exit_code == 2
    assert words in res.stderr


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


def test_pins_by_option(long_file: Path, tmp_path: Path) -> None:
    """The chunks of --set pins are never dropped; without them they are."""
    trace = tmp_path / "run.jsonl"
    args = ("-f", str(long_file), "-c", "4K", "-b", "64", "--kvflash", "1K", "--kvflash-policy", "lru", "-n", "1")

    def gone(*more: str) -> set[int]:
        good("run", *args, "--trace", str(trace), *more)
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        return {c for line in lines for c in line.get("drops", ())}

    assert {1, 2, 5, 6, 7} <= gone()
    left = gone("--set", "pins=0:100,300:350,7:8,448:449")
    assert not {0, 1, 4, 5, 7} & left
    assert {2, 3, 6, 8} <= left


#
# demo
#


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    path = tmp_path_factory.mktemp("demo") / "prompt.txt"
    args = ("--tokens", "2K", "--kvflash", "1K", "--needles", "4", "-t", "1")
    return process("demo", *args, "-o", path, env={**os.environ, "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}), path


def test_demo_finds_all_with_the_full_cache_and_with_chunks_brought_back(
    small_demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    res, _ = small_demo
    assert res.returncode == 0, res.stderr
    found = re.search(r"found[│ ]+(\d) of 4[│ ]+(\d) of 4[│ ]+(\d) of 4", res.stdout)
    assert found, res.stdout
    full, lru, recalled = map(int, found.groups())
    assert (full, recalled) == (4, 4)
    assert lru < 4
    assert re.search(r"KV in RAM[│ ]+6\.8 MiB[│ ]+\d+\.\d MiB[│ ]+\d+\.\d MiB", res.stdout), res.stdout
    assert "\x1b" not in res.stdout + res.stderr


def test_demo_writes_a_prompt_that_can_be_run(
    small_demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    res, path = small_demo
    line = res.stdout.splitlines()[-1]
    assert line.startswith("Try it:  kvflash run -f ")
    answer = re.search(r"│ +(\d{7}) ✓", res.stdout)  # the first question is at the end of the file
    assert answer
    args = line.removeprefix("Try it:  kvflash ").replace(str(path), "FILE").split()
    found = good(*[str(path) if a == "FILE" else a for a in args], "--kvflash", "off")
    assert answer[1] in found.stdout


def test_demo_json(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    args = ("--tokens", "1300", "--kvflash", "1K", "--needles", "3", "-s", "2", "-t", "1")
    res = good("demo", *args, "--json", "-o", str(path))
    found = json.loads(res.stdout)
    assert res.stdout.count("\n") == 1
    assert (len(found["keys"]), len(found["expected"]), found["seed"]) == (3, 3, 2)
    full, _, recalled = found["runs"]
    assert (full["found"], recalled["found"]) == (3, 3)
    assert full["stats"]["n_pool"] is None
    assert recalled["stats"]["n_pool"] == 1024
    assert recalled["stats"]["kv_device_bytes"] == 1024 * NEEDLE_TOKEN_BYTES
    assert path.read_text(encoding="utf-8").rstrip().endswith("Answer:")
