"""A machine that pages as an engine does, in any order, and knows what must hold after each step."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.policy import Ledger, LedgerError, Plan
from pyllama_kvflash.policy import plan as planning
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
        assert chunk in self.pool, f"chunk {chunk} is not there to be stored"
        self.host[chunk] = list(self.pool[chunk])

    def append(self, n: int) -> None:
        """Positions that were computed elsewhere: full chunks are in the host store alone, the last one is in the pool."""
        first = len(self.truth) // self.chunk
        self.truth += range(self._next, self._next + n)
        self._next += n
        self.pool.pop(first, None)
        for c in range(first, -(-len(self.truth) // self.chunk)):
            place = self.host if len(self.want(c)) == self.chunk else self.pool
            place[c] = self.want(c)
        self.check_size()

    def drop(self, chunk: int) -> None:
        del self.pool[chunk]

    def page_in(self, chunk: int) -> None:
        self.pool[chunk] = list(self.host[chunk])
        self.check_size()

    def seq_rm(self, n: int) -> None:
        cut = n // self.chunk
        self.truth = self.truth[:n]
        self.pool = {c: values[: max(0, n - c * self.chunk)] for c, values in self.pool.items()}
        self.pool = {c: values for c, values in self.pool.items() if values}
        self.host = {c: values for c, values in self.host.items() if c < cut}

    def check_size(self) -> None:
        assert len(self.pool) <= self.n_block, f"{len(self.pool)} chunks in a pool of {self.n_block} blocks"


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
        self.away: set[int] = set()  # read exactly, and not in the pool since
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
        assert {int(c) for c in np.flatnonzero(ledger.resident)} == set(world.pool), "ledger and pool differ"
        missing = set(np.flatnonzero(ledger.stored)) - set(world.host)
        assert not missing, f"no record of chunks {missing}"

    @invariant()
    def pool_is_never_exceeded(self) -> None:
        ledger, world = self.ledger, self.world
        world.check_size()
        assert ledger.n_free == world.n_block - len(world.pool), "ledger and pool differ"
        assert ledger.n_free + ledger.n_resident == ledger.n_block

    @invariant()
    def protected_stay(self) -> None:
        protected, resident = self.protected(), set(self.world.pool)
        self.away = {c for c in self.away - resident if c < self.ledger.n_chunks}
        gone = (self.held & protected) - resident - self.away
        assert not gone, f"protected chunks {gone} were evicted"
        for c in protected - self.away:
            assert c in resident or not (c < self.geometry.n_sinks or c in self.ledger.pins), f"{c} does not stay"
        self.held = resident & protected

    @invariant()
    def a_batch_always_fits(self) -> None:
        """Whatever is pinned: the largest batch finds room, once all is stored."""
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
            self.ledger.page_in(c)
            self.world.page_in(c)
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
        missing = [c for c in dict.fromkeys(chunks) if c not in self.world.pool]
        plan = planning.bring_in(self.ledger, chunks)
        self.check(plan, len(missing), missing, chunks)
        self.apply(plan)
        out = set(chunks) - set(self.world.pool)
        assert not out, f"chunks {out} were not brought in"

    @property
    def out(self) -> list[int]:
        return [int(c) for c in np.flatnonzero(~self.ledger.resident)]

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

    @rule(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=3), seed=seeds, settles=st.booleans())
    def read_exactly(self, sizes: list[int], seed: int | None, settles: bool) -> None:
        """As Pager.prepare and settle_in: batches of any size that take a block at most, then what must be there comes in.
        A prompt may be cut off before that.
        """
        ledger, chunk = self.ledger, self.geometry.chunk
        for size in sizes:
            self.seal()
            self.rate(seed)
            n = 1 + size % (6 * chunk)
            needs_block = int((ledger.n_tokens + n) % chunk > 0 and ledger.n_tokens % chunk == 0)
            plan = planning.make_room(ledger, needs_block)
            self.check(plan, needs_block)
            self.apply(plan)
            self.append(n)
        if settles:
            self.seal()
            self.bring([int(c) for c in np.flatnonzero(ledger.protected())], seed)
            self.away.clear()
            self.seen["settled in"] += 1

    def append(self, n: int) -> None:
        first = self.ledger.n_sealed
        self.world.append(n)
        self.ledger.append(n)
        self.away |= set(range(first, self.ledger.n_sealed))
        self.scores[first:] = [np.nan] * (-(-len(self.world.truth) // self.geometry.chunk) - first)
        self.seen["read exactly"] += 1

    @precondition(lambda self: self.ledger.evictable().any())
    @rule(pick=picks)
    def page_out(self, pick: int) -> None:
        candidates = np.flatnonzero(self.ledger.evictable())
        self.drop([int(candidates[-1 - pick % len(candidates)])])

    @precondition(lambda self: self.out)
    @rule(pick=picks, seed=seeds)
    def page_in(self, pick: int, seed: int | None) -> None:
        chunk = self.out[pick % len(self.out)]
        self.bring([chunk], seed)
        self.ledger.unrate(chunk)
        self.scores[chunk] = np.nan

    @precondition(lambda self: self.ledger.n_chunks)
    @rule(picks=st.lists(picks, min_size=1, max_size=12), seed=seeds)
    def page_in_many(self, picks: list[int], seed: int | None) -> None:
        """More than may fit: then PoolError, and nothing moves."""
        self.seal()
        chunks = [pick % self.ledger.n_chunks for pick in picks]
        missing = {c for c in chunks if not self.ledger.holds(c)}
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

    @precondition(lambda self: self.geometry.n_pins)
    @rule(at=st.integers(0, 1000), length=st.integers(1, 192), seed=seeds)
    def pin(self, at: int, length: int, seed: int | None) -> None:
        """A range that may lie ahead of what is written."""
        start = at % (self.ledger.n_tokens + 4 * self.geometry.chunk)
        chunks = pinned_chunks([(start, start + 1 + length % (2 * self.geometry.chunk))], self.geometry.chunk)
        if self.geometry.blocks(len(self.ledger.pins | chunks)) > self.ledger.n_block:
            self.seen["pin refused"] += 1
            return
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
        if n % chunk and not self.ledger.holds(cut):
            self.forget((cut + 1) * chunk)
            self.bring([cut], seed)
            self.seen["cut brought in"] += 1
        self.forget(n)
        n_chunks = self.ledger.n_chunks
        tail = range(max(0, n_chunks - self.geometry.n_tail), n_chunks)
        self.bring(tail, seed)
        assert all(self.ledger.holds(c) for c in tail)
        self.seen["rollback"] += 1

    @precondition(lambda self: self.ledger.n_chunks > 2 * self.ledger.n_block)
    @rule()
    def clear(self) -> None:
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
        assert ledger.n_chunks == len(ledger.resident) == len(ledger.touched) == len(ledger.heat())
        assert np.array_equal(ledger.score, self.scores, equal_nan=True)
        places = set(world.host)
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
        self.check_touched(first)

    def append(self, n: int) -> None:
        first = self.ledger.n_sealed
        super().append(n)
        self.check_touched(first)

    def check_touched(self, first: int) -> None:
        """All chunks from `first` on at once, after all others."""
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
            lambda: ledger.append(0),
            lambda: ledger.append(-1),
            lambda: ledger.rollback(ledger.n_tokens + 1),
            lambda: ledger.rollback(-1),
            lambda: ledger.rate(np.zeros(n + 1)),
            lambda: ledger.unrate(n),
            lambda: ledger.unrate(-1),
        ]
        if ledger.n_free == 0 and ledger.n_tokens % ledger.chunk == 0 and ledger.chunk > 1:
            steps.append(lambda: ledger.append(ledger.chunk + 1))
        for c in {-1, n, pick % (n + 1)}:
            there = ledger.holds(c) if 0 <= c < n else None
            if not there or c in self.protected():
                steps.append(lambda c=c: ledger.drop(c))  # type: ignore[misc]
            if there is not False or ledger.n_free == 0:
                steps.append(lambda c=c: ledger.page_in(c))  # type: ignore[misc]
            if not there or c >= ledger.n_sealed:
                steps.append(lambda c=c: ledger.mark_stored(c))  # type: ignore[misc]
            if there is False and ledger.chunk > 1:
                steps.append(lambda c=c: ledger.rollback(c * ledger.chunk + 1))  # type: ignore[misc]
        for step in steps:
            with pytest.raises(LedgerError):
                step()
            assert snapshot(ledger) == before


def check_choice(ledger: Ledger, plan: Plan, n_free: int) -> None:
    """The hottest of all candidates and what is protected, for as few moves as that takes. `ledger` is as it was before."""
    resident = {int(c) for c in np.flatnonzero(ledger.resident)}
    candidates = {int(c) for c in np.flatnonzero(ledger.candidates())}
    drops, page_ins = set(plan.drops), set(plan.page_ins)
    assert len(drops) == len(plan.drops)
    assert len(page_ins) == len(plan.page_ins)
    assert drops <= resident & candidates, "what is no candidate is dropped"
    assert page_ins <= candidates - resident, "what is no candidate, or is there, is paged in"

    room = ledger.n_block - n_free - len(resident - candidates)
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
        tuple(ledger.resident.tolist()),
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


def filled(n_block: int = 8, chunk: int = 16, *, n_tokens: int | None = None, scores: Iterable[float] = ()) -> Ledger:
    """A pool with chunks in all its blocks, all stored; chunk 0 is a sink, the last two are the tail."""
    ledger = Ledger(n_block, chunk, n_sinks=1, n_tail=2)
    ledger.write(n_tokens or n_block * chunk)
    for c in ledger.to_store():
        ledger.mark_stored(c)
    ledger.rate(np.array(list(scores), np.float64))
    return ledger


def come_back(ledger: Ledger, chunk: int) -> None:
    ledger.page_in(chunk)


def by_heat(ledger: Ledger) -> list[int]:
    """All chunks, coldest first."""
    return [int(c) for c in np.argsort(ledger.heat(), kind="stable")]


RESELECT = planning.reselect
