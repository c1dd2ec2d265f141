"""Whether drafting pays: measured while it runs, so that it is never slower than plain decoding for long.

A drafted step commits the tokens of its draft that were right and one more, and takes longer than a plain one. What it is
worth is (tokens committed x seconds of a plain step) / seconds of a drafted step, all three as moving averages.
"""

_SMOOTH = 0.2  # weight of the newest step in an average
_FIRST = 3  # plain steps before the first draft: nothing else tells what a plain step takes
_REFRESH = 128  # drafted steps after which a plain one is taken, for the same reason
_PROBE = 3  # drafted steps that a closed gate tries
_WAIT, _LONGEST_WAIT = 64, 1024  # plain steps between two tries: twice as many after each in vain


class Gate:
    """Says before each step whether to draft. margin: what a draft must be worth, 0: the gate is always open.

    sustain: drafted steps in a row that are worth less before it closes. The caller has the clock, and reports each step.
    """

    def __init__(self, margin: float = 1.0, sustain: int = 4) -> None:
        self.margin = margin
        self.sustain = sustain
        self.n_gated = 0  # plain steps that would have been drafted but for the gate
        self.plain_s: float | None = None
        self.drafted_s: float | None = None
        self.committed: float | None = None
        self._n_plain = 0
        self._n_drafted = 0
        self._since_plain = 0
        self._below = 0
        self._closed = False
        self._wait = _WAIT
        self._left = 0  # plain steps until the next try, or drafted ones of this one
        self._trying = False

    @property
    def worth(self) -> float | None:
        """Of a drafted step, in plain ones; None: not known yet."""
        if self.plain_s is None or self.drafted_s is None or self.committed is None:
            return None
        return self.committed * self.plain_s / self.drafted_s if self.drafted_s else None

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
        self._n_plain += 1
        self._since_plain = 0
        self.plain_s = _average(self.plain_s, seconds)
        if not self._closed or self._trying:
            return
        self.n_gated += 1
        self._left -= 1
        if self._left <= 0:
            self._try()

    def drafted(self, seconds: float, committed: int) -> None:
        """A drafted step took so long, the draft included, and committed so many tokens, at least one."""
        self._n_drafted += 1
        self._since_plain += 1
        if self._n_drafted == 1:
            return  # it sets things up
        self.drafted_s = _average(self.drafted_s, seconds)
        self.committed = _average(self.committed, committed)
        worth = self.worth
        if not self.margin or worth is None:
            return
        self._below = 0 if worth >= self.margin else self._below + 1
        if self._trying:
            self._left -= 1
            if self._left <= 0:
                self._decide()
        elif self._below >= self.sustain:
            self._close()

    def _close(self) -> None:
        self._closed, self._trying, self._below = True, False, 0
        self._left = self._wait

    def _try(self) -> None:
        """Afresh: what was measured before it closed is of another text."""
        self._trying, self._left = True, _PROBE
        self.drafted_s = self.committed = None

    def _decide(self) -> None:
        if self._below:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._close()
        else:
            self._closed = self._trying = False
            self._wait = _WAIT


def _average(before: float | None, now: float) -> float:
    return now if before is None else (1 - _SMOOTH) * before + _SMOOTH * now
