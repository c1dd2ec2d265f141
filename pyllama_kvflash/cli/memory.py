"""A model's memory use, as text."""

from collections.abc import Sequence

from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.device import PURPOSES, DeviceBytes

_NO_LIMIT = "records go to disk (`disk`) only once no RAM is left: limit those in RAM, too (`host_limit` 256M, say)"


def mib(n: int) -> str:
    """Return a number of bytes as text: in MiB or, from 10 GiB on, in GiB."""
    return f"{n / 2**30:.2f} GiB" if n >= 10 << 30 else f"{n / 2**20:.1f} MiB"


def about(n: int) -> str:
    """Return a number of bytes as a short text: "4.2 MiB", "892 MiB", "6.7 GiB"."""
    if n >= 1 << 30:
        return f"{n / 2**30:.1f} GiB"
    return f"{n / 2**20:.{int(n < 10 << 20)}f} MiB"


def place_name(need: DeviceBytes) -> str:
    """Return the name of a device's memory: "RAM", or the GPU's name."""
    return need.name if need.gpu else "RAM"


def sum_line(need: DeviceBytes) -> str:
    """Return a device's memory use as a sum: "912.3 MiB = 463.0 MiB weights + ..."."""
    names = PURPOSES | ({"program": "driver"} if need.gpu else {})
    terms = " + ".join(f"{mib(size)} {names[name]}" for name, size in need.parts.items())
    return f"{mib(need.total)} = {terms}"


def held_in_ram(needs: Sequence[DeviceBytes]) -> tuple[int, int]:
    """Return how many bytes of RAM a pool takes without a GPU: at the start, and on top of that by the time the context is full."""
    return sum(need.kv + need.panes for need in needs), sum(need.records + need.coarse for need in needs)


def records_lines(options: Options, needs: Sequence[DeviceBytes], full: int) -> list[str]:
    """Return warnings about where records are kept. needs: each device's memory with a full context. full: the full cache's bytes."""
    if options.host_limit is not None and options.disk:
        return []
    if options.disk:
        return [_NO_LIMIT]
    fixed, grows = held_in_ram(needs)
    most = fixed + grows
    if any(need.gpu for need in needs) or most <= full or not grows:
        return []
    n = round(options.n_parallel * options.n_ctx * max(0, full - fixed) / grows)
    said = (
        f"without a GPU, the pool and its records share the RAM: beyond {n:,} tokens of text they take more than the full cache,"
        f" {about(most)} at most, unless records beyond a limit are on disk (`host_limit` 256M and `disk` DIR)"
    )
    return [said]


def memory_line(needs: Sequence[DeviceBytes]) -> str:
    """Return the line that lists the memory a run needs, on every device."""
    line = "memory with a full context: " + "; ".join(f"{place_name(need)} up to {sum_line(need)}" for need in needs)
    loaded = sum(need.weights for need in needs if need.gpu)
    return line + (f"; while it loads, RAM also maps the file, {mib(loaded)}" if loaded else "")
