"""Write a drafter to a GGUF file: atomically, a few rows at a time, checking every weight."""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.convert.layout import Tensor
from pyllama_kvflash.errors import ModelError, OutputError, number

Progress = Callable[[float], None]

TYPES = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q5_1": "MOSTLY_Q5_1",
    "q5_0": "MOSTLY_Q5_0",
    "q4_1": "MOSTLY_Q4_1",
    "q4_0": "MOSTLY_Q4_0",
}
"""Types that this module writes, with gguf's name for a file of each."""

_CHUNK = 1 << 22  # elements converted at once
_F16_MAX = 65504.0
_HEADER = 1 << 20  # most bytes of padding and tensor infos


class Contents(NamedTuple):
    """The contents of a file. keys: "general.type" and so on, each with its value, the value's GGUF type, and its items' type."""

    keys: dict[str, tuple[Any, Any, Any]]
    tensors: list[Tensor]


def write_file(part: Path, contents: Contents, outtype: str, progress: Progress) -> None:
    """Write a GGUF file.

    outtype: one of TYPES.
    progress: called with 0.0 to 1.0.

    Raises ModelError for a weight that is not a number or does not fit, OutputError if there is no room, and OSError.
    """
    import gguf  # noqa: PLC0415 (half a second)

    file = gguf.GGUFWriter(part, "dflash")
    plan = [(t, tensor_type(gguf, t, outtype)) for t in contents.tensors]
    sizes = [_n_bytes(gguf, t, kind) for t, kind in plan]
    _check_room(part, sum(sizes) + _HEADER)
    for (tensor, kind), size in zip(plan, sizes, strict=True):
        file.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
    for key, value in contents.keys.items():
        file.add_key_value(key, *value)
    try:
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_ti_data_to_file()
        out = (file.fout or [])[0]
        file.write_padding(out, out.tell())
        done, total = 0, sum(sizes)
        for (tensor, kind), size in zip(plan, sizes, strict=True):
            for chunk in _chunks(gguf, tensor, kind):
                out.write(chunk.tobytes())
                done += chunk.nbytes
                progress(done / total)
            file.write_padding(out, size)
        out.flush()
    finally:
        _close(file)


def _close(file: Any) -> None:
    """Close a writer. After a disk error, closing fails again: suppress that, so that the first error is reported."""
    with suppress(OSError):
        file.close()


def tensor_type(gguf: Any, tensor: Tensor, outtype: str) -> Any:
    """Return the type for writing a tensor. As in upstream's converter, the type is f16 if a row is not a whole number of blocks."""
    kinds = gguf.GGMLQuantizationType
    if tensor.values is not None and tensor.values.dtype == np.int64:
        return kinds.I64
    if tensor.keep:
        return kinds.F32
    kind = kinds[outtype.upper()]
    return kind if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else kinds.F16


def _n_bytes(gguf: Any, tensor: Tensor, kind: Any) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(tensor.shape) // int(block) * int(size)


def _check_room(part: Path, need: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if free < need:
        msg = f"the drafter takes {need / 2**30:.2f} GiB, and {part.parent} has {free / 2**30:.2f} GiB free"
        raise OutputError(msg)


def _chunks(gguf: Any, tensor: Tensor, kind: Any) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's data, some rows at a time."""
    if tensor.values is not None:
        yield tensor.values
        return
    f16 = kind not in (
        gguf.GGMLQuantizationType.F32,
        gguf.GGMLQuantizationType.BF16,
    )  # f16 holds the values, or their scales
    for rows, first in _rows(tensor):
        _check_values(tensor, rows, first, f16=f16)
        yield rows if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(rows, kind)


def _rows(tensor: Tensor) -> Iterator[tuple[npt.NDArray[np.float32], int]]:
    """Yield some rows of a stored tensor, (n, width) float32, and the index of the first of them. Rows of a vector have one element."""
    stored = tensor.stored
    if stored is None:
        return
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    n = math.prod(tensor.shape) // width
    if tensor.rows is not None:  # reordered rows: attention matrices, which are small enough to read whole
        yield stored.floats(0, n * width).reshape(n, width)[tensor.rows], 0
        return
    step = max(1, _CHUNK // width)
    for first in range(0, n, step):
        last = min(first + step, n)
        yield stored.floats(first * width, last * width).reshape(-1, width), first


def _check_values(tensor: Tensor, rows: npt.NDArray[np.float32], first: int, *, f16: bool) -> None:
    largest = float(np.abs(rows).max()) if rows.size else 0.0  # NaN if any weight is
    if math.isfinite(largest) and (largest <= _F16_MAX or not f16):
        return
    name = tensor.stored.name if tensor.stored else tensor.name
    if math.isfinite(largest):
        msg = f"{name} has a weight of {number(largest)}, and f16 ends at {number(_F16_MAX)}: use `outtype` bf16"
        raise ModelError(msg)
    i = int(np.flatnonzero(~np.isfinite(rows))[0])
    msg = f"{name} has a weight that is {rows.reshape(-1)[i]}, at row {first + i // rows.shape[1]}: the file is damaged"
    raise ModelError(msg)
