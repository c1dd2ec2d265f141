"""Counters of a server, and their Prometheus text."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from pyllama_kvflash.engine.sequence import KVSequence
from pyllama_kvflash.events import Stats

OUTCOMES = ("ok", "cancelled", "error", "rejected", "invalid")
"""How requests end: answered; the client left; an error; the queue was full or the server not ready; an invalid request."""

SOURCES = ("memory", "disk")

_COUNTERS = {
    "prefill_tokens": "Prompt tokens that were read.",
    "prefill_seconds": "Seconds spent reading prompts.",
    "decode_tokens": "Tokens of answers that were decoded.",
    "decode_seconds": "Seconds spent decoding answers.",
    "drafted_tokens": "Tokens guessed by speculative decoding.",
    "accepted_tokens": "Guessed tokens that were accepted.",
    "checked_tokens": "Tokens that were compared with the full cache.",
    "agreed_tokens": "Compared tokens for which the pool and the full cache have the same likeliest token.",
    "check_seconds": "Seconds spent comparing tokens with the full cache.",
    "pages_out": "Chunks that left the pool.",
    "pages_in": "Chunks that came back to the pool.",
    "guests_fetched": "Guests (16 positions of one layer) that layers fetched from records, with policy fresh.",
    "requests": "Requests, by how they ended.",
    "prefix_cache_hits": "Prompts with a cached beginning, by source.",
    "prefix_cache_tokens": "Prompt tokens that were cached, by source.",
    "prefix_cache_misses": "Prompts without a cached beginning.",
    "prefix_cache_saves": "Sequences written to the prefix cache on disk.",
}


_LABELS = {
    "requests": ("outcome", OUTCOMES),
    "prefix_cache_hits": ("source", SOURCES),
    "prefix_cache_tokens": ("source", SOURCES),
}
"""Counters with a label: the label's name, and its values."""

_GAUGES = {
    "pool_cells": "Cells of the pool; 0: the full cache is in use.",
    "context": "Context length of each sequence, in tokens.",
    "chunks": "Chunks of all sequences.",
    "chunks_resident": "Chunks that are in the pool.",
    "host_bytes": "Host memory taken for the records of chunks.",
    "checkpoint_bytes": "Host memory of checkpoints: saved recurrent states and sliding windows.",
    "coarse_bytes": "Size of the codes, which stand for positions outside the pool; on a GPU with the workspace for them.",
    "kv_device_bytes": "Device memory of the KV cache: the full cache, or the pool with its workspace for prompts and codes.",
    "sequences": "Sequences that share the pool.",
    "sequences_busy": "Sequences that serve a request.",
    "queue": "Requests that wait for a sequence.",
}


class Metrics:
    """The server's counters and gauges. The scheduler's thread and the handlers write them; the handlers read them.

    gauges: the values that look() last recorded, by name.
    """

    def __init__(self) -> None:
        self.gauges: dict[str, int] = dict.fromkeys(_GAUGES, 0)
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()  # by name, including the label
        self._seen: dict[int, tuple[int, int]] = {}
        self._fetched = 0

    def add(self, **amounts: float) -> None:
        """Add amounts to counters, by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount  # type: ignore[assignment]  # seconds are not integers

    def request(self, outcome: str) -> None:
        """Count a request that ended. outcome: one of OUTCOMES."""
        self.add(**{_labelled("requests", outcome): 1})

    def reused(self, source: str, n_tokens: int) -> None:
        """Count a prompt. n_tokens: how many of its first tokens were cached. source: one of SOURCES."""
        if n_tokens:
            hits, tokens = (_labelled(name, source) for name in ("prefix_cache_hits", "prefix_cache_tokens"))
            self.add(**{hits: 1, tokens: n_tokens})
        else:
            self.add(prefix_cache_misses=1)

    def total(self, name: str) -> float:
        """Return the value of a counter. name: without the suffix _total."""
        with self._lock:
            return self._totals[name]

    def pages(self, seq: KVSequence) -> Stats:
        """Count the chunks a sequence moved since the last call, and the guests all sequences fetched. Returns the sequence's stats.

        Call it before clearing the sequence, which resets the sequence's own counts.
        """
        stats = seq.stats()
        now, before = (stats.pages_out, stats.pages_in), self._seen.get(seq.seq, (0, 0))
        if now[0] < before[0] or now[1] < before[1]:
            before = 0, 0
        self._seen[seq.seq] = now
        # guests are counted for all sequences together
        fetched, self._fetched = stats.guests_fetched - self._fetched, stats.guests_fetched
        self.add(pages_out=now[0] - before[0], pages_in=now[1] - before[1], guests_fetched=fetched)
        return stats

    def look(self, sequences: Iterable[KVSequence], busy: int, queue: int) -> None:
        """Set the gauges. busy: number of sequences with a request. queue: number of requests that wait."""
        stats = [self.pages(seq) for seq in sequences]
        self.gauges = {
            "pool_cells": stats[0].n_pool or 0,
            "context": stats[0].n_ctx,
            "chunks": sum(s.chunks for s in stats),
            "chunks_resident": sum(s.resident for s in stats),
            "host_bytes": stats[0].host_bytes,
            "checkpoint_bytes": sum(s.checkpoint_bytes for s in stats),
            "coarse_bytes": stats[0].coarse_bytes,
            "kv_device_bytes": stats[0].device_kv_bytes,
            "sequences": len(stats),
            "sequences_busy": busy,
            "queue": queue,
        }

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        lines = []
        for name, meaning in _GAUGES.items():
            lines += _metric(name, "gauge", meaning, {"": self.gauges[name]})
        for name, meaning in _COUNTERS.items():
            words = _LABELS[name][1] if name in _LABELS else [""]
            labels = [_labelled(name, word).removeprefix(name) for word in words]
            values = {label: self.total(f"{name}{label}") for label in labels}
            lines += _metric(f"{name}_total", "counter", meaning, values)
        return "\n".join(lines) + "\n"


def _labelled(name: str, word: str) -> str:
    """Return a counter's name with the label's value `word`, such as requests{outcome="ok"}; just the name if it has no label."""
    return f'{name}{{{_LABELS[name][0]}="{word}"}}' if name in _LABELS else name


def _metric(name: str, kind: str, meaning: str, values: Mapping[str, float]) -> list[str]:
    full = f"kvflash_{name}"
    return [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *(f"{full}{k} {v:.15g}" for k, v in values.items())]
