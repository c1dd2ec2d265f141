"""Decide when to compare tokens with the full cache: as often as a given share of the time allows."""

from collections import deque

_RECENT = 4  # checks in the average


class Checks:
    """Plans checks of `n` tokens, and averages their results. The caller owns the clock.

    The first check is due at once, so that even a short answer has a result. Its cost is still unknown, but the prompt has usually
    taken much longer. A later check is due once all checks, including the due one, take at most `share` of the time.
    """

    def __init__(self, share: float, n: int) -> None:
        """share: the largest share of the time for prompts and answers, checks included, 0 to 1. n: tokens of a check."""
        self.share = share
        self.n = n
        self._elapsed_s = 0.0
        self._spent_s = 0.0
        self._check_s = 0.0  # seconds of the last check
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def due(self) -> bool:
        """Whether to begin a check now."""
        return self._spent_s + self._check_s <= self.share * self._elapsed_s

    @property
    def agreement(self) -> float | None:
        """The share of the last checks' tokens that equal the full cache's, 0 to 1; None before the first check."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def passed(self, seconds: float) -> None:
        """Record that reading or decoding took `seconds`."""
        self._elapsed_s += seconds

    def began(self, seconds: float) -> None:
        """Record that beginning a check took `seconds`."""
        self._spent_s += seconds

    def checked(self, seconds: float, n_agreed: int) -> None:
        """Record a check that took `seconds`. n_agreed: how many of its tokens equal the full cache's."""
        self._elapsed_s += seconds
        self._spent_s += seconds
        self._check_s = seconds
        self._recent.append(n_agreed / self.n)

    def forget(self) -> None:
        """Forget the results of the last checks, because another text begins."""
        self._recent.clear()
