"""The shapes of a branch: its schemas merged into one shape for each type."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import inf

from pyllama_kvflash.json_schema import languages, patterns
from pyllama_kvflash.json_schema.branches import Branch, Branches
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import MAX_COUNT, Place
from pyllama_kvflash.json_schema.formats import FORMATS
from pyllama_kvflash.json_schema.languages import ALL, ANYTHING, NOTHING, Chars, Language
from pyllama_kvflash.json_schema.numbers import SHARP, digits
from pyllama_kvflash.json_schema.shapes import Array, Key, Number, Object, Other, Property, Shape, Text, Values
from pyllama_kvflash.json_schema.values import Interval, Unsure, exact, listed, text_of

MAX_MULTIPLES = 1_000
MAX_PATTERNS = 4  # of property names: each combination of them is looked at
MAX_COUNTED = 1_000  # optional properties times the number of properties that are counted before each

TOO_LARGE = f"with what is beside it, its grammar needs more than {languages.MAX_STATES:,} states"


def _least(branch: Branch, keyword: str) -> int | None:
    """Return the greatest value of a keyword that sets a lower bound (minItems); None if no place has the keyword."""
    return max((int(value) for _, value in branch.having(keyword)), default=None)


def _most(context: Context, branch: Branch, keyword: str) -> float:
    """Return the least value of a keyword that sets an upper bound (maxItems); inf if there is none. Excessive values are noted."""
    for place, value in branch.having(keyword):
        if value > MAX_COUNT:
            context.note(place, keyword, f"nothing is counted beyond {MAX_COUNT:,}: leave it out")
    return min((int(value) for _, value in branch.having(keyword) if value <= MAX_COUNT), default=inf)


#
# numbers
#


def numbers(context: Context, branch: Branch, *, integer: bool) -> list[Shape]:
    """Return the shapes of a branch's numbers. integer: only those without a fraction."""
    within = Interval.of(branch.places)
    steps = [exact(value) for _, value in branch.having("multipleOf")]
    step = Fraction(math.lcm(*(s.numerator for s in steps)), math.gcd(*(s.denominator for s in steps)) or 1)
    if steps and (integer or step.denominator == 1):
        integer, step = True, Fraction(step.numerator)  # the integers among the multiples
    places = 0 if integer else SHARP
    if step != 1:
        found = _multiples(step, within)
        if found is not None:
            return [Values(tuple(map(text_of, found)))]
        n = len(str(step.denominator)) - 1
        if not integer and step == Fraction(1, 10**n):
            places = n
        else:
            why = f"give a range with up to {MAX_MULTIPLES:,} of them, or 1, 0.1, 0.01, ..."
            context.note_all(branch, ("multipleOf",), why)
    if not integer:
        within = _short(context, branch, within)
        if within == Interval() and not steps:
            return [Number(integer=False)]
        longest = max(len(str(abs(math.trunc(bound)))) for bound in (within.low or 0, within.high or 0))
        places = min(places, max(1, SHARP - longest))
    language = digits(*within.multiples(Fraction(1, 10**places)), places)
    return [] if language == NOTHING else [Number(integer, language)]


def _short(context: Context, branch: Branch, within: Interval) -> Interval:
    """Drop bounds that have more digits before the point than a double keeps, with a note. Returns the range that remains."""
    why = f"a bound of numbers has at most {SHARP} digits before the point here"
    if within.low is not None and abs(within.low) >= 10**SHARP:
        context.note_all(branch, ("minimum", "exclusiveMinimum"), why)
        within = replace(within, low=None, low_open=False)
    if within.high is not None and abs(within.high) >= 10**SHARP:
        context.note_all(branch, ("maximum", "exclusiveMaximum"), why)
        within = replace(within, high=None, high_open=False)
    return within


def _multiples(step: Fraction, within: Interval) -> tuple[int | float, ...] | None:
    """Return the multiples of a step in a range; None if there are too many, or if Python's floats cannot hold one of them exactly."""
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
    """Return the shapes of a branch's strings."""
    res: Language = ANYTHING
    for place, keyword, language in _languages(context, branch):
        more = languages.both(res, language)
        if context.has_grammar(more):
            res = more
        else:
            context.note(place, keyword, TOO_LARGE, annotation=keyword == "format")
    low, high = _least(branch, "minLength") or 0, _most(context, branch, "maxLength")
    for left_out, at_least, at_most in (
        ((), low, high),
        (("maxLength",), low, inf),
        (("minLength", "maxLength"), 0, inf),
    ):
        counted = _counted(res, at_least, at_most)
        if context.has_grammar(counted):
            context.note_all(branch, left_out, TOO_LARGE)
            return [] if languages.is_empty(counted) else [Text(counted)]
    return [Text(res)]


