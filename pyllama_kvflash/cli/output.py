"""Write generated text to stdout or a file."""

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pyllama_kvflash.errors import OutputError, UsageError


class Output:
    """Stdout, or a file that is opened at once but emptied only when there is something to write.

    So a run that cannot write fails before it works, and a run that fails has overwritten nothing.
    """

    def __init__(self, name: str | None, inputs: Sequence[Path] = ()) -> None:
        """Open the output. name: None: stdout. inputs: files that must not be overwritten. Raises UsageError and
        OutputError.
        """
        self._path = Path(name) if name is not None else None
        self._begun = False
        self._file: IO[str] | None = None
        if self._path is None:
            if sys.stdout is None:
                msg = "stdout is closed: give a file with -o/--output"
                raise OutputError(msg)
            return
        try:
            self._existed = self._path.exists()
            if any(path.exists() and self._existed and path.samefile(self._path) for path in inputs):
                msg = f"{name} is what the run reads: give another file with -o/--output"
                raise UsageError(msg)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as err:
            raise self._error(err) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None or self._path is None:
            return
        try:
            self._file.close()
        except OSError as err:
            if value is None:  # otherwise the write has raised the error
                raise self._error(err) from None
        if not self._begun and not self._existed:
            self._path.unlink(missing_ok=True)

    @property
    def on_terminal(self) -> bool:
        """Whether what is written is read as it comes."""
        return self._file is None and sys.stdout.isatty()

    def write(self, text: str) -> None:
        """Write text, visible at once. Raises OutputError; on stdout OSError, which `kvflash` translates."""
        if self._file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            if not self._begun and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(0)
            self._begun = True
            self._file.write(text)
            self._file.flush()
        except OSError as err:
            raise self._error(err) from None

    def _error(self, err: OSError) -> OutputError:
        return OutputError(f"{self._path} cannot be written: {err.strerror}")
