"""Estimate the acceptance of a drafted token from the drafter's confidence.

A token is rejected more often if its drafter gave it a low probability. Accepted and rejected tokens are counted in ranges of
that probability (a histogram calibration, Zadrozny and Elkan 2001). A range with few counts takes the average of all tokens.
"""

import math
from bisect import bisect
from collections.abc import Sequence

_EDGES = (0.5, 0.8, 0.9, 0.98, 0.995, 0.9995)  # between ranges
_KEPT = 0.99  # decay of a range's counts per token in it: a hard text soon outweighs an easy one before it
_WEIGHT = 4.0  # weight of the average in each range, in tokens


class Doubt:
    """Counts of one drafter's accepted and rejected tokens. The caller reports each check."""

    def __init__(self) -> None:
        self._right = [0.0] * (len(_EDGES) + 1)
        self._tried = [0.0] * (len(_EDGES) + 1)

    def all_right(self, tops: Sequence[float], average: float) -> float:
        """Return the probability that all tokens of a draft are accepted.

        tops: the drafter's probability of each token. average: the acceptance rate over all tokens.
        """
        at = [bisect(_EDGES, top) for top in tops]
        return math.prod((self._right[i] + _WEIGHT * average) / (self._tried[i] + _WEIGHT) for i in at)

    def checked(self, tops: Sequence[float], n_right: int) -> None:
        """Record a check that accepted the first n_right tokens of a draft. Tokens after a rejected one do not count."""
        for k, top in enumerate(tops[: n_right + 1]):
            i = bisect(_EDGES, top)
            self._tried[i] = _KEPT * self._tried[i] + 1
            self._right[i] = _KEPT * self._right[i] + (k < n_right)
