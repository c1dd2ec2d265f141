"""Schemas that must all be met, as one shape for each type: numbers, strings and arrays."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pyllama_kvflash.json_schema import languages, patterns
from pyllama_kvflash.json_schema.branches import Branch
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import MAX_COUNT, Place
from pyllama_kvflash.json_schema.formats import FORMATS
from pyllama_kvflash.json_schema.languages import NOTHING, Language
from pyllama_kvflash.json_schema.numbers import Decimals
from pyllama_kvflash.json_schema.shapes import Array, Key, Number, Shape, Text, Values
from pyllama_kvflash.json_schema.values import bounds, exact, items

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
        listed = _multiples(step, low, high, low_open=low_open, high_open=not not_open)
        if listed is not None:
            values = tuple(v for v in listed if not integer or isinstance(v, int))
            return [Values(values)] if values else []
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
    if step is not None and places is not None:  # bounds that are multiples have few digits
        if low is not None and (low / step).denominator > 1:
            low, low_open = math.ceil(low / step) * step, False
        if high is not None and (high / step).denominator > 1:
            high, not_open = math.floor(high / step) * step, True
    return _decimals(context, branch, Number(False, low, high, low_open, not not_open, places))


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
    for names, less in (
        ((), shape),
        (("maximum",), replace(shape, high=None)),
        (("minimum",), replace(shape, low=None)),
        (("minimum", "maximum"), replace(shape, low=None, high=None)),
    ):
        if (text := decimals(less)) is not None:
            for keyword in (k for name in names for k in (name, f"exclusive{name.capitalize()}")):
                for place, _ in having(branch, keyword):
                    context.note(place, keyword, "a bound of numbers has at most 15 digits here")
            return [less] if text else []
    return [Number(False)]


def decimals(shape: Number) -> str | None:
    """Return GBNF for the digits of numbers; None: a bound has too many digits; "": there are no such numbers."""
    how = {"low_open": shape.low_open, "high_open": shape.high_open}
    return Decimals(shape.low, shape.high, places=shape.places, **how).text()


def _multiples(
    step: Fraction, low: Fraction | None, high: Fraction | None, *, low_open: bool, high_open: bool
) -> list[int | float] | None:
    """Return the multiples in a range; None if there are too many, or they are not numbers of Python."""
    if low is None or high is None:
        return None
    first = math.ceil(low / step) + (low_open and (low / step).denominator == 1)
    last = math.floor(high / step) - (high_open and (high / step).denominator == 1)
    if last - first >= MAX_MULTIPLES:
        return None
    found = [i * step for i in range(first, last + 1)]
    res = [int(v) if v.denominator == 1 else float(v) for v in found]
    return res if all(exact(value) == v for value, v in zip(res, found, strict=True)) else None


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
    res = None
    for place, keyword, language in _languages(context, branch):
        more = language if res is None else languages.both(res, language)
        if context.has_grammar(more):
            res = more
        else:
            context.note(place, keyword, TOO_LARGE, annotation=keyword == "format")
    if res is None:
        return [Text(low, high)]
    for names, least_, most_ in (((), low, high), (("maxLength",), low, None), (("minLength", "maxLength"), 0, None)):
        counted = _counted(res, least_, most_)
        if context.has_grammar(counted):
            for keyword in names:
                for place, _ in having(branch, keyword):
                    context.note(place, keyword, TOO_LARGE)
            res = counted
            break
    return [] if languages.is_empty(res) else [Text(language=res)]


TOO_LARGE = f"with what is beside it, its grammar needs more than {languages.MAX_STATES:,} states"


def language_of(context: Context, place: Place, keyword: str, pattern: str) -> Language | None:
    """Return the language of a regular expression; None, with a note: there is none."""
    try:
        return patterns.language(pattern)
    except patterns.PatternError as err:
        context.note(place, keyword, f"no grammar can be made of it: {err}")
        return None


def _languages(context: Context, branch: Branch) -> Iterator[tuple[Place, str, Language]]:
    for place, pattern in having(branch, "pattern"):
        if (found := language_of(context, place, "pattern", pattern)) is not None:
            yield place, "pattern", found
    for place, name in having(branch, "format"):
        if name in FORMATS:
            yield place, "format", patterns.language(FORMATS[name])
        else:
            context.note(place, "format", f"the format {name[:40]!r} is an annotation", annotation=True)


def _counted(language: Language, low: int, high: int | None) -> Language:
    """Return the texts of a language that have so many characters."""
    least, most = languages.lengths(language)
    if least >= low and (high is None or (most is not None and most <= high)):
        return language
    if isinstance(language, languages.Many) and languages.lengths(language.part) == (1, 1):
        low, highs = max(low, language.low), [n for n in (high, language.high) if n is not None]
        high = min(highs, default=None)
        return NOTHING if high is not None and low > high else languages.many(language.part, low, high)
    if low == 1 and high is None:
        return languages.nonempty(language)
    return languages.both(language, Text(low, high).texts)


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
