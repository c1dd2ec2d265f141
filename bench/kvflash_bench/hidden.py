"""What is hidden in texts, prose and noise to hide it in, and needles in a haystack."""
# ruff: noqa: S311 (random text, not secrets)

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from kvflash_bench.questions import Build, Given, Question, Questions
from pyllama_kvflash.needle.words import KEY_ADJECTIVES, KEY_NOUNS


def word_pairs(rng: random.Random, n: int, but: Sequence[str] = ()) -> list[str]:
    """Return n different pairs of words, such as "wooden-harbour", none of those in `but`, or as many as there are."""
    n_pairs = len(KEY_ADJECTIVES) * len(KEY_NOUNS)
    pairs = rng.sample(range(n_pairs), min(n + len(but), n_pairs))
    found = (f"{KEY_ADJECTIVES[i // len(KEY_NOUNS)]}-{KEY_NOUNS[i % len(KEY_NOUNS)]}" for i in pairs)
    return [key for key in found if key not in but][:n]


def number(rng: random.Random) -> str:
    """Return a number of seven digits."""
    return str(rng.randint(1_000_000, 9_999_999))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def letters(rng: random.Random, n: int, alphabet: str) -> str:
    """Return n random letters."""
    return "".join(rng.choices(alphabet, k=n))


def different(n: int, make: Callable[[], str]) -> list[str]:
    """Return n different results of make()."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[make()] = None
    return list(found)


_VALUES = {"numbers": number, "uuids": _uuid}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = 40  # evenly spaced places, of which a needle takes one
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@cache
def _words(haystack: str) -> tuple[list[str], list[int]]:
    """Return the words of a text, and the index at which each sentence begins."""
    sentences = [s.split() for s in _SENTENCE_END.split(haystack.strip())]
    starts = [0]
    for sentence in sentences[:-1]:
        starts.append(starts[-1] + len(sentence))
    return [word for sentence in sentences for word in sentence], starts


def prose(haystack: str, n: int, rng: random.Random) -> list[str]:
    """Return sentences of n words in all, from a random sentence on. After the last word comes the first one again."""
    return sentences(words_from(haystack, sentence_start(haystack, rng), n))


def sentence_start(haystack: str, rng: random.Random) -> int:
    """Return the index of the word that begins a random sentence."""
    return rng.choice(_words(haystack)[1])


def words_from(haystack: str, start: int, n: int) -> list[str]:
    """Return n words, from one on. After the last word comes the first one again."""
    words, _ = _words(haystack)
    return [words[(start + i) % len(words)] for i in range(n)]


def sentences(words: Sequence[str]) -> list[str]:
    """Return words as sentences."""
    return _SENTENCE_END.split(" ".join(words))


def among(lines: Sequence[str], hidden: Sequence[str], places: Sequence[float]) -> list[str]:
    """Return the lines with the hidden ones put in before those at these shares of the whole, in order."""
    at = sorted(int(p * len(lines)) for p in places)
    res: list[str] = []
    before = 0
    for place, line in zip(at, hidden, strict=True):
        res += [*lines[before:place], line]
        before = place
    return [*res, *lines[before:]]


def depths(rng: random.Random, n: int) -> list[float]:
    """Return n different places, 40 at most, as shares of a text."""
    return [i / (_DEPTHS - 1) for i in rng.sample(range(_DEPTHS), n)]


def listed(words: Sequence[str]) -> str:
    """Return words as a sentence names them."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + ", and " + words[-1]


def needle(kind: str, key: str, value: str) -> str:
    """Return the sentence that hides a value. kind: "numbers" or "uuids"."""
    return f"One of the special magic {kind} for {key} is: {value}."


def _ask(kind: str, keys: Sequence[str], expected: Sequence[str]) -> tuple[str, str]:
    """Return a question, and the beginning of its answer."""
    one = len(expected) == 1
    what, verb, name = ("is the", "is", kind[:-1]) if one else ("are all the", "are", kind)
    query = listed(keys)
    return (
        f"What {what} special magic {name} for {query} mentioned in the provided text?",
        f" The special magic {name} for {query} mentioned in the provided text {verb}",
    )


@dataclass(frozen=True, slots=True)
class Niah:
    """Needles in a haystack.

    hay: "prose", "noise" or "needles".
    kind: of the values: "numbers" or "uuids".
    keys: "words" or "uuids".
    n_keys: needles with different keys; n_values: needles for each key.
    n_asked: keys that are asked for, in one question or, with in_turn, one after the other.
    n_new: most tokens of an answer.
    """

    hay: str = "prose"
    kind: str = "numbers"
    keys: str = "words"
    n_keys: int = 1
    n_values: int = 1
    n_asked: int = 1
    in_turn: bool = False
    n_new: int = 128

    def __call__(self, given: Given) -> Build:
        """Hide the needles."""
        rng = given.rng
        names = word_pairs(rng, self.n_keys) if self.keys == "words" else different(self.n_keys, lambda: _uuid(rng))
        found = iter(different(self.n_keys * self.n_values, lambda: _VALUES[self.kind](rng)))
        values = {name: [next(found) for _ in range(self.n_values)] for name in names}
        hidden = [needle(self.kind, name, v) for name in names for v in values[name]]
        rng.shuffle(hidden)
        places = depths(rng, len(hidden))
        asked = names[: self.n_asked]
        turns = [[name] for name in asked] if self.in_turn else [asked]
        questions = [self._question(turn, [v for name in turn for v in values[name]]) for turn in turns]
        seed = rng.random()

        def build(n: int) -> Questions:
            lines = self._lines(given.haystack, n, random.Random(seed), names)
            text = (" " if self.hay == "prose" else "\n").join(among(lines, hidden, places))
            first = questions[0]
            whole = f"{self._intro(one=len(first.expected) == 1)}\n{text}\n{first.text}"
            return (replace(first, text=whole), *questions[1:])

        return build

    def _intro(self, *, one: bool) -> str:
        kind, are, some = (self.kind[:-1], "is", "A") if one else (self.kind, "are", "Some")
        return (
            f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will quiz you"
            f" about the {kind} afterwards."
        )

    def _lines(self, haystack: str, n: int, rng: random.Random, names: Sequence[str]) -> list[str]:
        """Return the lines that the needles are hidden in. If they are needles, too, none has one of these names."""
        if self.hay == "prose":
            return prose(haystack, n, rng)
        if self.hay == "noise":
            return [NOISE] * n
        keys = word_pairs(rng, n, names) if self.keys == "words" else [_uuid(rng) for _ in range(n)]
        return [needle(self.kind, key, _VALUES[self.kind](rng)) for key in keys]

    def _question(self, keys: Sequence[str], expected: Sequence[str]) -> Question:
        text, prefix = _ask(self.kind, keys, expected)
        return Question(text, prefix, tuple(expected), self.n_new, right=f" {listed(expected)}.")
