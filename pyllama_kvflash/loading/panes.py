"""The exact pass of a pool: opening its context, and counting its memory."""

from typing import Any

from pyllama_kvflash.errors import NativeError, UnsupportedError
from pyllama_kvflash.loading.load_plan import Tap, context_options
from pyllama_kvflash.loading.memory import check_memory, device_memory, lodging_bytes, types_of
from pyllama_kvflash.native import Context, ExactContext, Model, PaneParams, devices, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.device import DeviceBytes
from pyllama_kvflash.policy.scorers import EDGE
from pyllama_kvflash.policy.sizing import LEAST_PANES, whole_cells
from pyllama_kvflash.pool.exact import ExactReader

NO_TAP = Tap()
_WAY_OUT = "a smaller `n_ctx`, a smaller cache type (`type_k`, `type_v`), or `prefill` pool"


def open_exact(
    model: Model, geometry: Geometry, options: Options, n_pane: int, tap: Tap
) -> tuple[ExactReader | None, tuple[str, ...], tuple[str, ...]]:
    """Make the context that reads prompts exactly, with n_pane panes. options: from Options.resolved().

    Returns the reader, notes and warnings. Raises NativeError and UnsupportedError. With `prefill` "auto", an error becomes a
    warning, and the reader is None.
    """
    n_cells = whole_cells(options.n_ctx)
    try:
        memory = device_memory(geometry, options, n_pane=n_pane)
        check_memory(memory, n_cells, f"an exact pass with {n_pane} panes", _WAY_OUT)
        ctx = _context(model, options, _params(geometry, n_pane, options, tap))
    except (NativeError, UnsupportedError) as err:
        if options.prefill == "auto":
            return None, (), (f"prompts are read through the pool: {err}",)
        raise
    panes, compute = ctx.kv_bytes().attn / 2**20, ctx.compute_bytes() / 2**20
    streamed = "all layers" if n_pane >= len(geometry.rows) else f"{n_pane} layer{'s' * (n_pane > 1)} at a time"
    if n_pane > LEAST_PANES and any(device.remote for device in memory) and not options.panes:
        streamed += f", which spares the network of the RPC servers (`panes` {LEAST_PANES} takes the least memory)"
    note = (
        f"prompts are read exactly: {panes:.0f} MiB for KV of {options.n_ctx:,} tokens, {streamed}, and {compute:.0f} MiB of"
        f" buffers for batches of {ctx.n_ubatch:,}"
    )
    if options.codes_in_panes:
        note += "; codes are in that memory while an answer is written, and on the host while a prompt is read (`codes_in_panes`)"
    return ExactReader(ctx), (note,), ()


def exact_bytes(
    model: Model, geometry: Geometry, options: Options, n_pane: int = 0, tap: Tap = NO_TAP
) -> dict[int, DeviceBytes]:
    """Return, by device index, the bytes of an exact pass: panes (without codes that share their memory), compute buffers and states. The
    states count on one device, because their placement is unknown.

    model: loaded with no_alloc. options: from Options.resolved(). n_pane: panes; 0: as the options say, or LEAST_PANES. Raises
    NativeError and UnsupportedError.
    """
    n_pane = n_pane or options.panes or LEAST_PANES
    states = _state_bytes(model, options)
    with _context(model, options, _params(geometry, n_pane, options, tap)) as ctx:
        return _by_device(ctx, geometry, options, n_pane, states)


def held_bytes(ctx: ExactContext, geometry: Geometry, options: Options) -> dict[int, DeviceBytes]:
    """Return, by device index, the bytes of an open exact pass, in the form of exact_bytes()."""
    held = ctx.kv_bytes()
    return _by_device(ctx, geometry, options, ctx.pane_info().n_pane, held.swa + held.recurrent)


def _by_device(
    ctx: ExactContext, geometry: Geometry, options: Options, n_pane: int, states: int
) -> dict[int, DeviceBytes]:
    panes = geometry.panes_by_device(row_bytes, *types_of(options), n_pane)
    first, lodging = next(iter(panes), 0), lodging_bytes(geometry, options)
    return {
        i: DeviceBytes(
            device.name,
            device.gpu,
            panes=max(0, ctx.n_ctx * panes.get(i, 0) - lodging.get(i, 0)),
            buffers=ctx.compute_bytes(i),
            states=states if i == first else 0,
        )
        for i, device in enumerate(devices())
    }


def _state_bytes(model: Model, options: Options) -> int:
    """Return the bytes of an exact pass's windows and states. A stock context has as many, and reports them without allocating."""
    with Context(model, **_shape(model, options)) as ctx:
        held = ctx.kv_bytes()
    return held.swa + held.recurrent


def _shape(model: Model, options: Options) -> dict[str, Any]:
    n_ubatch = min(options.n_ubatch, options.n_ctx)
    sizes = {"n_ctx": options.n_ctx, "n_batch": n_ubatch, "n_ubatch": n_ubatch}
    return {**context_options(options), **sizes, "n_rollback": options.n_lookahead(recurrent=model.recurrent)}


def _params(geometry: Geometry, n_pane: int, options: Options, tap: Tap) -> PaneParams:
    mass_piece = options.chunk // EDGE if tap.n_token else 0
    least = max(lodging_bytes(geometry, options).values(), default=0)
    return PaneParams(n_pane=n_pane, q_tap=tap.n_token, q_every=tap.every, mass_piece=mass_piece, least_bytes=least)


def _context(model: Model, options: Options, panes: PaneParams) -> ExactContext:
    shape = _shape(model, options)
    try:
        return ExactContext(model, panes, **shape)
    except (NativeError, UnsupportedError) as err:
        msg = f"no exact pass over {options.n_ctx:,} tokens in batches of {shape['n_ubatch']:,} can be made: {err}; use {_WAY_OUT}"
        raise type(err)(msg) from None
