"""Benchmarks of speed: models of real shapes, steps, and the figures of tables. Never the speed itself."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import speeds
from benches import ignore
from speeds import ENGINE, random_tokens
from support import changes
from support.changes import BENCHES
from support.oracles import ON_CPU

from kvflash_bench import shape_tensors, shapes
from kvflash_bench import speed as speed_bench
from kvflash_bench.curves import speed_figure
from kvflash_bench.grid import Results, Variant
from kvflash_bench.shapes import SHAPES, shape_file, write_shape
from kvflash_bench.speed import Cache, Row, Speed, flatness, speed_variant, stop_writing_back, summarise
from kvflash_bench.steps import decode_steps, python_loop
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import HostMemoryError, NativeError, OutputError, UsageError
from pyllama_kvflash.events import Done, Token
from pyllama_kvflash.native import ALL, Context, Model, Sampling
from pyllama_kvflash.native.guests import Guests
from pyllama_kvflash.options import Spec

pytestmark = pytest.mark.native

environment = speeds.environment
kept = speeds.kept


@pytest.fixture(scope="module")
def shape_path(kept: Path) -> Callable[[str], Path]:
    """The file of a shape, which the first one to ask for it writes."""

    def path(name: str) -> Path:
        with shape_file(name, kept) as res:
            return res

    return path


MORE = 64 << 20  # bytes that a GPU takes for codes, more than those of a small shape


#
# shapes
#


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("tiny", "llama_kv_cache"),
        ("tiny-hybrid", "llama_memory_hybrid"),
        ("tiny-mtp", "llama_memory_hybrid"),
        ("tiny-moe", "llama_memory_hybrid"),
        ("tiny-gemma4", "llama_kv_cache_iswa"),
        ("tiny-laguna", "llama_kv_cache_iswa"),
    ],
)
def test_a_shape_has_the_geometry_asked_for_and_decodes(
    name: str, memory: str, shape_path: Callable[[str], Path]
) -> None:
    shape = SHAPES[name]
    assert shape.n_bytes - shape_tensors.HEADER <= shape_path(name).stat().st_size <= shape.n_bytes
    with Model.load(shape_path(name)) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        assert (model.n_layer, model.n_vocab, model.n_ctx_train) == (shape.n_layer, shape.n_vocab, shape_tensors.N_CTX)
        assert ctx.memory_class == memory
        assert [layer.il for layer in ctx.layers()] == [
            i for i in range(shape.n_layer) if (i + (name != "tiny-laguna")) % shape.interval == 0
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


@pytest.mark.sampled(BENCHES, changes.ENGINE)
@pytest.mark.parametrize("pool", ["off", 512])
@pytest.mark.parametrize("name", ["tiny-gemma4", "tiny-laguna", "tiny-mtp", "tiny-moe-mtp"])
def test_windows_and_heads_run_with_the_full_cache_and_with_a_pool(
    monkeypatch: pytest.MonkeyPatch, name: str, pool: int | str, shape_path: Callable[[str], Path]
) -> None:
    """The heads draft; their weights are random, so that their guesses say nothing."""
    monkeypatch.setitem(SHAPES, "tiny-moe-mtp", replace(SHAPES["tiny-moe"], n_mtp=1))
    monkeypatch.setattr(Model, "is_eog", lambda *_: False)
    monkeypatch.setattr(Model, "piece", lambda *_, **__: b"")
    options: dict[str, Any] = {"n_ctx": 4096, "n_threads": 1, "n_batch": 256, "policy": "lru", "pool": pool}
    if name.endswith("mtp"):
        options["spec"] = Spec(kind="mtp", n_max=2, gate=0)
    with KVFlash.from_file(shape_path(name), **options) as kv:
        *events, done = kv.generate(random_tokens(1500), max_tokens=8, sampling=Sampling(temperature=0))
        if kv.n_pool:
            kv.check_integrity()
    assert sum(isinstance(e, Token) for e in events) == 8
    assert isinstance(done, Done)
    assert (done.stats.drafted > 0) == ("spec" in options)
    assert (done.stats.chunks > done.stats.resident) == (pool != "off")


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
    assert shapes.keys(SHAPES["27b-hybrid"])["rope.dimension_sections"] == [12, 10, 10, 0]


@pytest.mark.parametrize(("name", "n_params"), [("27b-mtp", 25.1e9), ("26b-a4b", 24.7e9), ("laguna", 33.2e9)])
def test_the_large_shapes_with_windows_and_heads_are_those_of_the_real_models(name: str, n_params: float) -> None:
    """But for their vocabularies."""
    listed, keys = list(shapes.tensors(SHAPES[name])), shapes.keys(SHAPES[name])
    assert sum(int(np.prod(t.shape)) for t in listed) == pytest.approx(n_params, rel=0.005)
    dims = {t.name: t.shape for t in listed}
    if name == "27b-mtp":
        assert (keys["block_count"], keys["nextn_predict_layers"]) == (65, 1)
        assert dims["blk.64.nextn.eh_proj.weight"] == (2 * 5120, 5120)
        assert dims["blk.64.attn_q.weight"] == dims["blk.63.attn_q.weight"]
        return
    full, head_dims, n_kv, n_q = {
        "26b-a4b": (range(5, 30, 6), (256, 512), (8, 2), (16, 16)),
        "laguna": (range(0, 40, 4), (128, 128), (8, 8), (64, 48)),
    }[name]
    for il, in_window in enumerate(keys["attention.sliding_window_pattern"]):
        assert in_window == (il not in full)
        kind = 0 if in_window else 1
        assert dims[f"blk.{il}.attn_k.weight"][1] == n_kv[kind] * head_dims[kind]
        assert dims[f"blk.{il}.attn_q.weight"][1] == n_q[kind] * head_dims[kind]
        assert (f"blk.{il}.attn_v.weight" in dims) == (in_window or name == "laguna")


def test_a_shape_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shapes.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 << 30))
    with pytest.raises(UsageError, match=r"shape 8b takes 3\.8 GiB, and .* has 2\.0 GiB free: .*`shape_dir`") as error:
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


def test_a_shape_of_no_name(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"'9b' is not a shape: there are 8b, 70b, 27b-hybrid, 27b-mtp, 35b-a3b, 26b-a4b, laguna, tiny, .*, tiny-laguna",
    ):
        write_shape("9b", tmp_path / "x")
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
        options = {**ENGINE, "n_ctx": 2048, "pool": 768, "policy": "lru", "prefill": "pool"}
        with KVFlash.from_file(shape_path("tiny"), **options) as kv:
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
            seen.append((kv.n_tokens, kv.logits(), kv.residency().resident, kv.host_bytes))
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
        "pool_bytes": 1 << 20,
        "coarse_bytes": 0,
        "pane_bytes": 2 << 20,
        "kv_most_bytes": 4 << 20,
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
    memory = "3.0 | 1.0 + 0.0 + 2.0 | 4.0"
    assert lines[2] == (
        f"| 1K | full | 100.0 | 90.9 | 1.00 | 10.00 | 1.80 | - | 500 | 750 | 1.00 | {memory} | - | 1.00 | 0 | 0 |"
    )
    assert lines[3] == (
        f"| 1K | lru 512 | 200.0 | 142.9 | 2.00 | 5.00 | 4.00 | 1.20 | 500 | 750 | 1.00 | {memory} | 800 | 1.00 | 2 | 7 |"
    )
    assert lines[4] == "| 2K | full: failed |" + " - |" * 16
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


def test_pools_stand_beside_lru(tmp_path: Path) -> None:
    """Those of the same size, at contexts that both were measured at."""
    speed, results = make_speed(variants=tuple(map(speed_variant, ("full", "lru", "fresh")))), Results(tmp_path)
    full, lru, fresh = speed.caches()
    failure = {"context": 2048, "error": "no"}
    results.add(speed.key(full), result([point(1024, [0.020] * 8), failure]))
    results.add(speed.key(lru), result([point(1024, [0.010] * 8), point(2048, [0.010] * 8)], 512))
    results.add(speed.key(fresh), result([point(1024, [0.0125] * 8, total_s=5.0), failure], 512))
    found = list(speed_bench.beside_lru(summarise(speed, results)))
    assert found == ["Decode of fresh 512, of lru's: 0.80 at 1K.", "Prefill of fresh 512, of lru's: 0.80 at 1K."]
    assert all(line in speed_bench.as_markdown(speed, results) for line in found)


@pytest.mark.nightly(BENCHES, changes.ENGINE)
def test_codes_count(monkeypatch: pytest.MonkeyPatch, shape_path: Callable[[str], Path]) -> None:
    """Beside the pool and the panes, while decoding and at most; on a GPU with what attending to them takes."""
    speed = make_speed(
        variants=(speed_variant("fresh"),), contexts=(512, 1024, 2048), common={**ENGINE, "chunk": 16, **ON_CPU}
    )
    plain = speed_bench.measure(speed, speed.caches()[0], shape_path("tiny"), ignore)["points"][-1]
    assert plain["coarse_bytes"] > 0
    all_of_it = plain["pool_bytes"] + plain["coarse_bytes"] + plain["pane_bytes"]
    assert plain["kv_device_bytes"] == plain["kv_most_bytes"] == all_of_it
    info = Guests.info
    monkeypatch.setattr(Guests, "info", lambda its: replace(info(its), device_bytes=MORE, bytes=0))
    found = speed_bench.measure(speed, speed.caches()[0], shape_path("tiny"), ignore)["points"][-1]
    assert found["coarse_bytes"] == MORE
    assert found["kv_device_bytes"] == found["kv_most_bytes"] == all_of_it - plain["coarse_bytes"] + MORE


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
    assert lossy.variant.options == {"chunk": 32, "prefill": "pool"}, "an exact pass reads what was written"
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
    with pytest.raises(UsageError, match="lru 512 is not a pool: a pool of 1,024 tokens covers the context of 744"):
        speed_bench.measure(speed, speed.caches()[1], shape_path("tiny"), ignore)
