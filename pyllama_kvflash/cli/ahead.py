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
        self._ended = threading.Event()  # Thread.join() does not wait again once Ctrl-C has ended it (Python 3.11)
        self.reads = False  # whether a text was begun, and neither waited for nor stopped
        self.progress: Prefill | None = None  # what was read so far

    def begin(self, tokens: Tokens) -> None:
        """Read these tokens (n,) int32 after what is in the context."""
        self.progress = None
        self._ended.clear()
        thread = threading.Thread(target=self._run, args=(tokens,), name="kvflash-ahead", daemon=True)
        with suppress(RuntimeError):  # there is no memory for a thread: the text is read with the message
            thread.start()
            self.reads = True

    def _run(self, tokens: Tokens) -> None:
        try:
            self._read(tokens)
        finally:
            self._ended.set()

    def _read(self, tokens: Tokens) -> None:
        start = time.perf_counter()
        try:
            for event in self._kv.prefill(tokens):
                if isinstance(event, Prefill):
                    self.progress = event
        except (KVFlashError, MemoryError):  # what is missing is read with the message, which says what is wrong
            self._on_part(time.perf_counter() - start)
            return
        with suppress(KVFlashError, MemoryError):  # it is tried again at the end
            self._on_read(time.perf_counter() - start)

    def settle(self) -> None:
        """Wait until the text is read, with a bar. Ctrl-C stops it where native.interruptible() is in effect; pressed twice, it
        leaves that to stop().
        """
        if not self.reads:
            return
        with self._reporter.prefilling() as bar:
            while not self._ended.wait(_LOOK_SECONDS):
                if self.progress is not None:
                    bar(self.progress)
        self.reads = False

    def stop(self) -> None:
        """Stop reading; what was read stays in the context. Ctrl-C takes effect after that."""
        if not self.reads:
            return
        native.interrupt(True)
        pressed: KeyboardInterrupt | None = None
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except KeyboardInterrupt as err:
                pressed = err
        native.interrupt(False)
        self.reads = False
        if pressed:
            raise pressed
