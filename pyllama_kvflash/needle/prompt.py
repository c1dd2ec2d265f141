"""Needle prompts: generated prose with secret codes at even depths, and one question for each code."""

import random
import re
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final

from . import words

MAX_NEEDLES: Final = 1000

_STATEMENT: Final = "The secret code for the {key} is {answer}."
_QUESTION: Final = "Question: what is the secret code for the {key}? Answer:"
_SHARED_WORD: Final = 0.15  # chance that a trained key takes its adjective, or its noun, from an earlier key
_HELD_OUT_WORDS: Final = 0.5  # chance that a held-out key has held-out words, not a new pair of trained ones
_SLACK: Final = 32  # tokens that a document may lose because the counts of its lines do not add up
_ROUNDS: Final = 8  # most layouts to try until the count of the whole text fits
_TAIL: Final = 24  # a gap of fewer tokens at the end is left open
_PIECE: Final = 160  # characters of a user's text that stay together
_REDRAWS: Final = 64  # sentences tried for a larger gap


@dataclass(frozen=True, slots=True)
class Needle:
    """A secret code hidden in a document, and the question that asks for it.

    `start` and `end` are the character span of `statement` in the document, end exclusive.  If the needles were
    dropped, the span is empty and marks where the statement would have been.
    """

    key: str
    answer: str
    statement: str
    question: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class NeedlePrompt:
    """A document and its needles, in document order.

    `text` ends with a newline: `text + needle.question` is a whole prompt, and a model that recalls the
    needle continues it with a space, the answer and a full stop.  `n_tokens` counts `text` alone, without BOS.
    """

    text: str
    needles: tuple[Needle, ...]
    n_tokens: int
    seed: int


def make_prompt(
    n_tokens: int,
    count: Callable[[str], int],
    *,
    n_needles: int = 16,
    seed: int = 1,
    held_out: bool = False,
    drop: bool = False,
    haystack: str | None = None,
) -> NeedlePrompt:
    """Write a document of prose with `n_needles` secret codes at even depths, each on a line of its own.

    The result depends on the arguments alone, not on the process or the Python version.  The same `seed`, `n_needles`
    and `held_out` give the same keys and answers at every length, dropped or not.

    Args:
        n_tokens: tokens that the document may take.  It takes at most about 100 fewer.  The
            question (about 20 tokens), the answer (5) and BOS come on top.
        count: counts the tokens of a text with the model's own tokenizer, without BOS.  It is called about once on
            every line and once on the whole text.  The counts of the lines should add up to that of the text, as they
            do for tokenizers that split at newlines; otherwise the difference is corrected at the cost of more calls.
        n_needles: codes to hide, 1 to `MAX_NEEDLES`.
        seed: number of the document, 0 or more.
        held_out: take keys that the bundled model was not trained on.  Even with the full cache, the model
            misses the codes of some of these keys.  With trained keys, it misses none.
        drop: leave the statements out and fill the room with prose.  Keys, answers and questions stay the
            same, so a correct answer could only be a guess.
        haystack: text to hide the codes in instead of generated prose.  It is read from its beginning, and repeated
            if it is too short.

    Raises:
        ValueError: an argument is out of range, `n_tokens` cannot hold the needles, or `count` does not
            behave as a token counter.
    """
    if not 1 <= n_needles <= MAX_NEEDLES:
        raise ValueError(f"n_needles is {n_needles}: choose a number from 1 to {MAX_NEEDLES}.")
    if seed < 0:
        raise ValueError(f"seed is {seed}: choose 0 or more.")

    rng = random.Random(seed)
    keys = _draw_keys(rng, n_needles, held_out=held_out)
    answers = _draw_answers(rng, n_needles)
    statements = [_STATEMENT.format(key=key, answer=answer) for key, answer in zip(keys, answers, strict=True)]
    lines = [statement + "\n" for statement in statements]
    needed = count("".join(lines))
    if needed > n_tokens:
        raise ValueError(
            f"n_tokens is {n_tokens}, but the {n_needles} needles alone take {needed} tokens: "
            f"raise n_tokens to {needed} or more, or lower n_needles"
        )

    prose = _Prose(rng, count, haystack)
    layout, total = _fit(prose, [""] * n_needles if drop else lines, n_tokens, 0 if drop else needed)
    if not layout.text:
        raise ValueError(f"n_tokens is {n_tokens}, too few for one sentence of prose: raise n_tokens")
    each = zip(keys, answers, statements, layout.starts, strict=True)
    needles = tuple(_needle(*its, drop=drop) for its in each)
    return NeedlePrompt(text=layout.text, needles=needles, n_tokens=total, seed=seed)


def _needle(key: str, answer: str, statement: str, start: int, *, drop: bool = False) -> Needle:
    """Return the needle whose statement begins at `start`, or would begin there if it were not dropped."""
    end = start if drop else start + len(statement)
    return Needle(key, answer, statement, _QUESTION.format(key=key), start, end)


# ---- keys and answers --------------------------------------------------------------------------------------


