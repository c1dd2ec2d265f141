"""qk, qk-cos and lru against plain numpy: the score of every chunk, and what a scorer asks for."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import CHECK
from support.views import CHUNK, OUT, Floats, Keys, Rows, check_scores, random_queries, random_rows, view

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.policy import Lru, Qk, QkCos, Queries, ZMax, n_queries

#
# qk
#


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
    assert not any(getattr(scorer, "shares", False) for scorer in (Lru(), ZMax(), QkCos()))


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


def test_nothing_is_ranked_again_where_it_cannot_matter() -> None:
    """All of it fits, there is no room at all, nobody asked, or the summaries are all keys."""
    rows = random_rows()
    queries, keys = random_queries(rows), AllKeys(rows.rows)
    for qk, room in ((Qk(), 12), (Qk(), 0), (Qk(rerank=0), 2), (Qk(rerank=1), 2), (Qk("rows"), 2)):
        qk.score(view(rows, queries, room=room, keys=keys, n_whole=12))
    assert keys.asked == set()


#
# qk, after an exact pass
#


def exact_shares(mass: Floats, candidates: Sequence[int], n: int, n_head: int) -> dict[int, float]:
    """By the words of the docstring, one number at a time: of a layer's queries the largest part that a chunk has, of its sum over
    pieces; summed over layers, as a share of what all heads have; half of a border piece for the chunk beyond, if that is more.
    """

    def most(chunk: int, pieces: range) -> float:
        return sum(
            max(float(sum(mass[q, layer, chunk * 4 + i] for i in pieces)) for q in range(len(mass)))
            for layer in range(mass.shape[1])
        )

    res = {}
    for c in candidates:
        lent = [most(c - 1, range(3, 4)) / 2] if c > 0 else []
        lent += [most(c + 1, range(1)) / 2] if c + 1 < n else []
        res[c] = max([most(c, range(4)), *lent]) / n_head
    return res


def attended(n_query: int, n: int, n_head: int, seed: int = 0, n_layer: int = 3) -> Floats:
    """What queries attend to: of each layer's heads all that they have, over pieces of n chunks."""
    res = np.random.default_rng(seed).exponential(size=(n_query, n_layer, 4 * n)) ** 3
    found: Floats = (n_head * res / res.sum(axis=2, keepdims=True)).astype(np.float32)
    return found


class Unasked:
    """Summaries, or keys, that nobody may ask: what they could say is known."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize("out", OUT.values(), ids=OUT.keys())
@pytest.mark.parametrize("n_query", [1, 3])
def test_shares_are_those_that_were_computed(out: tuple[int, ...], n_query: int) -> None:
    """Of all chunks, whatever has a summary; what is no candidate has none, and lends to its neighbours all the same."""
    rows = random_rows()
    candidates = [c for c in range(12) if c not in out]
    mass_ = attended(n_query, 12, rows.n_head, len(out))
    queries = random_queries(rows, n_query)
    seen = view(rows, queries, out, mass=mass_, summaries=Unasked(), keys=Unasked(), room=2, n_whole=3)
    for scorer in (Qk(), Qk("rows"), Qk(rerank=0)):
        check_scores(scorer.score(seen), exact_shares(mass_, candidates, 12, 3 * rows.n_head), atol=1e-6)


@given(data=st.data(), seed=st.integers(0, 10**6), n=st.integers(1, 20), n_query=st.integers(1, 4))
@CHECK
def test_shares_that_were_computed_whatever_is_pinned(data: st.DataObject, seed: int, n: int, n_query: int) -> None:
    """Pieces behind the last chunk are not looked at."""
    rows = random_rows(seed, n=n, n_layer=2, n_head=3, n_head_kv=1, n_row=2)
    out = data.draw(st.sets(st.integers(0, n - 1), max_size=n))
    mass_ = attended(n_query, n, 3, seed, 2)
    longer = np.concatenate([mass_, np.full((n_query, 2, 7), 99, np.float32)], axis=2)
    want = exact_shares(mass_, [c for c in range(n) if c not in out], n, 6)
    for each in (mass_, longer):
        check_scores(Qk().score(view(rows, random_queries(rows, n_query), out, mass=each)), want, atol=1e-6)


@pytest.mark.parametrize(
    ("piece", "hot"),
    [
        (6 * 4, {6: 1.0, 5: 0.5}),  # the first of a chunk, and the chunk before it
        (6 * 4 + 1, {6: 1.0}),
        (6 * 4 + 2, {6: 1.0}),
        (6 * 4 + 3, {6: 1.0, 7: 0.5}),
        (0, {}),  # there is none before it, and it is no candidate
        (3, {1: 0.5}),
        (11 * 4, {10: 0.5}),
        (11 * 4 + 3, {}),
    ],
)
def test_what_is_attended_to_near_a_border_counts_beyond_it(piece: int, hot: dict[int, float]) -> None:
    """As where keys are ranked again: the sink and the tail are no candidates, and may be looked at near their borders."""
    rows = random_rows(n_layer=1, n_head=1, n_head_kv=1)
    mass_ = np.zeros((1, 1, 12 * 4), np.float32)
    mass_[0, 0, piece] = 1
    found = Qk().score(view(rows, random_queries(rows), (0, 11), mass=mass_))
    assert np.isneginf(found[[0, 11]]).all()
    assert {c: found[c] for c in range(1, 11) if found[c] > 0} == hot


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
    assert Qk(query=query).query == query


@pytest.mark.parametrize(
    "query",
    ["", "last:", "last:0", "last:01", "last:1000", "last:-1", "last:x", "last ", "first", "Question", "question\n"],
)
def test_a_choice_of_queries_that_there_is_not(query: str) -> None:
    for ask in (n_queries, lambda query: Qk(query=query)):
        with pytest.raises(UsageError, match=r"^'.*' is not a choice of queries: give last, last:N .* or question$"):
            ask(query)


def test_names_and_what_is_asked_for() -> None:
    assert [(s.name, s.summary, n_queries(s.query)) for s in (Lru(), Qk(), ZMax(), QkCos())] == [
        ("lru", None, 1),
        ("qk", "centroid:4", 4),
        ("zmax", "centroid:4", 4),
        ("qk-cos", "direction", 1),
    ]
    assert Qk("mean").summary == "mean"
