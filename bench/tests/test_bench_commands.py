"""`kvflash bench niah` and `kvflash bench kld`, as a person types them."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import benches
from benches import FILES, FORGETFUL, good, invoke, png, refused, result, stored, type_examples
from support.changes import BENCHES, ENGINE
from support.commands import SCRIPT

from kvflash_bench import kld, sweep
from kvflash_bench.cli.answers import measuring
from kvflash_bench.grid import Results, digest
from kvflash_bench.long_texts import LONG
from kvflash_bench.prompts import Prompts
from kvflash_bench.ruler_texts import SAMPLE, make_text
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_gpu")]

book = benches.book
count = benches.count
environment = benches.environment

TINY = ("--contexts", "2K", "--pools", "1K", "--docs", "1", "--needles", "2", "-t", "1")

VARIANTS = ("--variants", f"full,lru,{FORGETFUL}")


@pytest.fixture(scope="module")
def niah(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The bench as a process of its own, into a folder that it makes."""
    folder = tmp_path_factory.mktemp("niah") / "out"
    res = subprocess.run(
        [SCRIPT, "bench", "niah", *TINY, *VARIANTS, "-o", folder], env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},  # as one_gpu
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


def test_what_was_measured_is_kept_when_a_later_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(kv: KVFlash, *_: Any) -> dict[str, Any]:
        if kv.n_pool is not None:
            raise KeyboardInterrupt
        return result([True, False])

    monkeypatch.setattr(sweep, "run_cell", run)
    res = invoke("niah", *TINY, *VARIANTS, "-o", str(tmp_path))
    assert res.exit_code == 130, res.output
    assert (
        f"\nkvflash: 1 of 3 runs is measured and kept in {tmp_path}: the same command measures the rest\n" in res.stderr
    )
    assert res.stderr.endswith("kvflash: error: interrupted\n")
    assert len(stored(tmp_path)) == 1
    assert "| full | 1/2 | 1/2 |\n| lru | - | 0/0 |" in (tmp_path / "results.md").read_text()


def test_a_run_that_is_kept_is_counted_before_the_tables_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run_cell", lambda *_: result([True, False]))
    monkeypatch.setattr(sweep, "write", stopped)
    res = invoke("niah", *TINY, *VARIANTS, "-o", str(tmp_path))
    assert res.exit_code == 130, res.output
    assert "\nkvflash: 1 of 3 runs is measured and kept in" in res.stderr
    assert len(stored(tmp_path)) == 1


def test_a_bench_that_is_interrupted_at_once_keeps_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), measuring("kld", 3, Results(Path("out")), Reporter()):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


@pytest.mark.nightly(BENCHES)
def test_niah_in_a_text(book: Path, tmp_path: Path) -> None:
    res = good("niah", *TINY, "--variants", "full", "-f", str(book), "-o", str(tmp_path))
    assert json.loads(stored(tmp_path)[0])["key"]["haystack"] == digest(book.read_text())
    assert "| full | 2/2 | 2/2 |" in res.stdout


@pytest.mark.nightly(BENCHES)
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


@pytest.mark.nightly(BENCHES, ENGINE)
def test_kld_of_a_text(book: Path, tmp_path: Path) -> None:
    args = ("kld", "-f", str(book), "--contexts", "1K", "--score", "16", "--shares", "75", "-t", "1")
    args += ("--variants", "full/type_k=q8_0/type_v=q8_0,lru", "-b", "64", "-o", str(tmp_path / "kld"))
    res = good(*args)
    folder = tmp_path / "kld"
    assert {p.name for p in folder.iterdir()} == FILES
    lines = res.stdout.splitlines()
    assert (folder / "results.md").read_text() == res.stdout
    assert [line.split(" | ")[1:5] for line in lines[2:4]] == [
        ["lru", "768", "3.25 MiB", "108.3 %"], ["full/type_k=q8_0/type_v=q8_0", "-", "1.59 MiB", "53.1 %"]
    ]  # fmt: skip
    pool, quantised = json.loads((folder / "results.json").read_text())["rows"]
    assert (pool["variant"], pool["pool"], quantised["share"]) == ("lru", 768, 34 / 64)
    assert 0 < quantised["kld"] < 0.01
    assert pool["kld"] > 0
    assert pool["kld"] < pool["kld_99"] < pool["kld_999"], "of 16 tokens, both are next to the largest"
    assert " | mean KLD | 99 % KLD | 99.9 % KLD | same top | " in lines[0]
    assert lines[2].split(" | ")[6:8] == [f"{pool[name]:.2e}" for name in ("kld_99", "kld_999")]
    assert 0.8 <= quantised["same_top"] <= 1, "three of the 16 are near ties"
    png((folder / "results.png").read_bytes())

    before = (folder / "results.jsonl").read_bytes()
    assert "2 runs were measured before" in good(*args).stderr
    assert (folder / "results.jsonl").read_bytes() == before


