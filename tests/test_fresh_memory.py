"""The memory of codes on a GPU, with what attending to them and choosing by them takes: what is kept free, and where it is shown.

No GPU is needed: test_coarse_gpu.py holds the formula against what the kernels take, and figures are held against a native
library that says it took some.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import ENGINE, crossed
from support.oracles import ONE_GPU
from support.runs import BY_SIXTEEN, TOKENS, Open

from kvflash_bench.device import device_kv
from pyllama_kvflash import KVFlash
from pyllama_kvflash.events import Prefill
from pyllama_kvflash.loading import memory
from pyllama_kvflash.loading.planning import planned
from pyllama_kvflash.native import Context, Device, Model, choice_bytes, codes_bytes, devices, guests
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.policy.device import RESERVE
from pyllama_kvflash.policy.fresh import Heads

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

environment = commands.environment

MIB = 1 << 20
SMALL: dict[str, Any] = {**BY_SIXTEEN, "pool": 512, "policy": "fresh", "coarse": "4"}

#
# the formula
#

LLAMA_8B = Heads(32, 8, 128, 128), 36  # of each layer, and layers


def test_what_is_kept_free_follows_the_shape() -> None:
    """The 8B shape at 128K: shares of 8 tokens' attention and partial sums, 24 MiB, prepared queries, 2 MiB, and tables; and the
    layer that needs the most decides.
    """
    heads, n_layer = LLAMA_8B
    shape = 128 << 10, 1, 4096, 64
    choice = choice_bytes((heads,) * n_layer, *shape)
    assert 26 * MIB < choice < 30 * MIB
    assert choice_bytes((heads,), *shape) > choice - 2 * MIB
    wide = Heads(64, 16, 128, 128)
    one, all_ = (choice_bytes((wide,) * n + (heads,) * (n_layer - n), *shape) for n in (1, n_layer))
    assert one == all_ > 1.9 * choice


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


def codes_of(path: Path, n_ctx: int, n_pool: int, **changes: Any) -> int:
    """What the first device takes with all layers there."""
    with Model.load(path, **ONE_GPU, no_alloc=True) as model, Context(model, n_ctx=512, n_batch=64, n_ubatch=64) as ctx:
        heads = tuple(map(Heads.of, ctx.layers()))
    made: dict[str, Any] = {"coarse": "4", "n_seq": 1, "chunk": 64, **changes}
    form = CoarseForm.of(made["coarse"])
    assert form
    n_cells = -(-n_ctx // 256) * 256
    codes = sum(codes_bytes(h, form, n_cells, on_gpu=True) for h in heads)
    n_seq: int = made["n_seq"]
    return n_seq * codes + choice_bytes(heads, n_cells, n_seq, n_pool, made["chunk"])


@pytest.mark.parametrize(
    ("name", "changes"),
    crossed(
        ["qwen3", "gemma4", "qwen35"],
        [{}, {"coarse": "4,2"}, {"coarse": "2"}, {"n_parallel": 3}, {"chunk": 16}, {"n_ctx": 4000}, {"policy": "lru"}],
    ),
)
def test_a_plan_says_what_codes_take(
    tiny_path: Callable[[str], Path], gpus: Callable[..., None], name: str, changes: dict[str, Any]
) -> None:
    gpus(8 << 30)
    options = {"coarse": "4", "n_ctx": 4096, "pool": 1024, "n_threads": 1, **ONE_GPU, **changes}
    plan = planned(tiny_path(name), Options(**options))
    (need, *others), size = plan.memory, plan.size
    shape = {"n_seq" if key == "n_parallel" else key: n for key, n in changes.items() if key not in ("n_ctx", "policy")}
    assert size.n_pool is not None
    assert need.coarse == codes_of(tiny_path(name), options["n_ctx"], size.n_pool, **shape) > 0
    assert need.total == sum(need.parts.values())
    assert not any(other.coarse for other in others)


@pytest.mark.parametrize(("name", "policy"), [("qwen3", "lru"), ("gemma4", "fresh")])
def test_no_more_is_taken_than_is_planned(tiny_path: Callable[[str], Path], name: str, policy: str) -> None:
    """Wherever codes are here: little less once nearly the whole context has some."""
    options: dict[str, Any] = {"n_ctx": 4096, "pool": 1024, "n_threads": 1, "policy": policy, "coarse": "4"}
    most = sum(need.coarse for need in planned(tiny_path(name), Options(**options)).memory)
    with KVFlash.from_file(tiny_path(name), **options) as kv:
        assert kv.stats().coarse_bytes <= most
        for _ in kv.prefill(TOKENS[:4000]):
            pass
        assert 0.9 * most <= kv.stats().coarse_bytes <= most


@pytest.mark.parametrize("policy", ["fresh", "lru"])
def test_each_gpu_keeps_free_what_its_layers_take(gpus: Callable[..., None], policy: str) -> None:
    """Whatever chooses: the scratch is on each, the codes of a layer are where it is; and a GPU without layers has nothing."""
    gpus(1 << 30, 2 << 30, 3 << 30)
    heads = (Heads(4, 2, 64, 64), Heads(4, 2, 64, 64), Heads(8, 4, 64, 64))
    geometry = Geometry(((128, 128), (128, 128), (256, 256)), (0, 2, 2), heads)
    small, _, large = (codes_bytes(h, (4, 2), 4096, on_gpu=True) for h in heads)
    options = Options(coarse="4,2", n_ctx=4096, policy=policy)
    choice = choice_bytes(heads, 4096, 1, 4096, 64)
    want = {0: small + choice, 2: small + large + choice}
    assert memory.coarse_bytes(geometry, options) == want
    found = memory.device_memory(geometry, options)
    assert [(d.name, d.coarse) for d in found] == [("CUDA0", want[0]), ("CUDA2", want[2])]
    less = choice - choice_bytes(heads, 4096, 1, 1024, 64)
    assert less > 0
    for fixed in (
        memory.coarse_bytes(geometry, replace(options, pool=1024)),
        memory.coarse_bytes(geometry, options, 1024),
    ):
        assert fixed == {i: n - less for i, n in want.items()}


@pytest.mark.parametrize(
    ("policy", "coarse"), [("auto", "4"), ("fresh", "2"), ("qk", "4,2"), ("lru", "4"), ("lru", "off")]
)
def test_an_automatic_pool_leaves_room_for_codes(
    tiny_path: Callable[[str], Path], gpus: Callable[..., None], policy: str, coarse: str
) -> None:
    """As planned, so made: twice the pool, and codes, fit into what is free, but for the reserve."""
    path = tiny_path("qwen3")
    options: dict[str, Any] = {"n_ctx": 16_384, "n_threads": 1, "policy": policy, "coarse": coarse, "prefill": "pool"}
    options |= ONE_GPU
    token_bytes = planned(path, Options(**options, pool=1024)).memory[0].kv // 1024
    codes = codes_of(path, 16_384, 16_384, coarse=coarse) if coarse != "off" else 0
    free = RESERVE + codes + 2 * 2048 * token_bytes
    gpus(free)
    with KVFlash.from_file(path, **options) as kv:
        assert kv.n_pool == 2048
        said = f" - {codes / MIB:.0f} MiB for codes" if codes else ""
        assert f" - 512 MiB reserve{said}) / " in kv.notes[0]
    gpus(free - 1)
    with KVFlash.from_file(path, **options) as kv:
        assert kv.n_pool == 2048 - 256


#
# figures
#

TAKEN = 3 * MIB + 4096


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library say that a GPU has the codes."""
    info = guests.Guests.info
    monkeypatch.setattr(guests.Guests, "info", lambda self: replace(info(self), device_bytes=TAKEN, bytes=0))


@pytest.mark.usefixtures("on_device")
def test_the_device_holds_pool_codes_and_panes(opened: Open) -> None:
    kv = opened(**SMALL)
    events = list(kv.prefill(TOKENS[:1500]))
    stats, held = kv.stats(), kv.ctx.kv_bytes().attn
    assert (stats.kv_device_bytes, stats.coarse_bytes) == (held, TAKEN)
    assert stats.pane_bytes > 0
    assert stats.device_kv_bytes == kv.resident_bytes == held + TAKEN + stats.pane_bytes
    assert {e.resident_bytes for e in events if isinstance(e, Prefill)} == {kv.resident_bytes}
    now = device_kv(kv)
    assert (now.pool, now.codes, now.panes, now.total) == (held, TAKEN, stats.pane_bytes, kv.resident_bytes)
