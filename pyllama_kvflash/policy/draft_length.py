"""Choose how many tokens to draft before a check: the number with the highest expected speed, possibly 0."""

from collections.abc import Sequence

from pyllama_kvflash.policy.gate import Gate
from pyllama_kvflash.policy.lookahead import Length, Lookahead


class DraftLength:
    """Chooses the length of the next draft. The caller owns the clock, and reports each step.

    A gate decides whether to draft at all. A gate suits a drafter that may never be right, because failed tries cost next to
    nothing. The lookahead chooses among the lengths by measurement. Without a gate, 0 may be one of the lengths.
    """

    def __init__(self, lengths: Sequence[int], gate: Gate | None = None) -> None:
        """lengths: choices, ascending; a single length is not measured. gate: if None, always draft."""
        self.gate = gate
        self._longest = lengths[-1]
        self._lookahead = Lookahead(lengths) if len(lengths) > 1 else None

    @property
    def n(self) -> int:
        """Tokens of the next draft; 0: decode plainly."""
        if self.gate is not None and not self.gate.open:
            return 0
        return self._lookahead.n if self._lookahead else self._longest

    @property
    def next(self) -> Length:
        """Where the next draft ends. Its `least` is compared with all_right()."""
        return self._lookahead.next if self._lookahead else Length(self._longest)

    def all_right(self, tops: Sequence[float]) -> float:
        """Return the probability that all tokens of a draft are accepted. tops: the drafter's probability of each token."""
        return self._lookahead.all_right(tops) if self._lookahead else 1.0

    def plain(self, seconds: float) -> bool:
        """Record a step without a draft. Returns whether the gate prevented the draft."""
        if self.gate is None:
            return False
        before = self.gate.n_gated
        self.gate.plain(seconds)
        return self.gate.n_gated > before

    def beside(self, n_drafted: int) -> None:
        """Record that n_drafted tokens were drafted during a check."""
        if self._lookahead:
            self._lookahead.beside(n_drafted)

    def checked(
        self, n_drafted: int, n_right: int, draft_s: float, check_s: float, width: int = 0, tops: Sequence[float] = ()
    ) -> None:
        """Record a check that accepted n_right of n_drafted tokens.

        draft_s: seconds of drafting; 0: the tokens were drafted during the last check. check_s: seconds of the check. width: tokens of
        its batch; 0: n_drafted + 1. tops: as for all_right(); (): unknown.
        """
        if self._lookahead:
            self._lookahead.checked(n_drafted, n_right, draft_s, check_s, width, tops)
        if self.gate:
            self.gate.drafted(draft_s + check_s, n_right + 1)
