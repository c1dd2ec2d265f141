"""The writer: samples the tokens of an answer from the logits of what was decoded."""

from pyllama_kvflash.engine.answer import Answer
from pyllama_kvflash.engine.decoder import Decoder
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Probs
from pyllama_kvflash.native import Sampler
from pyllama_kvflash.pool.step import Part


class Writer:
    """Writes an answer on a decoder's sequence.

    at: positions before the answer's last token. The sequence has more after a step that was cut off.
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
        """Sample the next token from the last one's logits. Call this right after its decode: they do not stay."""
        sequence = self.decoder.sequence
        self._sample(sequence.n_tokens - 1, -1)
        sequence.pending = self.answer.token

    def accept(self, part: Part, n_guessed: int) -> None:
        """Sample what follows each token of a decoded draft while its logits are there, for as long as that is the next one of
        the draft. The part then has what is accepted, wherever this is cut off.

        n_guessed: guesses among the part's tokens. The first token is the answer's last one; those after the guesses are padding.
        """
        start, answer = part.sequence.n_tokens, self.answer
        for i in range(n_guessed + 1):
            part.accepted = i + 1, None
            goes_on = self._sample(start + i, i)
            part.accepted = i + 1, answer.token
            if not goes_on or i == n_guessed or answer.token != part.tokens[i + 1]:
                return

    def _sample(self, pos: int, i: int) -> bool:
        """Sample what follows the token at position pos, token i of the last batch. Returns whether the answer continues."""
        ctx, meter = self.decoder.sequence.ctx, self.decoder.meter
        if meter:
            meter.saw(pos, i)
        token = self.sampler.sample(ctx, i)
        probs = self.sampler.probs(ctx, token, i)
        goes_on = self.answer.take(token, pos + 1, None if probs is None else Probs(*probs))
        self.at = pos + 1
        return goes_on

    def go_back(self) -> None:
        """Take the last token out again if it was decoded but nothing was sampled after it: its logits are gone."""
        sequence = self.decoder.sequence
        if sequence.n_tokens > self.at:
            self.decoder.rollback(self.at)
            sequence.pending = self.answer.token
