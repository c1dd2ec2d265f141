"""Schemas that must all be met, as the shapes of objects."""

from dataclasses import dataclass, field

from pyllama_kvflash.json_schema.branches import Branch, Branches
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import Place
from pyllama_kvflash.json_schema.merged import having, least, most, outermost, texts
from pyllama_kvflash.json_schema.shapes import Key, Object, Property, Shape, Text
from pyllama_kvflash.json_schema.values import Unsure, types

MAX_NAMES, MAX_NAME = 5_000, 200  # characters of names that other properties may not have: of all, and of one


@dataclass(slots=True)
class _Open:
    """Properties that have no name in the schema: their values (None: there are none), and what they are called."""

    values: list[Place] | None
    names: Text = field(default_factory=Text)


def objects(context: Context, branch: Branch, key: Key) -> list[Shape]:
    """Return the objects of a branch. key: of its node."""
    required = _required(branch)
    unevaluated = _unevaluated(context, branch, key)
    names = dict.fromkeys(n for place in branch.places for n in place.get("properties", {}))
    names |= dict.fromkeys(required)
    others = _others(context, branch, unevaluated, names)
    if others.values is not None and any(place.schema is False for place in others.values):
        others.values = None
    if (listed := _named(context, branch, names, others)) is not None:
        names |= dict.fromkeys(listed)
        others.values = None
    properties = tuple(
        Property(name, context.key(_of(context, branch, unevaluated, name)), name in required)
        for name in names
        if name in required or _allowed(context, branch, name)
    )
    if any(p.required and not _allowed(context, branch, p.name) for p in properties):
        return []
    many = (
        sum(map(len, names)) > MAX_NAMES or max(map(len, names), default=0) > MAX_NAME
    )  # too many to tell others from them, so there are none
    rest = None if others.values is None or many else context.key(others.values)
    shape = Object(properties, rest, others.names, excluded=frozenset(names))
    return _counted(context, branch, shape)


def _required(branch: Branch) -> dict[str, None]:
    return {name: None for _, needed in having(branch, "required") if isinstance(needed, list) for name in needed}


def _unevaluated(context: Context, branch: Branch, key: Key) -> list[Place]:
    """Return what unevaluatedProperties says of properties that nothing else does."""
    res = []
    for place, _ in having(branch, "unevaluatedProperties"):
        if outermost(context, branch, place, key):
            res.append(context.document.child(place, "unevaluatedProperties"))
        else:
            context.note(place, "unevaluatedProperties", "what is not evaluated cannot be determined here")
    return res


def _matching(context: Context, place: Place, name: str) -> list[Place]:
    """Return the schemas of the patterns that a name matches. A pattern of which that cannot be determined is taken for one."""
    res = []
    for pattern in place.get("patternProperties", {}):
        try:
            if not context.checker.matches(name, place, "patternProperties", pattern):
                continue
        except Unsure:
            pass  # so that the property keeps to that, too
        res.append(context.document.child(place, "patternProperties", pattern))
    return res


def _of(context: Context, branch: Branch, unevaluated: list[Place], name: str) -> list[Place]:
    """Return what the branch says of the property of a name."""
    document, res = context.document, []
    for place in branch.places:
        found = [document.child(place, "properties", name)] if name in place.get("properties", {}) else []
        found += _matching(context, place, name)
        if not found and place.has("additionalProperties"):
            found = [document.child(place, "additionalProperties")]
        res += found
    return res or unevaluated


def _allowed(context: Context, branch: Branch, name: str) -> bool:
    """Return whether a property may have a name."""
    return all(
        context.meets(name, context.document.child(place, "propertyNames"))
        for place, _ in having(branch, "propertyNames")
    )


def _others(context: Context, branch: Branch, unevaluated: list[Place], names: dict[str, None]) -> _Open:
    """Return what the branch says of properties that it does not name. Beside `properties` there are none unless it says so."""
    said = [
        context.document.child(place, "additionalProperties") for place, _ in having(branch, "additionalProperties")
    ]
    patterns = [(place, p) for place, given in having(branch, "patternProperties") for p in given]
    if not patterns:
        of_schema = any("\0" not in place.path for place, _ in having(branch, "properties"))
        return _Open(said or unevaluated if said or unevaluated or not of_schema else None)
    values = [context.document.child(place, "patternProperties", p) for place, p in patterns]
    if said and all(place.schema is not False for place in said):
        return _Open([*said, *values])  # whatever they are called: they keep to all of that
    if len({p for _, p in patterns}) > 1:
        for place, _ in having(branch, "patternProperties"):
            context.note(
                place, "patternProperties", "there are several patterns: which names are of both cannot be determined"
            )
        return _Open([])
    place, pattern = patterns[0]
    if not context.has_pattern(pattern):
        context.note(place, "patternProperties", "no grammar can be made of its pattern")
        return _Open(values)
    if any(_matching(context, place, name) for name in names):
        return _Open(None)
    return _Open(values, Text(pattern=pattern))


