"""Guests: blocks of a sequence in which each layer holds its own choice of chunks, and the index that it chooses by.

Native code makes the choice, in the graph. This module decides which chunks are in the index, and how many blocks guests have.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import HostMemoryError
from pyllama_kvflash.native import Context, Record
from pyllama_kvflash.native.guests import UNIT, Guests
from pyllama_kvflash.policy import Ledger
from pyllama_kvflash.policy.fresh import IndexForm

GROWN = 1.125
"""Growth of a sequence, since its basis was found, at which the index is made anew. Keys turn with their position: a sequence half as
long again doubles the error of the basis."""


class GuestRoom:
    """The guests of one sequence. The ledger counts their blocks; a guest is a copy of a record, and nobody's state."""

    def __init__(
        self, ctx: Context, ledger: Ledger, record: Callable[[int], Record], form: IndexForm, n_threads: int
    ) -> None:
        """record: returns the record of a chunk, which keeps its place."""
        self.native = Guests(ctx)
        self.form = form
        self.n_fitted = 0  # chunks that the basis was found for
        self._ledger = ledger
        self._record = record
        self._threads = ThreadPoolExecutor(max(1, n_threads), "kvflash-index")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def n_bytes(self, n: int) -> int:
        """Return the bytes of the index of n positions, wherever it is."""
        return sum(self.form.n_bytes(layer.n_head_kv, layer.n_embd_head_k, n) for layer in self.native.layers)

    @property
    def bits(self) -> float:
        """Bits of the index for each value of a key, in the layer whose keys have the fewest."""
        return self.form.n_bits / min(layer.n_embd_head_k for layer in self.native.layers)

    def layers(self) -> npt.NDArray[np.float32]:
        """Return how many layers have each chunk as a guest, (n_chunks,); a layer with a part of it counts as that part."""
        _, units = self.native.tables()
        each = self._ledger.chunk // UNIT
        counts = np.bincount(units[units >= 0] // each, minlength=self._ledger.n_chunks)
        return (counts / each).astype(np.float32)

    def cover(self, n: int) -> None:
        """Put the first n chunks, which have their records, into the index. Raises HostMemoryError."""
        info = self.native.info()
        have = info.n // self._ledger.chunk
        if n <= have:
            return
        self.n_fitted = min(self.n_fitted, have)  # chunks after a rollback are others
        if n >= GROWN * self.n_fitted:
            have = 0
            self.native.forget()
        records = [self._record(c) for c in range(have, n)]
        try:
            n_layer = len(self.native.layers)
            if not have:
                deque(self._threads.map(lambda i: self._fit(i, records), range(n_layer)), maxlen=0)
            # a GPU has one stream for this, and a call of it takes longer than its work for a chunk
            each = n_layer if info.device_bytes else 1
            parts = [range(i, i + each) for i in range(0, n_layer, each)]
            deque(self._threads.map(lambda layers: self.native.put(layers, have, records), parts), maxlen=0)
        except MemoryError:
            msg = f"no host memory for the index of {n * self._ledger.chunk:,} tokens: use fewer bits (index 1)"
            raise HostMemoryError(msg) from None
        self.native.cover(have, records)
        self.n_fitted = self.n_fitted if have else n

    def _fit(self, layer: int, records: list[Record]) -> None:
        mean, variances, components = self.native.components(layer, records)
        self.native.fit(layer, mean, *self.form.basis(variances, components))

    def restore(self, n: int, index: Sequence[Record], n_fitted: int) -> None:
        """Put back the index of the first n chunks, which have their records. index: from saved_index(), of as many or more.

        Raises what filling a lent record raises.
        """
        records = [self._record(c) for c in range(n)]
        self.native.restore_index(n * self._ledger.chunk, index)
        self.native.cover(0, records)
        self.n_fitted = n_fitted

    def put_back(self, blocks: npt.NDArray[np.int32], units: npt.NDArray[np.int32]) -> None:
        """Have guests in these free blocks (n_block,), with these units in the slots of each layer (n_layer, n_slot)."""
        self._ledger.n_guests = len(blocks)
        self.native.resize(len(blocks), blocks.tolist())
        self.native.place(units)

    def resize(self, n: int) -> None:
        """Have n blocks of guests. As many must be free."""
        self._ledger.n_guests = n
        self.native.resize(n)

    def give_up(self, n: int) -> None:
        """Give up n blocks of guests."""
        self.resize(self._ledger.n_guests - n)

    def reconcile(self) -> None:
        """After a step was cut off, set the ledger to the number of blocks that guests have."""
        self._ledger.n_guests = self.native.info().n_block

    def clear(self) -> None:
        """Forget everything, after the context was cleared."""
        self._ledger.n_guests = self.n_fitted = 0
