"""A schema in its normal form: the shapes of its values, and what of it they do not say."""

from typing import Any

from pyllama_kvflash.json_schema import merged, objects
from pyllama_kvflash.json_schema.branches import Branch, Branches
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import Place, SchemaError
from pyllama_kvflash.json_schema.keywords import OF_TYPE
from pyllama_kvflash.json_schema.shapes import Anything, Key, Shape, Shapes, Values, parts, pruned, size
from pyllama_kvflash.json_schema.values import ALL_KINDS, frozen, kind_of, kinds, listed

MAX_SHAPES = 10_000
MAX_RULES = 50_000


class Normal:
    """Puts a document in its normal form. context: of the document; it is told what is not enforced."""

    def __init__(self, context: Context) -> None:
        self._context, self._document = context, context.document
        self._branches = Branches(context.document, context.checker)
        self._shapes: Shapes = {}

    def of(self, key: Key) -> Shapes:
        """Return the shapes of these places, and of all that are in them. Raises SchemaError (there are too many of them, or no
        value meets the schema).
        """
        todo = [key]
        while todo:
            at = todo.pop()
            if at in self._shapes:
                continue
            if len(self._shapes) >= MAX_SHAPES:
                raise SchemaError("#", "", f"put together, it has more than {MAX_SHAPES:,} schemas")
            self._shapes[at] = self._made(at)
            self._document.spend(len(self._shapes[at]))
            todo += reversed([part for shape in self._shapes[at] for part in parts(shape)])
        if size(self._shapes) > MAX_RULES:
            raise SchemaError(
                "#", "", f"its lengths and numbers of items need more than {MAX_RULES:,} rules: make them smaller"
            )
        res = pruned(self._shapes)
        if not res[key]:
            raise self._nothing()
        return res

    def _made(self, key: Key) -> list[Shape]:
        places = [self._document.places[i] for i in key]
        res: dict[Any, Shape] = {}
        for branch in self._branches.of(places):
            for shape in self._shapes_of(branch, key):
                res.setdefault(frozen(list(shape.values)) if isinstance(shape, Values) else shape, shape)
        return [Anything()] if any(isinstance(s, Anything) for s in res.values()) else list(res.values())

    def _shapes_of(self, branch: Branch, key: Key) -> list[Shape]:
        allowed = self._allowed(branch)
        if any(listed(place) for place in branch.places):
            return [Values(self._listed(branch))]
        for place, keyword, why in branch.left:
            if keyword != "not" or self._excludes(place, allowed):
                self._context.note(place, keyword, why)
        if allowed == ALL_KINDS and not any(
            p.schema.keys() & frozenset().union(*OF_TYPE.values()) for p in branch.places if isinstance(p.schema, dict)
        ):
            return [Anything()]
        res: list[Shape] = [Values((None,))] if "null" in allowed else []
        res += [Values((True, False))] if "boolean" in allowed else []
        if allowed & {"integer", "fraction"}:
            res += merged.numbers(self._context, branch, integer="fraction" not in allowed)
        if "string" in allowed:
            res += merged.texts(self._context, branch)
        if "array" in allowed:
            res += merged.arrays(self._context, branch, key)
        if "object" in allowed:
            res += objects.objects(self._context, branch, key)
        return res

    @staticmethod
    def _allowed(branch: Branch) -> frozenset[str]:
        """Return the kinds of a branch's values. If no type is named, those that keywords tell something of."""
        told = [t for t, words in OF_TYPE.items() if any(place.has(word) for place in branch.places for word in words)]
        return kinds(told) if told and not any(branch.having("type")) else branch.kinds

    def _listed(self, branch: Branch) -> tuple[Any, ...]:
        """Return the values that a branch lists, and that meet all of its schemas."""
        values = next(values for place in branch.places for values in listed(place))
        found = {frozen(value): value for value in values if all(self._context.meets(value, p) for p in branch.places)}
        return tuple(found.values())

    def _excludes(self, place: Place, allowed: frozenset[str]) -> bool:
        """Return whether what a value must not be could be one of these kinds."""
        lists = listed(self._document.child(place, "not"))
        return not lists or any(kind_of(value) in allowed for value in lists[0])

    def _nothing(self) -> SchemaError:
        """Return the error for a schema of which there is no value: at the first part that has no shape at all."""
        for key, options in self._shapes.items():
            if all(shape == Values(()) for shape in options):
                place = self._document.places[key[0]]
                word = next((k for k in ("const", "enum") if place.has(k)), "")
                return SchemaError(place.pointer, word, "no value meets it and all that stands beside it")
        return SchemaError("#", "", "no value meets it: it must have itself in it without end")
