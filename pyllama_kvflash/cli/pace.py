"""An estimate of the time for the rest of a prompt."""


class Pace:
    """Estimates the time for the rest of a prompt. A token takes longer the more tokens come before it.

    The second half of the tokens read so far tells how long a token takes now. A comparison with the first half tells how fast
    that time grows.
    """

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}  # seconds taken, by the number of tokens read

    def left(self, done: int, total: int, seconds: float) -> float:
        """Return the seconds that the rest takes, after `done` of `total` tokens have taken `seconds` in all."""
        # the prompt may be read again from the beginning
        self._taken = {at: taken for at, taken in self._taken.items() if at < done}
        half = min(self._taken, key=lambda at: abs(at - done / 2), default=0)
        now = (seconds - self._taken.get(half, 0.0)) / (done - half)  # per token, in the middle of the second half
        before = self._taken[half] / half if half else now
        self._taken[done] = seconds
        growth = max(0.0, now - before) / (done / 2)  # per token, between the middles of the two halves
        return (total - done) * (now + growth * (total - half) / 2)
