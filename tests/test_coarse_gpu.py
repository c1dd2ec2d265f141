"""Attention by codes with the kernels of a GPU, compiled for the CPU (tests/native/cuda), against that of the CPU.

Codes are the same, bytes for bytes. The CPU rounds queries and weights to bytes, the kernels queries to bytes and weights to halves.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import tiny
from support.coarse_runs import N_READ, N_STEPS, apart, coarse_run, steps
from support.kernels import SOURCES, build_kernels, host_kernels, library
from support.oracles import CACHES, ON_GPU, SCRIBBLE, Case, Logits, Run, assert_equal

from pyllama_kvflash.native import Model, Record, choice_bytes, codes_bytes
from pyllama_kvflash.native.guests import Guests
from pyllama_kvflash.policy.fresh import Heads

__all__ = ["library"]
pytestmark = [
    pytest.mark.native,
    pytest.mark.nightly(
        r"pyllama_kvflash/native/src/(guests|coarse)/.*|tests/native/cuda/.*|tests/support/(coarse_runs|kernels)\.py"
    ),
    pytest.mark.skipif(ON_GPU, reason="a GPU has its own: tests/test_coarse.py is about these"),
]

NEAR = 0.01  # relative RMS of logits: queries as bytes, weights as bytes or halves

Tables = list[npt.NDArray[np.int32]]
BATCHES = [1] * (N_STEPS // 2) + [N_STEPS // 2]


def run(case: Case, *, follows: Tables | None = None, placed: bool = True, **options: Any) -> tuple[Logits, Tables]:
    """Logits of the steps; and the units of each layer before each batch, and at the end.

    placed: the first token has the same guests wherever it runs. follows: units before each batch; then layers choose none.
    """
    made = coarse_run(case, **options, **({"n_exchange": 0} if follows else {}))
    logits, tables = [], []
    with made.run as run:
        units = made.guests.tables()[1]
        if units.size and placed:
            made.guests.place(np.tile(4 + np.arange(units.shape[1], dtype=np.int32), (len(units), 1)))
        for i, n in enumerate(BATCHES):
            if follows:
                made.guests.place(follows[i])
            tables.append(made.guests.tables()[1])
            logits.append(run.feed_at_once(n))
        return np.concatenate(logits), [*tables, made.guests.tables()[1]]


def both(case: Case, library: Path, **options: Any) -> tuple[float, float]:
    """How far the kernels' logits are from the CPU's, of tokens one by one or at once, and the share of guests that are the same.

    The kernels choose for the next token, the CPU for this one: it has the kernels' guests, and chooses in a run of its own.
    """
    with host_kernels(library):
        got, tables = run(case, **options)
    (want, _), (_, others) = run(case, follows=tables, **options), run(case, **options)
    same = [len(set(a) & set(b)) / len(a) for a, b in zip(tables[-1].tolist(), others[-1].tolist(), strict=True) if a]
    off = max(apart(got[part], want[part]) for part in (slice(N_STEPS // 2), slice(N_STEPS // 2, None)))
    return off, float(np.mean(same)) if same else 1.0


@pytest.fixture
def case_of(tiny_model: Callable[[str], Model]) -> Callable[..., Case]:
    return lambda name, cache="f16": Case(tiny_model(name), CACHES[cache], n_prompt=N_READ, n_steps=N_STEPS)


@pytest.mark.parametrize("n_blocks", [0, 4])
@pytest.mark.parametrize("bits", [(4, 4), (4, 2), (2, 2)])
def test_it_is_the_attention_of_the_cpu(
    case_of: Callable[..., Case], library: Path, bits: tuple[int, int], n_blocks: int
) -> None:
    off, same = both(case_of("qwen3"), library, bits=bits, n_blocks=n_blocks)
    print(off, same)
    assert off < NEAR
    assert same > 0.85


@pytest.mark.parametrize("cache", ["f16", "f16-nofa", "q8_0"])
@pytest.mark.parametrize("name", ["qwen3", "gemma4", "qwen35", "gpt-oss", "deepseek2"])
def test_families(case_of: Callable[..., Case], library: Path, name: str, cache: str) -> None:
    off, _ = both(case_of(name, cache), library, bits=(4, 4), n_blocks=4)
    assert off < NEAR


@pytest.fixture
def case_with_heads(tmp_path: Path) -> Iterator[Callable[..., Case]]:
    """A model with so many heads, of keys, and values of each."""
    with ExitStack() as stack:

        def make(n_head: int, n_head_kv: int, d: int, cache: str) -> Case:
            its = partial(tiny.qwen3, n_layer=2, n_embd=64, n_ff=64, n_head=n_head, n_head_kv=n_head_kv, n_head_dim=d)
            tiny.write_worded(tmp_path / "model.gguf", "qwen3", its)
            model = stack.enter_context(Model.load(tmp_path / "model.gguf"))
            return Case(model, CACHES[cache], n_prompt=N_READ, n_steps=N_STEPS)

        yield make


@pytest.mark.parametrize(
    "heads",
    [
        (8, 8, 96, "q8_0"),
        (5, 1, 64, "q4_0"),
        (9, 1, 128, "f16"),
        (3, 3, 80, "f16"),
        (16, 1, 256, "q8_0"),
        (8, 8, 32, "q4_0"),
    ],
)
def test_heads_of_all_kinds(
    case_with_heads: Callable[..., Case], library: Path, heads: tuple[int, int, int, str]
) -> None:
    """Rows that begin where nothing is aligned, tokens whose queries are of two passes, sums of values past a row."""
    off, _ = both(case_with_heads(*heads), library, bits=(4, 4), n_blocks=4)
    assert off < NEAR


def test_a_pass_that_begins_within_a_token(case_with_heads: Callable[..., Case], tmp_path: Path) -> None:
    wrong = mutated(tmp_path, ("skip                 = first % share;", "skip                 = 0;"))
    off, _ = both(case_with_heads(5, 1, 64, "f16"), wrong, bits=(4, 4), n_blocks=4)
    assert not off < NEAR


def test_nothing_outside_is_the_stock_cache(case_of: Callable[..., Case], library: Path) -> None:
    case = case_of("qwen3")
    with host_kernels(library), coarse_run(case, bits=(4, 4), out=()).run as run:
        assert_equal(run.feed(N_STEPS, 1), case.stock_logits[-N_STEPS:])


@pytest.mark.parametrize(
    ("name", "cache"),
    [("qwen3", "f16"), ("qwen3", "f16-nofa"), ("qwen3", "q8_0"), ("gpt-oss", "q8_0"), ("deepseek2", "f16")],
)
@pytest.mark.parametrize("bits", [(4, 2), (2, 4)])
def test_codes_are_those_of_the_cpu(
    case_of: Callable[..., Case], library: Path, name: str, cache: str, bits: tuple[int, int]
) -> None:
    """Of the same records, bytes for bytes: rows as they lie, values next to each other, rotated, one latent."""
    case = case_of(name, cache)
    of_cpu = coarse_run(case, bits=bits)
    n = of_cpu.guests.info().n
    with of_cpu.run:
        want = of_cpu.guests.saved_codes(n)
    with host_kernels(library):
        made = coarse_run(case, bits=bits)
    with made.run:
        for mine, its in zip(made.guests.saved_codes(n), want, strict=True):
            np.testing.assert_array_equal(mine, its)


def test_segments_begin_as_on_the_cpu(case_of: Callable[..., Case], library: Path) -> None:
    """With a mean of their own, or that of the segment before; whatever is put at once."""
    model = case_of("qwen3").model

    def saved(parts: list[int]) -> list[Record]:
        with Run(model, CACHES["f16"], pool=8192, coarse=(4, 4)) as run:
            run.feed(4096 + 2048)
            guests, first = Guests(run.ctx), 0
            for n in parts:
                records = [run.read(c) for c in range(first, first + n)]
                guests.put(range(len(guests.layers)), first, records)
                guests.cover(first, records)
                first += n
            return guests.saved_codes(first * 64)

    for parts in ([96], [30, 40, 26], [64, 1, 31]):
        want = saved(parts)
        with host_kernels(library):
            got = saved(parts)
        for mine, its in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, its)


def test_saved_codes_go_on(case_of: Callable[..., Case], library: Path) -> None:
    """With the same bits, in a sequence that is given them."""
    case = case_of("qwen3")
    with host_kernels(library):
        one, two = coarse_run(case, bits=(4, 2)), coarse_run(case, bits=(4, 2))
    with one.run as a, two.run as b:
        n = one.guests.info().n
        blobs = one.guests.saved_codes(n)
        for layer, blob in enumerate(blobs):
            two.guests.restore_codes(layer, n, np.zeros_like(blob))
            two.guests.restore_codes(layer, n, blob)
        assert_equal(steps(a), steps(b))


def test_saved_codes_are_put_back_by_threads(case_of: Callable[..., Case], library: Path) -> None:
    """Those of different layers at once, in a context that had none: its memory for them is laid out once."""
    case = case_of("qwen3")
    with host_kernels(library):
        one, other = coarse_run(case, bits=(4, 2)), case.pool(1280, coarse=(4, 2), n_exchange=4)
    with one.run as a, other as b:
        b.feed(N_READ)
        records = [b.read(c) for c in range(N_READ // 64)]
        for c in range(1, 10):
            b.ctx.drop(c)
        guests, n = Guests(b.ctx), one.guests.info().n
        blobs = one.guests.saved_codes(n)
        with ThreadPoolExecutor(len(blobs)) as threads:
            for _ in threads.map(lambda layer: guests.restore_codes(layer, n, blobs[layer]), range(len(blobs))):
                pass
        guests.cover(0, records)
        b.ctx.scribble(SCRIBBLE)
        assert_equal(steps(a), steps(b))


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "deepseek2"])
@pytest.mark.parametrize("n_ctx", [4096, 4100])
def test_kernels_take_what_is_kept_free(case_of: Callable[..., Case], library: Path, name: str, n_ctx: int) -> None:
    """But for what tables have whose rows are counted as larger than they are."""
    with host_kernels(library):
        made = coarse_run(case_of(name), bits=(4, 2), n_ctx=n_ctx)
    with made.run:
        heads, n_cells = tuple(map(Heads.of, made.guests.layers)), -(-n_ctx // 256) * 256
        codes = sum(codes_bytes(h, (4, 2), n_cells, on_gpu=True) for h in heads)
        want = choice_bytes(heads, n_cells, 1, 1280, 64) + codes
        assert 0 <= want - made.guests.info().device_bytes < 4 << 10


#
# that this can fail
#

LATE = "rows that are not there yet"  # with MLA keys are values, too, and come alone
MUTANTS = {
    "another mean": (
        "mean_of(a.coding[0], codes, min(first + i, n - 1) * (SEGMENT / UNIT), head)",
        "mean_of(a.coding[0], codes, 0, 0)",
    ),
    "guests in both sums": ("const int32_t u = table[slot];", "const int32_t u = -1;"),
    "the scale of another position": (
        "of_k = m.codes[0].scales + slot * UNIT + pos_of(g);",
        "of_k = m.codes[0].scales + slot * UNIT;",
    ),
    "what another query's weights add": ("-scale * piece.total[j];", "-scale * piece.total[0];"),
    "weights of another query": ("turned(halves(y[e][0] * by, y[e][1] * by));", "halves(y[e][0] * by, y[e][1] * by);"),
    "values of another position": ("read_words(from + 32);", "read_words(from + 16);"),
    "the mean of nobody": ("{x * by[0], x * by[1], y * by[0], y * by[1]}", "{}"),
    "no rotation back": ("if (tid < 32) { hadamard_powers(x, c.d); }", ""),
    "the pool without its guests": ("(p.n_chunk / UNIT) + task.n_fill;", "(p.n_chunk / UNIT);"),
    "cells' weights of another query": (
        "b   = weights[lane];",
        "b   = weights[lane ^ 4];",
    ),
    "values of another cell": ("rows.four<type>(4 * c + t,", "rows.four<type>(4 * c + (t ^ 1),"),
    "the pool by the tops of the last cells": ("factor[j] = exp2f(its.top[j] - top);", "factor[j] = 1;"),
    LATE: ("alone ? copied<0>() : copied<1>();", "copied<1>();"),
    "codes of rows that are not divided": ("factor = __fdiv_rn(1, to.factors[head * k.d + e]);", "factor = 1;"),
}


def mutated(folder: Path, *changes: tuple[str, str]) -> Path:
    texts = {str(f.relative_to(SOURCES)): f.read_text() for f in SOURCES.glob("*/*.cu*")}
    names = [next(name for name, text in texts.items() if old in text) for old, _ in changes]
    assert all(sum(text.count(old) for text in texts.values()) == 1 for old, _ in changes)

    def change(name: str) -> Callable[[str], str]:
        its = [c for c, n in zip(changes, names, strict=True) if n == name]
        return lambda text: reduce(lambda done, c: done.replace(*c), its, text)

    return build_kernels(folder, {name: change(name) for name in names})


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(case_of: Callable[..., Case], tmp_path: Path, name: str) -> None:
    case = case_of("deepseek2" if name == LATE else "qwen3")
    off, _ = both(case, mutated(tmp_path, MUTANTS[name]), bits=(4, 4), n_blocks=4)
    assert not off < NEAR  # NaN, too


@pytest.mark.parametrize("is_right", [True, False])
def test_logits_rise(case_of: Callable[..., Case], tmp_path: Path, is_right: bool) -> None:
    """Whenever one is larger than those before it, what is relative to these is so again."""
    wrong = [] if is_right else [("first ? 1 : exp2f(-by[j])", "1")]
    off, _ = both(case_of("qwen3"), mutated(tmp_path, ("LEAD       = 8;", "LEAD       = 0;"), *wrong), bits=(4, 4))
    assert (off < NEAR) == is_right


PASSES = "    fibers::hide(a.passes, (size_t) n_head * n_pass * a.pass_size());\n"
TAKEN = "    fibers::hide(a.taken, (size_t) n_token * a.n_word() * sizeof(uint32_t));\n"
PARTS = "    fibers::hide(a.parts, (size_t) n * a.p.n_head * n_part * a.part_size() * sizeof(float));\n"
ATTEND, MIX = (
    "    const auto kernel = a.coding[0].n_bit == 4 ? attend_of<4>",
    "        launch_early(kernel, dim3(a.p.n_head, n)",
)
HIDDEN = ((ATTEND, PASSES + TAKEN + ATTEND), (MIX, PARTS + MIX))
"""Changes by which a block sees nothing of the kernel ahead before it waits for that."""
EARLY = {
    "nothing": (),
    "what is prepared": (
        "    ggml_cuda_pdl_sync();\n    read_pass(a, at, task, pass, m);",
        "    read_pass(a, at, task, pass, m);\n    ggml_cuda_pdl_sync();",
    ),
    "queries for the pool": (
        "            ggml_cuda_pdl_sync();\n            read_plain(a, at, task, pass);",
        "            read_plain(a, at, task, pass);\n            ggml_cuda_pdl_sync();",
    ),
    "parts": ("    ggml_cuda_pdl_sync();\n    mix_read first(", "    mix_read first("),
}


@pytest.mark.parametrize("read", EARLY)
def test_kernels_that_begin_early(case_of: Callable[..., Case], tmp_path: Path, read: str) -> None:
    wrong = [EARLY[read]] if EARLY[read] else []
    off, _ = both(case_of("qwen3"), mutated(tmp_path, *HIDDEN, *wrong), bits=(4, 4), n_blocks=4)
    assert (off < NEAR) == (not wrong)


@pytest.mark.parametrize("is_right", [True, False])
def test_free_slots_are_filled(case_of: Callable[..., Case], library: Path, tmp_path: Path, is_right: bool) -> None:
    """With any units and their rows: those that the CPU has there from the beginning."""
    fetch = "fetch(p, seq, ask.blocks(seq), moves, n, threadIdx.x / 32, WARPS);"
    with host_kernels(library if is_right else mutated(tmp_path, (fetch, ""))):
        got, tables = run(case_of("qwen3"), bits=(4, 4), n_blocks=4, n_exchange=0, placed=False)
    want, _ = run(case_of("qwen3"), bits=(4, 4), n_blocks=4, follows=[tables[-1]] * len(BATCHES))
    assert (apart(got, want) < NEAR) == is_right
