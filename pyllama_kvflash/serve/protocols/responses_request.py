"""Requests of OpenAI's Responses API, checked and converted to the form of a chat."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyllama_kvflash.chat.engine import Message
from pyllama_kvflash.engine.answer import MAX_ANSWER
from pyllama_kvflash.json_schema import Checked
from pyllama_kvflash.serve.protocols import conversation
from pyllama_kvflash.serve.protocols.answer_fields import given, sampling_of, template_kwargs
from pyllama_kvflash.serve.protocols.fields import Unknown, array, as_object, get, kind, obj, one_of, ranged, text
from pyllama_kvflash.serve.protocols.known import IGNORED, check_known
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, Served
from pyllama_kvflash.serve.protocols.request_error import RequestError, invalid
from pyllama_kvflash.serve.protocols.responses_store import ResponseStore

_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty", "seed", "logit_bias",
}  # fmt: skip
_KNOWN = _SAMPLING | {
    "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text", "reasoning",
    "include", "store", "previous_response_id", "stream", "truncation", "metadata", "chat_template_kwargs",
    *conversation.CONTINUING,
}  # fmt: skip
_IGNORED = IGNORED | {"client_metadata", "max_tool_calls", "stream_options"}
_UNSUPPORTED = {"background", "conversation", "prompt", "top_logprobs"}
_LOGPROBS = "message.output_text.logprobs"
_REASONING = "reasoning.encrypted_content"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The types of parts that are text, each with the field that holds the text."""

_ITEM = {"type", "id", "status"}
_FIELDS = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments", "namespace", "caller"},
    "function_call_output": {"call_id", "output", "name"},
    "reasoning": {"summary", "content", "encrypted_content"},
}
"""Fields of an item besides those in _ITEM, by the item's type."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Parts of a request that only the reply of this protocol needs.

    echo: fields that the response repeats. items: the conversation, without instructions.
    store: where to store the response; None: nowhere. packed: whether reasoning items get an encrypted_content.
    """

    echo: dict[str, Any]
    items: list[dict[str, Any]]
    store: ResponseStore | None
    packed: bool


def parse(body: dict[str, Any], served: Served) -> ParsedRequest:
    """Check the body of POST /v1/responses. Raises RequestError."""
    fields = given(body)
    check_known(fields, _KNOWN, served.unknown, _IGNORED, unsupported=_UNSUPPORTED)
    get(fields, "model", str)  # any name: there is one model
    earlier, items = _earlier(fields, served.responses), _input(fields, served.responses)
    include = _include(array(fields, "include") or [])
    tools = _tools(array(fields, "tools") or [], served.unknown)
    tools, choice = _choice(fields.get("tool_choice"), tools)
    if one_of({"truncation": "disabled", **fields}, "truncation", ("auto", "disabled")) == "auto":
        served.unknown.leave_out("truncation 'auto'", "a conversation that does not fit the context is refused")
    keep = get(fields, "store", bool)
    asked = Asked(
        echo=_echo(fields),
        items=[*earlier, *items],
        store=None if keep is False else served.responses,
        packed=_REASONING in include,
    )
    return ParsedRequest(
        sampling=sampling_of({k: v for k, v in fields.items() if k in _SAMPLING}, served),
        messages=_messages(get(fields, "instructions", str), earlier, items, served.unknown),
        continues=conversation.continues(fields),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=get(fields, "parallel_tool_calls", bool),
        schema=_schema(obj(fields, "text") or {}, served.unknown),
        chat_template_kwargs=_template_kwargs(fields, served.unknown),
        max_tokens=ranged(fields, "max_output_tokens", int, 1, MAX_ANSWER),
        stream=bool(get(fields, "stream", bool)),
        extra=asked,
    )


