"""The arguments of a call one by one, for chat templates whose calls name each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pyllama_kvflash.json_schema.keywords import TYPES
from pyllama_kvflash.json_schema.shapes import Anything, Array, Key, Number, Object, Shape, Shapes, Text, Values
from pyllama_kvflash.json_schema.values import kind_of


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument. keys: of shapes; its value is of one of them. types: of its values. exact: whether all is enforced if strings
    are written without quotes, up to a mark that ends them.
    """

    name: str
    keys: tuple[Key, ...]
    required: bool
    types: tuple[str, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call. exact: whether they say all that its schema does."""

    of: tuple[Argument, ...]
    exact: bool


def arguments(shapes: Shapes, key: Key) -> Arguments:
    """Return the arguments of a call whose schema has these shapes."""
    objects = [shape for shape in shapes[key] if isinstance(shape, Object)]
    keys: dict[str, dict[Key, None]] = {}
    for prop in (prop for shape in objects for prop in shape.properties):
        keys.setdefault(prop.name, {})[prop.key] = None
    needed = [{p.name for p in shape.properties if p.required} for shape in objects]
    found = tuple(
        _argument(shapes, name, tuple(of_name), required=all(name in names for names in needed))
        for name, of_name in keys.items()
    )
    return Arguments(
        found, len(objects) == len(shapes[key]) == 1 and _only_named(objects[0]) and all(a.exact for a in found)
    )


def _argument(shapes: Shapes, name: str, keys: tuple[Key, ...], *, required: bool) -> Argument:
    options = [shape for key in keys for shape in shapes[key]]
    types = tuple(dict.fromkeys(kind for shape in options for kind in _types(shape)))
    return Argument(name, keys, required, types, "string" not in types or options in ([Text()], [Anything()]))


def _only_named(shape: Object) -> bool:
    """Return whether an object may have any of its properties beside those that it must have, and no others."""
    n_required = sum(p.required for p in shape.properties)
    return not shape.others and shape.low <= n_required and shape.high >= len(shape.properties)


def _types(shape: Shape) -> Sequence[str]:
    match shape:
        case Values(values):
            return ["number" if (kind := kind_of(value)) == "fraction" else kind for value in values]
        case Number(integer):
            return ["integer" if integer else "number"]
        case Text():
            return ["string"]
        case Array():
            return ["array"]
        case Object():
            return ["object"]
    return TYPES
