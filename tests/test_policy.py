"""Ledger and plan beside a toy world that holds bytes: whatever the order of steps, no chunk is ever lost."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, settings
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
from pyllama_kvflash.policy import Ledger, LedgerError, Plan, State, lru
from pyllama_kvflash.policy import plan as planning
from pyllama_kvflash.policy.sizing import SPARE_BLOCKS, pinned_chunks

Scores = npt.NDArray[np.float64]


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
    """The engine's steps (engine.KVFlash) in any order, on the ledger and on the world at once."""

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
            c for c in chunks if c < self.geometry.n_sinks or c >= n_chunks - tail or c in self.ledger.pins or c >= sealed
        }

    @invariant()
    def nothing_is_lost(self) -> None:
        ledger, world = self.ledger, self.world
        n_sealed = len(world.truth) // world.chunk
        for c in range(n_sealed):
            assert c in world.pool or c in world.host, f"chunk {c} is lost"
        for place in (world.pool, world.host):
            for c, values in place.items():
                assert values == world.want(c), f"chunk {c} has the wrong bytes"
        for c in range(n_sealed, ledger.n_chunks):
            assert c in world.pool, f"chunk {c}, being written, is not resident"

    @invariant()
    def ledger_tells_the_truth(self) -> None:
        ledger, world = self.ledger, self.world
        ledger.check_integrity()
        state, stored = ledger.state, ledger.stored
        assert ledger.n_tokens == len(world.truth)
        assert ledger.n_chunks == len(state) == len(ledger.touched)
        assert {int(c) for c in np.flatnonzero(state == State.RESIDENT)} == set(world.pool)
        assert {int(c) for c in np.flatnonzero(state == State.IN_FLIGHT)} == world.landing
        assert {int(c) for c in np.flatnonzero(stored)} == set(world.host)
        assert ledger.to_store() == []

    @invariant()
    def pool_is_never_exceeded(self) -> None:
        ledger, world = self.ledger, self.world
        world.check_size()
        assert ledger.n_free == world.n_block - len(world.pool) - len(world.landing) >= 0
        assert ledger.n_free + ledger.n_resident + ledger.n_in_flight == ledger.n_block

    @invariant()
    def protected_stay(self) -> None:
        world, protected = self.world, self.protected()
        assert {int(c) for c in np.flatnonzero(self.ledger.protected())} == protected
        assert {int(c) for c in np.flatnonzero(self.ledger.evictable())} == (set(world.pool) & set(world.host)) - protected
        gone = (self.held & protected) - set(world.pool)
        assert not gone, f"protected chunks {gone} were evicted"
        sinks_and_pins = {c for c in protected if c < self.geometry.n_sinks or c in self.ledger.pins}
        assert sinks_and_pins <= set(world.pool)
        self.held = set(world.pool) & protected

    @invariant()
    def a_batch_always_fits(self) -> None:
        """Whatever is pinned or in flight: the largest batch finds room (the machine keeps at most 2 in flight)."""
        room = self.ledger.n_free + int(np.count_nonzero(self.ledger.evictable()))
        assert room >= self.ledger.new_chunks(self.geometry.n_batch), "the next batch would find no room"

    #
    # the engine's steps
    #

    def scores(self, seed: int | None) -> Scores:
        if seed is None:
            return lru(self.ledger)
        rng = np.random.default_rng(seed)
        n = self.ledger.n_chunks
        return rng.random(n) if seed % 2 else rng.integers(0, 3, n).astype(np.float64)  # the latter with ties

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

    def check_coldest(self, drops: tuple[int, ...], scores: Scores, keep: Iterable[int] = ()) -> None:
        """Dropped are the coldest that may go, coldest first; of equals, the older."""
        free_to_go = [int(c) for c in np.flatnonzero(self.ledger.evictable()) if int(c) not in set(keep)]
        by_heat = sorted(free_to_go, key=lambda c: (scores[c], c))
        assert list(drops) == by_heat[: len(drops)]

    def advance(self, n: int, seed: int | None) -> None:
        n_new, scores = self.ledger.new_chunks(n), self.scores(seed)
        plan = planning.make_room(self.ledger, scores, n_new)
        assert plan.page_ins == ()
        assert len(plan.drops) == max(0, n_new - self.ledger.n_free)
        self.check_coldest(plan.drops, scores)
        self.apply(plan)
        self.world.decode(n)
        self.ledger.write(n)
        newest = self.ledger.touched.max()
        assert all(self.ledger.touched[c] == newest for c in range((self.ledger.n_tokens - n) // self.ledger.chunk, self.ledger.n_chunks))
        for c in self.ledger.to_store():
            self.world.read(c)
            self.ledger.store(c)

    def bring(self, chunks: list[int], seed: int | None) -> None:
        scores = self.scores(seed)
        plan = planning.bring_in(self.ledger, scores, chunks)
        assert set(plan.page_ins) == {c for c in chunks if c not in self.world.pool and c not in self.world.landing}
        assert len(plan.drops) == max(0, len(plan.page_ins) - self.ledger.n_free)
        self.check_coldest(plan.drops, scores, keep=chunks)
        self.apply(plan)
        assert set(chunks) <= set(self.world.pool) | self.world.landing

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

    @rule(n=st.integers(1, 8), rest=st.integers(0, 192), seed=seeds)
    def prefill(self, n: int, rest: int, seed: int | None) -> None:
        left = n * self.geometry.n_batch + rest % self.geometry.n_batch
        while left:
            self.advance(min(left, self.geometry.n_batch), seed)
            left -= min(left, self.geometry.n_batch)

    @precondition(lambda self: self.ledger.evictable().any())
    @rule(pick=picks)
    def page_out(self, pick: int) -> None:
        candidates = np.flatnonzero(self.ledger.evictable())
        self.drop([int(candidates[pick % len(candidates)])])

    @precondition(lambda self: self.chunks_that_are(State.OUT))
    @rule(pick=picks, seed=seeds)
    def page_in(self, pick: int, seed: int | None) -> None:
        out = self.chunks_that_are(State.OUT)
        self.bring([out[pick % len(out)]], seed)

    @precondition(lambda self: self.ledger.n_chunks)
    @rule(picks=st.lists(picks, min_size=1, max_size=12), seed=seeds)
    def page_in_many(self, picks: list[int], seed: int | None) -> None:
        """More than may fit: then PoolError, and nothing moves."""
        chunks = [pick % self.ledger.n_chunks for pick in picks]
        missing = {c for c in chunks if self.ledger.state_of(c) == State.OUT}
        room = self.ledger.n_free + len([c for c in np.flatnonzero(self.ledger.evictable()) if int(c) not in chunks])
        if len(missing) <= room:
            self.bring(chunks, seed)
        else:
            before = snapshot(self.ledger)
            with pytest.raises(PoolError, match=f"{self.ledger.n_block} are protected"):
                planning.bring_in(self.ledger, self.scores(seed), chunks)
            assert snapshot(self.ledger) == before
            self.seen["no room"] += 1

    @precondition(lambda self: self.chunks_that_are(State.OUT) and self.ledger.n_in_flight < SPARE_BLOCKS)
    @rule(pick=picks, seed=seeds)
    def begin_page_in(self, pick: int, seed: int | None) -> None:
        """The bytes stay under way while other steps happen."""
        out = self.chunks_that_are(State.OUT)
        chunk = out[pick % len(out)]
        self.drop(planning.bring_in(self.ledger, self.scores(seed), [chunk]).drops)
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
    @rule(back=st.integers(0, 600), seed=seeds)
    def rollback(self, back: int, seed: int | None) -> None:
        n = max(0, self.ledger.n_tokens - back)
        cut = n // self.geometry.chunk
        self.settle(range(cut, self.ledger.n_chunks))
        if n % self.geometry.chunk and self.ledger.state_of(cut) == State.OUT:
            self.bring([cut], seed)
            self.seen["cut brought in"] += 1
        self.world.seq_rm(n)
        self.ledger.rollback(n)
        self.seen["rollback"] += 1

    @precondition(lambda self: self.ledger.n_chunks > 2 * self.ledger.n_block)
    @rule()
    def clear(self) -> None:
        self.settle(list(self.world.landing))
        self.world.seq_rm(0)
        self.ledger.clear()
        self.seen["clear"] += 1

    @rule(pick=picks)
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


FULL = settings(derandomize=True, database=None, deadline=None, max_examples=200, stateful_step_count=50)
QUICK = settings(FULL, max_examples=100, phases=(Phase.generate,), report_multiple_bugs=False, print_blob=False)


def test_nothing_is_lost_whatever_the_order() -> None:
    """The invariants hold in all runs, and the runs did page, pin, roll back and clear often enough to mean something."""
    Paging.seen.clear()
    run_state_machine_as_test(Paging, settings=FULL)
    few = {step: n for step, n in Paging.seen.items() if n < 20}
    assert not few
    assert len(Paging.seen) == 10
    assert Paging.seen["drop"] > 2000
    assert Paging.seen["page in"] > 500


#
# the machine can fail: one rule of the code broken at a time
#


def ignore_protection(self: Ledger) -> npt.NDArray[np.bool_]:
    """make_room that takes any resident chunk with a record."""
    return (self._state == State.RESIDENT) & self._stored


def protect_nothing(self: Ledger) -> npt.NDArray[np.bool_]:
    """A ledger that knows no protection at all."""
    return np.zeros(self.n_chunks, np.bool_)


def protect_no_pins(self: Ledger) -> npt.NDArray[np.bool_]:
    mask = np.arange(self.n_chunks) >= min(self.n_sealed, self.n_chunks - self.n_tail)
    mask[: self.n_sinks] = True
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
    keep = -(-n_tokens // self.chunk)
    self.n_tokens = n_tokens
    self._state, self._stored, self._touched = self._state[:keep], self._stored[:keep], self._touched[:keep]


def store_says_nothing(self: Ledger, chunk: int) -> None:
    """Records that nobody knows of: nothing can ever be dropped."""


def hottest(ledger: Ledger, scores: Scores, n: int, keep: Iterable[int]) -> tuple[int, ...]:
    mask = ledger.evictable()
    mask[list(keep)] = False
    candidates = np.flatnonzero(mask)
    return tuple(int(c) for c in candidates[np.argsort(-scores[candidates])][: max(0, n)])


def too_few(ledger: Ledger, scores: Scores, n: int, keep: Iterable[int]) -> tuple[int, ...]:
    return COLDEST(ledger, scores, n - 1, tuple(keep))


def keep_nothing(ledger: Ledger, scores: Scores, n: int, keep: Iterable[int]) -> tuple[int, ...]:
    """Dropping what was to be brought in."""
    return COLDEST(ledger, scores, n, ())


COLDEST = planning._coldest

BROKEN: list[tuple[object, str, Callable[..., object]]] = [
    (Ledger, "evictable", ignore_protection),
    (Ledger, "protected", protect_nothing),
    (Ledger, "protected", protect_no_pins),
    (Ledger, "drop", drop_forgets_stored),
    (Ledger, "drop", drop_keeps_the_block),
    (Ledger, "new_chunks", count_whole_chunks),
    (Ledger, "new_chunks", count_one_too_many),
    (Ledger, "abort_page_in", abort_leaks_the_block),
    (Ledger, "abort_page_in", abort_is_a_commit),
    (Ledger, "rollback", rollback_keeps_the_record),
    (Ledger, "store", store_says_nothing),
    (planning, "_coldest", hottest),
    (planning, "_coldest", too_few),
    (planning, "_coldest", keep_nothing),
]


@pytest.mark.parametrize(("owner", "name", "broken"), BROKEN, ids=[broken.__name__ for _, _, broken in BROKEN])
def test_the_machine_sees_a_broken_rule(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: Callable[..., object]
) -> None:
    """An invariant, or the ledger itself, fires."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError) as err:  # LedgerError is one
        run_state_machine_as_test(Paging, settings=QUICK)
    print(repr(err.value)[:150])
