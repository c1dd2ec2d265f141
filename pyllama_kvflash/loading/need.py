"""The memory that an engine needs on each device, by purpose."""

import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pyllama_kvflash.loading.memory import coarse_bytes, types_of
from pyllama_kvflash.native import Context, Model, devices, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.device import DeviceBytes
from pyllama_kvflash.policy.sizing import whole_cells
from pyllama_kvflash.pool.checkpoints import MOST

_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")

DRIVER = 660 << 20
"""GPU bytes that CUDA itself takes once kernels have run, measured on an H200 with driver 580 (docs/results/memory.md)."""


def weights_of(model: Model) -> Counter[int]:
    """Return the bytes of weights on each device, by device index."""
    res: Counter[int] = Counter()
    for weight in model.weights():
        res[weight.device] += weight.size
    return res


def needs_of(
    geometry: Geometry,
    options: Options,
    n_pool: int | None,
    ctx: Context,
    exact: Mapping[int, DeviceBytes],
    drafter: Sequence[int],
    program: int,
) -> tuple[DeviceBytes, ...]:
    """Return what each device holds with a full context; empty ones are left out. For a model loaded with no_alloc, these are estimates.

    options: from Options.resolved(). n_pool: cells of the pool; None: the full cache. exact: what the exact pass holds, by device index.
    drafter: bytes of a drafter on each device. program: see program_bytes().
    """
    weights, found = weights_of(ctx.model), devices()
    token_bytes = geometry.by_device(row_bytes, *types_of(options))
    n_all = whole_cells(options.n_ctx) * options.n_parallel
    full = sum(token_bytes.values()) * n_all
    records = full if options.host_limit is None else min(full, options.host_limit)  # the others are in a file
    held, first, host = ctx.kv_bytes(), next(iter(token_bytes), 0), [d.gpu for d in found].index(False)
    coarse = coarse_bytes(geometry, options, n_pool) if n_pool else {}
    res = []
    for i, device in enumerate(found):
        need = DeviceBytes(
            name=device.name,
            gpu=device.gpu,
            weights=weights[i],
            kv=token_bytes.get(i, 0) * (n_pool or n_all),
            coarse=coarse.get(i, 0),
            states=held.swa + held.recurrent if i == first else 0,
            buffers=ctx.compute_bytes(i),
            drafter=drafter[i],
            records=records if n_pool and i == host else 0,
            checkpoints=_checkpoints(ctx, options) if i == host else 0,
            program=program if i == host else 0,
        )
        need = need + exact[i] if i in exact else need
        res.append(replace(need, program=DRIVER) if device.gpu and need.total else need)
    return tuple(need for need in res if need.total)


_program: list[int] = []  # the first result of program_bytes()


def program_bytes(model: Model | None = None) -> int:
    """Return the RAM that Python, libraries and the vocabulary take, not counting weights. Later calls return the first result,
    because measuring again would count the memory of other engines.

    model: the model just loaded, before any context takes memory; None: no weights are loaded.
    """
    if not _program:
        sizes = weights_of(model) if model else Counter()
        on_host = sum(sizes[i] for i, device in enumerate(devices()) if not device.gpu)
        _program.append(max(0, resident_bytes() - on_host))
    return _program[0]


def _checkpoints(ctx: Context, options: Options) -> int:
    """Return how many bytes the checkpoints of all sequences may take."""
    held = ctx.kv_bytes()
    one = held.recurrent // (1 + ctx.n_rollback)  # llama.cpp keeps another for each token of a draft
    return min(options.checkpoint_limit, MOST * (held.swa + one)) if held.attn else 0


def resident_bytes() -> int:
    """Return the current RAM of this process, including mapped files."""
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return peak_bytes()


def peak_bytes() -> int:
    """Return the peak RAM of this process, including mapped files."""
    try:  # VmHWM, because ru_maxrss also counts the parent's peak before exec
        return int(_STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
