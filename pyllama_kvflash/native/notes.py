"""Notes of the calls under way: a second one is refused, and does not wait."""

from collections.abc import Callable, Hashable
from threading import get_ident
from typing import TypeVar

R = TypeVar("R")

Notes = dict[Hashable, tuple[int, object]]
"""What is in use, each with the thread that uses it (threading.get_ident()) and a mark of its call."""


class Taken(Exception):  # noqa: N818 (the caller says what is wrong)
    """Another call uses the same."""


def noted(notes: Notes, what: Hashable, call: Callable[[], R]) -> R:
    """Make a call, with a note of what it uses for as long as it runs. Raises Taken if another call has such a note.

    Ctrl-C may come between any two lines. A lock would be left held if it came between taking it and the `try`. So the note is
    made in one step within the `try`, and removed in two places, of which Ctrl-C can skip one.
    """
    mine = get_ident(), object()
    try:
        try:
            if notes.setdefault(what, mine) is not mine:
                raise Taken
            return call()
        finally:
            _remove(notes, what, mine)
    finally:
        _remove(notes, what, mine)


def _remove(notes: Notes, what: Hashable, mine: tuple[int, object]) -> None:
    if notes.get(what) is mine:
        notes.pop(what, None)
