"""Summaries of keys against numpy, on made-up layers and records: what they are, what they depend on, what they score."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import LIBRARY
from support.summaries import (
    BF16,
    KINDS,
    META,
    asked_while_appended,
    bits,
    geometry,
    kept,
    keys_of,
    layer_of_keys,
    queries,
    record_of,
)

from pyllama_kvflash.errors import UnsupportedError, UsageError
from pyllama_kvflash.native import Layer, Record, Summaries
from pyllama_kvflash.native.summary import SLAB

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


def centroids(keys: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    """Farthest-point seeds, two Lloyd steps, and the mean length of its keys for each."""

    def far(points: Sequence[npt.NDArray[np.float64]]) -> int:
        return int(np.argmax([min(float(((x - p) ** 2).sum()) for p in points) for x in keys]))

    res = [keys[far([keys.mean(axis=0)])]]
    while len(res) < n:
        res.append(keys[far(res)])
    for _ in range(2):
        nearest = np.array([int(np.argmin([((x - c) ** 2).sum() for c in res])) for x in keys])
        res = [keys[nearest == i].mean(axis=0) if (nearest == i).any() else c for i, c in enumerate(res)]
    for i, c in enumerate(res):
        if (nearest == i).any() and np.linalg.norm(c) > 0:
            res[i] = c / np.linalg.norm(c) * np.linalg.norm(keys[nearest == i], axis=1).mean()
    return np.array(res)


def summary(keys: npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.float64]:
    """Of one head's keys (row, dimension)."""
    mean = keys.mean(axis=0)
    name, _, n = kind.partition(":")
    return {
        "centroid": lambda: centroids(keys, int(n)),
        "mean": lambda: mean[None],
        "direction": lambda: mean[None] / np.linalg.norm(mean),
        "rows": lambda: keys,
    }[name]()


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rounded to the nearest, ties to even."""
    u = x.astype(np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def want_scores(rows: Sequence[npt.NDArray[np.float32]], q: npt.NDArray[np.float32]) -> Any:
    """(n_head, n) and what one sum of products may be off, for the summaries (n_head_kv, n_row, d) of each chunk."""
    group = len(q) // len(rows[0])
    res, off = np.empty((len(q), len(rows))), np.empty((len(q), len(rows)))
    for c, entry in enumerate(rows):
        for h, x in enumerate(q.astype(np.float64)):
            terms = entry[h // group].astype(np.float64) * x
            res[h, c] = terms.sum(axis=1).max()
            off[h, c] = 2**-20 * np.abs(terms).sum(axis=1).max()
    return res, off


def check_scores(summaries: Summaries, q: npt.NDArray[np.float32], layer: int, n: int | None = None) -> None:
    found = summaries.score(layer, q, n)
    count = len(summaries) if n is None else n
    assert found.shape == (len(q), count)
    assert found.dtype == np.float32
    want, off = want_scores([summaries.entry(c)[layer] for c in range(count)], q)
    assert (np.abs(found - want) <= off).all()


#
# what a summary is
#


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_k", TYPES)
def test_a_summary_is_what_numpy_makes_of_the_keys(kind: str, type_k: str) -> None:
    layers = geometry(type_k=type_k)
    records = [record_of(layers, seed, type_k) for seed in range(3)]
    summaries = kept(layers, kind, records)
    for record, chunk in zip(records, range(3), strict=True):
        for layer, entry in zip(layers, summaries.entry(chunk), strict=True):
            keys = keys_of(layer, record, type_k)
            want = np.stack([summary(keys[:, h].astype(np.float64), kind) for h in range(2)])
            assert entry.shape == want.shape
            assert entry.dtype == np.float32
            if kind == "rows":
                assert np.array_equal(entry, to_bf16(want.astype(np.float32)))
            else:
                np.testing.assert_allclose(entry, want, rtol=BF16, atol=1e-5)  # 1e-5: sums in float near zero


@pytest.mark.parametrize("n_chunk", [16, 32, 64])
@pytest.mark.parametrize(("d", "n_head_kv"), [(64, 1), (80, 2), (128, 3)])
@pytest.mark.parametrize("kind", ["centroid:4", "rows"])
def test_chunks_and_heads_of_any_size(n_chunk: int, d: int, n_head_kv: int, kind: str) -> None:
    layers = geometry(d=d, n_head_kv=n_head_kv, n_head=n_head_kv, n_chunk=n_chunk, type_k="q8_0")
    record = record_of(layers, 5, "q8_0", n_chunk)
    summaries = kept(layers, kind, [record, record], n_chunk)
    for layer, entry, again in zip(layers, summaries.entry(0), summaries.entry(1), strict=True):
        keys = keys_of(layer, record, "q8_0").astype(np.float64)
        want = np.stack([summary(keys[:, h], kind) for h in range(n_head_kv)])
        np.testing.assert_allclose(entry, want, rtol=BF16, atol=1e-5)
        assert np.array_equal(entry, again)


def test_rows_that_are_equally_far_go_to_the_lower_index() -> None:
    """The first seed is the first of the rows farthest from the mean; a row between two centroids is the first one's."""
    keys = np.zeros((16, 1, 2), np.float32)
    keys[3, 0], keys[7, 0] = (-4, 0), (4, 0)
    found = kept(*_with(layer_of_keys(keys), "centroid:2")).entry(0)[0][0]
    assert np.array_equal(found, to_bf16(np.array([[-4 / 15, 0], [4, 0]], np.float32)))
    found = kept(*_with(layer_of_keys(-keys), "centroid:2")).entry(0)[0][0]
    assert np.array_equal(found, to_bf16(np.array([[4 / 15, 0], [-4, 0]], np.float32)))


