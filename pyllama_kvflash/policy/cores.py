"""Detect threads that wait for cores. The threads of a step wait for each other, so beside a busy program fewer threads are faster."""

N_STEPS = 32
"""Steps between two looks at the times."""
_LEAST_S = 1.0  # seconds of work and waiting that a look needs; less is too noisy
# share of waiting above which to warn. Measured: 0.005 on idle cores, 0.2 beside a program that uses a quarter of a core, 0.45 beside
# one that uses a whole core
_MOST = 0.3


class CoreWatch:
    """Detects, once, that threads wait for cores. The caller reads the times after each step for which due() is true."""

    def __init__(self) -> None:
        self._n_steps = 0
        self._before: tuple[float, float] | None = None
        self.over = False  # whether it has nothing more to report

    def due(self) -> bool:
        """Count a step. Returns whether to look at the times now."""
        self._n_steps += 1
        return not self.over and self._n_steps % N_STEPS == 1

    def look(self, times: tuple[float, float] | None, least: float = _LEAST_S) -> float | None:
        """Return the share of time that threads waited since the last look, if it is large, and only once; otherwise None.

        times: total seconds that this process's threads worked, and that they waited for a core; None: unknown. least: with fewer
        seconds of both together since the last look, there is no result yet.
        """
        if times is None:
            self.over = True
            return None
        if self._before is None:
            self._before = times
            return None
        worked, waited = (now - before for now, before in zip(times, self._before, strict=True))
        if worked < 0 or waited < 0:  # a thread has ended, and its times are gone
            self._before = times
            return None
        if worked + waited < least:
            return None
        self._before = times
        share = waited / (worked + waited)
        self.over = share > _MOST
        return share if self.over else None
