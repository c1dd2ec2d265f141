"""The engine: decide, apply, decode, event.

A KVFlash holds one sequence. For each batch it has the pager decide what must leave the pool and apply that (`policy`),
decodes (`native`), has the chunks stored that are full now, and yields what happened (`events`). Between batches the
selector has all chunks scored and the best ones brought back.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import native
from pyllama_kvflash.errors import Interrupted, NativeError, UnsupportedError, UsageError
from pyllama_kvflash.events import Done, Event, Paged, Prefill, Reselect, Stats, Token, Warn
from pyllama_kvflash.loading import Loaded, load
from pyllama_kvflash.native import Sampler, Sampling, Tokens
from pyllama_kvflash.options import Options, check_span
from pyllama_kvflash.pager import Pager, Residency
from pyllama_kvflash.policy import Queries, Scorer, n_queries
from pyllama_kvflash.selector import Selector
from pyllama_kvflash.text import TextStream


class KVFlash:
    """A model with one sequence of up to n_ctx positions, of which the pool keeps n_pool on the device.

    A context manager; not for two threads at once. Without a pool (`pool="off"`, or one that covers the context) it is
    llama.cpp's full cache under the same interface: the control.
    """

    def __init__(self, loaded: Loaded) -> None:
        """Use KVFlash.from_file."""
        self.model = loaded.model
        self.ctx = loaded.ctx
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
        self._pager: Pager | None = None
        self._selector: Selector | None = None
        if self.n_pool is not None and loaded.scorer is not None:
            scorer = loaded.scorer
            try:
                self._pager = Pager(self.ctx, self.options, self.n_pool, scorer.summary)
            except UnsupportedError as err:
                self.warnings += (f"policy {scorer.name} cannot score this model: {err}; using lru",)
                self._pager = Pager(self.ctx, self.options, self.n_pool, None)
            else:
                if scorer.name != "lru":
                    self._selector = Selector(self.ctx, self._pager, scorer, self.options)

    @classmethod
    def from_file(cls, path: str | Path, *, progress: Callable[[float], None] | None = None, **options: Any) -> Self:
        """Load a GGUF file. options: the fields of Options; progress: called with 0.0 to 1.0 while it loads.

        Raises UsageError (an option), ModelError (the file), UnsupportedError (its memory cannot be pooled).
        """
        return cls(load(Path(path), Options(**options), progress))

    def close(self) -> None:
        """Free the context and the model. Harmless when called again."""
        if self._selector is not None:
            self._selector.close()
        self.ctx.close()
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    #
    # generation
    #

    def generate(
        self,
        prompt: str | bytes | Sequence[int] | Tokens,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        append: bool = False,
    ) -> Iterator[Event]:
        """Run a prompt and produce up to max_tokens (-1: until the context is full), as typed events.

        prompt: text (BOS is added as the model's metadata says), or tokens as they are. append: go on after what is
        already in the context, and the last token that was produced; otherwise it is cleared first. stop: strings that
        end the text and are not shown.

        Raises UsageError (empty or too long a prompt), PoolError, HostMemoryError and NativeError.
        """
        tokens = self._prompt_tokens(prompt, append=append)
        if not append:
            self.clear()
        sampling = sampling or Sampling()
        sampler, text = Sampler(sampling, self.model.n_vocab), TextStream(stop)
        n_prompt, n_generated, prefill_s, reason = 0, 0, 0.0, "length"
        begin = time.perf_counter()
        try:
            for event in self.prefill(tokens):
                if isinstance(event, Prefill):
                    n_prompt, prefill_s = event.done, event.seconds
                yield event
            begin = time.perf_counter()
            while max_tokens < 0 or n_generated < max_tokens:
                step = time.perf_counter()
                token = sampler.sample(self.ctx)
                sample_s = time.perf_counter() - step
                if self.model.is_eog(token):
                    reason = "eos"
                    break
                n_generated += 1
                self._pending = token
                yield Token(token, text.push(self.model.piece(token)))
                if text.stopped:
                    reason = "stop"
                    break
                if n_generated == max_tokens:
                    break
                if self.n_tokens >= self.options.n_ctx:
                    reason = "context"
                    break
                yield from self._decode_one(token, sample_s)
        except Interrupted:
            reason = "interrupted"
        stats = self.stats(
            n_prompt=n_prompt,
            n_generated=n_generated,
            prefill_s=prefill_s,
            decode_s=time.perf_counter() - begin if n_generated else 0.0,
            seed=None if sampling.greedy else sampling.seed,
        )
        yield Done(reason, text.flush(), stats)

    def prefill(self, tokens: Sequence[int] | Tokens) -> Iterator[Event]:
        """Decode tokens in batches after what is in the context; the last one gets logits.

        The pool is chosen anew between batches, and for the last tokens, which are then run again (tail replay). Yields
        Paged, Reselect, Warn and Prefill.
        """
        ids = np.ascontiguousarray(tokens, np.int32)
        n, done = len(ids), 0
        self._check_room(n, self.n_tokens)
        self._cancel()
        n_tail = self._replayed(n)
        begin = time.perf_counter()
        while done < n:
            size = min(self.n_batch, (n - n_tail if done < n - n_tail else n) - done)
            last = done + size == n
            if last and self._chosen(size):
                yield from self._tail(ids[done:])
            elif paged := self._advance(ids[done : done + size], native.LAST if last else native.NONE):
                yield paged
            done += size
            if last:
                self.ctx.synchronize()
            elif self._selector and self.options.prefill_reselect and self._selector.needed:
                yield from self._reselect("prefill", [self.queries()], min(self.n_batch, n - done))
            seconds = time.perf_counter() - begin
            yield Prefill(done, n, seconds, self.resident_bytes, self.host_bytes)

    def _replayed(self, n: int) -> int:
        """How many tokens at the end of a prompt of n are run again: none, if all of it stays resident."""
        return (
            min(self.options.replay, n, self.n_batch, self.options.tail * self.options.chunk) if self._chosen(n) else 0
        )

    def _chosen(self, n: int) -> bool:
        """Whether the pool cannot hold n more tokens beside all that is there, and a scorer chooses what stays."""
        return self._selector is not None and self.n_pool is not None and self.n_tokens + n > self.n_pool

    def _tail(self, tokens: Tokens) -> Iterator[Event]:
        """The end of a prompt: run it, choose the pool for it, and run it again on what was missing the first time."""
        selector, start = self._selector, self.n_tokens
        if selector is None:
            msg = "there is no selector"
            raise AssertionError(msg)
        state = self.ctx.save_partial() if self._recurrent else b""
        queries: list[Queries] = []
        n_single = min(n_queries(selector.scorer.query) or len(tokens), len(tokens))  # the tap has one token a batch
        for part in np.split(tokens, range(len(tokens) - n_single + 1, len(tokens))):
            if paged := self._advance(part):
                yield paged
            queries.append(selector.queries())
        moved = False
        for event in self._reselect("question", queries, 1):
            moved |= isinstance(event, Reselect) and bool(event.page_ins)
            yield event
        if moved and self.options.replay:
            self._rewind(start, state)
            if paged := self._advance(tokens):
                yield paged

    def _rewind(self, n_tokens: int, state: bytes) -> None:
        """Back to the first n_tokens positions, with what save_partial() gave there."""
        with self._step():
            if state:
                self.ctx.restore_partial(state, n_tokens)
            else:
                self.ctx.seq_rm(n_tokens)
            del self._history[n_tokens:]
            self.pager.rolled_back(n_tokens)

    def _reselect(self, reason: str, queries: Sequence[Queries], n_next: int) -> Iterator[Event]:
        """Score and repage at once, leaving room for n_next tokens."""
        selector = self._selector
        if selector is None or not selector.needed:
            return
        n_free = self.pager.ledger.new_chunks(n_next)
        with self._step():
            event = selector.now(reason, self.tokens, queries, max(1, n_free))
        yield from self._warnings(selector)
        yield event

    def _decode_one(self, token: int, seconds: float) -> Iterator[Event]:
        """A token of the answer; seconds: what sampling it took."""
        begin = time.perf_counter()
        if paged := self._advance(np.array([token], np.int32)):
            yield paged
        yield from self._tick(1, seconds + time.perf_counter() - begin)

    def _tick(self, n_new: int, seconds: float) -> Iterator[Event]:
        """After a decode: what the schedule says."""
        selector = self._selector
        if selector is None or not selector.needed:
            return
        with self._step():
            event = selector.tick(self.tokens, n_new, seconds)
        yield from self._warnings(selector)
        if event:
            yield event

    def _warnings(self, selector: Selector) -> Iterator[Event]:
        while selector.warnings:
            yield Warn(selector.warnings.pop(0))

    def _cancel(self) -> None:
        """No scores of what the sequence was."""
        if self._selector is not None:
            self._selector.cancel()

    def decode(self, tokens: Sequence[int] | Tokens, outputs: int = native.LAST) -> list[Event]:
        """Decode one batch (at most n_batch tokens) after what is in the context, and do what the schedule says then.

        outputs: which tokens get logits (native.NONE, LAST, ALL). Returns what happened: Paged, Reselect, Warn. Raises
        UsageError (the context is full), PoolError, HostMemoryError, Interrupted and NativeError; the sequence is then
        what it was before.
        """
        ids = np.ascontiguousarray(tokens, np.int32)
        self._check_room(len(ids), self.n_tokens)
        begin = time.perf_counter()
        paged = self._advance(ids, outputs)
        return [*([paged] if paged else []), *self._tick(len(ids), time.perf_counter() - begin)]

    def logits(self, i: int = -1) -> npt.NDArray[np.float32]:
        """A copy of the logits (n_vocab,) of token i of the last batch."""
        return self.ctx.logits(i)

    def queries(self) -> Queries:
        """Queries of the last token decoded, for each pooled layer (n_head, n_embd_head_k); empty without a scorer."""
        return self._selector.queries() if self._selector else []

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> Tokens:
        """Token ids (n,) int32 of a text. add_special: BOS and EOS as the model's metadata asks for."""
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int] | Tokens) -> str:
        """Text of tokens, without the special ones; broken UTF-8 becomes U+FFFD."""
        return b"".join(self.model.piece(int(t)) for t in tokens).decode("utf-8", "replace")

    def _prompt_tokens(self, prompt: str | bytes | Sequence[int] | Tokens, *, append: bool) -> Tokens:
        if len(prompt) == 0:
            msg = "the prompt is empty: give at least one character, or one token"
            raise UsageError(msg)
        if isinstance(prompt, str | bytes):
            tokens = self.tokenize(prompt, add_special=not append)
        else:
            tokens = np.ascontiguousarray(prompt, np.int32)
        if append and self._pending is not None:
            tokens = np.concatenate([[self._pending], tokens]).astype(np.int32)
        self._check_room(len(tokens), 0 if not append else self.n_tokens)
        return tokens

    def _check_room(self, n: int, at: int) -> None:
        if at + n > self.options.n_ctx:
            after = f" after the {at} in the context" if at else ""
            msg = (
                f"{n} tokens{after} do not fit the context of {self.options.n_ctx}: use a larger n_ctx"
                " (-c/--ctx-size) or a shorter prompt"
            )
            raise UsageError(msg)

    #
    # decide, apply, decode
    #

    def _advance(self, tokens: Tokens, outputs: int = native.LAST) -> Paged | None:
        """One batch: make room, decode, seal. What moved, if anything did."""
        pos = self.n_tokens
        with self._step():
            plan = self._pager.make_room(len(tokens)) if self._pager else None
            self.ctx.decode(tokens, pos, outputs)
            self._pending = None
            self._history.frombytes(np.ascontiguousarray(tokens, np.int32).tobytes())
            if self._pager:
                self._pager.written(len(tokens))
        return Paged(pos, plan.drops, plan.page_ins) if plan else None

    @contextmanager
    def _step(self) -> Iterator[None]:
        """A change of the sequence or of what is resident. If it is cut off, the next one begins by reconciling."""
        self._recover()
        self._consistent = False
        yield
        self._consistent = True

    def _recover(self) -> None:
        """After a step that was cut off: take what it left in the cache out again, and go on from the last position."""
        if self._consistent:
            return
        try:
            self.ctx.seq_rm(self.n_tokens)
        except UnsupportedError:
            msg = "a batch was cut off, and this model's memory cannot go back: clear() and start again"
            raise NativeError(msg) from None
        if self._pager:
            self._pager.reconcile(self.n_tokens)
        self._consistent = True

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
        """Have another scorer choose from now on. What it needs of the chunks is made from their records.

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

    def clear(self) -> None:
        """Forget the sequence and its records; pins stay."""
        self._cancel()
        self._consistent = False
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
        events = [e for e in self._reselect("decode", [self.queries()], 1) if isinstance(e, Reselect)]
        return events[0] if events else None

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
        self._recover()
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
        """Host bytes taken for records."""
        return self._pager.store.held_bytes if self._pager else 0

    def stats(
        self,
        *,
        n_prompt: int = 0,
        n_generated: int = 0,
        prefill_s: float = 0,
        decode_s: float = 0,
        seed: int | None = None,
    ) -> Stats:
        """Memory and page traffic now, with the counts and times given."""
        kv = self.ctx.kv_bytes()
        pager, selector = self._pager, self._selector
        return Stats(
            n_prompt=n_prompt,
            n_generated=n_generated,
            prefill_s=prefill_s,
            decode_s=decode_s,
            n_ctx=self.options.n_ctx,
            n_pool=self.n_pool,
            kv_device_bytes=kv.attn,
            kv_full_bytes=self._full_bytes,
            other_device_bytes=kv.swa + kv.recurrent,
            host_bytes=self.host_bytes,
            chunks=pager.ledger.n_chunks if pager else 0,
            resident=pager.ledger.n_resident if pager else 0,
            stored=pager.n_stored if pager else 0,
            pages_out=pager.n_out if pager else 0,
            pages_in=pager.n_in if pager else 0,
            reselects=selector.n_done if selector else 0,
            reselect_s=selector.seconds if selector else 0.0,
            summary_bytes=pager.summaries.n_bytes if pager and pager.summaries else 0,
            seed=seed,
        )
