"""Device memory before something is made of it: what is free, and whether it is enough."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.native import CACHE_TYPES, devices, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import FORMS, CoarseForm
from pyllama_kvflash.policy.fresh import GpuChoice, IndexForm
from pyllama_kvflash.policy.sizing import AUTO_CAP, CELLS, RESERVE, DeviceMemory


def device_memory(geometry: Geometry, options: Options) -> list[DeviceMemory]:
    """Return the name, free bytes and KV bytes per token of each device that holds KV, with what is loaded now, and what
    policy "fresh" will take there for its index, or codes.
    """
    return _beside(geometry.by_device(row_bytes, *_types(options)), choosing_bytes(geometry, options))


def choosing_bytes(geometry: Geometry, options: Options) -> Counter[int]:
    """Return the bytes of an index, or of codes, and what a GPU takes to choose by them, by the index of the device."""
    return Counter(index_bytes(geometry, options)) + Counter(coarse_bytes(geometry, options))


def coarse_bytes(geometry: Geometry, options: Options) -> dict[int, int]:
    """Return the bytes of the codes of whole contexts, by the index of the device.

    options: resolved, and `coarse` decided.
    """
    form = CoarseForm.of(options.coarse)
    if form is None or options.pool == "off":
        return {}
    res: Counter[int] = Counter()
    for heads, device in zip(geometry.heads, geometry.devices or (0,) * len(geometry.heads), strict=True):
        res[device] += options.n_parallel * form.n_bytes(heads, options.n_ctx)
    return dict(res)


def most_bits(geometry: Geometry, options: Options) -> str:
    """Return the closest codes for which there is memory beside the smallest pool and the records: a value of `coarse`.

    options: resolved.
    """
    memory, n_all = device_memory(geometry, replace(options, coarse="off")), options.n_ctx * options.n_parallel
    floor = options.shape.floor(options.n_batch)
    pool = max(floor, options.pool) if isinstance(options.pool, int) else floor
    for form in FORMS:
        codes = choosing_bytes(geometry, replace(options, coarse=form))
        needed = [
            codes[i] + d.token_bytes * pool + (in_memory(options, d.token_bytes * n_all) if d.host else 0)
            for i, d in zip(dict.fromkeys(geometry.devices or (0,)), memory, strict=True)
        ]
        if all(n <= d.free - RESERVE for n, d in zip(needed, memory, strict=True)):
            return form
    return "off"


def in_memory(options: Options, full: int) -> int:
    """Return the bytes of all records that host memory takes; others are in a file."""
    return full if options.host_limit is None else min(full, options.host_limit)


def index_bytes(geometry: Geometry, options: Options, n_pool: int | None = None) -> dict[int, int]:
    """Return the most device memory that layers take to choose, beside their codes, by the index of the GPU: nothing unless there
    are codes, or the policy is "fresh". Elsewhere the index is host memory, and takes nothing of what a pool may have.

    options: resolved. n_pool: cells of the pool; None: as many as may be requested.
    """
    found = devices()
    gpus = {i for i in geometry.devices if found[i].gpu}
    codes = CoarseForm.of(options.coarse)
    if (options.policy != "fresh" and not codes) or options.pool == "off" or not gpus:
        return {}
    requested = options.auto_cap or AUTO_CAP if isinstance(options.pool, str) else options.pool
    choice = GpuChoice(
        form=None if codes else IndexForm.of(geometry.head, options.index),
        heads=geometry.heads,
        n_ctx=-(-options.n_ctx // CELLS) * CELLS,
        n_seq=options.n_parallel,
        n_pool=n_pool or requested,
        chunk=options.chunk,
    )
    return {gpu: choice.n_bytes([i for i, device in enumerate(geometry.devices) if device == gpu]) for gpu in gpus}


def pane_memory(geometry: Geometry, options: Options, n_pane: int) -> list[DeviceMemory]:
    """Return the name, free bytes and pane bytes per token of each device that holds KV, with what is loaded now."""
    return _beside(geometry.panes_by_device(row_bytes, *_types(options), n_pane))


def _types(options: Options) -> tuple[int, int]:
    return CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v]


def _beside(token_bytes: Mapping[int, int], index: Mapping[int, int] = MappingProxyType({})) -> list[DeviceMemory]:
    """Return the memory of the devices that take so many bytes a token, and for an index, by device index."""
    found = devices()
    return [
        DeviceMemory(
            *(found[i].name, found[i].free, n), host=not found[i].gpu, index=index.get(i, 0), remote=found[i].remote
        )
        for i, n in token_bytes.items()
    ]


def check_memory(memory: Sequence[DeviceMemory], n_ctx: int, what: str, way_out: str) -> None:
    """Raise NativeError if a device has no room for n_ctx tokens of `what`.

    The allocation itself may succeed, and the system end some process once the memory is used.
    """
    for device in memory:
        if device.token_bytes * n_ctx > device.free:
            need, have = f"{device.token_bytes * n_ctx / 2**30:.1f} GiB", f"{device.free / 2**30:.1f} GiB"
            msg = f"{what} of {n_ctx:,} tokens takes {need} on {device.name}, and {have} are free: use {way_out}"
            raise NativeError(msg)
