"""What is said of device memory beforehand: it is what is taken then."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.oracles import ON_GPU

from kvflash_bench.shapes import SHAPES, write_outline
from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.loading.planning import planned
from pyllama_kvflash.native import context, pretending
from pyllama_kvflash.native import lib as native_lib
from pyllama_kvflash.options import Options

pytestmark = pytest.mark.native

WAYS: dict[str, dict[str, Any]] = {
    "a pool": {"pool": 1024},
    "the full cache": {"pool": "off"},
    "through the pool": {"pool": 1024, "prefill": "pool"},
    "quantised": {"pool": 1024, "type_k": "q8_0", "type_v": "q8_0"},
    "no flash attention": {"pool": 1024, "flash_attn": "off", "n_ubatch": 128},
    "all layers": {"pool": 1024, "panes": 99},
    "automatic": {},
    "two sequences": {"pool": 2048, "n_parallel": 2},
    "lru": {"pool": 1024, "policy": "lru"},
    "lossless": {"pool": 1024, "mode": "lossless"},
}


PADDING = 16 << 10 if ON_GPU else 0
"""Most bytes by which CUDA pads the last rows of quantised panes."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3", "gemma4", "qwen35"])
def test_what_is_said_is_taken(tiny_path: Callable[[str], Path], name: str, way: str) -> None:
    """To the byte."""
    options: dict[str, Any] = {"n_ctx": 4096, "n_threads": 1, **WAYS[way]}
    plan = planned(tiny_path(name), Options(**options))
    found, size = plan.memory, plan.size
    with KVFlash.from_file(tiny_path(name), **options) as kv:
        stats = kv.stats()
        assert size.n_pool == kv.n_pool
        taken = stats.kv_device_bytes + stats.pane_bytes
        assert 0 <= taken - sum(need.kv + need.panes for need in found) <= PADDING
        assert sum(need.buffers for need in found) == stats.compute_bytes
        contexts = [kv.ctx, *([kv.sequence.exact.ctx] if kv.sequence.exact else [])]
        held = [ctx.kv_bytes() for ctx in contexts]
        assert sum(need.states for need in found) == sum(h.swa + h.recurrent for h in held)
        weights = sum(need.weights for need in found)
        assert weights == sum(weight.size for weight in kv.model.weights())  # tied ones twice where there is a GPU


@pytest.mark.skipif(ON_GPU, reason="a GPU tells itself")
def test_flash_attention_has_other_types_in_halves(tmp_path: Path) -> None:
    """As CUDA's has them (ggml_cuda_flash_attn_ext_get_alloc_size): of one layer of each context."""
    path, shape, n_ctx = tmp_path / "8b.gguf", SHAPES["8b"], 65_536
    write_outline(shape, path)

    def buffers(kind: str, **more: Any) -> int:
        with pretending(64 << 30, 64 << 30):
            found = planned(path, Options(n_ctx=n_ctx, type_k=kind, type_v=kind, n_threads=1, **more)).memory
        return next(need.buffers for need in found if need.gpu)

    for options, n_cell in (({"pool": "off"}, n_ctx), ({"pool": 4096, "coarse": "off", "policy": "qk"}, n_ctx + 4096)):
        halves = 2 * n_cell * 2 * shape.n_head_kv * shape.n_head_dim
        more = buffers("q8_0", **options) - buffers("f16", **options)
        assert 0.9 * halves < more < 1.1 * halves


def test_a_failed_load_lets_go_of_the_model(tiny_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, for another one may be tried in its memory."""
    compute = context.compute

    def full(function: Any, model: Any, params: Any, pool: Any, *rest: Any) -> None:
        if pool and params.n_ctx > 512:
            msg = "there is no memory"
            raise NativeError(msg)
        compute(function, model, params, pool, *rest)

    monkeypatch.setattr(context, "compute", full)
    gc.collect()
    gc.disable()
    try:
        before = len(native_lib._owned)
        with pytest.raises(NativeError, match="there is no memory"):
            KVFlash.from_file(tiny_path("qwen3"), n_ctx=4096, pool=1024, coarse="4", n_threads=1)
        assert len(native_lib._owned) == before
    finally:
        gc.enable()
