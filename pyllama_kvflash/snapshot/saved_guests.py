"""The guests of a fresh pool as a snapshot keeps them: where they are, and the index by which each layer chooses them."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native import Record
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.policy.fresh import IndexForm
from pyllama_kvflash.pool.guests import GuestRoom
from pyllama_kvflash.pool.pager import Pager

GUESTS = np.dtype(
    [
        ("form", "<u4", 3),  # components with 4, 2 and 1 bits; or 0, and the bits of the codes of keys and of values
        ("n_tokens", "<u4"),  # positions in the index
        ("n_fitted", "<u4"),  # chunks that its basis was found for
        ("n_layer", "<u4"),
        ("n_block", "<u4"),  # of guests
        ("n_slot", "<u4"),  # guests of a layer
    ]
)


@dataclass(frozen=True, slots=True)
class SavedGuests:
    """The guests of a sequence, and what its index is.

    n_tokens: positions in the index, the first ones, in whole chunks.
    n_fitted: chunks that the basis of the index was found for.
    sizes: bytes of the index of each layer.
    blocks: of guests, (n_block,) int32.
    units: in each slot of each layer, (n_layer, n_slot) int32; -1: none.
    """

    form: IndexForm | CoarseForm
    n_tokens: int
    n_fitted: int
    sizes: tuple[int, ...]
    blocks: npt.NDArray[np.int32]
    units: npt.NDArray[np.int32]

    @classmethod
    def of(cls, pager: Pager, n_tokens: int) -> tuple[Self | None, list[Record]]:
        """Take the guests as they are now, without changing them, for a snapshot of the first n_tokens positions.

        Returns also the index of each layer. None: the sequence has neither guests nor an index.
        """
        room, ledger = pager.guests, pager.ledger
        if room is None or not (room.native.info().n or ledger.n_guests):
            return None, []
        n = min(room.native.info().n, n_tokens // ledger.chunk * ledger.chunk)
        index = room.native.saved_index(n)
        res = cls(room.form, n, room.n_fitted, tuple(map(len, index)), *room.native.tables())
        return (res if n_tokens == ledger.n_tokens else res.first(n)), index

    def first(self, n_tokens: int) -> Self:
        """Return the index of the first n_tokens positions at most, which are whole chunks, without guests."""
        none = np.empty((len(self.units), 0), np.int32)
        return replace(self, n_tokens=min(n_tokens, self.n_tokens), blocks=none.ravel(), units=none)

    def fits(self, room: GuestRoom) -> bool:
        """Return whether the saved index is such a one as is kept here."""
        return self.form == room.form and self.sizes == room.native.index_sizes(self.n_tokens)

    def packed(self) -> bytes:
        """Return the section of a file that holds this."""
        head = np.zeros((), GUESTS)
        form = self.form
        head["form"] = (0, form.k, form.v) if isinstance(form, CoarseForm) else (form.n_four, form.n_two, form.n_one)
        head["n_tokens"], head["n_fitted"], head["n_layer"] = self.n_tokens, self.n_fitted, len(self.sizes)
        head["n_block"], head["n_slot"] = len(self.blocks), self.units.shape[1]
        parts = np.array(self.sizes, "<u8"), self.blocks.astype("<i4"), self.units.astype("<i4")
        return head.tobytes() + b"".join(part.tobytes() for part in parts)

    @classmethod
    def unpacked(cls, raw: bytes) -> Self | None:
        """Return what a section holds; None: it is empty."""
        if not raw:
            return None
        head = np.frombuffer(raw, GUESTS, 1)[0]
        form = head["form"].tolist()
        n_layer, n_block = int(head["n_layer"]), int(head["n_block"])
        sizes = np.frombuffer(raw, "<u8", n_layer, GUESTS.itemsize)
        rest = np.frombuffer(raw, "<i4", -1, GUESTS.itemsize + sizes.nbytes).astype(np.int32)
        return cls(
            form=IndexForm(*form) if form[0] else CoarseForm(*form[1:]),
            n_tokens=int(head["n_tokens"]),
            n_fitted=int(head["n_fitted"]),
            sizes=tuple(sizes.tolist()),
            blocks=rest[:n_block],
            units=rest[n_block:].reshape(n_layer, int(head["n_slot"])),
        )
