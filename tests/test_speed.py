"""Benchmarks of speed and paging: models of real shapes, the figures of tables, and the commands. Never the speed itself."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import Result

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from benches import good, isolate, refused, type_examples

from pyllama_kvflash.bench import paging as paging_bench
from pyllama_kvflash.bench import shapes
from pyllama_kvflash.bench import speed as speed_bench
from pyllama_kvflash.bench.curves import paging_figure, speed_figure
from pyllama_kvflash.bench.grid import Results, Variant
from pyllama_kvflash.bench.paging import Copies, Measured, Paging, Stream, Swap
from pyllama_kvflash.bench.shapes import SHAPES, shape_file, write_shape
from pyllama_kvflash.bench.speed import Cache, Row, Speed, flatness, speed_variant, stop_writing_back, summarise
from pyllama_kvflash.bench.steps import decode_steps, near, python_loop
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import HostMemoryError, NativeError, OutputError, UsageError
from pyllama_kvflash.events import Reselect
from pyllama_kvflash.native import ALL, Context, Model, PoolParams
from pyllama_kvflash.policy import State, View

pytestmark = pytest.mark.native

FILES = {f"results.{kind}" for kind in ("md", "csv", "json", "png")}
ENGINE = {"n_threads": 1, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}
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


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the caller's settings, and nothing written outside a folder of the test."""
    isolate(monkeypatch, tmp_path, "bench")
    monkeypatch.setattr(paging_bench, "PLAIN_BYTES", 1 << 20)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small shapes' models."""
    folder = tmp_path_factory.mktemp("shapes")
    for name in ("tiny", "tiny-hybrid", "tiny-moe"):
        with shape_file(name, folder):
            pass
    return folder


@pytest.fixture(scope="module")
def shape_path(kept: Path) -> Callable[[str], Path]:
    return lambda name: kept / f"kvflash-{name}-v{shapes.VERSION}.gguf"


def random_tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, n, dtype=np.int32)


def ignore(*_: Any) -> None:
    """No progress."""


#
# shapes
#


@pytest.mark.parametrize(
    ("name", "memory"),
    [("tiny", "llama_kv_cache"), ("tiny-hybrid", "llama_memory_hybrid"), ("tiny-moe", "llama_memory_hybrid")],
)
def test_a_shape_has_the_geometry_asked_for_and_decodes(
    name: str, memory: str, shape_path: Callable[[str], Path]
) -> None:
    shape = SHAPES[name]
    assert shape.n_bytes - shapes._HEADER <= shape_path(name).stat().st_size <= shape.n_bytes
    with Model.load(shape_path(name)) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        assert (model.n_layer, model.n_vocab, model.n_ctx_train) == (shape.n_layer, shape.n_vocab, shapes.N_CTX)
        assert ctx.memory_class == memory
        assert [layer.il for layer in ctx.layers()] == [
            i for i in range(shape.n_layer) if (i + 1) % shape.interval == 0
        ]
        for layer in ctx.layers():
            assert (layer.n_head, layer.n_head_kv, layer.n_embd_head_k) == (
                shape.n_head,
                shape.n_head_kv,
                shape.n_head_dim,
            )
        ctx.decode(random_tokens(32), 0, ALL)
        logits = np.stack([ctx.logits(i) for i in range(32)])
    assert np.isfinite(logits).all()
    assert len(set(logits.argmax(axis=1).tolist())) > 4, "what comes next depends on what came before"


