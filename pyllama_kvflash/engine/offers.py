"""The ways to hold a context in a GPU's memory and RAM of given sizes: caches of several types, in RAM, and pools."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyllama_kvflash.engine import expected
from pyllama_kvflash.engine.loading import check_runs
from pyllama_kvflash.engine.need import Need
from pyllama_kvflash.engine.placement import has_experts
from pyllama_kvflash.engine.planning import needs
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.native import Model, pretending
from pyllama_kvflash.options import Options

POOLS = (16_384, 8192, 4096, 2048, 1024)
"""Pools that are tried, the largest first: a larger pool answers better and decodes more slowly."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to hold the context.

    kind: the cache: "f16", "q8_0", "q4_0", "RAM" or "pool". options: fields of Options that it takes. needs: what each device
    holds. lacking: bytes that each is short of, by name; {}: it fits. experts: it has some that may stay on the host.
    """

    kind: str
    options: dict[str, Any]
    n_pool: int | None
    needs: tuple[Need, ...]
    lacking: dict[str, int]
    experts: bool = False

    @property
    def lossless(self) -> bool:
        """Whether answers are the full cache's."""
        return self.options.get("mode") == "lossless"

    @property
    def coarse(self) -> str:
        """Bits of the codes of what is outside a pool."""
        return str(self.options.get("coarse", "off"))

    def divergence(self, n_ctx: int) -> dict[str, float] | None:
        """Return how far its long answers are from the full f16 cache's, as expected.divergence(); None: it was not measured."""
        kind = self.options.get("type_k", "f16")
        if self.n_pool is None or self.lossless:
            return expected.FULL_KLD[kind]
        return expected.divergence(self.n_pool / n_ctx, self.coarse, kind)

    def bytes_of(self, *, gpu: bool) -> int:
        """Return the bytes of the GPU's memory, or of RAM, with a full context."""
        return sum(need.total for need in self.needs if need.gpu == gpu)


def offers(path: Path, n_ctx: int, gpu: int, ram: int, n_ubatch: int = 512) -> list[Offer]:
    """Return all ways, whether they fit or not. n_ctx: positions; 0: as many as the model was trained for. gpu, ram: bytes.

    Loads no weights. Raises as planning.needs().
    """
    with pretending(gpu, ram):
        with Model.load(path, no_alloc=True) as model:
            check_runs(model, Options(pool="off"))
            n_ctx, experts = n_ctx or model.n_ctx_train, has_experts(model)
        # all on the first GPU: more of them have more memory in all, but each holds its own layers
        cpu_moe = "auto" if experts else 0
        base = Options(n_ctx=n_ctx, n_ubatch=n_ubatch, split_mode="none", n_cpu_moe=cpu_moe)
        return list(_Look(path, base, gpu, ram).all())


def best(found: list[Offer], n_ctx: int) -> Offer | None:
    """Return the one to take of those that fit: the full f16 cache, else what is the least far from it, as far as measured,
    and the largest pool of those that were not; None if none fits.

    A pool without codes is taken after what else fits, and the cache in RAM last: it is slow. q4_0 is never taken: with the model
    that was measured it breaks answers. Lossless decoding is for the user to choose.
    """

    def rank(offer: Offer) -> tuple[bool, bool, float, int]:
        far, uncoded = offer.divergence(n_ctx), offer.n_pool is not None and offer.coarse == "off"
        return offer.kind == "RAM", uncoded, sum(far.values()) if far else math.inf, -(offer.n_pool or n_ctx)

    fit = [offer for offer in found if not offer.lacking and not offer.lossless and offer.kind != "q4_0"]
    return min(fit, key=rank, default=None)


class _Look:
    def __init__(self, path: Path, base: Options, gpu: int, ram: int) -> None:
        self._path, self._base = path, base
        self._room = {True: gpu, False: ram}

    def all(self) -> Iterator[Offer]:
        yield self._offer("f16", {"pool": "off"})
        for kind in ("q8_0", "q4_0"):
            with suppress(UnsupportedError):  # a cache type that the model's rows do not have
                yield self._offer(kind, {"pool": "off", **_types(kind)})
        yield self._in_ram()
        for kind in ("f16", "q8_0"):
            with suppress(UnsupportedError):  # a memory that cannot be pooled
                if (pool := self._pool(kind)) is not None:
                    yield pool
                    yield self._offer("pool", {**pool.options, "mode": "lossless"})

    def _pool(self, kind: str) -> Offer | None:
        """Return the largest pool that fits with the closest codes for which the smallest pool leaves memory; if none fits, the smallest
        one without codes. None if the context or the model has none.
        """
        *larger, least = [size for size in POOLS if size < self._base.n_ctx] or [0]
        found = None
        for bits in expected.BITS if least else ():
            with suppress(UnsupportedError):  # codes that there cannot be
                found = self._offer("pool", {"pool": least, "coarse": bits, **_types(kind)})
                if found.n_pool is None:  # what cannot be pooled has the full cache
                    return None
                if not found.lacking:
                    break
        if found is None or found.lacking:
            return found
        tried = (self._offer("pool", {**found.options, "pool": size}) for size in larger)
        return next((offer for offer in tried if not offer.lacking), found)

    def _in_ram(self) -> Offer:
        options = {"pool": "off", "kv_offload": False, **_types("q8_0")}
        found = self._offer("RAM", {**options, "n_cpu_moe": 0})  # "auto" makes room for KV
        return self._offer("RAM", options) if found.lacking and self._base.n_cpu_moe else found

    def _offer(self, kind: str, options: dict[str, Any]) -> Offer:
        asked = replace(self._base, **options)
        held, size = needs(self._path, asked)
        if kind == "RAM":
            held = _moved(held)
        lacking = {}
        for gpu, room in self._room.items():
            if (n := sum(need.total for need in held if need.gpu == gpu)) > room:
                lacking["GPU" if gpu else "RAM"] = n - room
        return Offer(kind, options, size.n_pool, held, lacking, asked.n_cpu_moe != 0)


def _types(kind: str) -> dict[str, str]:
    return {} if kind == "f16" else {"type_k": kind, "type_v": kind}


def _moved(held: tuple[Need, ...]) -> tuple[Need, ...]:
    """Return what is held with KV and states in RAM, where llama.cpp has both, wherever the machine that looks has them."""
    kv, states = sum(need.kv for need in held), sum(need.states for need in held)
    there = next(i for i, need in enumerate(held) if not need.gpu)
    return tuple(
        replace(need, kv=kv, states=states) if i == there else replace(need, kv=0, states=0)
        for i, need in enumerate(held)
    )
