"""Host memory for the records of chunks, in slabs that never move."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import HostMemoryError, counted

Record = npt.NDArray[np.uint8]

_GROWTH = 16  # a slab adds at most 1/16 to the memory held, which stays within 10 % of the records' bytes
# bytes of the first and of the largest slab taken in advance; each is twice the one before. An exact pass copies each slab
# separately, and a full GPU queue (some 1,000 operations) blocks the caller
_SLAB, _SLAB_MOST = 256 << 20, 2 << 30
_UNEXPECTED = 32 << 20  # largest unannounced slab, in bytes: the caller waits some 10 ms for it
_PAGE = 4096  # a record's rows begin on a page: the bus reads them 10 % faster
_LARGE = 1 << 20  # smaller records are not aligned: the padding would cost too much


class HostMemory:
    """Places for records, in slabs of host memory that never move. Several stores may share them."""

    def __init__(
        self,
        record_bytes: int,
        allocate: Callable[[int], Record] | None = None,
        limit: int | None = None,
        meta_bytes: int = 0,
        spill: Callable[[int], Record] | None = None,
        n_growers: int = 1,
    ) -> None:
        """record_bytes: bytes of a record.
        allocate: takes a size and returns an array (size,) uint8, or raises MemoryError; None: plain memory.
        limit: how many bytes of records are allowed; None: no limit.
        meta_bytes: bytes of a record before its rows.
        spill: like allocate, for records beyond the limit or the available memory; None: such records are an error.
        n_growers: threads that allocate announced slabs; each adds 2 to 5 GB/s, the rate at which the system clears pages.
        """
        self.record_bytes = record_bytes
        self.n_used = 0  # places taken
        page = _PAGE if record_bytes >= _LARGE else 1
        self._lead = -meta_bytes % page
        self._pitch = -(-(self._lead + record_bytes) // page) * page
        self._allocate = allocate or (lambda size: np.full(size, 0, np.uint8))  # full() commits the memory now
        self._limit = limit
        self._held: list[tuple[Record, Sequence[object]]] = []
        self._slabs: list[Record] = []
        # a heap: taking the lowest place keeps neighbouring chunks adjacent, even in freed places, so that one copy moves several
        # chunks. One by one, they would use a fifth of the bus's speed
        self._free: list[tuple[int, Record]] = []
        self._grower = ThreadPoolExecutor(n_growers, "kvflash-host")
        self._growing: deque[tuple[int, Future[Record]]] = deque()
        self._spill = HostMemory(record_bytes, spill, meta_bytes=meta_bytes) if spill else None
        self._spilled: set[int] = set()  # id() of each place taken from _spill

    def close(self) -> None:
        """Free the memory. No copy to or from it may follow."""
        self._grower.shutdown(cancel_futures=True)
        self._growing.clear()
        self._slabs.clear()
        self._free.clear()
        self.n_used = 0
        if self._spill:
            self._spill.close()

    @property
    def spilled_bytes(self) -> int:
        """Bytes taken beyond the limit, used or not."""
        return self._spill.held_bytes if self._spill else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory taken, used or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self) -> Record:
        """Return a free place (record_bytes,) uint8. Raises HostMemoryError, unless reserve() has made sure of the place."""
        self.reserve(1)
        if self._spill and not self._within(1):
            place = self._spill.take()
            self._spilled.add(id(place))
            return place
        self.n_used += 1
        return heappop(self._free)[1]

    def give(self, place: Record, holders: Sequence[object] = ()) -> None:
        """Free a place. If someone still reads it (`holders` is not empty), free it later, on the next reserve().

        Holders may remove themselves from that list in any thread.
        """
        if holders:
            self._held.append((place, holders))
            return
        if self._spill and id(place) in self._spilled:
            self._spilled.remove(id(place))
            self._spill.give(place)
            return
        self.n_used -= 1
        heappush(self._free, _placed(place))

    def _within(self, n: int) -> int:
        """Return how many more places, up to n, fit within the limit."""
        return n if self._limit is None else max(0, min(n, self._limit // self.record_bytes - self.n_used))

    def expect(self, n: int) -> None:
        """Announce n more places; threads allocate slabs for them.

        Raises HostMemoryError if the places exceed the limit. If memory runs out, it is reserve() that raises this error.
        """
        self.check_limit(n)
        n = self._within(n)
        missing = n - len(self._free) - sum(count for count, _ in self._growing)
        size = _SLAB
        while missing > 0:
            count = min(missing, max(1, size // self.record_bytes))
            size = min(_SLAB_MOST, 2 * size)
            try:
                slab = self._grower.submit(self._allocate, count * self._pitch)
            except RuntimeError:  # no memory for a thread: reserve() takes what it needs
                return
            self._growing.append((count, slab))
            missing -= count

    def reserve(self, n: int) -> None:
        """Make sure that n more places can be taken. Raises HostMemoryError; the memory held stays."""
        for _ in range(len(self._held)):
            self.give(*self._held.pop(0))
        self.check_limit(n)
        if self._spill and (beyond := n - self._within(n)):
            self._spill.reserve(beyond)
            n -= beyond
        while len(self._free) < n:
            count, coming = self._growing.popleft() if self._growing else (self._growth(), None)
            try:
                slab = coming.result() if coming else self._allocate(count * self._pitch)
            except MemoryError:
                count += self._expect_no_more()
                if self._spill:  # the memory held now becomes the limit
                    self._limit = self.record_bytes * (self.n_used + len(self._free))
                    self.reserve(n)
                    return
                msg = (
                    f"no host memory for another {count * self.record_bytes / 2**20:.1f} MiB of chunk records, with"
                    f" {self.n_used * self.record_bytes / 2**20:.1f} MiB held: use a shorter context, a smaller cache type"
                    " (`type_k`, `type_v`), or a machine with more memory"
                )
                raise HostMemoryError(msg) from None
            self._slabs.append(slab)
            places = slab.reshape(count, self._pitch)[:, self._lead : self._lead + self.record_bytes]
            self._free += map(_placed, places)
            heapify(self._free)

    def _growth(self) -> int:
        """Return the number of places in an unannounced slab, within the limit."""
        count = max(1, min(self.n_used // _GROWTH, _UNEXPECTED // self.record_bytes))
        return count if self._limit is None else min(count, (self._limit - self.held_bytes) // self.record_bytes)

    def _expect_no_more(self) -> int:
        """Cancel the announced slabs that are not allocated yet. Returns the number of records they would hold."""
        for _, slab in self._growing:
            slab.cancel()
        count = sum(count for count, _ in self._growing)
        self._growing.clear()
        return count

    def check_limit(self, n: int) -> None:
        """Raise HostMemoryError unless the limit allows n more places."""
        need = (self.n_used + n) * self.record_bytes
        if self._limit is not None and need > self._limit and not self._spill:
            msg = (
                f"{counted(self.n_used + n, 'chunk record')} {'takes' if self.n_used + n == 1 else 'take'} {_size(need)} of host"
                f" memory, and {_size(self._limit)} are allowed: raise `host_limit`, keep the rest in a file (`disk`), use a shorter context"
                " or a smaller cache type (`type_k`, `type_v`)"
            )
            raise HostMemoryError(msg)


def _placed(place: Record) -> tuple[int, Record]:
    """Return a place with its address."""
    return place.__array_interface__["data"][0], place


def _size(n: int) -> str:
    unit, name = next((u for u in ((1 << 30, "GiB"), (1 << 20, "MiB")) if n >= u[0]), (1 << 10, "KiB"))
    return f"{n / unit:.2f} {name}"
