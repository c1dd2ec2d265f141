"""Summaries of keys against numpy, on made-up layers and records: what they are, what they depend on, what they score."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import tiny
from gguf import quants

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from pyllama_kvflash import KVFlash, native
from pyllama_kvflash.errors import KVFlashError, UnsupportedError, UsageError
from pyllama_kvflash.native import CACHE_TYPES, Layer, Record, Summaries, row_bytes
from pyllama_kvflash.native.summary import SLAB

pytestmark = pytest.mark.native

Keys = npt.NDArray[np.float32]  # row, head of K, dimension
KINDS = (
    *(f"centroid:{n}" for n in (1, 2, 4, 8, 16)),
    *(f"runs:{n}" for n in (1, 4, 16)),
    *("mean", "direction", "minmax", "exact"),
)
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")

META = 832  # bytes of a record before its first layer
N_EMBD_V = 48
BF16 = 2**-8  # bf16 has 8 significant bits: it is at most half of the last one off, relative to what was rounded


def geometry(
    *, n_layer: int = 2, n_head: int = 4, n_head_kv: int = 2, d: int = 64, n_chunk: int = 16, type_k: str = "f16"
) -> list[Layer]:
    """Layers as a record has them: K rows and V rows in turn."""
    res, offset = [], META
    size_k = row_bytes(CACHE_TYPES[type_k], n_head_kv * d) * n_chunk
    size_v = 2 * N_EMBD_V * n_chunk
    for il in range(n_layer):
        res.append(
            Layer(
                il=il,
                type_k=CACHE_TYPES[type_k],
                type_v=CACHE_TYPES["f16"],
                n_embd_k=n_head_kv * d,
                n_embd_v=N_EMBD_V,
                n_head=n_head,
                n_head_kv=n_head_kv,
                n_embd_head_k=d,
                device=0,
                offs_k=offset,
                size_k=size_k,
                offs_v=offset + size_k,
                size_v=size_v,
            )
        )
        offset += size_k + size_v
    return res


def encode(values: Keys, type_k: str) -> Record:
    """Rows as the cache holds them."""
    kind = gguf.GGMLQuantizationType[type_k.upper()]
    return np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8).reshape(-1)


def record_of(layers: Sequence[Layer], seed: int = 0, type_k: str = "f16", n_chunk: int = 16) -> Record:
    """Random bytes, and random keys around three places, so near each other that Lloyd steps would go on changing them."""
    rng = np.random.default_rng(seed)
    res = rng.integers(0, 256, layers[-1].offs_v + layers[-1].size_v).astype(np.uint8)
    for layer in layers:
        places = 0.5 * rng.standard_normal((3, layer.n_embd_k))
        keys = places[rng.integers(0, 3, n_chunk)] + rng.standard_normal((n_chunk, layer.n_embd_k))
        res[layer.offs_k : layer.offs_k + layer.size_k] = encode(keys.astype(np.float32), type_k)
    return res


def keys_of(layer: Layer, record: Record, type_k: str = "f16") -> Keys:
    """The keys in a record."""
    raw = record[layer.offs_k : layer.offs_k + layer.size_k]
    kind = gguf.GGMLQuantizationType[type_k.upper()]
    n_chunk = layer.size_k // row_bytes(layer.type_k, layer.n_embd_k)
    flat = {"f32": np.float32, "f16": np.float16}.get(type_k)
    values = raw.view(flat) if flat else quants.dequantize(raw.reshape(n_chunk, -1), kind)
    return values.astype(np.float32).reshape(n_chunk, layer.n_head_kv, layer.n_embd_head_k)


def layer_of_keys(keys: Keys) -> tuple[list[Layer], Record]:
    """One layer, and a record with exactly these keys."""
    n_chunk, n_head_kv, d = keys.shape
    layers = geometry(n_layer=1, n_head=n_head_kv, n_head_kv=n_head_kv, d=d, n_chunk=n_chunk, type_k="f32")
    record = np.zeros(layers[-1].offs_v + layers[-1].size_v, np.uint8)
    record[META : META + layers[0].size_k] = keys.astype(np.float32).reshape(-1).view(np.uint8)
    return layers, record


def kept(layers: Sequence[Layer], kind: str, records: Sequence[Record], n_chunk: int = 16) -> Summaries:
    res = Summaries(layers, n_chunk, kind)
    for chunk, record in enumerate(records):
        res.put(chunk, record)
    return res


def bits(summaries: Summaries, layer: int | None = None, n: int | None = None) -> list[bytes]:
    """Of each chunk, in one layer or in all."""
    entries = [summaries.entry(chunk) for chunk in range(len(summaries) if n is None else n)]
    return [b"".join(x.tobytes() for x in (e if layer is None else [e[layer]])) for e in entries]


#
# the reference
#


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


def lengthened(keys: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Their mean, as long as they are on average."""
    mean: npt.NDArray[np.float64] = keys.mean(axis=0)
    return mean / np.linalg.norm(mean) * np.linalg.norm(keys, axis=1).mean()


