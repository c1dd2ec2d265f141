"""When to compare tokens with the full cache: as often as a share of the time allows."""

from collections import deque

_RECENT = 4  # checks that say how it goes now


class Checks:
    """Plans checks of `n` tokens, and counts what they find. The caller owns the clock.

    The first check comes at once, so that there is a figure for short answers, too: nobody knows yet what it takes, and the
    prompt has usually taken much longer. From then on the next one begins when all of them together have taken no more than
    `share` of the time, the next one included.
    """

    def __init__(self, share: float, n: int) -> None:
        """share: 0 to 1, of the time for prompts and answers, checks included. n: tokens of a check."""
        self.share = share
        self.n = n
        self._elapsed_s = 0.0
        self._spent_s = 0.0
        self._check_s = 0.0  # the last one
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def due(self) -> bool:
        """Whether to begin with a check now."""
        return self._spent_s + self._check_s <= self.share * self._elapsed_s

    @property
    def agreement(self) -> float | None:
        """Share of the tokens of the last checks that were the full cache's, 0 to 1; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def passed(self, seconds: float) -> None:
        """Record that reading or decoding went on for so long."""
        self._elapsed_s += seconds

    def began(self, seconds: float) -> None:
        """Record that it took so long to begin a check."""
        self._spent_s += seconds

    def checked(self, seconds: float, n_agreed: int) -> None:
        """Record a check that took so long, and how many of its n tokens were the full cache's."""
        self._elapsed_s += seconds
        self._spent_s += seconds
        self._check_s = seconds
        self._recent.append(n_agreed / self.n)

    def forget(self) -> None:
        """Forget what the last checks found: another text begins."""
        self._recent.clear()
