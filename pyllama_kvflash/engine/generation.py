"""One prompt and its answer on one sequence. All text is generated here."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from pyllama_kvflash.engine import steps
from pyllama_kvflash.engine.answer import Answer
from pyllama_kvflash.engine.decoder import Decoder
from pyllama_kvflash.engine.going_back import keep_common
from pyllama_kvflash.engine.steps import DraftedStep, LosslessStep, PlainStep
from pyllama_kvflash.engine.writer import Writer
from pyllama_kvflash.errors import HostMemoryError, Interrupted, SnapshotError, number
from pyllama_kvflash.events import DraftStats, Event, Prefill, Token, Warn, sum_stats
from pyllama_kvflash.native import Sampler, Sampling, Tokens
from pyllama_kvflash.pool.exact import Beside

_AHEAD = 4096  # tokens of an answer for which host memory is taken in advance


class Generation:
    """Reads a prompt batch by batch, then answers step by step. Several generations can take turns, each on its own sequence.

    An error leaves the generation unchanged, and the call can be repeated. The generation holds its sequence until another call
    takes or changes that sequence. From then on the generation's methods raise InUseError, and change nothing.

    n_prompt: tokens of the prompt read so far. prefill_s: seconds spent on them.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Tokens,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        preserved: Collection[int] = (),
        whole: bool = False,
        marks: Sequence[int] = (),
    ) -> None:
        """prompt: tokens (n,) int32 to read after the text in the context. With an empty prompt, the answer continues after the
        pending token, or from the logits of the last token. preserved: special tokens that are shown as text. whole: the prompt
        replaces the text in the context; their common prefix is not read again. marks: positions where the next prompt may
        diverge from this one, in ascending order; empty: unknown.
        """
        sequence = decoder.sequence
        model = sequence.ctx.model
        self.decoder = decoder
        self.answer = Answer(model, max_tokens, sequence.options.n_ctx, stop, preserved)
        self.n_prompt, self.prefill_s = 0, 0.0
        self._began: float | None = None  # when the answer began
        sampler = Sampler(sampling or Sampling(), model)
        self._writer = Writer(decoder, self.answer, sampler)
        self._claim = decoder.claim()
        self._damage: SnapshotError | None = None  # found in the common prefix
        if whole:  # last: if an earlier line refuses the prompt, the text stays
            n_kept, self._damage = keep_common(decoder, prompt)
            prompt = prompt[n_kept:]
        self._text = np.concatenate([sequence.tokens, prompt]).astype(np.int32)  # the text to read before the answer
        self._marks = marks or (self._last_graph,)
        self._reader: Iterator[Event] | None = None
        self._guesses: Tokens | None = None  # drafted after the last token; None: not drafted yet
        self._guessing_s = 0.0
        n_answer = min(max_tokens, _AHEAD) if max_tokens >= 0 else _AHEAD
        with suppress(HostMemoryError):  # the answer may be shorter; reading reserves the prompt's part
            if sequence.pager:
                sequence.pager.expect(min(len(prompt) + n_answer, sequence.options.n_ctx - sequence.n_tokens))
        self._due = len(prompt) > 0 or sequence.pending is None  # a token must be sampled from the last one's logits
        self._goes_on = not self._due
        last = sequence.pending if self._goes_on else None
        sampler.read(self._text if last is None else np.append(self._text, last))
        if len(prompt):
            self.read_on()
            return
        if sequence.pending is not None and not self._due:
            self.answer.go_on(sequence.tokens, sequence.pending)
            if sequence.selector is not None:
                sequence.selector.rest()  # do not measure the pause as decode time
        self._begin_answer()

    @property
    def reading(self) -> bool:
        """Whether part of the prompt has yet to be read."""
        return self._reader is not None

    @property
    def _last_graph(self) -> int:
        """The position where the prompt's last graph begins. A checkpoint there splits no graph."""
        start, n_ubatch = self.decoder.sequence.n_tokens, self.decoder.sequence.options.n_ubatch
        return start + max(0, len(self._text) - start - 1) // n_ubatch * n_ubatch

    @property
    def n_text(self) -> int:
        """Positions to be read before the answer begins or continues."""
        return len(self._text)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self._reader is None and self.answer.reason is not None

    def check(self) -> None:
        """Raise InUseError if another call has taken the sequence."""
        self._claim.check()

    @property
    def decode_s(self) -> float:
        """Seconds since the answer began; 0 while it has no token."""
        return time.perf_counter() - self._began if self._began is not None and self.answer.n_tokens else 0.0

    @property
    def draft_stats(self) -> DraftStats | None:
        """Counts of speculative decoding for the answer; None without drafts, and before the answer begins."""
        parts = [part.stats for part in (self.decoder.drafts, self.decoder.lossless) if part]
        return sum_stats(parts) if parts and self._began is not None else None

    def rest(self) -> Iterator[Event]:
        """Read and answer to the end, and yield the events. The text of a damaged snapshot is read again. Ctrl-C ends the answer."""
        if self._damage:
            yield _read_again(self._damage)
        try:
            while not self.ended:
                try:
                    yield from self.read() if self.reading else self.step()
                except SnapshotError as err:
                    yield _read_again(err)
                    self.recover()
        except Interrupted:
            self.answer.reason = "interrupted"

    @property
    def counts(self) -> dict[str, Any]:
        """Counts and times of the prompt and the answer so far: fields of Stats."""
        drafts, meter = self.draft_stats, self.decoder.meter
        return {
            "n_prompt": self.n_prompt,
            "n_generated": self.answer.n_tokens,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            **(asdict(drafts) if drafts else {}),
            **(asdict(meter.stats) if meter else {}),
        }

    #
    # the prompt
    #

    def read(self) -> Iterator[Event]:
        """Read one batch of the prompt. After the last one, sample the answer's first token. Raises InUseError, and the errors of
        Decoder.prefill().
        """
        event: Event | None = None
        while self.reading and not isinstance(event, Prefill):
            event = self._claim.run(self._next)
            if event is None:
                break
            yield event
        if self.reading:
            yield from self._claim.run(self._read_all)

    def _next(self) -> Event | None:
        """Return the reader's next event; None at the end of the text."""
        event = next(self._reader or iter(()), None)
        if event is None and self.decoder.sequence.n_tokens < len(self._text):  # an error ended the reader
            self.read_on()
            event = next(self._reader or iter(()), None)
        if isinstance(event, Prefill) and self._began is None:
            self.n_prompt, self.prefill_s = event.done, event.seconds
        return event

    def _read_all(self) -> list[Token]:
        """Begin the answer if the whole text has been read. Returns the answer's new tokens."""
        if self.decoder.sequence.n_tokens < len(self._text):
            return []
        self._reader = None
        self._begin_answer()
        return self.answer.shown()

    def read_on(self) -> None:
        """Prepare to read the rest of the text, from the sequence's last position."""
        self._reader = self.decoder.prefill(self._text[self.decoder.sequence.n_tokens :], self._marks)

    def recover(self, n_kept: int = 0) -> None:
        """Roll a damaged sequence back to n_kept positions, and prepare to read its text again. The answer then continues where it
        stopped. Raises InUseError.
        """
        self._claim.run(self._recover, n_kept)

    def _recover(self, n_kept: int) -> None:
        sequence, self._guesses = self.decoder.sequence, None
        if not self.reading:
            self._text, self._due = sequence.tokens, sequence.n_tokens > self._writer.at
        if n_kept:
            self.decoder.rollback(n_kept)
        else:
            self.decoder.clear()
        if sequence.n_tokens < len(self._text):
            self.read_on()
        else:
            self._begin_answer()

    def _begin_answer(self) -> None:
        sequence, answer = self.decoder.sequence, self.answer
        if self._began is None:
            self._began = time.perf_counter()
            if self.decoder.drafts:
                self.decoder.drafts.begin(sequence.history)
            self.decoder.begin_answer(goes_on=self._goes_on)
            if self.decoder.meter:
                self.decoder.meter.reset(self.prefill_s)
        if self._due and answer.reason is None:
            self._writer.write()
        else:
            sequence.pending = answer.token
        self._writer.at = sequence.n_tokens

    #
    # the answer: prepare(), next_step() and compare() are parts of a step, for step_together()
    #

    def step(self, following: "Generation | None" = None) -> list[Event]:
        """Decode the last token, perhaps with drafted ones, and sample the next. Raises InUseError, and the errors of
        Decoder.decode().

        following: the generation that takes the next step. That generation may draft while this one's draft is verified. None, or
        this generation itself: no other generation takes turns.
        """
        return self._claim.run(self._step, following)

    def _step(self, following: "Generation | None") -> list[Event]:
        if lossless := self.decoder.lossless_now:
            self._writer.go_back()
            return [
                *LosslessStep(self._writer, lossless).take(
                    following.ahead() if following and following is not self else None
                ),
                *self.answer.shown(),
                *self.decoder.after_step(),
            ]
        self.prepare()
        [events] = steps.take([self.next_step(self.decoder.sequence.options.n_ubatch)])
        found = self.compare()  # before shown(): if it is cut off, no tokens are lost
        return [*events, *self.answer.shown(), *found, *self.decoder.after_step()]

    def ahead(self) -> Beside | None:
        """Return the part of the next step that can run while another answer's draft is verified, or None."""
        lossless = None if self.reading or self.ended else self.decoder.lossless_now
        if not lossless or not self._claim.holds or self.decoder.sequence.n_tokens > self._writer.at:
            return None
        return LosslessStep(self._writer, lossless).ahead()

    def prepare(self) -> None:
        """Prepare a step: undo an interrupted one, and begin a comparison with the full cache if one is due."""
        self._writer.go_back()
        if meter := self.decoder.metered:
            meter.begin()

    def next_step(self, room: int) -> PlainStep:
        """Return the next step: drafted if there are guesses, else plain. room: the largest batch, in tokens."""
        if self.decoder.drafts:
            self._draft()
        guesses, self._guesses = self._guesses, None
        if guesses is None or not len(guesses):
            return PlainStep(self._writer)
        width, n_most = self._limits()
        width = min(width, room)
        n = min(len(guesses), n_most - 1, width - 1)
        if n < 1:
            return PlainStep(self._writer)
        return DraftedStep(self._writer, guesses[:n], width, self._guessing_s)

    #
    # guesses
    #

    def draft(self) -> bool:
        """Draft tokens after the last one, unless they are drafted already. Returns whether the step needs its own batch."""
        return self._claim.run(self._draft)

    def _draft(self) -> bool:
        drafts, sequence = self.decoder.drafts, self.decoder.sequence
        if self.decoder.lossless_now:
            return True
        if drafts is None:
            return False
        alone = drafts.reads_features or sequence.recurrent
        if self._guesses is None:
            self._writer.go_back()
            begin = time.perf_counter()
            n_most = self._limits()[1]
            none = np.empty(0, np.int32)
            self._guesses = drafts.guess(sequence.history, self._writer.token, n_most - 1) if n_most > 1 else none
            self._guessing_s = time.perf_counter() - begin
        return alone and (bool(len(self._guesses)) or drafts.reads_features)

    def _limits(self) -> tuple[int, int]:
        """Return the width of the batch that verifies a draft, and how many of its tokens may be accepted; (1, 1): no draft.

        Within these limits, each token attends to the same chunks as if it were decoded alone.
        """
        sequence, drafts = self.decoder.sequence, self.decoder.drafts
        options = sequence.options
        width = drafts.length.n + 1 if drafts else 1
        n_batch = min(
            self.decoder.n_batch, options.n_ubatch
        )  # one graph: with more, the last token's queries may be lost
        if width == 1 or sequence.n_tokens + width > options.n_ctx or width > n_batch:
            return 1, 1
        n_most, selector, pager = self.answer.left(sequence.n_tokens) + 1, sequence.selector, sequence.pager
        if pager:
            width = pager.fitting(width)
            n_most = min(n_most, selector.n_steady) if selector else n_most
        return width, min(n_most, width)

    #
    # the meter
    #

    def compare(self) -> list[Event]:
        """Compare the last tokens with the full cache, once enough of them are sampled. If they agree too seldom, switch to lossless
        decoding. Returns the events.
        """
        meter, options = self.decoder.metered, self.decoder.sequence.options
        found = meter.check() if meter else None
        if meter is None or found is None:
            return []
        agreement = meter.checks.agreement
        if self.ended or agreement is None or agreement >= options.min_agreement:
            return [found]
        self._recover(self.decoder.n_exact)
        self.decoder.be_lossless()
        return [
            found,
            Warn(
                f"only {100 * agreement:.0f} % of the last compared tokens agree with the full cache, less than the"
                f" {number(100 * options.min_agreement)} % of `min_agreement`: the answer is read"
                " again, and decoding is lossless from here on"
            ),
        ]


def _read_again(err: SnapshotError) -> Warn:
    return Warn(f"{err}; the restored text is read again")


def step_together(generations: Sequence[Generation]) -> list[list[Event]]:
    """Decode the last tokens of several answers in one batch, perhaps with drafted ones, and sample the next token of each.
    Returns the events of each, except Token.

    Raises InUseError before anything is decoded if a generation has lost its sequence. Also raises the errors of decode_each().
    After an error, each answer that lacks its new token gets it in its next step.
    """
    if not generations:
        return []
    return generations[0].decoder.guard.run(_step_together, generations)


def _step_together(generations: Sequence[Generation]) -> list[list[Event]]:
    for generation in generations:
        generation.check()
        generation.decoder.check_joins()
    for generation in generations:
        generation.prepare()
    room = max(1, generations[0].decoder.sequence.options.n_ubatch // len(generations))
    happened = steps.take([generation.next_step(room) for generation in generations])
    return [
        [*events, *generation.compare(), *generation.decoder.after_step()]
        for generation, events in zip(generations, happened, strict=True)
    ]
