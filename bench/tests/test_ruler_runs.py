"""RULER with a model: what it gives the model, the control that brings all back before the answer, and the command."""

import csv
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import benches
from benches import FILES, good, ignore, refused
from support.changes import BENCHES

from kvflash_bench import kld, ruler_tables
from kvflash_bench import ruler as ruler_bench
from kvflash_bench.control import before_answer, before_prompt
from kvflash_bench.grid import Variant
from kvflash_bench.long_texts import LONG
from kvflash_bench.prompts import Prompts
from kvflash_bench.questions import Question
from kvflash_bench.recall import open_variant
from kvflash_bench.ruler import Cell, Ruler, answer, run_text
from kvflash_bench.ruler_texts import SAMPLE, TASKS, make_text
from pyllama_kvflash.chat.engine import ChatTemplate
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Done, Token
from pyllama_kvflash.native import Model, Sampling
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.nightly(BENCHES)]

environment = benches.environment

COMMON = {"n_threads": 1, "n_batch": 64}
HAYSTACK = SAMPLE.read_text("utf-8")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY = ("--contexts", "1K", "--pools", "768", "--docs", "1", "-b", "64", "-t", "1")


@pytest.fixture
def chatml(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models have a chat template."""
    meta = Model.meta
    mine = {"tokenizer.chat_template": CHATML}
    monkeypatch.setattr(Model, "meta", lambda self, key: mine[key] if key in mine else meta(self, key))


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


def test_a_template_that_leaves_answers_out(model: Model) -> None:
    prompts = Prompts(model)
    prompts._template = ChatTemplate(model, "{{ messages[0].content }}")
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
            kv.clear()
            events = list(kv.generate(ids, max_tokens=n_new, sampling=Sampling(temperature=0)))
            tokens = kv.tokens.tolist()
            kv.clear()
            list(kv.prefill(ids))
            said = answer(kv, n_new)
            assert said.text == "".join(e.text for e in events if isinstance(e, Token | Done))
            assert said.n_tokens == sum(isinstance(e, Token) for e in events)
            assert kv.tokens.tolist() == tokens
            assert len(said.pending) == (len(ids) + said.n_tokens > kv.n_tokens)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", LONG)
def test_the_right_answers_follow_the_prompt(
    task: str, chat: bool, model: Model, request: pytest.FixtureRequest
) -> None:
    if chat:
        request.getfixturevalue("chatml")
    prompts = Prompts(model)
    questions = make_text(task, 3000, prompts.count, HAYSTACK, 3)
    prompt, rest = prompts.answered(questions)
    first, *then = (
        text_of(model, prompts.first(questions[0])),
        *(text_of(model, prompts.further(q)) for q in questions[1:]),
    )
    assert text_of(model, [*prompt, *rest]) == first + questions[0].right + "".join(
        f"{asked}{q.right}" for asked, q in zip(then, questions[1:], strict=True)
    )
    n = len(prompts.first(questions[0]))
    assert n - 3 <= len(prompt) <= n, "but for tokens in which the answer begins"
    assert len(prompt) + len(rest) <= 3000


def test_an_answer_keeps_to_the_schema_of_its_question() -> None:
    """needle-7m knows nothing of JSON."""
    schema = '{"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "integer", "minimum": 1, "maximum": 9}}'
    question = replace(FIRST, n_new=200, schema=schema, score=lambda said, _: float(len(json.loads(said)) == 2))
    with opened("full") as kv:
        cell, prompts = Cell(2048, None, Variant.parse("full")), Prompts(kv.model)
        found = run_text(kv, cell, prompts, (question,), ignore)
        free = run_text(kv, cell, prompts, (FIRST,), ignore)
    assert re.fullmatch(r"\[\s*[1-9]\s*,\s*[1-9]\s*\]", found["answers"][0])
    assert found["score"] == 1, "the question's own"
    assert not free["answers"][0].lstrip().startswith("[")


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
        with pytest.raises(UsageError, match="is not an option"):
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
    pooled, _ = read(f"{policy}/prefill=pool", prompt, 768)
    full, _ = read("full", prompt, 0)
    with kv, pooled, full:
        assert kv.n_batch == pooled.n_batch
        assert np.array_equal(kv.residency().resident, pooled.residency().resident)
        last = kv.logits()
        assert np.array_equal(last, pooled.logits()), "it was read as through a pool of that size"
        assert not np.array_equal(last, full.logits())
        records = [bytes(kv.pager.records.get(c)) for c in range(len(prompt) // 64)]

        before_answer(kv, control)
        assert np.all(kv.residency().resident)
        assert kv.tokens.tolist() == list(prompt)
        assert not np.array_equal(kv.logits(), last), "its last tokens were read again, with all of it"
        n_out = kv.pager.moves.n_out
        said, pool_said = steps(kv, rest), steps(pooled, rest)
        assert np.all(kv.residency().resident), "and all stays"
        assert kv.pager.moves.n_out == n_out
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
        assert np.all(kv.residency().resident)
        assert kv.tokens.tolist() == prompt.tolist()
        kv.decode(prompt[:1])
        kv.check_integrity()


def test_control_is_confined_again_for_the_next_text(ids: Any) -> None:
    kv, control = read("lru/answer=full", ids, 768)
    with kv:
        first, resident = kv.logits(), kv.residency().resident
        before_answer(kv, control)
        assert kv.n_batch == 64
        before_prompt(kv, control, 768)
        list(kv.prefill(ids))
        assert np.array_equal(kv.logits(), first)
        assert np.array_equal(kv.residency().resident, resident)
        assert np.count_nonzero(resident) <= 768 // 64


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
    variants = ("--variants", "lru/prefill=pool,lru/answer=full", "--shares", "75")
    args = ("-f", "book.txt", "--contexts", "1K", "--score", "80", "-b", "64", "-t", "1", "-o", "out")
    res = good("kld", *args, *variants)
    control, pooled = sorted(json.loads(Path("out/results.json").read_text())["rows"], key=lambda r: r["variant"])
    assert control["kv_device_bytes"] == pooled["kv_device_bytes"], "shown beside the pool that it is a control of"
    assert control["share"] == 0.75
    assert control["kld"] != pooled["kld"]
    assert "answer=full: what comes before is read through a pool of that size" in res.stdout

    grid = kld.KldSweep(BUNDLED_MODEL, HAYSTACK[:20000], (1024,), (0.5,), (), 80, COMMON)
    variants = (("lru/answer=full", 1024), ("full", None), ("lru/prefill=pool", 512))
    mine, full, lru = (kld._run(grid, kld.KldCell(1024, pool, Variant.parse(v)), ignore)[0] for v, pool in variants)
    assert mean_kld(full, mine) < 1e-3 < mean_kld(full, lru), "of a pool that holds all; its last batch was another one"


@pytest.mark.parametrize("bench", ["niah", "facts", "speed"])
def test_other_benches_refuse_a_control(bench: str) -> None:
    sentence = refused(bench, str(BUNDLED_MODEL), "--variants", "full,lru/answer=full", "-t", "1")
    assert sentence.endswith(f"is a control of bench ruler and bench kld: leave it out of bench {bench}")


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
        assert stderr.count(f"warning: {name}: a context of 1,024 tokens is longer than the 512 the model was") == 1
        assert stderr.count(f"warning: {name}: a pool of 512 tokens is too small: raised to 768") == 1


def test_quick_is_a_default_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Ruler] = []
    monkeypatch.setattr(ruler_bench, "measure", lambda ruler, *_: seen.append(ruler) or iter(()))
    monkeypatch.setattr(ruler_tables, "summarise", lambda *_: [])
    monkeypatch.setattr(importlib.import_module("kvflash_bench.cli.answers"), "picture", lambda *_: None)
    good("ruler", str(BUNDLED_MODEL), "--quick", "--docs", "2")
    good("ruler", str(BUNDLED_MODEL))
    good("ruler", str(BUNDLED_MODEL), "--tasks", "long")
    quick, whole, long = seen
    assert long.tasks == tuple(LONG)
    assert (quick.contexts, len(quick.seeds)) == ((4096,), 2)
    assert set(quick.tasks) < set(TASKS)
    assert (whole.contexts, whole.pools, len(whole.seeds), whole.tasks) == (
        (8192, 16384),
        (1024, 2048),
        5,
        tuple(TASKS),
    )
    assert [v.label for v in whole.variants] == ["full", "lru", "qk", "fresh"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tasks", "long"), "a text of 1024 tokens is too short for json: use a longer one"),
        (("--contexts", "256"), "nothing to measure: no pool of --pools is smaller than a context of --contexts"),
        (("--variants", "oracle"), "the oracle is told where codes are"),
        (("-f", "empty.txt"), "the text file empty.txt is empty: give one with words"),
        (("-f", "few.txt", "--tasks", "cwe"), "the text has 2 different words of 4 to 9 letters, and cwe needs 40"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(args: tuple[str, ...], says: str) -> None:
    Path("empty.txt").write_text(" \n")
    Path("few.txt").write_text("Only these two.")
    assert says in refused("ruler", str(BUNDLED_MODEL), *TINY, "--variants", "lru", "--tasks", "vt", *args)
    assert not Path("kvflash-ruler/results.jsonl").exists()


def test_a_model_must_be_given() -> None:
    assert "bench ruler needs a model that answers questions" in refused("ruler", *TINY)
    assert not Path("kvflash-ruler").exists()
