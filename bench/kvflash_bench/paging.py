"""Paging: bandwidth out of the pool and into it beside a plain copy, and the token stream while chunks are swapped."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from kvflash_bench.grid import Results, short
from kvflash_bench.steps import WARM_UP, Steps, decode_steps, hardware, near
from kvflash_bench.tables import command, markdown, write_files
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Prefill, Warn
from pyllama_kvflash.loading.load import load
from pyllama_kvflash.native import NONE, Context, devices
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Scores, View
from pyllama_kvflash.policy.sizing import whole_cells
from pyllama_kvflash.pool.host_memory import HostMemory, Record

CHUNK = 64
AT_ONCE = (1, 4, 16, 32)  # chunks that begin to move before any is waited for
PLAIN_BYTES = 256 << 20  # size of the block that a plain copy moves
AFTER = 4  # steps after a reselect in which its copies may still run

OnPrefill = Callable[[str], Callable[[Prefill], None]]


class Swap:
    """A scorer that always swaps: it wants the n chunks that were out longest, in place of the n that came first."""

    name = "swap"
    summary: str | None = None
    query = "last"

    def __init__(self, n: int) -> None:
        self.n = n
        self.resident: Callable[[], npt.NDArray[np.bool_]] = lambda: np.zeros(0, np.bool_)

    def score(self, view: View) -> Scores:
        """Return 2 for the chunks that are to come, and 1 for as many of the latest resident ones as fit beside
        them.
        """
        resident = self.resident()[: len(view.candidates)]
        by_age = np.argsort(view.touched, kind="stable")
        outside = [c for c in by_age if view.candidates[c] and not resident[c]]
        inside = [c for c in by_age if view.candidates[c] and resident[c]]
        coming = outside[: min(self.n, view.room)]
        scores: Scores = np.zeros(len(view.candidates))
        scores[coming] = 2
        scores[inside[max(0, len(inside) - (view.room - len(coming))) :]] = 1
        return scores


@dataclass(frozen=True, slots=True)
class Paging:
    """The plan of a measurement.

    pool: tokens.
    repeat: rounds of copies, whose median counts.
    n_swap: chunks to swap every tau tokens.
    steps: tokens to decode meanwhile.
    common: options of the engine.

    Raises UsageError.
    """

    pool: int
    repeat: int
    n_swap: int
    tau: int
    steps: int
    common: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the pool holds the protected chunks and the swapped ones."""
        usual = Options(chunk=CHUNK)
        floor = usual.shape.floor(self.common.get("n_batch") or 0)
        if self.pool < floor:
            msg = f"a pool of {self.pool} tokens (`pool`) is too small to page: give at least {floor}"
            raise UsageError(msg)
        room = self.n_block - usual.shape.sinks - usual.tail - 1  # one stays free for the chunk that begins next
        if self.n_swap > room:
            msg = (
                f"{self.n_swap} chunks cannot be swapped (`n_swap`) in a pool of {self.n_pool} tokens: at most {room}, or"
                " give a larger `pool`"
            )
            raise UsageError(msg)
        if self.steps <= 2 * self.tau:
            msg = f"{self.steps} steps (`steps`) are too few to see a reselect every {self.tau} tokens (`tau`)"
            raise UsageError(msg)

    @property
    def n_pool(self) -> int:
        """The pool in tokens, rounded up to llama.cpp's steps."""
        return whole_cells(self.pool)

    @property
    def n_block(self) -> int:
        """Number of chunks that the pool holds."""
        return self.n_pool // CHUNK

    def engine(self, policy: str | Swap) -> dict[str, Any]:
        """Return the engine's options, with a context for twice the pool's tokens and then the steps."""
        return {
            "coarse": "off",
            **self.common,
            "n_ctx": 2 * self.n_pool + WARM_UP + self.steps,
            "pool": self.n_pool,
            "chunk": CHUNK,
            "policy": policy,
            "prefill": "pool",
            "tau": self.tau,
            "share": 0.0,
            "replay": 0,
        }


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of `chunks` chunks at once, "out" of the pool or "in". Rates are bytes a second, of K and V rows alone.

    plain_rate: of a large block between the same memories in the same run.
    small_rate: of a block as large as a record.
    """

    direction: str
    chunks: int
    ms_a_chunk: float
    rate: float
    plain_rate: float
    small_rate: float


@dataclass(frozen=True, slots=True)
class Stream:
    """Decoded tokens, in milliseconds each. reselected: chunks swapped, by the step after which they were."""

    name: str
    steps_ms: list[float]
    reselected: dict[int, int]

    @property
    def step_ms(self) -> float:
        """Median step in milliseconds."""
        return median(self.steps_ms)

    @property
    def worst_ms(self) -> float:
        """Longest step in milliseconds."""
        return max(self.steps_ms)

    @property
    def worst_near_ms(self) -> float | None:
        """The longest of the steps with a reselect and the AFTER next ones, in milliseconds; None without reselects."""
        found = near(list(self.reselected), len(self.steps_ms), AFTER)
        return max(self.steps_ms[i] for i in found) if found else None


@dataclass(frozen=True, slots=True)
class Measured:
    """All results of a run.

    record_bytes: size of a chunk's record, meta_bytes of which are not K or V rows.
    n_copy: copies that moving a chunk takes.
    plain_bytes: size of the block of a plain copy.
    """

    record_bytes: int
    meta_bytes: int
    n_copy: int
    plain_bytes: int
    copies: list[Copies]
    streams: list[Stream]
    warnings: list[str]
    machine: str


def measure(paging: Paging, path: Path, on_prefill: OnPrefill, done: Callable[[], None]) -> Measured:
    """Time the copies, then the streams. done: called after each round and each stream, repeat + 2 times.

    Raises what KVFlash.from_file does.
    """
    loaded = load(path, Options(**paging.engine("lru")), KVFlash.open)
    with closing(loaded):
        ctx = loaded.ctx
        _fill(ctx, paging.n_pool, loaded.n_batch)
        info = ctx.pool_info()
        plain = _plain_bytes(info.record_bytes)
        copies = time_copies(ctx, paging.repeat, plain, done)
    warnings: list[str] = []
    streams = []
    swapping = f"{paging.n_swap} chunks every {paging.tau} tokens"
    for name, n_swap in ((swapping, paging.n_swap), ("lru, no reselects", 0)):
        streams.append(_stream(path, paging, name, n_swap, on_prefill(name), warnings))
        done()
    sizes = info.record_bytes, info.meta_bytes, info.n_copy, plain
    return Measured(*sizes, copies, streams, warnings, hardware())


#
# copies
#


def _fill(ctx: Context, n_pool: int, n_batch: int) -> None:
    """Fill a pool with written, resident chunks."""
    tokens = np.random.default_rng(0).integers(0, ctx.model.n_vocab, n_pool, dtype=np.int32)
    for pos in range(0, n_pool, n_batch):
        ctx.decode(tokens[pos : pos + n_batch], pos, NONE)
    ctx.synchronize()


def _plain_bytes(record_bytes: int) -> int:
    """Return the size of a block that fits all memories, and is at least as large as a record."""
    return max(record_bytes, min(PLAIN_BYTES, min(d.free for d in devices()) // 4))


def time_copies(ctx: Context, repeat: int, plain_bytes: int, done: Callable[[], None]) -> list[Copies]:
    """Move chunks out and in, and plain blocks in turns with them. Return the medians of `repeat` rounds.

    Afterwards everything is as before.
    """
    info = ctx.pool_info()
    at_once = [k for k in AT_ONCE if k <= info.n_block]
    memory = HostMemory(info.record_bytes, ctx.host_buffer, meta_bytes=info.meta_bytes)
    memory.reserve(at_once[-1])
    records = [memory.take() for _ in range(at_once[-1])]
    times: dict[tuple[str, int], list[float]] = {(way, k): [] for way in ("out", "in") for k in at_once}
    plain: dict[tuple[str, int], list[float]] = {}
    _round_trip(ctx, range(at_once[-1]), records)  # the first time takes longer
    for i in range(repeat):
        for k in at_once:
            chunks = [(i + j) % info.n_block for j in range(k)]
            out_s, in_s = _round_trip(ctx, chunks, records)
            times["out", k].append(out_s)
            times["in", k].append(in_s)
        for way in ("out", "in"):
            for size, n in ((plain_bytes, 2), (info.record_bytes, 8)):
                rate = ctx.copy_rate(size, n, to_device=way == "in")
                plain.setdefault((way, size), []).append(rate)
        done()
    n_bytes = info.record_bytes - info.meta_bytes
    return [
        Copies(
            way,
            k,
            1e3 * median(found) / k,
            k * n_bytes / median(found),
            median(plain[way, plain_bytes]),
            median(plain[way, info.record_bytes]),
        )
        for (way, k), found in times.items()
    ]


def _round_trip(ctx: Context, chunks: Sequence[int], records: Sequence[Record]) -> tuple[float, float]:
    """Return the seconds until the bytes of all chunks are on the host, and until they are back on the device."""
    begin = time.perf_counter()
    for chunk, record in zip(chunks, records, strict=False):
        ctx.begin_read(chunk, record)
    ctx.wait()
    out_s = time.perf_counter() - begin
    for chunk in chunks:
        ctx.drop(chunk)
    begin = time.perf_counter()
    for chunk, record in zip(chunks, records, strict=False):
        ctx.page_in(chunk, record)
    ctx.wait()
    in_s = time.perf_counter() - begin
    return out_s, in_s


#
# the token stream
#


def _stream(
    path: Path, paging: Paging, name: str, n_swap: int, on_prefill: Callable[[Prefill], None], warnings: list[str]
) -> Stream:
    """Decode after twice as many tokens as the pool holds. n_swap 0: use lru."""
    swap = Swap(n_swap)
    with KVFlash.from_file(path, **paging.engine(swap if n_swap else "lru")) as kv:
        swap.resident = lambda: kv.pager.ledger.resident
        tokens = np.random.default_rng(0).integers(0, kv.model.n_vocab, 2 * paging.n_pool, dtype=np.int32)
        for event in kv.prefill(tokens):
            if isinstance(event, Prefill):
                on_prefill(event)
            elif isinstance(event, Warn):
                warnings.append(event.text)
        steps: Steps = decode_steps(kv, paging.steps, warnings)
        warnings += kv.warnings
    return Stream(name, [1e3 * s for s in steps.seconds], steps.reselected)


#
# tables
#


def as_markdown(paging: Paging, found: Measured) -> str:
    """Return the tables of copies and streams, with the machine and the command."""
    plain = f"{found.plain_bytes / 2**20:.0f} MiB block"
    head = ["copy", "chunks at once", "GB/s", "ms a chunk", f"plain {plain}", "x plain", "plain chunk", "x plain chunk"]
    text = markdown(head, [_copy_cells(c) for c in found.copies])
    bare = found.streams[-1].step_ms
    head = [
        "tokens", "median step ms", "worst", "worst/median", f"worst near a reselect (and {AFTER} after)",
        "over its median", "over lru's median", "reselects", "chunks in each",
    ]  # fmt: skip
    text += "\n" + markdown(head, [_stream_cells(s, bare) for s in found.streams])
    moves = f"{found.n_copy} cop{'y' if found.n_copy == 1 else 'ies'}"
    text += (
        f"\nA chunk's record is {found.record_bytes / 2**20:.2f} MiB and moves in {moves}; GB/s are of its K and V rows."
        f" Pool of {short(paging.n_pool)} tokens; medians of {paging.repeat} rounds in turns; plain copies are of pinned"
        f" memory where there is a GPU. {paging.steps} tokens decoded after {short(2 * paging.n_pool)}.\n"
    )
    return text + f"\n{command([found])}\n"


def _copy_cells(c: Copies) -> list[str]:
    return [
        f"page {c.direction}",
        str(c.chunks),
        f"{c.rate / 1e9:.2f}",
        f"{c.ms_a_chunk:.3f}",
        f"{c.plain_rate / 1e9:.2f}",
        f"{c.rate / c.plain_rate:.3f}",
        f"{c.small_rate / 1e9:.2f}",
        f"{c.rate / c.small_rate:.3f}",
    ]


def _stream_cells(s: Stream, bare_ms: float) -> list[str]:
    near_ms = s.worst_near_ms
    each = sorted(set(s.reselected.values()))
    return [
        s.name,
        f"{s.step_ms:.3f}",
        f"{s.worst_ms:.3f}",
        f"{s.worst_ms / s.step_ms:.2f}",
        "-" if near_ms is None else f"{near_ms:.3f}",
        "-" if near_ms is None else f"{near_ms / s.step_ms:.2f}",
        "-" if near_ms is None else f"{near_ms / bare_ms:.2f}",
        str(len(s.reselected)),
        "-" if not each else str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}",
    ]


def write(paging: Paging, found: Measured, results: Results) -> str:
    """Write results.md, .csv (the copies) and .json (everything, each step included). Return the Markdown."""
    whole = {"kind": "paging", "pool": paging.n_pool, "tau": paging.tau, "repeat": paging.repeat, **asdict(found)}
    whole["streams"] = [dict(_plain(s)) for s in found.streams]
    return write_files(results, as_markdown(paging, found), [asdict(c) for c in found.copies], whole)


def _plain(s: Stream) -> Iterator[tuple[str, Any]]:
    yield from asdict(s).items()
    for name in ("step_ms", "worst_ms", "worst_near_ms"):
        yield name, getattr(s, name)
