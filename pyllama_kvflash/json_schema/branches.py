"""Branches: the alternatives of a schema. Each is a set of schemas that a value must all meet."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyllama_kvflash.json_schema.document import REFERENCES, Document, Place, Schema
from pyllama_kvflash.json_schema.keywords import DEPENDENT, TYPES, is_annotation
from pyllama_kvflash.json_schema.values import ALL_KINDS, Checker, Unsure, allowed, kinds, listed

MAX_BRANCHES = 500

Option = Sequence[Place]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The options that a keyword of a place leaves. A value must meet all schemas of one option."""

    place: Place
    keyword: str
    options: Sequence[Option]


@dataclass(slots=True)
class Branch:
    """Schemas that a value must all meet. have: the schemas, by index. choices: the choices that are not made yet. left: keywords that
    the branch does not express, each with its place and the reason.
    """

    have: dict[int, Place] = field(default_factory=dict)
    choices: list[_Choice] = field(default_factory=list)
    left: list[tuple[Place, str, str]] = field(default_factory=list)

    def copy(self) -> "Branch":
        """Return a copy that grows independently."""
        return Branch(dict(self.have), list(self.choices), list(self.left))

    @property
    def places(self) -> Collection[Place]:
        """The schemas, in the order in which the document lists their properties."""
        return self.have.values()

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of values that all of the schemas allow."""
        return frozenset.intersection(ALL_KINDS, *(allowed(place.schema) for place in self.places))

    def having(self, keyword: str) -> Iterator[tuple[Place, Any]]:
        """Yield the places that have a keyword, with its value."""
        return ((place, place.get(keyword)) for place in self.places if place.has(keyword))


class Branches:
    """Finds the branches of schemas in a document."""

    def __init__(self, document: Document, checker: Checker) -> None:
        self._document, self._checker = document, checker

    def of(self, places: Sequence[Place]) -> list[Branch]:
        """Return the branches of schemas that must all be met; [] if no value meets them all."""
        done: list[Branch] = []
        todo = self._grown(places, Branch())
        while todo:
            branch = todo.pop(0)
            if not branch.choices:
                done.append(branch)
                continue
            choice = branch.choices.pop(0)
            grown = []
            for option in choice.options:
                self._document.spend(1 + (len(branch.have) + len(branch.choices)) // 16)  # copies are cheap
                grown += self._grown(option, branch.copy())
            if len(done) + len(todo) + len(grown) > MAX_BRANCHES:
                branch.left.append((choice.place, choice.keyword, f"it makes more than {MAX_BRANCHES} combinations"))
                grown = [branch]
            todo[:0] = grown
        return done

    def _grown(self, option: Option, branch: Branch) -> list[Branch]:
        """Add an option's schemas, and those that they refer to, to a branch. Returns [branch]; [] if no value meets them all."""
        todo = list(option)
        entered = set[int]()  # places whose turn comes after that of others
        while todo:
            place = todo.pop(0)
            if place.schema is False:
                return []
            if place.index in entered:
                entered.remove(place.index)
                branch.have[place.index] = branch.have.pop(place.index)
            elif place.schema is not True and place.index not in branch.have:
                branch.have[place.index] = place
                entered.add(place.index)
                todo[:0] = self._together(place)
                self._choose(place, branch)
        return [branch]

    def _together(self, place: Place) -> list[Place]:
        """Return a place and the places that its values must also meet, in the order in which the document lists their properties."""
        res = [] if place.has("properties") else [place]
        for keyword in place.keywords:
            if keyword == "properties":
                res.append(place)
            elif keyword in REFERENCES:
                res.append(self._document.target(place, keyword))
            elif keyword == "allOf":
                res += self._document.children(place, keyword)
        return res

    def _choose(self, place: Place, branch: Branch) -> None:
        """Add the choices of a place to a branch, and to `left` the keywords that choices cannot express."""
        if place.has("oneOf") and not self._all_apart(place):
            branch.left.append((place, "oneOf", "its branches may have values in common: it is taken as anyOf"))
        for keyword, options in self._options(place):
            if options is None:
                branch.left.append((place, keyword, "what is not of that schema cannot be determined"))
            else:
                branch.choices.append(_Choice(place, keyword, options))

    def _options(self, place: Place) -> Iterator[tuple[str, list[Option] | None]]:
        """Yield each keyword of a place that leaves a choice, with its options; None for a negation that cannot be determined."""
        child, made = self._document.child, self._document.made
        for keyword in ("anyOf", "oneOf"):
            if place.has(keyword):
                yield keyword, [[one] for one in self._document.children(place, keyword)]
        for keyword in DEPENDENT:
            for name, needs in place.get(keyword, {}).items():
                needed = [name, *needs] if isinstance(needs, list) else [name]
                given = [made(place, f"{keyword} {name}", {"required": needed})]
                given += [] if isinstance(needs, list) else [child(place, keyword, name)]
                yield keyword, [[made(place, f"without {name}", {"properties": {name: False}})], given]
        if place.has("not"):
            yield "not", self._negated(child(place, "not"))
        then, other = ([child(place, word)] if place.has(word) else [] for word in ("then", "else"))
        if place.has("if") and (then or other):
            test = child(place, "if")
            negated = self._negated(test)
            yield "if", None if negated is None else [[test, *then], *([*one, *other] for one in negated)]

    def _negated(self, place: Place) -> list[Option] | None:
        """Return options that allow the values that do not meet a place; None if these values cannot be determined."""
        made = self._document.made
        if isinstance(place.schema, bool):
            return [[made(place, "not", not place.schema)]]
        schema = {k: v for k, v in place.schema.items() if not is_annotation(k)}
        if schema.keys() == {"not"}:
            return [[self._document.child(place, "not")]]
        if schema.keys() == {"$ref"}:
            return self._negated(self._document.refs(place)[0])
        if schema.keys() <= {"const", "enum"} and schema:
            return [[made(place, "not", {"not": schema})]] if "\0" not in place.path else None
        return self._negated_object(place, schema) if schema.keys() <= {"type", "properties", "required"} else None

    def _negated_object(self, place: Place, schema: dict[str, Any]) -> list[Option] | None:
        """Do what `_negated` does, for a schema without keywords other than `type`, `properties` and `required`."""
        given, required = allowed(schema), schema.get("required", [])
        if isinstance(required, bool) or ("integer" in given) != ("fraction" in given):
            return None  # required: of draft 3; numbers: those with a fraction, or those without, are no type
        if schema.keys() & {"properties", "required"} and given not in (ALL_KINDS, {"object"}):
            return None
        others = [name for name in TYPES if not kinds([name]) & given]
        res: dict[str, Schema] = {"not type": {"type": others}} if others else {}
        for name in required:
            res[f"without {name}"] = {"type": "object", "properties": {name: False}}
        for name, sub in schema.get("properties", {}).items():
            res[f"another {name}"] = {"type": "object", "required": [name], "properties": {name: {"not": sub}}}
        return [[self._document.made(place, *one)] for one in (res or {"not": False}).items()]

    #
    # whether schemas have no value in common
    #

    def _all_apart(self, place: Place) -> bool:
        branches = self._document.children(place, "oneOf")
        objects = allowed(place.schema) == {"object"}
        if len(branches) ** 2 > MAX_BRANCHES * 20:
            return False
        return all(self._apart(a, b, objects=objects) for i, a in enumerate(branches) for b in branches[:i])

    def _apart(self, a: Place, b: Place, *, objects: bool = False, depth: int = 0) -> bool:
        """Return whether it is certain that no value meets both schemas. objects: consider only values that are objects."""
        self._document.spend(1)
        a, b = self._referred(a), self._referred(b)
        if a.schema is False or b.schema is False:
            return True
        if not (isinstance(a.schema, dict) and isinstance(b.schema, dict)) or depth > 8:  # noqa: PLR2004
            return False
        common = allowed(a.schema) & allowed(b.schema)
        pairs = (a, b), (b, a)
        if not common or any(self._none_of(*pair) for pair in pairs):
            return True
        return (objects or common == {"object"}) and any(self._told_apart(*pair, depth) for pair in pairs)

    def _referred(self, place: Place) -> Place:
        while place.has("$ref"):
            place = self._document.refs(place)[0]
        return place

    def _none_of(self, place: Place, other: Place) -> bool:
        """Return whether a place lists its values, and another place allows none of them."""
        lists = listed(place)
        meets = self._checker.meets
        try:
            return bool(lists) and not any(meets(v, other) and meets(v, place) for v in lists[0])
        except Unsure:
            return False

    def _told_apart(self, a: Place, b: Place, depth: int) -> bool:
        """Return whether `a` requires a property that `b` forbids, or for which `b` allows none of the values that `a` allows."""
        needed = a.get("required", [])
        for name in needed if isinstance(needed, list) else []:
            if name in b.get("properties", {}):
                if name in a.get("properties", {}):
                    mine, theirs = (self._document.child(place, "properties", name) for place in (a, b))
                    if self._apart(mine, theirs, depth=depth + 1):
                        return True
            elif b.get("additionalProperties") is False and not b.has("patternProperties"):
                return True
        return False
