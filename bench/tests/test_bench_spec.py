"""`kvflash bench spec`: texts, turns, what is counted and compared, the tables, and the command. Never the speed itself."""

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from benches import FILES, good, isolate, refused
from support.changes import BENCHES, ENGINE
from support.drafting import width_noise
from support.rounding import Chosen

from kvflash_bench import answers as answers_bench
from kvflash_bench import speculation as spec_bench
from kvflash_bench.answers import batch_costs, context, difference, in_turns, make_text
from kvflash_bench.grid import Results
from kvflash_bench.speculation import Cell, Row, SpecBench, Way, agreements, as_markdown, spec_figure, summarise
from pyllama_kvflash.engine import generation
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import Interrupted, UnsupportedError, UsageError
from pyllama_kvflash.events import Done
from pyllama_kvflash.native import Context, Sampler
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL

pytestmark = pytest.mark.native

SOME = ("--texts", "copy,needles", "--kinds", "ngram")
SIZES = ("--pool", "256", "--chunk", "16", "-n", "144", "--questions", "2", "--rounds", "1", "-t", "1")
BENCH = SpecBench(
    *(BUNDLED_MODEL, str(BUNDLED_DRAFTER)), lengths=(144,), questions=2, pool=256, chunk=16, rounds=1, common={"n_threads": 1}
)  # fmt: skip
SMALL = {"n_ctx": 2048, "pool": "off", "n_threads": 1}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the caller's settings, and nothing written outside a folder of the test."""
    isolate(monkeypatch, tmp_path, "bench", "spec")
    monkeypatch.setattr(answers_bench, "_TRIES", 2)
    monkeypatch.setattr(answers_bench, "_DOCUMENT", 2)


def ignore(*_: Any) -> None:
    """No progress."""


#
# texts and turns
#


@pytest.mark.parametrize("pool", [256, 512])
def test_texts_are_made_for_the_pool(pool: int, opened: Callable[..., KVFlash]) -> None:
    kv = opened("needle")
    copy, _ = make_text(kv, "copy", pool, 0)
    prose, _ = make_text(kv, "entropy", pool, 0)
    document, needles = make_text(kv, "needles", pool, 3)
    lines = copy.splitlines()
    assert len(set(lines[-8:])) == 1, "what is to be copied"
    assert lines[-1].startswith("The secret code for the ")
    assert "secret code" not in prose
    assert [document.count(n.statement) for n in needles] == [1, 1, 1]
    for text, part, n in ((copy, "copy", 0), (prose, "entropy", 0), (document, "needles", 3)):
        assert len(kv.tokenize(text)) <= context(part, pool, n)
    assert 1.4 * pool < len(kv.tokenize(document)) <= 2 * pool


@pytest.mark.nightly(BENCHES, ENGINE)
def test_needle_7m_goes_on_copying_and_draws_no_end_of_text(opened: Callable[..., KVFlash]) -> None:
    kv = opened("needle")
    line = make_text(kv, "copy", 512, 0)[0].splitlines()[-1] + "\n"
    [([tokens], _)] = in_turns([kv], "copy", 512, 140, ignore)
    assert kv.detokenize(tokens).startswith(line * 10)
    [([tokens], [answer])] = in_turns([kv], "entropy", 512, 300, ignore)
    assert (len(tokens), answer["n"]) == (300, 300)
    assert len(set(tokens)) > 150


