"""Grammars of JSON schemas."""

import json
import re
import warnings
from collections.abc import Callable
from functools import lru_cache

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.json_schema import Checked, check, loads
from pyllama_kvflash.native.lib import check as check_status
from pyllama_kvflash.native.lib import ffi, lib

_USUAL_GRAMMAR = 1 << 16  # bytes: a larger one is made twice
_MAX_REPEATED = 2_000  # times, in llama.cpp's grammars


def json_grammar(schema: str, *, strict: bool = False, note: Callable[[str], None] = warnings.warn) -> str:
    """Return the grammar (GBNF) of the texts that a JSON schema allows.

    note: called with a sentence about each keyword that is not enforced. strict: such a schema is an error instead.

    Raises UsageError, and SchemaError, which names the place and the keyword.
    """
    checked = check(loads(schema), pattern_grammar, strict=strict)
    for loosened in checked.loosened:
        note(str(loosened))
    return whole_grammar(checked)


def whole_grammar(checked: Checked) -> str:
    """Return the grammar (GBNF) of a schema's texts."""
    name, rules = checked.rules("j")
    return f"root ::= {name}\n{rules}"


@lru_cache(maxsize=1024)
def pattern_grammar(pattern: str) -> str | None:
    """Return the grammar (GBNF) of the strings in which a regular expression is found; None: there is none."""
    if "\0" in pattern:
        return None
    try:
        res = _converted(json.dumps({"type": "string", "pattern": pattern}))
    except UsageError:
        return None
    # llama.cpp takes any string for one that it does not know, and says so on stderr only
    repeated = [
        int(n)
        for found in re.findall(r"\{(\d*),?(\d*)\}", re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', "", res))
        for n in found
        if n
    ]
    return None if "\nroot ::= string\n" in res or max(repeated, default=0) > _MAX_REPEATED else res


def _converted(schema: str) -> str:
    size, text, res = ffi.new("size_t *"), schema.encode(), ffi.new("char[]", _USUAL_GRAMMAR)
    check_status(lib.kvf_json_grammar(text, res, _USUAL_GRAMMAR, size))
    if size[0] > _USUAL_GRAMMAR:
        res = ffi.new("char[]", size[0])
        check_status(lib.kvf_json_grammar(text, res, size[0], size))
    found: bytes = ffi.string(res)
    return found.decode()
