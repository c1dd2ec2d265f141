"""Residency decisions in pure Python and numpy, without native code, files or a clock. They need no compiled extension."""

from pyllama_kvflash.policy.ledger import Blocks, Ledger, LedgerError, Scores
from pyllama_kvflash.policy.plan import Plan, bring_in, make_room, reselect, room_for_candidates
from pyllama_kvflash.policy.schedule import Schedule, Scoring
from pyllama_kvflash.policy.scorers import (
    MOST_LAYERS,
    SCORERS,
    UNSCORED,
    Fresh,
    Lru,
    Qk,
    QkCos,
    Queries,
    Scorer,
    View,
    ZMax,
    n_queries,
)
from pyllama_kvflash.policy.sizing import Geometry, PoolShape, PoolSize, auto_pool, resolve_pool

__all__ = [
    "MOST_LAYERS",
    "SCORERS",
    "UNSCORED",
    "Blocks",
    "Fresh",
    "Geometry",
    "Ledger",
    "LedgerError",
    "Lru",
    "Plan",
    "PoolShape",
    "PoolSize",
    "Qk",
    "QkCos",
    "Queries",
    "Schedule",
    "Scorer",
    "Scores",
    "Scoring",
    "View",
    "ZMax",
    "auto_pool",
    "bring_in",
    "make_room",
    "n_queries",
    "reselect",
    "resolve_pool",
    "room_for_candidates",
]
