"""The same conversation in all protocols: each must make the same prompt of it, token for token.

A prompt that is the one before has all of its tokens but the last in the cache. So the count of cached tokens tells.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from support.bodies import CHAT, MESSAGE, OLLAMA_CHAT, RESPONSES

PICTURE = "iVBORw0KGgo="
DATA = f"data:image/png;base64,{PICTURE}"
_WORDS = (
    "",
    "Hello.",
    "The weather in Lima?",
    "  two\nlines ",
    "日本 🙂",
    "a\tb",
    "{{ 7 * 7 }}",
    "café\r\nau lait",
    "<b>&amp;",
)


class Said(NamedTuple):
    """A message. role: of the OpenAI protocol; tool: with the result of the call before. text: or an array, or nothing."""

    role: str
    text: Any
    calls: bool = False  # of the assistant: it calls a tool
    picture: bool = False  # of a tool: its result has one


class Conversation(NamedTuple):
    """A system message and turns. tools: whether the request has the tool that is called."""

    system: str | None
    said: tuple[Said, ...]
    tools: bool = True


def conversation(rng: random.Random) -> Conversation:
    """One that all protocols can say. It may end with a message of the assistant, perhaps an empty one."""
    said: list[Said] = []
    for _ in range(rng.randrange(1, 4)):
        said.append(Said("user", rng.choice(_WORDS[1:])))
        if rng.random() < 0.3:
            said += [Said("assistant", "", calls=True), Said("tool", rng.choice(_WORDS), picture=rng.random() < 0.3)]
        said.append(Said("assistant", rng.choice(_WORDS[1:]).strip()))
    end = rng.random()
    if end < 0.5:
        said[-1] = Said("assistant", "")
    elif end < 0.9:
        said.pop()
    return Conversation(rng.choice([None, "Be brief."]), tuple(said))


_CALL = {"name": "weather", "arguments": '{"city": "Lima"}'}
_TOOL = {"name": "weather", "description": "It.", "parameters": {"type": "object", "properties": {"city": {}}}}


def _parts(said: Said, kind: str, picture: dict[str, Any]) -> Any:
    """The result of a tool, with the picture after its text."""
    return [{"type": kind, "text": said.text}, picture] if said.picture else said.text


def _chat(one: Conversation) -> dict[str, Any]:
    def message(said: Said) -> dict[str, Any]:
        if said.role == "tool":
            content = _parts(said, "text", {"type": "image_url", "image_url": {"url": DATA}})
            return {"role": "tool", "tool_call_id": "c1", "content": content}
        calls = {"tool_calls": [{"id": "c1", "type": "function", "function": _CALL}]} if said.calls else {}
        return {"role": said.role, "content": said.text, **calls}

    system = [] if one.system is None else [{"role": "system", "content": one.system}]
    tools = {"tools": [{"type": "function", "function": _TOOL}]} if one.tools else {}
    return {"messages": [*system, *map(message, one.said)], **tools, "max_tokens": 1, "temperature": 0}


def _blocks(one: Conversation) -> dict[str, Any]:
    def message(said: Said) -> dict[str, Any]:
        if said.role == "tool":
            picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
            result = {"type": "tool_result", "tool_use_id": "c1", "content": _parts(said, "text", picture)}
            return {"role": "user", "content": [result]}
        call = {"type": "tool_use", "id": "c1", "name": "weather", "input": json.loads(_CALL["arguments"])}
        role = "system" if said.role == "developer" else said.role
        return {"role": role, "content": [call] if said.calls else said.text}

    system = {} if one.system is None else {"system": one.system}
    tools = (
        {"tools": [{"name": "weather", "description": "It.", "input_schema": _TOOL["parameters"]}]} if one.tools else {}
    )
    return {**system, "messages": [*map(message, one.said)], **tools, "max_tokens": 1, "temperature": 0}


def _items(one: Conversation) -> dict[str, Any]:
    def item(said: Said) -> dict[str, Any]:
        if said.role == "tool":
            output = _parts(said, "input_text", {"type": "input_image", "image_url": DATA})
            return {"type": "function_call_output", "call_id": "c1", "output": output}
        if said.calls:
            return {"type": "function_call", "call_id": "c1", **_CALL}
        return {"role": said.role, "content": said.text}

    system = {} if one.system is None else {"instructions": one.system}
    tools = {"tools": [{"type": "function", **_TOOL}]} if one.tools else {}
    how = {"max_output_tokens": 1, "temperature": 0, "store": False}
    return {**system, "input": [*map(item, one.said)], **tools, **how}


def _ollama(one: Conversation) -> dict[str, Any]:
    def message(said: Said) -> dict[str, Any]:
        if said.role == "tool":
            picture = {"images": [PICTURE]} if said.picture else {}
            return {"role": "tool", "tool_name": "weather", "content": said.text, **picture}
        call = {"function": {"name": "weather", "arguments": json.loads(_CALL["arguments"])}}
        return {"role": said.role, "content": said.text, **({"tool_calls": [call]} if said.calls else {})}

    system = [] if one.system is None else [{"role": "system", "content": one.system}]
    tools = {"tools": [{"type": "function", "function": _TOOL}]} if one.tools else {}
    options = {"num_predict": 1, "temperature": 0}
    return {"messages": [*system, *map(message, one.said)], **tools, "options": options, "stream": False}


FORMS: dict[str, Callable[[Conversation], dict[str, Any]]] = {
    CHAT: _chat,
    MESSAGE: _blocks,
    RESPONSES: _items,
    OLLAMA_CHAT: _ollama,
}


def counts(path: str, found: dict[str, Any]) -> tuple[int, int]:
    """How many tokens the prompt of an answer had, and how many of them were cached."""
    if path == OLLAMA_CHAT:
        return found["prompt_eval_count"], found.get("prompt_eval_cached_count", 0)
    usage = found["usage"]
    if path == CHAT:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"] if path == RESPONSES else usage["cache_read_input_tokens"]
    return usage["input_tokens"] + (0 if path == RESPONSES else cached), cached


def difference(post: Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]], one: Conversation) -> str:
    """What differs between the protocols; "" if nothing. post: sends a body, and returns the status and the answer."""
    before: int | str | None = None
    for path, form in FORMS.items():
        body = form(one)
        status, found = post(path, body)
        n_prompt, n_cached = counts(path, found) if status == 200 else (0, 0)
        told: int | str = n_prompt if status == 200 else f"status {status}"
        if before is not None and (told != before or (status == 200 and n_cached != n_prompt - 1)):
            return f"{path}: {told} ({n_cached} cached), after {before}: {json.dumps(body, ensure_ascii=False)[:1500]}"
        before = told
    return ""
