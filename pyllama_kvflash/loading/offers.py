"""The ways to hold a context in a GPU's memory and RAM of given sizes: caches of several types, in RAM, pools, and layers on the CPU."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, Self

from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.loading import expected
from pyllama_kvflash.loading.bits import SMALL_BATCH
from pyllama_kvflash.loading.load import check_runs
from pyllama_kvflash.loading.need import DRIVER, Need
from pyllama_kvflash.loading.placement import has_experts
from pyllama_kvflash.loading.planning import planned
from pyllama_kvflash.native import Model, pretending
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.sizing import HOST_CAP

POOLS = (16_384, 8192, 4096, 2048, 1024)
"""Pools that are tried, the largest first: a larger pool answers better and decodes more slowly."""
_READS_MUCH = 1.25  # times the least that a token reads in RAM: answers are slower by as much
_AS_GOOD = 1.5  # times the divergence of q8_0, within which seeds differ


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to hold the context.

    kind: the cache: "f16", "q8_0", "q4_0", "RAM" or "pool". options: fields of Options that it takes. needs: what each device
    holds. lacking: bytes that each is short of, by name; {}: it fits. moves: experts, or feed-forward weights, may stay on the host.
    on_gpu: there is a GPU to compute with. n_on_cpu: layers of which feed-forward weights stay there. host_read: bytes of weights that the
    CPU reads in RAM for a token. recurrent: the model has such states, too.
    """

    kind: str
    options: dict[str, Any]
    n_pool: int | None
    needs: tuple[Need, ...]
    lacking: dict[str, int]
    moves: bool = False
    on_gpu: bool = True
    n_on_cpu: int = 0
    host_read: int = 0
    recurrent: bool = False

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

    def is_close(self, n_ctx: int) -> bool:
        """Return whether its long answers are as close to the full f16 cache's as those of a full q8_0 cache."""
        far, q8_0 = self.divergence(n_ctx), expected.FULL_KLD["q8_0"]
        return far is not None and all(far[text] <= _AS_GOOD * q8_0[text] for text in far)

    def speed(self, n_ctx: int) -> float | None:
        """Return its speed, as expected.speed(); None: it was not measured."""
        if self.lossless or (self.on_gpu and self.host_read and self.kind != "RAM"):
            return None
        if not self.on_gpu:
            return expected.cpu_speed(self.kind, n_ctx)
        return (expected.hybrid_speed if self.recurrent else expected.speed)(self.kind, n_ctx, self.coarse)

    @property
    def most_speed(self) -> float:
        """The most tokens a second that RAM allows, from which weights come; infinite if none do."""
        return expected.RAM_RATE / self.host_read if self.host_read else math.inf

    def bytes_of(self, *, gpu: bool) -> int:
        """Return the bytes of the GPU's memory, or of RAM, with a full context."""
        return sum(need.total for need in self.needs if need.gpu == gpu)


def offers(path: Path, n_ctx: int, gpu: int, ram: int, n_ubatch: int | None = None) -> list[Offer]:
    """Return all ways, whether they fit or not. n_ctx: positions; 0: as many as the model was trained for. gpu, ram: bytes; gpu 0: the CPU
    computes. n_ubatch: tokens of a physical batch; None: the usual ones, or fewer where those take memory that is missing.

    Loads no weights. Raises as planning.needs().
    """
    with pretending(gpu and max(1, gpu - DRIVER), ram):  # as a program has it that has begun
        with Model.load(path, no_alloc=True) as model:
            check_runs(model, Options(pool="off"))
            n_ctx, experts = n_ctx or model.n_ctx_train, has_experts(model.weights())
            facts = _Facts.of(model)
        base = Options(n_ctx=n_ctx, n_ubatch=Options().n_ubatch if n_ubatch is None else n_ubatch)
        if not gpu:
            return list(_OnCPU(path, replace(base, n_gpu_layers=0), 0, ram, {}, facts).all())
        # all on the first GPU: more of them have more memory in all, but each holds its own layers
        base = replace(base, split_mode="none", n_cpu_moe="auto" if experts else 0)
        look = _Look(path, base, gpu, ram, {"n_ubatch": SMALL_BATCH} if n_ubatch is None else {}, facts)
        found = list(look.all())
        if not any(not offer.lacking and _answers_well(offer) for offer in found):
            found += look.tight()
        return found


