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
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.policy.fresh import Heads, IndexForm

GROWN = 1.125
"""Growth of a sequence, since its basis was found, at which the index is made anew. Keys turn with their position: a sequence half as
long again doubles the error of the basis."""


def form_of(ctx: Context) -> IndexForm | CoarseForm | None:
    """Return what a context keeps of all positions beside the pool: codes, an index, or nothing."""
    pool = ctx.pool
    if pool and pool.coarse_k:
        return CoarseForm(pool.coarse_k, pool.coarse_v)
    return IndexForm(pool.index_four, pool.index_two, pool.index_one) if pool and pool.index_four else None


class GuestRoom:
    """What is kept of all chunks of one sequence, an index or codes, and its guests. The ledger counts their blocks; a guest is a
    copy of a record, and nobody's state.
    """

    def __init__(
        self,
        ctx: Context,
        ledger: Ledger,
        record: Callable[[int], Record],
        form: IndexForm | CoarseForm,
        n_threads: int,
        *,
        chooses: bool = True,
    ) -> None:
        """record: returns the record of a chunk, which keeps its place. chooses: whether there are to be guests."""
        self.native = Guests(ctx)
        self.form = form
        self.chooses = chooses
        self.n_fitted = 0  # chunks that the basis was found for
        self._ledger = ledger
        self._record = record
        self._threads = ThreadPoolExecutor(max(1, n_threads), "kvflash-index")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def n_bytes(self, n: int) -> int:
        """Return the bytes of the index of n positions, wherever it is."""
        return sum(self.form.n_bytes(Heads.of(layer), n) for layer in self.native.layers)

    @property
    def n_coded(self) -> int:
        """Chunks, from the first, that have codes."""
        return self.native.info().n // self._ledger.chunk if isinstance(self.form, CoarseForm) else 0

    @property
    def device_bytes(self) -> int:
        """Bytes beside the pool, on its device: of codes, or of an index that is there."""
        info = self.native.info()
        return max(info.device_bytes, info.bytes if info.n and isinstance(self.form, CoarseForm) else 0)

    def layers(self) -> npt.NDArray[np.float32]:
        """Return how many layers have each chunk as a guest, (n_chunks,); a layer with a part of it counts as that part."""
        _, units = self.native.tables()
        each = self._ledger.chunk // UNIT
        counts = np.bincount(units[units >= 0] // each, minlength=self._ledger.n_chunks)
        return (counts / each).astype(np.float32)

    def cover(self, n: int) -> None:
        """Put the first n chunks, which have their records, into the index, or the codes. Raises HostMemoryError."""
        info = self.native.info()
        have = info.n // self._ledger.chunk
        if n <= have:
            return
        self.n_fitted = min(self.n_fitted, have)  # chunks after a rollback are others
        form = self.form if isinstance(self.form, IndexForm) and n >= GROWN * self.n_fitted else None
        if form:
            have = 0
            self.native.forget()
        records = [self._record(c) for c in range(have, n)]
        try:
            n_layer = len(self.native.layers)
            if form:
                deque(self._threads.map(lambda i: self._fit(form, i, records), range(n_layer)), maxlen=0)
            # a GPU has one stream for this, and a call of it takes longer than its work for a chunk
            each = n_layer if info.device_bytes else 1
            parts = [range(i, i + each) for i in range(0, n_layer, each)]
            deque(self._threads.map(lambda layers: self.native.put(layers, have, records), parts), maxlen=0)
        except MemoryError:
            fewer = (
                "use fewer bits (`index` 1)"
                if isinstance(self.form, IndexForm)
                else "use fewer bits (`coarse` 2), or none"
            )
            msg = f"no host memory for what is kept of {n * self._ledger.chunk:,} tokens: {fewer}"
            raise HostMemoryError(msg) from None
        self.native.cover(have, records)
        self.n_fitted = self.n_fitted if have else n

    def _fit(self, form: IndexForm, layer: int, records: list[Record]) -> None:
        mean, variances, components = self.native.components(layer, records)
        self.native.fit(layer, mean, *form.basis(variances, components))

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
        if self.chooses:
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
