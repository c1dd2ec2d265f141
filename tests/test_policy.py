"""Ledger and plan beside a toy world that holds bytes: whatever the order of steps, no chunk is ever lost."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, given, settings
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
from pyllama_kvflash.policy import Ledger, LedgerError, Plan, Scores, State, bring_in, make_room, reselect
from pyllama_kvflash.policy import plan as planning
from pyllama_kvflash.policy.ledger import _CHUNK
from pyllama_kvflash.policy.sizing import SPARE_BLOCKS, pinned_chunks


def heat_of(ledger: Ledger, chunk: int) -> tuple[bool, float, int]:
    """What the order of chunks is by the words of the design: equal ones are equally hot, and scores are never equal."""
    score = ledger.score[chunk]
    return (True, float(ledger.touched[chunk]), 0) if np.isnan(score) else (False, float(score), chunk)


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
        self.scores: list[float] = []  # what the ledger must know, NaN: nothing

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

    def rate(self, seed: int | None) -> None:
        """No scores, or random ones for the first chunks, with ties if the seed is even; some of them none."""
        rng = np.random.default_rng(seed or 0)
        n = self.ledger.n_chunks if seed is None else int(rng.integers(self.ledger.n_chunks, endpoint=True))
        scores = rng.random(n) if seed and seed % 2 else rng.integers(0, 3, n).astype(np.float64)
        scores[rng.random(n) < (1 if seed is None else 0.2)] = np.nan
        self.ledger.rate(scores)
        self.scores[:n] = scores.tolist()

    def forget(self, n: int) -> None:
        """Positions from n on."""
        self.world.seq_rm(n)
        self.ledger.rollback(n)
        del self.scores[-(-n // self.geometry.chunk) :]

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

    def check(self, plan: Plan, n_blocks: int, page_ins: Iterable[int] = (), keep: Iterable[int] = ()) -> None:
        """What a plan must be beyond its effect: see Exact."""

    def check_reselect(self, plan: Plan, n_free: int, n_most: int | None) -> None:
        """The same of a plan that chooses the pool anew."""

    def advance(self, n: int, seed: int | None) -> None:
        self.seal()
        self.rate(seed)
        n_new = self.ledger.new_chunks(n)
        plan = planning.make_room(self.ledger, n_new)
        self.check(plan, n_new)
        self.apply(plan)
        first = len(self.world.truth) // self.geometry.chunk
        self.world.decode(n)
        self.ledger.write(n)
        self.scores[first:] = [np.nan] * (-(-len(self.world.truth) // self.geometry.chunk) - first)

    def seal(self, at_most: int | None = None) -> None:
        for c in self.ledger.to_store()[:at_most]:
            self.world.read(c)
            self.ledger.mark_stored(c)

    def bring(self, chunks: list[int], seed: int | None) -> None:
        self.seal()
        self.rate(seed)
        missing = [c for c in dict.fromkeys(chunks) if c not in self.world.pool and c not in self.world.landing]
        plan = planning.bring_in(self.ledger, chunks)
        self.check(plan, len(missing), missing, chunks)
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
        chunk = out[pick % len(out)]
        self.bring([chunk], seed)
        self.ledger.unrate(chunk)
        self.scores[chunk] = np.nan

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
            self.rate(seed)
            before = snapshot(self.ledger)
            try:
                planning.bring_in(self.ledger, chunks)
            except PoolError:
                assert snapshot(self.ledger) == before
            else:
                raise AssertionError("there is no room, and yet a plan")
            self.seen["no room"] += 1

    @rule(n_free=st.integers(0, 4), n_most=st.none() | st.integers(1, 4), seed=seeds)
    def reselect(self, n_free: int, n_most: int | None, seed: int | None) -> None:
        """Whatever is not stored yet, or under way."""
        self.rate(seed)
        plan = planning.reselect(self.ledger, n_free, n_most)
        self.check_reselect(plan, n_free, n_most)
        self.apply(plan)
        self.seen["reselect"] += bool(plan.page_ins)

    @precondition(lambda self: self.chunks_that_are(State.OUT) and self.ledger.n_in_flight < SPARE_BLOCKS)
    @rule(pick=picks, seed=seeds)
    def begin_page_in(self, pick: int, seed: int | None) -> None:
        """The bytes stay under way while other steps happen."""
        self.seal()
        out = self.chunks_that_are(State.OUT)
        chunk = out[pick % len(out)]
        self.rate(seed)
        self.drop(planning.bring_in(self.ledger, [chunk]).drops)
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
            self.forget((cut + 1) * chunk)
            self.bring([cut], seed)
            self.seen["cut brought in"] += 1
        self.forget(n)
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
        self.scores.clear()
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
        assert ledger.n_chunks == len(ledger.state) == len(ledger.touched) == len(ledger.heat())
        assert np.array_equal(ledger.score, self.scores, equal_nan=True)
        places = set(world.host) - world.landing
        assert {int(c) for c in np.flatnonzero(ledger.candidates())} == places - protected
        assert ledger.to_store() == [c for c in range(ledger.n_sealed) if c not in world.host]

    def check(self, plan: Plan, n_blocks: int, page_ins: Iterable[int] = (), keep: Iterable[int] = ()) -> None:
        """No more drops than needed, of the coldest that may go, coldest first; of equals, the older."""
        may_go = {int(c) for c in np.flatnonzero(self.ledger.evictable())} - set(keep)
        by_heat = sorted(may_go, key=lambda c: (heat_of(self.ledger, c), c))
        assert plan.drops == tuple(by_heat[: max(0, n_blocks - self.ledger.n_free)]), "not the coldest"
        assert plan.page_ins == tuple(page_ins)
        assert bool(plan) == bool(plan.drops or plan.page_ins)

    def check_reselect(self, plan: Plan, n_free: int, n_most: int | None) -> None:
        if n_most is None:
            check_choice(self.ledger, plan, n_free)
        else:
            check_swaps(self.ledger, plan, RESELECT(self.ledger, n_free), n_free, n_most)

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
            lambda: ledger.rate(np.zeros(n + 1)),
            lambda: ledger.unrate(n),
            lambda: ledger.unrate(-1),
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
                steps.append(lambda c=c: ledger.mark_stored(c))  # type: ignore[misc]
            if state is not None and state != State.RESIDENT and ledger.chunk > 1:
                steps.append(lambda c=c: ledger.rollback(c * ledger.chunk + 1))  # type: ignore[misc]
        for step in steps:
            with pytest.raises(LedgerError):
                step()
            assert snapshot(ledger) == before


def check_choice(ledger: Ledger, plan: Plan, n_free: int) -> None:
    """The hottest of all candidates and what is protected, for as few moves as that takes. `ledger` is as it was before."""
    resident = {int(c) for c in np.flatnonzero(ledger.state == State.RESIDENT)}
    candidates = {int(c) for c in np.flatnonzero(ledger.candidates())}
    drops, page_ins = set(plan.drops), set(plan.page_ins)
    assert len(drops) == len(plan.drops)
    assert len(page_ins) == len(plan.page_ins)
    assert drops <= resident & candidates, "what is no candidate is dropped"
    assert page_ins <= candidates - resident, "what is no candidate, or is there, is paged in"

    room = ledger.n_block - n_free - ledger.n_in_flight - len(resident - candidates)
    if room <= 0:
        assert plan == Plan(), "there is no room, and yet a plan"
        return
    chosen = (resident - drops | page_ins) & candidates
    heats = sorted((heat_of(ledger, c) for c in candidates), reverse=True)
    assert sorted((heat_of(ledger, c) for c in chosen), reverse=True) == heats[:room], "not the hottest"
    assert ledger.n_free + len(drops) - len(page_ins) >= n_free, "too few blocks are free"
    assert len(drops) == max(0, len(page_ins) + n_free - ledger.n_free), "more is dropped than is needed"
    hot, cold = ([heat_of(ledger, c) for c in chunks] for chunks in (plan.page_ins, plan.drops))
    assert hot == sorted(hot, reverse=True), "not the hottest first"
    assert cold == sorted(cold), "not the coldest first"


def check_swaps(ledger: Ledger, plan: Plan, whole: Plan, n_free: int, n_most: int) -> None:
    """Of the plan that makes all the best resident, what brings in no more than n_most: its hottest, for its coldest."""
    assert plan.page_ins == whole.page_ins[:n_most], "not the hottest first"
    assert plan.drops == whole.drops[: len(plan.drops)], "not the coldest"
    n_drop = max(0, len(plan.page_ins) + n_free - ledger.n_free) if whole else 0
    assert len(plan.drops) == n_drop, "more is dropped than is needed"


def snapshot(ledger: Ledger) -> tuple[Any, ...]:
    return (
        ledger.n_tokens,
        tuple(ledger.state.tolist()),
        tuple(ledger.stored.tolist()),
        tuple(ledger.touched.tolist()),
        ledger.score.tobytes(),
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
        "reselect",
    )
    assert not [step for step in steps if not Paging.seen[step]]
    assert Paging.seen["drop"] > 1000
    assert Paging.seen["page in"] > 100


def filled(n_block: int = 8, chunk: int = 16, *, n_tokens: int | None = None, scores: Iterable[float] = ()) -> Ledger:
    """A pool with chunks in all its blocks, all stored; chunk 0 is a sink, the last two are the tail."""
    ledger = Ledger(n_block, chunk, n_sinks=1, n_tail=2)
    ledger.write(n_tokens or n_block * chunk)
    for c in ledger.to_store():
        ledger.mark_stored(c)
    ledger.rate(np.array(list(scores), np.float64))
    return ledger


def come_back(ledger: Ledger, chunk: int) -> None:
    ledger.begin_page_in(chunk)
    ledger.commit_page_in(chunk)


def by_heat(ledger: Ledger) -> list[int]:
    """All chunks, coldest first."""
    return [int(c) for c in np.argsort(ledger.heat(), kind="stable")]


def test_the_older_of_equally_cold_chunks_goes() -> None:
    assert make_room(filled(scores=[0] * 8), 2) == Plan(drops=(1, 2))
    assert make_room(filled(), 2) == Plan(drops=(1, 2))
    assert make_room(filled(scores=[0, 5, 3, 5, 3, 9, 0, 0]), 3) == Plan(drops=(2, 4, 1))


def test_free_blocks_are_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = filled(n_tokens=6 * 16 - 1)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "heat", lambda _: pytest.fail("the order was asked for, where nothing has to go"))
        assert not make_room(ledger, 2)
        assert not bring_in(ledger, [1, 5])
    assert make_room(ledger, 3).drops == (1,)


def test_lru_holds_on_to_what_was_paged_in() -> None:
    ledger = filled()
    ledger.drop(1)
    come_back(ledger, 1)
    assert make_room(ledger, 5).drops == (2, 3, 4, 5, 1)


def test_bring_in_never_drops_what_it_was_asked_for() -> None:
    ledger = filled()
    for c in (1, 2):
        ledger.drop(c)
    ledger.write(2 * 16)
    for c in ledger.to_store():
        ledger.mark_stored(c)
    ledger.rate(np.arange(10.0))
    plan = bring_in(ledger, [3, 1, 4, 1, 2, 9])
    assert plan == Plan(drops=(5, 6), page_ins=(1, 2))


def test_too_little_room_drops_nothing_and_says_why() -> None:
    ledger = filled()
    ledger.pins |= {3, 4, 99}
    before = snapshot(ledger)
    with pytest.raises(PoolError, match=r"^4 more blocks .* 3 can be freed: 5 of its 8 are protected .* larger pool"):
        make_room(ledger, 4)
    assert make_room(ledger, 3).drops == (1, 2, 5)
    assert snapshot(ledger) == before


#
# scores
#


def test_a_new_chunk_has_no_score_and_scores_are_a_copy() -> None:
    ledger = filled()
    assert np.isnan(ledger.score).all()
    ledger.score[:] = 1
    ledger.candidates()[:] = False
    assert np.isnan(ledger.score).all()
    assert ledger.candidates().tolist() == [False, True, True, True, True, True, False, False]


def test_candidates_are_what_has_a_record_and_no_protection_in_or_out() -> None:
    """Not the sink, the tail, a pin, or what is under way; one that is out is."""
    ledger = filled(10, n_tokens=8 * 16)
    ledger.pins.add(5)
    ledger.drop(1)
    ledger.drop(2)
    ledger.begin_page_in(2)
    ledger.write(16)
    assert np.flatnonzero(ledger.candidates()).tolist() == [1, 3, 4, 6]


def test_scores_stay_with_the_first_chunks() -> None:
    """A scoring that began before the last chunks were there says nothing of them; the next one replaces it."""
    ledger = filled(scores=[3, 1, 2])
    assert ledger.score[:3].tolist() == [3, 1, 2]
    assert np.isnan(ledger.score[3:]).all()
    ledger.rate(np.array([np.nan, 7]))
    assert ledger.score[1:3].tolist() == [7, 2]
    assert np.isnan(ledger.score[0])
    before = snapshot(ledger)
    ledger.rate(np.zeros(0))
    assert snapshot(ledger) == before
    with pytest.raises(LedgerError, match="9 scores for 8 chunks"):
        ledger.rate(np.zeros(9))
    assert snapshot(ledger) == before


def test_what_is_unscored_is_hotter_than_all_that_is_scored() -> None:
    ledger = filled(scores=[np.nan, 1e9, np.inf, np.nan, -np.inf, -5])
    ledger.drop(3)
    come_back(ledger, 3)
    assert by_heat(ledger) == [4, 5, 1, 2, 0, 6, 7, 3]
    assert make_room(ledger, 5).drops == (4, 5, 1, 2, 3)


def test_a_chunk_that_was_asked_for_is_hot_until_the_next_scoring() -> None:
    ledger = filled(scores=range(8))
    ledger.unrate(1)
    assert make_room(ledger, 4).drops == (2, 3, 4, 5)
    ledger.rate(np.arange(8.0))
    assert make_room(ledger, 4).drops == (1, 2, 3, 4)
    for chunk in (-1, 8):
        with pytest.raises(LedgerError, match=f"chunk {chunk} does not exist"):
            ledger.unrate(chunk)


def test_a_chunk_that_is_written_to_again_loses_its_score() -> None:
    ledger = filled(scores=range(8))
    ledger.rollback(5 * 16 + 3)
    assert ledger.score.tolist() == [0, 1, 2, 3, 4, 5]
    ledger.write(1)
    assert ledger.score[:5].tolist() == [0, 1, 2, 3, 4]
    assert np.isnan(ledger.score[5])


def test_a_chunk_that_is_full_keeps_its_score_while_the_next_is_written() -> None:
    ledger = filled(10, n_tokens=8 * 16, scores=range(8))
    ledger.write(16)
    assert ledger.score[:8].tolist() == list(range(8))
    assert np.isnan(ledger.score[8])


def test_rollback_forgets_the_scores_behind_it() -> None:
    ledger = filled(scores=range(8))
    ledger.rollback(4 * 16)
    assert ledger.score.tolist() == [0, 1, 2, 3]
    ledger.write(4 * 16)
    assert np.isnan(ledger.score[4:]).all()
    ledger.clear()
    assert len(ledger.score) == 0


def test_scores_stay_where_a_chunk_goes() -> None:
    ledger = filled(scores=range(8))
    ledger.drop(1)
    assert ledger.score[1] == 1
    come_back(ledger, 1)
    assert ledger.score[1] == 1
    assert make_room(ledger, 1).drops == (1,), "a score counts for more than what was used last"


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Any chunks that the rules allow, stored or not, in, out or under way; scores with ties, infinite ones and none."""
    n, chunk = draw(st.integers(0, 14)), draw(st.sampled_from([1, 4]))
    n_tokens = n * chunk - (draw(st.integers(0, chunk - 1)) if n else 0)
    number = st.sampled_from([np.nan, np.nan, -np.inf, np.inf, 0.0, -0.0, 1.0]) | st.floats(allow_nan=False, width=16)
    chunks = np.zeros(n, _CHUNK)
    for i, row in enumerate(chunks):
        row["stored"] = (i + 1) * chunk <= n_tokens and draw(st.integers(0, 4)) > 0
        row["state"] = draw(st.sampled_from([0, 0, 1, 2, 2])) if row["stored"] else State.RESIDENT
        row["touched"] = draw(st.integers(1, 5))
        row["score"] = draw(number)
    n_block = int(np.count_nonzero(chunks["state"])) + draw(st.integers(0, 4))
    ledger = Ledger(n_block, chunk, n_sinks=draw(st.integers(0, 2)), n_tail=draw(st.integers(0, 3)))
    ledger.pins |= draw(st.sets(st.integers(0, 16), max_size=3))
    ledger._now = (n_tokens, chunks)
    ledger._tick = 5
    ledger.check_integrity()
    return ledger


