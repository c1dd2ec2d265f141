"""One thread at a time may use an engine, for one call. Only the caller that last changed a sequence may continue it."""

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary, finalize

from pyllama_kvflash import native
from pyllama_kvflash.errors import InUseError, UsageError
from pyllama_kvflash.pool.sequence import PooledSequence

P = ParamSpec("P")
R = TypeVar("R")

_USE, _FREE = "use", "free"
_LOOK_SECONDS = 0.002  # polling interval of close() while a call is under way
_EXIT_SECONDS = 30.0  # the longest wait for a call when Python exits; a call may never return


class Guard:
    """Lets one call at a time use an engine, and closes the engine between two calls.

    The guard uses no lock, because Ctrl-C could leave a lock held: see native.noted().
    """

    def __init__(self, free: Callable[[], None], name: str) -> None:
        """free: a function that frees the engine, and does not refer to the guard. If Ctrl-C interrupts it, the next call frees the
        rest. name: the engine's name, for errors.

        Garbage collection of the guard also frees the engine. `free` keeps the engine's parts alive until then, because the
        garbage collector would free them in any order.
        """
        self.closed = False
        self._closing = False
        self._free = free
        self._name = name
        self._pid = os.getpid()
        self._notes: native.Notes = {}  # by _USE and _FREE
        self._abandoned = finalize(self, _free_here, free, self._pid)
        self._abandoned.atexit = False  # _close_all() waits for calls
        _live[id(self)] = self

    def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make a call that uses the engine. Raises InUseError if another call is under way, and UsageError if the engine is closed."""

        def use() -> R:
            self.check_open()  # once more: from here on no other thread can close it
            return call(*args, **kwargs)

        self.check_open()
        try:
            return native.noted(self._notes, _USE, use)
        except native.Taken:
            raise InUseError(_BY_ITSELF if self._thread(_USE) == get_ident() else _BY_ANOTHER) from None
        finally:
            if self._closing and self._thread(_USE) is None:
                self._finish()

    def check_open(self) -> None:
        """Raise UsageError if the engine is closed, or is about to be."""
        if self._closing:
            msg = f"the engine of {self._name} is closed: open it again"
            raise UsageError(msg)

    def close(self, seconds: float | None = None) -> None:
        """Free the engine. If another thread is in a call, wait for its end. Harmless when called again.

        If this thread is in a call, as in a signal handler, return at once; the engine is then freed when that call ends.
        seconds: the longest wait; None: until the other thread's call ends.
        """
        if os.getpid() != self._pid:
            return  # a forked process: the engine is its parent's
        self._closing = True
        begin = time.monotonic()
        while not self.closed:
            at_work = self._thread(_USE) or self._thread(_FREE)
            if at_work is None:
                self._finish()
            elif at_work == get_ident() or (seconds is not None and time.monotonic() - begin > seconds):
                return
            else:
                time.sleep(_LOOK_SECONDS)

    def _finish(self) -> None:
        """Free the engine, unless that is done or under way."""
        with suppress(native.Taken):
            native.noted(self._notes, _FREE, self._free_once)

    def _free_once(self) -> None:
        if self.closed:
            return
        try:
            self._free()
        except Exception:
            self.closed = True
            raise
        self.closed = True  # not after Ctrl-C: then close() frees the rest
        self._abandoned.detach()

    def _thread(self, what: str) -> int | None:
        """Return the thread that uses or frees the engine, or None."""
        note = self._notes.get(what)
        return note[0] if note else None


def _free_here(free: Callable[[], None], pid: int) -> None:
    """Free an engine, unless this is a forked process."""
    if os.getpid() == pid:
        free()


class Claim:
    """A hold on a sequence across several calls. It lasts until another call takes or changes the sequence."""

    def __init__(self, guard: Guard, sequence: PooledSequence) -> None:
        """Take the sequence from its holder."""
        self._guard = guard
        self._sequence = sequence
        self._mark = sequence.holder = object()  # not the claim, which refers to the guard

    @property
    def holds(self) -> bool:
        """Whether nothing else has taken the sequence."""
        return self._sequence.holder is self._mark

    def check(self) -> None:
        """Raise InUseError if something else has taken the sequence."""
        if not self.holds:
            raise InUseError(_OVERTAKEN)

    def run(self, call: Callable[..., R], *args: Any) -> R:
        """Make a call that continues the sequence. Raises the errors of check() and Guard.run()."""
        return self._guard.run(self._checked, call, args)

    def each(self, events: Iterator[R]) -> Iterator[R]:
        """Yield the events; other callers may use the engine between two of them. Raises the errors of run()."""
        while (event := self.run(next, events, None)) is not None:
            yield event

    def _checked(self, call: Callable[..., R], args: tuple[Any, ...]) -> R:
        self.check()
        return call(*args)


class Guarded(Protocol):
    """An object with an engine's guard."""

    @property
    def guard(self) -> Guard:
        """The engine's guard."""


S = TypeVar("S", bound=Guarded)


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run a method as one call of the engine. Raises InUseError, and UsageError if the engine is closed."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.guard.run(method, self, *args, **kwargs)

    return call


_BY_ANOTHER = "the engine is in use by another thread: wait until that call has returned"
_BY_ITSELF = (
    "the engine is in use by another call of this thread: wait until that call has returned, and make none in a callback or a"
    " signal handler"
)
_OVERTAKEN = (
    "another call has taken or changed this sequence in the meantime, so this one cannot continue: finish one before the next, or"
    " use a sequence for each (`n_parallel`)"
)

_live: WeakValueDictionary[int, Guard] = WeakValueDictionary()


@atexit.register
def _close_all() -> None:
    """Close all engines when Python ends: the library is unloaded then, and threads may still compute."""
    native.interrupt(True)
    for guard in [ref() for ref in _live.valuerefs()]:
        if guard is not None:
            with suppress(Exception):  # close the others anyway
                guard.close(_EXIT_SECONDS)
