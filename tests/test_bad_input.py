"""What is wrong is said in one sentence, with an exit code: no traceback, no signal, nothing that hangs or is lost."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
from click.testing import CliRunner

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from pyllama_kvflash.cli import main
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /dev")]

SCRIPT = str(Path(sys.executable).with_name("kvflash"))
TIMEOUT = 60  # seconds: what takes longer hangs
RUNTIME, USAGE, INTERRUPTED = 1, 2, 130

# -p Hello with a small context: what is asked for where only the rest is wrong
HELLO = ("-p", "Hello", "-c", "1K", "-n", "4", "--temp", "0")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's settings, and one thread: two wait for each other when the machine is busy."""
    for name in list(os.environ):
        if name.startswith(("KVFLASH_", "LLAMA_ARG_")) or name in {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("LLAMA_ARG_THREADS", "1")


class Ended(NamedTuple):
    """A process that is over."""

    code: int
    out: str
    err: str


def kvflash(*args: str | Path | bytes, stdin: bytes = b"", command: tuple[str, ...] = (SCRIPT,)) -> Ended:
    res = subprocess.run([*command, *args], input=stdin, capture_output=True, timeout=TIMEOUT, check=False)
    return Ended(res.returncode, res.stdout.decode("utf-8", "replace"), res.stderr.decode("utf-8", "replace"))


def in_process(*args: str | Path, stdin: bytes = b"") -> Ended:
    """The same without a process, for what is wrong before anything is loaded."""
    res = CliRunner().invoke(main, [str(a) for a in args], input=stdin)
    raised = "" if isinstance(res.exception, SystemExit | None) else f"Traceback: {res.exception!r}"
    return Ended(res.exit_code, res.stdout, res.stderr + raised)


def shell(command: str, *args: str | Path) -> Ended:
    """A shell command line in which $K is kvflash and "$@" the arguments."""
    return kvflash(*args, command=("sh", "-c", f"K={SCRIPT}; {command}", "sh"))


def check_plain(res: Ended) -> None:
    assert "Traceback" not in res.err, res.err
    assert "Exception ignored" not in res.err, res.err
    assert res.code >= 0, f"ended by {signal.Signals(-res.code).name}: {res.err}"
    assert res.code not in {134, 136, 139}, f"the shell saw a signal: {res.err}"


def check_error(res: Ended, code: int, *words: str) -> str:
    """One sentence, with these words in it, and nothing on stdout. The sentence."""
    check_plain(res)
    assert res.code == code, res.err
    errors = [line for line in res.err.splitlines() if re.match(r"(kvflash: e|E)rror: ", line)]
    assert len(errors) == 1, res.err
    assert errors[0] == res.err.splitlines()[-1], "the error comes last"
    assert res.out == ""
    for word in words:
        assert word in errors[0]
    return errors[0]


def check_good(res: Ended) -> None:
    check_plain(res)
    assert res.code == 0, res.err
    assert "error" not in res.err


#
# models
#


def test_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "no-such.gguf"
    for command in (("run", *HELLO), ("inspect",)):
        check_error(kvflash(*command, path), USAGE, str(path), "does not exist", "give the path")


def test_directory_as_a_model(tmp_path: Path) -> None:
    for command in (("run", *HELLO), ("inspect",)):
        check_error(kvflash(*command, tmp_path), USAGE, str(tmp_path), "is a directory", "give the .gguf file")


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"Once upon a time\n", b"\0" * 4096, b"\x89PNG\r\n\x1a\n", b"ggjt\3\0\0\0"]
)
def test_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    for command in (("run", *HELLO), ("inspect",)):
        check_error(kvflash(*command, path), RUNTIME, str(path), "is no GGUF model")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    check_error(kvflash("inspect", path), USAGE, str(path), "cannot be read")


# in the magic, the version, the counts, the metadata, the tokens, the tensor table, the first tensor, the last one
CUTS = ["4", "6", "12", "20", "24", "100", "5000", "table", "data", "data+1", "half", "end-1"]


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_model(tmp_path: Path, cut: str) -> None:
    data = BUNDLED_MODEL.read_bytes()
    reader = gguf.GGUFReader(BUNDLED_MODEL)
    places = {
        "table": reader.tensors[0].field.offset + 10,
        "data": reader.data_offset,
        "data+1": reader.data_offset + 1,
        "half": len(data) // 2,
        "end-1": len(data) - 1,
    }
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: places.get(cut) or int(cut)])
    for command in (("run", *HELLO), ("inspect",)):
        check_error(kvflash(*command, path), RUNTIME, str(path), "cannot be loaded")


def test_unknown_architecture(tiny_path: Callable[[str], Path]) -> None:
    for command in (("run", *HELLO), ("inspect",)):
        check_error(kvflash(*command, tiny_path("unheard-of")), RUNTIME, "unknown model architecture", "unheard-of")


@pytest.mark.parametrize("name", ["mamba", "deepseek32"])
def test_memory_that_cannot_be_pooled(tiny_path: Callable[[str], Path], name: str) -> None:
    path = tiny_path(name)
    check_error(
        kvflash("run", path, "-p", "Hello", "-c", "8K", "--kvflash", "1K"),
        RUNTIME,
        str(path),
        "cannot be pooled",
        "--kvflash off",
    )


