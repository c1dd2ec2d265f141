"""What to drop and what to fetch: computed here, applied in one place (the pager)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.policy.ledger import Ledger, State


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks to drop, coldest first, then chunks to page in, in order. Applied whole, drops first.

    taken: what other sequences of the pool give up for it, as (place in Blocks.ledgers, chunks).
    """

    drops: tuple[int, ...] = ()
    page_ins: tuple[int, ...] = ()
    taken: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.drops or self.page_ins)


def make_room(ledger: Ledger, n_blocks: int) -> Plan:
    """Free enough blocks for n_blocks new ones, by dropping the coldest evictable chunks, see _given_up().

    Raises PoolError if what is protected leaves too few: nothing is dropped then.
    """
    return _given_up(ledger, n_blocks - ledger.n_free)


def bring_in(ledger: Ledger, chunks: Sequence[int]) -> Plan:
    """Make the given chunks resident, at the cost of the coldest evictable ones. Resident ones stay.

    Raises PoolError if there is no room for all of them.
    """
    missing = tuple(c for c in dict.fromkeys(chunks) if ledger.state_of(c) == State.OUT)
    return replace(_given_up(ledger, len(missing) - ledger.n_free, keep=chunks), page_ins=missing)


def reselect(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    """Make the hottest of all candidates resident, in or out, and leave n_free blocks free for what comes next.

    n_most: chunks that come in at most, the hottest of them for the coldest there are; None: as many as it takes. Page-ins
    come hottest first. What is protected stays; no more is dropped than is needed. Where the pool has no room for any
    candidate, nothing moves.
    """
    mask = ledger.candidates()
    resident = ledger.state == State.RESIDENT
    room = room_for_candidates(ledger, n_free)
    candidates = np.flatnonzero(mask)
    if room <= 0:
        return Plan()
    hottest = candidates[np.argsort(ledger.heat()[candidates], kind="stable")][::-1]  # ties: as in _by_heat
    page_ins = hottest[:room][~resident[hottest[:room]]][:n_most]
    cold = hottest[room:][resident[hottest[room:]]][::-1]  # as many as page-ins at least, or there are free blocks
    n_drop = max(0, len(page_ins) + n_free - ledger.n_free)
    return Plan(tuple(int(c) for c in cold[:n_drop]), tuple(int(c) for c in page_ins))


def room_for_candidates(ledger: Ledger, n_free: int) -> int:
    """Blocks beside those of protected chunks and n_free that are to stay free; maybe less than none."""
    kept = (ledger.state == State.RESIDENT) & ~ledger.candidates()
    return ledger.n_block - n_free - ledger.n_in_flight - int(np.count_nonzero(kept))


def _given_up(ledger: Ledger, n: int, keep: Sequence[int] = ()) -> Plan:
    """Drops that free n blocks for a sequence: one by one, of the sequence that holds the most then (with the n for the
    one that asks; that one first, if others hold as many), its coldest. So each may hold an equal share, and what one
    does not need is another's.
    """
    if n <= 0:
        return Plan()
    ledgers = ledger.blocks.ledgers
    cold = [_by_heat(each, keep if each is ledger else ())[::-1] for each in ledgers]
    if sum(map(len, cold)) < n:
        raise PoolError(_too_few(ledger, n, sum(map(len, cold))))
    held = [each.n_held + (n if each is ledger else 0) for each in ledgers]
    drops: list[list[int]] = [[] for _ in ledgers]
    for _ in range(n):
        i = max((i for i, c in enumerate(cold) if c), key=lambda i: (held[i], ledgers[i] is ledger))
        drops[i].append(cold[i].pop())
        held[i] -= 1
    own = ledgers.index(ledger)
    taken = tuple((i, tuple(chunks)) for i, chunks in enumerate(drops) if chunks and i != own)
    return Plan(tuple(drops[own]), taken=taken)


def _by_heat(ledger: Ledger, keep: Sequence[int]) -> list[int]:
    """The chunks that could leave, coldest first."""
    mask = ledger.evictable()
    mask[list(keep)] = False
    candidates = np.flatnonzero(mask)
    order = np.argsort(ledger.heat()[candidates], kind="stable")  # ties: the older chunk goes
    return [int(c) for c in candidates[order]]


def _too_few(ledger: Ledger, n: int, n_there: int) -> str:
    ledgers = ledger.blocks.ledgers
    held = sum(int(np.count_nonzero(each.protected() & (each.state == State.RESIDENT))) for each in ledgers)
    return (
        f"{n} more blocks of the pool are needed and {n_there} can be freed: {held} of its {ledger.blocks.n}"
        " are protected (sinks, tail, pins); use a larger pool, a smaller batch or fewer pins"
    )
