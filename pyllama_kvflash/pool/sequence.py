"""A sequence in a pool: which positions are written, what is resident, and what is brought back.

Each batch has the pager decide what must leave the pool and apply that, is decoded, and has the chunks stored that are
full then. Between batches the selector has all chunks scored. Whatever cuts a step off, the next one mends it first.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np

from pyllama_kvflash import native
from pyllama_kvflash.engine.loading import Loaded
from pyllama_kvflash.errors import NativeError, UnsupportedError, UsageError
from pyllama_kvflash.events import Event, Paged, Reselect, Warn
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.options import check_span
from pyllama_kvflash.policy import Queries, Scorer
from pyllama_kvflash.pool.pager import Pager, Shared
from pyllama_kvflash.pool.residency import Residency
from pyllama_kvflash.pool.selector import Selector


class PooledSequence:
    """A sequence of up to n_ctx positions in a pool that keeps n_pool positions on the device. `KVFlash` adds the text.

    Several may share a pool: `sequences` has all of them, by number.
    """

    def __init__(self, loaded: Loaded, beside: Self | None = None) -> None:
        """Use KVFlash.from_file. beside: the first one of its context."""
        self.sequences: list[Self] = beside.sequences if beside else []
        self.seq = len(self.sequences)
        self.sequences.append(self)
        self.model = loaded.model
        self.ctx = loaded.ctx.sequence(self.seq)
        self.options = loaded.options
        self.n_pool = loaded.n_pool
        self.notes = loaded.notes
        self.warnings = loaded.warnings
        self._full_bytes = loaded.full_bytes
        self._recurrent = self.ctx.kv_bytes().recurrent > 0
        self._max_batch = loaded.n_batch
        self._history = array("i")
        self._pending: int | None = None  # produced, and not yet decoded
        self._consistent = True
        self._owed: tuple[int, int] | None = None  # a token on its way between history and pending, and its position
        self._closed = False
        self._pager: Pager | None = None
        self._selector: Selector | None = None
        self._shared: Shared | None = None
        if self.n_pool is not None:
            shared = beside._shared if beside else None
            self._shared = shared or Shared(self.ctx, self.options, self.n_pool)
            self._page(loaded.scorers[self.seq], self._shared)
        if beside is None:
            for _ in range(1, self.options.n_parallel):
                type(self)(loaded, self)

    def _page(self, scorer: Scorer, shared: Shared) -> None:
        try:
            self._pager = Pager(self.ctx, self.options, shared, scorer.summary)
        except UnsupportedError as err:
            self.warnings += (f"policy {scorer.name} cannot score this model: {err}; using lru",)
            self._pager = Pager(self.ctx, self.options, shared, None)
        else:
            if scorer.name != "lru":
                self._selector = Selector(self.ctx, self._pager, scorer, self.options, goes_back=not self._recurrent)

    def close(self) -> None:
        """Free the context and the model, for all sequences. Harmless when called again."""
        for sequence in self.sequences:
            sequence._end()
        if self._shared is not None:
            self._shared.close()
        self.ctx.close()
        self.model.close()

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._selector is not None:
            self._selector.close()
        if self._pager is not None:
            self._pager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    #
    # decide, apply, decode
    #

    def _advance(self, tokens: Tokens, outputs: int = native.LAST) -> Paged | None:
        """One batch: make room, decode, seal. What moved, if anything did."""
        pos, pager = len(self._history), self._pager
        self._recover()
        self._consistent = False
        plan = pager.make_room(len(tokens)) if pager else None
        self.ctx.decode(tokens, pos, outputs)
        # a GPU computes by now: what follows takes no time of its
        self._stand(tokens)
        if pager:
            pager.computing(len(tokens))
            pager.written(len(tokens))
        self._consistent = True
        return Paged(pos, plan.drops, plan.page_ins) if plan else None

    def _steady(self, n: int) -> tuple[int, int]:
        """Of n tokens to be decoded in one batch: how many the batch may have, and how many may stand, for all to be as if
        they came one by one: the same chunks resident for each, scored and moved after the same ones.
        """
        pager, selector = self._pager, self._selector
        if pager is None:
            return n, n
        n = pager.fitting(n)
        if pager.in_motion:
            return n, 1
        return n, min(n, selector.n_steady) if selector else n

    def _advance_some(self, tokens: Tokens, judge: Iterable[tuple[int, int | None]]) -> Paged | None:
        """One batch, of whose tokens the first ones stand: judge says how many, by its logits, and which token follows them if
        that is known, as far as it comes. The others never were: the ledger does not hear of them, and no chunk is sealed
        for them.
        """
        pos, pager = len(self._history), self._pager
        self._recover()
        self._consistent = False
        plan = pager.make_room(len(tokens)) if pager else None
        self.ctx.decode(tokens, pos, native.ALL)
        if pager:
            pager.computing(len(tokens))
        n, following = 1, None
        try:
            for n, following in judge:  # noqa: B007 (the last ones are what is wanted)
                pass
        finally:
            self.ctx.keep(n)
            self._pending = None  # the first of them: now it stands, and wherever this is cut off, no token is in both
            self._history.frombytes(tokens[:n].tobytes())
            self._pending = following
            if pager:
                pager.written(n)
            self._consistent = True
        return Paged(pos, plan.drops, plan.page_ins) if plan else None

    def _advance_each(self, tokens: Mapping[int, int]) -> dict[int, Paged | None]:
        """One token of each of several sequences, in one batch."""
        self._recover()
        each = [self.sequences[i] for i in tokens]
        plans, taken = [], (0, 0)
        for s in each:
            s._consistent = False
            plans.append(s._pager.make_room(1, taken) if s._pager else None)
            if s._pager:
                full = (s.n_tokens + 1) % s.options.chunk == 0
                taken = taken[0] + s._pager.ledger.new_chunks(1), taken[1] + full
        places = [s.n_tokens for s in each]
        self.ctx.decode_each(list(tokens), places, list(tokens.values()))
        for s, token in zip(each, tokens.values(), strict=True):
            s._stand(np.array([token], np.int32))
            if s._pager:
                s._pager.computing(1)
                s._pager.written(1)
            s._consistent = True
        return {
            s.seq: Paged(pos, plan.drops, plan.page_ins) if plan else None
            for s, pos, plan in zip(each, places, plans, strict=True)
        }

    @contextmanager
    def _step(self) -> Iterator[None]:
        """A change of the sequence or of what is resident. If it is cut off, the next one begins by reconciling."""
        self._recover()
        self._consistent = False
        yield
        self._consistent = True

    def _recover(self) -> None:
        """After a step that was cut off: take what it left in the cache out again, and go on from the last position."""
        cut_off = [s for s in self.sequences if not s._consistent]
        if not cut_off:
            return
        for s in cut_off:
            try:
                s.ctx.seq_rm(s.n_tokens)
            except UnsupportedError:
                msg = "a batch was cut off, and this model's memory cannot go back: clear() and start again"
                raise NativeError(msg) from None
            s._settle_owed()
        for s in self.sequences:  # some may have been about to give up blocks
            if s._pager:
                s._pager.reconcile(s.n_tokens)
            s._consistent = True

    #
    # relevance
    #

    def queries(self) -> Queries:
        """Queries of the last token decoded, for each pooled layer (n_head, n_embd_head_k); empty without a scorer."""
        return self._selector.queries() if self._selector else []

    def _take_back(self) -> tuple[int, Paged | None]:
        """Take the last token out, to be decoded again: it is pending from now on, wherever this is cut off. It, and what moved."""
        n, token = self.n_tokens - 1, self._history[-1]
        with self._step():
            self.pager.settle()
            self._owed = n, token
            del self._history[n:]
            try:
                self.ctx.seq_rm(n)
                plan = self.pager.rolled_back(n)
            finally:
                self._settle_owed()
        return token, Paged(n, plan.drops, plan.page_ins) if plan else None

    def _stand(self, tokens: Tokens) -> None:
        """Tokens that were decoded, the pending one first if there is one, are in the history from now on."""
        self._owed = None if self._pending is None else (self.n_tokens, self._pending)
        self._pending = None
        self._history.frombytes(tokens.tobytes())
        self._owed = None

    def _settle_owed(self) -> None:
        """A token that was on its way is in the history, or else it is pending."""
        if self._owed is not None and self.n_tokens == self._owed[0]:
            self._pending = self._owed[1]
        self._owed = None

    def _rewind(self, n_tokens: int, state: bytes) -> Paged | None:
        """Back to the first n_tokens positions, with what save_partial() gave there. What moved, if anything did."""
        with self._step():
            self.pager.settle()
            if state:
                self.ctx.restore_partial(state, n_tokens)
            else:
                self.ctx.seq_rm(n_tokens)
            del self._history[n_tokens:]
            plan = self.pager.rolled_back(n_tokens)
        return Paged(n_tokens, plan.drops, plan.page_ins) if plan else None

    def _reselect(
        self, reason: str, queries: Sequence[Queries], n_next: int, n_most: int | None = None
    ) -> Iterator[Event]:
        """Score and repage at once, leaving room for n_next tokens. n_most: chunks come in at most."""
        selector = self._selector
        if selector is None or not selector.needed:
            return
        n_free = self.pager.ledger.new_chunks(n_next)
        with self._step():
            event = selector.now(reason, self.tokens, queries, max(1, n_free), n_most)
        yield from self._warnings(selector)
        yield event

    def _between(self, n_next: int) -> Iterator[Event]:
        """After a batch of a prompt, with at most n_next tokens in the next: choose the pool anew."""
        selector = self._selector
        if selector is None or not selector.needed:
            return
        with self._step():
            event = selector.batch(lambda: self.tokens, self.n_tokens, max(1, self.pager.ledger.new_chunks(n_next)))
        yield from self._warnings(selector)
        if event:
            yield event

    def _tick(self, n_new: int) -> list[Event]:
        """After a decode: what the schedule says."""
        selector = self._selector
        if selector is None:
            return []
        self._consistent = False
        event = selector.tick(lambda: self.tokens, self.n_tokens, n_new)
        self._consistent = True
        return [*self._warnings(selector), *([event] if event else [])] if event or selector.warnings else []

    def _warnings(self, selector: Selector) -> Iterator[Event]:
        while selector.warnings:
            yield Warn(selector.warnings.pop(0))

    def _cancel(self) -> None:
        """No scores of what the sequence was."""
        if self._selector is not None:
            self._selector.cancel()

    #
    # the sequence
    #

    @property
    def n_tokens(self) -> int:
        """Positions written so far."""
        return len(self._history)

    @property
    def tokens(self) -> Tokens:
        """The tokens written so far, (n_tokens,) int32, a copy."""
        return np.array(self._history, np.int32)

    @property
    def policy(self) -> str:
        """The name of the scorer at work, "full" without a pool."""
        if self._pager is None:
            return "full"
        return self._selector.scorer.name if self._selector else "lru"

    @property
    def scorer(self) -> Scorer | None:
        """The scorer at work, None with lru or the full cache."""
        return self._selector.scorer if self._selector else None

    def use(self, scorer: Scorer) -> None:
        """Have another scorer choose from now on, by the same layers. What it needs of the chunks is made from their records.

        Raises UsageError if the context was made without one (lru, full cache), UnsupportedError and HostMemoryError.
        """
        if self._selector is None:
            msg = f"policy {self.policy} has no scorer to replace: open the model with one"
            raise UsageError(msg)
        self._selector.use(scorer)

    @property
    def n_batch(self) -> int:
        """Tokens of a batch at most: what the pool holds beside its sinks, tail and pins."""
        return min(self._max_batch, self._pager.n_batch) if self._pager else self._max_batch

    def expect(self, n_tokens: int) -> None:
        """So many more tokens are to come: take the host memory for their chunks meanwhile. A hint; without it, memory is
        taken when it is needed, which may hold up a decode. Raises HostMemoryError if `host_limit` does not allow it.
        """
        if self._pager:
            self._pager.expect(n_tokens)

    def clear(self) -> None:
        """Forget the sequence and its records; pins stay."""
        self._cancel()
        self._consistent = False
        self._owed = None
        del self._history[:]
        self._pending = None
        self.ctx.clear()
        if self._pager:
            self._pager.clear()
        self._consistent = True

    def rollback(self, n_tokens: int) -> None:
        """Keep the first n_tokens positions. The last chunks that remain are brought back if they are out.

        logits() has nothing to do with it until the next decode. Raises UnsupportedError if a recurrent state, or a
        sliding window that was overwritten, cannot go back.
        """
        if not 0 <= n_tokens <= self.n_tokens:
            msg = f"cannot roll back to {n_tokens} positions: there are {self.n_tokens}"
            raise UsageError(msg)
        self._cancel()
        with self._step():
            if self._pager:
                self._pager.settle()
            gone = self._history[n_tokens:]
            del self._history[n_tokens:]
            try:
                self.ctx.seq_rm(n_tokens)
            except UnsupportedError:
                self._history += gone
                raise
            self._pending = None
            if self._pager:
                self._pager.rolled_back(n_tokens)

    #
    # residency: the calls below need a pool, and raise UsageError without one
    #

    @property
    def pager(self) -> Pager:
        """Ledger, host store and moves, for those who extend this."""
        if self._pager is None:
            msg = "there is no pool: the full cache is in use"
            raise UsageError(msg)
        return self._pager

    def residency(self) -> Residency:
        """Where every chunk is now, as arrays."""
        self._recover()
        return self.pager.residency()

    def pin(self, start: int, end: int) -> None:
        """Keep positions [start, end) on the device from now on, bringing chunks back that are out.

        The range may lie ahead of what is written. Raises PoolError, and pins nothing, if that left too little to page.
        """
        check_span(start, end, self.options.n_ctx)
        with self._step():
            self.pager.pin(start, end)

    def reselect(self) -> Reselect | None:
        """Score all chunks with the last token's queries now, and bring back the best. None: nothing is out, or lru."""
        if self._selector is None or not self._selector.needed:
            return None
        events = list(self._reselect("decode", [self.queries()], 1))
        return next((e for e in events if isinstance(e, Reselect)), None)

    def unpin(self, start: int, end: int) -> None:
        """Let the chunks of positions [start, end) be evicted again."""
        self.pager.unpin(start, end)

    def page_in(self, chunk: int) -> None:
        """Bring a chunk back, at the cost of the coldest one. Harmless if it is resident. Raises PoolError."""
        with self._step():
            self.pager.page_in(chunk)

    def page_out(self, chunk: int) -> None:
        """Drop a chunk from the pool; its record stays in the host store. Raises PoolError if it is protected."""
        with self._step():
            self.pager.page_out(chunk)

    def check_integrity(self) -> None:
        """Raise LedgerError unless ledger, host store and native pool agree. For tests, and when idle."""
        with self._step():
            self.pager.settle()
        self.pager.check_integrity()

    #
    # figures
    #

    @property
    def resident_bytes(self) -> int:
        """Device bytes of the full-attention KV that is allocated: the pool, or the whole context."""
        return self.ctx.kv_bytes().attn

    @property
    def host_bytes(self) -> int:
        """Host bytes taken for records, of all sequences."""
        return self._shared.memory.held_bytes if self._shared else 0
