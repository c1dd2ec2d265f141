"""The control "answer=full": a prompt is read through a pool, and then all of it is brought back for the answer.

The last tokens, which a pool reads twice, are then read again with all of it: what is still lost beside the full cache was lost
while the rest was read. A recurrent state cannot go back; there the question is as the pool read it.

The context is made with a pool that holds all (recall.open_variant), of which the prompt has a part.
"""

from contextlib import suppress
from typing import Any

from pyllama_kvflash.bench.grid import Variant
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import pool_floor
from pyllama_kvflash.policy.sizing import PoolSize, largest_batch, resolve_pool, usual_batch

CONTROL_NOTE = (
    "answer=full: what comes before is read through a pool of that size, then all of it is brought back, and the last tokens"
    " are read again."
)


def control_options(options: dict[str, Any], pool: int) -> dict[str, Any]:
    """Fields of Options of a control of a pool: one that holds all, and batches as they are with that pool."""
    o = Options(**options)
    n_pool = pool_size(o, pool).n_pool or pool
    n_batch = o.n_batch or min(usual_batch(n_pool, o.chunk), largest_batch(n_pool, o.chunk, o.sinks, o.tail))
    return {**options, "pool": o.n_ctx, "n_batch": n_batch, "snapshots": True}


def pool_size(o: Options, pool: int) -> PoolSize:
    """The pool that a prompt is read through where one of so many tokens is asked for, as KVFlash.from_file would make it."""
    floor = pool_floor(o.chunk, o.n_batch or o.chunk, o.sinks, o.tail)
    return resolve_pool(pool, n_ctx=o.n_ctx, floor=floor, memory=(), keep=True)


def before_prompt(kv: KVFlash, variant: Variant, pool: int | None) -> tuple[str, ...]:
    """Forget what was read; a control has a pool of this size from now on. What the user should know of its size."""
    kv.clear()
    if not variant.control or pool is None:
        return ()
    size = pool_size(kv.options, pool)
    kv.pager.confine(size.n_pool or pool)
    return size.warnings


def before_answer(kv: KVFlash, variant: Variant) -> None:
    """A control has everything resident from now on, and reads its last tokens again."""
    if not variant.control:
        return
    kv.pager.confine(kv.n_pool or 0)
    kv.pager.page_in_all()
    tokens = kv.tokens
    start = max(0, len(tokens) - max(1, kv.options.replay))
    with suppress(UnsupportedError):
        kv.rollback(start)
        for _ in kv.prefill(tokens[start:]):
            pass


def device_bytes(kv: KVFlash, variant: Variant, pool: int | None) -> int:
    """Device bytes of the KV; of a control, those of the pool that its prompt is read through."""
    if not variant.control or pool is None or kv.n_pool is None:
        return kv.resident_bytes
    return kv.resident_bytes * (pool_size(kv.options, pool).n_pool or kv.n_pool) // kv.n_pool