PROPERTY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow],
)


@given(ledger=ledgers())
@PROPERTY
def test_heat_is_the_order_of_scores_and_then_of_use(ledger: Ledger) -> None:
    heat, order = ledger.heat(), [heat_of(ledger, c) for c in range(ledger.n_chunks)]
    assert np.isfinite(heat).all()
    for a in range(ledger.n_chunks):
        for b in range(ledger.n_chunks):
            assert (heat[a] < heat[b]) == (order[a] < order[b])


@given(ledger=ledgers(), n_free=st.integers(0, 6))
@PROPERTY
def test_reselect_is_the_best_choice_whatever_the_ledger(ledger: Ledger, n_free: int) -> None:
    before, protected = snapshot(ledger), ledger.protected()
    stays = {c for c in range(ledger.n_chunks) if ledger.state[c] == State.RESIDENT and not ledger.candidates()[c]}
    plan = reselect(ledger, n_free)
    assert snapshot(ledger) == before
    check_choice(ledger, plan, n_free)
    assert plan == reselect(ledger, n_free)
    for chunk in plan.drops:
        ledger.drop(chunk)
    ledger.check_integrity()
    for chunk in plan.page_ins:
        ledger.begin_page_in(chunk)
        ledger.check_integrity()
        ledger.commit_page_in(chunk)
    ledger.check_integrity()
    assert not plan or ledger.n_free >= n_free
    assert (ledger.state[sorted(stays)] == State.RESIDENT).all()
    assert not protected[list(plan.drops)].any()


