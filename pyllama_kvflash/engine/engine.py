"""The engine: a prompt in, typed events out. What it does to its sequence is in `sequence`."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import native
from pyllama_kvflash.engine.answer import Answer
from pyllama_kvflash.engine.loading import Loaded, load
from pyllama_kvflash.errors import HostMemoryError, Interrupted, SnapshotError, UsageError
from pyllama_kvflash.events import Done, DraftStats, Event, Paged, Prefill, Reselect, Stats, Warn
from pyllama_kvflash.native import Sampler, Sampling, Summaries, Tokens
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Queries, n_queries
from pyllama_kvflash.snapshot.saved import SavedSequence

_ROUNDS = 3  # a token is decoded again, at most
_AHEAD = 4096  # tokens of an answer of any length for which host memory is taken at once


class KVFlash(SavedSequence):
    """A model with a sequence of up to n_ctx positions, of which the pool keeps n_pool on the device.

    With n_parallel > 1 it is the first of `sequences`, which share the pool; each is used as it would be alone, one call
    after the other, and decode_each() decodes a token of several at once.

    A context manager; not for two threads at once. Without a pool (`pool="off"`, or one that covers the context) it is
    llama.cpp's full cache under the same interface: the control.
    """

    @classmethod
    def from_file(cls, path: str | Path, *, progress: Callable[[float], None] | None = None, **options: Any) -> Self:
        """Load a GGUF file. options: the fields of Options; progress: called with 0.0 to 1.0 while it loads.

        Raises UsageError (an option), ModelError (the file), UnsupportedError (its memory cannot be pooled).
        """
        return cls.open(Path(path), Options(**options), progress)

    @classmethod
    def open(cls, path: Path, options: Options, progress: Callable[[float], None] | None = None) -> Self:
        """from_file(), with the options in one object."""
        return cls(load(path, options, cls.open, progress))

    def __init__(self, loaded: Loaded, beside: Self | None = None) -> None:
        """Use from_file."""
        super().__init__(loaded, beside)
        self._drafts = loaded.drafts

    @property
    def n_draft(self) -> int:
        """Tokens that are guessed at most, 0 without speculative decoding."""
        return self._drafts.n_max if self._drafts else 0

    def clear(self) -> None:
        """Forget the sequence and its records; pins stay."""
        super().clear()
        if self._drafts:
            self._drafts.truncate(0)

    def rollback(self, n_tokens: int) -> None:
        """Keep the first n_tokens positions. The last chunks that remain are brought back if they are out.

        logits() has nothing to do with it until the next decode. Raises UnsupportedError if a recurrent state, or a
        sliding window that was overwritten, cannot go back.
        """
        super().rollback(n_tokens)
        if self._drafts:
            self._drafts.truncate(n_tokens)

    def close(self) -> None:
        """Free the context and the model, for all sequences. Harmless when called again."""
        if self._drafts:
            self._drafts.close()
        super().close()

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
        already in the context, and the last token that was produced; otherwise it is cleared first. With append and an empty
        prompt an answer goes on as if it had not been broken off. stop: strings that end the text and are not shown.

        Raises UsageError (empty or too long a prompt), PoolError, HostMemoryError and NativeError.
        """
        self._recover()  # what was to be decoded again is pending
        tokens = self._prompt_tokens(prompt, append=append)
        if not append:
            self.clear()
        with suppress(HostMemoryError):  # the answer may be shorter; prefill() asks for the prompt itself
            self.expect(len(tokens) + self._answer_length(len(tokens), max_tokens))
        sampling = sampling or Sampling()
        sampler = Sampler(sampling, self.model.n_vocab)
        answer = Answer(self.model, max_tokens, self.options.n_ctx, stop)
        n_prompt, prefill_s = 0, 0.0
        begin = time.perf_counter()
        try:
            if len(prompt) == 0:
                self._go_on(answer)
            else:
                for event in self._mended(tokens, self.prefill(tokens)):
                    if isinstance(event, Prefill):
                        n_prompt, prefill_s = event.done, event.seconds
                    yield event
            begin = time.perf_counter()
            if self._drafts:
                self._drafts.begin(self._history)
            if answer.reason is None and answer.token is None:
                self._take(answer, sampler.sample(self.ctx))
            yield from answer.shown()
            while answer.reason is None:
                n, n_taken = self.n_tokens, answer.n_tokens
                yield from self._mended((), self._further(answer, sampler))
                if self.n_tokens > n and answer.n_tokens == n_taken and answer.reason is None:
                    self._take(answer, sampler.sample(self.ctx))  # the step was cut off before that
                yield from answer.shown()
        except Interrupted:
            yield from answer.shown()
            answer.reason = "interrupted"
        stats = self.stats(
            n_prompt=n_prompt,
            n_generated=answer.n_tokens,
            prefill_s=prefill_s,
            decode_s=time.perf_counter() - begin if answer.n_tokens else 0.0,
            seed=None if sampling.greedy else sampling.seed,
            drafts=self._drafts.stats if self._drafts else None,
        )
        yield Done(answer.reason or "interrupted", answer.flush(), stats)

    def _mended(self, tokens: Sequence[int] | Tokens, events: Iterator[Event]) -> Iterator[Event]:
        """The events of a step that adds tokens. If a record of a snapshot turns out to be damaged, all is read anew."""
        n = len(self._history)
        try:
            yield from events
        except SnapshotError as err:
            yield Warn(f"{err}; what was restored is read again")
            pending = self._pending  # of a step: none, if its token was decoded
            text = np.array([*self._history[:n], *tokens] if len(tokens) else self._history, np.int32)
            self.clear()
            yield from self.prefill(text)
            self._pending = None if len(tokens) else pending

    def _go_on(self, answer: Answer) -> None:
        """An answer begins with the token that the one before ended with, and with no scoring of its own."""
        answer.token = self._pending
        if self._selector is not None:
            self._selector.rest()

    def _take(self, answer: Answer, token: int) -> bool:
        """The answer's next token, after all that is decoded."""
        res = answer.take(token, self.n_tokens)
        self._pending = answer.token
        return res

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
        self.expect(n)
        if self._drafts:
            self._drafts.expect(self.n_tokens + n)
        mark = self._mark(n - n_tail)
        stops = sorted({mark, n - n_tail, n})
        while done < n:
            if mark and done == mark:
                self._checkpoint()
            size = min(self.n_batch, next(at for at in stops if at > done) - done)
            last = done + size == n
            if last and self._chosen(size):
                yield from self._tail(ids[done:])
            elif paged := self._heard(ids[done : done + size], native.LAST if last else native.NONE):
                yield paged
            done += size
            if last:
                self.ctx.synchronize()
            elif self.options.prefill_reselect:
                yield from self._between(min(self.n_batch, n - done))
            seconds = time.perf_counter() - begin
            yield Prefill(done, n, seconds, self.resident_bytes, self.host_bytes)

    def _replayed(self, n: int) -> int:
        """How many tokens at the end of a prompt of n are run again: none, if all is resident and stays so."""
        o = self.options
        # a sliding window can go back by what one graph writes, and no further
        return min(o.replay, n, self.n_batch, o.n_ubatch, o.tail * o.chunk) if self._chosen(n) else 0

    def _chosen(self, n: int) -> bool:
        """Whether a scorer chooses what n more tokens see: something is out, as after a rollback of a longer text, or its share
        of the pool cannot hold all.
        """
        if self._selector is None:
            return False
        ledger = self.pager.ledger
        return ledger.n_resident < ledger.n_chunks or self.n_tokens + n > ledger.n_share * ledger.chunk

    def _tail(self, tokens: Tokens) -> Iterator[Event]:
        """The end of a prompt: run it, choose the pool for it, and run it again on what was missing the first time."""
        selector, start = self._selector, self.n_tokens
        if selector is None:
            msg = "there is no selector"
            raise AssertionError(msg)
        state = self.ctx.save_partial() if self._recurrent else b""
        queries: list[Queries] = []
        n_asking = min(n_queries(selector.scorer.query) or len(tokens), len(tokens))
        for part, n in self._asking(tokens, n_asking):
            if paged := self._heard(part):
                yield paged
            queries += [selector.queries(back) for back in reversed(range(n))]
        moved = False
        for event in self._reselect("question", queries, 1):
            moved |= isinstance(event, Reselect) and bool(event.page_ins)
            yield event
        if moved and self.options.replay:
            for paged in (self._rewind(start, state), self._heard(tokens)):
                if paged:
                    yield paged
            if selector.repeats:
                seen = list(self._reselect("decode", [selector.queries()], 1, self.options.swaps))
                yield from seen
                yield from self._again(seen)

    def _asking(self, tokens: Tokens, n_asking: int) -> list[tuple[Tokens, int]]:
        """Tokens in batches, and of how many of the last ones of each the queries are wanted, n_asking in all: as few batches as the
        tap allows, which keeps those of the last tokens of a graph.
        """
        n, n_ubatch = len(tokens), self.options.n_ubatch
        n_most = min(self.ctx.q_tap, n_ubatch)
        n_first = (n_asking - 1) % n_most + 1
        end = n - n_asking + n_first  # of the first part that asks
        cuts = list(range(end, n, n_most))
        wanted = [n_first, *[n_most] * len(cuts)]
        if (end - 1) % n_ubatch + 1 < n_first:  # its last graph would have fewer tokens
            cuts.insert(0, end - n_first)
            wanted.insert(0, 0)
        return list(zip(np.split(tokens, cuts), wanted, strict=True))

    def _answer_length(self, n_prompt: int, max_tokens: int) -> int:
        """For how many tokens of an answer it is worth taking host memory before there is any."""
        return min(max_tokens if max_tokens >= 0 else _AHEAD, _AHEAD, self.options.n_ctx - self.n_tokens - n_prompt)

    def _further(self, answer: Answer, sampler: Sampler) -> Iterator[Event]:
        """Decode the last token of an answer, perhaps with guesses of what follows, and have it take what does."""
        token, drafts = answer.token, self._drafts
        if token is None:
            msg = "the answer has ended"
            raise AssertionError(msg)
        begin = time.perf_counter()
        if drafts and drafts.gate.open:
            width, n_most = self._room(answer)
            if n_most > 1 and len(guesses := drafts.guess(self._history, token, n_most - 1)):
                yield from self._check(answer, sampler, [token, *guesses.tolist()], width, n_most, begin)
                return
        begin = time.perf_counter()
        events = self._decode(np.array([token], np.int32), native.LAST)
        self._take(answer, sampler.sample(self.ctx))
        if drafts:
            drafts.plain(time.perf_counter() - begin)
        yield from events

    def _room(self, answer: Answer) -> tuple[int, int]:
        """Tokens of a batch that checks a draft, and how many of them may stand; one: decode plainly."""
        width = self.n_draft + 1
        n_batch = min(self.n_batch, self.options.n_ubatch)  # one graph, or the queries of the last token may be lost
        if width == 1 or self.n_tokens + width > self.options.n_ctx or width > n_batch:
            return 1, 1
        width, n_most = self._steady(width)
        return width, min(n_most, answer.left(self.n_tokens) + 1)

    def _check(
        self, answer: Answer, sampler: Sampler, tokens: list[int], width: int, n_most: int, begin: float
    ) -> Iterator[Event]:
        """Decode a token with guesses of what follows: those stand that would have come one by one, n_most at most."""
        drafts, start = self._drafts, self.n_tokens
        if drafts is None:
            msg = "nothing drafts"
            raise AssertionError(msg)
        # filled up, so that the graph stays
        batch = np.array([*tokens, *[tokens[0]] * (width - len(tokens))], np.int32)
        n_most = min(n_most, len(tokens))

        def judge() -> Iterator[tuple[int, int | None]]:
            for i in range(n_most):
                yield i + 1, None
                found = sampler.sample(self.ctx, i)
                goes_on = answer.take(found, start + i + 1)
                yield i + 1, answer.token
                if not goes_on or i + 1 == n_most or found != batch[i + 1]:
                    return

        drafts.before(start, len(batch))
        paged = self._advance_some(batch, judge())
        n = self.n_tokens - start
        drafts.decoded(batch[:n], start)
        n_guessed = len(tokens) - 1
        drafts.checked(n_guessed, min(n - 1, n_guessed), time.perf_counter() - begin)
        if paged:
            yield paged
        yield from self._tick(n)

    def _heard(self, tokens: Tokens, outputs: int = native.LAST) -> Paged | None:
        """One batch, which a drafter may read along. What moved, if anything did."""
        start, drafts = self.n_tokens, self._drafts
        if drafts:
            drafts.before(start, len(tokens))
        paged = self._advance(tokens, outputs)
        if drafts:
            drafts.decoded(tokens, start)
        return paged

    def decode(self, tokens: Sequence[int] | Tokens, outputs: int = native.LAST) -> list[Event]:
        """Decode one batch (at most n_batch tokens) after what is in the context, and do what the schedule says then.

        outputs: which tokens get logits (native.NONE, LAST, ALL). Returns what happened: Paged, Reselect, Warn. Raises
        UsageError (the context is full), PoolError, HostMemoryError, Interrupted and NativeError; the sequence is then
        what it was before.
        """
        ids = np.ascontiguousarray(tokens, np.int32)
        self._check_room(len(ids), self.n_tokens)
        return self._decode(ids, outputs)

    def _decode(self, tokens: Tokens, outputs: int) -> list[Event]:
        paged = self._heard(tokens, outputs)
        events = self._tick(len(tokens))
        return [*([paged] if paged else []), *events, *(self._again(events) if len(tokens) == 1 else ())]

    def _again(self, events: Sequence[Event]) -> Iterator[Event]:
        """Decode the last token again while chunks come in that have much of its attention: it was decoded without them."""
        selector = self._selector
        for _ in range(_ROUNDS):
            found = next((e for e in events if isinstance(e, Reselect)), None)
            if selector is None or found is None or not selector.missed(found):
                return
            selector.schedule.repeated()
            token, moved = self._take_back()
            for paged in (moved, self._heard(np.array([token], np.int32))):
                if paged:
                    yield paged
            events = list(self._reselect("decode", [selector.queries()], 1, self.options.swaps))
            selector.schedule.repeated()
            yield from events

    def decode_each(self, tokens: Mapping[int, int]) -> dict[int, list[Event]]:
        """Decode one token of each of several sequences in one batch: {number in `sequences`: token}.

        Returns what happened, by sequence. Raises as decode() does. The logits of each are got through its own logits().
        """
        for i in tokens:
            if not 0 <= i < len(self.sequences):
                msg = f"there is no sequence {i}: n_parallel is {len(self.sequences)}"
                raise UsageError(msg)
            self._check_room(1, self.sequences[i].n_tokens)
        moved = self._advance_each(tokens)
        return {i: [*([paged] if paged else []), *self.sequences[i]._tick(1)] for i, paged in moved.items()}

    def logits(self, i: int = -1) -> npt.NDArray[np.float32]:
        """A copy of the logits (n_vocab,) of token i of the last batch."""
        return self.ctx.logits(i)

    def stats(
        self,
        *,
        n_prompt: int = 0,
        n_generated: int = 0,
        prefill_s: float = 0,
        decode_s: float = 0,
        seed: int | None = None,
        drafts: DraftStats | None = None,
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
            disk_bytes=self._shared.memory.spilled_bytes if self._shared else 0,
            chunks=pager.ledger.n_chunks if pager else 0,
            resident=pager.ledger.n_resident if pager else 0,
            stored=pager.n_stored if pager else 0,
            pages_out=pager.n_out if pager else 0,
            pages_in=pager.n_in if pager else 0,
            reselects=selector.n_done if selector else 0,
            reselect_s=selector.seconds if selector else 0.0,
            summary_bytes=pager.summaries.n_bytes if pager and pager.summaries else 0,
            seed=seed,
            **(asdict(drafts) if drafts else {}),
        )

    @property
    def summaries(self) -> Summaries | None:
        """Of the keys of sealed chunks, None if the scorer wants none."""
        return self._pager.summaries if self._pager else None

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> Tokens:
        """Token ids (n,) int32 of a text. add_special: BOS and EOS as the model's metadata asks for."""
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int] | Tokens) -> str:
        """Text of tokens, without the special ones; broken UTF-8 becomes U+FFFD."""
        return b"".join(self.model.piece(int(t)) for t in tokens).decode("utf-8", "replace")

    def _prompt_tokens(self, prompt: str | bytes | Sequence[int] | Tokens, *, append: bool) -> Tokens:
        if len(prompt) == 0 and not (append and self._pending is not None):
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
