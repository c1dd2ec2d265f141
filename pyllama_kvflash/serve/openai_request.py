"""Requests of the OpenAI protocol, checked field by field. Unknown fields are refused, not ignored."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyllama_kvflash.chat import Message
from pyllama_kvflash.engine.answer import MAX_ANSWER
from pyllama_kvflash.errors import number
from pyllama_kvflash.json_schema import Checked
from pyllama_kvflash.native import MAX_BIASES, Sampling, whole_grammar
from pyllama_kvflash.serve import conversation
from pyllama_kvflash.serve.fields import get, obj, one_of, ranged
from pyllama_kvflash.serve.request_error import invalid

MAX_STOP, MAX_STOP_CHARS = 64, 500  # the protocol allows 4 strings; autocompletion sends more
MAX_ANSWERS = 128
MAX_LOGPROBS = 20
LEGACY_MAX_TOKENS = 16  # default of a completion in the OpenAI protocol

MAX_SEED = 2**32 - 1  # seeds of the sampler; those of the protocol are 64-bit

_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "cache_prompt", "prompt_cache_options", "prediction",
}  # fmt: skip
"""Fields that do not affect the answer."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
}
"""Fields that this server does not support, with the values that have no effect (null never has one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A checked request: messages (of a chat), or a prompt (text or token ids).

    tools, tool_choice, parallel_tool_calls (None: if the template supports it), chat_template_kwargs: of a chat.
    schema: JSON schema of the answer, checked. max_tokens: None if not given. n: answers wanted.
    pin_seconds: how long the prompt must stay in the cache on disk; 0: as long as there is room.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | list[int] = ""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "none"
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    schema: Checked | None = None
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    pin_seconds: float = 0.0


_COMMON = {
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "logprobs",
    "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty", "logit_bias",
    "response_format", "grammar", "json_schema",
}  # fmt: skip
_CHAT = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "reasoning_effort", "chat_template_kwargs",
}  # fmt: skip


def parse(body: dict[str, Any], *, chat: bool, defaults: Sampling, n_vocab: int) -> ParsedRequest:
    """Check a body. Raises RequestError.

    chat: whether the request is for a chat, not a completion.
    defaults: for the fields that the request leaves out.
    n_vocab: size of the vocabulary.
    """
    fields = {k: v for k, v in body.items() if v is not None}
    check_known(fields, _COMMON | (_CHAT if chat else {"prompt"}))
    get(fields, "model", str)  # any name: there is one model
    stream = bool(get(fields, "stream", bool))
    schema = _schema(fields)
    sampling = replace(sampling_of(fields, defaults, n_vocab), n_probs=_n_probs(fields, chat=chat))
    res = ParsedRequest(
        schema=schema,
        sampling=sampling if chat or schema is None else replace(sampling, grammar=whole_grammar(schema)),
        max_tokens=_max_tokens(fields, chat=chat),
        stop=stop_of(fields.get("stop")),
        n=ranged(fields, "n", int, 1, MAX_ANSWERS) or 1,
        stream=stream,
        include_usage=_include_usage(obj(fields, "stream_options"), stream=stream),
    )
    return _chat(fields, res) if chat else replace(res, prompt=_prompt(fields.get("prompt"), n_vocab))


def _chat(fields: Mapping[str, Any], parsed: ParsedRequest) -> ParsedRequest:
    """Return a request with the fields of a chat."""
    tools = conversation.tools(fields.get("tools"))
    choice = conversation.tool_choice(fields.get("tool_choice"), tools)
    if tools and choice != "none" and parsed.sampling.grammar:
        raise invalid("tools and a grammar cannot be combined: give one of them", "grammar", "invalid_value")
    kwargs = dict(obj(fields, "chat_template_kwargs") or {})
    if effort := get(fields, "reasoning_effort", str):
        kwargs |= {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return replace(
        parsed,
        messages=conversation.messages(fields.get("messages")),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=get(fields, "parallel_tool_calls", bool),
        chat_template_kwargs=kwargs,
    )


def _n_probs(fields: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return how many likely tokens to report for each token; None: not even its own probability."""
    if not chat:
        return ranged(fields, "logprobs", int, 0, MAX_LOGPROBS)
    n = ranged(fields, "top_logprobs", int, 0, MAX_LOGPROBS)
    asked = get(fields, "logprobs", bool)
    if n and not asked:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    return n or 0 if asked else None


def check_known(fields: Mapping[str, Any], known: set[str], ignored: set[str] = _IGNORED, at: str = "") -> None:
    """Raise RequestError for an unknown or unsupported field. at: a prefix of the names in messages."""
    for key, value in fields.items():
        if key in known or key in ignored:
            continue
        if key not in _UNSUPPORTED:
            name = f"{at}{key}"[:100]
            raise invalid(f"{name!r} is not a known field: leave it out", name, "unknown_parameter")
        # True == 1, but is not a number of answers
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in _UNSUPPORTED[key]):
            harmless = "".join(f", or give {json.dumps(v)}" for v in _UNSUPPORTED[key])
            raise invalid(
                f"{key} is not supported by this server: leave it out{harmless}", key, "unsupported_parameter"
            )


