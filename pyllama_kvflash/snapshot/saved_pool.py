"""The state of a pool in a snapshot: taken from a pager, and restored into one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native import Record
from pyllama_kvflash.policy import bring_in
from pyllama_kvflash.policy.ledger import Mask, Scores
from pyllama_kvflash.pool.pager import Pager
from pyllama_kvflash.snapshot.saved_guests import SavedGuests

Lend = Callable[[int], None]
"""Lends the record of a chunk to the host store."""
Codes = Callable[[int], Record]
"""Reads the codes of a layer. Any thread may call it."""

_LEAST_WIDTH = 256  # the fewest cells that the attention reads


@dataclass(frozen=True, slots=True)
class SavedPool:
    """The state of a pool. What it keeps of each chunk is in arrays (n_chunks,).

    block: each chunk's block; -1: none.
    n_pool: cells of the pool.
    n_kv: cells that the attention read; 0: unknown, because positions were cut off.
    guests: the guests, and a description of the codes; None without both.
    """

    n_tokens: int
    n_pool: int
    n_kv: int
    tick: int
    resident: Mask
    block: npt.NDArray[np.int32]
    touched: npt.NDArray[np.int64]
    score: Scores
    pins: frozenset[int] = frozenset()
    guests: SavedGuests | None = None

    @classmethod
    def of(cls, pager: Pager) -> Self:
        """Copy the current state of the pool."""
        ledger, info = pager.ledger, pager.ctx.pool_info()
        where = pager.residency()
        return cls(
            n_tokens=ledger.n_tokens,
            n_pool=info.n_pool,
            n_kv=max(info.n_kv, _LEAST_WIDTH),  # 0 after an exact pass, until the pool is read
            tick=ledger.tick,
            resident=where.resident,
            block=where.block,
            touched=ledger.touched,
            score=where.score,
            pins=frozenset(ledger.pins),
        )

    def first(self, n_tokens: int, chunk: int) -> Self:
        """Return a copy cut to the first n_tokens positions, which are all of them or end with a chunk."""
        if n_tokens == self.n_tokens:
            return self
        n = n_tokens // chunk
        cut = {name: getattr(self, name)[:n] for name in ("resident", "block", "touched", "score")}
        pins = frozenset(c for c in self.pins if c < n)
        guests = self.guests and self.guests.first(n * chunk)
        return replace(self, n_tokens=n_tokens, n_kv=0, pins=pins, guests=guests, **cut)

    def put_back(self, pager: Pager, lend: Lend, codes: Codes | None) -> bool:
        """Restore the pool into an empty sequence's pager. Returns whether the chunks are back in their former blocks.

        Chunks return to their blocks in a pool of the same size that no other sequence shares. Elsewhere the hottest chunks that
        fit are paged in; with policy fresh, the next token chooses guests instead.

        codes: reads saved codes; None: they cannot be used here. Raises the errors of `codes`, `lend` and page-ins.
        """
        ledger, room = pager.ledger, pager.guests
        pins = set(ledger.pins)
        ledger.pins |= self.pins
        try:
            if room:
                pager.records.read_ahead()  # guests may be fetched from any record
            if room and self.guests and codes:  # first, while memory for the records is being allocated
                pager.ctx.synchronize()  # here once, instead of in each thread
                room.begin_restore(self.guests.n_tokens, codes)
            for chunk in range(len(self.resident)):
                lend(chunk)
            return self._put_back(pager, codes)
        except BaseException:
            if room:
                room.stop_restore()
            ledger.pins.clear()
            ledger.pins |= pins
            raise

    def _put_back(self, pager: Pager, codes: Codes | None) -> bool:
        ledger = pager.ledger
        same = self.n_kv > 0 and pager.ctx.pool_info().n_pool == self.n_pool and len(ledger.blocks.ledgers) == 1
        guests = self.guests if codes else None
        if pager.guests and guests:
            pager.guests.end_restore(guests.n_tokens // ledger.chunk, guests.n_known // ledger.chunk)
        else:
            same = same and not self._shares_pool(pager)
        if same:
            self._in_place(pager, guests)
        else:
            self._anew(pager)
        pager.ctx.wait()
        pager.records.forget(self.n_tokens // ledger.chunk)  # the record of a partly filled chunk
        return same

    def _shares_pool(self, pager: Pager) -> bool:
        """Return whether guests held blocks, or will hold some. If so, the saved places of chunks do not describe this pool."""
        if pager.guests and pager.guests.chooses:
            return not np.all(self.resident)
        return self.guests is not None and len(self.guests.blocks) > 0

    def _in_place(self, pager: Pager, guests: SavedGuests | None) -> None:
        for chunk in np.flatnonzero(self.resident).tolist():
            pager.ctx.page_in(chunk, pager.records.get(chunk), int(self.block[chunk]))
        pager.ledger.load(self.n_tokens, self.resident, self.touched, self.score, self.tick)
        if pager.guests and guests:
            pager.guests.put_back(guests.blocks, guests.units)
        pager.ctx.set_width(self.n_kv)

    def _anew(self, pager: Pager) -> None:
        ledger = pager.ledger
        out = np.zeros_like(self.resident)
        ledger.load(self.n_tokens, out, self.touched, self.score, self.tick)
        must = ledger.protected()
        n_more = ledger.n_share - int(np.count_nonzero(must)) - 1
        others = np.flatnonzero(~must)
        hottest = others[np.argsort(ledger.heat()[others], kind="stable")][::-1]
        if pager.guests and pager.guests.chooses and len(hottest) > n_more:
            n_more = 0  # guests have these blocks
        back = [*np.flatnonzero(must).tolist(), *hottest[: max(0, n_more)].tolist()]
        pager.apply(bring_in(ledger, back))
        ledger.load(self.n_tokens, ledger.resident, self.touched, self.score, self.tick)
        pager.host(0)
