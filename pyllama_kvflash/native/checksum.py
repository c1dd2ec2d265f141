"""Fast checksums, with which snapshots detect damage."""

from typing import Any

from pyllama_kvflash.native.lib import ffi, init, lib

CHECKSUM = 16
"""Bytes of a checksum."""


class Checksum:
    """XXH3-128 (Collet, xxhash.com), computed incrementally. It detects damage, but not forgery.

    It is as fast as memory, while SHA-256 reaches 0.5 to 2 GB/s a thread.
    """

    def __init__(self) -> None:
        init()
        sum_ = lib.kvf_checksum_new()
        if sum_ == ffi.NULL:
            raise MemoryError
        self._sum = ffi.gc(sum_, lib.kvf_checksum_free)

    def update(self, data: Any) -> None:
        """Add bytes, or the bytes of a contiguous array. Other threads run meanwhile."""
        src = ffi.from_buffer(data)
        lib.kvf_checksum_add(self._sum, src, len(src))

    def digest(self) -> bytes:
        """Return the checksum, CHECKSUM bytes, big-endian."""
        res = bytearray(CHECKSUM)
        lib.kvf_checksum_get(self._sum, ffi.from_buffer("uint8_t[]", res))
        return bytes(res)


def checksum(data: Any) -> bytes:
    """Return the checksum of bytes, or of a contiguous array."""
    res = Checksum()
    res.update(data)
    return res.digest()
