"""The engine: decide, apply, decode, event.

A KVFlash holds one sequence. For each batch it has the pager decide what must leave the pool and apply that (`policy`),
decodes (`native`), has the chunks stored that are full now, and yields what happened (`events`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import native
from pyllama_kvflash.errors import Interrupted, NativeError, UnsupportedError, UsageError
from pyllama_kvflash.events import Done, Event, Paged, Prefill, Stats, Token
from pyllama_kvflash.loading import Loaded, load
from pyllama_kvflash.native import Sampler, Sampling, Tokens
from pyllama_kvflash.options import Options, check_span
from pyllama_kvflash.pager import Pager, Residency
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
        self._n_tokens = 0
        self._pending: int | None = None  # produced, and not yet decoded
        self._consistent = True
        self._pager = Pager(self.ctx, self.options, self.n_pool) if self.n_pool is not None else None

    @classmethod
    def from_file(cls, path: str | Path, *, progress: Callable[[float], None] | None = None, **options: Any) -> Self:
        """Load a GGUF file. options: the fields of Options; progress: called with 0.0 to 1.0 while it loads.

        Raises UsageError (an option), ModelError (the file), UnsupportedError (its memory cannot be pooled).
        """
        return cls(load(Path(path), Options(**options), progress))

    def close(self) -> None:
        """Free the context and the model. Harmless when called again."""
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
                token = sampler.sample(self.ctx)
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
                if self._n_tokens >= self.options.n_ctx:
                    reason = "context"
                    break
                if paged := self._advance(np.array([token], np.int32)):
                    yield paged
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
        """Decode tokens in batches after what is in the context; the last one gets logits. Yields Paged and Prefill."""
        ids = np.ascontiguousarray(tokens, np.int32)
        n, n_batch = len(ids), self.options.n_batch
        self._check_room(n, self._n_tokens)
        begin = time.perf_counter()
        for i in range(0, n, n_batch):
            last = i + n_batch >= n
            if paged := self._advance(ids[i : i + n_batch], native.LAST if last else native.NONE):
                yield paged
            if last:
                self.ctx.synchronize()
            seconds = time.perf_counter() - begin
            yield Prefill(min(i + n_batch, n), n, seconds, self.resident_bytes, self.host_bytes)

    def decode(self, tokens: Sequence[int] | Tokens, outputs: int = native.LAST) -> None:
        """Decode one batch (at most n_batch tokens) after what is in the context.

        outputs: which tokens get logits (native.NONE, LAST, ALL). Raises UsageError (the context is full), PoolError,
        HostMemoryError, Interrupted and NativeError; the sequence is then what it was before.
        """
        ids = np.ascontiguousarray(tokens, np.int32)
        self._check_room(len(ids), self._n_tokens)
        self._advance(ids, outputs)

    def logits(self, i: int = -1) -> npt.NDArray[np.float32]:
        """A copy of the logits (n_vocab,) of token i of the last batch."""
        return self.ctx.logits(i)

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
        self._check_room(len(tokens), 0 if not append else self._n_tokens)
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
        pos = self._n_tokens
        with self._step():
            plan = self._pager.make_room(len(tokens)) if self._pager else None
            self.ctx.decode(tokens, pos, outputs)
            self._pending = None
            self._n_tokens += len(tokens)
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
            self.ctx.seq_rm(self._n_tokens)
        except UnsupportedError:
            msg = "a batch was cut off, and this model's memory cannot go back: clear() and start again"
            raise NativeError(msg) from None
        if self._pager:
            self._pager.reconcile(self._n_tokens)
        self._consistent = True

    #
    # the sequence
    #

    @property
    def n_tokens(self) -> int:
        """Positions written so far."""
        return self._n_tokens

    def clear(self) -> None:
        """Forget the sequence and its records; pins stay."""
        self._consistent = False
        self._n_tokens = 0
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
        if not 0 <= n_tokens <= self._n_tokens:
            msg = f"cannot roll back to {n_tokens} positions: there are {self._n_tokens}"
            raise UsageError(msg)
        with self._step():
            before, self._n_tokens = self._n_tokens, n_tokens
            try:
                self.ctx.seq_rm(n_tokens)
            except UnsupportedError:
                self._n_tokens = before
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
        pager = self._pager
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
            seed=seed,
        )
