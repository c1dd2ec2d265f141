"""Checks the messages and tools of a request, and returns them in the form of the OpenAI protocol."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pyllama_kvflash.chat.engine import Message
from pyllama_kvflash.json_schema import Checked, SchemaError, check, check_arguments, refuse_loosened
from pyllama_kvflash.serve.protocols.fields import Unknown, array, as_object, get, is_object, kind, obj, one_of, text
from pyllama_kvflash.serve.protocols.request_error import invalid
from pyllama_kvflash.text import is_json

MAX_TOOLS = 256
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_KNOWN = {
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "refusal", "provider_specific_fields"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
"""Fields of a message, by its role. litellm sends messages back with provider_specific_fields, which add nothing."""
_ANY = {"role", "content", "name"}
_UNREAD = {"audio", "function_call", "images", "tool_calls"}
"""Fields of a message that are refused, because the model would have to see them."""


CONTINUING = {"continue_final_message", "add_generation_prompt"}
"""vLLM's fields that say whether an answer continues the last message. Each protocol with conversations accepts them."""


def continues(fields: Mapping[str, Any]) -> bool | None:
    """Return whether the answer continues the last message; None: it does if the last message is an assistant's and has text.

    Raises RequestError.
    """
    wanted, begins = (get(fields, name, bool) for name in ("continue_final_message", "add_generation_prompt"))
    if wanted and begins:
        msg = "continue_final_message and add_generation_prompt are both true: an answer either continues a message or begins one"
        raise invalid(msg, "continue_final_message", "invalid_value")
    if begins is False and wanted is False:
        msg = "continue_final_message and add_generation_prompt are both false, so there is no answer: leave one of them out"
        raise invalid(msg, "add_generation_prompt", "invalid_value")
    return wanted if wanted is not None else {True: None, False: True, None: None}[begins]


def _with_one_system(given: Sequence[Message]) -> tuple[Message, ...]:
    """Merge the leading system messages into one, since many templates accept only one."""
    n = next((i for i, m in enumerate(given) if m["role"] != "system"), len(given))
    if n <= 1:
        return tuple(given)
    return ({"role": "system", "content": "\n\n".join(m["content"] for m in given[:n])}, *given[n:])


_TEXTS = {"text": "text", "refusal": "refusal"}
_UNSEEN = {
    "image": ("image", "image_url", "input_image", "computer_screenshot"),
    "file": ("file", "input_file", "document", "resource", "resource_link"),
    "audio": ("audio", "audio_url", "input_audio"),
    "video": ("video", "video_url", "input_video"),
    "search_result": ("search_result",),
    "tool_reference": ("tool_reference",),
}
_KINDS = {which: name for name, types in _UNSEEN.items() for which in types}


def content(value: Any, at: str, types: Mapping[str, str], unknown: Unknown | None = None) -> str:
    """Return the text of a message's content: a string, or an array of parts.

    types: the types of parts that are text, each with the field that holds the text. Other parts are refused.
    unknown: None, except for a tool's result. An agent cannot do without a result, so images, files and the like in it are not
    refused: the model sees their types, and `unknown` collects a warning for each. Raises RequestError.
    """
    if isinstance(value, str):
        return value
    if value is None and unknown is not None:
        return ""
    if not isinstance(value, list):
        raise invalid(f"{at} is {kind(value)}: give a string, or an array of text parts", at, "invalid_type")
    res = []
    for i, part in enumerate(value):
        here = f"{at}[{i}]"
        which = text(as_object(part, here, "type and text"), "type", f"{here}.type")
        if which in types:
            res.append(text(part, types[which], f"{here}.{types[which]}"))
        elif unknown is not None and which in _KINDS:
            unknown.leave_out(here, f"the model sees only the type of this part, {_KINDS[which]}")
            res.append(f"[{_KINDS[which]}: this model reads text only]")
        else:
            example = json.dumps({"type": next(iter(types)), "text": "..."})
            msg = f"{here} has the type {which[:100]!r}: only text can be read, such as {example}"
            raise invalid(msg, here, "unsupported_parameter")
    return joined(res)


def joined(texts: Iterable[str]) -> str:
    """Join the texts of several parts with line breaks. Empty texts are left out."""
    return "\n".join(filter(None, texts))


