"""The checks of support/oracles.py can fail: each is shown sabotaged data, through the calls that any caller has.

What a forged record holds cannot be seen by page_in(), which knows the head only; so the logits must tell. Left out is
what only changes the order of sums, since RoPE is in K already: two whole chunks exchanged, or K and V rolled alike.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from support import tiny
from support.changes import LIBRARY

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import numpy_models, oracles
from support.models import NAMES
from support.numpy_models import Reference, rope
from support.oracles import CACHES, TOKENS, Case, Difference, Step, forge, rows

from pyllama_kvflash.errors import PoolError, RecordError
from pyllama_kvflash.native import Layer, Model, Record

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]

Records = dict[int, Record]
Sabotage = Callable[[Records, Sequence[Layer]], None]

OTHER_TOKENS = (TOKENS + 1) % tiny.N_VOCAB
N_PROMPT, N_STEPS = 500, 20
CHUNKS = (1, 2, 5)  # those that are paged


def nothing(records: Records, layers: Sequence[Layer]) -> None:
    """The control."""


def permute_k(records: Records, layers: Sequence[Layer]) -> None:
    """K rows of one chunk, in one layer, the other way round."""
    k = rows(records[5], layers[0], "k")
    k[:] = k[::-1].copy()


def exchange_two_v(records: Records, layers: Sequence[Layer]) -> None:
    """Two V rows of one chunk, in one layer."""
    v = rows(records[5], layers[-1], "v")
    v[[10, 50]] = v[[50, 10]]


def roll_k(records: Records, layers: Sequence[Layer]) -> None:
    """K rows one position on: placement off by one."""
    for record in records.values():
        for layer in layers:
            k = rows(record, layer, "k")
            k[:] = np.roll(k, 1, axis=0)


def swap_layers(records: Records, layers: Sequence[Layer]) -> None:
    """K and V of two layers."""
    for which in "kv":
        a, b = (rows(records[5], layer, which) for layer in (layers[0], layers[-1]))
        a[:], b[:] = b.copy(), a.copy()


def swap_k_and_v(records: Records, layers: Sequence[Layer]) -> None:
    """K and V of one layer."""
    a, b = (rows(records[5], layers[0], which) for which in "kv")
    a[:], b[:] = b.copy(), a.copy()


def alias_layers(records: Records, layers: Sequence[Layer]) -> None:
    """The last layer has the rows of the first: what a layer that reuses another's would do to it."""
    for which in "kv":
        rows(records[5], layers[-1], which)[:] = rows(records[5], layers[0], which)


def clear_mask_bit(records: Records, layers: Sequence[Layer]) -> None:
    """One position of one chunk is forgotten."""
    records[5] = forge(records[5], mask=oracles.head(records[5])["mask"] & ~(1 << 33))


def flip_signs(records: Records, layers: Sequence[Layer]) -> None:
    """One bit in each byte of one K row, in one layer."""
    rows(records[5], layers[0], "k")[33] ^= 0x80


def zero_v(records: Records, layers: Sequence[Layer]) -> None:
    """One V row is lost, in one layer."""
    rows(records[5], layers[-1], "v")[33] = 0


def wrong_chunk(records: Records, layers: Sequence[Layer]) -> None:
    """A record as another chunk's, with a forged head: that one is there twice."""
    records[1] = forge(records[5], chunk=1)


def never_back(records: Records, layers: Sequence[Layer]) -> None:
    """A chunk stays out."""
    del records[5]


SABOTAGES: list[Sabotage] = [
    permute_k,
    exchange_two_v,
    roll_k,
    swap_layers,
    swap_k_and_v,
    alias_layers,
    clear_mask_bit,
    flip_signs,
    zero_v,
    wrong_chunk,
    never_back,
]


class Control(NamedTuple):
    """A case, and what the stock cache makes of the steps."""

    case: Case
    want: oracles.Logits


@pytest.fixture(scope="module", params=oracles.params(caches=["f16", "q8_0"]))
def control(request: pytest.FixtureRequest, tiny_model: Callable[[str], Model]) -> Control:
    """Every model, plain and quantised."""
    name, cache = request.param
    case = Case(tiny_model(name), CACHES[cache])
    with case.stock() as run:
        run.feed(N_PROMPT)
        return Control(case, run.feed(N_STEPS, 1))


@pytest.fixture
def dense(tiny_model: Callable[[str], Model]) -> Case:
    """The dense model, F16."""
    return Case(tiny_model("qwen3"), CACHES["f16"])


def out_and_in(control: Control, sabotage: Sabotage) -> Difference:
    """Page chunks out and in with something done to their records, and go on: the difference that it makes."""
    with control.case.pool(1024) as run:
        run.feed(N_PROMPT)
        places = {c: run.ctx.block_of(c) for c in CHUNKS}
        records = run.out(CHUNKS)
        sabotage(records, run.ctx.layers())
        for c, record in records.items():
            run.ctx.page_in(c, record, places[c])
        return oracles.difference(run.feed(N_STEPS, 1), control.want)


def assert_differs(got: Difference) -> None:
    """By a bit, which is what the exact checks go by. Most of these are far above the noise; it is printed."""
    print(got)
    assert got.largest > 0, str(got)


def test_no_sabotage(control: Control) -> None:
    got = out_and_in(control, nothing)
    assert got.largest == 0, str(got)


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda f: f.__name__)
def test_sabotaged_record(control: Control, sabotage: Sabotage) -> None:
    assert_differs(out_and_in(control, sabotage))


