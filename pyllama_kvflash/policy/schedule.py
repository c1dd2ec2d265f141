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


class Schedule:
    """Every tau tokens, or tau times a power of two where scoring would cost more than `share` of the decode time.

    Costs are measured (the caller has the clock). Powers of two, so that a little noise in them does not move the steps
    at which the pool changes: the same seed gives the same text unless the measured cost itself crosses a step.
    """

    def __init__(self, tau: int = 4, share: float = 0.05, *, beside: bool = True) -> None:
        """beside: scoring goes on beside decode, and is applied some tokens later; otherwise decode waits for it."""
        self.tau = tau
        self.share = share
        self.beside = beside
        self._step_s: float | None = None
        self._costs: list[float] = []
        self._n = 0
        self._begun = False

    @property
    def cost_s(self) -> float:
        """Seconds that a reselect costs: the least of the last five, since a busy machine only adds."""
        return min(self._costs, default=0.0)

    @property
    def step_s(self) -> float | None:
        """Seconds that a token takes, None: not measured yet."""
        return self._step_s

    @property
    def interval(self) -> int:
        """Tokens from one scoring to the next."""
        if not self._step_s or not self.share:
            return self.tau
        tokens = self.cost_s / (self.share * self._step_s)
        return self.tau << max(0, math.ceil(math.log2(max(tokens, 1) / self.tau)))

    @property
    def lag(self) -> int:
        """Tokens from the beginning of a scoring to the step where its plan is applied: a number of its own, not of the
        clock's, so that the same seed gives the same text. A quarter of the interval: beside a GPU, scoring may take
        that long and nothing waits for it.
        """
        return max(1, self.interval // 4) if self.beside else 0

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
            self._costs = [saved.cost_s]
        self._step_s = self._step_s or saved.step_s or None

    def step(self, n_tokens: int, seconds: float | None) -> None:
        """n_tokens were decoded in so many seconds, None: nobody knows."""
        self._n += n_tokens
        if seconds is None:
            return
        each = seconds / n_tokens
        self._step_s = each if self._step_s is None else 0.9 * self._step_s + 0.1 * each

    def scored(self, seconds: float) -> None:
        """A reselect took so many seconds in all."""
        self._costs = [*self._costs[-4:], seconds]

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
