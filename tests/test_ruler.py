"""RULER's tasks: their texts, what a model is given of them, the control that brings all back, tables, and the command."""

import csv
import importlib
import json
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("jinja2")

from benches import good, invoke, isolate, refused, type_examples

from pyllama_kvflash.bench import kld, ruler_tables, ruler_texts
from pyllama_kvflash.bench import ruler as ruler_bench
from pyllama_kvflash.bench.control import before_answer, before_prompt
from pyllama_kvflash.bench.figures import ruler_figure
from pyllama_kvflash.bench.grid import Results, Variant
from pyllama_kvflash.bench.recall import open_variant
from pyllama_kvflash.bench.ruler import Cell, Prompts, Ruler, answer, parse_tasks, run_text
from pyllama_kvflash.bench.ruler_texts import SAMPLE, TASKS, Question, Questions, make_text, score
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Done, Token
from pyllama_kvflash.native import Model, Sampling
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.policy import State

pytestmark = pytest.mark.native

FILES = {f"results.{kind}" for kind in ("md", "csv", "json", "jsonl", "png")}
COMMON = {"n_threads": 1, "n_batch": 64}
HAYSTACK = SAMPLE.read_text("utf-8")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NIAH = [task for task in TASKS if task not in {"vt", "cwe", "fwe"}]
ALONE = ["single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "in_turn"]
TINY = ("--contexts", "1K", "--pools", "768", "--docs", "1", "-b", "64", "-t", "1")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the caller's settings, and nothing written outside a folder of the test."""
    isolate(monkeypatch, tmp_path, "bench")


@pytest.fixture
def chatml(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models have a chat template."""
    meta = Model.meta
    mine = {"tokenizer.chat_template": CHATML}
    monkeypatch.setattr(Model, "meta", lambda self, key: mine[key] if key in mine else meta(self, key))


def ignore(_: Any) -> None:
    """No progress."""


def count(questions: Questions) -> int:
    """As some tokenizer might."""
    return sum(len(re.findall(r"\w{1,4}|[^\w\s]|\n", q.text + q.prefix)) for q in questions)


def made(task: str, n_tokens: int = 5000, seed: int = 11, haystack: str = HAYSTACK) -> Questions:
    return make_text(task, n_tokens, count, haystack, seed)


#
# texts
#


@pytest.mark.parametrize("n_tokens", [1500, 5000, 20000])
@pytest.mark.parametrize("task", TASKS)
def test_a_text_fills_its_length_with_room_for_the_answers(task: str, n_tokens: int) -> None:
    questions = made(task, n_tokens)
    n = count(questions) + sum(q.n_new for q in questions)
    assert 0.95 * n_tokens <= n <= n_tokens


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_names_a_text(task: str) -> None:
    assert made(task, 2000, 3) == made(task, 2000, 3)
    assert made(task, 2000, 3)[0].text != made(task, 2000, 4)[0].text
    assert made(task, 2000, 3)[0].expected != made(task, 2000, 4)[0].expected


def needles(text: str) -> list[tuple[str, str]]:
    """Key and value of all in a text, in its order."""
    return re.findall(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.(?:\s|$)", text)


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
    some = ruler_texts._keys(random.Random(1), 5)
    others = ruler_texts._keys(random.Random(1), 10**6, some)
    assert len({*some, *others}) == len(some) + len(others) > 30_000, "as many as there are"
    assert ruler_texts._keys(random.Random(1), 5, some)[0] not in some


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
    with pytest.raises(UsageError, match="'best' is no task of RULER here: there are single_1, "):
        made("best")
    for task in TASKS:
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
    assert score(said, expected) == points


def test_tasks_are_read_by_both_names() -> None:
    assert parse_tasks("niah_single_1, vt,vt,single_1") == ("single_1", "vt")
    for text in ("", "vt,", "qa_1", "VT"):
        with pytest.raises(UsageError, match="is no task of RULER here: there are single_1"):
            parse_tasks(text)


#
# what a model is given
#

FIRST = Question("A text.\nWhat is it?", " It is", ("7",), 8)
SECOND = Question("And then?", " Then", ("8",), 8)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        yield model


def text_of(model: Model, tokens: Any) -> str:
    return b"".join(model.piece(int(t), special=True) for t in tokens).decode()


def test_prompts_are_the_templates_conversation(model: Model, chatml: None) -> None:
    prompts = Prompts(model)
    user, then = "<|im_start|>user\nA text.\nWhat is it?<|im_end|>\n", "<|im_start|>assistant\n"
    assert text_of(model, prompts.first(FIRST)).endswith(f"{user}{then} It is")
    asked = f"<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n{then} Then"
    assert text_of(model, prompts.further(SECOND)) == asked
    assert prompts.count((FIRST, SECOND)) == len(prompts.first(FIRST)) + len(prompts.further(SECOND))


def test_without_a_template_the_text_is_plain(model: Model) -> None:
    prompts = Prompts(model)
    assert np.array_equal(prompts.first(FIRST), model.tokenize("A text.\nWhat is it? It is"))
    assert text_of(model, prompts.further(SECOND)) == "\nAnd then? Then"


def test_a_template_that_leaves_answers_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = Model.meta
    only = "{{ messages[0].content }}"
    monkeypatch.setattr(Model, "meta", lambda self, key: only if key.endswith("chat_template") else meta(self, key))
    prompts = Prompts(model)
    prompts.first(FIRST)
    with pytest.raises(UsageError, match="the chat template leaves out what the assistant said"):
        prompts.further(SECOND)


def opened(variant: str, n_ctx: int = 2048, pool: int = 768, **more: Any) -> KVFlash:
    return open_variant(BUNDLED_MODEL, Variant.parse(variant), n_ctx, pool, {**COMMON, **more})


@pytest.mark.parametrize("variant", ["full", "lru", "qk/share=0"])
def test_an_answer_is_what_generate_says(variant: str) -> None:
    with opened(variant) as kv:
        ids = Prompts(kv.model).first(make_text("single_2", 1500, Prompts(kv.model).count, HAYSTACK, 1)[0])
        for n_new in (1, 70):
            events = list(kv.generate(ids, max_tokens=n_new, sampling=Sampling(temperature=0)))
            tokens = kv.tokens.tolist()
            kv.clear()
            list(kv.prefill(ids))
            said = answer(kv, n_new)
            assert said.text == "".join(e.text for e in events if isinstance(e, Token | Done))
            assert said.n_tokens == sum(isinstance(e, Token) for e in events)
            assert kv.tokens.tolist() == tokens
            assert len(said.pending) == (len(ids) + said.n_tokens > kv.n_tokens)


@pytest.mark.parametrize("variant", ["full", "lru", "lru/answer=full"])
def test_the_second_question_follows_the_first_answer(variant: str, chatml: None) -> None:
    with opened(variant) as kv:
        prompts = Prompts(kv.model)
        questions = make_text("in_turn", 2048, prompts.count, HAYSTACK, 2)
        cell = Cell(2048, 768, Variant.parse(variant))
        found = run_text(kv, cell, prompts, questions, ignore)
        first, further = prompts.first(questions[0]).tolist(), prompts.further(questions[1]).tolist()
        tokens = kv.tokens.tolist()
        again = run_text(kv, cell, prompts, questions, ignore)
    assert tokens[: len(first)] == first
    at = next(i for i in range(len(first), len(tokens)) if tokens[i : i + len(further)] == further)
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        assert text_of(model, tokens[len(first) : at]) == found["answers"][0], "its last token is decoded, too"
    assert found["n_tokens"] == len(first)
    assert len(found["answers"]) == len(found["scores"]) == 2
    assert found["score"] == sum(found["scores"]) / 2
    assert found["expected"] == [list(q.expected) for q in questions]
    assert again["answers"] == found["answers"], "nothing is left of the text before"
    assert json.loads(json.dumps(found)) == found


#
# the control
#


def test_control_is_an_option_of_a_pool() -> None:
    variant = Variant.parse("qk/answer=full/replay=0")
    assert (variant.control, variant.policy, variant.options) == (True, "qk", {"replay": 0})
    assert not Variant.parse("qk").control
    with pytest.raises(UsageError, match="the full cache has none: name a policy"):
        Variant.parse("full/answer=full")
    for text in ("qk/answer=half", "qk/answer"):
        with pytest.raises(UsageError, match="is no option"):
            Variant.parse(text)


def read(variant: str, ids: Any, pool: int) -> tuple[KVFlash, Variant]:
    """A model that has read a prompt."""
    kv, parsed = opened(variant, pool=pool), Variant.parse(variant)
    assert before_prompt(kv, parsed, pool) == ()
    list(kv.prefill(ids))
    return kv, parsed


def steps(kv: KVFlash, tokens: Any) -> list[np.ndarray]:
    """Logits before the first and after each of these tokens."""
    found = [kv.logits()]
    for token in tokens:
        kv.decode([int(token)])
        found.append(kv.logits())
    return found


@pytest.fixture(scope="module")
def ids(model: Model) -> Any:
    """A prompt of 1,500 tokens or so, and what is decoded after it, 150 tokens."""
    text = make_text("single_2", 1700, Prompts(model).count, HAYSTACK, 5)[0].text
    return model.tokenize(text)


@pytest.mark.parametrize("policy", ["lru", "qk/share=0"])
def test_control_reads_as_the_pool_and_answers_with_all(policy: str, ids: Any) -> None:
    prompt, rest = ids[:-150], ids[-150:]
    kv, control = read(f"{policy}/answer=full", prompt, 768)
    pooled, _ = read(policy, prompt, 768)
    full, _ = read("full", prompt, 0)
    with kv, pooled, full:
        assert kv.n_batch == pooled.n_batch
        assert np.array_equal(kv.residency().state, pooled.residency().state)
        last = kv.logits()
        assert np.array_equal(last, pooled.logits()), "it was read as through a pool of that size"
        assert not np.array_equal(last, full.logits())
        records = [bytes(kv.pager.records.get(c)) for c in range(len(prompt) // 64)]

        before_answer(kv, control)
        assert np.all(kv.residency().state == State.RESIDENT)
        assert kv.tokens.tolist() == list(prompt)
        assert not np.array_equal(kv.logits(), last), "its last tokens were read again, with all of it"
        n_out = kv.pager.n_out
        said, pool_said = steps(kv, rest), steps(pooled, rest)
        assert np.all(kv.residency().state == State.RESIDENT), "and all stays"
        assert kv.pager.n_out == n_out
        kv.check_integrity()
        n_kept = (len(prompt) - kv.options.replay) // 64
        assert records[:n_kept] == [bytes(kv.pager.records.get(c)) for c in range(n_kept)], (
            "the rest is as the pool read it"
        )
    assert not any(np.array_equal(a, b) for a, b in zip(said, pool_said, strict=True))


def test_control_of_a_pool_that_holds_the_prompt_is_the_full_cache(ids: Any) -> None:
    prompt, rest = ids[:600], ids[600:700]
    kv, control = read("lru/answer=full", prompt, 1024)
    full, _ = read("full", prompt, 0)
    with kv, full:
        before_answer(kv, control)
        full.rollback(len(prompt) - 64)
        list(full.prefill(prompt[-64:]))
        assert all(np.array_equal(a, b) for a, b in zip(steps(kv, rest), steps(full, rest), strict=True))


@pytest.mark.parametrize(("replay", "n_again"), [(0, 1), (1, 1), (64, 64), (5000, 600)])
def test_control_reads_its_last_tokens_again(
    ids: Any, monkeypatch: pytest.MonkeyPatch, replay: int, n_again: int
) -> None:
    """As many as a pool does; one at least, for its logits are to come of all of it."""
    prompt = ids[:600]
    kv, control = read(f"lru/answer=full/replay={replay}", prompt, 1024)
    with kv:
        again = []
        decode = kv.ctx.decode
        monkeypatch.setattr(kv.ctx, "decode", lambda ids, pos, out: (again.extend(ids.tolist()), decode(ids, pos, out)))
        before_answer(kv, control)
        assert again == list(prompt[-n_again:])
        assert kv.tokens.tolist() == list(prompt)


def test_control_of_a_state_that_cannot_go_back(tiny_path: Callable[[str], Path]) -> None:
    """The question stays as the pool read it, and the answer goes on."""
    prompt = np.random.default_rng(1).integers(0, 500, 1500).astype(np.int32)
    control = Variant.parse("qk/answer=full")
    with open_variant(tiny_path("qwen35"), control, 2048, 768, {"n_threads": 1}) as kv:
        before_prompt(kv, control, 768)
        list(kv.prefill(prompt))
        last = kv.logits()
        before_answer(kv, control)
        assert np.array_equal(kv.logits(), last)
        assert np.all(kv.residency().state == State.RESIDENT)
        assert kv.tokens.tolist() == prompt.tolist()
        kv.decode(prompt[:1])
        kv.check_integrity()


def test_control_is_confined_again_for_the_next_text(ids: Any) -> None:
    kv, control = read("lru/answer=full", ids, 768)
    with kv:
        first, state = kv.logits(), kv.residency().state
        before_answer(kv, control)
        assert kv.n_batch == 64
        before_prompt(kv, control, 768)
        list(kv.prefill(ids))
        assert np.array_equal(kv.logits(), first)
        assert np.array_equal(kv.residency().state, state)
        assert np.count_nonzero(state == State.RESIDENT) <= 768 // 64


def test_control_has_the_pool_that_would_be_made() -> None:
    with opened("lru/answer=full", pool=300) as kv, opened("lru", pool=300) as pooled:
        warnings = before_prompt(kv, Variant.parse("lru/answer=full"), 300)
        assert warnings == tuple(w for w in pooled.warnings if "too small" in w)
        assert len(warnings) == 1
        assert kv.pager.ledger.n_free * 64 == pooled.n_pool


@pytest.mark.parametrize("pool", [768, 1024, 1500])
def test_control_reads_in_the_batches_of_that_pool(pool: int) -> None:
    with opened("lru/answer=full", pool=pool, n_batch=0) as kv, opened("lru", pool=pool, n_batch=0) as pooled:
        assert before_prompt(kv, Variant.parse("lru/answer=full"), pool) == ()
        assert (kv.n_batch, kv.pager.ledger.n_free * 64) == (pooled.n_batch, pooled.n_pool)


def mean_kld(full: Any, other: Any) -> float:
    """The mean divergence of what other predicts from what the full cache does."""
    p, q = (x - x.max(axis=1, keepdims=True) for x in (full.astype(np.float64), other.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def test_kld_of_a_control(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(HAYSTACK[:20000])
    variants = ("--variants", "lru,lru/answer=full", "--shares", "75")
    args = ("-f", "book.txt", "--contexts", "1K", "--score", "80", "-b", "64", "-t", "1", "-o", "out")
    res = good("kld", *args, *variants)
    control, pooled = sorted(json.loads(Path("out/results.json").read_text())["rows"], key=lambda r: len(r["variant"]))[
        ::-1
    ]
    assert control["kv_device_bytes"] == pooled["kv_device_bytes"], "shown beside the pool that it is a control of"
    assert control["share"] == 0.75
    assert control["kld"] != pooled["kld"]
    assert "answer=full: what comes before is read through a pool of that size" in res.stdout

    grid = kld.KldSweep(BUNDLED_MODEL, HAYSTACK[:20000], (1024,), (0.5,), (), 80, COMMON)
    variants = (("lru/answer=full", 1024), ("full", None), ("lru", 512))
    mine, full, lru = (kld._run(grid, kld.KldCell(1024, pool, Variant.parse(v)), ignore)[0] for v, pool in variants)
    assert mean_kld(full, mine) < 1e-3 < mean_kld(full, lru), "of a pool that holds all; its last batch was another one"


@pytest.mark.parametrize("bench", ["niah", "facts", "speed"])
def test_other_benches_refuse_a_control(bench: str) -> None:
    sentence = refused(bench, str(BUNDLED_MODEL), "--variants", "full,lru/answer=full", "-t", "1")
    assert sentence.endswith(f"is a control of bench ruler and bench kld: leave it out of bench {bench}")


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


def test_nothing_measured_is_an_empty_table(tmp_path: Path) -> None:
    assert ruler_tables.summarise(plan(), Results(tmp_path)) == []
    assert ruler_tables.write(plan(), Results(tmp_path)).startswith("Context 2K\n\n| variant | pool |")


#
# the command
#

SOME = ("--tasks", "in_turn,vt", "--variants", "full,lru,lru/answer=full")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("ruler") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kvflash", "bench", "ruler"])
        return good("ruler", str(BUNDLED_MODEL), *TINY, *SOME, "-o", str(folder)), folder


def test_the_bench_writes_its_tables(measured: tuple[Any, Path]) -> None:
    res, folder = measured
    assert {p.name for p in folder.iterdir()} == FILES
    assert res.stdout == (folder / "results.md").read_text("utf-8")
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert [(r["variant"], r["pool"], r["texts"]) for r in rows] == [
        ("full", None, 2), ("lru", 768, 2), ("lru/answer=full", 768, 2)
    ]  # fmt: skip
    table = list(csv.DictReader((folder / "results.csv").read_text("utf-8").splitlines()))
    assert [(r["variant"], float(r["vt"]), float(r["mean"])) for r in table] == [
        (r["variant"], r["scores"]["vt"], r["mean"]) for r in rows
    ]
    assert "1 text of each task, numbers 11 to 11." in res.stdout
    assert "answer=full: what comes before is read through a pool of that size" in res.stdout
    kept = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(k["key"]["variant"], k["key"]["task"]) for k in kept] == [
        (v, t) for v in ("full", "lru", "lru/answer=full") for t in ("in_turn", "vt")
    ]
    assert all(k["result"]["n_tokens"] < 1024 and k["result"]["n_tokens"] > 700 for k in kept)


def test_what_was_measured_is_not_measured_again(
    measured: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (measured[1] / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "results.jsonl").write_text("".join(lines[:3] + lines[4:]))
    seen = []
    lost = json.loads(lines[3])["result"]
    monkeypatch.setattr(ruler_bench, "run_text", lambda _kv, cell, *_: seen.append(cell) or lost)
    args = (str(BUNDLED_MODEL), *TINY, *SOME, "-o", "again")
    monkeypatch.setattr(sys, "argv", ["kvflash", "bench", "ruler"])
    res = good("ruler", *args)
    assert [(c.variant.label, c.pool) for c in seen] == [("lru", 768)]
    assert "5 runs were measured before" in res.stderr
    assert good("ruler", *args).stdout == res.stdout == measured[0].stdout
    assert len(seen) == 1


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 0

    def run(*_: Any) -> dict[str, Any]:
        nonlocal n
        n += 1
        if n == 3:
            raise KeyboardInterrupt
        return result(0.5)

    monkeypatch.setattr(ruler_bench, "run_text", run)
    assert invoke("ruler", str(BUNDLED_MODEL), *TINY, *SOME, "-o", "out").exit_code == 130
    assert len(Path("out/results.jsonl").read_text().splitlines()) == 2
    assert "| full | - | 50.0 | 50.0 | 50.0 | - | - | 2 |" in Path("out/results.md").read_text()


def test_warnings_are_told_once_for_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Model.load

    def trained(*args: Any, **more: Any) -> Model:
        model = load(*args, **more)
        model.n_ctx_train = 512
        return model

    monkeypatch.setattr(Model, "load", trained)
    args = ("--variants", "lru,lru/answer=full", "--tasks", "single_1", "--docs", "2", "--pools", "512")
    stderr = good("ruler", str(BUNDLED_MODEL), *TINY, *args).stderr
    for name in ("lru 1,024/512", "lru/answer=full 1,024/512"):
        assert stderr.count(f"warning: {name}: a context of 1024 tokens is longer than the 512 the model was") == 1
        assert stderr.count(f"warning: {name}: a pool of 512 tokens is too small: raised to 768") == 1


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("It was a wet day in Harbourtown. " * 3)
    args = ("-f", "book.txt", "--variants", "full", "--tasks", "single_2")
    good("ruler", str(BUNDLED_MODEL), *TINY, *args)
    assert {p.name for p in Path("kvflash-ruler").iterdir()} == FILES, "the folder that is taken without -o"


def test_quick_is_a_default_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Ruler] = []
    monkeypatch.setattr(ruler_bench, "measure", lambda ruler, *_: seen.append(ruler) or iter(()))
    monkeypatch.setattr(ruler_tables, "summarise", lambda *_: [])
    monkeypatch.setattr(importlib.import_module("pyllama_kvflash.cli.bench"), "picture", lambda *_: None)
    good("ruler", str(BUNDLED_MODEL), "--quick", "--docs", "2")
    good("ruler", str(BUNDLED_MODEL))
    quick, whole = seen
    assert (quick.contexts, len(quick.seeds)) == ((4096,), 2)
    assert set(quick.tasks) < set(TASKS)
    assert (whole.contexts, whole.pools, len(whole.seeds), whole.tasks) == (
        (8192, 16384),
        (1024, 2048),
        5,
        tuple(TASKS),
    )
    assert [v.label for v in whole.variants] == ["full", "lru", "qk"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tasks", "best"), "'best' is no task of RULER here: there are single_1, "),
        (("--tasks", ""), "'' is no task of RULER here"),
        (("--contexts", "256"), "nothing to measure: no pool of --pools is smaller than a context of --contexts"),
        (("--contexts", "256", "--variants", "full"), "a text of 256 tokens is too short for vt: use a longer one"),
        (("--variants", "full,best"), "'best' in 'best' is no policy"),
        (("--variants", "oracle"), "the oracle is told where codes are"),
        (("--variants", "full/answer=full"), "the full cache has none: name a policy"),
        (("-f", "no/such.txt"), "the text file no/such.txt cannot be read"),
        (("-f", "empty.txt"), "the text file empty.txt is empty: give one with words"),
        (("-f", "few.txt", "--tasks", "cwe"), "the text has 2 different words of 4 to 9 letters, and cwe needs 40"),
        (("--docs", "0"), "0 is not in the range"),
        (("-t", "0"), "n_threads (-t/--threads) is 0"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(args: tuple[str, ...], says: str) -> None:
    Path("empty.txt").write_text(" \n")
    Path("few.txt").write_text("Only these two.")
    assert says in refused("ruler", str(BUNDLED_MODEL), *TINY, "--variants", "lru", "--tasks", "vt", *args)
    assert not Path("kvflash-ruler/results.jsonl").exists()


def test_a_model_must_be_given() -> None:
    assert "bench ruler needs a model that answers questions" in refused("ruler", *TINY)
    assert "no/such.gguf" in refused("ruler", "no/such.gguf", *TINY)
    assert not Path("kvflash-ruler").exists()


def test_a_model_without_a_tokenizer(tiny_path: Callable[[str], Path]) -> None:
    assert "has no tokenizer" in refused("ruler", str(tiny_path("qwen3")), *TINY, "--tasks", "vt", code=1)


def test_help_shows_commands_that_can_be_typed() -> None:
    shown, _ = type_examples("ruler")
    assert len(shown) >= 3
    assert "RULER's tasks" in good("--help").stdout
