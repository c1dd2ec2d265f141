"""What people do today when a cache does not fit, beside a pool: smaller cache types, and the cache in RAM (--no-kv-offload).

    python bench/offload.py --shape 8b -ub 2048 --contexts 32768 131072 --read-seconds 200
    python bench/offload.py --model model.gguf --contexts 4096 --pool 1024

Prompt and answer of each, in one run. With the cache in RAM the CPU computes attention, and reading a long prompt takes hours: it
reads for --read-seconds, and "read" says how far it came. To decode behind a whole context all the same, it gets the state of the
same cache on the GPU.
"""

import argparse
import ctypes
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvflash_bench.device import device_used
from kvflash_bench.grid import machine
from kvflash_bench.shapes import shape_file
from kvflash_bench.steps import WARM_UP, decode_steps
from kvflash_bench.tables import Live
from pyllama_kvflash import KVFlash
from pyllama_kvflash.native.lib import ffi

BATCH = 2048
STEPS = 32
COLUMNS = ["cache", "context", "read", "prompt tok/s", "answer tok/s", "device in use MiB"]


@dataclass(frozen=True)
class Cache:
    """A row: its options for KVFlash.from_file()."""

    label: str
    options: dict[str, Any]

    @property
    def on_host(self) -> bool:
        """Whether the CPU computes attention."""
        return not self.options.get("kv_offload", True)


def caches(pool: int, type_kv: str) -> list[Cache]:
    """Return all of them; that in RAM after the one whose state it gets."""

    def full(kind: str, **more: Any) -> dict[str, Any]:
        return {"pool": "off", "type_k": kind, "type_v": kind, **more}

    pooled = {"pool": pool, "type_k": type_kv, "type_v": type_kv}
    return [
        Cache("full, f16", full("f16")),
        Cache("full, q4_0", full("q4_0")),
        Cache(f"full, {type_kv}", full(type_kv)),
        Cache(f"full, {type_kv}, --no-kv-offload", full(type_kv, kv_offload=False)),
        Cache(f"pool {pool}, {type_kv}, lru", {**pooled, "policy": "lru", "coarse": "off"}),
        Cache(f"pool {pool}, {type_kv}, default", pooled),
    ]


def random_tokens(kv: KVFlash, n: int) -> Any:
    """Return n tokens (n,) int32, the same for each cache."""
    return np.random.default_rng(0).integers(0, kv.model.n_vocab, n, dtype=np.int32)


def read(kv: KVFlash, end: int, seconds: float) -> tuple[int, float]:
    """Read up to position `end`, or for so long. Return the tokens read, and the seconds."""
    start, begin = kv.n_tokens, time.perf_counter()
    tokens = random_tokens(kv, end)[start:]
    for first in range(0, len(tokens), BATCH if seconds else len(tokens)):
        part = tokens[first : first + BATCH] if seconds else tokens
        for _ in kv.prefill(part):
            pass
        if seconds and time.perf_counter() - begin > seconds:
            break
    return kv.n_tokens - start, time.perf_counter() - begin


def decode(kv: KVFlash) -> float:
    """Return the median seconds of STEPS tokens, at the end of what is there; then they are forgotten."""
    at = kv.n_tokens
    took = median(decode_steps(kv, STEPS, []).seconds)
    kv.rollback(at)
    return took


def decode_behind(kv: KVFlash, state: "State", n: int) -> float:
    """The same in a stock context that has the state of another one, n positions long."""
    kv.clear()
    state.copy_to(kv)
    took = []
    for i in range(WARM_UP // 4 + STEPS // 4):  # each takes long
        begin = time.perf_counter()
        kv.ctx.decode(np.array([i % kv.model.n_vocab], np.int32), n + i)
        kv.ctx.logits().argmax()
        took.append(time.perf_counter() - begin)
    kv.ctx.clear()
    return median(took[WARM_UP // 4 :])


class State:
    """The state of a stock context, by llama.cpp's own functions."""

    def __init__(self, kv: KVFlash) -> None:
        maps = Path("/proc/self/maps").read_text().split()
        self._lib = ctypes.CDLL(next(word for word in maps if "libllama" in Path(word).name))
        for name in ("get_size", "get_data", "set_data"):
            getattr(self._lib, f"llama_state_seq_{name}").restype = ctypes.c_size_t
        self._data = np.empty(self._lib.llama_state_seq_get_size(self._handle(kv), 0), np.uint8)
        self._call("get_data", kv)

    def copy_to(self, kv: KVFlash) -> None:
        """Make it the state of another context."""
        self._call("set_data", kv)

    def _call(self, name: str, kv: KVFlash) -> None:
        function = getattr(self._lib, f"llama_state_seq_{name}")
        if not function(self._handle(kv), ctypes.c_void_p(self._data.ctypes.data), ctypes.c_size_t(self._data.size), 0):
            msg = f"llama_state_seq_{name} failed"
            raise RuntimeError(msg)

    @staticmethod
    def _handle(kv: KVFlash) -> ctypes.c_void_p:
        return ctypes.c_void_p(int(ffi.cast("uintptr_t", kv.ctx.handle)))


def rows_of(cache: Cache, path: Path, args: argparse.Namespace, states: dict[int, State]) -> Iterator[list[str]]:
    """Measure one cache at each context. states: of the last cache on the GPU, by context."""
    before = device_used() or 0
    room = args.contexts[-1] + 256
    common = {"n_ubatch": args.n_ubatch, "n_threads": args.threads, "flash_attn": "on", "n_ctx": room}
    with KVFlash.from_file(path, **common, **cache.options) as kv:
        total_n, total_s, cut = 0, 0.0, False
        for context in args.contexts:
            if not cut:
                n, seconds = read(kv, context, args.read_seconds if cache.on_host else 0)
                total_n, total_s = total_n + n, total_s + seconds
                cut = kv.n_tokens < context
            used = f"{((device_used() or 0) - before) / 2**20:,.0f}"
            step = decode_behind(kv, states[context], context) if cut else decode(kv)
            yield [cache.label, f"{context:,}", f"{total_n:,}", f"{total_n / total_s:,.1f}", f"{1 / step:,.2f}", used]
            if not cache.on_host and kv.n_pool is None and cache.options["type_k"] == args.type_kv:
                states[context] = State(kv)


def main() -> None:
    """Measure, and print a table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--shape-dir", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--pool", type=int, default=4096)
    parser.add_argument("-ct", "--type-kv", default="q8_0")
    parser.add_argument("-ub", "--n-ubatch", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--read-seconds", type=float, default=200)
    args = parser.parse_args()
    print(f"{machine()}\n")
    table = Live(*COLUMNS)
    states: dict[int, State] = {}
    with nullcontext(args.model) if args.model else shape_file(args.shape, args.shape_dir) as path:
        for cache in caches(args.pool, args.type_kv):
            for row in rows_of(cache, path, args, states):
                table.row(*row)


if __name__ == "__main__":
    main()
