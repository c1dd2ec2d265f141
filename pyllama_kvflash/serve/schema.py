"""Request bodies, checked field by field. Whatever is not understood is refused, not ignored."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pyllama_kvflash.chat import Message
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.native import Sampling, json_grammar
from pyllama_kvflash.serve.fault import invalid

MAX_STOP, MAX_STOP_CHARS = 4, 500
LEGACY_MAX_TOKENS = 16  # default of a completion in the OpenAI protocol

_SEEDS = 2**32 - 1  # seeds of the sampler; those of the protocol are 64-bit
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
}  # fmt: skip
"""Fields that do not affect the answer."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "logprobs": (False,),
    "top_logprobs": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "verbosity": (),
}
"""Fields of the protocol that this server cannot do, with the values (besides null) that ask for nothing."""

T = TypeVar("T", bound=int | float | str | bool)


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request: messages (of a chat), or a prompt (text or token ids). max_tokens: None if not given."""

    messages: tuple[Message, ...]
    prompt: str | list[int]
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises Fault."""
    try:
        value = json.loads(body)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as err:  # no JSON, no UTF-8, or a number of thousands of digits
        raise invalid(f"the body is no JSON: {str(err)[:200]}") from None
    if not isinstance(value, dict):
        raise invalid(f"the body is {_kind(value)}: give a JSON object")
    return value


def parse(body: dict[str, Any], *, chat: bool, defaults: Sampling, n_vocab: int) -> Ask:
    """Check a body. Raises Fault.

    chat: whether it asks for a chat, not a completion.
    defaults: for what the request leaves open.
    n_vocab: tokens of the model.
    """
    fields = {k: v for k, v in body.items() if v is not None}
    _check_known(fields, {*_COMMON, "messages" if chat else "prompt"})
    _get(fields, "model", str)  # any name: there is one model
    stream = bool(_get(fields, "stream", bool))
    return Ask(
        messages=_messages(fields.get("messages")) if chat else (),
        prompt="" if chat else _prompt(fields.get("prompt"), n_vocab),
        sampling=_sampling(fields, defaults, n_vocab),
        max_tokens=_max_tokens(fields, chat=chat),
        stop=_stop(fields.get("stop")),
        stream=stream,
        include_usage=_include_usage(_object(fields, "stream_options"), stream=stream),
    )


_COMMON = {
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "seed",
    "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty", "logit_bias",
    "response_format", "grammar", "json_schema",
}  # fmt: skip


def _check_known(fields: Mapping[str, Any], known: set[str]) -> None:
    for key, value in fields.items():
        if key in known or key in _IGNORED:
            continue
        if key not in _UNSUPPORTED:
            raise invalid(f"there is no field {key[:100]!r} here: leave it out", key[:100], "unknown_parameter")
        # True == 1, but is not a number of answers
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in _UNSUPPORTED[key]):
            harmless = "".join(f", or give {json.dumps(v)}" for v in _UNSUPPORTED[key])
            raise invalid(
                f"{key} is not supported by this server: leave it out{harmless}", key, "unsupported_parameter"
            )


