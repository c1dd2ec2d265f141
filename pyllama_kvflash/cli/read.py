"""Reads the texts that are given to commands, all in the same way (docs/FAQ.md has a table)."""

import codecs
import sys
from collections.abc import Iterator
from pathlib import Path

from pyllama_kvflash.cli.documents import text_of
from pyllama_kvflash.cli.roles import reads
from pyllama_kvflash.errors import UsageError

_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_UTF32 = {codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE}


def read_text(file: str, what: str = "text") -> str:
    """Return the text of a file, which may be a PDF or DOCX; "-": stdin. what: a word for the text in errors. Raises UsageError."""
    name = "stdin" if file == "-" else file
    try:
        data = _stdin() if name == "stdin" else Path(name).read_bytes()
    except OSError as err:
        msg = f"the {what} file {name} cannot be read: {err.strerror}"
        raise UsageError(msg) from None
    called = f"the {what} in {name}"
    found = text_of(data, called)
    return decoded(data, called) if found is None else found


def check_given(text: str | None, option: str) -> None:
    """Raise UsageError if a text of the command line was not UTF-8: Python turns such bytes into halves of surrogate pairs."""
    if text is not None and any("\ud800" <= c <= "\udfff" for c in text):
        msg = f"the text given with {option} is not UTF-8: {text!a}"
        raise UsageError(msg)


def decoded(data: bytes, what: str) -> str:
    """Decode a text in UTF-8, or in UTF-16 with a byte order mark. The mark is removed, and line ends become Unix line ends.

    what: the text's name in errors. Raises UsageError for any other text, and for one with a zero byte.
    """
    if data[:4] in _UTF32:
        msg = f"{what} is UTF-32 text: convert it with iconv -f UTF-32 -t UTF-8"
        raise UsageError(msg)
    return _decoded(data, what, _UTF16.get(data[:2], "utf-8"))


def piped_lines() -> Iterator[str]:
    """Yield the lines of stdin as they come, decoded as a file's text is. UTF-16 is read as a whole. Raises UsageError."""
    stdin = sys.stdin.buffer
    try:
        for n, data in enumerate(iter(stdin.readline, b""), 1):
            if n == 1 and data[:2] in _UTF16:
                yield from _lines(decoded(data + stdin.read(), "stdin"))
                return
            yield from _lines(_decoded(data, f"line {n:,} of stdin", "utf-8"))
    except OSError as err:
        msg = f"stdin cannot be read: {err.strerror}"
        raise UsageError(msg) from None


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


def _decoded(data: bytes, what: str, encoding: str) -> str:
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as err:
        known = "UTF-8 text" if encoding == "utf-8" else "UTF-16 text, which its byte order mark says it is"
        msg = (
            f"{what} is not {known}: byte {data[err.start]:#04x} at offset {err.start:,}; convert it, for example with"
        )
        msg += " iconv -f LATIN1 -t UTF-8"
        raise UsageError(msg) from None
    if "\0" in text:
        at = len(text.partition("\0")[0].encode(encoding))
        if encoding == "utf-8" and _looks_like_utf16(data, at):
            order = "LE" if at % 2 else "BE"
            msg = f"{what} looks like UTF-16 without a byte order mark: convert it with iconv -f UTF-16{order} -t UTF-8"
        else:
            msg = f"{what} is binary: a zero byte at offset {at:,}; give a text file"
        raise UsageError(msg)
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _looks_like_utf16(data: bytes, at: int) -> bool:
    """Return whether data with a zero byte at offset `at` looks like UTF-16: many bytes at offsets of this parity are zero, and no others."""
    zeros = data[at % 2 :: 2].count(0)
    return zeros > 1 and zeros * 4 > len(data) and not data[1 - at % 2 :: 2].count(0)


def _stdin() -> bytes:
    if sys.stdin is None:
        msg = 'stdin is closed: give a prompt with -p "text" or -f file.txt'
        raise UsageError(msg)
    reads("stdin", "/dev/stdin")
    return sys.stdin.buffer.read()
