"""Run kvflash as a person does, in this process or in one of its own."""

import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner, Result

from pyllama_kvflash.cli import main
from support import needles
from support.forks import SCRIPT, forked

TIMEOUT = 60  # seconds; the slowest command takes about ten, and what takes longer hangs
RUNTIME, USAGE, INTERRUPTED = 1, 2, 130


def forget_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's settings."""
    for name in list(os.environ):
        if name.startswith(("KVFLASH_", "LLAMA_")) or name in {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"}:
            monkeypatch.delenv(name)


def use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's settings, and one thread: two wait for each other when the machine is busy."""
    forget_settings(monkeypatch)
    monkeypatch.setenv("LLAMA_ARG_THREADS", "1")


#
# which commands there are
#


def leaves(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands, each by its names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        if isinstance(command, click.Group):
            yield from leaves(command, *names, name)
        else:
            yield (*names, name), command


#
# in this process
#


def invoke(*args: str | Path, text: str | bytes | None = None) -> Result:
    """Run a command. It ends as a process would: by an exit code, never by an exception."""
    res = CliRunner().invoke(main, list(map(str, args)), input=text)
    assert res.exception is None or isinstance(res.exception, SystemExit), repr(res.exception)
    return res


def good(*args: str | Path, text: str | bytes | None = None) -> Result:
    """The same, where nothing goes wrong."""
    res = invoke(*args, text=text)
    assert res.exit_code == 0, res.output
    return res


#
# in a process of its own
#


class Ended(NamedTuple):
    """A process that is over."""

    code: int
    out: str
    err: str


def kvflash(*args: str | Path | bytes, stdin: bytes = b"", command: tuple[str | Path, ...] = (SCRIPT,)) -> Ended:
    """Run a command."""
    if command == (SCRIPT,) and "PYTHONIOENCODING" not in os.environ:  # that is looked at as Python starts
        res = forked([os.fsdecode(arg) for arg in args], stdin, TIMEOUT)
    else:
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


def process(*args: str | Path, timeout: float = TIMEOUT, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, with the options of subprocess.run."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    if "input" in kwargs:
        del options["stdin"]
    return subprocess.run([SCRIPT, *args], timeout=timeout, encoding="utf-8", check=False, **options)


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


#
# how it ended
#


def ended(res: Ended | Result | subprocess.CompletedProcess[str]) -> Ended:
    """However it was run."""
    if isinstance(res, Result):
        return Ended(res.exit_code, res.stdout, res.stderr)
    if isinstance(res, subprocess.CompletedProcess):
        return Ended(res.returncode, res.stdout, res.stderr)
    return res


def check_plain(res: Ended) -> None:
    """No traceback, and no signal."""
    assert "Traceback" not in res.err, res.err
    assert "Exception ignored" not in res.err, res.err
    assert res.code >= 0, f"ended by {signal.Signals(-res.code).name}: {res.err}"
    assert res.code not in {134, 136, 139}, f"the shell saw a signal: {res.err}"


def check_error(how: Ended | Result | subprocess.CompletedProcess[str], code: int, *words: str) -> str:
    """One sentence, with these words in it, and nothing on stdout. The sentence."""
    res = ended(how)
    check_plain(res)
    assert res.code == code, res.err
    errors = [line for line in res.err.splitlines() if line.startswith("kvflash: error: ")]
    assert len(errors) == 1, res.err
    assert errors[0] == res.err.splitlines()[-1], "the error comes last"
    assert res.out == ""
    for word in words:
        assert word in errors[0], errors[0]
    return errors[0]


def check_good(res: Ended) -> None:
    """Nothing went wrong."""
    check_plain(res)
    assert res.code == 0, res.err
    assert "error" not in res.err


#
# what they are told
#

# -p Hello with a small context: what is asked for where only the rest is wrong
HELLO = ("-p", "Hello", "-c", "1K", "-n", "4", "--temp", "0")

NEEDLE_TOKEN_BYTES = 6 * 2 * 128 * 2  # layers, K and V, elements of a row, bytes of an f16

# A pool of 768 tokens is what batches of 64 need: the prompt of 1,100 tokens is longer.
SHORT = ("-p", "The secret code for the", "-c", "1K")
POOLED = ("-c", "4K", "-b", "64", "--kvflash", "768")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's settings, and one thread: two wait for each other when the machine is busy."""
    use_one_thread(monkeypatch)
    monkeypatch.setenv("COLUMNS", "100")


def summary(*args: str, text: str | None = None) -> dict[str, Any]:
    res: dict[str, Any] = json.loads(good("run", "--temp", "0", "--json", *args, text=text).stdout)
    return res


def rows(text: str) -> dict[str, str]:
    """A table of two columns."""
    return {k: v.strip() for k, v in re.findall(r"^(\S[^\n]*?)  +(\S.*)$", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt of 1,100 tokens: prose, four codes, and a question about the last one."""
    prompt = needles.document(1050, seed=3)
    path = tmp_path_factory.mktemp("prompt") / "long.txt"
    path.write_text(prompt.text + prompt.needles[-1].question + "\n", encoding="utf-8")
    (path.parent / "answer.txt").write_text(prompt.needles[-1].answer)
    return path
