"""Running `kvflash bench` in this process, for the tests of its commands."""

import os
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pyllama_kvflash.cli import main


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path, *argv: str) -> None:
    """Nothing of the caller's settings, nothing written outside a folder of the test, and this command line."""
    for name in list(os.environ):
        if name.startswith(("KVFLASH_", "LLAMA_ARG_")) or name in {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"}:
            monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["kvflash", *argv])


def invoke(*args: str) -> Result:
    """Run a bench in this process. It ends by an exit code, never by an exception."""
    res = CliRunner().invoke(main, ("bench", *args))
    assert res.exception is None or isinstance(res.exception, SystemExit), repr(res.exception)
    return res


def good(*args: str) -> Result:
    res = invoke(*args)
    assert res.exit_code == 0, res.output
    return res


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
