"""Standard streams that cannot be written. A lost message changes nothing; a lost result is an error."""

import io
import os
import sys
from typing import Any

from pyllama_kvflash.errors import OutputError

_LAST = 2  # last descriptor of the standard streams


class _Lossy(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write bytes, or drop them. Returns the number of bytes written or dropped."""
        try:
            return super().write(data) or len(data)  # a full pipe that does not block takes none
        except OSError:
            return len(data)


def drop_what_fails() -> None:
    """Make stderr drop text that cannot be written, unless stderr is closed or is not Python's own stream."""
    err = sys.stderr
    if err is sys.__stderr__ and isinstance(err, io.TextIOWrapper):
        file = io.BufferedWriter(_Lossy(err.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(file, err.encoding, err.errors, line_buffering=True)


class _Closed(io.TextIOBase):
    """Replaces a closed stdout, so that no result is lost silently. Python sets sys.stdout to None, and click then writes nothing."""

    def write(self, _text: str, /) -> int:
        check_stdout()
        return 0


def refuse_what_is_lost() -> None:
    """Make writes to a closed stdout raise OutputError.

    Closed descriptors 0 to 2 become /dev/null: otherwise the next file to be opened would get such a descriptor,
    and with it the messages of native code.
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
    """Raise OutputError if stdout is closed. fix: what the user can do."""
    if stdout_closed():
        msg = f"stdout is closed: {fix}"
        raise OutputError(msg)
