"""The meter: how often the pool predicts the same token as the full cache.

From time to time, a few consecutive tokens are computed again, against all positions. This pass changes nothing, so the text is
the same with and without the meter. The pass reads the rows of earlier answer tokens as the pool computed them.
"""

import math
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.events import Checked, MeterStats
from pyllama_kvflash.native import StateBytes
from pyllama_kvflash.policy.checks import Checks
from pyllama_kvflash.pool.sequence import PooledSequence

N_CHECKED = 16
"""Tokens of a check. With fewer, most of the time would go into reading the cache."""

Logits = npt.NDArray[np.float32]


class Meter:
    """Checks the tokens of one sequence. Call `begin` before a token is decoded, `saw` when the next token is chosen, and
    `check` when the batch's logits are no longer needed.

    stats: counts of the answer.
    """

    def __init__(self, sequence: PooledSequence, share: float) -> None:
        """share: the largest share of the total time, prompts included, that checks may take, 0 to 1."""
        self.stats = MeterStats()
        self.checks = Checks(share, min(N_CHECKED, sequence.reads_exactly.n_batch))
        self._sequence = sequence
        self._start = 0
        self._state: StateBytes = b""  # the state outside chunks, at _start
        self._rows: list[Logits] | None = None  # logits of the tokens from _start on; None: no check is under way
        self._since: float | None = None

    def reset(self, prefill_s: float) -> None:
        """Begin an answer. prefill_s: seconds that its prompt took."""
        self.stats = MeterStats()
        self.checks.forget()
        self.checks.passed(prefill_s)
        self._rows = self._since = None

    def begin(self) -> None:
        """If a check is due, begin it with the token that is decoded next."""
        now, sequence = time.perf_counter(), self._sequence
        if self._since is not None:
            self.checks.passed(now - self._since)
        self._since = now
        if self._rows is None and self.checks.due:
            self._start, self._state = sequence.n_tokens, sequence.ctx.save_partial()
            self._rows = []
            self.checks.began(time.perf_counter() - now)

    def saw(self, pos: int, i: int) -> None:
        """Note the logits of token i of the last batch (-1: its last token), at position pos."""
        if self._rows is None or len(self._rows) == self.checks.n:
            return
        if pos == self._start + len(self._rows):
            self._rows.append(self._sequence.ctx.logits(i))
        else:
            self._rows = None  # tokens were rolled back

    def check(self) -> Checked | None:
        """Compare the tokens since begin() with the full cache, once there are enough. Returns the result, or None.

        Raises Interrupted, SnapshotError and NativeError.
        """
        if self._rows is None or len(self._rows) < self.checks.n:
            return None
        begin, rows, self._rows = time.perf_counter(), self._rows, None
        state, self._state = self._state, b""
        agreed, kld = _compare(self._sequence.seen_exactly(self._start, len(rows), state), rows)
        if self._sequence.selector:
            self._sequence.selector.rest()  # do not measure the check as decode time
        seconds = time.perf_counter() - begin
        self._since = time.perf_counter()
        self.checks.checked(seconds, agreed)
        stats = self.stats
        stats.checked += len(rows)
        stats.agreed += agreed
        stats.kld_sum += kld
        stats.check_s += seconds
        return Checked(self._start + len(rows), len(rows), agreed, kld / len(rows), seconds)


def _compare(full: Logits, pool: Sequence[Logits]) -> tuple[int, float]:
    """Return the number of rows with the same most likely token, and the sum of KL(full || pool) in nats. full, pool: logits
    (n, n_vocab). Computes row by row in f32, because vocabularies are large: 16 rows of 152K take 10 ms in f32, 190 ms in f64.
    """
    agreed, kld = 0, 0.0
    for row, other in zip(full, pool, strict=True):
        p, q = row - row.max(), other - other.max()
        weights = np.exp(p)
        sum_p, sum_q = (float(x.sum(dtype=np.float64)) for x in (weights, np.exp(q)))
        agreed += int(row.argmax() == other.argmax())
        kld += float(np.dot(weights, p - q)) / sum_p - math.log(sum_p) + math.log(sum_q)
    return agreed, kld
