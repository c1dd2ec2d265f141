"""The benchmark of paging, and the commands `kvflash bench speed` and `kvflash bench paging`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import speeds
from benches import good, invoke, refused
from speeds import ENGINE, random_tokens
from support import changes
from support.changes import BENCHES
from support.oracles import ON_GPU

from kvflash_bench import paging as paging_bench
from kvflash_bench import speed as speed_bench
from kvflash_bench.curves import paging_figure
from kvflash_bench.grid import Results
from kvflash_bench.paging import Copies, Measured, Paging, Stream, Swap
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import Interrupted, NativeError
from pyllama_kvflash.events import Reselect
from pyllama_kvflash.native import Context, Model, PoolParams
from pyllama_kvflash.policy import View

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_gpu")]

environment = speeds.environment
kept = speeds.kept
shape_path = speeds.shape_path

FILES = {f"results.{kind}" for kind in ("md", "csv", "json", "png")}
SMALL = ("--shape", "tiny", "--contexts", "512,1K", "--pools", "512", "--steps", "24", "-t", "1")
VARIANTS = ("full", "lru/chunk=32", "qk/chunk=32/share=0/tau=8")
PAGING = (
    "--shape",
    "tiny",
    "--pool",
    "768",
    "--repeat",
    "2",
    "--reselect",
    "2",
    "--tau",
    "16",
    "--steps",
    "48",
    "-t",
    "1",
)


#
# Ctrl-C
#


@pytest.mark.nightly(BENCHES, changes.ENGINE)
def test_what_an_interrupted_bench_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = speed_bench.measure

    def interrupted(plan: Any, cache: Any, *args: Any) -> Any:
        if cache.label != "full":
            raise Interrupted("interrupted")
        return measure(plan, cache, *args)

    args = ("speed", *SMALL, "--variants", ",".join(VARIANTS), "-o", str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(speed_bench, "measure", interrupted)
        res = invoke(*args)
    assert res.exit_code == 130, res.output
    assert f"1 of 3 runs is measured and kept in {tmp_path / 'out'}: the same command measures the rest" in res.stderr
    assert "1 run was measured before" in good(*args).stderr


#
# paging
#


def view(touched: list[int], room: int, outsiders: int = 1) -> View:
    candidates = np.ones(len(touched), np.bool_)
    candidates[:outsiders] = False  # a sink
    return View(tokens=random_tokens(4), chunk=64, touched=np.array(touched), candidates=candidates, room=room)


def test_swap_wants_what_was_out_longest_and_keeps_what_came_last() -> None:
    swap = Swap(2)
    there = np.array([True] * 4 + [False] * 4 + [True])
    swap.resident = lambda: there
    scores = swap.score(view([0, 5, 9, 7, 1, 4, 3, 2, 8], room=4))
    assert scores.tolist() == [0, 0, 1, 0, 2, 0, 0, 2, 1]
    assert not swap.score(view([0, 5, 9, 7, 1, 4, 3, 2, 8], room=0)).any()
    swap.n = 9
    assert np.count_nonzero(swap.score(view([0, 5, 9, 7, 1, 4, 3, 2, 8], room=3)) == 2) == 3
    assert np.count_nonzero(swap.score(view([0, 5, 9, 7, 1, 4, 3, 2, 8], room=20))) == 8


@pytest.mark.nightly(BENCHES, changes.ENGINE)
def test_swap_moves_just_so_many_chunks_each_time(shape_path: Callable[[str], Path]) -> None:
    plan = Paging(1024, 1, 3, 16, 160, ENGINE)
    swap = Swap(3)
    with KVFlash.from_file(shape_path("tiny"), **plan.engine(swap)) as kv:
        swap.resident = lambda: kv.pager.ledger.resident
        for _ in kv.prefill(random_tokens(2048)):
            pass
        events = [e for i in range(160) for e in kv.decode([i]) if isinstance(e, Reselect)]
        assert len(events) >= 8
        assert {len(e.page_ins) for e in events} == {3}
        assert len({c for e in events for c in e.page_ins}) > 10, "others each time"
        assert kv.policy == "swap"
        kv.check_integrity()


def test_copies_leave_the_pool_as_it_was(shape_path: Callable[[str], Path]) -> None:
    rounds = []
    with (
        Model.load(shape_path("tiny")) as model,
        Context(model, n_ctx=512, n_batch=128, n_threads=1, pool=PoolParams(n_pool=512)) as ctx,
    ):
        for pos in range(0, 512, 128):
            ctx.decode(random_tokens(128), pos)
        before = [records(ctx, c) for c in range(8)]
        found = paging_bench.time_copies(ctx, 3, 1 << 16, lambda: rounds.append(1))
        assert [records(ctx, c).tobytes() for c in range(8)] == [r.tobytes() for r in before]
        info = ctx.pool_info()
    assert len(rounds) == 3
    assert [(c.direction, c.chunks) for c in found] == [("out", 1), ("out", 4), ("in", 1), ("in", 4)]
    for c in found:
        n_bytes = info.record_bytes - info.meta_bytes
        assert c.rate == pytest.approx(1e3 * n_bytes / c.ms_a_chunk)
        assert min(c.plain_rate, c.small_rate) > 0


def records(ctx: Context, chunk: int) -> np.ndarray:
    record = np.zeros(ctx.pool_info().record_bytes, np.uint8)
    ctx.read(chunk, record)
    return record


def made_up() -> Measured:
    """54 GB/s of 60, and a worst step of 1.1 medians near a reselect."""
    copies = [Copies(way, k, 0.1 * k, 54e9, 60e9, 50e9) for way in ("out", "in") for k in (1, 16)]
    swapped = [4.0] * 100
    swapped[20], swapped[33], swapped[50] = 4.2, 4.4, 8.0
    streams = [Stream("16 chunks", swapped, {16: 16, 31: 15}), Stream("lru, no reselects", [3.2] * 100, {})]
    return Measured(5 << 20, 1024, 1, 256 << 20, copies, streams, [], "a machine")


def test_the_tables_of_paging(tmp_path: Path) -> None:
    plan = Paging(4000, 20, 16, 64, 512)
    assert plan.n_pool == 4096
    text = paging_bench.write(plan, made_up(), Results(tmp_path))
    lines = text.splitlines()
    assert lines[2] == "| page out | 1 | 54.00 | 0.100 | 60.00 | 0.900 | 50.00 | 1.080 |"
    assert "| 16 chunks | 4.000 | 8.000 | 2.00 | 4.400 | 1.10 | 1.38 | 2 | 15 to 16 |" in lines
    assert "| lru, no reselects | 3.200 | 3.200 | 1.00 | - | - | - | 0 | - |" in lines
    assert "A chunk's record is 5.00 MiB and moves in 1 copy;" in text
    assert text.endswith("\na machine: `kvflash bench`\n")
    whole = json.loads((tmp_path / "results.json").read_text())
    assert whole["streams"][0]["worst_near_ms"] == 4.4
    assert len(whole["streams"][0]["steps_ms"]) == 100
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 5
    assert paging_figure(made_up(), "title").startswith(b"\x89PNG")


#
# the commands
#


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, kept: Path) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("speed") / "out"
    args = (*SMALL, "--variants", ",".join(VARIANTS), "--shape-dir", str(kept), "-o", str(folder))
    return good("speed", *args), folder


def test_speed_writes_its_tables(measured: tuple[Result, Path]) -> None:
    res, folder = measured
    assert {p.name for p in folder.iterdir()} == FILES | {"results.jsonl"}
    assert res.stdout == (folder / "results.md").read_text()
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    whole = json.loads((folder / "results.json").read_text())
    names = ["full", "lru/chunk=32 512", "qk/chunk=32/share=0/tau=8 512"]
    assert [(r["context"], r["cache"]) for r in whole["rows"]] == [(c, n) for c in (512, 1024) for n in names]
    full, lru, qk = whole["rows"][3:]
    assert (full["pool"], lru["pool"], qk["pool"]) == (None, 512, 512)
    assert full["decode_x"] == full["prefill_x"] == 1
    pool = full["kv_device_bytes"] * 512 // (1024 + 256)  # 1,024 tokens, and the steps
    more = lru["kv_device_bytes"] - pool - full["kv_device_bytes"] // 2
    assert 0 <= more <= 4096 * ON_GPU, "and two of four layers, which CUDA pads"
    assert full["host_bytes"] == 0 < lru["host_bytes"]
    assert lru["reselects"] == 0 < qk["reselects"]
    assert lru["pages_in"] == 0
    for row in whole["rows"]:
        assert row["error"] is None
        assert row["decode_rate"] > 0
        assert row["step_ms"] <= row["step_p99_ms"] <= row["step_worst_ms"]
        assert row["worst_ratio"] >= (row["worst_moved_ratio"] or 1) > 0
        assert (row["device_bytes"] is not None) == ON_GPU  # not how many: other tests take memory of the GPU meanwhile
    assert set(whole["flatness"]) == set(names[1:])
    assert whole["python_loop"]["full"] is None
    assert res.stdout.count("Python's part of a step of") == 2
    assert "a model of shape tiny with random weights, 2.4 MiB" in res.stderr


def test_speed_goes_on_where_it_was(
    measured: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch, kept: Path, tmp_path: Path
) -> None:
    folder = measured[1]
    (tmp_path / "again").mkdir()
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "again" / "results.jsonl").write_text("".join(lines[:2]))
    seen = []
    real = speed_bench.measure
    monkeypatch.setattr(
        speed_bench, "measure", lambda plan, cache, *r: seen.append(cache.label) or real(plan, cache, *r)
    )
    args = (*SMALL, "--variants", ",".join(VARIANTS), "--shape-dir", str(kept), "-o", str(tmp_path / "again"))
    res = good("speed", *args)
    assert seen == ["qk/chunk=32/share=0/tau=8 512"]
    assert "2 runs were measured before" in res.stderr
    again = good("speed", *args)
    assert seen == ["qk/chunk=32/share=0/tau=8 512"]
    assert again.stdout == res.stdout
    assert "random weights" not in again.stderr, "nothing is written for nothing"


def test_speed_of_a_model_with_contexts_in_any_order(shape_path: Callable[[str], Path]) -> None:
    path = str(shape_path("tiny"))
    args = ("--contexts", "512,256", "--variants", "full", "--steps", "8", "-t", "1", "-ctk", "f16", "-ctv", "f16")
    good("speed", path, *args, "-o", "out")
    rows = json.loads(Path("out/results.json").read_text())["rows"]
    assert [r["context"] for r in rows] == [256, 512]
    assert rows[0]["kv_device_bytes"] == 768 * 4 * 2 * 128 * 2


def test_speed_where_nothing_fits_is_an_error(
    monkeypatch: pytest.MonkeyPatch, shape_path: Callable[[str], Path]
) -> None:
    def never(*_: Any) -> None:
        msg = "the full cache takes too much"
        raise NativeError(msg)

    monkeypatch.setattr(speed_bench, "open_variant", never)
    sentence = refused("speed", str(shape_path("tiny")), *SMALL[2:], "--variants", "full", code=1)
    assert sentence == "kvflash: error: the full cache takes too much"


@pytest.mark.nightly(BENCHES, changes.ENGINE)
def test_paging_writes_its_tables(kept: Path) -> None:
    res = good("paging", *PAGING, "--shape-dir", str(kept), "-o", "out")
    assert {p.name for p in Path("out").iterdir()} == FILES
    assert res.stdout == Path("out/results.md").read_text()
    whole = json.loads(Path("out/results.json").read_text())
    assert (whole["pool"], whole["n_copy"] >= 1) == (768, True)
    assert [(c["direction"], c["chunks"]) for c in whole["copies"]] == [("out", 1), ("out", 4), ("in", 1), ("in", 4)]
    swapped, bare = whole["streams"]
    assert len(swapped["steps_ms"]) == len(bare["steps_ms"]) == 48
    assert set(swapped["reselected"].values()) == {2}
    assert bare["reselected"] == {}
    assert Path("out/results.png").read_bytes().startswith(b"\x89PNG")
    assert "warning" not in res.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            (),
            "there is nothing to measure: give a model, or --shape with one of 8b, 70b, 27b-hybrid, 27b-mtp, 35b-a3b, 26b-a4b, laguna, tiny, tiny-hybrid, tiny-mtp, tiny-moe, tiny-gemma4, tiny-laguna",
        ),
        (("a.gguf", "--shape", "tiny"), "both a.gguf and --shape tiny are given: give one"),
        (("a.gguf", "-m", "b.gguf"), "two models are given"),
        (("--shape", "9b"), "'9b' is not one of"),
    ],
)
@pytest.mark.parametrize("command", ["speed", "paging"])
def test_what_is_no_model_is_one_sentence(command: str, args: tuple[str, ...], says: str) -> None:
    assert says in refused(command, *args)
    assert not list(Path().glob("kvflash-*/results.*"))


@pytest.mark.parametrize(
    ("command", "args", "says"),
    [
        ("speed", ("--pools", "1K"), "a pool of 1,024 tokens covers the longest context of 1,024"),
        ("speed", ("--contexts", "1000,1K"), "contexts 1000 and 1024 are too close: 24 steps (--steps)"),
        ("speed", ("--steps", "7"), "7 is not in the range"),
        ("speed", ("--variants", "oracle"), "the oracle has no speed to measure"),
        ("speed", ("--variants", "qk/write_back=0"), "only lru can go without, as lru/write_back=0"),
        ("speed", ("--variants", "lru/write_back=1"), "'write_back=1' in 'lru/write_back=1' is not an option"),
        ("paging", ("--pool", "512"), "a pool of 512 tokens (--pool) is too small to page: give at least 768"),
        ("paging", ("--reselect", "16"), "16 chunks cannot be swapped (--reselect) in a pool of 768 tokens: at most 6"),
        ("paging", ("--steps", "32"), "32 steps (--steps) are too few to see a reselect every 16 tokens (--tau)"),
        ("paging", ("-b", "512"), "is too small to page: give at least 1024"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(command: str, args: tuple[str, ...], says: str) -> None:
    usual = SMALL if command == "speed" else PAGING
    assert says in refused(command, *usual, *args)
    assert not list(Path().glob("kvflash-*/results.*"))


def test_a_shape_is_meant_instead_of_the_environments_model(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", "no/such.gguf")
    assert "no/such.gguf does not exist" in refused("speed")
    args = (*SMALL, "--contexts", "256", "--steps", "8", "--variants", "full", "--shape-dir", str(kept))
    good("speed", *args)
