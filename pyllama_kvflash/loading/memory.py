"""Device memory before an allocation: the free bytes, and whether they suffice."""

from collections import Counter
from collections.abc import Sequence

from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.native import CACHE_TYPES, choice_bytes, codes_bytes, devices, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.policy.device import DeviceBytes
from pyllama_kvflash.policy.sizing import most_cells, whole_cells


def device_memory(geometry: Geometry, options: Options, *, n_pane: int = 0, lodged: bool = False) -> list[DeviceBytes]:
    """Return each device that holds KV, with its current free bytes, KV bytes per token, and codes.

    n_pane: count the KV of this many panes; 0: count the cache's. lodged: leave out codes that share the panes' memory.
    """
    found, asked = devices(), (row_bytes, *types_of(options))
    sizes = geometry.panes_by_device(*asked, n_pane) if n_pane else geometry.by_device(*asked)
    codes = coarse_bytes(geometry, options, lodged=lodged or n_pane > 0)
    return [
        DeviceBytes(found[i].name, found[i].gpu, found[i].remote, found[i].free, token_bytes=n, coarse=codes.get(i, 0))
        for i, n in sizes.items()
    ]


def types_of(options: Options) -> tuple[int, int]:
    """Return the cache types of K and V as ggml numbers them."""
    return CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v]


def coarse_bytes(
    geometry: Geometry, options: Options, n_pool: int | None = None, *, lodged: bool = False
) -> dict[int, int]:
    """Return, by device index, the bytes of full contexts' codes, and of the GPU buffers for attending to codes.

    options: from Options.resolved(), with `coarse` resolved. n_pool: cells of the pool; None: the most that the options allow.
    lodged: leave out codes that share the memory of an exact pass.
    """
    codes = _codes(geometry, options)
    if not codes:
        return {}
    found, n_all, floor = devices(), options.n_ctx * options.n_parallel, options.shape.floor(options.n_batch)
    n_pool = n_pool or most_cells(options.pool, n_ctx=n_all, floor=floor, cap=options.auto_cap)
    choice = choice_bytes(geometry.heads, whole_cells(options.n_ctx), options.n_parallel, n_pool, options.chunk)
    elsewhere = lodging_bytes(geometry, options) if lodged else {}
    return {i: n - elsewhere.get(i, 0) + (choice if found[i].gpu else 0) for i, n in codes.items()}


def _codes(geometry: Geometry, options: Options) -> Counter[int]:
    form, found, res = CoarseForm.of(options.coarse), devices(), Counter[int]()
    if form is None or options.pool == "off":
        return res
    for heads, device in zip(geometry.heads, geometry.devices or (0,) * len(geometry.heads), strict=True):
        gpu = found[device].gpu
        each = codes_bytes(heads, form, whole_cells(options.n_ctx) if gpu else options.n_ctx, on_gpu=gpu)
        res[device] += options.n_parallel * each
    return res


def lodging_bytes(geometry: Geometry, options: Options) -> dict[int, int]:
    """Return, by device index, the bytes of codes that share the memory of an exact pass."""
    found = devices()
    return {i: n for i, n in _codes(geometry, options).items() if found[i].gpu} if options.codes_in_panes else {}


def check_memory(memory: Sequence[DeviceBytes], n_ctx: int, what: str, way_out: str) -> None:
    """Raise NativeError if a device has no room for n_ctx tokens of `what` and for codes.

    Without this check, the allocation might succeed, and the system might kill a process once the memory is used.
    """
    for device in memory:
        if device.token_bytes * n_ctx > device.free - device.coarse:
            need, have = f"{device.token_bytes * n_ctx / 2**30:.1f} GiB", f"{device.free / 2**30:.1f} GiB"
            codes = f", of which codes (`coarse`) take {device.coarse / 2**30:.1f}" if device.coarse else ""
            msg = f"{what} of {n_ctx:,} tokens takes {need} on {device.name}, and {have} are free{codes}: use {way_out}"
            raise NativeError(msg)
