"""The normal form of a schema: the shapes of its values. Keywords that shapes cannot express are noted."""

from pyllama_kvflash.json_schema import merged
from pyllama_kvflash.json_schema.branches import Branch, Branches
from pyllama_kvflash.json_schema.context import Context
from pyllama_kvflash.json_schema.document import Place, SchemaError
from pyllama_kvflash.json_schema.keywords import OF_TYPE
from pyllama_kvflash.json_schema.shapes import Anything, Key, Shape, Shapes, Values, parts, pruned, size
from pyllama_kvflash.json_schema.values import ALL_KINDS, frozen, kind_of, kinds, listed, text_of

MAX_SHAPES = 10_000
MAX_RULES = 50_000


class Normal:
    """Finds the shapes of a document's schemas. context: the document's context."""

    def __init__(self, context: Context) -> None:
        self._context, self._document = context, context.document
        self._branches = Branches(context.document, context.checker)
        self._shapes: Shapes = {}

    def of(self, key: Key) -> Shapes:
        """Return the shapes of a key and of all keys within it. Raises SchemaError if they are too many or no value meets the schema."""
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
            why = f"its lengths and numbers of items need more than {MAX_RULES:,} rules: make them smaller"
            raise SchemaError("#", "", why)
        res = pruned(self._shapes)
        if not res[key]:
            raise self._nothing()
        return res

    def _made(self, key: Key) -> list[Shape]:
        branches = self._branches.of([self._document.places[i] for i in key])
        res = dict.fromkeys(shape for branch in branches for shape in self._shapes_of(branch, key))
        return [Anything()] if Anything() in res else list(res)

    def _shapes_of(self, branch: Branch, key: Key) -> list[Shape]:
        if any(listed(place) for place in branch.places):
            return [Values(self._listed(branch))]
        told = [t for t, words in OF_TYPE.items() if any(place.has(word) for place in branch.places for word in words)]
        allowed = kinds(told) if told and not any(branch.having("type")) else branch.kinds
        for place, keyword, why in branch.left:
            if keyword != "not" or self._excludes(place, allowed):
                self._context.note(place, keyword, why)
        if allowed == ALL_KINDS and not told:
            return [Anything()]
        res: list[Shape] = [Values(("null",))] if "null" in allowed else []
        res += [Values(("true", "false"))] if "boolean" in allowed else []
        if allowed & {"integer", "fraction"}:
            res += merged.numbers(self._context, branch, integer="fraction" not in allowed)
        if "string" in allowed:
            res += merged.texts(self._context, branch)
        if "array" in allowed:
            res += merged.arrays(self._context, branch, key)
        if "object" in allowed:
            res += merged.objects(self._context, branch, key)
        return res

    def _listed(self, branch: Branch) -> tuple[str, ...]:
        """Return, as JSON, the values that a branch lists and that meet all of its schemas."""
        values = next(values for place in branch.places for values in listed(place))
        found = {frozen(value): value for value in values if all(self._context.meets(value, p) for p in branch.places)}
        return tuple(map(text_of, found.values()))

    def _excludes(self, place: Place, allowed: frozenset[str]) -> bool:
        """Return whether a place's `not` may exclude values of the allowed kinds."""
        lists = listed(self._document.child(place, "not"))
        return not lists or any(kind_of(value) in allowed for value in lists[0])

    def _nothing(self) -> SchemaError:
        """Return the error for a schema that no value meets. The error names the first part without values."""
        for key, options in self._shapes.items():
            if all(shape == Values(()) for shape in options):
                place = self._document.places[key[0]]
                word = next((k for k in ("const", "enum") if place.has(k)), "")
                return SchemaError(place.pointer, word, "no value meets it and all that stands beside it")
        return SchemaError("#", "", "no value meets it: it must have itself in it without end")
