"""Policy fresh: each layer attends to what is common and to guests of its own choice, and to nothing else.

The oracle of what is computed: a pool without guests, in which the chunk that fills a block comes from a forged record. Its rows
in each layer are those that the guests of that layer have. Equal means equal bits. The oracle of what is chosen: the same
scores in numpy, from the index's own bytes.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import kernels, tiny
from support.changes import LIBRARY
from support.kernels import host_kernels
from support.models import NAMES
from support.oracles import CACHES, ONE_GPU, SCRIBBLE, Cache, Logits, Run, assert_equal, rows

from pyllama_kvflash.errors import PoolError, UsageError
from pyllama_kvflash.native import Context, Layer, Model, PoolParams, Record
from pyllama_kvflash.native.guests import UNIT, Guests
from pyllama_kvflash.policy.fresh import GpuChoice, Heads, IndexForm

pytestmark = pytest.mark.native

Units = npt.NDArray[np.int32]

N_READ = 1000  # tokens before guests begin: 15 chunks of 64 are full
FIRST, LAST_OUT = 1, 9  # chunks that leave the pool


library = kernels.library


@contextmanager
def choosing(request: pytest.FixtureRequest, how: str) -> Iterator[None]:
    """Layers choose by the CPU's node, or by the kernels of GPUs, on the CPU."""
    with host_kernels(request.getfixturevalue("library")) if how == "kernels" else nullcontext():
        yield


@pytest.fixture(params=["node", "kernels"])
def chooser(request: pytest.FixtureRequest) -> Iterator[None]:
    with choosing(request, request.param):
        yield


def form_of(model: Model) -> IndexForm:
    with Context(model, n_ctx=512, n_batch=64, n_ubatch=64) as ctx:
        return IndexForm.of(min(layer.n_embd_head_k for layer in ctx.layers()))


def fit(guests: Guests, form: IndexForm, records: list[Record]) -> None:
    """Put these records, of chunks 0, 1 ..., into the index."""
    for i in range(len(guests.layers)):
        mean, variances, components = guests.components(i, records)
        guests.fit(i, mean, *form.basis(variances, components))
    guests.put(range(len(guests.layers)), 0, records)
    guests.cover(0, records)


class Fresh(NamedTuple):
    """A run whose chunks FIRST to LAST_OUT - 1 are out, and may be guests. Layers fetch from the records: they are kept."""

    run: Run
    guests: Guests
    records: list[Record]


