"""Which layers' experts stay in host memory: what was asked for, or as few as leave room for the pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyllama_kvflash.policy.sizing import AUTO_CAP, CELLS, RESERVE


@dataclass(frozen=True, slots=True)
class Holding:
    """A device, and what of the model it is to hold. Sizes are bytes.

    free: before the model is loaded. fixed: other weights than experts, and states that do not grow with the context.
    token_bytes: KV of a token. experts: those of every layer of the model in order, 0 where they are not here. copy: of
    the largest tensor of experts, which a batch of a prompt takes here while it lies on the host. compute: buffers of the
    computation; token_compute: what they are larger for each token of KV, for there is a mask of it. drafter: all that it
    takes. gpu: not the host.
    """

    name: str
    free: int
    fixed: int
    token_bytes: int
    experts: tuple[int, ...]
    copy: int = 0
    compute: int = 0
    token_compute: int = 0
    drafter: int = 0
    gpu: bool = True

    def need(self, n_host: int, tokens: int) -> int:
        """Bytes, the reserve among them, for so many tokens of KV if the experts of the first n_host layers are not here."""
        return sum(self.parts(n_host, tokens).values())

    def parts(self, n_host: int, tokens: int) -> dict[str, int]:
        """What need() adds up, by its name."""
        res = {
            "other weights and states": self.fixed,
            "experts": sum(self.experts[n_host:]),
            f"KV of {tokens} tokens": tokens * self.token_bytes,
            "computation": self.compute + tokens * self.token_compute,
            "drafter": self.drafter,
            "a copy for prompts": self.copy if n_host else 0,
            "reserve": RESERVE,
        }
        return {name: size for name, size in res.items() if size or name == "experts"}


@dataclass(frozen=True, slots=True)
class Placement:
    """The outcome: the experts of the first n_cpu_moe layers stay on the host, and pool is the request for a pool now.

    redundant: the full cache fits beside all experts. notes and warnings are sentences for the user.
    """

    n_cpu_moe: int
    pool: int | str
    redundant: bool = False
    notes: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())


def place_experts(
    request: int | str,
    holdings: Sequence[Holding],
    *,
    pool: int | str,
    n_ctx: int,
    floor: int,
    cap: int = AUTO_CAP,
) -> Placement:
    """Where the experts go for a request ("auto", or layers >= 0), beside a pool ("auto", at most cap; "off"; or tokens).

    holdings: every device that holds any of the model. floor: cells that the pool has at least. "auto" is the smallest
    number of layers with which every GPU holds its part of the weights and of the pool's KV, the full cache's if the pool
    is off or covers the context. The host is not asked: weights there are mapped from the file.

    The automatic pool would take half of what the experts leave, and these would leave what the pool takes. So the
    experts come second: they make room for a pool of cap tokens (no more than the context, no less than the floor), and
    that is then the pool. Only if it does not fit with all experts on the host, the pool is what is left: "auto" again.

    A full cache that fits beside all experts makes an automatic pool redundant: it is turned off. One that would fit with
    some experts on the host does not, for it is the pool that keeps these on the GPU.
    """
    n_layer = max(len(h.experts) for h in holdings)
    gpus = [h for h in holdings if h.gpu and any(h.experts)]
    if not any(any(h.experts) for h in holdings):
        text = f"n_cpu_moe (-ncmoe/--n-cpu-moe) is {request}, but the model has no experts: there is nothing to keep on the host"
        return Placement(0, pool, warnings=(text,))
    if not gpus:
        text = "experts: all are in host memory as it is, there is no GPU to save memory on"
        return Placement(0 if request == "auto" else min(int(request), n_layer), pool, notes=(text,))
    if request != "auto":
        return Placement(min(int(request), n_layer), pool, notes=(_given(int(request), n_layer, gpus),))
    return _auto([h for h in holdings if h.gpu], n_layer, pool, _rounded(n_ctx), floor, cap)


def _auto(gpus: Sequence[Holding], n_layer: int, pool: int | str, full: int, floor: int, cap: int) -> Placement:
    """For a full cache of `full` cells."""
    if pool != "off" and _fit(gpus, 0, full):
        beside = f"experts: all stay on the GPU, and the full cache beside them: {_arithmetic(gpus, 0, full)}, so"
        if pool == "auto":
            text = f"{beside} the pool is redundant, and turned off (--kvflash N keeps one of N tokens)"
            return Placement(0, "off", redundant=True, notes=(text,))
        text = f"{beside} the pool of {pool} tokens is not needed (--kvflash off)"
        return Placement(0, pool, redundant=True, notes=(text,))
    tokens, least = (min(full, max(floor, cells)) for cells in _cells(pool, full, cap))
    n = _fewest(gpus, n_layer, tokens)
    if n is None:
        return _squeezed(gpus, n_layer, pool, tokens, least)
    notes = [f"experts: {_first(n, n_layer, gpus)}: {_arithmetic(gpus, n, tokens)}"]
    n_full = _fewest(gpus, n_layer, full)
    if n_full != n:
        notes.append(_kept(n, n_full, full))
    return Placement(n, tokens if pool == "auto" else pool, notes=tuple(notes))


def _squeezed(gpus: Sequence[Holding], n_layer: int, pool: int | str, tokens: int, least: int) -> Placement:
    """All experts on the host: there is no room for KV of so many tokens, and perhaps for no pool at all."""
    if _fit(gpus, n_layer, least):
        text = f"experts: {_first(n_layer, n_layer, gpus)}, and the pool takes what is left: {_arithmetic(gpus, n_layer, tokens)}"
        return Placement(n_layer, pool, notes=(text,))
    text = (
        f"the GPU is too small even with all experts on the host: {_arithmetic(gpus, n_layer, least)}, so use a"
        f"{'' if pool == 'off' else ' smaller'} pool (--kvflash), smaller cache types (-ctk, -ctv) or fewer layers on the"
        " GPU (-ngl)"
    )
    return Placement(n_layer, pool, warnings=(text,))


def _cells(pool: int | str, full: int, cap: int) -> tuple[int, int]:
    """What a pool is to have, and is to have at least, where floor and context allow it."""
    if pool == "auto":
        return cap // CELLS * CELLS, 0
    cells = full if pool == "off" else _rounded(int(pool))
    return cells, cells


def _fit(gpus: Sequence[Holding], n_host: int, tokens: int) -> bool:
    return all(h.need(n_host, tokens) <= h.free for h in gpus)


def _fewest(gpus: Sequence[Holding], n_layer: int, tokens: int) -> int | None:
    """The smallest number of layers whose experts must go, None if all are not enough."""
    return next((n for n in range(n_layer + 1) if _fit(gpus, n, tokens)), None)


def _given(n: int, n_layer: int, gpus: Sequence[Holding]) -> str:
    of = f" (n_cpu_moe (-ncmoe/--n-cpu-moe) is {n}, and the model has {n_layer} layers)" if n > n_layer else ""
    return f"experts: {_first(min(n, n_layer), n_layer, gpus)}{of}"


def _first(n: int, n_layer: int, gpus: Sequence[Holding]) -> str:
    if n == 0:
        return "all stay on the GPU"
    which = "all" if n == n_layer else f"those of the first {f'{n} ' if n > 1 else ''}of {n_layer} layers"
    return f"{which} stay on the host ({_mib(sum(sum(h.experts[:n]) for h in gpus))})"


def _kept(n: int, n_full: int | None, full: int) -> str:
    beside = f"the pool keeps experts on the GPU: beside the full cache of {full} tokens"
    if n_full is None:
        return f"{beside} there would be no room even with all of them on the host"
    layers = f"{n_full} layer{'s' if n_full > 1 else ''}"
    return f"{beside} those of {layers} would have to stay on the host instead of {n or 'none'}"


def _arithmetic(gpus: Sequence[Holding], n_host: int, tokens: int) -> str:
    """In words, on the device that has the least to spare."""
    h = min(gpus, key=lambda h: h.free - h.need(n_host, tokens))
    need = h.need(n_host, tokens)
    others = f", the tightest of {len(gpus)} devices" if len(gpus) > 1 else ""
    terms = " + ".join(f"{_mib(size)} {name}" for name, size in h.parts(n_host, tokens).items())
    relation = "of" if need <= h.free else "but only"
    return f"{terms} = {_mib(need)}, {relation} {_mib(h.free)} free on {h.name}{others}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _rounded(n: int) -> int:
    return -(-n // CELLS) * CELLS
