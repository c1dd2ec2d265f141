"""The tier below host memory: records in a mapped file that disappears when the process ends."""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pyllama_kvflash.errors import HostMemoryError, UsageError
from pyllama_kvflash.native import Record


def slabs_in(folder: str | Path) -> Callable[[int], Record]:
    """Return an allocator of unnamed files in a folder; they disappear with the process. Raises UsageError.

    The allocator takes a size and returns an array (size,) uint8. It raises HostMemoryError if the disk is full.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        msg = f"{folder} is not a folder: give one on a disk with room for records (`disk`)"
        raise UsageError(msg)
    return lambda size: _slab(path, size)


def _slab(folder: Path, size: int) -> Record:
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".kvflash-") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, not when a page is written
            else:
                file.truncate(size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except OSError as err:
        why = "the disk is full" if err.errno == errno.ENOSPC else err.strerror or str(err)
        msg = f"no room for another {size / 2**20:.1f} MiB of chunk records in {folder}: {why}; free some, or use a larger disk"
        raise HostMemoryError(msg) from None
