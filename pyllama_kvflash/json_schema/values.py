"""Whether a value meets a schema: exact, for the values that a schema lists. What cannot be determined raises Unsure."""

import json
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pyllama_kvflash.json_schema import languages, patterns
from pyllama_kvflash.json_schema.document import Document, Place, is_number

_MOST = 1_000  # characters of a regular expression, and of a text that it is tried on
_FEW = 3  # repetitions without end: a text of n characters takes n**3 steps


class Unsure(Exception):  # noqa: N818 (not an error of anybody's)
    """It cannot be determined. keyword: what of the place could not be looked at."""

    def __init__(self, place: Place, keyword: str) -> None:
        super().__init__()
        self.place, self.keyword = place, keyword


def frozen(value: Any) -> Any:
    """Return a value in a form that is equal if JSON Schema calls the values equal: 1 is 1.0, and not true."""
    if isinstance(value, dict):
        return "object", frozenset((name, frozen(part)) for name, part in value.items())
    if isinstance(value, list):
        return "array", tuple(map(frozen, value))
    return ("number", exact(value)) if is_number(value) else (type(value).__name__, value)


def exact(number: float) -> Fraction:
    """Return a number as JSON writes it, exactly."""
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)


def type_of(value: Any) -> str:
    """Return the type of a value; a number without a fraction is an integer."""
    if is_number(value):
        return "integer" if value == int(value) else "number"
    return {bool: "boolean", str: "string", list: "array", dict: "object"}.get(type(value), "null")


