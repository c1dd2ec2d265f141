"""The size of the pool at every edge, and that its floor is enough for whatever comes."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import CHECK

from pyllama_kvflash.policy import Geometry, Ledger, PoolSize, auto_pool, bring_in, make_room
from pyllama_kvflash.policy import resolve_pool as resolve
from pyllama_kvflash.policy.device import RESERVE, DeviceBytes
from pyllama_kvflash.policy.sizing import (
    AUTO_CAP,
    AUTO_FULL,
    BATCH,
    CELLS,
    HOST_CAP,
    HOST_FULL,
    LEAST_PANES,
    SPARE_BLOCKS,
    PoolShape,
    n_panes,
    pinned_chunks,
)

KIB = 1024


def device(free: int, token_bytes: int = KIB, name: str = "GPU", *, gpu: bool = True, codes: int = 0) -> DeviceBytes:
    return DeviceBytes(name, gpu, free=free, token_bytes=token_bytes, coarse=codes)


def pool_floor(chunk: int, n_batch: int, n_sinks: int, n_tail: int, n_pinned: int = 0, n_seq: int = 1) -> int:
    return PoolShape(chunk, n_sinks, n_tail, n_pinned, n_seq).floor(n_batch)


FLOOR = pool_floor(64, 512, 1, 4)
PLENTY = RESERVE + (1 << 40)

counts = st.integers(0, 5)
chunks = st.sampled_from([16, 32, 64])


#
# the floor
#


@given(chunk=chunks, n_batch=st.integers(1, 4096), n_sinks=counts, n_tail=counts, n_pinned=counts)
@CHECK
def test_floor_is_what_is_counted_rounded_up(
    chunk: int, n_batch: int, n_sinks: int, n_tail: int, n_pinned: int
) -> None:
    floor = pool_floor(chunk, n_batch, n_sinks, n_tail, n_pinned)
    counted = chunk * (n_sinks + n_tail + n_pinned + math.ceil(n_batch / chunk) + 1 + SPARE_BLOCKS)
    assert floor % CELLS == 0
    assert floor - CELLS < counted <= floor


def write(ledger: Ledger, n: int, rng: np.random.Generator, n_batch: int) -> None:
    """One batch as the engine does it: room, with the spare blocks left, then decode and store."""
    free = ledger.n_free + int(np.count_nonzero(ledger.evictable()))
    assert free >= -(-n_batch // ledger.chunk) + SPARE_BLOCKS
    ledger.rate(rng.random(ledger.n_chunks))
    for c in make_room(ledger, ledger.new_chunks(n)).drops:
        ledger.drop(c)
    ledger.write(n)
    for c in ledger.to_store():
        ledger.mark_stored(c)


def page_in(ledger: Ledger, chunk: int, rng: np.random.Generator) -> None:
    ledger.rate(rng.random(ledger.n_chunks))
    plan = bring_in(ledger, [chunk])
    for c in plan.drops:
        ledger.drop(c)
    for c in plan.page_ins:
        ledger.page_in(c)


@given(data=st.data(), tight=st.booleans(), seed=st.integers(0, 100))
@settings(CHECK, max_examples=200)
def test_floor_is_enough_for_any_batches(data: st.DataObject, *, tight: bool, seed: int) -> None:
    """With all that was counted pinned: any batches from any position find room, and so does any chunk that is out.

    tight: without what rounding up to 256 cells adds.
    """
    chunk = data.draw(chunks)
    n_batch = data.draw(st.integers(1, 8 * chunk))
    n_sinks, n_tail, n_pins = data.draw(st.tuples(counts, counts, counts))
    pins = data.draw(st.sets(st.integers(0, 60), min_size=n_pins, max_size=n_pins))
    floor = pool_floor(chunk, n_batch, n_sinks, n_tail, n_pins)
    n_block = n_sinks + n_tail + n_pins + -(-n_batch // chunk) + 1 + SPARE_BLOCKS if tight else floor // chunk
    ledger = Ledger(n_block, chunk, n_sinks=n_sinks, n_tail=n_tail)
    ledger.pins |= pins
    rng = np.random.default_rng(seed)

    start = data.draw(st.integers(0, 60 * chunk))
    while ledger.n_tokens < start:
        write(ledger, min(n_batch, start - ledger.n_tokens), rng, n_batch)
    for n in data.draw(st.lists(st.integers(1, n_batch), min_size=1, max_size=20)):
        write(ledger, n, rng, n_batch)
        out = np.flatnonzero(~ledger.resident)
        if len(out):
            page_in(ledger, int(rng.choice(out)), rng)
        if rng.random() < 0.2:  # from another position
            keep = int(rng.integers(0, ledger.n_tokens + 1))
            if keep % chunk:
                page_in(ledger, keep // chunk, rng)
            ledger.rollback(keep)
        ledger.check_integrity()
    assert all(ledger.holds(c) for c in pins if c < ledger.n_chunks)


@given(chunk=chunks, n_sinks=counts, n_tail=st.integers(1, 5), n_pins=counts, n_more=st.integers(0, 4000))
@CHECK
def test_the_usual_batch_is_one_that_the_pool_holds(
    chunk: int, n_sinks: int, n_tail: int, n_pins: int, n_more: int
) -> None:
    """Of whole chunks, one at least, a quarter of the pool at most, and no larger than the largest."""
    shape = PoolShape(chunk, n_sinks, n_tail, n_pins)
    n_pool = shape.floor() + n_more * CELLS
    n, quarter = shape.usual_batch(n_pool), min(n_pool // 4, BATCH)
    assert n % chunk == 0
    assert chunk <= n <= max(chunk, quarter)
    assert n + chunk > min(quarter, shape.largest_batch(n_pool))
    assert shape.floor(n) <= n_pool


#
# auto
#


def auto(free: int, n_ctx: int, cap: int = AUTO_CAP) -> int:
    return auto_pool([device(free)], n_ctx, cap)[0]


@pytest.mark.parametrize(
    ("free", "tokens"),
    [
        (0, 0),
        (RESERVE - 1, 0),
        (RESERVE, 0),
        (RESERVE + 2 * 256 * KIB - 1, 0),  # one byte short of 256 tokens
        (RESERVE + 2 * 256 * KIB, 256),
        (RESERVE + 2 * 512 * KIB - 1, 256),
        (RESERVE + 2 * 512 * KIB, 512),
        (RESERVE + 2 * AUTO_CAP * KIB - 1, AUTO_CAP - 256),
        (RESERVE + 2 * AUTO_CAP * KIB, AUTO_CAP),
        (PLENTY, AUTO_CAP),
    ],
)
def test_auto_is_half_of_what_is_free_beyond_the_reserve(free: int, tokens: int) -> None:
    assert auto(free, 1 << 20) == tokens


def test_auto_says_how_it_came_to_its_number() -> None:
    tokens, note = auto_pool([device(RESERVE + (3 << 20), 1536, "CPU")], 32_768)
    assert tokens == 1024
    assert note == (
        "auto: half of (515 MiB free on CPU - 512 MiB reserve) / 1.50 KiB a token = 1,024 tokens,"
        " at most 16,384 (`auto_cap`) and the context of 32,768: 1,024"
    )


def test_auto_keeps_free_what_codes_take() -> None:
    """On each device its own; one that holds less beside it is the tightest."""
    free = RESERVE + (64 << 20) + (3 << 20)
    tokens, note = auto_pool([device(free, 1536, "CUDA0", codes=64 << 20), device(free, 1536)], 32_768)
    assert tokens == 1024
    assert note.startswith(
        "auto: half of (579 MiB free on CUDA0, the tightest of 2 devices - 512 MiB reserve - 64 MiB for codes) / 1.50"
    )
    assert auto_pool([device(free, 1536, codes=free)], 32_768)[0] == 0


GIB = 1 << 30


frees = st.integers(0, RESERVE + (1 << 26))
sizes = st.integers(1, 1 << 16)
memories = st.lists(st.builds(device, frees, sizes), min_size=1, max_size=5)


@given(memory=memories, n_ctx=st.integers(1, 1 << 18), cap=st.integers(1, 1 << 18))
@CHECK
def test_auto_fits_every_device(memory: list[DeviceBytes], n_ctx: int, cap: int) -> None:
    tokens, _ = auto_pool(memory, n_ctx, cap)
    assert tokens == min(auto_pool([each], n_ctx, cap)[0] for each in memory)
    assert 0 <= tokens <= cap
    assert tokens < n_ctx + CELLS
    for each in memory:
        assert tokens == 0 or RESERVE + 2 * tokens * each.token_bytes <= each.free


@given(memory=memories, n_ctx=st.integers(1, 1 << 18))
@CHECK
def test_the_note_adds_up(memory: list[DeviceBytes], n_ctx: int) -> None:
    """Whoever follows its arithmetic, by the figures it shows, comes to its number."""
    tokens, note = auto_pool(memory, n_ctx, cap=4096)
    free, reserve, kib, quotient, cap, context, result = map(
        float, re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?= |:|$)", plain(note))
    )
    least = min(memory, key=lambda r: r.tokens)
    assert (reserve, cap, context, result) == (512, 4096, n_ctx, tokens)
    assert abs(free * 2**20 - least.free) <= 2**19
    assert abs(kib * 1024 - least.token_bytes) <= 6
    assert quotient == least.tokens == max(0, least.free - RESERVE) // 2 // least.token_bytes
    assert tokens == min(quotient // 256 * 256, 4096, math.ceil(n_ctx / 256) * 256)


def plain(note: str) -> str:
    """Without the number of devices, and what separates thousands."""
    return re.sub(r", the tightest of \d+ devices", "", note).replace(",", "")


def test_a_device_without_kv_does_not_count() -> None:
    """Of three devices the second has no memory left, and no layers either."""
    free = [GIB, 0, RESERVE + 2 * 1024 * 2 * KIB]
    geometry = Geometry(((256, 256), (256, 256), (256, 256), (256, 256)), (0, 2, 2, 0))
    devices = [device(free[i], n, f"GPU{i}") for i, n in geometry.by_device(lambda _, n: 2 * n, 1, 1).items()]
    tokens, note = auto_pool(devices, 1 << 20)
    assert tokens == 1024
    assert "on GPU2, the tightest of 2 devices" in note


#
# a request and what becomes of it
#


def pool(
    request: int | str, *, n_ctx: int = 1 << 20, floor: int = FLOOR, free: int = PLENTY, cap: int | None = None
) -> PoolSize:
    return resolve(request, n_ctx=n_ctx, floor=floor, memory=[device(free)], cap=cap)


def test_off_is_the_full_cache_without_a_word() -> None:
    assert pool("off") == PoolSize(None, (), ())


@pytest.mark.parametrize("request_", [0, 1, 255, 256, FLOOR - 256])
def test_below_the_floor_is_raised_with_a_warning(request_: int) -> None:
    size = pool(request_)
    assert size.n_pool == FLOOR
    assert size.notes == ()
    (warning,) = size.warnings
    assert warning.startswith(f"a pool of {request_:,} tokens is too small: raised to {FLOOR:,}, ")
    assert "`n_batch`" in warning


@pytest.mark.parametrize(
    ("request_", "n_pool"),
    [(FLOOR - 255, FLOOR), (FLOOR - 1, FLOOR), (FLOOR + 1, FLOOR + 256), (FLOOR + 255, FLOOR + 256)],
)
def test_rounded_up_to_256_with_a_note(request_: int, n_pool: int) -> None:
    note = f"pool rounded up from {request_:,} to {n_pool:,} tokens (steps of 256)"
    assert pool(request_) == PoolSize(n_pool, (note,), ())


@pytest.mark.parametrize(
    ("request_", "n_ctx", "n_pool"),
    [
        (2048, 2047, None),
        (2048, 2048, None),
        (2048, 2049, 2048),
        (2000, 2048, None),  # after rounding up
        (2000, 2001, None),
        (1792, 2001, 1792),
        (1 << 30, 2048, None),
    ],
)
def test_pool_that_covers_the_context_is_the_full_cache(request_: int, n_ctx: int, n_pool: int | None) -> None:
    size = pool(request_, n_ctx=n_ctx)
    assert size.n_pool == n_pool
    covers = [note for note in size.notes if f"covers the context of {n_ctx:,}: no pool is needed" in note]
    assert len(covers) == (n_pool is None)


@pytest.mark.parametrize(
    ("free", "n_ctx", "n_pool"),
    [
        (PLENTY, 1 << 20, AUTO_CAP),
        (PLENTY, AUTO_FULL + 1, AUTO_CAP),
        (PLENTY, AUTO_FULL, None),
        (PLENTY, 5000, None),
        (RESERVE + AUTO_FULL * KIB, AUTO_FULL, None),
        (RESERVE + AUTO_FULL * KIB - 1, AUTO_FULL, (AUTO_FULL // 2 - 1) // CELLS * CELLS),
        (RESERVE + 2 * 2048 * KIB, 1 << 20, 2048),
        (RESERVE + 2 * 2048 * KIB, 2048, None),
    ],
)
def test_auto(free: int, n_ctx: int, n_pool: int | None) -> None:
    """The full cache of a short context, where it fits; a pool of a long one, though the full cache may fit."""
    size = pool("auto", n_ctx=n_ctx, free=free)
    assert size.n_pool == n_pool
    fits = free - RESERVE >= n_ctx * KIB
    assert (
        f"auto: the full cache of {n_ctx:,} tokens {'fits' if n_pool is None else 'would fit'}" in size.notes[0]
    ) == fits
    assert len(size.notes) == (n_pool is not None) + fits
    assert size.warnings == ()


@pytest.mark.parametrize("n_ctx", [2048, HOST_CAP, AUTO_FULL + 1, 1 << 20, (1 << 20) + 1])
def test_auto_on_the_host_is_the_full_cache_where_it_is_small(n_ctx: int) -> None:
    """A larger one would be taken at once, where a pool's records grow with the text. Snapshots need a pool."""
    small = n_ctx * KIB <= HOST_FULL
    for free, full in ((RESERVE + n_ctx * KIB, small), (RESERVE + n_ctx * KIB - 1, False)):
        memory = [device(free, gpu=False)]
        size = resolve("auto", n_ctx=n_ctx, floor=FLOOR, memory=memory)
        assert (size.n_pool is None) == full
        assert ("`pool` 4096" in size.notes[0]) == (full and n_ctx > HOST_CAP)
        assert size.n_pool is None or size.n_pool <= HOST_CAP
        assert ("of RAM at once; a pool takes" in size.notes[0]) == (free == RESERVE + n_ctx * KIB and not small)
        kept = resolve("auto", n_ctx=n_ctx, floor=FLOOR, memory=memory, keep=True)
        assert kept.n_pool is not None
        assert ("MiB of RAM; a prefix cache and snapshots need a pool, so one is taken" in kept.notes[0]) == full
    spread = [device(PLENTY, gpu=False), device(PLENTY)]
    assert (resolve("auto", n_ctx=n_ctx, floor=FLOOR, memory=spread).n_pool is None) == (n_ctx <= AUTO_FULL)


