"""Exact checks of single values, such as those that a schema lists. Unsure is raised where a check is not possible."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pyllama_kvflash.json_schema import languages, patterns
from pyllama_kvflash.json_schema.document import Document, Place, Schema, is_number
from pyllama_kvflash.json_schema.keywords import DEPENDENT, OF_TYPE, TYPES

_MOST = 1_000  # characters of a text that is matched with a regular expression


class Unsure(Exception):  # noqa: N818 (control flow, not an error)
    """Whether a value meets a schema cannot be determined. place, keyword: what cannot be checked."""

    def __init__(self, place: Place, keyword: str) -> None:
        super().__init__()
        self.place, self.keyword = place, keyword


def frozen(value: Any) -> Any:
    """Return a hashable form of a value that compares as in JSON Schema: 1 equals 1.0, but not `true`."""
    if isinstance(value, dict):
        return "object", frozenset((name, frozen(part)) for name, part in value.items())
    if isinstance(value, list):
        return "array", tuple(map(frozen, value))
    return ("number", exact(value)) if is_number(value) else (type(value).__name__, value)


def exact(number: float) -> Fraction:
    """Return the exact value of a number's JSON text."""
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)


def kind_of(value: Any) -> str:
    """Return the kind of a value: its type, but `fraction` for a number that is not an integer."""
    if is_number(value):
        return "integer" if value == int(value) else "fraction"
    return {bool: "boolean", str: "string", list: "array", dict: "object"}.get(type(value), "null")


def kinds(types: Iterable[str]) -> frozenset[str]:
    """Return the kinds of types. Unlike types, kinds do not overlap."""
    return frozenset(kind for name in types for kind in (("integer", "fraction") if name == "number" else (name,)))


ALL_KINDS = kinds(TYPES)


def allowed(schema: Schema) -> frozenset[str]:
    """Return the kinds that a schema's `type` and `nullable` allow."""
    given = schema.get("type", TYPES) if isinstance(schema, dict) else TYPES
    names = [given] if isinstance(given, str) else given
    return kinds(names) | ({"null"} if isinstance(schema, dict) and schema.get("nullable") is True else set())


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from `low` to `high` (None: no bound). An open bound is itself excluded."""

    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False

    @classmethod
    def of(cls, places: Iterable[Place]) -> "Interval":
        """Return the numbers within the bounds of all places."""
        schemas = [place.keywords for place in places]
        lows = [bound for schema in schemas for bound in _bounds(schema, "minimum", "exclusiveMinimum")]
        highs = [bound for schema in schemas for bound in _bounds(schema, "maximum", "exclusiveMaximum")]
        low = max(lows, default=(None, False))
        high = min(highs, key=lambda bound: (bound[0], not bound[1]), default=(None, False))
        return cls(*low, *high)

    def multiples(self, step: Fraction) -> tuple[int | None, int | None]:
        """Return the first and the last multiple of a step in the interval, counted in steps; None where the interval has no bound."""
        first = last = None
        if self.low is not None:
            first = math.floor(self.low / step) + 1 if self.low_open else math.ceil(self.low / step)
        if self.high is not None:
            last = math.ceil(self.high / step) - 1 if self.high_open else math.floor(self.high / step)
        return first, last

    def __contains__(self, number: Fraction) -> bool:
        """Return whether a number is in the interval."""
        above = self.low is None or number > self.low or (number == self.low and not self.low_open)
        return above and (self.high is None or number < self.high or (number == self.high and not self.high_open))


def _bounds(schema: dict[str, Any], word: str, exclusive: str) -> Iterator[tuple[Fraction, bool]]:
    """Yield the bounds that two keywords set, each with whether it is open. In draft 4, the value of `exclusive` is a boolean."""
    if word in schema:
        yield exact(schema[word]), schema.get(exclusive) is True
    if is_number(schema.get(exclusive)):
        yield exact(schema[exclusive]), True


class Checker:
    """Tells whether values meet the schemas of a document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._lists: dict[int, list[frozenset[Any]]] = {}  # by the index of a place

    def meets(self, value: Any, place: Place) -> bool:
        """Return whether a value meets a schema, whose references must not form a circle. Raises Unsure."""
        self._document.spend(1)
        if isinstance(place.schema, bool):
            return place.schema
        return (
            kind_of(value) in allowed(place.schema)
            and self._listed(value, place)
            and self._together(value, place)
            and self._numbers(value, place)
            and self._text(value, place)
            and self._within(value, place)
        )

    def _listed(self, value: Any, place: Place) -> bool:
        """Return whether a schema's `const` and `enum` allow a value."""
        if place.index not in self._lists:
            self._lists[place.index] = [frozenset(map(frozen, values)) for values in listed(place)]
        return all(frozen(value) in values for values in self._lists[place.index])

    def _together(self, value: Any, place: Place) -> bool:
        """Return whether a value meets a schema's references, and its keywords that combine schemas."""
        if not all(self.meets(value, target) for target in self._document.refs(place)):
            return False
        all_of = [self.meets(value, one) for one in self._document.children(place, "allOf")]
        any_of = [self.meets(value, one) for one in self._document.children(place, "anyOf")]
        one_of = [self.meets(value, one) for one in self._document.children(place, "oneOf")]
        if not all(all_of) or (any_of and not any(any_of)) or (one_of and sum(one_of) != 1):
            return False
        if place.has("not") and self.meets(value, self._document.child(place, "not")):
            return False
        if not place.has("if"):
            return True
        then = "then" if self.meets(value, self._document.child(place, "if")) else "else"
        return not place.has(then) or self.meets(value, self._document.child(place, then))

    @staticmethod
    def _numbers(value: Any, place: Place) -> bool:
        if not is_number(value):
            return True
        step = place.get("multipleOf")
        return exact(value) in Interval.of([place]) and (step is None or (exact(value) / exact(step)).denominator == 1)

    def _text(self, value: Any, place: Place) -> bool:
        if not isinstance(value, str):
            return True
        if not place.get("minLength", 0) <= len(value) <= place.get("maxLength", len(value)):
            return False
        return not place.has("pattern") or self.matches(value, place, "pattern", place.get("pattern"))

    @staticmethod
    def matches(text: str, place: Place, keyword: str, pattern: str) -> bool:
        """Return whether a place's regular expression matches anywhere in a text. Raises Unsure."""
        try:
            language = patterns.language(pattern)
        except patterns.PatternError:
            raise Unsure(place, keyword) from None
        if len(text) > _MOST:
            raise Unsure(place, keyword)
        return languages.has(language, text)

    @staticmethod
    def _within(value: Any, place: Place) -> bool:
        """Return True if no keyword constrains what an array or an object contains. Otherwise raises Unsure."""
        words = OF_TYPE.get(kind_of(value), frozenset()) if isinstance(value, list | dict) else frozenset()
        for keyword in place.keywords:
            if keyword in words or (keyword in DEPENDENT and isinstance(value, dict)):
                raise Unsure(place, keyword)
        return True


def listed(place: Place) -> list[list[Any]]:
    """Return the lists of values that a schema allows: one for `const` and one for `enum`, if it has them."""
    return [[place.get("const")]] * place.has("const") + [place.get("enum")] * place.has("enum")


def text_of(value: Any) -> str:
    """Return a value as JSON without white space."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
