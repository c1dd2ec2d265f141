"""The host store: one record for every sealed chunk."""

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import HostMemoryError

Record = npt.NDArray[np.uint8]

_GROWTH = 16  # a slab adds at most 1/16 to what is held: memory stays within 10 % of the records'


class HostStore:
    """Owns the bytes of sealed chunks, in slabs of host memory that are never moved or copied.

    A record's place, once given, holds until forget(); the view that get() returns is valid until then. reserve() is
    called before the batch that seals a chunk is decoded, so that running out of memory loses nothing.
    """

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self._slabs: list[Record] = []
        self._free: list[Record] = []
        self._records: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._records

    @property
    def used_bytes(self) -> int:
        """Bytes of the records held."""
        return len(self._records) * self.record_bytes

    @property
    def held_bytes(self) -> int:
        """Host memory taken, used or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def reserve(self, n: int) -> None:
        """Make sure that n more records fit. Raises HostMemoryError, and holds what it held."""
        while len(self._free) < n:
            count = max(1, len(self._records) // _GROWTH)
            try:
                # full, not zeros: the pages are committed now, not when a record is written
                slab = np.full((count, self.record_bytes), 0, np.uint8)
            except MemoryError:
                msg = (
                    f"no host memory for another {count * self.record_bytes / 2**20:.1f} MiB of chunk records, with"
                    f" {self.used_bytes / 2**20:.1f} MiB held: use a shorter context, a smaller cache type (-ctk, -ctv),"
                    " or a machine with more memory"
                )
                raise HostMemoryError(msg) from None
            self._slabs.append(slab)
            self._free.extend(slab)

    def put(self, chunk: int) -> Record:
        """A place (record_bytes,) for a chunk's record, which the caller fills now; the same one if it has one."""
        if chunk not in self._records:
            self.reserve(1)
            self._records[chunk] = self._free.pop()
        return self._records[chunk]

    def get(self, chunk: int) -> Record:
        """The record of a chunk that is in the store."""
        return self._records[chunk]

    def forget(self, first: int) -> None:
        """Forget the records of chunk `first` and all later ones; their places are used again."""
        for chunk in [c for c in self._records if c >= first]:
            self._free.append(self._records.pop(chunk))
