"""Benchmarks of answers: variants, results that are kept, tables, sweeps and pictures. Nothing is measured here."""

import csv
import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import benches
from benches import ONE_THREAD, ignore, png, result, stored
from support.changes import BENCHES

from kvflash_bench import figures, sweep
from kvflash_bench.figures import heat_map, kld_figure
from kvflash_bench.grid import Results, Variant, digest
from kvflash_bench.kld import KldRow
from kvflash_bench.recall import Oracle, open_variant
from kvflash_bench.sweep import Cell, Row, Sweep
from kvflash_bench.tables import Live, comma_separated, head, markdown
from pyllama_kvflash.cli.needles import QUESTION_ROOM
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import OutputError, UsageError
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt

pytestmark = pytest.mark.native

book = benches.book
count = benches.count
environment = benches.environment


def count_words(text: str) -> int:
    return len(text.split())


#
# variants
#


def test_variant_is_a_policy_with_options_of_its_own() -> None:
    text = "qk/replay=0/type_k=q8_0/share=0.25/kv_offload=false"
    variant = Variant.parse(text)
    assert (variant.label, variant.policy, variant.full) == (text, "qk", False)
    assert variant.options == {"replay": 0, "type_k": "q8_0", "share": 0.25, "kv_offload": False}
    assert variant.options["kv_offload"] is False
    assert Variant.parse("full/type_k=q8_0") == Variant("full/type_k=q8_0", "full", {"type_k": "q8_0"})
    assert Variant.parse("full").full
    assert [Variant.parse(p).options for p in ("full", "oracle", "lru", "qk-cos")] == [{}] * 4


@pytest.mark.parametrize("text", ["", "nope", "nope/replay=0", " lru", "FULL", "/replay=0"])
def test_variant_of_no_policy(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"is not a policy: there are full, oracle, auto, fresh, qk, qk-cos, lru"
    ) as error:
        Variant.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("part", ["", "replay", "replays=1", "=1", "x=1", "__class__=1", "replay =1"])
def test_variant_with_no_option(part: str) -> None:
    with pytest.raises(UsageError, match="is not an option: give name=value") as error:
        Variant.parse(f"qk/{part}")
    assert str(error.value).startswith(repr(part))


@pytest.mark.parametrize("part", ["n_ctx=4096", "pool=1024", "policy=lru", "n_threads=1"])
def test_variant_cannot_set_what_the_bench_sets(part: str) -> None:
    for policy in ("full", "qk"):
        with pytest.raises(UsageError, match="is not an option"):
            Variant.parse(f"{policy}/{part}")


@pytest.mark.parametrize(
    "part", ["replay=", "replay=many", "share=1,5", "kv_offload=maybe", "replay=null", "replay=1e400"]
)
def test_variant_with_a_bad_number(part: str) -> None:
    with pytest.raises(UsageError, match=r"needs (a number|a whole number|true or false)$") as error:
        Variant.parse(f"qk/{part}")
    assert repr(part) in str(error.value)


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
    assert str(error.value) == f"line 2 of {path} is not a result: delete it, or give another folder"
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


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path)
    results.write("results.md", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
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
    rows = [{"h": "a,b", "i": 'say "x"', "lists": [1]}, {"h": "1", "i": "two\nlines", "j": "3"}]
    text = comma_separated(rows)
    assert list(csv.reader(io.StringIO(text))) == [["h", "i", "j"], ["a,b", 'say "x"', ""], ["1", "two\nlines", "3"]]
    assert "\r" not in text


def test_a_table_is_printed_row_by_row(capsys: pytest.CaptureFixture[str]) -> None:
    table = Live("a", "b")
    assert capsys.readouterr().out == head(["a", "b"])
    table.row("x", 1)
    assert head(["a", "b"]) + capsys.readouterr().out == markdown(["a", "b"], [["x", 1]])


def test_digest_tells_texts_apart() -> None:
    marks = [digest(text) for text in (None, "", "a", "b", "ä")]
    assert marks[0] is None
    assert len(set(marks)) == 5
    assert digest("a") == marks[2]


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
    return KldRow("v", kind, 2048, None, 1, share, value, value, value, 1.0, 2.0, 0.0, 0.0, "M", 256)


@pytest.mark.nightly(BENCHES)
def test_kld_figure_is_a_picture() -> None:
    pytest.importorskip("matplotlib")
    quantised = [kld_row("full cache, quantised", s, v) for s, v in ((0.53, 1e-4), (0.28, 0.02))]
    pool = [kld_row("pool, qk", s, v) for s, v in ((0.5, 0.01), (0.25, 0.1))]
    assert png(kld_figure(([*quantised, *pool], "t"))).size > 0
    assert png(kld_figure((quantised[:1], "t"))).size > 0
    assert png(kld_figure(([kld_row("full cache, quantised", 1.0, 0.0), *pool], "t"))).size > 0
    assert png(kld_figure(([kld_row("full cache, quantised", 1.0, 0.0)], "t"))).size > 0
    assert kld_figure((quantised, "t")) != kld_figure((pool, "t"))
    assert png(kld_figure((quantised, "a"), (pool, "b"))).shape[1] > 1.9 * png(kld_figure((pool, "b"))).shape[1]


def test_kld_figure_marks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mark says a share, and its bytes if all rows are of one context; quantised caches say their types."""
    pytest.importorskip("matplotlib")
    said: list[str] = []

    def read(fig: Any) -> bytes:
        axis = fig.axes[0]
        texts = *axis.get_xticklabels(), *axis.texts, *axis.get_legend().get_texts()
        said[:] = [text.get_text() for text in texts]
        return b""

    monkeypatch.setattr(figures, "png", read)
    rows = [
        replace(kld_row("full cache, quantised", 0.531, 0.01), variant="full/type_k=q8_0/type_v=q8_0"),
        replace(kld_row("full cache, quantised", 0.4, 0.1), variant="full/type_k=q8_0/type_v=q4_0"),
        replace(kld_row("pool, fresh", 0.125, 0.02), variant="fresh", pool=256),
        replace(kld_row("pool, lru", 0.13, 0.2), variant="lru", pool=256),
    ]
    kld_figure(([replace(r, kv_device_bytes=int(r.share * (100 << 20))) for r in rows], "t"))
    assert {"q8_0", "q8_0/q4_0", "12.5 %\n12.5 MiB", "53.1 %\n53.1 MiB", "pool, fresh, 2K"} <= set(said)
    assert not [t for t in said if t.startswith("13 %")], "too near to the mark before"
    kld_figure(([rows[0], replace(rows[2], n_ctx=4096)], "t"))
    assert "12.5 %" in said
