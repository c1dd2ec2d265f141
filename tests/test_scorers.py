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
    View,
    n_queries,
    scorers,
)

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

    def mass(self, layer: int, q: Floats, scale: float, n: int | None = None) -> Floats:
        self.asked.append((layer, n))
        rows = self.rows[layer, :n].astype(np.float64)
        group = self.n_head // rows.shape[1]
        res = np.zeros((len(q), len(rows)))
        for i, h in itertools.product(range(len(q)), range(self.n_head)):
            logits = scale * (rows[:, h // group] @ q[i, h].astype(np.float64))
            weights = np.exp(logits - logits.max(initial=-np.inf))
            res[i] += weights.sum(axis=1) / weights.sum()
        return res.max(axis=0, initial=0).astype(np.float32)


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


def check_scores(scores: npt.NDArray[np.float64], want: dict[int, float], other: float = -np.inf) -> None:
    assert scores.dtype == np.float64
    full = np.full(len(scores), other)
    full[list(want)] = list(want.values())
    np.testing.assert_allclose(scores, full, rtol=1e-4, atol=1e-4)


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
    """By the words of the docstring, of n chunks: each head's softmax over all their rows, summed over heads and layers, of a
    layer's queries the largest.
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
    return {c: of_chunk[c] for c in candidates}


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
    check_scores(found, mass(rows, queries, candidates, 12, scales))


@given(data=st.data(), seed=st.integers(0, 10**6), n=st.integers(2, 20))
@CHECK
def test_mass_is_what_it_says_whatever_is_pinned(data: st.DataObject, seed: int, n: int) -> None:
    rows = random_rows(seed, n=n, n_layer=2, n_head=3, n_head_kv=1, n_row=2)
    out = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    n_whole = data.draw(st.integers(0, n))
    candidates = [c for c in range(n) if c not in out]
    queries = random_queries(rows, 2, seed)
    found = Qk(rerank=0).score(view(rows, queries, out, n_whole=n_whole, keys=CLOSE))
    check_scores(found, mass(rows, queries, candidates, max(n_whole, candidates[-1] + 1)))


def test_mass_sums_up_to_the_heads() -> None:
    """No more is given away than there is, whatever the candidates are."""
    rows = random_rows(n_layer=3, n_head=4)
    assert Qk().score(view(rows, random_queries(rows))).sum() == pytest.approx(12, rel=1e-5)
    some = Qk().score(view(rows, random_queries(rows), (0, 11), n_whole=12))
    assert 0 < some[np.isfinite(some)].sum() < 12


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
    np.testing.assert_allclose(flat, 1.0, rtol=1e-5)  # 12 heads, of 12 chunks


@dataclasses.dataclass
class AllKeys:
    """All keys of each chunk, as native.Keys gives their products."""

    keys: Keys
    asked: set[int] = dataclasses.field(default_factory=set)

    def score(
        self,
        layer: int,
        q: Floats,
        chunks: Sequence[int],
        scale: float = 0.0,
        part: tuple[int, int] | None = None,
    ) -> Floats:
        self.asked |= set(chunks)
        begin, end = part or (0, self.keys.shape[3])
        group = q.shape[1] // self.keys.shape[2]
        each = [
            [self.keys[layer, c, h // group, begin:end] @ x for c in chunks]
            for one in q.astype(np.float64)
            for h, x in enumerate(one)
        ]
        found = [[np.log(np.exp(scale * x).sum()) if scale else x.max() for x in of_chunk] for of_chunk in each]
        return np.array(found, np.float32)


@pytest.mark.parametrize(("room", "n_best"), [(2, 6), (1, 3), (3, 9)])
def test_the_best_are_ranked_again_by_all_their_keys(room: int, n_best: int) -> None:
    """By their mass among them and what is no candidate; what was not looked at stays below, in the order that it had. A best one
    may have more by a neighbour's keys at their border, never less.
    """
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((2, 16, 2, CHUNK, 8))
    rows, out = Rows(keys.mean(axis=3, keepdims=True), 4), (0, 14, 15)
    queries, exact = random_queries(rows, 2), AllKeys(keys)
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
    """One key of chunk 6 has all the attention: so the chunk beyond the border that it is near is wanted, and no other."""
    keys = np.zeros((1, 12, 1, CHUNK, 2))
    keys[0, 6, 0, at] = 20
    rows = Rows(keys.mean(axis=3, keepdims=True), 1)
    q = [[np.ones((1, 2), np.float32)]]
    qk = Qk(rerank=4)
    found = qk.score(view(rows, q, (0, 11), room=2, n_whole=12, keys=AllKeys(keys)))
    assert found[6] == pytest.approx(1)
    hot = {int(c) for c in np.flatnonzero(found > 0.5)}
    assert hot == {6} | ({beyond} if beyond else set())
    decoding = qk.score(view(rows, q, (0, 11), room=2, n_whole=12))
    assert np.count_nonzero(decoding > 0.5) <= 1
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
def test_layers_may_be_scored_in_any_order_and_in_threads(scorer: Scorer) -> None:
    rows = random_rows(n_layer=5)
    queries = random_queries(rows, 2)
    want = scorer.score(view(rows, queries, (0, 5)))
    used = []

    def backwards(f: Callable[[int], Any], items: Iterable[int]) -> Iterator[Any]:
        found = {item: f(item) for item in reversed(list(items))}
        used.append(sorted(found))
        return (found[item] for item in sorted(found))

    assert np.array_equal(scorer.score(view(rows, queries, (0, 5), each=backwards)), want)
    n = 1 if isinstance(scorer, Qk) else 2  # it hands over all queries at once
    assert used == [[0, 1, 2, 3, 4]] * n, "the hook is not used, or not for every layer of every query"
    with ThreadPoolExecutor(4) as pool:
        assert np.array_equal(scorer.score(view(rows, queries, (0, 5), each=pool.map)), want)


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


def run(schedule: Schedule, n: int, step_s: float, cost_s: float) -> tuple[list[int], list[int]]:
    """n tokens, one a step, as the selector does it: the steps at which a scoring began, and was applied."""
    begun, applied = [], []
    for i in range(1, n + 1):
        schedule.step(1, step_s)
        if schedule.apply():
            schedule.scored(cost_s)
            applied.append(i)
        elif schedule.begin():
            begun.append(i)
    return begun, applied


def test_scoring_begins_every_tau_tokens_and_is_applied_some_steps_later() -> None:
    begun, applied = run(Schedule(tau=64, share=0.05), 300, 1.0, 1.0)
    assert begun == [64, 128, 192, 256]
    assert applied == [80, 144, 208, 272]  # a quarter of 64 later


@pytest.mark.parametrize(
    ("tau", "share", "lag"),
    [(64, 0.05, 16), (64, 0.0, 16), (1, 0.05, 1), (7, 0.05, 1), (8, 0.05, 2), (64, 1.0, 16)],
)
def test_the_lag_is_a_quarter_of_the_interval(tau: int, share: float, lag: int) -> None:
    schedule = Schedule(tau, share)
    assert schedule.lag == lag
    begun, applied = run(schedule, 3 * tau + lag, 1.0, 0.0)
    assert begun[0] == tau
    assert applied[0] == tau + lag


@pytest.mark.parametrize("tau", [1, 8, 64])
def test_what_is_not_beside_decode_is_applied_at_once(tau: int) -> None:
    """At the same step, and the next one begins tau steps later; a longer interval has no lag either."""
    schedule, happened = Schedule(tau, 0.05, beside=False), []
    assert schedule.lag == 0
    for i in range(1, 4 * tau + 1):
        schedule.step(1, 1.0)
        assert not schedule.apply()
        assert schedule.n_until(due=False) == max(1, tau - schedule.n_since)
        if schedule.begin():
            assert not schedule.begin()
            assert schedule.apply()
            assert not schedule.apply()
            schedule.scored(0.0)
            happened.append(i)
    assert happened == [tau, 2 * tau, 3 * tau, 4 * tau]
    schedule.scored(1.0)
    schedule._costs = [1e3]
    assert schedule.interval > tau
    assert schedule.lag == 0


def left(schedule: Schedule) -> int:
    """Tokens until the next scoring begins."""
    return schedule.interval - schedule._n


@pytest.mark.parametrize(
    ("cost_s", "interval"),
    [(0, 64), (1, 64), (3.19, 64), (3.21, 128), (6.39, 128), (6.41, 256), (51.1, 1024), (51.3, 2048), (1e6, 2**25)],
)
def test_the_interval_is_tau_times_the_power_of_two_that_the_cost_needs(cost_s: float, interval: int) -> None:
    """A token takes a second, scoring may take 5%: the cost is at most 0.05*interval, and more than half of that."""
    schedule = Schedule(tau=64, share=0.05)
    schedule.step(1, 1.0)
    schedule.scored(cost_s)
    assert schedule.interval == interval
    assert schedule.lag == interval // 4
    assert left(schedule) == interval - 1


def test_the_lag_grows_with_the_interval() -> None:
    schedule = Schedule(tau=64, share=0.05)
    begun, applied = run(schedule, 600, 1.0, 10.0)
    assert begun == [64, 64 + 256, 64 + 512]
    assert applied == [64 + 16, 320 + 64]


def test_a_share_of_zero_never_stretches() -> None:
    begun, applied = run(Schedule(tau=16, share=0), 100, 1e-6, 1e6)
    assert begun == [16, 32, 48, 64, 80, 96]
    assert applied == [20, 36, 52, 68, 84, 100]


def test_the_cost_is_the_least_of_the_last_five() -> None:
    schedule = Schedule()
    assert schedule.cost_s == 0
    for cost, least in [(5, 5), (7, 5), (3, 3), (9, 3), (9, 3), (9, 3), (9, 3), (9, 9), (4, 4)]:
        schedule.scored(cost)
        assert schedule.cost_s == least


def test_a_slow_step_counts_little_and_a_batch_by_its_tokens() -> None:
    schedule = Schedule(tau=10, share=0.1)
    schedule.step(1, 1.0)
    schedule.scored(1.9)  # 19 tokens
    assert schedule.interval == 20
    schedule.step(5, 5.0)
    assert left(schedule) == 14
    schedule.step(1, 2.0)  # the mean is 1.1: 17.3 tokens
    assert schedule.interval == 20
    schedule.step(1, 100.0)
    assert schedule.interval == 10


def test_a_pool_that_was_just_chosen_is_left_alone_for_an_interval() -> None:
    schedule = Schedule(tau=8, share=0.5)
    for steps in (7, 10):  # before a scoring begins, and while it is under way
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
    assert applied == [10]


def test_clocks_that_show_nothing_do_no_harm() -> None:
    schedule = Schedule(tau=4, share=0.05)
    schedule.step(1, 0.0)
    schedule.scored(1.0)
    assert schedule.interval == 4
    assert run(schedule, 8, 0.0, 0.0)[0] == [3, 7]


seconds = st.floats(1e-6, 10, allow_nan=False)
taus = st.integers(1, 128)
shares = st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5, 1.0]) | st.floats(0.01, 1)


@given(tau=taus, share=shares, step_s=seconds, cost_s=seconds)
@CHECK
def test_scoring_takes_at_most_its_share_of_the_time(tau: int, share: float, step_s: float, cost_s: float) -> None:
    """From the second scoring on: at first nothing is measured. Steps of several tokens, until ten scorings."""
    schedule = Schedule(tau, share)
    n_scored, now, start = 0, 0.0, 0.0
    pattern = ["begin", "apply"]
    happened: list[str] = []
    while n_scored < 10:
        size = max(1, left(schedule) // 4)  # in four steps or so, however long the interval
        schedule.step(size, size * step_s)
        now += size * step_s
        if schedule.apply():
            happened.append("apply")
            schedule.scored(cost_s)
            n_scored += 1
            if n_scored == 1:
                start = now
        elif schedule.begin():
            happened.append("begin")
        assert schedule.interval >= tau
    assert happened == pattern * 10
    assert 9 * cost_s <= share * (now - start) * (1 + 1e-6)


@given(
    tau=taus,
    share=shares,
    steps=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    costs=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    scale=st.floats(-2.5, 2.5),
)
@CHECK
def test_noise_that_crosses_no_step_changes_nothing(
    tau: int, share: float, steps: list[float], costs: list[float], scale: float
) -> None:
    """The same steps begin and apply as without noise: a tenth in the cost, and in the time of a token."""
    cost = 2.0**scale * tau * share
    margin = scale - math.floor(scale)
    assume(scale < -0.4 or 0.35 < margin < 0.65)

    def happened(steps: list[float], costs: list[float]) -> list[tuple[str, int]]:
        schedule, res = Schedule(tau, share), []
        for i in range(12 * tau):
            schedule.step(1, steps[i % len(steps)])
            if schedule.apply():
                schedule.scored(cost * costs[i % len(costs)])
                res.append(("apply", i))
            elif schedule.begin():
                res.append(("begin", i))
        return res

    assert happened(steps, costs) == happened([1.0], [1.0])
