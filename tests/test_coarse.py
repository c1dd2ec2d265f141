"""Codes of all positions: every position counts once in the attention, exactly where the pool has it, and else by its code.

The oracle of what counts: with codes that are exact (32 bits, the CPU's alone), a pool is the full cache within its noise, wherever it is cut. The
oracle of the codes: their rows in numpy (support.codes), put into records in place of the real ones, with exact codes of these.
Every oracle is shown to fail.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import codes, families, tiny
from support.changes import LIBRARY
from support.coarse_runs import N_READ, N_STEPS, Coarse, apart, coarse_run, rows_instead, steps
from support.codes import Coded, unpacked
from support.families import N_EMBD, N_FF, N_SWA, geometry, norms
from support.oracles import CACHES, ON_GPU, Case, Run, assert_equal, rows

from pyllama_kvflash.errors import UnsupportedError, UsageError
from pyllama_kvflash.native import Model, PoolParams, Record, codes_bytes
from pyllama_kvflash.native.guests import UNIT, Guests
from pyllama_kvflash.policy.fresh import Heads

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]
exact = pytest.mark.skipif(ON_GPU, reason="exact codes are the CPU's")

QUANTISED_Q = 0.006  # of a quantised cache llama.cpp rounds queries, and weights beside it are of those that are not
CODED = 0.012  # queries as bytes, and weights of values: relative RMS of logits


def gemma2(w: "tiny.Writer") -> None:
    """A cap of the attention's logits, low enough to matter."""
    geometry(
        w, 2, embd_scale=0.1, attention__sliding_window=N_SWA, attn_logit_softcapping=3.0, final_logit_softcapping=30.0
    )
    for i in range(2):
        blk = f"blk.{i}."
        norms(w, blk, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        families.attention(w, blk)
        w.ffn(blk, N_EMBD, N_FF)
    for part in w._file.tensors:
        part.pop("output.weight", None)  # the embeddings are it


def floor(case: Case) -> float:
    """What rounding does, at most."""
    noise = apart(case.noisy_logits, case.stock_logits[-N_STEPS:])
    return 3 * max(noise, 1e-3) + (QUANTISED_Q if case.cache.type == "q8_0" else 0)


def is_full_cache(case: Case, made: Coarse) -> bool:
    with made.run as run:
        got = apart(steps(run), case.stock_logits[-N_STEPS:])
    print(f"{case.model.path.stem} {case.cache}: {got:.2g} from the full cache, and rounding {floor(case):.2g}")
    return got <= floor(case)


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capped") / "gemma2.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.MODELS, "gemma2", gemma2)
        tiny.write("gemma2", path)
    return path


@pytest.fixture
def case_of(tiny_model: Callable[[str], Model], capped: Path) -> Callable[..., Case]:
    def made(name: str, cache: str = "f16") -> Case:
        model = Model.load(capped) if name == "gemma2" else tiny_model(name)
        return Case(model, CACHES[cache], n_prompt=N_READ, n_steps=N_STEPS)

    return made


#
# every position once
#

NAMES = (
    "qwen3",
    "gemma4",
    "qwen35",
    "gpt-oss",
    "deepseek2",
    "gemma2",
)  # heads, shared layers, states, sinks, one latent, a cap
CUTS = {"first": range(1, 2), "some": (1, 2, 5, 9, 10), "most": range(1, 13)}