def _with(made: tuple[list[Layer], Record], kind: str) -> tuple[list[Layer], str, list[Record]]:
    layers, record = made
    return layers, kind, [record]


def test_a_centroid_without_rows_stays_where_it_is() -> None:
    """Two places, four centroids: the third and the fourth seed are the first row, whose centroid has all the rows."""
    keys = np.zeros((16, 1, 2), np.float32)
    keys[:, 0] = (3, 4)
    keys[9, 0] = (0, -2)
    found = kept(*_with(layer_of_keys(keys), "centroid:4")).entry(0)[0][0]
    assert found.tolist() == [[0, -2], [3, 4], [3, 4], [3, 4]]


#
# what a summary depends on
#


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_the_same_records_give_the_same_bits(kind: str, type_k: str) -> None:
    """Built again, put anew, put in other places, and after others were there."""
    layers = geometry(type_k=type_k)
    records = [record_of(layers, seed, type_k) for seed in range(6)]
    first = kept(layers, kind, records)
    want = bits(first)
    assert len(set(want)) == 6
    assert bits(kept(layers, kind, records)) == want
    first.put(2, records[2].copy())
    assert bits(first) == want
    first.put(2, records[5])
    assert bits(first) == [*want[:2], want[5], *want[3:]]
    first.put(2, records[2])
    assert bits(first) == want
    assert bits(kept(layers, kind, records[::-1])) == want[::-1]


