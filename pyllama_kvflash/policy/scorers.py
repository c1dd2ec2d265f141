"""Scorers: they rate how much each chunk matters now, whether it is resident or not. A higher score is hotter."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.policy.ledger import Mask, Scores

Floats = npt.NDArray[np.float32]
Queries = Sequence[Floats]
"""Queries of one token: (n_head, n_embd_head_k) for each scored layer, in the basis of the cached keys."""


class Products(Protocol):
    """Summaries of the keys of sealed chunks. `native.Summaries` implements it."""

    @property
    def n_layer(self) -> int:
        """Number of scored layers."""

    def score(self, layer: int, q: Floats, n: int | None = None) -> Floats:
        """Return each head's largest product q·k with the summary rows of each of the first n chunks, (n_head, n) float32.

        q: (n_head, n_embd_head_k) queries of a layer. n: None means all chunks.
        """

    def mass(self, layers: Sequence[int], queries: Queries, scales: Sequence[float], n: int | None = None) -> Floats:
        """Return each chunk's share of the attention to the first n chunks, summed over heads: (len(layers), n).

        queries: (n_query, n_head, d) for each of the layers. Of several queries, each chunk's largest share counts.
        scales: the factor of q·k in each layer.
        """


class AllKeys(Protocol):
    """All keys of chunks, read from their records. `native.Keys` implements it."""

    def score(
        self,
        layer: int,
        q: Floats,
        chunks: Sequence[int],
        scale: float = 0.0,
        edge: int = 0,
    ) -> Floats:
        """Return each query's largest product q·k with a key of each chunk, (n_token * n_head, len(chunks)).

        q: queries (n_token, n_head, d).
        scale: if given, return the logarithm of the sum of exp(scale·q·k) over the chunk's keys instead.
        edge: if given, return three such arrays, (3, ...): over all keys, over the first `edge` and over the last `edge`.
        """


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot of a sequence for a scorer. It does not change while the scorer runs.

    tokens: (n_tokens,) int32.
    chunk: positions in a chunk.
    touched: the step at which each chunk was last written or paged in, (n_chunks,) int64; larger is later.
    candidates: the chunks whose score counts, (n_chunks,) bool.
    queries: the queries of the last token, or of the last tokens of a prompt.
    summaries: key summaries of the kind that the scorer names; None if the scorer needs none.
    room: the number of candidates that the pool can hold.
    keys: all keys, at the end of a prompt, when there is time to read them; otherwise None.
    each: like `map`, possibly in several threads.
    scales: the factor of q·k before the softmax, for each layer; (): 1/√d.
    n_whole: chunks 0 .. n_whole - 1 have a summary.
    mass: each query's attention to each piece of chunk/EDGE positions, as a share summed over the heads of a layer, (n_query,
        n_layer, n_piece) float32. None except after an exact pass.
    """

    tokens: npt.NDArray[np.int32]
    chunk: int
    touched: npt.NDArray[np.int64]
    candidates: Mask
    queries: Sequence[Queries] = ()
    summaries: Products | None = None
    room: int = 0
    keys: AllKeys | None = None
    each: Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]] = map
    scales: Sequence[float] = ()
    n_whole: int = 0
    mass: Floats | None = None


@runtime_checkable
class Scorer(Protocol):
    """Ranks chunks. To add a scorer, give any object like this as `policy`, or register an entry point (docs/SCORERS.md).

    name: shown in reports.
    summary: the kind of key summary to keep of each sealed chunk ("centroid:4", "mean", ...); None: none.
    query: the tokens whose queries the view has: "last" (the last one), "last:N" (the last N) or "question" (all tokens
        at the end of the prompt that are decoded twice). During an answer, the view always has the last token's queries.

    If the scorer's attribute `shares` is true, its scores are shares of a token's attention. A token is then decoded again if
    chunks with more than 3 % of its attention were out.
    """

    name: str
    summary: str | None
    query: str

    def score(self, view: View) -> Scores:
        """Return a score for each chunk, (n_chunks,) float64; higher is hotter. Only the candidates' values matter.

        The method is called in a thread during decode, and never in two threads at once.
        """


