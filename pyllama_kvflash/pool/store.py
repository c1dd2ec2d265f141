"""The host store: one record for every sealed chunk, and the memory that all of them are in."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import HostMemoryError

Record = npt.NDArray[np.uint8]
Check = Callable[[Record], None]

_GROWTH = 16  # a slab adds at most 1/16 to what is held: memory stays within 10 % of the records'
_SLAB = 256 << 20  # bytes of a slab that is taken ahead
_UNEXPECTED = 32 << 20  # and of one that somebody waits for: some 10 ms
_CHECKERS = 8  # threads that check lent records; each hashes a GB a second
_PAGE = 4096  # the rows of a record begin on one: a bus reads from there a tenth faster than from anywhere
_LARGE = 1 << 20  # bytes of a record for which that is worth its room


class HostMemory:
    """Places for records, in slabs of host memory that are never moved or copied. Several stores may share it."""

    def __init__(
        self,
        record_bytes: int,
        allocate: Callable[[int], Record] | None = None,
        limit: int | None = None,
        meta_bytes: int = 0,
        spill: Callable[[int], Record] | None = None,
    ) -> None:
        """allocate: gives so many bytes, or raises MemoryError; None: plain memory. limit: bytes of records at most.
        meta_bytes: of a record, before its rows. spill: as allocate, for what is beyond the limit, or the memory there is.
        """
        self.record_bytes = record_bytes
        self.n_used = 0  # places taken
        page = _PAGE if record_bytes >= _LARGE else 1
        self._lead = -meta_bytes % page
        self._pitch = -(-(self._lead + record_bytes) // page) * page
        self._allocate = allocate or (lambda size: np.full(size, 0, np.uint8))  # full: committed now, not when written
        self._limit = limit
        self._held: list[tuple[Record, Sequence[object]]] = []
        self._slabs: list[Record] = []
        self._free: list[Record] = []
        self._grower = ThreadPoolExecutor(1, "kvflash-host")
        self._growing: deque[tuple[int, Future[Record]]] = deque()
        self._spill = HostMemory(record_bytes, spill, meta_bytes=meta_bytes) if spill else None
        self._spilled: set[int] = set()  # ids of places there

    def close(self) -> None:
        """Give the memory back. Nothing may be copied to or from it any more."""
        self._grower.shutdown(cancel_futures=True)
        self._growing.clear()
        self._slabs.clear()
        self._free.clear()
        self.n_used = 0
        if self._spill:
            self._spill.close()

    @property
    def spilled_bytes(self) -> int:
        """What is taken beyond the limit, used or not."""
        return self._spill.held_bytes if self._spill else 0

    @property
    def held_bytes(self) -> int:
        """Host memory taken, used or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self) -> Record:
        """A place (record_bytes,). Raises HostMemoryError unless reserve() was called for it."""
        self.reserve(1)
        if self._spill and not self._within(1):
            place = self._spill.take()
            self._spilled.add(id(place))
            return place
        self.n_used += 1
        return self._free.pop()

    def give(self, place: Record, holders: Sequence[object] = ()) -> None:
        """A place is used no more, once there are no holders: others may remove themselves from that list, in any thread."""
        if holders:
            self._held.append((place, holders))
            return
        if self._spill and id(place) in self._spilled:
            self._spilled.remove(id(place))
            self._spill.give(place)
            return
        self.n_used -= 1
        self._free.append(place)

    def _within(self, n: int) -> int:
        """How many of n more places are within the limit."""
        return n if self._limit is None else max(0, min(n, self._limit // self.record_bytes - self.n_used))

    def expect(self, n: int) -> None:
        """So many more places will be taken: get the memory for them beside the computation, in slabs.

        Raises HostMemoryError if the limit does not allow so many; where memory runs out, reserve() says so.
        """
        self._check_limit(n)
        n = self._within(n)
        missing = n - len(self._free) - sum(count for count, _ in self._growing)
        most = max(1, _SLAB // self.record_bytes)
        while missing > 0:
            count = min(missing, most)
            try:
                slab = self._grower.submit(self._allocate, count * self._pitch)
            except RuntimeError:  # no memory for a thread: reserve() takes what it needs
                return
            self._growing.append((count, slab))
            missing -= count

    def reserve(self, n: int) -> None:
        """Make sure that n more places can be taken. Raises HostMemoryError, and holds what it held."""
        for _ in range(len(self._held)):
            self.give(*self._held.pop(0))
        self._check_limit(n)
        if self._spill and (beyond := n - self._within(n)):
            self._spill.reserve(beyond)
            n -= beyond
        while len(self._free) < n:
            count, coming = self._growing.popleft() if self._growing else (self._growth(), None)
            try:
                slab = coming.result() if coming else self._allocate(count * self._pitch)
            except MemoryError:
                count += self._expect_no_more()
                if self._spill:  # from now on, what is held is all there is
                    self._limit = self.record_bytes * (self.n_used + len(self._free))
                    self.reserve(n)
                    return
                msg = (
                    f"no host memory for another {count * self.record_bytes / 2**20:.1f} MiB of chunk records, with"
                    f" {self.n_used * self.record_bytes / 2**20:.1f} MiB held: use a shorter context, a smaller cache type"
                    " (-ctk, -ctv), or a machine with more memory"
                )
                raise HostMemoryError(msg) from None
            self._slabs.append(slab)
            self._free.extend(slab.reshape(count, self._pitch)[:, self._lead : self._lead + self.record_bytes])

    def _growth(self) -> int:
        """Places of a slab that nobody expected: no more of them than the limit allows."""
        count = max(1, min(self.n_used // _GROWTH, _UNEXPECTED // self.record_bytes))
        return count if self._limit is None else min(count, (self._limit - self.held_bytes) // self.record_bytes)

    def _expect_no_more(self) -> int:
        """What is not taken yet will not be: so many records."""
        for _, slab in self._growing:
            slab.cancel()
        count = sum(count for count, _ in self._growing)
        self._growing.clear()
        return count

    def _check_limit(self, n: int) -> None:
        need = (self.n_used + n) * self.record_bytes
        if self._limit is not None and need > self._limit and not self._spill:
            msg = (
                f"{self.n_used + n} chunk records take {_size(need)} of host memory, and {_size(self._limit)} are"
                " allowed: raise host_limit (--kvflash-host), have the rest in a file (--kvflash-disk), use a shorter context"
                " or a smaller cache type (-ctk, -ctv)"
            )
            raise HostMemoryError(msg)


@dataclass(slots=True)
class _Entry:
    """A record. check: it is somebody else's, and to be checked before it is used; ahead: that is being done."""

    record: Record
    check: Check | None = None
    digest: bytes | None = None
    ahead: Future[None] | None = None
    lent: bool = False

    def see(self) -> None:
        if self.check is not None:
            self.check(self.record)
            self.check = None


class HostStore:
    """Owns the records of one sequence's sealed chunks, at places of a HostMemory.

    A record's place, once given, holds until forget(); the view that get() returns is valid until then. reserve() is
    called before the batch that seals a chunk is decoded, so that running out of memory loses nothing.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._entries: dict[int, _Entry] = {}
        self._ahead: ThreadPoolExecutor | None = None
        self._holders: list[object] = []

    # Without locks: Ctrl-C may come between any two lines, and one that it leaves locked would stop all that follows.

    def close(self) -> None:
        """Let go of the records, for HostMemory.close() to free them."""
        self._stop_checking()
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._entries

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.memory.record_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the records held."""
        return len(self._entries) * self.record_bytes

    def put(self, chunk: int) -> Record:
        """A place (record_bytes,) for a chunk's record, which the caller fills now; the same one if it has one."""
        if chunk not in self._entries:
            self._entries[chunk] = _Entry(self.memory.take())
        return self._entries[chunk].record

    def lend(self, chunk: int, record: Record, digest: bytes, check: Check) -> None:
        """A chunk's record that is somebody else's, of a map of a file perhaps, and stays as it is until forget(). check: is
        called with it before it is used for the first time, and raises if it is not what it should be.
        """
        self._entries[chunk] = _Entry(record, check, digest, lent=True)

    def get(self, chunk: int) -> Record:
        """The record of a chunk that is in the store. Raises what the check of a lent one does. Any thread may ask."""
        entry = self._entries[chunk]
        if entry.check is not None:
            if entry.ahead is None or entry.ahead.cancel():
                entry.see()
            else:
                entry.ahead.result()
        return entry.record

    def unchecked(self, chunk: int) -> tuple[Record, Callable[[], None]]:
        """The record of a chunk, and what is to be called before it is used, in any thread: as the check of a lent one."""
        entry = self._entries[chunk]
        return entry.record, entry.see

    def check_ahead(self) -> None:
        """All lent records will be used: check them in threads meanwhile. What is wrong get() says."""
        self._stop_checking()
        self._ahead = ThreadPoolExecutor(_CHECKERS, "kvflash-check")
        with suppress(RuntimeError):  # no memory for a thread: get() checks
            for entry in self._entries.values():
                if entry.check is not None:
                    entry.ahead = self._ahead.submit(entry.see)

    def _stop_checking(self) -> None:
        if self._ahead:
            self._ahead.shutdown(cancel_futures=True)
            self._ahead = None

    def digest(self, chunk: int, record: Record, compute: Callable[[Record], bytes]) -> bytes:
        """The digest of a whole record that is held, computed once as long as it is the chunk's. Any thread may ask."""
        entry = self._entries.get(chunk)
        if entry is None or entry.record is not record:  # it was forgotten meanwhile
            return compute(record)
        if entry.digest is None:
            entry.digest = compute(record)
        return entry.digest

    def forget(self, first: int) -> None:
        """Forget the records of chunk `first` and all later ones; their places are used again."""
        if any(c >= first and entry.lent for c, entry in self._entries.items()):
            self._stop_checking()
        for chunk in [c for c in self._entries if c >= first]:
            entry = self._entries.pop(chunk)
            if not entry.lent:
                self.memory.give(entry.record, self._holders)

    def hold(self) -> None:
        """From now on, until release(), what was forgotten stays as it is: somebody reads it."""
        self._holders.append(self)

    def release(self) -> None:
        """It has been read. Any thread may say so."""
        self._holders.pop()


def _size(n: int) -> str:
    unit, name = next((u for u in ((1 << 30, "GiB"), (1 << 20, "MiB")) if n >= u[0]), (1 << 10, "KiB"))
    return f"{n / unit:.2f} {name}"
