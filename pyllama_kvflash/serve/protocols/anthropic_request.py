"""Requests of the Anthropic protocol (Messages API), checked and converted to the OpenAI form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyllama_kvflash.engine.answer import MAX_ANSWER
from pyllama_kvflash.json_schema import Checked
from pyllama_kvflash.serve.protocols import conversation
from pyllama_kvflash.serve.protocols.answer_fields import sampling_of, stop_of
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

    counting: the request only counts tokens, and needs no max_tokens.
    """
    fields = {k: v for k, v in body.items() if v is not None}
    check_known(fields, _KNOWN, served.unknown, _IGNORED)
    get(fields, "model", str)  # any name: there is one model
    limit = ranged(fields, "max_tokens", int, 0, MAX_ANSWER)  # 0: the prompt is only read
    if limit is None and not counting:
        raise invalid("max_tokens is missing: give a limit for the answer", "max_tokens", "missing_field")
    pins, unknown = _Pins(), served.unknown
    pins.see(fields, "")
    tools = _tools(fields, pins)
    choice, parallel = _choice(obj(fields, "tool_choice"), tools)
    found = [*_system(fields.get("system"), pins), *_messages(fields.get("messages"), pins, unknown)]
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
        pin_seconds=pins.seconds,
    )


def _reasoning(thinking: dict[str, Any] | None, config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the template's settings for reasoning."""
    effort = get(config or {}, "effort", str, "output_config.effort")
    res: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking.get("type") != "disabled"}
    return res if effort is None else {**res, "reasoning_effort": effort}


class _Pins:
    """How long the cache must keep the prompt, from its cache_control marks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def see(self, fields: Mapping[str, Any], at: str) -> None:
        """Read the mark of an object, if it has one. at: the object's name in messages."""
        name = f"{at}.cache_control".lstrip(".")
        mark = obj(fields, "cache_control", name)
        if mark is not None:
            one_of(mark, "type", ("ephemeral",), f"{name}.type")
            ttl = one_of({"ttl": mark.get("ttl") or "5m"}, "ttl", tuple(_TTL), f"{name}.ttl")
            self.seconds = max(self.seconds, _TTL[ttl])


def _system(value: Any, pins: _Pins) -> list[dict[str, Any]]:
    if value is None:
        return []
    content = _texts(value, "system", pins)
    return [{"role": "system", "content": content}] if content else []


_BILLING = "x-anthropic-billing-header:"
"""The beginning of a block that Claude Code adds to the system prompt. It is not for the model, and differs in each request."""