def test_a_shape_is_always_the_same_file(shape_path: Callable[[str], Path], tmp_path: Path) -> None:
    write_shape("tiny-hybrid", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == shape_path("tiny-hybrid").read_bytes()


def test_matrices_are_no_copies_of_each_other_nor_of_their_own_rows() -> None:
    listed = [t for t in shapes.tensors(SHAPES["8b"]) if t.kind == "q4_0"]
    starts = {i * 40_503 % shapes._N_RANDOM for i in range(len(list(shapes.tensors(SHAPES["27b-hybrid"]))))}
    assert len(starts) >= len(listed), "no two tensors begin at the same block"
    for shape in SHAPES.values():
        for tensor in shapes.tensors(shape):
            if tensor.kind == "q4_0":
                n_columns = tensor.shape[0] // 32
                assert np.gcd(n_columns, shapes._N_RANDOM) == 1
                assert tensor.shape[1] < shapes._N_RANDOM


def test_the_large_shapes_are_those_of_the_real_models() -> None:
    dense, hybrid = (list(shapes.tensors(SHAPES[name])) for name in ("8b", "27b-hybrid"))
    n_params = {len(x): sum(int(np.prod(t.shape)) for t in x) for x in (dense, hybrid)}
    assert 7.0e9 < n_params[len(dense)] < 8.0e9
    assert 24e9 < n_params[len(hybrid)] < 27e9
    by_name = {t.name: t.shape for t in hybrid}
    full = [i for i in range(64) if f"blk.{i}.attn_k.weight" in by_name]
    assert full == list(range(3, 64, 4))
    assert by_name["blk.3.attn_k.weight"] == (5120, 4 * 256)
    assert by_name["blk.3.attn_q.weight"] == (5120, 2 * 24 * 256)
    assert by_name["blk.0.ssm_out.weight"] == (48 * 128, 5120)
    assert by_name["blk.0.attn_qkv.weight"] == (5120, 128 * (16 + 16 + 48))
    assert {t.name: t.shape for t in dense}["blk.35.attn_k.weight"] == (4096, 8 * 128)
    assert shapes._keys(SHAPES["27b-hybrid"])["rope.dimension_sections"] == [12, 10, 10, 0]


def test_a_shape_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shapes.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 << 30))
    with pytest.raises(UsageError, match=r"shape 8b takes 3\.8 GiB, and .* has 2\.0 GiB free: .*--shape-dir") as error:
        write_shape("8b", tmp_path / "8b.gguf")
    assert str(error.value).count(". ") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_shape_that_cannot_be_written_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shapes, "_data", full)
    with pytest.raises(OutputError, match=r"tiny\.gguf cannot be written: No space left on device"):
        write_shape("tiny", tmp_path / "tiny.gguf")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written"):
        write_shape("tiny", tmp_path / "file" / "tiny.gguf")


