"""Checkpoints of a sequence: copies of its recurrent state or sliding window at earlier positions.

A plain cache can be rolled back to any position. A recurrent state cannot be rolled back, and a sliding window only until its
cells are overwritten. So copies are kept in host memory, at positions where the next prompt is likely to diverge.
"""

import math
from collections.abc import Mapping, Sequence

from pyllama_kvflash.native import StateBytes
from pyllama_kvflash.pool.sequence import PooledSequence

MOST = 16  # checkpoints per sequence
_EVERY = 4096  # tokens between checkpoints at the ends of batches
_CUT_EVERY = (
    4096  # tokens between cuts of a batch at the end of a chunk: the batch's second part reads the whole KV again
)
_NEWEST = 2  # the newest checkpoints are never evicted: an agent mostly goes back to one of them
_NEAREST = 64  # tokens; shorter distances to the end count as this one
_SAVED = 4  # checkpoints in a snapshot, at most; one takes some 150 MiB for a 27B model


class Checkpoints:
    """The checkpoints of one sequence. A cache that can be rolled back needs none."""

    def __init__(self, sequence: PooledSequence) -> None:
        options = sequence.options
        self._sequence = sequence
        self._limit = options.checkpoint_limit // options.n_parallel
        self._states: dict[int, StateBytes] = {}  # by position, in ascending order

    @property
    def kept(self) -> bool:
        """Whether this sequence keeps checkpoints."""
        return self._sequence.stateful and self._limit > 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return sum(map(len, self._states.values()))

    #
    # make
    #

    def stops(self, n: int, marks: Sequence[int], n_tail: int = 0) -> list[int]:
        """Return how many of the next n tokens come before each checkpoint that is due among them, in ascending order.

        marks: positions, in ascending order, where another text may diverge from this one. Checkpoints are due at the last mark, at
        earlier ones that are at least n_ubatch tokens apart and, in a new text, at the first. Each checkpoint cuts a batch. n_tail:
        no checkpoint may cut the last n_tail tokens.
        """
        start, options = self._sequence.n_tokens, self._sequence.options
        if not self.kept:
            return []
        n -= n_tail
        ahead = [min(pos, start + n) for pos in marks if max(start, 1) <= pos < start + n + n_tail]
        first = ahead[:1] if not self._states else []
        taken: list[int] = []
        for pos in reversed(ahead):
            if not taken or taken[-1] - pos >= options.n_ubatch or pos in first:
                taken.append(pos)
        if options.snapshots and self._sequence.pager:  # a snapshot can be cut at the end of a chunk
            end = (start + n - 1) // options.chunk * options.chunk
            if not self.at_chunks or end - self.at_chunks[-1] >= _CUT_EVERY:
                taken += [end]
        return sorted({pos - start for pos in taken if pos >= max(start, 1)})

    def make(self) -> None:
        """Make a checkpoint at the current position."""
        sequence = self._sequence
        if not self.kept or not sequence.n_tokens:
            return
        sequence.recover()
        if state := sequence.ctx.save_partial():  # empty if the class of llama.cpp's memory cannot be pooled
            self._states.pop(sequence.n_tokens, None)
            self._states[sequence.n_tokens] = state
            self._evict()

    def passed(self) -> None:
        """Before a batch, make a checkpoint if the last checkpoint is far back."""
        if self.kept and self._sequence.n_tokens - max(self._states, default=0) >= _EVERY:
            self.make()

    def _evict(self) -> None:
        while len(self._states) > MOST or self.n_bytes > self._limit:
            del self._states[least(list(self._states), self.at_chunks[-1:])]

    #
    # go back
    #

    def before(self, n_tokens: int) -> int:
        """Return the last position up to n_tokens that has a checkpoint, or 0."""
        return max((pos for pos in self._states if pos <= n_tokens), default=0)

    def reach(self, n_tokens: int) -> int:
        """Return how many positions surely remain when the sequence is rolled back to n_tokens, or to the last checkpoint before."""
        stays = n_tokens == self._sequence.n_tokens or not self._sequence.stateful
        return n_tokens if stays else self.before(n_tokens)

    def go_back(self, n_tokens: int) -> None:
        """Roll the sequence back to the checkpoint at n_tokens positions. Raises the errors of PooledSequence.rollback()."""
        self._sequence.rollback(n_tokens, self._states[n_tokens])

    def truncate(self, n_tokens: int) -> None:
        """Forget the checkpoints after the first n_tokens positions."""
        self._states = {pos: state for pos, state in self._states.items() if pos <= n_tokens}

    #
    # snapshots
    #

    @property
    def at_chunks(self) -> list[int]:
        """The positions of checkpoints at the end of a chunk, in ascending order: a snapshot can be cut there."""
        chunk = self._sequence.options.chunk
        return [pos for pos in self._states if pos % chunk == 0]

    def saved(self, n_tokens: int) -> list[tuple[int, StateBytes]]:
        """Return the checkpoints for a snapshot of the first n_tokens positions, in ascending order."""
        return [(pos, self._states[pos]) for pos in self.at_chunks if pos <= n_tokens][-_SAVED:]

    def restored(self, states: Mapping[int, StateBytes]) -> None:
        """Replace all checkpoints by those of a snapshot."""
        self._states = dict(sorted(states.items())) if self.kept else {}
        self._evict()


def least(positions: Sequence[int], spared: Sequence[int] = ()) -> int:
    """Return the position of the least useful checkpoint, the oldest of several equal ones. positions: in ascending order.

    spared: positions returned only if no other checkpoint is old enough. A snapshot can be cut there; without such a checkpoint,
    the next batch would be cut to make one.

    The distance from the end at which the next prompt diverges is taken as log-uniform, because texts mostly diverge near the end.
    So the prompt diverges between a checkpoint and the next one with a probability proportional to log(distance of the checkpoint
    from the end / distance of the next one). If the former is evicted, such a prompt is read from the checkpoint before.
    """
    end = positions[-1] + _NEAREST
    old = range(max(1, len(positions) - _NEWEST))

    def missed(i: int) -> float:
        before, pos, after = (*([0] if i == 0 else []), *positions[max(i - 1, 0) : i + 2], end)[:3]
        return (pos - before) * math.log((end - pos) / max(end - after, _NEAREST))

    return positions[min(old, key=lambda i: (positions[i] in spared, missed(i)))]
