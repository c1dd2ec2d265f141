"""Decide from measured times whether drafting is faster, so that it never stays slower than plain decoding for long.

A drafted step commits the accepted tokens and one more, and takes longer than a plain step. Its worth is (tokens
committed x seconds of a plain step) / seconds of a drafted step, all three as moving averages. The plain step right
after a drafted one takes longer, because the graph changes; the extra time is charged to drafting.
"""

import math

_TIMES, _TOKENS = 0.2, 0.1  # weight of the newest step in an average; committed tokens vary more than times
_SPIKE = 3  # a step counts as at most this many times the average: timing errors only make times longer
_FIRST = 3  # plain steps before the first draft, to learn what a plain step takes
_REFRESH = 128  # drafted steps until a plain step is measured again
_TRY = 4  # drafted steps of a try, at the start and while closed; then the gate opens or closes
_SUSTAIN = 4  # an open gate closes after so many consecutive drafted steps worth less than the margin
_HOPELESS = 3  # a try ends early if even its fastest time makes it worth less than 1/3 of the margin
_WAIT, _LONGEST_WAIT = 64, 1024  # plain steps between two tries, doubled after each failed try
_MAKE_UP = 64  # plain steps to wait for each step that a try lost: failed tries cost at most 1.6 % of the time
_LONGEST_MAKE_UP = 8192


class Gate:
    """Decides before each step whether to draft. The caller owns the clock, and reports each step.

    margin: the least worth of a drafted step, in plain steps; 0: always draft.
    """

    def __init__(self, margin: float = 1.0) -> None:
        self.margin = margin
        self.n_gated = 0  # steps that were plain because the gate was closed
        self.plain_s: float | None = None
        self.drafted_s: float | None = None
        self.committed: float | None = None
        self._n_plain = 0
        self._n_drafted = 0  # drafted steps since the last try began
        self._spent_s = 0.0  # seconds of these steps
        self._least_s = math.inf  # seconds of the fastest of these
        self._gained = 0  # tokens that these committed
        self._since_plain = 0  # drafted steps since a plain one was measured
        self._switched = False  # whether the previous step was drafted
        self._extra_s = 0.0  # extra seconds of plain steps after drafted ones
        self._below = 0
        self._closed = False
        self._trying = True
        self._wait = 0  # plain steps of the last wait
        self._left = 0  # plain steps until the next try

    @property
    def worth(self) -> float | None:
        """The worth of a drafted step in plain steps; None if unknown."""
        if self.plain_s is None or self.drafted_s is None or self.committed is None:
            return None
        return self.committed * self.plain_s / self.drafted_s if self.drafted_s else math.inf

    @property
    def open(self) -> bool:
        """Whether to draft the next step."""
        if not self.margin:
            return True
        if self._closed:
            return self._trying
        return self._n_plain >= _FIRST and self._since_plain < _REFRESH

    @property
    def closed(self) -> bool:
        """Whether drafting was found to be slower. A closed gate tries again from time to time."""
        return self._closed

    def plain(self, seconds: float) -> None:
        """Record a plain step that took `seconds`."""
        if self._switched and self.plain_s is not None:
            self._extra_s += max(0.0, min(seconds, _SPIKE * self.plain_s) - self.plain_s)
        else:
            self._n_plain += 1
            self._since_plain = 0
            self.plain_s = _time(self.plain_s, seconds, self._n_plain)
        self._switched = False
        if not self._closed or self._trying:
            return
        self.n_gated += 1
        self._left -= 1
        if self._left <= 0:
            self._trying = True
            self._n_drafted, self._spent_s, self._least_s, self._gained = 0, 0.0, math.inf, 0

    def drafted(self, seconds: float, committed: int) -> None:
        """Record a drafted step: its seconds, drafting included, and the tokens it committed, at least one."""
        seconds, self._extra_s, self._switched = seconds + self._extra_s, 0.0, True
        self._n_drafted += 1
        self._since_plain += 1
        self._spent_s += seconds
        self._least_s = min(self._least_s, seconds)
        self._gained += committed
        n = self._n_drafted - 1
        if not n:
            return  # the first step of a try is slow: setup, or the drafter catches up
        # averages restart with each try, because the text has changed
        self.drafted_s = _time(self.drafted_s, seconds, n)
        self.committed = _mean(self.committed, committed, n)
        worth = self.worth
        if worth is None:
            return
        self._below = 0 if worth >= self.margin else self._below + 1
        if self._trying:
            if self._n_drafted >= _TRY or self._hopeless():
                self._decide()
        elif self._below >= _SUSTAIN:
            self._wait = 0
            self._close(_WAIT)

    def _decide(self) -> None:
        if self._below:
            self._wait = min(max(_WAIT, 2 * self._wait), _LONGEST_WAIT)
            self._close(max(self._wait, min(_MAKE_UP * self._lost(), _LONGEST_MAKE_UP)))
        else:
            self._closed = self._trying = False

    def _hopeless(self) -> bool:
        tokens = self._gained / self._n_drafted
        return tokens * (self.plain_s or 0) * _HOPELESS < self.margin * self._least_s

    def _lost(self) -> float:
        """Return the loss of the last try in plain steps, including the drafter's catching up."""
        return self._spent_s / self.plain_s - self._gained if self.plain_s else 0

    def _close(self, wait: float) -> None:
        self._closed, self._trying = True, False
        self._left = round(wait)


def _time(before: float | None, now: float, n: int) -> float:
    """Return the average with the n-th time added; for the first few times, the minimum, since a single time may be slow by chance."""
    if n == 1 or not before:
        return now
    return min(before, now) if n <= _FIRST else before + _TIMES * (min(now, _SPIKE * before) - before)


def _mean(before: float | None, now: float, n: int) -> float:
    """Return the average with the n-th value added."""
    return now if n == 1 or before is None else before + max(1 / n, _TOKENS) * (now - before)
