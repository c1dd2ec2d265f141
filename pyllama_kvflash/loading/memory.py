"""Device memory before something is made of it: what is free, and whether it is enough."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.native import CACHE_TYPES, devices, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.policy.fresh import GpuChoice
from pyllama_kvflash.policy.sizing import CELLS, DeviceMemory, most_cells


def device_memory(geometry: Geometry, options: Options, *, lodged: bool = False) -> list[DeviceMemory]:
    """Return the name, free bytes and KV bytes per token of each device that holds KV, with what is loaded now, and what
    codes will take there. lodged: the memory of an exact pass is there, in which codes are.
    """
    codes = _without_lodging(geometry, options) if lodged else coarse_bytes(geometry, options)
    return _beside(geometry.by_device(row_bytes, *_types(options)), codes)


def coarse_bytes(geometry: Geometry, options: Options, n_pool: int | None = None) -> dict[int, int]:
    """Return the bytes of the codes of whole contexts, and of what a GPU takes to attend to them, by the index of the device.

    options: resolved, and `coarse` decided. n_pool: cells of the pool; None: as many as may be requested.
    """
    res = _codes(geometry, options)
    if not res:
        return {}
    found, n_cells = devices(), -(-options.n_ctx // CELLS) * CELLS
    n_all, floor = options.n_ctx * options.n_parallel, options.shape.floor(options.n_batch)
    choice = GpuChoice(
        heads=geometry.heads,
        n_ctx=n_cells,
        n_seq=options.n_parallel,
        n_pool=n_pool or most_cells(options.pool, n_ctx=n_all, floor=floor, cap=options.auto_cap),
        chunk=options.chunk,
    )
    return {i: n + choice.n_bytes if found[i].gpu else n for i, n in res.items()}


def _codes(geometry: Geometry, options: Options) -> Counter[int]:
    form, found, res = CoarseForm.of(options.coarse), devices(), Counter[int]()
    if form is None or options.pool == "off":
        return res
    n_cells = -(-options.n_ctx // CELLS) * CELLS
    for heads, device in zip(geometry.heads, geometry.devices or (0,) * len(geometry.heads), strict=True):
        each = form.gpu_bytes(heads, n_cells) if found[device].gpu else form.n_bytes(heads, options.n_ctx)
        res[device] += options.n_parallel * each
    return res


def lodging_bytes(geometry: Geometry, options: Options) -> Mapping[int, int]:
    """Return the bytes of the codes that are in the memory of an exact pass, by the index of the device."""
    found = devices()
    return {i: n for i, n in _codes(geometry, options).items() if found[i].gpu} if options.codes_in_panes else {}


def _without_lodging(geometry: Geometry, options: Options) -> dict[int, int]:
    lodging = lodging_bytes(geometry, options)
    return {i: n - lodging.get(i, 0) for i, n in coarse_bytes(geometry, options).items()}


def in_memory(options: Options, full: int) -> int:
    """Return the bytes of all records that host memory takes; others are in a file."""
    return full if options.host_limit is None else min(full, options.host_limit)


def pane_memory(geometry: Geometry, options: Options, n_pane: int) -> list[DeviceMemory]:
    """Return the name, free bytes and pane bytes per token of each device that holds KV, with what is loaded now, and what codes
    will take beside the panes.
    """
    return _beside(geometry.panes_by_device(row_bytes, *_types(options), n_pane), _without_lodging(geometry, options))


def _types(options: Options) -> tuple[int, int]:
    return CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v]


def _beside(token_bytes: Mapping[int, int], codes: Mapping[int, int] = MappingProxyType({})) -> list[DeviceMemory]:
    """Return the memory of the devices that take so many bytes a token, and for codes, by device index."""
    found = devices()
    return [
        DeviceMemory(
            *(found[i].name, found[i].free, n), host=not found[i].gpu, codes=codes.get(i, 0), remote=found[i].remote
        )
        for i, n in token_bytes.items()
    ]


def check_memory(memory: Sequence[DeviceMemory], n_ctx: int, what: str, way_out: str) -> None:
    """Raise NativeError if a device has no room for n_ctx tokens of `what`, beside codes.

    The allocation itself may succeed, and the system end some process once the memory is used.
    """
    for device in memory:
        if device.token_bytes * n_ctx > device.free - device.codes:
            need, have = f"{device.token_bytes * n_ctx / 2**30:.1f} GiB", f"{device.free / 2**30:.1f} GiB"
            codes = f", of which codes (`coarse`) take {device.codes / 2**30:.1f}" if device.codes else ""
            msg = f"{what} of {n_ctx:,} tokens takes {need} on {device.name}, and {have} are free{codes}: use {way_out}"
            raise NativeError(msg)
