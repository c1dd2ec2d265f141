"""The texts of RULER's tasks, made anew from their published formats for any tokenizer and any haystack.

Source: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv
2404.06654), and the templates of its repository, github.com/NVIDIA/RULER (Apache-2.0). Numbers, keys and variable names
are ours. These differ:

- prose is a novel, and `cwe` takes its words from it, instead of essays and a list of words;
- the answer of `vt` does not begin with a space after its colon, which most tokenizers make a part of the next word;
- `qa_1` and `qa_2` need data sets, and are not here.
"""
# ruff: noqa: S311 (random text, not secrets)

import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.needle.words import KEY_ADJECTIVES, KEY_NOUNS

SAMPLE = Path(__file__).parent / "data" / "moby-dick.txt"
"""The default haystack: Herman Melville's novel, 1851, public domain."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the beginning of its answer, and the strings that the answer must have. n_new: most tokens of an
    answer.
    """

    text: str
    prefix: str
    expected: tuple[str, ...]
    n_new: int


Questions = tuple[Question, ...]
"""Questions about one text: the first has the whole text before it, the others follow the previous answer."""

Count = Callable[[Questions], int]
"""Counts the tokens of questions as a model gets them, without the answers."""


def score(answer: str, expected: Sequence[str]) -> float:
    """Return RULER's `string_match_all`: the share of the expected strings that are in the answer, ignoring case."""
    return sum(e.lower() in answer.lower() for e in expected) / len(expected)


def make_text(task: str, n_tokens: int, count: Count, haystack: str, seed: int) -> Questions:
    """Make a text of a task that, with its questions and room for their answers, fills n_tokens and no more.

    haystack: prose to hide things in. It is read from a place that the seed names, and starts over at its end.

    Raises UsageError if the task is unknown, or n_tokens are too few for it.
    """
    if task not in TASKS:
        msg = f"{task!r} is no task of RULER here: there are {', '.join(TASKS)}"
        raise UsageError(msg)
    build = TASKS[task](haystack, random.Random(f"{task} {seed}"), n_tokens)

    def n_total(questions: Questions) -> int:
        return count(questions) + sum(q.n_new for q in questions)

    questions = _fit(build, n_total, n_tokens)
    if questions is None:
        msg = f"a text of {n_tokens} tokens is too short for {task}: use a longer one (--contexts)"
        raise UsageError(msg)
    return questions


Build = Callable[[int], Questions]
"""Makes a text of a number of units (lines, words). It hides the same things whatever its size."""

_FINE = 200  # a text is as long as it can be, to within 1/_FINE of it


def _fit(build: Build, n_total: Count, n: int) -> Questions | None:
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


#
# what is hidden
#


def _keys(rng: random.Random, n: int, but: Sequence[str] = ()) -> list[str]:
    """Return n different pairs of words, such as "wooden-harbour", none of those in `but`, or as many as there are."""
    n_pairs = len(KEY_ADJECTIVES) * len(KEY_NOUNS)
    pairs = rng.sample(range(n_pairs), min(n + len(but), n_pairs))
    found = (f"{KEY_ADJECTIVES[i // len(KEY_NOUNS)]}-{KEY_NOUNS[i % len(KEY_NOUNS)]}" for i in pairs)
    return [key for key in found if key not in but][:n]


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _letters(rng: random.Random, n: int, alphabet: str) -> str:
    return "".join(rng.choices(alphabet, k=n))


