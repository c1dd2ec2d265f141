"""Notes of the calls under way: a second call for the same object is refused at once, instead of waiting."""

from collections.abc import Callable, Hashable
from threading import get_ident
from typing import TypeVar

R = TypeVar("R")

Notes = dict[Hashable, tuple[int, object]]
"""The objects in use, each with its thread (threading.get_ident()) and a mark of its call."""


class Taken(Exception):  # noqa: N818 (the caller says what is wrong)
    """Another call uses the same object."""


def noted(notes: Notes, what: Hashable, call: Callable[[], R]) -> R:
    """Make a call, and note that `what` is in use while it runs. Raises Taken if another call has noted the same.

    Ctrl-C may come between any two lines. Between taking a lock and the `try`, it would leave the lock held. So the note is made in
    one step within the `try`, and removed in two places, because Ctrl-C can skip only one of them.
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
