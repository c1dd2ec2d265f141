"""What to drop and what to fetch: computed here, applied in one place (the pager)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.policy.ledger import Ledger, State


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks to drop, coldest first, then chunks to page in, in order. Applied whole, drops first."""

    drops: tuple[int, ...] = ()
    page_ins: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.drops or self.page_ins)


def make_room(ledger: Ledger, n_blocks: int) -> Plan:
    """Free enough blocks for n_blocks new ones, by dropping the coldest evictable chunks.

    Raises PoolError if what is protected leaves too few: nothing is dropped then.
    """
    return Plan(drops=_coldest(ledger, n_blocks - ledger.n_free, keep=()))


def bring_in(ledger: Ledger, chunks: Sequence[int]) -> Plan:
    """Make the given chunks resident, at the cost of the coldest evictable ones. Resident ones stay.

    Raises PoolError if there is no room for all of them.
    """
    missing = tuple(c for c in dict.fromkeys(chunks) if ledger.state_of(c) == State.OUT)
    return Plan(drops=_coldest(ledger, len(missing) - ledger.n_free, keep=chunks), page_ins=missing)


def reselect(ledger: Ledger, n_free: int) -> Plan:
    """Make the hottest of all candidates resident, in or out, and leave n_free blocks free for what comes next.

    Page-ins come hottest first. What is protected stays; no more is dropped than is needed. Where the pool has no room
    for any candidate, nothing moves.
    """
    mask = ledger.candidates()
    resident = ledger.state == State.RESIDENT
    room = room_for_candidates(ledger, n_free)
    candidates = np.flatnonzero(mask)
    if room <= 0:
        return Plan()
    hottest = candidates[np.argsort(ledger.heat()[candidates], kind="stable")][::-1]  # ties: as in _coldest
    page_ins = hottest[:room][~resident[hottest[:room]]]
    cold = hottest[room:][resident[hottest[room:]]][::-1]
    n_drop = max(0, len(page_ins) + n_free - ledger.n_free)
    return Plan(tuple(int(c) for c in cold[:n_drop]), tuple(int(c) for c in page_ins))


def room_for_candidates(ledger: Ledger, n_free: int) -> int:
    """Blocks beside those of protected chunks and n_free that are to stay free; maybe less than none."""
    kept = (ledger.state == State.RESIDENT) & ~ledger.candidates()
    return ledger.n_block - n_free - ledger.n_in_flight - int(np.count_nonzero(kept))


def _coldest(ledger: Ledger, n: int, keep: Sequence[int]) -> tuple[int, ...]:
    if n <= 0:
        return ()
    mask = ledger.evictable()
    mask[list(keep)] = False
    candidates = np.flatnonzero(mask)
    if len(candidates) < n:
        held = int(np.count_nonzero(ledger.protected() & (ledger.state == State.RESIDENT)))
        msg = (
            f"{n} more blocks of the pool are needed and {len(candidates)} can be freed: {held} of its {ledger.n_block}"
            " are protected (sinks, tail, pins); use a larger pool, a smaller batch or fewer pins"
        )
        raise PoolError(msg)
    order = np.argsort(ledger.heat()[candidates], kind="stable")  # ties: the older chunk goes
    return tuple(int(c) for c in candidates[order[:n]])