@pytest.mark.parametrize("name", NAMES)
def test_types_that_changed_places(tiny_model: Callable[[str], Model], name: str) -> None:
    """K of one type is taken for V of another, and the other way round: by its head it is refused, by its rows it shows."""
    case, other = (Case(tiny_model(name), oracles.Cache(k, type_v=v)) for k, v in (("q8_0", "q4_0"), ("q4_0", "q8_0")))
    with case.pool(1024) as run, other.pool(1024) as twin, case.stock() as stock:
        for each in (run, twin, stock):
            each.feed(N_PROMPT)
        want = stock.feed(N_STEPS, 1)
        theirs, ours = twin.out(CHUNKS), run.out(CHUNKS)
        with pytest.raises(RecordError, match="the type of K differs"):
            run.ctx.page_in(5, theirs[5])
        types = {field: oracles.head(ours[5])[field] for field in ("type_k", "type_v")}
        for c in CHUNKS:
            run.ctx.page_in(c, forge(theirs[c], **types))
        assert oracles.difference(run.feed(N_STEPS, 1), want).largest != 0  # or no number


def test_stale_record(control: Control) -> None:
    """Of the same positions with other tokens: nothing in the head tells them apart."""
    with control.case.pool(1024, tokens=OTHER_TOKENS) as run:
        run.feed(N_PROMPT)
        stale = run.out(CHUNKS)

    def use_stale(records: Records, layers: Sequence[Layer]) -> None:
        records |= stale

    assert_differs(out_and_in(control, use_stale))


def test_tolerance_for_other_blocks(dense: Case) -> None:
    """K rows rolled by one in three chunks that lie elsewhere: far outside of what placement may do."""
    with dense.pool() as run:
        run.feed(oracles.N_PROMPT)
        records = run.out(run.resident())
        roll_k({c: records[c] for c in CHUNKS}, run.ctx.layers())
        for block, c in enumerate(reversed(records)):
            run.ctx.page_in(c, records[c], block)
        steps = run.feed(oracles.N_STEPS, 1)
    with pytest.raises(AssertionError, match="noise floor"):
        dense.assert_close(steps)


def without(schedule: Sequence[Step], i: int) -> list[Step]:
    """A drop that does not happen."""
    return [step._replace(drops=() if j == i else step.drops) for j, step in enumerate(schedule)]


def with_another(schedule: Sequence[Step], i: int) -> list[Step]:
    """The next chunk is dropped as well."""
    more = (*schedule[i].drops, schedule[i].drops[-1] + 1)
    return [step._replace(drops=more if j == i else step.drops) for j, step in enumerate(schedule)]


def late(schedule: Sequence[Step], i: int) -> list[Step]:
    """Drops that happen a batch too late."""
    moved = {i: (), i + 1: schedule[i].drops + schedule[i + 1].drops}
    return [step._replace(drops=moved.get(j, step.drops)) for j, step in enumerate(schedule)]


@pytest.mark.nightly(LIBRARY)
@pytest.mark.parametrize("change", [without, with_another, late], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_another_schedule(
    tiny_model: Callable[[str], Model], name: str, change: Callable[[Sequence[Step], int], list[Step]]
) -> None:
    """The stock cache loses other positions than the pool, or loses them at another time."""
    case = Case(tiny_model(name), CACHES["f16"])
    with case.pool(1024, n_batch=256) as run:
        logits, schedule, _ = run.feed_through(1500, 20)
    i = next(j for j, step in enumerate(schedule) if step.drops)
    with case.stock(n_batch=256) as run:
        assert_differs(oracles.difference(run.replay(change(schedule, i)), logits))
    case.assert_replayed(logits, schedule, 1024, n_batch=256)


@pytest.mark.parametrize("name", NAMES)
def test_another_chunk_makes_room(tiny_model: Callable[[str], Model], name: str) -> None:
    """After a refused batch another chunk is dropped than in the run without one."""
    case = Case(tiny_model(name), CACHES["f16"])
    logits = []
    for c in (3, 4):
        with case.pool(1024) as run:
            run.feed(1024)
            with pytest.raises(PoolError):
                run.decode(1)
            run.ctx.drop(c)
            logits.append(run.feed(20, 1))
    assert_differs(oracles.difference(*logits))


#
# queries
#


def rope_of_pairs(x: npt.NDArray[Any], pos: int, base: float, n_rot: int) -> npt.NDArray[Any]:
    """Rotary embedding of neighbouring channels, as other models have it."""
    order = np.arange(n_rot).reshape(-1, 2).T.ravel()
    res = x.copy()
    res[..., order] = rope(x[..., order], pos, base, n_rot)
    return res


def test_queries_of_something_else(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(dense.model.path)
    with dense.pool(1024, q_tap=True) as run:
        run.feed(300)
        got, token = run.ctx.queries()[0], int(TOKENS[299])
    assert numpy_models.error(got, reference.qwen3(token, 299)) < 1e-2
    errors = {
        "the position before": numpy_models.error(got, reference.qwen3(token, 298)),
        "another token": numpy_models.error(got, reference.qwen3(token ^ 1, 299)),
        "the basis of a quantised cache": numpy_models.error(
            got @ numpy_models.hadamard(64), reference.qwen3(token, 299)
        ),
    }
    monkeypatch.setattr(numpy_models, "rope", rope_of_pairs)
    errors["another RoPE"] = numpy_models.error(got, reference.qwen3(token, 299))
    assert min(errors.values()) > 0.1, str(errors)
