"""Ledger and plan beside a toy world that holds bytes: whatever the order of steps, no chunk is ever lost."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.policy import POLICIES, Ledger, LedgerError, Plan, Scorer, State, bring_in, lru, make_room
from pyllama_kvflash.policy import plan as planning
from pyllama_kvflash.policy.sizing import SPARE_BLOCKS, pinned_chunks


def fixed(scores: npt.NDArray[Any]) -> Scorer:
    return lambda _: scores.astype(np.float64)


def unasked(_: Ledger) -> npt.NDArray[np.float64]:
    raise AssertionError("the scorer was asked for nothing")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A pool of the smallest size that pool_floor allows before it rounds up, and `extra` blocks."""

    chunk: int
    n_batch: int
    n_sinks: int
    n_tail: int
    n_pins: int
    extra: int

    def blocks(self, n_pins: int) -> int:
        return self.n_sinks + self.n_tail + n_pins + -(-self.n_batch // self.chunk) + 1 + SPARE_BLOCKS

    @property
    def n_block(self) -> int:
        return self.blocks(self.n_pins) + self.extra


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    chunk = draw(st.sampled_from([1, 2, 3, 16, 64]))
    return Geometry(
        chunk=chunk,
        n_batch=draw(st.integers(1, 3 * chunk)),
        n_sinks=draw(st.integers(0, 2)),
        n_tail=draw(st.integers(0, 4)),
        n_pins=draw(st.integers(0, 3)),
        extra=draw(st.integers(0, 2)),
    )


class World:
    """What the native pool and the host store do, as simply as it can be said: chunk -> the values of its positions."""

    def __init__(self, n_block: int, chunk: int) -> None:
        self.n_block = n_block
        self.chunk = chunk
        self.truth: list[int] = []  # the value of every position, never the same one twice
        self.pool: dict[int, list[int]] = {}
        self.landing: set[int] = set()
        self.host: dict[int, list[int]] = {}
        self._next = 0

    def want(self, chunk: int) -> list[int]:
        return self.truth[chunk * self.chunk : (chunk + 1) * self.chunk]

    def decode(self, n: int) -> None:
        for _ in range(n):
            pos = len(self.truth)
            if pos % self.chunk == 0:
                self.pool[pos // self.chunk] = []
            self.pool[pos // self.chunk].append(self._next)
            self.truth.append(self._next)
            self._next += 1
        self.check_size()

    def read(self, chunk: int) -> None:
        self.host[chunk] = list(self.pool[chunk])

    def drop(self, chunk: int) -> None:
        del self.pool[chunk]

    def begin(self, chunk: int) -> None:
        self.landing.add(chunk)
        self.check_size()

    def land(self, chunk: int) -> None:
        self.landing.remove(chunk)
        self.pool[chunk] = list(self.host[chunk])

    def seq_rm(self, n: int) -> None:
        cut = n // self.chunk
        self.truth = self.truth[:n]
        self.pool = {c: values[: max(0, n - c * self.chunk)] for c, values in self.pool.items()}
        self.pool = {c: values for c, values in self.pool.items() if values}
        self.host = {c: values for c, values in self.host.items() if c < cut}

    def check_size(self) -> None:
        held = len(self.pool) + len(self.landing)
        assert held <= self.n_block, f"{held} chunks in a pool of {self.n_block} blocks"


class Paging(RuleBasedStateMachine):
    """The engine's steps (engine.KVFlash) in any order, on the ledger and on the world at once.

    Its invariants are about what comes out: bytes, blocks, what stays. `Exact` adds what the ledger must answer.
    """

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(geometry=geometries())
    def start(self, geometry: Geometry) -> None:
        self.geometry = geometry
        n_block, chunk = geometry.n_block, geometry.chunk
        self.ledger = Ledger(n_block, chunk, n_sinks=geometry.n_sinks, n_tail=geometry.n_tail)
        self.world = World(n_block, chunk)
        self.held: set[int] = set()  # resident and protected after the last step

    #
    # what must hold
    #

    def protected(self) -> set[int]:
        """By the words of the design, not by the ledger's code."""
        n, tail = len(self.world.truth), self.geometry.n_tail
        n_chunks = -(-n // self.geometry.chunk)
        chunks = range(n_chunks)
        sealed = n // self.geometry.chunk
        return {
            c
            for c in chunks
            if c < self.geometry.n_sinks or c >= n_chunks - tail or c in self.ledger.pins or c >= sealed
        }

    @invariant()
    def nothing_is_lost(self) -> None:
        world = self.world
        n_sealed = len(world.truth) // world.chunk
        for c in range(-(-len(world.truth) // world.chunk)):
            assert c in world.pool or (c in world.host and c < n_sealed), f"chunk {c} is lost"
        for place in (world.pool, world.host):
            for c, values in place.items():
                assert values == world.want(c), f"chunk {c} has the wrong bytes"

    @invariant()
    def ledger_and_world_agree(self) -> None:
        ledger, world = self.ledger, self.world
        ledger.check_integrity()
        assert ledger.n_tokens == len(world.truth)
        assert set(self.chunks_that_are(State.RESIDENT)) == set(world.pool), "ledger and pool differ"
        assert set(self.chunks_that_are(State.IN_FLIGHT)) == world.landing, "ledger and pool differ"
        missing = set(np.flatnonzero(ledger.stored)) - set(world.host)
        assert not missing, f"no record of chunks {missing}"

    @invariant()
    def pool_is_never_exceeded(self) -> None:
        ledger, world = self.ledger, self.world
        world.check_size()
        assert ledger.n_free == world.n_block - len(world.pool) - len(world.landing), "ledger and pool differ"
        assert ledger.n_free + ledger.n_resident + ledger.n_in_flight == ledger.n_block

    @invariant()
    def protected_stay(self) -> None:
        protected, resident = self.protected(), set(self.world.pool)
        gone = (self.held & protected) - resident
        assert not gone, f"protected chunks {gone} were evicted"
        for c in protected:
            assert c in resident or not (c < self.geometry.n_sinks or c in self.ledger.pins), f"{c} does not stay"
        self.held = resident & protected

    @invariant()
    def a_batch_always_fits(self) -> None:
        """Whatever is pinned or in flight (at most SPARE_BLOCKS): the largest batch finds room, once all is stored."""
        room = self.ledger.n_free + len(set(self.world.pool) - self.protected())
        assert room >= self.ledger.new_chunks(self.geometry.n_batch), "the next batch would find no room"

    #
    # the engine's steps
    #

    def scorer(self, seed: int | None) -> Scorer:
        """lru, or random numbers, with ties if the seed is even."""
        if seed is None:
            return lru
        n = self.ledger.n_chunks
        rng = np.random.default_rng(seed)
        return fixed(rng.random(n) if seed % 2 else rng.integers(0, 3, n))

    def drop(self, chunks: Iterable[int]) -> None:
        for c in chunks:
            assert c not in self.protected(), f"protected chunk {c} is dropped"
            self.world.drop(c)
            self.ledger.drop(c)
            self.seen["drop"] += 1

    def apply(self, plan: Plan) -> None:
        self.drop(plan.drops)
        for c in plan.page_ins:
            self.ledger.begin_page_in(c)
            self.world.begin(c)
            self.world.land(c)
            self.ledger.commit_page_in(c)
            self.seen["page in"] += 1

    def check(
        self, plan: Plan, score: Scorer, n_blocks: int, page_ins: Iterable[int] = (), keep: Iterable[int] = ()
    ) -> None:
        """What a plan must be beyond its effect: see Exact."""

    def advance(self, n: int, seed: int | None) -> None:
        self.seal()
        n_new, score = self.ledger.new_chunks(n), self.scorer(seed)
        plan = planning.make_room(self.ledger, score, n_new)
        self.check(plan, score, n_new)
        self.apply(plan)
        self.world.decode(n)
        self.ledger.write(n)

    def seal(self, at_most: int | None = None) -> None:
        for c in self.ledger.to_store()[:at_most]:
            self.world.read(c)
            self.ledger.store(c)

    def bring(self, chunks: list[int], seed: int | None) -> None:
        self.seal()
        score = self.scorer(seed)
        missing = [c for c in dict.fromkeys(chunks) if c not in self.world.pool and c not in self.world.landing]
        plan = planning.bring_in(self.ledger, score, chunks)
        self.check(plan, score, len(missing), missing, chunks)
        self.apply(plan)
        out = set(chunks) - set(self.world.pool) - self.world.landing
        assert not out, f"chunks {out} were not brought in"

    def settle(self, chunks: Iterable[int]) -> None:
        for c in self.world.landing & set(chunks):
            self.world.land(c)
            self.ledger.commit_page_in(c)

    def chunks_that_are(self, state: State) -> list[int]:
        return [int(c) for c in np.flatnonzero(self.ledger.state == state)]

    #
    # rules
    #

    seeds = st.none() | st.integers(0, 1000)
    picks = st.integers(0, 1000)

    @rule(n=st.integers(1, 192), seed=seeds)
    def decode(self, n: int, seed: int | None) -> None:
        self.advance(1 + n % self.geometry.n_batch, seed)
        self.seal()

    @rule(seed=seeds, sealed=st.integers(0, 2))
    def decode_and_interrupt(self, seed: int | None, sealed: int) -> None:
        """Ctrl-C after the batch, before all its records are written: the next step that needs room writes them."""
        self.advance(self.geometry.n_batch, seed)
        self.seal(sealed)
        self.seen["interrupted"] += bool(self.ledger.to_store())

    @rule(n=st.integers(1, 8), rest=st.integers(0, 192), seed=seeds)
    def prefill(self, n: int, rest: int, seed: int | None) -> None:
        left = n * self.geometry.n_batch + rest % self.geometry.n_batch
        while left:
            self.advance(min(left, self.geometry.n_batch), seed)
            self.seal()
            left -= min(left, self.geometry.n_batch)

    @precondition(lambda self: self.ledger.evictable().any())
    @rule(pick=picks)
    def page_out(self, pick: int) -> None:
        candidates = np.flatnonzero(self.ledger.evictable())
        self.drop([int(candidates[-1 - pick % len(candidates)])])

    @precondition(lambda self: self.chunks_that_are(State.OUT))
    @rule(pick=picks, seed=seeds)
    def page_in(self, pick: int, seed: int | None) -> None:
        out = self.chunks_that_are(State.OUT)
        self.bring([out[pick % len(out)]], seed)

    @precondition(lambda self: self.ledger.n_chunks)
    @rule(picks=st.lists(picks, min_size=1, max_size=12), seed=seeds)
    def page_in_many(self, picks: list[int], seed: int | None) -> None:
        """More than may fit: then PoolError, and nothing moves."""
        self.seal()
        chunks = [pick % self.ledger.n_chunks for pick in picks]
        missing = {c for c in chunks if self.ledger.state_of(c) == State.OUT}
        room = self.ledger.n_free + len([c for c in np.flatnonzero(self.ledger.evictable()) if int(c) not in chunks])
        if len(missing) <= room:
            self.bring(chunks, seed)
        else:
            before = snapshot(self.ledger)
            try:
                planning.bring_in(self.ledger, self.scorer(seed), chunks)
            except PoolError:
                assert snapshot(self.ledger) == before
            else:
                raise AssertionError("there is no room, and yet a plan")
            self.seen["no room"] += 1

    @precondition(lambda self: self.chunks_that_are(State.OUT) and self.ledger.n_in_flight < SPARE_BLOCKS)
    @rule(pick=picks, seed=seeds)
    def begin_page_in(self, pick: int, seed: int | None) -> None:
        """The bytes stay under way while other steps happen."""
        self.seal()
        out = self.chunks_that_are(State.OUT)
        chunk = out[pick % len(out)]
        self.drop(planning.bring_in(self.ledger, self.scorer(seed), [chunk]).drops)
        self.ledger.begin_page_in(chunk)
        self.world.begin(chunk)

    @precondition(lambda self: self.world.landing)
    @rule(pick=picks)
    def commit_page_in(self, pick: int) -> None:
        self.settle([sorted(self.world.landing)[pick % len(self.world.landing)]])

    @precondition(lambda self: self.world.landing)
    @rule(pick=picks)
    def abort_page_in(self, pick: int) -> None:
        chunk = sorted(self.world.landing)[pick % len(self.world.landing)]
        self.world.landing.remove(chunk)
        self.ledger.abort_page_in(chunk)
        self.seen["abort"] += 1

    @precondition(lambda self: self.geometry.n_pins)
    @rule(at=st.integers(0, 1000), length=st.integers(1, 192), seed=seeds)
    def pin(self, at: int, length: int, seed: int | None) -> None:
        """A range that may lie ahead of what is written."""
        start = at % (self.ledger.n_tokens + 4 * self.geometry.chunk)
        chunks = pinned_chunks([(start, start + 1 + length % (2 * self.geometry.chunk))], self.geometry.chunk)
        if self.geometry.blocks(len(self.ledger.pins | chunks)) > self.ledger.n_block:
            self.seen["pin refused"] += 1
            return
        self.settle(chunks)
        self.bring(sorted(c for c in chunks if c < self.ledger.n_chunks), seed)
        self.seen["pin"] += 1
        self.seen["pin ahead"] += any(c >= self.ledger.n_chunks for c in chunks)
        self.ledger.pins |= chunks

    @precondition(lambda self: self.ledger.pins)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        self.ledger.pins -= {sorted(self.ledger.pins)[pick % len(self.ledger.pins)]}

    @precondition(lambda self: self.ledger.n_tokens)
    @rule(back=st.integers(0, 600) | st.integers(601, 10**6), seed=seeds)
    def rollback(self, back: int, seed: int | None) -> None:
        """As Pager.rolled_back: forget what lies behind the cut first, which makes room for what must come back."""
        n_tokens, chunk = self.ledger.n_tokens, self.geometry.chunk
        n = max(0, n_tokens - back) if back <= 600 else back % n_tokens  # near the end, or anywhere
        cut = n // chunk
        self.seal()
        self.settle(list(self.world.landing))
        if n % chunk and self.ledger.state_of(cut) == State.OUT:
            self.world.seq_rm((cut + 1) * chunk)
            self.ledger.rollback((cut + 1) * chunk)
            self.bring([cut], seed)
            self.seen["cut brought in"] += 1
        self.world.seq_rm(n)
        self.ledger.rollback(n)
        n_chunks = self.ledger.n_chunks
        tail = range(max(0, n_chunks - self.geometry.n_tail), n_chunks)
        self.bring(tail, seed)
        assert all(self.ledger.state_of(c) == State.RESIDENT for c in tail)
        self.seen["rollback"] += 1

    @precondition(lambda self: self.ledger.n_chunks > 2 * self.ledger.n_block)
    @rule()
    def clear(self) -> None:
        self.settle(list(self.world.landing))
        self.world.seq_rm(0)
        self.ledger.clear()
        self.seen["clear"] += 1


class Exact(Paging):
    """Also: what the ledger and the plans must say, word for word, and what the ledger must refuse."""

    @invariant()
    def ledger_answers(self) -> None:
        ledger, world, protected = self.ledger, self.world, self.protected()
        assert {int(c) for c in np.flatnonzero(ledger.protected())} == protected
        assert {int(c) for c in np.flatnonzero(ledger.evictable())} == (set(world.pool) & set(world.host)) - protected
        assert {int(c) for c in np.flatnonzero(ledger.stored)} == set(world.host)
        assert ledger.n_sealed == len(world.truth) // world.chunk
        assert ledger.n_chunks == len(ledger.state) == len(ledger.touched) == len(lru(ledger))
        assert ledger.to_store() == [c for c in range(ledger.n_sealed) if c not in world.host]

    def check(
        self, plan: Plan, score: Scorer, n_blocks: int, page_ins: Iterable[int] = (), keep: Iterable[int] = ()
    ) -> None:
        """No more drops than needed, of the coldest that may go, coldest first; of equals, the older."""
        may_go = {int(c) for c in np.flatnonzero(self.ledger.evictable())} - set(keep)
        scores = score(self.ledger)
        by_heat = sorted(may_go, key=lambda c: (scores[c], c))
        assert plan.drops == tuple(by_heat[: max(0, n_blocks - self.ledger.n_free)]), "not the coldest"
        assert plan.page_ins == tuple(page_ins)
        assert bool(plan) == bool(plan.drops or plan.page_ins)

    def advance(self, n: int, seed: int | None) -> None:
        first = self.ledger.n_sealed
        super().advance(n, seed)
        assert (self.ledger.touched[first:] == self.ledger.touched.max()).all()
        assert (self.ledger.touched[:first] < self.ledger.touched.max()).all()

    @rule(pick=Paging.picks)
    def forbidden(self, pick: int) -> None:
        """What the rules forbid raises, and changes nothing."""
        ledger, before = self.ledger, snapshot(self.ledger)
        n = ledger.n_chunks
        steps: list[Callable[[], object]] = [
            lambda: ledger.write(0),
            lambda: ledger.write((ledger.n_free + 1) * ledger.chunk),
            lambda: ledger.rollback(ledger.n_tokens + 1),
            lambda: ledger.rollback(-1),
        ]
        for c in {-1, n, pick % (n + 1)}:
            state = ledger.state_of(c) if 0 <= c < n else None
            if state != State.RESIDENT or c in self.protected():
                steps.append(lambda c=c: ledger.drop(c))  # type: ignore[misc]
            if state != State.OUT or ledger.n_free == 0:
                steps.append(lambda c=c: ledger.begin_page_in(c))  # type: ignore[misc]
            if state != State.IN_FLIGHT:
                steps.append(lambda c=c: ledger.commit_page_in(c))  # type: ignore[misc]
                steps.append(lambda c=c: ledger.abort_page_in(c))  # type: ignore[misc]
            if state != State.RESIDENT or c >= ledger.n_sealed:
                steps.append(lambda c=c: ledger.store(c))  # type: ignore[misc]
            if state is not None and state != State.RESIDENT and ledger.chunk > 1:
                steps.append(lambda c=c: ledger.rollback(c * ledger.chunk + 1))  # type: ignore[misc]
        for step in steps:
            with pytest.raises(LedgerError):
                step()
            assert snapshot(ledger) == before


def snapshot(ledger: Ledger) -> tuple[Any, ...]:
    return (
        ledger.n_tokens,
        tuple(ledger.state.tolist()),
        tuple(ledger.stored.tolist()),
        tuple(ledger.touched.tolist()),
        frozenset(ledger.pins),
    )


FULL = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=200,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)
QUICK = settings(FULL, max_examples=300, phases=(Phase.generate,), report_multiple_bugs=False, print_blob=False)


def test_nothing_is_lost_whatever_the_order() -> None:
    """The invariants hold in all runs, and the runs did page, pin, roll back and clear."""
    Paging.seen.clear()
    run_state_machine_as_test(Exact, settings=FULL)
    steps = (
        "interrupted",
        "abort",
        "no room",
        "pin",
        "pin ahead",
        "pin refused",
        "rollback",
        "cut brought in",
        "clear",
    )
    assert not [step for step in steps if not Paging.seen[step]]
    assert Paging.seen["drop"] > 1000
    assert Paging.seen["page in"] > 100


def filled(n_block: int = 8, chunk: int = 16, *, n_tokens: int | None = None) -> Ledger:
    """A pool with chunks in all its blocks, all stored; chunk 0 is a sink, the last two are the tail."""
    ledger = Ledger(n_block, chunk, n_sinks=1, n_tail=2)
    ledger.write(n_tokens or n_block * chunk)
    for c in ledger.to_store():
        ledger.store(c)
    return ledger


def test_the_older_of_equally_cold_chunks_goes() -> None:
    ledger = filled()
    assert make_room(ledger, fixed(np.zeros(8)), 2) == Plan(drops=(1, 2))
    assert make_room(ledger, fixed(np.array([0, 5, 3, 5, 3, 9, 0, 0])), 3) == Plan(drops=(2, 4, 1))


def test_free_blocks_are_used_first() -> None:
    ledger = filled(n_tokens=6 * 16 - 1)
    assert not make_room(ledger, unasked, 2)
    assert not bring_in(ledger, unasked, [1, 5])
    assert make_room(ledger, fixed(np.zeros(6)), 3).drops == (1,)


def test_lru_holds_on_to_what_was_paged_in() -> None:
    ledger = filled()
    ledger.drop(1)
    ledger.begin_page_in(1)
    ledger.commit_page_in(1)
    assert make_room(ledger, POLICIES["lru"], 5).drops == (2, 3, 4, 5, 1)


def test_bring_in_never_drops_what_it_was_asked_for() -> None:
    ledger = filled()
    for c in (1, 2):
        ledger.drop(c)
    ledger.write(2 * 16)
    for c in ledger.to_store():
        ledger.store(c)
    plan = bring_in(ledger, fixed(np.arange(10.0)), [3, 1, 4, 1, 2, 9])
    assert plan == Plan(drops=(5, 6), page_ins=(1, 2))


def test_too_little_room_drops_nothing_and_says_why() -> None:
    ledger = filled()
    ledger.pins |= {3, 4, 99}
    before = snapshot(ledger)
    with pytest.raises(PoolError, match=r"^4 more blocks .* 3 can be freed: 5 of its 8 are protected .* larger pool"):
        make_room(ledger, fixed(np.zeros(8)), 4)
    assert make_room(ledger, fixed(np.zeros(8)), 3).drops == (1, 2, 5)
    assert snapshot(ledger) == before


def test_a_chunk_without_a_record_never_leaves() -> None:
    ledger = Ledger(8, 16, n_sinks=1, n_tail=2)
    ledger.write(8 * 16)
    assert ledger.to_store() == list(range(8))
    assert not ledger.evictable().any()
    with pytest.raises(LedgerError, match="chunk 4 has no record: it would be lost"):
        ledger.drop(4)
    ledger.store(4)
    ledger.drop(4)


def test_a_record_of_a_chunk_that_was_cut_is_void() -> None:
    """Cut through and written again, a chunk is stored anew before it can leave."""
    ledger = filled()
    ledger.rollback(3 * 16 + 1)
    assert ledger.stored.tolist() == [True, True, True, False]
    ledger.write(15)
    assert ledger.to_store() == [3]


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("n_tokens", 8 * 16 + 1, "8 chunks for 129 positions"),
        ("n_tokens", 8 * 16 - 1, "a record of a chunk that is not sealed"),
        ("n_block", 7, "more than the pool"),
        ("state", [2, 2, 0, 2, 2, 2, 2, 2], "neither resident nor stored"),
        ("state", [3] * 8, r"!= pool"),
    ],
)
def test_integrity_check_sees_a_contradiction(attribute: str, value: Any, why: str) -> None:
    ledger = filled()
    ledger.check_integrity()
    if attribute == "n_block":
        ledger.n_block = value
    elif attribute == "n_tokens":
        ledger._now = (value, ledger._now[1])
    else:
        ledger._state[:] = value
    if "resident" in why:
        ledger._stored[2] = False
    with pytest.raises(LedgerError, match=why):
        ledger.check_integrity()


#
# the machine can fail: one rule of the code broken at a time
#


def ignore_protection(self: Ledger) -> npt.NDArray[np.bool_]:
    """make_room that takes any resident chunk with a record."""
    mask: npt.NDArray[np.bool_] = (self._state == State.RESIDENT) & self._stored
    return mask


def protect_nothing(self: Ledger) -> npt.NDArray[np.bool_]:
    """A ledger that knows no protection at all."""
    return np.zeros(self.n_chunks, np.bool_)


def protect_no_pins(self: Ledger) -> npt.NDArray[np.bool_]:
    mask = np.arange(self.n_chunks) >= min(self.n_sealed, self.n_chunks - self.n_tail)
    mask[: self.n_sinks] = True
    return mask


def ignore_records(self: Ledger) -> npt.NDArray[np.bool_]:
    """make_room that takes chunks whose record was never written."""
    mask: npt.NDArray[np.bool_] = (self._state == State.RESIDENT) & ~self.protected()
    return mask


def drop_forgets_stored(self: Ledger, chunk: int) -> None:
    self._state[chunk] = State.OUT
    self._stored[chunk] = False


def drop_keeps_the_block(self: Ledger, chunk: int) -> None:
    """The chunk is gone from the pool, the ledger says that it is there."""


def count_whole_chunks(self: Ledger, n_tokens: int) -> int:
    """A write that overlooks the chunk that is only begun."""
    return (self.n_tokens + n_tokens) // self.chunk - self.n_chunks


def count_one_too_many(self: Ledger, n_tokens: int) -> int:
    return n_tokens // self.chunk + 1


def abort_leaks_the_block(self: Ledger, chunk: int) -> None:
    """The block stays set aside for ever."""


def abort_is_a_commit(self: Ledger, chunk: int) -> None:
    self._state[chunk] = State.RESIDENT


def rollback_keeps_the_record(self: Ledger, n_tokens: int) -> None:
    """A chunk that is cut through keeps a record of positions that are gone."""
    self._now = (n_tokens, self._now[1][: -(-n_tokens // self.chunk)])


def store_says_nothing(self: Ledger, chunk: int) -> None:
    """Records that nobody knows of: nothing can ever be dropped."""


def floor_without_pins(self: Geometry, n_pins: int) -> int:
    """Pins that no floor holds back."""
    return self.n_sinks + self.n_tail + -(-self.n_batch // self.chunk) + 1 + SPARE_BLOCKS


def hottest(ledger: Ledger, score: Scorer, n: int, keep: Iterable[int]) -> tuple[int, ...]:
    mask = ledger.evictable()
    mask[list(keep)] = False
    candidates = np.flatnonzero(mask)
    return tuple(int(c) for c in candidates[np.argsort(-score(ledger)[candidates])][: max(0, n)])


def too_few(ledger: Ledger, score: Scorer, n: int, keep: Iterable[int]) -> tuple[int, ...]:
    return COLDEST(ledger, score, n - 1, tuple(keep))


def keep_nothing(ledger: Ledger, score: Scorer, n: int, keep: Iterable[int]) -> tuple[int, ...]:
    """Dropping what was to be brought in."""
    return COLDEST(ledger, score, n, ())


COLDEST = planning._coldest

BROKEN: list[tuple[object, str, Callable[..., object], type[Paging], str]] = [
    (Ledger, "evictable", ignore_protection, Paging, "protected chunk . is dropped"),
    (Ledger, "evictable", ignore_records, Paging, "chunk . has no record: it would be lost"),
    (Ledger, "protected", protect_nothing, Paging, "protected chunk . is dropped"),
    (Ledger, "protected", protect_no_pins, Paging, "protected chunk . is dropped"),
    (Ledger, "drop", drop_forgets_stored, Paging, "neither resident nor stored"),
    (Ledger, "drop", drop_keeps_the_block, Paging, "ledger and pool differ"),
    (Ledger, "new_chunks", count_whole_chunks, Paging, "chunks for . positions"),
    (Ledger, "new_chunks", count_one_too_many, Paging, "chunks for . positions"),
    (Ledger, "abort_page_in", abort_leaks_the_block, Paging, "ledger and pool differ"),
    (Ledger, "abort_page_in", abort_is_a_commit, Paging, "ledger and pool differ"),
    (Ledger, "rollback", rollback_keeps_the_record, Paging, "a record of a chunk that is not sealed"),
    (
        Ledger,
        "store",
        store_says_nothing,
        Paging,
        "neither resident nor stored|more blocks of the pool are needed and 0 can be freed",
    ),
    (Geometry, "blocks", floor_without_pins, Paging, "the next batch would find no room|can be freed"),
    (planning, "_coldest", too_few, Paging, "chunks in a pool of . blocks|no free block"),
    (planning, "_coldest", keep_nothing, Paging, "were not brought in|no room, and yet a plan"),
    (planning, "_coldest", hottest, Exact, "not the coldest"),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "machine", "why"), BROKEN, ids=[broken.__name__ for _, _, broken, _, _ in BROKEN]
)
def test_the_machine_sees_a_broken_rule(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    broken: Callable[..., object],
    machine: type[Paging],
    why: str,
) -> None:
    """An invariant, or the ledger itself, fires, and for the reason that is expected."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, PoolError), match=why.replace(".", "[0-9]+")):  # LedgerError is one
        run_state_machine_as_test(machine, settings=QUICK)
