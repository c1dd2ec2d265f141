"""How likely a drafted token is right, by how sure of it its drafter was.

A drafter is wrong above all where it gives its first choice a low probability. How often, checks say: right and wrong tokens are counted by ranges of that
probability (a histogram calibration, Zadrozny and Elkan 2001). A range of which little is known is like all tokens.
"""

import math
from bisect import bisect
from collections.abc import Sequence

_EDGES = (0.5, 0.8, 0.9, 0.98, 0.995, 0.9995)  # between ranges
_KEPT = 0.99  # of a range's weight, at each of its tokens: so an easy text is forgotten as soon as a hard one begins
_WEIGHT = 4.0  # tokens as which the average counts in each range


class Doubt:
    """Counts for one drafter. Report each check."""

    def __init__(self) -> None:
        self._right = [0.0] * (len(_EDGES) + 1)
        self._tried = [0.0] * (len(_EDGES) + 1)

    def all_right(self, tops: Sequence[float], average: float) -> float:
        """Return the probability that all tokens of a draft are right.

        tops: for each, the probability of the drafter's first choice. average: the share of all tokens that are right.
        """
        at = [bisect(_EDGES, top) for top in tops]
        return math.prod((self._right[i] + _WEIGHT * average) / (self._tried[i] + _WEIGHT) for i in at)

    def checked(self, tops: Sequence[float], n_right: int) -> None:
        """Record the check of a draft, of which the first n_right tokens were right. What follows a wrong one says nothing."""
        for k, top in enumerate(tops[: n_right + 1]):
            i = bisect(_EDGES, top)
            self._tried[i] = _KEPT * self._tried[i] + 1
            self._right[i] = _KEPT * self._right[i] + (k < n_right)