def sampling_of(fields: Mapping[str, Any], defaults: Sampling, n_vocab: int) -> Sampling:
    """Return the settings that choose tokens. Raises RequestError."""
    given: dict[str, Any] = {
        "temperature": ranged(fields, "temperature", float, 0, 2),
        "top_p": ranged(fields, "top_p", float, 0, 1),
        "top_k": ranged(fields, "top_k", int, -1, 2**31 - 1),
        "min_p": ranged(fields, "min_p", float, 0, 1),
        "repeat_penalty": ranged(fields, "repeat_penalty", float, 0.001, 1000),
        "frequency_penalty": ranged(fields, "frequency_penalty", float, -2, 2),
        "presence_penalty": ranged(fields, "presence_penalty", float, -2, 2),
        "logit_bias": _logit_bias(obj(fields, "logit_bias"), n_vocab),
        "grammar": get(fields, "grammar", str),
    }
    if given["top_k"] == -1:  # llama.cpp's value for all tokens
        given["top_k"] = 0
    seed = get(fields, "seed", int)
    given["seed"] = None if seed in {None, -1} else seed % MAX_SEED  # -1: a random one
    return replace(defaults, **{k: v for k, v in given.items() if v is not None})


def _logit_bias(value: dict[str, Any] | None, n_vocab: int) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    if len(value) > MAX_BIASES:
        msg = f"logit_bias has {len(value):,} tokens: the limit is {MAX_BIASES:,}"
        raise invalid(msg, "logit_bias", "invalid_value")
    found = []
    for key in value:
        if not (key.isdecimal() and len(key) < 10 and int(key) < n_vocab):  # noqa: PLR2004 (digits)
            msg = f"logit_bias is for {key[:20]!r}, which is not a token: ids are 0 to {n_vocab - 1:,}"
            raise invalid(msg, "logit_bias", "invalid_value")
        bias = ranged(value, key, float, -100, 100, f"logit_bias.{key}")
        found.append((int(key), 0.0 if bias is None else bias))
    return tuple(found)


_FORMATS = "text", "json_object", "json_schema"


def _schema(fields: Mapping[str, Any]) -> Checked | None:
    """Return the JSON schema of the answer; None: it may be any text. Raises RequestError."""
    form = obj(fields, "response_format")
    asked = None if form is None else _asked_schema(form)
    given = fields.get("json_schema")
    if sum(bool(source) for source in (asked is not None, given is not None, fields.get("grammar"))) > 1:
        msg = "response_format, json_schema and grammar cannot be combined: give one of them"
        raise invalid(msg, "response_format" if form else "grammar", "invalid_value")
    return asked if given is None else conversation.schema(given, "json_schema")


def _asked_schema(form: dict[str, Any]) -> Checked | None:
    """Return the schema of a response_format; None: any text."""
    kind = one_of(form, "type", _FORMATS, "response_format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return conversation.schema(form.get("schema", {"type": "object"}), "response_format.schema")
    asked = obj(form, "json_schema", "response_format.json_schema") or {}
    if "schema" not in asked:
        msg = "response_format has no schema: give json_schema.schema, an object"
        raise invalid(msg, "response_format", "invalid_value")
    strict = bool(get(asked, "strict", bool, "response_format.json_schema.strict"))
    return conversation.schema(asked["schema"], "response_format.json_schema.schema", strict=strict)


def _max_tokens(fields: Mapping[str, Any], *, chat: bool) -> int | None:
    key = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    value = get(fields, key, int)
    if value == -1:  # as in llama.cpp
        return None
    if value is not None and not 1 <= value <= MAX_ANSWER:
        what = "1 or more" if value < 1 else f"{MAX_ANSWER:,} or less"
        raise invalid(f"{key} is {number(value)}, and must be {what}, or -1 for as many as fit", key, "invalid_value")
    return LEGACY_MAX_TOKENS if value is None and not chat else value


def stop_of(value: Any, key: str = "stop") -> tuple[str, ...]:
    """Return the strings that end an answer. Raises RequestError."""
    stop = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(s, str) for s in stop) or len(stop) > MAX_STOP:
        raise invalid(f"{key} is not a string, or an array of up to {MAX_STOP} strings", key, "invalid_type")
    if any(len(s) > MAX_STOP_CHARS for s in stop):
        raise invalid(f"a string of {key} has more than {MAX_STOP_CHARS} characters: shorten it", key, "invalid_value")
    return tuple(filter(None, stop))


def _include_usage(value: dict[str, Any] | None, *, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise invalid("stream_options needs stream: true", "stream_options", "invalid_value")
    check_known(value, {"include_usage", "include_obfuscation"}, at="stream_options.")
    return bool(get(value, "include_usage", bool, "stream_options.include_usage"))


def _prompt(value: Any, n_vocab: int) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value or any(type(t) is not int for t in value):
        raise invalid(
            "prompt must be a string or an array of token ids that is not empty; a request has one prompt", "prompt"
        )
    if bad := [t for t in value if not 0 <= t < n_vocab]:
        raise invalid(
            f"prompt has token {number(bad[0])}, which is not in the vocabulary: ids are 0 to {n_vocab - 1:,}", "prompt"
        )
    return value
