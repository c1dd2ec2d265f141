"""Write the table of JSON Schema's keywords in docs/SERVER.md; with --check, fail if it is out of date."""

import sys
from pathlib import Path

from pyllama_kvflash.json_schema.keywords import ANNOTATIONS, KEYWORDS

ROWS = {
    "type": ("enforced", "a name or an array of names. Without it, the other keywords tell it: `properties` an object, and so on"),
    "nullable": ("enforced", "of OpenAPI: `true` beside `type` allows null"),
    "enum": ("enforced", "up to 20,000 values; strings and numbers are filtered by all keywords beside it"),
    "const": ("enforced", "as `enum`"),
    "$ref": ("enforced", "to `#`, a pointer (`~0`, `~1`, `%25`), an `$anchor` or an `$id` of the document, with keywords beside it; any other is refused"),
    "$dynamicRef": ("in part", "as `$ref`, where the document has one anchor of that name; else refused"),
    "$recursiveRef": ("enforced", "of 2019-09: `#`"),
    "$defs": ("enforced", "what `$ref` names"),
    "definitions": ("enforced", "older spelling of `$defs`"),
    "$id": ("enforced", "what `$ref` names"),
    "$anchor": ("enforced", "what `$ref` names"),
    "$dynamicAnchor": ("enforced", "what `$ref` and `$dynamicRef` name"),
    "$recursiveAnchor": ("in part", "where it is the document's root"),
    "allOf": ("enforced", "merged"),
    "anyOf": ("enforced", "with the keywords beside it; up to 500 combinations"),
    "oneOf": ("in part", "where no value can be of two branches: by `type`, `const`, `enum`, or a required property that tells them apart; else as `anyOf`"),
    "not": ("in part", "of `true`, `false`, `type`, `required`, `properties` of these; else only where `const` or `enum` lists strings and numbers, which are filtered by it"),
    "if": ("in part", "where `not` of it can be enforced"),
    "then": ("in part", "as `if`"),
    "else": ("in part", "as `if`"),
    "minimum": ("enforced", "of integers and numbers; up to 15 digits before the point for numbers, which then have no exponent"),
    "maximum": ("enforced", "as `minimum`"),
    "exclusiveMinimum": ("enforced", "as `minimum`; also as `true` beside `minimum` (draft 4)"),
    "exclusiveMaximum": ("enforced", "as `exclusiveMinimum`"),
    "multipleOf": ("in part", "of 1, 0.1, 0.01, ...; others where the range has up to 1,000 multiples"),
    "minLength": ("enforced", "up to 100,000; beside `pattern` or `format`, up to 2,000 states of a machine that reads both"),
    "maxLength": ("enforced", "as `minLength`"),
    "pattern": ("in part", "without look-arounds, back references, `\\b` and `\\p`, and `^` or `$` in what is repeated; up to 2,000 repetitions; several patterns as `minLength`"),
    "format": ("in part", "`date`, `time`, `date-time`, `duration`, `uuid`, `ipv4`, `ipv6`, `hostname`, `email`, `uri`, `uri-reference`, `iri`, `json-pointer`, `relative-json-pointer`: [the usual forms](#formats); others are annotations (2020-12), with a warning"),
    "properties": ("enforced", "in the order of the schema"),
    "required": ("enforced", "also for names that `properties` lacks"),
    "additionalProperties": ("enforced", "if it is missing beside `properties`, there are none; the names of `properties` need up to 2,000 states"),
    "patternProperties": ("in part", "up to 4 patterns, each as `pattern`; without `additionalProperties`, no other properties are written"),
    "propertyNames": ("in part", "an `enum`, or what can be enforced of a string"),
    "minProperties": ("in part", "where optional `properties` times the counted ones are up to 1,000; of properties without a name one, as a name may come twice"),
    "maxProperties": ("in part", "as `minProperties`"),
    "dependentRequired": ("enforced", "up to 500 combinations"),
    "dependentSchemas": ("enforced", "as `dependentRequired`"),
    "dependencies": ("enforced", "older spelling of both"),
    "unevaluatedProperties": ("in part", "where nothing outside of its own schema says more of the object"),
    "items": ("enforced", "a schema, or an array (older spelling of `prefixItems`)"),
    "prefixItems": ("enforced", "all of them, unless `minItems` is given; nothing after them, unless `items` is given"),
    "additionalItems": ("enforced", "older spelling of `items` after `prefixItems`"),
    "minItems": ("enforced", "up to 100,000"),
    "maxItems": ("enforced", "up to 100,000"),
    "uniqueItems": ("not enforced", "but where an array has one item at most"),
    "contains": ("not enforced", "items are not counted by their schema"),
    "minContains": ("not enforced", "as `contains`; 0 asks for nothing"),
    "maxContains": ("not enforced", "as `contains`"),
    "unevaluatedItems": ("in part", "as `unevaluatedProperties`, without `contains`"),
}  # fmt: skip
"""What comes of each keyword: enforced, in part, not enforced; and when, or how."""

TARGET = Path(__file__).with_name("SERVER.md")
BEGIN, END = (f"<!-- docs/schemas.py: {where} -->\n" for where in ("begin", "end"))


def table() -> str:
    """Return the table."""
    if KEYWORDS ^ ROWS.keys():
        sys.exit(f"docs/schemas.py lacks keywords, or has others: {sorted(KEYWORDS ^ ROWS.keys())}")
    rows = [f"| `{name}` | {verdict} | {note} |" for name, (verdict, note) in ROWS.items()]
    names = ", ".join(f"`{name}`" for name in sorted(ANNOTATIONS, key=lambda name: name.strip("$").lower()))
    return "\n".join(
        [
            "| Keyword | | |",
            "|---|---|---|",
            *rows,
            f"| {names}, `x-...` | annotation | says nothing of which values are allowed |",
            "| any other | not enforced | it is not known, and named as such |\n",
        ]
    )


def render(page: str) -> str:
    """Return a page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    text = TARGET.read_text()
    if "--check" in sys.argv:
        sys.exit("docs/SERVER.md is out of date: run `make docs`" if render(text) != text else 0)
    TARGET.write_text(render(text))
