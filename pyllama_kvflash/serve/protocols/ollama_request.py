"""Requests of Ollama's API, checked and converted to the OpenAI form."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyllama_kvflash.engine.answer import MAX_ANSWER
from pyllama_kvflash.json_schema import Checked
from pyllama_kvflash.native import Sampling
from pyllama_kvflash.serve.protocols import conversation
from pyllama_kvflash.serve.protocols.answer_fields import given, sampling_of, stop_of
from pyllama_kvflash.serve.protocols.fields import array, as_object, get, kind, obj, one_of, ranged
from pyllama_kvflash.serve.protocols.fim import infill
from pyllama_kvflash.serve.protocols.known import check_known
from pyllama_kvflash.serve.protocols.ollama_response import loaded
from pyllama_kvflash.serve.protocols.openai_request import MAX_LOGPROBS
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, Served
from pyllama_kvflash.serve.protocols.request_error import Answered, invalid

_COMMON = {"model", "stream", "format", "options", "keep_alive", "think", "logprobs", "top_logprobs"}
_REFUSED = {
    "template": "send the rendered prompt with raw: true, or start the server with --chat-template-file",
    "context": "send the conversation to /api/chat",
    "images": "only text can be read",
}
"""Fields of /api/generate that are refused unless they are empty, each with the reason or what to do instead."""

_IGNORED = {"truncate", "shift"}  # about a prompt that is too long, which this server refuses

_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "frequency_penalty",
    "presence_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "seed",
}  # fmt: skip
_OPTIONS = {*_SAMPLING, "num_ctx", "num_predict", "stop"}
_WITHOUT_EFFECT = {
    "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "logits_all", "vocab_only",
    "use_mmap", "use_mlock", "embedding_only", "penalize_newline",
}  # fmt: skip
"""Options for loading a model, which is loaded already, and options that Ollama has dropped."""

_EFFORTS = ("low", "medium", "high", "max")


def chat(body: dict[str, Any], served: Served) -> ParsedRequest:
    """Check the body of POST /api/chat. Raises RequestError, and Answered if there is no message.

    tool_choice and parallel_tool_calls, which Ollama lacks, work as in the OpenAI protocol.
    """
    fields = given(body)
    known = _COMMON | {"messages", "tools", "tool_choice", "parallel_tool_calls"} | conversation.CONTINUING
    check_known(fields, known, served.unknown, _IGNORED)
    found = array(fields, "messages")
    if not found:
        raise Answered(loaded(served.name, "message", unload=_unloads(fields)))
    tools = conversation.tools([_tool(t) for t in array(fields, "tools") or ()])
    return replace(
        _both(fields, served),
        messages=conversation.messages(_messages(found), served.unknown),
        continues=conversation.continues(fields),
        tools=tools,
        tool_choice=conversation.tool_choice(fields.get("tool_choice"), tools),
        parallel_tool_calls=get(fields, "parallel_tool_calls", bool),
    )


def generate(body: dict[str, Any], served: Served) -> ParsedRequest:
    """Check the body of POST /api/generate. Raises RequestError, and Answered if there is no prompt."""
    fields = given(body)
    for key, why in _REFUSED.items():
        if fields.get(key):
            raise invalid(f"{key} is not supported by this server: {why}", key, "unsupported_parameter")
    check_known(fields, _COMMON | {"prompt", "system", "suffix", "raw", *_REFUSED}, served.unknown, _IGNORED)
    prompt, system, suffix = (get(fields, name, str) or "" for name in ("prompt", "system", "suffix"))
    raw = get(fields, "raw", bool)
    if not (prompt or suffix):
        raise Answered(loaded(served.name, "response", unload=_unloads(fields)))
    parsed = _both(fields, served)
    if raw or suffix:
        if system:
            served.unknown.leave_out("system", "the prompt is not a conversation")
        if suffix:
            return replace(parsed, prompt=infill(served.kv, prompt, suffix, at="suffix"))
        return replace(parsed, prompt=prompt, special=True)
    found = [{"role": "system", "content": system}] if system else []
    found.append({"role": "user", "content": prompt})
    return replace(parsed, messages=conversation.messages(found, served.unknown))


def _both(fields: Mapping[str, Any], served: Served) -> ParsedRequest:
    """Return a request with the fields that /api/chat and /api/generate share."""
    get(fields, "model", str)  # any name: there is one model
    _unloads(fields)
    stream, options = get(fields, "stream", bool), given(obj(fields, "options") or {})
    n_probs = ranged(fields, "top_logprobs", int, 0, MAX_LOGPROBS) or 0
    return ParsedRequest(
        schema=_schema(fields.get("format")),
        chat_template_kwargs=_reasoning(fields.get("think")),
        sampling=replace(_sampling(options, served), n_probs=n_probs if get(fields, "logprobs", bool) else None),
        max_tokens=_limit(options),
        stop=stop_of(options.get("stop"), "options.stop"),
        stream=True if stream is None else stream,
    )


def _unloads(fields: Mapping[str, Any]) -> bool:
    """Return whether keep_alive asks to unload the model after the request. Raises RequestError."""
    value = fields.get("keep_alive", "")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        msg = f"keep_alive is {kind(value)}: give a number of seconds, or a text such as 5m"
        raise invalid(msg, "keep_alive", "invalid_type")
    return value == 0 or re.fullmatch(r"0+[a-z]*", str(value)) is not None


def _schema(value: Any) -> Checked | None:
    """Return the JSON schema of the answer; None: it may be any text. Raises RequestError."""
    if value is None or value == "":
        return None
    if value != "json" and not isinstance(value, dict):
        what = repr(value)[:100] if isinstance(value, str) else kind(value)
        raise invalid(f'format is {what}: give "json", or a JSON schema', "format", "invalid_value")
    return conversation.schema({"type": "object"} if value == "json" else value, "format")


def _reasoning(value: Any) -> dict[str, Any]:
    """Return the chat template's settings for reasoning. Raises RequestError."""
    if isinstance(value, str):
        return {"reasoning_effort": one_of({"think": value}, "think", _EFFORTS)}
    think = get({"think": value}, "think", bool)
    return {} if think is None else {"enable_thinking": think}


