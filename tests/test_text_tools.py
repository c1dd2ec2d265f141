"""Tools for a template that knows none: they are text of the conversation, and calls are found in the answer all the same."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support import serving
from support.serving import Running, sse

from pyllama_kvflash.chat.engine import ChatTemplate
from pyllama_kvflash.chat.tools import WARNING, as_text
from pyllama_kvflash.native import Model, Reply
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native]

environment = serving.environment

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bergen", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
SAID = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>'
ASKED = {"role": "user", "content": "And in Lima?"}
TALK: list[Any] = [
    {"role": "system", "content": "Be brief."},
    ASKED,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "clear"},
    {"role": "tool", "tool_call_id": "2", "content": "21"},
]


def test_calls_and_results_are_text() -> None:
    assert as_text(TALK, (), must=False) == [
        TALK[0],
        ASKED,
        {"role": "assistant", "content": f"I look.\n{SAID}"},
        {
            "role": "user",
            "content": "<tool_response>\nclear\n</tool_response>\n<tool_response>\n21\n</tool_response>",
        },
    ]


@pytest.mark.parametrize("must", [False, True])
def test_the_system_message_describes_tools(must: bool) -> None:
    for talk, begin in ((TALK, "Be brief.\n\n"), (TALK[1:], "")):
        first = as_text(talk, [TOOL, NOW], must=must)[0]
        assert first["role"] == "system"
        assert first["content"].startswith(begin)
        assert f"<tools>\n{json.dumps(TOOL)}\n{json.dumps(NOW)}\n</tools>" in first["content"]
        assert first["content"].endswith("Answer with a call.") == must


LINES = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me] {% endif %}"
)
TEMPLATES = {"lines": LINES, "none": None}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as res:
        yield res


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest, model: Model) -> ChatTemplate:
    return ChatTemplate(model, TEMPLATES[request.param])


def test_a_call_is_found_in_the_answer(template: ChatTemplate) -> None:
    assert not template.takes_tools
    rendered = template.rendered(TALK, tools=[TOOL], tool_choice="auto", parallel_tool_calls=False)
    assert WARNING in rendered.warnings
    assert json.dumps(TOOL) in rendered.prompt
    assert SAID in rendered.prompt
    assert rendered.grammar is not None
    assert rendered.grammar.lazy
    deltas = Reply(rendered).push(f"Well. {SAID}", partial=False)
    calls = [d.call for d in deltas if d.call]
    assert {call.name for call in calls if call.name} == {"weather"}
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Lima"}


#
# the server
#


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running() as res:
        yield res


BODY: dict[str, Any] = {"messages": TALK, "tools": [TOOL, NOW], "max_tokens": 200, "temperature": 1, "seed": 5}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call(running: Running, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    res = running.post({**BODY, "tool_choice": choice, "stream": stream}, "/v1/chat/completions")
    assert res.status_code == 200, res.text
    assert res.headers["KVFlash-Warning"].startswith(WARNING)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in sse(res.text)[0][:-1]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        name, given = calls[0]["function"]["name"], "".join(c["function"]["arguments"] for c in calls)
    else:
        choice = res.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        name, given = (choice["message"]["tool_calls"][0]["function"][k] for k in ("name", "arguments"))
    assert name == "weather"
    assert json.loads(given)["city"] in {"Bergen", "Lima"}


@pytest.mark.slow
def test_a_call_or_a_schema(running: Running) -> None:
    """An answer may be either: llama.cpp's form of calls in text has a place for both."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    res = running.post({**BODY, "response_format": form}, "/v1/chat/completions")
    assert res.status_code == 200, res.text
    message = res.json()["choices"][0]["message"]
    if not message.get("tool_calls"):
        assert list(json.loads(message["content"])) == ["n"]
