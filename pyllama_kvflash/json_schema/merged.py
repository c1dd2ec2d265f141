"""Schemas that must all be met, as one shape for each type: numbers, strings and arrays."""

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from pyllama_kvflash.json_schema.branches import Branch
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import MAX_COUNT, Place
from pyllama_kvflash.json_schema.numbers import Decimals
from pyllama_kvflash.json_schema.shapes import Array, Key, Number, Shape, Text, Values
from pyllama_kvflash.json_schema.values import bounds, exact, items

FORMATS = ("date", "time", "date-time", "uuid")
MAX_MULTIPLES = 1_000


def having(branch: Branch, keyword: str) -> Iterator[tuple[Place, Any]]:
    """Yield the places of a branch that have a keyword, with its value."""
    return ((place, place.get(keyword)) for place in branch.places if place.has(keyword))


def least(branch: Branch, keyword: str) -> int | None:
    """Return the greatest of the least numbers that a keyword counts; None: there is none."""
    return max((int(value) for _, value in having(branch, keyword)), default=None)


def most(context: Context, branch: Branch, keyword: str) -> int | None:
    """Return the least of the greatest numbers that a keyword counts; None: there is none that can be counted to."""
    found = []
    for place, value in having(branch, keyword):
        if value > MAX_COUNT:
            context.note(place, keyword, f"nothing is counted beyond {MAX_COUNT:,}: leave it out")
        else:
            found.append(int(value))
    return min(found, default=None)


#
# numbers
#


def numbers(context: Context, branch: Branch, *, integer: bool) -> list[Shape]:
    """Return the numbers of a branch."""
    found = [bounds(place.schema) for place in branch.places if isinstance(place.schema, dict)]
    low, low_open = max(((b[0], b[1]) for b in found if b[0] is not None), default=(None, False))
    high, not_open = min(((b[2], not b[3]) for b in found if b[2] is not None), default=(None, True))
    multiples = [(place, exact(value)) for place, value in having(branch, "multipleOf")]
    step: Fraction | None = None
    for _, other in multiples:
        step = other if step is None else _common(step, other)
    if step is not None and (integer or step.denominator == 1):
        integer, step = True, Fraction(step.numerator)  # the integers among the multiples
    if step is not None and step != 1:
        if listed := _multiples(step, low, high, low_open=low_open, high_open=not not_open):
            return [Values(tuple(v for v in listed if not integer or isinstance(v, int)))]
        places = _decimal_places(step)
        if places is None or integer:
            for place, _ in multiples:
                context.note(
                    place, "multipleOf", f"give a range with up to {MAX_MULTIPLES:,} of them, or 1, 0.1, 0.01, ..."
                )
    else:
        places = None
    if integer:
        return _integers(low, high, low_open=low_open, high_open=not not_open)
    shape = Number(False, low, high, low_open, not not_open, places)
    return _decimals(context, branch, shape)


def _common(one: Fraction, other: Fraction) -> Fraction:
    """Return the least number that is a multiple of both."""
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _integers(low: Fraction | None, high: Fraction | None, *, low_open: bool, high_open: bool) -> list[Shape]:
    first = None if low is None else math.ceil(low) + (low_open and low.denominator == 1)
    last = None if high is None else math.floor(high) - (high_open and high.denominator == 1)
    if first is not None and last is not None and first > last:
        return []
    return [Number(True, None if first is None else Fraction(first), None if last is None else Fraction(last))]


def _decimals(context: Context, branch: Branch, shape: Number) -> list[Shape]:
    if not shape.bounded:
        return [shape]
    if shape.low is not None and shape.high is not None and shape.low > shape.high:
        return []
    text = decimals(shape)
    if text is None:
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            for place, _ in having(branch, keyword):
                context.note(place, keyword, "a bound of numbers has at most 15 digits here")
        return [Number(False)]
    return [shape] if text else []


def decimals(shape: Number) -> str | None:
    """Return GBNF for the digits of numbers; None: a bound has too many digits; "": there are no such numbers."""
    how = {"low_open": shape.low_open, "high_open": shape.high_open}
    return Decimals(shape.low, shape.high, places=shape.places, **how).text()


def _multiples(
    step: Fraction, low: Fraction | None, high: Fraction | None, *, low_open: bool, high_open: bool
) -> list[int | float]:
    """Return the multiples in a range; none if there are too many, or they are not numbers of Python."""
    if low is None or high is None:
        return []
    first = math.ceil(low / step) + (low_open and (low / step).denominator == 1)
    last = math.floor(high / step) - (high_open and (high / step).denominator == 1)
    if not 0 <= last - first < MAX_MULTIPLES:
        return []
    found = [i * step for i in range(first, last + 1)]
    res = [int(v) if v.denominator == 1 else float(v) for v in found]
    return res if all(exact(value) == v for value, v in zip(res, found, strict=True)) else []


def _decimal_places(step: Fraction) -> int | None:
    """Return how many digits after the point the multiples have; None: not every such number is one."""
    n = len(str(step.denominator)) - 1
    return n if step == Fraction(1, 10**n) else None


#
# strings
#