def _languages(context: Context, branch: Branch) -> Iterator[tuple[Place, str, Language]]:
    """Yield the language of each pattern and format of a branch, with its place and keyword. Those without a language are noted."""
    for place, pattern in branch.having("pattern"):
        if (found := _language(context, place, "pattern", pattern)) is not None:
            yield place, "pattern", found
    for place, name in branch.having("format"):
        if name in FORMATS:
            yield place, "format", patterns.language(FORMATS[name])
        else:
            context.note(place, "format", f"the format {name[:40]!r} is an annotation", annotation=True)


def _language(context: Context, place: Place, keyword: str, pattern: str) -> Language | None:
    """Return the language of a regular expression; None, with a note, if no grammar can be made of it."""
    try:
        return patterns.language(pattern)
    except patterns.PatternError as err:
        context.note(place, keyword, f"no grammar can be made of it: {err}")
        return None


def _counted(language: Language, low: int, high: float) -> Language:
    """Return the texts of a language that are `low` to `high` characters long."""
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
    """Return the shapes of a branch's arrays. key: the key that the branch belongs to."""
    document = context.document
    firsts: list[Sequence[Place]] = []
    rests: list[Sequence[Place]] = []
    for place in branch.places:
        older = isinstance(place.get("items"), list)  # before 2020-12
        first, rest = ("items", "additionalItems") if older else ("prefixItems", "items")
        firsts.append(document.children(place, first))
        rests.append([document.child(place, rest)] if place.has(rest) and (firsts[-1] or rest == "items") else [])
    unsaid = _unevaluated(context, branch, "unevaluatedItems", key)
    after = [place for rest in rests for place in rest] or unsaid
    n = max(map(len, firsts))
    prefix = tuple(
        context.key(p for have, rest in zip(firsts, rests, strict=True) for p in (have[i : i + 1] or rest))
        for i in range(n)
    )
    low, high = _least(branch, "minItems"), _most(context, branch, "maxItems")
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


def _unevaluated(context: Context, branch: Branch, keyword: str, key: Key) -> list[Place]:
    """Return the schemas of unevaluatedItems or unevaluatedProperties, which apply to what nothing else evaluates. This is known only if
    no other place has keywords for the value besides `type`, and none has `not`, `if` or `contains`. Otherwise the keyword is noted.
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


#
# objects
#

_Others = list[tuple[Language, list[Place]]]
"""The properties that a schema does not name: the language of their names, and the schemas of their values."""


def objects(context: Context, branch: Branch, key: Key) -> list[Shape]:
    """Return the shapes of a branch's objects. key: the key that the branch belongs to."""
    required = {n: None for _, needed in branch.having("required") if isinstance(needed, list) for n in needed}
    unsaid = _unevaluated(context, branch, "unevaluatedProperties", key)
    names = dict.fromkeys(n for place in branch.places for n in place.get("properties", {})) | required
    others = _others(context, branch, unsaid)
    called = _called(context, branch) if others else ANYTHING
    allowed = [name for name in names if _allowed(context, branch, name)]
    if not required.keys() <= set(allowed):
        return []
    properties = []
    for name in allowed:
        patterned = branch.having("patternProperties")
        matching = {p for place, found in patterned for p in found if _may_match(context, name, place, p)}
        values = _of(context, branch, name, matching) or unsaid
        properties.append(Property(name, context.key(values), name in required))
    more = tuple(_open(context, branch, others, called, names))
    return [_limited(context, branch, Object(tuple(properties), more))]


def _of(context: Context, branch: Branch, name: str | None, matching: Collection[str]) -> list[Place]:
    """Return the schemas of a property's value. name: None if the schema does not name the property. matching: patterns it matches."""
    child, res = context.document.child, []
    for place in branch.places:
        found = [child(place, "properties", name)] if name is not None and name in place.get("properties", {}) else []
        found += [child(place, "patternProperties", p) for p in place.get("patternProperties", {}) if p in matching]
        if not found and place.has("additionalProperties"):
            found = [child(place, "additionalProperties")]
        res += found
    return res


