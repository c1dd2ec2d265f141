"""Request fields that several protocols share: an answer's sampling, its schema and its length."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyllama_kvflash.engine.answer import MAX_ANSWER
from pyllama_kvflash.errors import UsageError, number
from pyllama_kvflash.json_schema import Checked
from pyllama_kvflash.native import MAX_BIASES, MAX_BREAKERS, RANGES, Sampling, order_of, order_of_letters
from pyllama_kvflash.serve.protocols import conversation
from pyllama_kvflash.serve.protocols.fields import array, get, obj, ranged
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, Served
from pyllama_kvflash.serve.protocols.request_error import invalid

_RANGES: dict[str, tuple[type[int | float], float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0, 1),
    "repeat_penalty": (float, 0.001, 1000),
    "frequency_penalty": (float, -2, 2),
    "presence_penalty": (float, -2, 2),
    **RANGES,
}
SAMPLING = {*_RANGES, "logit_bias", "seed", "grammar", "samplers", "dry_sequence_breakers", "ignore_eos"}
"""Fields that sampling_of() reads."""

MAX_STOP, MAX_STOP_CHARS = 64, 500  # the protocol allows 4 strings; autocompletion sends more
MAX_SEED = 2**32 - 1  # the sampler's seeds are 32-bit, the protocol's 64-bit


def sampling_of(fields: Mapping[str, Any], served: Served) -> Sampling:
    """Return the sampling settings: the server's own, overridden by the fields of a request. Raises RequestError."""
    found: dict[str, Any] = {
        **{name: _in_range(fields, name, served.kv.options.n_ctx) for name in _RANGES},
        "samplers": _order(fields.get("samplers")),
        "dry_sequence_breakers": _breakers(array(fields, "dry_sequence_breakers")),
        "ignore_eos": get(fields, "ignore_eos", bool),
        "logit_bias": _logit_bias(obj(fields, "logit_bias"), served.kv.model.n_vocab),
        "grammar": get(fields, "grammar", str),
    }
    seed = get(fields, "seed", int)
    found["seed"] = None if seed in {None, -1} else seed % MAX_SEED  # -1: a random one
    try:
        return replace(served.defaults, **{k: v for k, v in found.items() if v is not None})
    except UsageError as err:  # about dry_sequence_breakers: the other fields were checked
        raise invalid(str(err).replace("`", ""), "dry_sequence_breakers", "invalid_value") from None


def _in_range(fields: Mapping[str, Any], name: str, n_ctx: int) -> float | None:
    kind, low, high = _RANGES[name]
    if fields.get(name) == -1 and name in {"repeat_last_n", "dry_penalty_last_n"}:  # -1: the whole context
        return int(min(n_ctx, high))
    if fields.get(name) == -1 and name == "top_k":  # -1: all tokens
        return 0
    return ranged(fields, name, kind, low, high)


def _order(value: Any) -> tuple[str, ...] | None:
    """Return the order of samplers. value: an array of names, llama-server's letters, or names separated by semicolons."""
    if value is None:
        return None
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise invalid("samplers must be a string or an array of names", "samplers", "invalid_type")
    letters = order_of_letters(value) if isinstance(value, str) else None
    try:
        return order_of(value if letters is None else letters)
    except UsageError as err:
        raise invalid(str(err).replace("`", ""), "samplers", "invalid_value") from None


def _breakers(value: list[Any] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not all(isinstance(text, str) for text in value) or len(value) > MAX_BREAKERS:
        msg = f"dry_sequence_breakers must be an array of up to {MAX_BREAKERS} strings"
        raise invalid(msg, "dry_sequence_breakers", "invalid_type")
    return tuple(filter(None, value))


def _logit_bias(value: dict[str, Any] | None, n_vocab: int) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    if len(value) > MAX_BIASES:
        msg = f"logit_bias has {len(value):,} tokens: the limit is {MAX_BIASES:,}"
        raise invalid(msg, "logit_bias", "invalid_value")
    found = []
    for key in value:
        if not (key.isdecimal() and len(key) < 10 and int(key) < n_vocab):  # noqa: PLR2004 (digits)
            msg = f"logit_bias names {key[:20]!r}, which is not a token: ids are 0 to {n_vocab - 1:,}"
            raise invalid(msg, "logit_bias", "invalid_value")
        bias = ranged(value, key, float, -100, 100, f"logit_bias.{key}")
        found.append((int(key), 0.0 if bias is None else bias))
    return tuple(found)


def schema_of(fields: Mapping[str, Any]) -> Checked | None:
    """Return the JSON schema of the answer; None: it may be any text. Raises RequestError."""
    form = obj(fields, "response_format")
    asked, given = conversation.schema_of_form(form, "response_format", "json_schema"), fields.get("json_schema")
    if sum(bool(source) for source in (asked is not None, given is not None, fields.get("grammar"))) > 1:
        msg = "response_format, json_schema and grammar cannot be combined: give one of them"
        raise invalid(msg, "response_format" if form else "grammar", "invalid_value")
    return asked if given is None else conversation.schema(given, "json_schema")


def template_kwargs(fields: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Return the settings for the chat template. effort: the reasoning effort; "none" turns reasoning off. Raises RequestError."""
    res = dict(obj(fields, "chat_template_kwargs") or {})
    if effort:
        res |= {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return res


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are given. A field that is null counts as not given."""
    return {k: v for k, v in body.items() if v is not None}


def usual(fields: Mapping[str, Any], served: Served, max_tokens: int | None) -> ParsedRequest:
    """Return a request with the fields that the OpenAI protocol and llama-server share. Raises RequestError."""
    get(fields, "model", str)  # any name: there is one model
    slot = ranged(fields, "id_slot", int, -1, len(served.kv.sequences) - 1)
    return ParsedRequest(
        schema=schema_of(fields),
        sampling=sampling_of(fields, served),
        max_tokens=max_tokens,
        stop=stop_of(fields.get("stop")),
        stream=bool(get(fields, "stream", bool)),
        id_slot=-1 if slot is None else slot,
        cache_prompt=get(fields, "cache_prompt", bool) is not False,
        timings_per_token=bool(get(fields, "timings_per_token", bool)),
        return_progress=bool(get(fields, "return_progress", bool)),
    )


def max_tokens_of(fields: Mapping[str, Any]) -> int | None:
    """Return the limit for an answer's tokens; None: as many as fit. Raises RequestError."""
    names = "max_completion_tokens", "n_predict", "max_tokens"
    key = next((name for name in names if name in fields), "max_tokens")
    value = get(fields, key, int)
    if value == -1:  # as in llama.cpp
        return None
    if value is not None and not 1 <= value <= MAX_ANSWER:
        what = "1 or more" if value < 1 else f"{MAX_ANSWER:,} or less"
        raise invalid(f"{key} is {number(value)}, and must be {what}, or -1 for as many as fit", key, "invalid_value")
    return value


def stop_of(value: Any, key: str = "stop") -> tuple[str, ...]:
    """Return the strings that end an answer. Raises RequestError."""
    stop = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(s, str) for s in stop) or len(stop) > MAX_STOP:
        raise invalid(f"{key} must be a string or an array of up to {MAX_STOP} strings", key, "invalid_type")
    if any(len(s) > MAX_STOP_CHARS for s in stop):
        raise invalid(f"a string of {key} has more than {MAX_STOP_CHARS} characters: shorten it", key, "invalid_value")
    return tuple(filter(None, stop))