#
# options
#


def _sampling(options: Mapping[str, Any], served: Served) -> Sampling:
    """Return the sampling settings. Raises RequestError."""
    check_known(options, _OPTIONS, served.unknown, _WITHOUT_EFFECT, "options.")
    n_ctx, asked = served.kv.options.n_ctx, get(options, "num_ctx", int, "options.num_ctx")
    if asked is not None and asked > n_ctx:
        served.unknown.leave_out("options.num_ctx", f"the context has {n_ctx:,} tokens, as the server's -c says")
    return sampling_of({k: v for k, v in options.items() if k in _SAMPLING}, served)


def _limit(options: Mapping[str, Any]) -> int | None:
    """Return the limit for an answer's tokens; None: as many as fit. Raises RequestError."""
    limit = ranged(options, "num_predict", int, -2, MAX_ANSWER, "options.num_predict")
    return limit if limit and limit > 0 else None


#
# conversations
#


def _tool(value: Any) -> Any:
    """Return a tool. If it has no type, its type becomes "function"."""
    return {**value, "type": value.get("type") or "function"} if isinstance(value, dict) else value


def _messages(found: list[Any]) -> list[dict[str, Any]]:
    """Return messages in the OpenAI form, where each call has an id that its tool result names. Raises RequestError."""
    res: list[dict[str, Any]] = []
    calls: list[tuple[str, str]] = []  # the id and the name of each call without a result
    n_calls = 0
    for i, value in enumerate(found):
        at = f"messages[{i}]"
        message = {"content": "", **given(as_object(value, at, "role and content"))}
        made = []
        for k, call in enumerate(array(message, "tool_calls", f"{at}.tool_calls") or ()):
            made.append(_call(call, f"{at}.tool_calls[{k}]", n_calls))
            n_calls += 1
        if made:
            message["tool_calls"] = made
            calls = [(call["id"], call["function"].get("name")) for call in made]
        if message.get("role") == "assistant" and "thinking" in message:
            message["reasoning_content"] = message.pop("thinking")
        if message.get("role") == "tool":
            _name_call(message, at, calls)
            if pictures := array(message, "images", f"{at}.images"):
                message["content"] = [
                    {"type": "text", "text": message["content"]},
                    *({"type": "image"} for _ in pictures),
                ]
            message.pop("images", None)
        res.append(message)
    return res


def _call(value: Any, at: str, number: int) -> dict[str, Any]:
    """Return a call in the OpenAI form. A call without an id gets one made from `number`: nine letters and digits, as some templates demand."""
    call = as_object(value, at, "a function")
    function = given(as_object(call.get("function"), f"{at}.function", "name and arguments"))
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(obj(function, "arguments", f"{at}.function.arguments") or {}, ensure_ascii=False)
    made = {"name": function.get("name"), "arguments": arguments}
    return {"id": get(call, "id", str, f"{at}.id") or f"call{number:05}", "type": "function", "function": made}


def _name_call(message: dict[str, Any], at: str, calls: list[tuple[str, str]]) -> None:
    """Give a tool result the id of its call. A result without an id belongs to its tool's first call, else to the first call.

    calls: the id and the name of each call without a result. The call that the result belongs to is removed.
    """
    name = get(message, "tool_name", str, f"{at}.tool_name")
    message.pop("tool_name", None)
    if name is not None:
        message["name"] = name
    asked = get(message, "tool_call_id", str, f"{at}.tool_call_id")
    its = next(iter([c for c in calls if c[0] == asked] or [c for c in calls if c[1] == name] or calls), None)
    if its is not None:
        calls.remove(its)
    message["tool_call_id"] = asked or (its[0] if its else "call")
