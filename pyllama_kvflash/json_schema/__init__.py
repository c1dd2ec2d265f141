"""JSON schemas as grammars. A keyword that is not enforced is named. Nothing here needs the native library.

`document` surveys a schema; `normal` turns it into shapes, with `branches` and `merged`; `gbnf` writes the shapes as a grammar.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyllama_kvflash.json_schema.arguments import Argument, Arguments, arguments
from pyllama_kvflash.json_schema.context import Context, Loosened
from pyllama_kvflash.json_schema.document import Document, SchemaError, loads
from pyllama_kvflash.json_schema.gbnf import Writer
from pyllama_kvflash.json_schema.keywords import TYPES
from pyllama_kvflash.json_schema.normal import Normal
from pyllama_kvflash.json_schema.shapes import Key, Shapes

__all__ = [
    "TYPES",
    "Argument",
    "Arguments",
    "Checked",
    "Key",
    "Loosened",
    "SchemaError",
    "check",
    "check_arguments",
    "json_grammar",
    "loads",
    "refuse_loosened",
]


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked schema. source: the schema as given. key: the key of its shapes. loosened: the keywords that are not enforced."""

    source: Any
    shapes: Shapes
    key: Key
    loosened: tuple[Loosened, ...]

    def grammar(self) -> str:
        """Return the grammar (GBNF) of the schema's texts."""
        (name,), rules = self.rules("j", [(self.key,)])
        return f"root ::= {name}\n{rules}"

    def rules(self, prefix: str, values: Sequence[Sequence[Key]]) -> tuple[list[str], str]:
        """Return the name of each value's rule, and all rules (GBNF). values: each one's keys; the value has a shape of one of them."""
        return Writer(self.shapes, prefix).written(values)

    def arguments(self) -> Arguments:
        """Return the arguments of a call that this schema describes."""
        return arguments(self.shapes, self.key)


def json_grammar(schema: str, *, strict: bool = False, note: Callable[[str], None] = warnings.warn) -> str:
    """Return the grammar (GBNF) of the texts that a JSON schema allows.

    note: called with a sentence for each keyword that is not enforced. strict: refuse a schema with such a keyword, unless the keyword
    is an annotation.

    Raises SchemaError, a UsageError that names the place and the keyword.
    """
    checked = check(loads(schema), strict=strict)
    for loosened in checked.loosened:
        note(str(loosened))
    return checked.grammar()


def check(schema: Any, *, strict: bool = False) -> Checked:
    """Check a schema. strict: refuse keywords that cannot be enforced, except annotations. Raises SchemaError."""
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
    """Check the schema of a call's arguments, which are an object. Parts that cannot be used allow any value; `loosened` names them."""
    try:
        document = Document(schema)
        errors, res = [*document.errors], _checked(schema, document, of_objects=True)
    except SchemaError as err:
        errors, res = [err], _checked(schema, Document(True), of_objects=True)
    return replace(res, loosened=(*(Loosened(e.pointer, e.keyword, e.what) for e in errors), *res.loosened))


def _checked(schema: Any, document: Document, *, of_objects: bool = False) -> Checked:
    context = Context(document)
    for place, keyword, why in document.unknown:
        context.note(place, keyword, why)
    try:
        objects = [document.made(document.root, "object", {"type": "object"})] if of_objects else []
        key = context.key([document.root, *objects])
        shapes = Normal(context).of(key)
    except RecursionError:
        raise SchemaError("#", "", "its references are too deep in each other") from None
    return Checked(schema, shapes, key, tuple(context.loosened))
