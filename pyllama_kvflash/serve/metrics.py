"""Counters of a server, and their Prometheus text."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pyllama_kvflash.engine.sequence import KVSequence
from pyllama_kvflash.events import Stats

OUTCOMES = ("ok", "cancelled", "error", "rejected", "invalid")
"""How requests end: answered; the client left; failed; the queue was full or the server not ready; invalid."""

SOURCES = ("memory", "disk")

_TOTALS = {
    "prefill_tokens": "Prompt tokens that were read.",
    "prefill_seconds": "Seconds of reading prompts.",
    "decode_tokens": "Tokens of answers that were decoded.",
    "decode_seconds": "Seconds of decoding answers.",
    "drafted_tokens": "Tokens guessed by speculative decoding.",
    "accepted_tokens": "Of these, tokens that were right.",
    "checked_tokens": "Tokens that were compared with the full cache.",
    "agreed_tokens": "Of these, tokens for which both have the same likeliest token.",
    "check_seconds": "Seconds of comparing them.",
    "pages_out": "Chunks that left the pool.",
    "pages_in": "Chunks that came back.",
    "guests_fetched": "Guests (16 tokens of a layer) that layers fetched from records, with policy fresh.",
    "prefix_cache_misses": "Prompts without a cached beginning.",
    "prefix_cache_saves": "Sequences written to the prefix cache on disk.",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """The state of the server at one moment."""

    pool_cells: int = 0
    context: int = 0
    chunks: int = 0
    chunks_resident: int = 0
    host_bytes: int = 0
    checkpoint_bytes: int = 0
    coarse_bytes: int = 0
    kv_device_bytes: int = 0
    sequences: int = 0
    sequences_busy: int = 0
    queue: int = 0


_GAUGES = {
    "pool_cells": "Cells of the pool; 0: the full cache is in use.",
    "context": "Positions of a sequence.",
    "chunks": "Chunks of all sequences.",
    "chunks_resident": "Of these, in the pool.",
    "host_bytes": "Host memory taken for the records of chunks.",
    "checkpoint_bytes": "Host memory of checkpoints: recurrent states and sliding windows to go back to.",
    "coarse_bytes": "Size of the codes by which positions outside the pool are attended to; on a GPU with what that takes.",
    "kv_device_bytes": "Device memory of the KV cache: the full cache, or the pool with its workspace for prompts and codes.",
    "sequences": "Sequences on the pool.",
    "sequences_busy": "Of these, with a request.",
    "queue": "Requests that wait for a sequence.",
}


@dataclass(slots=True)
class Metrics:
    """Counters of the server. The scheduler's thread and the handlers write them; the handlers read them."""

    figures: Figures = field(default_factory=Figures)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _totals: Counter[str] = field(default_factory=Counter)
    _outcomes: Counter[str] = field(default_factory=Counter)
    _hits: Counter[str] = field(default_factory=Counter)
    _reused: Counter[str] = field(default_factory=Counter)
    _seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    _fetched: int = 0

    def add(self, **amounts: float) -> None:
        """Add amounts to totals, by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount  # type: ignore[assignment]  # seconds are not integers

    def request(self, outcome: str) -> None:
        """Count a request that ended. outcome: one of OUTCOMES."""
        with self._lock:
            self._outcomes[outcome] += 1

    def reused(self, source: str, n_tokens: int) -> None:
        """Count a prompt with n_tokens of a cached beginning, 0 or more. source: one of SOURCES."""
        with self._lock:
            if n_tokens:
                self._hits[source] += 1
                self._reused[source] += n_tokens
            else:
                self._totals["prefix_cache_misses"] += 1

    def total(self, name: str) -> float:
        """Return a total by its name, without _total."""
        with self._lock:
            return self._totals[name]

    def pages(self, seq: KVSequence) -> Stats:
        """Count the chunks moved since the last call. Returns the sequence's stats.

        Call it before the sequence is cleared: that resets the sequence's own counts.
        """
        stats = seq.stats()
        now, before = (stats.pages_out, stats.pages_in), self._seen.get(seq.seq, (0, 0))
        if now[0] < before[0] or now[1] < before[1]:
            before = 0, 0
        self._seen[seq.seq] = now
        fetched, self._fetched = stats.guests_fetched - self._fetched, stats.guests_fetched  # of all sequences
        self.add(pages_out=now[0] - before[0], pages_in=now[1] - before[1], guests_fetched=fetched)
        return stats

    def look(self, sequences: Iterable[KVSequence], busy: int, queue: int) -> None:
        """Record the present state of the sequences."""
        stats = [self.pages(seq) for seq in sequences]
        self.figures = Figures(
            pool_cells=stats[0].n_pool or 0,
            context=stats[0].n_ctx,
            chunks=sum(s.chunks for s in stats),
            chunks_resident=sum(s.resident for s in stats),
            host_bytes=stats[0].host_bytes,
            checkpoint_bytes=sum(s.checkpoint_bytes for s in stats),
            coarse_bytes=stats[0].coarse_bytes,
            kv_device_bytes=stats[0].device_kv_bytes,
            sequences=len(stats),
            sequences_busy=busy,
            queue=queue,
        )

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        with self._lock:
            totals, outcomes, hits, reused = map(Counter, (self._totals, self._outcomes, self._hits, self._reused))
        lines = []
        for name, meaning in _GAUGES.items():
            lines += _metric(name, "gauge", meaning, {"": getattr(self.figures, name)})
        for name, meaning in _TOTALS.items():
            lines += _metric(f"{name}_total", "counter", meaning, {"": totals[name]})
        by_outcome = {f'{{outcome="{o}"}}': outcomes[o] for o in OUTCOMES}
        lines += _metric("requests_total", "counter", "Requests, by how they ended.", by_outcome)
        for name, found, meaning in (
            ("prefix_cache_hits_total", hits, "Prompts with a cached beginning, by source."),
            (
                "prefix_cache_tokens_total",
                reused,
                "Prompt tokens that did not have to be read, by source.",
            ),
        ):
            lines += _metric(name, "counter", meaning, {f'{{source="{s}"}}': found[s] for s in SOURCES})
        return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, meaning: str, values: Mapping[str, float]) -> list[str]:
    full = f"kvflash_{name}"
    return [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *(f"{full}{k} {v:.15g}" for k, v in values.items())]
