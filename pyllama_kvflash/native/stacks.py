"""What a thread is in the middle of, read from its stack: true however a call was cut off, where a lock would be left held."""

import sys
from threading import get_ident
from types import CodeType

Notes = dict[CodeType, list[int]]
"""By a method of an object: the thread that runs it."""


def n_running(code: CodeType, thread: int, owner: object = None) -> int:
    """Return how often a function is on the stack of a thread, given by threading.get_ident().

    owner: count only calls of a method of this object.
    """
    frame, n = sys._current_frames().get(thread), 0  # noqa: SLF001 (there is no other way to look at a thread)
    while frame is not None:
        n += frame.f_code is code and (owner is None or frame.f_locals.get("self") is owner)
        frame = frame.f_back
    return n


def noted(notes: Notes, method: CodeType, owner: object) -> bool:
    """Note that this thread runs a method of an object, unless another note of it counts: that of a thread whose stack it is on.

    Returns whether it was noted. The method calls this, and takes the note away; one that was cut off need not. (Two threads that
    find such a note at the same instant may both be told so.)
    """
    mine = [get_ident()]
    while (other := notes.setdefault(method, mine)) is not mine:  # setdefault() is atomic
        if n_running(method, other[0], owner) > (other == mine):  # more than the one that asks
            return False
        if notes.get(method) is other:  # it was cut off before it could take its note away
            notes.pop(method, None)
    return True


def anywhere(code: CodeType) -> bool:
    """Return whether a function is on the stack of any thread."""
    return any(n_running(code, thread) for thread in sys._current_frames())  # noqa: SLF001 (as above)
