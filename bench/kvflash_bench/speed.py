"""Decode and prefill speed against the context, for the full cache and for pools in one run: measure, resume,
tabulate.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from kvflash_bench.device import device_kv, device_used
from kvflash_bench.grid import (
    Key,
    Result,
    Results,
    Variant,
    refuse_controls,
    setting,
    short,
)
from kvflash_bench.recall import open_variant
from kvflash_bench.steps import AFTER, WARM_UP, decode_steps, hardware, near, python_loop
from kvflash_bench.tables import command, markdown, write_files
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import HostMemoryError, NativeError, UsageError
from pyllama_kvflash.events import Prefill, Warn
from pyllama_kvflash.native import Record, Tokens

MIB, GIB = 1 << 20, 1 << 30

_NO_WRITE_BACK = "write_back=0"

OnPrefill = Callable[[Prefill], None]


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache that is measured in one go, from the shortest context to the longest. pool None: the full cache."""

    variant: Variant
    pool: int | None

    @property
    def label(self) -> str:
        """Name in tables."""
        return self.variant.label + (f" {short(self.pool)}" if self.pool else "")

    @property
    def write_back(self) -> bool:
        """Whether records are written. If not, chunks that leave are lost: a reference for prefill."""
        return _NO_WRITE_BACK not in self.variant.label.split("/")


def speed_variant(text: str) -> Variant:
    """Parse a variant as Variant.parse does, or "lru/write_back=0". Raises UsageError."""
    parts = text.split("/")
    kept = [part for part in parts if part != _NO_WRITE_BACK]
    variant = replace(Variant.parse("/".join(kept)), label=text)
    if variant.policy == "oracle":
        msg = "the oracle has no speed to measure: it wants codes in a text"
        raise UsageError(msg)
    refuse_controls("speed", [variant])
    if len(kept) < len(parts) and variant.policy != "lru":
        msg = f"{text!r} would bring back what was never written: only lru can go without, as lru/{_NO_WRITE_BACK}"
        raise UsageError(msg)
    if len(kept) < len(parts):
        # an exact pass reads what was written
        variant = replace(variant, options={**variant.options, "prefill": "pool"})
    return variant


@dataclass(frozen=True, slots=True)
class Speed:
    """The plan of a measurement.

    model: its mark in a key.
    contexts: ascending.
    steps: tokens to decode at each context.
    path: of the model, beside which a scorer model is looked for; None: a shape has no such file.

    Raises UsageError.
    """

    model: str
    contexts: tuple[int, ...]
    pools: tuple[int, ...]
    variants: tuple[Variant, ...]
    steps: int
    common: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def __post_init__(self) -> None:
        """Check that there is room for the steps, and something to page."""
        for low, high in pairwise(self.contexts):
            if high - low <= self.steps + WARM_UP:
                msg = (
                    f"contexts {low} and {high} are too close: {self.steps} steps (`steps`) and {WARM_UP} to warm up are"
                    f" decoded at {low}"
                )
                raise UsageError(msg)
        for pool in self.pools:
            if pool >= self.contexts[-1] and not all(v.full for v in self.variants):
                msg = (
                    f"a pool of {pool:,} tokens covers the longest context of {self.contexts[-1]:,}: give longer `contexts`,"
                    " or smaller `pools`"
                )
                raise UsageError(msg)

    def caches(self) -> list[Cache]:
        """Return all caches to measure, the full cache once."""
        return [Cache(v, pool) for v in self.variants for pool in ((None,) if v.full else self.pools)]

    def key(self, cache: Cache) -> Key:
        """Return the key under which a result is filed. The machine and its threads count, because this measures
        speed.
        """
        return {
            "bench": "speed",
            "model": self.model,
            "contexts": list(self.contexts),
            "pool": cache.pool,
            "variant": cache.variant.label,
            "steps": self.steps,
            "common": {**setting(self.common, cache.variant, self.path), "n_threads": self.common.get("n_threads")},
            "machine": hardware(),
        }

    def missing(self, results: Results) -> list[Cache]:
        """Return the caches that are not measured, and those that did not fit: maybe they do now."""
        found = [(cache, results.get(self.key(cache))) for cache in self.caches()]
        return [c for c, r in found if r is None or any(p["error"] for p in r["points"])]


