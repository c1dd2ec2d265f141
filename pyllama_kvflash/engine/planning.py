"""What a model takes of each device's memory, before anything of it is loaded."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from pyllama_kvflash.engine.loading import (
    Probe,
    batch_of,
    open_context,
    placement,
    pool_params,
    pool_size,
    probe,
    tap,
    where,
    with_policy,
)
from pyllama_kvflash.engine.memory import device_memory, index_bytes
from pyllama_kvflash.engine.panes import ExactBytes, exact_bytes
from pyllama_kvflash.engine.placement import on_host
from pyllama_kvflash.native import CACHE_TYPES, Model, add_rpc, devices, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import PoolSize
from pyllama_kvflash.policy.sizing import DeviceMemory, n_panes
from pyllama_kvflash.scorers.factory import make_scorer


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a device is to hold.

    kv: of full attention: the pool, or the full cache. index: by which layers choose on a GPU, with a whole context in it.
    states: sliding windows and recurrent states. panes: of an exact pass. buffers: of the computation.
    """

    name: str
    gpu: bool
    weights: int
    kv: int
    index: int
    states: int
    panes: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it. What a driver takes for itself is not known beforehand."""
        return self.weights + self.kv + self.index + self.states + self.panes + self.buffers


def needs(path: Path, options: Options) -> tuple[list[Need], PoolSize]:
    """Return what each device is to hold, and the pool. Raises as loading.load()."""
    for server in options.rpc:
        add_rpc(server)
    placed = placement(path, options)
    options = replace(options, n_cpu_moe=placed.n_cpu_moe, pool=placed.pool)
    with Model.load(path, **where(options), on_host=on_host(placed.n_cpu_moe), no_alloc=True) as model:
        options = options.resolved(model.n_ctx_train)
        seen = probe(model, options)
        return _needs(model, seen, with_policy(options, seen))


def _needs(model: Model, seen: Probe, options: Options) -> tuple[list[Need], PoolSize]:
    weights: Counter[int] = Counter()
    for weight in model.weights():
        weights[weight.device] += weight.size
    size, exact, q_tap, q_every = PoolSize(None), dict[int, ExactBytes](), 0, 1
    if options.pool != "off" and seen.refusal is None:
        q_tap, q_every = _tapped(model, seen, options)
        size, exact = _pool(model, seen, options, weights, q_tap, q_every)
    pool = pool_params(model, options, size.n_pool, q_tap, q_every, seen.geometry.head) if size.n_pool else None
    types = CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v]
    token_bytes = seen.geometry.by_device(row_bytes, *types)
    n_all = size.n_pool or options.n_ctx * options.n_parallel
    with open_context(model, options, batch_of(size, options), pool) as ctx:
        held = ctx.kv_bytes()
        buffers = [ctx.compute_bytes(i) for i in range(len(devices()))]
    index = index_bytes(seen.geometry, options, size.n_pool) if size.n_pool else {}
    holds_states = next(iter(token_bytes), 0)
    return [
        Need(
            name=device.name,
            gpu=device.gpu,
            weights=weights[i],
            kv=token_bytes.get(i, 0) * n_all,
            index=index.get(i, 0),
            states=(held.swa + held.recurrent if i == holds_states else 0) + exact.get(i, ExactBytes()).states,
            panes=exact.get(i, ExactBytes()).panes,
            buffers=buffers[i] + exact.get(i, ExactBytes()).buffers,
        )
        for i, device in enumerate(devices())
    ], size


def _tapped(model: Model, seen: Probe, options: Options) -> tuple[int, int]:
    """Return what tap() does, without loading a scorer's model."""
    if options.policy in ("drafter", "crosstok"):
        options = replace(options, policy="qk-cos")
    return tap(make_scorer(options, model, _no_engine), options, len(seen.geometry.rows))


def _no_engine(*_: object) -> NoReturn:
    msg = "no scorer's model is loaded to look at a model"
    raise AssertionError(msg)


def _pool(
    model: Model, seen: Probe, options: Options, weights: Counter[int], q_tap: int, q_every: int
) -> tuple[PoolSize, dict[int, ExactBytes]]:
    """Return the pool, and what exact_bytes() says of each device."""
    indices = dict.fromkeys(seen.geometry.devices or (0,) * len(seen.geometry.rows))

    def memory(taken: dict[int, int]) -> list[DeviceMemory]:
        found = device_memory(seen.geometry, options)
        return [replace(d, free=max(0, d.free - taken.get(i, 0))) for i, d in zip(indices, found, strict=True)]

    exact: dict[int, ExactBytes] = {}
    if options.prefill != "pool" and pool_size(options, memory(weights)).n_pool:
        n_layer = len(seen.geometry.rows)
        n_pane = n_panes(
            options.panes, options.pool, memory(weights), options.n_ctx, n_layer, lossless=options.lossless
        )
        exact = exact_bytes(model, seen.geometry, replace(options, panes=n_pane), q_tap, q_every)
    beside = {i: weights[i] + sum(exact.get(i, ())) for i in indices}
    size = pool_size(options, memory(beside))
    return size, exact if size.n_pool else {}
