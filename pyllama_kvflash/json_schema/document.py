"""A JSON schema as a document: the schemas within it, and the targets of their references. Nothing here knows of grammars."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any
from urllib.parse import unquote, urljoin

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.json_schema.keywords import KEYWORDS, LIST, MAP, ONE, SAME_VALUE, TYPES, is_annotation
from pyllama_kvflash.text import is_json

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
MAX_DEPTH = 100  # of nested schemas
MAX_SCHEMAS = 20_000
MAX_VALUES = 20_000  # of an enum
MAX_TEXT = 4 << 20  # characters of a schema
MAX_NAME = 1_000  # characters of a property's name, a pattern or another name
MAX_WORK = 200_000  # checks of values, and schemas in branches: some seconds
MAX_COUNT = 100_000  # of a length, or a number of items

Schema = bool | dict[str, Any]


def place_of(pointer: str, keyword: str) -> str:
    """Return where a keyword is, as a pointer for a message: on one line, shortened."""
    at = pointer if not keyword else f"{pointer}/{escaped(keyword)}"
    at = "".join(char if char.isprintable() else "?" for char in at)
    return at if len(at) <= 200 else f"{at[:100]}...{at[-90:]}"  # noqa: PLR2004 (characters)


class SchemaError(UsageError):
    """A schema cannot be used.

    pointer, keyword: where the fault is ("#": the whole schema; "": no single keyword). what: the fault. at: the place, as messages
    name it.
    """

    def __init__(self, pointer: str, keyword: str, what: str) -> None:
        self.pointer, self.keyword, self.what = pointer, keyword, what
        self.at = place_of(pointer, keyword)
        super().__init__(f"the JSON schema cannot be used: {self.at}: {what}")


@dataclass(slots=True, eq=False)
class Place:
    """A schema in a document, or one made from it.

    path: the schema's JSON pointer; for a made schema, its origin's pointer, a zero byte and a mark. schema: True in place of a schema
    that cannot be used. base: the URI that relative references resolve against.
    """

    index: int
    path: str
    schema: bool | dict[str, Any]
    base: str

    @property
    def pointer(self) -> str:
        """The JSON pointer of the schema, or of the schema that it was made from."""
        return self.path.partition("\0")[0]

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the schema with their values; {} for `true` and `false`."""
        return self.schema if isinstance(self.schema, dict) else {}

    def has(self, keyword: str) -> bool:
        """Return whether the schema has a keyword."""
        return isinstance(self.schema, dict) and keyword in self.schema

    def get(self, keyword: str, default: Any = None) -> Any:
        """Return the value of a keyword; the default if the schema does not have the keyword."""
        return self.schema.get(keyword, default) if isinstance(self.schema, dict) else default


