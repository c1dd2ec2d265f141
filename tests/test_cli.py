"""The command line: what a person types, what comes out, and where."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import click
import gguf
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from pyllama_kvflash import __version__
from pyllama_kvflash.cli import main
from pyllama_kvflash.engine import loading
from pyllama_kvflash.native import Context, Device, Layer, Model
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt
from pyllama_kvflash.options import Options

pytestmark = pytest.mark.native

SCRIPT = Path(sys.executable).with_name("kvflash")
TIMEOUT = 60  # seconds; the slowest command here takes about ten
NEEDLE_TOKEN_BYTES = 6 * 2 * 128 * 2  # layers, K and V, elements of a row, bytes of an f16
COMMANDS = ("run", "chat", "serve", "demo", "inspect", "plot", "cache")

# A pool of 768 tokens is what batches of 64 need: the prompt of 1,500 tokens is twice as long.
SHORT = ("-p", "The secret code for the", "-c", "1K")
POOLED = ("-c", "4K", "-b", "64", "--kvflash", "768")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's settings, and one thread: two wait for each other when the machine is busy."""
    for name in list(os.environ):
        if name.startswith(("KVFLASH_", "LLAMA_ARG_")) or name in {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("LLAMA_ARG_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "100")


def invoke(*args: str, text: str | bytes | None = None) -> Result:
    """Run a command in this process. It ends as a process would: by an exit code, never by an exception."""
    res = CliRunner().invoke(main, args, input=text)
    assert res.exception is None or isinstance(res.exception, SystemExit), repr(res.exception)
    return res


def good(*args: str, text: str | bytes | None = None) -> Result:
    res = invoke(*args, text=text)
    assert res.exit_code == 0, res.output
    return res


def process(*args: str | Path, timeout: float = TIMEOUT, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    if "input" in kwargs:
        del options["stdin"]
    return subprocess.run([SCRIPT, *args], timeout=timeout, encoding="utf-8", check=False, **options)


def summary(*args: str, text: str | None = None) -> dict[str, Any]:
    res: dict[str, Any] = json.loads(good("run", "--temp", "0", "--json", *args, text=text).stdout)
    return res


def rows(text: str) -> dict[str, str]:
    """A table of two columns."""
    return {k: v.strip() for k, v in re.findall(r"^(\S[^\n]*?)  +(\S.*)$", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt of 1,500 tokens: prose, four codes, and a question about the last one."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        prompt = make_prompt(1450, lambda s: len(model.tokenize(s, add_special=False)), n_needles=4, seed=3)
    path = tmp_path_factory.mktemp("prompt") / "long.txt"
    path.write_text(prompt.text + prompt.needles[-1].question + "\n", encoding="utf-8")
    (path.parent / "answer.txt").write_text(prompt.needles[-1].answer)
    return path


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


@pytest.mark.parametrize("command", [(), *[(c,) for c in COMMANDS]])
def test_examples_in_help_are_valid(command: tuple[str, ...]) -> None:
    for name, *args in examples(good(*command, "--help").stdout):
        main.commands[name].make_context(name, args)  # parses, does not run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    params = [p for p in main.commands[name].params if isinstance(p, click.Option)]
    assert [p.name for p in params if not p.help] == []


def test_all_commands_are_known() -> None:
    assert set(main.commands) >= set(COMMANDS)
    text = good("--help").stdout
    assert all(re.search(rf"^  {name} +\S", text, re.MULTILINE) for name in COMMANDS)


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
    for word in ("needle-7m", "context 1,024", "prefill", "decode", "tok/s", "device KV", "length"):
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
    args = ("-f", str(long_file), *POOLED, "-n", "8")
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
    assert all(e["resident_bytes"] == 768 * NEEDLE_TOKEN_BYTES for e in prefill)

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


def test_closing_line_of_a_pool(long_file: Path) -> None:
    last = good("run", "-f", str(long_file), *POOLED, "-n", "4").stderr.splitlines()[-1]
    assert re.fullmatch(
        r"kvflash: \w+: prefill 1,\d+ tok at [\d,]+ tok/s · decode 4 tok at [\d.,]+ tok/s"
        r" · device KV 2\.2 MiB, full cache 12\.0 MiB \(18\.8 %\) · host [\d.]+ MiB · pages \d+ out, \d+ in",
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


@pytest.mark.parametrize("how", ["stdin", "stdin-named", "file", "long-option"])
def test_ways_to_give_a_prompt(how: str, tmp_path: Path) -> None:
    want = summary("-p", "The secret code for the red boat", "-c", "1K", "-n", "8")
    text = "The secret code for the red boat\n"  # the newline at the end is taken off
    path = tmp_path / "prompt.txt"
    path.write_text("\ufeff" + text, encoding="utf-8")
    args, stdin = {
        "stdin": ((), text),
        "stdin-named": (("-f", "-"), text),
        "file": (("-f", str(path)), None),
        "long-option": (("--prompt-file", str(path)), None),
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


def test_no_tokens() -> None:
    found = summary(*SHORT, "-n", "0")
    assert found["text"] == ""
    assert found["reason"] == "length"
    assert found["stats"]["n_generated"] == 0


def test_until_the_context_is_full() -> None:
    found = summary("-p", "The secret code for the", "-c", "256", "-n", "-1")
    assert found["reason"] in {"context", "eos"}
    if found["reason"] == "context":
        assert found["stats"]["n_prompt"] + found["stats"]["n_generated"] == 256 + 1  # the last one is not decoded


#
# what is generated
#


def test_greedy_is_deterministic() -> None:
    first, second = (summary(*SHORT, "-n", "16") for _ in range(2))
    assert first["text"] == second["text"] != ""
    assert summary(*SHORT, "-n", "16", "-s", "5")["text"] == first["text"]


def sampled(*args: str) -> dict[str, Any]:
    res: dict[str, Any] = json.loads(
        good("run", *SHORT, "-n", "32", "--temp", "1.5", "--top-k", "0", "--json", *args).stdout
    )
    return res


def test_a_seed_reproduces() -> None:
    seven = sampled("-s", "7")
    assert sampled("-s", "7")["text"] == seven["text"]
    assert sampled("-s", "8")["text"] != seven["text"]
    assert seven["stats"]["seed"] == 7


def test_a_random_seed_is_told_and_reproduces() -> None:
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


def test_held_back_text_is_shown_at_the_end() -> None:
    whole = summary(*SHORT, "-n", "8")["text"]
    assert summary(*SHORT, "-n", "8", "-r", whole[-2:] + "never comes")["text"] == whole


@pytest.mark.parametrize(
    ("args", "n_ctx", "n_pool"),
    [
        (("-c", "4096", "--kvflash", "1024"), 4096, 1024),
        (("-c", "4K", "--kvflash", "1K"), 4096, 1024),
        (("--ctx-size", "4k", "--kvflash", "1k"), 4096, 1024),
        (("-c", "1M", "--kvflash", "2K"), 1 << 20, 2048),
        (("-c", "4000", "--kvflash", "1030"), 4000, 1280),  # in steps of 256 cells, and said so
        (("-c", "4K", "--kvflash", "off"), 4096, None),
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
        assert any("1280" in note for note in found["notes"])


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def n_ctx(*args: str) -> int:
        return int(summary("-p", "Hello", "-n", "1", *args)["stats"]["n_ctx"])

    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1K")
    assert n_ctx() == 1024
    monkeypatch.setenv("KVFLASH_CTX_SIZE", "2K")
    assert n_ctx() == 2048  # ours wins
    assert n_ctx("-c", "3K") == 3072  # and an option over both
    monkeypatch.setenv("KVFLASH_POOL", "off")
    assert summary("-p", "Hello", "-n", "1", "-c", "32K")["stats"]["n_pool"] is None


def parsed(*args: str) -> dict[str, Any]:
    """What the options of a run mean, without a run."""
    return main.commands["run"].make_context("run", ["-p", "Hello", *args]).params


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ((), {"tensor_split": (), "rpc": (), "host_limit": None, "auto_cap": 16_384, "n_gpu_layers": -1}),
        (("-ts", "3,1"), {"tensor_split": (3.0, 1.0)}),
        (("--tensor-split", "0.5, 0,2"), {"tensor_split": (0.5, 0.0, 2.0)}),
        (("-ts", "3/1"), {"tensor_split": (3.0, 1.0)}),  # as llama.cpp takes it
        (("-ts", ""), {"tensor_split": ()}),
        (("--rpc", "localhost:50052"), {"rpc": ("localhost:50052",)}),
        (("--rpc", "10.0.0.1:50052, gpu-2:1"), {"rpc": ("10.0.0.1:50052", "gpu-2:1")}),
        (("--rpc", ""), {"rpc": ()}),
        (("--kvflash-host", "1000000"), {"host_limit": 1_000_000}),
        (("--kvflash-host", "64K"), {"host_limit": 64 << 10}),
        (("--kvflash-host", "512M"), {"host_limit": 512 << 20}),
        (("--kvflash-host", "512MiB"), {"host_limit": 512 << 20}),
        (("--kvflash-host", "64GiB"), {"host_limit": 64 << 30}),
        (("--kvflash-host", "64g"), {"host_limit": 64 << 30}),
        (("--kvflash-host", "2TiB"), {"host_limit": 2 << 40}),
        (("--kvflash-auto-cap", "8K"), {"auto_cap": 8192}),
        (("-ngl", "20"), {"n_gpu_layers": 20}),
        ((), {"n_cpu_moe": 0}),
        (("-ncmoe", "20"), {"n_cpu_moe": 20}),
        (("--n-cpu-moe", "auto"), {"n_cpu_moe": "auto"}),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_options_of_devices_and_memory(args: Sequence[str], want: dict[str, Any]) -> None:
    found = parsed(*args)
    assert {name: found[name] for name in want} == want


@pytest.mark.parametrize(
    ("variables", "option", "name", "low", "high", "typed"),
    [
        (("LLAMA_ARG_TENSOR_SPLIT", "KVFLASH_TENSOR_SPLIT"), "-ts", "tensor_split", "1", "2", "3"),
        (("LLAMA_ARG_N_CPU_MOE", "KVFLASH_N_CPU_MOE"), "-ncmoe", "n_cpu_moe", "1", "auto", "2"),
        (("LLAMA_ARG_RPC", "KVFLASH_RPC"), "--rpc", "rpc", "a:1", "b:2", "c:3"),
        (("", "KVFLASH_HOST"), "--kvflash-host", "host_limit", "", "2G", "3G"),
        (("", "KVFLASH_AUTO_CAP"), "--kvflash-auto-cap", "auto_cap", "", "2K", "3K"),
    ],
)
def test_environment_of_devices_and_memory(
    monkeypatch: pytest.MonkeyPatch,
    variables: tuple[str, str],
    option: str,
    name: str,
    low: str,
    high: str,
    typed: str,
) -> None:
    """llama.cpp's variable, where it has one; ours wins over it, and an option over both."""
    for variable, value in zip(variables, (low, high), strict=True):
        if variable:
            monkeypatch.setenv(variable, value)
            assert parsed()[name] == parsed(option, value)[name]
    assert parsed(option, typed)[name] != parsed()[name]


def test_cap_of_the_automatic_pool() -> None:
    for cap, n_pool in (("2K", 2048), ("5000", 4864)):
        found = summary("-p", "Hello", "-n", "1", "-c", "32K", "--kvflash-auto-cap", cap)
        assert found["stats"]["n_pool"] == n_pool
        assert found["notes"][0].endswith(f"(--kvflash-auto-cap) and the context of 32768: {n_pool}")
    found = summary("-p", "Hello", "-n", "1", "-c", "32K", "--kvflash-auto-cap", "2K", "--kvflash", "3K")
    assert found["stats"]["n_pool"] == 3072, "a number is taken as it is"


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


@pytest.mark.parametrize("args", [("-ts", "3,1"), ("-ts", "0,1"), ("-ngl", "0"), ("-ngl", "3")])
def test_shares_change_nothing_without_gpus(args: Sequence[str]) -> None:
    want = summary(*SHORT, "-n", "8")
    assert summary(*SHORT, "-n", "8", *args)["text"] == want["text"]


def test_an_argument_wins_over_a_model_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", "some-other-model.gguf")
    assert summary(str(BUNDLED_MODEL), *SHORT, "-n", "1")["model"] == str(BUNDLED_MODEL)
    assert summary("-m", str(BUNDLED_MODEL), *SHORT, "-n", "1")["model"] == str(BUNDLED_MODEL)


def test_bad_environment_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "plenty")
    res = invoke("run", "-p", "Hello")
    assert res.exit_code == 2
    assert "plenty" in res.stderr


#
# the pool
#


def test_a_prompt_longer_than_the_pool(long_file: Path) -> None:
    found = summary("-f", str(long_file), *POOLED, "-n", "8", "--kvflash-replay", "0")
    stats = found["stats"]
    assert stats["n_prompt"] > stats["n_pool"] == 768
    assert stats["kv_device_bytes"] == 768 * NEEDLE_TOKEN_BYTES
    assert stats["kv_full_bytes"] == 4096 * NEEDLE_TOKEN_BYTES
    assert stats["pages_out"] > 0
    assert stats["resident"] <= 12
    assert stats["stored"] == (stats["n_prompt"] + stats["n_generated"] - 1) // 64
    answer = (long_file.parent / "answer.txt").read_text()
    assert answer in found["text"]  # the last code is in the tail, which stays


def test_off_equals_a_pool_that_holds_everything(long_file: Path) -> None:
    args = ("-f", str(long_file), "-c", "4K", "-b", "256", "-n", "24")
    pool = summary(*args, "--kvflash", "2K")
    off = summary(*args, "--kvflash", "off")
    assert pool["stats"]["n_pool"] == 2048
    assert pool["stats"]["pages_out"] == 0
    assert off["stats"]["n_pool"] is None
    assert off["stats"]["host_bytes"] == 0
    assert pool["text"] == off["text"]


@pytest.mark.parametrize("chunk", ["16", "32", "64"])
def test_chunk_sizes(long_file: Path, chunk: str) -> None:
    found = summary("-f", str(long_file), *POOLED, "-n", "1", "--kvflash-chunk", chunk, "--kvflash-replay", "0")
    assert found["stats"]["stored"] == found["stats"]["n_prompt"] // int(chunk)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0", "bf16"])
def test_cache_types(long_file: Path, kv_type: str) -> None:
    found = summary("-f", str(long_file), *POOLED, "-n", "1", "-ctk", kv_type, "-ctv", kv_type)
    size = json.loads(good("inspect", "--json").stdout)["token_bytes"][kv_type]
    assert found["stats"]["kv_device_bytes"] == 768 * size


#
# no terminal, no decoration
#


@pytest.mark.parametrize("command", ["run", "inspect"])
def test_no_escape_codes_without_a_terminal(command: str) -> None:
    res = process(command, *(SHORT if command == "run" else ()))
    assert res.returncode == 0
    assert "\x1b" not in res.stdout + res.stderr
    assert "\r" not in res.stdout + res.stderr


def on_a_terminal(*args: str, env: dict[str, str] | None = None) -> tuple[str, str]:
    """Stdout, a pipe, and stderr, a terminal."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def drain() -> None:
        try:
            while data := os.read(ours, 4096):
                shown.extend(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        res = process(*args, stderr=theirs, env={**os.environ, "TERM": "xterm-256color", **(env or {})})
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    assert res.returncode == 0, shown.decode()
    return res.stdout, shown.decode()


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


#
# inspect
#

MEMORY = {
    "needle": "llama_kv_cache",
    "qwen3": "llama_kv_cache",
    "qwen35": "llama_memory_hybrid",
    "gemma4": "llama_kv_cache_iswa",
}


class Geometry(NamedTuple):
    """What the metadata of a model says about its cache."""

    n_layer: int
    layers: list[int]  # with full attention and KV of their own
    n_swa: int
    n_row: int  # elements of a K row, and of a V row

    @classmethod
    def read(cls, path: Path) -> Self:
        """Of a needle, qwen3, qwen35 or gemma4 model."""
        fields = gguf.GGUFReader(path).fields
        arch = fields["general.architecture"].contents()

        def get(key: str, default: Any = None) -> Any:
            field = fields.get(f"{arch}.{key}")
            return default if field is None else field.contents()

        n_layer = get("block_count")
        interval = get("full_attention_interval", 1)
        sliding = get("attention.sliding_window_pattern", [False] * n_layer)
        own = n_layer - get("attention.shared_kv_layers", 0)
        layers = [i for i in range(own) if i % interval == interval - 1 and not sliding[i]]
        n_row = get("attention.head_count_kv") * get("attention.key_length")
        return cls(n_layer, layers, get("attention.sliding_window", 0), n_row)

    def token_bytes(self, block_bytes: int) -> int:
        """Bytes of a token; block_bytes: of 32 elements."""
        return len(self.layers) * 2 * self.n_row // 32 * block_bytes


def model_file(name: str, tiny_path: Callable[[str], Path]) -> Path:
    return BUNDLED_MODEL if name == "needle" else tiny_path(name)


@pytest.mark.parametrize("name", MEMORY)
def test_inspect_json(name: str, tiny_path: Callable[[str], Path]) -> None:
    path = model_file(name, tiny_path)
    found = json.loads(good("inspect", str(path), "--json", "-c", "8K").stdout)
    want = Geometry.read(path)
    assert found["model"] == str(path)
    assert found["architecture"] == name.replace("needle", "qwen3")
    assert found["memory_class"] == MEMORY[name]
    assert (found["poolable"], found["refusal"]) == (True, None)
    assert (found["n_layer"], found["pooled_layers"]) == (want.n_layer, want.layers)
    assert found["n_swa"] == want.n_swa
    assert found["n_ctx"] == 8192
    sizes = found["token_bytes"]
    assert sizes["f16"] == sizes["bf16"] == sizes["f32"] // 2 == want.token_bytes(64)
    assert sizes["q8_0"] == want.token_bytes(34)
    assert sizes["q4_0"] == want.token_bytes(18)
    assert found["auto_pool"] == 8192  # no more than the context
    assert "MiB free" in found["auto_note"]


@pytest.mark.parametrize("name", MEMORY)
def test_inspect_text(name: str, tiny_path: Callable[[str], Path]) -> None:
    path = model_file(name, tiny_path)
    table = rows(good("inspect", str(path), "-c", "8K").stdout)
    want = Geometry.read(path)
    assert table["memory"] == MEMORY[name]
    assert table["pool"] == "yes"
    assert table["pooled layers"].startswith(f"{len(want.layers)} of {want.n_layer}: ")
    assert table["sliding window"].startswith(f"{want.n_swa} tokens" if want.n_swa else "none")
    assert table["f16 cache"].startswith(f"{want.token_bytes(64):,} bytes a token")
    assert table["context"].startswith("8,192")
    assert table["auto pool"].startswith("auto: half of (")


@pytest.mark.parametrize("name", ["mamba", "deepseek32"])
def test_inspect_a_model_that_cannot_be_pooled(name: str, tiny_path: Callable[[str], Path]) -> None:
    found = json.loads(good("inspect", str(tiny_path(name)), "--json").stdout)
    assert found["poolable"] is False
    assert "cannot be pooled" in found["refusal"]
    assert found["auto_pool"] is None
    res = good("inspect", str(tiny_path(name)))
    assert re.search(r"^pool +no: ", res.stdout, re.MULTILINE)
    assert "auto pool" not in res.stdout


GIB = 1 << 30


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a model are on the first and the third by turns; the second is full, and has none."""
    frees = {"CUDA0": 24 * GIB, "CUDA1": 0, "CUDA2": GIB, "CPU": 64 * GIB}
    found = [Device(name, "a device", name != "CPU", free, free) for name, free in frees.items()]
    layers = Context.layers

    def spread(self: Context) -> list[Layer]:
        return [replace(layer, device=i % 2 * 2) for i, layer in enumerate(layers(self))]

    monkeypatch.setattr(loading, "devices", lambda: found)
    monkeypatch.setattr(Context, "layers", spread)


@pytest.mark.usefixtures("three_gpus")
def test_inspect_several_devices() -> None:
    table = rows(good("inspect", "-c", "32K").stdout)
    half = NEEDLE_TOKEN_BYTES // 2
    assert table["KV on CUDA0"] == f"{half:,} of the f16 cache's bytes a token, 24.00 GiB free"
    assert table["KV on CUDA2"] == f"{half:,} of the f16 cache's bytes a token, 1024.0 MiB free"
    assert "KV on CUDA1" not in table
    assert "KV on CPU" not in table
    assert table["auto pool"].startswith("auto: half of (1024 MiB free on CUDA2, the tightest of 2 devices - 512 MiB")

    found = json.loads(good("inspect", "-c", "32K", "--json").stdout)
    assert found["devices"] == [
        {"name": "CUDA0", "free": 24 * GIB, "token_bytes": half},
        {"name": "CUDA2", "free": GIB, "token_bytes": half},
    ]
    assert found["token_bytes"]["f16"] == NEEDLE_TOKEN_BYTES
    assert found["auto_pool"] == 16_384


def test_inspect_one_device() -> None:
    assert "KV on" not in good("inspect").stdout
    (device,) = json.loads(good("inspect", "--json").stdout)["devices"]
    assert device["token_bytes"] == NEEDLE_TOKEN_BYTES
    assert device["free"] > 0


@pytest.mark.usefixtures("three_gpus")
def test_run_on_several_devices_says_which_is_the_tightest() -> None:
    found = summary("-p", "Hello", "-n", "1", "-c", "32K", "-ctk", "q8_0")
    assert "free on CUDA2, the tightest of 2 devices" in found["notes"][0]
    assert f"/ {(128 * 2 + 128 // 32 * 34) * 3 / 1024:.2f} KiB a token" in found["notes"][0]
    res = invoke("run", "-p", "Hello", "-n", "1", "-c", "1M", "--kvflash", "off")
    assert res.exit_code == 1
    assert "takes 1.5 GiB on CUDA2, and 1.0 GiB are free" in res.stderr


def test_inspect_says_what_it_looks_at() -> None:
    res = good("inspect")
    assert "using the bundled" in res.stderr
    assert str(BUNDLED_MODEL) in res.stdout.replace("\n", "")


def test_inspect_json_is_one_line() -> None:
    assert good("inspect", "--json").stdout.count("\n") == 1


#
# relevance
#


def test_trace_and_plot(long_file: Path, tmp_path: Path) -> None:
    """What a run writes is what it did, and can be drawn."""
    pytest.importorskip("matplotlib")
    trace = tmp_path / "run.jsonl"
    args = ("-f", str(long_file), *POOLED, "-n", "40", "--kvflash-tau", "16", "--kvflash-share", "0", "--temp", "0")
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
    assert {line["reason"] for line in chosen} == {"prefill", "question", "decode"}
    assert all(line["scores"][0] is None for line in chosen)  # the sink
    assert all(isinstance(line["scores"][3], float) for line in chosen)

    picture = tmp_path / "run.png"
    assert f"wrote {picture}" in good("plot", str(trace)).stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert good("plot", str(trace), "-o", str(tmp_path / "x.svg")).exit_code == 0


def test_trace_of_a_full_cache(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "run.jsonl"
    good("run", *SHORT, "-n", "4", "--trace", str(trace))
    assert json.loads(trace.read_text().splitlines()[0])["n_pool"] is None
    good("plot", str(trace))


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


@pytest.mark.parametrize("name", ["no/such/run.jsonl", "."])
def test_trace_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    res = invoke("run", *SHORT, "-n", "2", "--trace", str(tmp_path / name))
    assert res.exit_code == 1
    assert "cannot be written" in res.stderr


def test_policies(long_file: Path) -> None:
    """Each by its name; the last code is in the tail, whatever chooses."""
    answer = (long_file.parent / "answer.txt").read_text()
    moved = {}
    for policy in ("qk", "qk-zmax", "qk-cos", "lru"):
        found = summary("-f", str(long_file), *POOLED, "-n", "8", "--kvflash-policy", policy)
        assert found["policy"] == policy
        assert answer in found["text"]
        moved[policy] = found["stats"]["pages_in"]
        assert (found["stats"]["reselects"] > 0) == (policy != "lru")
        assert (found["stats"]["summary_bytes"] > 0) == (policy != "lru")
    assert moved["lru"] == 0 < moved["qk"]


def test_relevance_options_by_environment(long_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_POLICY", "lru")
    assert summary("-f", str(long_file), *POOLED, "-n", "1")["policy"] == "lru"
    assert summary("-f", str(long_file), *POOLED, "-n", "1", "--kvflash-policy", "qk")["policy"] == "qk"
    monkeypatch.delenv("KVFLASH_POLICY")
    few = summary("-f", str(long_file), *POOLED, "-n", "100", "-r", "never")["stats"]["reselects"]
    monkeypatch.setenv("KVFLASH_TAU", "2")
    monkeypatch.setenv("KVFLASH_SHARE", "0")
    assert summary("-f", str(long_file), *POOLED, "-n", "100", "-r", "never")["stats"]["reselects"] >= few + 2


@pytest.mark.parametrize("by", ["option", "environment"])
def test_few_chunks_come_back_at_once(
    long_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """--kvflash-swaps bounds what a scoring moves while decoding, and nothing else."""
    trace = tmp_path / "run.jsonl"
    more = ("--kvflash-swaps", "1") if by == "option" else ()
    if by == "environment":
        monkeypatch.setenv("KVFLASH_SWAPS", "1")
    args = ("-f", str(long_file), *POOLED, "-n", "60", "--kvflash-share", "0", "--temp", "0")
    good("run", *args, *more, "--trace", str(trace))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    n = {why: [len(x["page_ins"]) for x in lines if x.get("reason") == why] for why in ("question", "decode")}
    assert max(n["question"]) > 1
    assert max(n["decode"]) == 1


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_defaults_are_those_of_the_library(command: str) -> None:
    """Of every option that has one, but how many sequences there are."""
    own, differ = Options(), {}
    with click.Context(main.commands[command]) as ctx:  # type: ignore[attr-defined]
        for param in ctx.command.params:
            if param.name in Options.__dataclass_fields__ and param.name != "n_parallel":
                found = param.type_cast_value(ctx, param.get_default(ctx))
                if str(found) != str(getattr(own, param.name)):
                    differ[param.name] = found, getattr(own, param.name)
    assert differ == {}


@pytest.mark.parametrize("by", ["option", "environment"])
def test_tokens_are_decoded_again(long_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """--kvflash-again says from which share on; 0: never. A trace tells what was missed, and each scoring after it."""
    trace = tmp_path / "run.jsonl"
    args = ("-f", str(long_file), *POOLED, "-n", "60", "--kvflash-share", "0", "--kvflash-tau", "4", "--temp", "0")

    def scored(again: str) -> dict[int, list[float]]:
        if by == "environment":
            monkeypatch.setenv("KVFLASH_AGAIN", again)
        good("run", *args, "--trace", str(trace), *(("--kvflash-again", again) if by == "option" else ()))
        res: dict[int, list[float]] = {}
        for line in map(json.loads, trace.read_text().splitlines()):
            if line.get("reason") == "decode":
                res.setdefault(line["pos"], []).append(line["missed"])
        return res

    never, seldom, often = scored("0"), scored("0.9"), scored("1e-9")
    assert {len(missed) for missed in never.values()} == {len(missed) for missed in seldom.values()} == {1}
    assert len(never) >= 10
    assert never.keys() < often.keys()  # and once at the end of the prompt
    assert max(map(len, often.values())) > 1
    for missed in often.values():
        assert len(missed) <= 4
        assert all(share > 1e-9 for share in missed[:-1]), "decoded again for nothing"
        assert len(missed) == 4 or missed[-1] <= 1e-9, "not decoded again"


def test_a_drafter_is_taken_at_its_word(long_file: Path, tmp_path: Path) -> None:
    """--draft-scorer means policy drafter, unless another one is typed; a bad one is a warning."""
    args = ("-f", str(long_file), *POOLED, "-n", "8")
    found = summary(*args, "--draft-scorer", str(BUNDLED_MODEL))
    assert (found["policy"], found["warnings"]) == ("drafter", [])
    assert summary(*args, "--draft-scorer", str(BUNDLED_MODEL), "--kvflash-policy", "qk")["policy"] == "qk"
    bad = tmp_path / "draft.gguf"
    bad.write_bytes(b"no model")
    res = good("run", *args, "--draft-scorer", str(bad), "--temp", "0", "-q")
    assert res.stderr.count("\n") == 1
    assert res.stderr.startswith(f"kvflash: warning: drafter cannot score: {bad} is no GGUF model")
    assert (long_file.parent / "answer.txt").read_text() in res.stdout


def test_pins_by_option(long_file: Path, tmp_path: Path) -> None:
    """The chunks of --pin-prefix and --pin-spans are never dropped; without them they are."""
    trace = tmp_path / "run.jsonl"
    args = ("-f", str(long_file), "-c", "4K", "-b", "64", "--kvflash", "1K", "--kvflash-policy", "lru", "-n", "1")

    def gone(*more: str) -> set[int]:
        good("run", *args, "--trace", str(trace), *more)
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        return {c for line in lines for c in line.get("drops", ())}

    assert {1, 2, 5, 6, 7} <= gone()
    left = gone("--pin-prefix", "100", "--pin-spans", "300:350,7:8,448:449")
    assert not {0, 1, 4, 5, 7} & left
    assert {2, 3, 6, 8} <= left


#
# demo
#


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    path = tmp_path_factory.mktemp("demo") / "prompt.txt"
    args = ("--tokens", "2K", "--kvflash", "1K", "--needles", "4", "-t", "1")
    return process("demo", *args, "-o", path, env={**os.environ, "COLUMNS": "100"}), path


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
    assert re.search(r"device KV[│ ]+6\.8 MiB[│ ]+3\.0 MiB[│ ]+3\.0 MiB", res.stdout), res.stdout
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