@pytest.mark.parametrize("name", ["qwen3", "mamba"])
def test_model_without_a_tokenizer(tiny_path: Callable[[str], Path], name: str) -> None:
    path = tiny_path(name)
    check_error(kvflash("run", path, *HELLO, "--kvflash", "off"), RUNTIME, "token")


def test_model_path_of_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xf6del.gguf")
    check_error(kvflash("inspect", path), USAGE, "does not exist")
    path.symlink_to(BUNDLED_MODEL)
    check_good(kvflash("inspect", path))
    check_good(kvflash("inspect", "--json", path))
    check_good(kvflash("run", path, *HELLO, "--json"))


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    check_error(kvflash("inspect", path, command=("timeout", "5", SCRIPT)), USAGE, str(path))


FUZZ = r"""
import os, random, resource, signal, sys
from pathlib import Path

import pyllama_kvflash.engine.engine
from pyllama_kvflash.cli import main

model, copy, log, args, n, seed = sys.argv[1], *map(Path, sys.argv[2:4]), sys.argv[4].split(), *map(int, sys.argv[5:])
data = Path(model).read_bytes()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

for i in range(n):
    rng = random.Random(seed + i)
    bad = bytearray(data)
    at = rng.randrange(4, min(len(data), 64 << 10))
    for j in range(at, min(at + rng.choice([1, 1, 1, 2, 4, 8]), len(data))):
        bad[j] = rng.choice([0, 255, rng.randrange(256), bad[j] ^ 1 << rng.randrange(8)])
    copy.write_bytes(bad)
    pid = os.fork()  # not a fresh process: starting Python takes longer than the run
    if pid == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        signal.alarm(20)
        main([str(copy) if a == "MODEL" else a for a in args])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = log.read_text(errors="replace")
    if code not in (0, 1, 2) or "Traceback" in text or (code and "error: " not in text):
        print(f"seed {seed + i}, at byte {at}: code {code}: {text[-500:]}")
"""
RUN_IT = "run MODEL -p The -n 2 -c 2K -b 64 --kvflash 768 --temp 0"


@pytest.mark.parametrize(
    ("name", "args", "n", "seed"),
    [
        ("needle", RUN_IT, 60, 0),
        ("needle", RUN_IT, 40, 1000),
        ("qwen3", "inspect MODEL", 60, 0),
        ("qwen35", "inspect MODEL", 40, 0),
        ("gemma4", "inspect MODEL", 40, 0),
    ],
)
def test_damaged_model(
    tmp_path: Path, tiny_path: Callable[[str], Path], name: str, args: str, n: int, seed: int
) -> None:
    model = BUNDLED_MODEL if name == "needle" else tiny_path(name)
    res = subprocess.run(
        [sys.executable, "-c", FUZZ, model, tmp_path / "damaged.gguf", tmp_path / "log", args, str(n), str(seed)],
        capture_output=True,
        timeout=2 * TIMEOUT,
        text=True,
        check=False,
    )
    assert (res.returncode, res.stdout) == (0, ""), res.stdout + res.stderr


# single metadata values that upstream divides by, loops over or allocates by
VALUES = [
    ("qwen35", "qwen35.full_attention_interval", 0),
    ("qwen35", "qwen35.ssm.inner_size", 1 << 31),
    ("qwen35", "qwen35.attention.head_count_kv", 0),
    ("qwen3", "qwen3.embedding_length", 0),
    ("qwen3", "qwen3.block_count", 0xFFFFFFFF),
    ("gemma4", "gemma4.attention.sliding_window", 0),
]

DECODE = """
import sys
from pyllama_kvflash import KVFlash, KVFlashError
try:
    with KVFlash.from_file(sys.argv[1], n_ctx=2048, n_batch=64, pool=768, n_threads=1) as kv:
        kv.decode(list(range(64)))
except KVFlashError as err:
    sys.exit(f"kvflash: error: {err}")
"""


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *VALUES,
        ("qwen35", "qwen35.rope.dimension_count", 0),
        ("gemma4", "gemma4.rope.dimension_count", 0),
        ("qwen3", "qwen3.rope.freq_base", 0),
    ],
)
def test_metadata_that_makes_no_sense(
    tmp_path: Path, tiny_path: Callable[[str], Path], name: str, key: str, value: int
) -> None:
    source = tiny_path(name)
    field = gguf.GGUFReader(source).fields[key]
    at = field.offset + sum(part.nbytes for part in field.parts[:-1])
    data = bytearray(source.read_bytes())
    data[at : at + 4] = value.to_bytes(4, "little")
    path = tmp_path / "odd.gguf"
    path.write_bytes(data)
    short = ("timeout", "5")  # it takes milliseconds, or for ever
    for res in (
        kvflash("inspect", path, command=(*short, SCRIPT)),
        kvflash(path, command=(*short, sys.executable, "-c", DECODE)),
    ):
        check_plain(res)
        assert res.code in {0, 1}, res.err  # 124: it took too long


