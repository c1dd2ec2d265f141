"""The control "answer=full": a prompt is read through a pool, and then all of it is brought back for the answer.

The last tokens, which a pool reads twice, are then read again with everything resident. What is still lost against the
full cache was lost while the rest was read. A recurrent state cannot go back: there the question stays as the pool read
it.

The context is made with a pool that holds all (recall.open_variant), and the prompt gets a part of it.
"""

from contextlib import suppress
from typing import Any

from kvflash_bench.grid import Variant
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.sizing import PoolSize, resolve_pool

CONTROL_NOTE = (
    "answer=full: what comes before is read through a pool of that size, then all of it is brought back, and the last tokens"
    " are read again."
)


def control_options(options: dict[str, Any], pool: int) -> dict[str, Any]:
    """Return the fields of Options for a pool's control: a pool that holds all, with the batches that the pool would
    have.
    """
    o = Options(**options)
    n_pool = pool_size(o, pool).n_pool or pool
    return {
        **options,
        "prefill": "pool",
        "pool": o.n_ctx,
        "n_batch": o.n_batch or o.shape.usual_batch(n_pool),
        "snapshots": True,
    }


def pool_size(o: Options, pool: int) -> PoolSize:
    """Return the pool through which a prompt is read if `pool` tokens are requested, as KVFlash.from_file would make
    it.
    """
    return resolve_pool(pool, n_ctx=o.n_ctx, floor=o.shape.floor(o.n_batch), memory=(), keep=True)


def before_prompt(kv: KVFlash, variant: Variant, pool: int | None) -> tuple[str, ...]:
    """Forget what was read; from now on a control has a pool of this size. Return warnings about its size."""
    kv.clear()
    if not variant.control or pool is None:
        return ()
    size = pool_size(kv.options, pool)
    kv.pager.shared.confine(size.n_pool or pool)
    return size.warnings


def before_answer(kv: KVFlash, variant: Variant) -> None:
    """Make everything resident for a control from now on, and read its last tokens again."""
    if not variant.control:
        return
    kv.pager.shared.confine(kv.n_pool or 0)
    kv.pager.page_in_all()
    tokens = kv.tokens
    start = max(0, len(tokens) - max(1, kv.options.replay))
    with suppress(UnsupportedError):
        kv.rollback(start)
        for _ in kv.prefill(tokens[start:]):
            pass


def device_bytes(kv: KVFlash, variant: Variant, pool: int | None) -> int:
    """Return the device bytes of the KV, with codes and the panes of an exact pass; for a control, those of
    the pool through which its prompt is read.
    """
    if not variant.control or pool is None or kv.n_pool is None:
        return kv.resident_bytes
    stats = kv.stats()
    own = stats.kv_device_bytes * (pool_size(kv.options, pool).n_pool or kv.n_pool) // kv.n_pool
    return own + stats.device_kv_bytes - stats.kv_device_bytes
