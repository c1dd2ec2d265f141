"""The host store: one record for every sealed chunk of a sequence."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from pyllama_kvflash.pool.host_memory import HostMemory, Record

Check = Callable[[Record], None]

_CHECKERS = 8  # threads that check lent records; each hashes 1 GB/s


@dataclass(slots=True)
class _Entry:
    """A record, with its digest once it is known.

    check: verifies a lent record that was not checked yet; None: none is needed.
    ahead: that check, if it was begun in a thread.
    lent: somebody else owns the record.
    """

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
    """The records of one sequence's sealed chunks, at places of a HostMemory.

    A record keeps its place until forget(), and the view that get() returns is valid until then. Call
    HostMemory.reserve() before decoding the batch that seals a chunk; then running out of memory loses nothing.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._entries: dict[int, _Entry] = {}
        self._ahead: ThreadPoolExecutor | None = None
        self._holders: list[object] = []

    # No locks: Ctrl-C may come between any two lines, and a lock left held would block everything after it.

    def close(self) -> None:
        """Let go of the records, so that HostMemory.close() frees them."""
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
        """Return the place (record_bytes,) uint8 of a chunk's record, new or the one it has, for the caller to fill."""
        if chunk not in self._entries:
            self._entries[chunk] = _Entry(self.memory.take())
        return self._entries[chunk].record

    def lend(self, chunk: int, record: Record, digest: bytes, check: Check) -> None:
        """Take a record that somebody else owns, perhaps in a mapped file, and keeps unchanged until forget().

        digest: of the record. check: called with the record before its first use; it raises if the record is damaged.
        """
        self._entries[chunk] = _Entry(record, check, digest, lent=True)

    def get(self, chunk: int) -> Record:
        """Return the record of a chunk in the store. Raises what the check of a lent one raises. For any thread."""
        entry = self._entries[chunk]
        if entry.check is not None:
            if entry.ahead is None or entry.ahead.cancel():
                entry.see()
            else:
                entry.ahead.result()
        return entry.record

    def unchecked(self, chunk: int) -> tuple[Record, Callable[[], None]]:
        """Return the record of a chunk, and a function to call before using it, in any thread.

        The function checks a lent record, and raises what its check raises.
        """
        entry = self._entries[chunk]
        return entry.record, entry.see

    def check_ahead(self) -> None:
        """Begin to check all lent records in threads, because all will be used. get() raises what was found wrong."""
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
        """Return the digest of a whole record, computed once while the record is the chunk's. For any thread."""
        entry = self._entries.get(chunk)
        if entry is None or entry.record is not record:  # it was forgotten meanwhile
            return compute(record)
        if entry.digest is None:
            entry.digest = compute(record)
        return entry.digest

    def forget(self, first: int) -> None:
        """Forget the records of chunk `first` and all later ones, and free their places."""
        if any(c >= first and entry.lent for c, entry in self._entries.items()):
            self._stop_checking()
        for chunk in [c for c in self._entries if c >= first]:
            entry = self._entries.pop(chunk)
            if not entry.lent:
                self.memory.give(entry.record, self._holders)

    def hold(self) -> object:
        """Keep the bytes of records that are forgotten from now on, for a reader. Returns a holder for release()."""
        holder = object()
        self._holders.append(holder)
        return holder

    def release(self, holder: object) -> None:
        """End a hold. Harmless when called again. For any thread."""
        with suppress(ValueError):
            self._holders.remove(holder)
