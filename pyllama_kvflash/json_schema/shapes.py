"""What values of a schema look like, once everything in it is put together: shapes, of which a value has one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from pyllama_kvflash.json_schema.languages import ANYTHING, Language, counted

BLOCK = 256  # repetitions that share a rule: llama.cpp's parser copies what is repeated, and counts to 2,000

Key = tuple[int, ...]
"""Places of a document whose schemas a value must all meet, by their indices; (): any value."""


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value."""


@dataclass(frozen=True, slots=True)
class Values:
    """One of these values."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A number, or an integer. digits: how it is written, without an exponent; None: any number."""

    integer: bool
    digits: Language | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A string of a language."""

    language: Language = ANYTHING


@dataclass(frozen=True, slots=True)
class Array:
    """low to high items (None: no bound): those of the prefix, then those of the rest (None: there are no more)."""

    prefix: tuple[Key, ...]
    rest: Key | None
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Property:
    """A property of an object."""

    name: str
    key: Key
    required: bool


@dataclass(frozen=True, slots=True)
class Other:
    """Properties that a schema does not name: what they are called, and their values."""

    names: Language
    key: Key


@dataclass(frozen=True, slots=True)
class Object:
    """Properties, in this order, then others: low to high of them all together (None: no bound)."""

    properties: tuple[Property, ...]
    others: tuple[Other, ...] = ()
    low: int = 0
    high: int | None = None


Shape = Anything | Values | Number | Text | Array | Object
Shapes = dict[Key, list[Shape]]


def parts(shape: Shape) -> Iterator[Key]:
    """Yield the keys of what a value of a shape has in it."""
    if isinstance(shape, Array):
        yield from shape.prefix
    elif isinstance(shape, Object):
        yield from (p.key for p in shape.properties)
        yield from (other.key for other in shape.others)
    if isinstance(shape, Array) and shape.rest is not None:
        yield shape.rest


def size(shapes: Shapes) -> int:
    """Return about how many rules a grammar of shapes has: what is counted in a rule of its own is counted in steps."""
    found = [shape for options in shapes.values() for shape in options]
    texts = {shape.language for shape in found if isinstance(shape, Text)}
    texts |= {other.names for shape in found if isinstance(shape, Object) for other in shape.others}
    counts = [n for language in texts for n in counted(language)]
    counts += [s.low if s.high is None else s.high for s in found if isinstance(s, Array | Object)]
    return len(found) + sum(min(n, 2 * BLOCK + n // BLOCK) for n in counts)


def pruned(shapes: Shapes) -> Shapes:
    """Return the shapes of which there are values, without the parts of which there are none. An object that must have itself in
    it has none.
    """
    users: dict[Key, list[Key]] = {}
    for key, options in shapes.items():
        for part in {part for shape in options for part in parts(shape)}:
            users.setdefault(part, []).append(key)
    known: set[Key] = set()
    todo = list(reversed(shapes))
    while todo:
        key = todo.pop()
        if key not in known and any(_possible(shape, known) for shape in shapes[key]):
            known.add(key)
            todo += users.get(key, [])
    return {key: [_cut(s, known) for s in options if _possible(s, known)] for key, options in shapes.items()}


def _possible(shape: Shape, known: set[Key]) -> bool:
    if isinstance(shape, Values):
        return bool(shape.values)
    if isinstance(shape, Array):
        return shape.low <= _longest(shape, known)
    if isinstance(shape, Object):
        others = any(other.key in known for other in shape.others)
        n_most = inf if others else sum(p.key in known for p in shape.properties)
        n_least = max(shape.low, sum(p.required for p in shape.properties))
        needed = all(p.key in known for p in shape.properties if p.required)
        return needed and n_least <= min(n_most, inf if shape.high is None else shape.high)
    return True


def _longest(shape: Array, known: set[Key]) -> float:
    """Return how many items there can be."""
    n = next((i for i, key in enumerate(shape.prefix) if key not in known), len(shape.prefix))
    more = n == len(shape.prefix) and shape.rest in known
    return min(inf if more else n, inf if shape.high is None else shape.high)


def _cut(shape: Shape, known: set[Key]) -> Shape:
    if isinstance(shape, Array):
        longest = _longest(shape, known)
        high = None if longest == inf else int(longest)
        prefix = shape.prefix if high is None else shape.prefix[:high]
        rest = shape.rest if shape.rest in known and (high is None or high > len(prefix)) else None
        return Array(prefix, rest, shape.low, high)
    if isinstance(shape, Object):
        there = tuple(p for p in shape.properties if p.key in known)
        others = tuple(other for other in shape.others if other.key in known)
        return replace(shape, properties=there, others=others)
    return shape
