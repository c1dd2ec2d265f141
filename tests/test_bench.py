"""Benchmarks of answers: what is measured, what is kept, what is shown, and `kvflash bench` as a person types it."""

import csv
import io
import json
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from benches import good, invoke, isolate, refused, type_examples

from pyllama_kvflash import native
from pyllama_kvflash.bench import kld, recall, sweep
from pyllama_kvflash.bench.demo import QUESTION_ROOM
from pyllama_kvflash.bench.figures import heat_map, kld_figure
from pyllama_kvflash.bench.grid import Results, Variant, comma_separated, digest, markdown
from pyllama_kvflash.bench.kld import KldRow, KldSweep
from pyllama_kvflash.bench.recall import BLAMES, Oracle, open_variant, run_cell
from pyllama_kvflash.bench.sweep import Cell, Row, Sweep
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import OutputError, UsageError
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt
from pyllama_kvflash.policy import Qk, QkZmax, Scorer

pytestmark = pytest.mark.native

SCRIPT = Path(sys.executable).with_name("kvflash")
ONE_THREAD = {"n_threads": 1}
FORGETFUL = "qk-zmax/qk_summary=mean/qk_rerank=0"  # the mean of 64 keys hides the one that matters
FILES = {f"results.{kind}" for kind in ("md", "csv", "json", "jsonl", "png")}
TINY = ("--contexts", "2K", "--pools", "1K", "--docs", "1", "--needles", "2", "-t", "1")


def count_words(text: str) -> int:
    return len(text.split())


def ignore(_: Any) -> None:
    """No progress."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the caller's settings, and nothing written outside a folder of the test."""
    isolate(monkeypatch, tmp_path, "bench")


@pytest.fixture(scope="module")
def count() -> Iterator[Callable[[str], int]]:
    """Tokens of a text by the bundled model."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        yield lambda text: len(model.tokenize(text, add_special=False))


@pytest.fixture(scope="module")
def book(count: Callable[[str], int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a person, nearly 1,100 tokens."""
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(make_prompt(1100, count, n_needles=1, seed=5, drop=True).text, encoding="utf-8")
    return path


#
# variants
#


def test_variant_is_a_policy_with_options_of_its_own() -> None:
    text = "qk/replay=0/qk_summary=exact/share=0.25/prefill_reselect=false"
    variant = Variant.parse(text)
    assert (variant.label, variant.policy, variant.full) == (text, "qk", False)
    assert variant.options == {"replay": 0, "qk_summary": "exact", "share": 0.25, "prefill_reselect": False}
    assert variant.options["prefill_reselect"] is False
    assert Variant.parse("full/type_k=q8_0") == Variant("full/type_k=q8_0", "full", {"type_k": "q8_0"})
    assert Variant.parse("full").full
    assert [Variant.parse(p).options for p in ("full", "oracle", "lru", "qk-cos")] == [{}] * 4


@pytest.mark.parametrize("text", ["", "nope", "nope/replay=0", " lru", "FULL", "/replay=0"])
def test_variant_of_no_policy(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no policy: there are full, oracle, qk, qk-zmax, qk-cos, lru") as error:
        Variant.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("part", ["", "replay", "replays=1", "=1", "x=1", "__class__=1", "replay =1"])
def test_variant_with_no_option(part: str) -> None:
    with pytest.raises(UsageError, match="is no option: give name=value") as error:
        Variant.parse(f"qk/{part}")
    assert str(error.value).startswith(repr(part))


@pytest.mark.parametrize("part", ["n_ctx=4096", "pool=1024", "pins=()", "policy=lru"])
def test_variant_cannot_set_what_the_bench_sets(part: str) -> None:
    for policy in ("full", "qk"):
        with pytest.raises(UsageError, match="is no option"):
            Variant.parse(f"{policy}/{part}")


@pytest.mark.parametrize("part", ["replay=", "replay=many", "tau=0x10", "share=1,5", "prefill_reselect=maybe"])
def test_variant_with_a_bad_number(part: str) -> None:
    with pytest.raises(UsageError, match=r"needs (a number|a whole number|true or false)$") as error:
        Variant.parse(f"qk/{part}")
    assert repr(part) in str(error.value)


@pytest.mark.parametrize("part", ["replay=null", "replay=[1]", "tau={}", "replay=1e400"])
def test_variant_with_json_that_is_no_number(part: str) -> None:
    with pytest.raises(UsageError, match=r"needs (a number|a whole number|true or false)$"):
        Variant.parse(f"qk/{part}")


def test_threads_are_no_option_of_a_variant() -> None:
    with pytest.raises(UsageError, match="n_threads=1"):
        Variant.parse("qk/n_threads=1")


def test_open_variant_has_its_options_before_the_common_ones() -> None:
    common = {**ONE_THREAD, "type_k": "q8_0", "tau": 32}
    with open_variant(BUNDLED_MODEL, Variant.parse("full/type_k=f16"), 1024, 0, common) as kv:
        assert (kv.n_pool, kv.options.n_ctx, kv.options.type_k, kv.options.tau) == (None, 1024, "f16", 32)
    with open_variant(BUNDLED_MODEL, Variant.parse("oracle/replay=0"), 2048, 1024, common) as kv:
        assert (kv.n_pool, kv.policy, kv.options.replay, kv.options.type_k) == (1024, "oracle", 0, "q8_0")
        assert isinstance(kv.scorer, Oracle)


#
# results
#


def stored(folder: Path) -> list[str]:
    return (folder / "results.jsonl").read_text("utf-8").splitlines()


def test_results_are_there_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    results = Results(folder)
    assert results.get({"a": 1}) is None
    results.add({"a": 1, "b": {"c": None}}, {"found": [True]})
    results.add({"a": 2}, {"found": [False]})
    again = Results(folder)
    assert again.get({"b": {"c": None}, "a": 1}) == {"found": [True]}, "the order of a key's fields does not matter"
    assert again.get({"a": 2}) == {"found": [False]}
    assert again.get({"a": 1}) is None
    again.add({"a": 3}, {"found": []})
    again.add({"a": 2}, {"found": [True]})
    lines = [json.loads(line) for line in stored(folder)]
    assert [line["key"].get("a") for line in lines] == [1, 2, 3], "one line each"
    assert lines[1]["result"] == {"found": [True]}
    assert sorted(p.name for p in folder.iterdir()) == ["results.jsonl"]


@pytest.mark.parametrize("keep", [1, 10, -1])
def test_half_a_line_at_the_end_is_measured_again(tmp_path: Path, keep: int) -> None:
    results = Results(tmp_path)
    for i in range(3):
        results.add({"i": i}, {"x": i})
    path = tmp_path / "results.jsonl"
    *whole, last = stored(tmp_path)
    path.write_text("\n".join([*whole, last[:keep]]), encoding="utf-8")
    again = Results(tmp_path)
    assert [again.get({"i": i}) for i in range(3)] == [{"x": 0}, {"x": 1}, None]
    again.add({"i": 2}, {"x": 5})
    assert stored(tmp_path) == [*whole, '{"key": {"i": 2}, "result": {"x": 5}}']


@pytest.mark.parametrize("bad", ["{", "", "7", "[]", '{"key": {}}', '{"result": {}}'])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, bad: str) -> None:
    fine = '{"key": {}, "result": {}}'
    path = tmp_path / "results.jsonl"
    path.write_text(f"{fine}\n{bad}\n{fine}\n", encoding="utf-8")
    with pytest.raises(UsageError) as error:
        Results(tmp_path)
    assert str(error.value) == f"line 2 of {path} is no result: delete it, or give another folder"
    assert path.read_text(encoding="utf-8") == f"{fine}\n{bad}\n{fine}\n"


