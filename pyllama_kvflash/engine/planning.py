"""What a model takes of each device's memory, before anything of it is loaded."""

from dataclasses import replace
from pathlib import Path

from pyllama_kvflash.engine.load_plan import Tap, plan_contexts
from pyllama_kvflash.engine.loading import open_context, placement, probe, where, with_policy
from pyllama_kvflash.engine.memory import device_memory
from pyllama_kvflash.engine.need import Need, needs_of, program_bytes, weights_of
from pyllama_kvflash.engine.panes import ExactBytes, exact_bytes
from pyllama_kvflash.engine.placement import drafters, on_host
from pyllama_kvflash.native import Model, add_rpc, devices
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry, PoolSize
from pyllama_kvflash.policy.sizing import DeviceMemory
from pyllama_kvflash.scorers.factory import query_of


def needs(path: Path, options: Options) -> tuple[tuple[Need, ...], PoolSize]:
    """Return what each device holds with a full context, and the pool. Raises as loading.load()."""
    for server in options.rpc:
        add_rpc(server)
    placed = placement(path, options)
    options = replace(options, n_cpu_moe=placed.n_cpu_moe, pool=placed.pool)
    with Model.load(path, **where(options), on_host=on_host(placed.n_cpu_moe), no_alloc=True) as model:
        program, options = program_bytes(), options.resolved(model.n_ctx_train)
        seen = probe(model, options)
        if seen.refusal is not None:
            options = replace(options, pool="off")
        return _needs(model, seen.geometry, with_policy(options, seen), program)


class _Looking:
    """Where a plan is only looked at: what the weights and an exact pass will take is not free."""

    def __init__(self, model: Model, geometry: Geometry, options: Options) -> None:
        self.weights = weights_of(model)
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


def _needs(model: Model, geometry: Geometry, options: Options, program: int) -> tuple[tuple[Need, ...], PoolSize]:
    ground = _Looking(model, geometry, options)
    plan = plan_contexts(model, geometry, options, ground)
    with open_context(model, options, plan) as ctx:
        exact = ground.exact if plan.pool else {}
        drafter = drafters(replace(options, n_batch=plan.n_batch), ctx, range(len(devices())))
        return needs_of(geometry, options, plan.size.n_pool, ctx, exact, drafter, program), plan.size
