"""The plan of a model's contexts. Loading makes these contexts, and `kvflash inspect` shows their memory."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from pyllama_kvflash.native import PoolParams
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import MOST_LAYERS, UNSCORED, Geometry, PoolSize, resolve_pool
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.policy.device import RESERVE, DeviceBytes
from pyllama_kvflash.policy.sizing import BATCH, n_panes


@dataclass(frozen=True, slots=True)
class Tap:
    """Which queries a context keeps: those of the last n_token tokens (0: none), in every `every`-th layer."""

    n_token: int = 0
    every: int = 1


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The contexts of a model.

    size: the pool's size.
    n_batch: the largest batch, in tokens, that goes through the pool or the full cache.
    pool: the parameters of the pool; None: the full cache.
    """

    size: PoolSize
    n_batch: int
    pool: PoolParams | None


def context_options(options: Options) -> dict[str, Any]:
    """Return the arguments of Context that say how it computes. options: from Options.resolved()."""
    return {
        "n_threads": options.n_threads or 1,
        "type_k": options.type_k,
        "type_v": options.type_v,
        "flash_attn": options.flash_attn,
        "offload_kqv": options.kv_offload,
        "n_seq": options.n_parallel,
        "n_rollback": options.n_draft,
    }


class Ground(Protocol):
    """The facts that a plan depends on: measured while loading a model, estimated while only inspecting it."""

    def memory(self) -> list[DeviceBytes]:
        """Return the free memory of each device that holds KV."""

    def asks(self) -> tuple[str, str]:
        """Return the name of the policy's scorer, and its `query`."""

    def read_exactly(self, n_pane: int, tap: Tap) -> bool:
        """Allocate the memory of an exact pass with n_pane panes, or only count its bytes. Returns whether it fits."""


def plan_contexts(geometry: Geometry, options: Options, ground: Ground, fingerprint: int = 0) -> LoadPlan:
    """Decide on the pool and the exact pass.

    geometry: the full-attention cache's. options: from Options.resolved(), with a policy that the model can have. fingerprint: the
    model's, for the pool's records; 0 if the plan is only inspected.

    An automatic pool is sized from the memory that the exact pass leaves. Raises the ground's errors, and UsageError.
    """
    size, tap, n_layer = PoolSize(None), Tap(), len(geometry.rows)
    if options.pool != "off":
        size = pool_size(options, ground.memory())
    if size.n_pool is not None:
        tap = _tap(*ground.asks(), options, n_layer)
        if options.prefill != "pool":
            often = options.lossless
            n_pane = n_panes(
                *(options.panes, options.pool, ground.memory(), options.n_ctx, n_layer),
                n_pool=size.n_pool,
                buffers=RESERVE,  # an estimate: the buffers can be measured only with panes allocated
                lossless=often,
            )
            if ground.read_exactly(n_pane, tap):
                size = pool_size(options, ground.memory())
    usual = options.shape.usual_batch(size.n_pool) if size.n_pool else BATCH
    pool = None if size.n_pool is None else _params(options, size.n_pool, tap, fingerprint)
    return LoadPlan(size, min(options.n_batch or usual, options.n_ctx), pool)


def pool_size(options: Options, memory: list[DeviceBytes]) -> PoolSize:
    """Return the pool that the options ask for. memory: the devices that will hold the pool."""
    return resolve_pool(
        options.pool,
        n_ctx=options.n_ctx * options.n_parallel,
        floor=options.shape.floor(options.n_batch),
        memory=memory,
        cap=options.auto_cap,
        keep=options.snapshots,
    )


def coded(pool: PoolParams, options: Options) -> PoolParams:
    """Return the parameters of a pool, with codes of all positions if the options ask for them."""
    coarse = CoarseForm.of(options.coarse)
    if coarse is None:
        return pool
    return replace(pool, coarse_k=coarse.k, coarse_v=coarse.v, n_exchange=options.n_swaps)


def _tap(policy: str, query: str, options: Options, n_layer: int) -> Tap:
    n_token = 0 if policy in UNSCORED else max(1 + options.n_draft, options.n_asking(query))
    return Tap(n_token, max(1, -(-n_layer // MOST_LAYERS)) if policy == "qk" else 1)


def _params(options: Options, n_pool: int, tap: Tap, mark: int) -> PoolParams:
    pool = PoolParams(n_pool=n_pool, n_chunk=options.chunk, q_tap=tap.n_token, fingerprint=mark, q_every=tap.every)
    return coded(pool, options)
