"""Guests: which units each layer chooses, and where they are. tests/test_coarse.py is about what tokens see of them.

The oracle of the choice: the shares of the attention of all units in numpy, by the keys that the codes stand for.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import codes, kernels, tiny
from support.changes import LIBRARY
from support.coarse_runs import EXACT, N_READ, N_STEPS, Coarse, coarse_run
from support.kernels import host_kernels
from support.oracles import CACHES, ON_GPU, Case, Run, rows

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.native import Layer, Model, Record
from pyllama_kvflash.native.guests import UNIT

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]

library = kernels.library

OUT = range(4, 40)  # units that are out of the pool as common ones
N_BLOCKS, N_EXCHANGE = 6, 4  # blocks of guests; and how many coarse_run() lets a layer exchange

# before the attention on a CPU, after it for the next token on a GPU; or by the kernels of a GPU, on the CPU
HOW = ["native", pytest.param("kernels", marks=pytest.mark.skipif(ON_GPU, reason="a GPU has its own"))]
Make = Callable[..., Coarse]


def makes(request: pytest.FixtureRequest, how: str) -> Make:
    exact = not ON_GPU and how != "kernels"
    set_to: dict[str, Any] = {"bits": EXACT if exact else (4, 4), "q_tap": True}

    def make(model: Model, **more: Any) -> Coarse:
        case = Case(model, CACHES["f16"], n_prompt=N_READ, n_steps=N_STEPS)
        if how != "kernels":
            return coarse_run(case, **{"n_blocks": N_BLOCKS, **set_to, **more})
        with host_kernels(request.getfixturevalue("library")):
            return coarse_run(case, **{"n_blocks": N_BLOCKS, **set_to, **more})

    return make


@pytest.fixture(params=HOW)
def make(request: pytest.FixtureRequest) -> Make:
    return makes(request, request.param)


@pytest.fixture
def made(make: Make, tiny_model: Callable[[str], Model]) -> Iterator[Coarse]:
    found = make(tiny_model("qwen3"))
    with found.run:
        yield found


#
# the choice
#


def keys_of(records: list[Record], layer: Layer) -> codes.Floats:
    """The keys of F16 records, (n, n_head_kv, d)."""
    found = np.concatenate([rows(r, layer, "k").view(np.float16) for r in records])
    return found.astype(np.float32).reshape(len(found), layer.n_head_kv, -1)


def shares(made: Coarse, cap: float = 0) -> list[npt.NDArray[np.float64]]:
    """The share of the attention that each unit had in each layer for the last token, summed over heads."""
    run, guests, records = made
    bits, n = (run.ctx.pool.coarse_k, run.ctx.pool.coarse_v) if run.ctx.pool else (0, 0), guests.info().n
    tail = [run.read(c) for c in range(n // 64, run.pos // 64 + 1)]
    coded = guests.saved_codes(n)
    res = []
    for i, layer in enumerate(guests.layers):
        keys = np.concatenate([keys_of(records, layer), keys_of(tail, layer)])[: run.pos]
        if bits != EXACT:
            far = slice(OUT.start * UNIT, OUT.stop * UNIT)
            keys[far] = next(codes.unpacked(coded[i], layer, n, bits)).rows()[far]
        q, scale = run.ctx.queries()[i].astype(np.float64), float(run.ctx.query_scales()[i])
        score = np.zeros(len(keys) // UNIT + 1)
        for h, query in enumerate(q):
            x = keys[:, h // (layer.n_head // layer.n_head_kv)] @ query * scale
            x = cap * np.tanh(x / cap) if cap else x
            mass = np.exp(x - x.max())
            score += np.bincount(np.arange(len(x)) // UNIT, mass / mass.sum(), len(score))
        res.append(score)
    return res


TIE = 0.04  # queries are bytes, by which a share is off by up to 2 %: two that are closer may be either way


def check_fills_with_the_best(made: Coarse, cap: float = 0) -> None:
    made.run.feed(1, 1)
    for units, score in zip(made.guests.tables()[1], shares(made, cap), strict=True):
        assert len(set(units.tolist())) == 4 * N_BLOCKS
        out = set(OUT) - set(units.tolist())
        assert len(out) == len(OUT) - 4 * N_BLOCKS, "a guest is common, or twice there"
        assert score[units].min() >= max(score[list(out)]) * (1 - TIE) - 1e-6


def check_the_worst_go_for_the_best(made: Coarse, cap: float = 0) -> None:
    here, others = list(OUT)[: 4 * N_BLOCKS], list(OUT)[4 * N_BLOCKS :]
    made.guests.place(np.tile(np.array(here, np.int32), (len(made.guests.layers), 1)))
    made.run.feed(1, 1)
    n_came = 0
    for units, score in zip(made.guests.tables()[1], shares(made, cap), strict=True):
        came, went = set(units.tolist()) - set(here), set(here) - set(units.tolist())
        n_came += len(came)
        assert len(came) == len(went) <= N_EXCHANGE
        if came:
            assert min(score[list(came)]) >= max(score[u] for u in others if u not in came) * (1 - TIE) - 1e-6
            assert max(score[list(went)]) <= min(score[u] for u in here if u not in went) * (1 + TIE) + 1e-6
        assert came or max(score[others]) <= min(score[here]) * (1 + TIE) + 1e-6
    assert n_came, "nothing was exchanged"


CAP = 2.0


def capped(w: tiny.Writer) -> None:
    """Of gemma2's architecture: logits of the attention are less than CAP, as tanh has it. CUDA's attention has a cap only with
    heads of 128 and 256 values.
    """
    n_embd, n_head, n_head_kv, d = 64, 2, 1, 128
    w.geometry(n_layer=2, n_embd=n_embd, n_ff=64, n_head=n_head, n_head_kv=n_head_kv, n_head_dim=d, rope=1e4)
    w.keys(attention__sliding_window=256, attn_logit_softcapping=CAP)
    w.random("token_embd.weight", n_embd, tiny.N_VOCAB)
    w.norm("output_norm.weight", n_embd)
    for i in range(2):
        blk = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            w.norm(f"{blk}{name}.weight", n_embd)
        for name, n_out in (("q", n_head * d), ("k", n_head_kv * d), ("v", n_head_kv * d)):
            w.random(f"{blk}attn_{name}.weight", n_embd, n_out, scale=2)
        w.random(blk + "attn_output.weight", n_head * d, n_embd)
        w.ffn(blk, n_embd, 64)


def headed(n_head: int, n_head_kv: int, d: int) -> Callable[[tiny.Writer], None]:
    return partial(tiny.qwen3, n_layer=2, n_embd=64, n_ff=64, n_head=n_head, n_head_kv=n_head_kv, n_head_dim=d)


@pytest.mark.parametrize(
    ("arch", "write", "cap"),
    [
        *(
            ("qwen3", headed(*heads), 0)
            for heads in ((1, 1, 128), (5, 1, 64), (9, 1, 128), (3, 3, 80), (2, 1, 96), (2, 2, 256))
        ),
        ("gemma2", capped, CAP),
    ],
)
@pytest.mark.parametrize("how", HOW)
def test_heads_of_all_kinds(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    arch: str,
    write: Callable[[tiny.Writer], None],
    cap: float,
    how: str,
) -> None:
    tiny.write_worded(tmp_path / "model.gguf", arch, write)
    with Model.load(tmp_path / "model.gguf") as model:
        made = makes(request, how)(model)
        with made.run:
            if how == "native" and not ON_GPU:
                check_fills_with_the_best(made, cap)
            check_the_worst_go_for_the_best(made, cap)


def test_free_slots_are_filled(made: Coarse) -> None:
    """With other units in each slot. A token sees all of them: who chooses after the attention fills them before."""
    made.run.feed(1, 1)
    units = made.guests.tables()[1]
    assert all(len(set(row.tolist())) == 4 * N_BLOCKS for row in units)
    assert np.isin(units, OUT).all()


def test_nothing_is_twice_there(made: Coarse) -> None:
    """A chunk that becomes common is not a guest any more, in any layer."""
    run, guests, records = made
    run.feed(1, 1)
    chunk = int(guests.tables()[1][0, 0]) // 4
    guests.resize(5)
    run.ctx.page_in(chunk, records[chunk])
    run.feed(1, 1)
    units = guests.tables()[1]
    assert units.shape[1] == 20
    assert not np.isin(units, np.arange(4 * chunk, 4 * chunk + 4)).any()
    assert all(len(set(row.tolist())) == 20 for row in units)


def test_fewer_out_than_slots(make: Make, tiny_model: Callable[[str], Model]) -> None:
    """Slots that nothing can fill are not seen. All that is out is there then, and so the logits are the full cache's."""
    run, guests, records = make(tiny_model("qwen3"))
    with run:
        run.pos = 10 * 64 + 32
        run.ctx.seq_rm(run.pos)
        guests.put(range(len(guests.layers)), 0, records[:10])
        guests.cover(0, records[:10])
        guests.resize(10)
        logits = run.feed(1, 1)
        units = guests.tables()[1]
    assert (units[:, len(OUT) :] == -1).all()
    assert np.array_equal(np.sort(units[:, : len(OUT)], 1), np.tile(np.array(OUT), (len(units), 1)))
    with Run(tiny_model("qwen3"), CACHES["f16"], pool=1024) as pool:
        pool.feed(10 * 64 + 32)
        want = pool.feed(1, 1)
    assert np.abs(logits - want).max() < 0.02 * want.std(), "everything is seen, in another order"