@pytest.mark.parametrize(
    ("cap", "n_pool"),
    [(2048, 2048), (5000, 4864), (1 << 15, 1 << 15), (1, FLOOR), (FLOOR, FLOOR), (AUTO_CAP, AUTO_CAP)],
)
def test_a_cap_asks_for_a_pool(cap: int, n_pool: int) -> None:
    """That of the usual size, too, where the full cache would fit."""
    assert pool("auto", n_ctx=AUTO_FULL).n_pool is None
    size = pool("auto", n_ctx=max(AUTO_FULL, n_pool + 1), cap=cap)
    assert size.n_pool == n_pool
    assert f"at most {cap:,} (`auto_cap`)" in size.notes[0]
    assert len(size.notes) == 1
    assert len(size.warnings) == (cap < FLOOR)


def test_a_number_is_taken_whatever_auto_would_choose() -> None:
    assert pool(1 << 19, free=0, cap=256) == PoolSize(1 << 19, (), ())


@given(
    request_=st.integers(0, 100_000) | st.sampled_from(["auto", "off"]),
    n_ctx=st.integers(1, 100_000),
    n_batch=st.integers(1, 4096),
    n_pinned=counts,
    memory=memories,
    cap=st.integers(1, 100_000),
)
@CHECK
def test_outcome_is_always_a_pool_that_works(
    request_: int | str, n_ctx: int, n_batch: int, n_pinned: int, memory: list[DeviceBytes], cap: int
) -> None:
    """At least the floor, at least what was asked for, whole steps of 256, less than the context; or no pool."""
    floor = pool_floor(64, n_batch, 1, 4, n_pinned)
    size = resolve(request_, n_ctx=n_ctx, floor=floor, memory=memory, cap=cap)
    if size.n_pool is not None:
        assert request_ != "off"
        assert request_ != "auto" or size.n_pool <= max(floor, cap)
        assert floor <= size.n_pool < n_ctx
        assert size.n_pool % CELLS == 0
        assert request_ == "auto" or int(request_) <= size.n_pool < max(floor, int(request_) + CELLS) + 1
    elif isinstance(request_, int):
        assert max(floor, request_ + CELLS) > n_ctx
    assert all(isinstance(text, str) and text and "\n" not in text for text in size.notes + size.warnings)


