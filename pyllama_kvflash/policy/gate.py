"""Whether drafting pays: measured while it runs, so that it is never slower than plain decoding for long.

A drafted step commits the tokens of its draft that were right and one more, and takes longer than a plain one. What it is
worth is (tokens committed x seconds of a plain step) / seconds of a drafted step, all three as moving averages. The plain
step right after a drafted one takes longer, for the graph is another one: that is put down to the drafted ones.
"""

import math

_TIMES, _TOKENS = 0.2, 0.1  # weights of the newest step in an average; how many tokens are right varies more
_SPIKE = 3  # averages that a step counts as at most: a clock errs upwards
_FIRST = 3  # plain steps before the first draft: nothing else tells what a plain step takes
_REFRESH = 128  # drafted steps after which plain ones are taken until one was measured, for the same reason
_TRY = 4  # drafted steps after which it opens or closes, at the start and when it was closed
_HOPELESS = 3  # or sooner, if by the fastest it would be worth less than a third of what it must be
_WAIT, _LONGEST_WAIT = 64, 1024  # plain steps between two tries: twice as many after each in vain
_MAKE_UP = 64  # and as many for each that the last one lost: tries in vain take 1.6 % of the time
_LONGEST_MAKE_UP = 8192


class Gate:
    """Says before each step whether to draft. margin: what a draft must be worth, 0: the gate is always open.

    sustain: drafted steps in a row that are worth less before it closes, once a try has opened it. The caller has the clock,
    and reports each step.
    """

    def __init__(self, margin: float = 1.0, sustain: int = 4) -> None:
        self.margin = margin
        self.sustain = sustain
        self.n_gated = 0  # plain steps that would have been drafted but for the gate
        self.plain_s: float | None = None
        self.drafted_s: float | None = None
        self.committed: float | None = None
        self._n_plain = 0
        self._n_drafted = 0  # since the last try began
        self._spent_s = 0.0  # the seconds that they took
        self._least_s = math.inf  # and the fastest
        self._gained = 0  # and the tokens that they committed
        self._since_plain = 0  # drafted steps since one was measured
        self._switched = False  # the step before was a drafted one
        self._extra_s = 0.0  # what plain steps took longer because of that
        self._below = 0
        self._closed = False
        self._trying = True
        self._wait = 0  # the last one
        self._left = 0  # plain steps until the next try

    @property
    def worth(self) -> float | None:
        """Of a drafted step, in plain ones; None: not known yet."""
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
        """Whether drafting does not pay; a closed gate tries again now and then."""
        return self._closed

    def plain(self, seconds: float) -> None:
        """A plain step took so long."""
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
        """A drafted step took so long, the draft included, and committed so many tokens, at least one."""
        seconds, self._extra_s, self._switched = seconds + self._extra_s, 0.0, True
        self._n_drafted += 1
        self._since_plain += 1
        self._spent_s += seconds
        self._least_s = min(self._least_s, seconds)
        self._gained += committed
        n = self._n_drafted - 1
        if not n:
            return  # it sets things up, or the drafter catches up
        # from the first of a try afresh: what was measured before it closed is of another text
        self.drafted_s = _time(self.drafted_s, seconds, n)
        self.committed = _mean(self.committed, committed, n)
        worth = self.worth
        if worth is None:
            return
        self._below = 0 if worth >= self.margin else self._below + 1
        if self._trying:
            if self._n_drafted >= _TRY or self._hopeless():
                self._decide()
        elif self._below >= self.sustain:
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
        """By the last try, in plain steps, catching up included."""
        return self._spent_s / self.plain_s - self._gained if self.plain_s else 0

    def _close(self, wait: float) -> None:
        self._closed, self._trying = True, False
        self._left = round(wait)


def _time(before: float | None, now: float, n: int) -> float:
    """The average with the n-th: the least of the first few, since any of them may have taken long by chance."""
    if n == 1 or not before:
        return now
    return min(before, now) if n <= _FIRST else before + _TIMES * (min(now, _SPIKE * before) - before)


def _mean(before: float | None, now: float, n: int) -> float:
    """The average with the n-th."""
    return now if n == 1 or before is None else before + max(1 / n, _TOKENS) * (now - before)
