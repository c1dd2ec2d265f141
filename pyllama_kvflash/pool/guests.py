"""Guests: units of 16 positions that each layer chose and holds in blocks of the pool, and the codes by which it chooses them.

Native code makes the choice, in the graph. This module decides which chunks have codes, and how many blocks guests have.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import AllocationError, HostMemoryError
from pyllama_kvflash.native import Context, Record
from pyllama_kvflash.native.guests import UNIT, Guests
from pyllama_kvflash.policy import Ledger
from pyllama_kvflash.policy.coarse import CoarseForm


def form_of(ctx: Context) -> CoarseForm | None:
    """Return the form of the codes that a context keeps of all positions; None: it keeps none."""
    pool = ctx.pool
    return CoarseForm(pool.coarse_k, pool.coarse_v) if pool and pool.coarse_k else None


@contextmanager
def _memory_for(what: str) -> Iterator[None]:
    try:
        yield
    except (AllocationError, MemoryError) as err:
        msg = f"there is no memory for {what} ({err}): use fewer bits (`coarse` 2) or no codes (`coarse` off)"
        raise HostMemoryError(msg) from None


class GuestRoom:
    """The codes of one sequence's chunks, and its guests, which only copy rows of records. The ledger counts the guests' blocks."""

    def __init__(
        self,
        ctx: Context,
        ledger: Ledger,
        record: Callable[[int], Record],
        form: CoarseForm,
        n_threads: int,
        *,
        chooses: bool = True,
    ) -> None:
        """record: returns a chunk's record, which must not move. chooses: whether layers choose guests."""
        self.native = Guests(ctx)
        self.form = form
        self.chooses = chooses
        self._ledger = ledger
        self._record = record
        self._threads = ThreadPoolExecutor(max(1, n_threads), "kvflash-codes")
        self._restoring: list[Future[None]] = []

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def n_bytes(self, n: int) -> int:
        """Return how many bytes the codes of n positions take, on the host or a device."""
        return sum(self.native.code_sizes(n))

    @property
    def n_coded(self) -> int:
        """How many chunks, from the first on, have codes."""
        return self.native.info().n // self._ledger.chunk

    def layers(self) -> npt.NDArray[np.float32]:
        """Return in how many layers each chunk is a guest, (n_chunks,) float32. A layer with part of a chunk counts as that fraction."""
        _, units = self.native.tables()
        each = self._ledger.chunk // UNIT
        counts = np.bincount(units[units >= 0] // each, minlength=self._ledger.n_chunks)
        return (counts / each).astype(np.float32)

    def cover(self, n: int) -> None:
        """Make the missing codes of the first n chunks, from their records. Raises HostMemoryError."""
        info = self.native.info()
        have = info.n // self._ledger.chunk
        if n <= have:
            return
        records = [self._record(c) for c in range(have, n)]
        n_layer = len(self.native.layers)
        # a GPU has one stream for this, and a call takes longer than the GPU's work for a chunk
        each = n_layer if info.device_bytes else 1
        parts = [range(i, i + each) for i in range(0, n_layer, each)]
        with _memory_for(f"the codes of {n * self._ledger.chunk:,} tokens"):
            deque(self._threads.map(lambda layers: self.native.put(layers, have, records), parts), maxlen=0)
            self.native.cover(have, records)

    def begin_restore(self, n_tokens: int, codes: Callable[[int], Record]) -> None:
        """Begin to restore the codes of the first n_tokens positions, in threads. end_restore() or stop_restore() must follow.

        codes: a function that any thread may call. It returns a layer's codes, as saved_codes() does, for at least n_tokens
        positions. Raises HostMemoryError.
        """

        def put(layer: int) -> None:
            self.native.restore_codes(layer, n_tokens, codes(layer))

        try:
            for layer in range(len(self.native.layers)):
                self._restoring.append(self._threads.submit(put, layer))
        except RuntimeError as err:
            msg = f"its codes cannot be restored: {err}"
            raise HostMemoryError(msg) from None

    def end_restore(self, n: int, n_known: int) -> None:
        """Wait for the codes of the first n chunks, whose records must exist.

        n_known: the number of chunks with codes, as in SavedGuests.n_known. Raises the errors of reading codes and of filling lent records.
        """
        with _memory_for("its codes"):
            for put in self._restoring:
                put.result()
        records = [self._record(c) for c in range(n)]
        self.native.cover(0, records[:n_known])
        self.native.cover(n_known, records[n_known:])
        self._restoring.clear()

    def stop_restore(self) -> None:
        """Cancel the restoration of codes, and wait for its threads. Harmless when repeated."""
        for put in self._restoring:
            put.cancel()
        wait(self._restoring)
        self._restoring.clear()

    def put_back(self, blocks: npt.NDArray[np.int32], units: npt.NDArray[np.int32]) -> None:
        """Restore guests: their blocks (n_block,), which must be free, and the units in each layer's slots (n_layer, n_slot)."""
        if self.chooses:
            self._ledger.n_guests = len(blocks)
            self.native.resize(len(blocks), blocks.tolist())
            self.native.place(units)

    def resize(self, n: int) -> None:
        """Set the number of guest blocks to n. Additional blocks must be free."""
        self._ledger.n_guests = n
        self.native.resize(n)

    def give_up(self, n: int) -> None:
        """Give up n guest blocks."""
        self.resize(self._ledger.n_guests - n)

    def reconcile(self) -> None:
        """After a step was cut off, copy the number of guest blocks into the ledger."""
        self._ledger.n_guests = self.native.info().n_block

    def clear(self) -> None:
        """Forget everything, after the context was cleared."""
        self._ledger.n_guests = 0


def coarse_bytes(rooms: Sequence[GuestRoom]) -> int:
    """Return how many bytes the codes of all sequences take, together with the GPU buffers for attending to codes."""
    infos = [room.native.info() for room in rooms]
    return sum(info.bytes for info in infos if info.n) + max((info.device_bytes for info in infos), default=0)