def _echo(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the response repeats, with null for NaN and infinities."""
    res: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": obj(fields, "metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    }
    res |= {key: fields[key] for key in res if key in fields}
    return dict(json.loads(json.dumps(res), parse_constant=lambda _: None))


def _include(value: list[Any]) -> list[Any]:
    if any(not isinstance(name, str) for name in value):
        raise invalid("include must be an array of strings", "include", "invalid_type")
    if _LOGPROBS in value:
        msg = f"include has {_LOGPROBS}, which this server does not support: leave it out"
        raise invalid(msg, "include", "unsupported_parameter")
    return value


def _template_kwargs(fields: Mapping[str, Any], unknown: Unknown) -> dict[str, Any]:
    """Return the settings for the chat template."""
    reasoning = obj(fields, "reasoning") or {}
    check_known(reasoning, {"effort"}, unknown, {"summary", "generate_summary"}, "reasoning.")
    return template_kwargs(fields, get(reasoning, "effort", str, "reasoning.effort"))


def _schema(asked: dict[str, Any], unknown: Unknown) -> Checked | None:
    """Return the JSON schema of the answer; None: it may be any text. Raises RequestError."""
    check_known(asked, {"format", "verbosity"}, unknown, at="text.")
    if asked.get("verbosity") not in (None, "medium"):
        unknown.leave_out("text.verbosity", "this server has no setting for it")
    return conversation.schema_of_form(obj(asked, "format", "text.format"), "text.format")


#
# items
#


def _earlier(fields: Mapping[str, Any], store: ResponseStore) -> list[dict[str, Any]]:
    """Return the items of the conversation that the request continues. Raises RequestError."""
    name = get(fields, "previous_response_id", str)
    if name is None:
        return []
    kept = store.get(name)
    if kept is None:
        raise not_kept(name, "send the whole conversation as input", "previous_response_id")
    return kept.conversation


def not_kept(name: str, fix: str, param: str | None = None) -> RequestError:
    """Return the error for a response that is not stored. fix: what to do. param: the field that names the response; None: the path does."""
    msg = (
        f"{param or 'the response'} is {name[:100]!r}, which is not stored here: another server made it, its request had"
        f" store: false, or it was removed as one of the oldest; {fix}"
    )
    if param is None:
        return RequestError(404, msg, code="not_found")
    return invalid(msg, param, "previous_response_not_found")


def _input(fields: Mapping[str, Any], store: ResponseStore) -> list[dict[str, Any]]:
    """Return the items of the input, with references replaced by the items that they name. Raises RequestError."""
    value = fields.get("input", [])
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid(f"input is {kind(value)}: give a string, or an array of items", "input", "invalid_type")
    return [_resolved(as_object(item, f"input[{i}]", "a type"), f"input[{i}]", store) for i, item in enumerate(value)]


def _resolved(item: dict[str, Any], at: str, store: ResponseStore) -> dict[str, Any]:
    """Return the item that a reference names, or the item itself. Raises RequestError."""
    if item.get("type") != "item_reference":
        return item
    name = text(item, "id", f"{at}.id")
    found = store.item(name)
    if found is None:
        raise not_kept(name, "send the item itself", f"{at}.id")
    return found


def _messages(
    instructions: str | None, earlier: list[dict[str, Any]], given: list[dict[str, Any]], unknown: Unknown
) -> tuple[Message, ...]:
    """Return items as the messages of a chat. Consecutive turns of one role are merged. Raises RequestError."""
    seen = Unknown()  # the warnings about earlier items were sent with their own requests
    found = [
        {"role": "system", "content": instructions or ""},
        *(_message(item, f"previous_response_id[{i}]", seen) for i, item in enumerate(earlier)),
        *(_message(item, f"input[{i}]", unknown) for i, item in enumerate(given)),
    ]
    res = conversation.by_turns(filter(None, found if instructions else found[1:]))
    if not res:
        raise invalid("input is missing: give a string, or an array of at least one item", "input", "missing_field")
    return conversation.messages(res, unknown)


def _message(item: dict[str, Any], at: str, unknown: Unknown) -> dict[str, Any] | None:
    """Return an item as a message of a chat; None: it has nothing for the model."""
    which = item.get("type") or "message"
    if not isinstance(which, str):
        raise invalid(f"{at}.type is {kind(which)}: give a string", f"{at}.type", "invalid_type")
    if which not in _FIELDS:
        unknown.leave_out(f"{at} (of the type {which[:100]!a})", "this server does not know such items")
        return None
    check_known(item, _ITEM | _FIELDS[which], unknown, set(), f"{at}.")
    match which:
        case "message":
            role = _ROLES[one_of(item, "role", tuple(_ROLES), f"{at}.role")]
            there = item.get("content")
            if there is None and role == "assistant":
                there = ""
            return {"role": role, "content": conversation.content(there, f"{at}.content", _TEXTS)}
        case "function_call":
            function = {key: text(item, key, f"{at}.{key}") for key in ("name", "arguments")}
            call = {"id": text(item, "call_id", f"{at}.call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            found = conversation.content(item.get("output"), f"{at}.output", _TEXTS, unknown)
            return {"role": "tool", "tool_call_id": text(item, "call_id", f"{at}.call_id"), "content": found}
    thought = _thought(item, at)
    return {"role": "assistant", "content": "", "reasoning_content": thought} if thought else None


def _thought(item: dict[str, Any], at: str) -> str:
    """Return the text of a reasoning item: its content, else the reasoning that this server packed, else its summary."""
    found = {}
    for key, which in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = [as_object(p, f"{at}.{key}[{i}]", "type and text") for i, p in enumerate(_array(item, key, at))]
        found[key] = "\n".join(text(p, "text", f"{at}.{key}.text") for p in parts if p.get("type") in (which, "text"))
    packed = get(item, "encrypted_content", str, f"{at}.encrypted_content")
    return found["content"] or _unpacked(packed or "") or found["summary"]


def _array(item: dict[str, Any], key: str, at: str) -> list[Any]:
    return array(item, key, f"{at}.{key}") or []


_PACKED = "kvflash:"


def packed(reasoning: str) -> str:
    """Return reasoning as an encrypted_content, though unencrypted: clients send that field back, but drop plain text."""
    return _PACKED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def _unpacked(content: str) -> str:
    """Return the reasoning in an encrypted_content; "" if this server did not make it."""
    if not content.startswith(_PACKED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_PACKED), validate=True).decode()
    except ValueError:
        return ""


#
# tools
#


def _tools(given: list[Any], unknown: Unknown) -> tuple[dict[str, Any], ...]:
    """Return the functions among the tools. Other tools are left out: clients such as Codex manage without them.

    Raises RequestError.
    """
    res, places = [], []
    for i, value in enumerate(given):
        at = f"tools[{i}]"
        tool = as_object(value, at, "type and name")
        which = text(tool, "type", f"{at}.type")
        if which != "function":
            named = f" {tool['name'][:100]!a}" if isinstance(tool.get("name"), str) else ""
            unknown.leave_out(f"{at} ({which[:100]!a}{named})", "this server offers functions only")
            continue
        res.append(tool)
        places.append(i)
    return conversation.tools(res, "", places=places)


def _choice(value: Any, tools: tuple[dict[str, Any], ...]) -> tuple[tuple[dict[str, Any], ...], str | dict[str, Any]]:
    """Return the tools that may be called, and the choice among them. Raises RequestError."""
    if not isinstance(value, dict):
        return tools, conversation.tool_choice(value, tools)
    if one_of(value, "type", ("function", "allowed_tools"), "tool_choice.type") == "function":
        name = text(value, "name", "tool_choice.name")
        return tools, conversation.tool_choice({"function": {"name": name}}, tools)
    mode = one_of({"mode": "auto", **value}, "mode", ("auto", "required"), "tool_choice.mode")
    allowed = [
        as_object(t, f"tool_choice.tools[{i}]", "type and name")
        for i, t in enumerate(_array(value, "tools", "tool_choice"))
    ]
    names = [tool.get("name") for tool in allowed]
    tools = tuple(tool for tool in tools if tool["function"]["name"] in names)
    return tools, conversation.tool_choice(mode, tools)
