"""Plan which chunks to drop and which to page in. Only the pager applies a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.policy.ledger import Ledger

_GUESTS = -1  # a guest block, in a list of chunks


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks to drop, coldest first, and chunks to page in, in order. A plan is applied as a whole, drops first.

    taken: chunks that other sequences give up for this plan, as (index in Blocks.ledgers, chunks).
    guests: numbers of guest blocks given up for this plan, as (index in Blocks.ledgers, blocks).
    """

    drops: tuple[int, ...] = ()
    page_ins: tuple[int, ...] = ()
    taken: tuple[tuple[int, tuple[int, ...]], ...] = ()
    guests: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.drops or self.page_ins)


def make_room(ledger: Ledger, n_blocks: int) -> Plan:
    """Plan to have n_blocks free blocks, by dropping the coldest evictable chunks. See _given_up().

    Raises PoolError, and drops nothing, if the protected chunks leave too few blocks.
    """
    return _given_up(ledger, n_blocks - ledger.n_free)


def bring_in(ledger: Ledger, chunks: Sequence[int]) -> Plan:
    """Plan to make the given chunks resident in place of the coldest evictable ones. Resident ones stay.

    Raises PoolError if there is no room for all of them.
    """
    missing = tuple(c for c in dict.fromkeys(chunks) if not ledger.holds(c))
    return replace(_given_up(ledger, len(missing) - ledger.n_free, keep=chunks), page_ins=missing)


def reselect(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    """Plan to make the hottest candidates resident, and to leave n_free blocks free for new chunks.

    n_most: the most chunks to page in (the hottest, in place of the coldest resident ones). None: no limit.

    The hottest page-ins come first. Protected chunks stay, and no more chunks are dropped than needed. If the pool has no
    room for any candidate, nothing moves.
    """
    mask = ledger.candidates()
    resident = ledger.resident
    room = room_for_candidates(ledger, n_free)
    candidates = np.flatnonzero(mask)
    if room <= 0:
        return Plan()
    hottest = candidates[np.argsort(ledger.heat()[candidates], kind="stable")][::-1]  # ties: as in _by_heat
    page_ins = hottest[:room][~resident[hottest[:room]]][:n_most]
    cold = hottest[room:][resident[hottest[room:]]][::-1]  # at least as many as page-ins, unless there are free blocks
    n_drop = max(0, len(page_ins) + n_free - ledger.n_free)
    return Plan(tuple(int(c) for c in cold[:n_drop]), tuple(int(c) for c in page_ins))


def room_for_candidates(ledger: Ledger, n_free: int) -> int:
    """Return the number of blocks for candidates. Other resident chunks keep theirs, and n_free blocks stay free. May be negative."""
    kept = ledger.resident & ~ledger.candidates()
    return ledger.n_block - n_free - int(np.count_nonzero(kept))


def _given_up(ledger: Ledger, n: int, keep: Sequence[int] = ()) -> Plan:
    """Plan, one at a time, the drops that free n blocks for `ledger`.

    The sequence that holds the most blocks drops its coldest evictable chunk, or else a guest block. `ledger` counts as holding n
    more blocks, and drops first in a tie. So each sequence is sure of an equal share, and may use blocks that others do not need.

    keep: chunks of `ledger` that stay.
    """
    if n <= 0:
        return Plan()
    ledgers = ledger.blocks.ledgers
    cold = [[*[_GUESTS] * each.n_guests, *_by_heat(each, keep if each is ledger else ())[::-1]] for each in ledgers]
    if sum(map(len, cold)) < n:
        raise PoolError(_too_few(ledger, n, sum(map(len, cold))))
    held = [each.n_held + (n if each is ledger else 0) for each in ledgers]
    drops: list[list[int]] = [[] for _ in ledgers]
    for _ in range(n):
        i = max((i for i, c in enumerate(cold) if c), key=lambda i: (held[i], ledgers[i] is ledger))
        drops[i].append(cold[i].pop())
        held[i] -= 1
    own = ledgers.index(ledger)
    chunks = [tuple(c for c in dropped if c != _GUESTS) for dropped in drops]
    taken = tuple((i, dropped) for i, dropped in enumerate(chunks) if dropped and i != own)
    guests = tuple((i, n) for i, dropped in enumerate(drops) if (n := dropped.count(_GUESTS)))
    return Plan(chunks[own], taken=taken, guests=guests)


def _by_heat(ledger: Ledger, keep: Sequence[int]) -> list[int]:
    """Return the evictable chunks, coldest first."""
    mask = ledger.evictable()
    mask[list(keep)] = False
    candidates = np.flatnonzero(mask)
    order = np.argsort(ledger.heat()[candidates], kind="stable")  # ties: the older chunk goes
    return [int(c) for c in candidates[order]]


def _too_few(ledger: Ledger, n: int, n_there: int) -> str:
    ledgers = ledger.blocks.ledgers
    held = sum(int(np.count_nonzero(each.protected() & each.resident)) for each in ledgers)
    return (
        f"{n} more blocks of the pool are needed and {n_there} can be freed: {held} of its {ledger.blocks.n}"
        " are protected (sinks, tail, pins); use a larger pool, a smaller batch or fewer pins"
    )
