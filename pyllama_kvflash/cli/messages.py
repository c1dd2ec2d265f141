"""The messages of a conversation: what a person types, or the lines of a file."""

import io
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import click

from pyllama_kvflash.cli.read import piped_lines
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.errors import UsageError

_QUOTES = '"""'
_PASTE_SECONDS = 0.03  # within which the next line of a pasted text arrives


def is_typed() -> bool:
    """Return whether a person types, and sees the answers."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def messages(reporter: Reporter) -> Iterator[str]:
    """Yield the messages and commands that a person types, or that a file has on its lines. Empty ones are left out.

    Raises UsageError for a file without messages, and for a line that is not text.
    """
    if typed := is_typed():
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415 (keys that edit a line)
    read = _reader()
    any_yet = False
    while True:
        try:
            text = _message(read, typed=typed).strip()
        except KeyboardInterrupt:
            if not typed:
                raise
            click.echo()
            reporter.note("/exit or Ctrl-D leaves")
            continue
        except EOFError:
            if typed:
                click.echo()
            elif not any_yet:
                msg = "stdin has no message: give one on each line"
                raise UsageError(msg) from None
            return
        if text:
            any_yet = True
            yield text


def _message(read: Callable[[str], str], *, typed: bool) -> str:
    """Return one message, of several lines if it is quoted or pasted. Raises EOFError and KeyboardInterrupt."""
    text = read("> " if typed else "")
    if not text.lstrip().startswith(_QUOTES):
        while typed and select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
            try:
                text += "\n" + read("")
            except EOFError:
                break
        return text
    text = text.lstrip().removeprefix(_QUOTES)
    with suppress(EOFError):  # a file may end without the quotes
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + read("... " if typed else "")
    return text.rstrip().removesuffix(_QUOTES)


def _reader() -> Callable[[str], str]:
    """Return a function that shows a prompt, and reads a line of stdin.

    The function raises EOFError, and UsageError for a line that is not text.
    """
    if sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not text fail later, as a message
        return input
    lines = piped_lines()

    def read(_prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    return read
