"""The memory of policy fresh's index where layers choose on a GPU: what is kept free for it, and where it is shown.

No GPU is needed: test_fresh.py holds the formula against what the kernels take, and figures are held against a native library
that says it took some.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.commands import POOLED, good, summary
from support.oracles import ONE_GPU
from support.runs import BY_SIXTEEN, HOST, TOKENS, Open

from pyllama_kvflash import KVFlash
from pyllama_kvflash.bench.control import device_bytes
from pyllama_kvflash.bench.device import device_kv
from pyllama_kvflash.bench.grid import Variant
from pyllama_kvflash.cli.report import banner, closing_line, stats_table
from pyllama_kvflash.engine import memory, placement
from pyllama_kvflash.engine.loading import probe
from pyllama_kvflash.engine.planning import needs
from pyllama_kvflash.events import Prefill
from pyllama_kvflash.native import Context, Device, Model, devices, guests
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.policy.fresh import GpuChoice, Heads, IndexForm
from pyllama_kvflash.policy.sizing import RESERVE
from pyllama_kvflash.serve.metrics import Metrics

pytestmark = pytest.mark.native

environment = commands.environment
long_file = commands.long_file

MIB = 1 << 20
SMALL = {**BY_SIXTEEN, "pool": 512, "policy": "fresh"}

#
# the formula
#

LLAMA_8B = Heads(32, 8, 128), 36  # of each layer, and layers


def test_what_is_kept_free_follows_the_shape() -> None:
    """The 8B shape at 128K: 576 MiB of codes (1 bit a value), and scratch; and the layer that needs the most decides of that."""
    heads, n_layer = LLAMA_8B
    choice = GpuChoice(IndexForm.of(128), (heads,) * n_layer, 128 << 10, 1, 4096, 64)
    whole = choice.n_bytes(range(n_layer))
    assert choice.form.n_bytes(heads, 128 << 10) * n_layer > 576 * MIB  # 128 bytes a position and layer
    assert 600 * MIB < whole < 680 * MIB
    wide = replace(choice, heads=(Heads(64, 16, 128), *choice.heads[1:]))
    one = wide.n_bytes([]) - choice.n_bytes([])
    assert one > 2 * MIB
    assert wide.n_bytes([5]) - wide.n_bytes([]) == choice.n_bytes([5]) - choice.n_bytes([])


#
# sizing
#


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Take the first device, here maybe the CPU, for a GPU with so much free memory, beside others; the cache is on it."""
    here = devices()

    def pretend(*free: int) -> None:
        found = [Device(f"CUDA{i}", "a device", gpu=True, free=n, total=n) for i, n in enumerate(free)]
        found += here[len(found) :]  # layers may also be there
        monkeypatch.setattr(memory, "devices", lambda: found)

    return pretend


def choice_of(path: Path, n_ctx: int, n_pool: int, **changes: Any) -> int:
    """What the first device takes with all layers there."""
    with Model.load(path, **ONE_GPU, no_alloc=True) as model, Context(model, n_ctx=512, n_batch=64, n_ubatch=64) as ctx:
        heads = tuple(map(Heads.of, ctx.layers()))
    form = IndexForm.of(min(h.n_embd for h in heads), changes.pop("index", 0))
    values: dict[str, Any] = {"n_seq": 1, "chunk": 64, **changes}
    return GpuChoice(form, heads, n_ctx, values["n_seq"], n_pool, values["chunk"]).n_bytes(range(len(heads)))


