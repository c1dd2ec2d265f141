"""Ranges of numbers as languages: the decimal texts of exactly the numbers in a range."""

from pyllama_kvflash.json_schema.languages import EMPTY, Chars, Language, either, many, seq, text

LONGEST = 16  # digits before the point, at most, where there is no bound
SHARP = 15  # decimal digits that a double keeps

_ZERO = ord("0")


def digits(first: int | None, last: int | None, places: int) -> Language:
    """Return the texts of the numbers from `first` to `last`, without exponents. places: the most digits after the point.

    first, last: in units of 10**-places; None: only the number of digits is bounded.
    """
    most = (
        10 ** (places + max(LONGEST, *(len(str(abs(n))) - places + 1 for n in (first, last) if n is not None), 0)) - 1
    )
    low, high = -most if first is None else first, most if last is None else last
    negative = _positive(max(1, -high), -low, places)  # not -0
    return either(seq(text("-"), negative), _positive(max(0, low), high, places))


def _positive(low: int, high: int, places: int) -> Language:
    """Return the texts of the numbers from `low` to `high`. `low` must not be negative."""
    options = []
    while low <= high:
        n = max(len(str(low)), places + 1)
        n_last = len(str(high + 1)) - 1  # digits of the longest numbers of which all are in the range
        if low == 10 ** (n - 1) and n_last >= n:
            options.append(seq(_digit(1, 9), _digits(n - 1 - places, n_last - 1 - places), _fraction(places)))
            low = 10**n_last
        else:
            last = min(high, 10**n - 1)
            options.append(_between(str(low).zfill(n), str(last).zfill(n), places))
            low = last + 1
    return either(*options)


def _between(low: str, high: str, places: int) -> Language:
    """Return the texts of the numbers from `low` to `high`, which have equally many digits. The last `places` digits follow the point;
    final zeros there are optional.
    """
    n = len(low)
    if low == "0" * n and high == "9" * n:
        if n < places or n == 0:
            return _digits(0, n)
        return seq(_digits(n - places, n - places), _fraction(places))
    zeros, nines = "0" * (n - 1), "9" * (n - 1)
    first, last = int(low[0]), int(high[0])
    if first == last:
        options = [(first, last, low[1:], high[1:])]
    else:
        options = [(first, first, low[1:], nines), (first + 1, last - 1, zeros, nines), (last, last, zeros, high[1:])]
    res = either(*(seq(_digit(a, b), _between(more, most, places)) for a, b, more, most in options if a <= b))
    if n == places:
        res = seq(text("."), res)
    return either(EMPTY, res) if n <= places and low == "0" * n else res


def _digit(first: int, last: int) -> Language:
    return Chars(((_ZERO + first, _ZERO + last),))


def _digits(least: int, most: int) -> Language:
    return many(_digit(0, 9), least, most)


def _fraction(places: int) -> Language:
    """Return the texts of an optional fraction: the point and up to `places` digits."""
    return either(EMPTY, seq(text("."), _digits(1, places))) if places else EMPTY
