"""Device memory before an allocation: the free bytes, and whether they suffice."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.native import CACHE_TYPES, choice_bytes, devices, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.policy.sizing import CELLS, DeviceMemory, most_cells


def device_memory(geometry: Geometry, options: Options, *, lodged: bool = False) -> list[DeviceMemory]:
    """Return the name, current free bytes, KV bytes per token and bytes for codes of each device that holds KV.

    lodged: an exact pass is open, whose memory the codes share.
    """
    codes = _without_lodging(geometry, options) if lodged else coarse_bytes(geometry, options)
    return _beside(geometry.by_device(row_bytes, *_types(options)), codes)


def coarse_bytes(geometry: Geometry, options: Options, n_pool: int | None = None) -> dict[int, int]:
    """Return the bytes of the codes of full contexts, with the GPU buffers for attending to them, by device index.

    options: resolved, and `coarse` decided. n_pool: cells of the pool; None: the most that may be requested.
    """
    res = _codes(geometry, options)
    if not res:
        return {}
    found, n_cells = devices(), -(-options.n_ctx // CELLS) * CELLS
    n_all, floor = options.n_ctx * options.n_parallel, options.shape.floor(options.n_batch)
    n_pool = n_pool or most_cells(options.pool, n_ctx=n_all, floor=floor, cap=options.auto_cap)
    choice = choice_bytes(geometry.heads, n_cells, options.n_parallel, n_pool, options.chunk)
    return {i: n + choice if found[i].gpu else n for i, n in res.items()}


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
    """Return the bytes of codes that share the memory of an exact pass, by device index."""
    found = devices()
    return {i: n for i, n in _codes(geometry, options).items() if found[i].gpu} if options.codes_in_panes else {}


def _without_lodging(geometry: Geometry, options: Options) -> dict[int, int]:
    lodging = lodging_bytes(geometry, options)
    return {i: n - lodging.get(i, 0) for i, n in coarse_bytes(geometry, options).items()}


def in_memory(options: Options, full: int) -> int:
    """Return the bytes of records in host memory; the others are in a file. full: bytes of all records."""
    return full if options.host_limit is None else min(full, options.host_limit)


def pane_memory(geometry: Geometry, options: Options, n_pane: int) -> list[DeviceMemory]:
    """Return the name, current free bytes, pane bytes per token, and bytes for codes outside the panes, of each device that holds
    KV.
    """
    return _beside(geometry.panes_by_device(row_bytes, *_types(options), n_pane), _without_lodging(geometry, options))


def _types(options: Options) -> tuple[int, int]:
    return CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v]


def _beside(token_bytes: Mapping[int, int], codes: Mapping[int, int] = MappingProxyType({})) -> list[DeviceMemory]:
    """Return the memory of devices. token_bytes, codes: bytes per token, and for codes, by device index."""
    found = devices()
    return [
        DeviceMemory(
            *(found[i].name, found[i].free, n), host=not found[i].gpu, codes=codes.get(i, 0), remote=found[i].remote
        )
        for i, n in token_bytes.items()
    ]


def check_memory(memory: Sequence[DeviceMemory], n_ctx: int, what: str, way_out: str) -> None:
    """Raise NativeError if a device has no room for n_ctx tokens of `what` and for codes.

    Without this check, the allocation might succeed, and the system kill a process once the memory is used.
    """
    for device in memory:
        if device.token_bytes * n_ctx > device.free - device.codes:
            need, have = f"{device.token_bytes * n_ctx / 2**30:.1f} GiB", f"{device.free / 2**30:.1f} GiB"
            codes = f", of which codes (`coarse`) take {device.codes / 2**30:.1f}" if device.codes else ""
            msg = f"{what} of {n_ctx:,} tokens takes {need} on {device.name}, and {have} are free{codes}: use {way_out}"
            raise NativeError(msg)