def summary(keys: npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.float64]:
    """Of one head's keys (row, dimension)."""
    mean = keys.mean(axis=0)
    name, _, n = kind.partition(":")
    return {
        "centroid": lambda: centroids(keys, int(n)),
        "runs": lambda: np.array([lengthened(run) for run in np.split(keys, int(n))]),
        "mean": lambda: mean[None],
        "direction": lambda: mean[None] / np.linalg.norm(mean),
        "minmax": lambda: np.array([keys.min(axis=0), keys.max(axis=0)]),
        "exact": lambda: keys,
    }[name]()


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rounded to the nearest, ties to even."""
    u = x.astype(np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def want_scores(rows: Sequence[npt.NDArray[np.float32]], q: npt.NDArray[np.float32], kind: str) -> Any:
    """(n_head, n) and what one sum of products may be off, for the summaries (n_head_kv, n_row, d) of each chunk."""
    group = len(q) // len(rows[0])
    res, off = np.empty((len(q), len(rows))), np.empty((len(q), len(rows)))
    for c, entry in enumerate(rows):
        for h, x in enumerate(q.astype(np.float64)):
            terms = entry[h // group].astype(np.float64) * x
            res[h, c] = terms.max(axis=0).sum() if kind == "minmax" else terms.sum(axis=1).max()
            off[h, c] = 2**-20 * np.abs(terms).sum(axis=1).max()
    return res, off


def check_scores(summaries: Summaries, q: npt.NDArray[np.float32], layer: int, n: int | None = None) -> None:
    found = summaries.score(layer, q, n)
    count = len(summaries) if n is None else n
    assert found.shape == (len(q), count)
    assert found.dtype == np.float32
    want, off = want_scores([summaries.entry(c)[layer] for c in range(count)], q, summaries.kind)
    assert (np.abs(found - want) <= off).all()


def queries(layer: Layer, seed: int = 3) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((layer.n_head, layer.n_embd_head_k)).astype(np.float32)


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
            if kind in {"exact", "minmax"}:
                assert np.array_equal(entry, to_bf16(want.astype(np.float32)))
            else:
                np.testing.assert_allclose(entry, want, rtol=BF16, atol=1e-5)  # 1e-5: sums in float near zero


@pytest.mark.parametrize("n_chunk", [16, 32, 64])
@pytest.mark.parametrize(("d", "n_head_kv"), [(64, 1), (80, 2), (128, 3)])
@pytest.mark.parametrize("kind", ["centroid:4", "minmax", "exact"])
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


def test_a_centroid_is_as_long_as_its_keys_are_on_average() -> None:
    """Keys that point away from each other: their mean is short."""
    keys = np.zeros((16, 1, 2), np.float32)
    keys[:8, 0], keys[8:, 0] = (3, 4), (4, -3)
    assert np.allclose(kept(*_with(layer_of_keys(keys), "mean")).entry(0)[0][0], [[3.5, 0.5]], rtol=BF16)
    one = kept(*_with(layer_of_keys(keys), "centroid:1")).entry(0)[0][0]
    np.testing.assert_allclose(one, [5 * np.array([3.5, 0.5]) / np.hypot(3.5, 0.5)], rtol=BF16)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_all_zero_have_a_summary_of_zeros(kind: str) -> None:
    summaries = kept(*_with(layer_of_keys(np.zeros((16, 2, 4), np.float32)), kind))
    assert not summaries.entry(0)[0].any()
    assert not summaries.score(0, np.ones((2, 4), np.float32)).any()


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_k", TYPES)
def test_a_summary_depends_on_the_keys_of_its_layer_alone(kind: str, type_k: str) -> None:
    layers = geometry(n_layer=3, type_k=type_k)
    record = record_of(layers, 0, type_k)
    layer = layers[1]
    mine = slice(layer.offs_k, layer.offs_k + layer.size_k)
    other = record_of(layers, 1, type_k)
    assert np.count_nonzero(other != record) > 0.9 * len(record)
    other[mine] = record[mine]
    assert bits(kept(layers, kind, [record]), 1) == bits(kept(layers, kind, [other]), 1)
    assert bits(kept(layers, kind, [record]), 0) != bits(kept(layers, kind, [other]), 0)
    assert bits(kept(layers, kind, [record]), 2) != bits(kept(layers, kind, [other]), 2)


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
    with pytest.raises(UsageError, match="chunk 4 is summarised, where 3 is next"):
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
    """For "minmax" the bound of Quest, of any number of query heads to a head of keys."""
    layers = geometry(n_head=2 * group, d=d)
    summaries = kept(layers, kind, [record_of(layers, seed) for seed in range(7)])
    for layer in (0, 1):
        for n in (None, 1, 4, 6):
            check_scores(summaries, queries(layers[layer], n or 0), layer, n)


@pytest.mark.parametrize("kind", ["centroid:2", "centroid:16", "minmax"])
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


@pytest.mark.parametrize("n_chunk", [32, 64])
def test_scores_of_more_rows_than_a_panel_has(n_chunk: int) -> None:
    layers = geometry(n_chunk=n_chunk)
    records = [record_of(layers, seed, n_chunk=n_chunk) for seed in range(5)]
    summaries = kept(layers, "exact", records, n_chunk)
    for layer in (0, 1):
        check_scores(summaries, queries(layers[layer]), layer)
    found = summaries.score(0, queries(layers[0]))
    products = [np.einsum("hd,rhd->hr", queries(layers[0]), keys_of(layers[0], r).repeat(2, axis=1)) for r in records]
    np.testing.assert_allclose(found.T, [x.max(axis=1) for x in products], rtol=0.02)  # keys are rounded to bf16


def test_minmax_is_above_every_product_with_a_key() -> None:
    layers = geometry(n_layer=1, type_k="bf16")
    records = [record_of(layers, seed, "bf16") for seed in range(20)]
    q = queries(layers[0])
    bound, exact = (kept(layers, kind, records).score(0, q) for kind in ("minmax", "exact"))
    assert (bound >= exact - 1e-4).all()
    assert (bound > exact).any()


def test_queries_may_lie_anywhere_and_nothing_is_scored_for_nothing() -> None:
    layers = geometry()
    summaries = kept(layers, "centroid:4", [record_of(layers, seed) for seed in range(3)])
    q = queries(layers[0])
    want = summaries.score(0, q)
    assert np.array_equal(summaries.score(0, np.asfortranarray(q)), want)
    assert np.array_equal(summaries.score(0, np.repeat(q, 2, axis=1)[:, ::2]), want)
    assert summaries.score(0, q, 0).shape == (4, 0)
    assert Summaries(layers, 16, "mean").score(1, q).shape == (4, 0)


def asked_while_appended(
    summaries: Summaries, records: Sequence[npt.NDArray[np.uint8]], ask: Callable[[], bool]
) -> list[bool]:
    """What a thread is told that asks again and again, while chunks are appended until there are three slabs."""
    found: list[bool] = []
    stop = threading.Event()

    def asking() -> None:
        while not stop.is_set():
            found.append(ask())

    thread = threading.Thread(target=asking)
    thread.start()
    try:
        for chunk in itertools.count(len(summaries)):
            if chunk >= 3 * SLAB and len(found) >= 20:
                break
            summaries.put(chunk, records[(chunk + 1) % 8])
    finally:
        stop.set()
        thread.join()
    return found


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
# mass
#


def counts(summaries: Summaries, layer: int, chunk: int) -> npt.NDArray[np.float64]:
    """How many keys each row (n_head_kv, n_row) of a chunk stands for, as it is kept."""
    slab, i = divmod(chunk, SLAB)
    n_head_kv, d, n_row = summaries._layers[layer].n_head_kv, summaries._layers[layer].n_embd_head_k, summaries._n_row
    last = summaries._slabs[slab][layer].reshape(-1, n_head_kv, d + 1, 16)[:, :, -1]
    flat = last.transpose(1, 0, 2).reshape(n_head_kv, -1)[:, i * n_row : (i + 1) * n_row]
    return np.exp((flat.astype(np.uint32) << 16).view(np.float32).astype(np.float64))


def shares(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The softmax of (chunk, row) over all of them, summed over rows."""
    weights = np.exp(logits - logits.max())
    res: npt.NDArray[np.float64] = weights.sum(axis=1) / weights.sum()
    return res


