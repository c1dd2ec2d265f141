"""Decide when to score: often enough to follow the text, and seldom enough that the cost is negligible."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Scoring:
    """The saved progress of a selector.

    n_since: tokens since the last scoring began.
    queries: queries of the scoring under way, float32, all pooled layers one after the other.
    scores: scores that have yet to be applied, (n_chunks,) float64.
    cost_s, step_s: seconds of a scoring and of a token; 0: not measured.
    """

    n_since: int = 0
    queries: npt.NDArray[np.float32] | None = None
    scores: npt.NDArray[np.float64] | None = None
    cost_s: float = 0.0
    step_s: float = 0.0


SELDOM = 2
"""Scoring within the token counts as too seldom if its interval exceeds this many times tau."""


class Schedule:
    """Starts a scoring every tau tokens, or every tau * 2^k if scoring would otherwise exceed `share` of the decode time.

    A scoring either ends within the token, so that the next token attends to the chosen chunks, or runs beside decode
    and is applied `lag` tokens later. If both are possible and a device decodes meanwhile (`free`), scoring runs beside
    decode while its cost is unknown, or if scoring within the token would be too seldom.

    Costs are measured, and the caller owns the clock. Because of the powers of two, small noise in the costs does not
    change the steps at which the pool changes: the same seed gives the same text unless a cost crosses a power of two.
    """

    def __init__(self, tau: int = 2, share: float = 0.03, *, within: bool = False, free: bool = True) -> None:
        """within: whether scoring may end within the token. free: whether scoring beside decode takes no time from decode."""
        self.tau = tau
        self.share = share
        self.within = within
        self.free = free
        self._step_s: float | None = None
        self._costs: list[tuple[float, float, float]] = []
        self._n = 0
        self._begun = False

    @property
    def cost_s(self) -> float:
        """Seconds of a reselect within a token: the least of the last five, since a busy machine only adds time."""
        return min(map(sum, self._costs), default=0.0)

    @property
    def step_s(self) -> float | None:
        """Seconds of a token; None if not measured."""
        return self._step_s

    def _every(self, seconds: float) -> int:
        """Return the interval in tokens for work that takes `seconds`."""
        if not self._step_s or not self.share:
            return self.tau
        tokens = seconds / (self.share * self._step_s)
        return self.tau << max(0, math.ceil(math.log2(max(tokens, 1) / self.tau)))

    @property
    def beside(self) -> bool:
        """Whether scoring runs beside decode now."""
        if not self.within or not self.free or not self.share:
            return not self.within
        return not self._costs or self._every(self.cost_s) > SELDOM * self.tau

    @property
    def interval(self) -> int:
        """Tokens from one scoring to the next."""
        if self.beside and self.free:
            apply_s = min((apply for _, apply, _ in self._costs), default=0.0)
            return max(self._every(apply_s), 2 * self._behind())
        return self._every(self.cost_s)

    @property
    def lag(self) -> int:
        """Tokens from the start of a scoring to the step at which its plan is applied.

        The lag is counted in tokens, not in seconds, so that the same seed gives the same text. If a device decodes, the lag is
        the smallest power of two with which nothing waits for the scoring.
        """
        if not self.beside:
            return 0
        return self._behind() if self.free else max(1, self.interval // 4)

    def _behind(self) -> int:
        """Return the smallest power of two n such that n tokens take at least half a token's time longer than a scoring."""
        score_s, step_s = min((score for score, _, _ in self._costs), default=0.0), self._step_s
        if not step_s or not self.share:
            return 1
        return 1 << max(0, math.ceil(math.log2(max(score_s / step_s + 0.5, 1))))

    def restart(self) -> None:
        """Restart the count, because the pool was just chosen anew."""
        self._n = 0
        self._begun = False

    @property
    def n_since(self) -> int:
        """Tokens since the last scoring began, or since the pool was chosen."""
        return self._n

    def resume(self, saved: Scoring) -> None:
        """Continue from a saved schedule. The saved measurements count only if this schedule has none."""
        self._n = saved.n_since
        self._begun = saved.scores is not None or saved.queries is not None
        if saved.cost_s and not self._costs:
            self._costs = [(saved.cost_s, 0.0, 0.0)]
        self._step_s = self._step_s or saved.step_s or None

    def step(self, n_tokens: int, seconds: float | None) -> None:
        """Record that n_tokens were decoded in `seconds`; None: unknown."""
        self._n += n_tokens
        if seconds is None:
            return
        each = seconds / n_tokens
        self._step_s = each if self._step_s is None else 0.9 * self._step_s + 0.1 * each

    def scored(self, score_s: float, apply_s: float, copy_s: float = 0.0) -> None:
        """Record a reselect. score_s: seconds of scoring. apply_s: seconds of changing the pool.

        copy_s: seconds of device copies, for which scoring within the token would wait.
        """
        self._costs = [*self._costs[-4:], (score_s, apply_s, copy_s)]

    def repeated(self) -> None:
        """Add the time of a token that is decoded again to the cost of the last scoring."""
        if self._costs:
            score_s, apply_s, copy_s = self._costs[-1]
            self._costs[-1] = score_s, apply_s + (self._step_s or 0.0), copy_s

    def begin(self) -> bool:
        """Return whether to begin scoring now, and if so, note that it has begun. Call it once per step."""
        if self._begun or self._n < self.interval:
            return False
        self._n = 0
        self._begun = True
        return True

    def n_until(self, *, due: bool) -> int:
        """Return the number of tokens, at least 1, until begin() returns true. due: count until apply() returns true instead."""
        return max(1, (self.lag if due else self.interval) - self._n)

    def apply(self) -> bool:
        """Return whether the scores are due now, and if so, note that they were applied."""
        if not self._begun or self._n < self.lag:
            return False
        self._begun = False
        return True
