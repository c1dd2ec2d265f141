"""Compute a number that tells models apart."""

import hashlib
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from pyllama_kvflash.gguf_header import Header, read_parts

_MOST = 32 << 20  # bytes of tensors to read; a model with no more is read whole
_SAMPLE = 4096  # bytes read at once
_LEAST = 512  # fewest bytes read of each matrix, however many matrices there are
_STACKED = 1024  # most matrices that a tensor is divided into: no model has as many experts


def fingerprint(path: Path) -> int:
    """Return a 64-bit blake2b digest of a model: of each file's size, its whole header, and samples of its tensors.

    path: the only file, or the first part. The names of files do not count. Raises OSError.

    The samples take the same number of bytes from each matrix, evenly spaced from the first to the last byte: 32 MiB in all, or
    more for many thousands of matrices. A stacked tensor counts as several matrices. Smaller models and matrices are read whole.
    So a change of a few rows of a large matrix may go unnoticed. Training, merging and quantising change whole matrices, and
    are noticed.
    """
    files = [(part, header, part.stat().st_size) for part, header in read_parts(path)]
    spans = [_matrices(header, size) for _, header, size in files]
    lengths = [end - start for found in spans for start, end in found]
    share = max(_LEAST, _MOST // max(1, len(lengths))) if sum(lengths) > _MOST else _MOST
    digest = hashlib.blake2b(digest_size=8)
    for (part, header, size), found in zip(files, spans, strict=True):
        raw = header.raw if header else b""
        digest.update(size.to_bytes(8, "little") + len(raw).to_bytes(8, "little") + raw)
        with part.open("rb", buffering=0) as file:
            for start, end in found:
                for place, n_bytes in _places(start, end, share):
                    file.seek(place)
                    digest.update(file.read(n_bytes))
    return int.from_bytes(digest.digest(), "little")


def _matrices(header: Header | None, size: int) -> list[tuple[int, int]]:
    """Return the start and the end of each matrix in a file of `size` bytes. Without a header, the whole file is one matrix."""
    if header is None:
        return [(0, size)]
    stacked = {header.data + t.offset: math.prod(t.shape[2:]) for t in header.tensors}
    bounds = sorted({*(min(start, size) for start in stacked), size})
    res: list[tuple[int, int]] = []
    for start, end in pairwise(bounds):
        n = min(max(1, stacked.get(start, 1)), _STACKED, end - start)
        cuts = [start + (end - start) * i // n for i in range(n + 1)]
        res += pairwise(cuts)
    return res


def _places(start: int, end: int, share: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each piece to read: the whole span or, if that exceeds `share` bytes, samples from its first to its last byte."""
    if end - start <= share:
        yield start, end - start
        return
    n = max(2, share // _SAMPLE)
    n_bytes = share // n
    for i in range(n):
        yield start + (end - start - n_bytes) * i // (n - 1), n_bytes