#
# numbers
#


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--kvflash", "0"), ("pool (--kvflash) is 0",)),
        (("--kvflash", "-5"), ("pool (--kvflash) is -5",)),
        (("--kvflash", "many"), ("--kvflash", "'many'", "auto", "off")),
        (("--kvflash", ""), ("--kvflash", "''")),
        (("--kvflash", "1.5K"), ("--kvflash", "'1.5K'")),
        (("--kvflash", "4G"), ("--kvflash", "'4G'")),
        (("--kvflash", "99999999999999999999"), ("--kvflash",)),
        (("-c", "-1"), ("-c/--ctx-size", "-1")),
        (("-c", "99999999999999999999"), ("-c/--ctx-size", "99999999999999999999")),
        (("-c", "5000000000"), ("-c/--ctx-size", "5000000000")),
        (("-c", "big"), ("--ctx-size", "'big'")),
        (("-b", "-1"), ("-b/--batch-size", "-1")),
        (("-b", "99999999999"), ("-b/--batch-size", "99999999999")),
        (("-ub", "0"), ("-ub/--ubatch-size", "0")),
        (("-t", "0"), ("-t/--threads", "0")),
        (("-t", "-3"), ("-t/--threads", "-3")),
        (("-t", "1000000"), ("-t/--threads", "1000000")),
        (("-t", "two"), ("--threads", "'two'")),
        (("-n", "-5"), ("-n/--predict", "-5")),
        (("-n", "x"), ("--predict", "'x'")),
        (("-ctk", "q9_9"), ("--cache-type-k", "'q9_9'", "q8_0")),
        (("-ctv", "f8"), ("--cache-type-v", "'f8'", "q8_0")),
        (("-fa", "maybe"), ("--flash-attn", "'maybe'")),
        (("-ngl", "some"), ("--n-gpu-layers", "'some'")),
        (("-ncmoe", "-1"), ("-ncmoe/--n-cpu-moe", "is -1", '"auto"')),
        (("--n-cpu-moe", "lots"), ("--n-cpu-moe", "'lots'", '"auto"')),
        (("-ncmoe", "1.5"), ("--n-cpu-moe", "'1.5'")),
        (("-ncmoe", "all"), ("--n-cpu-moe", "'all'")),
        (("-ts", "3,x"), ("--tensor-split", "'3,x'", "3,1")),
        (("-ts", "3,,1"), ("--tensor-split", "'3,,1'")),
        (("-ts", "nan"), ("--tensor-split", "'nan'")),
        (("-ts", "1,inf"), ("--tensor-split", "'1,inf'")),
        (("-ts", "0,0"), ("-ts/--tensor-split", "(0.0, 0.0)", "3,1")),
        (("-ts", "-1,2"), ("-ts/--tensor-split", "(-1.0, 2.0)", "3,1")),
        (("-ts", "1" + ",1" * 99), ("-ts/--tensor-split", "100 shares", "at most")),
        (("--rpc", "somewhere"), ("--rpc", "'somewhere'", "host:port")),
        (("--rpc", "a:1,,b:2"), ("--rpc", "''", "host:port")),
        (("--rpc", "a:1;b:2"), ("--rpc", "'a:1;b:2'", "host:port")),
        (("--rpc", "a:port"), ("--rpc", "'a:port'", "host:port")),
        (("--kvflash-host", "0"), ("--kvflash-host", "is 0")),
        (("--kvflash-host", "-4G"), ("--kvflash-host", "-4294967296")),
        (("--kvflash-host", "99999999T"), ("--kvflash-host", "109951161678088372224")),
        (("--kvflash-host", "some"), ("--kvflash-host", "'some'", "64GiB", "512M")),
        (("--kvflash-host", ""), ("--kvflash-host", "''", "64GiB")),
        (("--kvflash-host", "64GB"), ("--kvflash-host", "'64GB'", "1,024")),
        (("--kvflash-host", "1.5G"), ("--kvflash-host", "'1.5G'")),
        (("--kvflash-host", "64 Gi"), ("--kvflash-host", "'64 Gi'")),
        (("--kvflash-auto-cap", "0"), ("--kvflash-auto-cap", "is 0")),
        (("--kvflash-auto-cap", "-1"), ("--kvflash-auto-cap", "-1")),
        (("--kvflash-auto-cap", "auto"), ("--kvflash-auto-cap", "'auto'")),
        (("--kvflash-auto-cap", "2048M"), ("--kvflash-auto-cap", "2147483648")),
        (("--kvflash-chunk", "48"), ("--kvflash-chunk", "'48'", "64")),
        (("--kvflash-policy", "best"), ("--kvflash-policy", "'best'", "qk, qk-zmax, qk-cos, lru, drafter, crosstok")),
        (("--kvflash-swaps", "0"), ("--kvflash-swaps", "is 0")),
        (("--kvflash-tau", "-64"), ("--kvflash-tau", "-64")),
        (("--kvflash-tau", "often"), ("--kvflash-tau", "'often'")),
        (("--kvflash-tau", "99999999999"), ("--kvflash-tau", "99999999999")),
        (("--kvflash-share", "-0.1"), ("--kvflash-share", "-0.1")),
        (("--kvflash-share", "5"), ("--kvflash-share", "is 5.0")),
        (("--kvflash-share", "nan"), ("--kvflash-share", "nan")),
        (("--kvflash-share", "half"), ("--kvflash-share", "'half'")),
        (("--kvflash-again", "-0.1"), ("--kvflash-again", "-0.1")),
        (("--kvflash-again", "5"), ("--kvflash-again", "is 5.0")),
        (("--kvflash-again", "nan"), ("--kvflash-again", "nan")),
        (("--kvflash-again", "once"), ("--kvflash-again", "'once'")),
        (("--kvflash-replay", "-1"), ("--kvflash-replay", "-1")),
        (("--kvflash-replay", "all"), ("--kvflash-replay", "'all'")),
        (("--qk-summary", "centroid:3"), ("--qk-summary", "'centroid:3'", "minmax")),
        (("--qk-summary", ""), ("--qk-summary", "''")),
        (("--qk-aggregate", "sum"), ("--qk-aggregate", "'sum'", "zmax")),
        (("--qk-query", "last:0"), ("--qk-query", "'last:0'", "question")),
        (("--qk-query", "none"), ("--qk-query", "'none'", "question")),
        (("--scorer-pool", "0"), ("--scorer-pool", "is 0")),
        (("--pin-prefix", "-1"), ("pin 0:-1", "give")),
        (("--pin-prefix", "some"), ("--pin-prefix", "'some'")),
        (("--pin-prefix", "1M"), ("0:1048576", "67584")),
        (("--pin-spans", "5"), ("--pin-spans", "'5'", "0:512")),
        (("--pin-spans", "5:"), ("--pin-spans", "''")),
        (("--pin-spans", "0:64,a:b"), ("--pin-spans", "'a'")),
        (("--pin-spans", "64:64"), ("64:64",)),
        (("--pin-spans", "0:64,128:64"), ("128:64",)),
        (("--pin-spans", "-1:64"), ("-1:64",)),
        (("--pin-spans", "0:1M"), ("0:1048576", "67584")),
        (("--temp", "nan"), ("--temp", "nan")),
        (("--temp", "inf"), ("--temp", "inf")),
        (("--temp", "hot"), ("--temp", "'hot'")),
        (("--top-p", "nan"), ("--top-p", "nan")),
        (("--top-p", "2"), ("--top-p", "2")),
        (("--min-p", "-1"), ("--min-p", "-1")),
        (("--top-k", "99999999999"), ("--top-k", "99999999999")),
        (("--repeat-penalty", "0"), ("--repeat-penalty", "0")),
        (("--repeat-last-n", "99999999999"), ("--repeat-last-n", "99999999999")),
        (("-s", "99999999999"), ("--seed", "99999999999")),
        (("--json", "--jsonl"), ("--json", "--jsonl")),
        (("--frobnicate",), ("--frobnicate",)),
        (("-m", "another.gguf", "one.gguf"), ("another.gguf", "one.gguf")),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) and value[0].startswith("-") else "",
)
def test_bad_option(args: tuple[str, ...], words: tuple[str, ...]) -> None:
    sentence = check_error(in_process("run", "-p", "Hello", *args), USAGE, *words)
    assert "e+" not in sentence, "numbers are written out"