#
# the blocks
#


def test_rollback_takes_guests_out(made: Coarse) -> None:
    """With the codes, whose means tell of what is taken back."""
    run, guests, records = made
    run.feed(3, 1)
    run.ctx.seq_rm(5 * 64 + 7)
    assert (guests.info().n, guests.info().n_known) == (0, 0)
    assert (guests.tables()[1] == -1).all()
    for first, n in ((0, 3), (3, 5)):
        guests.put(range(len(guests.layers)), first, records[first:n])
        guests.cover(first, records[first:n])
    run.ctx.seq_rm(4 * 64 + 7)
    assert (guests.info().n, guests.info().n_known) == (4 * 64, 3 * 64), "means tell of three chunks, which are there"


def test_clear_frees_all(made: Coarse) -> None:
    run, guests, _ = made
    run.feed(1, 1)
    run.ctx.clear()
    assert guests.info().n == guests.info().n_block == guests.info().n_slot == 0
    assert run.ctx.pool_info().n_block_free == 1280 // 64


def test_guests_take_free_blocks_alone(made: Coarse) -> None:
    run, guests, _ = made
    n = guests.info().n_block + run.ctx.pool_info().n_block_free
    with pytest.raises(PoolError):
        guests.resize(n + 1)
    assert guests.info().n_block == N_BLOCKS
    guests.resize(n)
    with pytest.raises(PoolError):
        run.decode(64)  # a new chunk, and no block
