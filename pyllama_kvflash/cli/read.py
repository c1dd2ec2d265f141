"""Read texts that commands are given: all in the same way, whatever they are (docs/FAQ.md has the table)."""

import codecs
import sys
from collections.abc import Iterator
from pathlib import Path

from pyllama_kvflash.cli.roles import reads
from pyllama_kvflash.errors import UsageError

_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def read_text(file: str, what: str = "text") -> str:
    """Read a text from a file, or from stdin for "-". what: its name in errors. Raises UsageError."""
    name = "stdin" if file == "-" else file
    try:
        data = _stdin() if name == "stdin" else Path(name).read_bytes()
    except OSError as err:
        msg = f"the {what} file {name} cannot be read: {err.strerror}"
        raise UsageError(msg) from None
    return decoded(data, f"the {what} in {name}")


def decoded(data: bytes, what: str) -> str:
    """Return a text that is UTF-8, or UTF-16 with a byte order mark, without that mark and with Unix line ends.

    what: the text, for errors. Raises UsageError for any other text, and for one with a zero byte.
    """
    encoding = encoding_of(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as err:
        raise UsageError(_not_text(what, encoding, data[err.start], err.start)) from None
    if "\0" in text:
        raise UsageError(_binary(what, data))
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def encoding_of(data: bytes) -> str:
    """Return how a text is encoded, by its first bytes."""
    return _UTF16.get(data[:2], "utf-8")


def piped_lines() -> Iterator[str]:
    """Yield the lines of stdin as they come, each decoded as a file is; UTF-16 is read as a whole. Raises UsageError."""
    stdin = sys.stdin.buffer
    for n, line in enumerate(iter(stdin.readline, b""), 1):
        if n == 1 and encoding_of(line) != "utf-8":
            yield from decoded(line + stdin.read(), "stdin").split("\n")
            return
        yield decoded(line, f"line {n:,} of stdin").removesuffix("\n")


def _not_text(what: str, encoding: str, byte: int, at: int) -> str:
    known = "UTF-16 text, which its byte order mark says it is" if encoding != "utf-8" else "UTF-8 text"
    return f"{what} is not {known}: byte {byte:#04x} at offset {at:,}; convert it, for example with iconv -f LATIN1 -t UTF-8"


def _binary(what: str, data: bytes) -> str:
    at = data.index(0)
    if data[at % 2 :: 2].count(0) * 4 > len(data):  # every other byte, mostly
        order = "LE" if at % 2 else "BE"
        return f"{what} looks like UTF-16 without a byte order mark: convert it with iconv -f UTF-16{order} -t UTF-8"
    return f"{what} is binary: a zero byte at offset {at:,}; give a text file"


def _stdin() -> bytes:
    if sys.stdin is None:
        msg = 'stdin is closed: give a prompt with -p "text" or -f file.txt'
        raise UsageError(msg)
    reads("stdin", "/dev/stdin")
    return sys.stdin.buffer.read()