def _different(n: int, make: Callable[[], str]) -> list[str]:
    """Return n different results of make()."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[make()] = None
    return list(found)


_VALUES = {"numbers": _number, "uuids": _uuid}
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
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


def _prose(haystack: str, n: int, rng: random.Random) -> list[str]:
    """Return sentences of n words in all, from a random sentence on. After the last word comes the first one again."""
    words, starts = _words(haystack)
    start = rng.choice(starts)
    return _SENTENCE_END.split(" ".join(words[(start + i) % len(words)] for i in range(n)))


def _among(lines: Sequence[str], hidden: Sequence[str], places: Sequence[float]) -> list[str]:
    """Return the lines with the hidden ones put in before those at these shares of the whole, in order."""
    at = sorted(int(p * len(lines)) for p in places)
    res: list[str] = []
    before = 0
    for place, needle in zip(at, hidden, strict=True):
        res += [*lines[before:place], needle]
        before = place
    return [*res, *lines[before:]]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + ", and " + words[-1]


def _ask(kind: str, keys: Sequence[str], expected: Sequence[str]) -> tuple[str, str]:
    """Return a question, and the beginning of its answer."""
    one = len(expected) == 1
    what, verb, name = ("is the", "is", kind[:-1]) if one else ("are all the", "are", kind)
    query = _listed(keys)
    return (
        f"What {what} special magic {name} for {query} mentioned in the provided text?",
        f" The special magic {name} for {query} mentioned in the provided text {verb}",
    )


@dataclass(frozen=True, slots=True)
class _Niah:
    """Needles in a haystack.

    hay: "prose", "noise" or "needles".
    kind: of the values: "numbers" or "uuids".
    keys: "words" or "uuids".
    n_keys: needles with different keys; n_values: needles for each key.
    n_asked: keys that are asked for, in one question or, with in_turn, one after the other.
    """

    hay: str = "prose"
    kind: str = "numbers"
    keys: str = "words"
    n_keys: int = 1
    n_values: int = 1
    n_asked: int = 1
    in_turn: bool = False

    def __call__(self, haystack: str, rng: random.Random, _n_tokens: int) -> Build:
        names = _keys(rng, self.n_keys) if self.keys == "words" else _different(self.n_keys, lambda: _uuid(rng))
        found = iter(_different(self.n_keys * self.n_values, lambda: _VALUES[self.kind](rng)))
        values = {name: [next(found) for _ in range(self.n_values)] for name in names}
        hidden = [self._needle(name, v) for name in names for v in values[name]]
        rng.shuffle(hidden)
        places = [i / (_DEPTHS - 1) for i in rng.sample(range(_DEPTHS), len(hidden))]
        asked = names[: self.n_asked]
        turns = [[name] for name in asked] if self.in_turn else [asked]
        questions = [self._question(turn, [v for name in turn for v in values[name]]) for turn in turns]
        seed = rng.random()

        def build(n: int) -> Questions:
            lines = self._lines(haystack, n, random.Random(seed), names)
            text = (" " if self.hay == "prose" else "\n").join(_among(lines, hidden, places))
            first = questions[0]
            whole = f"{self._intro(one=len(first.expected) == 1)}\n{text}\n{first.text}"
            return (replace(first, text=whole), *questions[1:])

        return build

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.kind} for {key} is: {value}."

    def _intro(self, *, one: bool) -> str:
        kind, are, some = (self.kind[:-1], "is", "A") if one else (self.kind, "are", "Some")
        return (
            f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will quiz you"
            f" about the {kind} afterwards."
        )

    def _lines(self, haystack: str, n: int, rng: random.Random, names: Sequence[str]) -> list[str]:
        """Return the lines that the needles are hidden in. If they are needles, too, none has one of these names."""
        if self.hay == "prose":
            return _prose(haystack, n, rng)
        if self.hay == "noise":
            return [_NOISE] * n
        keys = _keys(rng, n, names) if self.keys == "words" else [_uuid(rng) for _ in range(n)]
        return [self._needle(key, _VALUES[self.kind](rng)) for key in keys]

    def _question(self, keys: Sequence[str], expected: Sequence[str]) -> Question:
        text, prefix = _ask(self.kind, keys, expected)
        return Question(text, prefix, tuple(expected), 128)


_HOPS = 4
_CHAIN_INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text."


def _variable_tracking(_haystack: str, rng: random.Random, _n_tokens: int) -> Build:
    """Hide a value and five variables that have it, each through the one before: VAR B = VAR A.

    An answered example comes first.
    """
    shown = _different(_HOPS + 1, lambda: _letters(rng, 3, string.ascii_uppercase))
    names = _different(_HOPS + 1, lambda: _letters(rng, 5, string.ascii_uppercase))
    values = _different(2, lambda: str(rng.randint(10_000, 99_999)))
    places = [rng.random() for _ in names]
    example = "".join(_chain(shown, values[0], [_NOISE] * 10, [rng.random() for _ in shown]))

    def build(n: int) -> Questions:
        text, prefix = _chain(names, values[1], [_NOISE] * n, places)
        return (Question(f"{example} {' '.join(shown)}\n\n{text}", prefix, tuple(names), 30),)

    return build


def _chain(names: Sequence[str], value: str, lines: Sequence[str], places: Sequence[float]) -> tuple[str, str]:
    steps = [f"VAR {a} = {b}" for a, b in zip(names, [value, *(f"VAR {n}" for n in names[:-1])], strict=True)]
    text = "\n".join(_among(lines, steps, places))
    question = f"Question: Find all variables that are assigned the value {value} in the text above."
    prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above,"
        f" {len(names)} variables are assigned the value {value}, they are:"
    )
    return f"{_CHAIN_INTRO}\n\n{text}\n{question}", prefix


_COMMON = 10
_SHORT = 4096  # tokens: a shorter text repeats its words less often


def _common_words(haystack: str, rng: random.Random, n_tokens: int) -> Build:
    """Number a list of words of which ten appear thirty times, and the others three times. An answered example comes
    first.
    """
    n_shown, shown_times, times = (20, (3, 1), (6, 1)) if n_tokens < _SHORT else (40, (10, 3), (30, 3))
    words = sorted({w.lower() for w in re.findall(r"\b[a-zA-Z]{4,9}\b", haystack)})
    least = n_shown + 2 * _COMMON
    if len(words) < least:
        msg = f"the text has {len(words)} different words of 4 to 9 letters, and cwe needs {least}: give a longer one (-f)"
        raise UsageError(msg)
    rng.shuffle(words)
    shown, rest = words[:n_shown], words[n_shown:]
    seed = rng.random()

    def asked(words: Sequence[str], times: tuple[int, int]) -> str:
        every = [*words[:_COMMON]] * times[0] + [*words[_COMMON:]] * times[1]
        random.Random(seed).shuffle(every)
        listed = " ".join(f"{i}. {w}" for i, w in enumerate(every, 1))
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
            f" appear most often.\n{listed}\nQuestion: What are the {_COMMON} most common words in the above list?"
        )

    prefix = f" Answer: The top {_COMMON} words that appear most often in the list are:"
    answer = " ".join(f"{i}. {w}" for i, w in enumerate(shown[:_COMMON], 1))
    example = f"{asked(shown, shown_times)}{prefix} {answer}\n"

    def build(n: int) -> Questions:
        return (Question(example + asked(rest[: _COMMON + n], times), prefix, tuple(rest[:_COMMON]), 120),)

    return build


_ZIPF = 2.0
_CODED = 2000


def _frequent_words(_haystack: str, rng: random.Random, _n_tokens: int) -> Build:
    """Draw coded words by Zipf's law. The most frequent is dots; the three after it are asked for."""
    coded = ["....", *_different(_CODED, lambda: _letters(rng, 6, string.ascii_lowercase))]
    zeta = sum(k**-_ZIPF for k in range(1, len(coded) + 1))
    seed = rng.random()

    def build(n: int) -> Questions:
        n_more = 4  # the last word that is asked for appears once more than the next
        words = [w for k, w in enumerate(coded, 1) for _ in range(int(n * k**-_ZIPF / zeta) + (k <= n_more))]
        random.Random(seed).shuffle(words)
        text = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently"
            f" appeared coded words. {' '.join(words)}\nQuestion: Do not provide any explanation. Please ignore the dots"
            " '....'. What are the three most frequently appeared words in the above coded text?"
        )
        prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"
        return (Question(text, prefix, tuple(coded[1:4]), 50),)

    return build


TASKS: dict[str, Callable[[str, random.Random, int], Build]] = {
    "single_1": _Niah(hay="noise"),
    "single_2": _Niah(),
    "single_3": _Niah(kind="uuids"),
    "multikey_1": _Niah(n_keys=4),
    "multikey_2": _Niah(hay="needles"),
    "multikey_3": _Niah(hay="needles", kind="uuids", keys="uuids"),
    "multivalue": _Niah(n_values=4),
    "multiquery": _Niah(n_keys=4, n_asked=4),
    "in_turn": _Niah(n_keys=4, n_asked=2, in_turn=True),
    "vt": _variable_tracking,
    "cwe": _common_words,
    "fwe": _frequent_words,
}
"""Tasks by RULER's names without "niah_". in_turn is ours: two questions about one text, the second after an answer."""
