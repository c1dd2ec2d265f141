"""Ranges of numbers as GBNF: the decimal digits of exactly those numbers that are in them."""

from fractions import Fraction

_LONGEST = 16  # digits of a number that has no bound
_SHARP = 15  # digits that a double keeps


def integers(low: int | None, high: int | None) -> str:
    """Return the integers from low to high, both included. None: no bound, but that of the digits."""
    most = 10 ** max(_LONGEST, *(len(str(abs(bound))) + 1 for bound in (low, high) if bound is not None), 0) - 1
    low, high = -most if low is None else low, most if high is None else high
    parts = []
    if low < 0:
        parts.append(f'"-" ({_counts(max(1, -high), -low)})')
    if high >= 0:
        parts.append(_counts(max(0, low), high))
    return " | ".join(parts)


def _counts(low: int, high: int) -> str:
    """Return the integers from low to high, which are 0 or more."""
    parts = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)  # of as many digits
        parts.append(_between(str(low), str(last)))
        low = last + 1
    return " | ".join(_joined(parts))


def _joined(parts: list[str]) -> list[str]:
    """Return alternatives, with those of 1, 2, 3 ... digits as one."""
    lengths = [i for i, part in enumerate(parts) if part == _any_of_length(i + 1)]
    if len(lengths) < 2:  # noqa: PLR2004 (nothing to join)
        return parts
    first, last = lengths[0], lengths[-1]
    return [*parts[:first], f"[1-9] [0-9]{{{first},{last}}}", *parts[last + 1 :]]


def _any_of_length(n: int) -> str:
    return _between("1" + "0" * (n - 1), "9" * n)


def _between(low: str, high: str) -> str:
    """Return the texts of digits from low to high, which are of one length."""
    if not low:
        return ""
    if low == high:
        return f'"{low}"'
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    first, last = int(low[0]), int(high[0])
    if first == last:
        return f'"{low[0]}" {_group(_between(low[1:], high[1:]))}'.strip()
    parts = []
    if low[1:] != zeros:
        parts.append(f'"{low[0]}" {_group(_between(low[1:], nines))}')
        first += 1
    whole_last = high[1:] == nines
    if first <= (last if whole_last else last - 1):
        parts.append(f"{_digit(first, last if whole_last else last - 1)} {_digits(len(zeros), len(zeros))}".strip())
    if not whole_last:
        parts.append(f'"{high[0]}" {_group(_between(zeros, high[1:]))}')
    return " | ".join(parts)


def _digit(first: int, last: int) -> str:
    return f"[{first}-{last}]" if first < last else f'"{first}"'


def _digits(least: int, most: int) -> str:
    if most == 0:
        return ""
    return "[0-9]" if least == most == 1 else f"[0-9]{{{least}}}" if least == most else f"[0-9]{{{least},{most}}}"


def _group(text: str) -> str:
    return f"({text})" if " | " in text else text


