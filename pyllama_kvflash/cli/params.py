"""Option types and the options that several commands share. Names follow llama.cpp."""

import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import click
from click.core import ParameterSource

from pyllama_kvflash.native import CACHE_TYPES
from pyllama_kvflash.options import CHUNKS, FLASH_ATTN
from pyllama_kvflash.policy import AGGREGATES
from pyllama_kvflash.registry import policy_names

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


class Policy(click.ParamType[str]):
    """The name of a policy."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check, or fail with what there is."""
        if value not in policy_names():
            self.fail(f"{value!r} is no policy: there are {', '.join(policy_names())}", param, ctx)
        return str(value)


class Spans(click.ParamType[tuple[tuple[int, int], ...]]):
    """Ranges of positions: 0:512,4K:5K."""

    name = "spans"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        """Parse, or fail with what is allowed."""
        if isinstance(value, tuple):
            return value
        count = TokenCount()
        res = []
        for part in filter(None, str(value).split(",")):
            start, colon, end = part.partition(":")
            if not colon:
                self.fail(f"{part!r} is no range of positions: give one such as 0:512, several with commas", param, ctx)
            res.append((int(count.convert(start, param, ctx)), int(count.convert(end, param, ctx))))
        return tuple(res)


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


def resolve(values: dict[str, Any]) -> dict[str, Any]:
    """Fields of Options from the values of POOL and SCORERS: pins put together, a drafter taken at its word."""
    res = dict(values)
    res["chunk"] = int(res["chunk"])
    prefix, spans = res.pop("pin_prefix"), res.pop("pin_spans")
    res["pins"] = (((0, prefix),) if prefix else ()) + spans
    typed = click.get_current_context().get_parameter_source("policy")
    if res["draft_model"] and typed == ParameterSource.DEFAULT:
        res["policy"] = "drafter"
    return res


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
    click.option("-b", "--batch-size", "n_batch", type=TokenCount(), default=0, show_default=True,
                 envvar=env("BATCH"), help="Prompt tokens per decode call, which the pool must hold, 0: as many as it"
                 " can, at most 2048."),
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
    click.option("--kvflash-policy", "policy", metavar="NAME", type=Policy(), default="qk", show_default=True,
                 envvar="KVFLASH_POLICY",
                 help="Which chunks stay and come back. qk: those that the model's own attention asks for; drafter: those"
                 " that a small model's does (crosstok: through its own tokenizer); lru: the most recent ones; qk-cos: a"
                 " published formula, for comparison; or one that a package registered."),
    click.option("--kvflash-tau", "tau", type=TokenCount(), default=64, show_default=True, envvar="KVFLASH_TAU",
                 help="Tokens from one scoring of all chunks to the next; more where it would cost too much."),
    click.option("--kvflash-share", "share", type=float, default=0.05, show_default=True, envvar="KVFLASH_SHARE",
                 help="Share of the decode time that scoring may take, 0: no limit."),
    click.option("--kvflash-replay", "replay", type=TokenCount(), default=64, show_default=True,
                 envvar="KVFLASH_REPLAY",
                 help="Tokens at the end of the prompt to run again once the pool was chosen for them, 0: none."),
    click.option("--pin-prefix", metavar="N", type=TokenCount(), default=0, show_default=True,
                 help="Keep the first N tokens on the device."),
    click.option("--pin-spans", metavar="A:B,C:D", type=Spans(), default="",
                 help="Keep these positions on the device, each from A up to B. BOS is position 0."),
)  # fmt: skip

SCORERS = options(
    click.option("--qk-summary", metavar="KIND", default="centroid:4", show_default=True, envvar="KVFLASH_QK_SUMMARY",
                 help="What qk keeps of a chunk's keys: centroid:N (1, 2, 4, 8, 16), mean, minmax or exact."),
    click.option("--qk-aggregate", type=click.Choice(AGGREGATES), default="zmax", show_default=True,
                 envvar="KVFLASH_QK_AGGREGATE", help="How the scores of all heads become one."),
    click.option("--qk-query", metavar="WHICH", default="last:4", show_default=True, envvar="KVFLASH_QK_QUERY",
                 help="Whose queries score: last, last:N (tokens) or question (all that are run again)."),
    click.option("--qk-rerank", type=int, default=8, show_default=True, envvar="KVFLASH_QK_RERANK",
                 help="At the end of the prompt, rank this many times the pool's chunks again by all their keys, 0: none."),
    click.option("--draft-scorer", "draft_model", metavar="FILE", default=None, envvar="KVFLASH_DRAFT_SCORER",
                 help="The drafter, and policy drafter.  [default: MODEL-draft.gguf or draft-scorer.gguf next to the"
                 " model, in $KVFLASH_DRAFT_DIR, or in ~/.cache/kvflash]"),
    click.option("--draft-pool", type=TokenCount(), default=2048, show_default=True, envvar="KVFLASH_DRAFT_POOL",
                 help="The drafter's own pool in tokens."),
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
