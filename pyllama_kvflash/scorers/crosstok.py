"""Map scores from another tokenizer's tokens to ours, by the characters of the text that the tokens cover."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float64]
Spans = npt.NDArray[np.int64]
"""Characters [start, end) of each token, (n, 2) int64: in order, and a partition of [0, length of the text)."""


def char_spans(pieces: Sequence[bytes]) -> Spans:
    """Return the span of each token in the text `b"".join(pieces).decode("utf-8", "replace")`: (n, 2) int64, in
    characters.

    A character split between tokens belongs to the token that completes it, because before that token a model does not know the
    character. A broken character (U+FFFD) belongs to the token that reveals it or, at the end, to the last token with bytes. A
    token that completes no character has an empty span before its character. So does a token without bytes (a special one).
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    counts = np.fromiter((len(decode(piece)) for piece in pieces), np.int64, len(pieces))
    if rest := len(decode(b"", final=True)):
        counts[next(i for i in reversed(range(len(pieces))) if pieces[i])] += rest
    ends = np.cumsum(counts)
    return np.stack([ends - counts, ends], axis=1)


def spread(scores: npt.ArrayLike, spans_from: Spans, spans_to: Spans) -> Scores:
    """Map the scores of one tokenizer's tokens (sources) to another tokenizer's tokens (targets): each target gets the highest
    score of the sources that overlap it. scores: (n,), of the sources. Returns the targets' scores, (m,) float64.

    A target with an empty span takes the score of the source at that place or, at the end of the text, of the last
    source. Sources with an empty span overlap nothing: a BOS does not make the first word hot. If no source has text,
    all targets take the highest score. If the texts differ in length (a tokenizer may normalise: a leading space, NFC),
    positions are scaled so that both texts end together. The mapping is then off by about as many characters as differ.

    Raises ValueError if the numbers of scores and sources differ, or if there are targets but no sources.
    """
    values = np.asarray(scores, np.float64)
    if values.shape != (len(spans_from),):
        msg = f"scores have the shape {values.shape} for {len(spans_from)} spans: give one score for each span"
        raise ValueError(msg)
    if len(spans_to) == 0:
        return np.empty(0, np.float64)
    if len(values) == 0:
        msg = f"there is no score to give to {len(spans_to)} tokens: score at least one token"
        raise ValueError(msg)
    held = spans_from[:, 1] > spans_from[:, 0]
    if not held.any():
        return np.full(len(spans_to), values.max())
    # multiply each by the other's length: in whole numbers, equal texts are compared exactly
    start, end = (spans_from[held] * max(int(spans_to[-1, 1]), 1)).T
    low, high = (spans_to * int(spans_from[-1, 1])).T
    first = np.minimum(np.searchsorted(end, low, "right"), len(end) - 1)
    stop = np.searchsorted(start, high, "left")
    # reduceat takes the element at `first` if `stop` is not after it (an empty span), and refuses a `stop` past the end
    padded = np.append(values[held], 0.0)
    best: Scores = np.maximum.reduceat(padded, np.stack([first, stop], axis=1).ravel())[::2]
    return best


