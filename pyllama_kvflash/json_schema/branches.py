"""What a schema is put together from: its branches, each a set of schemas that a value must all meet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyllama_kvflash.json_schema.document import REFERENCES, Document, Place
from pyllama_kvflash.json_schema.keywords import DEPENDENT, TYPES, is_annotation
from pyllama_kvflash.json_schema.values import ALL_KINDS, Checker, Unsure, allowed, kinds, listed

MAX_BRANCHES = 500

Option = Sequence[Place]


@dataclass(frozen=True, slots=True)
class Branch:
    """Schemas that a value must all meet. left: keywords of theirs that this does not say, and why."""

    places: tuple[Place, ...]
    left: tuple[tuple[Place, str, str], ...]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of values that all of the schemas allow."""
        return frozenset.intersection(ALL_KINDS, *(allowed(place.schema) for place in self.places))

    def having(self, keyword: str) -> Iterator[tuple[Place, Any]]:
        """Yield the places that have a keyword, with its value."""
        return ((place, place.get(keyword)) for place in self.places if place.has(keyword))


@dataclass(slots=True)
class _Choice:
    """Options of which a value must meet one, for a keyword of a place."""

    place: Place
    keyword: str
    options: list[Option]


@dataclass(slots=True)
class _State:
    """A branch as it grows."""

    have: dict[int, Place] = field(default_factory=dict)
    choices: list[_Choice] = field(default_factory=list)
    left: list[tuple[Place, str, str]] = field(default_factory=list)

    def copy(self) -> "_State":
        return _State(dict(self.have), list(self.choices), list(self.left))


class Branches:
    """Finds the branches of schemas in a document."""

    def __init__(self, document: Document, checker: Checker) -> None:
        self._document, self._checker = document, checker

    def of(self, places: Sequence[Place]) -> list[Branch]:
        """Return the branches of schemas that must all be met; none: nothing can be of them all."""
        done: list[Branch] = []
        todo = self._grown(places, _State())
        while todo:
            state = todo.pop(0)
            if not state.choices:
                done.append(Branch(tuple(state.have.values()), tuple(state.left)))
                continue
            choice = state.choices.pop(0)
            grown = []
            for option in choice.options:
                self._document.spend(1 + (len(state.have) + len(state.choices)) // 16)  # copies are cheap
                grown += self._grown(option, state.copy())
            if len(done) + len(todo) + len(grown) > MAX_BRANCHES:
                state.left.append((choice.place, choice.keyword, f"it makes more than {MAX_BRANCHES} combinations"))
                grown = [state]
            todo[:0] = grown
        return done

    def _grown(self, option: Option, state: _State) -> list[_State]:
        """Return a state that has an option's schemas, and those that they need; none: nothing can be of them all."""
        todo, ordered = list(option), list[Place]()  # ordered: those that come behind what they refer to
        while todo:
            place = todo.pop(0)
            if place.schema is False:
                return []
            if place in ordered:
                state.have[place.index] = state.have.pop(place.index)
            elif place.schema is not True and place.index not in state.have:
                state.have[place.index] = place
                before, behind = self._needed(place)
                ordered += [place] if before else []
                todo[:0] = [*before, place, *behind] if before else behind
                self._choose(place, state)
        return [state]

    def _needed(self, place: Place) -> tuple[list[Place], list[Place]]:
        """Return the places that must be met with this one: those named before its `properties`, and those behind them."""
        res: tuple[list[Place], list[Place]] = [], []
        behind = not place.has("properties")
        for keyword, value in place.schema.items() if isinstance(place.schema, dict) else ():
            behind = behind or keyword == "properties"
            if keyword in REFERENCES:
                res[behind].append(self._document.target(place, keyword))
            elif keyword == "allOf":
                res[behind].extend(self._document.child(place, keyword, i) for i in range(len(value)))
        return res

    def _choose(self, place: Place, state: _State) -> None:
        """Note what a place leaves to choose, and what it asks for that choices cannot say."""
        for keyword in ("anyOf", "oneOf"):
            if place.has(keyword):
                options: list[Option] = [
                    [self._document.child(place, keyword, i)] for i in range(len(place.get(keyword)))
                ]
                state.choices.append(_Choice(place, keyword, options))
        if place.has("oneOf") and not self._all_apart(place):
            state.left.append((place, "oneOf", "its branches may have values in common: it is taken as anyOf"))
        state.choices += self._dependent(place)
        for keyword, find in (("not", self._not), ("if", self._if)):
            if place.has(keyword):
                found = find(place)
                if found is None:
                    state.left.append((place, keyword, "what is not of that schema cannot be determined"))
                elif found:
                    state.choices.append(_Choice(place, keyword, found))

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
        branches = [self._document.child(place, "oneOf", i) for i in range(len(place.get("oneOf")))]
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
        if not common or self._none_of(a, b) or self._none_of(b, a):
            return True
        return (objects or common == {"object"}) and (self._told_apart(a, b, depth) or self._told_apart(b, a, depth))

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
