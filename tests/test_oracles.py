"""The pool computes what the stock cache computes: bit for bit wherever the cells lie alike, else within its own noise.

A run is fed random tokens, as if a prompt had been read and then its continuation one by one, and gives the logits of
the last token of every batch. Equal means equal bits. test_mutations.py shows that each of these checks can fail.

A GPU cuts its sums by the width of the attention, and fuses other operations where Q is also read. There a stock cache
is as wide as the pool that it is compared with, and a run with the Q tap is held to the noise of that machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.changes import LIBRARY

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import gguf
from support.models import MEMORY
from support.numpy_models import Array, Reference, error, hadamard
from support.oracles import (
    CACHES,
    FIELDS,
    FINGERPRINT,
    HEAD,
    N_POOL,
    N_PROMPT,
    N_STEPS,
    ON_GPU,
    TOKENS,
    Cache,
    Case,
    Logits,
    Run,
    assert_equal,
    forge,
    head,
    params,
    rows,
)

from pyllama_kvflash.errors import ModelError, PoolError, RecordError, UnsupportedError, UsageError
from pyllama_kvflash.native import CACHE_TYPES, Model, Record
from pyllama_kvflash.native.lib import ffi, lib

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]


@pytest.fixture(scope="module", params=params())
def case(request: pytest.FixtureRequest, tiny_model: Callable[[str], Model]) -> Case:
    """Every model with every cache type."""
    name, cache = request.param
    return Case(tiny_model(name), CACHES[cache])


@pytest.fixture(scope="module", params=params(caches=["f16"]))
def f16_case(request: pytest.FixtureRequest, tiny_model: Callable[[str], Model]) -> Case:
    """Every model, F16."""
    name, cache = request.param
    return Case(tiny_model(name), CACHES[cache])


@pytest.fixture
def qwen3(tiny_model: Callable[[str], Model]) -> Model:
    """The dense model."""
    return tiny_model("qwen3")


#
# all resident
#


@pytest.mark.parametrize("q_tap", [False, True], ids=["plain", "q_tap"])
def test_all_resident(case: Case, q_tap: bool) -> None:
    with case.pool(q_tap=q_tap) as run:
        assert run.ctx.memory_class == MEMORY[case.model.path.stem]
        logits = np.concatenate([run.feed(N_PROMPT), run.feed(N_STEPS, 1)])
        assert run.resident() == list(range((N_PROMPT + N_STEPS) // 64 + 1))
    if q_tap and ON_GPU:
        case.assert_close(logits[-N_STEPS:])
    else:
        assert_equal(logits, case.stock_logits)


def test_clear(f16_case: Case) -> None:
    with f16_case.pool() as run:
        run.feed(700)
        run.ctx.clear()
        assert run.resident() == []
        run.pos = 0
        logits = np.concatenate([run.feed(N_PROMPT), run.feed(N_STEPS, 1)])
    assert_equal(logits, f16_case.stock_logits)


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_rollback(tiny_model: Callable[[str], Model], name: str) -> None:
    """Tokens that are tried and taken back leave no trace: what speculative decoding does."""

    def run_with_guesses(run: Run) -> Logits:
        logits = [run.feed(900)]
        for _ in range(30):
            pos = run.pos
            run.ctx.decode((run.tokens[pos : pos + 8] + 3) % tiny.N_VOCAB, pos)
            run.ctx.seq_rm(pos)
            logits.append(run.feed(2))
        return np.concatenate(logits)

    case = Case(tiny_model(name), CACHES["f16"])
    with case.stock() as stock, case.pool(1024) as pool:
        assert_equal(run_with_guesses(pool), run_with_guesses(stock))


#
# eviction
#

N_LONG = 3000


@pytest.mark.slow
def test_eviction(case: Case) -> None:
    with case.pool(1024, n_batch=256) as run:
        logits, schedule, infos = run.feed_through(N_LONG, 130)
        resident = run.resident()
    case.assert_replayed(logits, schedule, 1024, n_batch=256)
    n_drops = sum(len(step.drops) for step in schedule)
    assert n_drops > 30, f"{n_drops} drops"
    assert resident == [0, *range(49 - 15, 49)], str(resident)
    widths = [info.n_kv for info in infos]
    assert widths == [256, 512, 768] + [1024] * (len(widths) - 3), str(widths)
    assert {info.n_pool for info in infos} == {1024}
    assert {info.record_bytes for info in infos} == {infos[0].record_bytes}


@pytest.mark.parametrize("chunk", [16, 32])
def test_eviction_of_smaller_chunks(f16_case: Case, chunk: int) -> None:
    with f16_case.pool(512, n_batch=128, chunk=chunk) as run:
        logits, schedule, _ = run.feed_through(1500, 100)
    f16_case.assert_replayed(logits, schedule, 512, n_batch=128, chunk=chunk)
    n_drops = sum(len(step.drops) for step in schedule)
    assert n_drops > 30 * 16 // chunk, f"{n_drops} drops"


def test_sliding_window_is_not_pooled(tiny_model: Callable[[str], Model]) -> None:
    """A pool smaller than the window drops chunks inside of it: SWA layers keep their size and their rows."""
    case = Case(tiny_model("gemma4"), CACHES["f16"])
    assert case.model.n_swa == tiny.GEMMA4_SWA
    with case.pool(512, n_batch=128) as run, case.stock(n_batch=128) as stock:
        logits, schedule, _ = run.feed_through(1500, 100)
        pooled, whole = run.ctx.kv_bytes(), stock.ctx.kv_bytes()
    case.assert_replayed(logits, schedule, 512, n_batch=128)
    starts = np.cumsum([step.n for step in schedule]) - [step.n for step in schedule]
    ages = [int(pos) - c * 64 for pos, step in zip(starts, schedule, strict=True) for c in step.drops]
    assert len(ages) > 10, f"{len(ages)} drops"
    assert max(ages) < tiny.GEMMA4_SWA, f"the first position of a dropped chunk lay {max(ages)} back"
    assert pooled.swa == whole.swa, f"{pooled}, stock {whole}"
    assert whole.attn == pooled.attn * 4096 // 512, f"{pooled}, stock {whole}"


#
# out and in
#


def test_out_and_in(case: Case) -> None:
    with case.pool() as run:
        prompt = run.feed(N_PROMPT)
        places = {c: run.ctx.block_of(c) for c in run.resident()}
        records = run.out(list(places))
        assert run.ctx.pool_info().n_block_free == N_POOL // 64
        for c, block in places.items():
            assert run.ctx.page_in(c, records[c], block) == block
        for c, record in records.items():
            again = run.read(c)
            assert np.array_equal(again, record), f"chunk {c} differs in {np.sum(again != record)} bytes"
        logits = np.concatenate([prompt, run.feed(N_STEPS, 1)])
    assert_equal(logits, case.stock_logits)


def test_out_for_a_while(tiny_model: Callable[[str], Model]) -> None:
    """Tokens decoded without some chunks, then taken back: with the chunks in again, nothing has happened."""
    for name in ("qwen3", "gemma4"):
        case = Case(tiny_model(name), CACHES["f16"])
        want = case.stock_logits
        with case.pool() as run:
            prompt = run.feed(N_PROMPT)
            places = {c: run.ctx.block_of(c) for c in range(1, 13, 2)}
            records = run.out(list(places))
            assert run.resident() == [c for c in range(16) if c not in places]
            without = run.feed(1)
            assert not np.array_equal(without[0], want[-N_STEPS]), f"{name}: the chunks that were out did not matter"
            run.ctx.seq_rm(N_PROMPT)
            run.pos = N_PROMPT
            for c, block in places.items():
                run.ctx.page_in(c, records[c], block)
            assert_equal(np.concatenate([prompt, run.feed(N_STEPS, 1)]), want)


def test_other_blocks(case: Case, record_property: Callable[[str, object], None]) -> None:
    """Placement changes the order of sums, nothing else, and leaves no trace in the records."""
    with case.pool() as run:
        run.feed(N_PROMPT)
        records = run.out(run.resident())
        blocks = np.random.default_rng(1).permutation(N_POOL // 64)[: len(records)]
        for c, block in zip(records, blocks, strict=True):
            assert run.ctx.page_in(c, records[c], int(block)) == block
        for c, record in records.items():
            again = run.read(c)
            assert np.array_equal(again, record), f"chunk {c} differs in {np.sum(again != record)} bytes"
        got = case.assert_close(run.feed(N_STEPS, 1))
    record_property("noise", str(case.noise))
    record_property("shuffled", str(got))
    print(f"noise floor: {case.noise}\nshuffled:    {got}")


#
# no free block
#


def test_no_free_block(case: Case) -> None:
    """A batch that does not fit is refused as a whole, though its first ubatch would, and leaves nothing behind."""
    with case.pool(1024) as run, case.pool(1024) as twin:
        run.feed(700)
        twin.feed(700)
        blocks = [a.tolist() for a in run.ctx.blocks()]
        records = {c: run.read(c) for c in run.resident()}
        for _ in range(2):
            with pytest.raises(PoolError, match="no room in the KV cache for 512 tokens at position 700"):
                run.ctx.decode(TOKENS[700:1212], 700)
        assert [a.tolist() for a in run.ctx.blocks()] == blocks
        for c, record in records.items():
            assert np.array_equal(run.read(c), record), f"chunk {c} differs"
        for r in (run, twin):
            for c in (2, 3, 7):
                r.ctx.drop(c)
        assert_equal(run.feed(512), twin.feed(512))
        assert run.ctx.pool_info().n_block_free == 0
        full = 1216 - run.pos
        assert_equal(run.feed(full, 1), twin.feed(full, 1))
        with pytest.raises(PoolError, match="no room in the KV cache for 1 tokens at position 1216"):
            run.decode(1)
        for r in (run, twin):
            r.ctx.drop(1)
        assert_equal(run.feed(64, 1), twin.feed(64, 1))


#
# records
#


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_record_layout(case: Case, chunk: int) -> None:
    with case.pool(chunk=chunk) as run:
        run.feed(300)
        info, layers = run.ctx.pool_info(), run.ctx.layers()
        full, part = 3, 300 // chunk
        records = {c: run.read(c) for c in (full, part)}
    type_id = CACHE_TYPES[case.cache.type]
    flags = lib.KVF_FLAG_V_TRANS if case.cache.flash_attn == "off" else 0
    flags |= 0 if case.cache.type == "f16" else lib.KVF_FLAG_ROT_K | lib.KVF_FLAG_ROT_V
    meta_bytes = {16: 256, 32: 448, 64: 832}[chunk]
    for c, record in records.items():
        n = chunk if c == full else 300 % chunk
        assert head(record) == {
            "magic": int.from_bytes(b"KVFR", "little"),
            "version": 1,
            "head_bytes": 64,
            "record_bytes": len(record),
            "fingerprint": FINGERPRINT,
            "mask": (1 << n) - 1,
            "chunk": c,
            "n_chunk": chunk,
            "n_layer": len(layers),
            "type_k": type_id,
            "type_v": type_id,
            "flags": flags,
            "meta_bytes": meta_bytes,
            "reserved": 0,
        }
        cells = record[HEAD.size : HEAD.size + 12 * chunk].view("<i4").reshape(chunk, 3)
        positions = np.arange(c * chunk, c * chunk + n)
        is_2d = case.model.path.stem == "qwen35"  # M-RoPE: x and y are the position
        for i in (0, 1):
            assert cells[:n, i].tolist() == (positions if is_2d else np.zeros(n)).tolist()
        assert cells[:n, 2].tolist() == TOKENS[positions].tolist()
        assert not cells[n:].any()
        assert not record[HEAD.size + 12 * chunk : meta_bytes].any()
    assert info.meta_bytes == meta_bytes
    assert info.flags == flags
    offs = meta_bytes
    for layer in layers:
        assert (layer.offs_k, layer.offs_v) == (offs, offs + layer.size_k)
        assert layer.size_k == chunk * lib.ggml_row_size(type_id, layer.n_embd_k)
        assert layer.size_v == chunk * lib.ggml_row_size(type_id, layer.n_embd_v)
        offs += layer.size_k + layer.size_v
    assert offs == info.record_bytes


def test_transposed_values(qwen3: Model) -> None:
    """Without flash attention V lies in columns; layer 0 has the same numbers either way."""
    values = []
    for name in ("f16", "f16-nofa"):
        with Run(qwen3, CACHES[name], pool=1024) as run:
            run.feed(256)
            record = run.read(2)
            transposed = name == "f16-nofa"
            v = rows(record, run.ctx.layers()[0], "v", transposed=transposed).view(np.float16)
            values.append(v.T if transposed else v)
    assert np.array_equal(values[0], values[1])


@dataclass
class Paged:
    """A pool from which one chunk was taken."""

    run: Run
    chunk: int
    record: Record


@pytest.fixture
def paged(qwen3: Model) -> Iterator[Paged]:
    """Chunk 2 of 4 is out."""
    with Run(qwen3, pool=1024) as run:
        run.feed(256)
        yield Paged(run, 2, run.out([2])[2])


CORRUPT = {field: (lambda old: old ^ 1) for field in FIELDS} | {
    "mask": lambda _: 0,
    "record_bytes": lambda old: old + 64,
    "flags": lambda old: old ^ lib.KVF_FLAG_V_TRANS,
    "fingerprint": lambda old: old ^ 1 << 63,
}


@pytest.mark.parametrize("field", FIELDS)
def test_record_with_another(paged: Paged, field: str) -> None:
    old = head(paged.record)[field]
    record = forge(paged.record, **{field: CORRUPT[field](old)})
    assert np.sum(record != paged.record) > 0
    with pytest.raises(RecordError, match="not a record of chunk 2 of this model and cache"):
        paged.run.ctx.page_in(paged.chunk, record)
    assert paged.run.resident() == [0, 1, 3]
    paged.run.ctx.page_in(paged.chunk, paged.record)
    assert np.array_equal(paged.run.read(paged.chunk), paged.record)


@pytest.mark.parametrize("chunk", [16, 32])
def test_mask_of_more_than_a_chunk(qwen3: Model, chunk: int) -> None:
    with Run(qwen3, pool=1024, chunk=chunk) as run:
        run.feed(256)
        record = run.out([2])[2]
        with pytest.raises(RecordError, match="the mask differs"):
            run.ctx.page_in(2, forge(record, mask=(1 << chunk + 1) - 1))


def test_record_of_another_length(paged: Paged) -> None:
    more = np.concatenate([paged.record, np.zeros(64, np.uint8)])
    for record in (paged.record[:-1], paged.record[:64], paged.record[:0], more):
        with pytest.raises(RecordError, match=f"has {len(paged.record)} bytes, not {len(record)}"):
            paged.run.ctx.page_in(paged.chunk, record)
    with pytest.raises(UsageError, match="record_bytes of room"):
        paged.run.ctx.read(0, paged.record[:-1])


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"cache": Cache("q8_0")}, "bytes"),
        ({"cache": Cache("bf16")}, "type of K"),
        ({"cache": Cache("f16", "off")}, "layout or rotation"),
        ({"fingerprint": 1}, "model fingerprint"),
        ({"chunk": 32}, "bytes"),
    ],
    ids=["size", "type", "layout", "model", "chunk"],
)
def test_record_of_another(qwen3: Model, paged: Paged, other: dict[str, Any], field: str) -> None:
    with Run(qwen3, pool=1024, **other) as run, pytest.raises(RecordError, match=field):
        run.ctx.page_in(paged.chunk, paged.record)
    with pytest.raises(RecordError, match="the chunk number differs"):
        paged.run.ctx.page_in(paged.chunk + 1, paged.record)


def test_wrong_places(paged: Paged) -> None:
    ctx, record = paged.run.ctx, paged.record
    with pytest.raises(PoolError, match="block 0 is not free"):
        ctx.page_in(2, record, 0)
    with pytest.raises(UsageError, match="block 16 is outside the pool of 16 blocks"):
        ctx.page_in(2, record, 16)
    for call in (ctx.drop, paged.run.read):
        with pytest.raises(PoolError, match="chunk 2 is not resident"):
            call(2)
        for c in (-1, 2**31 - 1):
            with pytest.raises(UsageError, match="chunk is out of range"):
                call(c)
    assert ctx.page_in(2, record) == 2
    with pytest.raises(PoolError, match="chunk 2 is already resident"):
        ctx.page_in(2, record, 9)
    assert ctx.block_of(2) == 2
    paged.run.out([2])
    paged.run.pos = 256
    paged.run.feed(13 * 64)
    with pytest.raises(PoolError, match="no free block for chunk 2"):
        ctx.page_in(2, record)


def test_pool_calls_need_a_pool(qwen3: Model) -> None:
    with Run(qwen3, n_ctx=1024) as run:
        run.feed(64)
        calls: list[Callable[[], object]] = [
            run.ctx.pool_info,
            lambda: run.ctx.block_of(0),
            lambda: run.ctx.drop(0),
            lambda: run.ctx.scribble(0),
            lambda: run.ctx.queries()[0],
            lambda: run.ctx.page_in(0, np.zeros(64, np.uint8)),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="this context has no pool"):
                call()


#
# refusals
#


def test_whole_state_is_refused(f16_case: Case) -> None:
    """A restore would re-pack the cells. A refused one changes nothing."""
    for pool in (None, 1024):
        with Run(f16_case.model, pool=pool, n_ctx=4096) as run, Run(f16_case.model, pool=pool, n_ctx=4096) as twin:
            run.feed(700)
            twin.feed(500)
            size = lib.llama_state_get_size(run.ctx.handle)
            state = ffi.new("uint8_t[]", size)
            assert lib.llama_state_get_data(run.ctx.handle, state, size) == size > 0
            n_read = lib.llama_state_set_data(twin.ctx.handle, state, size)
            if pool is None:
                assert n_read == size
                twin.pos = 700
                assert np.isfinite(twin.feed(1)).all()
                continue
            assert n_read == 0
            assert twin.resident() == list(range(8))
            twin.feed(12)
            run.ctx.clear()
            run.pos = 0
            run.feed(500)
            run.feed(12)
            assert_equal(twin.feed(100, 1), run.feed(100, 1))


REFUSED = {
    "mamba": "llama_memory_recurrent",
    "deepseek32": "llama_kv_cache_dsa",
    "qwen4exp": "llama_memory_hybrid_idx",
}


@pytest.mark.parametrize("n_ctx", [4096, 256], ids=["context", "pool_covers_context"])
@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_cannot_be_pooled(tiny_model: Callable[[str], Model], name: str, n_ctx: int) -> None:
    model = tiny_model(name)
    with pytest.raises(UnsupportedError, match=rf"the memory of this model \({REFUSED[name]}\) cannot be pooled"):
        Run(model, pool=256, n_ctx=n_ctx, n_batch=64)
    with Run(model, n_ctx=n_ctx, n_batch=64) as run:
        assert run.ctx.memory_class == REFUSED[name]
        assert np.isfinite(run.feed(100)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": 1000}, "n_pool must be a multiple of 256 above 0, not 1000"),
        ({"pool": 1024, "chunk": 17}, "n_chunk must be 16, 32 or 64, not 17"),
        ({"pool": 512, "n_batch": 512}, "a pool of 512 cells cannot hold a batch of 512 and two chunks"),
    ],
    ids=["cells", "chunk", "batch"],
)
def test_pool_that_makes_no_sense(qwen3: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Run(qwen3, **options)


def test_unknown_architecture(tiny_path: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="unknown model architecture: 'unheard-of'"):
        Model.load(tiny_path("unheard-of"))


#
# queries
#


@pytest.mark.parametrize("cache", CACHES)
def test_queries(qwen3: Model, cache: str) -> None:
    """Of the last token of a batch, be it the prompt's or a single one, in the basis of the cache."""
    reference = Reference(qwen3.path)
    basis = np.eye(64) if cache.startswith("f16") else hadamard(64)
    with Run(qwen3, CACHES[cache], pool=2048, q_tap=True) as run:
        for n in (512, 300, 256, 1, 1, 7, 1):
            run.decode(n)
            pos = run.pos - 1
            got, want = run.ctx.queries()[0], reference.qwen3(int(TOKENS[pos]), pos) @ basis
            assert got.shape == want.shape == (4, 64)
            assert error(got, want) < 1e-2, f"after a batch of {n}, at {pos}: relative RMS {error(got, want):.3g}"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["qwen35", "gemma4"])
