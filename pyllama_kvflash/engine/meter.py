"""The meter: how often the pool gives the full cache's token.

Now and then a few tokens in a row are computed once more, against everything. That pass leaves no trace, so the text is the
same with the meter and without. It takes the rows of earlier tokens of the answer as the pool made them.
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
"""Tokens of a check: of fewer, most of the time would go into reading the cache."""

Logits = npt.NDArray[np.float32]


class Meter:
    """Checks the tokens of one sequence. Call `begin` before a token is decoded, `saw` when the next one is chosen, and
    `check` when nothing of the batch is needed any more.

    stats: counts of the answer.
    """

    def __init__(self, sequence: PooledSequence, share: float) -> None:
        """share: the largest share of the time that checks may take, 0 to 1; of prompts, too."""
        self.stats = MeterStats()
        self.checks = Checks(share, min(N_CHECKED, sequence.reads_exactly.n_batch))
        self._sequence = sequence
        self._start = 0
        self._state: StateBytes = b""  # what no chunk holds, at _start
        self._rows: list[Logits] | None = None  # logits of the tokens from _start on; None: no check was begun
        self._since: float | None = None

    def reset(self, prefill_s: float) -> None:
        """Begin an answer, whose prompt took prefill_s."""
        self.stats = MeterStats()
        self.checks.forget()
        self.checks.passed(prefill_s)
        self._rows = self._since = None

    def begin(self) -> None:
        """Begin to check with the token that is decoded next, if a check is due."""
        now, sequence = time.perf_counter(), self._sequence
        if self._since is not None:
            self.checks.passed(now - self._since)
        self._since = now
        if self._rows is None and self.checks.due:
            self._start, self._state = sequence.n_tokens, sequence.ctx.save_partial()
            self._rows = []
            self.checks.began(time.perf_counter() - now)

    def saw(self, pos: int, i: int) -> None:
        """Note the logits of token i of the last batch, at position pos: -1, its last one."""
        if self._rows is None or len(self._rows) == self.checks.n:
            return
        if pos == self._start + len(self._rows):
            self._rows.append(self._sequence.ctx.logits(i))
        else:
            self._rows = None  # some were taken back

    def check(self) -> Checked | None:
        """Compare the tokens since begin() with the full cache, if there are enough. Returns what was found.

        Raises Interrupted, SnapshotError and NativeError.
        """
        if self._rows is None or len(self._rows) < self.checks.n:
            return None
        begin, rows, self._rows = time.perf_counter(), self._rows, None
        state, self._state = self._state, b""
        agreed, kld = _compare(self._sequence.seen_exactly(self._start, len(rows), state), rows)
        if self._sequence.selector:
            self._sequence.selector.rest()  # no token took that long
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
    """Return at how many tokens both, (n, n_vocab), find the same one most likely, and the sum of KL(full || pool), in
    nats. Row by row in f32, because a vocabulary is large: sixteen rows of 152K take 10 ms so, and 190 in f64.
    """
    agreed, kld = 0, 0.0
    for row, other in zip(full, pool, strict=True):
        p, q = row - row.max(), other - other.max()
        weights = np.exp(p)
        sum_p, sum_q = (float(x.sum(dtype=np.float64)) for x in (weights, np.exp(q)))
        agreed += int(row.argmax() == other.argmax())
        kld += float(np.dot(weights, p - q)) / sum_p - math.log(sum_p) + math.log(sum_q)
    return agreed, kld
