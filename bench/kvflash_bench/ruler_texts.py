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
from collections.abc import Sequence
from pathlib import Path

from kvflash_bench.hidden import NOISE, Niah, among, different, letters
from kvflash_bench.long_texts import LONG
from kvflash_bench.questions import Build, Count, Given, Question, Questions, Task, fit
from pyllama_kvflash.errors import UsageError

SAMPLE = Path(__file__).parent / "data" / "moby-dick.txt"
"""The default haystack: Herman Melville's novel, 1851, public domain."""


def make_text(task: str, n_tokens: int, count: Count, haystack: str, seed: int) -> Questions:
    """Make a text of a task that, with its questions and room for their answers, fills n_tokens and no more.

    haystack: prose to hide things in. It is read from a place that the seed names, and starts over at its end.

    Raises UsageError if the task is unknown, or n_tokens are too few for it.
    """
    build = task_named(task)(Given(haystack, random.Random(f"{task} {seed}"), n_tokens, count))

    def n_total(questions: Questions) -> int:
        return count(questions) + sum(q.n_new for q in questions)

    questions = fit(build, n_total, n_tokens)
    if questions is None:
        msg = f"a text of {n_tokens} tokens is too short for {task}: use a longer one (`contexts`)"
        raise UsageError(msg)
    return questions


_HOPS = 4
_CHAIN_INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text."


def _variable_tracking(given: Given) -> Build:
    """Hide a value and five variables that have it, each through the one before: VAR B = VAR A.

    An answered example comes first.
    """
    rng = given.rng
    shown = different(_HOPS + 1, lambda: letters(rng, 3, string.ascii_uppercase))
    names = different(_HOPS + 1, lambda: letters(rng, 5, string.ascii_uppercase))
    values = different(2, lambda: str(rng.randint(10_000, 99_999)))
    places = [rng.random() for _ in names]
    example = "".join(_chain(shown, values[0], [NOISE] * 10, [rng.random() for _ in shown]))

    def build(n: int) -> Questions:
        text, prefix = _chain(names, values[1], [NOISE] * n, places)
        return (Question(f"{example} {' '.join(shown)}\n\n{text}", prefix, tuple(names), 30),)

    return build


def _chain(names: Sequence[str], value: str, lines: Sequence[str], places: Sequence[float]) -> tuple[str, str]:
    steps = [f"VAR {a} = {b}" for a, b in zip(names, [value, *(f"VAR {n}" for n in names[:-1])], strict=True)]
    text = "\n".join(among(lines, steps, places))
    question = f"Question: Find all variables that are assigned the value {value} in the text above."
    prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above,"
        f" {len(names)} variables are assigned the value {value}, they are:"
    )
    return f"{_CHAIN_INTRO}\n\n{text}\n{question}", prefix


_COMMON = 10
_SHORT = 4096  # tokens: a shorter text repeats its words less often


def _common_words(given: Given) -> Build:
    """Number a list of words of which ten appear thirty times, and the others three times. An answered example comes
    first.
    """
    n_shown, shown_times, times = (20, (3, 1), (6, 1)) if given.n_tokens < _SHORT else (40, (10, 3), (30, 3))
    words = sorted({w.lower() for w in re.findall(r"\b[a-zA-Z]{4,9}\b", given.haystack)})
    least = n_shown + 2 * _COMMON
    if len(words) < least:
        msg = f"the text has {len(words)} different words of 4 to 9 letters, and cwe needs {least}: give a longer one (-f)"
        raise UsageError(msg)
    given.rng.shuffle(words)
    shown, rest = words[:n_shown], words[n_shown:]
    seed = given.rng.random()

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


def _frequent_words(given: Given) -> Build:
    """Draw coded words by Zipf's law. The most frequent is dots; the three after it are asked for."""
    coded = ["....", *different(_CODED, lambda: letters(given.rng, 6, string.ascii_lowercase))]
    zeta = sum(k**-_ZIPF for k in range(1, len(coded) + 1))
    seed = given.rng.random()

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


TASKS: dict[str, Task] = {
    "single_1": Niah(hay="noise"),
    "single_2": Niah(),
    "single_3": Niah(kind="uuids"),
    "multikey_1": Niah(n_keys=4),
    "multikey_2": Niah(hay="needles"),
    "multikey_3": Niah(hay="needles", kind="uuids", keys="uuids"),
    "multivalue": Niah(n_values=4),
    "multiquery": Niah(n_keys=4, n_asked=4),
    "in_turn": Niah(n_keys=4, n_asked=2, in_turn=True),
    "vt": _variable_tracking,
    "cwe": _common_words,
    "fwe": _frequent_words,
}
"""Tasks by RULER's names without "niah_". in_turn is ours: two questions about one text, the second after an answer."""

GROUPS = {"ruler": tuple(TASKS), "long": tuple(LONG)}
"""Tasks by the names of groups. Each group has a mean of its own."""


def task_named(name: str) -> Task:
    """Return a task of TASKS or LONG. Raises UsageError."""
    tasks = TASKS | LONG
    if name not in tasks:
        msg = f"{name!r} is not a task: there are {', '.join(tasks)}"
        raise UsageError(msg)
    return tasks[name]
