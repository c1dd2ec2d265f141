"""The ways to fit a context into given GPU memory and RAM: full caches by type, a cache in RAM, pools, and layers on the CPU."""

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
from pyllama_kvflash.loading.need import DRIVER
from pyllama_kvflash.loading.placement import has_experts
from pyllama_kvflash.loading.planning import planned
from pyllama_kvflash.native import Model, pretending
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.device import DeviceBytes
from pyllama_kvflash.policy.sizing import HOST_CAP

POOLS = (16_384, 8192, 4096, 2048, 1024)
"""Pool sizes to try, the largest first: a larger pool answers better and decodes more slowly."""
_READS_MUCH = 1.25  # an offer that reads more than this many times the least RAM per token is noticeably slower
_AS_GOOD = 1.5  # up to this many times q8_0's divergence counts as equal: another seed makes such a difference, too


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to hold the context.

    kind: the cache: "f16", "q8_0", "q4_0", "RAM" or "pool". options: the fields of Options that make it. needs: each device's memory.
    lacking: the bytes that "GPU" and "RAM" lack; {}: the offer fits. moves: whether experts, or feed-forward weights, may stay on the
    host. on_gpu: whether a GPU computes. n_on_cpu: layers whose feed-forward weights stay on the host. host_read: bytes of weights that
    the CPU reads from RAM per token. recurrent: whether the model has recurrent states.
    """

    kind: str
    options: dict[str, Any]
    n_pool: int | None
    needs: tuple[DeviceBytes, ...]
    lacking: dict[str, int]
    moves: bool = False
    on_gpu: bool = True
    n_on_cpu: int = 0
    host_read: int = 0
    recurrent: bool = False

    @property
    def lossless(self) -> bool:
        """Whether the pool is in mode lossless, so that answers are the same as with a full cache."""
        return self.options.get("mode") == "lossless"

    @property
    def coarse(self) -> str:
        """The bits of the codes beside a pool; "off" without codes."""
        return str(self.options.get("coarse", "off"))

    def divergence(self, n_ctx: int) -> dict[str, float] | None:
        """Return how far long answers diverge from those of the full f16 cache, as expected.divergence() does; None: not measured."""
        kind = self.options.get("type_k", "f16")
        if self.n_pool is None or self.lossless:
            return expected.FULL_KLD[kind]
        return expected.divergence(self.n_pool / n_ctx, self.coarse, kind)

    def is_close(self, n_ctx: int) -> bool:
        """Return whether long answers are about as close to the full f16 cache's as those of a full q8_0 cache are."""
        far, q8_0 = self.divergence(n_ctx), expected.FULL_KLD["q8_0"]
        return far is not None and all(far[text] <= _AS_GOOD * q8_0[text] for text in far)

    def speed(self, n_ctx: int) -> float | None:
        """Return the decode speed, as expected.speed() does; None: not measured."""
        if self.lossless or (self.on_gpu and self.host_read and self.kind != "RAM"):
            return None
        if not self.on_gpu:
            return expected.cpu_speed(self.kind, n_ctx)
        return (expected.hybrid_speed if self.recurrent else expected.speed)(self.kind, n_ctx, self.coarse)

    @property
    def most_speed(self) -> float:
        """The most tokens per second, given that weights in RAM must be read; infinite if no weights are in RAM."""
        return expected.RAM_RATE / self.host_read if self.host_read else math.inf

    def bytes_of(self, *, gpu: bool) -> int:
        """Return how many bytes of GPU memory, or of RAM, a full context takes."""
        return sum(need.total for need in self.needs if need.gpu == gpu)