def _texts(value: Any, at: str, pins: _Pins, unknown: Unknown | None = None) -> str:
    """Return the text of a string, or of text blocks.

    unknown: the blocks are of a tool's result, and what the model cannot see is not refused.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(f"{at} is {kind(value)}: give a string, or an array of text blocks", at, "invalid_type")
    texts = []
    for i, block in enumerate(value):
        note = conversation.unseen(block, f"{at}[{i}]", unknown)
        texts.append(_text(block, f"{at}[{i}]", pins) if note is None else note)
    return conversation.joined(text for text in texts if not text.startswith(_BILLING))


def _text(value: Any, at: str, pins: _Pins) -> str:
    block = as_object(value, at, "type and text")
    one_of(block, "type", ("text",), f"{at}.type")
    pins.see(block, at)
    return text(block, "text", f"{at}.text")


def _messages(value: Any, pins: _Pins, unknown: Unknown) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise invalid("messages must be an array of at least one message", "messages", "invalid_type")
    found = [message for i, m in enumerate(value) for message in _message(m, f"messages[{i}]", pins, unknown)]
    res: list[dict[str, Any]] = []
    for message in found:  # in this protocol, two turns of one role in a row are one turn
        if res and message["role"] == res[-1]["role"] in {"user", "assistant"}:
            res[-1] = conversation.merged(res[-1], message)
        else:
            res.append(message)
    return res


def _message(value: Any, at: str, pins: _Pins, unknown: Unknown) -> list[dict[str, Any]]:
    """Return a message in the OpenAI form: each result of a tool becomes a separate message."""
    given = as_object(value, at, "role and content")
    role = one_of(given, "role", ("user", "assistant", "system"), f"{at}.role")
    check_known(given, {"role", "content"}, unknown, set(), f"{at}.")
    content = given.get("content")
    if isinstance(content, str) or role == "system":
        return [{"role": role, "content": _texts(content, f"{at}.content", pins)}]
    if content is None and role == "assistant":
        content = []
    if not isinstance(content, list):
        raise invalid(f"{at}.content is {kind(content)}: give a string, or an array of blocks", at, "invalid_type")
    blocks = [as_object(b, f"{at}.content[{i}]", "a type") for i, b in enumerate(content)]
    return (
        _user(blocks, f"{at}.content", pins, unknown) if role == "user" else _assistant(blocks, f"{at}.content", pins)
    )


def _user(blocks: Sequence[dict[str, Any]], at: str, pins: _Pins, unknown: Unknown) -> list[dict[str, Any]]:
    """Return the results of tools, and then the message of the user, if there is one."""
    results, texts = [], []
    for i, block in enumerate(blocks):
        here = f"{at}[{i}]"
        if one_of(block, "type", ("text", "tool_result"), f"{here}.type") == "text":
            texts.append(_text(block, here, pins))
            continue
        pins.see(block, here)
        there = block.get("content")
        found = "" if there is None else _texts(there, f"{here}.content", pins, unknown)
        if get(block, "is_error", bool, f"{here}.is_error"):
            found = f"Error: {found}"
        called = text(block, "tool_use_id", f"{here}.tool_use_id")
        results.append({"role": "tool", "tool_call_id": called, "content": found})
    return results + ([{"role": "user", "content": conversation.joined(texts)}] if texts or not results else [])


def _assistant(blocks: Sequence[dict[str, Any]], at: str, pins: _Pins) -> list[dict[str, Any]]:
    """Return the message of the assistant."""
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        here = f"{at}[{i}]"
        pins.see(block, here)
        match one_of(block, "type", ("text", "tool_use", "thinking", "redacted_thinking"), f"{here}.type"):
            case "text":
                texts.append(text(block, "text", f"{here}.text"))
            case "thinking":
                thoughts.append(text(block, "thinking", f"{here}.thinking"))
            case "tool_use":
                function = {"name": text(block, "name", f"{here}.name")}
                function["arguments"] = json.dumps(obj(block, "input", f"{here}.input") or {}, ensure_ascii=False)
                calls.append({"id": text(block, "id", f"{here}.id"), "type": "function", "function": function})
    res = {
        "role": "assistant",
        "content": conversation.joined(texts),
        "tool_calls": calls,
        "reasoning_content": "\n".join(thoughts),
    }
    return [res]


def _tools(fields: Mapping[str, Any], pins: _Pins) -> tuple[dict[str, Any], ...]:
    tools: list[Any] = []
    for i, value in enumerate(array(fields, "tools") or ()):
        at = f"tools[{i}]"
        tool = as_object(value, at, "name and input_schema")
        if tool.get("type") is not None and tool["type"] != "custom":
            msg = f"{at}.type is {repr(tool['type'])[:100]}: this server has no tools of its own, only custom ones"
            raise invalid(msg, f"{at}.type", "unsupported_parameter")
        pins.see(tool, at)
        function = {
            "name": text(tool, "name", f"{at}.name"),
            "description": get(tool, "description", str, f"{at}.description"),
            "parameters": tool.get("input_schema"),
            "strict": tool.get("strict"),
        }
        tools.append({"type": "function", "function": function})
    return conversation.tools(tools, "tools[{}].input_schema")


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
    form, at = obj(fields, "output_format"), "output_format"  # as it was in the beta
    if form is None:
        form, at = obj(obj(fields, "output_config") or {}, "format", "output_config.format"), "output_config.format"
    if form is None:
        return None
    one_of(form, "type", ("json_schema",), f"{at}.type")
    found = obj(form, "schema", f"{at}.schema")
    if found is None:
        raise invalid(f"{at}.schema is missing: give an object", f"{at}.schema", "missing_field")
    return conversation.schema(found, f"{at}.schema")