#
# measuring
#


def measure(speed: Speed, cache: Cache, path: Path, on_prefill: OnPrefill) -> Result:
    """Fill one cache from context to context, and decode at each. Returns plain JSON values; times are seconds.

    If memory is too small for the longest context, the next shorter one is tried. Raises what KVFlash.from_file does,
    but no such memory error.
    """
    before = device_used()
    failed: list[Result] = []
    contexts = list(speed.contexts)
    while contexts:
        n_ctx = contexts[-1] + WARM_UP + speed.steps + 2 * 64  # the Python loop wants a chunk of its own
        try:
            kv = open_variant(path, cache.variant, n_ctx, cache.pool or 0, speed.common)
        except NativeError as err:
            failed.insert(0, _failure(contexts.pop(), err))
            continue
        with kv:
            _check_pool(kv, cache)
            if not cache.write_back:
                stop_writing_back(kv)
            warnings = list(kv.warnings)
            points = [*_points(kv, contexts, speed.steps, on_prefill, warnings), *failed]
            whole = cache.write_back and not any(p["error"] for p in points)
            loop = python_loop(kv) if kv.n_pool and whole else None
            return {
                "points": [{**p, "device_before": before} for p in points],
                "n_pool": kv.n_pool,
                "loop": loop,
                "warnings": warnings,
                "machine": hardware(),
            }
    return {"points": failed, "n_pool": cache.pool, "loop": None, "warnings": [], "machine": hardware()}


def _failure(context: int, err: Exception) -> Result:
    return {"context": context, "error": str(err)}


def _check_pool(kv: KVFlash, cache: Cache) -> None:
    if cache.pool is not None and kv.n_pool is None:
        msg = f"{cache.label} is not a pool: {'; '.join((*kv.warnings, *kv.notes))}"
        raise UsageError(msg)


def stop_writing_back(kv: KVFlash) -> None:
    """Write no records from now on: what leaves the pool is lost."""
    kv.ctx.begin_read = _no_copy  # type: ignore[method-assign]


def _no_copy(chunk: int, record: Record) -> int:
    del chunk, record
    return 0


def _points(
    kv: KVFlash, contexts: Sequence[int], n_steps: int, on_prefill: OnPrefill, warnings: list[str]
) -> Iterator[Result]:
    rng = np.random.default_rng(0)  # the same tokens for all caches
    total, total_s, most = 0, 0.0, 0
    for i, context in enumerate(contexts):
        tokens = rng.integers(0, kv.model.n_vocab, context - kv.n_tokens, dtype=np.int32)
        try:
            seconds, held = _fill(kv, tokens, on_prefill, warnings)
            steps = decode_steps(kv, n_steps, warnings)
        except (NativeError, HostMemoryError) as err:
            yield from (_failure(c, err) for c in contexts[i:])
            return
        total, total_s = total + len(tokens), total_s + seconds
        stats, now = kv.stats(), device_kv(kv)
        most = max(most, held, now.total)
        yield {
            "context": context,
            "error": None,
            "stretch": len(tokens),
            "stretch_s": seconds,
            "total": total,
            "total_s": total_s,
            "steps_s": [round(s, 7) for s in steps.seconds],
            "moved": steps.moved,
            "reselects": len(steps.reselected),
            "pages_in": steps.pages_in,
            "kv_device_bytes": now.total,
            "pool_bytes": now.pool,
            "coarse_bytes": now.codes,
            "pane_bytes": now.panes,
            "kv_most_bytes": most,
            "host_bytes": stats.host_bytes,
            "summary_bytes": stats.summary_bytes,
            "device_used": device_used(),
        }


def _fill(kv: KVFlash, tokens: Tokens, on_prefill: OnPrefill, warnings: list[str]) -> tuple[float, int]:
    """Return the seconds that a stretch of prompt takes, and the most device bytes of KV meanwhile."""
    begin, most = time.perf_counter(), 0
    for event in kv.prefill(tokens):
        if isinstance(event, Prefill):
            on_prefill(event)
            most = max(most, event.resident_bytes)
        elif isinstance(event, Warn):
            warnings.append(event.text)
    return time.perf_counter() - begin, most


#
# tables
#