def fresh_run(
    model: Model, cache: Cache, *, chunk: int = 64, n_exchange: int = 0, n_blocks: int = 4, **more: Any
) -> Fresh:
    form = form_of(model)
    run = Run(
        model, cache, pool=1024, chunk=chunk, index=(form.n_four, form.n_two, form.n_one), n_exchange=n_exchange, **more
    )
    run.feed(N_READ)
    each = 64 // chunk
    out = range(FIRST * each, LAST_OUT * each)
    records = [run.read(c) for c in range(N_READ // chunk)]
    for c in out:
        run.ctx.drop(c)
    guests = Guests(run.ctx)
    fit(guests, form, records)
    guests.resize(n_blocks * each)
    run.ctx.scribble(SCRIBBLE)
    return Fresh(run, guests, records)


def some_units(n_layer: int, n_slot: int, seed: int = 3) -> Units:
    """Another choice in each layer, of units that are out."""
    rng = np.random.default_rng(seed)
    out = np.arange(FIRST * 64 // UNIT, LAST_OUT * 64 // UNIT)
    return np.array([rng.permutation(out)[:n_slot] for _ in range(n_layer)], np.int32)


def forged(
    record: Record, layers: list[Layer], slots: Units, records: list[Record], *, chunk: int, v_trans: bool
) -> Record:
    """A record whose rows, in each layer, are those of the units (n_layer, chunk/UNIT)."""
    res = record.copy()
    for layer, units in zip(layers, slots, strict=True):
        for i, unit in enumerate(units):
            c, at = divmod(int(unit) * UNIT, chunk)
            to, of = slice(i * UNIT, (i + 1) * UNIT), slice(at, at + UNIT)
            rows(res, layer, "k")[to] = rows(records[c], layer, "k")[of]
            if layer.size_v and v_trans:
                own, its = (rows(r, layer, "v", transposed=True).view(np.uint16) for r in (res, records[c]))
                own[:, to] = its[:, of]
            elif layer.size_v:
                rows(res, layer, "v")[to] = rows(records[c], layer, "v")[of]
    return res


def forged_run(
    model: Model, cache: Cache, blocks: Units, units: Units, *, chunk: int = 64, n_steps: int = 20
) -> Logits:
    """The same steps in a pool without guests, whose blocks have what the guests have."""
    each = 64 // chunk
    with Run(model, cache, pool=1024, chunk=chunk) as run:
        run.feed(N_READ)
        records = [run.read(c) for c in range(N_READ // chunk)]
        out = list(range(FIRST * each, LAST_OUT * each))
        for c in out:
            run.ctx.drop(c)
        run.ctx.scribble(SCRIBBLE)
        n = chunk // UNIT
        for i, block in enumerate(blocks):
            mine = units[:, i * n : (i + 1) * n]
            record = forged(
                records[out[i]], run.ctx.layers(), mine, records, chunk=chunk, v_trans=cache.flash_attn == "off"
            )
            run.ctx.begin_page_in(out[i], record, int(block))
            run.ctx.commit(out[i])
        return run.feed(n_steps, 1)


BY_NODE = [(name, cache, 64) for name in NAMES for cache in CACHES] + [("qwen3", "f16", 16), ("qwen3", "f16-nofa", 32)]
BY_KERNELS = [("qwen3", cache, 64) for cache in CACHES] + [("gemma4", "f16", 64), ("qwen3", "f16", 16)]


def by(how: str, cells: list[tuple[str, str, int]]) -> list[Any]:
    """The cells for one way of choosing. Those that differ from the first in more than one are nightly, as in support.changes; by
    kernels, which take long as fibers, all others.
    """
    most = 0 if how == "kernels" else 1
    return [
        pytest.param(
            (*cell, how),
            marks=[pytest.mark.nightly(LIBRARY)] if sum(map(operator.ne, cell, cells[0])) > most else [],
            id="-".join(map(str, (*cell, how))),
        )
        for cell in cells
    ]


@pytest.fixture(params=[*by("node", BY_NODE), *by("kernels", BY_KERNELS)])
def cell(request: pytest.FixtureRequest, tiny_model: Callable[[str], Model]) -> Iterator[tuple[Model, Cache, int]]:
    name, cache, chunk, how = request.param
    with choosing(request, how):
        yield tiny_model(name), CACHES[cache], chunk


def test_layers_attend_to_their_own(cell: tuple[Model, Cache, int]) -> None:
    model, cache, chunk = cell
    made = fresh_run(model, cache, chunk=chunk)
    run, guests = made.run, made.guests
    with run:
        blocks = guests.tables()[0]
        units = some_units(len(guests.layers), guests.info().n_slot)
        guests.place(units)
        logits = run.feed(20, 1)
        assert np.array_equal(guests.tables()[1], units)
    want = forged_run(model, cache, blocks, units, chunk=chunk)
    assert_equal(logits, want)
    if len(units) > 1:  # the oracle sees one unit in one layer
        other = units.copy()
        other[-1, 0] = next(u for u in some_units(1, 32)[0] if u not in other[-1])
        assert not np.array_equal(forged_run(model, cache, blocks, other, chunk=chunk), want)


def test_the_same_in_every_layer_is_a_pool(chooser: None, tiny_model: Callable[[str], Model]) -> None:
    model, cache = tiny_model("qwen3"), CACHES["f16"]
    made = fresh_run(model, cache)
    run, guests = made.run, made.guests
    with run:
        blocks = guests.tables()[0]
        units = np.concatenate([np.arange(4 * c, 4 * c + 4) for c in (5, 3, 8, 2)]).astype(np.int32)
        guests.place(np.tile(units, (len(guests.layers), 1)))
        logits = run.feed(20, 1)
    with Run(model, cache, pool=1024) as pool:
        pool.feed(N_READ)
        records = pool.out(range(FIRST, LAST_OUT))
        for c, block in zip((5, 3, 8, 2), blocks, strict=True):
            pool.ctx.begin_page_in(c, records[c], int(block))
            pool.ctx.commit(c)
        assert_equal(logits, pool.feed(20, 1))


#
# the choice
#


class Index(NamedTuple):
    """The index of a layer, as its bytes say."""

    mean: npt.NDArray[np.float32]
    basis: npt.NDArray[np.float32]
    step: npt.NDArray[np.float32]
    codes: npt.NDArray[np.float32]  # (n, n_head_kv, n_comp), about 0

    @property
    def keys(self) -> npt.NDArray[np.float32]:
        """(n, n_head_kv, d)."""
        parts = self.codes * self.step
        return np.asarray(self.mean + np.einsum("nhc,hdc->nhd", parts, self.basis), np.float32)


def unpacked(raw: Record, form: IndexForm, layer: Layer, n: int) -> Index:
    """Read the bytes of a layer's index of n positions, as kvflash-fresh.h lays them out."""
    h, d, c = layer.n_head_kv, layer.n_embd_head_k, form.n_comp
    floats = np.frombuffer(raw, np.float32, h * d + h * d * c + h * c)
    mean, basis, step = np.split(floats, [h * d, h * d + h * d * c])
    n_nibble = form.n_four + form.n_two // 2 + form.n_one // 4
    packed = np.frombuffer(raw, np.uint8, -1, floats.nbytes).reshape(-1, h, n_nibble, 32)
    nibbles = np.concatenate([packed & 15, packed >> 4], -1)  # (group, head, nibble, 64)
    nibbles = nibbles.transpose(0, 3, 1, 2).reshape(-1, h, n_nibble)[:n]
    codes = []
    at = 0
    for count, bits in ((form.n_four, 4), (form.n_two, 2), (form.n_one, 1)):
        part = nibbles[..., at : at + count * bits // 4]
        each = (part[..., None] >> (np.arange(4 // bits) * bits)) & (2**bits - 1)
        codes.append(each.reshape(*each.shape[:2], -1) - (2**bits - 1) / 2)
        at += count * bits // 4
    return Index(
        mean.reshape(h, d), basis.reshape(h, d, c), step.reshape(h, c), np.concatenate(codes, -1).astype(np.float32)
    )


def true_keys(records: list[Record], layer: Layer, chunk: int) -> npt.NDArray[np.float32]:
    """The keys of F16 records, (n, n_head_kv, d)."""
    keys = [rows(r, layer, "k").view(np.float16).astype(np.float32) for r in records]
    return np.concatenate(keys).reshape(-1, layer.n_head_kv, layer.n_embd_head_k)


def shares(
    q: npt.NDArray[np.float32],
    scale: float,
    keys: npt.NDArray[np.float32],
    known: npt.NDArray[np.float32],
    common: npt.NDArray[np.bool_],
    cap: float,
) -> npt.NDArray[np.float64]:
    """Each unit's share of the attention of q (n_head, d), summed over heads: of keys by the index, and of known ones."""
    group = len(q) // keys.shape[1]
    res = np.zeros(len(keys) // UNIT)
    for h, query in enumerate(q.astype(np.float64)):
        far, near = (x[:, h // group] @ query * scale for x in (keys, known))
        if cap:
            far, near = (cap * np.tanh(x / cap) for x in (far, near))
        far[np.repeat(common, UNIT)] = -np.inf
        top = max(far.max(), near.max())
        mass = np.exp(far - top).reshape(-1, UNIT).sum(1)
        res += mass / (mass.sum() + np.exp(near - top).sum())
    return res


@pytest.fixture
def chooses(chooser: None, tiny_model: Callable[[str], Model]) -> Iterator[Fresh]:
    """A run with 24 of 32 units as guests, and 3 exchanged a token."""
    made = fresh_run(tiny_model("qwen3"), CACHES["f16"], n_exchange=3, n_blocks=6, q_tap=True)
    with made.run:
        yield made


def scored(made: Fresh, n_known: int, cap: float = 0) -> list[npt.NDArray[np.float64]]:
    """The shares that the token that was decoded last has in each layer, in numpy."""
    run, guests, records = made
    form = form_of(run.ctx.model)
    n = guests.info().n
    common = np.ones(n // UNIT, bool)
    common[FIRST * 4 : LAST_OUT * 4] = False
    res = []
    tail = [run.read(c) for c in range(N_READ // 64, run.pos // 64 + 1)]
    for i, layer in enumerate(guests.layers):
        index = unpacked(guests.saved_index(n)[i], form, layer, n)
        every = np.concatenate([true_keys(records, layer, 64), true_keys(tail, layer, 64)])[:n_known]
        kept = np.ones(len(every), bool)
        kept[FIRST * 64 : LAST_OUT * 64] = False
        q, scale = run.ctx.queries()[i], float(run.ctx.query_scales()[i])
        res.append(shares(q, scale, index.keys, every[kept], common, cap))
    return res


def test_empty_slots_are_filled_with_the_best(chooses: Fresh) -> None:
    fills_empty_slots_with_the_best(chooses)


def fills_empty_slots_with_the_best(made: Fresh, cap: float = 0, n_unknown: int = 0, n_layer: int = 99) -> None:
    """n_unknown: of the tokens so far those whose keys layers do not have when they choose. n_layer: the most looked at."""
    run, guests, _ = made
    run.feed(1, 1)
    every = zip(guests.tables()[1], scored(made, run.pos - n_unknown, cap), strict=True)
    for units, score in islice(every, n_layer):
        assert len(set(units.tolist())) == 24
        out = set(range(FIRST * 4, LAST_OUT * 4)) - set(units.tolist())
        assert len(out) == 8, "a guest is common, or twice there"
        assert score[units].min() >= max(score[list(out)]) * 0.98 - 1e-6


def test_the_worst_go_for_the_best(chooses: Fresh) -> None:
    the_worst_go_for_the_best(chooses)


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
    ("arch", "make", "cap"),
    [
        ("qwen3", headed(*heads), 0)
        for heads in ((1, 1, 128), (5, 1, 64), (9, 1, 128), (3, 3, 80), (2, 1, 96), (2, 2, 256))
    ]
    + [("gemma2", capped, CAP)],
)
def test_heads_of_all_kinds(
    chooser: None, tmp_path: Path, arch: str, make: Callable[[tiny.Writer], None], cap: float
) -> None:
    tiny.write_worded(tmp_path / "model.gguf", arch, make)
    with Model.load(tmp_path / "model.gguf") as model:
        made = fresh_run(model, CACHES["f16"], n_exchange=3, n_blocks=6, q_tap=True)
        with made.run:
            fills_empty_slots_with_the_best(made, cap)
            the_worst_go_for_the_best(made, cap)


def test_predicted_queries_are_of_the_input_of_the_layer_before(library: Path, tmp_path: Path) -> None:
    """Where the layer before gives what it is given, the queries that are predicted are the layer's own. Elsewhere they are not."""
    for n_idle in (2, 0):
        tiny.write_worded(tmp_path / "model.gguf", "qwen3", partial(tiny.idle, n_idle=n_idle))
        with host_kernels(library), Model.load(tmp_path / "model.gguf") as model:
            made = fresh_run(model, CACHES["f16"], n_exchange=3, n_blocks=6, q_tap=True, ahead=2)
            with made.run, pytest.raises(AssertionError) if n_idle == 0 else nullcontext():
                fills_empty_slots_with_the_best(made, n_unknown=1)


def again(run: Run, n: int) -> None:
    """The next n tokens are the same."""
    run.tokens = run.tokens.copy()  # others use them
    run.tokens[run.pos : run.pos + n] = run.tokens[run.pos]


def test_predictions_are_mended_by_what_was_missed_before(library: Path, tmp_path: Path) -> None:
    """With the same token again predictions are the own queries: not the first time, and not in the last layer."""
    tiny.write_worded(tmp_path / "model.gguf", "qwen3", tiny.steady)
    with host_kernels(library), Model.load(tmp_path / "model.gguf", **ONE_GPU) as model:
        made = fresh_run(model, CACHES["f16"], n_exchange=24, n_blocks=6, q_tap=True, ahead=2)
        again(made.run, 64)
        with made.run:
            for _ in range(2):  # it begins anew where its index was read
                with pytest.raises(AssertionError):
                    fills_empty_slots_with_the_best(made, n_unknown=1, n_layer=3)
                made.run.feed(1, 1)
                fills_empty_slots_with_the_best(made, n_unknown=1, n_layer=3)


def test_layers_wait_at_first_and_where_much_is_missed(library: Path, tmp_path: Path) -> None:
    """Also where its index was read: it goes on as a copy does. `steady` misses nothing with the same token again, but with another."""
    for make, waits in ((tiny.steady, False), (partial(tiny.qwen3, q_norm=4.0), True)):
        tiny.write_worded(tmp_path / "model.gguf", "qwen3", make)
        with host_kernels(library), Model.load(tmp_path / "model.gguf", **ONE_GPU) as model:
            for n_same, is_read in ((4, False), (14, False), (14, True)):
                made = fresh_run(model, CACHES["f16"], n_exchange=24, n_blocks=6, q_tap=True, ahead=1)
                again(made.run, n_same)
                is_ahead = n_same > 12 and not waits and not is_read
                with made.run, pytest.raises(AssertionError) if is_ahead else nullcontext():
                    made.run.feed(n_same, 1)
                    made.guests.saved_index(64) if is_read else None
                    fills_empty_slots_with_the_best(made, n_layer=2)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
def test_what_is_chosen_ahead_is_what_is_seen(
    library: Path, tiny_model: Callable[[str], Model], name: str, ahead: int
) -> None:
    model, cache = tiny_model(name), CACHES["f16"]
    with host_kernels(library):
        run, guests, _ = fresh_run(model, cache, n_exchange=3, n_blocks=4, ahead=ahead)
    with run:
        logits = run.feed(1, 1)
        blocks, units = guests.tables()
    assert_equal(logits, forged_run(model, cache, blocks, units, n_steps=1))


def test_several_tokens_choose_by_their_own_queries(library: Path, tiny_model: Callable[[str], Model]) -> None:
    tables = []
    for ahead in (2, 0):
        with host_kernels(library):
            run, guests, _ = fresh_run(tiny_model("qwen3"), CACHES["f16"], n_blocks=4, ahead=ahead)
        with run:
            run.feed(3)
            tables.append(guests.tables()[1])
    assert np.array_equal(*tables)


def the_worst_go_for_the_best(made: Fresh, cap: float = 0) -> None:
    run, guests, _ = made
    every = list(range(FIRST * 4, LAST_OUT * 4))
    guests.place(np.tile(np.array(every[:24], np.int32), (len(guests.layers), 1)))
    run.feed(1, 1)
    for units, score in zip(guests.tables()[1], scored(made, run.pos, cap), strict=True):
        came, went = set(units.tolist()) - set(every[:24]), set(every[:24]) - set(units.tolist())
        assert len(came) == len(went) <= 3
        others = [u for u in every[24:] if u not in came]
        stayed = [u for u in every[:24] if u not in went]
        if came:
            assert min(score[list(came)]) >= max(score[others]) * 0.98 - 1e-6
            assert max(score[list(went)]) <= min(score[stayed]) * 1.02 + 1e-6
        best, worst = max(score[every[24:]]), min(score[every[:24]])
        assert came or best <= worst * 1.02 + 1e-6


@pytest.mark.parametrize("exchanged", [False, True])
def test_what_is_chosen_is_what_is_seen(chooser: None, tiny_model: Callable[[str], Model], *, exchanged: bool) -> None:
    """The token for which guests were fetched already attends to them, and not to what was there before."""
    model, cache = tiny_model("qwen3"), CACHES["f16"]
    run, guests, _ = fresh_run(model, cache, n_exchange=3, n_blocks=4)
    with run:
        before = np.tile(np.arange(4, 20, dtype=np.int32), (len(guests.layers), 1))
        if exchanged:
            guests.place(before)
        logits = run.feed(1, 1)
        blocks, units = guests.tables()
    assert not np.array_equal(units, before)
    assert_equal(logits, forged_run(model, cache, blocks, units, n_steps=1))


def test_layers_choose_by_turns(chooser: None, tiny_model: Callable[[str], Model]) -> None:
    made = fresh_run(tiny_model("qwen3"), CACHES["f16"], n_exchange=4, n_turn=2)
    run, guests = made.run, made.guests
    with run:
        run.feed(1, 1)
        seen = [guests.tables()[1]]
        assert (seen[0] >= 0).all(), "what is empty all layers fill"
        for _ in range(8):
            run.feed(1, 1)
            seen.append(guests.tables()[1])
    chose = [{i for i in range(3) if not np.array_equal(now[i], before[i])} for before, now in pairwise(seen)]
    for some, others in (({0, 2}, {1}), ({1}, {0, 2})):
        if all(layers <= some for layers in chose[::2]):
            assert all(layers <= others for layers in chose[1::2])
            break
    else:
        pytest.fail(f"layers chose out of turn: {chose}")
    assert {0, 1, 2} == set().union(*chose)


def test_new_slots_are_seen_when_all_layers_have_filled_them(chooser: None, tiny_model: Callable[[str], Model]) -> None:
    model, cache = tiny_model("qwen3"), CACHES["f16"]
    run, guests, _ = fresh_run(model, cache, n_exchange=0, n_blocks=3, n_turn=2)
    with run:
        run.feed(1, 1)
        blocks, units = guests.tables()
        guests.resize(4)
        logits = run.feed(1, 1)
        new = guests.tables()[1][:, 12:]
        run.feed(1, 1)
        assert (guests.tables()[1] >= 0).all()
    filled = (new >= 0).all(axis=1)
    assert filled.any()
    assert (new[~filled] == -1).all()
    assert not filled.all(), "no layer waits for its turn"
    assert_equal(logits, forged_run(model, cache, blocks, units, n_steps=2)[-1:])


def test_nothing_is_twice_there(chooses: Fresh) -> None:
    """A chunk that becomes common is not a guest any more, in any layer."""
    run, guests, records = chooses
    run.feed(1, 1)
    chunk = int(guests.tables()[1][0, 0]) // 4
    guests.resize(5)
    run.ctx.begin_page_in(chunk, records[chunk])
    run.ctx.commit(chunk)
    run.feed(1, 1)
    units = guests.tables()[1]
    assert units.shape[1] == 20
    assert not np.isin(units, np.arange(4 * chunk, 4 * chunk + 4)).any()
    assert all(len(set(row.tolist())) == 20 for row in units)


def test_fewer_out_than_slots(chooser: None, tiny_model: Callable[[str], Model]) -> None:
    """Slots that nothing can fill are not seen. All that is out is there then, and so the logits are the full cache's."""
    run, guests, _ = fresh_run(tiny_model("qwen3"), CACHES["f16"], n_exchange=2)
    with run:
        run.pos = 9 * 64 + 32
        run.ctx.seq_rm(run.pos)
        guests.resize(9)
        logits = run.feed(1, 1)
        units = guests.tables()[1]
    assert (units[:, 32:] == -1).all()
    assert np.array_equal(np.sort(units[:, :32], 1), np.tile(np.arange(4, 36), (len(units), 1)))
    with Run(tiny_model("qwen3"), CACHES["f16"], pool=1024) as pool:
        pool.feed(9 * 64 + 32)
        want = pool.feed(1, 1)
    assert np.abs(logits - want).max() < 0.02 * want.std(), "everything is seen, in another order"


def test_rollback_takes_guests_out(chooses: Fresh) -> None:
    run, guests, _ = chooses
    run.feed(3, 1)
    run.ctx.seq_rm(5 * 64 + 7)
    units = guests.tables()[1]
    assert guests.info().n == 5 * 64
    assert units.max() < 5 * 4
    assert (units == -1).any()


def test_clear_frees_all(chooses: Fresh) -> None:
    run, guests, _ = chooses
    run.feed(1, 1)
    run.ctx.clear()
    assert guests.info().n == guests.info().n_block == guests.info().n_slot == 0
    assert run.ctx.pool_info().n_block_free == 16


def test_index_as_bytes(chooses: Fresh) -> None:
    """What is saved and put back chooses the same."""
    run, guests, records = chooses
    n = guests.info().n
    saved = guests.saved_index(n)
    run.feed(1, 1)
    want = guests.tables()[1]
    run.ctx.seq_rm(run.pos - 1)
    guests.forget()
    assert (guests.tables()[1] == -1).all()
    guests.restore_index(n, saved)
    guests.cover(0, records)
    run.pos -= 1
    run.feed(1, 1)
    assert np.array_equal(guests.tables()[1], want)
    with pytest.raises(UsageError):
        guests.restore_index(n, [part[:-1] for part in saved])


def test_guests_take_free_blocks_alone(chooses: Fresh) -> None:
    run, guests, _ = chooses
    n = guests.info().n_block + run.ctx.pool_info().n_block_free
    with pytest.raises(PoolError):
        guests.resize(n + 1)
    assert guests.info().n_block == 6
    guests.resize(n)
    with pytest.raises(PoolError):
        run.decode(64)  # a new chunk, and no block


@pytest.mark.nightly(LIBRARY)
@pytest.mark.parametrize("kind", ["f32", "bf16", "q4_1", "q5_0", "q5_1", "iq4_nl"])
def test_kernels_read_all_types(request: pytest.FixtureRequest, tiny_model: Callable[[str], Model], kind: str) -> None:
    """Of the same records the kernels find the mean and the covariance, and so the index, that the node finds."""
    found: list[list[npt.NDArray[np.float32]]] = []
    for how in ("node", "kernels"):
        with choosing(request, how):
            made = fresh_run(tiny_model("qwen3"), Cache(kind, "on", None))
        with made.run:
            found.append([])
            for i in range(2):
                mean, variances, components = made.guests.components(i, made.records)
                found[-1] += [mean, np.einsum("hc,hcd,hce->hde", variances, components, components)]
            chosen = made.run.feed(1, 1)
    for node, theirs in zip(*found, strict=True):
        assert np.allclose(node, theirs, rtol=1e-4, atol=1e-4 * np.abs(node).max())
    assert np.isfinite(chosen).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 15])
def test_components_are_those_of_the_keys(tiny_model: Callable[[str], Model], name: str, n: int) -> None:
    """Of few keys, too, which have no variance along most components."""
    made = fresh_run(tiny_model(name), CACHES["f16"])
    with made.run:
        for i, layer in enumerate(made.guests.layers):
            mean, variances, components = (x.astype(np.float64) for x in made.guests.components(i, made.records[:n]))
            keys = true_keys(made.records[:n], layer, 64).astype(np.float64)
            assert np.allclose(mean, keys.mean(0), atol=1e-4)
            assert (variances >= 0).all()
            assert (np.diff(variances) <= 0).all()
            for h in range(layer.n_head_kv):
                cov = np.cov(keys[:, h], rowvar=False, bias=True)
                size = np.trace(cov)
                assert np.allclose(variances[h], np.linalg.eigvalsh(cov)[::-1], atol=1e-4 * size)
                assert np.allclose(components[h] @ components[h].T, np.eye(len(cov)), atol=1e-5)
                assert np.allclose(components[h] @ cov @ components[h].T, np.diag(variances[h]), atol=1e-4 * size)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("chunk", "n_seq"), [(64, 1), (16, 2)])
def test_kernels_take_what_is_kept_free(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Model], name: str, chunk: int, n_seq: int
) -> None:
    """With a whole context in the index of one sequence; the others' have nothing."""
    with choosing(request, "kernels"):
        made = fresh_run(tiny_model(name), CACHES["f16"], chunk=chunk, n_seq=n_seq, n_ctx=1024)
    with made.run:
        heads = tuple(map(Heads.of, made.guests.layers))
        devices = [at.device for at in made.guests.layers]
        want = GpuChoice(form_of(tiny_model(name)), heads, 1024, n_seq, 1024, chunk)
        sizes = [want.n_bytes([i for i, at in enumerate(devices) if at == device]) for device in set(devices)]
        codes = (sum(sizes) - len(sizes) * want.n_bytes([])) * (n_seq - 1) // n_seq
        assert made.guests.info().device_bytes == sum(sizes) - codes


def test_what_an_index_cannot_be(tiny_model: Callable[[str], Model]) -> None:
    for index in ({"index_two": 3}, {"index_one": 2}, {"index_two": 1 << 10}):
        pool = PoolParams(n_pool=256, index_four=4, **index)
        with pytest.raises(UsageError):
            Context(tiny_model("qwen3"), n_ctx=512, n_batch=64, n_ubatch=64, pool=pool)