@given(ledger=ledgers(), n_free=st.integers(0, 6), n_most=st.integers(0, 6))
@PROPERTY
def test_reselect_brings_in_no_more_than_it_is_told_to(ledger: Ledger, n_free: int, n_most: int) -> None:
    """The hottest of what would come in for the coldest of what would go, and the blocks that are to be free are."""
    before, stays = snapshot(ledger), ledger.protected() & (ledger.state == State.RESIDENT)
    plan, whole = reselect(ledger, n_free, n_most), reselect(ledger, n_free)
    assert snapshot(ledger) == before
    assert len(plan.page_ins) <= n_most
    check_swaps(ledger, plan, whole, n_free, n_most)
    if n_most >= len(whole.page_ins):
        assert plan == whole
    heat = ledger.heat()
    for new in plan.page_ins:
        assert all(heat[new] >= heat[old] for old in plan.drops)
    for chunk in plan.drops:
        ledger.drop(chunk)
    for chunk in plan.page_ins:
        ledger.begin_page_in(chunk)
        ledger.commit_page_in(chunk)
    ledger.check_integrity()
    assert not plan or ledger.n_free >= n_free
    assert (ledger.state[stays] == State.RESIDENT).all()


def test_reselect_brings_the_best_back_hottest_first() -> None:
    ledger = filled()
    for c in (1, 2, 3):
        ledger.drop(c)
    ledger.write(3 * 16)
    for c in ledger.to_store():
        ledger.mark_stored(c)
    ledger.rate(np.array([0, 7, 9, 1, 3, 2, 8, 4, 0, 0, 0]))  # 0 a sink, 9 and 10 the tail
    assert reselect(ledger, 1) == Plan(drops=(8, 5, 4), page_ins=(2, 1))
    assert reselect(ledger, 0) == Plan(drops=(8, 5), page_ins=(2, 1))
    assert reselect(ledger, 4) == Plan(drops=(8, 5, 4, 7, 6), page_ins=(2,))
    assert reselect(ledger, 5) == Plan()
    assert reselect(ledger, 1, 1) == Plan(drops=(8, 5), page_ins=(2,))
    assert reselect(ledger, 0, 1) == Plan(drops=(8,), page_ins=(2,))
    assert reselect(ledger, 1, 0) == Plan(drops=(8,))
    assert reselect(ledger, 1, 2) == reselect(ledger, 1, 8) == reselect(ledger, 1)


