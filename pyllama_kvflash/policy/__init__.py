"""Decisions: pure Python and numpy. No native code, no files, no clock: everything here runs without a compiler."""

from pyllama_kvflash.policy.ledger import Ledger, LedgerError, State
from pyllama_kvflash.policy.plan import Plan, Scorer, bring_in, make_room
from pyllama_kvflash.policy.scorers import POLICIES, lru
from pyllama_kvflash.policy.sizing import Geometry, PoolSize, auto_pool, pool_floor, resolve_pool

__all__ = [
    "POLICIES",
    "Geometry",
    "Ledger",
    "LedgerError",
    "Plan",
    "PoolSize",
    "Scorer",
    "State",
    "auto_pool",
    "bring_in",
    "lru",
    "make_room",
    "pool_floor",
    "resolve_pool",
]
