"""Choose the bits of codes: the most accurate codes that fit in memory with everything else."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.native import devices
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import FORMS
from pyllama_kvflash.policy.device import RESERVE, DeviceBytes

SMALL_BATCH = 128
"""Tokens of a physical batch if memory is short: this frees some 230 MiB of a GPU for codes, and slows prompts down."""

LEAST = 256 << 20
"""Reserve on a GPU if a larger one would leave no room for codes: the memory that running kernels take, and a little more."""


def choices(options: Options, *, possible: bool, lodged: bool = False) -> tuple[Options, ...]:
    """Return the options to try, the most accurate codes first, with `coarse`, `codes_in_panes` and policy "auto" resolved. The last ones
    are used even if they do not fit. Policy "auto" becomes "fresh" with codes, else "qk".

    options: from Options.resolved(). possible: whether the model can have codes here. lodged: whether codes can share the panes' memory.
    """
    bits: tuple[str, ...] = (options.coarse,)
    if options.coarse == "auto":
        bits = forms(options) if possible and options.pool != "off" else ("off",)
    wanted = (False, True) if options.codes_in_panes is None else (options.codes_in_panes,)
    shared = [each for each in wanted if lodged or not each] or [False]
    return tuple(
        replace(_with(options, each), codes_in_panes=there)
        for each in bits
        for there in (shared if each != "off" else (False,))
    )


def may_lodge(options: Options, geometry: Geometry) -> bool:
    """Return whether codes can share the memory of an exact pass. That needs one sequence, one GPU (the CPU may have layers, too), and
    no exact passes during answers. Several sequences would need both memories at once, because one reads while another answers.
    """
    found = devices()
    gpus = {i for i in geometry.devices or (0,) if found[i].gpu}
    return (
        options.n_parallel == 1
        and len(gpus) == 1
        and options.pool != "off"
        and options.prefill != "pool"
        and not options.reads_in_answers
    )


def forms(options: Options) -> tuple[str, ...]:
    """Return the values to try for `coarse` "auto", the most accurate first. Policy "fresh" cannot do without codes."""
    return FORMS if options.policy == "fresh" else (*FORMS, "off")


def _with(options: Options, bits: str) -> Options:
    policy = options.policy
    if policy == "auto":
        policy = "qk" if bits == "off" else "fresh"
    return replace(options, coarse=bits, policy=policy)


def free_bytes() -> dict[str, int]:
    """Return the free bytes of each device, by the device's name. Call this before loading, for fits()."""
    return {device.name: device.free for device in devices()}


def fits(needs: Sequence[DeviceBytes], free: Mapping[str, int], reserve: int = RESERVE) -> bool:
    """Return whether each device with codes has room for everything, and a reserve. Devices without codes are not checked, because fewer
    bits would not help them.

    free: from free_bytes(), when only the program itself was in memory. reserve: bytes to leave free on a GPU; elsewhere, RESERVE.
    """
    return all(
        need.total - need.program <= free[need.name] - (reserve if need.gpu else RESERVE)
        for need in needs
        if need.coarse
    )


class Made(Protocol):
    """What first_that_fits() makes of options: a plan, or contexts."""

    @property
    def memory(self) -> Sequence[DeviceBytes]:
        """What each device holds with a full context. Empty devices are left out."""

    def close(self) -> None:
        """Free everything."""


M = TypeVar("M", bound=Made)


def first_that_fits(
    options: Options, found: Sequence[Options], free: Mapping[str, int], make: Callable[[Options], M]
) -> M:
    """Call `make` with each of the options, in the order of _tries(), and return the first result whose memory fits. If none does, return
    the result for the last of `found`.

    found: choices(options). free: as for fits(). Raises the errors of `make` for the last options.
    """
    for tried, reserve in _tries(options, found):
        with suppress(NativeError):
            made = make(tried)
            if fits(made.memory, free, reserve):
                return made
            made.close()
    return make(found[-1])


def _tries(options: Options, found: Sequence[Options]) -> list[tuple[Options, int]]:
    """Return the options to try, in order, each with the reserve for fits(). If none of them fits, the last of `found` is used.

    If `coarse` is "auto", small batches are tried after the usual ones, since they may leave room for codes on a GPU.
    """
    *closer, last = found
    small = max(SMALL_BATCH, options.n_parallel)  # a token of each sequence fits
    if options.coarse != "auto" or options.n_ubatch <= small or not any(device.gpu for device in devices()):
        return [(each, RESERVE) for each in closer]
    coded = closer if last.coarse == "off" else found
    return [*((each, RESERVE) for each in coded), *((replace(each, n_ubatch=small), LEAST) for each in coded)]