def offers(path: Path, n_ctx: int, gpu: int, ram: int, n_ubatch: int | None = None) -> list[Offer]:
    """Return all ways to hold a context, whether they fit or not. n_ctx: positions; 0: the trained context. gpu, ram: bytes; with gpu 0,
    the CPU computes. n_ubatch: tokens of a physical batch; None: the usual number, or fewer if memory is short.

    Loads no weights. Raises the errors of planning.planned().
    """
    with pretending(gpu and max(1, gpu - DRIVER), ram):  # the driver takes its part when a program starts
        with Model.load(path, no_alloc=True) as model:
            check_runs(model, Options(pool="off"))
            n_ctx, experts = n_ctx or model.n_ctx_train, has_experts(model.weights())
            facts = _Facts.of(model)
        base = Options(n_ctx=n_ctx, n_ubatch=Options().n_ubatch if n_ubatch is None else n_ubatch)
        if not gpu:
            return list(_OnCPU(path, replace(base, n_gpu_layers=0), 0, ram, {}, facts).all())
        # everything on the first GPU: several GPUs have more memory together, but each holds its own layers
        base = replace(base, split_mode="none", n_cpu_moe="auto" if experts else 0)
        look = _Look(path, base, gpu, ram, {"n_ubatch": SMALL_BATCH} if n_ubatch is None else {}, facts)
        found = list(look.all())
        if not any(not offer.lacking and _answers_well(offer) for offer in found):
            found += look.tight()
        return found


class Rank(IntEnum):
    """The quality of an offer: the lower the rank, the better."""

    CLOSE = 0  # diverges no more than a full q8_0 cache
    CODED = 1  # codes of 4 bits beside a pool smaller than the measured ones
    LOSSLESS = 2
    FAR = 3  # long answers are worse
    SHARED = 4  # the CPU computes a part of some layers
    SHARED_FAR = 5  # as SHARED, and long answers are worse
    BLIND = 6  # a token attends to resident chunks only


def rank(offer: Offer, n_ctx: int) -> Rank:
    """Return the rank of an offer that fits."""
    if offer.n_pool is not None and offer.coarse == "off" and not offer.lossless:
        return Rank.BLIND
    if offer.n_on_cpu:
        return Rank.SHARED if offer.is_close(n_ctx) or offer.coarse == "4" else Rank.SHARED_FAR
    if offer.lossless:
        return Rank.LOSSLESS
    if offer.is_close(n_ctx):
        return Rank.CLOSE
    return Rank.CODED if offer.coarse == "4" else Rank.FAR


def usable(found: list[Offer]) -> list[Offer]:
    """Return the offers to recommend: not the cache in RAM (slow), nor q4_0, which broke answers in measurements."""
    return [offer for offer in found if offer.kind not in ("q4_0", "RAM")]


def best(found: list[Offer], n_ctx: int) -> Offer | None:
    """Return the best offer that fits, or None.

    With a GPU, the criteria are, in this order: the rank; few bytes of experts that a token reads from RAM; the usual batch size; few
    layers in RAM; the least measured divergence from the full f16 cache; the largest pool.
    """
    fit = [offer for offer in usable(found) if not offer.lacking]
    if fit and not fit[0].on_gpu:  # a pool's answers are as good, and much faster
        return max(fit, key=lambda offer: (offer.n_pool is None) == (n_ctx <= HOST_CAP))
    ranks = [rank(offer, n_ctx) for offer in fit]
    least = min((offer.host_read for offer, its in zip(fit, ranks, strict=True) if its == min(ranks)), default=0)

    def order(offer: Offer) -> tuple[Rank, bool, bool, int, float, int]:
        far = offer.divergence(n_ctx)
        return (
            rank(offer, n_ctx),
            offer.host_read > _READS_MUCH * least and not offer.n_on_cpu,
            "n_ubatch" in offer.options,
            offer.n_on_cpu,
            sum(far.values()) if far else math.inf,
            -(offer.n_pool or n_ctx),
        )

    return min(fit, key=order, default=None)


def _answers_well(offer: Offer) -> bool:
    return offer.lossless or offer.kind in ("f16", "q8_0") or (offer.n_pool is not None and offer.coarse != "off")