def test_reselect_moves_nothing_where_the_best_are_there() -> None:
    ledger = filled(scores=range(8))
    ledger.drop(1)
    assert reselect(ledger, 1) == Plan()
    assert reselect(ledger, 0) == Plan(page_ins=(1,))


def test_a_chunk_without_a_record_never_leaves() -> None:
    ledger = Ledger(8, 16, n_sinks=1, n_tail=2)
    ledger.write(8 * 16)
    assert ledger.to_store() == list(range(8))
    assert not ledger.evictable().any()
    with pytest.raises(LedgerError, match="chunk 4 has no record: it would be lost"):
        ledger.drop(4)
    ledger.mark_stored(4)
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
        ("state", [3] * 8, "!= held"),
    ],
)
def test_integrity_check_sees_a_contradiction(attribute: str, value: Any, why: str) -> None:
    ledger = filled()
    ledger.check_integrity()
    if attribute == "n_block":
        ledger.blocks.n = value
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


def hottest(ledger: Ledger, n: int, keep: Sequence[int] = ()) -> Plan:
    mask = ledger.evictable()
    mask[list(keep)] = False
    candidates = np.flatnonzero(mask)
    return Plan(tuple(int(c) for c in candidates[np.argsort(-ledger.heat()[candidates])][: max(0, n)]))


