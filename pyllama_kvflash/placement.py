"""Before a model is loaded: which of its experts stay in host memory, by a look at it without its weights."""

import re
from collections.abc import Sequence

from pyllama_kvflash.native import CACHE_TYPES, Context, Model, devices, row_bytes
from pyllama_kvflash.native.model import Weight
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.experts import Holding, Placement, place_experts
from pyllama_kvflash.policy.sizing import CELLS

_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # llama.cpp's LLM_FFN_EXPS_REGEX
_LAYER = re.compile(r"blk\.(\d+)\.")
_IS_EXPERTS = re.compile(r"blk\.(\d+)" + _EXPERTS)


def on_host(n_cpu_moe: int) -> list[str]:
    """Patterns of the experts of so many layers from the first, as llama.cpp's -ncmoe makes them."""
    return [rf"blk\.{i}{_EXPERTS}" for i in range(n_cpu_moe)]


def place(model: Model, geometry: Geometry, options: Options, floor: int) -> Placement:
    """Where the experts go, and what becomes of the pool: see place_experts.

    model: without its weights (no_alloc), for the devices that it will be loaded onto. geometry: of its full-attention
    cache. options: resolved. floor: cells that a pool has at least. Raises NativeError and UnsupportedError.
    """
    return place_experts(
        options.n_cpu_moe,
        holdings(model, geometry, options),
        pool=options.pool,
        n_ctx=options.n_ctx * options.n_parallel,
        floor=floor,
        cap=options.auto_cap,
    )


def holdings(model: Model, geometry: Geometry, options: Options) -> list[Holding]:
    """What each device that holds any of the model is to hold of it, and its memory now."""
    weights, found = model.weights(), devices()
    token_bytes = geometry.by_device(row_bytes, CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v])
    n_layer = 1 + max((int(m[1]) for w in weights if (m := _LAYER.match(w.name))), default=-1)
    state = _state_bytes(model, geometry, options)
    copy = max((w.size for w in weights if _IS_EXPERTS.match(w.name)), default=0)
    some = any(_IS_EXPERTS.match(w.name) and not found[w.device].gpu for w in weights)  # are on the host as it is
    res = []
    for i in sorted({w.device for w in weights} | token_bytes.keys()):
        others, experts = _sizes([w for w in weights if w.device == i], n_layer)
        fixed = others + state + (copy if some else 0)
        args = (found[i].name, found[i].free, fixed, token_bytes.get(i, 0), experts)
        res.append(Holding(*args, copy=0 if some else copy, gpu=found[i].gpu))
    return res


def _sizes(weights: Sequence[Weight], n_layer: int) -> tuple[int, tuple[int, ...]]:
    """Bytes of weights that are no experts, and those of each layer's experts."""
    others, experts = 0, [0] * n_layer
    for weight in weights:
        if match := _IS_EXPERTS.match(weight.name):
            experts[int(match[1])] += weight.size
        else:
            others += weight.size
    return others, tuple(experts)


def _state_bytes(model: Model, geometry: Geometry, options: Options) -> int:
    """Bytes of sliding windows and recurrent states, and of a cache that cannot be pooled, whose rows are not known.

    All of them count on each device: where they are is not known.
    """
    n_ubatch = min(options.n_ubatch, options.n_batch or options.n_ubatch)
    n_ctx = options.n_ctx
    if geometry.rows:
        n_ctx = min(n_ctx, model.n_swa + n_ubatch + CELLS)  # a longer context does not change them
    with Context(
        model,
        n_ctx=n_ctx,
        n_batch=min(n_ubatch, n_ctx),
        n_ubatch=min(n_ubatch, n_ctx),
        type_k=options.type_k,
        type_v=options.type_v,
        flash_attn=options.flash_attn,
        n_seq=options.n_parallel,
    ) as ctx:
        held = ctx.kv_bytes()
    return held.swa + held.recurrent