class Rank(IntEnum):
    """How good a way is, the best first."""

    CLOSE = 0  # as a full q8_0 cache, or closer
    CODED = 1  # codes of 4 bits beside a pool that is smaller than those that were measured
    LOSSLESS = 2
    FAR = 3  # long answers are worse
    SHARED = 4  # the CPU has a part of some layers
    BLIND = 5  # a token sees the pool, and nothing else


def rank(offer: Offer, n_ctx: int) -> Rank:
    """Return how good a way is that fits."""
    if offer.n_pool is not None and offer.coarse == "off" and not offer.lossless:
        return Rank.BLIND
    if offer.n_on_cpu:
        return Rank.SHARED
    if offer.lossless:
        return Rank.LOSSLESS
    if offer.is_close(n_ctx):
        return Rank.CLOSE
    return Rank.CODED if offer.coarse == "4" else Rank.FAR


def usable(found: list[Offer]) -> list[Offer]:
    """Return the ways that may be taken: the cache in RAM is slow, and q4_0 breaks answers of the model that was measured."""
    return [offer for offer in found if offer.kind not in ("q4_0", "RAM")]


def best(found: list[Offer], n_ctx: int) -> Offer | None:
    """Return the one to take of those that fit; None if none does.

    It has the best rank; of these, a token reads little more of the experts in RAM than it must, then batches are the usual ones, then as
    few layers as possible are in RAM unless answers get worse by that, then it has the least divergence from the full f16 cache, as far as it was measured, and the largest pool.
    """
    fit = [offer for offer in usable(found) if not offer.lacking]
    if fit and not fit[0].on_gpu:  # answers of a pool are as good, and written in a part of the time
        return max(fit, key=lambda offer: (offer.n_pool is None) == (n_ctx <= HOST_CAP))
    ranks = [rank(offer, n_ctx) for offer in fit]
    least = min((offer.host_read for offer, its in zip(fit, ranks, strict=True) if its == min(ranks)), default=0)

    def order(offer: Offer) -> tuple[Rank, bool, bool, bool, int, float, int]:
        far = offer.divergence(n_ctx)
        apart = offer.n_on_cpu > 0 and not (offer.is_close(n_ctx) or offer.coarse == "4")
        small = "n_ubatch" in offer.options
        return (
            rank(offer, n_ctx),
            offer.host_read > _READS_MUCH * least and not offer.n_on_cpu,
            small,
            apart,
            offer.n_on_cpu,
            sum(far.values()) if far else math.inf,
            -(offer.n_pool or n_ctx),
        )

    return min(fit, key=order, default=None)


def _answers_well(offer: Offer) -> bool:
    return offer.lossless or offer.kind in ("f16", "q8_0") or (offer.n_pool is not None and offer.coarse != "off")


