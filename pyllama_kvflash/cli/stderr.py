"""Messages that cannot be shown: what they are about goes on after a full disk, and after their reader has gone."""

import io
import sys
from typing import Any


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
