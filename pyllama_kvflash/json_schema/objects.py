"""Schemas that must all be met, as the shapes of objects."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pyllama_kvflash.json_schema import languages
from pyllama_kvflash.json_schema.branches import Branch, Branches
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import Place
from pyllama_kvflash.json_schema.languages import ANYTHING, Language
from pyllama_kvflash.json_schema.merged import (
    TOO_LARGE,
    having,
    language_of,
    least,
    most,
    outermost,
    texts,
)
from pyllama_kvflash.json_schema.shapes import Key, Object, Other, Property, Shape, Text
from pyllama_kvflash.json_schema.values import Unsure, types

MAX_PATTERNS = 4  # of names: each combination of them is looked at

_Others = list[tuple[Language, list[Place]]]
"""Properties that have no name in the schema: what they are called, and what their values must meet."""


def objects(context: Context, branch: Branch, key: Key) -> list[Shape]:
    """Return the objects of a branch. key: of its node."""
    required = _required(branch)
    unevaluated = _unevaluated(context, branch, key)
    names = dict.fromkeys(n for place in branch.places for n in place.get("properties", {}))
    names |= dict.fromkeys(required)
    others = [o for o in _others(context, branch, unevaluated) if all(p.schema is not False for p in o[1])]
    called = _called(context, branch) if others else ANYTHING
    if isinstance(called, list):
        names |= dict.fromkeys(called)
        others = []
    properties = tuple(
        Property(name, context.key(_of(context, branch, unevaluated, name)), name in required)
        for name in names
        if name in required or _allowed(context, branch, name)
    )
    if any(p.required and not _allowed(context, branch, p.name) for p in properties):
        return []
    rest = () if isinstance(called, list) else tuple(_open(context, branch, others, called, names))
    return _counted(context, branch, Object(properties, rest))


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
    """Return the schemas of the patterns that a name matches, or may match."""
    res = []
    for pattern in place.get("patternProperties", {}):
        try:
            if not context.checker.matches(name, place, "patternProperties", pattern):
                continue
        except Unsure:
            why = "whether the name of a property matches cannot be determined: the property keeps to it, too"
            context.note(place, "patternProperties", why)
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


def _others(context: Context, branch: Branch, unevaluated: list[Place]) -> _Others:
    """Return what the branch says of properties that it does not name. Beside `properties` there are none unless it says so."""
    document = context.document
    said = [document.child(place, "additionalProperties") for place, _ in having(branch, "additionalProperties")]
    given = {p: place for place, patterns in having(branch, "patternProperties") for p in patterns}
    if not given:
        of_schema = any("\0" not in place.path for place, _ in having(branch, "properties"))
        return [(ANYTHING, said or unevaluated)] if said or unevaluated or not of_schema else []
    found = {p: language_of(context, place, "patternProperties", p) for p, place in given.items()}
    if len(given) > MAX_PATTERNS:
        for place, _ in having(branch, "patternProperties"):
            context.note(place, "patternProperties", f"there are more than {MAX_PATTERNS} patterns")
    if len(given) > MAX_PATTERNS or None in found.values():
        return [
            (
                ANYTHING,
                [document.child(place, "patternProperties", p) for p, place in given.items()][:1]
                if len(given) == 1
                else [],
            )
        ]
    res: _Others = []
    for matched in product((True, False), repeat=len(found)):
        inside = [p for p, is_matched in zip(found, matched, strict=True) if is_matched]
        names = [
            language if m else languages.other(language)
            for language, m in zip(found.values(), matched, strict=True)
            if language
        ]
        values = []
        for place in branch.places:
            mine = [
                document.child(place, "patternProperties", p) for p in inside if p in place.get("patternProperties", {})
            ]
            if not mine and place.has("additionalProperties"):
                mine = [document.child(place, "additionalProperties")]
            values += mine
        if values or inside or unevaluated:
            res.append((languages.both(*names), values or unevaluated))
    return res


def _called(context: Context, branch: Branch) -> Language | list[str]:
    """Return what propertyNames lets properties be called: the names if it lists them."""
    given = [context.document.child(place, "propertyNames") for place, _ in having(branch, "propertyNames")]
    if not given:
        return ANYTHING
    found = [b for b in Branches(context.document, context.checker).of(given) if _of_texts(b)]
    listed = [b for b in found if any(p.has("enum") or p.has("const") for p in b.places)]
    if len(listed) == len(found):
        values = [
            v for b in listed for p in b.places for v in ([p.get("const")] if p.has("const") else p.get("enum", []))
        ]
        return [v for v in dict.fromkeys(v for v in values if isinstance(v, str)) if _allowed(context, branch, v)]
    if listed or any(b.left for b in found):
        for place, _ in having(branch, "propertyNames"):
            context.note(place, "propertyNames", "which names it leaves cannot be determined")
        return ANYTHING
    return languages.either(*(s.texts for b in found for s in texts(context, b) if isinstance(s, Text)))


def _open(
    context: Context, branch: Branch, others: _Others, called: Language, names: dict[str, None]
) -> Iterator[Other]:
    """Yield the properties that the branch does not name, without the names that it has."""
    named = languages.other(languages.either(*map(languages.text, names)))
    for language, values in others:
        found = languages.both(language, called, named)
        if not context.has_grammar(found):
            why = f"there are no properties but those of the schema: {TOO_LARGE}"
            keywords = ("patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties")
            place, keyword = next((p, k) for k in (*keywords, "properties", "required") for p, _ in having(branch, k))
            context.note(place, keyword, why)
        elif not languages.is_empty(found):
            yield Other(Text() if found == ANYTHING else Text(language=found), context.key(values))


def _of_texts(branch: Branch) -> bool:
    """Return whether the types of a branch allow strings."""
    given = (types(place.schema) for place in branch.places if isinstance(place.schema, dict))
    return all(allowed is None or "string" in allowed for allowed in given)


def _counted(context: Context, branch: Branch, shape: Object) -> list[Shape]:
    """Return the shapes of objects with minProperties to maxProperties properties."""
    low, high = least(branch, "minProperties") or 0, most(context, branch, "maxProperties")
    needed = tuple(p for p in shape.properties if p.required)
    optional = tuple(p for p in shape.properties if not p.required)
    if (high is not None and high < max(low, len(needed))) or (not shape.others and low > len(shape.properties)):
        return []
    return (
        _at_least(context, branch, shape, low)
        if high is None or (not shape.others and high >= len(shape.properties))
        else _at_most(context, branch, shape, low, high, needed, optional)
    )


def _at_least(context: Context, branch: Branch, shape: Object, low: int) -> list[Shape]:
    n_needed = sum(p.required for p in shape.properties)
    if low <= n_needed:
        return [shape]
    if not shape.others and low == len(shape.properties):
        return [replace(shape, properties=tuple(Property(p.name, p.key, True) for p in shape.properties))]
    if low == 1:
        return [replace(shape, nonempty=True)]
    if n_needed == len(shape.properties) and shape.others:
        if low - n_needed > 1:
            _note(context, branch, "minProperties", "a name may come twice")
        return [replace(shape, low=low - n_needed)]
    _note(context, branch, "minProperties", "optional properties are not counted beyond the first")
    return [shape]


def _at_most(
    context: Context, branch: Branch, shape: Object, low: int, high: int, needed: tuple[Property, ...], optional: tuple[Property, ...]
) -> list[Shape]:  # fmt: skip
    left = high - len(needed)
    if not optional:
        if low - len(needed) > 1:
            _note(context, branch, "minProperties", "a name may come twice")
        return [replace(shape, properties=needed, low=max(0, low - len(needed)), high=left)]
    if left == 0:
        return [replace(shape, properties=needed, high=0)]
    if left == 1:
        res: list[Shape] = [
            replace(
                shape,
                properties=tuple(Property(p.name, p.key, True) for p in shape.properties if p.required or p is one),
                high=0,
            )
            for one in optional
        ]
        if low <= len(needed) or shape.others:
            res.append(replace(shape, properties=needed, low=max(0, low - len(needed)), high=1))
        return res
    _note(context, branch, "maxProperties", "optional properties are not counted")
    return _at_least(context, branch, shape, low)


def _note(context: Context, branch: Branch, keyword: str, why: str) -> None:
    for place, _ in having(branch, keyword):
        context.note(place, keyword, why)
