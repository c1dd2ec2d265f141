"""What the files of the tests' models say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import gguf

from pyllama_kvflash.needle import BUNDLED_MODEL

MEMORY = {"qwen3": "llama_kv_cache", "qwen35": "llama_memory_hybrid", "gemma4": "llama_kv_cache_iswa"}  # its class
NAMES = tuple(MEMORY)


class Geometry(NamedTuple):
    """What the metadata of a model says about its cache."""

    n_layer: int
    layers: list[int]  # with full attention and KV of their own
    n_swa: int
    n_row: int  # elements of a K row, and of a V row

    @classmethod
    def read(cls, path: Path) -> Self:
        """Of a needle, qwen3, qwen35 or gemma4 model."""
        fields = gguf.GGUFReader(path).fields
        arch = fields["general.architecture"].contents()

        def get(key: str, default: Any = None) -> Any:
            field = fields.get(f"{arch}.{key}")
            return default if field is None else field.contents()

        n_layer = get("block_count")
        interval = get("full_attention_interval", 1)
        sliding = get("attention.sliding_window_pattern", [False] * n_layer)
        own = n_layer - get("attention.shared_kv_layers", 0)
        layers = [i for i in range(own) if i % interval == interval - 1 and not sliding[i]]
        n_row = get("attention.head_count_kv") * get("attention.key_length")
        return cls(n_layer, layers, get("attention.sliding_window", 0), n_row)

    def token_bytes(self, block_bytes: int) -> int:
        """Bytes of a token; block_bytes: of 32 elements."""
        return len(self.layers) * 2 * self.n_row // 32 * block_bytes


def model_file(name: str, tiny_path: Callable[[str], Path]) -> Path:
    return BUNDLED_MODEL if name == "needle" else tiny_path(name)
