"""Every keyword of JSON Schema that this package knows. docs/schemas.py says what comes of each."""

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

SAME_VALUE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"})
"""Keywords whose schemas apply to the same value as the schema that has them."""

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


KEYWORDS = ONE | LIST | MAP | frozenset(DEPENDENT).union(*OF_TYPE.values()) | {
    "type", "nullable", "enum", "const", "minContains", "maxContains",
    "$ref", "$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor",
}  # fmt: skip
"""All that say something of values, or of schemas."""


def is_annotation(keyword: str) -> bool:
    """Return whether a keyword says nothing about which values are allowed."""
    return keyword in ANNOTATIONS or keyword.startswith("x-")