def _get(fields: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """Return a field of this type; None if it is missing. An integer also counts as a float."""
    value = fields.get(key)
    if value is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 1 << 53:
        return kind(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise invalid(f"{key} is {_kind(value)}: give {_KINDS[kind]}", key, "invalid_type")
    return value


def _object(fields: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Return an object in a field; None if it is missing."""
    value = fields.get(key)
    if value is not None and not isinstance(value, dict):
        raise invalid(f"{key} is {_kind(value)}: give an object", key, "invalid_type")
    return value


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _kind(value: Any) -> str:
    """Return the type of a JSON value, in words."""
    return "null" if value is None else _KINDS[type(value)]


def _ranged(fields: Mapping[str, Any], key: str, kind: type[T], low: float, high: float) -> T | None:
    value: Any = _get(fields, key, kind)
    if value is not None and not low <= value <= high:  # NaN fails
        raise invalid(f"{key} is {value}, and must be from {low:g} to {high:g}", key, "invalid_value")
    res: T | None = value
    return res


def _sampling(fields: Mapping[str, Any], defaults: Sampling, n_vocab: int) -> Sampling:
    given: dict[str, Any] = {
        "temperature": _ranged(fields, "temperature", float, 0, 2),
        "top_p": _ranged(fields, "top_p", float, 0, 1),
        "top_k": _ranged(fields, "top_k", int, 0, 2**31 - 1),
        "min_p": _ranged(fields, "min_p", float, 0, 1),
        "repeat_penalty": _ranged(fields, "repeat_penalty", float, 0.001, 1000),
        "frequency_penalty": _ranged(fields, "frequency_penalty", float, -2, 2),
        "presence_penalty": _ranged(fields, "presence_penalty", float, -2, 2),
        "logit_bias": _logit_bias(_object(fields, "logit_bias"), n_vocab),
        "grammar": _grammar(fields),
    }
    seed = _get(fields, "seed", int)
    given["seed"] = None if seed is None else seed % _SEEDS
    return replace(defaults, **{k: v for k, v in given.items() if v is not None})


def _logit_bias(value: dict[str, Any] | None, n_vocab: int) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    found = []
    for key in value:
        if not (key.isdecimal() and len(key) < 10 and int(key) < n_vocab):  # noqa: PLR2004 (digits)
            msg = f"logit_bias is for {key[:20]!r}, which is no token: ids are 0 to {n_vocab - 1}"
            raise invalid(msg, "logit_bias", "invalid_value")
        bias = _ranged({"logit_bias": value[key]}, "logit_bias", float, -100, 100)
        found.append((int(key), 0.0 if bias is None else bias))
    return tuple(found)


_FORMATS = "text", "json_object", "json_schema"


def _grammar(fields: Mapping[str, Any]) -> str | None:
    """Return the grammar that the answer is to keep to; None if the request does not say."""
    grammar, schema = _get(fields, "grammar", str), _object(fields, "json_schema")
    form = _object(fields, "response_format")
    if form is not None:
        asked = _asked_schema(form)
        if asked is not None and (grammar or schema):
            msg = "response_format and a grammar or json_schema are given: give one of them"
            raise invalid(msg, "response_format", "invalid_value")
        schema = asked if asked is not None else schema
    if schema is None:
        return grammar
    if grammar:
        msg = "grammar and json_schema are given: give one of them"
        raise invalid(msg, "grammar", "invalid_value")
    try:
        return json_grammar(json.dumps(schema))
    except KVFlashError as err:
        raise invalid(str(err), "response_format" if form else "json_schema", "invalid_value") from None


def _asked_schema(form: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema that a response_format asks for; None: any text."""
    kind = form.get("type")
    if kind not in _FORMATS:
        msg = f"response_format.type is {str(kind)[:100]!r}: give one of {', '.join(_FORMATS)}"
        raise invalid(msg, "response_format", "invalid_value")
    if kind == "text":
        return None
    if kind == "json_object":
        asked = form.get("schema", {"type": "object"})
    else:
        asked = (_object(form, "json_schema") or {}).get("schema")
    if not isinstance(asked, dict):
        msg = "response_format has no schema: give json_schema.schema, an object"
        raise invalid(msg, "response_format", "invalid_value")
    return asked


def _max_tokens(fields: Mapping[str, Any], *, chat: bool) -> int | None:
    key = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    value = _get(fields, key, int)
    if value is not None and not 1 <= value < 1 << 31:
        raise invalid(f"{key} is {value}, and must be 1 or more", key, "invalid_value")
    return LEGACY_MAX_TOKENS if value is None and not chat else value


def _stop(value: Any) -> tuple[str, ...]:
    stop = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(s, str) for s in stop) or len(stop) > MAX_STOP:
        raise invalid(f"stop is neither a string nor an array of up to {MAX_STOP} of them", "stop", "invalid_type")
    if any(len(s) > MAX_STOP_CHARS for s in stop):
        raise invalid(f"a stop string is longer than {MAX_STOP_CHARS} characters", "stop", "invalid_value")
    return tuple(filter(None, stop))


def _include_usage(value: dict[str, Any] | None, *, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise invalid("stream_options is for requests with stream: true", "stream_options", "invalid_value")
    _check_known(value, {"include_usage", "include_obfuscation"})
    return bool(_get(value, "include_usage", bool))


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise invalid("messages must be an array of at least one message", "messages", "invalid_type")
    return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(value))


def _message(value: Any, at: str) -> Message:
    if not isinstance(value, dict):
        raise invalid(f"{at} is {_kind(value)}: give an object with role and content", at, "invalid_type")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        shown = repr(role)[:100]
        raise invalid(f"{at}.role is {shown}: give one of {', '.join(_ROLES)}", f"{at}.role", "invalid_value")
    extra = next((k for k, v in value.items() if k not in {"role", "content", "name"} and v not in (None, [])), None)
    if extra is not None:
        raise invalid(f"{at}.{extra[:100]} is not supported by this server: leave it out", at, "unsupported_parameter")
    return {"role": _ROLES[role], "content": _content(value.get("content"), f"{at}.content")}


def _content(value: Any, at: str) -> str:
    """Return the text of a string, or of an array of parts, which must all be text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(f"{at} is {_kind(value)}: give a string, or an array of text parts", at, "invalid_type")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f'{at} has a part that is no {{"type": "text", "text": "..."}}: only text can be read', at)
    return "".join(part["text"] for part in value)


def _prompt(value: Any, n_vocab: int) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value or any(type(t) is not int for t in value):
        raise invalid("prompt must be a string or an array of token ids, and not empty; one prompt a request", "prompt")
    if bad := [t for t in value if not 0 <= t < n_vocab]:
        raise invalid(f"token {str(bad[0])[:20]} is not in the vocabulary: ids are 0 to {n_vocab - 1}", "prompt")
    return value
