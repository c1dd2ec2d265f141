"""Read texts that commands are given."""

import sys
from pathlib import Path

from pyllama_kvflash.cli.roles import reads
from pyllama_kvflash.errors import UsageError


def read_text(file: str, what: str = "text") -> str:
    """Read a UTF-8 text from a file, or from stdin for "-". what: its name in errors. Raises UsageError."""
    name = "stdin" if file == "-" else file
    try:
        data = _stdin() if name == "stdin" else Path(name).read_bytes()
    except OSError as err:
        msg = f"the {what} file {name} cannot be read: {err.strerror}"
        raise UsageError(msg) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        msg = f"the {what} in {name} is not UTF-8 text: byte {data[err.start]:#04x} at offset {err.start}"
        raise UsageError(msg) from None
    if "\0" in text:
        msg = f"the {what} in {name} is binary: a zero byte at offset {data.index(0)}; give a text file"
        raise UsageError(msg)
    return text


def _stdin() -> bytes:
    if sys.stdin is None:
        msg = 'stdin is closed: give a prompt with -p "text" or -f file.txt'
        raise UsageError(msg)
    reads("stdin", "/dev/stdin")
    return sys.stdin.buffer.read()
