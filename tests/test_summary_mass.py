"""The share of the attention that each chunk has, against numpy, from summaries or from all keys; and summaries in use."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import tiny
from support.changes import LIBRARY

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.summaries import (
    KINDS,
    Keys,
    bits,
    geometry,
    kept,
    keys_of,
    queries,
    record_of,
)

from pyllama_kvflash import KVFlash, native
from pyllama_kvflash.errors import KVFlashError, UsageError
from pyllama_kvflash.native import Layer, Summaries
from pyllama_kvflash.native.summary import SLAB
from pyllama_kvflash.policy import Qk

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]


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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", ["centroid:1", "centroid:4", "rows"])
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


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8, 1e15])
def test_very_large_products_do_not_overflow(size: float) -> None:
    """All of a head's attention is on its best key then, of either sign; and none of it is lost."""
    layers = geometry(n_layer=1, n_head=4, n_head_kv=2, d=64)
    records = [record_of(layers, seed) for seed in range(300)]
    for kind in ("rows", "centroid:4"):
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


def test_mass_of_nothing_and_errors() -> None:
    layers = geometry()
    summaries = kept(layers, "mean", [record_of(layers)] * 3)
    q = some_queries(layers[0], 2)
    assert mass_of(summaries, 0, q, 1, 0).shape == (0,)
    assert mass_of(Summaries(layers, 16, "mean"), 1, q, 1).shape == (0,)
    for shape in ((4, 64), (2, 4, 63), (2, 3, 64), (2, 8, 64)):
        with pytest.raises(
            UsageError,
            match=r"^queries \(.*\) for 3 chunks do not fit layer 1, which has \(4, 64\) for each token, and 3 chunks$",
        ):
            mass_of(summaries, 1, np.zeros(shape, np.float32), 1)
    with pytest.raises(
        UsageError, match=r"for 4 chunks do not fit layer 0, which has \(4, 64\) for each token, and 3 chunks$"
    ):
        mass_of(summaries, 0, q, 1, 4)
    with pytest.raises(UsageError, match="layers, slabs, q, scales and dst must not be null; n_q must be at least 1"):
        mass_of(summaries, 0, q[:0], 1)


def unlike() -> list[Layer]:
    """Three layers, of which each has other heads."""
    res, offset = [], 0
    for n_head, n_head_kv, d in ((4, 2, 64), (6, 1, 32), (8, 8, 80)):
        (layer,) = geometry(n_layer=1, n_head=n_head, n_head_kv=n_head_kv, d=d)
        res.append(dataclasses.replace(layer, il=len(res), offs_k=layer.offs_k + offset, offs_v=layer.offs_v + offset))
        offset += layer.size_k + layer.size_v
    return res


@pytest.mark.parametrize("kind", ["centroid:4", "centroid:2", "mean", "rows"])
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
    with pytest.raises(
        UsageError,
        match=r"^queries \(2, 4, 64\) for 3 chunks do not fit layer 1, which has \(6, 32\) for each token, and 3 chunks$",
    ):
        summaries.mass([0, 1], [q[0], q[0]], [1, 1])
    with pytest.raises(UsageError, match=r"^queries \(1, 8, 80\) for 3 chunks do not fit layer 2, which has"):
        summaries.mass([0, 1, 2], [q[0], q[1], q[2][:1]], [1, 1, 1])
    with pytest.raises(
        UsageError, match=r"for 4 chunks do not fit layer 2, which has \(8, 80\) for each token, and 3 chunks$"
    ):
        summaries.mass([2, 0], [q[2], q[0]], [1, 1], 4)
    with pytest.raises(UsageError, match="for -1 chunks"):
        summaries.mass([0], [q[0]], [1], -1)
    for short in ([q[0]], [*q, q[0]]):
        with pytest.raises(ValueError, match=r"argument 2 is (longer|shorter)"):
            summaries.mass([0, 1, 2], short, [1, 1, 1])
    for scales in ([1, 1], [1] * 4):
        with pytest.raises(ValueError, match=r"argument 3 is (longer|shorter)"):
            summaries.mass([0, 1, 2], q, scales)
    with pytest.raises(UsageError, match="layers, slabs, q, scales and dst must not be null; n_q must be at least 1"):
        summaries.mass([0, 1], [x[:0] for x in q[:2]], [1, 1])


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
            pager = kv.sequence.pager
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
        assert not kv.residency().resident.all()
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
    options: dict[str, Any] = {"n_ctx": 4096, "pool": 512, "chunk": 16, "n_threads": 1}
    with KVFlash.from_file(tiny_path(name), policy=Qk("rows"), type_k=type_k, type_v=type_k, **options) as kv:
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
    with KVFlash.from_file(path, policy="qk", n_ctx=1024, pool=512, chunk=16, n_threads=1) as kv:
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
    with pytest.raises(UsageError, match="n_edge must not exceed n_chunk, and must be 0 if scale is 0"):
        keys.score(0, some_queries(layers[0], 1), [0], 1.0, 17)
    with pytest.raises(UsageError, match="n_edge must not exceed n_chunk, and must be 0 if scale is 0"):
        keys.score(0, some_queries(layers[0], 1), [0], 0.0, 4)
    assert keys.score(0, some_queries(layers[0], 1), [], 1.0, 4).shape == (3, layers[0].n_head, 0)
