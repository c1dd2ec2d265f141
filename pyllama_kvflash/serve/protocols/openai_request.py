"""Requests of the OpenAI protocol, checked field by field."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyllama_kvflash.errors import number
from pyllama_kvflash.serve.protocols import conversation
from pyllama_kvflash.serve.protocols.answer_fields import SAMPLING, given, max_tokens_of, template_kwargs, usual
from pyllama_kvflash.serve.protocols.fields import Unknown, get, obj, ranged
from pyllama_kvflash.serve.protocols.fim import infill
from pyllama_kvflash.serve.protocols.known import check_known
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, Served
from pyllama_kvflash.serve.protocols.request_error import invalid

MAX_ANSWERS = 128
MAX_LOGPROBS = 20
LEGACY_MAX_TOKENS = 16  # default of a completion in the OpenAI protocol

_COMMON = SAMPLING | {
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n_predict", "stop", "n", "logprobs",
    "response_format", "json_schema", "id_slot", "cache_prompt", "timings_per_token", "return_progress",
}  # fmt: skip
_CHAT = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "reasoning_effort", "chat_template_kwargs",
    *conversation.CONTINUING,
}  # fmt: skip


def completion(body: dict[str, Any], served: Served) -> ParsedRequest:
    """Check the body of POST /v1/completions. Raises RequestError."""
    fields = given(body)
    check_known(fields, _COMMON | {"prompt", "suffix"}, served.unknown)
    res = _both(fields, served)
    if not fields.keys() & {"max_tokens", "max_completion_tokens", "n_predict"}:
        res = replace(res, max_tokens=LEGACY_MAX_TOKENS)
    sampling = replace(res.sampling, n_probs=ranged(fields, "logprobs", int, 0, MAX_LOGPROBS))
    prompt = prompt_of(fields.get("prompt"), served.kv.model.n_vocab)
    if suffix := get(fields, "suffix", str):
        if not isinstance(prompt, str):
            raise invalid("suffix needs a prompt that is a string", "suffix", "invalid_value")
        prompt = infill(served.kv, prompt, suffix, at="suffix")
    return replace(res, sampling=sampling, prompt=prompt)


def _both(fields: Mapping[str, Any], served: Served) -> ParsedRequest:
    """Return a request with the fields that chats and completions share."""
    parsed = usual(fields, served, max_tokens_of(fields))
    return replace(
        parsed,
        n=ranged(fields, "n", int, 1, MAX_ANSWERS) or 1,
        include_usage=_include_usage(obj(fields, "stream_options"), served.unknown, stream=parsed.stream),
    )


def chat(body: dict[str, Any], served: Served) -> ParsedRequest:
    """Check the body of POST /v1/chat/completions. Raises RequestError."""
    fields = given(body)
    check_known(fields, _COMMON | _CHAT, served.unknown)
    parsed = _both(fields, served)
    tools = conversation.tools(fields.get("tools"))
    choice = conversation.tool_choice(fields.get("tool_choice"), tools)
    if tools and choice != "none" and parsed.sampling.grammar:
        raise invalid("tools and a grammar cannot be combined: give one of them", "grammar", "invalid_value")
    return replace(
        parsed,
        sampling=replace(parsed.sampling, n_probs=_n_probs(fields)),
        messages=conversation.messages(fields.get("messages"), served.unknown),
        continues=conversation.continues(fields),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=get(fields, "parallel_tool_calls", bool),
        chat_template_kwargs=template_kwargs(fields, get(fields, "reasoning_effort", str)),
    )


def _n_probs(fields: Mapping[str, Any]) -> int | None:
    """Return how many of the likeliest tokens to report beside each token; None: no probabilities at all."""
    n = ranged(fields, "top_logprobs", int, 0, MAX_LOGPROBS)
    asked = get(fields, "logprobs", bool)
    if n and not asked:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    return n or 0 if asked else None


def _include_usage(value: dict[str, Any] | None, unknown: Unknown, *, stream: bool) -> bool:
    if value is None:
        return False
    check_known(value, {"include_usage", "include_obfuscation"}, unknown, at="stream_options.")
    return bool(get(value, "include_usage", bool, "stream_options.include_usage")) and stream


def prompt_of(value: Any, n_vocab: int) -> str | list[int]:
    """Return the prompt of a completion, as text or token ids. Raises RequestError."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value or any(type(t) is not int for t in value):
        raise invalid("prompt must be a non-empty string or array of token ids; a request has one prompt", "prompt")
    if bad := [t for t in value if not 0 <= t < n_vocab]:
        raise invalid(
            f"prompt has token {number(bad[0])}, which is not in the vocabulary: ids are 0 to {n_vocab - 1:,}", "prompt"
        )
    return value
