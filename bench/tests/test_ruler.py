"""RULER's tasks: their texts, and the tables of results."""

import csv
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import benches
from support.changes import BENCHES

from kvflash_bench import hidden, ruler_tables
from kvflash_bench.figures import ruler_figure
from kvflash_bench.grid import Results, Variant
from kvflash_bench.long_texts import LONG, share_in_order, share_of_fields, share_of_records, share_of_runs
from kvflash_bench.questions import Questions, share_found
from kvflash_bench.ruler import Cell, Ruler, parse_tasks
from kvflash_bench.ruler_texts import GROUPS, SAMPLE, TASKS, make_text
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = pytest.mark.native

environment = benches.environment

HAYSTACK = SAMPLE.read_text("utf-8")
NIAH = [task for task in TASKS if task not in {"vt", "cwe", "fwe"}]
ALONE = ["single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "in_turn"]


def count(questions: Questions) -> int:
    """As some tokenizer might."""
    return sum(len(re.findall(r"\w{1,4}|[^\w\s]|\n", q.text + q.prefix)) for q in questions)


def made(task: str, n_tokens: int = 5000, seed: int = 11, haystack: str = HAYSTACK) -> Questions:
    return make_text(task, n_tokens, count, haystack, seed)


#
# texts
#


@pytest.mark.sampled(BENCHES)
@pytest.mark.parametrize("n_tokens", [1500, 5000, 20000])
@pytest.mark.parametrize("task", [*TASKS, *LONG])
def test_a_text_fills_its_length_with_room_for_the_answers(task: str, n_tokens: int) -> None:
    if task == "json":
        n_tokens += 1500  # its shortest text
    questions = made(task, n_tokens)
    n = count(questions) + sum(q.n_new for q in questions)
    assert 0.95 * n_tokens <= n <= n_tokens


@pytest.mark.sampled(BENCHES)
@pytest.mark.parametrize("task", [*TASKS, *LONG])
def test_a_seed_names_a_text(task: str) -> None:
    assert made(task, 3000, 3) == made(task, 3000, 3)
    assert made(task, 3000, 3)[0].text != made(task, 3000, 4)[0].text
    assert made(task, 3000, 3)[0].expected != made(task, 3000, 4)[0].expected


def needles(text: str) -> list[tuple[str, str]]:
    """Key and value of all in a text, in its order."""
    return re.findall(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.(?:\s|$)", text)


@pytest.mark.sampled(BENCHES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("task", NIAH)
def test_needles_answer_the_question_and_no_other_has_their_key(task: str, seed: int) -> None:
    questions = made(task, 8000, seed)
    found = needles(questions[0].text)
    values: dict[str, list[str]] = {}
    for key, value in found:
        values.setdefault(key, []).append(value)
    for q in questions:
        asked = re.search(r"for (.+) mentioned in the provided text\?$", q.text.splitlines()[-1])
        assert asked
        keys = re.split(r", (?:and )?", asked[1])
        assert sorted(v for key in keys for v in values[key]) == sorted(q.expected)
        assert len(set(q.expected)) == len(q.expected)
        assert f" for {asked[1]} mentioned in the provided text" in q.prefix
    n_values = 4 if task == "multivalue" else 1
    assert {len(v) for v in values.values()} == {n_values}
    n_keys = {"multikey_1": 4, "multiquery": 4, "in_turn": 4}.get(task, 1)
    assert len(values) == n_keys or task in {"multikey_2", "multikey_3"}


def test_needles_to_hide_others_in_have_other_keys() -> None:
    some = hidden.word_pairs(random.Random(1), 5)
    others = hidden.word_pairs(random.Random(1), 10**6, some)
    assert len({*some, *others}) == len(some) + len(others) > 30_000, "as many as there are"
    assert hidden.word_pairs(random.Random(1), 5, some)[0] not in some


@pytest.mark.parametrize("task", NIAH)
def test_wording_is_of_one_or_of_many(task: str) -> None:
    questions = made(task, 3000)
    kind = "uuid" if task in {"single_3", "multikey_3"} else "number"
    for q in questions:
        intro, last = q.text.splitlines()[0], q.text.splitlines()[-1]
        if task in ALONE:
            assert len(q.expected) == 1
            assert last.startswith(f"What is the special magic {kind} for ")
            assert q.prefix.startswith(f" The special magic {kind} for ")
            assert q.prefix.endswith(" mentioned in the provided text is")
            if q is questions[0]:
                assert intro.startswith(f"A special magic {kind} is hidden within the following text. Make sure to")
                assert intro.endswith(f" I will quiz you about the {kind} afterwards.")
        else:
            assert len(q.expected) == 4
            assert last.startswith(f"What are all the special magic {kind}s for ")
            assert q.prefix.endswith(" mentioned in the provided text are")
            assert intro.startswith(f"Some special magic {kind}s are hidden within")


def test_in_turn_asks_twice() -> None:
    first, second = made("in_turn")
    assert second.text.startswith("What is the special magic number for ")
    assert "\n" not in second.text
    assert first.expected != second.expected
    assert all(len(made(task, 2000)) == 1 for task in TASKS if task != "in_turn")


def test_a_needle_is_anywhere() -> None:
    at = []
    for seed in range(40):
        q = made("single_2", 2000, seed)[0]
        at.append(q.text.index(q.expected[0]) / len(q.text))
    assert min(at) < 0.2
    assert max(at) > 0.8
    assert 0.3 < np.mean(at) < 0.7


def test_variables_are_a_chain() -> None:
    q = made("vt")[0]
    example, text = q.text.split("\n\nMemorize and track")
    steps = re.findall(r"^VAR (\w+) = (VAR )?(\w+)$", text, re.MULTILINE)
    value = re.search(r"assigned the value (\d+) in the text above\.$", text)
    assert value
    assert [name for name, _, _ in steps] == list(q.expected)
    assert [of for _, _, of in steps] == [value[1], *q.expected[:-1]]
    assert len(set(q.expected)) == 5
    assert f"5 variables are assigned the value {value[1]}, they are:" in q.prefix
    names = re.findall(r"^VAR (\w+) = ", example, re.MULTILINE)
    assert example.endswith(f"they are: {' '.join(names)}"), "it is answered"
    assert not set(names) & set(q.expected)


@pytest.mark.parametrize(("n_tokens", "times", "shown"), [(2000, (6, 1), (3, 1)), (8000, (30, 3), (10, 3))])
def test_common_words_are_the_most_frequent(n_tokens: int, times: tuple[int, int], shown: tuple[int, int]) -> None:
    q = made("cwe", n_tokens)[0]
    for text, expected, (n_common, n_rare) in zip(
        q.text.split("Below is a numbered list")[1:], (None, q.expected), (shown, times), strict=True
    ):
        listed = text.split("often.\n")[1].split("\nQuestion")[0]
        numbers, words = zip(*re.findall(r"(\d+)\. ([a-z]+)", listed), strict=True)
        assert [int(n) for n in numbers] == list(range(1, len(words) + 1))
        counts = Counter(words)
        common = {w for w, _ in counts.most_common(10)}
        assert {counts[w] for w in common} == {n_common}
        assert {n for w, n in counts.items() if w not in common} == {n_rare}
        told = expected or re.findall(r"\d+\. ([a-z]+)", text.split("in the list are:")[1])
        assert common == set(told)


@pytest.mark.parametrize("n_tokens", [400, 2000, 20000])
def test_frequent_words_come_after_the_dots(n_tokens: int) -> None:
    q = made("fwe", n_tokens)[0]
    words = q.text.split("coded words. ")[1].split("\nQuestion")[0].split()
    counts = [n for _, n in Counter(words).most_common()]
    assert [w for w, _ in Counter(words).most_common(1)] == ["...."]
    assert {w for w, _ in Counter(words).most_common(4)} == {"....", *q.expected}
    assert counts[3] > counts[4]
    if n_tokens == 20000:
        assert counts[1] / counts[0] == pytest.approx(1 / 4, rel=0.05), "Zipf's law, squared"
        assert counts[2] / counts[0] == pytest.approx(1 / 9, rel=0.05)


def test_a_short_haystack_begins_again() -> None:
    short = "It was a wet day. The cat sat on the mat! Nobody knew why?"
    text = made("single_2", 1500, haystack=short)[0].text
    assert text.count("The cat sat on the mat!") > 20
    assert "Nobody knew why? It was a wet day." in text


def test_texts_that_cannot_be_made() -> None:
    with pytest.raises(UsageError, match=r"'best' is not a task: there are single_1, .*, list, turns, copy, json$"):
        made("best")
    for task in (*TASKS, *LONG):
        with pytest.raises(UsageError, match=f"a text of 100 tokens is too short for {task}: use a longer one"):
            made(task, 100)
    with pytest.raises(UsageError, match=r"the text has 2 different words .* cwe needs 60: give a longer one"):
        made("cwe", haystack="three four")


def test_all_words_there_are_is_enough() -> None:
    """A text that a haystack has too few different words for is shorter."""
    words = " ".join("".join(chr(97 + i // 26**k % 26) for k in range(4)) for i in range(200))
    q = made("cwe", 20000, haystack=words)[0]
    assert count((q,)) < 10000


@pytest.mark.parametrize(
    ("said", "expected", "points"),
    [
        ("It is 1234567.", ("1234567",), 1),
        ("It is 123456.", ("1234567",), 0),
        ("harbour, LAMP", ("Harbour", "lamp"), 1),
        ("1, 2 and 3", ("1", "2", "4", "5"), 0.5),
        ("", ("x",), 0),
    ],
)
def test_score_is_the_share_that_is_there(said: str, expected: tuple[str, ...], points: float) -> None:
    assert share_found(said, expected) == points


def test_tasks_are_read_by_both_names() -> None:
    assert parse_tasks("niah_single_1, vt,vt,single_1") == ("single_1", "vt")
    for text in ("", "vt,", "qa_1", "VT", "Long"):
        with pytest.raises(UsageError, match="is not a task: there are single_1"):
            parse_tasks(text)


def test_groups_are_read_as_their_tasks() -> None:
    assert parse_tasks("ruler") == tuple(TASKS)
    assert parse_tasks("copy,long, vt") == ("copy", "list", "turns", "json", "vt")
    assert not set(TASKS) & set(LONG)
    assert set(GROUPS) == {"ruler", "long"}


#
# long answers
#


def test_a_list_is_of_all_needles_in_the_order_of_the_text() -> None:
    (q,) = made("list")
    found = needles(q.text)
    names, values = zip(*found, strict=True)
    assert len(set(values)) == len(set(names)) == 16
    assert q.expected == values
    assert f"numbers for {', '.join(names[:-1])}, and {names[-1]} mentioned in" in q.text.splitlines()[-1]
    assert (q.prefix + q.right).splitlines()[1:] == [f"- {name}: {value}" for name, value in found]


def test_turns_are_eight_questions_about_sixteen_needles() -> None:
    questions = made("turns")
    values = dict(needles(questions[0].text))
    assert (len(questions), len(values)) == (8, 16)
    asked = [re.search(r"number for (\S+) mentioned in the provided text\?$", q.text) for q in questions]
    assert all(asked)
    assert len({a[1] for a in asked if a}) == 8
    for q, a in zip(questions, asked, strict=True):
        assert q.expected == (values[a[1]],)
        assert q.right == f" {values[a[1]]}."
        assert "\n" not in q.text or q is questions[0]


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_goes_on_from_words_that_are_in_the_text_once(seed: int) -> None:
    (q,) = made("copy", seed=seed)
    (passage,) = q.expected
    opening = q.prefix.removeprefix("\n```\n")
    assert len(opening.split()) == 12
    assert q.text.count(opening) == 1, "and the question does not name them"
    assert q.text.count(f"{opening} {passage}") == q.text.count(passage) == 1
    assert q.right == f" {passage}"
    n = count((replace(q, text=passage, prefix=""),))
    assert 190 <= n <= 200 < q.n_new
    assert " ".join(HAYSTACK.split()).count(f"{opening} {passage}") == 1, "it is the haystack's, word for word"


def test_a_copy_of_few_words() -> None:
    """All of the haystack is less than a passage."""
    (q,) = made("copy", 1500, haystack="It was a wet day. The cat sat on the mat!")
    assert q.text.count("The cat sat on the mat! It was a wet day.") > 20
    (q,) = made("copy", 5000, haystack="x" * 400)
    assert q.score(q.right, q.expected) == 1


def test_records_are_in_prose_and_in_the_schema() -> None:
    (q,) = made("json")
    said = re.findall(r"Record (\d+) says that the city is (\w+) and that the kilograms are (\d+)\.", q.text)
    records = [{"record": int(i), "city": city, "kilograms": int(n)} for i, city, n in said]
    assert [r["record"] for r in records] == list(range(1, 25))
    assert [json.loads(e) for e in q.expected] == json.loads(q.right) == records
    schema = json.loads(q.schema)
    assert schema["minItems"] == schema["maxItems"] == 24
    item = schema["items"]
    assert set(item["required"]) == set(item["properties"]) == set(records[0])
    assert all(re.search(item["properties"]["city"]["pattern"], r["city"]) for r in records)


@pytest.mark.parametrize("task", LONG)
def test_the_right_answer_has_all_points_and_room(task: str) -> None:
    for q in made(task):
        assert q.score(q.right, q.expected) == 1
        assert q.score("", q.expected) == 0
        assert count((replace(q, text="", prefix=q.right),)) <= q.n_new


@pytest.mark.parametrize(
    ("said", "points"),
    [
        (" 11\n- a-2: 22\n- b: 333\n4. 4444", 1),
        ("22 333 4444 11", 0.75),
        ("11 11 22 22 333 333 4444 4444", 1),
        ("4444 333 22 11", 0.25),
        ("11, 5, 333 and 4444.", 0.75),
        ("111 2222", 0),
        ("", 0),
    ],
)
def test_a_list_scores_what_is_in_order(said: str, points: float) -> None:
    assert share_in_order(said, ("11", "22", "333", "4444")) == points


@pytest.mark.parametrize(
    ("said", "points"),
    [
        ("one two three four five six seven eight", 1),
        (" one two\nthree  four five six seven eight nine", 1),
        ("one two three four five", 2 / 5),
        ("one two three four five 6 seven eight", 2 / 5),
        ("five six seven eight", 1 / 5),
        ("One two three four", 0),
        ("one two three", 0),
        ("four three two one", 0),
    ],
)
def test_a_copy_scores_runs_of_four_words(said: str, points: float) -> None:
    assert share_of_runs(said, ("one two three four five six seven eight",)) == points


@pytest.mark.parametrize(
    ("said", "points"),
    [
        ('[{"record": 2, "city": "B", "kilograms": 2}, {"kilograms": 1, "record": 1, "city": "A"}]', 1),
        ('[{"record": 1, "city": "A", "kilograms": 1}, {"record": 2, "city": "B", "kil', 0.5),
        ('[{"record": 1, "city": "B", "kilograms": 1}, {"record": 1, "city": "A", "kilograms": 1}]', 0.25),
        ('{"record": 2, "city": "b", "kilograms": "2"}', 0),
        ('{"record": [1], "city": "A"} {oh} {"city": "A"}', 0),
        ("A 1 B 2", 0),
    ],
)
def test_records_score_right_values_by_number(said: str, points: float) -> None:
    expected = ('{"record": 1, "city": "A", "kilograms": 1}', '{"record": 2, "city": "B", "kilograms": 2}')
    assert share_of_fields(said, expected) == points


def records(contents: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """A record for each letter, its city. The kilograms go with it."""
    return tuple(
        json.dumps({"record": n, "city": city, "kilograms": ord(city)})
        for n, city in zip(numbers, contents, strict=True)
    )


EIGHT = records("ABCDEFGH", range(1, 9))


@pytest.mark.parametrize(
    ("said", "numbers", "by_number", "in_order"),
    [
        ("ABCDEFGH", range(1, 9), 1, 1),
        ("ABCDEFGH", range(2, 10), 0, 1),
        ("ABDEFGHZ", range(1, 9), 2 / 8, 7 / 8),
        ("ABCCDEFGH", range(1, 10), 3 / 8, 1),
        ("AAAAAAAA", range(1, 9), 1 / 8, 1 / 8),
        ("HGFEDCBA", range(8, 0, -1), 1, 1 / 8),
        ("EFGHABCD", range(1, 9), 0, 4 / 8),
        ("STUVWXYZ", range(1, 9), 0, 0),
        ("", (), 0, 0),
    ],
    ids=["right", "counted-from-2", "left-out", "twice", "repeated", "backwards", "halves", "made-up", "nothing"],
)
def test_records_in_order_are_found_whatever_their_numbers(
    said: str, numbers: Sequence[int], by_number: float, in_order: float
) -> None:
    answer = f"[{', '.join(records(said, numbers))}]"
    assert share_of_fields(answer, EIGHT) == by_number
    assert share_of_records(answer, EIGHT) == in_order


@pytest.mark.parametrize(
    ("said", "points"),
    [
        ('[{"record": 1, "city": "A", "kilograms": 65}, {"record": 2, "city": "B", "kilogr', 1 / 8),
        ('[{"record": 1, "city": "A", "kilograms": 65}, {"record": 2, "city": "B", "kilograms": 66', 1 / 8),
        ('{"city": "A", "kilograms": 65} {oh} {"city": "B" "kilograms": 66} {"kilograms": 67, "city": "C"}', 2 / 8),
        ('{"city": "A", "kilograms": 66} {"city": "B"} {"kilograms": 67} {}', 0),
        ('{"city": "a", "kilograms": 65} {"city": "B", "kilograms": "66"} {"city": [3], "kilograms": 67}', 0),
        ("A 65 B 66", 0),
    ],
    ids=["cut-off", "cut-off-at-its-end", "no-json", "parts", "other-values", "prose"],
)
def test_records_count_whole(said: str, points: float) -> None:
    assert share_of_records(said, EIGHT) == points


def test_records_that_are_expected_twice_count_twice() -> None:
    expected = records("ABAC", range(1, 5))
    for said, points in (("ABC", 0.75), ("AAC", 0.75), ("ABAC", 1)):
        assert share_of_records(" ".join(records(said, range(len(said)))), expected) == points


def test_made_up_records_have_no_points_in_order() -> None:
    """Some of their cities are those of the text: that is chance."""
    answers = [" ".join(made("json", seed=seed)[0].expected) for seed in range(2, 12)]
    expected = made("json", seed=1)[0].expected
    cities = {json.loads(e)["city"] for e in expected}
    assert all(cities & set(re.findall(r"[A-Z][a-z]+", said)) for said in answers)
    assert [share_of_records(said, expected) for said in answers] == [0] * 10


#
# results and tables
#


def plan(**more: Any) -> Ruler:
    variants = tuple(Variant.parse(v) for v in ("full", "lru", "qk"))
    return replace(Ruler(BUNDLED_MODEL, (4096, 2048), (1024, 2048), variants, ("vt", "cwe"), (7, 8), HAYSTACK), **more)


def result(points: float, **more: Any) -> dict[str, Any]:
    """As run_text gives it."""
    figures = {"n_decoded": 10, "decode_s": 2.0, "prefill_s": 1.0, "machine": "M", "warnings": []}
    return {**figures, "score": points, **more}


def test_cells_have_the_full_cache_once_and_no_pool_as_large_as_the_context() -> None:
    cells = [(c.n_ctx, c.pool, c.variant.label) for c in plan().cells()]
    assert cells == [
        (2048, None, "full"), (2048, 1024, "lru"), (2048, 1024, "qk"),
        (4096, None, "full"), (4096, 1024, "lru"), (4096, 2048, "lru"), (4096, 1024, "qk"), (4096, 2048, "qk"),
    ]  # fmt: skip
    assert plan().texts() == [("vt", 7), ("cwe", 7), ("vt", 8), ("cwe", 8)]


def test_key_changes_with_what_matters_and_not_with_threads(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF another model")
    cell = Cell(4096, 1024, Variant.parse("lru"))
    keys = [
        plan().key(cell, "vt", 7),
        plan().key(cell, "cwe", 7),
        plan().key(cell, "vt", 8),
        *(plan(**x).key(cell, "vt", 7) for x in ({"model": other}, {"haystack": "b"}, {"common": {"type_k": "q8_0"}})),
        *(
            plan().key(replace(cell, **x), "vt", 7)
            for x in ({"n_ctx": 1}, {"pool": 1}, {"variant": Variant.parse("qk")})
        ),
    ]
    assert len({json.dumps(key) for key in keys}) == len(keys) == 9
    same = plan(common={"n_threads": 3}, contexts=(4096,), tasks=("vt",), seeds=(7,), pools=(1024,))
    assert same.key(cell, "vt", 7) == plan().key(cell, "vt", 7)


def filled(ruler: Ruler, folder: Path, points: Callable[[Cell, str, int], float | None]) -> Results:
    results = Results(folder)
    for cell in ruler.cells():
        for task, seed in ruler.texts():
            if (value := points(cell, task, seed)) is not None:
                results.add(ruler.key(cell, task, seed), result(value))
    return results


def test_the_gap_is_paired_over_texts(tmp_path: Path) -> None:
    full = {("vt", 7): 1.0, ("cwe", 7): 0.4, ("vt", 8): 0.6, ("cwe", 8): 0.2}
    lru = {("vt", 7): 0.2, ("cwe", 7): 0.4, ("vt", 8): 0.6, ("cwe", 8): 0.1}
    ruler = plan(contexts=(2048,), variants=tuple(Variant.parse(v) for v in ("full", "lru")))
    results = filled(ruler, tmp_path, lambda cell, *text: (full if cell.variant.full else lru)[text])
    first, second = ruler_tables.summarise(ruler, results)
    assert (first.scores, first.mean, first.gap, first.gap_se) == ({"vt": 80, "cwe": 30.0}, 55, None, None)
    assert second.scores == pytest.approx({"vt": 40, "cwe": 25})
    assert second.mean == pytest.approx(32.5)
    assert second.gap == pytest.approx(-22.5)
    assert second.gap_se == pytest.approx(stdev([-80, 0, 0, -10]) / math.sqrt(4))
    assert (second.texts, second.prefill_s, second.decode_rate) == (4, 1, 5)
    table = ruler_tables.as_markdown(ruler, [first, second]).splitlines()
    assert table[0] == "Context 2K"
    assert table[2] == "| variant | pool | vt | cwe | mean | gap to full | s.e. | texts |"
    assert table[4] == "| full | - | 80.0 | 30.0 | 55.0 | - | - | 4 |"
    assert table[5] == "| lru | 1K | 40.0 | 25.0 | 32.5 | -22.5 | 19.3 | 4 |"
    assert "2 texts of each task, numbers 7 to 8. M: `kvflash bench`" in table[-1]


def test_the_gap_is_over_the_texts_that_both_have(tmp_path: Path) -> None:
    def points(cell: Cell, task: str, seed: int) -> float | None:
        if cell.variant.full:
            return 1.0 if (task, seed) == ("vt", 7) else None
        return {("vt", 7): 0.5, ("vt", 8): 0.0}.get((task, seed))

    ruler = plan(contexts=(2048,), variants=tuple(Variant.parse(v) for v in ("full", "lru", "qk/replay=0")))
    full, lru, _ = ruler_tables.summarise(ruler, filled(ruler, tmp_path, points))
    assert (full.mean, lru.mean, lru.gap, lru.gap_se, lru.texts) == (100, 25, -50, None, 2)
    assert "| lru | 1K | 25.0 | - | 25.0 | -50.0 | - | 2 |" in ruler_tables.as_markdown(ruler, [full, lru])


def test_without_the_full_cache_there_is_no_gap(tmp_path: Path) -> None:
    ruler = plan(variants=tuple(Variant.parse(v) for v in ("full/type_k=q8_0", "lru")))
    rows = ruler_tables.summarise(ruler, filled(ruler, tmp_path, lambda *_: 0.5))
    assert {row.gap for row in rows} == {None}
    text = ruler_tables.write(ruler, Results(tmp_path))
    assert "| lru | 1K | 50.0 | 50.0 | 50.0 | - | - | 4 |" in text
    assert "Context 2K\n" in text
    assert text.index("Context 2K\n") < text.index("Context 4K\n")
    assert ruler_figure(rows, ruler.tasks, "a title").startswith(b"\x89PNG")


def test_long_answers_have_a_table_and_a_mean_of_their_own(tmp_path: Path) -> None:
    points = {("full", "vt"): 1.0, ("full", "list"): 0.5, ("full", "copy"): 0.75, ("lru", "vt"): 0.5}

    def of(cell: Cell, task: str, _seed: int) -> float:
        return points.get((cell.variant.label, task), 0.25)

    variants = tuple(Variant.parse(v) for v in ("full", "lru"))
    ruler = plan(contexts=(2048,), variants=variants, tasks=("list", "vt", "copy"))
    results = filled(ruler, tmp_path, of)
    rows = ruler_tables.summarise(ruler, results)
    assert [(r.group, r.variant, r.scores, r.mean, r.gap, r.texts) for r in rows] == [
        ("ruler", "full", {"vt": 100}, 100, None, 2),
        ("ruler", "lru", {"vt": 50}, 50, -50, 2),
        ("long", "full", {"list": 50, "copy": 75}, 62.5, None, 4),
        ("long", "lru", {"list": 25, "copy": 25}, 25, -37.5, 4),
    ]
    table = ruler_tables.write(ruler, results).splitlines()
    assert table[0] == "Context 2K"
    assert table[2] == "| variant | pool | vt | mean | gap to full | s.e. | texts |"
    assert table[7] == "Context 2K, long answers"
    assert table[9] == "| variant | pool | list | copy | mean | gap to full | s.e. | texts |"
    assert table[12] == "| lru | 1K | 25.0 | 25.0 | 25.0 | -37.5 | 7.2 | 4 |"
    assert ruler_figure(rows, ruler.tasks, "a title").startswith(b"\x89PNG")
    alone = replace(ruler, tasks=("list", "copy"))
    assert [r.group for r in ruler_tables.summarise(alone, results)] == ["long", "long"]
    assert ruler_tables.as_markdown(alone, rows[2:]).startswith("Context 2K, long answers\n\n| variant")


def test_both_scores_of_json_are_shown(tmp_path: Path) -> None:
    """The second one is made of the answers: results that were measured before it was there have it, too."""
    said = {"full": EIGHT, "lru": records("ABDEFGHZ", range(1, 9))}
    ruler = plan(contexts=(2048,), variants=tuple(Variant.parse(v) for v in said), tasks=("json", "list"))
    results = Results(tmp_path)
    for cell in ruler.cells():
        answer = " ".join(said[cell.variant.label])
        of_json = result(share_of_fields(answer, EIGHT), answers=[answer], expected=[EIGHT])
        for task, seed in ruler.texts():
            results.add(ruler.key(cell, task, seed), of_json if task == "json" else result(0.5))
    table = ruler_tables.write(ruler, Results(tmp_path)).splitlines()
    assert table[2] == "| variant | pool | json | json in order | list | mean | gap to full | s.e. | texts |"
    assert table[4] == "| full | - | 100.0 | 100.0 | 50.0 | 75.0 | - | - | 4 |"
    assert table[5].startswith("| lru | 1K | 25.0 | 87.5 | 50.0 | 37.5 | -37.5 | "), "mean and gap are of the first"
    assert "json in order: the share of whole records in their order" in "".join(table[6:])
    full, lru = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (full["scores"], full["in_order"]) == ({"json": 100, "list": 50}, {"json": 100})
    assert (lru["scores"], lru["in_order"]) == ({"json": 25, "list": 50}, {"json": 87.5})
    _, line = csv.DictReader((tmp_path / "results.csv").read_text("utf-8").splitlines())
    assert (line["json"], line["json in order"], line["list"]) == ("25.0", "87.5", "50.0")
    rows = ruler_tables.summarise(ruler, results)
    assert ruler_figure(rows, ruler.tasks, "a title").startswith(b"\x89PNG")


def test_a_task_with_one_score_has_one_column(tmp_path: Path) -> None:
    ruler = plan(contexts=(2048,), tasks=("json", "vt"))
    results = filled(ruler, tmp_path, lambda _cell, task, _seed: 0.5 if task == "vt" else None)
    text = ruler_tables.write(ruler, results)
    assert "| variant | pool | vt | mean |" in text
    assert "| variant | pool | json | json in order | mean |" in text, "and one that is not measured yet has none"
    assert ruler_tables.columns(("list", "json", "vt")) == ["list", "json", "json in order", "vt"]
    assert [r.in_order for r in ruler_tables.summarise(ruler, results)] == [{}, {}, {}]


def test_nothing_measured_is_an_empty_table(tmp_path: Path) -> None:
    assert ruler_tables.summarise(plan(), Results(tmp_path)) == []
    assert ruler_tables.write(plan(), Results(tmp_path)).startswith("Context 2K\n\n| variant | pool |")