def test_models_take_turns(opened: Callable[..., KVFlash], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    kvs = [opened("needle"), opened("needle")]
    for i, kv in enumerate(kvs):
        real = kv.sequence.tick  # after each step of an answer
        monkeypatch.setattr(kv.sequence, "tick", lambda *a, i=i, real=real: seen.append(i) or real(*a))
    (first, _), (second, _) = in_turns(kvs, "copy", 256, 140, ignore)
    assert first == second
    assert [len(t) for t in first] == [140]
    runs = [seen[0]]
    for a, b in pairwise(seen):
        runs += [b] if a != b else []
    assert runs == [0, 1, 0, 1, 0, 1], "64 tokens, 64, and the rest"
    assert (seen.count(0), seen.count(1)) == (139, 139), "the first token comes out of the prompt"


def test_questions_are_asked_each_as_if_it_were_the_only_one(opened: Callable[..., KVFlash]) -> None:
    kv = opened("needle")
    _, needles = make_text(kv, "needles", 256, 3)
    [(texts, answers)] = in_turns([kv], "needles", 256, 3, ignore)
    assert [kv.detokenize(t) for t in texts] == [f" {n.answer}.\n" for n in needles]
    assert [a["found"] for a in answers] == [True] * 3
    assert all(a["n"] == len(t) and a["decode_s"] > 0 for a, t in zip(answers, texts, strict=True))
    assert len({a["mark"] for a in answers}) == 3


def test_an_interrupted_answer_ends_the_bench(opened: Callable[..., KVFlash], monkeypatch: pytest.MonkeyPatch) -> None:
    kv = opened("needle")
    monkeypatch.setattr(kv, "generate", lambda *_, **__: iter([Done("interrupted", "", kv.stats())]))
    with pytest.raises(Interrupted):
        in_turns([kv], "copy", 256, 8, ignore)


@pytest.mark.parametrize(
    ("text", "right", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ([1, 2], [1], 1),
        ([], [4], 0),
    ],
)
def test_the_first_difference(text: list[int], right: list[int], at: int | None) -> None:
    assert difference(text, right) == at


def test_what_a_batch_costs_leaves_the_text_as_it_is(
    opened: Callable[..., KVFlash], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = opened("needle")
    kv.decode(kv.tokenize("The road"))
    before = kv.tokens.tolist()
    costs = batch_costs(kv, [5, 9])
    assert kv.tokens.tolist() == before
    assert set(costs) == {5, 9}
    assert all(cost > 0 for cost in costs.values())

    def never(_: int) -> None:
        raise UnsupportedError("it cannot go back")

    monkeypatch.setattr(kv, "rollback", never)
    assert batch_costs(kv, [5, 9]) == {}


#
# what is measured
#


def test_cells_and_ways() -> None:
    bench = replace(BENCH, lengths=(144, 500), n_max=(4, 8), kinds=("ngram",), pool=250)
    assert [(c.text, c.n, c.cache) for c in bench.cells()] == [
        (text, n, cache)
        for text, n in (("copy", 144), ("copy", 500), ("entropy", 144), ("entropy", 500), ("needles", 2))
        for cache in ("full", "pool 256")
    ]
    assert [w.label for w in bench.ways()] == [f"ngram of {n}, gate {gate}" for n in (4, 8) for gate in ("on", "off")]
    specs = [spec for way in BENCH.ways() if (spec := BENCH.spec(way))]
    assert [spec.gate for spec in specs] == [1, 0, 1, 0]
    assert [spec.model for spec in specs] == [str(BUNDLED_DRAFTER)] * 2 + [None] * 2
    assert BENCH.spec(Way()) is None


def test_a_key_has_all_that_a_result_depends_on() -> None:
    cell = Cell("copy", 144, 256)
    changes: list[dict[str, Any]] = [
        {"kinds": ("ngram",)}, {"n_max": (4,)}, {"pool": 512, "lengths": (300,)}, {"chunk": 32, "pool": 1024, "lengths": (900,)}, {"rounds": 2},
        {"common": {"n_threads": 2}}, {"common": {"n_threads": 1, "flash_attn": "off"}}, {"drafter": str(BUNDLED_MODEL)},
    ]  # fmt: skip
    keys = [BENCH.key(cell), BENCH.key(replace(cell, pool=None)), BENCH.key(replace(cell, n=145))]
    keys += [replace(BENCH, **change).key(cell) for change in changes]
    marks = {json.dumps(key, sort_keys=True) for key in keys}
    assert len(marks) == len(keys)
    assert BENCH.key(cell) == replace(BENCH, texts=("copy",), lengths=(144, 900)).key(cell), "other cells do not matter"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kinds": ("draft", "best")}, "there is no kind 'best': give some of draft,dflash,eagle3,mtp,ngram"),
        ({"texts": ("poem",)}, "there is no text 'poem': give some of copy,entropy,needles"),
        ({"drafter": None}, "kind draft needs a drafter: give its file with `drafter`"),
        ({"n_max": (8, 65)}, "`spec.n_max` is 65"),
        ({"pool": 128, "chunk": 32}, "a pool of 128 (`pool`) is too small for chunks of 32: give at least 512"),
        ({"chunk": 24}, "`chunk` is 24"),
        ({"lengths": (500, 128)}, "128 tokens (-n) after a text of 128 do not fill a pool of 256: give more than 128"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(BENCH, **change)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_questions_alone_need_no_length() -> None:
    assert replace(BENCH, texts=("needles",), lengths=(1,)).texts == ("needles",)


#
# tables, from results that were made up
#


def answer(n: int, seconds: float, mark: str = "a", **more: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("drafted", "accepted", "draft_steps", "plain_steps", "gated_steps"), 0)
    return {"n": n, "decode_s": seconds, **counts, "mark": mark, "differs": None, **more}


def made_up(bench: SpecBench, runs: list[list[dict[str, Any]]], plain: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A result whose first way has these answers in its rounds, and all other ways plain's."""
    ways = [
        {"kind": w.kind, "n_max": w.n_max, "gate": w.gate,
         "runs": [{"answers": a, "plain": p} for a, p in zip(runs if i == 0 else plain, plain, strict=True)]}
        for i, w in enumerate(bench.ways())
    ]  # fmt: skip
    return {"n_pool": None, "at": 700, "ways": ways, "costs": {"9": 4.0}, "warnings": [], "machine": "a machine"}


def test_rows_are_medians_of_rounds_and_shares_of_all(tmp_path: Path) -> None:
    bench = replace(BENCH, kinds=("ngram",), texts=("copy",), rounds=3)
    results = Results(tmp_path)
    counts = {"drafted": 16, "accepted": 12, "draft_steps": 2, "plain_steps": 8, "gated_steps": 5}
    runs = [[answer(101, s, differs=d, **counts)] for s, d in ((0.5, None), (0.2, 40), (0.25, 30))]
    plain = [[answer(101, s)] for s in (1.0, 1.0, 2.0)]
    results.add(bench.key(Cell("copy", 144, None)), made_up(bench, runs, plain))
    base, on, off = summarise(bench, results)
    assert (base.kind, base.gate, base.rate, base.x, base.acceptance, base.cost) == ("plain", None, 100, 1, None, None)
    assert (base.equal, base.answers) == (6, 6), "beside each of two ways, three times"
    assert (on.kind, on.n_max, on.gate, on.rate, on.cost, on.at) == ("ngram", 8, True, 400, 4.0, 700)
    assert (on.x, on.x_low, on.x_high) == (5, 2, 8), "against plain decoding beside it"
    assert (on.acceptance, on.committed, on.gated) == (0.75, 7, 0.5)
    assert (on.equal, on.answers, on.differs, on.found) == (1, 3, 30, None)
    assert (off.gate, off.x, off.equal, off.differs) == (False, 1, 3, None)
    table = as_markdown(bench, results)
    assert "| copy, 101 tokens | full | ngram of 8 | on | 400 | 5.00 | (2.00, 8.00) | 75.0 % | 7.00 | 50.0 % |" in table
    assert "| 4.0 at 700 | 1/3, differs at 30 |" in table
    assert "a machine: `kvflash bench spec`" in table
    assert spec_figure(summarise(bench, results), "made up").startswith(b"\x89PNG")


def test_nothing_measured_is_an_empty_table(tmp_path: Path) -> None:
    assert summarise(BENCH, Results(tmp_path)) == agreements(BENCH, Results(tmp_path)) == []
    assert as_markdown(BENCH, Results(tmp_path)).startswith("| text |")


def test_answers_of_no_token_have_no_rate(tmp_path: Path) -> None:
    bench, results = replace(BENCH, kinds=("ngram",), texts=("copy",)), Results(tmp_path)
    results.add(bench.key(Cell("copy", 144, None)), made_up(bench, [[answer(0, 0.0)]], [[answer(1, 0.0)]]))
    assert {(r.rate, r.x) for r in summarise(bench, results)} == {(0.0, 0.0)}


def test_guesses_are_compared_where_both_caches_say_the_same(tmp_path: Path) -> None:
    bench, results = replace(BENCH, kinds=("draft",), texts=("needles",)), Results(tmp_path)
    cells = list(bench.cells())

    def asked(marks: str, accepted: tuple[int, ...]) -> list[list[dict[str, Any]]]:
        pairs = zip(marks, accepted, strict=True)
        return [[answer(5, 0.1, mark, found=True, drafted=10, accepted=n, draft_steps=2) for mark, n in pairs]]

    plain = asked("ab", (0, 0))
    results.add(bench.key(cells[0]), made_up(bench, asked("ab", (4, 2)), plain))
    assert agreements(bench, results) == [], "the pool is not measured"
    results.add(bench.key(cells[1]), made_up(bench, asked("ac", (3, 9)), plain))
    on, off = agreements(bench, results)
    assert on == {"kind": "draft", "n_max": 8, "gate": True, "asked": 2, "same": 1, "full": 0.4, "pool": 0.3}
    assert (off["gate"], off["same"], off["full"]) == (False, 2, 0)
    table = as_markdown(bench, results)
    assert "draft of 8, gate on: 1 of 2 answers are the same through the pool; of the guesses in those 40.0 %" in table
    assert "Codes answered right, full: 4 of 4." in table
    results.add(bench.key(cells[1]), made_up(bench, asked("xy", (3, 9)), plain))
    assert (agreements(bench, results)[0]["same"], agreements(bench, results)[0]["full"]) == (0, None)


#
# the command
#


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("spec") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kvflash", "bench", "spec"])
        patch.setattr(answers_bench, "_TRIES", 2)
        patch.setattr(answers_bench, "_DOCUMENT", 2)
        return good("spec", *SIZES, *SOME, "-o", str(folder)), folder


@pytest.mark.nightly(BENCHES)
def test_the_bench_writes_its_tables(measured: tuple[Result, Path]) -> None:
    res, folder = measured
    assert {p.name for p in folder.iterdir()} == FILES
    assert res.stdout == (folder / "results.md").read_text()
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    whole = json.loads((folder / "results.json").read_text())
    rows = [Row(**row) for row in whole["rows"]]
    ways = [("plain", 0, None), ("ngram", 8, True), ("ngram", 8, False)]
    expected = [(t, c, *w) for t in ("copy", "needles") for c in ("full", "pool 256") for w in ways]
    assert [(r.text, r.cache, r.kind, r.n_max, r.gate) for r in rows] == expected
    head, *lines = csv.reader((folder / "results.csv").read_text().splitlines())
    assert head == [f.name for f in fields(Row)]
    assert len(lines) == len(rows)
    for r in rows:
        assert r.pool == (None if r.cache == "full" else 256)
        assert r.tokens == (144 if r.text != "needles" else 10)
        assert r.rate > 0
        assert r.x_low <= r.x <= r.x_high
        assert (r.cost is None) == (r.kind == "plain")
        assert (r.found is None) == (r.text != "needles")
        assert 0 <= r.gated <= 1
        assert (r.differs is None) == (r.equal == r.answers)
        if not r.gate:
            assert r.gated == 0
        if r.kind == "plain":
            assert (r.x, r.acceptance, r.committed) == (1, None, None)
    assert "nan" not in res.stdout


@pytest.mark.nightly(BENCHES)
def test_greedy_text_is_plains_and_copies_are_guessed(measured: tuple[Result, Path]) -> None:
    whole = json.loads((measured[1] / "results.json").read_text())
    rows = [Row(**row) for row in whole["rows"]]
    for r in rows:
        if r.cache == "full":
            assert (r.equal, r.differs) == (r.answers, None), r
    free = {(r.text, r.cache, r.kind): r for r in rows if r.gate is False}
    for cache in ("full", "pool 256"):
        assert (free["copy", cache, "ngram"].acceptance or 0) > 0.9
        assert (free["copy", cache, "ngram"].committed or 0) > 4
    assert [(a["kind"], a["gate"], a["asked"]) for a in whole["agreements"]] == [("ngram", g, 2) for g in (True, False)]
    assert measured[0].stdout.count("answers are the same through the pool") == 2
    assert "Codes answered right, full: 4 of 4." in measured[0].stdout


@pytest.mark.nightly(BENCHES)
def test_what_was_measured_is_not_measured_again(
    measured: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = (measured[1] / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "results.jsonl").write_text("".join(lines[:1] + lines[2:]))
    seen: list[Cell] = []
    lost = json.loads(lines[1])["result"]
    monkeypatch.setattr(spec_bench, "measure", lambda _, cell, __: seen.append(cell) or lost)
    args = (*SIZES, *SOME, "-o", "again")
    res = good("spec", *args)
    assert seen == [Cell("copy", 144, 256)]
    assert "3 runs were measured before" in res.stderr
    assert good("spec", *args).stdout == res.stdout == measured[0].stdout
    assert len(seen) == 1


@pytest.mark.nightly(BENCHES)
def test_some_texts_and_kinds_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the full cache drafts change nothing, at temperature 2, but for what the width of a batch does to the logits."""
    chosen = Chosen(width_noise(BUNDLED_MODEL, 5, SMALL))

    class Held(Sampler):
        n = 0

        def sample(self, ctx: Context, i: int = -1) -> int:
            self.n += 1
            if not ctx.pooled:
                chosen.hold(ctx, i, self.n)
            return super().sample(ctx, i)

    monkeypatch.setattr(generation, "Sampler", Held)
    args = ("--texts", "entropy", "--kinds", "draft", "--draft-max", "4", "-m", str(BUNDLED_MODEL))
    res = good("spec", *SIZES, *args, "-o", "out")
    rows = json.loads(Path("out/results.json").read_text())["rows"]
    ways = [("plain", 0, None), ("draft", 4, True), ("draft", 4, False)]
    labels = [(r["cache"], r["kind"], r["n_max"], r["gate"]) for r in rows]
    assert labels == [(cache, *way) for cache in ("full", "pool 256") for way in ways]
    assert [r["cost"] is None for r in rows] == [r["kind"] == "plain" for r in rows]
    drafted = [r for r in rows if r["kind"] == "draft" and not r["gate"]]
    assert drafted[0]["equal"] == 1, "with the full cache"
    assert chosen.n_held == 3 * 144, "of two ways, and of one without drafts beside each"
    assert all(0 < r["acceptance"] < 0.5 for r in drafted), "at temperature 2 hardly anything can be guessed"
    assert json.loads(Path("out/results.json").read_text())["agreements"] == []
    assert "no model given" not in res.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--chunk", "64"), "a pool of 256 (--pool) is too small for chunks of 64: give at least 768"),
        (("-n", "16"), "16 tokens (-n) after a text of 128 do not fill a pool of 256"),
        (
            ("--questions", "900", "--texts", "needles"),
            "no text can be made for a pool of 256 (--pool) and 900 questions",
        ),
        (("-md", "no.gguf"), "no.gguf does not exist"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(args: tuple[str, ...], says: str) -> None:
    assert says in refused("spec", *SIZES, *args)
    assert not list(Path().glob("kvflash-*/results.*"))


def test_another_model_needs_its_own_drafter(tiny_path: Callable[[str], Path]) -> None:
    sentence = refused("spec", str(tiny_path("qwen3")), *SIZES)
    assert "kind draft needs a drafter: give its file with -md/--model-draft, or leave it out of --kinds" in sentence


def test_a_drafter_of_another_kind_is_one_sentence() -> None:
    sentence = refused("spec", *SIZES, "--kinds", "eagle3", code=1)
    assert "cannot draft as eagle3: the drafter names no layers of the target" in sentence
