"""Scorers and schedule against plain numpy: every chunk's score, and how much of the time scoring may take."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.policy import (
    AGGREGATES,
    Lru,
    Qk,
    QkCos,
    QkZmax,
    Queries,
    Schedule,
    Scorer,
    Scoring,
    View,
    n_queries,
    scorers,
)
from pyllama_kvflash.policy.schedule import SELDOM

CHECK = settings(derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])

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


SCORERS = [Qk(), QkZmax(), QkZmax(aggregate="layer-mean"), QkCos()]
SCORER_IDS = ["mass", "zmax", "layer-mean", "cos"]


def check_scores(
    scores: npt.NDArray[np.float64], want: dict[int, float], other: float = -np.inf, atol: float = 1e-4
) -> None:
    assert scores.dtype == np.float64
    full = np.full(len(scores), other)
    full[list(want)] = list(want.values())
    np.testing.assert_allclose(scores, full, rtol=1e-4, atol=atol)


#
# qk
#

OUT = {
    "all are candidates": (),
    "sinks and tail": (0, 10, 11),
    "a pin in the middle": (0, 5, 11),
    "pins side by side, and alone": (0, 1, 3, 4, 7, 9, 11),
    "no neighbours": (0, 2, 4, 6, 8, 10),
    "two at the ends": tuple(range(1, 11)),
}


def mass(
    rows: Rows,
    queries: Sequence[Queries],
    candidates: Sequence[int],
    n: int,
    scales: Sequence[float] | None = None,
) -> dict[int, float]:
    """By the words of the docstring, of n chunks: each head's softmax over all their rows, of a layer's queries the largest sum over
    its heads; summed over layers, as a share of what all heads have to give.
    """
    n_layer, _, n_head_kv, n_row, d = rows.rows.shape
    of_chunk = [0.0] * n
    for layer in range(n_layer):
        scale = scales[layer] if scales else 1 / math.sqrt(d)
        each = []
        for q in queries:
            sums = [0.0] * n
            for h in range(rows.n_head):
                keys = rows.rows[layer, :n, h // (rows.n_head // n_head_kv)]
                weights = [
                    [math.exp(scale * float(np.dot(q[layer][h], keys[c, r]))) for r in range(n_row)] for c in range(n)
                ]
                total = sum(map(sum, weights))
                sums = [x + sum(w) / total for x, w in zip(sums, weights, strict=True)]
            each.append(sums)
        of_chunk = [x + max(y) for x, y in zip(of_chunk, zip(*each, strict=True), strict=True)]
    return {c: of_chunk[c] / n_layer / rows.n_head for c in candidates}


CLOSE = Rows(np.zeros((1, 1, 1, 1, 1)), 1)  # in place of all keys: without `rerank` they are not looked at


@pytest.mark.parametrize("out", OUT.values(), ids=OUT.keys())
@pytest.mark.parametrize("n_query", [1, 3])
@pytest.mark.parametrize("scales", [None, (0.5, 0.05, 1.0)], ids=["usual scale", "scales"])
@pytest.mark.parametrize("close", [True, False], ids=["question", "decode"])
def test_mass_is_what_it_says(
    out: tuple[int, ...], n_query: int, scales: tuple[float, ...] | None, close: bool
) -> None:
    rows = random_rows(len(out))
    queries = random_queries(rows, n_query)
    candidates = [c for c in range(12) if c not in out]
    seen = view(rows, queries, out, n_whole=12, scales=scales or (), keys=CLOSE if close else None)
    found = Qk(rerank=0).score(seen)
    check_scores(found, mass(rows, queries, candidates, 12, scales), atol=1e-6)


@given(data=st.data(), seed=st.integers(0, 10**6), n=st.integers(2, 20))
@CHECK
def test_mass_is_what_it_says_whatever_is_pinned(data: st.DataObject, seed: int, n: int) -> None:
    rows = random_rows(seed, n=n, n_layer=2, n_head=3, n_head_kv=1, n_row=2)
    out = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    n_whole = data.draw(st.integers(0, n))
    candidates = [c for c in range(n) if c not in out]
    queries = random_queries(rows, 2, seed)
    found = Qk(rerank=0).score(view(rows, queries, out, n_whole=n_whole, keys=CLOSE))
    check_scores(found, mass(rows, queries, candidates, max(n_whole, candidates[-1] + 1)), atol=1e-6)


@pytest.mark.parametrize(("n_layer", "n_head"), [(1, 1), (1, 4), (3, 4), (5, 2)])
def test_the_shares_of_a_query_sum_up_to_one(n_layer: int, n_head: int) -> None:
    """No more is given away than there is, whatever the candidates are: what they lack, the others have."""
    rows = random_rows(n_layer=n_layer, n_head=n_head, n_head_kv=1)
    queries = random_queries(rows)
    assert Qk.shares
    every = Qk().score(view(rows, queries))
    assert every.sum() == pytest.approx(1, rel=1e-5)
    some = Qk().score(view(rows, queries, (0, 7, 11), n_whole=12))
    kept = np.isfinite(some)
    assert np.flatnonzero(~kept).tolist() == [0, 7, 11]
    np.testing.assert_allclose(some[kept], every[kept], rtol=1e-5)
    assert not any(getattr(scorer, "shares", False) for scorer in (Lru(), QkZmax(), QkCos()))


def test_mass_prefers_what_is_looked_at_to_what_stands_out() -> None:
    """Seven of eight heads put most of their attention on chunk 3, a little on some others; one head, which looks at its sink,
    likes chunk 8 much more than all other candidates. z is relative to a head's own deviation, so chunk 8 wins by it.
    """
    n, d = 12, 2
    rows = Rows(np.zeros((1, n, 8, 1, d)), 8)
    queries = [[np.tile(np.array([1.0, 0.0], np.float32), (8, 1))]]
    noise = np.random.default_rng(0).uniform(0, 2, (n, 7))
    rows.rows[0, :, :7, 0, 0] = noise
    rows.rows[0, 3, :7, 0, 0] = 6
    rows.rows[0, 0, 7, 0, 0] = 20
    rows.rows[0, 8, 7, 0, 0] = 4
    seen = view(rows, queries, (0,), n_whole=n)
    assert int(np.argmax(Qk().score(seen))) == 3
    assert int(np.argmax(QkZmax().score(seen))) == 8


def test_what_is_no_candidate_takes_its_share() -> None:
    """A head that looks at its sink, or at the newest chunks, has little to say about the others."""
    rows = random_rows(n_layer=1)
    queries = random_queries(rows)
    before = Qk().score(view(rows, queries, (0, 10, 11), n_whole=12))
    without = Qk().score(view(rows, queries, (0, 10, 11)))  # those behind the last candidate are not known to be there
    rows.rows[:, 11] *= 0
    rows.rows[:, 11] += 5 * np.stack([queries[0][0][2 * h] for h in range(2)])[None, :, None, :]
    after = Qk().score(view(rows, queries, (0, 10, 11), n_whole=12))
    inner = slice(1, 10)
    assert (after[inner] < before[inner]).all()
    assert np.array_equal(Qk().score(view(rows, queries, (0, 10, 11))), without)


def test_a_scale_of_a_layer_is_used_as_it_is() -> None:
    """Not 1/sqrt(d), which some models do not have."""
    rows = random_rows()
    queries = random_queries(rows, 2)
    usual = Qk().score(view(rows, queries))
    same = Qk().score(view(rows, queries, scales=[8**-0.5] * 3))
    np.testing.assert_allclose(same, usual, rtol=1e-5)
    assert not np.allclose(Qk().score(view(rows, queries, scales=[1.0] * 3)), usual)
    flat = Qk().score(view(rows, queries, scales=[0.0] * 3))
    np.testing.assert_allclose(flat, 1 / 12, rtol=1e-5)  # each head's, of 12 chunks


@dataclasses.dataclass
class AllKeys:
    """All keys of each chunk, as native.Keys gives their products."""

    keys: Keys
    asked: set[int] = dataclasses.field(default_factory=set)

    def score(self, layer: int, q: Floats, chunks: Sequence[int], scale: float = 0.0, edge: int = 0) -> Floats:
        self.asked |= set(chunks)
        group, n = q.shape[1] // self.keys.shape[2], self.keys.shape[3]
        parts = [(0, n), (0, edge), (n - edge, n)] if edge else [(0, n)]
        found = np.empty((len(parts), q.shape[0] * q.shape[1], len(chunks)), np.float32)
        for part, (begin, end) in enumerate(parts):
            for i, x in enumerate(q.astype(np.float64).reshape(-1, q.shape[2])):
                head = i % q.shape[1] // group
                for j, chunk in enumerate(chunks):
                    products = self.keys[layer, chunk, head, begin:end] @ x
                    found[part, i, j] = np.log(np.exp(scale * products).sum()) if scale else products.max()
        return found if edge else found[0]


@pytest.mark.parametrize("n_query", [1, 2, 9])
@pytest.mark.parametrize(("room", "n_best"), [(2, 6), (1, 3), (3, 9)])
def test_the_best_are_ranked_again_by_all_their_keys(room: int, n_best: int, n_query: int) -> None:
    """By their mass among them and what is no candidate; what was not looked at stays below, in the order that it had. A best one
    may have more by a neighbour's keys at their border, never less.
    """
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((2, 16, 2, CHUNK, 8))
    rows, out = Rows(keys.mean(axis=3, keepdims=True), 4), (0, 14, 15)
    queries, exact = random_queries(rows, n_query), AllKeys(keys)
    seen = view(rows, queries, out, room=room, n_whole=16)
    before = Qk().score(seen)
    after = Qk(rerank=3).score(dataclasses.replace(seen, keys=exact))
    best = sorted(np.argsort(-before)[:n_best].tolist())
    assert exact.asked == {*best, *out}
    among = sorted({*best, *out})
    want = mass(Rows(keys[:, among], 4), queries, range(len(among)), len(among))
    alone = [c for c in best if c - 1 not in best and c + 1 not in best]
    np.testing.assert_allclose(after[alone], [want[among.index(c)] for c in alone], rtol=1e-4)
    assert all(after[c] >= want[among.index(c)] * (1 - 1e-4) for c in best)
    rest = [c for c in range(1, 14) if c not in best and c - 1 not in best and c + 1 not in best]
    if rest:
        assert after[rest].max() <= min(want[among.index(c)] for c in best) * (1 + 1e-4)
        assert np.argsort(after[rest]).tolist() == np.argsort(before[rest]).tolist()
    assert np.isneginf(after[list(out)]).all()


@pytest.mark.parametrize(("at", "beyond"), [(0, 5), (CHUNK - 1, 7), (CHUNK // 2, None)])
def test_what_is_looked_at_near_a_border_counts_beyond_it(at: int, beyond: int | None) -> None:
    """One key of chunk 6 has all the attention: so the chunk beyond the border that it is near is wanted half as much, and no other."""
    keys = np.zeros((1, 12, 1, CHUNK, 2))
    keys[0, 6, 0, at] = 20
    rows = Rows(keys.mean(axis=3, keepdims=True), 1)
    q = [[np.ones((1, 2), np.float32)]]
    qk = Qk(rerank=4)
    found = qk.score(view(rows, q, (0, 11), room=2, n_whole=12, keys=AllKeys(keys)))
    assert found[6] == pytest.approx(1)
    hot = {int(c): float(found[c]) for c in np.flatnonzero(found > 0.1)}
    assert hot == pytest.approx({6: 1.0} | ({beyond: 0.5} if beyond else {}))
    decoding = qk.score(view(rows, q, (0, 11), room=2, n_whole=12))
    assert np.count_nonzero(decoding > 0.1) <= 1
    pinned = qk.score(view(rows, q, (0, beyond or 5, 11), room=2, n_whole=12, keys=AllKeys(keys)))
    assert np.isneginf(pinned[beyond or 5])


def test_nothing_is_ranked_again_where_it_cannot_matter() -> None:
    """All of it fits, there is no room at all, nobody asked, or the summaries are all keys."""
    rows = random_rows()
    queries, keys = random_queries(rows), AllKeys(rows.rows)
    for qk, room in ((Qk(), 12), (Qk(), 0), (Qk(rerank=0), 2), (Qk(rerank=1), 2), (Qk("exact"), 2)):
        qk.score(view(rows, queries, room=room, keys=keys, n_whole=12))
    assert keys.asked == set()


#
# qk-zmax
#


@pytest.mark.parametrize("out", OUT.values(), ids=OUT.keys())
@pytest.mark.parametrize("n_query", [1, 3])
def test_zmax_is_what_it_says(out: tuple[int, ...], n_query: int) -> None:
    rows = random_rows(len(out))
    queries = random_queries(rows, n_query)
    candidates = [c for c in range(12) if c not in out]
    check_scores(QkZmax().score(view(rows, queries, out)), zmax(rows, queries, candidates))


@given(data=st.data(), seed=st.integers(0, 10**6), n=st.integers(3, 20))
@CHECK
def test_zmax_is_what_it_says_whatever_is_pinned(data: st.DataObject, seed: int, n: int) -> None:
    rows = random_rows(seed, n=n, n_layer=2, n_head=3, n_head_kv=1, n_row=2)
    out = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 2))
    assume(n - len(out) > 1)
    queries = random_queries(rows, 2, seed)
    check_scores(QkZmax().score(view(rows, queries, out)), zmax(rows, queries, [c for c in range(n) if c not in out]))


def test_a_pin_in_the_middle_is_as_if_it_were_not_there() -> None:
    """The candidates on both sides of it, taken out one by one, and as a slice: the same but for what is a neighbour."""
    rows = random_rows(n=12)
    queries = random_queries(rows)
    scores = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorers, "HALO", np.inf)
        scores["mask"] = QkZmax().score(view(rows, queries, (0, 5, 11)))
        kept = [c for c in range(11) if c != 5]
        scores["slice"] = QkZmax().score(view(Rows(rows.rows[:, kept], 4), queries, (0,)))
    np.testing.assert_allclose(scores["mask"][kept[1:]], scores["slice"][1:], rtol=1e-5)
    assert len(scores["slice"]) == 10


def test_pins_do_not_count_in_the_mean_nor_as_neighbours() -> None:
    rows = random_rows()
    queries = random_queries(rows)
    scores = QkZmax().score(view(rows, queries, (5,)))
    rows.rows[:, 5] *= 1e3
    assert np.array_equal(QkZmax().score(view(rows, queries, (5,))), scores)
    assert not np.array_equal(QkZmax().score(view(rows, queries, (4,))), scores)


def test_a_neighbour_of_the_best_is_half_a_deviation_below_it() -> None:
    rows = Rows(np.zeros((1, 9, 1, 1, 2)), 1)
    rows.rows[0, 4] = 1
    scores = QkZmax().score(view(rows, [[np.ones((1, 2), np.float32)]]))
    best = math.sqrt(8)  # of nine, one is one and the others zero
    low = -1 / best
    assert scorers.HALO == 0.5
    np.testing.assert_allclose(scores, [low, low, low, best - 0.5, best, best - 0.5, low, low, low], rtol=1e-5)
    assert QkZmax(aggregate="layer-mean").score(view(rows, [[np.ones((1, 2), np.float32)]])).tolist().count(0) == 8


@pytest.mark.parametrize("out", [(), (0, 5, 11)])
def test_layer_mean_is_what_it_says(out: tuple[int, ...]) -> None:
    """The mean over layers of the maximum over heads; no halo."""
    rows = random_rows()
    queries = random_queries(rows, 2)
    best = np.max([products(rows, q).max(axis=1).mean(axis=0) for q in queries], axis=0)
    check_scores(
        QkZmax(aggregate="layer-mean").score(view(rows, queries, out)), {c: best[c] for c in range(12) if c not in out}
    )


@pytest.mark.parametrize(
    "scorer", [QkZmax(), QkZmax(aggregate="layer-mean"), QkCos()], ids=["zmax", "layer-mean", "cos"]
)
def test_of_several_queries_the_best_counts(scorer: Scorer) -> None:
    rows = random_rows()
    queries = random_queries(rows, 4)
    each = [scorer.score(view(rows, [q], (0, 6))) for q in queries]
    assert not np.array_equal(each[0], each[1])
    assert np.array_equal(scorer.score(view(rows, queries, (0, 6))), np.max(each, axis=0))
    assert np.array_equal(scorer.score(view(rows, queries[::-1], (0, 6))), np.max(each, axis=0))


def test_what_one_head_looks_for_is_found_by_zmax_and_drowned_in_the_mean() -> None:
    """One of 32 heads retrieves; the others have large scores that say nothing, in its layer too."""
    rng = np.random.default_rng(4)
    n_layer, n, n_head, d = 4, 40, 8, 16
    rows = Rows(rng.standard_normal((n_layer, n, n_head, 1, d)), n_head)
    queries = [list((8 * rng.standard_normal((n_layer, n_head, d))).astype(np.float32))]
    quiet = rng.standard_normal(d).astype(np.float32)
    queries[0][2][5] = quiet / np.linalg.norm(quiet)  # small, as all its scores are
    rows.rows[2, 17, 5, 0] = 8 * queries[0][2][5]  # the key that it looks for
    assert int(np.argmax(QkZmax().score(view(rows, queries)))) == 17
    mean = QkZmax(aggregate="layer-mean").score(view(rows, queries))
    assert np.count_nonzero(mean > mean[17]) > 5


def test_a_chunk_that_is_no_candidate_has_no_score() -> None:
    rows = random_rows()
    out = (0, 3, 11)
    for scorer in SCORERS:
        none = -2.0 if isinstance(scorer, QkCos) else -np.inf
        scores = scorer.score(view(rows, random_queries(rows), out))
        assert scores.shape == (12,)
        assert np.array_equal(scores == none, np.isin(np.arange(12), out))
        assert np.isfinite(scores[[c for c in range(12) if c not in out]]).all()


def test_nothing_behind_the_last_candidate_is_looked_at() -> None:
    """The last chunks have no summary yet."""
    rows = random_rows()
    for scorer in SCORERS:
        scorer.score(view(rows, random_queries(rows), (0, 9, 10, 11)))
    assert rows.asked == [(layer, 9) for _ in SCORERS for layer in range(3)]


@pytest.mark.parametrize("scorer", SCORERS, ids=SCORER_IDS)
def test_without_queries_or_candidates_there_is_no_score(scorer: Scorer) -> None:
    rows = random_rows()
    none = -2.0 if isinstance(scorer, QkCos) else -np.inf
    for empty in (view(rows), view(rows, random_queries(rows), range(12)), view(None, [[]], range(5)), view(None)):
        assert scorer.score(empty).tolist() == [none] * len(empty.candidates)
    assert rows.asked == []
    nothing = view(None, [[]], touched=np.zeros(0, np.int64), candidates=np.zeros(0, np.bool_))
    assert scorer.score(nothing).shape == (0,)


@pytest.mark.parametrize("scorer", SCORERS, ids=SCORER_IDS)
@pytest.mark.parametrize("chunk", [0, 6, 11])
def test_a_single_candidate_has_a_finite_score(scorer: Scorer, chunk: int) -> None:
    rows = random_rows()
    scores = scorer.score(view(rows, random_queries(rows), [c for c in range(12) if c != chunk]))
    assert np.isfinite(scores[chunk])
    assert int(np.argmax(scores)) == chunk
    assert scores[chunk] == 0 or not isinstance(scorer, QkZmax) or scorer.aggregate != "zmax"


def test_chunks_that_are_alike_have_the_same_finite_score() -> None:
    """No deviation at all in any head."""
    rows = random_rows()
    rows.rows[:] = rows.rows[:, :1]
    scores = QkZmax().score(view(rows, random_queries(rows), (0, 5)))
    found = scores[np.isfinite(scores)]
    assert len(found) == 10
    assert np.ptp(found) < 1e-3


@pytest.mark.parametrize("scorer", SCORERS, ids=SCORER_IDS)
def test_missing_summaries_are_an_error(scorer: Scorer) -> None:
    with pytest.raises(UsageError, match="needs summaries of the keys, and none were kept"):
        scorer.score(view(None, random_queries(random_rows())))


@pytest.mark.parametrize("scorer", SCORERS, ids=SCORER_IDS)
def test_layers_may_be_scored_in_any_order_and_in_threads(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(n_layer=5)
    queries = random_queries(rows, 2)
    want = scorer.score(view(rows, queries, (0, 5)))
    monkeypatch.setattr(scorers, "GRAIN", 1)  # or a single call has all layers
    used = []

    def backwards(f: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        layers = list(items)
        found = [f(item) for item in reversed(layers)]
        used.append([int(np.squeeze(item)) for item in layers])
        return reversed(found)

    assert np.array_equal(scorer.score(view(rows, queries, (0, 5), each=backwards)), want)
    n = 1 if isinstance(scorer, Qk) else 2  # it hands over all queries at once
    assert used == [[0, 1, 2, 3, 4]] * n, "the hook is not used, or not for every layer of every query"
    with ThreadPoolExecutor(4) as pool:
        assert np.array_equal(scorer.score(view(rows, queries, (0, 5), each=pool.map)), want)


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


@pytest.mark.parametrize("scorer", [Lru(), *SCORERS])
def test_scoring_changes_nothing_that_it_was_given(scorer: Scorer) -> None:
    rows = random_rows()
    seen = view(rows, random_queries(rows, 2), (0, 5))
    arrays = [seen.tokens, seen.touched, seen.candidates, rows.rows, *(x for q in seen.queries for x in q)]
    before = [x.copy() for x in arrays]
    first = scorer.score(seen)
    assert np.array_equal(scorer.score(seen), first)
    assert all(np.array_equal(x, y) for x, y in zip(arrays, before, strict=True))
    assert isinstance(scorer, Scorer)


#
# qk-cos, lru
#


def of_keys(keys: Keys, n_head: int) -> Rows:
    """The summary that QkCos asks for: the mean of each chunk's keys, scaled to length 1."""
    mean = keys.mean(axis=3, keepdims=True)
    return Rows(mean / np.linalg.norm(mean, axis=-1, keepdims=True), n_head)