class _Look:
    """The search for offers on a machine with a GPU. small: options that make batches smaller; {}: they stay as they are."""

    def __init__(self, path: Path, base: Options, gpu: int, ram: int, small: dict[str, Any], facts: "_Facts") -> None:
        self._path, self._base, self._small, self._facts = path, base, small, facts
        self._room = {True: gpu, False: ram}

    def all(self) -> Iterator[Offer]:
        yield from self._full()
        yield self._in_ram()
        for kind in ("f16", "q8_0"):
            with suppress(UnsupportedError):  # the memory cannot be pooled
                for more in ({}, {"mode": "lossless"}):
                    if (pool := self._pool(kind, more)) is not None:
                        yield pool

    def _full(self) -> Iterator[Offer]:
        yield self._offer("f16", {"pool": "off"})
        for kind in ("q8_0", "q4_0"):
            with suppress(UnsupportedError):  # the cache type does not suit the model's rows
                yield self._offer(kind, {"pool": "off", **_types(kind)})

    def tight(self) -> Iterator[Offer]:
        """Yield offers for a model too large for the GPU, with the weights of some layers in RAM.

        Prefers larger batches if they fit, because every prompt batch copies these weights to the GPU.
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
        """Return the best pool, or None if the context is too small or the model cannot be pooled. The best pool has the most accurate
        codes that fit beside the smallest pool (with small batches if necessary). Its size is the largest that fits beside those codes. If nothing
        fits, return the smallest pool without codes. more: additional options.
        """
        *larger, least = [size for size in POOLS if size < self._base.n_ctx] or [0]
        found = None
        batches = [{}, self._small] if self._small else [{}]
        forms = [(bits, batch) for bits in expected.BITS for batch in (batches if bits != "off" else [{}])]
        for bits, batch in forms if least else ():
            with suppress(UnsupportedError):  # the model cannot have codes
                found = self._offer("pool", {"pool": least, "coarse": bits, **_types(kind), **batch, **more})
                if found.n_pool is None:  # the model cannot be pooled, and would get the full cache
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
        held = _in_host(found.memory) if kind == "RAM" else found.memory
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

    def _lacking(self, held: tuple[DeviceBytes, ...]) -> dict[str, int]:
        res = {}
        for gpu, room in self._room.items():
            if (n := sum(need.total for need in held if need.gpu == gpu)) > room:
                res["GPU" if gpu else "RAM"] = n - room
        return res


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about a model. embeddings: bytes of the token embeddings, which are in RAM; a token reads almost none of them. share: the
    fraction that a token reads of the other weights in RAM. of_experts, recurrent: whether the model has experts, and recurrent states.
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

    def a_token(self, held: tuple[DeviceBytes, ...]) -> int:
        on_host = sum(need.weights for need in held if not need.gpu)
        return round(self.share * max(0, on_host - self.embeddings))


class _OnCPU(_Look):
    """The search for offers without a GPU: full caches, and the pool that `auto` would choose."""

    def all(self) -> Iterator[Offer]:
        yield from self._full()
        if self._base.n_ctx > HOST_CAP:
            for bits in (expected.BITS[0], "off"):
                with suppress(UnsupportedError):  # no pool, or no codes
                    yield self._offer("pool", {"pool": HOST_CAP, "coarse": bits})
                    return


def _types(kind: str) -> dict[str, str]:
    return {} if kind == "f16" else {"type_k": kind, "type_v": kind}


def _in_host(held: tuple[DeviceBytes, ...]) -> tuple[DeviceBytes, ...]:
    """Return the needs with KV and states counted in RAM. llama.cpp keeps both there without `kv_offload`, whatever this machine has."""
    kv, states = sum(need.kv for need in held), sum(need.states for need in held)
    there = next(i for i, need in enumerate(held) if not need.gpu)
    return tuple(
        replace(need, kv=kv, states=states) if i == there else replace(need, kv=0, states=0)
        for i, need in enumerate(held)
    )
