"""Requests of the Anthropic protocol (Messages API), checked and converted to the OpenAI form."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyllama_kvflash.engine.answer import MAX_ANSWER
from pyllama_kvflash.json_schema import Checked
from pyllama_kvflash.serve.protocols import conversation
from pyllama_kvflash.serve.protocols.answer_fields import given, sampling_of, stop_of
from pyllama_kvflash.serve.protocols.fields import Unknown, array, as_object, get, kind, obj, one_of, ranged, text
from pyllama_kvflash.serve.protocols.known import check_known
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, Served
from pyllama_kvflash.serve.protocols.request_error import invalid

_KNOWN = {
    "model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", "tools",
    "tool_choice", "thinking", "cache_control", "output_config", "output_format", *conversation.CONTINUING,
}  # fmt: skip
_IGNORED = {
    "metadata", "service_tier", "container", "context_management", "inference_geo", "betas", "diagnostics", "speed",
    "user_profile_id", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token",
}  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TTL = {"5m": 300.0, "1h": 3600.0}


def parse(body: dict[str, Any], served: Served, *, counting: bool = False) -> ParsedRequest:
    """Check the body of POST /v1/messages. Raises RequestError.

    counting: whether the request only counts tokens; such a request needs no max_tokens.
    """
    fields = given(body)
    check_known(fields, _KNOWN, served.unknown, _IGNORED)
    get(fields, "model", str)  # any name: there is one model
    limit = ranged(fields, "max_tokens", int, 0, MAX_ANSWER)  # 0: the prompt is only read
    if limit is None and not counting:
        raise invalid("max_tokens is missing: give a limit for the answer", "max_tokens", "missing_field")
    tools, unknown = _tools(fields), served.unknown
    choice, parallel = _choice(obj(fields, "tool_choice"), tools)
    found = [*_system(fields.get("system")), *_messages(fields.get("messages"), unknown)]
    messages = conversation.messages(found, unknown)
    picked: dict[str, Any] = {k: fields[k] for k in ("temperature", "top_p", "top_k") if k in fields}
    return replace(
        ParsedRequest(sampling=sampling_of(picked, served)),
        messages=messages,
        continues=conversation.continues(fields),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        schema=_schema(fields),
        chat_template_kwargs=_reasoning(obj(fields, "thinking"), obj(fields, "output_config")),
        max_tokens=limit,
        stop=stop_of(fields.get("stop_sequences"), "stop_sequences"),
        stream=bool(get(fields, "stream", bool)),
        pin_seconds=max(_pins(fields, ""), default=0.0),
    )


def _reasoning(thinking: dict[str, Any] | None, config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the template's settings for reasoning."""
    effort = get(config or {}, "effort", str, "output_config.effort")
    res: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking.get("type") != "disabled"}
    return res if effort is None else {**res, "reasoning_effort": effort}


def _pins(value: Any, at: str) -> Iterator[float]:
    """Yield, for each cache_control in a value, how many seconds to cache the prompt. at: the value's name in messages."""
    if isinstance(value, list):
        for i, part in enumerate(value):
            yield from _pins(part, f"{at}[{i}]")
    elif isinstance(value, dict):
        name = f"{at}.cache_control".lstrip(".")
        if (mark := obj(value, "cache_control", name)) is not None:
            one_of(mark, "type", ("ephemeral",), f"{name}.type")
            yield _TTL[one_of({"ttl": mark.get("ttl") or "5m"}, "ttl", tuple(_TTL), f"{name}.ttl")]
        for key in ("system", "tools", "messages", "content"):
            yield from _pins(value.get(key), f"{at}.{key}".lstrip("."))


_TEXT = {"text": "text"}
_BILLING = "x-anthropic-billing-header:"
"""The beginning of a block that Claude Code adds to the system prompt. It is not for the model, and differs in each request."""


