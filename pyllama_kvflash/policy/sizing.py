"""Size the pool: resolve a request, compute the smallest possible pool, and choose for `auto`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pyllama_kvflash.policy.device import RESERVE, DeviceBytes, mib
from pyllama_kvflash.policy.fresh import Heads

CELLS = 256  # llama.cpp widens the attention in steps of 256 cells
AUTO_CAP = 16_384  # tokens; a larger pool costs decode speed and gains little
AUTO_FULL = 32_768  # tokens; with a pool and codes of 4 bits a GPU decodes 1.3 times as fast as with the full f16 cache at 64K, 1.8 times at 128K
HOST_CAP = 4096  # tokens of the largest automatic pool without a GPU: each attended token costs CPU time
HOST_FULL = (
    1 << 30
)  # bytes of the largest automatic full cache without a GPU: it is allocated at once, a pool's records as text grows
BATCH = 2048  # tokens; llama.cpp's own default: larger batches gain nothing
LEAST_PANES = 2  # one layer's rows, and the next layer's, which are being copied
SINKS = 1  # first chunks that are never evicted: attention sinks are in the first few tokens
SPARE_BLOCKS = 2  # blocks that must stay evictable so that paging never deadlocks


def whole_cells(n: int) -> int:
    """Return n tokens rounded up to whole steps of CELLS."""
    return -(-n // CELLS) * CELLS


@dataclass(frozen=True, slots=True)
class Geometry:
    """The rows that a token adds to the full-attention cache: (K elements, V elements) for each layer.

    devices: the device of each layer's rows; (): one device for all. heads: each layer's heads; (): unknown.
    """

    rows: tuple[tuple[int, int], ...]
    devices: tuple[int, ...] = ()
    heads: tuple[Heads, ...] = ()

    def token_bytes(self, row_bytes: Callable[[int, int], int], type_k: int, type_v: int) -> int:
        """Return how many bytes one token takes. row_bytes: ggml's function of (type, elements)."""
        return sum(self.by_device(row_bytes, type_k, type_v).values())

    def by_device(self, row_bytes: Callable[[int, int], int], type_k: int, type_v: int) -> dict[int, int]:
        """Return how many bytes one token takes on each device that holds rows, by device index."""
        res: dict[int, int] = {}
        for (k, v), device in zip(self.rows, self.devices or (0,) * len(self.rows), strict=True):
            res[device] = res.get(device, 0) + row_bytes(type_k, k) + (row_bytes(type_v, v) if v else 0)
        return res

    def panes_by_device(
        self, row_bytes: Callable[[int, int], int], type_k: int, type_v: int, n_pane: int
    ) -> dict[int, int]:
        """Return how many bytes per position n_pane panes take on each device, by device index. A device's layers take turns in its
        panes, so each pane is as large as that device's largest rows.
        """
        res: dict[int, int] = {}
        devices = self.devices or (0,) * len(self.rows)
        for device in dict.fromkeys(devices):
            rows = [row for row, its in zip(self.rows, devices, strict=True) if its == device]
            k, v = max(k for k, _ in rows), max(v for _, v in rows)
            res[device] = min(n_pane, len(rows)) * (row_bytes(type_k, k) + (row_bytes(type_v, v) if v else 0))
        return res


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The result of resolve_pool().

    n_pool: the pool in tokens; None: no pool, the full cache.
    notes, warnings: sentences for the user.
    """

    n_pool: int | None
    notes: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The chunks that a pool must hold at one time, and the sizes that follow from them.

    chunk: tokens of a chunk.
    sinks, tail: chunks of each sequence.
    pinned: pinned chunks that are not sinks, over all sequences.
    n_seq: sequences that share the pool.
    """

    chunk: int
    sinks: int
    tail: int
    pinned: int = 0
    n_seq: int = 1

    @property
    def kept(self) -> int:
        """Blocks that never become free, plus the blocks that must stay evictable."""
        return self.n_seq * (self.sinks + self.tail) + self.pinned + SPARE_BLOCKS

    def floor(self, n_batch: int = 0) -> int:
        """Return the smallest pool in cells, in steps of 256, for batches of n_batch tokens; 0: for batches of one chunk."""
        batch_blocks = -(-(n_batch or self.chunk) // self.chunk) + 1  # a batch may begin within a chunk
        return whole_cells((self.kept + max(self.n_seq, batch_blocks)) * self.chunk)

    def largest_batch(self, n_pool: int) -> int:
        """Return the largest batch in tokens, of whole chunks and at most BATCH, for which n_pool cells are enough. See floor()."""
        return max(1, min((n_pool // self.chunk - self.kept - 1) * self.chunk, BATCH))

    def usual_batch(self, n_pool: int) -> int:
        """Return the tokens of a prompt batch, in whole chunks: a quarter of the pool, so that chosen chunks fill most of it."""
        quarter = max(self.chunk, min(n_pool // 4 // self.chunk * self.chunk, BATCH))
        return min(quarter, self.largest_batch(n_pool))


def auto_pool(memory: Sequence[DeviceBytes], n_ctx: int, cap: int = AUTO_CAP) -> tuple[int, str]:
    """Return the automatic pool in tokens, and the arithmetic in words.

    The pool is half of (free - reserve - codes) device bytes, divided by the bytes of a token, and at most cap and n_ctx. Of
    several devices, each with its own layers, the one with room for the fewest tokens decides.
    """
    device = min(memory, key=lambda r: r.tokens)
    tokens = min(device.tokens // CELLS * CELLS, cap // CELLS * CELLS, whole_cells(n_ctx))
    others = f", the tightest of {len(memory)} devices" if len(memory) > 1 else ""
    codes = f" - {mib(device.coarse)} for codes" if device.coarse else ""
    note = (
        f"auto: half of ({mib(device.room)} free on {device.name}{others} - {mib(RESERVE)} reserve{codes}) /"
        f" {device.token_bytes / 1024:.2f} KiB a token = {device.tokens:,} tokens, at most {cap:,} (`auto_cap`) and the"
        f" context of {n_ctx:,}: {tokens:,}"
    )
    return tokens, note


def full_cache(memory: Sequence[DeviceBytes], n_ctx: int) -> tuple[bool, str]:
    """Return whether `auto` chooses the full cache instead of a pool, and a note; the note is "" if the cache does not fit.

    The full cache is chosen if it fits beside the reserve, on the host up to HOST_FULL bytes, on a GPU up to AUTO_FULL tokens.
    Beyond these limits a pool decodes much faster, and on the host it allocates only as the text grows.
    """
    if not all(d.token_bytes * n_ctx <= d.room - RESERVE for d in memory):
        return False, ""
    n_bytes = sum(d.token_bytes for d in memory) * n_ctx
    size = f"{n_bytes / 2**20:,.0f} MiB"
    if not any(d.gpu for d in memory):
        if n_bytes <= HOST_FULL:
            faster = "" if n_ctx <= HOST_CAP else f"; a pool (`pool` {HOST_CAP}, say) decodes faster"
            return True, f"auto: the full cache of {n_ctx:,} tokens fits, with {size} of RAM{faster}"
        return (
            False,
            f"auto: the full cache of {n_ctx:,} tokens would take {size} of RAM at once; a pool takes what a text needs, and decodes faster",
        )
    if n_ctx <= AUTO_FULL:
        return True, f"auto: the full cache of {n_ctx:,} tokens fits, with {size}"
    return False, (
        f"auto: the full cache of {n_ctx:,} tokens would fit, with {size}; a pool decodes faster, and the gain grows with the context,"
        " but long answers are further from the full cache's (`pool` off)"
    )


def resolve_pool(
    request: int | str,
    *,
    n_ctx: int,
    floor: int,
    memory: Sequence[DeviceBytes],
    cap: int | None = None,
    keep: bool = False,
) -> PoolSize:
    """Return the pool for a request: "auto" (the full cache, or a pool), "off", or tokens > 0.

    floor: the fewest cells of a pool.
    memory: the devices that hold the pool, for "auto".
    cap: the largest automatic pool, in tokens; a cap rules the full cache out. None: the full cache, or a pool of at most AUTO_CAP
        tokens (HOST_CAP without a GPU).
    keep: make a pool even if it covers the context, but no larger than the context.
    """
    if request == "off":
        return PoolSize(None)
    notes: list[str] = []
    warnings: list[str] = []
    if request == "auto":
        full, note = full_cache(memory, n_ctx) if cap is None else (False, "")
        if full and not keep:
            return PoolSize(None, (note,))
        if full:
            note = f"{note.partition(';')[0]}; a prefix cache and snapshots need a pool, so one is taken"
        if note:
            notes.append(note)
        usual = max(HOST_CAP, floor) if not any(d.gpu for d in memory) else AUTO_CAP
        wanted, note = auto_pool(memory, n_ctx, cap or usual)
        notes.append(note)
    else:
        wanted = int(request)
    n_pool = whole_cells(wanted)
    if n_pool < floor < n_ctx:
        which = "the automatic pool of" if request == "auto" else "a pool of"
        warnings.append(
            f"{which} {wanted:,} tokens is too small: raised to {floor:,}, which holds the sinks, the tail, the pins,"
            f" one batch and {SPARE_BLOCKS} more chunks (a smaller `n_batch` lowers this)"
        )
    elif floor <= n_pool != wanted:
        notes.append(f"pool rounded up from {wanted:,} to {n_pool:,} tokens (steps of {CELLS})")
    n_pool = max(n_pool, floor)
    if n_pool >= n_ctx and keep:
        n_pool = min(n_pool, max(whole_cells(n_ctx), floor))
    elif n_pool >= n_ctx:
        notes.append(
            f"a pool of {n_pool:,} tokens covers the context of {n_ctx:,}: no pool is needed, using the full cache"
        )
        return PoolSize(None, tuple(notes), tuple(warnings))
    return PoolSize(n_pool, tuple(notes), tuple(warnings))


def most_cells(request: int | str, *, n_ctx: int, floor: int, cap: int | None = None) -> int:
    """Return the cells of the largest pool that resolve_pool() can return for a request other than "off", with unlimited memory."""
    wanted = (
        min((cap or AUTO_CAP) // CELLS * CELLS, whole_cells(n_ctx)) if request == "auto" else whole_cells(int(request))
    )
    return max(wanted, floor)


def n_panes(
    request: int,
    pool: int | str,
    memory: Sequence[DeviceBytes],
    n_ctx: int,
    n_layer: int,
    *,
    n_pool: int = 0,
    buffers: int = 0,
    lossless: bool = False,
) -> int:
    """Return the number of panes of an exact pass: the request, if it is not 0.

    The default is LEAST_PANES, because copies cost no time while a prompt is read. There are more panes, within half of (free -
    reserve - codes) on each device, in these cases:
    - an automatic pool with a GPU: if all layers fit, as many as keep the panes, n_pool tokens, codes and buffers together
      within the size of the full cache;
    - `lossless`, where every few tokens are checked: all layers, so that nothing is streamed; else as many as fit, since each pane
      saves time. For a pool of a given size this case applies only if all KV is on the host;
    - RPC servers: as for `lossless`, with any pool, since each batch would send the whole text through the network.
    """
    remote = any(d.remote for d in memory)
    on_host = bool(memory) and not any(d.gpu for d in memory)
    if request or not ((pool == "auto" and not on_host) or remote or (lossless and on_host)):
        return request or LEAST_PANES
    lossless = lossless or remote
    shares = (d.half / (d.token_bytes * n_ctx * (1 if d.gpu else 2)) for d in memory)
    share = min(shares, default=1.0)
    if share >= 1:
        left = min((1 - (n_pool + (d.coarse + buffers) / d.token_bytes) / n_ctx for d in memory), default=1.0)
        return max(LEAST_PANES, n_layer if lossless else int(n_layer * left))
    return max(LEAST_PANES, int(share * n_layer / len(memory))) if lossless else LEAST_PANES


def pinned_chunks(spans: Sequence[tuple[int, int]], chunk: int) -> set[int]:
    """Return the chunks that overlap position ranges [start, end)."""
    return {c for start, end in spans for c in range(start // chunk, -(-end // chunk))}


def n_pinned(chunks: set[int], n_sinks: int) -> int:
    """Return the number of pinned chunks that are not sinks."""
    return len(chunks - set(range(n_sinks)))