def test_quantised_v_without_flash_attention() -> None:
    res = kvflash("run", *HELLO, "-ctv", "q8_0", "-fa", "off")
    sentence = check_error(res, RUNTIME, "q8_0")
    assert re.search("flash.att", sentence)


def test_rpc_server_that_is_not_there() -> None:
    check_error(kvflash("run", *HELLO, "--rpc", "127.0.0.1:1"), RUNTIME, "127.0.0.1:1")


def test_pool_smaller_than_the_floor_is_raised() -> None:
    """To what the batch needs, or to the least of all."""
    for args, n_pool in (((), 768), (("-b", "512"), 1024), (("--pin-prefix", "512"), 1024)):
        res = kvflash("run", "-p", "Hello", "-c", "8K", "--kvflash", "100", "-n", "4", "--temp", "0", "--json", *args)
        check_good(res)
        assert f"kvflash: warning: a pool of 100 tokens is too small: raised to {n_pool}" in res.err
        found = json.loads(res.out)
        assert found["stats"]["n_pool"] == n_pool
        assert any(f"raised to {n_pool}" in text for text in found["warnings"])
        assert found["text"]


def test_pool_larger_than_the_context_is_not_needed() -> None:
    res = kvflash("run", "-p", "Hello", "-c", "2K", "--kvflash", "8K", "-n", "4", "--temp", "0", "--json")
    check_good(res)
    assert "no pool is needed" in res.err
    assert "8192" in res.err
    assert "2048" in res.err
    assert json.loads(res.out)["stats"]["n_pool"] is None