def test_results_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(b'\xff\xfe\n{"key": {}, "result": {}}\n')
    with pytest.raises(UsageError, match=r"results\.jsonl"):
        Results(tmp_path)


@pytest.mark.parametrize("what", ["file", "below a file", "results are a folder"])
def test_a_folder_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "in use" / "results.jsonl").mkdir(parents=True)
    folder = {"file": "file", "below a file": "file/x", "results are a folder": "in use"}[what]
    with pytest.raises(OutputError, match="cannot be used for the results: ") as error:
        Results(tmp_path / folder)
    assert str(tmp_path / folder) in str(error.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.write("results.md", "old")
    (tmp_path / ".results.md.part").symlink_to("/dev/full")  # writing there fails as on a full disk
    with pytest.raises(OutputError, match=r"results\.md cannot be written: No space left") as error:
        results.write("results.md", "new")
    assert error.value.exit_code == 1
    assert (tmp_path / "results.md").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["results.md"]
    assert results.write("results.md", b"new").read_text() == "new"


def test_a_write_over_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(OutputError, match=r"results\.csv cannot be written"):
        Results(tmp_path).write("results.csv", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["results.csv"]


#
# tables
#


def test_markdown() -> None:
    text = markdown(["a", "b", "c"], [["x", 1, 2.5], ["y", None, "-"]])
    assert text == "| a | b | c |\n| --- | ---: | ---: |\n| x | 1 | 2.5 |\n| y | None | - |\n"


def test_comma_separated_can_be_read_back() -> None:
    rows = [["a,b", 'say "x"'], ["1", "two\nlines"]]
    text = comma_separated(["h", "i"], rows)
    assert list(csv.reader(io.StringIO(text))) == [["h", "i"], *rows]
    assert "\r" not in text


def test_digest_tells_texts_apart() -> None:
    marks = [digest(text) for text in (None, "", "a", "b", "ä")]
    assert marks[0] is None
    assert len(set(marks)) == 5
    assert digest("a") == marks[2]


def result(found: list[bool], **more: Any) -> dict[str, Any]:
    """As run_cell gives it."""
    figures = ("kv_device_bytes", "kv_full_bytes", "summary_bytes", "prefill_s", "answer_s", "score_ms")
    return {
        **dict.fromkeys(figures, 1.0), "found": found, "resident": found, "lost": {}, "session": {}, "machine": "M", "warnings": [], **more
    }  # fmt: skip


def test_rows_add_up_documents(tmp_path: Path) -> None:
    variants = (Variant.parse("full"), Variant.parse("qk"))
    grid = Sweep("niah", BUNDLED_MODEL, (2048, 4096), (1024,), variants, (1, 2), 2)
    results = Results(tmp_path)
    for cell in grid.cells():
        if cell.n_ctx == 2048:
            half = [cell.seed == 1 or cell.variant.full, True]
            lost = {} if all(half) else {"0": "query"}
            results.add(grid.key(cell), result(half, lost=lost, prefill_s=cell.seed, session={"asked": 1, "found": 1}))
    full, qk = sweep.summarise(grid, results)
    assert (full.docs, full.asked, full.found, full.by_place) == (2, 4, 4, [1, 1])
    assert (qk.docs, qk.asked, qk.found, qk.resident, qk.by_place) == (2, 4, 3, 3, [0.5, 1])
    assert (qk.lost, qk.session, qk.prefill_s) == ({"query": 1}, {"asked": 2, "found": 2}, 1.5)
    lines = sweep.as_markdown(grid, [full, qk]).splitlines()
    assert lines[0] == "| found, context / pool | 2K / 1K | 4K / 1K | all |"
    assert lines[2] == "| pool / context | 50.0 % | 25.0 % |  |"
    assert lines[3:5] == ["| full | 4/4 | - | 4/4 |", "| qk | 3/4 | - | 3/4 |"], "what was not measured is a dash"
    assert "qk lost 1: 1 by the query." in lines


#
# distance of distributions
#


def test_compare_is_the_textbook_formula() -> None:
    rng = np.random.default_rng(1)
    base, other = (rng.normal(0, 3, (50, 30)).astype(np.float32) for _ in range(2))
    other[:20] = base[:20] + 0.1 * other[:20]
    truth = rng.integers(0, 30, 50).astype(np.int32)
    p, q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(1)[:, None] for x in (base, other))
    each = sorted(sum(p[i, v] * np.log(p[i, v] / q[i, v]) for v in range(30)) for i in range(50))
    at = 0.99 * 49
    found = kld.compare(base, other, truth)
    assert found["kld"] == pytest.approx(sum(each) / 50, rel=1e-9)
    assert found["kld_99"] == pytest.approx(each[int(at)] + (at - int(at)) * (each[-1] - each[int(at)]), rel=1e-9)
    assert found["same_top"] == sum(max(range(30), key=base[i].item) == other[i].argmax() for i in range(50)) / 50 < 1
    assert found["ppl"] == pytest.approx(np.prod([q[i, truth[i]] for i in range(50)]) ** (-1 / 50), rel=1e-9)
    assert found["kld"] != pytest.approx(kld.compare(other, base, truth)["kld"], rel=1e-3), "it has a direction"


def test_compare_with_itself_is_zero() -> None:
    x = np.random.default_rng(2).normal(0, 5, (9, 40)).astype(np.float32)
    found = kld.compare(x, x, x.argmax(axis=1).astype(np.int32))
    assert (found["kld"], found["kld_99"], found["same_top"]) == (0, 0, 1)
    shifted = kld.compare(x, x + np.float32(1024), np.zeros(9, np.int32))
    assert 0 <= shifted["kld"] < 1e-6, "large logits do not overflow, and only differences count"


def test_compare_of_even_odds() -> None:
    base, truth = np.zeros((3, 8), np.float32), np.zeros(3, np.int32)
    assert kld.compare(base, base, truth)["ppl"] == pytest.approx(8)


@pytest.fixture(scope="module")
def closeness(book: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[KldSweep, Results]:
    """The full cache, and that in q4_0, against the full cache."""
    variants = (Variant.parse("full"), Variant.parse("full/type_k=q4_0/type_v=q4_0"))
    grid = KldSweep(BUNDLED_MODEL, book.read_text(), (768,), (0.5,), variants, 24, ONE_THREAD)
    results = Results(tmp_path_factory.mktemp("kld"))
    done = list(kld.measure(grid, results, lambda _: ignore))
    assert done == list(grid.cells())
    return grid, results


def test_the_full_cache_is_itself(closeness: tuple[KldSweep, Results]) -> None:
    quantised, full = sorted(kld.rows(*closeness), key=lambda r: r.share)
    assert (full.variant, full.pool, full.kld, full.kld_99, full.same_top, full.share) == ("full", None, 0, 0, 1, 1)
    assert 0 < quantised.kld <= quantised.kld_99
    assert quantised.share == 18 / 64, "bytes of 32 values in q4_0, over those in f16"
    assert quantised.ppl != full.ppl


def test_perplexity_is_that_of_the_tokens_that_come(closeness: tuple[KldSweep, Results]) -> None:
    """Each token is scored by the logits before it: the same from one batch with all its logits."""
    grid, results = closeness
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=768, pool="off", n_threads=1) as kv:
        tokens = kv.tokenize(grid.text or "")[:768]
        list(kv.prefill(tokens[:743]))
        kv.decode(tokens[743:], native.ALL)
        logits = [kv.logits(i).astype(float) for i in range(25)]
    log_p = [x[t] - np.log(np.exp(x - x.max()).sum()) - x.max() for x, t in zip(logits, tokens[744:], strict=False)]
    assert len(log_p) == 24
    full = next(r for r in kld.rows(grid, results) if r.variant == "full")
    assert full.ppl == pytest.approx(np.exp(-np.mean(log_p)), rel=0.05), "but for rounding: batches of 25 and of 1"
    assert sum(x.argmax() == t for x, t in zip(logits, tokens[743:], strict=False)) < 3, "one off is something else"


def test_what_was_measured_is_not_measured_again(
    closeness: tuple[KldSweep, Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, results = closeness
    monkeypatch.setattr(kld, "open_variant", None)
    assert list(kld.measure(grid, Results(results.folder), lambda _: ignore)) == []
    with pytest.raises(TypeError):  # and here it would be
        list(kld.measure(replace(grid, n_score=23), Results(results.folder), lambda _: ignore))


def test_kld_cells() -> None:
    variants = tuple(Variant.parse(v) for v in ("full/type_k=q8_0", "lru"))
    grid = KldSweep(BUNDLED_MODEL, None, (2048, 4096), (0.5, 0.281), variants, 8)
    found = [(c.n_ctx, c.variant.policy, c.pool) for c in grid.cells()]
    assert found == [
        (2048, "full", None), (2048, "lru", 1024), (2048, "lru", 575),
        (4096, "full", None), (4096, "lru", 2048), (4096, "lru", 1150),
    ]  # fmt: skip


def test_kld_key_changes_with_what_matters(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF another model")
    grid = KldSweep(BUNDLED_MODEL, "text", (2048,), (0.5,), (Variant.parse("lru"),), 8, {"type_k": "f16"})
    cell = next(grid.cells())
    keys = [
        grid.key(cell),
        *(replace(grid, **x).key(cell) for x in ({"model": other}, {"text": None}, {"text": "b"}, {"n_score": 9})),
        replace(grid, common={"type_k": "q8_0"}).key(cell),
        *(grid.key(replace(cell, **x)) for x in ({"n_ctx": 1}, {"pool": 1}, {"variant": Variant.parse("qk")})),
    ]
    assert len({json.dumps(key) for key in keys}) == len(keys) == 9
    assert replace(grid, common={"type_k": "f16", "n_threads": 3}).key(cell) == grid.key(cell)
    assert replace(grid, contexts=(2048, 4096), shares=(0.5, 0.1)).key(cell) == grid.key(cell)


#
# recall
#


class Runs:
    """Cells of the bundled model, each measured once."""

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._known: dict[tuple[str, int, int], dict[str, Any]] = {}

    def prompt(self, n_ctx: int) -> NeedlePrompt:
        return make_prompt(n_ctx, self._count, n_needles=4, seed=11)

    def __call__(self, variant: str, n_ctx: int = 2048, session: int = 0) -> dict[str, Any]:
        key = variant, n_ctx, session
        if key not in self._known:
            with opened(variant, n_ctx, session) as kv:
                self._known[key] = run_cell(kv, self.prompt(n_ctx), ignore, session)
        return self._known[key]


def opened(variant: str, n_ctx: int = 2048, session: int = 0) -> KVFlash:
    return open_variant(BUNDLED_MODEL, Variant.parse(variant), n_ctx + QUESTION_ROOM * (session + 1), 1024, ONE_THREAD)


@pytest.fixture(scope="module")
def runs(count: Callable[[str], int]) -> Runs:
    return Runs(count)


def test_the_full_cache_finds_all(runs: Runs) -> None:
    found = runs("full")
    assert found["found"] == found["resident"] == [True] * 4
    assert found["expected"] == [n.answer for n in runs.prompt(2048).needles]
    assert all(code in answer for code, answer in zip(found["expected"], found["answers"], strict=True))
    assert found["kv_device_bytes"] == found["kv_full_bytes"]
    assert (found["lost"], found["score_ms"], found["summary_bytes"]) == ({}, 0, 0)
    assert found["position"] == pytest.approx([256, 768, 1280, 1792], abs=70)
    assert json.loads(json.dumps(found)) == found


def test_the_oracle_finds_what_lru_loses(runs: Runs) -> None:
    oracle, lru = runs("oracle", 4096), runs("lru", 4096)
    assert oracle["found"] == oracle["resident"] == [True] * 4
    assert lru["found"] == lru["resident"] == [False, False, False, True]
    assert lru["lost"] == oracle["lost"] == {}, "only qk is asked what lost it"
    assert oracle["kv_device_bytes"] == lru["kv_device_bytes"] < 0.3 * oracle["kv_full_bytes"]


def test_a_summary_that_cannot_find_it_is_blamed(runs: Runs) -> None:
    with opened(FORGETFUL) as kv:
        mine = kv.scorer
        assert isinstance(mine, QkZmax)
        found = run_cell(kv, runs.prompt(2048), ignore)
        assert kv.scorer is mine, "its own scorer is back"
        again = run_cell(kv, runs.prompt(2048), ignore)
    lost = [i for i, x in enumerate(found["found"]) if not x]
    assert 0 < len(lost) < 4
    assert found["lost"] == {str(i): "summary" for i in lost}
    assert [again[k] for k in ("found", "answers", "lost")] == [found[k] for k in ("found", "answers", "lost")]


class FakeEngine:
    """Notes the scorers that it was given."""

    def __init__(self, scorer: Scorer | None) -> None:
        self.scorer = scorer
        self.used: list[Scorer] = []
        self.ends: list[int] = []
        self.options = SimpleNamespace(chunk=64)

    def use(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.used.append(scorer)

    def rollback(self, end: int) -> None:
        self.ends.append(end)


@pytest.mark.parametrize("mine", [Qk(), QkZmax(), QkZmax(aggregate="layer-mean")], ids=["mass", "zmax", "layer-mean"])
@pytest.mark.parametrize("blame", BLAMES)
def test_blame_is_the_first_mending_that_finds_it(
    blame: str, mine: Qk | QkZmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv: Any = FakeEngine(mine)
    n = BLAMES.index(blame) + 1 if blame != "prefill" else None
    asked: list[set[int]] = []

    def answer(_kv: Any, _question: str, wanted: set[int]) -> str:
        asked.append(wanted)
        return "It is 1234567." if len(asked) == n else "It is 7654321."

    monkeypatch.setattr(recall, "_asked", answer)
    res = recall._blame(kv, "?", "1234567", (60, 70), 500)
    assert res == blame
    *rounds, last = kv.used
    assert last is mine is kv.scorer
    assert len(rounds) == len(asked) == (n or 4)
    assert kv.ends == [500] * len(asked), "each round begins at the end of the text"
    assert asked[0] == {0, 1}, "the chunks that the code lies across"
    assert rounds[0] is mine
    assert {type(s) for s in rounds[1:3]} <= {type(mine)}
    assert [(s.summary, s.query) for s in rounds[1:]] == [("exact", mine.query), ("exact", "question"), (None, "last")][
        : len(rounds) - 1
    ]


def test_the_session_goes_through_the_text(runs: Runs) -> None:
    assert runs("full", session=3)["session"] == {"asked": 3, "found": 3, "resident": 3}
    assert runs("full")["session"] == {"asked": 0, "found": 0, "resident": 0}
    # the first and the third code of four: a pool of half the text has the second half
    assert runs("lru")["found"] == [False, False, True, True]
    assert runs("lru", session=2)["session"] == {"asked": 2, "found": 1, "resident": 1}
    assert runs("oracle", session=99)["session"]["asked"] == 4, "no more than there are"


def test_positions_are_where_the_codes_are(runs: Runs) -> None:
    prompt = runs.prompt(2048)
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=1024, pool="off", n_threads=1) as kv:
        tokens = kv.tokenize(prompt.text)
        spans = recall.positions(kv, prompt)
        said = [kv.detokenize(tokens[a:b]).strip() for a, b in spans]
    assert said == [n.statement for n in prompt.needles]


#
# sweeps
#


def variants(*texts: str) -> tuple[Variant, ...]:
    return tuple(Variant.parse(text) for text in texts)


def test_cells_have_the_full_cache_once_and_no_pool_as_large_as_the_context() -> None:
    grid = Sweep("niah", BUNDLED_MODEL, (2048, 4096), (1024, 2048), variants("full", "lru"), (7, 8), 4)
    found = [(c.n_ctx, c.variant.label, c.pool, c.seed) for c in grid.cells()]
    assert Counter(found) == Counter(
        [(n, "full", None, s) for n in (2048, 4096) for s in (7, 8)]
        + [(n, "lru", p, s) for n, p in ((2048, 1024), (4096, 1024), (4096, 2048)) for s in (7, 8)]
    )
    assert list(replace(grid, contexts=(1024,), variants=variants("lru")).cells()) == []


def test_key_changes_with_what_matters_and_not_with_threads(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF another model")
    grid = Sweep("niah", BUNDLED_MODEL, (2048,), (1024,), variants("lru"), (7,), 4, common={"type_k": "f16"})
    cell = next(grid.cells())
    sweeps: list[dict[str, Any]] = [
        {"kind": "facts"}, {"model": other}, {"n_needles": 5}, {"n_decoys": 1}, {"session": 1}, {"haystack": "a"},
        {"haystack": "b"}, {"common": {"type_k": "q8_0"}}, {"common": {"type_k": "f16", "n_batch": 64}},
    ]  # fmt: skip
    cells: list[dict[str, Any]] = [
        {"n_ctx": 4096}, {"pool": 512}, {"pool": None}, {"seed": 8}, {"variant": Variant.parse("lru/replay=0")}
    ]  # fmt: skip
    keys = [grid.key(cell), *(replace(grid, **x).key(cell) for x in sweeps)]
    keys += [grid.key(replace(cell, **x)) for x in cells]
    assert len({json.dumps(key) for key in keys}) == len(keys) == 15
    same: list[dict[str, Any]] = [
        {"common": {"type_k": "f16", "n_threads": 1}}, {"seeds": (7, 8)}, {"contexts": (2048, 4096)},
        {"variants": variants("lru", "full")},
    ]  # fmt: skip
    assert [replace(grid, **x).key(cell) == keys[0] for x in same] == [True] * 4


def test_key_knows_the_model_by_what_is_in_it(tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(BUNDLED_MODEL, copy)
    grid = Sweep("niah", BUNDLED_MODEL, (2048,), (1024,), variants("lru"), (7,), 4)
    cell = next(grid.cells())
    assert replace(grid, model=copy).key(cell) == grid.key(cell)


def test_a_cell_is_measured_with_its_own_text(monkeypatch: pytest.MonkeyPatch, book: Path) -> None:
    seen: list[tuple[KVFlash, NeedlePrompt, int]] = []

    def note(kv: KVFlash, prompt: NeedlePrompt, _: Any, session: int) -> dict[str, Any]:
        seen.append((kv, prompt, session))
        return {}

    monkeypatch.setattr(sweep, "run_cell", note)
    grid = Sweep("niah", BUNDLED_MODEL, (2048,), (1024,), variants("lru"), (7, 8), 4, common=ONE_THREAD)
    mine, facts = replace(grid, haystack=book.read_text()), replace(grid, kind="facts", n_decoys=2, session=2)
    lru = Cell(2048, 1024, Variant.parse("lru"), 7)
    for s, cell in ((grid, lru), (grid, replace(lru, seed=8)), (mine, lru), (facts, lru)):
        assert s.measure(cell, ignore) == {}
    assert [p.seed for _, p, _ in seen] == [7, 8, 7, 7]
    assert all(2048 - 100 < p.n_tokens <= 2048 and len(p.needles) == 4 for _, p, _ in seen)
    assert len({p.text for _, p, _ in seen}) == 4
    assert [p.text.count("secret code for") > 4 for _, p, _ in seen] == [False, False, False, True], "decoys"
    assert book.read_text().splitlines()[0] in seen[2][1].text
    assert [s for _, _, s in seen] == [0, 0, 0, 2]
    assert [kv.options.n_ctx - 2048 for kv, _, _ in seen] == [QUESTION_ROOM * n for n in (1, 1, 1, 3)]


#
# a person's text as the haystack
#

POEM = "The sea is grey.   The boat\tis small! Who sails it?\n\n\n   Nobody knows,\nand nobody asks.\r\nThe end.\n"


def test_codes_are_hidden_in_a_given_text() -> None:
    prompt = make_prompt(400, count_words, n_needles=4, seed=3, haystack=POEM)
    assert 300 < prompt.n_tokens == count_words(prompt.text) <= 400
    codes = {n.statement for n in prompt.needles}
    lines = prompt.text.splitlines()
    prose = [line for line in lines if line not in codes]
    assert len(lines) - len(prose) == 4
    sentences = "The sea is grey. The boat is small! Who sails it? Nobody knows, and nobody asks. The end. "
    assert (sentences * 30).startswith(" ".join(prose)), "in its order, from its beginning, over and over"
    assert "\n\n" not in prompt.text
    assert all(prompt.text[n.start : n.end] == n.statement for n in prompt.needles)
    depths = [prompt.text[: n.start].count(" ") / prompt.text.count(" ") for n in prompt.needles]
    assert depths == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.08)


def test_a_given_text_changes_no_code() -> None:
    mine, prose = (make_prompt(500, count_words, seed=3, haystack=text) for text in (POEM, None))
    assert [(n.key, n.answer) for n in mine.needles] == [(n.key, n.answer) for n in prose.needles]
    assert make_prompt(500, count_words, seed=3, haystack=POEM) == mine
    assert mine.text != prose.text


@pytest.mark.parametrize("text", ["", " ", "\n\n", " \t\r\n \u00a0\n"])
def test_a_haystack_without_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"^the haystack has no words: give a text\.$"):
        make_prompt(500, count_words, haystack=text)


def test_a_haystack_without_sentences_fills_the_room() -> None:
    prompt = make_prompt(1000, count_words, n_needles=2, haystack="word " * 5000)
    assert prompt.n_tokens > 900


#
# pictures
#


def png(data: bytes) -> Any:
    """Pixels (height, width, 4) of a PNG that can be read to its end."""
    image = pytest.importorskip("matplotlib.image")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    pixels = image.imread(io.BytesIO(data))
    assert pixels.shape == (height, width, 4)
    return pixels


def row(variant: str, pool: int | None, found: list[float], n_ctx: int = 2048) -> Row:
    return Row(variant, n_ctx, pool, 1, len(found), 0, 0, {}, {}, found, 1, 2, 0, 0.0, 0.0, 0.0, "M")


def green_and_red(data: bytes) -> tuple[int, int]:
    """How many pixels have the colours of all found, and of none."""
    from matplotlib import colormaps  # noqa: PLC0415

    pixels = png(data)
    colours = (np.asarray(colormaps["RdYlGn"](x))[:3] for x in (1.0, 0.0))
    green, red = (int(np.all(np.abs(pixels[..., :3] - c) < 0.004, axis=2).sum()) for c in colours)
    return green, red


def test_heat_map_shows_what_was_found() -> None:
    pytest.importorskip("matplotlib")
    green, red = green_and_red(heat_map([row("full", None, [1, 1, 1]), row("lru", 1024, [1, 1, 1])], "t"))
    assert green > 100 * (red + 1) > 0
    one, most = green_and_red(heat_map([row("full", None, [1, 1, 1]), row("lru", 1024, [0, 0, 0])], "t"))
    assert green == pytest.approx(2 * one, rel=0.1), "one panel of two"
    assert most == pytest.approx(one, rel=0.1)


@pytest.mark.parametrize(
    "rows",
    [
        [row("full", None, [1.0])],
        [row("full", None, [1.0, 0.5]), row("full", None, [1.0, 1.0], 4096)],
        [row("full", None, [1.0, 1.0]), row("lru", 1024, [0.0])],
        [row("lru", 512, [0.0, 1.0]), row("qk", 768, [1.0, 1.0], 1500)],
    ],
)
def test_heat_map_of_any_rows_is_a_picture(rows: list[Row]) -> None:
    assert png(heat_map(rows, "a title, 2 texts")).size > 0


def kld_row(kind: str, share: float, value: float) -> KldRow:
    return KldRow("v", kind, 2048, None, 1, share, value, value, 1.0, 2.0, 0.0, 0.0, "M")


def test_kld_figure_is_a_picture() -> None:
    pytest.importorskip("matplotlib")
    quantised = [kld_row("full cache, quantised", s, v) for s, v in ((0.53, 1e-4), (0.28, 0.02))]
    pool = [kld_row("pool, qk", s, v) for s, v in ((0.5, 0.01), (0.25, 0.1))]
    assert png(kld_figure([*quantised, *pool], "t")).size > 0
    assert png(kld_figure(quantised[:1], "t")).size > 0
    assert png(kld_figure([kld_row("full cache, quantised", 1.0, 0.0), *pool], "t")).size > 0
    assert kld_figure(quantised, "t") != kld_figure(pool, "t")


def test_kld_figure_of_nothing_but_zeros_is_a_picture() -> None:
    pytest.importorskip("matplotlib")
    assert png(kld_figure([kld_row("full cache, quantised", 1.0, 0.0)], "t")).size > 0


#
# the command
#

VARIANTS = ("--variants", f"full,lru,{FORGETFUL}")


@pytest.fixture(scope="module")
def niah(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The bench as a process of its own, into a folder that it makes."""
    folder = tmp_path_factory.mktemp("niah") / "out"
    res = subprocess.run(
        [SCRIPT, "bench", "niah", *TINY, *VARIANTS, "-o", folder],
        capture_output=True, timeout=60, encoding="utf-8", check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return res, folder


def test_niah_writes_its_tables(niah: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    res, folder = niah
    assert res.returncode == 0, res.stderr
    assert {p.name for p in folder.iterdir()} == FILES
    assert (folder / "results.md").read_text("utf-8") == res.stdout
    assert f"wrote {folder / 'results.md'}, .csv, .json and .png" in res.stderr
    assert "Traceback" not in res.stderr
    png((folder / "results.png").read_bytes())
    assert f"`kvflash bench niah {' '.join((*TINY, *VARIANTS))} -o {folder}`" in res.stdout

    plain = json.loads((folder / "results.json").read_text())
    table = list(csv.DictReader(io.StringIO((folder / "results.csv").read_text("utf-8"))))
    assert plain["kind"] == "niah"
    assert [r["variant"] for r in plain["rows"]] == [r["variant"] for r in table] == ["full", "lru", FORGETFUL]
    for a, b in zip(plain["rows"], table, strict=True):
        assert (str(a["asked"]), str(a["found"]), str(a["kv_device_bytes"])) == (
            b["asked"], b["found"], b["kv_device_bytes"]
        )  # fmt: skip
        assert f"| {a['variant']} | {a['found']}/2 | {a['found']}/2 |\n" in res.stdout
    assert (plain["rows"][0]["found"], plain["rows"][1]["found"]) == (2, 1)
    lost = plain["rows"][2]["lost"]
    assert sum(lost.values()) == 2 - plain["rows"][2]["found"]
    assert [json.loads(line)["key"]["variant"] for line in stored(folder)] == ["full", "lru", FORGETFUL]


def test_a_second_run_measures_nothing_again(
    niah: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(niah[1], folder)
    before = (folder / "results.jsonl").read_bytes()
    monkeypatch.setattr(sweep, "run_cell", None)  # it could not
    res = good("niah", *TINY, *VARIANTS, "-o", str(folder))
    assert "kvflash: 3 runs were measured before" in res.stderr
    assert (folder / "results.jsonl").read_bytes() == before
    assert res.stdout.splitlines()[:-1] == niah[0].stdout.splitlines()[:-1], "but for the command in the last line"


def test_an_interrupted_run_goes_on_to_the_same_table(
    niah: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rest"
    folder.mkdir()
    first, second, _ = stored(niah[1])
    (folder / "results.jsonl").write_text(f"{first}\n{second[:200]}")
    measured: list[str] = []

    def counted(kv: KVFlash, *args: Any) -> dict[str, Any]:
        measured.append(kv.policy)
        return run_cell(kv, *args)

    monkeypatch.setattr(sweep, "run_cell", counted)
    res = good("niah", *TINY, *VARIANTS, "-o", str(folder))
    assert "kvflash: 1 run was measured before" in res.stderr
    assert measured == ["lru", "qk-zmax"]
    assert res.stdout.splitlines()[:-1] == niah[0].stdout.splitlines()[:-1]
    assert stored(folder)[0] == first
    fields = ("found", "resident", "answers", "expected", "lost", "kv_device_bytes")
    for a, b in zip(stored(folder), stored(niah[1]), strict=True):
        mine, whole = json.loads(a), json.loads(b)
        assert mine["key"] == whole["key"]
        assert [mine["result"][f] for f in fields] == [whole["result"][f] for f in fields]


def test_what_was_measured_is_kept_when_a_later_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(kv: KVFlash, *_: Any) -> dict[str, Any]:
        if kv.n_pool is not None:
            raise KeyboardInterrupt
        return result([True, False])

    monkeypatch.setattr(sweep, "run_cell", run)
    res = invoke("niah", *TINY, *VARIANTS, "-o", str(tmp_path))
    assert res.exit_code == 130, res.output
    assert len(stored(tmp_path)) == 1
    assert "| full | 1/2 | 1/2 |\n| lru | - | 0/0 |" in (tmp_path / "results.md").read_text()


def test_niah_in_a_text(book: Path, tmp_path: Path) -> None:
    res = good("niah", *TINY, "--variants", "full", "-f", str(book), "-o", str(tmp_path))
    assert json.loads(stored(tmp_path)[0])["key"]["haystack"] == digest(book.read_text())
    assert "| full | 2/2 | 2/2 |" in res.stdout


def test_facts(tmp_path: Path) -> None:
    tiny = ("--contexts", "2K", "--pools", "1K", "--docs", "1", "--facts", "3", "--session", "2", "--decoys", "1")
    res = good("facts", *tiny, "-t", "1", "--variants", "full,lru")
    folder = tmp_path / "kvflash-facts"
    assert {p.name for p in folder.iterdir()} == FILES, "the folder that is taken without -o"
    assert "| full | 3/3 | 3/3 |" in res.stdout
    assert "full, asked one after the other: 2 of 2 found, gold chunks resident for 2 of 2." in res.stdout
    assert json.loads((folder / "results.json").read_text())["kind"] == "facts"
    assert [json.loads(line)["key"]["decoys"] for line in stored(folder)] == [1, 1]
    assert (tmp_path / "kvflash-niah").exists() is False


def test_kld_of_a_text(book: Path, tmp_path: Path) -> None:
    args = ("kld", "-f", str(book), "--contexts", "1K", "--score", "16", "--shares", "75", "-t", "1")
    args += ("--variants", "full/type_k=q8_0/type_v=q8_0,lru", "-b", "64", "-o", str(tmp_path / "kld"))
    res = good(*args)
    folder = tmp_path / "kld"
    assert {p.name for p in folder.iterdir()} == FILES
    lines = res.stdout.splitlines()
    assert (folder / "results.md").read_text() == res.stdout
    assert [line.split(" | ")[1:5] for line in lines[2:4]] == [
        ["lru", "768", "2.25 MiB", "75.0 %"], ["full/type_k=q8_0/type_v=q8_0", "-", "1.59 MiB", "53.1 %"]
    ]  # fmt: skip
    pool, quantised = json.loads((folder / "results.json").read_text())["rows"]
    assert (pool["variant"], pool["pool"], quantised["share"]) == ("lru", 768, 34 / 64)
    assert 0 < quantised["kld"] < 0.01
    assert pool["kld"] > 0
    assert 0.8 <= quantised["same_top"] <= 1, "three of the 16 are near ties"
    png((folder / "results.png").read_bytes())

    before = (folder / "results.jsonl").read_bytes()
    assert "2 runs were measured before" in good(*args).stderr
    assert (folder / "results.jsonl").read_bytes() == before


def test_kld_without_a_text_asks_for_codes(tmp_path: Path) -> None:
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=1024, pool="off", n_threads=1) as kv:
        text = kld.questions(kv, 1024)
        assert 900 < len(kv.tokenize(text)) <= 1024
    end = text.splitlines()[-16:]
    assert all(line.startswith("Question: what is the secret code for the ") for line in end)
    assert all(text.count(line.split()[-1]) == 2 for line in end), "each code is told, and told again"
    args = ("kld", "--contexts", "1K", "--score", "8", "--variants", "full/type_k=q8_0", "-t", "1", "-o", str(tmp_path))
    assert "| 1024 | full/type_k=q8_0 | - |" in good(*args).stdout


def test_kld_of_a_text_that_is_too_short(book: Path, tmp_path: Path) -> None:
    args = ("-f", str(book), "--contexts", "2K", "--score", "8", "--variants", "lru", "-t", "1", "-o", str(tmp_path))
    sentence = refused("kld", *args)
    assert sentence.startswith("kvflash: error: the text has 1,".replace(",", ""))
    assert sentence.endswith("tokens, and a context of 2048 is asked for: give a longer text")


@pytest.mark.parametrize("score", ["1K", "1024", "2000", "0", "-3"])
def test_kld_scores_less_than_the_context(score: str) -> None:
    sentence = refused("kld", "--contexts", "4K,1K", "--score", score, "-t", "1")
    assert "--score" in sentence
    if score in {"1024", "2000"}:
        assert sentence == f"kvflash: error: --score is {score}, and must be less than the shortest context of 1024"
    assert not Path("kvflash-kld").exists()


@pytest.mark.parametrize(
    ("command", "option", "value", "says"),
    [
        ("niah", "--contexts", "many", "'many' is no number of tokens"),
        ("niah", "--contexts", "2K,", "'' is no number of tokens"),
        ("facts", "--contexts", "0", "'0' has a number below 1"),
        ("kld", "--contexts", "2K,-1", "'2K,-1' has a number below 1"),
        ("niah", "--pools", "1.5K", "'1.5K' is no number of tokens"),
        ("facts", "--pools", "1K,0", "'1K,0' has a number below 1"),
        ("niah", "--pools", "64K", "no pool of --pools is smaller than a context of --contexts"),
        ("kld", "--shares", "half", "'half' is no list of percentages"),
        ("kld", "--shares", "50,", "'50,' is no list of percentages"),
        ("kld", "--shares", "0", "'0' must be above 0 and below 100"),
        ("kld", "--shares", "50,100", "'50,100' must be above 0 and below 100"),
        ("kld", "--shares", "nan", "'nan' must be above 0 and below 100"),
        ("niah", "--variants", "full,best", "'best' in 'best' is no policy"),
        ("niah", "--variants", "qk/pool=1", "is no option"),
        ("niah", "--needles", "0", "0 is not in the range"),
        ("facts", "--facts", "65", "65 is not in the range"),
        ("niah", "--docs", "0", "0 is not in the range"),
        ("niah", "-t", "0", "n_threads (-t/--threads) is 0"),
        ("niah", "-b", "-1", "n_batch (-b/--batch-size) is -1"),
        ("niah", "--needles", "1000", "the 1000 needles alone take"),
        ("facts", "--facts", "64", "the 64 facts with 2 decoys each alone take"),
        ("niah", "-f", "no/such.txt", "the text file no/such.txt cannot be read"),
        ("kld", "-f", "no/such.txt", "the text file no/such.txt cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(command: str, option: str, value: str, says: str) -> None:
    given = {"--contexts": "2K", "-t": "1", "--variants": "lru", option: value}
    sentence = refused(command, *[x for pair in given.items() for x in pair])
    assert says in sentence
    assert not list(Path().glob("kvflash-*/results.jsonl"))


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for command in ("niah", "facts", "kld"):
        sentence = refused(command, "-t", "1", "-o", str(tmp_path / "file"), code=1)
        assert "cannot be used for the results" in sentence
    assert (tmp_path / "file").read_text() == "mine"


def test_a_model_that_is_not_there_leaves_no_folder() -> None:
    sentence = refused("niah", "no/such.gguf", *TINY)
    assert "no/such.gguf" in sentence
    assert not Path("kvflash-niah").exists()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"key": {}, "result": {}}\nxx\n\n{"key": {}, "result": {}}\n')
    assert f"line 2 of {tmp_path / 'results.jsonl'} is no result" in refused("niah", *TINY, "-o", str(tmp_path))


@pytest.mark.parametrize("text", ["", "\n \n"])
@pytest.mark.parametrize("command", ["niah", "kld"])
def test_a_text_without_words_is_refused(command: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(text)
    small = ("--docs", "1", "--needles", "2") if command == "niah" else ("--score", "4")
    refused(command, "-f", "empty.txt", "--contexts", "2K", *small, "--variants", "full/type_k=q8_0", "-t", "1")


def test_kld_of_a_context_too_short_for_its_questions() -> None:
    refused("kld", "--contexts", "512", "--score", "8", "--variants", "full/type_k=q8_0", "-t", "1")


def test_kld_of_the_full_cache_alone_is_all_zeros_and_no_failure(book: Path) -> None:
    res = good("kld", "-f", str(book), "--contexts", "512", "--score", "4", "--variants", "full", "-t", "1")
    assert "| 512 | full | - |" in res.stdout
    assert "| 0.00e+00 | 0.00e+00 | 100.0 % |" in res.stdout


def test_the_reference_is_f16_whatever_the_others_are(book: Path) -> None:
    """`-ctk` is "of all variants that do not say", and the table is "against the full f16 cache"."""
    args = (
        "-f",
        str(book),
        "--contexts",
        "512",
        "--score",
        "4",
        "--variants",
        "full,lru",
        "--shares",
        "90",
        "-b",
        "64",
    )
    good("kld", *args, "-t", "1", "-ctk", "q8_0", "-ctv", "q8_0", "-o", "out")
    rows = json.loads(Path("out/results.json").read_text())["rows"]
    full = next(r for r in rows if r["variant"] == "full")
    assert full["share"] == 34 / 64


def test_a_text_asked_for_twice_counts_once() -> None:
    args = (
        "--contexts",
        "2K,2K",
        "--pools",
        "1K,1K",
        "--docs",
        "1",
        "--needles",
        "2",
        "-t",
        "1",
        "--variants",
        "full,lru",
    )
    assert "| full | 2/2 | 2/2 |\n" in good("niah", *args).stdout


def test_a_scorer_that_cannot_score_is_told(tmp_path: Path) -> None:
    """qk takes the drafter's place: a table that has qk's figures in the drafter's row must say so."""
    bad = tmp_path / "draft.gguf"
    bad.write_bytes(b"no model")
    res = invoke("niah", *TINY, "--variants", "drafter", "--draft-scorer", str(bad))
    assert "drafter cannot score" in res.stderr


def test_a_pool_that_is_raised_is_told() -> None:
    res = good("niah", *TINY, "--pools", "128", "--variants", "lru")
    assert "a pool of 128 tokens is too small: raised to " in res.stderr


def test_time_to_answer_leaves_out_the_search_for_the_blame(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by 1 s with each question, and by 100 s with each search."""
    asked, clock = recall._asked, [0]

    def ask(*args: Any) -> str:
        clock[0] += 1
        return asked(*args)

    def blame(*_: Any) -> str:
        clock[0] += 100
        return "summary"

    monkeypatch.setattr(recall, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(recall, "_asked", ask)
    monkeypatch.setattr(recall, "_blame", blame)
    with opened(FORGETFUL) as kv:
        res = run_cell(kv, runs.prompt(2048), ignore)
    assert res["lost"]
    assert res["answer_s"] == 1


def test_without_matplotlib_the_tables_are_written(
    niah: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    shutil.copy(niah[1] / "results.jsonl", folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    res = good("niah", *TINY, *VARIANTS, "-o", str(folder))
    assert {p.name for p in folder.iterdir()} == FILES - {"results.png"}
    assert "kvflash: warning: plots need matplotlib: pip install 'pyllama-kvflash[plot]'" in res.stderr
    assert "wrote" not in res.stderr
    assert "| full | 2/2 | 2/2 |" in res.stdout


@pytest.mark.parametrize("name", ["niah", "facts", "kld"])
def test_help_shows_a_command_that_can_be_typed(name: str) -> None:
    shown, _ = type_examples(name)
    assert shown
