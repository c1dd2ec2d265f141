"""The command line: what a person types, what comes out, and where."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import CLI, ENGINE
from support.commands import (
    NEEDLE_TOKEN_BYTES,
    POOLED,
    SHORT,
    check_error,
    good,
    invoke,
    on_a_terminal,
    process,
    rows,
    summary,
)

from pyllama_kvflash import __version__
from pyllama_kvflash.cli import main, report
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.loading import memory
from pyllama_kvflash.native import devices
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_gpu")]

environment = commands.environment
long_file = commands.long_file

COMMANDS = ("run", "chat", "serve", "demo", "inspect", "plot", "cache")


#
# help
#


def examples(text: str) -> list[list[str]]:
    """The command lines that a help text shows, as arguments of kvflash."""
    lines = [line.strip() for line in text.splitlines()]
    shown = [re.split(r"\s{2,}| \| | && ", line) for line in lines if re.match(r"(\S+ \S+ \| )?kvflash ", line)]
    parts = [part for line in shown for part in line if part.startswith("kvflash ")]
    return [[a.strip('"') for a in re.findall(r'"[^"]*"|\S+', part.split(" > ")[0])][1:] for part in parts]


@pytest.mark.parametrize("command", [(), *[(c,) for c in COMMANDS]])
def test_help(command: tuple[str, ...]) -> None:
    res = good(*command, "--help")
    assert res.stdout.startswith("Usage: ")
    assert res.stderr == ""
    assert good(*command, "-h").stdout == res.stdout
    found = [args for args in examples(res.stdout) if tuple(args[: len(command)]) == command]
    assert len(found) >= 2, "help teaches with examples"
    params = [p for name in command for p in command_of(name).params if isinstance(p, click.Option)]
    assert [p.name for p in params if not p.help] == []


@pytest.mark.parametrize("command", [(), *[(c,) for c in COMMANDS]])
def test_examples_in_help_are_valid(command: tuple[str, ...]) -> None:
    for name, *args in examples(good(*command, "--help").stdout):
        command_of(name).make_context(name, args)  # parses, does not run


def command_of(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found
    return found


def test_version() -> None:
    assert good("--version").stdout == f"kvflash, version {__version__}\n"


def test_no_command_shows_help() -> None:
    res = invoke()
    assert res.exit_code == 2
    assert all(name in res.output for name in COMMANDS)


#
# what goes where
#


def test_text_goes_to_stdout_and_the_rest_to_stderr() -> None:
    args = (*SHORT, "-n", "8")
    res = process("run", "--temp", "0", *args)
    assert res.returncode == 0, res.stderr
    assert res.stdout == summary(*args)["text"] + "\n"
    assert len(res.stdout) > 8
    for word in (
        "needle-7m",
        "a context of 1,024 tokens",
        "full cache in f16: 3.0 MiB",
        "read ",
        "wrote ",
        "tok/s",
        "at its peak",
        "(-n)",
    ):
        assert word in res.stderr
    assert all(line.startswith("kvflash: ") for line in res.stderr.splitlines())


def test_json_is_one_object() -> None:
    res = good("run", *SHORT, "-n", "8", "--temp", "0", "--json")
    assert res.stdout.count("\n") == 1
    found = json.loads(res.stdout)
    assert set(found) >= {"model", "text", "reason", "notes", "warnings", "stats", "policy"}
    assert found["model"] == str(BUNDLED_MODEL)
    assert found["reason"] == "length"
    stats = found["stats"]
    assert stats["n_generated"] == 8
    assert stats["n_prompt"] > 4
    assert stats["n_ctx"] == 1024
    assert stats["n_pool"] is None
    assert stats["kv_device_bytes"] == 1024 * NEEDLE_TOKEN_BYTES
    assert stats["prefill_rate"] > 0
    assert stats["decode_rate"] > 0
    assert stats["seed"] is None


def test_jsonl_is_an_object_a_line_that_ends_in_done(long_file: Path) -> None:
    args = ("-f", str(long_file), *POOLED, "--kvflash-policy", "qk", "-n", "8")
    res = good("run", *args, "--temp", "0", "--jsonl")
    events = [json.loads(line) for line in res.stdout.splitlines()]
    kinds = [e["event"] for e in events]
    assert kinds[0] == "prefill"
    assert kinds[-1] == "done"
    assert kinds.count("done") == 1
    assert set(kinds) == {"prefill", "paged", "reselect", "token", "done"}
    assert "prefill" not in kinds[kinds.index("token") :]

    prefill = [e for e in events if e["event"] == "prefill"]
    assert [e["done"] for e in prefill] == sorted(e["done"] for e in prefill)
    assert prefill[-1]["done"] == prefill[-1]["total"] == events[-1]["stats"]["n_prompt"]
    held = 768 * NEEDLE_TOKEN_BYTES + 4096 * NEEDLE_TOKEN_BYTES // 3  # the pool, and two of six layers of the context
    assert all(e["resident_bytes"] == held for e in prefill)

    tokens = [e for e in events if e["event"] == "token"]
    assert len(tokens) == events[-1]["stats"]["n_generated"] == 8
    assert "".join(e["text"] for e in [*tokens, events[-1]]) == summary(*args)["text"]
    for field, count in (("drops", "pages_out"), ("page_ins", "pages_in")):
        moved = sum(len(e[field]) for e in events if e["event"] in {"paged", "reselect"})
        assert moved <= events[-1]["stats"][count] <= moved + 4  # the tail that came back for the replay is in no event
        assert moved > 0


def test_quiet_leaves_nothing_on_stderr() -> None:
    res = process("run", *SHORT, "-n", "4", "-q")
    assert res.returncode == 0
    assert res.stderr == ""
    assert res.stdout


def test_quiet_still_warns() -> None:
    res = good("run", "-p", "Hello", "-c", "8K", "--kvflash", "100", "-n", "1", "-q")
    assert res.stderr.startswith("kvflash: warning: a pool of 100 tokens is too small: raised to ")
    assert res.stderr.count("\n") == 1


def test_stats_shows_all_figures() -> None:
    res = good("run", *SHORT, "-n", "4", "--stats", "-s", "11")
    table = rows(res.stderr)
    assert table["context"].startswith("1,024")
    assert table["pool"].startswith("none")
    assert table["seed"] == "11"
    assert {"prompt", "generated", "device KV", "full cache", "host records", "pages"} <= set(table)
    assert "prompt" not in res.stdout


def test_details_of_a_pool(long_file: Path) -> None:
    last = good("run", "-f", str(long_file), *POOLED, "-n", "4", "-v").stderr.splitlines()[-1]
    assert re.fullmatch(
        r"kvflash: \w+: prefill 1,\d+ tok at [\d,]+ tok/s · decode 4 tok at [\d.,]+ tok/s"
        r" · (KV [\d.]+ MiB = 2\.2 MiB of pool \+ [\d.]+ MiB of records \+ [\d.]+ MiB of codes \+ 4\.0 MiB to read prompts,"
        r" full cache 12\.0 MiB|device KV .* \(\d+\.\d %\) · host [\d.]+ MiB)"
        r" · pages \d+ out, \d+ in · memory (up to [\d.]+ \w+ of the GPU, )?[\d.]+ MiB of RAM at its peak",
        last,
    ), last


def test_output_file(tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    args = ("run", *SHORT, "-n", "8", "--temp", "0")
    plain = good(*args)
    res = good(*args, "-o", str(path))
    assert res.stdout == ""
    assert path.read_text(encoding="utf-8") == plain.stdout

    good(*args, "-o", str(path), "--json")  # a run that ends well does write over
    assert json.loads(path.read_text(encoding="utf-8"))["text"] + "\n" == plain.stdout


@pytest.mark.parametrize("how", ["stdin", "stdin-named", "file"])
def test_ways_to_give_a_prompt(how: str, tmp_path: Path) -> None:
    want = summary("-p", "The secret code for the red boat", "-c", "1K", "-n", "8")
    text = "The secret code for the red boat\n"  # the newline at the end is taken off
    path = tmp_path / "prompt.txt"
    path.write_text("\ufeff" + text, encoding="utf-8")
    args, stdin = {
        "stdin": ((), text),
        "stdin-named": (("-f", "-"), text),
        "file": (("--prompt-file", str(path)), None),
    }[how]
    found = summary(*args, "-c", "1K", "-n", "8", text=stdin)
    assert found["text"] == want["text"]
    assert found["stats"]["n_prompt"] == want["stats"]["n_prompt"]


def test_two_newlines_at_the_end_are_one_too_many() -> None:
    one, two = (summary("-c", "1K", "-n", "1", text=text)["stats"]["n_prompt"] for text in ("a\n", "a\n\n"))
    assert two == one + 1


def test_model_by_argument_and_by_option() -> None:
    by_argument = summary(str(BUNDLED_MODEL), *SHORT, "-n", "4")
    by_option = summary("-m", str(BUNDLED_MODEL), *SHORT, "-n", "4")
    assert by_argument["text"] == by_option["text"]
    assert "using the bundled" not in good("run", str(BUNDLED_MODEL), *SHORT, "-n", "1").stderr
    assert "using the bundled" in good("run", *SHORT, "-n", "1").stderr


def test_verbose_shows_the_library_log_on_stderr() -> None:
    res = process("run", *SHORT, "-n", "2", "--temp", "0", "-v")
    assert res.returncode == 0
    assert "llama_model_loader" in res.stderr
    assert res.stdout == summary(*SHORT, "-n", "2")["text"] + "\n"


def test_until_the_context_is_full() -> None:
    found = summary("-p", "The secret code for the", "-c", "256", "-n", "-1")
    assert found["reason"] in {"context", "eos"}
    if found["reason"] == "context":
        assert found["stats"]["n_prompt"] + found["stats"]["n_generated"] == 256 + 1  # the last one is not decoded


#
# what is generated
#


def sampled(*args: str) -> dict[str, Any]:
    res: dict[str, Any] = json.loads(
        good("run", *SHORT, "-n", "32", "--temp", "1.5", "--top-k", "0", "--json", *args).stdout
    )
    return res


def test_a_random_seed_is_told_and_reproduces() -> None:
    assert sampled("-s", "7")["stats"]["seed"] == 7
    drawn = sampled()
    assert sampled("-s", str(drawn["stats"]["seed"]))["text"] == drawn["text"]
    assert sampled()["stats"]["seed"] != drawn["stats"]["seed"]


def test_stop_string_is_not_shown() -> None:
    whole = summary(*SHORT, "-n", "16")["text"]
    stop = whole[5:8]
    found = summary(*SHORT, "-n", "16", "-r", "no such text", "-r", stop)
    assert found["reason"] == "stop"
    assert found["text"] == whole[: whole.index(stop)]
    assert good("run", *SHORT, "-n", "16", "--temp", "0", "-r", stop).stdout == found["text"] + "\n"


@pytest.mark.sampled(CLI, ENGINE)
@pytest.mark.parametrize(
    ("args", "n_ctx", "n_pool"),
    [
        (("-c", "4K", "--kvflash", "1K"), 4096, 1024),
        (("-c", "1M", "--kvflash", "2K"), 1 << 20, 2048),
        (("-c", "4000", "--kvflash", "1030"), 4000, 1280),  # in steps of 256 cells, and said so
        (("-c", "4K", "--kvflash", "4K"), 4096, None),
        (("--kvflash", "1K"), 67584, 1024),  # the model's context
    ],
)
def test_sizes(args: Sequence[str], n_ctx: int, n_pool: int | None) -> None:
    found = summary("-p", "Hello", "-n", "1", *args)
    assert (found["stats"]["n_ctx"], found["stats"]["n_pool"]) == (n_ctx, n_pool)
    cells = n_pool if n_pool is not None else -(-n_ctx // 256) * 256
    assert found["stats"]["kv_device_bytes"] == cells * NEEDLE_TOKEN_BYTES
    if "1030" in args:
        assert any("1,280" in note for note in found["notes"])


def parsed(*args: str) -> dict[str, Any]:
    """What the options of a run mean, without a run."""
    return main.commands["run"].make_context("run", ["-p", "Hello", *args]).params


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ((), {"tensor_split": (), "rpc": (), "host_limit": None, "n_gpu_layers": -1}),
        (("-ts", "3,1"), {"tensor_split": (3.0, 1.0)}),
        (("-ts", "3/1"), {"tensor_split": (3.0, 1.0)}),  # as llama.cpp takes it
        (("-ts", ""), {"tensor_split": ()}),
        (("--rpc", "10.0.0.1:50052, gpu-2:1"), {"rpc": ("10.0.0.1:50052", "gpu-2:1")}),
        (("--rpc", ""), {"rpc": ()}),
        (("--kvflash-host", "1000000"), {"host_limit": 1_000_000}),
        (("--kvflash-host", "512M"), {"host_limit": 512 << 20}),
        (("--kvflash-host", "64GiB"), {"host_limit": 64 << 30}),
        (("--kvflash-host", "2TiB"), {"host_limit": 2 << 40}),
        (("-ngl", "20"), {"n_gpu_layers": 20}),
        ((), {"n_cpu_moe": 0}),
        (("--n-cpu-moe", "auto"), {"n_cpu_moe": "auto"}),
        ((), {"prefill": "exact", "mode": "fast"}),
        (("--kvflash-mode", "lossless"), {"mode": "lossless"}),
        (("--kvflash-exact",), {"mode": "lossless"}),
        (("--kvflash-exact", "--kvflash-mode", "lossless"), {"mode": "lossless"}),
        (("--kvflash-prefill", "pool"), {"prefill": "pool"}),
        (("--kvflash-prefill", "auto", "--set", "panes=1"), {"prefill": "auto", "settings": {"panes": 1}}),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_options_of_devices_and_memory(args: Sequence[str], want: dict[str, Any]) -> None:
    found = parsed(*args)
    assert {name: found[name] for name in want} == want


def test_the_short_name_of_a_mode_contradicts_the_other() -> None:
    with pytest.raises(
        UsageError, match="--kvflash-exact is short for --kvflash-mode lossless, and --kvflash-mode is fast"
    ):
        parsed("--kvflash-exact", "--kvflash-mode", "fast")


@pytest.mark.parametrize(
    ("variable", "option", "name", "value", "typed"),
    [
        ("LLAMA_ARG_CTX_SIZE", "-c", "n_ctx", "1K", "3K"),
        ("KVFLASH_POOL", "--kvflash", "pool", "off", "1K"),
        ("LLAMA_ARG_TENSOR_SPLIT", "-ts", "tensor_split", "2", "3"),
        ("LLAMA_ARG_N_CPU_MOE", "-ncmoe", "n_cpu_moe", "auto", "2"),
        ("LLAMA_ARG_RPC", "--rpc", "rpc", "b:2", "c:3"),
        ("LLAMA_ARG_TEMPERATURE", "--temp", "temperature", "0.5", "0.2"),
        ("KVFLASH_HOST", "--kvflash-host", "host_limit", "2G", "3G"),
        ("KVFLASH_PREFILL", "--kvflash-prefill", "prefill", "pool", "auto"),
    ],
)
def test_environment_of_options(
    monkeypatch: pytest.MonkeyPatch, variable: str, option: str, name: str, value: str, typed: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert parsed()[name] == parsed(option, value)[name]
    assert parsed(option, typed)[name] != parsed()[name]


def test_cap_of_the_automatic_pool() -> None:
    found = summary("-p", "Hello", "-n", "1", "-c", "32K", "--set", "auto_cap=5000")
    assert found["stats"]["n_pool"] == 4864
    assert found["notes"][0].endswith("(`auto_cap`) and the context of 32,768: 4,864")


def test_host_memory_that_is_just_enough(long_file: Path) -> None:
    args = ("-f", str(long_file), *POOLED, "-n", "8")
    free = summary(*args)
    held = free["stats"]["host_bytes"]
    bounded = summary(*args, "--kvflash-host", str(held))
    assert bounded["text"] == free["text"]
    assert bounded["stats"]["host_bytes"] == held
    res = invoke("run", *args, "--kvflash-host", str(held - 1))
    assert res.exit_code == 1
    assert "--kvflash-host" in res.stderr


@pytest.mark.sampled(CLI, ENGINE)
@pytest.mark.parametrize("args", [("-ts", "3,1"), ("-ts", "0,1"), ("-ngl", "0"), ("-ngl", "3")])
def test_shares_change_nothing_without_gpus(args: Sequence[str]) -> None:
    want = summary(*SHORT, "-n", "8")
    assert summary(*SHORT, "-n", "8", *args)["text"] == want["text"]


#
# the pool
#


def test_a_prompt_longer_than_the_pool(long_file: Path) -> None:
    found = summary("-f", str(long_file), *POOLED, "-n", "8")
    assert found["policy"] == "fresh"
    stats = found["stats"]
    assert stats["n_prompt"] > stats["n_pool"] == 768
    assert stats["kv_device_bytes"] == 768 * NEEDLE_TOKEN_BYTES
    assert stats["kv_full_bytes"] == 4096 * NEEDLE_TOKEN_BYTES
    assert stats["guests_fetched"] > 0
    assert stats["resident"] + stats["guest_blocks"] <= 12
    assert stats["stored"] == (stats["n_prompt"] + stats["n_generated"] - 1) // 64
    answer = (long_file.parent / "answer.txt").read_text()
    assert answer in found["text"]  # the last code is in the tail, which stays


def test_cache_types(long_file: Path) -> None:
    found = summary("-f", str(long_file), *POOLED, "-n", "1", "-ctk", "q8_0", "-ctv", "q8_0")
    size = json.loads(good("inspect", "--json").stdout)["token_bytes"]["q8_0"]
    assert found["stats"]["kv_device_bytes"] == 768 * size


#
# how a prompt is read
#

LAYER_BYTES = 4096 * NEEDLE_TOKEN_BYTES // 6  # of a context of 4K


@pytest.mark.sampled(CLI, ENGINE)
@pytest.mark.parametrize(
    ("args", "n_pane"),
    [
        ((), 2),
        # those of other numbers: test_sizing.py
        (("--kvflash-prefill", "exact", "--set", "panes=1"), 1),
        (("--kvflash-prefill", "auto", "--set", "panes=5"), 5),
        (("--set", "panes=100"), 6),  # as many as there are layers
        (("--kvflash-prefill", "pool", "--set", "panes=3"), 0),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_memory_to_read_a_prompt(long_file: Path, args: Sequence[str], n_pane: int) -> None:
    """Layers of the whole context, and buffers; said before the run, and the code is found either way."""
    found = summary("-f", str(long_file), *POOLED, "-n", "4", *args)
    stats = found["stats"]
    assert stats["pane_bytes"] == n_pane * LAYER_BYTES
    assert stats["kv_device_bytes"] == 768 * NEEDLE_TOKEN_BYTES
    assert stats["compute_bytes"] > 0
    assert (long_file.parent / "answer.txt").read_text().startswith(found["text"].strip())
    said = [note for note in found["notes"] if note.startswith("prompts are read exactly: ")]
    assert len(said) == (n_pane > 0)
    if n_pane:
        layers = "all layers" if n_pane == 6 else f"{n_pane} layers? at a time"
        assert re.search(rf": {2 * n_pane} MiB for KV of 4,096 tokens, {layers}, and \d+ MiB of buffers", said[0]), (
            said[0]
        )
    assert found["warnings"] == []


def test_buffers_of_an_exact_pass_count(long_file: Path) -> None:
    """Those of the pool, and as much as `inspect` says beside them."""
    args = ("-f", str(long_file), *POOLED, "-n", "1")
    exact, pool = (summary(*args, "--kvflash-prefill", how)["stats"]["compute_bytes"] for how in ("exact", "pool"))
    looked_at = json.loads(good("inspect", "-c", "4K", "--json").stdout)["exact_compute_bytes"]
    assert 0.9 * looked_at < exact - pool < 1.1 * looked_at, "flash attention and threads may differ"


def test_figures_and_banner_of_how_prompts_are_read(long_file: Path) -> None:
    args = ("run", "-f", str(long_file), *POOLED, "-n", "1", "--stats", "-v")
    res = good(*args)
    table = rows(res.stderr)
    assert table["exact pass"] == f"{2 * LAYER_BYTES:,} bytes (4.0 MiB) of KV"
    assert re.fullmatch(r"[\d,]+ bytes \([\d.]+ MiB\)", table["computation"])
    assert "kvflash: prompts are read exactly: 4 MiB for KV of 4,096 tokens, 2 layers at a time, and " in res.stderr
    assert "prompts are read" not in res.stdout
    res = good(*args, "--kvflash-prefill", "pool")
    assert rows(res.stderr)["exact pass"] == "none"
    assert "computation" in rows(res.stderr)
    assert "prompts are read" not in res.stderr
    assert "to read prompts" not in res.stderr
    res = good("run", *SHORT, "-n", "1", "--stats", "--kvflash-prefill", "exact")
    assert rows(res.stderr)["exact pass"] == "none", "the full cache is exact"


def test_devices_without_room_to_read_exactly(long_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the way out, which can be taken; `auto` takes it, and says so."""
    found = [replace(d, free=3 << 20) for d in devices()]
    monkeypatch.setattr(memory, "devices", lambda: found)
    args = ("run", "-f", str(long_file), *POOLED, "-n", "4", "--temp", "0")
    error = check_error(invoke(*args), 1, "an exact pass with 2 panes of 4,096 tokens takes")
    assert error.endswith(
        "use a smaller -c/--ctx-size, a smaller cache type (-ctk/--cache-type-k, -ctv/--cache-type-v), or --kvflash-prefill pool"
    )
    pool, auto, one = (
        good(*args, *more)
        for more in (("--kvflash-prefill", "pool"), ("--kvflash-prefill", "auto"), ("--set", "panes=1"))
    )
    assert auto.stdout == pool.stdout != ""
    assert "warning: prompts are read through the pool: an exact pass with 2 panes" in auto.stderr
    assert "warning" not in pool.stderr + one.stderr


