"""What a model takes of each device's memory, before anything of it is loaded."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from pyllama_kvflash.engine.load_plan import Tap, plan_contexts
from pyllama_kvflash.engine.loading import open_context, placement, probe, where, with_policy
from pyllama_kvflash.engine.memory import device_memory, index_bytes
from pyllama_kvflash.engine.panes import ExactBytes, exact_bytes
from pyllama_kvflash.engine.placement import on_host
from pyllama_kvflash.native import CACHE_TYPES, Model, add_rpc, devices, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry, PoolSize
from pyllama_kvflash.policy.sizing import DeviceMemory
from pyllama_kvflash.scorers.factory import query_of


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
        if seen.refusal is not None:
            options = replace(options, pool="off")
        return _needs(model, seen.geometry, with_policy(options, seen))


class _Looking:
    """Where a plan is only looked at: what the weights and an exact pass will take is not free."""

    def __init__(self, model: Model, geometry: Geometry, options: Options) -> None:
        self.weights: Counter[int] = Counter()
        for weight in model.weights():
            self.weights[weight.device] += weight.size
        self.exact: dict[int, ExactBytes] = {}
        self._model, self._geometry, self._options = model, geometry, options

    def memory(self) -> list[DeviceMemory]:
        indices = dict.fromkeys(self._geometry.devices or (0,) * len(self._geometry.rows))
        found = device_memory(self._geometry, self._options)
        taken = [self.weights[i] + sum(self.exact.get(i, ())) for i in indices]
        return [replace(d, free=max(0, d.free - n)) for d, n in zip(found, taken, strict=True)]

    def asks(self) -> tuple[str, str]:
        return query_of(self._options)

    def read_exactly(self, n_pane: int, tap: Tap) -> bool:
        self.exact = exact_bytes(self._model, self._geometry, self._options, n_pane, tap)
        return True


def _needs(model: Model, geometry: Geometry, options: Options) -> tuple[list[Need], PoolSize]:
    ground = _Looking(model, geometry, options)
    plan = plan_contexts(model, geometry, options, ground)
    n_pool, exact = plan.size.n_pool, ground.exact if plan.pool else {}
    token_bytes = geometry.by_device(row_bytes, CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v])
    n_all = n_pool or options.n_ctx * options.n_parallel
    with open_context(model, options, plan) as ctx:
        held = ctx.kv_bytes()
        buffers = [ctx.compute_bytes(i) for i in range(len(devices()))]
    index = index_bytes(geometry, options, n_pool) if n_pool else {}
    holds_states = next(iter(token_bytes), 0)
    return [
        Need(
            name=device.name,
            gpu=device.gpu,
            weights=ground.weights[i],
            kv=token_bytes.get(i, 0) * n_all,
            index=index.get(i, 0),
            states=(held.swa + held.recurrent if i == holds_states else 0) + exact.get(i, ExactBytes()).states,
            panes=exact.get(i, ExactBytes()).panes,
            buffers=buffers[i] + exact.get(i, ExactBytes()).buffers,
        )
        for i, device in enumerate(devices())
    ], plan.size
