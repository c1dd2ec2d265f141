"""How many layers' experts stay on the host, at every edge: by numbers that are added up here by hand, and as properties."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import CHECK

from pyllama_kvflash.policy.device import RESERVE
from pyllama_kvflash.policy.experts import DENSE_CAP, Holding, Placement, place_experts
from pyllama_kvflash.policy.sizing import AUTO_CAP, CELLS

KIB, MIB = 1 << 10, 1 << 20
FLOOR, N_CTX, CAP = 1024, 32_768, 4096

# 4 layers of 300 MiB of experts, 100 MiB of other weights, KV of 16 KiB a token: 16 MiB for FLOOR, 64 for CAP, 512 for N_CTX
GPU = Holding("CUDA0", gpu=True, weights=100 * MIB, token_bytes=16 * KIB, experts=(300 * MIB,) * 4)
BESIDE_ALL = RESERVE + (100 + 1200 + 512) * MIB  # what the full cache takes beside all experts
NEED = [
    RESERVE + (100 + 300 * n + 64) * MIB for n in (4, 3, 2, 1, 0)
]  # a pool of CAP, with the experts of n layers here


def place(*holdings: Holding, request: int | str = "auto", pool: int | str = "auto", n_ctx: int = N_CTX) -> Placement:
    return place_experts(request, holdings, pool=pool, n_ctx=n_ctx, floor=FLOOR, cap=CAP)


def on(free: int, gpu: Holding = GPU, **arguments: int | str) -> Placement:
    return place(replace(gpu, free=free), **arguments)  # type: ignore[arg-type]


#
# auto, on one GPU
#


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_exactly_enough_and_one_byte_less(n: int) -> None:
    fits = on(NEED[n])
    assert (fits.n_cpu_moe, fits.pool, fits.redundant, fits.warnings) == (n, CAP, False, ())
    assert on(NEED[n] + 1).n_cpu_moe == n
    less = on(NEED[n] - 1)
    assert less.n_cpu_moe == min(n + 1, 4)
    assert less.pool == ("auto" if n == 4 else CAP)


#
# redundant or not
#


def test_a_pool_is_redundant_if_the_full_cache_fits_beside_all_experts() -> None:
    found = on(BESIDE_ALL)
    assert (found.n_cpu_moe, found.pool, found.redundant, found.warnings) == (0, "off", True, ())
    (note,) = found.notes
    assert note == (
        "experts: all stay on the GPU, and the full cache fits beside them: 100 MiB other weights and states + 1200 MiB experts"
        " + 512 MiB KV of 32,768 tokens + 512 MiB reserve = 2324 MiB, of 2324 MiB free on CUDA0, so the pool is redundant,"
        " and turned off (`pool` N keeps one of N tokens)"
    )


def test_a_pool_that_was_asked_for_by_its_size_stays() -> None:
    found = on(BESIDE_ALL, pool=2048)
    assert (found.n_cpu_moe, found.pool, found.redundant, found.warnings) == (0, 2048, True, ())
    assert found.notes[0].endswith("so the pool of 2,048 tokens is not needed (`pool` off)")


def test_a_pool_that_keeps_experts_on_the_gpu_is_never_turned_off() -> None:
    """One byte less: the full cache fits with the experts of one layer on the host, the pool with none."""
    found = on(BESIDE_ALL - 1)
    assert (found.n_cpu_moe, found.pool, found.redundant) == (0, CAP, False)
    arithmetic, kept = found.notes
    assert arithmetic.startswith("experts: all stay on the GPU: ")
    assert kept == (
        "the pool keeps experts on the GPU: beside the full cache of 32,768 tokens those of 1 layer would have to stay on"
        " the host instead of none"
    )
    assert on(BESIDE_ALL - 1, pool=2048).pool == 2048
    assert on(BESIDE_ALL - 1, pool="off").n_cpu_moe == 1


def test_a_full_cache_that_would_not_fit_at_all() -> None:
    found = on(RESERVE + (100 + 64) * MIB)
    assert found.n_cpu_moe == 4
    assert found.notes[1] == (
        "the pool keeps experts on the GPU: beside the full cache of 32,768 tokens there would be no room even with all of"
        " them on the host"
    )


#
# too little memory
#


def test_the_automatic_pool_takes_what_all_experts_leave() -> None:
    """Between FLOOR and CAP: the pool is sized when the model is loaded."""
    least = RESERVE + (100 + 16) * MIB
    for free in (NEED[4] - 1, least):
        found = on(free)
        assert (found.n_cpu_moe, found.pool, found.redundant, found.warnings) == (4, "auto", False, ())
        assert "and the pool takes what is left: " in found.notes[0]
        assert f"= {NEED[4] // MIB} MiB, but only " in found.notes[0]


@pytest.mark.parametrize(("pool", "mib"), [("auto", 16), (2048, 32), ("off", 512)])
def test_a_warning_if_nothing_fits(pool: int | str, mib: int) -> None:
    need = RESERVE + (100 + mib) * MIB
    assert on(need, pool=pool).warnings == ()
    found = on(need - 1, pool=pool)
    assert (found.n_cpu_moe, found.pool, found.notes) == (4, pool, ())
    (warning,) = found.warnings
    assert warning.startswith(
        "the GPU is too small even with all experts on the host: 100 MiB other weights and states + "
    )
    assert "+ 0 MiB experts + " in warning
    assert f"use a{' smaller' * (pool != 'off')} pool (`pool`)" in warning
    assert on(0, pool=pool).n_cpu_moe == 4


#
# several devices
#

FIRST = replace(GPU, token_bytes=8 * KIB, experts=(300 * MIB, 300 * MIB, 0, 0))
SECOND = replace(FIRST, name="CUDA1", weights=200 * MIB, experts=(0, 0, 300 * MIB, 300 * MIB))
HOST = Holding("CPU", gpu=False, weights=50 * MIB, experts=(0,) * 4)


@pytest.mark.parametrize(
    ("first", "second", "n", "tight", "less"),
    [  # layers whose experts each has room for, beside a pool of 32 MiB; layers that go if one of them has a byte less
        (2, 2, 0, "CUDA0", (1, 3)),
        (1, 2, 1, "CUDA0", (2, 3)),
        (0, 2, 2, "CUDA0", (4, 3)),
        (2, 1, 3, "CUDA1", (3, 4)),  # the first layers go first, though it is the second device that is short
        (2, 0, 4, "CUDA1", (4, 4)),
        (0, 0, 4, "CUDA0", (4, 4)),
        (1, 1, 3, "CUDA1", (3, 4)),
    ],
)
def test_every_device_holds_its_part(first: int, second: int, n: int, tight: str, less: tuple[int, int]) -> None:
    a = replace(FIRST, free=RESERVE + (100 + 300 * first + 32) * MIB)
    b = replace(SECOND, free=RESERVE + (200 + 300 * second + 32) * MIB)
    found = place(a, b, HOST)
    assert (found.n_cpu_moe, found.pool, found.warnings) == (n, CAP, ())
    assert f"free on {tight}, the tightest of 2 devices" in found.notes[0]
    assert place(b, HOST, a).n_cpu_moe == n, "in any order"
    assert place(replace(a, free=a.free - 1), b).n_cpu_moe == less[0]
    assert place(a, replace(b, free=b.free - 1)).n_cpu_moe == less[1]


#
# nothing to place
#


def test_without_a_gpu_there_is_nothing_to_save() -> None:
    host = replace(HOST, experts=(300 * MIB,) * 4, free=1 << 40, token_bytes=KIB)
    note = "experts: all are in host memory already, because there is no GPU"
    for pool in ("auto", 2048, "off"):
        assert place(host, pool=pool) == Placement(0, pool, notes=(note,))
    assert place(host, request=2) == Placement(2, "auto", notes=(note,))
    assert place(host, request=9) == Placement(4, "auto", notes=(note,))
    dense = replace(GPU, experts=(0,) * 4)
    assert place(dense, host).notes == (note,), "a GPU that has none of them"


def test_feed_forward_weights_are_called_that() -> None:
    """Less stays free than beside experts: all of a layer is read for each token."""
    gpu = replace(GPU, dense=True, reserve=RESERVE // 2, free=NEED[2] - RESERVE // 2)
    assert place(gpu, HOST).n_cpu_moe == 2
    (note,) = place(gpu, HOST, request=1).notes
    assert note == "feed-forward weights: those of the first of 4 layers stay on the host (300 MiB)"
    for pool, free in (("auto", 1 << 40), ("auto", gpu.free), (CAP, 1)):
        found = place(replace(gpu, free=free), HOST, pool=pool)
        assert not any("experts" in text for text in (*found.notes, *found.warnings))


def test_a_pool_beside_feed_forward_weights_is_smaller_than_beside_experts() -> None:
    for dense, pool in ((True, DENSE_CAP), (False, AUTO_CAP)):
        need = RESERVE + (100 + 300 + pool * 16 // 1024) * MIB
        gpu = replace(GPU, dense=dense, free=need)
        found = place_experts("auto", [gpu, HOST], pool="auto", n_ctx=1 << 20, floor=FLOOR)
        assert (found.n_cpu_moe, found.pool) == (3, pool)


@pytest.mark.parametrize("request_", ["auto", 1, 4, 99])
def test_a_model_with_nothing_to_move(request_: int | str) -> None:
    dense = replace(GPU, free=1 << 40, experts=(0,) * 4)
    found = place(dense, HOST, request=request_)
    assert (found.n_cpu_moe, found.pool, found.redundant, found.notes) == (0, "auto", False, ())
    assert found.warnings == (
        f"`n_cpu_moe` is {request_}, but the model has neither experts nor feed-forward weights to keep on the host",
    )
    assert place(replace(dense, experts=()), request=request_).warnings == found.warnings, "nor layers"


@pytest.mark.parametrize(
    ("n", "n_cpu_moe", "note"),
    [
        (1, 1, "experts: those of the first of 4 layers stay on the host (300 MiB)"),
        (3, 3, "experts: those of the first 3 of 4 layers stay on the host (900 MiB)"),
        (4, 4, "experts: all stay on the host (1200 MiB)"),
        (
            99,
            4,
            "experts: all stay on the host (1200 MiB) (`n_cpu_moe` is 99, and the model has 4 layers)",
        ),
    ],
)
def test_a_number_is_taken_whatever_auto_would_choose(n: int, n_cpu_moe: int, note: str) -> None:
    for free in (0, BESIDE_ALL):
        for pool in ("auto", 2048, "off"):
            assert on(free, request=n, pool=pool) == Placement(n_cpu_moe, pool, notes=(note,))


#
# the note, and properties
#


def test_auto_says_how_it_came_to_its_number() -> None:
    arithmetic, kept = on(NEED[1]).notes
    assert arithmetic == (
        "experts: those of the first of 4 layers stay on the host (300 MiB): 100 MiB other weights and states + 900 MiB"
        " experts + 64 MiB KV of 4,096 tokens + 512 MiB reserve = 1576 MiB, of 1576 MiB free on CUDA0"
    )
    assert kept == (
        "the pool keeps experts on the GPU: beside the full cache of 32,768 tokens those of 3 layers would have to stay on"
        " the host instead of 1"
    )


@st.composite
def models(draw: st.DrawFn) -> list[Holding]:
    """One to three GPUs and perhaps the host, each layer on one of them; often just about enough memory."""
    n_layer, n_gpu = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    home = draw(st.lists(st.integers(0, n_gpu), min_size=n_layer, max_size=n_layer))
    size = draw(st.lists(st.integers(0, 400 * MIB), min_size=n_layer, max_size=n_layer))
    copy = draw(st.sampled_from([0, max(size, default=0) // 3]))
    res = []
    for i in range(n_gpu + 1):
        experts = tuple(n if at == i else 0 for n, at in zip(size, home, strict=True))
        fixed, token_bytes = draw(st.integers(0, 100 * MIB)), draw(st.integers(0, 64 * KIB))
        compute, slope = draw(st.integers(0, 10 * MIB)), draw(st.sampled_from([0, 4 * KIB]))
        free = RESERVE + fixed + compute + draw(st.integers(-MIB, sum(experts) + copy + 8192 * token_bytes))
        sizes = {"weights": fixed, "token_bytes": token_bytes, "buffers": compute, "copy": copy, "token_compute": slope}
        res.append(Holding(f"dev{i}", gpu=i < n_gpu, free=max(0, free), experts=experts, **sizes))
    return res


requests = st.sampled_from(["auto", "off"]) | st.integers(1, 20_000)
contexts = st.integers(1, 20_000)
floors = st.integers(1, 8).map(lambda n: n * CELLS)
caps = st.integers(1, 20_000)


def fit(holdings: list[Holding], n_host: int, tokens: int) -> bool:
    """By hand."""
    for h in holdings:
        used = h.weights + sum(h.experts[n_host:]) + tokens * h.token_bytes + RESERVE + (h.copy if n_host else 0)
        used += h.buffers + tokens * h.token_compute
        if h.gpu and used > h.free:
            return False
    return True


def up(n: int) -> int:
    return (n + CELLS - 1) // CELLS * CELLS


@given(holdings=models(), pool=requests, n_ctx=contexts, floor=floors, cap=caps)
@settings(CHECK, max_examples=500)
def test_auto_fits_or_warns_and_one_layer_fewer_would_not(
    holdings: list[Holding], pool: int | str, n_ctx: int, floor: int, cap: int
) -> None:
    found = place_experts("auto", holdings, pool=pool, n_ctx=n_ctx, floor=floor, cap=cap)
    n, n_layer = found.n_cpu_moe, len(holdings[0].experts)
    assert 0 <= n <= n_layer
    assert all(text and "\n" not in text for text in found.notes + found.warnings)
    if not any(any(h.experts) for h in holdings if h.gpu):
        assert (n, found.pool, found.redundant) == (0, pool, False)
        return
    full = up(n_ctx)
    assert found.redundant == (pool != "off" and fit(holdings, 0, full))
    if found.redundant:
        assert (n, found.pool) == (0, "off" if pool == "auto" else pool)
        return
    wanted = {"auto": cap // CELLS * CELLS, "off": full}.get(str(pool)) or up(int(pool) if pool != "auto" else 0)
    tokens = min(full, max(floor, wanted))
    if fit(holdings, n, tokens):
        assert found.pool == (tokens if pool == "auto" else pool)
        assert found.warnings == ()
    else:
        assert (n, found.pool) == (n_layer, pool)
        assert bool(found.warnings) == (pool != "auto" or not fit(holdings, n, min(full, floor)))
    for fewer in range(n):
        assert not fit(holdings, fewer, tokens)


@given(holdings=models(), pool=requests, n_ctx=contexts, floor=floors, cap=caps, data=st.data())
@settings(CHECK, max_examples=300)
def test_more_memory_never_sends_more_experts_to_the_host(
    holdings: list[Holding], pool: int | str, n_ctx: int, floor: int, cap: int, data: st.DataObject
) -> None:
    more = [replace(h, free=h.free + data.draw(st.integers(0, 300 * MIB))) for h in holdings]
    few, many = (
        place_experts("auto", devices, pool=pool, n_ctx=n_ctx, floor=floor, cap=cap) for devices in (more, holdings)
    )
    assert few.n_cpu_moe <= many.n_cpu_moe
    assert few.redundant >= many.redundant
    assert len(few.warnings) <= len(many.warnings)


@given(holdings=models(), pool=requests, n_ctx=contexts)
@CHECK
def test_the_arithmetic_adds_up(holdings: list[Holding], pool: int | str, n_ctx: int) -> None:
    """By the figures that it shows, each rounded to a MiB."""
    found = place_experts("auto", holdings, pool=pool, n_ctx=n_ctx, floor=FLOOR, cap=CAP)
    for text in found.notes + found.warnings:
        if match := re.search(r"(\d+ MiB \w.*) = (\d+) MiB, (of|but only) (\d+) MiB free on dev(\d)", text):
            terms = [int(n) for n in re.findall(r"(\d+) MiB ", match[1] + " ")]
            terms = terms[-match[1].count(" + ") - 1 :]
            assert abs(sum(terms) - int(match[2])) <= len(terms)
            assert abs(holdings[int(match[5])].free / MIB - int(match[4])) <= 0.5
            assert (match[3] == "of") == (int(match[2]) <= int(match[4])) or abs(int(match[2]) - int(match[4])) <= 1
