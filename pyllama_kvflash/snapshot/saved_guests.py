"""The codes and guests in a snapshot: the form of the codes, and the places of the guests."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native import Record
from pyllama_kvflash.native.checksum import CHECKSUM
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.pool.guests import GuestRoom
from pyllama_kvflash.pool.pager import Pager

GUESTS = np.dtype(
    [
        ("reserved", "<u4"),  # 0
        ("form", "<u4", 2),  # bits of the codes of keys and of values
        ("n_tokens", "<u4"),  # positions with codes
        ("n_known", "<u4"),  # positions with codes when the last segment began
        ("n_layer", "<u4"),
        ("n_block", "<u4"),  # guest blocks
        ("n_slot", "<u4"),  # guest slots of a layer
    ]
)


@dataclass(frozen=True, slots=True)
class SavedGuests:
    """The guests of a sequence, and a description of its codes.

    n_tokens: how many positions, counted from the first, have codes; whole chunks.
    n_known: positions with codes when the last segment of 4,096 began.
    sizes: bytes of the codes of each layer.
    checksums: one for each layer's codes, so that threads can check them; empty: not known yet.
    blocks: guest blocks, (n_block,) int32.
    units: the unit in each slot of each layer, (n_layer, n_slot) int32; -1: none.
    """

    form: CoarseForm
    n_tokens: int
    n_known: int
    sizes: tuple[int, ...]
    blocks: npt.NDArray[np.int32]
    units: npt.NDArray[np.int32]
    checksums: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, pager: Pager, n_tokens: int) -> tuple[Self | None, list[Record]]:
        """Copy the current guests, and the codes of each layer, for a snapshot of the first n_tokens positions.

        Returns (None, []) if the sequence has neither guests nor codes.
        """
        room, ledger = pager.guests, pager.ledger
        if room is None or not (room.native.info().n or ledger.n_guests):
            return None, []
        info = room.native.info()
        n = min(info.n, n_tokens // ledger.chunk * ledger.chunk)
        codes = room.native.saved_codes(n)
        res = cls(room.form, n, min(n, info.n_known), tuple(map(len, codes)), *room.native.tables())
        return (res if n_tokens == ledger.n_tokens else res.first(n)), codes

    def first(self, n_tokens: int) -> Self:
        """Return a copy without guests, cut to n_tokens positions (whole chunks) if it has more."""
        none = np.empty((len(self.units), 0), np.int32)
        n = min(n_tokens, self.n_tokens)
        return replace(self, n_tokens=n, n_known=min(n, self.n_known), blocks=none.ravel(), units=none)

    def fits(self, room: GuestRoom) -> bool:
        """Return whether the saved codes have the form and the sizes of this pool's codes."""
        return self.form == room.form and self.sizes == room.native.code_sizes(self.n_tokens)

    def packed(self) -> bytes:
        """Return the file section for these guests."""
        head = np.zeros((), GUESTS)
        head["form"] = self.form.k, self.form.v
        head["n_tokens"], head["n_known"], head["n_layer"] = self.n_tokens, self.n_known, len(self.sizes)
        head["n_block"], head["n_slot"] = len(self.blocks), self.units.shape[1]
        sizes, *tables = np.array(self.sizes, "<u8"), self.blocks.astype("<i4"), self.units.astype("<i4")
        return b"".join([head.tobytes(), sizes.tobytes(), *self.checksums, *(table.tobytes() for table in tables)])

    @classmethod
    def unpacked(cls, raw: bytes) -> Self | None:
        """Return the guests in a file section; None if the section is empty."""
        if not raw:
            return None
        head = np.frombuffer(raw, GUESTS, 1)[0]
        n_layer, n_block = int(head["n_layer"]), int(head["n_block"])
        sizes = np.frombuffer(raw, "<u8", n_layer, GUESTS.itemsize)
        checksums = np.frombuffer(raw, f"V{CHECKSUM}", n_layer, GUESTS.itemsize + sizes.nbytes)
        rest = np.frombuffer(raw, "<i4", -1, GUESTS.itemsize + sizes.nbytes + checksums.nbytes).astype(np.int32)
        return cls(
            form=CoarseForm(*head["form"].tolist()),
            n_tokens=int(head["n_tokens"]),
            n_known=int(head["n_known"]),
            sizes=tuple(sizes.tolist()),
            blocks=rest[:n_block],
            units=rest[n_block:].reshape(n_layer, int(head["n_slot"])),
            checksums=tuple(each.tobytes() for each in checksums),
        )