#
# no terminal, no decoration
#


@pytest.mark.sampled(CLI, ENGINE)
@pytest.mark.parametrize("command", ["run", "inspect"])
def test_no_escape_codes_without_a_terminal(command: str) -> None:
    res = process(command, *(SHORT if command == "run" else ()))
    assert res.returncode == 0
    assert "\x1b" not in res.stdout + res.stderr
    assert "\r" not in res.stdout + res.stderr


COLOUR = re.compile(r"\x1b\[[\d;]*\b(3[0-8]|4[0-8]|9[0-7]|10[0-7])[\d;]*m")


def test_progress_on_a_terminal(long_file: Path) -> None:
    args = ("run", "-f", str(long_file), *POOLED, "-n", "2", "--temp", "0")
    out, err = on_a_terminal(*args)
    assert "tok/s" in err
    assert COLOUR.search(err)
    assert "\x1b" not in out
    plain, err = on_a_terminal(*args, env={"NO_COLOR": "1"})
    assert plain == out
    assert not COLOUR.search(err)


def test_an_answer_that_is_seen_nowhere_is_counted(long_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal beside the text, or in lines; with what the meter says."""
    args = (
        "run",
        "-f",
        str(long_file),
        *POOLED,
        "-n",
        "40",
        "--temp",
        "0",
        "--set",
        "opening=0",
        "--set",
        "meter=1",
    )
    out, err = on_a_terminal(*args, env={"NO_COLOR": "1"})
    assert re.search(r"answer .*40 tok +[\d.,]+ tok/s +[\d.]+ % of (16|32) as the full cache", err), err
    assert "tok/s" not in out
    monkeypatch.setattr(report, "_PLAIN_SECONDS", 0.0)
    lines = [line for line in good(*args).stderr.splitlines() if line.startswith("kvflash: answer ")]
    assert len(lines) == 40
    assert lines[0].startswith("kvflash: answer 1 tok  0.0 tok/s")
    assert "as the full cache" in lines[-1]
