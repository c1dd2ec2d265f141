"""Shapes: the normal form of a schema. Each value of the schema has one of its shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf

from pyllama_kvflash.json_schema.languages import ANYTHING, Language, counted, fulfilled

BLOCK = 256  # repetitions that share a rule: llama.cpp's parser copies the repeated part, and allows 2,000 repetitions

Key = tuple[int, ...]
"""Indices of the places in a document whose schemas a value must all meet; (): any value."""


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value."""


@dataclass(frozen=True, slots=True)
class Values:
    """One of some values. texts: the values as JSON."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A number. integer: without a fraction. digits: the language of its texts, without exponents; None: any number."""

    integer: bool
    digits: Language | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A string of a language."""

    language: Language = ANYTHING


@dataclass(frozen=True, slots=True)
class Array:
    """An array of `low` to `high` items (inf: no bound). prefix: the keys of the first items. rest: the others' key; None: no others."""

    prefix: tuple[Key, ...]
    rest: Key | None
    low: int
    high: float


@dataclass(frozen=True, slots=True)
class Property:
    """A property of an object."""

    name: str
    key: Key
    required: bool


@dataclass(frozen=True, slots=True)
class Other:
    """Properties that a schema does not name. names: the language of their names. key: the key of their values."""

    names: Language
    key: Key


@dataclass(frozen=True, slots=True)
class Object:
    """An object's properties, in this order, then others. low, high: the fewest and the most properties in total (inf: no bound)."""

    properties: tuple[Property, ...]
    others: tuple[Other, ...] = ()
    low: int = 0
    high: float = inf


Shape = Anything | Values | Number | Text | Array | Object
Shapes = dict[Key, list[Shape]]


def parts(shape: Shape) -> Iterator[Key]:
    """Yield the keys of a shape's items or properties."""
    if isinstance(shape, Array):
        yield from shape.prefix
        yield from () if shape.rest is None else (shape.rest,)
    elif isinstance(shape, Object):
        yield from (p.key for p in shape.properties)
        yield from (other.key for other in shape.others)


def size(shapes: Shapes) -> int:
    """Return about how many rules the grammar of shapes needs. A part that is repeated more often needs more rules."""
    found = [shape for options in shapes.values() for shape in options]
    texts = {shape.language for shape in found if isinstance(shape, Text)}
    texts |= {other.names for shape in found if isinstance(shape, Object) for other in shape.others}
    counts = [n for language in texts for n in counted(language)]
    counts += [s.low if s.high == inf else int(s.high) for s in found if isinstance(s, Array | Object)]
    return len(found) + sum(min(n, 2 * BLOCK + n // BLOCK) for n in counts)


def pruned(shapes: Shapes) -> Shapes:
    """Return the shapes that have values, without the parts that have none. An object that must contain itself has no values."""

    def possible(key: Key, known: set[Key]) -> list[Shape]:
        return [cut for shape in shapes[key] if (cut := _cut(shape, known)) is not None]

    uses = {key: {part for shape in options for part in parts(shape)} for key, options in shapes.items()}
    known = fulfilled(uses, lambda key, known: bool(possible(key, known)))
    return {key: possible(key, known) for key in shapes}


def _cut(shape: Shape, known: set[Key]) -> Shape | None:
    """Return a shape without the parts that have no values; None if the shape then has none itself. known: the keys that have values."""
    if isinstance(shape, Values):
        return shape if shape.texts else None
    if isinstance(shape, Array):
        prefix = tuple(takewhile(known.__contains__, shape.prefix))
        rest = shape.rest if len(prefix) == len(shape.prefix) and shape.rest in known else None
        high = min(shape.high, len(prefix) if rest is None else inf)
        n = int(min(high, len(prefix)))
        return Array(prefix[:n], rest if high > n else None, shape.low, high) if shape.low <= high else None
    if isinstance(shape, Object):
        properties = tuple(p for p in shape.properties if p.key in known)
        others = tuple(other for other in shape.others if other.key in known)
        required = [p for p in shape.properties if p.required]
        high = min(shape.high, inf if others else len(properties))
        if max(shape.low, len(required)) > high or any(p.key not in known for p in required):
            return None
        return replace(shape, properties=properties, others=others)
    return shape
