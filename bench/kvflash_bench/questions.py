"""Questions about a text, the points of their answers, and texts that are as long as they may be."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def share_found(answer: str, expected: Sequence[str]) -> float:
    """Return RULER's `string_match_all`: the share of the expected strings that are in the answer, ignoring case."""
    return sum(e.lower() in answer.lower() for e in expected) / len(expected)


Score = Callable[[str, Sequence[str]], float]
"""Gives the points of an answer, 0 to 1, from it and the expected strings."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the beginning of its answer, and the strings that the answer must have.

    n_new: most tokens of an answer. right: the right answer after the prefix, as a model would write it; "" if none is
    known. schema: JSON schema that the answer keeps to; "": none.
    """

    text: str
    prefix: str
    expected: tuple[str, ...]
    n_new: int
    right: str = ""
    score: Score = share_found
    schema: str = ""


Questions = tuple[Question, ...]
"""Questions about one text: the first has the whole text before it, the others follow the previous answer."""

Count = Callable[[Questions], int]
"""Counts the tokens of questions as a model gets them, without the answers."""

Build = Callable[[int], Questions]
"""Makes a text of a number of units (lines, words). It hides the same things whatever its size."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a task makes a text from.

    haystack: prose to hide things in. n_tokens: of the text, its questions and their answers.
    """

    haystack: str
    rng: random.Random
    n_tokens: int
    count: Count

    def n_tokens_of(self, text: str) -> int:
        """Return the number of tokens that a text adds to a question."""
        with_it, without = (self.count((Question(f"It is{more}", "", (), 0),)) for more in (f" {text}", ""))
        return with_it - without


Task = Callable[[Given], Build]

_FINE = 200  # a text is as long as it can be, to within 1/_FINE of it


def fit(build: Build, n_total: Count, n: int) -> Questions | None:
    """Return the text of the most units, nearly, that has at most n tokens in all, None if the shortest has more."""
    best, few, many = None, 0, 8
    while n_total(text := build(many)) <= n:
        best, few, many = text, many, 2 * many
        if many > n:  # it has no more units to add, such as different words
            return best
    while many - few > max(1, many // _FINE):
        middle = (few + many) // 2
        if n_total(text := build(middle)) <= n:
            best, few = text, middle
        else:
            many = middle
    return best