#
# panes
#


def row_bytes(kind: int, n: int) -> int:
    """Of a type of 2 bytes an element, or of 1; there are no rows without elements."""
    assert n > 0
    return {1: 2, 8: 1}[kind] * n


ROWS = ((1024, 512), (256, 2048), (512, 0))  # a layer may keep no V


@pytest.mark.parametrize(
    ("n_pane", "devices", "panes"),
    [
        (1, (), {0: 2 * 1024 + 2048}),  # the largest K and the largest V, whichever layers have them
        (2, (), {0: 2 * (2 * 1024 + 2048)}),
        (3, (), {0: 3 * (2 * 1024 + 2048)}),
        (99, (), {0: 3 * (2 * 1024 + 2048)}),  # no more panes than layers
        (1, (0, 1, 0), {0: 2 * 1024 + 512, 1: 2 * 256 + 2048}),
        (2, (0, 1, 0), {0: 2 * (2 * 1024 + 512), 1: 2 * 256 + 2048}),  # one layer there
        (2, (3, -1, -1), {3: 2 * 1024 + 512, -1: 2 * (2 * 512 + 2048)}),  # -1: the host
        (1, (0, 0, 1), {0: 2 * 1024 + 2048, 1: 2 * 512}),  # no V at all
        (2, (2, 1, 0), {2: 2 * 1024 + 512, 1: 2 * 256 + 2048, 0: 2 * 512}),
    ],
)
def test_panes_of_devices(n_pane: int, devices: tuple[int, ...], panes: dict[int, int]) -> None:
    assert Geometry(ROWS, devices).panes_by_device(row_bytes, 1, 8, n_pane) == panes


