"""Scorers that give what a test says."""

import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_kvflash import View, registry

Scores = npt.NDArray[np.float64]


class Given:
    """A scorer that gives what a function says, and keeps what it was shown."""

    name = "given"
    summary: str | None = None
    query = "last"

    def __init__(self, give: Callable[[View], Any]) -> None:
        self.give = give
        self.views: list[View] = []

    def score(self, view: View) -> Scores:
        self.views.append(view)
        res: Scores = self.give(view)
        return res


def shuffled(seed: int) -> Given:
    """Scores that mean nothing, other ones each time."""
    rng = np.random.default_rng(seed)
    return Given(lambda view: rng.random(len(view.candidates)))


def oldest(view: View) -> Scores:
    """The contrary of recency: what is far back comes in."""
    return -np.arange(len(view.candidates), dtype=np.float64)


def other_ones(view: View) -> Scores:
    """Random scores, the same ones for the same text."""
    return np.random.default_rng(len(view.tokens)).random(len(view.candidates))


def boom(_view: View) -> Scores:
    msg = "no such luck"
    raise ValueError(msg)


def registered(monkeypatch: pytest.MonkeyPatch, **made: Any) -> None:
    """Entry points of a package that is not there."""
    module = types.ModuleType("third_party")
    for name, value in made.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "third_party", module)
    points = {name: EntryPoint(name, f"third_party:{name}", registry.GROUP) for name in made}
    points["gone"] = EntryPoint("gone", "no_such_package:make", registry.GROUP)
    points["qk"] = EntryPoint("qk", "no_such_package:make", registry.GROUP)
    monkeypatch.setattr(registry, "registered", lambda: points)
