"""Schemas that must all be met, as the shapes of objects."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import inf

from pyllama_kvflash.json_schema import languages
from pyllama_kvflash.json_schema.branches import Branch, Branches
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import Place
from pyllama_kvflash.json_schema.languages import ANYTHING, Language
from pyllama_kvflash.json_schema.merged import (
    TOO_LARGE,
    language_of,
    least,
    most,
    texts,
    unevaluated,
)
from pyllama_kvflash.json_schema.shapes import Key, Object, Other, Property, Shape, Text
from pyllama_kvflash.json_schema.values import Unsure, listed

MAX_PATTERNS = 4  # of names: each combination of them is looked at
MAX_COUNTED = 1_000  # optional properties, each by the number of those before it

_PATTERNS = "patternProperties"

_Others = list[tuple[Language, list[Place]]]
"""Properties that have no name in the schema: what they are called, and what their values must meet."""


def objects(context: Context, branch: Branch, key: Key) -> list[Shape]:
    """Return the objects of a branch. key: of its node."""
    required = _required(branch)
    unsaid = unevaluated(context, branch, "unevaluatedProperties", key)
    names = dict.fromkeys(n for place in branch.places for n in place.get("properties", {})) | required
    others = _others(context, branch, unsaid)
    called = _called(context, branch) if others else ANYTHING
    allowed = [name for name in names if _allowed(context, branch, name)]
    if not required.keys() <= set(allowed):
        return []
    properties = tuple(
        Property(name, context.key(_of(context, branch, name, _may_match(context, name)) or unsaid), name in required)
        for name in allowed
    )
    return [_counted(context, branch, Object(properties, tuple(_open(context, branch, others, called, names))))]


def _required(branch: Branch) -> dict[str, None]:
    return {name: None for _, needed in branch.having("required") if isinstance(needed, list) for name in needed}


def _of(context: Context, branch: Branch, name: str | None, matches: Callable[[Place, str], bool]) -> list[Place]:
    """Return what the branch says of the property of a name, or of one that it does not name (None)."""
    child, res = context.document.child, []
    for place in branch.places:
        found = [child(place, "properties", name)] if name is not None and name in place.get("properties", {}) else []
        found += [child(place, _PATTERNS, p) for p in place.get(_PATTERNS, {}) if matches(place, p)]
        if not found and place.has("additionalProperties"):
            found = [child(place, "additionalProperties")]
        res += found
    return res


def _may_match(context: Context, name: str) -> Callable[[Place, str], bool]:
    """Return what tells whether a name matches, or may match, a pattern of a place."""

    def matches(place: Place, pattern: str) -> bool:
        try:
            return context.checker.matches(name, place, _PATTERNS, pattern)
        except Unsure:
            why = "whether the name of a property matches cannot be determined: the property keeps to it, too"
            context.note(place, _PATTERNS, why)
            return True

    return matches


def _allowed(context: Context, branch: Branch, name: str) -> bool:
    """Return whether a property may have a name."""
    return all(
        context.meets(name, context.document.child(place, "propertyNames"))
        for place, _ in branch.having("propertyNames")
    )


def _others(context: Context, branch: Branch, unsaid: list[Place]) -> _Others:
    """Return what the branch says of properties that it does not name. Beside `properties` there are none unless it says so."""
    given = {p: place for place, patterns in branch.having(_PATTERNS) for p in patterns}
    if len(given) > MAX_PATTERNS:
        context.note_all(branch, (_PATTERNS,), f"there are more than {MAX_PATTERNS} patterns")
        return [(ANYTHING, [])]
    found = {p: language for p, place in given.items() if (language := language_of(context, place, _PATTERNS, p))}
    if len(found) < len(given):
        return [(ANYTHING, [])]
    closed = bool(given) or any("\0" not in place.path for place, _ in branch.having("properties"))
    res: _Others = []
    for matched in product((True, False), repeat=len(found)):
        inside = {p for p, is_matched in zip(found, matched, strict=True) if is_matched}
        names = [language if p in inside else languages.other(language) for p, language in found.items()]
        values = _of(context, branch, None, lambda _, p, inside=inside: p in inside) or unsaid  # type: ignore[misc]
        if (values or not closed) and all(place.schema is not False for place in values):
            res.append((languages.both(*names), values))
    return res


def _called(context: Context, branch: Branch) -> Language:
    """Return what propertyNames lets properties be called."""
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
    """Yield the properties that the branch does not name, without the names that it has."""
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


def _counted(context: Context, branch: Branch, shape: Object) -> Object:
    """Return objects with minProperties to maxProperties properties."""
    low, high = least(branch, "minProperties") or 0, most(context, branch, "maxProperties")
    n_required = sum(p.required for p in shape.properties)
    n_optional = len(shape.properties) - n_required
    if not shape.others and high >= len(shape.properties):
        high = inf
    counted = max(low - n_required, 0 if high == inf else high - n_required)
    if n_optional * min(n_optional, counted) > MAX_COUNTED:
        context.note_all(
            branch, ("minProperties", "maxProperties"), f"it has {n_optional} optional properties to count"
        )
        return shape
    if shape.others and low - n_required > 1:
        context.note_all(branch, ("minProperties",), "a name may come twice")
    return replace(shape, low=low, high=high)