def want_mass(summaries: Summaries, layer: int, q: npt.NDArray[np.float32], scale: float, n: int) -> Any:
    """By the words of the docstring, from the rows and counts that are kept."""
    rows = np.stack([summaries.entry(c)[layer] for c in range(n)]).astype(np.float64)  # chunk, head, row, dimension
    weight = np.log(np.maximum([counts(summaries, layer, c) for c in range(n)], 1e-300))
    group = q.shape[1] // rows.shape[1]
    each = [
        sum(shares(scale * rows[:, h // group] @ x + weight[:, h // group]) for h, x in enumerate(of_token))
        for of_token in q.astype(np.float64)
    ]
    return np.max(each, axis=0)


def check_mass(
    summaries: Summaries, layer: int, q: npt.NDArray[np.float32], scale: float, n: int | None = None
) -> None:
    found = mass_of(summaries, layer, q, scale, n)
    count = len(summaries) if n is None else n
    assert (found.shape, found.dtype) == ((count,), np.float32)
    np.testing.assert_allclose(found, want_mass(summaries, layer, q, scale, count), rtol=3e-4, atol=1e-6)


def mass_of(summaries: Summaries, layer: int, q: Keys, scale: float, n: int | None = None) -> Keys:
    """In one layer."""
    return summaries.mass([layer], [q], [scale], n)[0]


def some_queries(layer: Layer, n: int, size: float = 1) -> npt.NDArray[np.float32]:
    return size * np.stack([queries(layer, 10 + i) for i in range(n)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "minmax"])
@pytest.mark.parametrize("d", [2, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
def test_mass_is_the_share_of_the_attention(kind: str, d: int, group: int) -> None:
    """Of any number of query heads to a head of keys, of the first chunks or of all, for one token and the most of several."""
    layers = geometry(n_head=2 * group, d=d)
    summaries = kept(layers, kind, [record_of(layers, seed) for seed in range(7)])
    for layer in (0, 1):
        for n in (None, 1, 4, 6):
            for n_token in (1, 3):
                check_mass(summaries, layer, some_queries(layers[layer], n_token), 2 * d**-0.5, n)


@pytest.mark.parametrize("n_chunk", [16, 32, 64])
@pytest.mark.parametrize("kind", ["centroid:1", "centroid:4", "centroid:16", "exact", "mean"])
def test_mass_of_chunks_of_any_size(kind: str, n_chunk: int) -> None:
    """Chunks of more rows than a panel has, and panels of several chunks."""
    layers = geometry(n_head=3, n_head_kv=1, d=32, n_chunk=n_chunk)
    summaries = kept(layers, kind, [record_of(layers, seed, n_chunk=n_chunk) for seed in range(9)], n_chunk)
    for n in range(1, 10):
        check_mass(summaries, 1, some_queries(layers[1], 2), 0.3, n)


@pytest.mark.parametrize("kind", ["centroid:1", "centroid:4", "exact"])
def test_mass_across_slabs(kind: str) -> None:
    """The share is of all chunks, wherever they lie."""
    layers = geometry(n_layer=1, n_head=2, n_head_kv=1, d=16)
    records = [record_of(layers, seed) for seed in range(20)]
    summaries = Summaries(layers, 16, kind)
    for chunk in range(600):
        summaries.put(chunk, records[chunk * 7 % 20])
    for n in (1, 255, 256, 257, 511, 512, 513, 599, 600):
        check_mass(summaries, 0, some_queries(layers[0], 2), 0.5, n)
        assert mass_of(summaries, 0, some_queries(layers[0], 1), 0.5, n).sum() == pytest.approx(2, rel=1e-5)


def test_mass_follows_slabs_that_come_and_go() -> None:
    """Where the slabs are is remembered: of as many as there are now."""
    layers = geometry(n_layer=1, n_head=1, n_head_kv=1, d=16)
    records = [record_of(layers, seed) for seed in range(4)]
    summaries, q = Summaries(layers, 16, "mean"), some_queries(layers[0], 1)
    for chunk in range(520):
        summaries.put(chunk, records[chunk % 3])
        if chunk in {0, 255, 256, 300, 519}:
            check_mass(summaries, 0, q, 1)
    for n in (519, 300, 256, 3):
        summaries.truncate(n)
        check_mass(summaries, 0, q, 1)
        for chunk in range(n, 520):
            summaries.put(chunk, records[(chunk + n) % 4])
        check_mass(summaries, 0, q, 1)


@pytest.mark.parametrize("type_k", ["f32", "f16", "q8_0", "q4_0"])
def test_mass_of_exact_summaries_is_the_softmax_of_the_keys(type_k: str) -> None:
    """Of the keys themselves, but for their rounding to bf16, which moves a product by 1/256 of it at most."""
    layers = geometry(n_head=6, n_head_kv=2, d=128, type_k=type_k)
    records = [record_of(layers, seed, type_k) for seed in range(12)]
    summaries = kept(layers, "exact", records)
    for i, layer in enumerate(layers):
        q = some_queries(layer, 1)
        keys = np.stack([keys_of(layer, r, type_k) for r in records]).astype(np.float64)  # chunk, row, head, dimension
        logits = [128**-0.5 * keys[:, :, h // 3] @ x for h, x in enumerate(q[0].astype(np.float64))]
        terms = max(float((np.abs(keys[:, :, h // 3]) @ np.abs(x)).max()) for h, x in enumerate(q[0]))
        off = np.expm1(2 * BF16 / 2 * 128**-0.5 * terms)  # numerator and denominator
        np.testing.assert_allclose(mass_of(summaries, i, q, 128**-0.5), sum(map(shares, logits)), rtol=off)
        np.testing.assert_allclose(mass_of(summaries, i, q, 128**-0.5), sum(map(shares, logits)), rtol=0.02)


def test_a_centroid_weighs_as_many_keys_as_it_stands_for() -> None:
    """Twelve keys here and four there: the same product for both, and a share of three to one. Centroids without keys have none."""
    keys = np.zeros((16, 1, 2), np.float32)
    keys[:12, 0], keys[12:, 0] = (1, 0), (0, 1)
    layers, record = layer_of_keys(keys)
    summaries = kept(layers, "centroid:4", [record])
    assert np.allclose(np.sort(counts(summaries, 0, 0)[0]), [0, 0, 4, 12], rtol=0.01)
    assert np.allclose(counts(kept(layers, "runs:4", [record]), 0, 0), 4, rtol=0.01)
    assert np.allclose(counts(kept(layers, "mean", [record]), 0, 0), 16, rtol=0.01)
    assert np.allclose(counts(kept(layers, "exact", [record]), 0, 0), 1)

    other = np.zeros((16, 1, 2), np.float32)
    other[:4, 0], other[4:, 0] = (1, 0), (0, 1)
    two = kept(layers, "centroid:2", [record, layer_of_keys(other)[1]])
    for q, share in (((50.0, 0.0), [12 / 16, 4 / 16]), ((0.0, 50.0), [4 / 16, 12 / 16]), ((0.0, 0.0), [0.5, 0.5])):
        np.testing.assert_allclose(mass_of(two, 0, np.array([[q]], np.float32), 1), share, rtol=0.01)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8, 1e15])
def test_very_large_products_do_not_overflow(size: float) -> None:
    """All of a head's attention is on its best key then, of either sign; and none of it is lost."""
    layers = geometry(n_layer=1, n_head=4, n_head_kv=2, d=64)
    records = [record_of(layers, seed) for seed in range(300)]
    for kind in ("exact", "centroid:4"):
        summaries = kept(layers, kind, records)
        q = some_queries(layers[0], 1, size)
        for sign in (1, -1):
            found = mass_of(summaries, 0, sign * q, 1)
            assert np.isfinite(found).all()
            assert found.sum() == pytest.approx(4, rel=1e-5)
            if size >= 1e4:
                best = {int(c) for c in summaries.score(0, sign * q[0]).argmax(axis=1)}
                assert {int(c) for c in np.flatnonzero(found > 0.5)} <= best
                assert found[sorted(best)].sum() == pytest.approx(4, rel=1e-3)


def test_no_product_at_all_is_an_even_share() -> None:
    """A scale of zero, and keys of zero: each chunk has as much as any other."""
    layers = geometry(n_layer=1)
    summaries = kept(layers, "exact", [record_of(layers, seed) for seed in range(5)])
    np.testing.assert_allclose(mass_of(summaries, 0, some_queries(layers[0], 2), 0), 4 / 5, rtol=1e-5)
    layers, record = layer_of_keys(np.zeros((16, 2, 4), np.float32))
    for kind in ("centroid:4", "centroid:16", "runs:4", "exact", "mean"):
        found = mass_of(kept(layers, kind, [record] * 7), 0, np.full((1, 2, 4), 1e3, np.float32), 1)
        np.testing.assert_allclose(found, 2 / 7, rtol=1e-5)


def test_mass_is_of_several_queries_the_most() -> None:
    """Of the sums over heads, not of each head's."""
    layers = geometry(n_layer=1)
    summaries = kept(layers, "centroid:4", [record_of(layers, seed) for seed in range(30)])
    q = some_queries(layers[0], 5, 3)
    each = [mass_of(summaries, 0, q[i : i + 1], 0.5) for i in range(5)]
    assert np.array_equal(mass_of(summaries, 0, q, 0.5), np.max(each, axis=0))
    assert np.array_equal(mass_of(summaries, 0, np.asfortranarray(q), 0.5), np.max(each, axis=0))


def test_mass_of_nothing_and_errors() -> None:
    layers = geometry()
    summaries = kept(layers, "mean", [record_of(layers)] * 3)
    q = some_queries(layers[0], 2)
    assert mass_of(summaries, 0, q, 1, 0).shape == (0,)
    assert mass_of(Summaries(layers, 16, "mean"), 1, q, 1).shape == (0,)
    for shape in ((4, 64), (2, 4, 63), (2, 3, 64), (2, 8, 64)):
        with pytest.raises(UsageError, match=r"^queries \(.*\) for 3 chunks, where layer 1 has \(4, 64\) and 3$"):
            mass_of(summaries, 1, np.zeros(shape, np.float32), 1)
    with pytest.raises(UsageError, match=r"for 4 chunks, where layer 0 has \(4, 64\) and 3$"):
        mass_of(summaries, 0, q, 1, 4)
    with pytest.raises(UsageError, match="layers, slabs, queries and room for the masses are needed"):
        mass_of(summaries, 0, q[:0], 1)


def unlike() -> list[Layer]:
    """Three layers, of which each has other heads."""
    res, offset = [], 0
    for n_head, n_head_kv, d in ((4, 2, 64), (6, 1, 32), (8, 8, 80)):
        (layer,) = geometry(n_layer=1, n_head=n_head, n_head_kv=n_head_kv, d=d)
        res.append(dataclasses.replace(layer, il=len(res), offs_k=layer.offs_k + offset, offs_v=layer.offs_v + offset))
        offset += layer.size_k + layer.size_v
    return res


@pytest.mark.parametrize("kind", ["centroid:4", "runs:2", "mean", "exact"])
def test_mass_of_several_layers_at_once_is_that_of_each(kind: str) -> None:
    """Bit for bit: whatever heads they have, in any order, across slabs, with a scale of its own for each."""
    layers = unlike()
    records = [record_of(layers, seed) for seed in range(7)]
    summaries = kept(layers, kind, [records[i * 5 % 7] for i in range(SLAB + 30)])
    scales = (0.125, 0.5, 1.0)
    for n_query in (1, 3):
        q = [some_queries(layer, n_query) for layer in layers]
        for n in (0, 1, 16, SLAB, SLAB + 1, None):
            each = [mass_of(summaries, i, q[i], scales[i], n) for i in range(3)]
            for order in ([0, 1, 2], [2, 0], [1], [1, 2, 1], range(3), []):
                found = summaries.mass(order, [q[i] for i in order], [scales[i] for i in order], n)
                assert found.shape == (len(order), SLAB + 30 if n is None else n)
                assert found.dtype == np.float32
                assert all(np.array_equal(mine, each[i]) for mine, i in zip(found, order, strict=True))
    assert not np.array_equal(each[0], mass_of(summaries, 0, q[0], scales[1])), "the scale matters"


def test_mass_of_several_layers_is_refused_whole() -> None:
    """One of them is wrong: it is said which."""
    layers = unlike()
    summaries = kept(layers, "centroid:2", [record_of(layers)] * 3)
    q = [some_queries(layer, 2) for layer in layers]
    with pytest.raises(UsageError, match=r"^queries \(2, 4, 64\) for 3 chunks, where layer 1 has \(6, 32\) and 3$"):
        summaries.mass([0, 1], [q[0], q[0]], [1, 1])
    with pytest.raises(UsageError, match=r"^queries \(1, 8, 80\) for 3 chunks, where layer 2 has"):
        summaries.mass([0, 1, 2], [q[0], q[1], q[2][:1]], [1, 1, 1])
    with pytest.raises(UsageError, match=r"for 4 chunks, where layer 2 has \(8, 80\) and 3$"):
        summaries.mass([2, 0], [q[2], q[0]], [1, 1], 4)
    with pytest.raises(UsageError, match="for -1 chunks"):
        summaries.mass([0], [q[0]], [1], -1)
    for short in ([q[0]], [*q, q[0]]):
        with pytest.raises(ValueError, match=r"argument 2 is (longer|shorter)"):
            summaries.mass([0, 1, 2], short, [1, 1, 1])
    for scales in ([1, 1], [1] * 4):
        with pytest.raises(ValueError, match=r"argument 3 is (longer|shorter)"):
            summaries.mass([0, 1, 2], q, scales)
    with pytest.raises(UsageError, match="layers, slabs, queries and room for the masses are needed"):
        summaries.mass([0, 1], [x[:0] for x in q[:2]], [1, 1])


def test_mass_does_not_change_while_chunks_are_appended() -> None:
    """In a thread, as it is asked for beside decode, across several slabs."""
    layers = geometry(n_layer=1, d=64)
    records = [record_of(layers, seed) for seed in range(8)]
    summaries = kept(layers, "centroid:4", [records[i % 8] for i in range(SLAB - 6)])
    n, q = len(summaries), some_queries(layers[0], 1)
    want = mass_of(summaries, 0, q, 1)
    assert all(asked_while_appended(summaries, records, lambda: np.array_equal(mass_of(summaries, 0, q, 1, n), want)))


#
# memory
#


def test_memory_comes_in_slabs_and_is_given_back() -> None:
    layers = geometry(d=128, n_chunk=64)
    summaries = Summaries(layers, 64, "centroid:4")
    slab = SLAB * summaries.chunk_bytes
    assert (len(summaries), summaries.n_layer, summaries.n_bytes) == (0, 2, 0)
    for n, slabs in ((0, 0), (1, 1), (256, 1), (257, 2), (10, 2), (600, 3)):
        summaries.reserve(n)
        assert summaries.n_bytes == slabs * slab
        assert len(summaries) == 0
    record = record_of(layers, n_chunk=64)
    for chunk in range(600):
        summaries.put(chunk, record)
    assert summaries.n_bytes == 3 * slab
    for n, slabs in ((513, 3), (512, 2), (257, 2), (256, 1), (1, 1), (0, 0)):
        summaries.truncate(n)
        assert (len(summaries), summaries.n_bytes) == (n, slabs * slab)


@pytest.mark.parametrize(
    ("kind", "n_row"),
    [("centroid:1", 1), ("centroid:4", 4), ("runs:8", 8), ("mean", 1), ("direction", 1), ("minmax", 2), ("exact", 64)],
)
def test_a_summary_takes_its_part_of_the_keys(kind: str, n_row: int) -> None:
    """n_row rows of 16 bits, where a chunk has 64: four centroids are a sixteenth of f16 keys; and for each row how many keys it
    stands for.
    """
    layers = geometry(n_layer=3, d=128, n_chunk=64)
    summaries = Summaries(layers, 64, kind)
    assert summaries.chunk_bytes == n_row / 64 * sum(layer.size_k for layer in layers) * (128 + 1) / 128


def test_places_do_not_move() -> None:
    """A score that is under way looks at them."""
    layers = geometry()
    record = record_of(layers)
    summaries = kept(layers, "mean", [record])

    def places() -> list[int]:
        return [rows.__array_interface__["data"][0] for slab in summaries._slabs for rows in slab]

    first = places()
    summaries.reserve(1000)
    before = places()
    assert before[:2] == first
    for chunk in range(1, 1001):
        summaries.put(chunk, record)
        assert places() == before
    summaries.truncate(500)
    assert places() == before[:4]


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
        "runs",
        "runs:",
        "runs4",
        "xruns:4",
        "MEAN",
        "mean:2",
        "mean\n",
    ],
)
def test_a_summary_that_there_is_not(kind: str) -> None:
    with pytest.raises(
        UsageError, match=r"is no summary of keys: give centroid:N, runs:N, mean, direction, minmax or exact"
    ):
        Summaries(geometry(), 16, kind)


@pytest.mark.parametrize("kind", ["centroid:0", "centroid:3", "centroid:12", "runs:0", "runs:3"])
def test_a_number_of_centroids_that_is_no_power_of_two(kind: str) -> None:
    with pytest.raises(UsageError, match=r"a summary has 1, 2, 4, \.\.\. 64 rows"):
        Summaries(geometry(), 16, kind)


def test_more_centroids_than_keys() -> None:
    for kind in ("centroid", "runs"):
        with pytest.raises(UsageError, match=f"{kind}:32 is asked for chunks of 16 keys: give {kind}:16 at most"):
            Summaries(geometry(), 16, f"{kind}:32")


@pytest.mark.parametrize(
    "change",
    [{"n_embd_k": 192}, {"n_embd_head_k": 63, "n_embd_k": 126}, {"n_head": 5}, {"n_head_kv": 0}, {"n_head_kv": 1}],
    ids=str,
)
def test_keys_that_are_no_heads(change: dict[str, int]) -> None:
    """Latent attention, odd heads, heads that share no keys evenly."""
    layers = geometry()
    layers[1] = dataclasses.replace(layers[1], **change)
    with pytest.raises(UnsupportedError, match=r"the keys of layer 1 are no [012] heads of 6[34] dimensions"):
        Summaries(layers, 16, "centroid:4")


def test_chunks_come_in_order() -> None:
    layers = geometry()
    summaries = Summaries(layers, 16, "mean")
    with pytest.raises(UsageError, match="chunk 1 is summarised, where 0 is next"):
        summaries.put(1, record_of(layers))
    with pytest.raises(UsageError, match="chunk -1 is summarised, where 0 is next"):
        summaries.put(-1, record_of(layers))
    assert len(summaries) == summaries.n_bytes == 0


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


def test_a_record_of_chunks_of_another_size() -> None:
    layers = geometry(n_chunk=64)
    with pytest.raises(UsageError, match="the record is shorter than this layer's keys"):
        Summaries(layers, 16, "mean").put(0, record_of(layers, n_chunk=64))
    with pytest.raises(UsageError, match="a chunk has 16, 32 or 64 positions"):
        Summaries(layers, 48, "mean").put(0, record_of(layers, n_chunk=64))


@pytest.mark.parametrize("shape", [(4, 63), (3, 64), (5, 64), (256,), (1, 4, 64), (64, 4)])
def test_queries_of_another_shape(shape: tuple[int, ...]) -> None:
    layers = geometry()
    summaries = kept(layers, "mean", [record_of(layers)])
    with pytest.raises(UsageError, match=r"^queries \(.*\) for 1 chunks, where layer 1 has \(4, 64\) and 1$"):
        summaries.score(1, np.zeros(shape, np.float32))


def test_more_chunks_than_there_are() -> None:
    """Though there is memory for them."""
    layers = geometry()
    summaries = kept(layers, "mean", [record_of(layers)] * 3)
    with pytest.raises(UsageError, match=r"for 4 chunks, where layer 0 has \(4, 64\) and 3$"):
        summaries.score(0, queries(layers[0]), 4)
    summaries.truncate(2)
    with pytest.raises(UsageError, match=r"for 3 chunks, where layer 0 has \(4, 64\) and 2$"):
        summaries.score(0, queries(layers[0]), 3)


#
# in use
#


@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_a_live_sequence_has_the_summaries_of_its_records(tiny_path: Callable[[str], Path], type_k: str) -> None:
    """While it pages, after a rollback into a chunk, and going on from there with other tokens."""
    tokens = np.random.default_rng(8).integers(0, tiny.N_VOCAB, 4000).astype(np.int32)
    options: dict[str, Any] = {"n_ctx": 16384, "pool": 768, "n_batch": 64, "n_threads": 1}
    with KVFlash.from_file(tiny_path("qwen3"), policy="qk", type_k=type_k, type_v=type_k, **options) as kv:

        def feed(end: int, first: int) -> list[bytes]:
            while kv.n_tokens < end:
                size = min(64, end - kv.n_tokens)
                kv.decode(tokens[first : first + size])
                first += size
            return check()

        def check() -> list[bytes]:
            pager = kv._pager
            assert pager is not None
            pager.wait_stored()
            assert pager.summaries is not None
            assert len(pager.summaries) == kv.n_tokens // 64 == len(pager.records)
            again = Summaries(kv.ctx.layers(), 64, pager.summaries.kind)
            for chunk in range(len(pager.summaries)):
                again.put(chunk, pager.records.get(chunk))
            found = bits(pager.summaries)
            assert found == bits(again)
            assert len(set(found)) == len(found)
            return found

        first = feed(1500, 0)
        assert (kv.residency().state == 0).any()
        kv.rollback(6 * 64 + 13)  # chunk 6 was out
        assert check() == first[:6]
        second = feed(1300, 2000)
        assert second[:6] == first[:6]
        assert not set(second[6:]) & set(first[6:])
        kv.rollback(1280)
        assert check() == second
        kv.clear()
        assert check() == []


@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4", "gemma3", "llama"])
def test_mass_is_the_attention_of_the_model(tiny_path: Callable[[str], Path], name: str, type_k: str) -> None:
    """The softmax of the queries from the tap and the keys from the records, with the scale that the graph has; made in numpy."""
    tokens = np.random.default_rng(8).integers(0, tiny.N_VOCAB - 2, 900).astype(np.int32)
    options: dict[str, Any] = {"n_ctx": 4096, "pool": 512, "chunk": 16, "n_threads": 1, "qk_summary": "exact"}
    with KVFlash.from_file(tiny_path(name), policy="qk", type_k=type_k, type_v=type_k, **options) as kv:
        for _ in kv.prefill(tokens):
            pass
        pager, layers = kv.pager, kv.ctx.layers()
        pager.wait_stored()
        assert pager.summaries is not None
        n, scales, q = len(pager.summaries), kv.ctx.query_scales(), kv.queries()
        assert n == 900 // 16
        assert scales.tolist() == pytest.approx([SCALES.get(name, layer.n_embd_head_k**-0.5) for layer in layers])
        for i, layer in enumerate(layers):
            keys = np.stack([keys_of(layer, pager.records.get(c), type_k) for c in range(n)]).astype(np.float64)
            group = layer.n_head // layer.n_head_kv
            heads = [float(scales[i]) * keys[:, :, h // group] @ x for h, x in enumerate(q[i].astype(np.float64))]
            np.testing.assert_allclose(
                mass_of(pager.summaries, i, q[i][None], scales[i]), sum(map(shares, heads)), rtol=0.1, atol=1e-4
            )


SCALES = {"gemma4": 1.0, "gemma3": 1.0}
"""What products are multiplied by, where it is not 1/sqrt(d): Gemma's queries come scaled, or need none."""


@pytest.mark.parametrize("scale", [0.0, 0.015625, 0.3])
def test_the_scale_is_that_of_the_metadata(tmp_path: Path, scale: float) -> None:
    """Granite has its own in the file; none is 1/sqrt(d). The text depends on it, and so does what is said of it."""
    path = tmp_path / "granite.gguf"
    writer = tiny.Writer(path, "granite")
    tiny.families.geometry(writer, 2, logit_scale=1.0, **({"attention__scale": scale} if scale else {}))
    tiny.families.dense_layers(writer)
    writer.close()
    tokens = np.random.default_rng(8).integers(0, tiny.N_VOCAB - 2, 40).astype(np.int32)
    with KVFlash.from_file(path, n_ctx=1024, pool=512, chunk=16, n_threads=1) as kv:
        kv.decode(tokens)
        d = kv.ctx.layers()[0].n_embd_head_k
        assert kv.ctx.query_scales().tolist() == pytest.approx([scale or d**-0.5] * 2)


def test_there_are_no_scales_where_nothing_was_computed_or_tapped(tiny_path: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "pool": 512, "chunk": 16, "n_threads": 1}
    with KVFlash.from_file(tiny_path("qwen3"), policy="lru", **options) as kv:
        kv.decode(np.arange(40, dtype=np.int32))
        with pytest.raises(KVFlashError, match="no queries: nothing was decoded, or the pool has no Q tap"):
            kv.ctx.query_scales()
    with (
        KVFlash.from_file(tiny_path("qwen3"), policy="qk", **options) as kv,
        pytest.raises(KVFlashError, match="no queries: nothing was decoded"),
    ):
        kv.ctx.query_scales()


#
# all keys, from the records
#


@pytest.mark.parametrize("n_token", [1, 3])
def test_all_keys_are_looked_at(n_token: int) -> None:
    """As the exact summaries, but for their rounding."""
    layers = geometry()
    records = [record_of(layers, seed) for seed in range(5)]
    exact = kept(layers, "exact", records)
    keys = native.Keys(layers, 16, records.__getitem__)
    for i, layer in enumerate(layers):
        q = np.stack([queries(layer, seed) for seed in range(n_token)])
        found = keys.score(i, q, [4, 0, 2])
        want = np.concatenate([exact.score(i, one)[:, [4, 0, 2]] for one in q])
        assert found.shape == (n_token * layer.n_head, 3)
        np.testing.assert_allclose(found, want, atol=0.02 * np.abs(want).max())
    with pytest.raises(UsageError, match="are not those of layer 0"):
        keys.score(0, q[0], [1])


@pytest.mark.parametrize(("scale", "edge"), [(0.05, 0), (1.0, 0), (1e4, 0), (0.05, 4), (0.2, 1), (0.05, 16)])
@pytest.mark.parametrize("n_token", [1, 2, 9])
def test_all_keys_are_summed_up(n_token: int, scale: float, edge: int) -> None:
    """With a scale, the logarithm of what all keys of a chunk weigh, and those at its borders; large products do not overflow."""
    layers = geometry()
    records = [record_of(layers, seed) for seed in range(5)]
    keys = native.Keys(layers, 16, records.__getitem__)
    parts = [slice(None), slice(edge), slice(16 - edge, None)] if edge else [slice(None)]
    for i, layer in enumerate(layers):
        q = some_queries(layer, n_token)
        found = keys.score(i, q, [4, 0, 2], scale, edge).reshape(len(parts), n_token, layer.n_head, 3)
        group = layer.n_head // layer.n_head_kv
        for (part, t, h, c), value in np.ndenumerate(found):
            k = keys_of(layer, records[[4, 0, 2][c]])[parts[part], h // group].astype(np.float64)
            x = scale * k @ q[t, h].astype(np.float64)
            want = x.max() + np.log(np.exp(x - x.max()).sum())
            assert value == pytest.approx(want, rel=1e-5, abs=1e-4)


def test_edges_of_all_keys_are_checked() -> None:
    layers = geometry()
    keys = native.Keys(layers, 16, [record_of(layers, 0)].__getitem__)
    with pytest.raises(UsageError, match="no such edges"):
        keys.score(0, some_queries(layers[0], 1), [0], 1.0, 17)
    with pytest.raises(UsageError, match="no such edges"):
        keys.score(0, some_queries(layers[0], 1), [0], 0.0, 4)
    assert keys.score(0, some_queries(layers[0], 1), [], 1.0, 4).shape == (3, layers[0].n_head, 0)
