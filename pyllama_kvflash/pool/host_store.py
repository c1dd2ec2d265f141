"""The host store: one record for every sealed chunk of a sequence."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from pyllama_kvflash.pool.host_memory import HostMemory, Record

Fill = Callable[[Record], None]
"""Fills a place with its record, and checks the record, unless that is done. If it raises, the place holds no valid record. Any
thread may call it."""


@dataclass(slots=True)
class Stored:
    """A record at its place (record_bytes,) uint8, with its checksum once that is known.

    fill: a function that fills the place; None: the place is filled.
    ahead: the call of `fill` in a thread, if there is one.
    """

    record: Record
    fill: Fill | None = None
    checksum: bytes | None = None
    ahead: Future[None] | None = None

    def see(self) -> None:
        """Fill the place, if it is not filled yet. Raises the errors of `fill`. Any thread may call this."""
        if (fill := self.fill) is not None:
            fill(self.record)
            self.fill = None

    def summed(self, compute: Callable[[Record], bytes]) -> bytes:
        """Return the checksum of the record, computed once. Any thread may call this."""
        if self.checksum is None:
            self.checksum = compute(self.record)
        return self.checksum


class HostStore:
    """The records of one sequence's sealed chunks, at places of a HostMemory.

    A record keeps its place until forget(); a view from get() is valid until then. Call HostMemory.reserve() before
    decoding a batch that seals a chunk: running out of memory then loses nothing.
    """

    def __init__(self, memory: HostMemory, n_readers: int = 1) -> None:
        """n_readers: threads that read records ahead."""
        self.memory = memory
        self._n_readers = n_readers
        self._entries: dict[int, Stored] = {}
        self._ahead: ThreadPoolExecutor | None = None
        self._holders: list[object] = []

    # No locks: Ctrl-C may come between any two lines, and a lock left held would block everything after it.

    def close(self) -> None:
        """Release the records, so that HostMemory.close() frees them."""
        self._stop_reading()
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
        """Return the place (record_bytes,) uint8 of a chunk's record, for the caller to fill. Takes a place if the chunk has none."""
        if chunk not in self._entries:
            self._entries[chunk] = Stored(self.memory.take())
        return self._entries[chunk].record

    def lend(self, chunk: int, known: bytes, fill: Fill) -> None:
        """Take a place for a record that lies elsewhere, such as in a file. `fill` copies the record when it is first used.

        known: the checksum of the record. Raises HostMemoryError.
        """
        entry = self._entries[chunk] = Stored(self.memory.take(), fill, known)
        if self._ahead:
            self._begin(self._ahead, entry)

    def get(self, chunk: int) -> Record:
        """Return the record of a chunk in the store. Raises the errors of `fill` for a lent record. Any thread may call this."""
        entry = self._entries[chunk]
        if entry.fill is not None:
            if entry.ahead is None or entry.ahead.cancel():
                entry.see()
            else:
                entry.ahead.result()
        return entry.record

    def stored(self, chunk: int) -> Stored:
        """Return the entry of a chunk in the store. Call the entry's see(), in any thread, before using the record."""
        return self._entries[chunk]

    def first(self, n: int) -> list[Record]:
        """Return the records of the first n chunks, as get() does. All must be in the store. Threads read lent records."""
        self.read_ahead()
        return [self.get(chunk) for chunk in range(n)]

    def read_ahead(self) -> None:
        """Read all lent records ahead, in threads. Records lent later are read as soon as lend() is called. get() raises the
        errors.
        """
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(self._n_readers, "kvflash-read")
        for entry in self._entries.values():
            if entry.fill is not None and (entry.ahead is None or entry.ahead.cancelled()):
                self._begin(self._ahead, entry)

    def _begin(self, readers: ThreadPoolExecutor, entry: Stored) -> None:
        with suppress(RuntimeError):  # no memory for a thread: get() reads
            entry.ahead = readers.submit(entry.see)

    def _stop_reading(self) -> None:
        if self._ahead:
            self._ahead.shutdown(cancel_futures=True)
            self._ahead = None

    def forget(self, first: int) -> None:
        """Forget the records of chunk `first` and all later ones, and free their places."""
        if first == 0 or any(c >= first and entry.fill for c, entry in self._entries.items()):
            self._stop_reading()  # otherwise a thread might write to a place that another record has taken
        for chunk in [c for c in self._entries if c >= first]:
            self.memory.give(self._entries.pop(chunk).record, self._holders)

    def hold(self) -> object:
        """From now on, keep the bytes of forgotten records, for a reader. Returns a holder, for release()."""
        holder = object()
        self._holders.append(holder)
        return holder

    def release(self, holder: object) -> None:
        """End a hold. Any thread may call this, even twice."""
        with suppress(ValueError):
            self._holders.remove(holder)
