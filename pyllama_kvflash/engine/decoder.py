"""The decoder of one sequence: it decodes batches, feeds the drafter, and has the selector choose chunks between batches."""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from pyllama_kvflash import native
from pyllama_kvflash.engine.cores import Cores
from pyllama_kvflash.engine.guard import Claim, Guard
from pyllama_kvflash.engine.lossless import Lossless
from pyllama_kvflash.engine.meter import Meter
from pyllama_kvflash.errors import UnsupportedError, UsageError, counted
from pyllama_kvflash.events import Event, Paged, Prefill, Reselect, Warn
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.policy import Queries, n_queries
from pyllama_kvflash.pool.checkpoints import Checkpoints
from pyllama_kvflash.pool.exact import Beside
from pyllama_kvflash.pool.sequence import PooledSequence
from pyllama_kvflash.pool.speculation import Drafts
from pyllama_kvflash.pool.step import Part, advance, advance_exactly, keep, keep_exactly

_ROUNDS = 3  # how often one token is decoded again, at most
_OPENING_DRAFT = 8  # tokens of a draft in the opening of an answer


class Decoder:
    """Decodes the tokens of one sequence: prompts in batches, answers token by token or with drafts."""

    def __init__(
        self, sequence: PooledSequence, checkpoints: Checkpoints, drafts: Drafts | None, n_batch: int, guard: Guard
    ) -> None:
        """drafts: None without speculative decoding. n_batch: the largest batch, in tokens. guard: the engine's, kept for callers;
        this class does not use it.
        """
        self.guard = guard
        self.sequence = sequence
        self.drafts = drafts
        self.checkpoints = checkpoints
        self._n_batch = n_batch
        self._options = sequence.options
        self.cores = Cores(sequence.options)
        can, o = sequence.exact is not None, self._options
        self.lossless = Lossless(sequence, drafts) if can and o.lossless else None
        # each drafted token would keep a recurrent state on the device, too much memory for so few tokens
        opens = can and o.n_opening and not sequence.recurrent
        self._opening = Lossless(sequence, drafts, _OPENING_DRAFT) if opens else None
        self.meter = Meter(sequence, o.meter_share / o.n_parallel) if can and o.meter_share else None

    @property
    def n_batch(self) -> int:
        """The largest batch, in tokens, that fits the pool beside its sinks, tail and pinned chunks."""
        sequence, n = self.sequence, self._n_batch
        if sequence.pager:
            n = min(n, sequence.pager.n_batch)
        return min(n, sequence.reads_exactly.n_batch) if self.lossless else n

    @property
    def _n_read(self) -> int:
        """The largest batch of a prompt, in tokens. With a full cache on a CPU it is `n_ubatch`: llama.cpp computes that many
        tokens at a time anyway, and small batches show progress early.
        """
        soon = self.cores.on_cpu and not self.sequence.pager
        return min(self.n_batch, self._options.n_ubatch) if soon else self.n_batch

    def claim(self) -> Claim:
        """Take the sequence from its current holder."""
        return Claim(self.guard, self.sequence)

    @property
    def opens_losslessly(self) -> bool:
        """Whether only the first tokens of an answer are decoded losslessly, and later ones through the pool."""
        return self._opening is not None and not self.lossless

    def begin_answer(self, *, goes_on: bool) -> None:
        """Begin an answer after the text in the context. goes_on: the answer continues an interrupted one; the lossless opening
        then ends where it would have ended without the interruption.
        """
        if not goes_on:
            self.sequence.opens_until = self.sequence.n_tokens + self._options.n_opening
        for lossless in (self.lossless, self._opening):
            if lossless:
                lossless.begin()

    def after_step(self) -> list[Warn]:
        """Return the warnings of an answer's step."""
        return [*self.cores.after_step(), *(self.drafts.warnings() if self.drafts else [])]

    @property
    def lossless_now(self) -> Lossless | None:
        """The lossless decoder for the next token; None if the token is decoded through the pool."""
        if not self.lossless and not self._opening:
            return None
        opening = self._opening if self.sequence.n_tokens < self.sequence.opens_until else None
        lossless = self.lossless or opening
        return lossless if lossless and self._is_too_long(1) else None

    @property
    def n_lossless(self) -> int:
        """How many tokens from here on may be decoded losslessly."""
        left = self._options.n_ctx - self.sequence.n_tokens
        return left if self.lossless else min(left, self.sequence.opens_until - self.sequence.n_tokens)

    def check_fits(self, n: int, at: int) -> None:
        """Raise UsageError unless n tokens after the first `at` positions fit the context."""
        if at + n > self._options.n_ctx:
            after = f" after the {at:,} in the context" if at else ""
            reach = self.sequence.ctx.model.n_reach
            more = "use a larger `n_ctx` or a shorter prompt"
            if at + n > reach:
                more = f"use a shorter prompt, a model that was trained for more than {reach:,}, or `rope.scaling` yarn"
            msg = f"{counted(n, 'token')}{after} {'does' if n == 1 else 'do'} not fit the context of {self._options.n_ctx:,}: {more}"
            raise UsageError(msg)

    def check_joins(self) -> None:
        """Raise UsageError unless a token of the sequence can be decoded in one batch with other sequences' tokens."""
        self.check_fits(1, self.sequence.n_tokens)
        if self.lossless and self.lossless_now:
            msg = "tokens of several sequences are decoded in one batch only through the pool: with `mode` lossless decode one"
            raise UsageError(f"{msg} sequence at a time")

    def clear(self) -> None:
        """Clear the sequence, its checkpoints and the drafter's text. Ends lossless decoding, unless `mode` asks for it."""
        if not self._options.lossless:
            self.lossless = None
        self.sequence.clear()
        self._truncate(0)

    def _truncate(self, n_tokens: int) -> None:
        self.checkpoints.truncate(n_tokens)
        if self.drafts:
            self.drafts.truncate(n_tokens)

    def rollback(self, n_tokens: int) -> None:
        """Roll the sequence, checkpoints and drafter back to n_tokens positions. Raises the errors of KVSequence.rollback()."""
        try:
            self.sequence.rollback(n_tokens)
        except UnsupportedError as err:
            last = self.checkpoints.before(n_tokens)
            if not last:
                raise
            if last != n_tokens:
                msg = f"{err}; or go back to the last checkpoint before it, {last:,}, and read on from there"
                raise UnsupportedError(msg) from None
            self.checkpoints.go_back(n_tokens)
        self._truncate(n_tokens)

    #
    # batches
    #

    def decode(self, tokens: Tokens, outputs: int = native.LAST) -> list[Event]:
        """Decode one batch, then score and move chunks if the schedule says so. Returns the events. tokens: (n,) int32.

        A single token is decoded again if chunks with much of its attention were out. Raises the errors of advance().
        """
        step = Step(self, Part(self.sequence, tokens))
        if self.lossless and self._is_too_long(len(tokens)):
            return self.decode_exactly(step, outputs)
        [events] = decode_each([step], outputs)
        return [*events, *self.again(events)] if events and len(tokens) == 1 else events

    def _batch(self, tokens: Tokens, outputs: int = native.LAST) -> Paged | None:
        """Decode one batch, and let a drafter read its tokens. Returns the moves."""
        return _decode([Step(self, Part(self.sequence, tokens))], outputs)[0]

    def listen(self, n: int, *, exactly: bool = False) -> None:
        """Before n tokens are decoded, switch the output of layer features on or off, as the drafter needs. exactly: the tokens are
        decoded against all positions before them.
        """
        if self.drafts:
            sequence = self.sequence
            self.drafts.before(sequence.reads_exactly.ctx if exactly else sequence.ctx, sequence.n_tokens, n)

    def heard(self, tokens: Tokens, start: int, *, exactly: bool = False) -> None:
        """Let the drafter read decoded tokens, except rejected ones. tokens: (n,) int32. start: the position of tokens[0]."""
        if self.drafts:
            sequence = self.sequence
            kept = tokens[: sequence.n_tokens - start]
            self.drafts.decoded(sequence.reads_exactly.ctx if exactly else sequence.ctx, kept, start)

    def _exact_batch(self, step: "Step", outputs: int, *, more: bool = False) -> Paged | None:
        """Decode one batch against all positions before it, and let a drafter read the kept tokens. Returns the moves.

        more: see advance_exactly().
        """
        part = step.part
        self.checkpoints.passed()
        self.listen(len(part.tokens), exactly=True)
        paged = advance_exactly(part, outputs, more=more, beside=step.beside)
        if part.draft:
            try:
                step.accept()
            finally:
                keep_exactly(part, more=step.goes_on)
        self.heard(part.tokens, step.start, exactly=True)
        return paged

    @property
    def metered(self) -> Meter | None:
        """The meter, if the next token is decoded through a pool that lacks chunks; else None."""
        return self.meter if self.meter and not self.lossless_now and self._is_too_long(1) else None

    @property
    def n_exact(self) -> int:
        """How many positions, from the first on, stay if decoding becomes lossless. Later positions must be read again."""
        return 0 if self.sequence.stateful else self.sequence.n_exact

    def be_lossless(self) -> None:
        """Decode losslessly until the sequence is cleared."""
        self.lossless = Lossless(self.sequence, self.drafts)

    def decode_exactly(self, step: "Step", outputs: int = native.LAST) -> list[Event]:
        """Decode one batch against all positions before it. Then page in the chunks that the last token attends to, unless a trial
        continues in the pool.

        Returns the events. Raises the errors of advance_exactly().
        """
        sequence, selector = self.sequence, self.sequence.selector
        behind, n_sealed = sequence.passing, sequence.paged.ledger.n_sealed
        moved = [self._exact_batch(step, outputs)]
        if not step.goes_on and (behind or sequence.paged.ledger.n_sealed > n_sealed):
            moved.append(sequence.settle_in())  # a chunk that has just become full belongs to the tail
        events: list[Event] = [paged for paged in moved if paged]
        if selector:
            queries, mass = [selector.queries()], sequence.attended(1)
            events += sequence.reselect_now("decode", queries, self._options.n_swaps, mass=mass)
        return events

    def missed(self, events: Sequence[Event]) -> bool:
        """Return whether chunks with much of a token's attention were paged in only after the token was decoded.

        Such a token should be decoded again. events: the events of its decode.
        """
        selector = self.sequence.selector
        found = next((e for e in events if isinstance(e, Reselect)), None)
        return selector is not None and found is not None and selector.missed(found)

    def again(self, events: Sequence[Event]) -> Iterator[Event]:
        """Decode the last token again while missed() is true for its latest decode, at most _ROUNDS times.

        events: the events of the token's decode. Yields the events of the repeats.
        """
        sequence, selector = self.sequence, self.sequence.selector
        for _ in range(_ROUNDS):
            if selector is None or not self.missed(events):
                return
            selector.schedule.repeated()
            token, moved = sequence.take_back()
            for paged in (moved, self._batch(np.array([token], np.int32))):
                if paged:
                    yield paged
            events = list(sequence.reselect_now("decode", [selector.queries()], self._options.n_swaps))
            selector.schedule.repeated()
            yield from events

    #
    # a prompt
    #

    def prefill(self, tokens: Tokens, marks: Sequence[int] = ()) -> Iterator[Event]:
        """Decode tokens in batches after the text in the context, as KVSequence.prefill() does. The last token gets logits.
        tokens: (n,) int32. marks: see Checkpoints.stops().
        """
        sequence, n = self.sequence, len(tokens)
        self.check_fits(n, sequence.n_tokens)
        sequence.cancel_scoring()
        if sequence.pager:
            sequence.pager.expect(n)
        if self.drafts:
            self.drafts.expect(sequence.n_tokens + n)
        exactly = sequence.exact is not None and self._is_too_long(n)
        for event in self._read_exactly(tokens, marks) if exactly else self._read_through_pool(tokens, marks):
            yield event
            if isinstance(event, Prefill):
                yield from self.cores.after_batch()

    def _read_through_pool(self, tokens: Tokens, marks: Sequence[int]) -> Iterator[Event]:
        """Decode tokens in batches that attend to resident chunks only. Chunks are chosen anew for the last tokens."""
        sequence, n, done = self.sequence, len(tokens), 0
        begin = time.perf_counter()
        n_tail = self._n_replayed(n)
        due = self.checkpoints.stops(n, marks, n_tail)
        stops = sorted({*due, n - n_tail, n})
        while done < n:
            if done in due:
                self.checkpoints.make()
            size = min(self._n_read, next(at for at in stops if at > done) - done)
            last = done + size == n
            if last and self._scorer_decides(size):
                yield from self._tail(tokens[done:])
            elif paged := self._batch(tokens[done : done + size], native.LAST if last else native.NONE):
                yield paged
            done += size
            if last:
                sequence.ctx.synchronize()
            seconds = time.perf_counter() - begin
            yield Prefill(done, n, seconds, sequence.resident_bytes, sequence.host_bytes)

    def _read_exactly(self, tokens: Tokens, marks: Sequence[int]) -> Iterator[Event]:
        """Decode tokens against all positions before them, then page in the chunks that the last tokens attend to."""
        sequence, n, done = self.sequence, len(tokens), 0
        reader, start = sequence.reads_exactly, sequence.n_tokens
        begin = time.perf_counter()
        due = self.checkpoints.stops(n, marks)
        while done < n:
            if done in due:
                self.checkpoints.make()
            size = min(reader.n_batch, next(at for at in (*due, n) if at > done) - done)
            step, last = Step(self, Part(sequence, tokens[done : done + size])), done + size == n
            # a state cannot be rolled back to the batch before, if this one is cut off
            more = not last and not sequence.stateful
            if paged := self._exact_batch(step, native.LAST if last else native.NONE, more=more):
                yield paged
            done += size
            if last:
                yield from self._settle_in(size)
            if (whole := reader.n_whole - start) > 0:
                seconds = time.perf_counter() - begin
                yield Prefill(whole, n, seconds, sequence.resident_bytes, sequence.host_bytes, exact=True)

    def _settle_in(self, n_last: int) -> Iterator[Event]:
        """After an exact pass, page in the chunks that its last tokens attend to. n_last: tokens of its last batch."""
        sequence, selector = self.sequence, self.sequence.selector
        if paged := sequence.settle_in():
            yield paged
        if selector:
            wanted = self._options.n_asking(selector.scorer.query)
            n_asking = min(wanted, n_last, sequence.ctx.q_tap)  # fewer if the scorer was replaced
            queries = [selector.queries(back) for back in reversed(range(n_asking))]
            mass = sequence.attended(n_asking)
            yield from sequence.reselect_now("question", queries, mass=mass)
        sequence.lay_out()

    def _is_too_long(self, n: int) -> bool:
        """Return whether the sequence with n more tokens exceeds its share of the pool, or already has a chunk out."""
        ledger = self.sequence.paged.ledger
        return ledger.n_resident < ledger.n_chunks or ledger.n_tokens + n > ledger.n_share * ledger.chunk

    def _n_replayed(self, n: int) -> int:
        """Return how many tokens at the end of a prompt of n tokens are decoded twice; 0 if no scorer has to choose chunks."""
        o = self._options
        # a sliding window can be rolled back only over the tokens of one graph
        return min(o.replay, n, self.n_batch, o.n_ubatch, o.tail * o.chunk) if self._scorer_decides(n) else 0

    def _scorer_decides(self, n: int) -> bool:
        """Return whether a scorer chooses chunks for n more tokens.

        A scorer is needed once a chunk is out (as after a rollback of a longer text), or the text exceeds the sequence's share.
        """
        return self.sequence.selector is not None and self._is_too_long(n)

    def _tail(self, tokens: Tokens) -> Iterator[Event]:
        """Decode the end of a prompt, choose chunks for it, and decode it again if chunks were paged in."""
        sequence, selector, start = self.sequence, self.sequence.selector, self.sequence.n_tokens
        if selector is None:
            msg = "there is no selector"
            raise AssertionError(msg)
        state = sequence.ctx.save_partial() if sequence.recurrent else b""
        queries: list[Queries] = []
        n_asking = min(n_queries(selector.scorer.query) or len(tokens), len(tokens))
        n_tap, n_ubatch = sequence.ctx.q_tap, self._options.n_ubatch
        for part, n in asking_parts(tokens, n_asking, n_tap, n_ubatch):
            if paged := self._batch(part):
                yield paged
            queries += [selector.queries(back) for back in reversed(range(n))]
        moved = False
        for event in sequence.reselect_now("question", queries):
            moved |= isinstance(event, Reselect) and bool(event.page_ins)
            yield event
        if moved and self._options.replay:
            self.checkpoints.truncate(start)  # checkpoints after it belong to the first decode
            for paged in (sequence.rewind(start, state), self._batch(tokens)):
                if paged:
                    yield paged
            if selector.repeats:
                seen = list(sequence.reselect_now("decode", [selector.queries()], self._options.n_swaps))
                yield from seen
                yield from self.again(seen)


