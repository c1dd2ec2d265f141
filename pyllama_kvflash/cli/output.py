"""Write generated text to stdout, a file, a pipe or a device."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pyllama_kvflash.errors import OutputError
from pyllama_kvflash.files import Replacement, is_stream, standard_stream


class Output:
    """Text that goes to stdout, or to a file that is opened at once: a run that cannot write fails before it works.

    A new file is written directly. One that is there stays as it is until close(), which puts the new one in its place;
    if the block raises, or nothing was written, it is kept. A pipe or a device is written to.
    """

    def __init__(self, name: str | None) -> None:
        """Open the output. name: None or "-": stdout. Raises OutputError."""
        self._path = Path(name) if name not in {None, "-"} else None
        self._file: IO[str] | None = None
        self._new: Path | None = None  # made here
        self._replacement: Replacement | None = None
        self._begun = False
        stream = standard_stream(self._path) if self._path is not None else 1
        if stream == 1:
            self._path = None
            if sys.stdout is None:
                msg = "stdout is closed: give a file with -o/--output"
                raise OutputError(msg)
        elif self._path is not None:
            try:
                self._file = self._opened(self._path, stream)
            except OSError as err:
                self._discard()
                raise self._error(err) from None

    def _opened(self, path: Path, stream: int | None) -> IO[str]:
        if stream is not None:
            return os.fdopen(os.dup(stream), "w", encoding="utf-8")
        if is_stream(path):
            return path.open("w", encoding="utf-8")
        try:
            real = Path(os.path.realpath(path))
            file = real.open("x", encoding="utf-8")
        except FileExistsError:
            self._replacement = Replacement(path)
            return self._replacement.path.open("w", encoding="utf-8")
        self._new = real
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            with suppress(OSError):  # the write has raised the error
                self._file.close()
            self._discard()

    @property
    def on_terminal(self) -> bool:
        """Whether what is written is read as it comes."""
        return self._path is None and sys.stdout.isatty()

    def write(self, text: str) -> None:
        """Write text, visible at once in stdout and in a new file. Raises OutputError; on stdout OSError, which
        `kvflash` translates.
        """
        if self._file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            self._begun = self._begun or text != ""
            self._file.write(text)
            self._file.flush()
        except OSError as err:
            raise self._error(err) from None

    def close(self) -> None:
        """Finish the file, and put it in the place of an old one. Harmless when called again. Raises OutputError."""
        if self._file is None or self._file.closed:
            return
        new = self._replacement if self._begun else None
        try:
            self._file.close()
            if new is not None:
                self._replacement = None  # what commit() leaves, it leaves on purpose
                new.commit()
        except OSError as err:
            raise self._error(err) from None
        finally:
            self._discard()

    def _discard(self) -> None:
        """Leave nothing of a file that was not finished, unless it is new and has text."""
        if self._replacement is not None:
            self._replacement.discard()
        elif self._new is not None and not self._begun:
            self._new.unlink(missing_ok=True)

    def _error(self, err: OSError) -> OutputError:
        return OutputError(f"{self._path} cannot be written: {err.strerror}")