def _may_match(context: Context, name: str, place: Place, pattern: str) -> bool:
    """Return whether a property's name matches a pattern of a place. If that is unknown, note it and return True."""
    try:
        return context.checker.matches(name, place, "patternProperties", pattern)
    except Unsure:
        why = "whether the name of a property matches cannot be determined: the property keeps to it, too"
        context.note(place, "patternProperties", why)
        return True


def _allowed(context: Context, branch: Branch, name: str) -> bool:
    """Return whether propertyNames allows a name."""
    return all(
        context.meets(name, context.document.child(place, "propertyNames"))
        for place, _ in branch.having("propertyNames")
    )


def _others(context: Context, branch: Branch, unsaid: list[Place]) -> _Others:
    """Return the properties that the branch does not name. With `properties` or `patternProperties`, only those with a schema."""
    given = {p: place for place, found in branch.having("patternProperties") for p in found}
    if len(given) > MAX_PATTERNS:
        context.note_all(branch, ("patternProperties",), f"there are more than {MAX_PATTERNS} patterns")
        return [(ANYTHING, [])]
    found = {p: one for p, place in given.items() if (one := _language(context, place, "patternProperties", p))}
    if len(found) < len(given):
        return [(ANYTHING, [])]
    closed = bool(given) or any("\0" not in place.path for place, _ in branch.having("properties"))
    res: _Others = []
    for matched in product((True, False), repeat=len(found)):
        inside = {p for p, is_matched in zip(found, matched, strict=True) if is_matched}
        names = [language if p in inside else languages.other(language) for p, language in found.items()]
        values = _of(context, branch, None, inside) or unsaid
        if (values or not closed) and all(place.schema is not False for place in values):
            res.append((languages.both(*names), values))
    return res


def _called(context: Context, branch: Branch) -> Language:
    """Return the names that propertyNames allows."""
    given = [context.document.child(place, "propertyNames") for place, _ in branch.having("propertyNames")]
    res: list[Language] = []
    for one in Branches(context.document, context.checker).of(given):
        if one.left:
            context.note_all(branch, ("propertyNames",), "which names it leaves cannot be determined")
            return ANYTHING
        lists = [values for place in one.places for values in listed(place)]
        if lists:
            res += [languages.text(v) for v in lists[0] if isinstance(v, str) and _allowed(context, branch, v)]
        elif "string" in one.kinds:
            res += [shape.language for shape in texts(context, one) if isinstance(shape, Text)]
    return languages.either(*res)


def _open(
    context: Context, branch: Branch, others: _Others, called: Language, names: dict[str, None]
) -> Iterator[Other]:
    """Yield `others` without the names in the branch. called: the names that propertyNames allows. names: the names in the branch."""
    named = languages.other(languages.either(*map(languages.text, names)))
    for language, values in others:
        found = languages.both(language, called, named)
        if not context.has_grammar(found):
            why = f"there are no properties but those of the schema: {TOO_LARGE}"
            keywords = ("patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties")
            place, keyword = next((p, k) for k in (*keywords, "properties", "required") for p, _ in branch.having(k))
            context.note(place, keyword, why)
        elif not languages.is_empty(found):
            yield Other(found, context.key(values))


def _limited(context: Context, branch: Branch, shape: Object) -> Object:
    """Return an object shape, limited to the numbers of properties that minProperties and maxProperties allow."""
    low, high = _least(branch, "minProperties") or 0, _most(context, branch, "maxProperties")
    n_required = sum(p.required for p in shape.properties)
    n_optional = len(shape.properties) - n_required
    if not shape.others and high >= len(shape.properties):
        high = inf
    counted = max(low - n_required, 0 if high == inf else high - n_required)
    if n_optional * min(n_optional, counted) > MAX_COUNTED:
        why = f"it has {n_optional} optional properties to count"
        context.note_all(branch, ("minProperties", "maxProperties"), why)
        return shape
    if shape.others and low - n_required > 1:
        context.note_all(branch, ("minProperties",), "a name may come twice")
    return replace(shape, low=low, high=high)
