"""Write generated text to stdout, a file, a pipe or a device."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pyllama_kvflash.cli.streams import check_stdout, stdout_closed
from pyllama_kvflash.errors import OutputError, unwritten
from pyllama_kvflash.files import Replacement, is_stream, standard_stream


class Output:
    """Text that goes to stdout or to a file. The file is opened at once, so that a run that cannot write fails before it starts.

    A new file is written directly. An existing file stays as it is until close() replaces it; it is kept if the block raises,
    or if nothing was written. A pipe or a device is written to directly.
    """

    def __init__(self, name: str | None, on_error: Callable[[OutputError], None] | None = None) -> None:
        """Open the output. Raises OutputError.

        name: None or "-": stdout. on_error: called once if writing to the open file fails, after which text is dropped; None:
        OutputError is raised instead.
        """
        self._on_error = on_error
        self._failed = False
        self._path = Path(name) if name not in {None, "-"} else None
        self._file: IO[str] | None = None
        self._new: Path | None = None  # a file that was created here
        self._replacement: Replacement | None = None
        self._begun = False
        stream = standard_stream(self._path) if self._path is not None else 1
        if stream == 1:
            self._path = None
            check_stdout("give a file with -o/--output")
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
    def is_seen(self) -> bool:
        """Whether the text is on a terminal, or in the same file as stderr, so that a line on stderr would split a sentence."""
        return self._path is None and (sys.stdout.isatty() or _is_one(sys.stdout, sys.stderr))

    def write(self, text: str) -> None:
        """Write text, which is visible at once on stdout and in a new file. Raises OutputError for a file if there is no on_error,
        and for stdout an OSError, which `kvflash` translates.
        """
        if self._file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        if self._failed:
            return
        try:
            self._file.write(text)
            self._file.flush()
            self._begun = self._begun or text != ""
        except OSError as err:
            self._fail(self._error(err))

    def close(self) -> None:
        """Finish the file, and replace an old one. Harmless when called again.

        Raises OutputError if there is no on_error.
        """
        if self._file is None or self._file.closed:
            return
        new = self._replacement if self._begun else None
        try:
            self._file.close()
            if new is not None:
                self._replacement = None  # if commit() leaves a file, that is on purpose
                new.commit()
        except OSError as err:
            self._fail(self._error(err))
        finally:
            self._discard()

    def _discard(self) -> None:
        """Remove an unfinished file, unless it is new and has text."""
        if self._replacement is not None:
            self._replacement.discard()
        elif self._new is not None and not self._begun:
            self._new.unlink(missing_ok=True)

    def _fail(self, error: OutputError) -> None:
        if self._on_error is None:
            raise error from None
        self._failed = True
        if self._file is not None:
            with suppress(OSError):  # the same error again
                self._file.close()
        self._discard()
        self._on_error(error)

    def _error(self, err: OSError) -> OutputError:
        return OutputError(unwritten(self._path, err))


class Answer(Output):
    """The answer of a run. If its file cannot be written, as on a full disk, the whole answer goes to stdout at the end."""

    def __init__(self, name: str | None, on_error: Callable[[OutputError], None]) -> None:
        """Open the output, as Output does. If stdout is closed, a file that cannot be written raises OutputError."""
        super().__init__(name, None if stdout_closed() else on_error)
        self._text: list[str] = []

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)
        self._rescue()

    def write(self, text: str) -> None:
        """Write text, as Output does."""
        self._text.append(text)
        super().write(text)

    def close(self) -> None:
        """Finish the file or, if writing it failed, write the whole answer to stdout. Harmless when called again."""
        super().close()
        self._rescue()

    def _fail(self, error: OutputError) -> None:
        self._begun = False  # half an answer is of no use beside the whole one
        super()._fail(OutputError(f"{error}; the answer is on stdout") if self._on_error else error)

    def _rescue(self) -> None:
        if self._failed:
            text, self._text = "".join(self._text), []
            sys.stdout.write(text)
            sys.stdout.flush()


def _is_one(a: IO[str], b: IO[str]) -> bool:
    """Return whether two streams write to the same file or pipe."""
    try:
        return os.path.sameopenfile(a.fileno(), b.fileno())
    except (OSError, ValueError):  # not files, or closed
        return False
