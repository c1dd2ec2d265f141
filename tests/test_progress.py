"""Progress of a prompt: in lines where there is no terminal, and on one line of a terminal of any width."""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import CLI
from support.commands import POOLED, good, on_a_terminal
from support.oracles import ON_GPU

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli.output import Output
from pyllama_kvflash.cli.pace import Pace
from pyllama_kvflash.cli.report import Reporter, time_left
from pyllama_kvflash.events import Prefill
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = pytest.mark.native

environment = commands.environment
long_file = commands.long_file


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s left"),
        (42.4, "42 s left"),
        (119.4, "119 s left"),
        (120, "2:00 left"),
        (3599.6, "1:00:00 left"),
        (3785, "1:03:05 left"),
    ],
)
def test_time_left(seconds: float, text: str) -> None:
    assert time_left(seconds) == text


@pytest.mark.parametrize(("each", "more"), [(0.01, 0.0), (0.01, 1e-6), (0.0, 1e-5), (0.002, 4e-6)])
def test_a_rest_whose_tokens_take_longer_is_estimated_so(each: float, more: float) -> None:
    """A token takes `each` second, and `more` for each one before it. The first batch can say nothing of that."""
    pace, total = Pace(), 32_000
    taken = {done: each * done + more * done**2 / 2 for done in range(500, total + 1, 500)}
    assert pace.left(500, total, taken[500]) == pytest.approx(taken[500] / 500 * (total - 500))
    for done in list(taken)[1:]:
        assert pace.left(done, total, taken[done]) == pytest.approx(taken[total] - taken[done], rel=0.02, abs=1e-6)


def lines_of(capsys: pytest.CaptureFixture[str], *batches: tuple[int, float]) -> list[str]:
    """What is shown without a terminal of a prompt of 4,096 tokens, of batches that end at (token, second)."""
    with Reporter().prefilling() as bar:
        for done, seconds in batches:
            bar(Prefill(done, 4096, seconds, 1 << 20, 2 << 20))
    return capsys.readouterr().err.splitlines()


def test_a_long_prompt_has_a_line_as_soon_as_its_first_batch_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = lines_of(capsys, (512, 2.0), (1024, 4.0))
    assert line.startswith("kvflash: reading 512/4,096 tok  14 s left  256 tok/s")


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize("columns", [40, 44, 200])
def test_a_line_fits_a_terminal_of_any_width(long_file: Path, columns: int) -> None:
    args = ("run", "-f", long_file, *POOLED, "-n", "40", "-o", "/dev/null")
    _, shown = on_a_terminal(*map(str, args), env={"NO_COLOR": "1", "COLUMNS": str(columns)})
    lines = re.findall(r"\x1b\[2K((?:load|reading|answer) [^\r\n\x1b]*)", shown)
    assert max(cell_len(line) for line in lines) <= columns
    known = [line for line in lines if re.match(r"reading .*[\d,]+/[\d,]+ tok", line)]
    assert known
    assert not any("…" in line for line in known)
    assert columns < 200 or any("tok/s" in line for line in known)
    assert any("━" in line for line in lines) == (columns == 200)


def test_two_lines_say_what_runs_and_one_what_it_took(long_file: Path) -> None:
    lines = good("run", str(BUNDLED_MODEL), "-f", str(long_file), *POOLED, "-n", "4").stderr.splitlines()
    said = [line for line in lines if not line.startswith("kvflash: reading ")]
    assert len(said) == 3, said
    assert said[0] == "kvflash: qwen3 6.97M Q8_0, a context of 4,096 tokens"
    assert said[1].startswith("kvflash: pool of 768 tokens in f16, and 4 bits of keys and values for all else: ")
    assert " the full cache takes 12 MiB" in said[1]
    assert re.fullmatch(
        r"kvflash: read 1,\d+ tokens in [\d.:]+( s)?, wrote 4 at [\d.,]+ tok/s,( GPU [\d.]+ \w+,)? RAM [\d.]+ [MG]iB at its peak"
        r"(, cut off at the token limit \(-n\))?",
        said[2],
    ), said[2]


@pytest.mark.skipif(ON_GPU, reason="a GPU is soon done")
def test_a_full_cache_says_how_far_it_is_before_a_large_batch_is_done() -> None:
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=2048, n_ubatch=256, n_threads=1) as kv:
        assert kv.n_batch > 1000
        done = [e.done for e in kv.prefill([5] * 1000) if isinstance(e, Prefill)]
    assert done == [256, 512, 768, 1000]


@pytest.mark.parametrize(("other", "seen"), [("log", True), ("err", False), (None, False)])
def test_no_line_of_progress_is_within_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str | None, seen: bool
) -> None:
    """An answer is taken as seen where both go to one file, as after `> log 2>&1`."""
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(sys, "stdout", stack.enter_context((tmp_path / "log").open("a")))
        err = stack.enter_context((tmp_path / other).open("a")) if other else io.StringIO()
        monkeypatch.setattr(sys, "stderr", err)
        assert Output(None).is_seen == seen
        with Output(str(tmp_path / "answer")) as out:
            assert not out.is_seen