def test_qk_cos_is_the_published_formula() -> None:
    """From the raw keys, one cosine at a time."""
    rng = np.random.default_rng(6)
    n_layer, n, n_head_kv, group, d = 3, 7, 2, 3, 8
    keys = rng.standard_normal((n_layer, n, n_head_kv, CHUNK, d)) + rng.standard_normal((n_layer, n, n_head_kv, 1, d))
    rows = of_keys(keys, n_head_kv * group)
    q = random_queries(rows)[0]

    def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
        return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))

    want = {
        c: float(
            np.mean(
                [
                    max(cosine(q[layer][h], keys[layer, c, h // group].mean(axis=0)) for h in range(n_head_kv * group))
                    for layer in range(n_layer)
                ]
            )
        )
        for c in (1, 2, 4, 5)
    }
    scores = QkCos().score(view(rows, [q], (0, 3, 6)))
    check_scores(scores, want, -2.0)
    longer = [x * np.float32(100) for x in q]
    np.testing.assert_allclose(QkCos().score(view(rows, [longer], (0, 3, 6))), scores, rtol=1e-5)
    assert np.isfinite(QkCos().score(view(rows, [[np.zeros_like(x) for x in q]]))).all()


def test_lru_is_the_time_of_last_use() -> None:
    """Of candidates and others, without queries or summaries."""
    touched = np.array([7, 1, 2**40, 1, 3])
    scores = Lru().score(view(None, touched=touched))
    assert scores.dtype == np.float64
    assert scores.tolist() == touched.tolist()


#
# what a scorer asks for
#


@pytest.mark.parametrize(
    ("query", "n"), [("last", 1), ("last:1", 1), ("last:4", 4), ("last:10", 10), ("last:999", 999), ("question", None)]
)
def test_the_number_of_queries(query: str, n: int | None) -> None:
    assert n_queries(query) == n
    assert Qk(query=query).query == QkZmax(query=query).query == query


@pytest.mark.parametrize(
    "query",
    ["", "last:", "last:0", "last:01", "last:1000", "last:-1", "last:x", "last ", "first", "Question", "question\n"],
)
def test_a_choice_of_queries_that_there_is_not(query: str) -> None:
    for ask in (n_queries, lambda query: Qk(query=query), lambda query: QkZmax(query=query)):
        with pytest.raises(UsageError, match=r"^'.*' is no choice of queries: give last, last:N .* or question$"):
            ask(query)


def test_a_bound_is_no_summary_of_mass() -> None:
    """Minima and maxima of keys are no keys: what is summed up of them says nothing."""
    with pytest.raises(UsageError, match="minmax"):
        Qk("minmax")
    assert QkZmax("minmax").summary == "minmax"


@pytest.mark.parametrize("aggregate", ["", "mean", "ZMAX", "max"])
def test_an_aggregate_that_there_is_not(aggregate: str) -> None:
    with pytest.raises(
        UsageError, match=f"the aggregate of qk-zmax is '{aggregate}', and must be one of zmax, layer-mean"
    ):
        QkZmax(aggregate=aggregate)


def test_names_and_what_is_asked_for() -> None:
    assert [(s.name, s.summary, n_queries(s.query)) for s in (Lru(), Qk(), QkZmax(), QkCos())] == [
        ("lru", None, 1),
        ("qk", "centroid:4", 4),
        ("qk-zmax", "centroid:4", 4),
        ("qk-cos", "direction", 1),
    ]
    assert AGGREGATES == ("zmax", "layer-mean")
    assert Qk("mean").summary == QkZmax("mean").summary == "mean"


#
# schedule
#


def run(schedule: Schedule, n: int, step_s: float, score_s: float, apply_s: float = 0.0) -> tuple[list[int], list[int]]:
    """n tokens, one a step, as the selector does it: the steps at which a scoring began, and was applied."""
    begun: list[int] = []
    applied: list[int] = []
    for i in range(1, n + 1):
        schedule.step(1, step_s)
        if len(begun) == len(applied) and schedule.begin():
            begun.append(i)
        if len(begun) > len(applied) and schedule.apply():
            schedule.scored(score_s, apply_s)
            applied.append(i)
    return begun, applied


def measured(schedule: Schedule, step_s: float, score_s: float, apply_s: float = 0.0) -> Schedule:
    """One that knows what things take."""
    schedule.step(1, step_s)
    schedule.scored(score_s, apply_s)
    return schedule


def left(schedule: Schedule) -> int:
    """Tokens until the next scoring begins."""
    return schedule.interval - schedule.n_since


MODES = {
    "within, on a CPU": {"within": True, "free": False},
    "within, with a device": {"within": True, "free": True},
    "beside, on a CPU": {"within": False, "free": False},
    "beside a device": {"within": False, "free": True},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def test_who_says_nothing_scores_beside_a_device_every_second_token() -> None:
    schedule = Schedule()
    assert (schedule.tau, schedule.share, schedule.within, schedule.free) == (2, 0.03, False, True)
    assert (schedule.beside, schedule.interval, schedule.lag) == (True, 2, 1)
    assert (schedule.cost_s, schedule.step_s, schedule.n_since) == (0.0, None, 0)


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("tau", [1, 2, 8, 64])
def test_what_is_within_the_token_is_applied_at_once(tau: int, free: bool) -> None:
    """At the same step, and the next one begins tau steps later."""
    schedule, happened = Schedule(tau, 0.05, within=True, free=free), []
    schedule.scored(0.0, 0.0)
    for i in range(1, 4 * tau + 1):
        schedule.step(1, 1.0)
        assert not schedule.apply()
        assert schedule.n_until(due=False) == max(1, tau - schedule.n_since)
        if schedule.begin():
            assert not schedule.begin()
            assert schedule.apply()
            assert not schedule.apply()
            schedule.scored(0.0, 0.0)
            happened.append(i)
        assert not schedule.beside
        assert schedule.lag == 0
    assert happened == [tau, 2 * tau, 3 * tau, 4 * tau]


def test_what_a_device_copies_counts_within_the_token_alone() -> None:
    """Beside decode nothing waits for it; so it is beside that much is copied."""
    few, many = (Schedule(2, 0.05, within=True, free=True) for _ in range(2))
    for schedule, copy_s in ((few, 0.0), (many, 1.0)):
        schedule.step(1, 1.0)
        schedule.scored(0.1, 0.0, copy_s)
    assert (few.beside, few.interval, few.lag) == (False, 2, 0)
    assert (many.beside, many.interval, many.lag) == (True, 2, 1)
    assert many.cost_s == 1.1


def test_a_token_that_is_decoded_again_is_a_part_of_what_scoring_costs() -> None:
    """Where every scoring has one, they become seldom; where some have, it is the least that counts."""
    schedule = Schedule(2, 0.05, within=True, free=False)
    schedule.repeated()
    assert schedule.cost_s == 0
    schedule.step(1, 1.0)
    for _ in range(5):
        schedule.scored(0.1, 0.0)
        schedule.repeated()
    assert (schedule.cost_s, schedule.interval) == (1.1, 32)
    schedule.scored(0.1, 0.0)
    assert (schedule.cost_s, schedule.interval) == (0.1, 2)


def test_a_longer_prompt_takes_longer_to_score() -> None:
    """What was measured of fewer chunks is no measure for more; nothing is known before the first."""
    schedule = Schedule(2, 0.05, within=True, free=True)
    schedule.grown(8.0)
    assert schedule.cost_s == 0
    schedule.step(1, 1.0)
    schedule.scored(0.1, 0.0)
    assert schedule.lag == 0
    schedule.grown(3.4)
    assert (schedule.beside, schedule.lag, schedule.interval) == (True, 4, 8)
    schedule.grown(0.1)
    assert schedule.lag == 4


def test_on_a_cpu_scoring_stays_within_the_token_however_seldom_that_is() -> None:
    schedule = measured(Schedule(2, 0.03, within=True, free=False), 1.0, 1e3)
    assert (schedule.beside, schedule.lag, schedule.interval) == (False, 0, 2 << 15)


@pytest.mark.parametrize(
    ("score_s", "apply_s", "beside", "interval"),
    [
        (0.0, 0.0, False, 2),
        (0.06, 0.0, False, 2),
        (0.05, 0.02, False, 4),
        (0.12, 0.0, False, 4),
        (0.2, 0.039, False, 8),  # as seldom as it may be
        (0.2, 0.05, True, 2),
        (0.0, 0.25, True, 16),
        (0.49, 0.0, True, 2),
        (0.51, 0.0, True, 4),
        (100.0, 0.0, True, 256),
    ],
)
def test_with_a_device_scoring_goes_beside_where_it_would_be_seldom_within(
    monkeypatch: pytest.MonkeyPatch, score_s: float, apply_s: float, beside: bool, interval: int
) -> None:
    """A token takes a second, scoring may take 3%: within the token, up to every eighth one. Beside, to score takes nothing."""
    monkeypatch.setattr("pyllama_kvflash.policy.schedule.SELDOM", 4)
    schedule = measured(Schedule(within=True), 1.0, score_s, apply_s)
    assert (schedule.beside, schedule.interval) == (beside, interval)
    assert (schedule.lag == 0) == (not beside)


def test_it_comes_back_within_the_token_when_that_costs_less() -> None:
    """After five scorings that took longer, which is as many as are remembered, and the other way round."""
    schedule = measured(Schedule(within=True), 1.0, 0.1)
    assert not schedule.beside
    for n, beside in enumerate([False, False, False, False, True, True]):
        schedule.scored(2.0, 0.0)
        assert schedule.beside == beside, n
    schedule.scored(0.1, 0.0)
    assert not schedule.beside


@pytest.mark.parametrize(
    ("score_s", "lag"), [(0, 1), (0.5, 1), (0.51, 2), (1.5, 2), (1.51, 4), (3.5, 4), (3.51, 8), (100, 128)]
)
def test_beside_a_device_nothing_waits_for_the_scores(score_s: float, lag: int) -> None:
    """The lag is the power of two of tokens that take as long as to score, and half a token more; scorings begin twice as seldom,
    and never more often than every tau tokens.
    """
    for tau in (1, 2, 8, 256):
        schedule = measured(Schedule(tau, 0.03), 1.0, score_s)
        assert (schedule.lag, schedule.interval) == (lag, max(tau, 2 * lag))
    schedule = measured(Schedule(2, 0.03), 0.5, score_s / 2)
    assert schedule.lag == lag, "it is the ratio that counts"


@pytest.mark.parametrize(("apply_s", "interval"), [(0, 2), (0.059, 2), (0.061, 4), (0.119, 4), (0.121, 8), (3.1, 128)])
def test_beside_a_device_to_change_the_pool_may_take_its_share(apply_s: float, interval: int) -> None:
    """It is done between two tokens, and scoring is not."""
    schedule = measured(Schedule(2, 0.03), 1.0, 0.1, apply_s)
    assert (schedule.lag, schedule.interval) == (1, interval)


def test_beside_a_device_each_cost_is_the_least_of_its_own() -> None:
    """Of the last five: the one that was scored fastest need not have been the one that was applied fastest."""
    schedule = Schedule(2, 0.03)
    schedule.step(1, 1.0)
    for score_s, apply_s in [(1.4, 0.5), (5.0, 0.05), (3.0, 0.4)]:
        schedule.scored(score_s, apply_s)
    assert schedule.cost_s == pytest.approx(1.9)
    assert (schedule.lag, schedule.interval) == (2, 4)  # 1.4 seconds, and 0.05


@pytest.mark.parametrize("mode", ["beside, on a CPU"])
@pytest.mark.parametrize(
    ("tau", "share", "lag"),
    [(64, 0.05, 16), (64, 0.0, 16), (1, 0.05, 1), (2, 0.05, 1), (7, 0.05, 1), (8, 0.05, 2), (64, 1.0, 16)],
)
def test_on_a_cpu_the_lag_is_a_quarter_of_the_interval(mode: str, tau: int, share: float, lag: int) -> None:
    """There, to score takes time from decoding for as long as it takes, and there is nothing to wait for but the step."""
    schedule = Schedule(tau, share, **MODES[mode])
    assert schedule.lag == lag
    begun, applied = run(schedule, 3 * tau + lag, 1.0, 0.0)
    assert begun[0] == tau
    assert applied[0] == tau + lag


def test_the_lag_grows_with_the_interval() -> None:
    begun, applied = run(Schedule(64, 0.05, free=False), 600, 1.0, 10.0)
    assert begun == [64, 64 + 256, 64 + 512]
    assert applied == [64 + 16, 320 + 64]


def test_scoring_begins_every_tau_tokens_and_is_applied_some_steps_later() -> None:
    begun, applied = run(Schedule(64, 0.05, free=False), 300, 1.0, 1.0)
    assert begun == [64, 128, 192, 256]
    assert applied == [80, 144, 208, 272]  # a quarter of 64 later
    begun, applied = run(Schedule(64, 0.05), 300, 1.0, 2.5)
    assert begun == [64, 128, 192, 256]
    assert applied == [65, 132, 196, 260]  # once it is known how long it takes
    begun, applied = run(Schedule(2, 0.05), 20, 1.0, 2.5)
    assert begun == [2, 10, 18]
    assert applied == [3, 14]


@pytest.mark.parametrize(
    ("cost_s", "interval"),
    [(0, 64), (1, 64), (3.19, 64), (3.21, 128), (6.39, 128), (6.41, 256), (51.1, 1024), (51.3, 2048), (1e6, 2**25)],
)
@pytest.mark.parametrize("within", [True, False])
def test_the_interval_is_tau_times_the_power_of_two_that_the_cost_needs(
    within: bool, cost_s: float, interval: int
) -> None:
    """A token takes a second, scoring may take 5%: the cost is at most 0.05*interval, and more than half of that."""
    schedule = measured(Schedule(64, 0.05, within=within, free=False), 1.0, 0.75 * cost_s, 0.25 * cost_s)
    assert schedule.interval == interval
    assert schedule.lag == (0 if within else interval // 4)
    assert left(schedule) == interval - 1


@modes
def test_a_share_of_zero_never_stretches(mode: dict[str, bool]) -> None:
    """Nor is anything beside that may be within the token."""
    lag = 0 if mode["within"] else 1 if mode["free"] else 4
    begun, applied = run(Schedule(16, 0, **mode), 100, 1e-6, 1e6, 1e6)
    assert begun == [16, 32, 48, 64, 80, 96]
    assert applied == [i + lag for i in begun]


@modes
def test_before_anything_is_measured_scoring_costs_nothing(mode: dict[str, bool]) -> None:
    """Neither without a clock for the tokens, nor without a scoring. Before one was measured, none holds up a device."""
    for known in ("nothing", "the scoring", "the token"):
        within = mode["within"] and (known == "the scoring" or not mode["free"])
        lag = 0 if within else 1 if mode["free"] else 4
        schedule = Schedule(16, 0.03, **mode)
        schedule.step(1, 1.0 if known == "the token" else None)
        if known == "the scoring":
            schedule.scored(1e6, 1e6)
        assert (schedule.interval, schedule.lag, left(schedule)) == (16, lag, 15)


def test_the_cost_is_the_least_of_the_last_five() -> None:
    schedule = Schedule()
    assert schedule.cost_s == 0
    for cost, least in [(5, 5), (7, 5), (3, 3), (9, 3), (9, 3), (9, 3), (9, 3), (9, 9), (4, 4)]:
        schedule.scored(cost - 1, 1)
        assert schedule.cost_s == least


def test_a_slow_step_counts_little_and_a_batch_by_its_tokens() -> None:
    schedule = Schedule(10, 0.1, within=True, free=False)
    schedule.step(1, 1.0)
    schedule.scored(1.9, 0.0)  # 19 tokens
    assert schedule.interval == 20
    schedule.step(5, 5.0)
    assert left(schedule) == 14
    schedule.step(1, 2.0)  # the mean is 1.1: 17.3 tokens
    assert schedule.interval == 20
    assert schedule.step_s == pytest.approx(1.1)
    schedule.step(1, 100.0)
    assert schedule.interval == 10
    schedule.step(1, None)  # nobody knows
    assert schedule.step_s == pytest.approx(10.99)


@pytest.mark.parametrize(("mode", "lag"), [("beside, on a CPU", 2), ("beside a device", 1)])
def test_a_pool_that_was_just_chosen_is_left_alone_for_an_interval(mode: str, lag: int) -> None:
    schedule = Schedule(8, 0.5, **MODES[mode])
    for steps in (7, 8 + lag - 1, 10):  # before a scoring begins, while it is under way, and after it
        for _ in range(steps):
            schedule.step(1, 1.0)
            schedule.apply()
            schedule.begin()
        schedule.restart()
        assert left(schedule) == 8
        assert not schedule.apply()
        assert not schedule.begin()
    begun, applied = run(schedule, 12, 1.0, 0.0)
    assert begun == [8]
    assert applied == [8 + lag]


def test_clocks_that_show_nothing_do_no_harm() -> None:
    schedule = measured(Schedule(4, 0.05, free=False), 0.0, 1.0)
    assert schedule.interval == 4
    assert run(schedule, 8, 0.0, 0.0) == ([3, 7], [4, 8])


@modes
def test_a_schedule_goes_on_where_another_was(mode: dict[str, bool]) -> None:
    """With what that one had measured, unless it has measured itself."""
    one = measured(Schedule(4, 0.03, **mode), 1.0, 0.1)
    for _ in range(2):
        one.step(1, 1.0)
    saved = Scoring(one.n_since, cost_s=one.cost_s, step_s=one.step_s or 0.0)
    other = Schedule(4, 0.03, **mode)
    other.resume(saved)
    assert (other.n_since, other.cost_s, other.step_s) == (3, 0.1, 1.0)
    assert (other.beside, other.interval, other.lag) == (one.beside, one.interval, one.lag)
    assert run(other, 20, 1.0, 0.1) == run(one, 20, 1.0, 0.1)
    known = measured(Schedule(4, 0.03, **mode), 2.0, 0.2)
    known.resume(saved)
    assert (known.n_since, known.cost_s, known.step_s) == (3, 0.2, 2.0)
    known.resume(Scoring())
    assert (known.n_since, known.cost_s, known.step_s) == (0, 0.2, 2.0)


@modes
@pytest.mark.parametrize("what", ["queries", "scores"])
def test_what_was_begun_is_applied_after_it_was_put_back(mode: dict[str, bool], what: str) -> None:
    schedule = Schedule(16, 0, **mode)
    found = {"queries": np.zeros(4, np.float32), "scores": np.zeros(4)}[what]
    schedule.resume(Scoring(0, **{what: found}))
    lag = 0 if mode["within"] else 1 if mode["free"] else 4
    assert schedule.n_until(due=True) == max(1, lag)
    for i in range(lag):
        assert not schedule.begin(), i
        assert not schedule.apply(), i
        schedule.step(1, 1.0)
    assert not schedule.begin(), "it was begun already"
    assert schedule.apply()
    assert not schedule.apply()


seconds = st.floats(1e-6, 10, allow_nan=False)
taus = st.integers(1, 128)
shares = st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5, 1.0]) | st.floats(0.01, 1)
any_mode = st.sampled_from(list(MODES.values()))


def doubled(first: int, enough: float) -> int:
    """The first of first, 2*first, 4*first ... that is enough."""
    while first < enough:
        first *= 2
    return first


def sure(first: int, enough: float) -> bool:
    """Whether rounding cannot say another one."""
    return all(abs(enough / (first << k) - 1) > 1e-9 for k in range(64))


@given(tau=taus, share=shares, step_s=seconds, score_s=seconds, apply_s=seconds, mode=any_mode)
@CHECK
def test_modes_and_their_numbers_are_what_they_say(
    tau: int, share: float, step_s: float, score_s: float, apply_s: float, mode: dict[str, bool]
) -> None:
    """By the words of the docstrings."""
    both, one, behind = (score_s + apply_s) / share / step_s, apply_s / share / step_s, score_s / step_s + 0.5
    assume(sure(tau, both) and sure(tau, one) and sure(1, behind))
    schedule = measured(Schedule(tau, share, **mode), step_s, score_s, apply_s)
    would_be = doubled(tau, both)
    beside = not mode["within"] or (mode["free"] and would_be > SELDOM * tau)
    assert schedule.beside == beside
    if not beside:
        assert (schedule.interval, schedule.lag) == (would_be, 0)
    elif mode["free"]:
        lag = doubled(1, behind)
        assert (schedule.interval, schedule.lag) == (max(doubled(tau, one), 2 * lag), lag)
    else:
        assert (schedule.interval, schedule.lag) == (would_be, max(1, would_be // 4))
    assert schedule.interval >= tau
    assert schedule.n_until(due=False) == max(1, schedule.interval - 1)
    assert schedule.n_until(due=True) == max(1, schedule.lag - 1)


@given(tau=taus, share=shares, step_s=seconds, score_s=seconds, apply_s=seconds, mode=any_mode)
@CHECK
def test_scoring_takes_at_most_its_share_of_the_time(
    tau: int, share: float, step_s: float, score_s: float, apply_s: float, mode: dict[str, bool]
) -> None:
    """From the second scoring on: at first nothing is measured. Steps of several tokens, until ten scorings. Beside a device, what is
    to be paid is to change the pool alone; and the scores are there when they are due.
    """
    schedule = Schedule(tau, share, **mode)
    n_scored, now, start, begun = 0, 0.0, 0.0, -1.0
    while n_scored < 10:
        size = max(1, (schedule.lag if begun >= 0 else left(schedule)) // 4)  # in four steps or so, however long it is
        schedule.step(size, size * step_s)
        now += size * step_s
        if begun < 0 and schedule.begin():
            begun = now
        if begun >= 0 and schedule.apply():
            if schedule.beside and schedule.free and n_scored:
                assert now - begun >= (score_s + step_s / 2) * (1 - 1e-6)
            schedule.scored(score_s, apply_s)
            begun = -1.0
            n_scored += 1
            if n_scored == 1:
                start = now
        assert schedule.interval >= tau
    paid = apply_s if schedule.beside and schedule.free else score_s + apply_s
    assert 9 * paid <= share * (now - start) * (1 + 1e-6)


@given(
    tau=taus,
    share=shares,
    steps=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    costs=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    scale=st.floats(-2.5, 2.5),
    within=st.booleans(),
)
@CHECK
def test_noise_that_crosses_no_step_changes_nothing(
    tau: int, share: float, steps: list[float], costs: list[float], scale: float, within: bool
) -> None:
    """The same steps begin and apply as without noise: a tenth in the cost, and in the time of a token."""
    cost = 2.0**scale * tau * share
    margin = scale - math.floor(scale)
    assume(scale < -0.4 or 0.35 < margin < 0.65)
    assert happened(tau, share, steps, [cost * c for c in costs], within=within, free=False) == happened(
        tau, share, [1.0], [cost], within=within, free=False
    )


@given(
    tau=taus,
    steps=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    costs=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    tokens=st.sampled_from([0.1, 0.9, 2.2, 5.0, 10.0]),
)
@CHECK
def test_noise_that_crosses_no_step_changes_nothing_beside_a_device(
    tau: int, steps: list[float], costs: list[float], tokens: float
) -> None:
    """The same, where it takes so many tokens to score them: the lag is measured, too."""
    noisy = happened(tau, 0.03, steps, [tokens * c for c in costs], within=False, free=True)
    assert noisy == happened(tau, 0.03, [1.0], [tokens], within=False, free=True)


def happened(
    tau: int, share: float, steps: list[float], costs: list[float], *, within: bool, free: bool
) -> list[tuple[str, int]]:
    """What begins and is applied, and where, with these times in turn."""
    schedule, res, under_way = Schedule(tau, share, within=within, free=free), [], False
    for i in range(12 * tau):
        schedule.step(1, steps[i % len(steps)])
        if not under_way and schedule.begin():
            under_way = True
            res.append(("begin", i))
        if under_way and schedule.apply():
            schedule.scored(costs[i % len(costs)], 0.0)
            under_way = False
            res.append(("apply", i))
    return res
