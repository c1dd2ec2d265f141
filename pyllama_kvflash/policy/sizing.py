"""How large the pool is: what was asked for, what it must hold at least, and what `auto` chooses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CELLS = 256  # llama.cpp widens the attention in steps of 256 cells
AUTO_CAP = 16_384  # tokens; beyond it a pool costs decode speed and brings little
RESERVE = 512 << 20  # bytes left to the computation and to other programs
BATCH = 2048  # tokens; llama.cpp's own default, beyond it a batch brings nothing
SPARE_BLOCKS = 2  # blocks that must stay evictable, so that paging never deadlocks


@dataclass(frozen=True, slots=True)
class Geometry:
    """The rows that a token leaves in the full-attention cache: (K elements, V elements) for each of its layers."""

    rows: tuple[tuple[int, int], ...]
    devices: tuple[int, ...] = ()  # whose memory each layer's rows are in, (): of one

    def token_bytes(self, row_bytes: Callable[[int, int], int], type_k: int, type_v: int) -> int:
        """Bytes of one token; row_bytes(type, elements) is ggml's."""
        return sum(self.by_device(row_bytes, type_k, type_v).values())

    def by_device(self, row_bytes: Callable[[int, int], int], type_k: int, type_v: int) -> dict[int, int]:
        """Bytes of one token on each device that holds any."""
        res: dict[int, int] = {}
        for (k, v), device in zip(self.rows, self.devices or (0,) * len(self.rows), strict=True):
            res[device] = res.get(device, 0) + row_bytes(type_k, k) + (row_bytes(type_v, v) if v else 0)
        return res


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device for `auto`: its free bytes, and those that a token of the pool takes there."""

    name: str
    free: int
    token_bytes: int

    @property
    def tokens(self) -> int:
        """That half of (free - reserve) holds."""
        return max(0, (self.free - RESERVE) // 2) // self.token_bytes


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The outcome. n_pool None: no pool, the full cache. notes and warnings are sentences for the user."""

    n_pool: int | None
    notes: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())


def pool_floor(chunk: int, n_batch: int, n_sinks: int, n_tail: int, n_pinned: int = 0, n_seq: int = 1) -> int:
    """Cells that sinks and tail of each of n_seq sequences, n_pinned chunks of all of them, one batch and two evictable
    blocks need, in steps of 256.
    """
    batch_blocks = max(n_seq, -(-n_batch // chunk) + 1)  # a batch may begin in the middle of a chunk
    blocks = n_seq * (n_sinks + n_tail) + n_pinned + batch_blocks + SPARE_BLOCKS
    return _round_up(blocks * chunk)


def usual_batch(n_pool: int, chunk: int) -> int:
    """Tokens of a batch of a prompt, in whole chunks: a quarter of the pool, so that most of what a token sees was chosen."""
    return max(chunk, min(n_pool // 4 // chunk * chunk, BATCH))


def largest_batch(n_pool: int, chunk: int, n_sinks: int, n_tail: int, n_pinned: int = 0, n_seq: int = 1) -> int:
    """Tokens of the largest batch, in whole chunks, for which such a pool is no smaller than its floor; at most BATCH."""
    blocks = n_pool // chunk - n_seq * (n_sinks + n_tail) - n_pinned - SPARE_BLOCKS - 1
    return max(1, min(blocks * chunk, BATCH))


def auto_pool(memory: Sequence[DeviceMemory], n_ctx: int, cap: int = AUTO_CAP) -> tuple[int, str]:
    """Half of (free - reserve) device bytes over bytes per token, at most cap and n_ctx; and the arithmetic in words.

    Of several devices, each with its own layers, the one that holds the fewest tokens counts.
    """
    device = min(memory, key=lambda r: r.tokens)
    tokens = min(device.tokens // CELLS * CELLS, cap // CELLS * CELLS, _round_up(n_ctx))
    others = f", the tightest of {len(memory)} devices" if len(memory) > 1 else ""
    note = (
        f"auto: half of ({device.free / 2**20:.0f} MiB free on {device.name}{others} - {RESERVE / 2**20:.0f} MiB reserve) /"
        f" {device.token_bytes / 1024:.2f} KiB a token = {device.tokens} tokens, at most {cap} (--kvflash-auto-cap) and the"
        f" context of {n_ctx}: {tokens}"
    )
    return tokens, note


def resolve_pool(
    request: int | str,
    *,
    n_ctx: int,
    floor: int,
    memory: Sequence[DeviceMemory],
    cap: int = AUTO_CAP,
    keep: bool = False,
) -> PoolSize:
    """The pool for a request ("auto", at most cap; "off"; or tokens > 0), on devices with so much memory. keep: have one even
    if it covers the context, and no larger than that.
    """
    if request == "off":
        return PoolSize(None)
    notes: list[str] = []
    warnings: list[str] = []
    if request == "auto":
        wanted, note = auto_pool(memory, n_ctx, cap)
        notes.append(note)
    else:
        wanted = int(request)
    n_pool = _round_up(wanted)
    if n_pool < floor < n_ctx:
        which = "the automatic pool of" if request == "auto" else "a pool of"
        warnings.append(
            f"{which} {wanted} tokens is too small: raised to {floor}, which holds the sinks, the tail, the pins,"
            f" one batch and {SPARE_BLOCKS} more chunks (a smaller -b/--batch-size lowers this)"
        )
    elif floor <= n_pool != wanted:
        notes.append(f"pool rounded up from {wanted} to {n_pool} tokens (steps of {CELLS})")
    n_pool = max(n_pool, floor)
    if n_pool >= n_ctx and keep:
        n_pool = min(n_pool, max(_round_up(n_ctx), floor))
    elif n_pool >= n_ctx:
        notes.append(
            f"a pool of {n_pool} tokens covers the context of {n_ctx}: no pool is needed, using the full cache"
        )
        return PoolSize(None, tuple(notes), tuple(warnings))
    return PoolSize(n_pool, tuple(notes), tuple(warnings))


def pinned_chunks(spans: Sequence[tuple[int, int]], chunk: int) -> set[int]:
    """The chunks that position ranges [start, end) touch."""
    return {c for start, end in spans for c in range(start // chunk, -(-end // chunk))}


def n_pinned(chunks: set[int], n_sinks: int) -> int:
    """Pinned chunks that are no sinks."""
    return len(chunks - set(range(n_sinks)))


def _round_up(n: int) -> int:
    return -(-n // CELLS) * CELLS
