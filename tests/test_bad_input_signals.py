"""Two commands at once, and Ctrl-C: each ends with an exit code, and nothing hangs or is lost."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import CLI, ENGINE
from support.commands import INTERRUPTED, SCRIPT, TIMEOUT, Ended, check_error, check_plain, kvflash

pytestmark = [pytest.mark.native, pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /dev")]

environment = commands.environment


@contextlib.contextmanager
def started(*args: str | Path, command: tuple[str | Path, ...] = (SCRIPT,)) -> Iterator[subprocess.Popen[bytes]]:
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
    assert res.err.rstrip().endswith(", interrupted")
    n_prompt = re.search(r"kvflash: read ([\d,]+) tokens? in|kvflash: wrote (0)", res.err)
    assert n_prompt
    assert int((n_prompt[1] or "0").replace(",", "")) < 50_000  # none, if the machine is busy


def test_interrupt_during_decode() -> None:
    with started(*ENDLESS) as process:
        res = interrupt(process, read_until(process.stdout, b" ", 20))
    check_plain(res)
    assert res.code == INTERRUPTED
    assert res.err.rstrip().endswith(", interrupted")
    want = kvflash(*ENDLESS, "-n", "32", "-q").out.rstrip("\n")
    n = min(len(want), len(res.out) - 1)
    assert n >= 20
    assert res.out[:n] == want[:n]
    assert res.out.endswith("\n")


@pytest.mark.sampled(CLI, ENGINE)
@pytest.mark.parametrize("exists", [False, True])
def test_interrupt_keeps_the_text_in_a_file(tmp_path: Path, exists: bool) -> None:
    """In the place of an old one, too."""
    path = tmp_path / "answer.txt"
    if exists:
        path.write_text("old")
    with started(*ENDLESS, "-o", path) as process:
        end = time.monotonic() + TIMEOUT
        while not any(file.stat().st_size > 20 for file in tmp_path.glob(".answer.txt.*" if exists else "*")):
            assert time.monotonic() < end
            time.sleep(0.01)
        res = interrupt(process)
    check_plain(res)
    assert (res.code, res.out) == (INTERRUPTED, "")
    assert len(path.read_text(encoding="utf-8")) > 20
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.nightly(CLI, ENGINE)
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


@pytest.mark.nightly(CLI, ENGINE)
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


@pytest.mark.sampled(CLI, ENGINE)
@pytest.mark.parametrize(("n", "form"), [(1, ()), (10, ("--json",))])
def test_interrupt_during_load(n: int, form: tuple[str, ...]) -> None:
    with started(str(n), *ENDLESS, *form, command=(sys.executable, "-c", WHILE_LOADING)) as process:
        out, err = process.communicate(timeout=TIMEOUT)
    res = Ended(process.returncode, out.decode(), err.decode())
    check_error(res, INTERRUPTED, "interrupted")


# Ctrl-C as a module is looked for, or as Python ends
WHILE_IMPORTING = """
import atexit, os, signal, sys
at = sys.argv.pop(1)
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
class Finder:
    def find_spec(self, name, *_):
        if name == at:
            ctrl_c()
sys.meta_path.insert(0, Finder())
if at == "exit":
    atexit.register(ctrl_c)
from pyllama_kvflash.__main__ import main
main()
"""


@pytest.mark.sampled(CLI, ENGINE)
@pytest.mark.parametrize("at", ["pyllama_kvflash.cli", "click", "pyllama_kvflash.cli.serve", "exit"])
def test_interrupt_as_python_starts_and_ends(at: str) -> None:
    with started(at, "--version", command=(sys.executable, "-c", WHILE_IMPORTING)) as process:
        out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (0 if at == "exit" else INTERRUPTED, b"")
    assert out.startswith(b"kvflash") == (at == "exit")


# an object is freed, and its weak reference says so: no exception gets out of there
WHILE_FREEING = """
import os, signal, sys, weakref
from pyllama_kvflash import native
class Thing: pass
def gone(_):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
def odd(_):
    raise ValueError("something else")
hook = sys.unraisablehook
with native.interruptible():
    for callback in gone, odd:
        thing = Thing()
        ref = weakref.ref(thing, callback)
        del thing
assert sys.unraisablehook is hook
"""


def test_impatient_interrupts_while_something_is_freed() -> None:
    with started(command=(sys.executable, "-c", WHILE_FREEING)) as process:
        out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (0, b"")
    assert b"KeyboardInterrupt" not in err
    assert b"something else" in err, "other exceptions are shown as ever"
