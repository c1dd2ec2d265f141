"""Shapes as a plain JSON schema, for what knows schemas and not grammars: llama.cpp's forms of calls that name each argument."""

from collections import Counter
from typing import Any

from pyllama_kvflash.json_schema.shapes import (
    Anything,
    Array,
    Key,
    Number,
    Object,
    Other,
    Shape,
    Shapes,
    Text,
    Values,
    parts,
)


class Plain:
    """Writes schemas that llama.cpp's converter takes.

    prefix: of the names of definitions: the converter takes those of one name for the same, whatever tool they are of. exact:
    whether what was written says all that the shapes do.
    """

    def __init__(self, shapes: Shapes, prefix: str) -> None:
        self.exact = True
        self._shapes, self._prefix = shapes, prefix
        self._used = Counter(part for options in shapes.values() for shape in options for part in parts(shape))
        self._defs: dict[str, Any] = {}
        self._names: dict[Key, str] = {}

    def arguments(self, key: Key) -> dict[str, Any]:
        """Return the schema of a call's arguments: one object, whose strings may be written without quotes."""
        objects = [shape for shape in self._shapes[key] if isinstance(shape, Object)]
        self.exact = len(objects) == len(self._shapes[key]) == 1 and self._only_named(objects[0])
        found: dict[str, list[Any]] = {}
        for shape in objects:
            for prop in shape.properties:
                self.exact = self.exact and self._as_text(prop.key)
                schema = self._value(prop.key)
                if schema not in found.setdefault(prop.name, []):
                    found[prop.name].append(schema)
        needed = [{p.name for p in shape.properties if p.required} for shape in objects]
        properties = {name: these[0] if len(these) == 1 else {"anyOf": these} for name, these in found.items()}
        required = [name for name in properties if all(name in names for names in needed)]
        return {"type": "object", "properties": properties, "required": required, "$defs": self._defs}

    def _as_text(self, key: Key) -> bool:
        """Return whether nothing is lost if a value's strings are written as they are, up to a mark that ends them."""
        options = self._shapes[key]
        strings = [
            s
            for s in options
            if isinstance(s, Anything | Text) or (isinstance(s, Values) and any(isinstance(v, str) for v in s.values))
        ]
        return not strings or options in ([Text()], [Anything()])

    @staticmethod
    def _only_named(shape: Object) -> bool:
        return not shape.others and not shape.nonempty

    def _value(self, key: Key) -> dict[str, Any]:
        """Return the schema for a key: a reference, if several name it, or it is in itself."""
        if self._used[key] <= 1 or not any(True for shape in self._shapes[key] for _ in parts(shape)):
            return self._schema(key)
        if key not in self._names:
            self._names[key] = f"{self._prefix}{len(self._names)}"
            self._defs[self._names[key]] = self._schema(key)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _schema(self, key: Key) -> dict[str, Any]:
        options = [self._shape(shape) for shape in self._shapes[key]]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _shape(self, shape: Shape) -> dict[str, Any]:
        match shape:
            case Values(values):
                return {"type": "boolean"} if list(map(type, values)) == [bool, bool] else {"enum": list(values)}
            case Number():
                return self._number(shape)
            case Text():
                return self._text(shape)
            case Array():
                return self._array(shape)
            case Object():
                return self._object(shape)
        return {}

    def _number(self, shape: Number) -> dict[str, Any]:
        if not shape.integer:
            self.exact = self.exact and not shape.bounded
            return {"type": "number"}
        bounds = {"minimum": shape.low, "maximum": shape.high}
        return {
            "type": "integer",
            **{name: int(bound) for name, bound in bounds.items() if bound is not None and abs(bound) < 1 << 53},
        }

    def _text(self, shape: Text) -> dict[str, Any]:
        self.exact = self.exact and shape.language is None
        return {"type": "string", **_counts("Length", shape.low, shape.high)}

    def _array(self, shape: Array) -> dict[str, Any]:
        if shape.prefix and shape.rest is None and shape.low == len(shape.prefix):
            return {"type": "array", "prefixItems": [self._value(key) for key in shape.prefix]}
        self.exact = self.exact and not shape.prefix
        items = {} if shape.prefix or shape.rest is None else {"items": self._value(shape.rest)}
        return {
            "type": "array",
            **items,
            **_counts("Items", shape.low, len(shape.prefix) if shape.rest is None else shape.high),
        }

    def _object(self, shape: Object) -> dict[str, Any]:
        if not shape.properties and shape.others:
            key = shape.others[0].key
            self.exact = self.exact and shape == Object((), (Other(Text(), key),))
            return {"type": "object", "additionalProperties": self._value(key) if len(shape.others) == 1 else {}}
        self.exact = self.exact and self._only_named(shape)
        properties = {p.name: self._value(p.key) for p in shape.properties}
        required = [p.name for p in shape.properties if p.required]
        return {"type": "object", "properties": properties, "required": required}


def _counts(what: str, low: int, high: int | None) -> dict[str, int]:
    most = 2_000  # that llama.cpp's parser counts
    return ({f"min{what}": min(low, most)} if low else {}) | (
        {f"max{what}": high} if high is not None and high <= most else {}
    )