def by_turns(given: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive user messages, and consecutive assistant messages, as some protocols demand."""
    res: list[dict[str, Any]] = []
    for message in given:
        if res and message["role"] == res[-1]["role"] in {"user", "assistant"}:
            res[-1] = _merged(res[-1], message)
        else:
            res.append(message)
    return res


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two messages of one role. `one` comes before `other`."""
    res: dict[str, Any] = {"role": one["role"], "content": ""}
    for key in ("content", "reasoning_content"):
        if found := [m[key] for m in (one, other) if m.get(key)]:
            res[key] = "\n".join(found)
    if calls := [*one.get("tool_calls", []), *other.get("tool_calls", [])]:
        res["tool_calls"] = calls
    return res


def messages(value: Any, unknown: Unknown) -> tuple[Message, ...]:
    """Return the messages of a conversation, with at most one leading system message. Raises RequestError."""
    if not isinstance(value, list) or not value:
        raise invalid("messages must be an array of at least one message", "messages", "invalid_type")
    called: dict[str, str] = {}  # names of functions, by the ids of calls
    return _with_one_system([_message(m, f"messages[{i}]", called, unknown) for i, m in enumerate(value)])


def _message(value: Any, at: str, called: dict[str, str], unknown: Unknown) -> Message:
    given = as_object(value, at, "role and content")
    role = _ROLES[one_of(given, "role", tuple(_ROLES), f"{at}.role")]
    known = _KNOWN.get(role, _ANY)
    for extra in [k for k, v in given.items() if k not in known and v not in (None, [])]:
        if extra in _UNREAD:
            raise invalid(f"{at}.{extra} is not supported by this server: leave it out", at, "unsupported_parameter")
        unknown.see(f"{at}.{extra}")
    if role == "assistant":
        return _assistant(given, at, called)
    there = content(given.get("content"), f"{at}.content", _TEXTS, unknown if role == "tool" else None)
    res = {"role": role, "content": there}
    if role == "tool":
        res["tool_call_id"] = text(given, "tool_call_id", f"{at}.tool_call_id")
        if name := get(given, "name", str, f"{at}.name") or called.get(res["tool_call_id"]):
            res["name"] = name
    return res


def _assistant(given: Mapping[str, Any], at: str, called: dict[str, str]) -> Message:
    """Return an assistant's message: text, calls, or both. called: receives the function names of the calls, by call id."""
    calls = [
        _call(c, f"{at}.tool_calls[{i}]") for i, c in enumerate(array(given, "tool_calls", f"{at}.tool_calls") or ())
    ]
    called.update({call["id"]: call["function"]["name"] for call in calls})
    thought, refusal = (get(given, k, str, f"{at}.{k}") for k in ("reasoning_content", "refusal"))
    there = given.get("content")
    there = refusal or "" if there is None else there
    res: dict[str, Any] = {"role": "assistant", "content": content(there, f"{at}.content", _TEXTS)}
    if calls:
        res["tool_calls"] = calls
    if thought:
        res["reasoning_content"] = thought
    return res


def _call(value: Any, at: str) -> dict[str, Any]:
    given = as_object(value, at, "id, type and function")
    one_of({"type": given.get("type", "function")}, "type", ("function",), f"{at}.type")
    function = as_object(given.get("function"), f"{at}.function", "name and arguments")
    return {
        "id": get(given, "id", str, f"{at}.id") or "",
        "type": "function",
        "function": {
            "name": text(function, "name", f"{at}.function.name"),
            "arguments": _arguments(text(function, "arguments", f"{at}.function.arguments")),
        },
    }


def _arguments(given: str) -> str:
    """Return a call's arguments as the JSON object that templates need. Other text, such as a truncated call's, is wrapped in an object."""
    if is_object(given or "{}"):
        return given or "{}"
    return json.dumps({"arguments": given}, ensure_ascii=False)


#
# tools
#


def tools(
    value: Any, inside: str = "function", schema: str = "parameters", places: Sequence[int] | None = None
) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request, in the form of the OpenAI protocol.

    inside: the tool's field that holds the name and the schema; "": the tool itself holds them. schema: the name of the schema's field.
    places: the tools' indices in the request, if some tools were left out. Raises RequestError.
    """
    given = array({"tools": value}, "tools") or []
    if len(given) > MAX_TOOLS:
        raise invalid(f"tools has {len(given)} tools: the limit is {MAX_TOOLS}", "tools", "invalid_value")
    numbered = zip(places or range(len(given)), given, strict=True)
    res = tuple(_tool(tool, f"tools[{i}]", inside, schema) for i, tool in numbered)
    names = [tool["function"]["name"] for tool in res]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid(f"tools has two tools with the name {twice}: rename one", "tools", "invalid_value")
    return res


def _tool(value: Any, at: str, inside: str, schema: str) -> dict[str, Any]:
    given = as_object(value, at, f"type and {inside or 'name'}")
    if inside:
        one_of(given, "type", ("function",), f"{at}.type")
        at = f"{at}.{inside}"
        given = as_object(given.get(inside), at, "a name")
    name = text(given, "name", f"{at}.name")
    if not _NAME.fullmatch(name):
        msg = f"{at}.name is {name[:100]!r}: give up to 128 letters, digits, dots, dashes and underscores"
        raise invalid(msg, f"{at}.name", "invalid_value")
    function = {
        "name": name,
        "description": get(given, "description", str, f"{at}.description") or "",
        "parameters": _parameters(given, at, schema),
    }
    return {"type": "function", "function": function}


def _parameters(function: Mapping[str, Any], at: str, key: str) -> dict[str, Any] | bool:
    """Return the schema of a tool's arguments.

    A strict tool is refused if parts of its schema cannot be enforced. For other tools, the grammar leaves such parts out.
    """
    given, name = function.get(key), f"{at}.{key}"
    if given is not None and not isinstance(given, dict | bool):
        raise invalid(f"{name} is {kind(given)}: give a JSON schema, an object", name, "invalid_type")
    if not is_json(given):
        raise invalid(f"{name} has NaN or an infinity, which JSON does not have: give numbers", name, "invalid_value")
    if given is not None and get(function, "strict", bool, f"{at}.strict"):
        with _schema_errors(name):
            refuse_loosened(check_arguments(given))
    return {} if given is None else given


def schema(value: Any, name: str, *, strict: bool = False) -> Checked:
    """Return an answer's JSON schema, checked. name: the schema's field. strict: whether to refuse parts that cannot be enforced.

    Raises RequestError, which names the place in the schema.
    """
    if not isinstance(value, dict | bool):
        raise invalid(f"{name} is {kind(value)}: give a JSON schema, an object", name, "invalid_type")
    with _schema_errors(name):
        return check(value, strict=strict)


def schema_of_form(form: dict[str, Any] | None, at: str, inside: str = "") -> Checked | None:
    """Return the JSON schema that a response format asks for; None: it asks for any text. Raises RequestError.

    inside: the field of `form` that holds the fields schema and strict; "": `form` itself holds them.
    """
    which = "text" if form is None else one_of(form, "type", ("text", "json_object", "json_schema"), f"{at}.type")
    if form is None or which == "text":
        return None
    if which == "json_object":
        return schema(form.get("schema", {"type": "object"}), f"{at}.schema")
    if inside:
        form, at = obj(form, inside, f"{at}.{inside}") or {}, f"{at}.{inside}"
    if "schema" not in form:
        raise invalid(f"{at} has no schema: give an object", f"{at}.schema", "missing_field")
    return schema(form["schema"], f"{at}.schema", strict=bool(get(form, "strict", bool, f"{at}.strict")))


@contextmanager
def _schema_errors(name: str) -> Iterator[None]:
    """Turn a schema's error into a RequestError. name: the schema's field."""
    try:
        yield
    except SchemaError as err:
        raise invalid(str(err), f"{name}{err.at[1:]}", "invalid_value") from None


def tool_choice(value: Any, given: tuple[dict[str, Any], ...]) -> str | dict[str, Any]:
    """Return which tools may be called: "auto", "none", "required", or the tool that must be called. Raises RequestError."""
    if value is None:
        return "auto" if given else "none"
    if isinstance(value, dict):
        name = text(
            as_object(value.get("function"), "tool_choice.function", "a name"), "name", "tool_choice.function.name"
        )
        if name not in {tool["function"]["name"] for tool in given}:
            raise invalid(
                f"tool_choice is {name[:100]!r}, which is not in tools: give the name of a tool",
                "tool_choice",
                "invalid_value",
            )
        return {"type": "function", "function": {"name": name}}
    choice = one_of({"tool_choice": value}, "tool_choice", ("auto", "none", "required"))
    if choice == "required" and not given:
        raise invalid(
            "tool_choice is 'required' without tools: give tools, or leave it out", "tool_choice", "invalid_value"
        )
    return choice if given else "none"