class Decimals:
    """Numbers in a range, written without an exponent.

    low, high: the bounds; None: there is none. low_open, high_open: the bound itself is not in the range. places: the most
    digits after the point; None: as many as a double keeps apart.
    """

    def __init__(
        self, low: Fraction | None, high: Fraction | None, *, low_open: bool, high_open: bool, places: int | None
    ) -> None:
        self._low, self._high, self._low_open, self._high_open = low, high, low_open, high_open
        longest = max((len(str(int(abs(bound)))) for bound in (low, high) if bound is not None), default=1)
        sharp = max(1, _SHARP - longest)
        self._places = sharp if places is None else min(places, sharp)

    def text(self) -> str | None:
        """Return the range as GBNF; None: a bound has more digits than are kept apart."""
        if any(bound is not None and not self._fits(bound) for bound in (self._low, self._high)):
            return None
        parts = []
        if self._low is None or self._low < 0:
            least = max(Fraction(0), -self._high) if self._high is not None else Fraction(0)
            open_ = self._high is not None and self._high <= 0 and self._high_open
            most = None if self._low is None else -self._low
            negative = self._positive(least, open_ or least == 0, most, self._low_open)  # not -0
            parts += [f'"-" ({negative})'] if negative else []
        if self._high is None or self._high >= 0:
            least = max(Fraction(0), self._low) if self._low is not None else Fraction(0)
            open_ = self._low is not None and self._low >= 0 and self._low_open
            positive = self._positive(least, open_, self._high, self._high_open)
            parts += [positive] if positive else []
        return " | ".join(parts)

    def _fits(self, bound: Fraction) -> bool:
        return bool((bound * 10**self._places).denominator == 1 and abs(bound) < 10**_SHARP)

    def _split(self, number: Fraction) -> tuple[int, str]:
        """Return a number's integer, and its digits after the point."""
        whole = int(number)
        return whole, str(int((number - whole) * 10**self._places)).zfill(self._places).rstrip("0")

    def _positive(self, low: Fraction, low_open: bool, high: Fraction | None, high_open: bool) -> str:  # noqa: FBT001
        """Return the numbers between two bounds, which are 0 or more; "": there are none."""
        whole, after = self._split(low)
        if high is None:
            parts = [
                self._number(whole, self._above(after, low_open)),
                f"({integers(whole + 1, None)}) {self._rest()}".strip(),
            ]
            return " | ".join(filter(None, parts))
        top, top_after = self._split(high)
        if whole == top:
            return self._number(whole, self._within(after, low_open, top_after, high_open)) if low <= high else ""
        parts = [self._number(whole, self._above(after, low_open))]
        if whole + 1 < top:
            parts.append(f"({integers(whole + 1, top - 1)}) {self._rest()}".strip())
        parts.append(self._number(top, self._below(top_after, high_open)))
        return " | ".join(filter(None, parts))

    def _rest(self) -> str:
        return f'("." {_digits(1, self._places)})?' if self._places else ""

    def _number(self, whole: int, options: list[str]) -> str:
        """Return an integer with what may be after it, each "" (nothing) or digits; "": none of them can be."""
        digits = [option for option in options if option]
        if not digits:
            return f'"{whole}"' if options else ""
        return f'"{whole}" ("." ({" | ".join(digits)})){"?" if "" in options else ""}'

    #
    # digits after the point: "" stands for none of them
    #

    def _above(self, digits: str, open_: bool, left: int | None = None) -> list[str]:  # noqa: FBT001
        """Return digits of at least (open: above) these, with `left` at most."""
        left = self._places if left is None else left
        if not digits:
            if not open_:
                return ["", _digits(1, left)] if left else [""]
            if not left:
                return []
            return [
                f"[1-9] {_digits(0, left - 1)}".strip(),
                *filter(None, [self._then('"0"', self._above("", open_, left - 1))]),
            ]
        first = int(digits[0])
        res = [self._then(f'"{first}"', self._above(digits[1:], open_, left - 1))]
        if first < 9:  # noqa: PLR2004 (a digit)
            res.append(f"{_digit(first + 1, 9)} {_digits(0, left - 1)}".strip())
        return [part for part in res if part]

    def _below(self, digits: str, open_: bool, left: int | None = None) -> list[str]:  # noqa: FBT001
        """Return digits of at most (open: below) these."""
        left = self._places if left is None else left
        if not digits:
            return [] if open_ else ["", f'"0"{{1,{left}}}'] if left else [""]
        first = int(digits[0])
        res = ["", self._then(f'"{first}"', self._below(digits[1:], open_, left - 1))]
        if first > 0:
            res.append(f"{_digit(0, first - 1)} {_digits(0, left - 1)}".strip())
        return [part for i, part in enumerate(res) if part or i == 0]

    def _within(self, low: str, low_open: bool, high: str, high_open: bool, left: int | None = None) -> list[str]:  # noqa: FBT001
        """Return digits from low to high."""
        left = self._places if left is None else left
        if not low and not low_open:
            return self._below(high, high_open, left)
        if low == high:
            return [] if low_open or high_open else self._exactly(low, left)
        if not high or (low and low[0] > high[0]):
            return []
        first, last = int(low[0]) if low else 0, int(high[0])
        if first == last:
            found = self._then(f'"{first}"', self._within(low[1:], low_open, high[1:], high_open, left - 1))
            return [found] if found else []
        res = [
            self._then(f'"{first}"', self._above(low[1:], low_open, left - 1)),
            f"{_digit(first + 1, last - 1)} {_digits(0, left - 1)}".strip() if first + 1 < last else "",
            self._then(f'"{last}"', self._below(high[1:], high_open, left - 1)),
        ]
        return [part for part in res if part]

    @staticmethod
    def _exactly(digits: str, left: int) -> list[str]:
        zeros = left - len(digits)
        more = f' "0"{{0,{zeros}}}' if zeros else ""
        return [f'"{digits}"{more}'] if digits else ["", f'"0"{{1,{left}}}'] if left else [""]

    @staticmethod
    def _then(first: str, options: list[str]) -> str:
        """Return a digit with what may come after it; "": nothing can."""
        if not options:
            return ""
        digits = [option for option in options if option]
        if not digits:
            return first
        return f"{first} ({' | '.join(digits)}){'?' if '' in options else ''}"
