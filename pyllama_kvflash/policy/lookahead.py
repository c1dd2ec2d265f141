"""Choose how many tokens to draft before a check, from measured acceptance and times.

A round drafts n tokens, and verifies them and the token before them in one batch. If each drafted token is accepted with
probability a, the round commits (1 - a^(n+1)) / (1 - a) tokens on average (Leviathan et al. 2023, arXiv:2211.17192, equation 1). A
round takes n times the time of drafting a token, plus the time of checking n + 1 tokens. The time of checking is taken as linear in
the number of tokens, and fitted to the checks so far.

If k tokens are drafted during a check that accepts everything, they begin the next draft, and cost no time. A run of such rounds
ends with a rejected token, after 1 / (1 - a) tokens on average. After its first check, a run has a^(n+1) / (1 - a^m) more checks on
average, of m = max(n, k) tokens each.

Tokens differ in confidence. A draft continues until the probability that all of it is accepted falls to the probability for n
average tokens. So a draft of confident tokens is longer than n, and an unsure token ends it early.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyllama_kvflash.policy.doubt import Doubt

_KEPT = 0.95  # decay of earlier rounds' weight per round
_SPIKE = 3  # a time counts as at most this many times the expected one: timing errors only make times longer
_PRIOR, _PRIOR_WEIGHT = 0.8, 4.0  # initial acceptance, and its weight in drafts
_FLAT = 1e-6  # a variance of token numbers below this counts as zero
_PROBE = 64  # rounds between trials of another number, which keep the line and the acceptance current


@dataclass(slots=True)
class _Line:
    """A weighted least-squares line through (tokens, seconds). Recent rounds weigh most."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        if self.weight:
            y = min(y, _SPIKE * self.at(x))
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, _KEPT * getattr(self, name) + value)

    def at(self, x: float) -> float:
        """Return how many seconds x tokens take. This never decreases as x grows."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread) if spread > _FLAT else 0.0
        slope = min(slope, mean_y / mean_x)  # no negative time for zero tokens
        return mean_y + slope * (x - mean_x)


class Length(NamedTuple):
    """Where a draft ends: after n tokens, or once the probability that all are accepted is `least` or below."""

    n: int
    least: float = 0.0


class Lookahead:
    """Chooses the number of tokens of the next draft. The caller owns the clock, and reports each round."""

    def __init__(self, choices: Sequence[int]) -> None:
        """choices: the numbers to choose from, ascending."""
        self.choices = tuple(choices)
        self.draft_s: float | None = None  # seconds of a drafted token
        self._right = _PRIOR * _PRIOR_WEIGHT
        self._tried = _PRIOR_WEIGHT
        self._checks = _Line()
        self._n_rounds = 0
        self._n_beside: float | None = None  # tokens drafted during a check; None: drafts wait for its end
        self._doubt = Doubt()

    @property
    def acceptance(self) -> float:
        """The probability that a drafted token is accepted if all tokens before it are."""
        return self._right / self._tried

    @property
    def n(self) -> int:
        """The length of the next draft, if the confidence of its tokens is unknown."""
        tried = self._tried_next
        return self._best if tried is None else tried

    @property
    def next(self) -> Length:
        """Where the next draft ends."""
        tried, best, longest = self._tried_next, 0, self.choices[-1]
        if tried is None:
            best = self._best
        if not best:
            return Length(tried or 0)
        if best < longest:
            return Length(min(longest, 2 * best), (1 + _FLAT) * min(self.acceptance, 1 - 1e-6) ** best)
        # an even longer draft might be better: a token is worth drafting while its expected gain exceeds the rate
        more = self._checks.at(longest + 1) - self._checks.at(longest)
        return Length(longest, self.rate(longest) * ((self.draft_s or 0.0) + more))

    @property
    def _tried_next(self) -> int | None:
        """A number of tokens to try next, to keep the line and the acceptance up to date; None: no trial is due."""
        choices, middle, last = self.choices, self.choices[len(self.choices) // 2], self.choices[-1]
        first = (middle, last if last > middle else choices[0])  # a line needs two points
        if self._n_rounds < len(first):
            return first[self._n_rounds]
        if self._n_rounds % _PROBE:
            return None
        best = self._best
        return next((n for n in choices if n > 2 * best), last)

    @property
    def _best(self) -> int:
        return max(self.choices, key=self.rate)

    def all_right(self, tops: Sequence[float]) -> float:
        """Return the probability that all tokens of a draft are accepted. tops: the drafter's probability of each token."""
        return self._doubt.all_right(tops, min(self.acceptance, 1 - 1e-6))

    def rate(self, n: int) -> float:
        """Return the expected tokens per second with drafts of n tokens. Needs at least one round with a draft."""
        a, k, draft_s = min(self.acceptance, 1 - 1e-6), self._n_beside or 0.0, self.draft_s or 0.0
        seconds, goes_on = n * draft_s + self._checks.at(n + 1), float(a ** (n + 1))
        if self._n_beside is None:
            return (1 - goes_on) / (1 - a) / max(seconds, 1e-9)
        m = max(n, k, 1)
        seconds += goes_on / (1 - float(a**m)) * (self._checks.at(m + 1) + (m - k) * draft_s)
        return 1 / (1 - a) / max(seconds, 1e-9)

    def beside(self, n_drafted: int) -> None:
        """Record that n_drafted tokens were drafted during a check."""
        before = n_drafted if self._n_beside is None else self._n_beside
        self._n_beside = before + (1 - _KEPT) * (n_drafted - before)

    def checked(
        self,
        n_drafted: int,
        n_right: int,
        draft_s: float,
        check_s: float,
        width: int = 0,
        tops: Sequence[float] = (),
    ) -> None:
        """Record a round: n_right of n_drafted tokens, drafted in draft_s seconds, were accepted.

        draft_s 0: the tokens were drafted during the last check. check_s: seconds of the check. width: tokens of its batch; 0:
        n_drafted + 1. tops: as for all_right().
        """
        self._n_rounds += 1
        self._doubt.checked(tops, n_right)
        if n_drafted:
            self._right = _KEPT * self._right + n_right
            self._tried = _KEPT * self._tried + min(n_right + 1, n_drafted)
        if n_drafted and draft_s:
            each = draft_s / n_drafted
            if self.draft_s is not None:
                each = self.draft_s + (1 - _KEPT) * (min(each, _SPIKE * self.draft_s) - self.draft_s)
            self.draft_s = each
        self._checks.add(width or n_drafted + 1, check_s)
