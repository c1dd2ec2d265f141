"""Lossless decoding: tokens are drafted through the pool, then verified in one exact batch, against all positions.

The pool drafts with the model's own weights, so most tokens are accepted (TriForce, Sun et al. 2024, arXiv:2404.11912, drafts
from a partial cache in this way). The accepted tokens come from the exact batch alone, so the text is the full cache's.

A check that streams layers mostly waits for the bus, so drafting continues meanwhile (as in SparseSpec, arXiv:2512.01278). If the
check accepts everything, the tokens drafted meanwhile are the next draft, and the pool keeps their rows.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from pyllama_kvflash import native
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.events import DraftStats, Event, Paged
from pyllama_kvflash.native import Sampler, Tokens
from pyllama_kvflash.policy.draft_length import DraftLength
from pyllama_kvflash.pool.exact import Beside
from pyllama_kvflash.pool.sequence import PooledSequence
from pyllama_kvflash.pool.speculation import Drafts

_PADDED = 16  # checks are padded to a multiple of this many tokens
_NO_TOKENS = np.empty(0, np.int32)


class Lossless:
    """Drafts tokens of one sequence through its pool, and chooses how many. Every check must be reported: see checked().

    stats: counts of the answer's drafts.
    """

    def __init__(self, sequence: PooledSequence, drafts: Drafts | None, n_fixed: int = 0) -> None:
        """drafts: proposes tokens that the pool verifies first; None: the pool drafts token by token. n_fixed: the number of tokens of
        every draft, so that the same seed gives the same text, even at near ties; 0: the number that is fastest.
        """
        self.stats = DraftStats()
        self._sequence = sequence
        self._drafts = drafts
        n_most = sequence.options.n_lookahead(recurrent=sequence.recurrent)
        if sequence.recurrent:  # some architectures' states cannot be rolled back: they get no drafts
            n_most = min(n_most, sequence.reads_exactly.ctx.n_rollback)
        self._n_most = min(n_fixed, n_most) if n_fixed else n_most
        self._length = DraftLength([self._n_most] if n_fixed else range(n_most + 1))
        self._fixed = n_fixed > 0
        self._draft_s = 0.0
        self._checked_tops: list[float] = []
        self._events: list[Event] = []  # of tokens drafted ahead
        self._forget()

    @property
    def _goes_on(self) -> bool:
        """Whether drafting continues during a check. It needs streamed layers and no `n_fixed`. It is not possible with a scorer,
        which chooses chunks after each check, or with a state, which can be rolled back only to the last check's start.
        """
        sequence = self._sequence
        return not (self._fixed or sequence.stateful or sequence.selector) and sequence.reads_exactly.streams

    def _forget(self) -> None:
        self._at = (-1, -1)  # positions before the pending token, and that token; the draft follows it
        self._drafted: list[int] = []
        self._tops: list[float] = []  # for each drafted token, the probability of the pool's most likely one
        self._n_rows = (
            0  # rows that the pool has from the pending token on; negative: rows of accepted tokens that it lacks
        )
        self._until = 0  # the position up to which the pool has room for the trial
        self._sampler: Sampler | None = None  # the sampler that drew the drafted tokens
        self._n_checked = 0  # drafted tokens in the check under way

    def begin(self) -> None:
        """Begin an answer."""
        self.stats = DraftStats()
        self._forget()

    @property
    def _room(self) -> int:
        """The longest check, in tokens."""
        sequence = self._sequence
        return min(sequence.options.n_ctx - sequence.n_tokens, sequence.reads_exactly.n_batch)

    #
    # a draft
    #

    def draft(self, token: int, left: int, sampler: Sampler) -> tuple[Tokens, list[Event]]:
        """Draft tokens after the pending `token`: decode them through the pool, in a trial. left: how many tokens may follow.

        sampler: the tokens are drawn by a fork of this sampler. Returns the draft, (n,) int32, and the moves. The draft may begin
        with tokens that were drafted during the last check. Raises PoolError, HostMemoryError, Interrupted and NativeError.
        """
        sequence, begin, length = self._sequence, time.perf_counter(), self._length.next
        n = max(0, min(length.n, left, self._room - 1))
        self._begin_draft(token, n, sampler)
        ahead = len(self._drafted)
        guesses = _NO_TOKENS if ahead else self._guess(token, min(n, sequence.ctx.n_ubatch) - 1)
        n = min(n, max(0, self._until - sequence.n_tokens))
        self._extend(lambda: self._enough(n, length.least), guesses, time.perf_counter() - begin)
        self._n_checked = min(len(self._drafted), self._n_most)
        n_new = self._n_checked - ahead  # tokens drafted during the last check cost nothing: see Lookahead
        self._draft_s = (time.perf_counter() - begin) * self._n_checked / n_new if n_new > 0 else 0.0
        self._checked_tops = self._tops[: self._n_checked]
        sequence.whole = sequence.trying
        events, self._events = self._events, []
        return np.array(self._drafted[: self._n_checked], np.int32), events

    def ahead(self, token: int, n: int, sampler: Sampler) -> Beside | None:
        """Return a function that drafts up to n tokens while another sequence is checked, or None. draft() then goes on from there.

        The function stops at the usual draft length, even if the check takes longer, because drafting takes GPU time from the check.
        """
        length = self._length.next
        if not self._goes_on or min(n, length.n) < 1:
            return None

        def draft(done: Callable[[], bool]) -> None:
            sequence = self._sequence
            if not all(s.steady for s in sequence.peers):
                return  # a repair would end the trial that is being checked
            with suppress(KVFlashError):  # draft() tries again
                self._begin_draft(token, n, sampler, beside=True)
                n_most = min(n, length.n, self._until - sequence.n_tokens)
                self._extend(lambda: done() or self._enough(n_most, length.least))
                sequence.whole = True

        return draft

    def _begin_draft(self, token: int, n: int, sampler: Sampler, *, beside: bool = False) -> None:
        """Begin a draft of n tokens after `token`, or continue the current one. `sequence.whole` is False until the draft ends.
        beside: another sequence is being checked.
        """
        sequence = self._sequence
        goes_on = sequence.trying and sequence.whole and self._at == (sequence.n_tokens, token)
        if not goes_on or not all(s.steady for s in sequence.peers):  # a repair of one sequence ends all trials
            sequence.recover(others=False)
            self._forget()
            self._at = (sequence.n_tokens, token)
            if n or self._goes_on:
                self._events += self._begin_trial(n, beside=beside)
        sequence.whole = False
        if self._sampler is None:
            self._sampler = sampler.fork()

    def _begin_trial(self, n: int, *, beside: bool) -> list[Event]:
        sequence = self._sequence
        if self._goes_on and sequence.pager:
            n = min(3 * self._n_most, sequence.pager.n_batch, sequence.options.n_ctx - sequence.n_tokens)
        plan = sequence.begin_trial(n, beside=beside)
        self._n_rows, self._until = 0, sequence.n_tokens + n
        return [Paged(sequence.n_tokens, plan.drops, plan.page_ins)] if plan else []

    def _enough(self, n: int, least: float) -> bool:
        """Return whether the draft ends: it has n tokens, or the probability that all are accepted is `least` or below."""
        return len(self._drafted) >= n or self._length.all_right(self._tops) <= least

    def _guess(self, token: int, at_most: int) -> Tokens:
        drafts = self._drafts
        n = min(drafts.length.n, at_most) if drafts else 0
        return drafts.guess(self._sequence.history, token, n) if drafts and n > 0 else _NO_TOKENS

    def _extend(self, enough: Callable[[], bool], guesses: Tokens = _NO_TOKENS, guessing_s: float = 0.0) -> None:
        """Draft tokens one at a time until `enough` returns true, or the text ends.

        guesses: tokens to verify in the first batch. guessing_s: seconds that drafting the guesses took.
        """
        sequence, sampler = self._sequence, self._sampler
        ctx = sequence.ctx
        while sampler is not None and not enough() and not (self._drafted and ctx.model.is_eog(self._drafted[-1])):
            begin, start = time.perf_counter(), sequence.n_tokens + self._n_rows
            batch = np.concatenate([self._missing(), guesses]).astype(np.int32)
            ctx.decode(batch, start, native.ALL if len(guesses) else native.LAST)
            first = len(batch) - 1 - len(guesses)
            for i in range(first, len(batch)):
                token = self._sample(sampler, i if len(guesses) else -1)
                self._drafted.append(token)
                self._tops.append(1.0 if self._fixed else native.top_probability(ctx, i if len(guesses) else -1))
                self._n_rows = start + i + 1 - sequence.n_tokens
                if ctx.model.is_eog(token):
                    break
                if i + 1 < len(batch) and token != batch[i + 1]:
                    ctx.keep(i + 1)
                    break
            if self._drafts and len(guesses):
                self._drafts.length.checked(len(guesses), i - first, guessing_s, time.perf_counter() - begin)
            elif self._drafts:
                self._drafts.length.plain(time.perf_counter() - begin)
            guesses = _NO_TOKENS

    def _sample(self, sampler: Sampler, i: int) -> int:
        """Sample a token after token i of the pool's last batch."""
        return sampler.sample(self._sequence.ctx, i)

    def _missing(self) -> Tokens:
        """Return the tokens without rows in the pool, (n,) int32: accepted ones, the pending one, drafted ones, in this order."""
        sequence, n = self._sequence, self._n_rows
        before = sequence.history[n:].tolist() if n < 0 else []
        return np.array([*before, *[self._at[1], *self._drafted][max(0, n) :]], np.int32)

    #
    # its check
    #

    @property
    def width(self) -> int:
        """Tokens of the batch that verifies the draft. On a GPU it is padded, so that the graph stays the same."""
        sequence, n = self._sequence, self._n_checked + 1
        if not sequence.reads_exactly.streams or sequence.recurrent:
            return n
        # padding into another chunk would take host memory for it
        to_chunk = -(sequence.n_tokens + n) % sequence.options.chunk
        return min(-(-n // _PADDED) * _PADDED, n + to_chunk, self._room)

    def beside(self, left: int, other: Beside | None = None) -> Beside | None:
        """Return the work to do while the draft is verified; None: nothing. other: another sequence's work, which is done
        instead of drafting on for this sequence. left: how many tokens may follow the pending one.
        """
        sequence = self._sequence
        if not self._goes_on or not sequence.trying:
            return None
        if other:
            return other
        # the check itself yields the token after those that it verifies
        n_most = min(self._n_checked + 1 + self._n_most, left, self._until - sequence.n_tokens)

        def draft(done: Callable[[], bool]) -> None:
            n = len(self._drafted)
            self._extend(lambda: done() or len(self._drafted) >= n_most)
            self._length.beside(len(self._drafted) - n)

        return draft

    def accepted(self, n: int, following: int | None) -> bool:
        """Record that n tokens are accepted, the pending one included. following: the token after them; None: the text ends.

        Returns whether the trial continues. It ends if a drafted token was rejected, the text ends, or the trial has no room left.
        """
        at, ahead = self._sequence.n_tokens + n, self._drafted[self._n_checked :]
        right = n == self._n_checked + 1 and ahead[:1] in ([], [following])
        if following is None or not right or not self._goes_on or self._until - at <= self._n_most:
            self._forget()
            return False
        if not ahead:  # the draft's sampler has not drawn the token that the check yielded
            self._sampler = None
        self._at, self._drafted, self._n_rows = (at, following), ahead[1:], self._n_rows - n
        self._tops = self._tops[self._n_checked + 1 :]
        return True

    def checked(self, n_drafted: int, n_right: int, seconds: float) -> None:
        """Record a check that took `seconds`, and accepted n_right of n_drafted tokens."""
        self._length.checked(n_drafted, n_right, self._draft_s, seconds, tops=self._checked_tops)
        self.stats.draft_steps += n_drafted > 0
        self.stats.plain_steps += n_drafted == 0
        self.stats.drafted += n_drafted
        self.stats.accepted += n_right
