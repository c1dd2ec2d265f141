"""Every keyword of JSON Schema that this package knows, and what comes of each. docs/schemas.py makes a table of it."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["enforced", "in part", "not enforced", "annotation", "refused"]


@dataclass(frozen=True, slots=True)
class Keyword:
    """What comes of a keyword. note: when, or how, for the table."""

    verdict: Verdict
    note: str = ""


KEYWORDS: dict[str, Keyword] = {
    "type": Keyword("enforced", "a name or an array of names. Without it, the other keywords tell it: `properties` an object, and so on"),
    "nullable": Keyword("enforced", "of OpenAPI: `true` beside `type` allows null"),
    "enum": Keyword("enforced", "up to 20,000 values; strings and numbers are filtered by all keywords beside it"),
    "const": Keyword("enforced", "as `enum`"),
    "$ref": Keyword("enforced", "to `#`, a pointer (`~0`, `~1`, `%25`), an `$anchor` or an `$id` of the document, with keywords beside it; any other is refused"),
    "$dynamicRef": Keyword("in part", "as `$ref`, where the document has one anchor of that name; else refused"),
    "$recursiveRef": Keyword("enforced", "of 2019-09: `#`"),
    "$defs": Keyword("enforced", "what `$ref` names"),
    "definitions": Keyword("enforced", "older spelling of `$defs`"),
    "$id": Keyword("enforced", "what `$ref` names"),
    "$anchor": Keyword("enforced", "what `$ref` names"),
    "$dynamicAnchor": Keyword("enforced", "what `$ref` and `$dynamicRef` name"),
    "$recursiveAnchor": Keyword("in part", "where it is the document's root"),
    "allOf": Keyword("enforced", "merged"),
    "anyOf": Keyword("enforced", "with the keywords beside it; up to 500 combinations"),
    "oneOf": Keyword("in part", "where no value can be of two branches: by `type`, `const`, `enum`, or a required property that tells them apart; else as `anyOf`"),
    "not": Keyword("in part", "of `true`, `false`, `type`, `required`, `properties` of these; else only where `const` or `enum` lists strings and numbers, which are filtered by it"),
    "if": Keyword("in part", "where `not` of it can be enforced"),
    "then": Keyword("in part", "as `if`"),
    "else": Keyword("in part", "as `if`"),
    "minimum": Keyword("enforced", "of integers and numbers; up to 15 digits before the point for numbers, which then have no exponent"),
    "maximum": Keyword("enforced", "as `minimum`"),
    "exclusiveMinimum": Keyword("enforced", "as `minimum`; also as `true` beside `minimum` (draft 4)"),
    "exclusiveMaximum": Keyword("enforced", "as `exclusiveMinimum`"),
    "multipleOf": Keyword("in part", "of 1, 0.1, 0.01, ...; others where the range has up to 1,000 multiples"),
    "minLength": Keyword("enforced", "up to 100,000; beside `pattern` or `format`, up to 2,000 states of a machine that reads both"),
    "maxLength": Keyword("enforced", "as `minLength`"),
    "pattern": Keyword("in part", "without look-arounds, back references, `\\b` and `\\p`, and `^` or `$` in what is repeated several times; up to 2,000 repetitions; several patterns as `minLength`"),
    "format": Keyword("in part", "`date`, `time`, `date-time`, `duration`, `uuid`, `ipv4`, `ipv6`, `hostname`, `email`, `uri`, `uri-reference`, `iri`, `json-pointer`, `relative-json-pointer`: [the usual forms](#formats); others are annotations (2020-12), with a warning"),
    "properties": Keyword("enforced", "in the order of the schema"),
    "required": Keyword("enforced", "also for names that `properties` lacks"),
    "additionalProperties": Keyword("enforced", "if it is missing beside `properties`, there are none; the names of `properties` need up to 2,000 states"),
    "patternProperties": Keyword("in part", "up to 4 patterns, each as `pattern`; if `additionalProperties` is missing, there are no other properties"),
    "propertyNames": Keyword("in part", "an `enum`, or what can be enforced of a string"),
    "minProperties": Keyword("in part", "up to 32 optional `properties` (1,000 and more where few are counted); of other properties one, as a name may come twice"),
    "maxProperties": Keyword("in part", "as `minProperties`"),
    "dependentRequired": Keyword("enforced", "up to 500 combinations"),
    "dependentSchemas": Keyword("enforced", "as `dependentRequired`"),
    "dependencies": Keyword("enforced", "older spelling of both"),
    "unevaluatedProperties": Keyword("in part", "where nothing outside of its own schema says more of the object"),
    "items": Keyword("enforced", "a schema, or an array (older spelling of `prefixItems`)"),
    "prefixItems": Keyword("enforced", "all of them, unless `minItems` is given; nothing after them, unless `items` is given"),
    "additionalItems": Keyword("enforced", "older spelling of `items` after `prefixItems`"),
    "minItems": Keyword("enforced", "up to 100,000"),
    "maxItems": Keyword("enforced", "up to 100,000"),
    "uniqueItems": Keyword("not enforced", "but where an array has one item at most"),
    "contains": Keyword("not enforced", "items are not counted by their schema"),
    "minContains": Keyword("not enforced", "as `contains`; 0 asks for nothing"),
    "maxContains": Keyword("not enforced", "as `contains`"),
    "unevaluatedItems": Keyword("in part", "as `unevaluatedProperties`, without `contains`"),
}  # fmt: skip
"""What a schema asserts, and what it is put together from."""

ANNOTATIONS = frozenset({
    "$schema", "$vocabulary", "$comment", "title", "description", "default", "examples", "example", "deprecated",
    "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "id", "discriminator", "xml",
    "externalDocs", "propertyOrdering", "enumNames", "enumDescriptions", "markdownDescription", "errorMessage",
    "defaultSnippets", "deprecationMessage",
})  # fmt: skip
"""What says nothing about which values are allowed: of JSON Schema, OpenAPI, Gemini, and editors. So do names with x-."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

ONE = frozenset({
    "additionalProperties", "additionalItems", "items", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""Keywords whose value is a schema (items: perhaps an array of them)."""

LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
"""Keywords whose value is an array of schemas."""

MAP = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"})
"""Keywords whose value is an object of schemas (dependencies: or of arrays of names)."""

DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
"""Keywords that ask for more where an object has a property."""

OF_TYPE: dict[str, frozenset[str]] = {
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems",
    }),
    "object": frozenset({
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    }),
}  # fmt: skip
"""Keywords that only tell something of values of one type."""


def is_annotation(keyword: str) -> bool:
    """Return whether a keyword says nothing about which values are allowed."""
    return keyword in ANNOTATIONS or keyword.startswith("x-")