def texts(context: Context, branch: Branch) -> list[Shape]:
    """Return the strings of a branch."""
    low, high = least(branch, "minLength") or 0, most(context, branch, "maxLength")
    if high is not None and low > high:
        return []
    pattern = _pattern(context, branch)
    if pattern is not None and (low or high is not None):
        counted = _counted(pattern, low, high)
        if counted == "":
            return []
        if counted is None or not context.has_pattern(counted):
            for keyword in ("minLength", "maxLength"):
                for place, _ in having(branch, keyword):
                    context.note(place, keyword, "a pattern is beside it: put the length in there")
        else:
            pattern = counted
    form = _format(context, branch, beside=pattern is not None or low > 0 or high is not None)
    return [Text(pattern=pattern) if pattern is not None else Text(low, high, None, form)]


def _pattern(context: Context, branch: Branch) -> str | None:
    """Return the one regular expression that is enforced."""
    res = None
    for place, pattern in having(branch, "pattern"):
        if res is not None and pattern != res:
            context.note(place, "pattern", "another pattern is beside it: make one of them")
        elif not context.has_pattern(pattern):
            context.note(
                place, "pattern",
                "no grammar can be made of it: leave out what looks around or back, and repeat at most 2,000 times",
            )  # fmt: skip
        else:
            res = pattern
    return res


def _counted(pattern: str, low: int, high: int | None) -> str | None:
    """Return a regular expression of a pattern's strings of so many characters; "": there are none; None: it is not known."""
    found = re.fullmatch(r"\^(\[(?:\\.|[^\]\\])+\]|\\[dwsDWS]|[a-zA-Z0-9.])([*+])\$", pattern)
    if not found:
        return None
    low = max(low, 1 if found[2] == "+" else 0)
    if high is not None and low > high:
        return ""
    return f"^{found[1]}{{{low},{'' if high is None else high}}}$"


def _format(context: Context, branch: Branch, *, beside: bool) -> str | None:
    res = None
    for place, name in having(branch, "format"):
        if name in FORMATS and not beside and res in {None, name}:
            res = name
        else:
            why = (
                "a pattern, a length or a format is beside it"
                if name in FORMATS
                else f"the format {name[:40]!r} is an annotation"
            )
            context.note(place, "format", why, annotation=True)
    return res


#
# arrays
#


def arrays(context: Context, branch: Branch, key: Key) -> list[Shape]:
    """Return the arrays of a branch. key: of its node."""
    document = context.document
    prefixes: list[Sequence[Place]] = []
    rests: list[list[Place]] = []
    for place in branch.places:
        first, rest = items(place)
        given = place.get(first) if isinstance(place.get(first), list) else []
        prefixes.append([document.child(place, first, i) for i in range(len(given))])
        rests.append(
            [document.child(place, rest)]
            if rest and place.has(rest) and not (rest == "additionalItems" and not given)
            else []
        )
    after = [place for rest in rests for place in rest]
    after += _unevaluated(context, branch, key, after)
    n = max(map(len, prefixes))
    prefix = tuple(
        context.key(p for have, rest in zip(prefixes, rests, strict=True) for p in (have[i : i + 1] or rest))
        for i in range(n)
    )
    low, high = least(branch, "minItems"), most(context, branch, "maxItems")
    if low is None:
        low = n if high is None else min(n, high)
    if high is not None and low > high:
        return []
    _note_arrays(context, branch, high, one=n <= 1 and not after and n > 0)
    closed = n > 0 and not after
    return [Array(prefix, None if closed else context.key(after), low, high)]


def _unevaluated(context: Context, branch: Branch, key: Key, after: list[Place]) -> list[Place]:
    """Return what unevaluatedItems says of further items."""
    res = []
    for place, _ in having(branch, "unevaluatedItems"):
        if not outermost(context, branch, place, key) or any(p.has("contains") for p in branch.places):
            context.note(place, "unevaluatedItems", "what is not evaluated cannot be determined here")
        elif not after:
            res.append(context.document.child(place, "unevaluatedItems"))
    return res


def outermost(context: Context, branch: Branch, place: Place, key: Key) -> bool:
    """Return whether all that a branch says of its values is within one place (or is of their types), and evaluates them."""
    others = [context.document.places[i] for i in key if i != place.index]
    evaluates = not any(p.has("not") or p.has("if") for p in branch.places)
    return (
        evaluates
        and place.index in key
        and all(isinstance(p.schema, dict) and p.schema.keys() <= {"type"} for p in others)
    )


def _note_arrays(context: Context, branch: Branch, high: int | None, *, one: bool) -> None:
    """Note what is not enforced of arrays. one: the schemas allow one item at most."""
    for place, unique in having(branch, "uniqueItems"):
        if unique and not one and (high is None or high > 1):
            context.note(place, "uniqueItems", "items are not compared")
    for place, _ in having(branch, "contains"):
        if place.get("minContains") != 0 or place.has("maxContains"):
            for keyword in {"contains", "minContains", "maxContains"} & place.schema.keys():  # type: ignore[union-attr]
                context.note(place, keyword, "items are not counted by their schema")