def test_a_shape_of_no_name_and_one_without_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"'9b' is no shape: there are 8b, 27b-hybrid, 35b-a3b, tiny, tiny-hybrid, tiny-moe"
    ):
        write_shape("9b", tmp_path / "x")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match="--shape needs gguf: pip install gguf"):
        write_shape("tiny", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_shape_is_kept_where_asked_for_and_else_removed(tmp_path: Path) -> None:
    with shape_file("tiny", tmp_path / "kept") as path:
        first = path.stat().st_mtime_ns
    with shape_file("tiny", tmp_path / "kept") as again:
        assert again == path
        assert again.stat().st_mtime_ns == first
    with shape_file("tiny", None) as path:
        assert path.is_file()
    assert not path.exists()
    assert not path.parent.exists()


#
# steps
#


def test_near_is_the_step_and_those_after_it() -> None:
    assert near([2, 4, 9], 12, 3) == [2, 3, 4, 5, 6, 7, 9, 10, 11]
    assert near([11], 12, 3) == [11]
    assert near([], 12) == []


def test_steps_are_counted_and_the_loop_stays_within_a_chunk(shape_path: Callable[[str], Path]) -> None:
    options = {**ENGINE, "n_ctx": 2048, "pool": 768, "policy": "qk", "share": 0.0, "tau": 16, "again": 0}
    with KVFlash.from_file(shape_path("tiny"), **options) as kv:
        for _ in kv.prefill(random_tokens(1000)):
            pass
        warnings: list[str] = []
        n_reselect, n_in, at = kv.stats().reselects, kv.stats().pages_in, kv.n_tokens
        steps = decode_steps(kv, 64, warnings)
        assert len(steps.seconds) == 64
        assert min(steps.seconds) > 0
        assert kv.n_tokens == at + 64 + 8
        assert len(steps.reselected) <= kv.stats().reselects - n_reselect <= len(steps.reselected) + 1
        assert len(steps.reselected) >= 3
        assert set(steps.reselected) <= set(steps.moved)
        assert len(steps.moved) >= 4, "a chunk begins every 64 tokens, and takes another's block"
        assert 0 <= steps.pages_in <= kv.stats().pages_in - n_in
        loop = python_loop(kv, rounds=2)
        assert loop is not None
        assert loop["engine_s"] > 0
        assert loop["bare_s"] > 0
        start = kv.n_tokens - 32  # the last round stays
        assert at + 72 <= start
        assert start // 64 == (kv.n_tokens - 1) // 64
        kv.check_integrity()
        kv.decode([1])
        kv.check_integrity()


def test_the_loop_of_a_recurrent_model_is_not_measured(shape_path: Callable[[str], Path]) -> None:
    with KVFlash.from_file(shape_path("tiny-hybrid"), **ENGINE, n_ctx=2048, pool=768, policy="lru") as kv:
        for _ in kv.prefill(random_tokens(100)):
            pass
        assert python_loop(kv, rounds=2) is None


def test_without_write_back_all_is_the_same_but_the_records(shape_path: Callable[[str], Path]) -> None:
    seen = []
    for lossy in (False, True):
        with KVFlash.from_file(shape_path("tiny"), **ENGINE, n_ctx=2048, pool=768, policy="lru") as kv:
            if lossy:
                stop_writing_back(kv)
            for _ in kv.prefill(random_tokens(1500)):
                pass
            for token in (3, 4, 5):
                kv.decode([token])
            kv.check_integrity()
            records = [kv.pager.records.get(c).copy() for c in range(1500 // 64)]
            assert all(not r.any() for r in records) == lossy
            assert all(r.any() for r in records) != lossy
            seen.append((kv.n_tokens, kv.logits(), kv.residency().state, kv.host_bytes))
    for one, other in zip(*seen, strict=True):
        assert np.array_equal(one, other)


#
# tables of speed
#


def make_speed(**changes: Any) -> Speed:
    values: dict[str, Any] = {
        "model": "m",
        "contexts": (1024, 2048),
        "pools": (512,),
        "variants": (Variant.parse("full"), Variant.parse("lru")),
        "steps": 8,
        "common": {"n_threads": 1},
    }
    return Speed(**{**values, **changes})


def point(context: int, steps: list[float], **changes: Any) -> dict[str, Any]:
    return {
        "context": context,
        "error": None,
        "stretch": 1000,
        "stretch_s": 2.0,
        "total": 3000,
        "total_s": 4.0,
        "steps_s": steps,
        "moved": [],
        "reselects": 0,
        "pages_in": 0,
        "kv_device_bytes": 3 << 20,
        "host_bytes": 1 << 30,
        "summary_bytes": 0,
        "device_used": None,
        "device_before": None,
        **changes,
    }


def result(points: list[dict[str, Any]], pool: int | None = None, **changes: Any) -> dict[str, Any]:
    return {"points": points, "n_pool": pool, "loop": None, "warnings": [], "machine": "a machine", **changes}


def fabricated(folder: Path) -> tuple[Speed, Results]:
    """The full cache at 1K, but not at 2K; and a pool at both."""
    speed, results = make_speed(), Results(folder)
    full, lru = speed.caches()
    failure = {"context": 2048, "error": "it takes 9 GiB, and 1 GiB are free"}
    ten = [0.010] * 8
    results.add(speed.key(full), result([point(1024, [*ten[:7], 0.018]), failure]))
    pooled = [
        point(
            1024,
            [0.005, 0.005, 0.006, 0.005, 0.005, 0.005, 0.020, 0.005],
            moved=[0],
            reselects=2,
            pages_in=7,
            device_used=900 << 20,
            device_before=100 << 20,
        ),
        point(2048, [0.004] * 8, stretch=4000, total=12000),
    ]
    results.add(speed.key(lru), result(pooled, 512, loop={"engine_s": 0.0041, "bare_s": 0.0040}))
    return speed, results


def test_rows_have_the_figures_of_the_steps(tmp_path: Path) -> None:
    rows = summarise(*fabricated(tmp_path))
    assert [(r.context, r.cache) for r in rows] == [
        (1024, "full"),
        (1024, "lru 512"),
        (2048, "full"),
        (2048, "lru 512"),
    ]
    full, lru, failed, late = rows
    assert full.decode_rate == pytest.approx(100)
    assert full.decode_mean_rate == pytest.approx(1 / 0.011)
    assert full.worst_ratio == pytest.approx(1.8)
    assert full.worst_moved_ratio is None
    assert (full.decode_x, full.prefill_x) == (1, 1)
    assert (full.prefill_rate, full.prefill_all) == (500, 750)
    assert lru.decode_rate == pytest.approx(200)
    assert lru.decode_x == pytest.approx(2)
    assert lru.step_ms == pytest.approx(5)
    assert lru.step_worst_ms == pytest.approx(20)
    assert lru.step_p99_ms == pytest.approx(1e3 * np.percentile([5e-3] * 6 + [6e-3, 20e-3], 99))
    assert lru.worst_ratio == pytest.approx(4)
    assert lru.worst_moved_ratio == pytest.approx(1.2), "the steps 0 to 3, not the 6th"
    assert lru.device_bytes == 800 << 20
    assert (lru.reselects, lru.pages_in) == (2, 7)
    assert failed.error == "it takes 9 GiB, and 1 GiB are free"
    assert failed.decode_rate is None
    assert late.decode_x is None, "there is nothing to compare it with"
    assert flatness(rows) == {"lru 512": pytest.approx(0.8)}


def test_the_table_says_it_all(tmp_path: Path) -> None:
    speed, results = fabricated(tmp_path)
    text = speed_bench.write(speed, results)
    lines = text.splitlines()
    assert lines[2] == "| 1K | full | 100.0 | 90.9 | 1.00 | 1.80 | - | 500 | 750 | 1.00 | 3.0 | - | 1.00 | 0 | 0 |"
    assert lines[3] == (
        "| 1K | lru 512 | 200.0 | 142.9 | 2.00 | 4.00 | 1.20 | 500 | 750 | 1.00 | 3.0 | 800 | 1.00 | 2 | 7 |"
    )
    assert lines[4] == "| 2K | full: failed |" + " - |" * 13
    assert "\nfull at 2K: it takes 9 GiB, and 1 GiB are free.\n" in text
    assert "\nDecode of lru 512, slowest/fastest over the contexts: 0.800.\n" in text
    assert (
        "Python's part of a step of lru 512 at 2K, against the bare native calls: 100 µs of 4.100 ms (2.50 %)." in text
    )
    assert text.endswith("\na machine: `kvflash bench`\n")
    whole = json.loads((tmp_path / "results.json").read_text())
    assert [r["cache"] for r in whole["rows"]] == ["full", "lru 512"] * 2
    assert whole["flatness"] == {"lru 512": pytest.approx(0.8)}
    with (tmp_path / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(r["decode_rate"] or 0) for r in table] == pytest.approx([100, 200, 0, 250])


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    speed, results = fabricated(tmp_path)
    assert [c.label for c in speed.missing(results)] == ["full"]
    assert make_speed(steps=9).missing(results) == make_speed(steps=9).caches()
    assert make_speed(common={"n_threads": 2}).missing(results), "threads count in a bench of speed"


def test_no_rows_give_a_table_and_a_picture(tmp_path: Path) -> None:
    assert speed_bench.as_markdown(make_speed(), Results(tmp_path)).startswith("| context |")
    rows = summarise(*fabricated(tmp_path))
    for some in (rows, rows[:1], rows[2:3], [Row("full", "full", None, 1024, error="no")]):
        assert speed_figure(some, "title").startswith(b"\x89PNG")


def test_variants_of_speed() -> None:
    lossy = Cache(speed_variant("lru/write_back=0/chunk=32"), 4096)
    assert not lossy.write_back
    assert lossy.variant.options == {"chunk": 32}
    assert lossy.label == "lru/write_back=0/chunk=32 4K"
    assert Cache(speed_variant("lru"), 4096).write_back
    assert Cache(speed_variant("full/type_k=f16"), None).label == "full/type_k=f16"


def test_caches_have_the_full_one_once() -> None:
    speed = make_speed(pools=(256, 512))
    assert [c.label for c in speed.caches()] == ["full", "lru 256", "lru 512"]


#
# measuring speed
#


def test_a_full_cache_that_does_not_fit_is_measured_where_it_does(
    monkeypatch: pytest.MonkeyPatch, shape_path: Callable[[str], Path]
) -> None:
    real = speed_bench.open_variant

    def limited(path: Path, variant: Variant, n_ctx: int, *rest: Any) -> KVFlash:
        if n_ctx > 1024:
            msg = f"{n_ctx} tokens do not fit"
            raise NativeError(msg)
        return real(path, variant, n_ctx, *rest)

    monkeypatch.setattr(speed_bench, "open_variant", limited)
    speed = make_speed(contexts=(256, 512, 2048, 4096), common=ENGINE)
    found = speed_bench.measure(speed, speed.caches()[0], shape_path("tiny"), ignore)
    assert [(p["context"], bool(p["error"])) for p in found["points"]] == [
        (256, False), (512, False), (2048, True), (4096, True),
    ]  # fmt: skip
    assert found["points"][2]["error"] == f"{2048 + 8 + 8 + 128} tokens do not fit"
    assert found["points"][1]["stretch"] == 512 - 256 - 8 - 8
    assert found["points"][1]["total"] == 256 + 512 - 256 - 8 - 8


def test_memory_that_runs_out_on_the_way_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, shape_path: Callable[[str], Path]
) -> None:
    real = speed_bench.decode_steps

    def limited(kv: KVFlash, *rest: Any) -> Any:
        if kv.n_tokens >= 1024:
            msg = "no host memory"
            raise HostMemoryError(msg)
        return real(kv, *rest)

    monkeypatch.setattr(speed_bench, "decode_steps", limited)
    speed = make_speed(contexts=(512, 1024, 2048), common={**ENGINE, "chunk": 16})
    found = speed_bench.measure(speed, speed.caches()[1], shape_path("tiny"), ignore)
    assert [p["error"] for p in found["points"]] == [None, "no host memory", "no host memory"]
    assert found["loop"] is None
    assert found["n_pool"] == 512


def test_a_pool_that_is_raised_to_the_context_is_refused(shape_path: Callable[[str], Path]) -> None:
    speed = make_speed(contexts=(300, 600), common={**ENGINE, "n_batch": 512})
    with pytest.raises(UsageError, match="lru 512 is no pool: a pool of 1024 tokens covers the context of 744"):
        speed_bench.measure(speed, speed.caches()[1], shape_path("tiny"), ignore)


#
# paging
#


def view(touched: list[int], room: int, outsiders: int = 1) -> View:
    candidates = np.ones(len(touched), np.bool_)
    candidates[:outsiders] = False  # a sink
    return View(tokens=random_tokens(4), chunk=64, touched=np.array(touched), candidates=candidates, room=room)


def test_swap_wants_what_was_out_longest_and_keeps_what_came_last() -> None:
    swap = Swap(2)
    states = np.array([State.RESIDENT] * 4 + [State.OUT] * 4 + [State.RESIDENT], np.int8)
    swap.state = lambda: states
    scores = swap.score(view([0, 5, 9, 7, 1, 4, 3, 2, 8], room=4))
    assert scores.tolist() == [0, 0, 1, 0, 2, 0, 0, 2, 1]
    assert not swap.score(view([0, 5, 9, 7, 1, 4, 3, 2, 8], room=0)).any()
    swap.n = 9
    assert np.count_nonzero(swap.score(view([0, 5, 9, 7, 1, 4, 3, 2, 8], room=3)) == 2) == 3
    assert np.count_nonzero(swap.score(view([0, 5, 9, 7, 1, 4, 3, 2, 8], room=20))) == 8


def test_swap_moves_just_so_many_chunks_each_time(shape_path: Callable[[str], Path]) -> None:
    plan = Paging(1024, 1, 3, 16, 160, ENGINE)
    swap = Swap(3)
    with KVFlash.from_file(shape_path("tiny"), **plan.engine(swap)) as kv:
        swap.state = lambda: kv.pager.ledger.state
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


def test_the_worst_step_near_a_reselect_is_within_four_steps_after_it() -> None:
    swapped, bare = made_up().streams
    assert (swapped.step_ms, swapped.worst_ms, swapped.worst_near_ms) == (4.0, 8.0, 4.4)
    assert bare.worst_near_ms is None


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
    assert lru["kv_device_bytes"] * (1024 + 256) == full["kv_device_bytes"] * 512, "1,024 tokens, and the steps"
    assert full["host_bytes"] == 0 < lru["host_bytes"]
    assert lru["reselects"] == 0 < qk["reselects"]
    assert lru["pages_in"] == 0
    for row in whole["rows"]:
        assert row["error"] is None
        assert row["decode_rate"] > 0
        assert row["step_ms"] <= row["step_p99_ms"] <= row["step_worst_ms"]
        assert row["worst_ratio"] >= (row["worst_moved_ratio"] or 1) > 0
        assert row["device_bytes"] is None or row["device_bytes"] >= 0
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
            "there is nothing to measure: give a model, or --shape with one of 8b, 27b-hybrid, 35b-a3b, tiny, tiny-hybrid, tiny-moe",
        ),
        (("a.gguf", "--shape", "tiny"), "both a.gguf and --shape tiny are given: give one"),
        (("-m", "a.gguf", "--shape", "tiny"), "both a.gguf and --shape tiny are given: give one"),
        (("a.gguf", "-m", "b.gguf"), "two models are given"),
        (("no/such.gguf",), "no/such.gguf does not exist"),
        (("--shape", "9b"), "'9b' is not one of"),
        (("--shape", "tiny", "-t", "0"), "n_threads (-t/--threads) is 0"),
        (("--shape", "tiny", "-ctk", "q9_0"), "'q9_0' is not one of"),
    ],
)
@pytest.mark.parametrize("command", ["speed", "paging"])
def test_what_is_no_model_is_one_sentence(command: str, args: tuple[str, ...], says: str) -> None:
    assert says in refused(command, *args)
    assert not list(Path().glob("kvflash-*/results.*"))


