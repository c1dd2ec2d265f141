"""What a bench measures with the bundled model: the distance of distributions, and recall."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import benches
from benches import ONE_THREAD, ignore
from support.changes import BENCHES
from support.oracles import ON_CPU

from kvflash_bench import kld, recall
from kvflash_bench.grid import Results, Variant
from kvflash_bench.kld import KldSweep, LongTask
from kvflash_bench.recall import BLAMES, open_variant, run_cell
from pyllama_kvflash import native
from pyllama_kvflash.cli.needles import QUESTION_ROOM
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt
from pyllama_kvflash.policy import Qk, Scorer

pytestmark = [pytest.mark.native, pytest.mark.nightly(BENCHES), pytest.mark.usefixtures("one_gpu")]

book = benches.book
count = benches.count
environment = benches.environment


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
    found = kld.compare(base, other, truth)
    assert found["kld"] == pytest.approx(sum(each) / 50, rel=1e-9)
    for name, at in (("kld_99", 0.99 * 49), ("kld_999", 0.999 * 49)):
        assert found[name] == pytest.approx(each[48] + (at - 48) * (each[49] - each[48]), rel=1e-9)
    assert found["same_top"] == sum(max(range(30), key=base[i].item) == other[i].argmax() for i in range(50)) / 50 < 1
    assert found["ppl"] == pytest.approx(np.prod([q[i, truth[i]] for i in range(50)]) ** (-1 / 50), rel=1e-9)
    assert found["kld"] != pytest.approx(kld.compare(other, base, truth)["kld"], rel=1e-3), "it has a direction"


def test_compare_with_itself_is_zero() -> None:
    x = np.random.default_rng(2).normal(0, 5, (9, 40)).astype(np.float32)
    found = kld.compare(x, x, x.argmax(axis=1).astype(np.int32))
    assert (found["kld"], found["kld_99"], found["kld_999"], found["same_top"]) == (0, 0, 0, 1)
    shifted = kld.compare(x, x + np.float32(1024), np.zeros(9, np.int32))
    assert 0 <= shifted["kld"] < 1e-6, "large logits do not overflow, and only differences count"


def test_percentiles_are_of_the_rarest_tokens() -> None:
    """One token of 2,000 that is far off shows in the mean alone, ten of them (0.5 %) in the last percentile, too."""
    base, truth = np.zeros((2000, 8), np.float32), np.zeros(2000, np.int32)
    for n_off, shown in ((1, []), (10, ["kld_999"]), (100, ["kld_99", "kld_999"])):
        logits = base.copy()
        logits[:n_off, 0] = 20
        found = kld.compare(base, logits, truth)
        assert found["kld"] > 0
        assert [name for name in ("kld_99", "kld_999") if found[name] > 1] == shown


@pytest.fixture(scope="module")
def closeness(book: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[KldSweep, Results]:
    """The full cache, and that in q4_0, against the full cache."""
    variants = (Variant.parse("full"), Variant.parse("full/type_k=q4_0/type_v=q4_0"))
    grid = KldSweep(BUNDLED_MODEL, book.read_text(), (768,), (0.5,), variants, 24, {**ONE_THREAD, **ON_CPU})
    results = Results(tmp_path_factory.mktemp("kld"))
    done = list(kld.measure(grid, results, lambda _: ignore))
    assert done == list(grid.cells())
    return grid, results


def test_the_full_cache_is_itself(closeness: tuple[KldSweep, Results]) -> None:
    quantised, full = sorted(kld.rows(*closeness), key=lambda r: r.share)
    assert (full.variant, full.pool, full.kld, full.kld_99, full.same_top, full.share) == ("full", None, 0, 0, 1, 1)
    assert 0 < quantised.kld <= quantised.kld_99 <= quantised.kld_999
    assert full.kld_999 == 0
    assert quantised.share == 18 / 64, "bytes of 32 values in q4_0, over those in f16"
    assert quantised.ppl != full.ppl


def test_perplexity_is_that_of_the_tokens_that_come(closeness: tuple[KldSweep, Results]) -> None:
    """Each token is scored by the logits before it: the same from one batch with all its logits."""
    grid, results = closeness
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=768, pool="off", n_threads=1, **ON_CPU) as kv:
        tokens = kv.tokenize(grid.text or "")[:768]
        list(kv.prefill(tokens[:743]))
        kv.decode(tokens[743:], native.ALL)
        logits = [kv.logits(i).astype(float) for i in range(25)]
    log_p = [x[t] - np.log(np.exp(x - x.max()).sum()) - x.max() for x, t in zip(logits, tokens[744:], strict=False)]
    assert len(log_p) == 24
    full = next(r for r in kld.rows(grid, results) if r.variant == "full")
    assert full.ppl == pytest.approx(np.exp(-np.mean(log_p)), rel=0.05), "but for rounding: batches of 25 and of 1"
    assert sum(x.argmax() == t for x, t in zip(logits, tokens[743:], strict=False)) < 3, "one off is something else"


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
    task = LongTask("list", 3, "prose")
    keys += [
        replace(grid, task=replace(task, **x)).key(cell) for x in ({}, {"name": "copy"}, {"seed": 4}, {"haystack": "b"})
    ]
    assert len({json.dumps(key) for key in keys}) == len(keys) == 13
    assert "task" not in keys[0], "results of plain texts are found again"
    assert replace(grid, task=task, text=None, n_score=9).key(cell) == replace(grid, task=task).key(cell)
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


FORGETFUL: Any = Variant("forgetful", Qk("mean", rerank=0), {"prefill": "pool", "share": 0, "tau": 64})  # type: ignore[arg-type]


def opened(variant: str | Variant, n_ctx: int = 2048, session: int = 0) -> KVFlash:
    variant = Variant.parse(variant) if isinstance(variant, str) else variant
    return open_variant(BUNDLED_MODEL, variant, n_ctx + QUESTION_ROOM * (session + 1), 1024, ONE_THREAD)


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
    assert oracle["kv_device_bytes"] == lru["kv_device_bytes"] < 0.6 * oracle["kv_full_bytes"], "with two panes of six"


def test_a_summary_that_cannot_find_it_is_blamed(runs: Runs) -> None:
    with opened(FORGETFUL) as kv:
        mine = kv.scorer
        assert isinstance(mine, Qk)
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


@pytest.mark.parametrize("blame", BLAMES)
def test_blame_is_the_first_mending_that_finds_it(blame: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Qk()
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
    assert [(s.summary, s.query) for s in rounds[1:]] == [("rows", mine.query), ("rows", "question"), (None, "last")][
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
