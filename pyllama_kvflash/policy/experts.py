"""Decide how many layers keep their experts (in a dense model, their feed-forward weights) in host memory: the requested number, or
the smallest number that leaves room for the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyllama_kvflash.policy.device import RESERVE, DeviceBytes, mib
from pyllama_kvflash.policy.sizing import AUTO_CAP, CELLS, whole_cells

DENSE_CAP = 4096
"""The largest automatic pool for a dense model, in tokens. A larger one would push more weights into RAM, and each token reads all
weights there, 2 ms a layer.
"""


@dataclass(frozen=True, slots=True)
class Holding(DeviceBytes):
    """A device and its part of the model. Sizes are in bytes. The fields inherited from DeviceBytes, except `free`, count neither a
    pool nor the weights that may stay on the host.

    free: free memory before the model is loaded.
    experts: experts of each layer of the model in order, 0 for a layer on another device; in a dense model, feed-forward weights.
    copy: the largest tensor among the experts. If it lies on the host, a prompt batch copies it to this device.
    token_compute: growth of the compute buffers with each token of KV, for its attention mask.
    dense: whether the model is dense.
    reserve: bytes that stay free.
    """

    experts: tuple[int, ...] = ()
    copy: int = 0
    token_compute: int = 0
    dense: bool = False
    reserve: int = RESERVE

    @property
    def what(self) -> str:
        """The name of the weights that may stay on the host, for notes."""
        return "feed-forward weights" if self.dense else "experts"

    def need(self, n_host: int, tokens: int) -> int:
        """Return the bytes needed for `tokens` tokens of KV, reserve included, with the first n_host layers' experts on the host."""
        return sum(self.terms(n_host, tokens).values())

    def terms(self, n_host: int, tokens: int) -> dict[str, int]:
        """Return the terms that need() adds up, in bytes by name."""
        res = {
            "other weights and states": self.weights + self.states + self.panes,
            self.what: sum(self.experts[n_host:]),
            f"KV of {tokens:,} tokens": tokens * self.token_bytes,
            "computation": self.buffers + tokens * self.token_compute,
            "drafter": self.drafter,
            "codes": self.coarse,
            "a copy for prompts": self.copy if n_host else 0,
            "reserve": self.reserve,
        }
        return {name: size for name, size in res.items() if size or name == self.what}


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of place_experts().

    n_cpu_moe: the number of layers, from the first on, whose experts stay on the host.
    dense: whether the model is dense. If so, its feed-forward weights take the place of experts.
    pool: the pool to request now: "auto", "off" or tokens.
    redundant: True if the full cache fits beside all experts.
    fits: False if no pool fits, even with all experts on the host.
    notes, warnings: sentences for the user.
    """

    n_cpu_moe: int
    pool: int | str
    redundant: bool = False
    notes: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())
    fits: bool = True
    dense: bool = False


def place_experts(
    request: int | str,
    holdings: Sequence[Holding],
    *,
    pool: int | str,
    n_ctx: int,
    floor: int,
    cap: int = 0,
) -> Placement:
    """Decide how many layers keep their experts on the host.

    request: "auto", or a number of layers >= 0.
    holdings: every device that holds part of the model.
    pool: "auto" (at most cap tokens), "off", or tokens.
    floor: the fewest cells that the pool may have.
    cap: the largest automatic pool, in tokens; 0: AUTO_CAP, or DENSE_CAP for a dense model.

    "auto" chooses the fewest layers with which every GPU holds its part of the weights and of the pool's KV, or of the
    full cache's KV if the pool is off or covers the context. The host is not checked.

    An automatic pool depends on the memory that experts leave, and automatic experts depend on the pool. To break this
    circle, the experts make room for a pool of cap tokens (at most the context, at least the floor), and that becomes
    the pool. If that pool does not fit even with all experts on the host, the pool stays "auto" and is sized from the rest.

    If the full cache fits beside all experts, an automatic pool is redundant and is turned off. If the full cache fits only
    with some experts on the host, the pool stays, because it keeps those experts on the GPU.
    """
    n_layer = max(len(h.experts) for h in holdings)
    gpus = [h for h in holdings if h.gpu and any(h.experts)]
    if not any(any(h.experts) for h in holdings):
        text = (
            f"`n_cpu_moe` is {request}, but the model has neither experts nor feed-forward weights to keep on the host"
        )
        return Placement(0, pool, warnings=(text,))
    if not gpus:
        text = f"{holdings[0].what}: all are in host memory already, because there is no GPU"
        return Placement(0 if request == "auto" else min(int(request), n_layer), pool, notes=(text,))
    if request != "auto":
        return Placement(min(int(request), n_layer), pool, notes=(_given(int(request), n_layer, gpus),))
    cap = cap or (DENSE_CAP if gpus[0].dense else AUTO_CAP)
    return _auto([h for h in holdings if h.gpu], n_layer, pool, whole_cells(n_ctx), floor, cap)


def _auto(gpus: Sequence[Holding], n_layer: int, pool: int | str, full: int, floor: int, cap: int) -> Placement:
    """Place experts for "auto". full: cells of a full cache."""
    if pool != "off" and _fit(gpus, 0, full):
        beside = f"{gpus[0].what}: all stay on the GPU, and the full cache fits beside them: {_arithmetic(gpus, 0, full)}, so"
        if pool == "auto":
            text = f"{beside} the pool is redundant, and turned off (`pool` N keeps one of N tokens)"
            return Placement(0, "off", redundant=True, notes=(text,))
        text = f"{beside} the pool of {pool:,} tokens is not needed (`pool` off)"
        return Placement(0, pool, redundant=True, notes=(text,))
    tokens, least = (min(full, max(floor, cells)) for cells in _cells(pool, full, cap))
    n = _fewest(gpus, n_layer, tokens)
    if n is None:
        return _squeezed(gpus, n_layer, pool, tokens, least)
    notes = [f"{gpus[0].what}: {_first(n, n_layer, gpus)}: {_arithmetic(gpus, n, tokens)}"]
    n_full = _fewest(gpus, n_layer, full)
    if n_full != n:
        notes.append(_kept(gpus[0].what, n, n_full, full))
    return Placement(n, tokens if pool == "auto" else pool, notes=tuple(notes))


def _squeezed(gpus: Sequence[Holding], n_layer: int, pool: int | str, tokens: int, least: int) -> Placement:
    """Put all experts on the host, because `tokens` tokens of KV do not fit. Warn if not even `least` tokens fit then."""
    if _fit(gpus, n_layer, least):
        text = f"{gpus[0].what}: {_first(n_layer, n_layer, gpus)}, and the pool takes what is left: {_arithmetic(gpus, n_layer, tokens)}"
        return Placement(n_layer, pool, notes=(text,))
    text = (
        f"the GPU is too small even with all {gpus[0].what} on the host: {_arithmetic(gpus, n_layer, least)}, so use a"
        f"{'' if pool == 'off' else ' smaller'} pool (`pool`), smaller cache types (`type_k`, `type_v`) or fewer layers on"
        " the GPU (`n_gpu_layers`)"
    )
    return Placement(n_layer, pool, warnings=(text,), fits=False)


def _cells(pool: int | str, full: int, cap: int) -> tuple[int, int]:
    """Return the desired and the smallest number of cells of a pool, before floor and context are applied."""
    if pool == "auto":
        return cap // CELLS * CELLS, 0
    cells = full if pool == "off" else whole_cells(int(pool))
    return cells, cells


def _fit(gpus: Sequence[Holding], n_host: int, tokens: int) -> bool:
    return all(h.need(n_host, tokens) <= h.free for h in gpus)


def _fewest(gpus: Sequence[Holding], n_layer: int, tokens: int) -> int | None:
    """Return the least number of layers whose experts must stay on the host; None if even all layers are not enough."""
    return next((n for n in range(n_layer + 1) if _fit(gpus, n, tokens)), None)


def _given(n: int, n_layer: int, gpus: Sequence[Holding]) -> str:
    of = f" (`n_cpu_moe` is {n}, and the model has {n_layer} layers)" if n > n_layer else ""
    return f"{gpus[0].what}: {_first(min(n, n_layer), n_layer, gpus)}{of}"


def _first(n: int, n_layer: int, gpus: Sequence[Holding]) -> str:
    if n == 0:
        return "all stay on the GPU"
    which = "all" if n == n_layer else f"those of the first {f'{n} ' if n > 1 else ''}of {n_layer} layers"
    return f"{which} stay on the host ({mib(sum(sum(h.experts[:n]) for h in gpus))})"


def _kept(what: str, n: int, n_full: int | None, full: int) -> str:
    beside = f"the pool keeps {what} on the GPU: beside the full cache of {full:,} tokens"
    if n_full is None:
        return f"{beside} there would be no room even with all of them on the host"
    layers = f"{n_full} layer{'s' if n_full > 1 else ''}"
    return f"{beside} those of {layers} would have to stay on the host instead of {n or 'none'}"


def _arithmetic(gpus: Sequence[Holding], n_host: int, tokens: int) -> str:
    """Spell out the memory sum for the device with the least free memory left."""
    h = min(gpus, key=lambda h: h.free - h.need(n_host, tokens))
    need = h.need(n_host, tokens)
    others = f", the tightest of {len(gpus)} devices" if len(gpus) > 1 else ""
    terms = " + ".join(f"{mib(size)} {name}" for name, size in h.terms(n_host, tokens).items())
    relation = "of" if need <= h.free else "but only"
    return f"{terms} = {mib(need)}, {relation} {mib(h.free)} free on {h.name}{others}"
