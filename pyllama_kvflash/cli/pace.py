"""How long the rest of a prompt takes."""


class Pace:
    """Follows the batches of a prompt, whose tokens take longer the more come before them.

    The second half of what is read says how long a token takes now, and the first half by how much that grows.
    """

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}  # seconds after so many tokens

    def left(self, done: int, total: int, seconds: float) -> float:
        """Return the seconds that the rest takes, after `done` of `total` tokens have taken `seconds` in all."""
        self._taken = {
            at: taken for at, taken in self._taken.items() if at < done
        }  # it may be read again from the beginning
        half = min(self._taken, key=lambda at: abs(at - done / 2), default=0)
        now = (seconds - self._taken.get(half, 0.0)) / (done - half)  # of a token, in the middle of the second half
        before = self._taken[half] / half if half else now
        self._taken[done] = seconds
        growth = max(0.0, now - before) / (done / 2)  # from the middle of one half to that of the other
        return (total - done) * (now + growth * (total - half) / 2)
