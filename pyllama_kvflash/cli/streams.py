"""Standard streams that cannot be written. A message that is lost changes nothing; a result that is lost is an error."""

import io
import os
import sys
from typing import Any

from pyllama_kvflash.errors import OutputError

_LAST = 2  # of the standard streams' descriptors


class _Lossy(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write bytes, or drop them. Returns the number done with."""
        try:
            return super().write(data) or len(data)  # a pipe that is full and does not wait takes none
        except OSError:
            return len(data)


def drop_what_fails() -> None:
    """Let stderr drop what cannot be written, unless it is closed, or another stream than Python's own took its place."""
    err = sys.stderr
    if err is sys.__stderr__ and isinstance(err, io.TextIOWrapper):
        file = io.BufferedWriter(_Lossy(err.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(file, err.encoding, err.errors, line_buffering=True)


class _Closed(io.TextIOBase):
    """What a closed stdout is, so that no result is lost in silence: Python has None there, and click writes nothing then."""

    def write(self, _text: str, /) -> int:
        check_stdout()
        return 0


def refuse_what_is_lost() -> None:
    """Let whatever is written to stdout raise OutputError if it is closed.

    Closed descriptors 0 to 2 become /dev/null: otherwise the next file to be opened would be one of them, and take the messages of
    native code.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _LAST:
        pass
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = _Closed()


def stdout_closed() -> bool:
    """Return whether there was no stdout when the command began."""
    return sys.stdout is None or isinstance(sys.stdout, _Closed)


def check_stdout(fix: str = "send it to a file with > FILE") -> None:
    """Raise OutputError if stdout is closed. fix: what to do then."""
    if stdout_closed():
        msg = f"stdout is closed: {fix}"
        raise OutputError(msg)
