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

_LOOK_SECONDS = 0.1  # between two updates of the bar while waiting for a text


class Ahead:
    """Reads tokens in a thread. Nothing else may use the engine from begin() until settle() or stop() returns."""

    def __init__(self, kv: KVFlash, reporter: Reporter, on_read: Seconds, on_part: Seconds) -> None:
        """on_read: called in the thread with the seconds that reading a text took. on_part: the same, if only a part was read."""
        self._kv, self._reporter, self._on_read, self._on_part = kv, reporter, on_read, on_part
        self._ended = threading.Event()  # Thread.join() does not wait again once Ctrl-C has ended it (Python 3.11)
        self.reads = False  # whether a text was begun, and neither settle() nor stop() was called since
        self.progress: Prefill | None = None  # what was read so far

    def begin(self, tokens: Tokens) -> None:
        """Start reading tokens, which follow those in the context. tokens: (n,) int32."""
        self.progress = None
        self._ended.clear()
        thread = threading.Thread(target=self._run, args=(tokens,), name="kvflash-ahead", daemon=True)
        with suppress(RuntimeError):  # no memory for a thread: the text is read with the message
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
        except (KVFlashError, MemoryError):  # the rest is read with the message, and a lasting error is reported then
            self._on_part(time.perf_counter() - start)
            return
        with suppress(KVFlashError, MemoryError):  # saving is tried again at the end
            self._on_read(time.perf_counter() - start)

    def settle(self) -> None:
        """Show a bar until the text is read.

        Within native.interruptible(), Ctrl-C stops the reading. A second Ctrl-C raises KeyboardInterrupt: call stop() then.
        """
        if not self.reads:
            return
        with self._reporter.prefilling() as bar:
            while not self._ended.wait(_LOOK_SECONDS):
                if self.progress is not None:
                    bar(self.progress)
        self.reads = False

    def stop(self) -> None:
        """Stop reading. The tokens read so far stay in the context. Ctrl-C takes effect only after the stop."""
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
