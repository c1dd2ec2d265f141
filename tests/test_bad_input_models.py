"""Broken models, and memory that is not there: one sentence, with an exit code, and no signal."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import CLI, ENGINE
from support.commands import (
    HELLO,
    RUNTIME,
    SCRIPT,
    TIMEOUT,
    USAGE,
    Ended,
    check_error,
    check_good,
    check_plain,
    in_process,
    kvflash,
)
from support.oracles import ON_GPU

from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /dev")]

environment = commands.environment
LOADING = pytest.mark.nightly(
    r"pyllama_kvflash/native/.*",
    r"pyllama_kvflash/(gguf_header|loading/(load|placement|refusals))\.py",
    "patches/.*",
    "vendor/.*",
)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes seconds to begin, in each process: what a file says is looked at before."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


#
# models
#


def test_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "no-such.gguf"
    for command in (("run", *HELLO), ("inspect",)):
        check_error(in_process(*command, path), USAGE, str(path), "does not exist", "give the path")


def test_directory_as_a_model(tmp_path: Path) -> None:
    for command in (("run", *HELLO), ("inspect",)):
        check_error(in_process(*command, tmp_path), USAGE, str(tmp_path), "is a directory", "give the .gguf file")


@pytest.mark.parametrize("content", [b"", b"GG", b"Once upon a time\n", b"\0" * 4096])
def test_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    for command in (("run", *HELLO), ("inspect",)):
        check_error(in_process(*command, path), RUNTIME, str(path), "is not a GGUF model")


# in the magic, the version, the counts, the metadata, the tokens, the tensor table, the first tensor, the last one
CUTS = ["6", "24", "table", "data+1", "end-1"]


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_model(tmp_path: Path, cut: str) -> None:
    data = BUNDLED_MODEL.read_bytes()
    reader = gguf.GGUFReader(BUNDLED_MODEL)
    places = {
        "table": reader.tensors[0].field.offset + 10,
        "data+1": reader.data_offset + 1,
        "end-1": len(data) - 1,
    }
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: places.get(cut) or int(cut)])
    in_data = cut in {"data+1", "end-1"}
    what = (
        f"it is incomplete, with {path.stat().st_size:,} of {len(data):,} bytes"
        if in_data
        else "it ends within its header"
    )
    for command in (("run", *HELLO), ("inspect",)):
        check_error(in_process(*command, path), RUNTIME, f"{path} cannot be loaded: {what}", "download it again")


def test_model_without_a_tokenizer(tiny_path: Callable[[str], Path]) -> None:
    check_error(kvflash("run", tiny_path("qwen3"), *HELLO, "--kvflash", "off"), RUNTIME, "has no tokenizer")


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


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("name", "args", "n", "seed"),
    [
        ("needle", RUN_IT, 8, 0),
        ("qwen3", "inspect MODEL", 8, 0),
        pytest.param("needle", RUN_IT, 32, 8, marks=LOADING),
        pytest.param("qwen3", "inspect MODEL", 22, 8, marks=LOADING),
        pytest.param("needle", RUN_IT, 60, 1000, marks=LOADING),
        pytest.param("qwen35", "inspect MODEL", 40, 0, marks=LOADING),
        pytest.param("gemma4", "inspect MODEL", 40, 0, marks=LOADING),
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


@pytest.mark.usefixtures("without_gpu")
@LOADING
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
    short = ("timeout", str(TIMEOUT))  # it takes milliseconds, or for ever
    for res in (
        kvflash("inspect", path, command=(*short, SCRIPT)),
        kvflash(path, command=(*short, sys.executable, "-c", DECODE)),
    ):
        check_plain(res)
        assert res.code in {0, 1}, res.err  # 124: it took too long


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
def one_arena(monkeypatch: pytest.MonkeyPatch, without_gpu: None) -> None:
    """Malloc maps 128 MiB for a new thread, and gives most of it back: a peak would say nothing."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")


def limited(kib: int, *args: str, stdin: bytes) -> Ended:
    return kvflash(*args, stdin=stdin, command=("sh", "-c", f'ulimit -v {kib}; exec "$0" "$@"', SCRIPT))


@pytest.mark.nightly(CLI, ENGINE)
@pytest.mark.skipif(ON_GPU, reason="CUDA maps gigabytes of addresses for a moment, which say nothing about memory")
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
    res = kvflash("run", *RECORDS, *form, "--kvflash-host", "32MiB", "-o", path, stdin=b"word " * 4000)
    sentence = check_error(
        res, RUNTIME, "chunk records take", "of host memory, and 32.00 MiB are allowed", "--kvflash-host"
    )
    assert re.search(r"\b12[45] chunk records take 4[67]\.\d\d MiB", sentence), sentence
    assert res.err == sentence + "\n"
    assert '"prefill"' not in res.out
    assert path.read_text() == "mine"
    check_error(kvflash("run", *RECORDS, "--kvflash-host", "1K", stdin=b"word " * 40), RUNTIME, "1.00 KiB are allowed")


@LOADING
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


@LOADING
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
