"""Reuse of prompts that were read before: in idle sequences, and in a cache on disk."""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.serve.metrics import Metrics
from pyllama_kvflash.serve.slot import Slot
from pyllama_kvflash.snapshot.cache import PrefixCache
from pyllama_kvflash.text import n_common

_COMMON = 64  # fewest common tokens that count as a common beginning: BOS alone does not

_QUESTION = 2  # index of the message after the system message and the first question

_NEW = 16  # a sequence is written again once 1/16 of it is new: each write delays a token, as it first copies all codes

_READ_MUCH = 16384  # new tokens after which a long prompt is saved while it is still being read

log = logging.getLogger("kvflash.serve")


@dataclass(frozen=True, slots=True)
class Write:
    """A file that is being written. stops: the positions up to which the file can be restored, in ascending order."""

    tokens: Tokens
    stops: Sequence[int]
    future: Future[Any]

    def reach(self, tokens: Tokens) -> int:
        """Return how many of a text's first tokens the file can restore."""
        common = n_common(self.tokens, tokens)
        return max((n for n in self.stops if n <= common), default=0)


class Prefixes:
    """Chooses a sequence for each prompt, and reuses the prompt's cached beginning. For the scheduler's thread only."""

    def __init__(self, metrics: Metrics, cache: PrefixCache | None, cache_min: int) -> None:
        """cache: the prefix cache on disk, if any. cache_min: a sequence is written to the cache once it has this many new tokens."""
        self._metrics = metrics
        self._cache = cache
        self._cache_min = cache_min
        self._writing: list[Write] = []

    def check(self, pooled: bool) -> None:  # noqa: FBT001 (a fact)
        """Give up the cache on disk if there is no pool. Call it before the first request. pooled: whether there is a pool."""
        if self._cache is not None and not pooled:
            log.warning(
                "--prefix-cache is not used: it stores the chunks of a pool, and the full cache is in use;"
                " prompts that are still in memory are reused"
            )
            self._cache = None

    def choose(self, free: Sequence[Slot], tokens: Tokens, begins: Sequence[int] = ()) -> Slot:
        """Return the free slot that holds most of a prompt's conversation. tokens: the prompt, (n,) int32. begins: as in Job.

        If no slot holds any of the conversation, the first choice is an empty slot, the second the slot with the longest common
        beginning, the last the least recently used slot. Prompts that differ in their first question are different
        conversations, even with a long system message in common: otherwise, two agents would evict each other from one slot.
        """
        fewest = begins[min(_QUESTION, len(begins) - 1)] if begins else _COMMON

        def worth(slot: Slot) -> tuple[int, bool, int, float]:
            common = slot.common(tokens)
            known = slot.reach(common) if common >= fewest else 0
            return known, slot.seq.n_tokens == 0, common if common >= _COMMON else 0, -slot.used

        return max(free, key=worth)

    def prepare(self, slot: Slot, tokens: Tokens, *, reuse: bool = True) -> None:
        """Make a sequence hold just the cached beginning of a prompt, from memory or from disk. At least one token is left to read.

        tokens: the prompt, (n,) int32. reuse: False clears the sequence instead. Raises as KVSequence.clear() does.
        """
        common = slot.common(tokens) if reuse else 0
        if common < slot.seq.n_tokens:
            self.save(slot, stays=common)
        if not reuse:
            self.clear(slot)
            return
        slot.replaced(common)
        if n := self._restore(slot, tokens, slot.reach(common)):
            self._metrics.reused("disk", n)
            return
        self._metrics.pages(slot.seq)  # before it may be cleared
        n = slot.seq.keep_common(tokens)
        slot.kept = min(slot.kept, n)
        self._metrics.reused("memory", n)

    def _restore(self, slot: Slot, tokens: Tokens, common: int) -> int:
        """Restore a prefix from disk if it is much longer than the `common` tokens in memory.

        Returns the number of positions restored; 0: the sequence is unchanged or, after an error, empty.
        """
        if self._cache is None:
            return 0
        # decoding a few more tokens is faster than reading a file
        least = common + (self._cache_min if common >= _COMMON else 1)
        self._finish([write.future for write in self._writing if write.reach(tokens) >= least])
        try:
            if self._cache.match(slot.seq, tokens[:-1]) < least:
                return 0
        except (KVFlashError, OSError) as err:  # the sequence is unchanged
            log.warning("the prefix cache could not be read: %s", err)
            return 0
        try:
            self._metrics.pages(slot.seq)
            slot.kept = self._cache.restore(slot.seq, tokens[:-1])
        except (KVFlashError, OSError) as err:
            log.warning("the prefix cache could not be read: %s", err)
            self.clear(slot)
        return slot.kept

    def save_some(self, slot: Slot) -> None:
        """Save a long prompt at intervals while it is being read, since the process may be killed before the prompt's end."""
        if slot.seq.n_tokens - slot.kept >= max(self._cache_min, _READ_MUCH):
            self.save(slot)

    def save_all(self, slots: Iterable[Slot], *, stays: int | None = None) -> None:
        """Save all idle sequences, as save() does."""
        for slot in slots:
            if slot.job is None:
                self.save(slot, stays=stays)

    def save(self, slot: Slot, keep_s: float = 0.0, *, stays: int | None = None) -> None:
        """Start writing a sequence to the cache on disk, if much of it is new. Requests continue meanwhile. Errors are only logged.

        keep_s: seconds for which the cache must keep the file; if not 0, the sequence is written however little is new.
        stays: number of positions that will stay in memory; None: all.
        """
        n = slot.seq.n_tokens
        n_lost = 0 if stays is None else n - max(slot.kept, stays)
        much = n - slot.kept >= max(self._cache_min, n // _NEW) or n_lost >= max(self._cache_min, 1)
        if self._cache is None or not (much or keep_s):
            return
        try:
            future = self._cache.begin(slot.seq, keep_s)
        except (KVFlashError, OSError) as err:
            log.warning("the prefix cache could not be written: %s", err)
        else:
            if future is not None:
                self._writing.append(Write(slot.seq.tokens, (*slot.seq.checkpoints, n), future))
                future.add_done_callback(self._written)
        slot.kept = slot.seq.n_tokens  # even after an error: another try would fail, too

    def _written(self, future: Future[Any]) -> None:
        """Count or log the result of a write. The writing thread calls this."""
        if (err := future.exception()) is not None:
            log.warning("the prefix cache could not be written: %s", err)
        else:
            self._metrics.add(prefix_cache_saves=1)

    def finish(self) -> bool:
        """Wait for all running writes, which hold copies of their sequences in memory. Returns whether any were running."""
        futures = [write.future for write in self._writing if not write.future.done()]
        self._finish(futures)
        return bool(futures)

    def _finish(self, futures: list[Future[Any]]) -> None:
        wait(futures)
        self._writing = [write for write in self._writing if not write.future.done()]

    def clear(self, slot: Slot) -> None:
        """Clear a sequence."""
        self.forget(slot)
        slot.replaced(0)
        slot.seq.clear()

    def forget(self, slot: Slot) -> None:
        """Count the chunk moves of a sequence that is about to be cleared, and note that none of it is on disk."""
        self._metrics.pages(slot.seq)
        slot.kept = 0
