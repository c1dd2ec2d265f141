"""What is said of device memory beforehand: it is what is taken then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.oracles import ON_GPU

from pyllama_kvflash import KVFlash
from pyllama_kvflash.engine.planning import needs
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
    found, size = needs(tiny_path(name), Options(**options))
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