class Document:
    """A surveyed schema.

    places: the schemas in it, and those made from them. errors: the faults of parts that are not schemas; such a part counts as
    `true`. unknown: keywords that have no effect, each with its place and the reason.

    Raises SchemaError if the schema is too large or too deep.
    """

    def __init__(self, schema: Any) -> None:
        self.places: list[Place] = []
        self.errors: list[SchemaError] = []
        self.unknown: list[tuple[Place, str, str]] = []
        self._at: dict[str, Place] = {}  # by path
        self._resources: dict[str, Place] = {}
        self._anchors: dict[tuple[str, str], list[Place]] = {}
        self._n_linked, self._left = 0, MAX_WORK
        self.root = self._survey(schema, "#", "")
        self._resources.setdefault("", self.root)
        self._link()
        self._refuse_circles()

    def spend(self, work: int) -> None:
        """Count the work of the conversion. Raises SchemaError once there is too much."""
        self._left -= work
        if self._left < 0:
            why = "it takes too long to put together: use fewer values, anyOf, oneOf and allOf in each other"
            raise SchemaError("#", "", why)

    def at(self, pointer: str) -> Place:
        """Return the place at a JSON pointer, which must exist."""
        return self._at[pointer]

    def child(self, place: Place, *parts: str | int) -> Place:
        """Return the place of a schema within another schema."""
        return self._at[_below(place.path, *map(str, parts))]

    def children(self, place: Place, keyword: str) -> list[Place]:
        """Return the places of the schemas in a keyword's array; [] if the schema does not have the keyword."""
        return [self.child(place, keyword, i) for i in range(len(place.get(keyword, ())))]

    def made(self, place: Place, mark: str, schema: Schema) -> Place:
        """Return the place of a schema made from the one at `place`. mark: tells the schemas made from one place apart."""
        path = f"{place.path}\0{mark}"
        if path not in self._at:
            self._survey(schema, path, place.base)
            self._link()
        return self._at[path]

    def target(self, place: Place, keyword: str) -> Place:
        """Return the place that a reference names. Raises SchemaError."""
        ref: str = place.get(keyword)
        uri, _, fragment = (place.base + ref if ref.startswith("#") else _joined(place.base, ref)).partition("#")
        name = unquote(fragment)
        start = self._resources.get(uri)
        if start is None:
            raise SchemaError(
                place.pointer, keyword, f"{ref[:100]!r} is not in this document: put what it names in $defs"
            )
        found = self._pointed(start, name) if name[:1] == "/" else self._anchored(uri, name, keyword) if name else start
        if found is None:
            raise SchemaError(place.pointer, keyword, f"there is no {ref[:100]!r} in this document")
        return found

    def _anchored(self, uri: str, name: str, keyword: str) -> Place | None:
        found = self._anchors.get((uri, name), [])
        if keyword == "$dynamicRef":
            found = [place for (_, other), places in self._anchors.items() if other == name for place in places]
        return found[0] if len(found) == 1 else None

    def _pointed(self, start: Place, path: str) -> Place | None:
        """Return the place at a JSON pointer within `start`; None if nothing is there. Surveys a schema that no keyword holds."""
        value: Any = start.schema
        for part in path[1:].split("/"):
            name = unescaped(part)
            if isinstance(value, list) and re.fullmatch("0|[1-9][0-9]{0,8}", name) and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                return None
        path = start.path + path
        return self._at.get(path) or self._survey(value, path, start.base)

    def refs(self, place: Place) -> list[Place]:
        """Return the targets of a schema's references. A value of the schema must meet them, too."""
        return [self.target(place, keyword) for keyword in REFERENCES if place.has(keyword)]

    def _link(self) -> None:
        """Find the targets of all references. A reference without a target is an error."""
        while self._n_linked < len(self.places):  # finding one may add places
            place = self.places[self._n_linked]
            self._n_linked += 1
            try:
                self.refs(place)
            except SchemaError as err:
                self._refuse(place, err)

    def _refuse(self, place: Place, err: SchemaError) -> None:
        self.errors.append(err)
        place.schema = True

    def _refuse_circles(self) -> None:
        """Refuse schemas that apply themselves to the same value: they say nothing, and a check would not end."""
        done: set[int] = set()
        for start in list(self.places):
            path: dict[int, Place] = {}
            todo = [(start, False)]
            while todo:
                place, leave = todo.pop()
                if leave:
                    del path[place.index]
                    done.add(place.index)
                elif place.index in path:
                    self._refuse(place, SchemaError(place.pointer, "", "it refers to itself without end"))
                elif place.index not in done:
                    path[place.index] = place
                    todo += [(place, True), *((other, False) for other in self._same_value(place))]

    def _same_value(self, place: Place) -> list[Place]:
        """Return the places whose schemas apply to the same values as this place's."""
        below = [path for path, _ in _subschemas(place.keywords) if path[0] in SAME_VALUE]
        return self.refs(place) + [self.child(place, *path) for path in below]

    #
    # the survey
    #

    def _survey(self, schema: Any, path: str, base: str, depth: int = 0) -> Place:
        if depth > MAX_DEPTH:
            raise SchemaError("#", "", f"it is more than {MAX_DEPTH} schemas deep: use $ref")
        if len(self.places) >= MAX_SCHEMAS:
            raise SchemaError("#", "", f"it has more than {MAX_SCHEMAS:,} schemas")
        fault = _fault(schema)
        if fault:
            self.errors.append(SchemaError(path.partition("\0")[0], *fault))
            schema = True
        if isinstance(schema, dict) and not schema.get("$id", "#").startswith("#"):
            base = _joined(base, schema["$id"]).partition("#")[0]
        place = self._at[path] = Place(len(self.places), path, schema, base)
        self.places.append(place)
        if isinstance(schema, dict):
            if "\0" not in path:
                self._name(place, schema)
            for parts, sub in _subschemas(schema):
                self._survey(sub, _below(path, *parts), base, depth + 1)
        return place

    def _name(self, place: Place, schema: dict[str, Any]) -> None:
        """Note a schema's names, which references may use, and its unknown keywords."""
        name = schema.get("$id", "")
        if name.startswith("#"):  # of draft 7
            self._anchors.setdefault((place.base, name[1:]), []).append(place)
        elif name:
            self._resources[place.base] = place
        for keyword in ("$anchor", "$dynamicAnchor"):
            if keyword in schema:
                self._anchors.setdefault((place.base, schema[keyword]), []).append(place)
        for keyword in schema:
            if keyword not in KEYWORDS and not is_annotation(keyword):
                self.unknown.append((place, keyword, "it is not a keyword that is known here"))
        if schema.get("$recursiveAnchor") and place.path != "#":
            self.unknown.append((place, "$recursiveAnchor", "it is not at the root"))
        if schema.get("required") is True:
            self.unknown.append((place, "required", "it is not an array of names (draft 3)"))


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the schemas directly within a schema, each with its path."""
    for keyword, value in schema.items():
        if keyword in LIST and isinstance(value, list):
            yield from (((keyword, str(i)), sub) for i, sub in enumerate(value))
        elif keyword in MAP:
            named = keyword == "dependencies"  # its values may be lists of names
            yield from (((keyword, name), sub) for name, sub in value.items() if not (named and isinstance(sub, list)))
        elif keyword in ONE:
            yield (keyword,), value


def _joined(base: str, ref: str) -> str:
    """Return a reference as a URI; the reference itself if it is not a valid one, and so names nothing elsewhere."""
    try:
        return urljoin(base, ref)
    except ValueError:
        return ref


def _below(path: str, *parts: str) -> str:
    return path + "".join(f"/{escaped(part)}" for part in parts)


def escaped(part: str) -> str:
    """Return a name, escaped for a JSON pointer."""
    return part.replace("~", "~0").replace("/", "~1")


def unescaped(part: str) -> str:
    """Return the name that a part of a JSON pointer stands for."""
    return part.replace("~1", "/").replace("~0", "~")


def loads(text: str) -> Any:
    """Parse a schema's text. Raises SchemaError."""
    if len(text) > MAX_TEXT:
        raise SchemaError("#", "", f"it has more than {MAX_TEXT:,} characters")
    try:
        return json.loads(text, parse_constant=_not_json)
    except RecursionError:
        raise SchemaError("#", "", "it is nested too deeply") from None
    except ValueError as err:
        raise SchemaError("#", "", f"it is not JSON: {str(err)[:200]}") from None


