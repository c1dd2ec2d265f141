"""A case of a JSON schema: what comes of it, and what such schemas are made of."""

from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

ENFORCED, LOOSENED, REFUSED = "enforced", "loosened", "refused"


@dataclass(frozen=True)
class Case:
    """keyword: what it is about, or what is named as loosened or refused. good, bad: values that must and must not be taken."""

    keyword: str
    schema: Any
    good: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    verdict: str = ENFORCED
    validator: Any = Draft202012Validator


def typed(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def obj(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def open_obj(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


ONE_OF_EACH = {
    "null": (None,), "boolean": (True, False), "integer": (0, -7, 123456), "number": (1.5, -0.25, 3), "string": ("", "a b", "ü\n😀"),
    "array": ([], [1, [2]]), "object": ({}, {"a": {"b": None}}),
}  # fmt: skip
INT, STR, NUM, BOOL = (typed(kind) for kind in ("integer", "string", "number", "boolean"))
