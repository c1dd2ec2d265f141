"""Tasks of long answers: a list, questions in turns, a copy, records as JSON. None is RULER's.

Each needs many places of its text one after the other, while it is answered. All are scored by exact strings.
"""
# ruff: noqa: S311 (random text, not secrets)

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from kvflash_bench.hidden import (
    Niah,
    among,
    depths,
    different,
    listed,
    needle,
    number,
    prose,
    sentence_start,
    sentences,
    word_pairs,
    words_from,
)
from kvflash_bench.questions import Build, Given, Question, Questions, Score, Task
from pyllama_kvflash.needle.words import PLACES


def _in_prose(given: Given, hidden: Sequence[str]) -> Callable[[int], str]:
    """Return what makes a text of n words of prose with these sentences in it, in this order."""
    places, seed = depths(given.rng, len(hidden)), given.rng.random()

    def text(n: int) -> str:
        return " ".join(among(prose(given.haystack, n, random.Random(seed)), hidden, places))

    return text


def _n_in_order(said: Sequence[object], expected: Sequence[object]) -> int:
    """Return the length of the longest common subsequence."""
    best = [0] * (len(expected) + 1)  # with the first 0, 1, ... expected ones
    for found in said:
        before = best.copy()
        for i, value in enumerate(expected, 1):
            best[i] = before[i - 1] + 1 if found == value else max(before[i], best[i - 1])
    return best[-1]


#
# a list
#

_N_LISTED = 16
_LINE = 30  # tokens of a line, by any tokenizer


