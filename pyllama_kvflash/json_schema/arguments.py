"""The arguments of a call, for chat templates whose calls write each argument separately, after its name."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pyllama_kvflash.json_schema.keywords import TYPES
from pyllama_kvflash.json_schema.shapes import Anything, Array, Key, Number, Object, Shape, Shapes, Text, Values
from pyllama_kvflash.json_schema.values import kind_of


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a call. keys: the value has a shape of one of these keys. types: the JSON types that the value may have."""

    name: str
    keys: tuple[Key, ...]
    required: bool
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call. exact: whether they express the whole schema even if strings are written without quotes."""

    of: tuple[Argument, ...]
    exact: bool


def arguments(shapes: Shapes, key: Key) -> Arguments:
    """Return the arguments of a call. shapes, key: those of the call's schema."""
    objects = [shape for shape in shapes[key] if isinstance(shape, Object)]
    keys: dict[str, dict[Key, None]] = {}
    for prop in (prop for shape in objects for prop in shape.properties):
        keys.setdefault(prop.name, {})[prop.key] = None
    needed = [{p.name for p in shape.properties if p.required} for shape in objects]
    found, exact = [], len(objects) == len(shapes[key]) == 1 and _only_named(objects[0])
    for name, of_name in keys.items():
        options = [shape for one in of_name for shape in shapes[one]]
        types = tuple(dict.fromkeys(kind for shape in options for kind in _types(shape)))
        found.append(Argument(name, tuple(of_name), all(name in names for names in needed), types))
        exact = exact and ("string" not in types or options in ([Text()], [Anything()]))
    return Arguments(tuple(found), exact)


def _only_named(shape: Object) -> bool:
    """Return whether an object may have any of its optional properties, but no property that the schema does not name."""
    n_required = sum(p.required for p in shape.properties)
    return not shape.others and shape.low <= n_required and shape.high >= len(shape.properties)


def _types(shape: Shape) -> Sequence[str]:
    match shape:
        case Values(texts):
            return ["number" if (kind := kind_of(json.loads(text))) == "fraction" else kind for text in texts]
        case Number(integer):
            return ["integer" if integer else "number"]
        case Text():
            return ["string"]
        case Array():
            return ["array"]
        case Object():
            return ["object"]
    return TYPES
