"""The header of a GGUF file, and the files of a split model.

The format (ggml-org/ggml, docs/gguf.md): "GGUF", version u32, number of tensors u64, number of values u64, the values, the
tensors, and the tensors' data at a multiple of the alignment. A value is its key, a type u32, and its data. A tensor is its
name, the number of dimensions u32, the dimensions u64, a type u32, and an offset in the data u64. A string is its length u64
and its bytes. Everything is little-endian.
"""

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

MAGIC = b"GGUF"
SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
"""The file name of a part, in llama.cpp's form: prefix, number from 1, number of parts."""

_STRING, _ARRAY = 8, 9
_FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_READ = 1 << 20  # bytes read at once
_LONGEST = 1 << 28  # most bytes of a header; usually it has some MiB, most of them for the vocabulary
_U64 = struct.Struct("<Q")


class Tensor(NamedTuple):
    """A tensor: its name, its shape with the contiguous dimension first, its ggml_type, and its offset in the data."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    raw: all bytes of the header, up to the end of the list of tensors.
    values: numbers and strings by key; lists are left out.
    data: offset of the tensors' data in the file.
    """

    raw: bytes
    values: dict[bytes, int | float | bytes]
    tensors: tuple[Tensor, ...]
    data: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file's header. Raises OSError, EOFError if the file ends within the header, and ValueError for another format."""
        with path.open("rb") as file:
            cursor = _Cursor(file)
            if cursor.take(4) != MAGIC or cursor.number("<I") not in _VERSIONS:
                raise ValueError
            n_tensors, n_values = cursor.number("<Q"), cursor.number("<Q")
            pairs = dict(cursor.pair() for _ in range(n_values))
            values = {key: value for key, value in pairs.items() if value is not None}
            tensors = tuple(cursor.tensor() for _ in range(n_tensors))
            raw = cursor.passed()
        alignment = values.get(b"general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError
        return cls(raw, values, tensors, math.ceil(len(raw) / alignment) * alignment)

    @property
    def split(self) -> tuple[int, int]:
        """The index of this part, from 0, and the number of parts; (0, 1): the model is one file."""
        no, count = (self.values.get(key) for key in (b"split.no", b"split.count"))
        return (no if isinstance(no, int) else 0), (count if isinstance(count, int) and count > 1 else 1)

    def needed(self) -> int:
        """Return how many bytes the file needs to hold all its tensors. Raises ValueError for an unknown type."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 (slow)

        if not self.tensors:
            return len(self.raw)
        end = 0
        for tensor in self.tensors:
            block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
            end = max(end, tensor.offset + math.prod(tensor.shape) // block * n_bytes)
        return self.data + end


class _Cursor:
    """Reads the parts of a header in their order. Raises EOFError if the file ends early, and ValueError for unknown types."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._read, self._at = file, bytearray(), 0
        self._size = os.fstat(file.fileno()).st_size

    def passed(self) -> bytes:
        """Return all bytes up to the current place."""
        return bytes(self._read[: self._at])

    def pair(self) -> tuple[bytes, int | float | bytes | None]:
        """Return the next key with its value; None: the value is a list."""
        key, kind = self.take(self.number("<Q")), self.number("<I")
        if kind == _ARRAY:
            items, n = self.number("<I"), self.number("<Q")
            if items == _STRING:
                self._skip_strings(n)
            else:
                self._skip(n * struct.calcsize(_form(items)))
            return key, None
        return key, self.take(self.number("<Q")) if kind == _STRING else self.number(_form(kind))

    def tensor(self) -> Tensor:
        """Return the next tensor."""
        name, n_dimensions = self.take(self.number("<Q")), self.number("<I")
        if n_dimensions > _MOST_DIMENSIONS:
            raise ValueError
        shape = tuple(self.number("<Q") for _ in range(n_dimensions))
        return Tensor(name, shape, self.number("<I"), self.number("<Q"))

    def number(self, form: str) -> int:
        """Return the next number. form: its format for struct.unpack(); some formats give a float."""
        res: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return res

    def take(self, n: int) -> bytes:
        """Return the next n bytes."""
        start = self._at
        self._skip(n)
        return bytes(self._read[start : self._at])

    def _skip(self, n: int) -> None:
        if self._at + n > self._size:
            raise EOFError
        if self._at + n > _LONGEST:
            raise ValueError
        while self._at + n > len(self._read):
            if not (more := self._file.read(_READ)):
                raise EOFError
            self._read += more
        self._at += n

    def _skip_strings(self, n: int) -> None:
        for _ in range(n):  # fast, since a vocabulary has hundreds of thousands of strings
            if self._at + _U64.size > len(self._read):
                self._skip(_U64.size)
                self._at -= _U64.size
            self._skip(_U64.size + _U64.unpack_from(self._read, self._at)[0])


def _form(kind: int) -> str:
    if kind not in _FORMS:
        raise ValueError
    return _FORMS[kind]


#
# the files of a model
#


def parts(name: str) -> list[str]:
    """Return the names of all files of a model, in order. name: the only file, or any part of a split model."""
    split = SPLIT.fullmatch(name)
    if not split:
        return [name]
    return [f"{split[1]}-{i:05}-of-{split[3]}.gguf" for i in range(1, int(split[3]) + 1)] or [name]


def read_parts(path: Path) -> list[tuple[Path, Header | None]]:
    """Return the files that a model is loaded from, each with its header; None: the header cannot be read.

    path: the only file, or the first part. Raises OSError.
    """
    first = _header(path)
    if first is None or first.split[1] == 1:
        return [(path, first)]
    others = [Path(part) for part in parts(str(path))[1:]]
    return [(path, first), *((part, _header(part)) for part in others)]


def _header(path: Path) -> Header | None:
    try:
        return Header.read(path)
    except (EOFError, ValueError):
        return None
