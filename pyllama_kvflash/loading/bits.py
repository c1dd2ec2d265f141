"""Which codes there are of the positions outside a pool: the closest ones for which there is memory beside all else."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyllama_kvflash.loading.need import Need
from pyllama_kvflash.native import devices
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import FORMS
from pyllama_kvflash.policy.sizing import RESERVE

SMALL_BATCH = 128
"""Tokens of a physical batch where memory is short: it leaves some 230 MiB of a GPU for codes, and prompts are slower."""

LEAST = 256 << 20
"""Bytes of a GPU that are left where more would leave no room for codes: what kernels take once they run, and a little."""


def choices(options: Options, *, possible: bool, lodged: bool = False) -> tuple[Options, ...]:
    """Return the options with `coarse`, `codes_in_panes` and policy "auto" resolved, in the order in which they are to be tried: the
    closest codes first, and the last one whether there is memory or not. The policy is "fresh" with codes, else "qk".

    options: resolved. possible: whether the model can have codes here. lodged: whether these can be in the memory of an exact pass.
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
    """Return whether codes can be in the memory of an exact pass: of a single GPU, beside which the CPU may have layers, and which no answer
    needs meanwhile.

    Several sequences read and answer in turn.
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
    """Return what `coarse` "auto" may be, the closest first: layers cannot choose without codes."""
    return FORMS if options.policy == "fresh" else (*FORMS, "off")


def _with(options: Options, bits: str) -> Options:
    policy = options.policy
    if policy == "auto":
        policy = "qk" if bits == "off" else "fresh"
    return replace(options, coarse=bits, policy=policy)


def free_bytes() -> dict[str, int]:
    """Return the free bytes of each device by its name: for fits(), before anything is loaded."""
    return {device.name: device.free for device in devices()}


def fits(needs: Sequence[Need], free: Mapping[str, int], reserve: int = RESERVE) -> bool:
    """Return whether each device that has codes holds them beside all else, and leaves a reserve. With others, fewer bits give nothing.

    free: before anything was loaded. What the program takes is not in it. reserve: bytes, of a GPU.
    """
    return all(
        need.total - need.program <= free[need.name] - (reserve if need.gpu else RESERVE)
        for need in needs
        if need.coarse
    )


def tries(options: Options, found: Sequence[Options]) -> list[tuple[Options, int]]:
    """Return choices(options) in the order in which they are to be tried, with the reserve of each for fits(). The last choice is taken where
    nothing fits.

    Where `coarse` is "auto" and no codes fit a GPU, small batches may leave room for some.
    """
    *closer, last = found
    small = max(SMALL_BATCH, options.n_parallel)  # a token of each sequence fits
    if options.coarse != "auto" or options.n_ubatch <= small or not any(device.gpu for device in devices()):
        return [(each, RESERVE) for each in closer]
    coded = closer if last.coarse == "off" else found
    return [*((each, RESERVE) for each in coded), *((replace(each, n_ubatch=small), LEAST) for each in coded)]
