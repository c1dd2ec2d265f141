"""Branches: the alternatives of a schema. Each is a set of schemas that a value must all meet."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyllama_kvflash.json_schema.document import REFERENCES, Document, Place
from pyllama_kvflash.json_schema.keywords import DEPENDENT, TYPES, is_annotation
from pyllama_kvflash.json_schema.values import ALL_KINDS, Checker, Unsure, allowed, kinds, listed

MAX_BRANCHES = 500

Option = Sequence[Place]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Options for a keyword of a place. A value must meet all schemas of one option."""

    place: Place
    keyword: str
    options: Sequence[Option]


@dataclass(slots=True)
class Branch:
    """Schemas that a value must all meet.

    have: the schemas by index. choices: those that have not been made. left: keywords of the schemas that the branch does not
    express, each with the reason.
    """

    have: dict[int, Place] = field(default_factory=dict)
    choices: list[_Choice] = field(default_factory=list)
    left: list[tuple[Place, str, str]] = field(default_factory=list)

    def copy(self) -> "Branch":
        """Return a copy that can grow by itself."""
        return Branch(dict(self.have), list(self.choices), list(self.left))

    @property
    def places(self) -> Collection[Place]:
        """The schemas, in the order of the properties they name."""
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
        """Return the branches of schemas that must all be met; []: no value meets them all."""
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
        """Add an option's schemas to a branch, and the schemas they refer to. Returns [] if no value meets them all."""
        todo, ordered = list(option), list[Place]()  # ordered: places that come after the ones they refer to
        while todo:
            place = todo.pop(0)
            if place.schema is False:
                return []
            if place in ordered:
                branch.have[place.index] = branch.have.pop(place.index)
            elif place.schema is not True and place.index not in branch.have:
                branch.have[place.index] = place
                before, behind = self._needed(place)
                ordered += [place] if before else []
                todo[:0] = [*before, place, *behind] if before else behind
                self._choose(place, branch)
        return [branch]

    def _needed(self, place: Place) -> tuple[list[Place], list[Place]]:
        """Return the places that a value of this place must meet, too: those named before its `properties`, and those after."""
        res: tuple[list[Place], list[Place]] = [], []
        behind = not place.has("properties")
        for keyword in place.schema if isinstance(place.schema, dict) else ():
            behind = behind or keyword == "properties"
            if keyword in REFERENCES:
                res[behind].append(self._document.target(place, keyword))
            elif keyword == "allOf":
                res[behind].extend(self._document.children(place, keyword))
        return res

    def _choose(self, place: Place, branch: Branch) -> None:
        """Add the choices of a place to a branch, and the keywords that choices cannot express."""
        for keyword in ("anyOf", "oneOf"):
            if place.has(keyword):
                options = [[one] for one in self._document.children(place, keyword)]
                branch.choices.append(_Choice(place, keyword, options))
        if place.has("oneOf") and not self._all_apart(place):
            branch.left.append((place, "oneOf", "its branches may have values in common: it is taken as anyOf"))
        branch.choices += self._dependent(place)
        for keyword, find in (("not", self._not), ("if", self._if)):
            if place.has(keyword):
                found = find(place)
                if found is None:
                    branch.left.append((place, keyword, "what is not of that schema cannot be determined"))
                elif found:
                    branch.choices.append(_Choice(place, keyword, found))

    def _dependent(self, place: Place) -> list[_Choice]:
        """Return the choices of what depends on a property: without it, or with what it needs."""
        res = []
        for keyword in DEPENDENT:
            for name, needs in place.get(keyword, {}).items():
                without = self._document.made(place, f"without {name}", {"properties": {name: False}})
                needed = [name, *needs] if isinstance(needs, list) else [name]
                given = [self._document.made(place, f"{keyword} {name}", {"required": needed})]
                given += [] if isinstance(needs, list) else [self._document.child(place, keyword, name)]
                res.append(_Choice(place, keyword, [[without], given]))
        return res

    def _not(self, place: Place) -> list[Option] | None:
        negated = self._negated(self._document.child(place, "not"))
        return None if negated is None else [[one] for one in negated]

    def _if(self, place: Place) -> list[Option] | None:
        then, other = ([self._document.child(place, k)] if place.has(k) else [] for k in ("then", "else"))
        if not (then or other):
            return []
        test = self._document.child(place, "if")
        negated = self._negated(test)
        return None if negated is None else [[test, *then], *([one, *other] for one in negated)]

    def _negated(self, place: Place) -> list[Place] | None:
        """Return schemas of which a value meets one if it does not meet this one; None: they cannot be determined."""
        made = self._document.made
        if isinstance(place.schema, bool):
            return [made(place, "not", not place.schema)]
        schema = {k: v for k, v in place.schema.items() if not is_annotation(k)}
        if isinstance(schema.get("required"), bool):
            return None  # of draft 4
        if schema.keys() == {"not"}:
            return [self._document.child(place, "not")]
        if schema.keys() == {"$ref"}:
            return self._negated(self._document.refs(place)[0])
        if schema.keys() <= {"const", "enum"} and schema:
            return [made(place, "not", {"not": schema})] if "\0" not in place.path else None
        return self._negated_object(place, schema) if schema.keys() <= {"type", "properties", "required"} else None

    def _negated_object(self, place: Place, schema: dict[str, Any]) -> list[Place] | None:
        made, given = self._document.made, allowed(schema)
        if ("integer" in given) != ("fraction" in given):
            return None  # numbers that have a fraction, or have none
        if schema.keys() & {"properties", "required"} and given not in (ALL_KINDS, {"object"}):
            return None
        others = [name for name in TYPES if not kinds([name]) & given]
        res = [made(place, "not type", {"type": others})] if others else []
        res += [
            made(place, f"without {name}", {"type": "object", "properties": {name: False}})
            for name in schema.get("required", ())
        ]
        for name, sub in schema.get("properties", {}).items():
            other = {"type": "object", "required": [name], "properties": {name: {"not": sub}}}
            res.append(made(place, f"another {name}", other))
        return res or [made(place, "not", False)]

    #
    # whether no value can be of two schemas
    #

    def _all_apart(self, place: Place) -> bool:
        branches = self._document.children(place, "oneOf")
        objects = allowed(place.schema) == {"object"}
        if len(branches) ** 2 > MAX_BRANCHES * 20:
            return False
        return all(self._apart(a, b, objects=objects) for i, a in enumerate(branches) for b in branches[:i])

    def _apart(self, a: Place, b: Place, *, objects: bool = False, depth: int = 0) -> bool:
        """Return whether it is certain that no value meets both. objects: only these are looked at."""
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
        """Return whether a place lists its values, and the other one takes none of them."""
        lists = listed(place)
        meets = self._checker.meets
        try:
            return bool(lists) and not any(meets(v, other) and meets(v, place) for v in lists[0])
        except Unsure:
            return False

    def _told_apart(self, a: Place, b: Place, depth: int) -> bool:
        """Return whether a property that objects of `a` must have is another one, or none, in those of `b`."""
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
