"""Fields of JSON objects, checked one by one. Each function raises RequestError for a value of the wrong kind."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pyllama_kvflash.errors import UsageError, encoded, out_of_range
from pyllama_kvflash.serve.protocols.request_error import invalid

T = TypeVar("T", bound=int | float | str | bool)

MAX_DEPTH = 200  # levels of objects and arrays in a body
_MAX_NAME, _MAX_UNKNOWN = 100, 40  # most characters of a field's name in a warning, and most warnings

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


class Unknown:
    """Collects warnings for the client about parts of its request that have no effect, such as unknown fields.

    warnings: a sentence for each part.
    """

    def __init__(self, *, strict: bool = False) -> None:
        """strict: whether to refuse a request with such parts."""
        self.strict = strict
        self.warnings: list[str] = []

    def see(self, name: str) -> None:
        """Note an unknown field. Raises RequestError if `strict`."""
        name = name[:_MAX_NAME]
        if self.strict:
            raise invalid(f"{name!r} is not a known field: leave it out", name, "unknown_parameter")
        self._warn(f"{name!a} is not a known field, and has no effect")

    def leave_out(self, name: str, why: str) -> None:
        """Note a part of the request that the model does not see. Raises RequestError if `strict`."""
        if self.strict:
            raise invalid(f"{name} cannot be used: {why}", name, "unsupported_parameter")
        self._warn(f"{name} is left out: {why}")

    def _warn(self, sentence: str) -> None:
        if sentence not in self.warnings and len(self.warnings) < _MAX_UNKNOWN:
            self.warnings.append(sentence)


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises RequestError."""
    try:
        value = _decoded(body)
    except RecursionError:
        raise invalid(f"the body is nested too deeply: objects and arrays may be {MAX_DEPTH} deep") from None
    except ValueError as err:  # not JSON, not UTF-8, or a number of thousands of digits
        raise invalid(f"the body is not JSON: {str(err)[:200]}") from None
    if not isinstance(value, dict):
        raise invalid(f"the body is {kind(value)}: give a JSON object")
    if _HALF.search(body):
        for key, part in value.items():
            _check_unicode(key, "a name in the body", None)
            _check_unicode(part, ascii(key)[1:-1][:100], key)
    return value


_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Matches each surrogate, lone or in a pair."""


def _check_unicode(value: Any, at: str, param: str | None) -> None:
    """Raise RequestError if a text in a value is not Unicode. at: the value's name. param: the body's field that holds the value."""
    if isinstance(value, str):
        try:
            encoded(value, at)
        except UsageError as err:
            raise invalid(str(err), param, "invalid_value") from None
    elif isinstance(value, list):
        for i, part in enumerate(value):
            _check_unicode(part, f"{at}[{i}]", param)
    elif isinstance(value, dict):
        for key, part in value.items():
            _check_unicode(key, f"a name in {at}", param)
            _check_unicode(part, f"{at}.{key[:100]}", param)


def _decoded(text: bytes | str, **how: Any) -> Any:
    """Return the value of a JSON text. how: passed to json.loads().

    Raises ValueError, and RecursionError for more than MAX_DEPTH levels: libraries recurse for each level.
    """
    value = json.loads(text, **how)
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        if not parts:
            return value
        level = [v for part in parts for v in part if isinstance(v, dict | list)]
    raise RecursionError


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object of at most MAX_DEPTH levels."""
    try:
        return isinstance(_decoded(text, parse_constant=_no_number), dict)
    except (ValueError, RecursionError):
        return False


def _no_number(name: str) -> None:
    """Refuse NaN and infinities, which Python accepts and JSON does not have."""
    raise ValueError(name)


def kind(value: Any) -> str:
    """Return the type of a JSON value, in words."""
    return "null" if value is None else _KINDS[type(value)]


def get(fields: Mapping[str, Any], key: str, want: type[T], at: str = "") -> T | None:
    """Return a field of the type `want`; None if it is missing. A float may be written as an integer. at: the field's name in messages."""
    value, at = fields.get(key), at or key
    if value is None:
        return None
    if want is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 1 << 53:
        return want(value)
    if not isinstance(value, want) or isinstance(value, bool) != (want is bool):
        raise invalid(f"{at} is {kind(value)}: give {_KINDS[want]}", at, "invalid_type")
    return value


def ranged(fields: Mapping[str, Any], key: str, want: type[T], low: float, high: float, at: str = "") -> T | None:
    """Return a field that is a number from `low` to `high`; None if it is missing. at: the field's name in messages."""
    value: Any = get(fields, key, want, at)
    if value is not None and not low <= value <= high:  # NaN fails
        raise invalid(out_of_range(value, low, high, at or key), at or key, "invalid_value")
    res: T | None = value
    return res


def obj(fields: Mapping[str, Any], key: str, at: str = "") -> dict[str, Any] | None:
    """Return an object in a field; None if it is missing."""
    value, at = fields.get(key), at or key
    if value is not None and not isinstance(value, dict):
        raise invalid(f"{at} is {kind(value)}: give an object", at, "invalid_type")
    return value


def array(fields: Mapping[str, Any], key: str, at: str = "") -> list[Any] | None:
    """Return an array in a field; None if it is missing."""
    value, at = fields.get(key), at or key
    if value is not None and not isinstance(value, list):
        raise invalid(f"{at} is {kind(value)}: give an array", at, "invalid_type")
    return value


def text(fields: Mapping[str, Any], key: str, at: str) -> str:
    """Return a required string."""
    value = get(fields, key, str, at)
    if value is None:
        raise invalid(f"{at} is missing: give a string", at, "missing_field")
    return value


def one_of(fields: Mapping[str, Any], key: str, allowed: tuple[str, ...], at: str = "") -> str:
    """Return a required field that is one of the `allowed` words."""
    value, at = fields.get(key), at or key
    if not isinstance(value, str) or value not in allowed:
        said = "missing" if value is None else repr(value)[:100]
        raise invalid(f"{at} is {said}: give one of {', '.join(allowed)}", at, "invalid_value")
    return value


def as_object(value: Any, at: str, of: str) -> dict[str, Any]:
    """Return a value that must be an object. of: the object's fields, in words."""
    if not isinstance(value, dict):
        raise invalid(f"{at} is {kind(value)}: give an object with {of}", at, "invalid_type")
    return value
