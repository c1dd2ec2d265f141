"""Small models of the shapes that are measured."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benches import isolate

from kvflash_bench import paging as paging_bench
from kvflash_bench import shapes
from kvflash_bench.shapes import shape_file

ENGINE = {"n_threads": 1, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}


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
