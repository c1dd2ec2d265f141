"""JSON schemas as grammars: every keyword is enforced, or named as one that is not. Nothing here needs the native library.

A schema is surveyed (`document`), put together (`branches`, `merged`, `objects`: `normal`), and its shapes are written as a
grammar (`gbnf`) or as a plain schema (`plain`). `keywords` says what comes of each keyword.
"""

from dataclasses import dataclass
from typing import Any

from pyllama_kvflash.json_schema.context import Context, Loosened
from pyllama_kvflash.json_schema.document import Document, SchemaError, loads
from pyllama_kvflash.json_schema.gbnf import Writer
from pyllama_kvflash.json_schema.normal import Normal
from pyllama_kvflash.json_schema.plain import Plain
from pyllama_kvflash.json_schema.shapes import Key, Shapes

__all__ = ["Checked", "Loosened", "SchemaError", "check", "check_arguments", "loads", "refuse_loosened"]


@dataclass(frozen=True, slots=True)
class Checked:
    """A schema that can be enforced, but for `loosened`. source: the schema as it was given."""

    source: Any
    shapes: Shapes
    key: Key
    loosened: tuple[Loosened, ...]

    def rules(self, prefix: str) -> tuple[str, str]:
        """Return the name of the rule of the schema's values, and GBNF with that and all others, whose names have a prefix."""
        return Writer(self.shapes, prefix).written(self.key)

    def plain(self, prefix: str) -> tuple[dict[str, Any], bool]:
        """Return a schema of an object for llama.cpp's converter, and whether it says all that this one does. prefix: of the names
        of definitions in it.
        """
        plain = Plain(self.shapes, prefix)
        try:
            return plain.arguments(self.key), plain.exact
        except RecursionError:  # so deep that llama.cpp's converter had better not see it
            return {"type": "object", "properties": {}, "required": []}, False


def check(schema: Any, *, strict: bool = False) -> Checked:
    """Return a schema, checked. strict: what cannot be enforced is an error, too, unless it is an annotation.

    Raises SchemaError.
    """
    document = Document(schema)
    if document.errors:
        raise document.errors[0]
    res = _checked(schema, document)
    if strict:
        refuse_loosened(res)
    return res


def refuse_loosened(checked: Checked) -> None:
    """Raise SchemaError for the first keyword that is not enforced, unless it is an annotation."""
    for one in checked.loosened:
        if not one.annotation:
            raise SchemaError(one.pointer, one.keyword, f"it cannot be enforced: {one.why}")


def check_arguments(schema: Any) -> Checked:
    """Return the schema of a call's arguments, which are an object. What cannot be used of it is any value, as is named in
    `loosened`.
    """
    try:
        document = Document(schema)
        of_errors = tuple(Loosened(e.pointer, e.keyword, e.what) for e in document.errors)
        res = _checked(schema, document, of_objects=True)
    except SchemaError as err:
        res = _checked(schema, Document(True), of_objects=True)
        of_errors = (Loosened(err.pointer, err.keyword, err.what),)
    return Checked(schema, res.shapes, res.key, (*of_errors, *res.loosened))


def _checked(schema: Any, document: Document, *, of_objects: bool = False) -> Checked:
    try:
        return _put_together(schema, document, of_objects=of_objects)
    except RecursionError:
        raise SchemaError("#", "", "its references are too deep in each other") from None


def _put_together(schema: Any, document: Document, *, of_objects: bool) -> Checked:
    context = Context(document)
    for place, keyword, why in document.unknown:
        context.note(place, keyword, why)
    places = [document.root, *([document.made(document.root, "object", {"type": "object"})] if of_objects else [])]
    key = context.key(places)
    shapes = Normal(context).of(key)
    return Checked(schema, shapes, key, tuple(context.loosened))
