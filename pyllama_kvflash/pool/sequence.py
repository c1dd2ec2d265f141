"""A sequence in a pool: its tokens, and the residency of its chunks.

`step.advance` decodes a batch. Between batches the selector scores the chunks and changes the pool. If a step is cut
off, the next one repairs the state first.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np

from pyllama_kvflash.errors import NativeError, PoolError, UnsupportedError, UsageError
from pyllama_kvflash.events import Event, Paged, Warn
from pyllama_kvflash.native import Context, StateBytes, Tokens
from pyllama_kvflash.options import Options, check_span
from pyllama_kvflash.policy import UNSCORED, Plan, Queries, Scorer
from pyllama_kvflash.policy.scorers import Floats
from pyllama_kvflash.pool.exact import ExactReader
from pyllama_kvflash.pool.guests import coarse_bytes
from pyllama_kvflash.pool.pager import Pager
from pyllama_kvflash.pool.residency import Residency
from pyllama_kvflash.pool.selector import Selector
from pyllama_kvflash.pool.shared import Shared


class PooledSequence:
    """One sequence of up to n_ctx positions. Without a pool (`pager` is None) it is a sequence of the full cache.

    peers: all sequences of the context, by number.
    history: the tokens written so far.
    pending: the newest token, which is not decoded yet, or None.
    opens_until: the position where the lossless opening of an answer ends, and fast mode begins.
    n_exact: how many positions, from the first on, have rows that are known to equal the full cache's.
    whole: whether the trial under way is complete: none of its steps was cut off.
    consistent: False while a step is under way, and after one was cut off.
    checking: whether an exact batch runs while the pool computes.
    passing: whether an exact pass is between two batches, and the pool does not have the pass's rows yet.
    holder: the mark of the last caller that took or changed the sequence; see engine.guard.
    """

    def __init__(
        self,
        ctx: Context,
        options: Options,
        peers: list[Self],
        shared: Shared | None,
        scorer: Scorer | None,
        exact: ExactReader | None = None,
    ) -> None:
        """ctx: this sequence's view of the context.
        peers: a list of the sequences made before; this sequence appends itself.
        shared: what the pool's sequences share. scorer: this sequence's scorer. Both None: no pool.
        exact: reads prompts that the pool cannot hold; None: the pool reads them.
        """
        self.seq = len(peers)
        self.peers = peers
        peers.append(self)
        self.ctx = ctx
        self.options = options
        held = ctx.kv_bytes()
        self.recurrent = held.recurrent > 0
        self.stateful = held.recurrent + held.swa > 0  # it has state outside chunks
        self.history = array("i")
        self.pending: int | None = None
        self.consistent = True
        self.passing = self.whole = self.checking = False
        self.holder: object = None
        self.exact = exact
        self.n_exact = self.opens_until = 0
        self._arriving: int | None = None  # n_tokens after an exact batch that the pool does not have yet
        self._state: StateBytes | None = None  # the state outside chunks, before the trial under way; None: no trial
        self.warnings: tuple[str, ...] = ()
        self._in_transit: tuple[int, int] | None = None  # (position, token) between history and pending
        self._closed = False
        self.pager: Pager | None = None
        self.selector: Selector | None = None
        if shared is not None and scorer is not None:
            self._page(shared, scorer)

    def _page(self, shared: Shared, scorer: Scorer) -> None:
        try:
            self.pager = Pager(self.ctx, self.options, shared, scorer.summary)
        except UnsupportedError as err:
            self.warnings = (f"policy {scorer.name} cannot score this model: {err}; using lru",)
            self.pager = Pager(self.ctx, self.options, shared, None)
        else:
            if scorer.name not in UNSCORED:
                self.selector = Selector(self.ctx, self.pager, scorer, self.options, goes_back=not self.recurrent)

    def close(self) -> None:
        """Wait for the copies, and end the threads. Harmless when called again."""
        if self._closed:
            return
        self._closed = True
        if self.exact is not None:
            self.exact.finish()  # it writes to the records
        if self.selector is not None:
            self.selector.close()
        if self.pager is not None:
            self.pager.close()

    @property
    def n_tokens(self) -> int:
        """Positions written so far."""
        return len(self.history)

    @property
    def tokens(self) -> Tokens:
        """The tokens written so far, (n_tokens,) int32, a copy."""
        return np.array(self.history, np.int32)

    @property
    def paged(self) -> Pager:
        """The pager. Raises UsageError without a pool."""
        if self.pager is None:
            msg = "there is no pool: the full cache is in use"
            raise UsageError(msg)
        return self.pager

    @property
    def reads_exactly(self) -> ExactReader:
        """The reader of exact passes. Raises UsageError if prompts are read through the pool."""
        if self.exact is None:
            msg = "prompts are read through the pool: open the model with `prefill` exact"
            raise UsageError(msg)
        return self.exact

    @property
    def resident_bytes(self) -> int:
        """Device bytes of full-attention KV: the pool, the codes of all sequences and the panes, or the whole context."""
        codes = coarse_bytes(self.pager.shared.guests) if self.pager else 0
        return self.ctx.kv_bytes().attn + codes + (self.exact.n_bytes if self.exact else 0)

    @property
    def host_bytes(self) -> int:
        """Host bytes allocated for the records of all sequences."""
        return self.pager.shared.memory.held_bytes if self.pager else 0

    #
    # a step
    #

    def extend(self, tokens: Tokens) -> None:
        """Append decoded tokens to the history. The pending token, if there is one, is tokens[0]. tokens: (n,) int32."""
        self._in_transit = None if self.pending is None else (len(self.history), self.pending)
        self.pending = None
        self.history.frombytes(tokens.tobytes())
        self._in_transit = None

    @contextmanager
    def step(self, *, others: bool = True) -> Iterator[None]:
        """Guard a change of the sequence or of its residency. If the change is cut off, the next step first
        repairs the sequence. others: see recover().
        """
        self.recover(others=others)
        self.consistent = False
        yield
        self.consistent = True

    def append(self, n: int) -> None:
        """Record that an exact batch has computed n more positions, which are about to be kept.

        If the step is cut off after this call, recovery completes it instead of undoing it.
        """
        self._arriving = self.n_tokens + n
        self.paged.ledger.append(n)

    def arrive(self) -> None:
        """After an exact batch, bring the pool to the batch's last position."""
        self._undo_trial()
        if self._arriving == self.n_tokens and self.exact is not None:
            self.exact.hand_over(self.ctx, self.n_tokens)
            self.paged.arrive()
        self._arriving = None

    def begin_trial(self, n: int, *, beside: bool = False) -> Plan:
        """Begin a trial: up to n tokens may be decoded through the pool after the last position. recover() undoes the trial, except
        for the evictions that made room for it. Returns these evictions.

        During a trial, exact batches may extend the sequence, and other sequences continue. beside: another sequence is being
        checked; its trial cannot be ended to make room. Raises PoolError and HostMemoryError.
        """
        self.recover(others=False)
        if (ledger := self.paged.ledger).new_chunks(n) > ledger.blocks.n_spare:
            if beside:
                msg = "the trials of all sequences do not fit the pool together"
                raise PoolError(msg)
            self.recover()
        if ledger.lacks_protected:  # the last batch was exact, and its settle_in() was cut off
            self.settle_in()
        self.consistent = False
        self.paged.wait_stored()
        plan = self.paged.make_room(n, seals=False)
        ledger.try_out(n)
        if self.stateful:
            self.reads_exactly.take_over(self.ctx, self.n_tokens)  # copy the state: the trial changes the pool's
        # a window can be rolled back, unless other sequences share its cells and have overwritten some
        saves = self.recurrent or (self.stateful and len(self.peers) > 1)
        self._state = self.ctx.save_partial() if saves else b""
        return plan

    @property
    def trying(self) -> bool:
        """Whether a trial is under way."""
        return self._state is not None

    @property
    def steady(self) -> bool:
        """Whether other sequences may continue without a repair of this one: it is consistent, being checked, or in a complete
        trial.
        """
        return self.consistent or self.checking or (self.trying and self.whole)

    def _undo_trial(self) -> None:
        """Remove the tokens that the trial has decoded. Harmless without a trial."""
        if self._state is not None:
            self._go_back(self.n_tokens, self._state)
        self._state, self.whole = None, False
        if self.pager:
            self.pager.ledger.try_out(0)

    def _go_back(self, n_tokens: int, state: StateBytes) -> None:
        """Roll the context back to its first n_tokens positions. state: the state outside chunks at that position; empty if the
        memory can be rolled back without it.
        """
        if state:
            self.ctx.restore_partial(state, n_tokens)
        else:
            self.ctx.seq_rm(n_tokens)

    def seen_exactly(self, start: int, n: int, state: StateBytes) -> Floats:
        """Return the logits, (n, n_vocab) float32, of n tokens from position `start` on. Each token is computed against all
        positions before it. Changes nothing.

        state: the result of save_partial() at `start`. Raises Interrupted, SnapshotError and NativeError.
        """
        self.recover()
        records, tokens = self.paged.copies(start, n), np.array(self.history[start : start + n], np.int32)
        return self.reads_exactly.look(self.ctx, tokens, start, records, state)

    def attended(self, n_query: int) -> Floats:
        """Return the attention of the last n_query tokens of an exact batch. See policy.View.mass."""
        return self.reads_exactly.attended(self.ctx, n_query, self.paged.ledger.n_chunks)

    def settle_in(self) -> Paged | None:
        """After an exact pass, page in the sinks, the tail, the pinned chunks, and then the most recent chunks."""
        with self.step(others=False):
            plan = self.paged.settle_in()
        return Paged(self.n_tokens, plan.drops, plan.page_ins) if plan else None

    def lay_out(self) -> None:
        """Sort the chunks in the pool by position. Call it after an exact pass, since the chunks' records must be complete."""
        with self.step():
            self.paged.lay_out()

    def recover(self, *, others: bool = True) -> None:
        """If a step was cut off, remove its leftovers from the cache, back to the last position. Ends a trial.

        others: also end the trials of other sequences. These trials end in any case if a step of any sequence was cut off.
        Raises NativeError if the model's memory cannot be rolled back.
        """
        if self.consistent and len(self.peers) == 1:
            return  # most steps
        cut_off, repaired = [s for s in self.peers if not s.consistent], self.peers
        if not others and all(s.steady for s in cut_off):
            cut_off = repaired = [s for s in cut_off if s is self]
        if not cut_off:
            return
        for s in cut_off:
            s.passing = s.whole = s.checking = False
            try:
                s._undo_trial()  # noqa: SLF001 (a peer)
                s.ctx.seq_rm(s.n_tokens)
            except UnsupportedError:
                msg = "a batch was cut off, and this model's memory cannot be rolled back: call clear() and start again"
                raise NativeError(msg) from None
            s.forget_exactly(s.n_tokens)  # rows of rejected tokens
            s.settle_token()
        for s in repaired:  # the step may have been taking blocks from any of them
            if s.pager:
                s.pager.reconcile(s.n_tokens)
                s.arrive()
            s.consistent = True

    def settle_token(self) -> None:
        """Make the token in transit pending, unless it is in the history."""
        if self._in_transit is not None and self.n_tokens == self._in_transit[0]:
            self.pending = self._in_transit[1]
        self._in_transit = None

    #
    # going back
    #

    def clear(self) -> None:
        """Forget the sequence and its records; pins stay."""
        self.cancel_scoring()
        self.consistent = False
        self._in_transit = None
        del self.history[:]
        self.pending = None
        self.opens_until = 0
        self.forget_exactly(0)
        self.ctx.clear()
        if self.pager:
            self.pager.clear()
        self._arriving = self._state = None
        self.passing = self.whole = self.checking = False
        self.consistent = True

    def forget_exactly(self, n_tokens: int) -> None:
        """Make the exact pass forget positions from n_tokens on."""
        self.n_exact = min(self.n_exact, n_tokens)
        if self.exact is not None:
            self.exact.forget(self.seq, n_tokens)

    def rollback(self, n_tokens: int, state: StateBytes = b"") -> None:
        """Keep the first n_tokens positions. See KVSequence.rollback. state: as for rewind(). Raises UsageError and UnsupportedError."""
        self.check_kept(n_tokens)
        self.cancel_scoring()
        with self.step():
            if self.pager:
                self.pager.wait_stored()
            self.forget_exactly(n_tokens)
            pending, self.pending = self.pending, None  # first, because it follows the removed tokens
            gone = self.history[n_tokens:]
            del self.history[n_tokens:]
            try:
                self._go_back(n_tokens, state)
            except UnsupportedError:
                self.history += gone
                self.pending = pending
                raise
            if self.pager:
                self.pager.rolled_back(n_tokens)

    def check_kept(self, n_tokens: int) -> None:
        """Raise UsageError unless the sequence has n_tokens positions."""
        if not 0 <= n_tokens <= self.n_tokens:
            msg = f"cannot roll back to {n_tokens:,} positions: there are {self.n_tokens:,}"
            raise UsageError(msg)

    def take_back(self) -> tuple[int, Paged | None]:
        """Remove the last token, so that it can be decoded again. Returns the token and the moves.

        From now on the token is pending, even if this call is cut off.
        """
        n, token = self.n_tokens - 1, self.history[-1]
        with self.step():
            self.paged.wait_stored()
            self.forget_exactly(n)
            self._in_transit = n, token
            del self.history[n:]
            try:
                self.ctx.seq_rm(n)
                plan = self.paged.rolled_back(n)
            finally:
                self.settle_token()
        return token, Paged(n, plan.drops, plan.page_ins) if plan else None

    def rewind(self, n_tokens: int, state: StateBytes) -> Paged | None:
        """Go back to the first n_tokens positions. Returns the moves.

        state: the result of save_partial() at n_tokens; empty if the memory can be rolled back without it.
        """
        with self.step():
            self.paged.wait_stored()
            self.forget_exactly(n_tokens)
            self._go_back(n_tokens, state)
            del self.history[n_tokens:]
            plan = self.paged.rolled_back(n_tokens)
        return Paged(n_tokens, plan.drops, plan.page_ins) if plan else None

    def cancel_scoring(self) -> None:
        """Discard a scoring under way. Call this before the sequence changes."""
        if self.selector is not None:
            self.selector.cancel()

    #
    # relevance
    #

    def queries(self) -> Queries:
        """Return the last token's queries, (n_head, n_embd_head_k) for each pooled layer; empty without a scorer."""
        return self.selector.queries() if self.selector else []

    def reselect_now(
        self,
        reason: str,
        queries: Sequence[Queries],
        n_most: int | None = None,
        mass: Floats | None = None,
    ) -> Iterator[Event]:
        """Score the chunks and move them, at once. n_most: the most chunks to page in; None: no limit. mass: the queries' attention,
        see policy.View.
        """
        selector = self.selector
        if selector is None or not selector.needed:
            return
        with self.step():
            event = selector.now(reason, self.tokens, queries, n_most, mass)
        yield from self._warnings(selector)
        yield event

    def tick(self, n_new: int) -> list[Event]:
        """After n_new tokens were decoded, score and move chunks if the schedule says so. Returns the events."""
        selector = self.selector
        if selector is None:
            return []
        self.consistent = False
        event = selector.tick(lambda: self.tokens, self.n_tokens, n_new)
        self.consistent = True
        return [*self._warnings(selector), *([event] if event else [])] if event or selector.warnings else []

    def _warnings(self, selector: Selector) -> Iterator[Event]:
        while selector.warnings:
            yield Warn(selector.warnings.pop(0))

    #
    # residency: the calls below need a pool, and raise UsageError without one
    #

    def residency(self) -> Residency:
        """Return where every chunk is now."""
        self.recover()
        return self.paged.residency()

    def pin(self, start: int, end: int) -> None:
        """Keep positions [start, end) on the device. See KVSequence.pin."""
        check_span(start, end, self.options.n_ctx)
        with self.step():
            self.paged.pin(start, end)

    def page_in(self, chunk: int) -> None:
        """Page in a chunk, in place of the coldest one. Raises PoolError."""
        with self.step():
            self.paged.page_in(chunk)

    def page_out(self, chunk: int) -> None:
        """Evict a chunk. Raises PoolError if the chunk is protected."""
        with self.step():
            self.paged.page_out(chunk)

    def check_integrity(self) -> None:
        """Raise LedgerError unless ledger, host store and native pool agree."""
        with self.step():
            self.paged.wait_stored()
        self.paged.check_integrity()
