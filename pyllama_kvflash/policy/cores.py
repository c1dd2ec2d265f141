"""Whether threads wait for cores: the threads of a step wait for each other, so beside a busy program fewer of them are faster."""

N_STEPS = 32
"""Steps between two looks at the times."""
_LEAST_S = 1.0  # seconds that threads worked or waited between two looks; what happens in less is chance
_MOST = 0.3  # share of these that they wait: 0.005 on idle cores, 0.2 beside a quarter of a core's work, 0.45 beside a busy one


class CoreWatch:
    """Finds out, once, that threads wait for cores. The caller counts steps, and reads the times when they are due."""

    def __init__(self) -> None:
        self._n_steps = 0
        self._before: tuple[float, float] | None = None
        self.over = False  # nothing more is said

    def due(self) -> bool:
        """Count a step. Returns whether to look at the times now."""
        self._n_steps += 1
        return not self.over and self._n_steps % N_STEPS == 1

    def look(self, times: tuple[float, float] | None, least: float = _LEAST_S) -> float | None:
        """Return the share of their time that threads waited since the look before, the first time that it is large.

        times: seconds that the threads of this process worked, and that they waited for a core, so far; None: not known. least: of both
        together, since the look before.
        """
        if times is None:
            self.over = True
            return None
        if self._before is None:
            self._before = times
            return None
        worked, waited = (now - before for now, before in zip(times, self._before, strict=True))
        if worked < 0 or waited < 0:  # a thread has ended, and its times with it
            self._before = times
            return None
        if worked + waited < least:
            return None
        self._before = times
        share = waited / (worked + waited)
        self.over = share > _MOST
        return share if self.over else None