def too_few(ledger: Ledger, n: int, keep: Sequence[int] = ()) -> Plan:
    return GIVEN_UP(ledger, n - 1, keep)


def keep_nothing(ledger: Ledger, n: int, keep: Sequence[int] = ()) -> Plan:
    """Dropping what was to be brought in."""
    return GIVEN_UP(ledger, n)


def page_in_too_much(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    """A choice that leaves a block too few."""
    return RESELECT(ledger, n_free - 1, n_most)


def drop_too_few(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    plan = RESELECT(ledger, n_free, n_most)
    return Plan(plan.drops[1:], plan.page_ins)


def coldest_first(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    plan = RESELECT(ledger, n_free, n_most)
    return Plan(plan.drops, plan.page_ins[::-1])


def choose_by_recency(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    """A choice that knows no scores."""
    blind = Ledger(ledger.n_block, ledger.chunk, n_sinks=ledger.n_sinks, n_tail=ledger.n_tail)
    blind.pins, blind._now = ledger.pins, (ledger.n_tokens, ledger._now[1].copy())
    blind.rate(np.full(blind.n_chunks, np.nan))
    return RESELECT(blind, n_free, n_most)


def swap_too_many(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    """A choice that brings in one more than it was told to."""
    return RESELECT(ledger, n_free, None if n_most is None else n_most + 1)


def scores_are_kept(self: Ledger, n_tokens: int) -> None:
    """A chunk that is written to again keeps the score of what it held."""
    scores = self.score[: -(-self.n_tokens // self.chunk)]
    WRITE(self, n_tokens)
    self.rate(scores)


def scored_is_hotter(self: Ledger) -> Scores:
    """What was never scored counts as cold."""
    return np.where(np.isnan(self.score), self.touched - 1e9, self.score)


GIVEN_UP = planning._given_up
RESELECT = planning.reselect
WRITE = Ledger.write

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
    (planning, "_given_up", too_few, Paging, "chunks in a pool of . blocks|no free block"),
    (planning, "_given_up", keep_nothing, Paging, "were not brought in|no room, and yet a plan"),
    (planning, "_given_up", hottest, Exact, "not the coldest"),
    (
        planning,
        "reselect",
        page_in_too_much,
        Exact,
        "too few blocks are free|not the hottest|not the coldest|more is dropped|no room",
    ),
    (planning, "reselect", drop_too_few, Paging, "no free block for chunk ."),
    (planning, "reselect", coldest_first, Exact, "not the hottest first"),
    (planning, "reselect", choose_by_recency, Exact, "not the hottest|not the coldest"),
    (planning, "reselect", swap_too_many, Exact, "not the hottest first"),
    (Ledger, "write", scores_are_kept, Exact, "array_equal"),
    (Ledger, "heat", scored_is_hotter, Exact, "not the coldest|not the hottest"),
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