@pytest.mark.parametrize(
    "changes", [{}, {"index": 4}, {"n_parallel": 3}, {"chunk": 16}, {"n_ctx": 4000}, {"policy": "fresh"}], ids=str
)
@pytest.mark.parametrize("name", ["qwen3", "gemma4", "qwen35"])
def test_a_plan_says_what_the_index_takes(
    tiny_path: Callable[[str], Path], gpus: Callable[..., None], name: str, changes: dict[str, Any]
) -> None:
    gpus(8 << 30)
    options = {"n_ctx": 4096, "pool": 1024, "n_threads": 1, **ONE_GPU, **changes}
    (need, *others), size = needs(tiny_path(name), Options(coarse="off", **options))
    shape = {"n_seq" if key == "n_parallel" else key: n for key, n in changes.items() if key not in ("n_ctx", "policy")}
    assert size.n_pool is not None
    assert need.index == choice_of(tiny_path(name), 4096, size.n_pool, **shape) > 0
    assert need.total == sum(need.parts.values())
    assert not any(other.index for other in others)


@pytest.mark.parametrize("options", [{"policy": "lru"}, {"policy": "qk"}, {"pool": "off"}, {"pool": 8192}], ids=str)
def test_nothing_is_kept_free_where_no_layer_chooses(
    tiny_path: Callable[[str], Path], gpus: Callable[..., None], options: dict[str, Any]
) -> None:
    gpus(8 << 30)
    found, _ = needs(
        tiny_path("qwen3"), Options(coarse="off", **{"n_ctx": 4096, "pool": 1024, "n_threads": 1, **ONE_GPU, **options})
    )
    assert not any(need.index for need in found)


@HOST
def test_nothing_of_a_pool_is_kept_free_on_the_host(tiny_path: Callable[[str], Path]) -> None:
    (need,), _ = needs(tiny_path("qwen3"), Options(coarse="off", n_ctx=4096, pool=1024, n_threads=1))
    assert not need.gpu
    geometry = Geometry(((128, 128),) * 2, (0, 0), (Heads(4, 2, 64),) * 2)
    assert memory.device_memory(geometry, Options(coarse="off", n_ctx=4096, policy="fresh"))[0].index == 0


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_no_more_is_taken_than_is_planned(tiny_path: Callable[[str], Path], name: str) -> None:
    """Wherever layers choose here: on a GPU little less once the index has the whole context, and on the CPU nothing."""
    options = {"n_ctx": 4096, "pool": 1024, "n_threads": 1, "policy": "fresh"}
    planned = sum(need.index for need in needs(tiny_path(name), Options(coarse="off", **options))[0] if need.gpu)
    with KVFlash.from_file(tiny_path(name), **options) as kv:
        assert kv.stats().index_device_bytes <= planned
        for _ in kv.prefill(TOKENS[:4000]):
            pass
        assert 0.9 * planned <= kv.stats().index_device_bytes <= planned


def test_each_gpu_keeps_free_what_its_layers_take(gpus: Callable[..., None]) -> None:
    """The scratch is on each, the codes of a layer are where it is; and a GPU without layers has nothing."""
    gpus(1 << 30, 2 << 30, 3 << 30)
    heads = (Heads(4, 2, 64), Heads(4, 2, 64), Heads(8, 4, 64))
    geometry = Geometry(((128, 128), (128, 128), (256, 256)), (0, 2, 2), heads)
    choice = GpuChoice(IndexForm.of(64), heads, 4096, 1, 16_384, 64)
    found = memory.device_memory(geometry, Options(coarse="off", n_ctx=4096, policy="fresh"))
    assert [(d.name, d.index) for d in found] == [("CUDA0", choice.n_bytes([0])), ("CUDA2", choice.n_bytes([1, 2]))]
    fixed = memory.index_bytes(geometry, Options(coarse="off", n_ctx=4096, policy="fresh", pool=1024))
    assert fixed == {i: replace(choice, n_pool=1024).n_bytes(here) for i, here in ((0, [0]), (2, [1, 2]))}


@pytest.mark.parametrize("policy", ["fresh", "lru"])
def test_codes_are_kept_free_with_what_choosing_takes(gpus: Callable[..., None], policy: str) -> None:
    gpus(8 << 30)
    heads = (Heads(4, 2, 64, 64),) * 2
    geometry = Geometry(((128, 128),) * 2, (0, 0), heads)
    options = Options(n_ctx=4096, pool=1024, policy=policy, coarse="4,2")
    codes = sum(CoarseForm(4, 2).n_bytes(h, 4096) for h in heads)
    fixed = GpuChoice(None, heads, 4096, 1, 1024, 64).n_bytes([0, 1])
    assert memory.device_memory(geometry, options)[0].index == codes + fixed
    assert memory.coarse_bytes(geometry, options) == {0: codes}
    assert memory.index_bytes(geometry, options) == {0: fixed}


