"""The pager: applies decisions of `policy` to the native pool and the host store, and keeps the three in step.

Nothing here waits for a copy that the computation does not wait for. A full chunk is written back while the next batch is
computed, and summarised after that, in a thread. On a GPU a plan is spread over steps while decoding, see _fly().
"""

from collections import deque
from concurrent.futures import Future
from contextlib import suppress

import numpy as np

from pyllama_kvflash.errors import PoolError, UsageError
from pyllama_kvflash.native import Context, Keys, Summaries
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Blocks, Ledger, Plan, Scores, State, bring_in, make_room, reselect
from pyllama_kvflash.policy.sizing import largest_batch, n_pinned, pinned_chunks, pool_floor
from pyllama_kvflash.pool.disk import slabs_in
from pyllama_kvflash.pool.residency import Residency, compare, held, look, n_landing, resident
from pyllama_kvflash.pool.store import HostMemory, HostStore
from pyllama_kvflash.pool.summariser import Summariser

# That begin to come back in one step: half a ms of a PCIe 5 bus, on which the next step's inputs would wait in line.
FLIGHT_BYTES = 24 << 20
_NOTHING = Plan()


class Shared:
    """What the sequences of a pool share: its blocks, the host memory for their records, and each other."""

    def __init__(self, ctx: Context, options: Options, n_pool: int) -> None:
        info = ctx.pool_info()
        self.blocks = Blocks(n_pool // options.chunk)
        spill = slabs_in(options.disk) if options.disk else None
        self.memory = HostMemory(info.record_bytes, ctx.host_buffer, options.host_limit, info.meta_bytes, spill)
        self.pagers: list[Pager] = []

    def close(self) -> None:
        """Free the host memory, once all pagers are closed."""
        self.memory.close()

    def n_pinned(self) -> int:
        """Pinned chunks of all sequences that are no sinks."""
        return sum(n_pinned(ledger.pins, ledger.n_sinks) for ledger in self.blocks.ledgers)


class Pager:
    """Owns the ledger and the host store of one sequence; moves its chunks in and out of the pool that it shares.

    The ledger is changed first, since it checks the rules; the pool follows. Should the step be cut off in between,
    reconcile() makes the pool what the ledger says. n_out, n_in and n_stored count moves since the last clear().
    """

    def __init__(self, ctx: Context, options: Options, shared: Shared, summary: str | None) -> None:
        """ctx: as the sequence sees it; the pagers of a pool are made in the order of their sequences.

        summary: what is kept of the keys of sealed chunks, for a scorer. Raises UnsupportedError if that cannot be.
        """
        self.n_out = self.n_in = self.n_stored = 0
        self.records = HostStore(shared.memory)
        self.ctx = ctx
        self._shared = shared
        self._reads: deque[tuple[int, int]] = deque()  # chunks being written back, and their tickets
        self.landing: dict[int, int] = {}  # chunks on their way in, and their blocks
        self.todo = (deque[int](), deque[int]())  # drops and page-ins of a plan that is spread over steps
        self._layers = ctx.tapped()
        self._summariser = Summariser(self._layers, options.chunk, self.records.get, options.n_threads or 1)
        self._summariser.use(summary, ())
        self.keys = Keys(self._layers, options.chunk, self.records.get)
        self._min_batch = options.n_batch or options.chunk
        self.ledger = Ledger(shared.blocks, options.chunk, n_sinks=options.sinks, n_tail=options.tail)
        self.ledger.pins |= pinned_chunks(options.pins, options.chunk)
        shared.pagers.append(self)

    @property
    def n_batch(self) -> int:
        """The largest batch that the pool holds beside the sinks, tails and pins."""
        ledger, blocks = self.ledger, self._shared.blocks
        return largest_batch(
            blocks.n * ledger.chunk,
            ledger.chunk,
            ledger.n_sinks,
            ledger.n_tail,
            self._shared.n_pinned(),
            len(blocks.ledgers),
        )

    #
    # a batch
    #

    def close(self) -> None:
        """End the copies and the threads, and free the records."""
        self.ctx.wait()
        self._summariser.close()
        self.records.close()

    def expect(self, n_tokens: int) -> None:
        """So many positions are to be written: take the host memory for them meanwhile. Raises HostMemoryError."""
        ledger = self.ledger
        n_full = (ledger.n_tokens + n_tokens) // ledger.chunk
        self._shared.memory.expect(n_full - len(self.records))
        self._summariser.expect(n_full)

    def make_room(self, n_tokens: int, taken: tuple[int, int] = (0, 0)) -> Plan:
        """Blocks for the chunks that a batch begins, and host memory for those that it seals.

        taken: how many blocks, and records, other sequences in the same batch take. Raises PoolError and HostMemoryError;
        nothing has moved then.
        """
        self._land_all()  # the copies began beside the batch before this one
        ledger = self.ledger
        if ledger.n_tokens % ledger.chunk and ledger.n_tokens % ledger.chunk + n_tokens < ledger.chunk:
            return _NOTHING  # most tokens go on in their chunk
        n_new = ledger.new_chunks(n_tokens)
        if n_new and n_new + taken[0] > ledger.n_free:
            self._bring_rest()
        plan = make_room(ledger, n_new + taken[0]) if n_new else _NOTHING
        n_full = (ledger.n_tokens + n_tokens) // ledger.chunk
        if n_full > ledger.n_sealed:
            self._shared.memory.reserve(n_full - ledger.n_sealed + taken[1])
            self._summariser.reserve(n_full)
        self.apply(plan)
        return plan

    def fitting(self, n_tokens: int) -> int:
        """Of so many tokens to be decoded at once, those for which no more chunks leave than for the first alone."""
        ledger = self.ledger
        n_new = max(ledger.n_free, ledger.new_chunks(1))
        return min(n_tokens, (ledger.n_chunks + n_new) * ledger.chunk - ledger.n_tokens)

    @property
    def in_motion(self) -> bool:
        """Whether the next steps change what is resident."""
        return bool(self.landing or self.todo[1])

    def computing(self, n_tokens: int) -> None:
        """A batch is being computed: go on with a plan that is spread over steps."""
        if self.todo[1]:
            self._fly(self.ledger.new_chunks(n_tokens))

    def written(self, n_tokens: int) -> None:
        """Its first n_tokens stand: begin to write back the chunks that are full then; they are free to drop."""
        n_earlier, n_sealed = len(self._reads), self.ledger.n_sealed
        self.ledger.write(n_tokens)
        if self.ledger.n_sealed > n_sealed:
            self._seal()
        if n_earlier:
            self._arrived(n_earlier)

    @property
    def n_whole(self) -> int:
        """Chunks 0 .. n_whole - 1 are sealed, their records whole, and their summaries made or being made."""
        return self._reads[0][0] if self._reads else self.ledger.n_sealed

    @property
    def summaries(self) -> Summaries | None:
        """Of the keys of sealed chunks, None if the scorer wants none. The last ones may still be being made."""
        return self._summariser.summaries

    @property
    def summarising(self) -> list[Future[None]]:
        """Summaries that are being made."""
        return self._summariser.pending

    def summarise(self, kind: str | None) -> None:
        """Keep summaries of this kind from now on, beginning with the records that are there. None: keep none.

        Raises UnsupportedError (the keys of this model are of another form) and HostMemoryError.
        """
        self.wait_stored()
        self._summariser.use(kind, [int(c) for c in np.flatnonzero(self.ledger.stored)])

    def _seal(self) -> None:
        for chunk in self.ledger.to_store():
            self._reads.append((chunk, self.ctx.begin_read(chunk, self.records.put(chunk))))
            self.ledger.mark_stored(chunk)
            self.n_stored += 1

    def _arrived(self, n: int) -> None:
        """The first n records that are being written back are needed whole: wait for them, and have them summarised."""
        for _ in range(n):
            chunk, ticket = self._reads[0]
            self.ctx.wait(ticket)
            self._summariser.begin(chunk + 1)
            self._reads.popleft()  # last: should this be cut off, it is done again
        self._summariser.collect()

    def settle(self) -> None:
        """Finish all that is under way: records are whole and summarised, no chunk is in flight."""
        self._bring_rest()
        self.wait_stored()

    def wait_stored(self) -> None:
        """Wait until all records are whole, and summarised."""
        self._arrived(len(self._reads))
        self._summariser.finish()

    #
    # moves
    #

    def apply(self, plan: Plan) -> None:
        """A plan, whole: drops first, then page-ins. The next batch sees it."""
        for i, chunks in plan.taken:
            for chunk in chunks:
                self._shared.pagers[i]._drop(chunk)  # noqa: SLF001 (another one of these)
        for chunk in plan.drops:
            self._drop(chunk)
        for chunk in plan.page_ins:
            self._begin(chunk)
        if plan.page_ins:
            self._land_all()

    def _drop(self, chunk: int) -> None:
        self.ledger.drop(chunk)
        self.ctx.drop(chunk)
        self.n_out += 1

    def _begin(self, chunk: int) -> None:
        record = self.records.get(chunk)  # first: one that was damaged is said to be before anything moved
        self.ledger.begin_page_in(chunk)
        self.landing[chunk] = -1  # before it is: reconcile() looks for it here
        self.landing[chunk] = self.ctx.begin_page_in(chunk, record)

    def _land_all(self) -> None:
        """What is on its way in is resident from the next batch on, which waits for its bytes."""
        for chunk in list(self.landing):
            self._commit(chunk)

    def _commit(self, chunk: int) -> None:
        self.ctx.commit(chunk)
        self.ledger.commit_page_in(chunk)
        del self.landing[chunk]
        self.n_in += 1

    def _fly(self, n_taken: int = 0) -> None:
        """Begin to bring in what comes next of a plan that is spread over steps, and drop what the flight after it takes
        the place of: a copy into a block that the batch under way does not use need not wait for it. What comes lands in a
        masked block, and is seen by the next step. n_taken: free blocks that the batch does use, for new chunks.
        """
        drops, page_ins = self.todo
        n = max(1, FLIGHT_BYTES // self.records.record_bytes)
        n_kept = 1 if drops else 0  # for the chunk that begins next
        for _ in range(min(n, len(page_ins), self.ledger.n_free - n_taken - n_kept)):
            self._begin(page_ins.popleft())
        evictable, n_free = self.ledger.evictable(), self.ledger.n_free - n_taken
        while drops and n_free <= min(n, len(page_ins)):
            chunk = drops.popleft()
            if evictable[chunk]:
                self._drop(chunk)
                n_free += 1
        if n_free == 0:
            page_ins.clear()  # a new chunk took the block: the coldest of the plan stays out

    def _bring_rest(self) -> None:
        """All that is left of a plan that is spread over steps."""
        while self.landing or self.todo[1]:
            self._land_all()
            self._fly()
        self.todo[0].clear()

    def cut_short(self) -> None:
        """No more of a plan that is spread over steps than what is on its way in already."""
        self._land_all()
        for todo in self.todo:
            todo.clear()

    #
    # relevance
    #

    def reselect(self, scores: Scores, n_free: int, n_most: int | None = None, *, spread: bool = False) -> Plan:
        """Make the chunks of the highest scores (n,) resident, NaN: no candidate. n_free: blocks to leave free. n_most: how many
        come in at most. spread: over as many steps as it takes for none of them to wait.
        """
        self.cut_short()
        self.ledger.rate(scores)
        plan = reselect(self.ledger, n_free, n_most)
        if spread:
            self.todo[0].extend(plan.drops)
            self.todo[1].extend(plan.page_ins)
            self._fly()
        else:
            self.apply(plan)
        return plan

    #
    # the sequence
    #

    def rolled_back(self, n_tokens: int) -> Plan:
        """Positions from n_tokens on were removed from the cache: forget them, and bring back what is the tail now.

        A chunk that is cut through comes back whole from its record, and is cut; it is sealed anew when it is full.
        Returns what moved.
        """
        ledger = self.ledger
        self.wait_stored()
        cut, rest = divmod(n_tokens, ledger.chunk)
        whole = Plan()
        if rest and ledger.state_of(cut) == State.OUT:
            ledger.rollback((cut + 1) * ledger.chunk)
            whole = bring_in(ledger, [cut])
            self.apply(whole)
            self.ctx.attn_seq_rm(n_tokens, -1)
        ledger.rollback(n_tokens)
        self.records.forget(cut)
        self._summariser.truncate(cut)
        tail = bring_in(ledger, range(max(0, ledger.n_chunks - ledger.n_tail), ledger.n_chunks))
        self.apply(tail)
        return Plan(whole.drops + tail.drops, whole.page_ins + tail.page_ins)

    def clear(self) -> None:
        """Forget the sequence; pins stay. The context is cleared already."""
        self.ctx.wait()
        self._reads.clear()
        self._summariser.give_up()
        self._forget_flights()
        self.ledger.clear()
        self.records.forget(0)
        self._summariser.truncate(0)
        self.n_out = self.n_in = self.n_stored = 0

    def reconcile(self, n_tokens: int) -> None:
        """After a step that was cut off at n_tokens positions: make the pool what the ledger says, and seal."""
        ledger = self.ledger
        if ledger.n_tokens > n_tokens:
            self._cancel_flights()
        self._mend_flights()
        if ledger.n_tokens < n_tokens:
            ledger.write(n_tokens - ledger.n_tokens)
        for chunk in held(self.ctx).keys() - resident(self.ledger):
            self.ctx.drop(chunk)
        if ledger.n_tokens > n_tokens:
            self.rolled_back(n_tokens)
        for chunk in resident(self.ledger) - held(self.ctx).keys():
            self.ctx.page_in(chunk, self.records.get(chunk))
        self._seal()
        self._summariser.give_up()
        self._summariser.begin(self.n_whole)

    def _mend_flights(self) -> None:
        """What is on its way in stays so; one chunk at most was cut off as it set out, or as it landed."""
        there = held(self.ctx)
        for chunk in [c for c in self.landing if c in there]:
            if self.ledger.state_of(chunk) == State.IN_FLIGHT:
                self.ledger.commit_page_in(chunk)
            del self.landing[chunk]
        while len(self.landing) > n_landing(self.ctx):
            self.landing.popitem()  # the last one
        for flying in np.flatnonzero(self.ledger.state == State.IN_FLIGHT):
            if int(flying) not in self.landing:
                self.ledger.abort_page_in(int(flying))

    def _cancel_flights(self) -> None:
        for flying in self.landing:
            with suppress(PoolError):  # it is there already, or never began
                self.ctx.cancel(flying)
        self._forget_flights()

    def _forget_flights(self) -> None:
        self.landing.clear()
        for todo in self.todo:
            todo.clear()
        for flying in np.flatnonzero(self.ledger.state == State.IN_FLIGHT):
            self.ledger.abort_page_in(int(flying))

    #
    # chunks
    #

    def loaded(self) -> None:
        """A sequence was put back: begin to summarise its chunks."""
        if self.summaries is not None:
            self.records.check_ahead()
            self._summariser.reserve(self.ledger.n_sealed)
            self._summariser.begin(self.ledger.n_sealed)

    def page_in(self, chunk: int) -> None:
        """Bring a chunk back, at the cost of the coldest one."""
        self._check(chunk)
        self.settle()
        self.apply(bring_in(self.ledger, [chunk]))
        self.ledger.unrate(chunk)  # who asks for it wants it to stay

    def page_in_all(self) -> None:
        """Bring all chunks back. Raises PoolError."""
        self.settle()
        self.apply(bring_in(self.ledger, range(self.ledger.n_chunks)))

    def confine(self, n_pool: int) -> None:
        """Use the blocks of n_pool positions only, for all sequences: until it is called again, all is as in such a pool."""
        self._shared.blocks.n = n_pool // self.ledger.chunk

    def page_out(self, chunk: int) -> None:
        """Drop a chunk from the pool."""
        self._check(chunk)
        self.settle()
        if self.ledger.state_of(chunk) == State.OUT:
            return
        if not self.ledger.evictable()[chunk]:
            msg = f"chunk {chunk} cannot leave the pool: it is a sink, in the tail, pinned or still being written"
            raise PoolError(msg)
        self.apply(Plan(drops=(chunk,)))

    def pin(self, start: int, end: int) -> None:
        """Keep the chunks of positions [start, end), bringing back those that are out."""
        ledger, blocks = self.ledger, self._shared.blocks
        chunks = pinned_chunks([(start, end)], ledger.chunk)
        more = n_pinned(ledger.pins | chunks, ledger.n_sinks) - n_pinned(ledger.pins, ledger.n_sinks)
        n, n_pool = self._shared.n_pinned() + more, blocks.n * ledger.chunk
        floor = pool_floor(ledger.chunk, self._min_batch, ledger.n_sinks, ledger.n_tail, n, len(blocks.ledgers))
        if floor > n_pool:
            msg = (
                f"pinning {start}:{end} makes {n} pinned chunks, for which a pool of {floor} tokens is needed;"
                f" this one has {n_pool}: use a larger pool or pin less"
            )
            raise PoolError(msg)
        self.settle()
        self.apply(bring_in(ledger, sorted(c for c in chunks if c < ledger.n_chunks)))
        ledger.pins |= chunks

    def unpin(self, start: int, end: int) -> None:
        """Let the chunks of positions [start, end) be evicted again."""
        self.ledger.pins -= pinned_chunks([(start, end)], self.ledger.chunk)

    def _check(self, chunk: int) -> None:
        ledger = self.ledger
        if not 0 <= chunk < ledger.n_chunks:
            msg = f"there is no chunk {chunk}: the sequence has {ledger.n_chunks} of {ledger.chunk} tokens"
            raise UsageError(msg)

    def residency(self) -> Residency:
        """Where every chunk is now."""
        return look(self.ledger, self.ctx)

    def check_integrity(self) -> None:
        """Raise LedgerError unless ledger, host store and native pool agree."""
        compare(self.ledger, self.records, self.ctx)