def types(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema allows by `type` and `nullable`; None: all."""
    given = schema.get("type")
    if given is None:
        return None
    names = set(given) if isinstance(given, list) else {given}
    return frozenset(names | ({"null"} if schema.get("nullable") is True else set()))


def of_types(value: Any, allowed: frozenset[str] | None) -> bool:
    """Return whether a value is of one of these types."""
    kind = type_of(value)
    return allowed is None or kind in allowed or (kind == "integer" and "number" in allowed)


@lru_cache(maxsize=256)
def expression(pattern: str) -> re.Pattern[str] | None:
    """Return a regular expression of ECMAScript as one of Python; None: it is not tried, because it is not the same there, or
    may take for ever.
    """
    if len(pattern) > _MOST or re.search(r"\\[pPcAZzuk1-9]|\(\?<[a-zA-Z]|\(\?P|\(\?#|\(\?\(", pattern):
        return None
    nested = re.search(r"[*+?})|][^()]*\)[*+{]", pattern)
    if nested or len(re.findall(r"[*+]|,\}", pattern)) > _FEW:
        return None
    same = re.sub(
        r"\\.|\[(?:\\.|[^\]\\])*\]|\$", lambda found: r"\Z" if found[0] == "$" else found[0], pattern, flags=re.DOTALL
    )
    try:
        return re.compile(same, re.ASCII)
    except (re.error, RecursionError, OverflowError):
        return None


class Checker:
    """Tells whether values meet the schemas of a document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._lists: dict[int, frozenset[Any]] = {}  # by the index of a place

    def meets(self, value: Any, place: Place) -> bool:
        """Return whether a value meets a schema, whose references do not go round in circles. Raises Unsure."""
        self._document.spend(1)
        if isinstance(place.schema, bool):
            return place.schema
        return (
            of_types(value, types(place.schema))
            and self._listed(value, place)
            and self._together(value, place)
            and self._numbers(value, place.schema)
            and self._text(value, place)
            and self._items(value, place)
            and self._object(value, place)
        )

    def _all(self, value: Any, place: Place, *parts: str | int) -> bool:
        return self.meets(value, self._document.child(place, *parts))

    def listed(self, place: Place) -> frozenset[Any] | None:
        """Return the values that `const` and `enum` of a schema list, frozen; None: it has neither."""
        if place.index not in self._lists and (place.has("const") or place.has("enum")):
            lists = [
                [place.get("const")] if keyword == "const" else place.get("enum")
                for keyword in ("const", "enum")
                if place.has(keyword)
            ]
            self._lists[place.index] = frozenset.intersection(*(frozenset(map(frozen, values)) for values in lists))
        return self._lists.get(place.index)

    def _listed(self, value: Any, place: Place) -> bool:
        listed = self.listed(place)
        return listed is None or frozen(value) in listed

    def _together(self, value: Any, place: Place) -> bool:
        """Return whether a value meets what a schema is put together from."""
        if not all(self.meets(value, target) for target in self._document.refs(place)):
            return False
        branches = {
            k: [self._all(value, place, k, i) for i in range(len(place.get(k, ())))]
            for k in ("allOf", "anyOf", "oneOf")
        }
        if not all(branches["allOf"]) or (branches["anyOf"] and not any(branches["anyOf"])):
            return False
        if branches["oneOf"] and sum(branches["oneOf"]) != 1:
            return False
        if place.has("not") and self._all(value, place, "not"):
            return False
        if place.has("if"):
            then = "then" if self._all(value, place, "if") else "else"
            return not place.has(then) or self._all(value, place, then)
        return True

    @staticmethod
    def _numbers(value: Any, schema: dict[str, Any]) -> bool:
        if not is_number(value):
            return True
        number = exact(value)
        low, low_open, high, high_open = bounds(schema)
        if low is not None and (number < low or (low_open and number == low)):
            return False
        if high is not None and (number > high or (high_open and number == high)):
            return False
        return "multipleOf" not in schema or (number / exact(schema["multipleOf"])).denominator == 1

    def _text(self, value: Any, place: Place) -> bool:
        if not isinstance(value, str):
            return True
        if not place.get("minLength", 0) <= len(value) <= place.get("maxLength", len(value)):
            return False
        return not place.has("pattern") or self.matches(value, place, "pattern", place.get("pattern"))

    @staticmethod
    def matches(text: str, place: Place, keyword: str, pattern: str) -> bool:
        """Return whether a regular expression of a place is found in a text. Raises Unsure."""
        if len(text) > _MOST:
            raise Unsure(place, keyword)
        try:
            return languages.has(patterns.language(pattern), text)
        except patterns.PatternError:  # what looks around may be tried here, and has no grammar
            found = expression(pattern)
        if found is None:
            raise Unsure(place, keyword)
        return found.search(text) is not None

    def _items(self, value: Any, place: Place) -> bool:
        if not isinstance(value, list):
            return True
        if place.has("unevaluatedItems"):
            raise Unsure(place, "unevaluatedItems")
        if not place.get("minItems", 0) <= len(value) <= place.get("maxItems", len(value)):
            return False
        if place.get("uniqueItems") and len({frozen(item) for item in value}) < len(value):
            return False
        prefix, rest = items(place)
        for i, item in enumerate(value):
            at = (prefix, i) if i < len(place.get(prefix, ())) and isinstance(place.get(prefix), list) else (rest,)
            if at[0] and place.has(at[0]) and not self._all(item, place, *at):
                return False
        if not place.has("contains"):
            return True
        n = sum(self._all(item, place, "contains") for item in value)
        return bool(place.get("minContains", 1) <= n <= place.get("maxContains", n))

    def _object(self, value: Any, place: Place) -> bool:
        if not isinstance(value, dict):
            return True
        if place.has("unevaluatedProperties"):
            raise Unsure(place, "unevaluatedProperties")
        if not place.get("minProperties", 0) <= len(value) <= place.get("maxProperties", len(value)):
            return False
        if isinstance(needed := place.get("required", []), list) and not value.keys() >= set(needed):
            return False
        for keyword in ("dependentRequired", "dependencies", "dependentSchemas"):
            for name, needs in place.get(keyword, {}).items():
                if name not in value:
                    continue
                if not (
                    value.keys() >= set(needs) if isinstance(needs, list) else self._all(value, place, keyword, name)
                ):
                    return False
        return all(self._property(name, part, place) for name, part in value.items())

    def _property(self, name: str, part: Any, place: Place) -> bool:
        if place.has("propertyNames") and not self._all(name, place, "propertyNames"):
            return False
        found = [("properties", name)] if name in place.get("properties", {}) else []
        found += [
            ("patternProperties", p)
            for p in place.get("patternProperties", {})
            if self.matches(name, place, "patternProperties", p)
        ]
        if not found and place.has("additionalProperties"):
            return self._all(part, place, "additionalProperties")
        return all(self._all(part, place, *at) for at in found)


def items(place: Place) -> tuple[str, str]:
    """Return the keywords of an array's first items and of the rest: today's, or the older ones."""
    return ("items", "additionalItems") if isinstance(place.get("items"), list) else ("prefixItems", "items")


def bounds(schema: dict[str, Any]) -> tuple[Fraction | None, bool, Fraction | None, bool]:
    """Return the bounds of a schema's numbers, and whether they are open: the least, the greatest. None: there is none."""

    def bound(name: str, sign: int) -> tuple[Fraction | None, bool]:
        key = f"exclusive{name.capitalize()}"
        found = [(exact(schema[name]), schema.get(key) is True)] if name in schema else []
        if is_number(schema.get(key)):
            found.append((exact(schema[key]), True))
        return max(found, key=lambda b: (sign * b[0], b[1]), default=(None, False))

    return *bound("minimum", 1), *bound("maximum", -1)


def text_of(value: Any) -> str:
    """Return a value as JSON, as short as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