def test_queries_behind_another_layer(tiny_model: Callable[[str], Model], name: str, cache: str) -> None:
    """A token that is alone in the context, at some position."""
    model = tiny_model(name)
    reference: Callable[[int, int], Array] = getattr(Reference(model.path), name)
    tolerance = {"q4_0": 0.2}.get(cache, 2e-2)  # V of gemma4's layer 0 goes through the cache
    with Run(model, CACHES[cache], pool=1024, n_ctx=4096, q_tap=True) as run:
        layer = run.ctx.layers()[0]
        assert layer.il == 1
        for pos in (0, 1, 77, 3000):
            run.ctx.clear()
            run.pos = pos
            run.decode(1)
            basis = np.eye(layer.n_embd_head_k) if cache.startswith("f16") else hadamard(layer.n_embd_head_k)
            got, want = run.ctx.queries()[0], reference(int(TOKENS[pos]), pos) @ basis
            assert error(got, want) < tolerance, f"at {pos}: relative RMS {error(got, want):.3g}"


@pytest.mark.parametrize(("cache", "tolerance"), [("f16", 1e-2), ("f16-nofa", 1e-2), ("q8_0", 2e-2), ("q4_0", 0.15)])
def test_keys_of_a_record(qwen3: Model, cache: str, tolerance: float) -> None:
    """The K rows of a record are the keys of its positions, in the basis of the queries."""
    reference = Reference(qwen3.path)
    with Run(qwen3, CACHES[cache], pool=1024) as run:
        run.feed(256)
        data = rows(run.read(2), run.ctx.layers()[0], "k")
    keys = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[CACHES[cache].type.upper()])
    basis = np.eye(64) if cache.startswith("f16") else hadamard(64)
    want = np.array([reference.qwen3(int(TOKENS[pos]), pos, "k") @ basis for pos in range(128, 192)])
    got = error(keys.reshape(want.shape), want)
    assert got < tolerance, f"relative RMS {got:.3g}"


def test_no_queries(qwen3: Model) -> None:
    with Run(qwen3, pool=1024) as run:
        run.feed(10)
        with pytest.raises(PoolError, match="the pool has no Q tap"):
            run.ctx.queries()[0]
    with Run(qwen3, pool=1024, q_tap=True) as run, pytest.raises(PoolError, match="nothing was decoded"):
        run.ctx.queries()[0]
