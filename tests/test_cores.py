"""A warning where threads wait for cores: once, and not for idle cores, a moment's work, or one thread."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.commands import SHORT, good
from support.oracles import ON_GPU
from support.runs import GREEDY

from pyllama_kvflash import KVFlash, Warn
from pyllama_kvflash.engine import cores
from pyllama_kvflash.engine.cores import Cores
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.cores import N_STEPS, CoreWatch

pytestmark = [pytest.mark.native, pytest.mark.skipif(ON_GPU, reason="a GPU needs no cores")]

environment = commands.environment


def looks(*times: tuple[float, float] | None) -> list[float | None]:
    watch = CoreWatch()
    return [watch.look(t) for t in times]


@pytest.mark.parametrize(
    ("worked", "waited", "says"),
    [
        (1.09, 0.01, False),  # two threads, as measured: on idle cores,
        (1.50, 0.38, False),  # beside a quarter of a core's work,
        (1.24, 0.82, True),  # beside one busy loop,
        (1.09, 1.10, True),  # beside two,
        (0.79, 1.20, True),  # and four threads on two cores
    ],
)
def test_what_was_measured(worked: float, waited: float, says: bool) -> None:
    [first, then] = looks((5.0, 3.0), (5.0 + worked, 3.0 + waited))
    assert first is None
    assert then == (pytest.approx(waited / (worked + waited)) if says else None)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"1/schedstat": "2000000000 500000000 7", "2/schedstat": "1000000000 0 1", "3/other": ""}, (3.0, 0.5)),
        ({"1/schedstat": "0 0 0"}, None),  # a kernel that does not count
        ({"1/other": ""}, None),
        ({}, None),
    ],
)
def test_times_of_threads(
    files: dict[str, str], found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_TASKS", tmp_path / "task")
    for name, text in files.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert cores.thread_times() == found


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads that wait half of the time. How often that was looked at."""
    counted: list[int] = []

    def times() -> tuple[float, float]:
        counted.append(1)
        return 1.0 * len(counted), 1.0 * len(counted)

    monkeypatch.setattr(cores, "thread_times", times)
    return counted


SAYS = "threads wait for a core 50 % of the time, as they do beside another busy program: `n_threads` is 2, and fewer would be faster"


def test_a_run_warns_once(crowded: list[int]) -> None:
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=512, n_threads=2) as kv:
        for said in ([Warn(SAYS)], []):
            events = kv.generate("a", max_tokens=3 * N_STEPS, sampling=GREEDY)
            assert [e for e in events if isinstance(e, Warn)] == said
    assert len(crowded) == 2


def test_a_prompt_warns_while_it_is_read(crowded: list[int], tiny_path: Callable[[str], Path]) -> None:
    with KVFlash.from_file(tiny_path("qwen3"), n_ctx=2048, n_threads=2, n_ubatch=32) as kv:
        events = list(kv.prefill([100] * 1280))
    assert [i for i, e in enumerate(events) if e == Warn(SAYS)] == [31], "threads have worked and waited for 60 s"


@pytest.mark.parametrize("options", [{"n_threads": 1}, {"n_threads": None}])
def test_one_thread_is_not_looked_at(options: dict[str, int | None], crowded: list[int]) -> None:
    watch = Cores(Options(**options))
    assert not any(watch.after_step() for _ in range(2 * N_STEPS))
    assert crowded == []


def test_the_command_line_names_its_option(crowded: list[int]) -> None:
    shown = good("run", *SHORT, "-n", str(2 * N_STEPS), "-t", "2", "-q").stderr
    assert f"kvflash: warning: {SAYS.replace('`n_threads`', '-t/--threads')}\n" in shown
