"""How a scorer model's attention is read, against plain numpy: the score of every chunk, and what may not change it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.properties import CHECK
from support.views import OUT, Rows, check_scores, products, random_queries, random_rows, view

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.policy import Qk, QkCos, Queries, Scorer, ZMax, scorers


def zmax(rows: Rows, queries: Sequence[Queries], candidates: Sequence[int]) -> dict[int, float]:
    """By the words of the docstring: z over the candidates, maximum, and half a deviation below the better neighbour."""
    best = dict.fromkeys(candidates, -math.inf)
    for q in queries:
        for of_layer in products(rows, q):
            for of_head in of_layer:
                values = [of_head[c] for c in candidates]
                mean = sum(values) / len(values)
                deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
                for c in candidates:
                    best[c] = max(best[c], (of_head[c] - mean) / deviation if deviation else 0)
    return {c: max(best[c], best.get(c - 1, -math.inf) - 0.5, best.get(c + 1, -math.inf) - 0.5) for c in candidates}


SCORERS = [Qk(), ZMax(), QkCos()]
SCORER_IDS = ["mass", "zmax", "cos"]


@pytest.mark.parametrize("out", OUT.values(), ids=OUT.keys())
@pytest.mark.parametrize("n_query", [1, 3])
def test_zmax_is_what_it_says(out: tuple[int, ...], n_query: int) -> None:
    rows = random_rows(len(out))
    queries = random_queries(rows, n_query)
    candidates = [c for c in range(12) if c not in out]
    check_scores(ZMax().score(view(rows, queries, out)), zmax(rows, queries, candidates))


@given(data=st.data(), seed=st.integers(0, 10**6), n=st.integers(3, 20))
@CHECK
def test_zmax_is_what_it_says_whatever_is_pinned(data: st.DataObject, seed: int, n: int) -> None:
    rows = random_rows(seed, n=n, n_layer=2, n_head=3, n_head_kv=1, n_row=2)
    out = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 2))
    assume(n - len(out) > 1)
    queries = random_queries(rows, 2, seed)
    check_scores(ZMax().score(view(rows, queries, out)), zmax(rows, queries, [c for c in range(n) if c not in out]))


@pytest.mark.parametrize("scorer", SCORERS, ids=SCORER_IDS)
def test_without_queries_or_candidates_there_is_no_score(scorer: Scorer) -> None:
    rows = random_rows()
    none = -2.0 if isinstance(scorer, QkCos) else -np.inf
    for empty in (view(rows), view(rows, random_queries(rows), range(12)), view(None, [[]], range(5)), view(None)):
        assert scorer.score(empty).tolist() == [none] * len(empty.candidates)
    assert rows.asked == []
    nothing = view(None, [[]], touched=np.zeros(0, np.int64), candidates=np.zeros(0, np.bool_))
    assert scorer.score(nothing).shape == (0,)


def test_chunks_that_are_alike_have_the_same_finite_score() -> None:
    """No deviation at all in any head."""
    rows = random_rows()
    rows.rows[:] = rows.rows[:, :1]
    scores = ZMax().score(view(rows, random_queries(rows), (0, 5)))
    found = scores[np.isfinite(scores)]
    assert len(found) == 10
    assert np.ptp(found) < 1e-3


@pytest.mark.parametrize("scorer", SCORERS, ids=SCORER_IDS)
def test_missing_summaries_are_an_error(scorer: Scorer) -> None:
    with pytest.raises(UsageError, match="needs summaries of the keys, and none were kept"):
        scorer.score(view(None, random_queries(random_rows())))


@pytest.mark.parametrize(
    ("share", "calls"),
    [
        (0.0, [[0, 1, 2, 3, 4]]),
        (1.0, [[0, 1], [2, 3, 4]]),
        (2.9, [[0], [1, 2], [3, 4]]),
        (99.0, [[0], [1], [2], [3], [4]]),
    ],
)
def test_layers_are_handed_over_in_as_many_calls_as_pay(
    monkeypatch: pytest.MonkeyPatch, share: float, calls: list[list[int]]
) -> None:
    """One, and one more for each GRAIN of products with chunks, but not more than there are layers. A single one is no thread's."""
    rows = random_rows(n_layer=5)
    queries = random_queries(rows, 2)
    n_products = 12 * 5 * 2 * 4 * 8  # chunks, layers, queries, heads, dimensions
    monkeypatch.setattr(scorers, "GRAIN", int(n_products / share) if share else n_products + 1)
    want, rows.asked = Qk().score(view(rows, queries)), []
    handed: list[list[int]] = []

    def each(f: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for layers in items:
            handed.append([int(i) for i in layers])
            yield f(layers)

    assert np.array_equal(Qk().score(view(rows, queries, each=each)), want)
    assert rows.asked == [(layer, 12) for layer in range(5)]
    assert handed == (calls if len(calls) > 1 else [])