def asking_parts(tokens: Tokens, n_asking: int, n_tap: int, n_ubatch: int) -> list[tuple[Tokens, int]]:
    """Cut tokens into as few batches as possible, so that the tap keeps the queries of the last n_asking tokens.

    tokens: (n,) int32. n_tap: the tap keeps the queries of a graph's last n_tap tokens. n_ubatch: tokens of a graph. Returns
    each batch, with the number of tokens at its end whose queries are needed.
    """
    n, n_most = len(tokens), min(n_tap, n_ubatch)
    n_first = (n_asking - 1) % n_most + 1
    end = n - n_asking + n_first  # end of the first batch whose queries are needed
    cuts = list(range(end, n, n_most))
    wanted = [n_first, *[n_most] * len(cuts)]
    if (end - 1) % n_ubatch + 1 < n_first:  # the batch's last graph would have fewer tokens
        cuts.insert(0, end - n_first)
        wanted.insert(0, 0)
    return list(zip(np.split(tokens, cuts), wanted, strict=True))


class Step:
    """Tokens of one sequence that are decoded in one batch, perhaps with other sequences' tokens.

    start: the position of the first token. beside: the pool's work while the tokens are decoded exactly. goes_on: whether that
    work continues after the batch; if so, the pool gets the tokens later.
    """

    def __init__(self, decoder: Decoder, part: Part) -> None:
        self.decoder = decoder
        self.part = part
        self.start = decoder.sequence.n_tokens
        self.beside: Beside | None = None
        self.goes_on = False

    def accept(self) -> None:
        """For a draft: set `part.accepted` from the logits of the batch."""


def decode_each(steps: Sequence[Step], outputs: int = native.ALL) -> list[list[Event]]:
    """Decode tokens of several sequences in one batch, then score and move chunks as each schedule says.

    Returns each step's events, in the order of `steps`. Decodes no token again. outputs: as for advance(). Raises the errors of
    advance().
    """
    moved = _decode(steps, outputs)
    res: list[list[Event]] = []
    for step, paged in zip(steps, moved, strict=True):
        events = step.decoder.sequence.tick(step.decoder.sequence.n_tokens - step.start)
        res.append([paged, *events] if paged else events)
    return res


def _decode(steps: Sequence[Step], outputs: int) -> list[Paged | None]:
    """Decode a batch, keep the accepted tokens, and let the drafters read them. Returns the moves of each sequence."""
    for step in steps:
        step.decoder.checkpoints.passed()
        if step.decoder.drafts:
            step.decoder.listen(len(step.part.tokens))
    moved = advance([step.part for step in steps], outputs)
    for step in steps:
        if step.part.draft:
            try:
                step.accept()
            finally:
                keep(step.part)
    for step in steps:
        if step.decoder.drafts:
            step.decoder.heard(step.part.tokens, step.start)
    return moved
