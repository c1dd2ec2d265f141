"""What a scorer is shown, with products in plain numpy."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.policy import Queries, View

Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.float64]  # layer, chunk, head of K, row, dimension
CHUNK = 16


@dataclasses.dataclass
class Rows:
    """Products with the rows of each chunk's summary, as native.Summaries gives them, in plain numpy."""

    rows: Keys
    n_head: int
    asked: list[tuple[int, int | None]] = dataclasses.field(default_factory=list)

    @property
    def n_layer(self) -> int:
        return len(self.rows)

    def score(self, layer: int, q: Floats, n: int | None = None) -> Floats:
        self.asked.append((layer, n))
        rows = self.rows[layer, :n]
        group = self.n_head // rows.shape[1]
        res = [(rows[:, h // group] @ q[h]).max(axis=1) for h in range(self.n_head)]
        return np.array(res, np.float32).reshape(self.n_head, len(rows))

    def mass(self, layers: Sequence[int], queries: Queries, scales: Sequence[float], n: int | None = None) -> Floats:
        found = [self.mass_of(*each, n) for each in zip(layers, queries, scales, strict=True)]
        return np.array(found, np.float32).reshape(len(found), -1)

    def mass_of(self, layer: int, q: Floats, scale: float, n: int | None) -> npt.NDArray[np.float64]:
        self.asked.append((int(layer), n))
        rows = self.rows[layer, :n].astype(np.float64)
        group = self.n_head // rows.shape[1]
        res = np.zeros((len(q), len(rows)))
        for i, h in itertools.product(range(len(q)), range(self.n_head)):
            logits = scale * (rows[:, h // group] @ q[i, h].astype(np.float64))
            weights = np.exp(logits - logits.max(initial=-np.inf))
            res[i] += weights.sum(axis=1) / weights.sum()
        most: npt.NDArray[np.float64] = res.max(axis=0, initial=0)
        return most


def random_rows(
    seed: int = 0, *, n_layer: int = 3, n: int = 12, n_head: int = 4, n_head_kv: int = 2, n_row: int = 4, d: int = 8
) -> Rows:
    return Rows(np.random.default_rng(seed).standard_normal((n_layer, n, n_head_kv, n_row, d)), n_head)


def random_queries(rows: Rows, n: int = 1, seed: int = 1) -> list[Queries]:
    rng = np.random.default_rng(seed)
    size = (rows.n_layer, rows.n_head, rows.rows.shape[-1])
    return [list((3 * rng.standard_normal(size)).astype(np.float32)) for _ in range(n)]


def view(rows: Rows | None, queries: Sequence[Queries] = (), out: Iterable[int] = (), **more: Any) -> View:
    """All chunks are candidates but those in `out`."""
    n = rows.rows.shape[1] if rows else 5
    candidates = np.ones(n, np.bool_)
    candidates[list(out)] = False
    return View(
        **{
            "tokens": np.zeros(n * CHUNK, np.int32),
            "chunk": CHUNK,
            "touched": np.arange(n, dtype=np.int64),
            "candidates": candidates,
            "queries": queries,
            "summaries": rows,
            **more,
        }
    )


def products(rows: Rows, q: Queries) -> npt.NDArray[np.float64]:
    """(layer, head, chunk): the largest q.c/sqrt(d), one number at a time."""
    n_layer, n, n_head_kv, _, d = rows.rows.shape
    group = rows.n_head // n_head_kv
    res = np.empty((n_layer, rows.n_head, n))
    for layer in range(n_layer):
        for h in range(rows.n_head):
            for c in range(n):
                res[layer, h, c] = max(
                    float(np.dot(q[layer][h], row)) / math.sqrt(d) for row in rows.rows[layer, c, h // group]
                )
    return res


def check_scores(
    scores: npt.NDArray[np.float64], want: dict[int, float], other: float = -np.inf, atol: float = 1e-4
) -> None:
    assert scores.dtype == np.float64
    full = np.full(len(scores), other)
    full[list(want)] = list(want.values())
    np.testing.assert_allclose(scores, full, rtol=1e-4, atol=atol)


OUT = {
    "all are candidates": (),
    "sinks and tail": (0, 10, 11),
    "a pin in the middle": (0, 5, 11),
    "pins side by side, and alone": (0, 1, 3, 4, 7, 9, 11),
    "no neighbours": (0, 2, 4, 6, 8, 10),
    "two at the ends": tuple(range(1, 11)),
}
