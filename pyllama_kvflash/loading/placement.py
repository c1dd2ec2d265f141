"""Decide which experts or feed-forward weights stay on the host, by opening the model without its weights."""

import re
from collections.abc import Sequence
from dataclasses import replace

from pyllama_kvflash.loading.bits import LEAST
from pyllama_kvflash.loading.load_plan import context_options
from pyllama_kvflash.loading.memory import coarse_bytes, types_of
from pyllama_kvflash.loading.panes import exact_bytes
from pyllama_kvflash.native import Context, Model, devices, row_bytes
from pyllama_kvflash.native.model import Weight
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.device import RESERVE
from pyllama_kvflash.policy.experts import Holding, Placement, place_experts
from pyllama_kvflash.policy.sizing import BATCH, CELLS
from pyllama_kvflash.pool.speculation import drafter_bytes

_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # llama.cpp's LLM_FFN_EXPS_REGEX
_FEED_FORWARD = r"\.ffn_(up|down|gate)\.weight"
_LAYER = re.compile(r"blk\.(\d+)\.")
_IS_EXPERTS = re.compile(r"blk\.(\d+)" + _EXPERTS)
_IS_FEED_FORWARD = re.compile(r"blk\.(\d+)" + _FEED_FORWARD)


def has_experts(weights: Sequence[Weight]) -> bool:
    """Return whether a model has experts that can stay on the host."""
    return any(_IS_EXPERTS.match(weight.name) for weight in weights)


def on_host(placed: Placement) -> list[str]:
    """Return patterns of the names of weights that stay on the host: experts, as with llama.cpp's -ncmoe, or a dense model's
    feed-forward weights.
    """
    return [rf"blk\.{i}{_FEED_FORWARD if placed.dense else _EXPERTS}" for i in range(placed.n_cpu_moe)]


def place(model: Model, geometry: Geometry, options: Options, floor: int) -> Placement:
    """Decide the placement of experts, and the pool to request. See place_experts().

    model: loaded without weights (no_alloc), on its future devices.
    geometry: the full-attention cache's.
    options: from Options.resolved().
    floor: the fewest cells of a pool.

    Raises NativeError and UnsupportedError.
    """
    held = holdings(model, geometry, options)
    found = place_experts(
        options.n_cpu_moe,
        held,
        pool=options.pool,
        n_ctx=options.n_ctx * options.n_parallel,
        floor=floor,
        cap=options.auto_cap or 0,
    )
    return replace(found, dense=held[0].dense)


def holdings(model: Model, geometry: Geometry, options: Options) -> list[Holding]:
    """Return the future contents and the current free memory of each device that will hold part of the model."""
    weights, found = model.weights(), devices()
    token_bytes = geometry.by_device(row_bytes, *types_of(options))
    n_layer = 1 + max((int(m[1]) for w in weights if (m := _LAYER.match(w.name))), default=-1)
    here = sorted({w.device for w in weights} | token_bytes.keys())
    state, computed, drafter = _measured(model, geometry, options, here)
    codes = coarse_bytes(geometry, options)
    reads = options.pool != "off" and options.prefill != "pool"
    exact = exact_bytes(model, geometry, options) if reads else {}
    dense = not has_experts(weights)
    moves = _IS_FEED_FORWARD if dense else _IS_EXPERTS
    copy = max((w.size for w in weights if moves.match(w.name)), default=0)
    some = any(moves.match(w.name) and not found[w.device].gpu for w in weights)  # some stay on the host in any case
    res = []
    for i, (compute, token_compute), draft in zip(here, computed, drafter, strict=True):
        others, moved = _sizes([w for w in weights if w.device == i], moves, n_layer)
        holding = Holding(
            name=found[i].name,
            gpu=found[i].gpu,
            free=found[i].free,
            token_bytes=token_bytes.get(i, 0),
            weights=others + (copy if some else 0),
            coarse=codes.get(i, 0),
            states=state,
            buffers=compute,
            drafter=draft,
            experts=moved,
            copy=0 if some else copy,
            token_compute=token_compute,
            dense=dense,
            reserve=LEAST if dense else RESERVE,  # small, because a token reads each moved layer whole
        )
        res.append(holding + exact[i] if i in exact else holding)
    return res


def _sizes(weights: Sequence[Weight], moves: re.Pattern[str], n_layer: int) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of the weights that cannot move, and for each layer the bytes of the weights that can."""
    others, moved = 0, [0] * n_layer
    for weight in weights:
        if match := moves.match(weight.name):
            moved[int(match[1])] += weight.size
        else:
            others += weight.size
    return others, tuple(moved)


def _measured(
    model: Model, geometry: Geometry, options: Options, here: Sequence[int]
) -> tuple[int, list[tuple[int, int]], list[int]]:
    """Measure the memory besides weights and pool, with contexts that allocate nothing: one with a small cache, one with a full cache.

    Returns three values, in bytes:
    - sliding windows, recurrent states, and a cache whose rows are unknown (it cannot be pooled); these count on every device,
      because their placement is unknown;
    - for each device in `here`, the compute buffers, and their growth per token of KV;
    - for each device in `here`, the memory of a drafter.
    """
    n_ubatch = min(options.n_ubatch, options.n_batch or options.n_ubatch)
    least = options.n_ctx
    if geometry.rows:
        least = min(least, model.n_swa + n_ubatch + CELLS)  # windows and states do not grow beyond this
    with _context(model, options, least, min(n_ubatch, least)) as small:
        held = small.kv_bytes()
        base = [small.compute_bytes(i) for i in here]
    with _context(model, options, options.n_ctx, min(n_ubatch, least)) as large:
        more = [large.compute_bytes(i) - n for i, n in zip(here, base, strict=True)]
        drafter = drafters(options, large, here)
    n_seq = options.n_parallel
    slopes = [max(0, -(-n // max(1, (options.n_ctx - least) * n_seq))) for n in more]
    return (
        held.swa + held.recurrent,
        [(n - slope * least * n_seq, slope) for n, slope in zip(base, slopes, strict=True)],
        drafter,
    )


def drafters(options: Options, target: Context, here: Sequence[int]) -> list[int]:
    """Return the bytes of the target's drafter on each device in `here`, as drafter_bytes() does."""
    if options.spec is None:
        return [0 for _ in here]
    n_batch = options.drafter_batch(min(options.n_batch or BATCH, options.n_ctx))
    return drafter_bytes(
        options.spec,
        target,
        here,
        n_batch=n_batch,
        n_ubatch=min(options.n_ubatch, n_batch),
        n_seq=options.n_parallel,
        where=options.where,
    )


def _context(model: Model, options: Options, n_ctx: int, n_batch: int) -> Context:
    return Context(model, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch, **context_options(options))
