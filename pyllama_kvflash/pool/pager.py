"""The pager: applies decisions of `policy` to the native pool and the host store, and keeps both consistent with the ledger.

The pager waits for a copy only if the computation needs the copy. A full chunk is written back while the next batch is computed,
and then summarised in a thread. `moves` brings chunks in and drops them.
"""

from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pyllama_kvflash.errors import DeviceLostError, PoolError, UsageError
from pyllama_kvflash.native import Context, Keys, Summaries
from pyllama_kvflash.options import Options, cores
from pyllama_kvflash.policy import Ledger, Plan, Scores, bring_in, make_room, reselect
from pyllama_kvflash.policy.sizing import SINKS, n_pinned, pinned_chunks
from pyllama_kvflash.pool.guests import GuestRoom, form_of
from pyllama_kvflash.pool.host_memory import Record
from pyllama_kvflash.pool.host_store import HostStore
from pyllama_kvflash.pool.moves import Moves
from pyllama_kvflash.pool.residency import Residency, compare, held, look, resident
from pyllama_kvflash.pool.shared import Shared
from pyllama_kvflash.pool.summariser import Summariser

_NOTHING = Plan()
_MOST_READERS = 32  # threads that read records; fewer already use all of a machine's memory bandwidth


class Pager:
    """The ledger and host store of one sequence. The pager asks `policy` which chunks move in the shared pool.

    After a step was cut off, reconcile() makes the pool agree with the ledger. n_stored counts the records written since the
    last clear().
    """

    def __init__(self, ctx: Context, options: Options, shared: Shared, summary: str | None) -> None:
        """ctx: this sequence's view of the context. Make the pagers of a pool in the order of their sequences.
        summary: the kind of key summaries that the scorer needs of sealed chunks; None: the scorer needs none.

        Raises UnsupportedError if the model's keys cannot be summarised.
        """
        self.n_stored = 0
        self.records = HostStore(shared.memory, min(_MOST_READERS, cores()))
        self.ctx = ctx
        self.shared = shared
        self._reads: deque[tuple[int, int]] = deque()  # chunks being written back, and their tickets
        self._layers = ctx.tapped()
        self._summariser = Summariser(self._layers, options.chunk, self.records.get, options.n_threads or 1)
        self._summariser.use(summary, ())
        self.keys = Keys(self._layers, options.chunk, self.records.get)
        self._min_batch = options.n_batch
        self.ledger = Ledger(shared.blocks, options.chunk, n_sinks=SINKS, n_tail=options.tail)
        self.ledger.pins |= pinned_chunks(options.pins, options.chunk)
        self.moves = Moves(ctx, self.ledger, self.records)
        shared.moves.append(self.moves)
        self.guests: GuestRoom | None = None
        if (form := form_of(ctx)) is not None:
            chooses, n_threads = options.policy == "fresh", options.n_threads or 1
            self.guests = GuestRoom(ctx, self.ledger, self.records.get, form, n_threads, chooses=chooses)
            shared.guests.append(self.guests)

    @property
    def n_batch(self) -> int:
        """The largest batch that the pool holds together with the sinks, tails and pins."""
        return self.shared.shape().largest_batch(self.shared.n_pool)

    #
    # a batch
    #

    def close(self) -> None:
        """Wait for the copies, end the threads, and free the records."""
        with suppress(DeviceLostError):  # the copies of a lost device have ended
            self.ctx.wait()
        self._summariser.close()
        if self.guests:
            self.guests.close()
        self.records.close()

    def check_limit(self, n_tokens: int) -> None:
        """Raise HostMemoryError if a text of n_tokens, in place of this one, would exceed the limit of host memory."""
        self.shared.memory.check_limit(n_tokens // self.ledger.chunk - len(self.records))

    def expect(self, n_tokens: int) -> None:
        """Announce n_tokens more positions: threads allocate host memory for them. Raises HostMemoryError."""
        n_full = self.ledger.n_sealed + self.ledger.seals(n_tokens)
        self.shared.memory.expect(n_full - len(self.records))
        self._summariser.expect(n_full)

    def make_room(self, n_tokens: int, taken: tuple[int, int] = (0, 0), *, seals: bool = True) -> Plan:
        """Free blocks for the chunks that a batch begins, and reserve host memory for the chunks that it seals.

        n_tokens: this sequence's tokens. taken: the numbers of blocks and of records that the batch's other sequences take. seals:
        False if the batch seals no chunk. Returns the moves. Raises PoolError and HostMemoryError; nothing has moved then.
        """
        ledger = self.ledger
        last = ledger.n_tokens % ledger.chunk  # positions of the chunk that is being written
        if last and last + n_tokens < ledger.chunk and not self._uncovered:
            return _NOTHING  # most tokens neither begin nor fill a chunk
        n_new = ledger.new_chunks(n_tokens)
        plan = make_room(ledger, n_new + taken[0]) if n_new else _NOTHING
        if n_sealing := ledger.seals(n_tokens) * seals:
            self.shared.memory.reserve(n_sealing + taken[1])
            self._summariser.reserve(ledger.n_sealed + n_sealing)
        self.apply(plan)
        left = self.host(n_new + taken[0])
        return replace(plan, drops=plan.drops + left.drops)

    def prepare(self, n_tokens: int, *, passing: bool = False) -> tuple[Plan, list[Record]]:
        """Prepare to compute n_tokens outside the pool.

        passing: whether the tokens before them were also computed outside, and are not in the pool yet.

        Returns the moves, and the records (record_bytes,) uint8 of all chunks up to the last of these tokens. The records of
        earlier positions are complete, or will be. The caller writes the rest. Raises PoolError and HostMemoryError; nothing
        has moved then.
        """
        self._arrived(len(self._reads))  # summaries of the previous batch are made during this one
        ledger = self.ledger
        end, first = ledger.n_tokens + n_tokens, ledger.n_sealed
        plan = make_room(ledger, 1) if ledger.needs_block else _NOTHING
        n_chunks = -(-end // ledger.chunk)
        self.shared.memory.reserve(max(0, n_chunks - len(self.records)))
        self._summariser.reserve(end // ledger.chunk)
        self.apply(plan)
        records = self.records.first(first)
        for c in range(first, n_chunks):
            begins = c not in self.records
            records.append(self.records.put(c))
            if begins and (c + 1) * ledger.chunk > end:
                records[-1][:] = 0  # the pool gets the whole record, and attention on a GPU multiplies masked NaN by 0
        if ledger.n_tokens % ledger.chunk and not passing:
            self.ctx.read(first, records[first])
        return plan, records

    def passed(self, n_tokens: int) -> None:
        """Begin to summarise the first n_tokens positions, which were computed outside the pool. Their records must be complete."""
        self._summariser.begin(n_tokens // self.ledger.chunk)
        self._summariser.collect()

    def copies(self, start: int, n_tokens: int) -> list[Record]:
        """Return the records of all chunks up to position start + n_tokens - 1. From the chunk of `start` on, they are copies."""
        self.wait_stored()
        first, end = start // self.ledger.chunk, -(-(start + n_tokens) // self.ledger.chunk)
        res = self.records.first(first)
        for chunk in range(first, end):
            res.append(np.empty(self.records.record_bytes, np.uint8))
            if chunk < self.ledger.n_sealed:
                res[-1][:] = self.records.get(chunk)
            else:
                self.ctx.read(chunk, res[-1])
        return res

    def arrive(self) -> None:
        """After positions were appended to the ledger, copy the chunk being written from its record into the pool.

        Harmless when repeated.
        """
        ledger = self.ledger
        self.moves.shed()  # the chunk that was being written may be full now
        if ledger.n_tokens % ledger.chunk:
            self.moves.refill([ledger.n_chunks - 1])
        if ledger.n_chunks in self.records:
            self.records.forget(ledger.n_chunks)
        self.n_stored = max(self.n_stored, ledger.n_sealed)
        self._summariser.begin(ledger.n_sealed)

    def settle_in(self) -> Plan:
        """Page in the protected and the most recent chunks, up to the sequence's share of the pool. Returns the moves."""
        self.wait_stored()
        ledger = self.ledger
        if self.guests and self.guests.chooses:
            always = bring_in(ledger, np.flatnonzero(ledger.protected()).tolist())
            self.apply(always)
            left = self.host(0)
            return Plan(always.drops + left.drops, always.page_ins)
        more = min(ledger.n_chunks, ledger.n_share) - ledger.n_held
        self.apply(
            make_room(ledger, max(0, min(more, ledger.blocks.n_room)))
        )  # trials of other sequences may hold the rest
        must = np.flatnonzero(ledger.protected())
        n_missing = int(np.count_nonzero(~ledger.resident[must]))
        recent = reselect(ledger, 1 + n_missing)
        recent = Plan(recent.drops, recent.page_ins[::-1])  # oldest first, as if they were written now
        self.apply(recent)
        always = bring_in(ledger, must.tolist())
        self.apply(always)
        return Plan(recent.drops + always.drops, recent.page_ins + always.page_ins)

    def lay_out(self) -> None:
        """Sort the chunks in the pool, so that results do not depend on the order of earlier moves."""
        self.wait_stored()
        if self.guests and self.guests.chooses:
            self.guests.resize(0)
        there = list(held(self.ctx))  # in the order of blocks
        if there != sorted(there) or self.ctx.block_of(there[-1]) != len(there) - 1:
            self.moves.refill(there)
        self.host(0)

    def host(self, n_free: int) -> Plan:
        """If a chunk is out, make codes of all sealed chunks. If layers choose guests, also evict the chunks that are not
        protected, and give guests all free blocks of the sequence's share except n_free. Returns the evictions.
        """
        guests, ledger = self.guests, self.ledger
        if guests is None or np.all(ledger.resident):
            return _NOTHING
        self.wait_stored()
        guests.cover(ledger.n_sealed)
        if not guests.chooses:
            return _NOTHING
        left = Plan(tuple(np.flatnonzero(ledger.evictable()).tolist()))
        self.apply(left)
        n = min(ledger.n_free, ledger.n_share - ledger.n_held) - n_free
        if n > 0:
            guests.resize(ledger.n_guests + n)
        return left

    @property
    def _uncovered(self) -> bool:
        """Whether a chunk that is out has no codes, so that no layer could attend to it. False if the pool has no codes."""
        if self.guests is None:
            return False
        return not np.all(self.ledger.resident[self.guests.native.info().n // self.ledger.chunk :])

    def fitting(self, n_tokens: int) -> int:
        """Return how many of n_tokens fit a batch that evicts no more chunks than its first token alone would."""
        ledger = self.ledger
        n_new = max(ledger.n_free, ledger.new_chunks(1))
        return min(n_tokens, (ledger.n_chunks + n_new) * ledger.chunk - ledger.n_tokens)

    def written(self, n_tokens: int) -> None:
        """Record that the first n_tokens of a batch are accepted. Begin to write back full chunks, which may be evicted from now on."""
        n_earlier, n_sealed = len(self._reads), self.ledger.n_sealed
        self.ledger.write(n_tokens)
        if self.ledger.n_sealed > n_sealed:
            self._seal()
        if n_earlier:
            self._arrived(n_earlier)

    @property
    def n_whole(self) -> int:
        """How many chunks, from the first on, have complete records. Their summaries are made, or being made."""
        return self._reads[0][0] if self._reads else self.ledger.n_sealed

    @property
    def summaries(self) -> Summaries | None:
        """Summaries of the keys of sealed chunks; None if the scorer needs none. The last summaries may still be unfinished."""
        return self._summariser.summaries

    @property
    def summarising(self) -> list[Future[None]]:
        """The summaries that are being made."""
        return self._summariser.pending

    def summarise(self, kind: str | None) -> None:
        """Keep summaries of this kind from now on, and summarise the stored records at once. None: keep none.

        Raises UnsupportedError (the model's keys have an unsupported form) and HostMemoryError.
        """
        self.wait_stored()
        self._summariser.use(kind, [int(c) for c in np.flatnonzero(self.ledger.stored)])

    def _seal(self) -> None:
        for chunk in self.ledger.to_store():
            self._reads.append((chunk, self.ctx.begin_read(chunk, self.records.put(chunk))))
            self.ledger.mark_stored(chunk)
            self.n_stored += 1

    def _arrived(self, n: int) -> None:
        """Wait for the first n records that are being written back, and begin to summarise them."""
        for _ in range(n):
            chunk, ticket = self._reads[0]
            self.ctx.wait(ticket)
            self._summariser.begin(chunk + 1)
            self._reads.popleft()  # last, so that an interrupted iteration is repeated
        self._summariser.collect()

    def wait_stored(self) -> None:
        """Wait until all records are complete and summarised."""
        self._arrived(len(self._reads))
        self._summariser.finish()

    #
    # moves
    #

    def apply(self, plan: Plan) -> None:
        """Carry out a whole plan: drops first, then page-ins. The next batch sees the result."""
        for i, chunks in plan.taken:
            for chunk in chunks:
                self.shared.moves[i].drop(chunk)
        for chunk in plan.drops:
            self.moves.drop(chunk)
        for i, n in plan.guests:
            self.shared.guests[i].give_up(n)
        self.moves.bring(plan.page_ins)

    #
    # relevance
    #

    def reselect(self, scores: Scores, n_free: int, n_most: int | None = None) -> Plan:
        """Make the chunks with the highest scores resident. Returns the plan.

        scores: (n,) float64; NaN: not a candidate. n_free: blocks to leave free.
        n_most: the most chunks to page in; None: no limit.
        """
        self.ledger.rate(scores)
        plan = reselect(self.ledger, n_free, n_most)
        self.apply(plan)
        return plan

    #
    # the sequence
    #

    def rolled_back(self, n_tokens: int) -> Plan:
        """Forget positions from n_tokens on, which were removed from the cache, and page in the new tail.

        If n_tokens is within a chunk, that chunk is first paged in if it is out, then cut. It is sealed anew once it is full again.
        Returns all moves.
        """
        ledger = self.ledger
        self.wait_stored()
        cut, rest = divmod(n_tokens, ledger.chunk)
        whole = Plan()
        if rest and not ledger.holds(cut):
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
        """Forget the sequence, after the context was cleared. Pins stay."""
        self.ctx.wait()
        self._reads.clear()
        self._summariser.give_up()
        self.moves.clear()
        if self.guests:
            self.guests.clear()
        self.ledger.clear()
        self.records.forget(0)
        self._summariser.truncate(0)
        self.n_stored = 0

    def reconcile(self, n_tokens: int) -> None:
        """After a cut-off step that left n_tokens positions, make the pool agree with the ledger, and seal full chunks."""
        ledger = self.ledger
        if self.guests:
            self.guests.reconcile()
        if ledger.n_tokens < n_tokens:
            ledger.write(n_tokens - ledger.n_tokens)
        self.moves.shed()
        if ledger.n_tokens > n_tokens:
            self.rolled_back(n_tokens)
        self.moves.fill(resident(ledger) - held(self.ctx).keys())
        self._seal()
        self._summariser.give_up()
        self._summariser.begin(self.n_whole)

    #
    # chunks
    #

    def loaded(self) -> None:
        """Begin to summarise the chunks of a restored sequence."""
        if self.summaries is not None:
            self.records.read_ahead()
            self._summariser.reserve(self.ledger.n_sealed)
            self._summariser.begin(self.ledger.n_sealed)

    def page_in(self, chunk: int) -> None:
        """Page in a chunk, in place of the coldest one. Raises UsageError and PoolError."""
        self._check(chunk)
        self.wait_stored()
        self.apply(bring_in(self.ledger, [chunk]))
        self.ledger.unrate(chunk)  # an old score might evict it soon

    def page_in_all(self) -> None:
        """Page in all chunks. Raises PoolError."""
        self.wait_stored()
        self.apply(bring_in(self.ledger, range(self.ledger.n_chunks)))

    def page_out(self, chunk: int) -> None:
        """Evict a chunk. Raises UsageError and PoolError."""
        self._check(chunk)
        self.wait_stored()
        if not self.ledger.holds(chunk):
            return
        if not self.ledger.evictable()[chunk]:
            msg = f"chunk {chunk} cannot leave the pool: it is a sink, in the tail, pinned or still being written"
            raise PoolError(msg)
        self.apply(Plan(drops=(chunk,)))

    def pin(self, start: int, end: int) -> None:
        """Pin the chunks of positions [start, end), and page in those that are out.

        Raises PoolError, and pins nothing, if too few unpinned blocks would remain.
        """
        ledger = self.ledger
        chunks = pinned_chunks([(start, end)], ledger.chunk)
        more = n_pinned(ledger.pins | chunks, ledger.n_sinks) - n_pinned(ledger.pins, ledger.n_sinks)
        self.shared.check_pins(more, self._min_batch, f"pinning {start}:{end}")
        self.wait_stored()
        self.apply(bring_in(ledger, sorted(c for c in chunks if c < ledger.n_chunks)))
        ledger.pins |= chunks

    def unpin(self, start: int, end: int) -> None:
        """Unpin the chunks of positions [start, end)."""
        self.ledger.pins -= pinned_chunks([(start, end)], self.ledger.chunk)

    def _check(self, chunk: int) -> None:
        ledger = self.ledger
        if not 0 <= chunk < ledger.n_chunks:
            msg = f"there is no chunk {chunk:,}: the sequence has {ledger.n_chunks:,} of {ledger.chunk} tokens"
            raise UsageError(msg)

    def residency(self) -> Residency:
        """Return where every chunk is now."""
        return look(self.ledger, self.ctx, self.guests)

    def check_integrity(self) -> None:
        """Raise LedgerError unless ledger, host store and native pool agree."""
        compare(self.ledger, self.records, self.ctx)
