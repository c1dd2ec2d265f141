"""The weights of a folder, without torch: headers of safetensors files, and rows of their tensors.

The format (huggingface/safetensors, README, "Format"): the length of a JSON object in 8 bytes, little-endian; the object,
which gives each tensor's dtype, shape and place; the data of the tensors.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import ModelError, UnsupportedError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes, the limit of the format's own reader
_PREFIXES = ("model.", "language_model.")  # prefixes that some exports put before the names
_SAME = (
    (re.compile(r"self_attn\.(sinks|attention_sink_bias|learnable_sink_param)(\.weight)?$"), "self_attn.sinks"),
    (re.compile(r"(_codebook|\.layer_scalar)\.weight$"), r"\1"),
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),
)
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_INTEGERS = {"I64": "<i8", "I32": "<i4"}


class Stored(NamedTuple):
    """A tensor in a file.

    shape: in torch's order, the contiguous dimension last.
    start: offset of the tensor's first byte in the file.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> str:
        """The shape in words: 128 x 64."""
        return " x ".join(map(str, self.shape)) or "a single number"

    def check_floats(self) -> None:
        """Raise UnsupportedError unless floats() can read the tensor."""
        if self.dtype not in _FLOATS:
            msg = f"{self.name} is of type {self.dtype}: give weights in bf16, f16 or f32, before they were quantised"
            raise UnsupportedError(msg)

    def floats(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return the elements [start, stop) as (stop - start,) float32. Raises ModelError."""
        raw = self._elements(_FLOATS[self.dtype], start, stop)
        if self.dtype == "BF16":  # bf16 is the upper half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def integers(self) -> npt.NDArray[np.int64]:
        """Return all elements as (n,) int64. Raises ModelError."""
        if self.dtype not in _INTEGERS:
            msg = f"{self.name} is of type {self.dtype}, and must be I64 or I32"
            raise ModelError(msg)
        return self._elements(_INTEGERS[self.dtype], 0, math.prod(self.shape)).astype(np.int64)

    def _elements(self, dtype: str, start: int, stop: int) -> npt.NDArray[Any]:
        step = np.dtype(dtype).itemsize
        try:
            found: npt.NDArray[Any] = np.fromfile(self.path, dtype, stop - start, offset=self.start + step * start)
        except OSError as err:
            msg = f"{self.path} cannot be read: {err.strerror}"
            raise ModelError(msg) from None
        if len(found) != stop - start:
            msg = f"{self.path} has become shorter: {self.name} is not all in it"
            raise ModelError(msg)
        return found


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a folder, by short_name()."""

    folder: Path
    tensors: dict[str, Stored]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the headers of a folder's safetensors files. Raises ModelError."""
        tensors: dict[str, Stored] = {}
        for path in _files(folder):
            for stored in read_header(path):
                name = short_name(stored.name)
                if name in tensors:
                    msg = f"{stored.name} in {path} is stored twice: {tensors[name].path} has {tensors[name].name}"
                    raise ModelError(msg)
                tensors[name] = stored
        if not tensors:
            msg = f"{folder} has no weights: its safetensors files are empty"
            raise ModelError(msg)
        return cls(folder, tensors)

    def get(self, name: str) -> Stored | None:
        """Return a tensor by its short name, or None."""
        return self.tensors.get(name)

    def some(self, part: str) -> Stored | None:
        """Return a tensor whose name contains `part`, or None."""
        return next((t for name, t in self.tensors.items() if part in name), None)


def short_name(name: str) -> str:
    """Return a tensor's uniform name. Exports use different prefixes and spellings."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for pattern, same in _SAME:
        name = pattern.sub(same, name)
    return name


def read_header(path: Path) -> list[Stored]:
    """Return a safetensors file's tensors, in the file's order. Raises ModelError for a file of another kind, or one cut off."""
    try:
        n_file = path.stat().st_size
        with path.open("rb") as file:
            n = int.from_bytes(file.read(8), "little")
            text = file.read(min(n, _MAX_HEADER)) if n_file >= 8 else b""  # noqa: PLR2004 (bytes of the length)
    except FileNotFoundError:
        msg = f"{path} does not exist: the download is not complete"
        raise ModelError(msg) from None
    except OSError as err:
        msg = f"{path} cannot be read: {err.strerror}"
        raise ModelError(msg) from None
    if len(text) < max(n, 2):
        why = "its header is longer than the file" if n <= _MAX_HEADER else f"its header would be {n:,} bytes"
        msg = f"{path} is not a safetensors file, or is cut off: {why if n_file else 'it is empty'}"
        raise ModelError(msg)
    try:
        header = json.loads(text)
        entries = [(_printable(name), *_entry(value)) for name, value in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        msg = f"{path} is not a safetensors file: its header is not a list of tensors"
        raise ModelError(msg) from None
    return [_stored(path, n_file - 8 - n, 8 + n, *entry) for entry in entries]


def _entry(value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's dtype, its shape, and the start and end of its bytes. Raises ValueError, TypeError and KeyError."""
    shape, (begin, end) = value["shape"], value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError
    return _printable(value["dtype"]), tuple(shape), begin, end


def _printable(text: str) -> str:
    """Return a text if it is printable. Raises ValueError and AttributeError."""
    if not text.isprintable():
        raise ValueError
    return text


def _stored(path: Path, n_data: int, first: int, name: str, dtype: str, shape: tuple[int, ...], *at: int) -> Stored:
    begin, end = at
    if end > n_data:
        msg = f"{path} is cut off: {name} ends at byte {end:,} of its data, which has {max(n_data, 0):,}"
        raise ModelError(msg)
    kind = (_FLOATS | _INTEGERS).get(dtype)
    if kind and end - begin != math.prod(shape) * np.dtype(kind).itemsize:
        size = " x ".join(map(str, shape))
        msg = f"{path} is damaged: {name} is {size} of {dtype}, and {end - begin:,} bytes are kept for it"
        raise ModelError(msg)
    return Stored(name, path, dtype, shape, first + begin)


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those that its index lists; without an index, all that begin with "model"."""
    index = folder / _INDEX
    if index.exists():
        return [folder / name for name in _indexed(index)]
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        other = next(iter(sorted(folder.glob("*.bin"))), None)
        what = f"{other.name} is torch's format, save it as safetensors" if other else "is this the drafter's folder?"
        msg = f"{folder} has no model.safetensors: {what}"
        raise ModelError(msg)
    return found


def _indexed(index: Path) -> list[str]:
    try:
        parts = json.loads(index.read_bytes())["weight_map"].values()
        names = sorted(set(parts))
    except OSError as err:
        msg = f"{index} cannot be read: {err.strerror}"
        raise ModelError(msg) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        msg = f"{index} is damaged: it has no weight_map"
        raise ModelError(msg) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            msg = f"{index} is damaged: {name!r} is not the name of a file in its folder"
            raise ModelError(msg)
    return names