def _system(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        value = [
            block for block in value if not (isinstance(block, dict) and str(block.get("text")).startswith(_BILLING))
        ]
    content = "" if value is None else conversation.content(value, "system", _TEXT)
    return [{"role": "system", "content": content}] if content else []


def _messages(value: Any, unknown: Unknown) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise invalid("messages must be an array of at least one message", "messages", "invalid_type")
    return conversation.by_turns(
        message for i, m in enumerate(value) for message in _message(m, f"messages[{i}]", unknown)
    )


def _message(value: Any, at: str, unknown: Unknown) -> list[dict[str, Any]]:
    """Convert a message to the OpenAI form, in which each tool result is a message of its own."""
    fields = as_object(value, at, "role and content")
    role = one_of(fields, "role", ("user", "assistant", "system"), f"{at}.role")
    check_known(fields, {"role", "content"}, unknown, set(), f"{at}.")
    there, at = fields.get("content"), f"{at}.content"
    if isinstance(there, str) or role == "system":
        return [{"role": role, "content": conversation.content(there, at, _TEXT)}]
    if there is None and role == "assistant":
        there = []
    if not isinstance(there, list):
        raise invalid(f"{at} is {kind(there)}: give a string, or an array of blocks", at, "invalid_type")
    blocks = [as_object(b, f"{at}[{i}]", "a type") for i, b in enumerate(there)]
    return _user(blocks, at, unknown) if role == "user" else [_assistant(blocks, at)]


def _user(blocks: Sequence[dict[str, Any]], at: str, unknown: Unknown) -> list[dict[str, Any]]:
    """Return a message for each tool result among a user's blocks, then one with the texts, unless all blocks are results."""
    results, texts = [], []
    for i, block in enumerate(blocks):
        here = f"{at}[{i}]"
        if one_of(block, "type", ("text", "tool_result"), f"{here}.type") == "text":
            texts.append(text(block, "text", f"{here}.text"))
            continue
        found = conversation.content(block.get("content"), f"{here}.content", _TEXT, unknown)
        if get(block, "is_error", bool, f"{here}.is_error"):
            found = f"Error: {found}"
        called = text(block, "tool_use_id", f"{here}.tool_use_id")
        results.append({"role": "tool", "tool_call_id": called, "content": found})
    return results + ([{"role": "user", "content": conversation.joined(texts)}] if texts or not results else [])


def _assistant(blocks: Sequence[dict[str, Any]], at: str) -> dict[str, Any]:
    """Return an assistant's message with the texts, reasoning and calls of the blocks."""
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        here = f"{at}[{i}]"
        match one_of(block, "type", ("text", "tool_use", "thinking", "redacted_thinking"), f"{here}.type"):
            case "text":
                texts.append(text(block, "text", f"{here}.text"))
            case "thinking":
                thoughts.append(text(block, "thinking", f"{here}.thinking"))
            case "tool_use":
                function = {"name": text(block, "name", f"{here}.name")}
                function["arguments"] = json.dumps(obj(block, "input", f"{here}.input") or {}, ensure_ascii=False)
                calls.append({"id": text(block, "id", f"{here}.id"), "type": "function", "function": function})
    return {
        "role": "assistant",
        "content": conversation.joined(texts),
        "tool_calls": calls,
        "reasoning_content": "\n".join(thoughts),
    }


def _tools(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = array(fields, "tools") or []
    for i, tool in enumerate(tools):
        which = tool.get("type") if isinstance(tool, dict) else None
        if which not in (None, "custom"):
            at = f"tools[{i}].type"
            msg = f"{at} is {repr(which)[:100]}: this server has no tools of its own, only custom ones"
            raise invalid(msg, at, "unsupported_parameter")
    return conversation.tools(tools, "", "input_schema")


def _choice(
    value: dict[str, Any] | None, tools: tuple[dict[str, Any], ...]
) -> tuple[str | dict[str, Any], bool | None]:
    """Return which tools the model may call, and whether it may call several at once."""
    if value is None:
        return conversation.tool_choice(None, tools), None
    alone = get(value, "disable_parallel_tool_use", bool, "tool_choice.disable_parallel_tool_use")
    parallel = None if alone is None else not alone
    how = one_of(value, "type", (*_CHOICES, "tool"), "tool_choice.type")
    if how == "tool":
        named = {"function": {"name": text(value, "name", "tool_choice.name")}}
        return conversation.tool_choice(named, tools), parallel
    return conversation.tool_choice(_CHOICES[how], tools), parallel


def _schema(fields: Mapping[str, Any]) -> Checked | None:
    """Return the JSON schema of the answer; None: it may be any text. Raises RequestError."""
    if (form := obj(fields, "output_format")) is not None:  # the field's name in the beta
        return conversation.schema_of_form(form, "output_format")
    form = obj(obj(fields, "output_config") or {}, "format", "output_config.format")
    return conversation.schema_of_form(form, "output_config.format")