def share_in_order(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected numbers that an answer has in their order: the longest common subsequence of its
    numbers and the expected ones.
    """
    return _n_in_order(re.findall(r"\d+", answer), expected) / len(expected)


def _list(given: Given) -> Build:
    """Hide needles, to be listed in the order of the text, in which the question names them."""
    names, values = word_pairs(given.rng, _N_LISTED), different(_N_LISTED, lambda: number(given.rng))
    text = _in_prose(given, [needle("numbers", *pair) for pair in zip(names, values, strict=True)])
    lines = "\n".join(f"- {name}: {value}" for name, value in zip(names, values, strict=True))

    def build(n: int) -> Questions:
        whole = (
            "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will ask you to"
            f" list them afterwards.\n{text(n)}\nWhat are all the special magic numbers for {listed(names)} mentioned in the"
            " provided text? List them in this order, each on a line."
        )
        begun = f"- {names[0]}:"
        prefix = f" The special magic numbers mentioned in the provided text are:\n{begun}"
        right = lines.removeprefix(begun)
        return (Question(whole, prefix, tuple(values), _N_LISTED * _LINE, right, share_in_order),)

    return build


#
# a copy
#

_N_COPIED = 200  # tokens
_N_OPENING = 12  # words that say where to begin
_RUN = 4


def share_of_runs(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the runs of four words of the expected passage that an answer has, too.

    A wrong word costs four runs. What comes before a first difference would be all or nothing: a wrong word in the
    beginning would cost the whole passage. Single words would not do either: any prose has "and" and "the".
    """

    def runs(text: str) -> list[tuple[str, ...]]:
        words = text.split()
        return [tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]

    said = set(runs(answer))
    wanted = runs(" ".join(expected))
    return sum(run in said for run in wanted) / len(wanted)


def _copy(given: Given) -> Build:
    """Ask for a passage of the prose, which the beginning of the answer names. Its sequel in the haystack is the text.

    The question does not name it: models then take what came after the beginning there, the end of the question.
    """
    start, depth = sentence_start(given.haystack, given.rng), given.rng.random()
    opening = " ".join(words_from(given.haystack, start, _N_OPENING))
    at = start + _N_OPENING
    n_words = next(
        n for n in count(_RUN) if given.n_tokens_of(" ".join(words_from(given.haystack, at, n + 1))) > _N_COPIED
    )
    passage = " ".join(words_from(given.haystack, at, n_words))

    def build(n: int) -> Questions:
        lines = sentences(words_from(given.haystack, at + n_words, n))
        text = " ".join(among(lines, [f"{opening} {passage}"], [depth]))
        whole = (
            "Here is a long text. Make sure to memorize it. I will ask you to repeat a part of it afterwards."
            f"\n{text}\nRepeat a part of the provided text, word for word."
        )
        n_new = _N_COPIED + _N_COPIED // 8  # for a model that splits words in other ways than its tokenizer
        return (Question(whole, f"\n```\n{opening}", (passage,), n_new, f" {passage}", share_of_runs),)

    return build


#
# records
#

_N_RECORDS = 24
_RECORD = 48  # tokens of a record, by any tokenizer, with white space
_KEY, _FIELDS = "record", ("city", "kilograms")
_SCHEMA = {
    "type": "array",
    "minItems": _N_RECORDS,
    "maxItems": _N_RECORDS,
    "items": {
        "type": "object",
        "properties": {
            "record": {"type": "integer"},
            "city": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
            "kilograms": {"type": "integer"},
        },
        "required": [_KEY, *_FIELDS],
    },
}


def _records(answer: str) -> Iterator[dict[str, Any]]:
    """Yield the records of an answer. What is no JSON is left out, and so is a last record that it ends within."""
    for found in re.findall(r"\{[^{}]*\}", answer):
        try:
            yield json.loads(found)
        except ValueError:
            continue


def share_of_fields(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the values of the expected records that those of an answer have, too, but for the numbers that
    they are matched by.

    Of records with one number the first counts.
    """
    said: dict[str, dict[str, Any]] = {}
    for record in _records(answer):
        said.setdefault(str(record.get(_KEY)), record)
    wanted = [json.loads(record) for record in expected]
    n_right = sum(bool(said.get(str(r[_KEY]), {}).get(name) == r[name]) for r in wanted for name in _FIELDS)
    return n_right / (len(wanted) * len(_FIELDS))


def share_of_records(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected records that an answer has in their order, whatever their numbers: the longest
    common subsequence of its records and the expected ones, which are equal if all other values are.

    A record that is left out, or a wrong number, shifts all that follow: share_of_fields() then finds next to nothing,
    and this all but one. A record counts as a whole, as parts are found in order by chance: with half a point for each
    value, 24 records of random values had 9 points of 100, and have 0.02 so. A record that is half right has none here.
    """

    def contents(records: Iterator[dict[str, Any]]) -> list[list[Any]]:
        return [[record.get(name) for name in _FIELDS] for record in records]

    wanted = contents(json.loads(record) for record in expected)
    return _n_in_order(contents(_records(answer)), wanted) / len(wanted)


def _json(given: Given) -> Build:
    """Hide numbered records, to be given as JSON."""
    rng = given.rng
    records = [
        {"record": i, "city": rng.choice(PLACES), "kilograms": rng.randint(100, 999)} for i in range(1, _N_RECORDS + 1)
    ]
    hidden = [
        f"Record {r['record']} says that the city is {r['city']} and that the kilograms are {r['kilograms']}."
        for r in records
    ]
    text = _in_prose(given, hidden)
    expected = tuple(json.dumps(r) for r in records)
    shown = json.dumps({"record": 0, "city": "name", "kilograms": 0})

    def build(n: int) -> Questions:
        whole = (
            f"{_N_RECORDS} records are hidden within the following text. Make sure to memorize them. I will ask you for them"
            f" afterwards.\n{text(n)}\nGive all {_N_RECORDS} records of the provided text as a JSON array, record 1 first. Each"
            f" is an object such as {shown}."
        )
        prefix = f" The {_N_RECORDS} records of the provided text are:\n"
        right = "[\n  " + ",\n  ".join(expected) + "\n]"
        return (Question(whole, prefix, expected, _N_RECORDS * _RECORD, right, share_of_fields, json.dumps(_SCHEMA)),)

    return build


LONG: dict[str, Task] = {
    "list": _list,
    "turns": Niah(n_keys=16, n_asked=8, in_turn=True, n_new=32),
    "copy": _copy,
    "json": _json,
}
"""Tasks of long answers by name."""

IN_ORDER: dict[str, Score] = {"json": share_of_records}
"""Second scores of tasks by name, for those whose own score hangs on numbers that a model counts."""