def test_a_huge_context_costs_nothing_on_a_pool() -> None:
    res = kvflash("run", "-p", "Hello", "-c", "1000000000", "--kvflash", "1K", "-n", "2", "--json")
    check_good(res)
    assert json.loads(res.out)["stats"]["n_ctx"] == 1_000_000_000


def test_a_huge_context_with_the_full_cache() -> None:
    # the limit, so that this one is not tried on a machine that has the memory
    args = ("run", "-p", "Hello", "-c", "1000000000", "--kvflash", "off", "-n", "2")
    check_error(shell('ulimit -v 4000000; exec "$K" "$@"', *args), RUNTIME, "1000000000", "full cache")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens", "10"), ("10", "raise")),
        (("--tokens", "-5"), ("-5",)),
        (("--tokens", "1M"), ("--tokens", "1048576", "67520")),
        (("--needles", "0"), ("needles", "0")),
        (("--seed", "-1"), ("seed", "-1")),
        (("--tokens", "1K", "--kvflash", "0"), ("--kvflash", "0")),
        (("--tokens", "1K", "--kvflash", "4K"), ("4096", "--kvflash")),
        (("--tokens", "1K", "-t", "0"), ("--threads", "0")),
    ],
)
def test_bad_demo(tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("mine")
    check_error(in_process("demo", "-o", path, *args), USAGE, *words)
    assert path.read_text() == "mine"


#
# prompts
#


def test_prompt_longer_than_the_context() -> None:
    res = kvflash("run", "-f", "-", "-c", "256", "-n", "4", stdin=b"word " * 500)
    check_error(res, USAGE, "tokens do not fit the context of 256", "-c/--ctx-size")


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("how", ["file", "stdin", "option"])
def test_empty_prompt(tmp_path: Path, content: bytes, how: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    if how == "option":
        if content:
            pytest.skip("one way to be empty")
        res = in_process("run", "-p", "")
    else:
        res = in_process("run", "-f", path) if how == "file" else in_process("run", stdin=content)
    check_error(res, USAGE, "the prompt", "empty")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"abc\0def", ("zero byte", "offset 3")),
        (b"abc\xff\xfe", ("not UTF-8", "0xff", "offset 3")),
        (b"caf\xe9 au lait", ("not UTF-8", "0xe9", "offset 3")),
        ("text".encode("utf-16"), ("not UTF-8",)),
        (BUNDLED_MODEL.read_bytes()[:4096], ("the prompt",)),
        (b"abc\xe2\x82", ("not UTF-8", "offset 3")),  # cut within a character
    ],
)
def test_binary_prompt(tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    path = tmp_path / "prompt.bin"
    path.write_bytes(content)
    check_error(in_process("run", "-f", path), USAGE, str(path), *words)
    check_error(in_process("run", stdin=content), USAGE, "stdin", *words)


def test_prompt_option_of_broken_bytes() -> None:
    check_error(kvflash("run", "-p", b"abc\xff"), USAGE, "the prompt", "UTF-8")


def test_prompt_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "no-such.txt"
    check_error(kvflash("run", "-f", path), USAGE, str(path), "No such file")
    check_error(kvflash("run", "-f", tmp_path), USAGE, str(tmp_path), "directory")


def test_two_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Hello")
    check_error(kvflash("run", "-p", "Hello", "-f", path), USAGE, "-p/--prompt", "-f/--file")


def test_no_prompt_on_a_terminal() -> None:
    ours, theirs = os.openpty()
    try:
        res = subprocess.run(
            [SCRIPT, "run"], stdin=theirs, capture_output=True, timeout=TIMEOUT, text=True, check=False
        )
    finally:
        os.close(ours)
        os.close(theirs)
    check_error(Ended(res.returncode, res.stdout, res.stderr), USAGE, "no prompt", "-p", "-f")


#
# output
#


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such" / "answer.txt"
    check_error(kvflash("run", *HELLO, "-o", tmp_path), RUNTIME, str(tmp_path), "cannot be written")
    check_error(kvflash("run", *HELLO, "-o", missing), RUNTIME, str(missing), "cannot be written")
    assert not missing.parent.exists()
    small = ("--tokens", "1100", "--needles", "2", "--kvflash", "1K")
    check_error(kvflash("demo", *small, "-o", missing), RUNTIME, str(missing), "cannot be written")


@pytest.mark.parametrize("form", [(), ("--json",), ("--jsonl",)])
def test_full_disk(form: tuple[str, ...]) -> None:
    check_error(kvflash("run", *HELLO, *form, "-o", "/dev/full"), RUNTIME, "/dev/full", "No space left")
    check_error(shell('"$K" "$@" > /dev/full', "run", *HELLO, *form), RUNTIME, "no space left")


@pytest.mark.parametrize("command", [("inspect",), ("inspect", "--json"), ("--help",), ("run", "--help")])
def test_full_disk_behind_other_commands(command: tuple[str, ...]) -> None:
    check_error(shell('"$K" "$@" > /dev/full', *command), RUNTIME, "no space left")


@pytest.mark.parametrize(
    "args",
    [
        ("no-such.gguf", "-p", "Hello"),
        (str(BUNDLED_MODEL), "-p", "one two three four five six seven " * 20, "-c", "64"),
        (str(BUNDLED_MODEL), "-p", "Hello", "-c", "1K", "-ctv", "q8_0", "-fa", "off"),
        (str(BUNDLED_MODEL), "-p", "Hello", "-ub", "0"),
        (str(BUNDLED_MODEL), "-p", "Hello", "-c", "4K", "--kvflash", "1K", "--kvflash-policy", "drafter"),
        (str(BUNDLED_MODEL), "-p", ""),
    ],
    ids=["model", "prompt", "cache", "option", "drafter", "empty"],
)
def test_a_run_that_fails_writes_nothing_over(tmp_path: Path, args: tuple[str, ...]) -> None:
    path = tmp_path / "answer.txt"
    path.write_text("mine")
    res = kvflash("run", *args, "-o", path)
    check_plain(res)
    assert res.code in {RUNTIME, USAGE}
    assert path.read_text() == "mine"


def test_output_over_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(BUNDLED_MODEL.read_bytes())
    check_error(kvflash("run", path, *HELLO, "-o", path), USAGE, str(path))
    assert path.read_bytes() == BUNDLED_MODEL.read_bytes()


def test_output_over_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Hello")
    check_error(kvflash("run", "-f", path, "-c", "1K", "-n", "4", "-o", path), USAGE, str(path))
    assert path.read_text() == "Hello"


@pytest.mark.parametrize(
    "args",
    [
        ("run", "-p", "Hello", "-c", "4K", "-n", "2000", "--temp", "0"),
        ("run", "-p", "Hello", "-c", "4K", "-n", "2000", "--temp", "0", "--jsonl"),
        ("inspect",),
        ("run", "--help"),
    ],
    ids=lambda args: "_".join(args[:1] + args[-1:]),
)
def test_reader_that_goes_away(args: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [SCRIPT, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as p:
        assert p.stdout
        assert p.stderr
        assert len(p.stdout.read(1)) == 1
        p.stdout.close()
        err = p.stderr.read().decode()
        code = p.wait(TIMEOUT)
    check_plain(Ended(code, "", err))
    assert code in {0, RUNTIME}
    assert "error" not in err  # `| head` is no error


@pytest.mark.parametrize("redirect", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(redirect: str) -> None:
    res = shell(f'"$K" "$@" {redirect}', "run", *HELLO)
    check_plain(res)
    if redirect == ">&-":
        check_error(res, RUNTIME, "stdout")
    elif "2>" not in redirect:
        assert res.code == 0, res.err
    res = shell(f'"$K" "$@" {redirect}', "run", "-c", "1K", "-n", "4", "-f", "-")
    check_plain(res)
    assert res.code in {RUNTIME, USAGE}  # stdin has nothing to read, or is closed


def test_output_encoding_that_cannot_show_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for args in (
        ("run", *HELLO, "-s", "1", "--temp", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "200"),
        ("demo", "--tokens", "1100", "--needles", "2", "--kvflash", "1K", "-t", "1", "-o", "/dev/null"),
        ("inspect",),
    ):
        check_good(kvflash(*args))


#
# memory
#

# what a process has mapped at its most, in KiB, on stderr when it is over
PEAK = """
import sys
from pathlib import Path
from pyllama_kvflash.cli import main
try:
    main(sys.argv[1:])
finally:
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmPeak")), file=sys.stderr)
"""
# 6 KiB a token; "word " is two
RECORDS = ("-c", "16K", "-b", "64", "--kvflash", "768", "-ctk", "f32", "-ctv", "f32", "-n", "4", "--temp", "0", "-q")


def peak_kib(*args: str, stdin: bytes) -> int:
    res = kvflash(*args, stdin=stdin, command=(sys.executable, "-c", PEAK))
    check_good(res)
    return int(res.err.splitlines()[-1])


@pytest.fixture
def one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Malloc maps 128 MiB for a new thread, and gives most of it back: a peak would say nothing."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")


def limited(kib: int, *args: str, stdin: bytes) -> Ended:
    return kvflash(*args, stdin=stdin, command=("sh", "-c", f'ulimit -v {kib}; exec "$0" "$@"', SCRIPT))


@pytest.mark.usefixtures("one_arena")
def test_out_of_host_memory_for_records() -> None:
    """The records ask for far more than is left, and far more is left than the run's other parts ask for."""
    args = ("run", *RECORDS, "-c", "128K")
    limit = peak_kib(*args, stdin=b"word " * 600) + (128 << 10)
    res = limited(limit, *args, stdin=b"word " * 50000)
    sentence = check_error(res, RUNTIME, "no host memory", "MiB of chunk records", "use a shorter context")
    wanted = re.search(r"for another ([\d.]+) MiB of chunk records, with [\d.]+ MiB held", sentence)
    assert wanted, sentence
    assert 450 < float(wanted[1]) < 600  # of the whole prompt, before its first batch: 6 KiB a token


@pytest.mark.parametrize("form", [(), ("--json",), ("--jsonl",)])
def test_prompt_of_more_records_than_are_allowed(tmp_path: Path, form: tuple[str, ...]) -> None:
    """It is refused as a whole: nothing was computed, or written over."""
    path = tmp_path / "answer.txt"
    path.write_text("mine")
    begin = time.monotonic()
    res = kvflash("run", *RECORDS, *form, "--kvflash-host", "32MiB", "-o", path, stdin=b"word " * 4000)
    assert time.monotonic() - begin < 5
    sentence = check_error(
        res, RUNTIME, "chunk records take", "of host memory, and 32.00 MiB are allowed", "--kvflash-host"
    )
    assert re.search(r"\b12[45] chunk records take 4[67]\.\d\d MiB", sentence), sentence
    assert res.err == sentence + "\n"
    assert path.read_text() == "mine"
    check_error(kvflash("run", *RECORDS, "--kvflash-host", "1", stdin=b"word " * 40), RUNTIME, "0.00 KiB are allowed")


def test_answer_of_more_records_than_are_allowed() -> None:
    """What was produced by then is shown."""
    args = ("run", *RECORDS, "-n", "400", "-r", "never said")
    free = kvflash(*args, stdin=b"word " * 600)
    assert free.code == 0, free.err
    res = kvflash(*args, "--kvflash-host", "8M", stdin=b"word " * 600)  # 7 for the prompt
    check_plain(res)
    assert res.code == RUNTIME
    assert re.fullmatch(r"kvflash: error: 2\d chunk records take 8\.\d\d MiB .*--kvflash-host.*\n", res.err)
    assert len(res.out) > 20
    assert free.out.startswith(res.out.rstrip("\n"))


def test_a_prompt_that_fits_the_pool_takes_no_more_than_is_allowed() -> None:
    """Its records are kept, too: a pool is no way around the limit. The full cache has none."""
    args, stdin = ("run", *RECORDS), b"word " * 200
    check_error(kvflash(*args, "--kvflash-host", "1M", stdin=stdin), RUNTIME, "chunk records take")
    check_good(kvflash(*args, "--kvflash", "off", "--kvflash-host", "1", stdin=stdin))


@pytest.mark.usefixtures("one_arena")
def test_out_of_host_memory_at_every_other_place() -> None:
    """From where Python itself has room to start, to where the run has."""
    start = kvflash("--version", command=(sys.executable, "-c", PEAK))
    low = int(start.err.splitlines()[-1])
    high = peak_kib("run", *RECORDS, stdin=b"word")
    codes = []
    for i in range(10):
        res = limited(low + 512 + (high - low) * i // 10, "run", *RECORDS, stdin=b"word")
        check_plain(res)
        assert res.code in {0, 1}, res.err
        assert res.err.count("error: ") == res.code
        codes.append(res.code)
    assert codes[0] == 1, "the least memory is too little"


NO_THREADS = """
import sys, threading
def start(self):
    raise RuntimeError("can't start new thread")
from pyllama_kvflash.cli import main
threading.Thread.start = start
main(sys.argv[1:])
"""


def test_no_memory_for_a_thread() -> None:
    res = kvflash("run", *HELLO, command=(sys.executable, "-c", NO_THREADS))
    check_plain(res)
    assert res.code in {0, 1}
    assert res.err.count("error: ") == res.code


#
# two at once, and Ctrl-C
#


def test_two_runs_at_once() -> None:
    args = [SCRIPT, "run", "-f", "-", "-c", "4K", "-b", "64", "--kvflash", "768", "-n", "16", "--temp", "0", "-q"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(subprocess.Popen(args, **pipes)) for _ in range(2)]
        for run in runs:
            assert run.stdin
            run.stdin.write(b"word " * 1500)
            run.stdin.close()
            run.stdin = None
        results = [run.communicate(timeout=TIMEOUT) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert results[0] == results[1]
    assert len(results[0][0]) > 1
    assert results[0][1] == b""


@contextlib.contextmanager
def started(*args: str | Path, command: tuple[str, ...] = (SCRIPT,)) -> Iterator[subprocess.Popen[bytes]]:
    """A process that takes Ctrl-C even if this one, in the background of a shell, does not."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [*command, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    finally:
        signal.signal(signal.SIGINT, previous)
    with process:
        try:
            yield process
        finally:
            process.kill()  # harmless if it is over


def read_until(stream: Any, word: bytes, length: int = 0) -> bytes:
    """What a process writes, until `word` was in it, and so many bytes."""
    seen, end = b"", time.monotonic() + TIMEOUT
    while word not in seen or len(seen) < length:
        ready, _, _ = select.select([stream], [], [], max(0, end - time.monotonic()))
        assert ready, f"{word!r} did not come: {seen!r}"
        data = os.read(stream.fileno(), 65536)
        assert data, f"{word!r} did not come: {seen!r}"
        seen += data
    return seen


def interrupt(process: subprocess.Popen[bytes], seen: bytes = b"", times: int = 1) -> Ended:
    """Ctrl-C, and what comes after it: in a few seconds."""
    begin = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT)
    assert time.monotonic() - begin < 5
    return Ended(process.returncode, (seen + out).decode(), err.decode())


ENDLESS = ("run", "-p", "The secret code for the", "-c", "60K", "--kvflash", "1K", "-n", "-1", "--temp", "0")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt of 50,000 tokens, which takes half a minute."""
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("word " * 25_000)
    return path


LONG = ("-c", "60K", "--kvflash", "2K", "-b", "512", "-n", "8", "--temp", "0")


def test_interrupt_during_prefill(book: Path) -> None:
    with started("run", "-f", book, *LONG) as process:
        read_until(process.stderr, b"pool of")
        time.sleep(1)
        res = interrupt(process)
    check_plain(res)
    assert res.code == INTERRUPTED
    assert res.out.strip() == ""
    assert "interrupted: prefill" in res.err
    n_prompt = re.search(r"prefill ([\d,]+) tok", res.err)
    assert n_prompt
    assert int(n_prompt[1].replace(",", "")) < 50_000  # none, if the machine is busy


def test_interrupt_during_prefill_json(book: Path) -> None:
    with started("run", "-f", book, *LONG, "--json") as process:
        read_until(process.stderr, b"pool of")
        time.sleep(0.5)
        res = interrupt(process)
    check_plain(res)
    assert res.code == INTERRUPTED
    found = json.loads(res.out)
    assert (found["reason"], found["text"]) == ("interrupted", "")
    assert found["stats"]["n_generated"] == 0


def test_interrupt_during_decode() -> None:
    with started(*ENDLESS) as process:
        res = interrupt(process, read_until(process.stdout, b" ", 20))
    check_plain(res)
    assert res.code == INTERRUPTED
    assert "interrupted: " in res.err
    want = kvflash(*ENDLESS, "-n", "32", "-q").out.rstrip("\n")
    n = min(len(want), len(res.out) - 1)
    assert n >= 20
    assert res.out[:n] == want[:n]
    assert res.out.endswith("\n")


def test_interrupt_keeps_the_text_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    with started(*ENDLESS, "-o", path) as process:
        end = time.monotonic() + TIMEOUT
        while not (path.exists() and path.stat().st_size > 20):
            assert time.monotonic() < end
            time.sleep(0.01)
        res = interrupt(process)
    check_plain(res)
    assert (res.code, res.out) == (INTERRUPTED, "")
    assert len(path.read_text(encoding="utf-8")) > 20


def test_interrupt_during_decode_json() -> None:
    with started(*ENDLESS, "--json") as process:
        read_until(process.stderr, b"pool of")
        time.sleep(0.5)
        res = interrupt(process)
    check_plain(res)
    assert res.code == INTERRUPTED
    found = json.loads(res.out)
    assert found["reason"] == "interrupted"
    assert found["text"]
    assert found["stats"]["n_generated"] > 0


def test_interrupt_during_decode_jsonl() -> None:
    with started(*ENDLESS, "--jsonl") as process:
        res = interrupt(process, read_until(process.stdout, b'"token"'))
    check_plain(res)
    assert res.code == INTERRUPTED
    events = [json.loads(line) for line in res.out.splitlines()]
    assert (events[-1]["event"], events[-1]["reason"]) == ("done", "interrupted")
    assert sum(e["event"] == "token" for e in events) == events[-1]["stats"]["n_generated"]


def test_impatient_interrupts() -> None:
    with started(*ENDLESS) as process:
        res = interrupt(process, read_until(process.stdout, b" "), times=5)
    check_plain(res)
    assert res.code == INTERRUPTED


# Ctrl-C from within the native loader, at its n-th report of progress
WHILE_LOADING = """
import os, signal, sys
from pyllama_kvflash.cli import main, report
n = int(sys.argv.pop(1))
def at(self, done, count=[0]):
    count[0] += 1
    if count[0] == n:
        os.kill(os.getpid(), signal.SIGINT)
report.LoadBar.__call__ = at
main(sys.argv[1:])
"""


@pytest.mark.parametrize("n", [1, 2, 10])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_interrupt_during_load(n: int, form: tuple[str, ...]) -> None:
    with started(str(n), *ENDLESS, *form, command=(sys.executable, "-c", WHILE_LOADING)) as process:
        out, err = process.communicate(timeout=TIMEOUT)
    res = Ended(process.returncode, out.decode(), err.decode())
    check_error(res, INTERRUPTED, "interrupted")


def test_interrupt_at_any_time(book: Path) -> None:
    """From the first line on stderr on."""
    for delay in (0, 0.01, 0.02, 0.03, 0.05, 0.1):
        with started("run", "-f", book, *LONG) as process:
            read_until(process.stderr, b"no model given")
            time.sleep(delay)
            res = interrupt(process)
        check_plain(res)
        assert res.code == INTERRUPTED, delay


def test_interrupt_demo(tmp_path: Path) -> None:
    with started("demo", "-t", "1", "-o", tmp_path / "prompt.txt") as process:
        read_until(process.stderr, b"pool of")
        time.sleep(0.5)
        res = interrupt(process)
    check_error(res, INTERRUPTED, "interrupted")