def test_no_panes_where_there_is_nothing_to_pool() -> None:
    assert Geometry(()).panes_by_device(row_bytes, 1, 1, 2) == {}
    with pytest.raises(ValueError, match="argument 2"):
        Geometry(((64, 64), (64, 64)), (0,)).panes_by_device(row_bytes, 1, 1, 2)


N_CTX, N_LAYER = 1024, 28
ENOUGH = RESERVE + 2 * N_CTX * KIB  # the rows of all positions are half of what is free beyond the reserve
WITH_RECORDS = RESERVE + 4 * N_CTX * KIB


@pytest.mark.parametrize("pool", ["auto", 2048])
@pytest.mark.parametrize("request_", [1, 2, 3, 28, 99])
@pytest.mark.parametrize("free", [0, PLENTY])
def test_panes_that_are_asked_for(request_: int, pool: int | str, free: int) -> None:
    assert n_panes(request_, pool, [device(free)], N_CTX, N_LAYER) == request_


@pytest.mark.parametrize(
    ("pool", "memory", "panes"),
    [
        ("auto", [(ENOUGH, False)], N_LAYER),
        ("auto", [(ENOUGH - 2, False)], LEAST_PANES),
        ("auto", [(PLENTY, False)], N_LAYER),
        ("auto", [(RESERVE - 1, False)], LEAST_PANES),
        ("auto", [(0, False)], LEAST_PANES),
        ("auto", [(ENOUGH, True)], LEAST_PANES),  # on the host alone, the records are all rows already
        ("auto", [(WITH_RECORDS, True)], LEAST_PANES),
        ("auto", [(ENOUGH, False), (WITH_RECORDS, True)], N_LAYER),
        ("auto", [(PLENTY, False), (ENOUGH, True)], LEAST_PANES),  # each device must hold its own
        ("auto", [(ENOUGH - 2, False), (PLENTY, False)], LEAST_PANES),
        (2048, [(PLENTY, False)], LEAST_PANES),  # who names a pool wants no more than that
        (1, [(PLENTY, True)], LEAST_PANES),
    ],
)
def test_panes_that_are_not_asked_for(pool: int | str, memory: list[tuple[int, bool]], panes: int) -> None:
    devices = [device(free, gpu=not host) for free, host in memory]
    assert n_panes(0, pool, devices, N_CTX, N_LAYER) == panes