@pytest.mark.parametrize("policy", ["auto", "fresh", "lru"])
def test_an_automatic_pool_leaves_room_for_the_index(
    tiny_path: Callable[[str], Path], gpus: Callable[..., None], policy: str
) -> None:
    """As planned, so made: it and the index fit twice into what is free, but for the reserve."""
    path, options = (
        tiny_path("qwen3"),
        {"n_ctx": 16_384, "n_threads": 1, "policy": policy, "prefill": "pool", **ONE_GPU},
    )
    token_bytes = next(iter(needs(path, Options(coarse="off", **options, pool=1024))[0])).kv // 1024
    index = choice_of(path, 16_384, 16_384) if policy != "lru" else 0
    free = RESERVE + index + 2 * 2048 * token_bytes
    gpus(free)
    with KVFlash.from_file(path, **options) as kv:
        assert kv.n_pool == 2048
        said = (
            f" - 512 MiB reserve - {index / MIB:.0f} MiB for codes or fresh's index) / "
            if index
            else " - 512 MiB reserve) / "
        )
        assert said in kv.notes[0]
    gpus(free - 1)
    with KVFlash.from_file(path, **options) as kv:
        assert kv.n_pool == 2048 - 256


@pytest.mark.parametrize("policy", ["fresh", "lru"])
def test_experts_leave_room_for_the_index(
    tiny_path: Callable[[str], Path], gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    gpus(8 << 30)
    monkeypatch.setattr(placement, "devices", memory.devices)
    path, options = (
        tiny_path("qwen3moe"),
        Options(coarse="off", n_ctx=4096, pool=1024, n_threads=1, policy=policy, **ONE_GPU),
    )
    with Model.load(path, **ONE_GPU, no_alloc=True) as model:
        held, *_ = placement.holdings(model, probe(model, options).geometry, options)
    assert held.index == held.parts(0, 1024).get("index of fresh", 0)
    assert held.index == (choice_of(path, 4096, 1024) if policy == "fresh" else 0)
    assert held.need(0, 1024) == replace(held, index=0).need(0, 1024) + held.index


@HOST
def test_inspect_says_whose_memory_the_index_takes(gpus: Callable[..., None]) -> None:
    args = ("inspect", "-c", "32K", "--kvflash", "2K")
    host = json.loads(good(*args, "--json").stdout)
    assert host["index_device_bytes"] == 0
    gpus(24 << 30)
    found, text = json.loads(good(*args, "--json").stdout), " ".join(good(*args).stdout.split())
    size, there = found["index_bytes"], found["index_device_bytes"]
    assert size == host["index_bytes"] < there < found["devices"][0]["index"], (
        "of an automatic pool, which may be larger"
    )
    assert (
        f" {size / MIB:.1f} MiB of device memory for the context (6.5 % of its f16 cache), {there / MIB:.1f} MiB with"
        in text
    )
    need = found["memory"][0]
    assert need["index"] == there
    assert f" + {need['index'] / MIB:.1f} MiB index of fresh + " in text
    assert "MiB index of fresh" not in good(*args, "--kvflash-policy", "lru").stdout
    other = json.loads(good(*args, "--kvflash-policy", "lru", "--json").stdout)
    assert (other["index_device_bytes"], other["devices"][0]["index"]) == (there, 0)


#
# figures
#

TAKEN = 3 * MIB + 4096


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library say that the index is a GPU's."""
    info = guests.Guests.info
    monkeypatch.setattr(guests.Guests, "info", lambda self: replace(info(self), device_bytes=TAKEN))


@pytest.mark.usefixtures("on_device")
def test_the_device_holds_pool_index_and_panes(opened: Open) -> None:
    kv = opened(**SMALL)
    events = list(kv.prefill(TOKENS[:1500]))
    stats, held = kv.stats(), kv.ctx.kv_bytes().attn
    assert (stats.kv_device_bytes, stats.index_device_bytes) == (held, TAKEN)
    assert stats.pane_bytes > 0
    assert stats.device_kv_bytes == kv.resident_bytes == held + TAKEN + stats.pane_bytes
    assert {e.resident_bytes for e in events if isinstance(e, Prefill)} == {kv.resident_bytes}
    assert (stats.index_memory, stats.index_host_bytes) == ("device", 0)
    assert stats.index_bytes > 0
    now = device_kv(kv)
    assert (now.pool, now.index, now.panes, now.total) == (held, TAKEN, stats.pane_bytes, kv.resident_bytes)


@HOST
def test_the_host_holds_the_index_elsewhere(opened: Open) -> None:
    kv = opened(**SMALL)
    for _ in kv.prefill(TOKENS[:1500]):
        pass
    stats = kv.stats()
    assert (stats.index_memory, stats.index_host_bytes, stats.index_device_bytes) == ("host", stats.index_bytes, 0)
    assert stats.device_kv_bytes == kv.resident_bytes == stats.kv_device_bytes + stats.pane_bytes


@pytest.mark.usefixtures("on_device")
def test_text_says_that_the_index_is_the_devices(opened: Open) -> None:
    kv = opened(**SMALL)
    for _ in kv.prefill(TOKENS[:1500]):
        pass
    stats = replace(kv.stats(), gpu_bytes=1 << 30)
    line = closing_line(stats, "length")
    assert any(" of device memory at the full context, " in said for said in banner(kv))
    share = 100 * stats.device_kv_bytes / stats.kv_full_bytes
    assert f" MiB + 3.0 MiB of index + {stats.pane_bytes / MIB:.1f} MiB to read prompts, full cache" in line
    assert f" ({share:.1f} %)" in line
    assert line.count("of index") == 1
    table = stats_table(stats)
    cells = dict(zip(*(column._cells for column in table.columns), strict=True))
    size = f"{stats.index_bytes:,} bytes ({stats.index_bytes / MIB:.1f} MiB)"
    assert cells["index"] == f"{size} of device memory; 3.0 MiB with those of other sequences, and what choosing takes"
    other = opened(**{**SMALL, "policy": "lru"})
    assert other.stats().index_device_bytes == 0
    assert "of index" not in closing_line(other.stats(), "length")


@pytest.mark.usefixtures("on_device")
def test_a_run_and_a_servers_metrics_count_it(opened: Open, long_file: Path) -> None:
    """Once, though it is of all sequences."""
    stats = summary("-f", str(long_file), *POOLED, "--kvflash-policy", "fresh", "-n", "4")["stats"]
    assert stats["index_device_bytes"] == TAKEN
    kv = opened(**{**SMALL, "pool": 1024, "n_parallel": 2})
    metrics = Metrics()
    metrics.look(kv.sequences, busy=0, queue=0)
    assert metrics.figures.index_device_bytes == TAKEN
    assert metrics.figures.kv_device_bytes == kv.ctx.kv_bytes().attn + TAKEN + kv.stats().pane_bytes
    assert f"kvflash_index_device_bytes {TAKEN}" in metrics.text()


@pytest.mark.usefixtures("on_device")
def test_a_control_has_the_index_of_its_context(opened: Open) -> None:
    """Of its pool only the part counts through which the prompt is read."""
    kv = opened(**{**SMALL, "pool": 4096, "snapshots": True, "prefill": "pool"})
    pool = kv.ctx.kv_bytes().attn
    control = Variant.parse("fresh/answer=full")
    assert device_bytes(kv, control, 1024) == pool // 4 + TAKEN
    assert device_bytes(kv, Variant.parse("fresh"), 1024) == kv.resident_bytes == pool + TAKEN
