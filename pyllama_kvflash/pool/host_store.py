"""The host store: one record for every sealed chunk of a sequence."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from pyllama_kvflash.pool.host_memory import HostMemory, Record

Check = Callable[[Record], None]

_CHECKERS = 8  # threads that check lent records; each hashes a GB a second


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

    def hold(self) -> object:
        """Keep what is forgotten from now on as it is, for somebody who reads it. Returns what release() takes."""
        holder = object()
        self._holders.append(holder)
        return holder

    def release(self, holder: object) -> None:
        """End a hold. Any thread may call this, also again."""
        with suppress(ValueError):
            self._holders.remove(holder)