def _draw_keys(rng: random.Random, n: int, *, held_out: bool) -> list[str]:
    """Draw `n` different keys: pairs of words that training used or, if `held_out`, pairs that it did not."""
    pairs: dict[tuple[str, str], None] = {}
    adjectives: list[str] = []
    nouns: list[str] = []
    while len(pairs) < n:
        if held_out and rng.random() < _HELD_OUT_WORDS:
            pair = rng.choice(words.HELD_OUT_ADJECTIVES), rng.choice(words.HELD_OUT_NOUNS)
        else:
            shared_adjective = not held_out and adjectives and rng.random() < _SHARED_WORD
            shared_noun = not held_out and nouns and rng.random() < _SHARED_WORD
            pair = (
                rng.choice(adjectives if shared_adjective else words.TRAINED_ADJECTIVES),
                rng.choice(nouns if shared_noun else words.TRAINED_NOUNS),
            )
            if words.is_held_out_pair(*pair) != held_out:
                continue
        if pair not in pairs:
            pairs[pair] = None
            adjectives.append(pair[0])
            nouns.append(pair[1])
    return [f"{adjective} {noun}" for adjective, noun in pairs]


def _draw_answers(rng: random.Random, n: int) -> list[str]:
    """Draw `n` different numbers of seven digits."""
    answers: dict[str, None] = {}
    while len(answers) < n:
        answers[str(rng.randint(1_000_000, 9_999_999))] = None
    return list(answers)


# ---- layout ------------------------------------------------------------------------------------------------


class _Prose:
    """An endless stream of prose, taken in lines that fit the room that is left. It can be read again from its start.

    The tokens of a line are counted once, however often it is taken.
    """

    def __init__(self, rng: random.Random, count: Callable[[str], int], haystack: str | None = None) -> None:
        self._source = (
            cycle(_paragraphs(haystack)) if haystack is not None else iter(lambda: words.paragraph(rng), None)
        )
        self._sizes: dict[str, int] = {}
        self._paragraphs: list[list[str]] = []
        self._next = 0  # paragraph to read after `_rest`
        self._rest: list[str] = []  # sentences left of the current paragraph
        self.count = count

    def rewind(self) -> None:
        """Go back to the first paragraph."""
        self._next = 0
        self._rest = []

    def take(self, room: int) -> str:
        """Take a line of at most `room` tokens.  Returns "" if the next sentence is longer.

        The line is the rest of the current paragraph, or its first sentences that fit.
        """
        if not self._rest:
            if self._next == len(self._paragraphs):
                self._paragraphs.append(next(self._source))
            self._rest = self._paragraphs[self._next]
            self._next += 1
        fits = len(self._rest)
        if self.size(self._line(fits)) > room:
            fits = bisect_right(range(1, fits), room, key=lambda n: self.size(self._line(n)))
        if not fits:
            return ""
        line = self._line(fits)
        self._rest = self._rest[fits:]
        return line

    def skip(self) -> None:
        """Pass over the sentence that did not fit."""
        self._rest = self._rest[1:]

    def size(self, line: str) -> int:
        """Return the number of tokens of `line`."""
        size = self._sizes.get(line)
        if size is None:
            size = self._sizes[line] = self.count(line)
            if size < 1:
                raise ValueError(f"count gave {size} for a line of text: it must give the number of tokens.")
        return size

    def _line(self, n: int) -> str:
        """Join the next `n` sentences to a line."""
        return " ".join(self._rest[:n]) + "\n"


def _paragraphs(text: str) -> list[list[str]]:
    """Split the lines of a text into sentences, and long sentences, such as those in scripts without spaces, into pieces."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    sentences = [re.split(r"(?<=[.!?]) ", line) for line in lines if line]
    found = [[piece for s in line for piece in textwrap.wrap(s, _PIECE)] for line in sentences]
    if not found:
        raise ValueError("the haystack has no words: give a text.")
    return found


@dataclass(frozen=True, slots=True)
class _Layout:
    """A document, the characters at which its needles start, and the sum of its prose lines' token counts."""

    text: str
    starts: list[int]
    prose_tokens: int


def _lay_out(prose: _Prose, needles: Sequence[str], room: int) -> _Layout:
    """Put the lines `needles` at even depths into at most `room` tokens of prose."""
    prose.rewind()
    parts: list[str] = []
    starts: list[int] = []
    used = 0  # tokens of prose
    length = 0  # characters of prose and needles
    n = len(needles)
    for i, needle in enumerate(needles):
        depth = room * (2 * i + 1) // (2 * n)
        while used < depth and (line := prose.take(depth - used)):
            parts.append(line)
            used += prose.size(line)
            length += len(line)
        parts.append(needle)
        starts.append(length)
        length += len(needle)
    redraws = _REDRAWS
    while (room - used >= _TAIL or not length) and redraws:
        if line := prose.take(room - used):
            parts.append(line)
            used += prose.size(line)
            length += len(line)
        else:
            prose.skip()
            redraws -= 1
    return _Layout("".join(parts), starts, used)


def _fit(prose: _Prose, needles: Sequence[str], n_tokens: int, needle_tokens: int) -> tuple[_Layout, int]:
    """Lay the document out so that the whole text has at most `n_tokens` tokens, and not many fewer.

    Returns the layout and its number of tokens.  If the counts of the lines do not add up to the count of the text, the same
    prose is laid out again with an allowance for the difference.
    """
    allowed = 0  # tokens that the text is allowed to have beyond the sum over its lines
    for attempt in range(_ROUNDS):
        layout = _lay_out(prose, needles, n_tokens - needle_tokens - allowed)
        total = prose.count(layout.text)
        excess = total - needle_tokens - layout.prose_tokens
        if total <= n_tokens and allowed - excess <= _SLACK:
            return layout, total
        allowed = excess if total <= n_tokens else excess + attempt * _SLACK // 4
    raise ValueError(
        f"n_tokens is {n_tokens}, but no document fits it in {_ROUNDS} tries, as count gives other numbers "
        "for a text than for its lines: pass the model's own tokenizer without BOS."
    )
