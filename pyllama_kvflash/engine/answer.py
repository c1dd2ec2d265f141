"""An answer as it grows: where it ends, and how much of its text can be shown."""

from collections.abc import Collection, Sequence

from pyllama_kvflash.errors import UsageError, out_of_range
from pyllama_kvflash.events import Probs, Token
from pyllama_kvflash.native import Model, Tokens
from pyllama_kvflash.text import TextStream

MAX_ANSWER = 2**31 - 1  # tokens
_TAIL = 8  # enough tokens for a whole character: four bytes, one token each, with special tokens in between


def check_max_tokens(max_tokens: int, least: int = 0) -> None:
    """Raise UsageError unless max_tokens is -1, or from `least` to MAX_ANSWER."""
    if max_tokens != -1 and not least <= max_tokens <= MAX_ANSWER:
        msg = f"{out_of_range(max_tokens, least, MAX_ANSWER, '`max_tokens`')}, or -1, which continues until the context is full"
        raise UsageError(msg)


class Answer:
    """The tokens of an answer, taken one by one.

    token: the last token taken, which is not decoded yet; None before the first, and after the end of text.
    reason: why the answer ended, as in events.Done; None while it continues.
    """

    def __init__(
        self, model: Model, max_tokens: int, n_ctx: int, stop: Sequence[str], preserved: Collection[int] = ()
    ) -> None:
        """max_tokens: the most tokens of the answer; -1: no limit, 0: the prompt is only read. n_ctx: positions of the context.
        preserved: special tokens that are shown as text.

        Raises UsageError.
        """
        check_max_tokens(max_tokens)
        self.n_tokens = 0
        self.token: int | None = None
        self.reason: str | None = "length" if max_tokens == 0 else None
        self._model = model
        self._max_tokens = max_tokens
        self._n_ctx = n_ctx
        self._preserved = preserved
        self._text = TextStream(stop)
        self._shown: list[Token] = []

    def take(self, token: int, pos: int, probs: Probs | None = None) -> bool:
        """Append a token, which will be decoded at pos. Returns whether the answer continues. probs: None unless asked for."""
        self.token = None
        if self._model.is_eog(token):
            self.reason = "eos"
            return False
        self.n_tokens += 1
        self.token = token
        piece = self._model.piece(token, special=token in self._preserved)
        self._shown.append(Token(token, self._text.push(piece), probs))
        if self._text.stopped:
            self.reason = "stop"
        elif self.n_tokens == self._max_tokens:
            self.reason = "length"
        elif pos >= self._n_ctx:
            self.reason = "context"
        return self.reason is None

    def left(self, pos: int) -> int:
        """Return how many tokens may follow the last one, which will be decoded at pos."""
        room = self._n_ctx - pos - 1
        return room if self._max_tokens < 0 else min(room, self._max_tokens - self.n_tokens)

    def shown(self) -> list[Token]:
        """Return the tokens taken since the last call."""
        res, self._shown = self._shown, []
        return res

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._text.stop

    def go_on(self, tokens: Tokens, token: int) -> None:
        """Continue an interrupted answer. tokens: (n,) int32, decoded so far. token: the next token, not decoded yet.

        If the interruption split a character, the character is shown once it is complete.
        """
        self.token = token
        before = [*tokens[-_TAIL:].tolist(), token]
        self._text.go_on(b"".join(self._model.piece(t, special=t in self._preserved) for t in before))

    def flush(self) -> str:
        """Return the text held back so far, without an incomplete character if the answer can continue."""
        return self._text.flush(goes_on=self.reason not in {"eos", "stop"})