class Lru:
    """Least recently used: a chunk is used when it is written or paged in. Its content does not matter."""

    name = "lru"
    summary: str | None = None
    query = "last"

    def score(self, view: View) -> Scores:
        """Return the time of last use, (n_chunks,) float64."""
        return view.touched.astype(np.float64)


class Fresh(Lru):
    """Each layer chooses its chunks in the graph, for the token being computed (policy.fresh, pool.guests).

    Nothing is scored between tokens: common chunks are evicted by recency.
    """

    name = "fresh"


UNSCORED = (Lru.name, Fresh.name)
"""Policies whose chunks are not scored between tokens."""
CENTROIDS = "centroid:4"
FADES = 0.8
"""While decoding, a chunk's score never falls below this fraction of its last one, because an answer may come back to the chunk."""
MOST_LAYERS = 24
"""How many layers policy qk scores, at most. If there are more, it scores every second one, or every third."""
GRAIN = 1 << 20
"""How many products make another thread worthwhile: about 0.1 ms of work."""
EDGE = 4
"""Each border of a chunk is 1/EDGE of its keys."""
LENT = 0.5
"""The fraction of a border's mass that also counts for the chunk beyond it."""


class Qk:
    """Scores a chunk by its share of the model's own attention, summed over heads and layers.

    A head's share of a chunk is the sum of exp(q·k·scale) over the chunk's keys, divided by the sum over all keys (the
    softmax). The share is estimated from centroids of the chunk's keys. A centroid is scaled to the mean length of its keys,
    and counts once for each of these keys. Of several queries, the largest sum in each layer counts.

    At the end of a prompt, the best chunks (`rerank` times as many as the pool can hold) are ranked again by all their
    keys. After a prompt was read exactly, all chunks are ranked by the attention of its last tokens. The passage that
    answers a question may span two chunks. So half of the mass of the keys at a border also counts for the chunk beyond it.
    """

    name = "qk"
    shares = True

    def __init__(self, summary: str | None = None, query: str = "last:4", rerank: int = 8) -> None:
        """summary: a kind of `native.Summaries`; None: "centroid:4". rerank 0: rank by the summaries alone. Raises UsageError."""
        n_queries(query)
        self.summary: str | None = summary or CENTROIDS
        self.query = query
        self.rerank = rerank

    def score(self, view: View) -> Scores:
        """Return the candidates' shares of the attention, (n_chunks,) float64; -inf for other chunks."""
        n, scores = _n_scored(view), np.full(len(view.candidates), -np.inf)
        if not n or not view.queries:
            return scores
        n_head = sum(q.shape[0] for q in view.queries[0])
        if view.mass is not None:
            shares: Scores = _attended(view, view.mass) / n_head
            return shares
        products = _products(view)
        n_all = max(n, view.n_whole)  # other chunks have a share of the attention, too
        queries = [np.stack([q[i] for q in view.queries]) for i in range(products.n_layer)]
        scales = list(view.scales) or [q.shape[-1] ** -0.5 for q in queries]
        mass = _mass(view, products, queries, scales, n_all).sum(axis=0)
        scores[:n] = np.where(view.candidates[:n], mass[:n], -np.inf)
        if self.rerank and view.keys is not None and self.summary != "rows":
            _closer(view, view.keys, queries, scales, scores, self.rerank * view.room)
        found: Scores = scores / n_head
        return found


def _attended(view: View, mass: Floats) -> Scores:
    """Return the candidates' shares of measured attention (View.mass), (n_chunks,); -inf for other chunks."""
    n = len(view.candidates)
    pieces = mass[..., : n * EDGE].reshape(*mass.shape[:2], n, EDGE)
    whole = pieces.sum(axis=3).max(axis=0).sum(axis=0).astype(np.float64)
    first, last = (pieces[..., i].max(axis=0).sum(axis=0) for i in (0, -1))
    scores = np.where(view.candidates, whole, -np.inf)
    _lend(view, scores, np.arange(n), first, last)
    return scores