def _named(context: Context, branch: Branch, names: dict[str, None], others: _Open) -> list[str] | None:
    """Keep other properties to propertyNames. Returns the names that they may have if it lists them."""
    given = [context.document.child(place, "propertyNames") for place, _ in having(branch, "propertyNames")]
    if not given or others.values is None:
        return None
    found = [b for b in Branches(context.document, context.checker).of(given) if _of_texts(b)]
    listed = [b for b in found if any(p.has("enum") or p.has("const") for p in b.places)]
    if len(listed) == len(found):
        values = [
            v for b in listed for p in b.places for v in ([p.get("const")] if p.has("const") else p.get("enum", []))
        ]
        return [v for v in dict.fromkeys(v for v in values if isinstance(v, str)) if _allowed(context, branch, v)]
    shapes = [s for b in found for s in texts(context, b)]
    plain = (
        not names and others.names == Text() and len(shapes) == 1 and not found[0].left and isinstance(shapes[0], Text)
    )
    if plain and isinstance(shapes[0], Text):
        others.names = shapes[0]
    else:
        for place, _ in having(branch, "propertyNames"):
            context.note(place, "propertyNames", "which names are left beside `properties` cannot be determined")
    return None


def _of_texts(branch: Branch) -> bool:
    """Return whether the types of a branch allow strings."""
    given = (types(place.schema) for place in branch.places if isinstance(place.schema, dict))
    return all(allowed is None or "string" in allowed for allowed in given)


def _counted(context: Context, branch: Branch, shape: Object) -> list[Shape]:
    """Return the shapes of objects with minProperties to maxProperties properties."""
    low, high = least(branch, "minProperties") or 0, most(context, branch, "maxProperties")
    needed = tuple(p for p in shape.properties if p.required)
    optional = tuple(p for p in shape.properties if not p.required)
    if (high is not None and high < max(low, len(needed))) or (shape.rest is None and low > len(shape.properties)):
        return []
    return (
        _at_least(context, branch, shape, low)
        if high is None or (shape.rest is None and high >= len(shape.properties))
        else _at_most(context, branch, shape, low, high, needed, optional)
    )


def _at_least(context: Context, branch: Branch, shape: Object, low: int) -> list[Shape]:
    n_needed = sum(p.required for p in shape.properties)
    if low <= n_needed:
        return [shape]
    if shape.rest is None and low == len(shape.properties):
        return [_with(shape, tuple(Property(p.name, p.key, True) for p in shape.properties))]
    if low == 1:
        return [_with(shape, shape.properties, nonempty=True)]
    if n_needed == len(shape.properties) and shape.rest is not None:
        if low - n_needed > 1:
            _note(context, branch, "minProperties", "a name may come twice")
        return [_with(shape, shape.properties, low=low - n_needed)]
    _note(context, branch, "minProperties", "optional properties are not counted beyond the first")
    return [shape]


def _at_most(
    context: Context, branch: Branch, shape: Object, low: int, high: int, needed: tuple[Property, ...], optional: tuple[Property, ...]
) -> list[Shape]:  # fmt: skip
    left = high - len(needed)
    if not optional:
        if low - len(needed) > 1:
            _note(context, branch, "minProperties", "a name may come twice")
        return [_with(shape, needed, low=max(0, low - len(needed)), high=left)]
    if left == 0:
        return [_with(shape, needed, high=0)]
    if left == 1:
        res: list[Shape] = [
            _with(
                shape, tuple(Property(p.name, p.key, True) for p in shape.properties if p.required or p is one), high=0
            )
            for one in optional
        ]
        if low <= len(needed) or shape.rest is not None:
            res.append(_with(shape, needed, low=max(0, low - len(needed)), high=1 if shape.rest is not None else 0))
        return res
    _note(context, branch, "maxProperties", "optional properties are not counted")
    return _at_least(context, branch, shape, low)


def _with(
    shape: Object, properties: tuple[Property, ...], *, low: int = 0, high: int | None = None, nonempty: bool = False
) -> Object:
    return Object(properties, shape.rest, shape.names, low, high, shape.excluded, nonempty)


def _note(context: Context, branch: Branch, keyword: str, why: str) -> None:
    for place, _ in having(branch, keyword):
        context.note(place, keyword, why)
