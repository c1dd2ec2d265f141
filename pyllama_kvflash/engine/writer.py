"""The writer: samples the tokens of an answer from the logits of the last batch."""

from pyllama_kvflash.engine.answer import Answer
from pyllama_kvflash.engine.decoder import Decoder
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Probs
from pyllama_kvflash.native import Sampler
from pyllama_kvflash.pool.step import Part


class Writer:
    """Writes an answer to a decoder's sequence.

    at: positions before the answer's last token. An interrupted step may leave more in the sequence.
    """

    def __init__(self, decoder: Decoder, answer: Answer, sampler: Sampler) -> None:
        self.decoder = decoder
        self.answer = answer
        self.sampler = sampler
        self.at = 0

    @property
    def token(self) -> int:
        """The last token of the answer, to be decoded next. Raises UsageError if there is none."""
        if self.answer.token is None:
            msg = "the answer has ended, or not begun: there is no token to continue from"
            raise UsageError(msg)
        return self.answer.token

    def write(self) -> None:
        """Sample the next token from the last token's logits. Call this before the next batch, which overwrites the logits."""
        sequence = self.decoder.sequence
        self._sample(sequence.n_tokens - 1, -1)
        sequence.pending = self.answer.token

    def accept(self, part: Part, n_guessed: int) -> None:
        """Sample a token after each token of a decoded draft, until one differs from the draft's next token. Sets
        `part.accepted` after each sample, so that its value is right even if this call is cut off.

        n_guessed: how many tokens of the part are drafted. Before them comes the answer's last token, after them padding.
        """
        start, answer = part.sequence.n_tokens, self.answer
        for i in range(n_guessed + 1):
            part.accepted = i + 1, None
            goes_on = self._sample(start + i, i)
            part.accepted = i + 1, answer.token
            if not goes_on or i == n_guessed or answer.token != part.tokens[i + 1]:
                return

    def _sample(self, pos: int, i: int) -> bool:
        """Sample a token after position pos, which is token i of the last batch. Returns whether the answer continues."""
        ctx, meter = self.decoder.sequence.ctx, self.decoder.meter
        if meter:
            meter.saw(pos, i)
        token = self.sampler.sample(ctx, i)
        probs = self.sampler.probs(ctx, token, i)
        goes_on = self.answer.take(token, pos + 1, None if probs is None else Probs(*probs))
        self.at = pos + 1
        return goes_on

    def go_back(self) -> None:
        """Roll back the answer's last token if it was decoded but no token was sampled after it: its logits are gone."""
        sequence = self.decoder.sequence
        if sequence.n_tokens > self.at:
            self.decoder.rollback(self.at)
            sequence.pending = self.answer.token