SIGN = {"f32": (4, 3, 0x80), "f16": (2, 1, 0x80), "bf16": (2, 1, 0x80), "q8_0": (34, 1, 0x80), "q4_0": (18, 1, 0x80)}
"""Bytes of a value, or of a block, and where the bit that is the sign of it, or of its scale, is."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_k", TYPES)
def test_a_single_bit_of_a_key_matters(kind: str, type_k: str) -> None:
    """The sign of the largest value in a head, or of the scale of its block: a summary of any kind must see it."""
    layers = geometry(n_layer=1, type_k=type_k)
    record = record_of(layers, 0, type_k)
    keys = np.abs(keys_of(layers[0], record, type_k)).reshape(-1)
    size, byte, bit = SIGN[type_k]
    largest = int(np.argmax(keys))
    block = largest // (len(keys) * size // layers[0].size_k)
    changed = record.copy()
    changed[META + block * size + byte] ^= bit
    assert np.count_nonzero(changed != record) == 1
    assert not np.array_equal(keys_of(layers[0], changed, type_k), keys_of(layers[0], record, type_k))
    assert bits(kept(layers, kind, [record])) != bits(kept(layers, kind, [changed]))


def test_putting_a_chunk_leaves_the_others_alone() -> None:
    """Beside it in the same panel of 16 rows, in the same slab and in the next one."""
    layers = geometry(n_layer=1, d=64)
    records = [record_of(layers, seed) for seed in range(4)]
    summaries = kept(layers, "centroid:4", [records[i % 3] for i in range(SLAB + 3)])
    want = bits(summaries)
    for chunk in (0, 1, 5, SLAB - 1, SLAB, SLAB + 2):
        summaries.put(chunk, records[3])
        after = bits(summaries)
        assert [c for c in range(SLAB + 3) if after[c] != want[c]] == [chunk]
        summaries.put(chunk, records[chunk % 3])


def test_summaries_forget_and_go_on() -> None:
    layers = geometry()
    records = [record_of(layers, seed) for seed in range(8)]
    summaries = kept(layers, "centroid:4", records[:6])
    summaries.truncate(3)
    assert len(summaries) == 3
    assert summaries.score(0, queries(layers[0])).shape == (4, 3)
    with pytest.raises(UsageError, match="chunk 4 cannot be summarised yet: chunk 3 is next"):
        summaries.put(4, records[4])
    for chunk in (3, 4):
        summaries.put(chunk, records[chunk + 3])
    assert bits(summaries) == bits(kept(layers, "centroid:4", [*records[:3], *records[6:]]))
    summaries.truncate(100)
    assert len(summaries) == 5
    summaries.truncate(0)
    assert len(summaries) == summaries.n_bytes == 0
    summaries.put(0, records[7])
    assert bits(summaries) == bits(kept(layers, "centroid:4", records[7:]))


#
# scores
#


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_a_score_is_the_largest_product_with_a_row(kind: str, d: int, group: int) -> None:
    """Of any number of query heads to a head of keys."""
    layers = geometry(n_head=2 * group, d=d)
    summaries = kept(layers, kind, [record_of(layers, seed) for seed in range(7)])
    for layer in (0, 1):
        for n in (None, 1, 4, 6):
            check_scores(summaries, queries(layers[layer], n or 0), layer, n)


@pytest.mark.parametrize("kind", ["centroid:2", "centroid:16"])
def test_scores_across_slabs(kind: str) -> None:
    """Chunks 255 and 256 lie side by side in a score, and not in memory."""
    layers = geometry(n_layer=1, n_head=3, n_head_kv=1, d=32)
    records = [record_of(layers, seed) for seed in range(600)]
    summaries = Summaries(layers, 16, kind)
    q = queries(layers[0])
    for chunk, record in enumerate(records):
        summaries.put(chunk, record)
        if chunk + 1 in {255, 256, 257, 511, 600}:
            check_scores(summaries, q, 0)
    whole = summaries.score(0, q)
    for n in (1, 17, 255, 256, 257, 512, 513, 599):
        assert np.array_equal(summaries.score(0, q, n), whole[:, :n])


def test_queries_may_lie_anywhere_and_nothing_is_scored_for_nothing() -> None:
    layers = geometry()
    summaries = kept(layers, "centroid:4", [record_of(layers, seed) for seed in range(3)])
    q = queries(layers[0])
    want = summaries.score(0, q)
    assert np.array_equal(summaries.score(0, np.asfortranarray(q)), want)
    assert np.array_equal(summaries.score(0, np.repeat(q, 2, axis=1)[:, ::2]), want)
    assert summaries.score(0, q, 0).shape == (4, 0)
    assert Summaries(layers, 16, "mean").score(1, q).shape == (4, 0)


def test_scores_do_not_change_while_chunks_are_appended() -> None:
    """In a thread, as they are asked for beside decode, across several slabs."""
    layers = geometry(n_layer=1, d=128)
    records = [record_of(layers, seed) for seed in range(8)]
    summaries = kept(layers, "centroid:4", [records[i % 8] for i in range(SLAB - 6)])
    n, q = len(summaries), queries(layers[0])
    want = summaries.score(0, q)
    assert all(asked_while_appended(summaries, records, lambda: np.array_equal(summaries.score(0, q, n), want)))
    assert np.array_equal(summaries.score(0, q, n), want)


#
# memory
#


def test_no_memory_is_an_error_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = geometry()
    summaries = kept(layers, "centroid:4", [record_of(layers, seed) for seed in range(3)])
    want = bits(summaries)

    def full(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "full", full)
        with pytest.raises(MemoryError):
            summaries.reserve(SLAB + 1)
    assert (len(summaries), summaries.n_bytes) == (3, SLAB * summaries.chunk_bytes)
    assert bits(summaries) == want
    summaries.reserve(SLAB + 1)


#
# errors
#


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "centroid",
        "centroid:",
        "centroid:-1",
        "centroid:100",
        "centroid4",
        "xcentroid:4",
        "runs:4",
        "minmax",
        "MEAN",
        "mean:2",
        "mean\n",
    ],
)
def test_a_summary_that_there_is_not(kind: str) -> None:
    with pytest.raises(UsageError, match=r"is not a summary of keys: give centroid:N, mean, direction or rows"):
        Summaries(geometry(), 16, kind)


@pytest.mark.parametrize(
    "change",
    [{"n_embd_k": 192}, {"n_embd_head_k": 63, "n_embd_k": 126}, {"n_head": 5}, {"n_head_kv": 0}, {"n_head_kv": 1}],
    ids=str,
)
def test_keys_that_are_no_heads(change: dict[str, int]) -> None:
    """Latent attention, odd heads, heads that share no keys evenly."""
    layers = geometry()
    layers[1] = dataclasses.replace(layers[1], **change)
    with pytest.raises(UnsupportedError, match=r"the keys of layer 1 are not [012] heads of 6[34] dimensions"):
        Summaries(layers, 16, "centroid:4")


@pytest.mark.parametrize("missing", ["the last key", "a layer", "all"])
def test_a_record_that_is_too_short(missing: str) -> None:
    layers = geometry()
    end = {"the last key": layers[1].offs_k + layers[1].size_k - 1, "a layer": layers[1].offs_k, "all": 0}[missing]
    summaries = Summaries(layers, 16, "centroid:4")
    with pytest.raises(UsageError, match="the record is shorter than this layer's keys"):
        summaries.put(0, record_of(layers)[:end])
    assert len(summaries) == 0
    summaries.put(0, record_of(layers))
    assert bits(summaries) == bits(kept(layers, "centroid:4", [record_of(layers)]))


@pytest.mark.parametrize("shape", [(4, 63), (3, 64), (5, 64), (256,), (1, 4, 64), (64, 4)])
def test_queries_of_another_shape(shape: tuple[int, ...]) -> None:
    layers = geometry()
    summaries = kept(layers, "mean", [record_of(layers)])
    with pytest.raises(
        UsageError,
        match=r"^queries \(.*\) for 1 chunks do not fit layer 1, which has \(4, 64\) for each token, and 1 chunks$",
    ):
        summaries.score(1, np.zeros(shape, np.float32))


def test_more_chunks_than_there_are() -> None:
    """Though there is memory for them."""
    layers = geometry()
    summaries = kept(layers, "mean", [record_of(layers)] * 3)
    with pytest.raises(
        UsageError, match=r"for 4 chunks do not fit layer 0, which has \(4, 64\) for each token, and 3 chunks$"
    ):
        summaries.score(0, queries(layers[0]), 4)
    summaries.truncate(2)
    with pytest.raises(
        UsageError, match=r"for 3 chunks do not fit layer 0, which has \(4, 64\) for each token, and 2 chunks$"
    ):
        summaries.score(0, queries(layers[0]), 3)
