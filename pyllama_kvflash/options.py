"""How a model is run. Names are llama.cpp's where it has one."""

import os
from dataclasses import dataclass, replace
from typing import Self

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import CACHE_TYPES
from pyllama_kvflash.policy import POLICIES

CHUNKS = (16, 32, 64)
FLASH_ATTN = ("auto", "on", "off")
MAX_TOKENS = 1 << 30  # positions are 32-bit numbers
MAX_THREADS = 512  # ggml's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a KVFlash. Sizes are tokens.

    n_ctx: logical context, 0: the model's. pool: tokens of KV kept on the device, "auto", or "off" for the full cache.
    chunk: tokens that are paged together (16, 32, 64). policy: which chunks stay ("lru"). n_batch, n_ubatch: prompt
    tokens per decode call and per graph. n_threads: None: all cores. n_gpu_layers: -1: all. type_k, type_v: cache
    types. flash_attn: "auto", "on", "off". sinks, tail: chunks at the beginning and at the end that always stay.
    pins: position ranges [start, end) that always stay.
    """

    n_ctx: int = 0
    pool: int | str = "auto"
    chunk: int = 64
    policy: str = "lru"
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    n_gpu_layers: int = -1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    sinks: int = 1
    tail: int = 4
    pins: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Check every value. Raises UsageError."""
        _within(self.n_ctx, 0, MAX_TOKENS, "n_ctx (-c/--ctx-size)", "0 takes the model's own context")
        _within(self.n_batch, 1, MAX_TOKENS, "n_batch (-b/--batch-size)", "512 is usual")
        _within(self.n_ubatch, 1, MAX_TOKENS, "n_ubatch (-ub/--ubatch-size)", "512 is usual")
        _within(self.sinks, 0, MAX_TOKENS, "sinks", "1 is usual")
        _within(self.tail, 1, MAX_TOKENS, "tail", "the chunk being written always stays")
        _within(self.n_gpu_layers, -1, MAX_TOKENS, "n_gpu_layers (-ngl/--n-gpu-layers)", "-1 offloads all")
        if self.n_threads is not None:
            _within(self.n_threads, 1, MAX_THREADS, "n_threads (-t/--threads)", "leave it out for all cores")
        _one_of(self.chunk, CHUNKS, "chunk (--kvflash-chunk)")
        _one_of(self.policy, tuple(POLICIES), "policy (--kvflash-policy)")
        _one_of(self.type_k, tuple(CACHE_TYPES), "type_k (-ctk/--cache-type-k)")
        _one_of(self.type_v, tuple(CACHE_TYPES), "type_v (-ctv/--cache-type-v)")
        _one_of(self.flash_attn, FLASH_ATTN, "flash_attn (-fa/--flash-attn)")
        if isinstance(self.pool, str):
            _one_of(self.pool, ("auto", "off"), "pool (--kvflash)")
        else:
            _within(self.pool, 1, MAX_TOKENS, "pool (--kvflash)", '"auto" chooses, "off" is the full cache')
        for start, end in self.pins:
            check_span(start, end, MAX_TOKENS)

    def resolved(self, n_ctx_train: int) -> Self:
        """With the model's context, this machine's threads, and no batch larger than the context."""
        n_ctx = self.n_ctx or n_ctx_train
        for start, end in self.pins:
            check_span(start, end, n_ctx)
        return replace(
            self,
            n_ctx=n_ctx,
            n_batch=min(self.n_batch, n_ctx),
            n_ubatch=min(self.n_ubatch, self.n_batch, n_ctx),
            n_threads=self.n_threads or _cores(),
        )


def check_span(start: int, end: int, n_ctx: int) -> None:
    """Raise UsageError unless [start, end) is a range of positions in a context."""
    if not 0 <= start < end <= n_ctx:
        msg = f"pin {start}:{end} is no range of positions: give 0 <= start < end <= {n_ctx}"
        raise UsageError(msg)


def _within(value: int, low: int, high: int, name: str, hint: str) -> None:
    if not low <= value <= high:
        msg = f"{name} is {value}, and must be from {low} to {high}: {hint}"
        raise UsageError(msg)


def _one_of(value: object, allowed: tuple[object, ...], name: str) -> None:
    if value not in allowed:
        msg = f"{name} is {value!r}, and must be one of {', '.join(map(str, allowed))}"
        raise UsageError(msg)


def _cores() -> int:
    """Cores that this process may use; where the system does not say, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
