"""Lossless decoding: tokens are drafted through the pool, and checked against everything in one exact batch.

The pool drafts with the model's own weights, so most of its tokens are right (TriForce, Sun et al. 2024, arXiv:2404.11912,
drafts from a partial cache in this way). The accepted tokens come from the exact batch alone: the text is the full cache's.
"""

import time
from collections.abc import Iterator

import numpy as np

from pyllama_kvflash import native
from pyllama_kvflash.engine.speculation import Drafts
from pyllama_kvflash.events import DraftStats, Event, Paged
from pyllama_kvflash.native import Sampler, Tokens
from pyllama_kvflash.policy.draft_length import DraftLength
from pyllama_kvflash.pool.sequence import PooledSequence

_NO_TOKENS = np.empty(0, np.int32)


class Lossless:
    """Drafts for one sequence through its pool, and chooses how much. Report every check.

    stats: counts of the answer's drafts.
    """

    def __init__(self, sequence: PooledSequence, drafts: Drafts | None, n_fixed: int = 0) -> None:
        """drafts: guess what the pool then drafts or rejects; None: it drafts token by token. n_fixed: draft so many tokens,
        whatever the clock says: the same seed then gives the same text, to the last near tie. 0: as many as pay.
        """
        self.stats = DraftStats()
        self._sequence = sequence
        self._drafts = drafts
        n_most = sequence.options.n_lookahead(recurrent=sequence.recurrent)
        if sequence.recurrent:  # some architectures' states cannot go back at all: then nothing is drafted
            n_most = min(n_most, sequence.reads_exactly.ctx.n_rollback)
        self._length = DraftLength([min(n_fixed, n_most)] if n_fixed else range(n_most + 1))
        self._draft_s = 0.0

    def begin(self) -> None:
        """Begin an answer."""
        self.stats = DraftStats()

    def n_next(self, left: int) -> int:
        """Return how many tokens to draft next, if at most `left` may follow the pending one."""
        sequence = self._sequence
        room = min(sequence.options.n_ctx - sequence.n_tokens, sequence.reads_exactly.n_batch)
        return max(0, min(self._length.n, left, room - 1))

    def draft(self, token: int, n: int, sampler: Sampler) -> tuple[Tokens, list[Event]]:
        """Guess what follows `token`, the pending one, by decoding it through the pool, which is unchanged afterwards.

        sampler: chooses the tokens, and stays where it is. Returns n tokens or fewer, (m,) int32, and what moved. Raises
        PoolError, HostMemoryError, Interrupted and NativeError.
        """
        self._draft_s = 0.0
        if not n:
            return _NO_TOKENS, []
        begin, sequence = time.perf_counter(), self._sequence
        guesses = self._guess(token, min(n, sequence.ctx.n_ubatch) - 1)
        guessing_s = time.perf_counter() - begin
        with sequence.trial(n) as plan:
            found = list(self._follow(token, n, guesses, guessing_s, sampler.fork()))
        self._draft_s = time.perf_counter() - begin
        return np.array(found, np.int32), [Paged(sequence.n_tokens, plan.drops, plan.page_ins)] if plan else []

    def _guess(self, token: int, at_most: int) -> Tokens:
        drafts = self._drafts
        n = min(drafts.length.n, at_most) if drafts else 0
        return drafts.guess(self._sequence.history, token, n) if drafts and n else _NO_TOKENS

    def _follow(self, token: int, n: int, guesses: Tokens, guessing_s: float, sampler: Sampler) -> Iterator[int]:
        """Decode through the pool, first the token with guesses and then one at a time. Yields the n tokens that follow it,
        or those up to the end of the text.

        guessing_s: seconds that the guesses took.
        """
        ctx, pos, n_found = self._sequence.ctx, self._sequence.n_tokens, 0
        while n_found < n:
            begin, batch = time.perf_counter(), np.array([token, *guesses], np.int32)
            ctx.decode(batch, pos, native.ALL)
            for i in range(len(batch)):
                token = sampler.sample(ctx, i)
                yield token
                if ctx.model.is_eog(token):
                    return
                if i + 1 < len(batch) and token != batch[i + 1]:
                    ctx.keep(i + 1)
                    break
            if self._drafts and len(batch) > 1:
                self._drafts.length.checked(len(batch) - 1, i, guessing_s, time.perf_counter() - begin)
            elif self._drafts:
                self._drafts.length.plain(time.perf_counter() - begin)
            pos, n_found, guesses = pos + i + 1, n_found + i + 1, _NO_TOKENS

    def checked(self, n_drafted: int, n_right: int, seconds: float) -> None:
        """Record the check of a draft, which took `seconds`: the first n_right of its n_drafted tokens were right."""
        self._length.checked(n_drafted, n_right, self._draft_s, seconds)
        self.stats.draft_steps += n_drafted > 0
        self.stats.plain_steps += n_drafted == 0
        self.stats.drafted += n_drafted
        self.stats.accepted += n_right
