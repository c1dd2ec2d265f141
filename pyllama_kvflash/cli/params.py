"""Option types and the options that several commands share. Names follow llama.cpp."""

import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import click

from pyllama_kvflash.native import CACHE_TYPES
from pyllama_kvflash.options import CHUNKS, FLASH_ATTN
from pyllama_kvflash.policy import POLICIES

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


class TokenCount(click.ParamType[int | str]):
    """A number of tokens: 4096, 4K or 1M (of 1,024)."""

    name = "tokens"

    def __init__(self, *words: str) -> None:
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Parse, or fail with what is allowed."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if text in self.words:
            return text
        match = re.fullmatch(r"([+-]?\d+)([KM]?)", text.upper())
        if not match:
            words = "".join(f', "{w}"' for w in self.words)
            self.fail(f"{value!r} is no number of tokens: give one such as 4096 or 4K{words}", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


class Layers(click.ParamType[int]):
    """A number of layers; all (or llama.cpp's auto, or a negative number) is -1."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse, or fail with what is allowed."""
        if value in ("all", "auto"):
            return -1
        try:
            return max(int(value), -1)
        except ValueError:
            self.fail(f'{value!r} is no number of layers: give one such as 20, or "all"', param, ctx)


def env(name: str, llama: str | None = None) -> list[str]:
    """Environment variables of an option: ours, then llama.cpp's."""
    return [f"KVFLASH_{name}", f"LLAMA_ARG_{llama or name}"]


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator, shown in the order given."""
    return lambda f: reduce(lambda g, d: d(g), reversed(decorators), f)


MODEL = options(
    click.argument("model_arg", metavar="[MODEL.gguf]", required=False, default=None),
    click.option("-m", "--model", metavar="FILE", envvar=env("MODEL"), help="The same as MODEL.gguf."),
)

CONTEXT = options(
    click.option("-c", "--ctx-size", "n_ctx", type=TokenCount(), default=0, envvar=env("CTX_SIZE"), show_default=True,
                 help="Logical context in tokens, 0: the model's. It costs device memory only without a pool."),
    click.option("-ctk", "--cache-type-k", "type_k", type=click.Choice(list(CACHE_TYPES)), default="f16",
                 show_default=True, envvar=env("CACHE_TYPE_K"), help="Type of the K cache."),
    click.option("-ctv", "--cache-type-v", "type_v", type=click.Choice(list(CACHE_TYPES)), default="f16",
                 show_default=True, envvar=env("CACHE_TYPE_V"), help="Type of the V cache; a quantised one needs -fa."),
    click.option("-fa", "--flash-attn", "flash_attn", type=click.Choice(FLASH_ATTN), default="auto",
                 show_default=True, envvar=env("FLASH_ATTN"), help="Flash attention."),
)  # fmt: skip

COMPUTE = options(
    click.option("-b", "--batch-size", "n_batch", type=TokenCount(), default=512, show_default=True,
                 envvar=env("BATCH"), help="Prompt tokens per decode call; the pool must hold one such batch."),
    click.option("-ub", "--ubatch-size", "n_ubatch", type=TokenCount(), default=512, show_default=True,
                 envvar=env("UBATCH"), help="Prompt tokens computed at once."),
    click.option("-t", "--threads", "n_threads", type=int, default=None, envvar=env("THREADS"),
                 help="CPU threads.  [default: all cores]"),
    click.option("-ngl", "--n-gpu-layers", "n_gpu_layers", metavar="N|all", type=Layers(), default="all",
                 show_default=True, envvar=env("N_GPU_LAYERS"), help="Layers to offload to the GPU."),
)  # fmt: skip

POOL = options(
    click.option("--kvflash", "pool", metavar="N|auto|off", type=TokenCount("auto", "off"), default="auto",
                 show_default=True, envvar="KVFLASH_POOL",
                 help="Pool size in tokens; auto: half of the free device memory, at most 16K; off: the full cache."),
    click.option("--kvflash-chunk", "chunk", type=click.Choice([str(c) for c in CHUNKS]), default="64",
                 show_default=True, envvar="KVFLASH_CHUNK", help="Tokens that are paged together."),
    click.option("--kvflash-policy", "policy", type=click.Choice(list(POLICIES)), default="lru", show_default=True,
                 envvar="KVFLASH_POLICY", help="Which chunks stay. lru: the most recent ones."),
)  # fmt: skip

SAMPLING = options(
    click.option("--temp", "temperature", type=float, default=0.8, show_default=True, help="Temperature, 0: greedy."),
    click.option("--top-k", type=int, default=40, show_default=True, help="Top-k, 0: off."),
    click.option("--top-p", type=float, default=0.95, show_default=True, help="Top-p, 1: off."),
    click.option("--min-p", type=float, default=0.05, show_default=True, help="Min-p, 0: off."),
    click.option("--repeat-penalty", type=float, default=1.0, show_default=True, help="Repeat penalty, 1: off."),
    click.option("--repeat-last-n", type=int, default=64, show_default=True, help="Tokens it looks back, 0: off."),
    click.option("-s", "--seed", type=int, default=-1, show_default=True, help="Seed, -1: a random one."),
)  # fmt: skip
