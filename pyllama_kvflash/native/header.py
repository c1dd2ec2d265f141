"""What the header of a GGUF file says of its size: read only if llama.cpp does not load it, for it names no sizes.

The format (ggml-org/ggml, docs/gguf.md): "GGUF", version u32, number of tensors u64, number of values u64, the values, the
tensors, and their data at a multiple of the alignment. A value is its key, a type u32, and its data; a tensor its name, the
number of dimensions u32, the dimensions u64, a type u32, and where it is in the data u64. A string is its length u64, and its
bytes. All is little-endian.
"""

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

_U32, _STRING, _ARRAY = 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4


def why_incomplete(path: Path) -> str:
    """Return what a GGUF file lacks; "" if it is whole, or this cannot be told."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            need = _Header(file, size).needed()
    except EOFError:
        return f"its header ends beyond its {size:,} bytes, so it is incomplete or damaged: download it again"
    except (OSError, ValueError, KeyError):
        return ""
    return f"it is incomplete, with {size:,} of {need:,} bytes: download it again" if size < need else ""


class _Header:
    """Reads a header from its start. Raises EOFError if the file ends before, and ValueError or KeyError for what is unknown."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def needed(self) -> int:
        """Return the size that the file has if no tensor is cut."""
        if self._take(4) != b"GGUF" or self._number("<I") not in _VERSIONS:
            raise ValueError
        n_tensors, n_values = self._number("<Q"), self._number("<Q")
        alignment = 32
        for _ in range(n_values):
            key, kind = self._take(self._number("<Q")), self._number("<I")
            if key == b"general.alignment" and kind == _U32:
                alignment = max(1, self._number("<I"))
            else:
                self._skip_value(kind)
        end = max((self._tensor_end() for _ in range(n_tensors)), default=0)
        return math.ceil(self._file.tell() / alignment) * alignment + end

    def _tensor_end(self) -> int:
        """Return where a tensor ends in the data."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 (slow)

        self._skip(self._number("<Q"))
        n_dimensions = self._number("<I")
        if n_dimensions > _MOST_DIMENSIONS:
            raise ValueError
        n = math.prod(self._number("<Q") for _ in range(n_dimensions))
        block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("<I"))]
        return self._number("<Q") + n // block * n_bytes

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip(self._number("<Q"))
        elif kind == _ARRAY:
            items, n = self._number("<I"), self._number("<Q")
            if items == _STRING:
                for _ in range(n):
                    self._skip(self._number("<Q"))
            else:
                self._skip(n * _SIZES[items])
        else:
            self._skip(_SIZES[kind])

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _take(self, n: int) -> bytes:
        data = self._file.read(n) if n <= self._size else b""
        if len(data) != n:
            raise EOFError
        return data

    def _skip(self, n: int) -> None:
        if self._file.tell() + n > self._size:
            raise EOFError
        self._file.seek(n, os.SEEK_CUR)
