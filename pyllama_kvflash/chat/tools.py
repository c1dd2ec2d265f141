"""Tools for a chat template that does not support them: the system message describes them, and a call is JSON between two tags.

The form is that of Hermes and Qwen models, the most common one: https://github.com/NousResearch/Hermes-Function-Calling.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyllama_kvflash.chat.calls import Calls
from pyllama_kvflash.native import ChatEngine, Model, Rendered

Message = Mapping[str, Any]

WARNING = "the model's chat template does not support tools: the system message describes them, which a small model may not follow"

_EXPLAINED = """You may call these functions to help with the user's request. Their descriptions are JSON, one a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments in this form:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""
_MUST = "\nAnswer with a call."

_FORM = """\
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""A template that writes calls as JSON between two tags. llama.cpp derives the grammar and the parser of an answer from it."""


class TextTools:
    """The grammar and the parser of answers whose calls are JSON between two tags."""

    def __init__(self, model: Model, *, seconds: float) -> None:
        """seconds: time limit for each rendering."""
        self._calls = Calls(ChatEngine(model, _FORM, seconds=seconds))

    def answered(self, request: Mapping[str, Any]) -> Rendered:
        """Return the grammar and parser of the answer to a request, as Calls.applied() does. The result's prompt has no meaning."""
        asked = {key: request[key] for key in _ASKED if key in request}
        return self._calls.applied(
            {**asked, "messages": [{"role": "user", "content": ""}], "add_generation_prompt": True}
        )


_ASKED = "tools", "tool_choice", "parallel_tool_calls", "json_schema"


def as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, must: bool) -> list[Message]:
    """Return a conversation whose calls and their results are text, with the tools in its system message.

    must: whether the answer must be a call.
    """
    res = list(_texts(messages))
    if not tools:
        return res
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    explained = _EXPLAINED.format(tools=lines) + (_MUST if must else "")
    if res and res[0]["role"] == "system":
        first = res.pop(0)
        explained = f"{first['content']}\n\n{explained}"
    return [{"role": "system", "content": explained}, *res]


def _texts(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages as text. Consecutive results of tools become one user message, since templates want alternating roles."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message.get('content') or ''}\n</tool_response>")
            continue
        if results and message["role"] == "user":
            results.append(message["content"])
            message = {**message, "content": "\n".join(results)}  # noqa: PLW2901
        elif results:
            yield {"role": "user", "content": "\n".join(results)}
        results = []
        yield _called(message) if message.get("tool_calls") else message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _called(message: Message) -> Message:
    """Return an assistant's message with its calls as text."""
    parts = [message["content"]] if message.get("content") else []
    for call in message["tool_calls"]:
        given, name = call["function"]["arguments"], json.dumps(call["function"]["name"], ensure_ascii=False)
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": "\n".join(parts)}