@dataclass(frozen=True, slots=True)
class Row:
    """A cache at one context. Rates are tokens a second, times milliseconds, memory bytes.

    decode_rate: from the median step.
    prefill_rate: of the stretch from the context before; prefill_all: of everything so far.
    worst_moved_ratio: the worst of the steps at which chunks moved and the AFTER next ones, over the median.
    kv_device_bytes: while decoding: pool_bytes (the pool or the full cache), coarse_bytes (codes, with what attending to them takes)
        and pane_bytes. kv_most_bytes: the most at any time so far.
    device_bytes: memory in use beyond that before the model was loaded.
    error: why there are no figures.
    """

    cache: str
    variant: str
    pool: int | None
    context: int
    error: str | None = None
    decode_rate: float | None = None
    decode_mean_rate: float | None = None
    decode_x: float | None = None
    step_ms: float | None = None
    step_p99_ms: float | None = None
    step_worst_ms: float | None = None
    worst_ratio: float | None = None
    worst_moved_ratio: float | None = None
    prefill_rate: float | None = None
    prefill_all: float | None = None
    prefill_x: float | None = None
    kv_device_bytes: int | None = None
    pool_bytes: int | None = None
    coarse_bytes: int | None = None
    pane_bytes: int | None = None
    kv_most_bytes: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    reselects: int | None = None
    pages_in: int | None = None
    machine: str = ""


def summarise(speed: Speed, results: Results) -> list[Row]:
    """Return a row for each measured context and cache, by context. x is relative to the first full cache."""
    found = []
    for cache in speed.caches():
        if (result := results.get(speed.key(cache))) is not None:
            found += [_row(cache, result, point) for point in result["points"]]
    first = next((v.label for v in speed.variants if v.full), None)
    base = {row.context: row for row in found if row.variant == first and row.error is None}
    compared = [_compared(row, base.get(row.context)) for row in found]
    return sorted(compared, key=lambda r: r.context)


def _compared(row: Row, full: Row | None) -> Row:
    if row.error is not None or full is None:
        return row
    return replace(
        row,
        decode_x=(row.decode_rate or 0) / (full.decode_rate or 1),
        prefill_x=(row.prefill_all or 0) / (full.prefill_all or 1),
    )


def _row(cache: Cache, result: Result, point: Result) -> Row:
    pool = result["n_pool"]
    row = Row(Cache(cache.variant, pool).label, cache.variant.label, pool, point["context"], machine=result["machine"])
    if point["error"] is not None:
        return replace(row, error=point["error"])
    seconds = point["steps_s"]
    step = median(seconds)
    moving = [seconds[i] for i in near(point["moved"], len(seconds))]
    used, before = point["device_used"], point["device_before"]
    return replace(
        row,
        decode_rate=1 / step,
        decode_mean_rate=1 / fmean(seconds),
        step_ms=1e3 * step,
        step_p99_ms=1e3 * float(np.percentile(seconds, 99)),
        step_worst_ms=1e3 * max(seconds),
        worst_ratio=max(seconds) / step,
        worst_moved_ratio=max(moving) / step if moving else None,
        prefill_rate=point["stretch"] / point["stretch_s"],
        prefill_all=point["total"] / point["total_s"],
        kv_device_bytes=point["kv_device_bytes"],
        pool_bytes=point["pool_bytes"],
        coarse_bytes=point["coarse_bytes"],
        pane_bytes=point["pane_bytes"],
        kv_most_bytes=point["kv_most_bytes"],
        device_bytes=None if used is None or before is None else used - before,
        host_bytes=point["host_bytes"],
        reselects=point["reselects"],
        pages_in=point["pages_in"],
    )


def flatness(rows: Sequence[Row]) -> dict[str, float]:
    """Return each pool's slowest decoding over its fastest, over all contexts: 1 is flat."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row.pool is not None and row.decode_rate is not None:
            rates.setdefault(row.cache, []).append(row.decode_rate)
    return {name: min(found) / max(found) for name, found in rates.items() if len(found) > 1}


def beside_lru(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how fast each pool decodes and reads prompts, as a share of `lru` with the same pool and context."""
    fitted = [row for row in rows if row.error is None and row.pool is not None]
    plain = {(row.pool, row.context): row for row in fitted if row.variant == "lru"}
    for name in dict.fromkeys(row.cache for row in fitted if row.variant != "lru"):
        pairs = [(row, plain[key]) for row in fitted if row.cache == name and (key := (row.pool, row.context)) in plain]
        for what, rate in (("Decode", "decode_rate"), ("Prefill", "prefill_all")):
            of = [f"{getattr(a, rate) / getattr(b, rate):.2f} at {short(a.context)}" for a, b in pairs]
            if of:
                yield f"{what} of {name}, of lru's: {', '.join(of)}."


