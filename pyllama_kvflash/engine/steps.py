"""Steps: the three ways to decode the next tokens of an answer.

A plain step decodes the last token. A drafted step decodes it together with drafted tokens, and keeps those that the target
accepts. Both can share a batch with other answers. A lossless step drafts through the pool, and verifies against all positions.
"""

import time
from collections.abc import Sequence

import numpy as np

from pyllama_kvflash import native
from pyllama_kvflash.engine.decoder import Step, decode_each
from pyllama_kvflash.engine.lossless import Lossless
from pyllama_kvflash.engine.writer import Writer
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.pool.exact import Beside
from pyllama_kvflash.pool.step import Part


class PlainStep(Step):
    """Decodes the last token, and samples the next one."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer.decoder, Part(writer.decoder.sequence, np.array([writer.token], np.int32)))
        self.writer = writer

    def report(self, seconds: float) -> None:
        """Report the time of the step to the drafter."""
        if drafts := self.decoder.drafts:
            drafts.plain(seconds)


class DraftedStep(PlainStep):
    """Decodes the last token with drafted ones, and keeps the accepted ones."""

    def __init__(self, writer: Writer, guesses: Tokens, width: int, guessing_s: float) -> None:
        """guesses: drafted tokens (n,) int32, n < width. width: tokens of the batch, which is padded so that the graph stays the
        same. guessing_s: seconds that drafting took.
        """
        super().__init__(writer)
        tokens = np.full(width, writer.token, np.int32)
        tokens[1 : len(guesses) + 1] = guesses
        self.part = Part(writer.decoder.sequence, tokens, draft=True)
        self._n_guessed = len(guesses)
        self._guessing_s = guessing_s

    def accept(self) -> None:
        """Accept the guesses that are right."""
        self.writer.accept(self.part, self._n_guessed)

    def report(self, seconds: float) -> None:
        """Report to the drafter how many guesses were accepted. seconds: the time of the step, not counting drafting."""
        drafts, n_right = self.decoder.drafts, self.decoder.sequence.n_tokens - self.start - 1
        if drafts:
            width, guessing_s = len(self.part.tokens), self._guessing_s
            drafts.checked(self._n_guessed, n_right, guessing_s + seconds, guessing_s, width)


class LosslessStep(Step):
    """Drafts through the pool, and verifies the draft against all positions. The tokens kept are the full cache's."""

    def __init__(self, writer: Writer, lossless: Lossless) -> None:
        super().__init__(writer.decoder, Part(writer.decoder.sequence, np.array([writer.token], np.int32), draft=True))
        self._writer = writer
        self._lossless = lossless
        self._n_guessed = 0

    @property
    def _left(self) -> int:
        """How many tokens may be drafted after the last one."""
        return min(self._writer.answer.left(self.start), self.decoder.n_lossless - 1)

    def ahead(self) -> Beside | None:
        """Return the part of the step that can run while another sequence's draft is verified, or None."""
        return self._lossless.ahead(self._writer.token, self._left, self._writer.sampler)

    def take(self, other: Beside | None = None) -> list[Event]:
        """Take the step. other: another sequence's work, done while the draft is verified. Returns the events, except Token. Raises
        the errors of Decoder.decode_exactly().
        """
        writer, lossless, decoder, left = self._writer, self._lossless, self.decoder, self._left
        guesses, events = lossless.draft(writer.token, left, writer.sampler)
        begin = time.perf_counter()
        tokens, self._n_guessed = np.full(max(lossless.width, len(guesses) + 1), writer.token, np.int32), len(guesses)
        tokens[1 : len(guesses) + 1] = guesses
        self.part.tokens = tokens
        self.beside = lossless.beside(left, other)
        events += decoder.decode_exactly(self, native.ALL)
        lossless.checked(len(guesses), decoder.sequence.n_tokens - self.start - 1, time.perf_counter() - begin)
        return events

    def accept(self) -> None:
        """Accept the guesses that are right."""
        self._writer.accept(self.part, self._n_guessed)
        n, following = self.part.accepted or (0, None)
        self.goes_on = self._lossless.accepted(n, following if self._writer.answer.reason is None else None)


def take(steps: Sequence[PlainStep]) -> list[list[Event]]:
    """Take one step of each of several answers, in one batch. Returns the events of each, except Token.

    Raises the errors of decode_each(). After an error, each answer that lacks its new token gets it in its next step.
    """
    begin = time.perf_counter()
    happened = decode_each(steps)
    missed = []
    for step, events in zip(steps, happened, strict=True):
        if step.part.draft:
            continue  # accept() has taken its tokens
        if events and step.decoder.missed(events):
            missed.append((step, events))
        else:
            step.writer.write()
    for step, events in missed:  # last, because this overwrites the logits of the others
        events.extend(list(step.decoder.again(events)))
        step.writer.write()
    seconds = (time.perf_counter() - begin) / len(steps)
    for step in steps:
        if step.decoder.drafts:
            step.report(seconds)
    return happened
