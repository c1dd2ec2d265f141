"""The engine: decide, apply, decode, event.

A KVFlash holds one sequence. For each batch it decides what must leave the pool (`policy`), applies that plan, decodes
(`native`), stores the records of chunks that were sealed, and yields what happened (`events`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import native
from pyllama_kvflash.errors import Interrupted, NativeError, PoolError, UnsupportedError, UsageError
from pyllama_kvflash.events import Done, Event, Paged, Prefill, Stats, Token
from pyllama_kvflash.loading import Loaded, load
from pyllama_kvflash.native import Sampler, Sampling, Tokens
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import POLICIES, Ledger, LedgerError, Plan, State, bring_in, make_room
from pyllama_kvflash.policy.sizing import pinned_chunks, pool_floor
from pyllama_kvflash.store import HostStore
from pyllama_kvflash.text import TextStream


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the chunks are, one array element each (n_chunks,).

    state: int8, 0 out, 1 in flight, 2 resident. block: int32, -1 if not resident. sealed, stored, protected: bool.
    score: float64, of the policy, higher is hotter.
    """

    state: npt.NDArray[np.int8]
    block: npt.NDArray[np.int32]
    sealed: npt.NDArray[np.bool_]
    stored: npt.NDArray[np.bool_]
    protected: npt.NDArray[np.bool_]
    score: npt.NDArray[np.float64]


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
        self._consistent = True
        self._pages_out = self._pages_in = self._stored = 0
        self._score = POLICIES[self.options.policy]
        self._ledger: Ledger | None = None
        self._store: HostStore | None = None
        if self.n_pool is not None:
            o = self.options
            self._ledger = Ledger(self.n_pool // o.chunk, o.chunk, n_sinks=o.sinks, n_tail=o.tail)
            self._ledger.pins |= pinned_chunks(o.pins, o.chunk)
            self._store = HostStore(self.ctx.pool_info().record_bytes)

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
        already in the context; otherwise it is cleared first. stop: strings that end the text and are not shown.

        Raises UsageError (empty or too long a prompt), PoolError, HostMemoryError and NativeError.
        """
        tokens = self._prompt_tokens(prompt, append=append)
        if not append:
            self.clear()
        start = self._n_tokens
        sampling = sampling or Sampling()
        sampler, text = Sampler(sampling, self.model.n_vocab), TextStream(stop)
        n_generated, reason = 0, "length"
        clock = [time.perf_counter()] * 2  # the beginning, and the end of the prefill
        try:
            yield from self.prefill(tokens)
            clock[1] = time.perf_counter()
            while max_tokens < 0 or n_generated < max_tokens:
                token = sampler.sample(self.ctx)
                if self.model.is_eog(token):
                    reason = "eos"
                    break
                n_generated += 1
                yield Token(token, text.push(self.model.piece(token)))
                if text.stopped:
                    reason = "stop"
                    break
                if n_generated == max_tokens:
                    break
                if self._n_tokens >= self.options.n_ctx:
                    reason = "context"
                    break
                yield from self._advance(np.array([token], np.int32))
        except Interrupted:
            reason = "interrupted"
        done = time.perf_counter()
        prefilled = clock[1] if self._n_tokens - start >= len(tokens) else done
        yield Done(
            reason,
            text.flush(),
            self.stats(
                n_prompt=min(len(tokens), self._n_tokens - start),
                n_generated=n_generated,
                prefill_s=prefilled - clock[0],
                decode_s=done - prefilled,
                seed=None if sampling.greedy else sampling.seed,
            ),
        )

    def prefill(self, tokens: Sequence[int] | Tokens) -> Iterator[Event]:
        """Decode tokens in batches after what is in the context; the last one gets logits. Yields Paged and Prefill."""
        ids = np.ascontiguousarray(tokens, np.int32)
        n, n_batch = len(ids), self.options.n_batch
        begin = time.perf_counter()
        for i in range(0, n, n_batch):
            last = i + n_batch >= n
            yield from self._advance(ids[i : i + n_batch], native.LAST if last else native.NONE)
            if last:
                self.ctx.synchronize()
            seconds = time.perf_counter() - begin
            yield Prefill(min(i + n_batch, n), n, seconds, self.resident_bytes, self.host_bytes)

    def decode(self, tokens: Sequence[int] | Tokens, outputs: int = native.LAST) -> None:
        """Decode one batch (at most n_batch tokens) after what is in the context.

        outputs: which tokens get logits (native.NONE, LAST, ALL). Raises UsageError (the context is full), PoolError,
        HostMemoryError, Interrupted and NativeError; the sequence is then what it was before.
        """
        for _ in self._advance(np.ascontiguousarray(tokens, np.int32), outputs):
            pass

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
        if isinstance(prompt, str | bytes):
            tokens = self.tokenize(prompt, add_special=not append)
        else:
            tokens = np.ascontiguousarray(prompt, np.int32)
        if len(tokens) == 0:
            msg = "the prompt is empty: give at least one token"
            raise UsageError(msg)
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

    def _advance(self, tokens: Tokens, outputs: int = native.LAST) -> Iterator[Paged]:
        """One batch: make room, decode, seal."""
        n = len(tokens)
        self._check_room(n, self._n_tokens)
        self._recover()
        if self._ledger is None or self._store is None:
            self._decode(tokens, outputs)
            return
        ledger = self._ledger
        n_new = ledger.new_chunks(n)
        if n_new > ledger.n_free:
            plan = make_room(ledger, self._score(ledger), n_new)
            self._apply(plan)
            yield Paged(self._n_tokens, plan.drops, plan.page_ins)
        self._store.reserve((ledger.n_tokens + n) // ledger.chunk - ledger.n_sealed)
        self._decode(tokens, outputs)
        self._seal()

    def _decode(self, tokens: Tokens, outputs: int) -> None:
        self._consistent = False  # until the ledger knows what the cache holds: Ctrl-C may come in between
        self.ctx.decode(tokens, self._n_tokens, outputs)
        if self._ledger is not None:
            self._ledger.write(len(tokens))
        self._n_tokens += len(tokens)
        self._consistent = True

    def _seal(self) -> None:
        """Write the records of chunks that are full now: from here on they can be dropped at no cost."""
        if self._ledger is None or self._store is None:
            return
        for chunk in self._ledger.to_store():
            self.ctx.read(chunk, self._store.put(chunk))
            self._ledger.store(chunk)
            self._stored += 1

    def _apply(self, plan: Plan) -> None:
        """The one place where chunks move: drops first, then page-ins."""
        ledger, store = self._pool()
        for chunk in plan.drops:
            self.ctx.drop(chunk)
            ledger.drop(chunk)
            self._pages_out += 1
        for chunk in plan.page_ins:
            ledger.begin_page_in(chunk)
            try:
                self.ctx.page_in(chunk, store.get(chunk))
            except BaseException:
                ledger.abort_page_in(chunk)
                raise
            ledger.commit_page_in(chunk)
            self._pages_in += 1

    def _recover(self) -> None:
        """After a batch that was cut off: take what it left in the cache out again."""
        if self._consistent:
            return
        try:
            self.ctx.seq_rm(self._n_tokens)
        except UnsupportedError:
            msg = "a batch was cut off, and this model's recurrent state cannot go back: clear() and start again"
            raise NativeError(msg) from None
        self._consistent = True

    def _pool(self) -> tuple[Ledger, HostStore]:
        if self._ledger is None or self._store is None:
            msg = "there is no pool: the full cache is in use"
            raise UsageError(msg)
        return self._ledger, self._store

    #
    # the sequence
    #

    @property
    def n_tokens(self) -> int:
        """Positions written so far."""
        return self._n_tokens

    def clear(self) -> None:
        """Forget the sequence and its records; pins stay."""
        self.ctx.clear()
        self._n_tokens = 0
        self._consistent = True
        self._pages_out = self._pages_in = self._stored = 0
        if self._ledger is not None and self._store is not None:
            self._ledger.clear()
            self._store.forget(0)

    def rollback(self, n_tokens: int) -> None:
        """Keep the first n_tokens positions. The chunk that is cut through is brought back first, and sealed anew.

        There are no logits until the next decode. Raises UnsupportedError if a recurrent state cannot go back.
        """
        if not 0 <= n_tokens <= self._n_tokens:
            msg = f"cannot roll back to {n_tokens} positions: there are {self._n_tokens}"
            raise UsageError(msg)
        self._recover()
        ledger = self._ledger
        if ledger is not None and n_tokens % ledger.chunk:
            cut = n_tokens // ledger.chunk
            if ledger.state_of(cut) == State.OUT:
                self._apply(bring_in(ledger, self._score(ledger), [cut]))
        self.ctx.seq_rm(n_tokens)
        self._n_tokens = n_tokens
        if ledger is not None and self._store is not None:
            ledger.rollback(n_tokens)
            self._store.forget(n_tokens // ledger.chunk)

    #
    # residency
    #

    def residency(self) -> Residency:
        """Where every chunk is now. Raises UsageError without a pool."""
        ledger, _ = self._pool()
        n = ledger.n_chunks
        block = np.full(n, -1, np.int32)
        chunks, _ = self.ctx.blocks()
        held = chunks >= 0
        block[chunks[held]] = np.flatnonzero(held)
        sealed = np.arange(n) < ledger.n_sealed
        return Residency(ledger.state, block, sealed, ledger.stored, ledger.protected(), self._score(ledger))

    def pin(self, start: int, end: int) -> None:
        """Keep positions [start, end) on the device from now on, bringing chunks back that are out.

        The range may lie ahead of what is written. Raises PoolError, and pins nothing, if that left too little to page.
        """
        ledger, _ = self._pool()
        if not 0 <= start < end <= self.options.n_ctx:
            msg = f"pin {start}:{end} is no range of positions: give 0 <= start < end <= {self.options.n_ctx}"
            raise UsageError(msg)
        chunks = pinned_chunks([(start, end)], ledger.chunk)
        n_pinned = len(ledger.pins | chunks)
        floor = pool_floor(ledger.chunk, self.options.n_batch, ledger.n_sinks, ledger.n_tail, n_pinned)
        if floor > ledger.n_block * ledger.chunk:
            msg = (
                f"pinning {start}:{end} makes {n_pinned} pinned chunks, for which a pool of {floor} tokens is needed;"
                f" this one has {self.n_pool}: use a larger pool or pin less"
            )
            raise PoolError(msg)
        self._apply(bring_in(ledger, self._score(ledger), sorted(c for c in chunks if c < ledger.n_chunks)))
        ledger.pins |= chunks

    def unpin(self, start: int, end: int) -> None:
        """Let the chunks of positions [start, end) be evicted again."""
        ledger, _ = self._pool()
        ledger.pins -= pinned_chunks([(start, end)], ledger.chunk)

    def page_in(self, chunk: int) -> None:
        """Bring a chunk back, at the cost of the coldest one. Harmless if it is resident. Raises PoolError."""
        ledger, _ = self._pool()
        self._check_chunk(ledger, chunk)
        self._apply(bring_in(ledger, self._score(ledger), [chunk]))

    def page_out(self, chunk: int) -> None:
        """Drop a chunk from the pool; its record stays in the host store. Raises PoolError if it is protected."""
        ledger, _ = self._pool()
        self._check_chunk(ledger, chunk)
        if ledger.state_of(chunk) == State.OUT:
            return
        if not ledger.evictable()[chunk]:
            msg = f"chunk {chunk} cannot leave the pool: it is a sink, in the tail, pinned or still being written"
            raise PoolError(msg)
        self._apply(Plan(drops=(chunk,)))

    def _check_chunk(self, ledger: Ledger, chunk: int) -> None:
        if not 0 <= chunk < ledger.n_chunks:
            msg = f"there is no chunk {chunk}: the sequence has {ledger.n_chunks} of {ledger.chunk} tokens"
            raise UsageError(msg)

    def check_integrity(self) -> None:
        """Raise LedgerError unless ledger, host store and native pool agree. For tests, and when idle."""
        ledger, store = self._pool()
        ledger.check_integrity()
        chunks, n_used = self.ctx.blocks()
        state = ledger.state
        held = {int(c): int(n) for c, n in zip(chunks, n_used, strict=True) if c >= 0}
        resident = {int(c) for c in np.flatnonzero(state == State.RESIDENT)}
        if set(held) != resident:
            msg = f"ledger and pool differ about chunks {sorted(set(held) ^ resident)[:8]}"
            raise LedgerError(msg)
        for chunk, n in held.items():
            want = min(ledger.chunk, ledger.n_tokens - chunk * ledger.chunk)
            if n != want:
                msg = f"chunk {chunk} has {n} cells in the pool, and {want} positions"
                raise LedgerError(msg)
        missing = [int(c) for c in np.flatnonzero(ledger.stored) if int(c) not in store]
        if missing:
            msg = f"no record in the store for chunks {missing[:8]}"
            raise LedgerError(msg)

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
        return self._store.held_bytes if self._store is not None else 0

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
        ledger = self._ledger
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
            chunks=ledger.n_chunks if ledger else 0,
            resident=ledger.n_resident if ledger else 0,
            stored=self._stored,
            pages_out=self._pages_out,
            pages_in=self._pages_in,
            seed=seed,
        )