def _lend(view: View, scores: Scores, chunks: npt.NDArray[np.int64], first: Floats, last: Floats) -> None:
    """Raise the score of each candidate beside one of `chunks` to at least LENT times the mass at their border, in place.

    first, last: the mass of each chunk's first and last keys, (len(chunks),).
    """
    for edges, there in ((first, chunks - 1), (last, chunks + 1)):
        found = (there >= 0) & (there < len(scores))
        found[found] = view.candidates[there[found]]
        np.maximum.at(scores, there[found], LENT * edges[found])


def _mass(view: View, products: Products, queries: Sequence[Floats], scales: Sequence[float], n: int) -> Floats:
    """Return the mass of the first n chunks in each layer, (n_layer, n). Uses few threads, because handing a layer to a thread can
    take longer than computing it.
    """
    n_layer = len(queries)
    work = n * sum(q.size for q in queries)
    n_part = min(n_layer, 1 + work // GRAIN)
    parts = [range(n_layer * i // n_part, n_layer * (i + 1) // n_part) for i in range(n_part)]

    def some(layers: Sequence[int]) -> Floats:
        return products.mass(layers, [queries[i] for i in layers], [scales[i] for i in layers], n)

    found = [some(parts[0])] if len(parts) == 1 else list(view.each(some, parts))
    return np.concatenate(found)


def _closer(
    view: View, keys: AllKeys, queries: Sequence[Floats], scales: Sequence[float], scores: Scores, n: int
) -> None:
    """Replace the n best scores by exact masses, from a softmax over all keys of these chunks and of all non-candidates. Scale the
    other scores so that they stay below. Changes `scores` in place, unless the pool has room for all n.
    """
    n_best = min(n, int(np.count_nonzero(view.candidates)))
    best = np.sort(np.argsort(-scores, kind="stable")[:n_best])
    if n_best <= view.room:
        return
    among = [*best.tolist(), *np.flatnonzero(~view.candidates[: view.n_whole]).tolist()]
    edge = max(1, view.chunk // EDGE)

    def one(i: int) -> Floats:
        e = keys.score(i, queries[i], among, scales[i], edge)
        e = e.reshape(3, *queries[i].shape[:2], -1)  # whole, first and last keys; tokens; heads; chunks
        e = np.exp(e - e[0].max(axis=-1, keepdims=True))
        res: Floats = (e / e[0].sum(axis=-1, keepdims=True)).sum(axis=2).max(axis=1)
        return res

    mass, first, last = np.array(list(view.each(one, range(len(queries))))).sum(axis=0)[:, :n_best]
    rest = view.candidates.copy()
    rest[best] = False
    scores[rest] *= min(1.0, float(mass.min()) / max(float(scores[rest].max(initial=0)), 1e-30))
    scores[best] = mass
    _lend(view, scores, best, first, last)


HALO = 0.5
"""How far a chunk's score may be below its better neighbour's, in standard deviations."""


class ZMax:
    """Scores chunks by the most distinct head of a scorer model (policies "drafter" and "crosstok").

    A head's score of a chunk is the largest q·c/√d over the rows c of its summary. Each head's scores are z-normalised
    over the candidates, and the maximum over layers and heads counts, since only few heads of a small model retrieve, and
    a mean would drown them. Of several queries, the maximum counts.

    A relevant passage may span two chunks of which only one scores high. So a chunk's score is at least that of its
    better neighbour minus HALO.
    """

    name = "zmax"
    summary: str | None = CENTROIDS
    query = "last:4"

    def score(self, view: View) -> Scores:
        """Return the candidates' scores, (n_chunks,) float64; -inf for other chunks."""
        scores = np.full(len(view.candidates), -np.inf)
        n = _n_scored(view)
        if n and view.queries:
            queries = [[x / np.sqrt(x.shape[1]) for x in q] for q in view.queries]
            found = np.max([_zmax(view, q, n) for q in queries], axis=0)
            scores[:n] = np.where(view.candidates[:n], found, -np.inf)
        return _with_halo(scores, view.candidates)


class QkCos:
    """The published formula, for comparison: the mean over layers of the maximum over heads of cos(Q, the chunk's mean K).

    A chunk without a summary scores -2, below any cosine.
    """

    name = "qk-cos"
    summary: str | None = "direction"
    query = "last"

    def score(self, view: View) -> Scores:
        """Return the candidates' scores, (n_chunks,) float64; -2 for other chunks."""
        unit = [[x / (np.linalg.norm(x, axis=1, keepdims=True) + 1e-9) for x in q] for q in view.queries]
        scores = np.full(len(view.candidates), -2.0)
        n = _n_scored(view)
        if n and unit:
            found = np.max([_layer_mean(view, q, n) for q in unit], axis=0)
            scores[:n] = np.where(view.candidates[:n], found, -2.0)
        return scores


SCORERS: dict[str, Callable[[], Scorer]] = {scorer.name: scorer for scorer in (Fresh, Qk, QkCos, Lru)}
"""The scorers that need no model of their own, by the policy's name. A new one is added only here."""


def shares(scorer: Scorer) -> bool:
    """Return whether a scorer's scores are shares of a token's attention, and so have an absolute meaning."""
    return bool(getattr(scorer, "shares", False))


def faded(now: Scores, before: Scores) -> Scores:
    """Return the scores `now` (n,) float64, each raised to at least FADES times its score in `before`; NaN stays NaN."""
    res: Scores = np.where(np.isnan(now), np.nan, np.fmax(now, FADES * before))
    return res


def n_queries(query: str) -> int | None:
    """Return the number of last tokens whose queries a scorer needs; None: all tokens of the question. Raises UsageError."""
    match = re.fullmatch(r"question|last(?::([1-9]\d{0,2}))?", query)
    if match is None:
        msg = f"{query!r} is not a choice of queries: give last, last:N (1 to 999) or question"
        raise UsageError(msg)
    return None if query == "question" else int(match[1] or 1)


def _with_halo(scores: Scores, candidates: Mask) -> Scores:
    """Raise each candidate's score to at least its better neighbour's minus HALO. Other chunks get -inf."""
    res, lent = scores.copy(), scores - HALO
    np.maximum(res[1:], lent[:-1], out=res[1:])
    np.maximum(res[:-1], lent[1:], out=res[:-1])
    return np.where(candidates, res, -np.inf)


def _n_scored(view: View) -> int:
    """Return the number of chunks up to the last candidate."""
    found = np.flatnonzero(view.candidates)
    return int(found[-1]) + 1 if len(found) else 0


def _zmax(view: View, q: Queries, n: int) -> Floats:
    """Return each chunk's largest score over layers and heads, (n,). Each head's scores are z-normalised over the candidates."""
    mask = view.candidates[:n]
    first, count = int(np.argmax(mask)), int(np.count_nonzero(mask))
    whole = count == n - first  # no pins in between: a slice is not copied
    products = _products(view)

    def one(layer: int) -> Floats:
        x = products.score(layer, q[layer], n)
        y = x[:, first:] if whole else x[:, mask]
        x -= y.mean(axis=1, keepdims=True)
        y = x[:, first:] if whole else x[:, mask]
        x *= 1 / np.sqrt(np.einsum("hc,hc->h", y, y) / count + 1e-12)[:, None]
        res: Floats = x.max(axis=0)
        return res

    res: Floats = np.max(list(view.each(one, range(products.n_layer))), axis=0)
    return res


def _layer_mean(view: View, q: Queries, n: int) -> Floats:
    """Return each chunk's mean over layers of the largest score over heads, (n,)."""
    products = _products(view)
    best = view.each(lambda layer: products.score(layer, q[layer], n).max(axis=0), range(products.n_layer))
    res: Floats = np.mean(list(best), axis=0)
    return res


def _products(view: View) -> Products:
    if view.summaries is None:
        msg = "this scorer needs summaries of the keys, and none were kept"
        raise UsageError(msg)
    return view.summaries