def _not_json(name: str) -> None:
    msg = f"{name} is not a JSON number"
    raise ValueError(msg)


#
# faults of schemas
#


def shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 (characters)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf


def is_count(value: Any) -> bool:
    """Return whether a value is an integer of 0 or more."""
    return is_number(value) and value >= 0 and value == int(value)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_WORDS: dict[str, tuple[Any, str]] = {
    "type": (lambda v: v != [], "a type, or an array of at least one type"),
    "enum": (lambda v: isinstance(v, list) and len(v) > 0, "an array of at least one value"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
                     "maxContains"), (is_count, "an integer of 0 or more")),
    **dict.fromkeys(("minimum", "maximum"), (is_number, "a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (lambda v: is_number(v) or isinstance(v, bool), "a number")),
    "multipleOf": (lambda v: is_number(v) and v > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$id", "$anchor", "$dynamicAnchor"),
                    (lambda v: isinstance(v, str), "a string")),
    "$recursiveRef": (lambda v: v == "#", '"#"'),
    **dict.fromkeys(("uniqueItems", "nullable", "$recursiveAnchor"), (lambda v: isinstance(v, bool), "true or false")),
    "required": (lambda v: _names(v) or isinstance(v, bool), "an array of names"),
    "dependentRequired": (lambda v: isinstance(v, dict) and all(map(_names, v.values())), "an object of arrays of names"),
    "dependencies": (lambda v: isinstance(v, dict) and all(_names(n) or not isinstance(n, list) for n in v.values()),
                     "an object of schemas, or of arrays of names"),
    **dict.fromkeys(MAP - {"dependencies"}, (lambda v: isinstance(v, dict), "an object of schemas")),
    **dict.fromkeys(LIST - {"items"}, (lambda v: isinstance(v, list) and len(v) > 0, "an array of schemas, not empty")),
}  # fmt: skip
"""A test of a keyword's value, and the words for what it must be."""

_ORDERED = [(word, word.replace("min", "max")) for word in ("minLength", "minItems", "minProperties", "minimum")]


def _fault(schema: Any) -> tuple[str, str] | None:
    """Return the first faulty keyword of a schema itself, not of those within, and the fault; None if there is none."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return "", f"{shown(schema)} is not a schema: give an object, true or false"
    for keyword, value in schema.items():
        found = _value_fault(keyword, value)
        if found:
            return keyword, found
    if isinstance(schema.get("items"), list) and "prefixItems" in schema:
        return "items", "it is an array, and prefixItems is given: give a schema"
    for low, high in _ORDERED:
        if low in schema and high in schema and schema[low] > schema[high]:
            return low, f"{low} is {shown(schema[low])}, above {high}, {shown(schema[high])}: no value can be of both"
    return None


def _value_fault(keyword: str, value: Any) -> str | None:  # noqa: PLR0911 (one for each fault)
    if keyword == "type":
        names = value if isinstance(value, list) else [value]
        bad = [name for name in names if name not in TYPES]
        if bad:
            return f"{shown(bad[0])} is not a type: give one of {', '.join(TYPES)}"
    test, words = _WORDS.get(keyword, (None, ""))
    if test and not test(value):
        return f"{shown(value)} is not {words}"
    if keyword in ("const", "enum") and not is_json(value):
        return "it has NaN or an infinity, which JSON does not have"
    if keyword == "enum" and len(value) > MAX_VALUES:
        return f"it has {len(value):,} values, and may have {MAX_VALUES:,}"
    if keyword in MAP and any(len(name) > MAX_NAME for name in value):
        return f"a name in it has more than {MAX_NAME:,} characters"
    if keyword.startswith("min") and test is is_count and value > MAX_COUNT:
        return f"{shown(value)} is more than can be counted: give at most {MAX_COUNT:,}"
    if keyword != "const" and isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        return "it is not Unicode text: half of a surrogate pair"
    return None
