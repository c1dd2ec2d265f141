"""What to drop and what to fetch: computed here, applied in one place (the engine)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.policy.ledger import Ledger, State

Scores = npt.NDArray[np.float64]
Scorer = Callable[[Ledger], Scores]
"""From a ledger to a score for each of its chunks, (n_chunks,) float64; higher is hotter. Asked only when needed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks to drop, coldest first, then chunks to page in, in order. Applied whole, drops first."""

    drops: tuple[int, ...] = ()
    page_ins: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.drops or self.page_ins)


def make_room(ledger: Ledger, score: Scorer, n_blocks: int) -> Plan:
    """Free enough blocks for n_blocks new ones, by dropping the evictable chunks of lowest score.

    Raises PoolError if what is protected leaves too few: nothing is dropped then.
    """
    return Plan(drops=_coldest(ledger, score, n_blocks - ledger.n_free, keep=()))


def bring_in(ledger: Ledger, score: Scorer, chunks: Sequence[int]) -> Plan:
    """Make the given chunks resident, at the cost of the evictable ones of lowest score. Resident ones stay.

    Raises PoolError if there is no room for all of them.
    """
    missing = tuple(c for c in dict.fromkeys(chunks) if ledger.state_of(c) == State.OUT)
    return Plan(drops=_coldest(ledger, score, len(missing) - ledger.n_free, keep=chunks), page_ins=missing)


def _coldest(ledger: Ledger, score: Scorer, n: int, keep: Sequence[int]) -> tuple[int, ...]:
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
    order = np.argsort(score(ledger)[candidates], kind="stable")  # ties: the older chunk goes
    return tuple(int(c) for c in candidates[order[:n]])
