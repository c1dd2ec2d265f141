"""When to score: often enough to follow the text, seldom enough to cost nothing that is felt."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Scoring:
    """How far a selector is: n_since tokens after it last began, with what it has of the scoring that is under way: queries
    (of all pooled layers, one after the other), or the scores (n_chunks,) that are to be applied. Seconds that a scoring and
    a token take, 0: not measured.
    """

    n_since: int = 0
    queries: npt.NDArray[np.float32] | None = None
    scores: npt.NDArray[np.float64] | None = None
    cost_s: float = 0.0
    step_s: float = 0.0


SELDOM = 2
"""Times tau: from where on to score within the token would be too seldom."""


class Schedule:
    """Every tau tokens, or tau times a power of two where scoring would cost more than `share` of the decode time.

    Scoring may be over `within` the token, so that the next one has what it chose; or go on beside decode, and be applied `lag`
    tokens later. Where both may be and a device computes meanwhile (`free`), it is beside if it would be seldom within, or
    nobody knows yet.

    Costs are measured (the caller has the clock). Powers of two, so that a little noise in them does not move the steps
    at which the pool changes: the same seed gives the same text unless the measured cost itself crosses a step.
    """

    def __init__(self, tau: int = 2, share: float = 0.03, *, within: bool = False, free: bool = True) -> None:
        """within: scoring may be over within the token. free: beside decode it takes nothing from it."""
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
        """Seconds that a reselect takes within a token: the least of the last five, since a busy machine only adds."""
        return min(map(sum, self._costs), default=0.0)

    @property
    def step_s(self) -> float | None:
        """Seconds that a token takes, None: not measured yet."""
        return self._step_s

    def _every(self, seconds: float) -> int:
        """Tokens from one to the next of what takes so long."""
        if not self._step_s or not self.share:
            return self.tau
        tokens = seconds / (self.share * self._step_s)
        return self.tau << max(0, math.ceil(math.log2(max(tokens, 1) / self.tau)))

    @property
    def beside(self) -> bool:
        """Whether scoring goes on beside decode now."""
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
        """Tokens from the beginning of a scoring to the step where its plan is applied: a number of its own, not of the
        clock's, so that the same seed gives the same text. Beside a device, as few as scoring needs for nothing to wait for it.
        """
        if not self.beside:
            return 0
        return self._behind() if self.free else max(1, self.interval // 4)

    def _behind(self) -> int:
        """A power of two: so many tokens are computed, but for half a one, while all chunks are scored."""
        score_s, step_s = min((score for score, _, _ in self._costs), default=0.0), self._step_s
        if not step_s or not self.share:
            return 1
        return 1 << max(0, math.ceil(math.log2(max(score_s / step_s + 0.5, 1))))

    def restart(self) -> None:
        """The pool was just chosen anew."""
        self._n = 0
        self._begun = False

    @property
    def n_since(self) -> int:
        """Tokens since the last scoring was begun, or the pool chosen."""
        return self._n

    def resume(self, saved: Scoring) -> None:
        """Go on where another schedule was, with what it had measured unless this one has itself."""
        self._n = saved.n_since
        self._begun = saved.scores is not None or saved.queries is not None
        if saved.cost_s and not self._costs:
            self._costs = [(saved.cost_s, 0.0, 0.0)]
        self._step_s = self._step_s or saved.step_s or None

    def step(self, n_tokens: int, seconds: float | None) -> None:
        """n_tokens were decoded in so many seconds, None: nobody knows."""
        self._n += n_tokens
        if seconds is None:
            return
        each = seconds / n_tokens
        self._step_s = each if self._step_s is None else 0.9 * self._step_s + 0.1 * each

    def scored(self, score_s: float, apply_s: float, copy_s: float = 0.0) -> None:
        """A reselect took so many seconds: to score, and to change the pool. copy_s: that a device copies, and would wait for within
        the token.
        """
        self._costs = [*self._costs[-4:], (score_s, apply_s, copy_s)]

    def repeated(self) -> None:
        """The last scoring had, or was for, a token that is decoded again: that is a part of what it costs."""
        if self._costs:
            score_s, apply_s, copy_s = self._costs[-1]
            self._costs[-1] = score_s, apply_s + (self._step_s or 0.0), copy_s

    def grown(self, score_s: float) -> None:
        """More of a prompt was read, and its chunks took so many seconds to score: what was measured before was of fewer."""
        self._costs = [(max(score_s, score), apply, copy) for score, apply, copy in self._costs]

    def begin(self) -> bool:
        """Whether to begin to score now; asked once a step."""
        if self._begun or self._n < self.interval:
            return False
        self._n = 0
        self._begun = True
        return True

    def n_until(self, *, due: bool) -> int:
        """Tokens until begin() says so, or apply() if scores are due; at least one."""
        return max(1, (self.lag if due else self.interval) - self._n)

    def apply(self) -> bool:
        """Whether the scores that were begun are due now."""
        if not self._begun or self._n < self.lag:
            return False
        self._begun = False
        return True
