"""Schemas that must all be met, as one shape for each type: numbers, strings and arrays."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from math import inf

from pyllama_kvflash.json_schema import languages, patterns
from pyllama_kvflash.json_schema.branches import Branch
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import MAX_COUNT, Place
from pyllama_kvflash.json_schema.formats import FORMATS
from pyllama_kvflash.json_schema.languages import ALL, ANYTHING, NOTHING, Chars, Language
from pyllama_kvflash.json_schema.numbers import SHARP, digits
from pyllama_kvflash.json_schema.shapes import Array, Key, Number, Shape, Text, Values
from pyllama_kvflash.json_schema.values import Interval, exact, items

MAX_MULTIPLES = 1_000


def least(branch: Branch, keyword: str) -> int | None:
    """Return the greatest value of a keyword that is a lower bound (minItems); None: no place has it."""
    return max((int(value) for _, value in branch.having(keyword)), default=None)


def most(context: Context, branch: Branch, keyword: str) -> float:
    """Return the least value of a keyword that is an upper bound (maxItems); inf: no place has it, but for values that are too large,
    which are noted.
    """
    for place, value in branch.having(keyword):
        if value > MAX_COUNT:
            context.note(place, keyword, f"nothing is counted beyond {MAX_COUNT:,}: leave it out")
    return min((int(value) for _, value in branch.having(keyword) if value <= MAX_COUNT), default=inf)


#
# numbers
#


def numbers(context: Context, branch: Branch, *, integer: bool) -> list[Shape]:
    """Return numbers a branch allows."""
    within = Interval.of(*(place.schema for place in branch.places))
    step = reduce(_common, (exact(value) for _, value in branch.having("multipleOf")), None)
    if step is not None and (integer or step.denominator == 1):
        integer, step = True, Fraction(step.numerator)  # the integers among the multiples
    places = 0 if integer else SHARP
    if step is not None and step != 1:
        listed = _multiples(step, within)
        if listed is not None:
            return [Values(listed)]
        n = len(str(step.denominator)) - 1
        if not integer and step == Fraction(1, 10**n):
            places = n
        else:
            why = f"give a range with up to {MAX_MULTIPLES:,} of them, or 1, 0.1, 0.01, ..."
            context.note_all(branch, ("multipleOf",), why)
    if not integer:
        within = _short(context, branch, within)
        if within == Interval() and step is None:
            return [Number(integer=False)]
        longest = max(len(str(abs(math.trunc(bound)))) for bound in (within.low or 0, within.high or 0))
        places = min(places, max(1, SHARP - longest))
    found = digits(*within.multiples(Fraction(1, 10**places)), places)
    return [] if found == NOTHING else [Number(integer, found)]


def _short(context: Context, branch: Branch, within: Interval) -> Interval:
    """Return a range without bounds that have more digits before the point than a double keeps, which are noted."""
    why = f"a bound of numbers has at most {SHARP} digits before the point here"
    if within.low is not None and abs(within.low) >= 10**SHARP:
        context.note_all(branch, ("minimum", "exclusiveMinimum"), why)
        within = replace(within, low=None, low_open=False)
    if within.high is not None and abs(within.high) >= 10**SHARP:
        context.note_all(branch, ("maximum", "exclusiveMaximum"), why)
        within = replace(within, high=None, high_open=False)
    return within


def _common(one: Fraction | None, other: Fraction) -> Fraction:
    """Return the least number that is a multiple of both."""
    if one is None:
        return other
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _multiples(step: Fraction, within: Interval) -> tuple[int | float, ...] | None:
    """Return the multiples in a range; None if there are too many, or some are inexact in Python."""
    first, last = within.multiples(step)
    if first is None or last is None or last - first >= MAX_MULTIPLES:
        return None
    found = [i * step for i in range(first, last + 1)]
    res = tuple(int(v) if v.denominator == 1 else float(v) for v in found)
    return res if all(exact(value) == v for value, v in zip(res, found, strict=True)) else None


#
# strings
#


def texts(context: Context, branch: Branch) -> list[Shape]:
    """Return the strings of a branch."""
    low, high = least(branch, "minLength") or 0, most(context, branch, "maxLength")
    res: Language = ANYTHING
    for place, keyword, language in _languages(context, branch):
        more = languages.both(res, language)
        if context.has_grammar(more):
            res = more
        else:
            context.note(place, keyword, TOO_LARGE, annotation=keyword == "format")
    for left_out, least_, most_ in (
        ((), low, high),
        (("maxLength",), low, inf),
        (("minLength", "maxLength"), 0, inf),
    ):
        counted = _counted(res, least_, most_)
        if context.has_grammar(counted):
            context.note_all(branch, left_out, TOO_LARGE)
            return [] if languages.is_empty(counted) else [Text(counted)]
    return [Text(res)]


TOO_LARGE = f"with what is beside it, its grammar needs more than {languages.MAX_STATES:,} states"


def language_of(context: Context, place: Place, keyword: str, pattern: str) -> Language | None:
    """Return the language of a regular expression; None, with a note: there is none."""
    try:
        return patterns.language(pattern)
    except patterns.PatternError as err:
        context.note(place, keyword, f"no grammar can be made of it: {err}")
        return None


def _languages(context: Context, branch: Branch) -> Iterator[tuple[Place, str, Language]]:
    for place, pattern in branch.having("pattern"):
        if (found := language_of(context, place, "pattern", pattern)) is not None:
            yield place, "pattern", found
    for place, name in branch.having("format"):
        if name in FORMATS:
            yield place, "format", patterns.language(FORMATS[name])
        else:
            context.note(place, "format", f"the format {name[:40]!r} is an annotation", annotation=True)


def _counted(language: Language, low: int, high: float) -> Language:
    """Return the texts of a language that have low to high characters."""
    if low > high:
        return NOTHING
    least, most = languages.lengths(language)
    if least >= low and most <= high:
        return language
    if isinstance(language, languages.Many) and languages.lengths(language.part) == (1, 1):
        low, high = max(low, language.low), min(high, language.high)
        return NOTHING if low > high else languages.many(language.part, low, high)
    if (low, high) == (1, inf):
        return languages.nonempty(language)
    return languages.both(language, languages.many(Chars(ALL), low, high))


#
# arrays
#


def arrays(context: Context, branch: Branch, key: Key) -> list[Shape]:
    """Return the arrays of a branch. key: of its node."""
    document = context.document
    firsts: list[Sequence[Place]] = []
    rests: list[Sequence[Place]] = []
    for place in branch.places:
        first, rest = items(place)
        firsts.append(document.children(place, first))
        rests.append([document.child(place, rest)] if place.has(rest) and (firsts[-1] or rest == "items") else [])
    unsaid = unevaluated(context, branch, "unevaluatedItems", key)
    after = [place for rest in rests for place in rest] or unsaid
    n = max(map(len, firsts))
    prefix = tuple(
        context.key(p for have, rest in zip(firsts, rests, strict=True) for p in (have[i : i + 1] or rest))
        for i in range(n)
    )
    low, high = least(branch, "minItems"), most(context, branch, "maxItems")
    if low is None:
        low = int(min(n, high))
    closed = n > 0 and not after
    for place, unique in branch.having("uniqueItems"):
        if unique and (n if closed else high) > 1:
            context.note(place, "uniqueItems", "items are not compared")
    for place, _ in branch.having("contains"):
        if place.get("minContains") != 0 or place.has("maxContains"):
            for keyword in filter(place.has, ("contains", "minContains", "maxContains")):
                context.note(place, keyword, "items are not counted by their schema")
    return [Array(prefix, None if closed else context.key(after), low, high)]


def unevaluated(context: Context, branch: Branch, keyword: str, key: Key) -> list[Place]:
    """Return what a keyword says of items or properties that nothing else does: where all that a branch says of its values is
    within one place (or is of their types), and evaluates them. key: of the branch's node.
    """
    res = []
    for place, _ in branch.having(keyword):
        others = [context.document.places[i] for i in key if i != place.index]
        alone = place.index in key and all(isinstance(p.schema, dict) and p.schema.keys() <= {"type"} for p in others)
        if alone and not any(p.has(word) for p in branch.places for word in ("not", "if", "contains")):
            res.append(context.document.child(place, keyword))
        else:
            context.note(place, keyword, "what is not evaluated cannot be determined here")
    return res