@pytest.mark.parametrize(
    ("n_pool", "codes", "panes"), [(0, 0, 28), (256, 0, 21), (256, 128, 17), (900, 0, 3), (1024, 0, 2)]
)
def test_pool_codes_and_panes_take_no_more_than_the_full_cache(n_pool: int, codes: int, panes: int) -> None:
    memory = [device(PLENTY, codes=codes * KIB)]
    assert n_panes(0, "auto", memory, N_CTX, N_LAYER, n_pool=n_pool) == panes
    assert n_panes(0, "auto", memory, N_CTX, N_LAYER, n_pool=n_pool, lossless=True) == N_LAYER
    if codes:  # buffers count as much
        plain = [device(PLENTY)]
        assert n_panes(0, "auto", plain, N_CTX, N_LAYER, n_pool=n_pool, buffers=codes * KIB) == panes


def test_panes_leave_room_for_codes() -> None:
    for free, panes in ((ENOUGH + 100, N_LAYER - 1), (ENOUGH + 98, LEAST_PANES)):
        assert n_panes(0, "auto", [device(free, codes=100)], N_CTX, N_LAYER) == panes


def test_a_model_of_one_layer_may_have_two_panes() -> None:
    """There are no more panes than layers, whatever the number says."""
    assert n_panes(0, "auto", [device(PLENTY)], N_CTX, 1) == LEAST_PANES


