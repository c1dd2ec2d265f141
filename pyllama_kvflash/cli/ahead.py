"""Read a text while a person types what to ask about it."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pyllama_kvflash import native
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.events import Prefill
from pyllama_kvflash.native import Tokens

Seconds = Callable[[float], None]

_LOOK_SECONDS = 0.1  # between two looks at a text that is waited for


class Ahead:
    """Reads in a thread. The engine is its own until settle() or stop() returns."""

    def __init__(self, kv: KVFlash, reporter: Reporter, on_read: Seconds, on_part: Seconds) -> None:
        """on_read, on_part: called in the thread with the seconds that a text took, or a part of it that was stopped."""
        self._kv, self._reporter, self._on_read, self._on_part = kv, reporter, on_read, on_part
        self._thread: threading.Thread | None = None
        self._last: Prefill | None = None  # what was read so far

    @property
    def reads(self) -> bool:
        """Whether a text was begun, and neither waited for nor stopped."""
        return self._thread is not None

    def begin(self, tokens: Tokens) -> None:
        """Read these tokens (n,) int32 after what is in the context."""
        self._last = None
        self._thread = threading.Thread(target=self._read, args=(tokens,), name="kvflash-ahead", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there is no memory for a thread: the text is read with the message
            self._thread = None

    def _read(self, tokens: Tokens) -> None:
        start = time.perf_counter()
        try:
            for event in self._kv.prefill(tokens):
                if isinstance(event, Prefill):
                    self._last = event
        except (KVFlashError, MemoryError):  # what is missing is read with the message, which says what is wrong
            self._on_part(time.perf_counter() - start)
            return
        with suppress(KVFlashError, MemoryError):  # it is tried again at the end
            self._on_read(time.perf_counter() - start)

    def settle(self) -> None:
        """Wait until the text is read, with a bar. Ctrl-C stops it where native.interruptible() is in effect."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._reporter.prefilling() as bar:
            while thread.is_alive():
                if self._last is not None:
                    bar(self._last)
                thread.join(_LOOK_SECONDS)

    def stop(self) -> None:
        """Stop reading; what was read stays in the context."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        native.interrupt(True)
        try:
            thread.join()
        finally:
            native.interrupt(False)
