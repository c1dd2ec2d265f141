"""The known keywords of JSON Schema. docs/schemas.py says which of them are enforced."""

ANNOTATIONS = frozenset({
    "$schema", "$vocabulary", "$comment", "title", "description", "default", "examples", "example", "deprecated",
    "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "id", "discriminator", "xml",
    "externalDocs", "propertyOrdering", "enumNames", "enumDescriptions", "markdownDescription", "errorMessage",
    "defaultSnippets", "deprecationMessage",
})  # fmt: skip
"""Annotations of JSON Schema, OpenAPI, Gemini and editors: they do not change which values are allowed. So are names with x-."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

ONE = frozenset({
    "additionalProperties", "additionalItems", "items", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""Keywords whose value is a schema (items: or an array of schemas)."""

LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
"""Keywords whose value is an array of schemas."""

MAP = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"})
"""Keywords whose value is an object of schemas (dependencies: also of arrays of names)."""

SAME_VALUE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"})
"""Keywords whose schemas apply to the same value as the schema that has them."""

DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
"""Keywords that apply if an object has a property."""

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
"""Keywords that apply to values of one type only."""

KEYWORDS = ONE | LIST | MAP | frozenset(DEPENDENT).union(*OF_TYPE.values()) | {
    "type", "nullable", "enum", "const", "minContains", "maxContains",
    "$ref", "$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor",
}  # fmt: skip
"""All known keywords that are not annotations."""


def is_annotation(keyword: str) -> bool:
    """Return whether a keyword does not change which values are allowed."""
    return keyword in ANNOTATIONS or keyword.startswith("x-")