class _Look:
    """small: options of smaller batches, {}: there are none."""

    def __init__(self, path: Path, base: Options, gpu: int, ram: int, small: dict[str, Any], facts: "_Facts") -> None:
        self._path, self._base, self._small, self._facts = path, base, small, facts
        self._room = {True: gpu, False: ram}

    def all(self) -> Iterator[Offer]:
        yield from self._full()
        yield self._in_ram()
        for kind in ("f16", "q8_0"):
            with suppress(UnsupportedError):  # a memory that cannot be pooled
                for more in ({}, {"mode": "lossless"}):
                    if (pool := self._pool(kind, more)) is not None:
                        yield pool

    def _full(self) -> Iterator[Offer]:
        yield self._offer("f16", {"pool": "off"})
        for kind in ("q8_0", "q4_0"):
            with suppress(UnsupportedError):  # a cache type that the model's rows do not have
                yield self._offer(kind, {"pool": "off", **_types(kind)})

    def tight(self) -> Iterator[Offer]:
        """Yield ways for a model that leaves too little of a GPU: with weights of some layers in RAM.

        Batches are not the smallest ones if larger ones fit: to read a prompt, each of them has these weights copied.
        """
        batches = [{"n_ubatch": 2 * SMALL_BATCH}, self._small] if self._small else [{}]
        size = next((size for size in POOLS[3:] if size < self._base.n_ctx), None)
        ways: list[tuple[str, dict[str, Any]]] = [("q8_0", {"pool": "off", **_types("q8_0")})]
        if size:
            forms = (("f16", "4"), ("q8_0", "4"), ("f16", "2"))
            ways += [("pool", {"pool": size, "coarse": bits, **_types(kind)}) for kind, bits in forms]
        for kind, options in ways:
            with suppress(UnsupportedError):  # no pool, or no codes
                tried = (self._offer(kind, {**options, **batch, "n_cpu_moe": "auto"}) for batch in batches)
                yield from islice((offer for offer in tried if not offer.lacking), 1)

    def _pool(self, kind: str, more: dict[str, str]) -> Offer | None:
        """Return the largest pool that fits with the closest codes for which the smallest pool leaves memory, with small batches if need
        be; if none fits, the smallest one without codes. None if the context or the model has none. more: options.
        """
        *larger, least = [size for size in POOLS if size < self._base.n_ctx] or [0]
        found = None
        batches = [{}, self._small] if self._small else [{}]
        forms = [(bits, batch) for bits in expected.BITS for batch in (batches if bits != "off" else [{}])]
        for bits, batch in forms if least else ():
            with suppress(UnsupportedError):  # codes that there cannot be
                found = self._offer("pool", {"pool": least, "coarse": bits, **_types(kind), **batch, **more})
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
        found = planned(self._path, asked)
        held = _in_host(found.needs) if kind == "RAM" else found.needs
        on_gpu, n_host = bool(self._room[True]), int(found.options.n_cpu_moe)
        return Offer(
            kind,
            options,
            found.size.n_pool,
            held,
            self._lacking(held),
            moves=asked.n_cpu_moe != 0,
            on_gpu=on_gpu,
            n_on_cpu=0 if self._facts.of_experts else n_host,
            host_read=self._facts.a_token(held) if on_gpu and n_host else 0,
            recurrent=self._facts.recurrent,
        )

    def _lacking(self, held: tuple[Need, ...]) -> dict[str, int]:
        res = {}
        for gpu, room in self._room.items():
            if (n := sum(need.total for need in held if need.gpu == gpu)) > room:
                res["GPU" if gpu else "RAM"] = n - room
        return res


@dataclass(frozen=True, slots=True)
class _Facts:
    """What its offers are told of a model. embeddings: bytes in RAM of which the CPU reads nothing for a token; share: what it reads of
    the others, which are experts, or not. recurrent: it has such states.
    """

    embeddings: int
    share: float
    of_experts: bool
    recurrent: bool

    @classmethod
    def of(cls, model: Model) -> Self:
        arch = model.meta("general.architecture")
        n, used = (int(model.meta(f"{arch}.{name}") or 0) for name in ("expert_count", "expert_used_count"))
        return cls(
            sum(w.size for w in model.weights() if w.name == "token_embd.weight"),
            used / n if n else 1.0,
            n > 0,
            model.recurrent,
        )

    def a_token(self, held: tuple[Need, ...]) -> int:
        on_host = sum(need.weights for need in held if not need.gpu)
        return round(self.share * max(0, on_host - self.embeddings))


class _OnCPU(_Look):
    """Without a GPU: full caches, and the pool that `auto` would take."""

    def all(self) -> Iterator[Offer]:
        yield from self._full()
        if self._base.n_ctx > HOST_CAP:
            for bits in (expected.BITS[0], "off"):
                with suppress(UnsupportedError):  # no pool, or no codes
                    yield self._offer("pool", {"pool": HOST_CAP, "coarse": bits})
                    return


def _types(kind: str) -> dict[str, str]:
    return {} if kind == "f16" else {"type_k": kind, "type_v": kind}


def _in_host(held: tuple[Need, ...]) -> tuple[Need, ...]:
    """Return what is held with KV and states in RAM, where llama.cpp has both, wherever the machine that looks has them."""
    kv, states = sum(need.kv for need in held), sum(need.states for need in held)
    there = next(i for i, need in enumerate(held) if not need.gpu)
    return tuple(
        replace(need, kv=kv, states=states) if i == there else replace(need, kv=0, states=0)
        for i, need in enumerate(held)
    )
