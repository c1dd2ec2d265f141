"""What a thread is in the middle of, read from its stack: true however a call was cut off, where a lock would be left held."""

import sys
from types import CodeType


def n_running(code: CodeType, thread: int, owner: object = None) -> int:
    """Return how often a function is on the stack of a thread, given by threading.get_ident().

    owner: count only calls of a method of this object.
    """
    frame, n = sys._current_frames().get(thread), 0  # noqa: SLF001 (there is no other way to look at a thread)
    while frame is not None:
        n += frame.f_code is code and (owner is None or frame.f_locals.get("self") is owner)
        frame = frame.f_back
    return n


def anywhere(code: CodeType) -> bool:
    """Return whether a function is on the stack of any thread."""
    return any(n_running(code, thread) for thread in sys._current_frames())  # noqa: SLF001 (as above)
