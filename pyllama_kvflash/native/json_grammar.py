"""Grammars of JSON schemas."""

import warnings
from collections.abc import Callable

from pyllama_kvflash.json_schema import Checked, check, loads


def json_grammar(schema: str, *, strict: bool = False, note: Callable[[str], None] = warnings.warn) -> str:
    """Return the grammar (GBNF) of the texts that a JSON schema allows.

    note: called with a sentence about each keyword that is not enforced. strict: such a schema is an error instead.

    Raises UsageError, and SchemaError, which names the place and the keyword.
    """
    checked = check(loads(schema), strict=strict)
    for loosened in checked.loosened:
        note(str(loosened))
    return whole_grammar(checked)


def whole_grammar(checked: Checked) -> str:
    """Return the grammar (GBNF) of a schema's texts."""
    name, rules = checked.rules("j")
    return f"root ::= {name}\n{rules}"
