"""Estimate the memory that a model needs on each device, before its weights are loaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.loading.bits import first_that_fits, free_bytes
from pyllama_kvflash.loading.load import Probe, bits_of, check_codes, open_context, placement, probe, where
from pyllama_kvflash.loading.load_plan import Tap, plan_contexts
from pyllama_kvflash.loading.memory import device_memory
from pyllama_kvflash.loading.need import needs_of, program_bytes, weights_of
from pyllama_kvflash.loading.panes import exact_bytes
from pyllama_kvflash.loading.placement import drafters, on_host
from pyllama_kvflash.native import Model, add_rpc, devices
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry, PoolSize
from pyllama_kvflash.policy.device import DeviceBytes
from pyllama_kvflash.policy.experts import Placement
from pyllama_kvflash.scorers.factory import query_of


@dataclass(frozen=True, slots=True)
class Planned:
    """The expected result of loading. memory: the bytes on each device with a full context. options: with codes and policy resolved."""

    memory: tuple[DeviceBytes, ...]
    size: PoolSize
    options: Options

    def close(self) -> None:
        """Do nothing: nothing is open."""


def planned(path: Path, options: Options) -> Planned:
    """Return the expected result of loading with the memory that is free now. Raises the errors of load.load()."""
    with look(path, options) as found:
        return found.planned()


@dataclass(frozen=True, slots=True)
class Look:
    """A model opened without its weights, on its future devices.

    options: from Options.resolved(), with experts placed, and with a pool only if the model can have one. Codes and policy are not
    decided yet. free: as for bits.fits(). program: see program_bytes().
    """

    model: Model
    seen: Probe
    options: Options
    free: Mapping[str, int]
    program: int

    def planned(self, pool: int | str | None = None) -> Planned:
        """Return the expected result of loading. pool: replaces the options' pool. Raises the errors of load.load()."""
        options = self.options if pool is None else replace(self.options, pool=pool)
        check_codes(self.model, options, self.seen)
        make = partial(_planned, self.model, self.seen.geometry, self.program)
        return first_that_fits(options, bits_of(options, self.seen), self.free, make)


@contextmanager
def look(path: Path, options: Options) -> Iterator[Look]:
    """Open a model for inspection. Raises the errors of load.load(), except the one for a model that cannot be pooled."""
    for server in options.rpc:
        add_rpc(server)
    refusal = None
    try:
        placed = placement(path, options)
    except UnsupportedError as err:
        placed, refusal = Placement(0, options.pool), err
    options, free = replace(options, n_cpu_moe=placed.n_cpu_moe, pool=placed.pool), free_bytes()
    with Model.load(path, **where(options), on_host=on_host(placed), no_alloc=True) as model:
        program, options = program_bytes(), options.resolved(model.n_ctx_train)
        seen = probe(model, options)
        if refusal and seen.refusal is None:
            raise refusal
        if seen.refusal is not None:
            options = replace(options, pool="off")
        yield Look(model, seen, options, free, program)


class _Looking:
    """The Ground of a plan that is only inspected: subtracts what the weights and the exact pass would take from free memory."""

    def __init__(self, model: Model, geometry: Geometry, options: Options) -> None:
        self.weights = weights_of(model)
        self.exact: dict[int, DeviceBytes] = {}
        self._model, self._geometry, self._options = model, geometry, options

    def memory(self) -> list[DeviceBytes]:
        indices = dict.fromkeys(self._geometry.devices or (0,) * len(self._geometry.rows))
        found = device_memory(self._geometry, self._options)
        taken = [replace(d, weights=self.weights[i]) for i, d in zip(indices, found, strict=True)]
        return [d + self.exact[i] if i in self.exact else d for i, d in zip(indices, taken, strict=True)]

    def asks(self) -> tuple[str, str]:
        return query_of(self._options)

    def read_exactly(self, n_pane: int, tap: Tap) -> bool:
        self.exact = exact_bytes(self._model, self._geometry, self._options, n_pane, tap)
        return True


def _planned(model: Model, geometry: Geometry, program: int, options: Options) -> Planned:
    ground = _Looking(model, geometry, options)
    plan = plan_contexts(geometry, options, ground)
    with open_context(model, options, plan) as ctx:
        exact = ground.exact if plan.pool else {}
        drafter = drafters(replace(options, n_batch=plan.n_batch), ctx, range(len(devices())))
        held = needs_of(geometry, options, plan.size.n_pool, ctx, exact, drafter, program)
        return Planned(held, plan.size, options)
