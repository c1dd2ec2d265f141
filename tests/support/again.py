"""Tokens that are decoded again: scorers that ask for them, and runs up to such a token."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pyllama_kvflash import KVFlash, View
from pyllama_kvflash.events import Event
from support.runs import Open, feed, out, read, reselects
from support.scorers import Given, Scores

Hot = Callable[[int, int], dict[int, float]]

START = 1250  # 20 chunks, of which those after the first are out
PLACES = {"in a chunk": 1300, "fills a chunk": 1344, "begins a chunk": 1345}  # positions there are with the token


class Shares(Given):
    """What it gives are shares: the newer a chunk, the more, and hardly any; but for what `hot` says: of a text of so many tokens,
    scored for the n-th time.
    """

    name = "shares"
    summary: str | None = "mean"
    shares = True

    def __init__(self, hot: Hot = lambda _n, _nth: {}) -> None:
        super().__init__(self.of)
        self.hot = hot

    def of(self, view: View) -> Scores:
        res = 1e-6 * np.arange(len(view.candidates))
        nth = sum(len(seen.tokens) == len(view.tokens) for seen in self.views) - 1
        for chunk, share in self.hot(len(view.tokens), nth).items():
            res[chunk] = share
        return res


class Restless(Given):
    """Shares that mean nothing, other ones for each text, and all of them much."""

    name = "restless"
    summary: str | None = "mean"
    shares = True

    def __init__(self) -> None:
        super().__init__(lambda view: np.random.default_rng(len(view.tokens)).random(len(view.candidates)))


def once(at: int, *chunks: int, share: float = 0.9) -> Shares:
    """These chunks are asked for by the token with which there are `at`, and by those after it."""
    return Shares(lambda n, _: dict.fromkeys(chunks, share / len(chunks)) if n >= at else {})


def before(opened: Open, at: int, policy: Given, name: str = "qwen3", **options: Any) -> KVFlash:
    """A run that is to decode the token with which there are `at`; the first chunks are out."""
    kv = opened(name, policy=policy, **options)
    read(kv, START)
    feed(kv, at - 1)
    assert {1, 2, 3, 4} <= set(out(kv))
    return kv


def rounds(events: list[Event]) -> list[tuple[int, tuple[int, ...], float]]:
    """Of each scoring: where, what came in, and what was missed."""
    return [(e.pos, e.page_ins, e.missed) for e in reselects(events)]