class Retokenizer:
    """Another tokenizer's tokens of a growing text. An update tokenizes only the new text.

    tokenize: turns UTF-8 into token ids, without special tokens. It never gets a part of a character.
    piece: returns the bytes of a token.
    overlap: how many unchanged tokens to tokenize again with the new text, because they may depend on it (up to three more
        if they split a character).

    If a token depends on text before the overlap, the result may differ from tokenizing the whole text at once. A tokenizer
    may put a space before its text. With a tokenizer that changes its text (lower case, NFC), the tokens are right, but after
    the first change every update tokenizes the whole text.

    Attributes (replaced by `update`, never changed in place):
        tokens: (n,) int32
        spans: (n, 2) int64, in characters of the text, or of the changed text if the tokenizer changes it

    Raises ValueError for a negative overlap.
    """

    def __init__(
        self, tokenize: Callable[[bytes], Sequence[int] | Tokens], piece: Callable[[int], bytes], overlap: int = 16
    ) -> None:
        if overlap < 0:
            msg = f"overlap is {overlap}: choose 0 or more"
            raise ValueError(msg)
        self.tokens: Tokens = np.empty(0, np.int32)
        self.spans: Spans = np.empty((0, 2), np.int64)
        self._tokenize = tokenize
        self._piece = piece
        self._overlap = overlap
        self._text: npt.NDArray[np.uint8] = np.empty(0, np.uint8)  # valid UTF-8
        self._ends: npt.NDArray[np.int64] = np.empty(0, np.int64)  # end of each token, in bytes of the text
        self._spelt = True  # the pieces spell the text, possibly after a space, so `_ends` is right

    def update(self, text: str | bytes) -> int:
        """Set the text (broken UTF-8 becomes U+FFFD), and return the number of unchanged leading tokens.

        If `tokenize` or `piece` raises, nothing has changed.
        """
        string = text if isinstance(text, str) else text.decode("utf-8", "replace")
        data = np.frombuffer(string.encode(), np.uint8)
        same = _common(self._text, data)
        if same == len(data) == len(self._text):
            return len(self.tokens)

        found = self._go_on(data, same) if self._spelt else None
        kept, fresh, pieces = found or (0, *self._read(data.tobytes()))
        joined = b"".join(pieces)
        spelt = found is not None or (joined.endswith(data.tobytes()) and not joined[: len(joined) - len(data)].strip())
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        ends = np.cumsum(sizes) + (len(data) - len(joined))
        spans = char_spans(pieces)
        if spelt and pieces:  # they end with the text; a space before it does not belong to it
            spans = np.maximum(spans + (len(string) - spans[-1, 1]), 0)

        tokens = np.concatenate([self.tokens[:kept], fresh])
        unchanged = _common(self.tokens, tokens)
        self.tokens, self.spans = tokens, np.concatenate([self.spans[:kept], spans])
        self._text, self._ends, self._spelt = data, np.concatenate([self._ends[:kept], ends]), spelt
        return unchanged

    def _go_on(self, data: npt.NDArray[np.uint8], same: int) -> tuple[int, Tokens, list[bytes]] | None:
        """Return the number of tokens to keep, and the ids and pieces after them; None: start from the beginning.

        same: the number of unchanged leading bytes of the text.
        """
        keep = int(np.searchsorted(self._ends, same, "right"))
        first = max(keep - self._overlap, 0)
        while first and _within(data, int(self._ends[first - 1])):
            first -= 1
        seam = int(self._ends[first - 1]) if first else 0
        if seam <= 0:  # less than 0: the tokenizer has put more than one token before the text
            return None
        tail = data[seam:].tobytes()
        fresh, pieces = self._read(tail)
        spelt = b"".join(pieces)

        # Just after the seam the old tokens are right, because they took the text before it into account; at the end the
        # new ones are. So switch from old to new after the last common token. Search for it from the end, where both
        # agree even if the tokenizer has put a space before the tail.
        known = {
            (end, token): i
            for i, end, token in zip(
                range(first, keep), self._ends[first:keep].tolist(), self.tokens[first:keep].tolist(), strict=True
            )
        }
        end = len(data)
        for j in reversed(range(len(pieces))):
            i = known.get((end, int(fresh[j])))
            if i is not None and not _within(data, end):
                return (i + 1, fresh[j + 1 :], pieces[j + 1 :]) if spelt.endswith(tail[end - seam :]) else None
            end -= len(pieces[j])
        return (first, fresh, pieces) if spelt == tail else None

    def _read(self, text: bytes) -> tuple[Tokens, list[bytes]]:
        tokens = np.asarray(self._tokenize(text), np.int32)
        return tokens, [self._piece(token) for token in tokens.tolist()]


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _within(data: npt.NDArray[np.uint8], at: int) -> bool:
    """Return whether byte `at` of this UTF-8 is within a character."""
    return at < len(data) and int(data[at]) & 0xC0 == 0x80  # noqa: PLR2004 (10xxxxxx: not the first byte of one)
