"""What an answer says, from texts that no model has to write: none is lost, and no call is half of one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from pyllama_kvflash.native import ChatEngine, Model, Rendered
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.serve.job import Finished
from pyllama_kvflash.serve.protocols.answer_parser import AnswerParser

pytestmark = pytest.mark.native

HERMES = (Path(__file__).parent / "data" / "tools.jinja").read_text("utf-8")
# calls are bare JSON, as with Llama 3
BARE = """{%- if tools %}Tools: {{ tools | tojson }} Answer with {"name": ..., "parameters": ...}.
{%- endif %}{%- for m in messages %}{{ '<|start|>' + m.role + '<|end|>' }}
{%- if m.tool_calls %}{%- for c in m.tool_calls %}{{ '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' }}
{%- endfor %}{%- else %}{{ m.content }}{%- endif %}{{ '<|eot|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>' }}{%- endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "tool_choice": "auto"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as found:
        yield found


def ended(reason: str = "eos", stop: str | None = None) -> Finished:
    return Finished(reason, 1, 0, 1, 0.1, stop)


def parsed(rendered: Rendered, text: str, done: Finished, stop: Any = (), step: int = 3) -> tuple[AnswerParser, str]:
    """An answer that comes in small pieces, and its content as it was streamed."""
    res, streamed = AnswerParser(rendered, stop), []
    for i in range(0, len(text), step):
        streamed += res.push(text[i : i + step])
    streamed += res.end(done)
    return res, "".join(delta.content for delta in streamed)


@pytest.mark.parametrize("source", [HERMES, BARE], ids=["tags", "bare"])
@pytest.mark.parametrize(
    "text",
    [
        "Just a text.",
        "In C: int main() { return 0; } That is all.",
        'As JSON: {"a": [1, {"b": null}]} and so on.',
        '{"name": "weather"',
        "a < b, <tool> and <tool_cal",
        "{ } [ ] { {",
    ],
)
def test_no_text_is_lost(model: Model, source: str, text: str) -> None:
    rendered = ChatEngine(model, source).apply(ASKED)
    found, streamed = parsed(rendered, text, ended())
    assert found.content == streamed
    assert found.content.strip() == text.strip()
    assert not found.called(ended())


def test_a_call_is_found(model: Model) -> None:
    found, streamed = parsed(ChatEngine(model, HERMES).apply(ASKED), f"I look.\n{CALL}", ended())
    assert [(c["name"], json.loads(c["arguments"])) for c in found.calls] == [("weather", {"city": "Lima"})]
    assert streamed.strip() == "I look."
    assert found.called(ended())


def test_a_call_that_the_client_s_own_string_ends_is_none(model: Model) -> None:
    rendered = ChatEngine(model, HERMES).apply(ASKED)
    text = CALL[: CALL.index("Lima") + 2]
    done = ended("stop", "ma")
    found, _ = parsed(rendered, text, done, stop=("ma",))
    assert not found.called(done)
    done = ended("stop", "</tool_call>")
    found, _ = parsed(rendered, CALL, done, stop=("ma",))
    assert found.called(done), "one of the template's own does not cut it off"


def test_what_the_prompt_ends_with_is_not_said_again(model: Model) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
    rendered = ChatEngine(model, HERMES).apply({"messages": messages, "continue_final_message": True})
    assert rendered.prompt.endswith("assistant\nIt is")
    found, streamed = parsed(rendered, " four.", ended())
    assert found.content == streamed == " four."