@exact
@pytest.mark.parametrize("cache", ["f16", "f16-nofa", "q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_exact_codes_are_the_full_cache(case_of: Callable[..., Case], name: str, cache: str) -> None:
    case = case_of(name, cache)
    for n_blocks in (0, 4):
        assert is_full_cache(case, coarse_run(case, n_blocks=n_blocks)), n_blocks


@exact
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("n_blocks", [0, 3])
def test_wherever_the_pool_is_cut(case_of: Callable[..., Case], cut: str, n_blocks: int) -> None:
    case = case_of("qwen3")
    assert is_full_cache(case, coarse_run(case, out=CUTS[cut], n_blocks=n_blocks))


@exact
def test_after_a_rollback(case_of: Callable[..., Case]) -> None:
    """Positions that are forgotten have no codes any more; those that come in their place have others."""
    case = case_of("qwen3")
    made = coarse_run(case, n_blocks=4)  # guests come from its records
    with made.run as run:
        run.feed(20, 1)
        run.ctx.seq_rm(N_READ)
        run.pos = N_READ
        assert apart(steps(run), case.stock_logits[-N_STEPS:]) <= floor(case)


def test_nothing_outside_is_the_stock_cache(case_of: Callable[..., Case]) -> None:
    """Bit for bit: without codes there are no nodes, and with codes of what is there all weights are the pool's."""
    case = case_of("qwen3")
    with case.pool(coarse=(4, 4)) as run:
        assert_equal(np.concatenate([run.feed(N_READ), run.feed(N_STEPS, 1)]), case.stock_logits)
    with coarse_run(case, bits=(4, 4), out=()).run as run:
        assert_equal(run.feed(N_STEPS, 1), case.stock_logits[-N_STEPS:])


@exact
def test_sequences_have_their_own(case_of: Callable[..., Case]) -> None:
    """One sequence has chunks outside, the other none; both in one batch."""
    case = case_of("qwen3")
    made = coarse_run(case, n_seq=2, n_blocks=2)
    with made.run as run, case.stock() as stock:
        other = run.ctx.sequence(1)
        other.decode(run.tokens[5000:5200], 0)
        stock.ctx.decode(run.tokens[5000:5200], 0)
        got, want = [], []
        for i in range(20):
            mine, its = run.tokens[N_READ + i], run.tokens[5200 + i]
            run.ctx.decode_each([0, 1], [N_READ + i, 200 + i], [np.array([t], np.int32) for t in (mine, its)])
            got.append([run.ctx.logits(0), run.ctx.logits(1)])
            stock.ctx.decode(np.array([its], np.int32), 200 + i)
            want.append(stock.ctx.logits())
        assert apart(np.array(got)[:, 0], case.stock_logits[-N_STEPS : -N_STEPS + 20]) <= floor(case)
        assert apart(np.array(got)[:, 1], np.array(want)) <= floor(case)


#
# that this can fail
#


def change_means(blob: Record, made: Coarse, layer: int) -> None:
    d = made.guests.layers[layer].n_embd_head_k * made.guests.layers[layer].n_head_kv
    start = 4 * 2 * d  # after what keys and values are divided by
    blob[start : start + 4 * d].view(np.float32)[:] *= 0.5


def change_spread(blob: Record, made: Coarse, layer: int) -> None:
    d = made.guests.layers[layer].n_embd_head_k * made.guests.layers[layer].n_head_kv
    blob[: 4 * d].view(np.float32)[:] = np.roll(blob[: 4 * d].view(np.float32), 1) * 1.2


@exact
@pytest.mark.parametrize("change", [change_means, change_spread])
def test_other_means_and_spreads_are_seen(case_of: Callable[..., Case], change: Callable[..., None]) -> None:
    case = case_of("qwen3")
    made = coarse_run(case)
    n = made.guests.info().n
    blobs = made.guests.saved_codes(n)
    for i, blob in enumerate(blobs):
        change(blob, made, i)
    for layer, blob in enumerate(blobs):
        made.guests.restore_codes(layer, n, blob)
    assert not is_full_cache(case, made)


@exact
def test_rows_of_another_unit_are_seen(case_of: Callable[..., Case]) -> None:
    """A table that names units whose rows are not in the slots: another layer's choice."""
    case = case_of("qwen3")
    made = coarse_run(case, n_blocks=4)
    made.run.feed(1)
    _, units = made.guests.tables()
    made.guests.place(units)  # as it was
    made.run.ctx.seq_rm(N_READ)
    made.run.pos = N_READ
    for c in range(1, 10):
        made.records[c][:] = made.records[(c + 1) % 10]  # what is fetched from now on
    made.guests.place(units)
    assert not is_full_cache(case, made)


#
# the codes
#


def cache_of(name: str) -> str:
    """A cache with which any device computes the attention: CUDA has no flash attention of some heads."""
    return "f16" if name == "qwen3" else "f16-nofa"


def coded_rows(made: Coarse, bits: tuple[int, int]) -> list[list[Coded]]:
    """Of each layer: keys, and values."""
    n = made.guests.info().n
    return [
        list(unpacked(blob, layer, n, bits))
        for blob, layer in zip(made.guests.saved_codes(n), made.guests.layers, strict=True)
    ]


def floats(records: Sequence[Record], layer: Any, which: str) -> codes.Floats:
    """Rows of a layer, F16, (n, n_head_kv, d)."""
    found = np.concatenate([rows(r, layer, which).view(np.float16) for r in records])
    return found.astype(np.float32).reshape(len(found), layer.n_head_kv, -1)


def forge(
    records: Sequence[Record], made: Coarse, coded: list[list[Coded]], *, transposed: bool = False
) -> list[Record]:
    """Records with the rows that the codes stand for. transposed: values are, without flash attention."""
    res = [r.copy() for r in records]
    for layer, parts in zip(made.guests.layers, coded, strict=True):
        for which, part in zip("kv", parts, strict=False):
            new = part.rows().astype(np.float16).reshape(len(res), 64, -1)
            turned = transposed and which == "v"
            for record, its in zip(res, new.swapaxes(1, 2) if turned else new, strict=True):
                rows(record, layer, which, transposed=turned)[:] = np.ascontiguousarray(its).view(np.uint8)
    return res


@pytest.mark.parametrize("bits", [(4, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("name", ["qwen3", "deepseek2"])
def test_codes_are_those_of_numpy(case_of: Callable[..., Case], name: str, bits: tuple[int, int]) -> None:
    """But where a value lies between two levels, to a rounding; noise is what Max's equally spaced levels have."""
    made = coarse_run(case_of(name, cache_of(name)), bits=bits)
    for layer, parts in zip(made.guests.layers, coded_rows(made, bits), strict=True):
        for which, part in zip("kv", parts, strict=False):
            x = floats(made.records, layer, which)
            want = codes.encoded(x, part.bits, spreads=which == "k")
            np.testing.assert_allclose(part.spread, want.spread, rtol=1e-5)
            np.testing.assert_allclose(part.means[..., : part.d], want.means[..., : part.d], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(part.scales, want.scales, rtol=2e-3)
            assert np.mean(part.codes[..., : part.d] != want.codes[..., : part.d]) < 2e-3
            noise = np.sum((part.rows() - x) ** 2) / np.sum((x - x.mean(0)) ** 2)
            assert noise < {4: 0.02, 2: 0.2}[part.bits]
    made.run.ctx.close()


@pytest.mark.parametrize("bits", [(4, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("name", ["qwen3", "deepseek2", "gemma2"])
def test_attention_is_that_of_the_codes(case_of: Callable[..., Case], name: str, bits: tuple[int, int]) -> None:
    case = case_of(name, cache_of(name))
    with coarse_run(case, bits=bits).run as run:
        made = Coarse(run, Guests(run.ctx), [run.read(c) for c in (0, *range(10, 15))])
        got = steps(run)
        coded = coded_rows(made, bits)
    whole = coarse_run(case, bits=bits)
    forged = forge(whole.records, whole, coded, transposed=case.cache.flash_attn == "off")
    whole.run.ctx.close()
    with rows_instead(case, forged) as run:
        assert apart(got, steps(run)) < CODED
    assert apart(got, case.stock_logits[-N_STEPS:]) > CODED  # and not of the rows themselves


@pytest.mark.parametrize("what", ["scales", "codes", "means"])
def test_another_code_is_seen(case_of: Callable[..., Case], what: str) -> None:
    """Of another position, another head, another segment."""
    case, bits = case_of("qwen3"), (4, 4)
    with coarse_run(case, bits=bits).run as run:
        got, coded = steps(run), coded_rows(Coarse(run, Guests(run.ctx), []), bits)
    axis = 1 if what == "codes" else 0
    moved = [
        [p._replace(**{what: np.roll(getattr(p, what), 1, axis) * (1 if what != "means" else 0)}) for p in parts]
        for parts in coded
    ]
    whole = coarse_run(case, bits=bits)
    forged = forge(whole.records, whole, moved)
    whole.run.ctx.close()
    with rows_instead(case, forged) as run:
        assert apart(got, steps(run)) > CODED


#
# bytes
#


@pytest.mark.parametrize("bits", [(4, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("name", ["qwen3", "deepseek2"])
def test_bytes_of_fewer_positions_are_their_beginning(
    case_of: Callable[..., Case], name: str, bits: tuple[int, int]
) -> None:
    made = coarse_run(case_of(name, cache_of(name)), bits=bits)
    n = made.guests.info().n
    all_, few = made.guests.saved_codes(n), made.guests.saved_codes(320)
    for layer, whole, part in zip(made.guests.layers, all_, few, strict=True):
        assert len(whole) == codes_bytes(Heads.of(layer), bits, n, on_gpu=False)
        assert len(part) == codes_bytes(Heads.of(layer), bits, 320, on_gpu=False)
        np.testing.assert_array_equal(part, whole[: len(part)])
    assert made.guests.info().bytes == (0 if ON_GPU else sum(map(len, all_)))
    got = made.run.feed(10, 1)
    made.run.ctx.seq_rm(N_READ)
    made.run.pos = N_READ
    for layer, whole in enumerate(all_):
        made.guests.restore_codes(layer, n, whole)
    np.testing.assert_array_equal(made.run.feed(10, 1), got)
    made.run.ctx.close()


@pytest.mark.nightly(LIBRARY)
def test_a_segment_begins_with_its_own_mean_or_that_before(case_of: Callable[..., Case]) -> None:
    """Its own if enough of it is known."""
    model = case_of("qwen3").model
    for n_more, own in ((2048, True), (64, False)):
        with Run(model, CACHES["f16"], pool=8192, coarse=(4, 4)) as run:
            run.feed(codes.SEGMENT + n_more)
            records = [run.read(c) for c in range((codes.SEGMENT + n_more) // 64)]
            guests = Guests(run.ctx)
            guests.put(range(len(guests.layers)), 0, records)
            guests.cover(0, records)
            made = Coarse(run, guests, records)
            means = coded_rows(made, (4, 4))[0][0].means
            assert np.array_equal(means[0], means[1]) != own


def test_what_codes_cannot_be(tiny_model: Callable[[str], Model]) -> None:
    with pytest.raises((UsageError, UnsupportedError), match="2 or 4 bits"):
        Run(tiny_model("qwen3"), pool=1024, coarse=(3, 4))
    assert PoolParams(n_pool=256).coarse_k == 0
    assert UNIT == codes.UNIT