@pytest.mark.parametrize(
    ("command", "args", "says"),
    [
        ("speed", ("--pools", "1K"), "a pool of 1024 tokens covers the longest context of 1024"),
        ("speed", ("--contexts", "1000,1K"), "contexts 1000 and 1024 are too close: 24 steps (--steps)"),
        ("speed", ("--contexts", "many"), "'many' is no number of tokens"),
        ("speed", ("--pools", "0"), "'0' has a number below 1"),
        ("speed", ("--steps", "7"), "7 is not in the range"),
        ("speed", ("--variants", "full,best"), "'best' in 'best' is no policy"),
        ("speed", ("--variants", "oracle"), "the oracle has no speed to measure"),
        ("speed", ("--variants", "qk/write_back=0"), "only lru can go without, as lru/write_back=0"),
        ("speed", ("--variants", "lru/write_back=1"), "'write_back=1' in 'lru/write_back=1' is no option"),
        ("speed", ("-b", "-1"), "n_batch (-b/--batch-size) is -1"),
        ("paging", ("--pool", "512"), "a pool of 512 tokens (--pool) is too small to page: give at least 768"),
        ("paging", ("--reselect", "16"), "16 chunks cannot be swapped (--reselect) in a pool of 768 tokens: at most 6"),
        ("paging", ("--steps", "32"), "32 steps (--steps) are too few to see a reselect every 16 tokens (--tau)"),
        ("paging", ("--tau", "0"), "0 is not in the range"),
        ("paging", ("--repeat", "0"), "0 is not in the range"),
        ("paging", ("-b", "512"), "is too small to page: give at least 1024"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(command: str, args: tuple[str, ...], says: str) -> None:
    usual = SMALL if command == "speed" else PAGING
    assert says in refused(command, *usual, *args)
    assert not list(Path().glob("kvflash-*/results.*"))


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for command, args in (("speed", SMALL), ("paging", PAGING)):
        assert "cannot be used for the results" in refused(command, *args, "-o", str(tmp_path / "file"), code=1)


def test_a_shape_is_meant_instead_of_the_environments_model(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", "no/such.gguf")
    assert "no/such.gguf does not exist" in refused("speed")
    args = (*SMALL, "--contexts", "256", "--steps", "8", "--variants", "full", "--shape-dir", str(kept))
    good("speed", *args)


@pytest.mark.parametrize("name", ["speed", "paging"])
def test_help_shows_commands_that_can_be_typed(name: str) -> None:
    shown, command = type_examples(name)
    assert len(shown) >= 3
    assert [p.name for p in command.params if isinstance(p, click.Option) and not p.help] == []


def test_the_group_lists_them() -> None:
    text = good("--help").stdout
    assert "Decode and prefill speed against the context." in text
    assert "Bandwidth of paging" in text
