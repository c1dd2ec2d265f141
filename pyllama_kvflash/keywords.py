"""The fields of Options as keyword arguments of a function: for type checkers, editors and help()."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypedDict, TypeVar

from pyllama_kvflash.native import Rope
from pyllama_kvflash.options import Options, Spec
from pyllama_kvflash.policy import Scorer

F = TypeVar("F", bound=Callable[..., Any])


class Keywords(TypedDict, total=False):
    """The fields of Options, which documents each of them. tests/test_public.py compares the two classes."""

    n_ctx: int
    pool: int | str
    auto_cap: int | None
    chunk: int
    tail: int
    pins: tuple[tuple[int, int], ...]
    n_parallel: int
    prefill: str
    opening: int
    mode: str
    meter: float
    min_agreement: float
    panes: int
    coarse: str
    codes_in_panes: bool | None
    policy: str | Scorer
    tau: int
    swaps: int
    share: float
    again: float
    replay: int
    scorer_model: str | None
    spec: Spec | None
    rope: Rope | None
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    type_k: str
    type_v: str
    flash_attn: str
    n_gpu_layers: int
    tensor_split: tuple[float, ...]
    split_mode: str
    main_gpu: int
    n_cpu_moe: int | str
    kv_offload: bool
    rpc: tuple[str, ...]
    host_limit: int | None
    disk: str | None
    snapshots: bool
    checkpoint_limit: int


def shows_options(function: F) -> F:
    """Make the signature of a function with **options show the fields of Options, with their defaults."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Options)
    ]
    function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function