def test_lossless_decoding_on_a_cpu_streams_nothing() -> None:
    """The host has the rows anyway; unless they do not fit twice, or a device has some."""
    host, little = device(PLENTY, gpu=False), device(1 << 20, gpu=False)
    gpu = device(PLENTY)
    for memory, n in (([host], N_LAYER), ([little], LEAST_PANES), ([host, gpu], LEAST_PANES), ([gpu], LEAST_PANES)):
        assert n_panes(0, 1024, memory, N_CTX, N_LAYER, lossless=True) == n
        assert n_panes(0, 1024, memory, N_CTX, N_LAYER) == LEAST_PANES
        assert n_panes(3, 1024, memory, N_CTX, N_LAYER, lossless=True) == 3
    assert Geometry(((64, 64),)).panes_by_device(row_bytes, 1, 1, LEAST_PANES) == {0: 256}


@pytest.mark.parametrize(
    ("pool", "free", "panes"),
    [
        ("auto", PLENTY, N_LAYER),
        ("auto", RESERVE + N_CTX * KIB, N_LAYER // 2),  # half of what is free holds half of the rows
        ("auto", RESERVE + N_CTX * KIB - 2, N_LAYER // 2 - 1),
        ("auto", 0, LEAST_PANES),
        (2048, PLENTY, LEAST_PANES),  # who names a pool wants no more than that
    ],
)
def test_lossless_decoding_keeps_the_layers_that_fit(pool: int | str, free: int, panes: int) -> None:
    """Each layer that is not streamed makes a check faster; a prompt gains nothing by some of them."""
    memory = [device(free)]
    assert n_panes(0, pool, memory, N_CTX, N_LAYER, lossless=True) == panes
    assert n_panes(0, pool, memory, N_CTX, N_LAYER) == (panes if panes == N_LAYER else LEAST_PANES)
    both = [*memory, device(PLENTY)]  # half of the layers are there
    assert n_panes(0, pool, both, N_CTX, N_LAYER, lossless=True) in (panes, max(LEAST_PANES, panes // 2))


#
# the rest
#


def test_token_bytes_are_summed_over_the_layers() -> None:
    geometry = Geometry(((1024, 512), (1024, 512), (256, 0)))  # a layer may keep no V
    assert geometry.token_bytes(row_bytes, 1, 8) == 2 * (2 * 1024 + 512) + 2 * 256
    assert geometry.by_device(row_bytes, 1, 8) == {0: geometry.token_bytes(row_bytes, 1, 8)}, "of one device"
    split = Geometry(geometry.rows, (3, -1, 3))  # -1: the host
    assert split.by_device(row_bytes, 1, 8) == {3: (2 * 1024 + 512) + 2 * 256, -1: 2 * 1024 + 512}
    assert split.token_bytes(row_bytes, 1, 8) == geometry.token_bytes(row_bytes, 1, 8)


@pytest.mark.parametrize(
    ("spans", "pinned"),
    [
        ([], set()),
        ([(0, 1)], {0}),
        ([(0, 64)], {0}),
        ([(0, 65)], {0, 1}),
        ([(63, 65)], {0, 1}),
        ([(64, 128)], {1}),
        ([(100, 101), (600, 700), (640, 650)], {1, 9, 10}),
    ],
)
def test_pinned_chunks(spans: list[tuple[int, int]], pinned: set[int]) -> None:
    assert pinned_chunks(spans, 64) == pinned