_HEAD = (
    "context", "cache", "decode tok/s", "mean", "x full", "median step ms", "worst/median step", "where chunks moved",
    "prefill tok/s", "of all", "x full", "device KV MiB", "pool + codes + panes", "at most", "device in use MiB", "host GiB",
    "reselects", "pages in",
)  # fmt: skip


def as_markdown(speed: Speed, results: Results) -> str:
    """Return the table, what it says about flatness and the Python loop, the machine and the command."""
    rows = summarise(speed, results)
    text = markdown(_HEAD, [_cells(row) for row in rows])
    errors = {(r.cache, r.error): r.context for r in reversed(rows) if r.error}
    notes = [f"{name} at {short(context)}: {error}." for (name, error), context in sorted(errors.items())]
    notes += [f"Decode of {name}, slowest/fastest over the contexts: {x:.3f}." for name, x in flatness(rows).items()]
    notes += [*beside_lru(rows), *_loops(speed, results)]
    notes.append(
        f"Decode: {speed.steps} steps at each context, from the median one; where chunks moved: the worst of those steps"
        f" and the {AFTER} next, over the median. Prefill: of the stretch from the context before, and of all so far. Device"
        " KV: while decoding, and at most, prompts included. Device in use: above what was before the model was loaded."
    )
    text += "".join(f"\n{note}\n" for note in notes)
    return text + (f"\n{command(rows)}\n" if rows else "")


def _loops(speed: Speed, results: Results) -> Iterator[str]:
    for cache in speed.caches():
        result = results.get(speed.key(cache))
        if result and (loop := result["loop"]):
            extra, share = loop["engine_s"] - loop["bare_s"], loop["engine_s"] / loop["bare_s"] - 1
            yield (
                f"Python's part of a step of {cache.label} at {short(speed.contexts[-1])}, against the bare native calls:"
                f" {1e6 * extra:.0f} µs of {1e3 * loop['engine_s']:.3f} ms ({100 * share:.2f} %)."
            )


def _cells(r: Row) -> list[str]:
    return [
        short(r.context),
        r.cache if r.error is None else f"{r.cache}: failed",
        _number(r.decode_rate, ".1f"),
        _number(r.decode_mean_rate, ".1f"),
        _number(r.decode_x, ".2f"),
        _number(r.step_ms, ".2f"),
        _number(r.worst_ratio, ".2f"),
        _number(r.worst_moved_ratio, ".2f"),
        _number(r.prefill_rate, ",.0f"),
        _number(r.prefill_all, ",.0f"),
        _number(r.prefill_x, ".2f"),
        _number(r.kv_device_bytes, ",.1f", MIB),
        " + ".join(f"{part / MIB:,.1f}" for part in (r.pool_bytes, r.coarse_bytes, r.pane_bytes) if part is not None)
        or "-",
        _number(r.kv_most_bytes, ",.1f", MIB),
        _number(r.device_bytes, ",.0f", MIB),
        _number(r.host_bytes, ".2f", GIB),
        _number(r.reselects, "d"),
        _number(r.pages_in, "d"),
    ]


def _number(value: float | None, form: str, unit: int = 1) -> str:
    return "-" if value is None else f"{value / unit if unit > 1 else value:{form}}"


def write(speed: Speed, results: Results) -> str:
    """Write results.md, .csv and .json. Return the Markdown."""
    rows = summarise(speed, results)
    plain = [asdict(r) for r in rows]
    loops = {c.label: r["loop"] for c in speed.caches() if (r := results.get(speed.key(c)))}
    whole = {
        "kind": "speed",
        "steps": speed.steps,
        "rows": plain,
        "flatness": flatness(rows),
        "python_loop": loops,
    }
    return write_files(results, as_markdown(speed, results), plain, whole)