@pytest.mark.nightly(BENCHES)
def test_kld_without_a_text_asks_for_codes(tmp_path: Path) -> None:
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=1024, pool="off", n_threads=1) as kv:
        text = kld.questions(kv, 1024)
        assert 900 < len(kv.tokenize(text)) <= 1024
    end = text.splitlines()[-16:]
    assert all(line.startswith("Question: what is the secret code for the ") for line in end)
    assert all(text.count(line.split()[-1]) == 2 for line in end), "each code is told, and told again"
    args = ("kld", "--contexts", "1K", "--score", "8", "--variants", "full/type_k=q8_0", "-t", "1", "-o", str(tmp_path))
    assert "| 1024 | full/type_k=q8_0 | - |" in good(*args).stdout


@pytest.mark.nightly(BENCHES)
@pytest.mark.parametrize("task", LONG)
def test_kld_of_a_task_is_of_its_right_answers(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, given = [], []
    prefill, forced = KVFlash.prefill, kld.forced_logits
    monkeypatch.setattr(KVFlash, "prefill", lambda kv, ids: read.append(ids) or prefill(kv, ids))
    monkeypatch.setattr(kld, "forced_logits", lambda kv, ids: given.append((kv.n_tokens, ids)) or forced(kv, ids))
    n_ctx = 3072 if task == "json" else 1024
    args = ("kld", "--contexts", str(n_ctx), "--variants", "full/type_k=q8_0", "-t", "1", "-o", str(tmp_path))
    res = good(*args, "--task", task, "-s", "3")
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        prompts = Prompts(model)
        questions = make_text(task, n_ctx, prompts.count, SAMPLE.read_text("utf-8"), 3)
        prompt, scored = prompts.answered(questions)
        said = b"".join(model.piece(int(token)) for token in scored).decode()
    assert said.endswith(questions[-1].right[-40:])
    assert [ids.tolist() for ids in read] == [prompt.tolist()] * 2
    assert [(n, ids.tolist()) for n, ids in given] == [(len(prompt), scored.tolist())] * 2, "questions, too"
    row = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    assert row["n_score"] == len(scored)
    assert 0 < row["kld"] < row["kld_99"] < row["kld_999"] < 1
    assert f"The {len(scored)} tokens after the prompt of {task}, text 3 (right answers" in res.stdout
    (line,) = stored(tmp_path)
    key = json.loads(line)["key"]
    assert (key["task"], key["seed"], key["score"], key["text"]) == (task, 3, None, digest(SAMPLE.read_text("utf-8")))
    assert "1 run was measured before" in good(*args, "--task", task, "-s", "3").stderr
    assert len(given) == 2


def test_kld_of_a_task_has_no_other_tokens_to_score() -> None:
    sentence = refused("kld", "--task", "copy", "--score", "256", "-t", "1")
    assert sentence.endswith("--score is 256, and --task compares all tokens of the right answer: give one of them")
    assert "is too short for json: use a longer one" in refused("kld", "--task", "json", "--contexts", "1K", "-t", "1")
    assert "'best' is not one of 'list', 'turns', 'copy', 'json'" in refused("kld", "--task", "best")


def test_kld_of_a_text_that_is_too_short(book: Path, tmp_path: Path) -> None:
    args = ("-f", str(book), "--contexts", "2K", "--score", "8", "--variants", "lru", "-t", "1", "-o", str(tmp_path))
    sentence = refused("kld", *args)
    assert sentence.startswith("kvflash: error: the text has 1,".replace(",", ""))
    assert sentence.endswith("tokens, and a context of 2048 is asked for: give a longer text")


def test_kld_scores_less_than_the_context() -> None:
    sentence = refused("kld", "--contexts", "4K,1K", "--score", "1024", "-t", "1")
    assert sentence == "kvflash: error: --score is 1,024, and must be less than the shortest context of 1,024"
    assert not Path("kvflash-kld").exists()


@pytest.mark.parametrize(
    ("command", "option", "value", "says"),
    [
        ("niah", "--contexts", "many", "'many' is not a token count"),
        ("facts", "--contexts", "0", "'0' has a number below 1"),
        ("niah", "--pools", "64K", "no pool of --pools is smaller than a context of --contexts"),
        ("kld", "--shares", "half", "'half' is not a list of percentages"),
        ("kld", "--shares", "50,100", "'50,100' must be above 0 and below 100"),
        ("niah", "--variants", "full,best", "'best' in 'best' is not a policy"),
        ("niah", "--needles", "0", "0 is not in the range"),
        ("facts", "--facts", "65", "65 is not in the range"),
        ("niah", "-t", "0", "-t/--threads is 0"),
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


@pytest.mark.parametrize("command", ["niah", "kld"])
def test_a_text_without_words_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    small = ("--docs", "1", "--needles", "2") if command == "niah" else ("--score", "4")
    refused(command, "-f", "empty.txt", "--contexts", "2K", *small, "--variants", "full/type_k=q8_0", "-t", "1")


def test_kld_of_a_context_too_short_for_its_questions() -> None:
    refused("kld", "--contexts", "512", "--score", "8", "--variants", "full/type_k=q8_0", "-t", "1")


@pytest.mark.nightly(BENCHES)
def test_the_reference_is_f16_whatever_the_others_are(book: Path) -> None:
    """`-ctk` is "of all variants that do not say", and the table is "against the full f16 cache"."""
    args = ("-f", str(book), "--contexts", "512", "--score", "4", "--variants", "full,lru", "--shares", "90")
    good("kld", *args, "-b", "64", "-t", "1", "-ctk", "q8_0", "-ctv", "q8_0", "-o", "out")
    rows = json.loads(Path("out/results.json").read_text())["rows"]
    full = next(r for r in rows if r["variant"] == "full")
    assert full["share"] == 34 / 64


@pytest.mark.nightly(BENCHES)
def test_a_text_asked_for_twice_counts_once() -> None:
    args = ("--contexts", "2K,2K", "--pools", "1K,1K", "--variants", "full,lru")
    assert "| full | 2/2 | 2/2 |\n" in good("niah", *TINY, *args).stdout


@pytest.mark.nightly(BENCHES)
def test_a_scorer_that_cannot_score_is_told(tmp_path: Path) -> None:
    """qk takes the drafter's place: a table that has qk's figures in the drafter's row must say so."""
    bad = tmp_path / "draft.gguf"
    bad.write_bytes(b"no model")
    res = invoke("niah", *TINY, "--variants", "drafter", "--draft-scorer", str(bad))
    assert "drafter cannot score" in res.stderr


@pytest.mark.nightly(BENCHES)
def test_a_pool_that_is_raised_is_told() -> None:
    res = good("niah", *TINY, "--pools", "128", "--variants", "lru")
    assert "a pool of 128 tokens is too small: raised to " in res.stderr


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
    assert "kvflash: warning: plots need matplotlib: pip install matplotlib" in res.stderr
    assert "wrote" not in res.stderr
    assert "| full | 2/2 | 2/2 |" in res.stdout


@pytest.mark.parametrize("name", ["niah", "facts", "kld", "spec", "speed", "paging", "ruler"])
def test_help_shows_a_command_that_can_be_typed(name: str) -> None:
    shown, command = type_examples(name)
    assert shown
    assert [p.name for p in command.params if isinstance(p, click.Option) and not p.help] == []
