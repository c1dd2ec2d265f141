"""llama.cpp's chat templates and parsers: what a conversation with tools is to the model, and what its answer says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.oracles import ON_CPU

from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.chat.engine import ChatTemplate
from pyllama_kvflash.errors import UnsupportedError, UsageError
from pyllama_kvflash.events import Token
from pyllama_kvflash.native import ChatEngine, Delta, Grammar, Model, Rendered, Reply
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = pytest.mark.native

TOOLS_JINJA = (Path(__file__).parent / "data" / "tools.jinja").read_text("utf-8")
THINKING_JINJA = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"to {name}", "parameters": schema}}


WEATHER = tool("weather", city={"type": "string"})
ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
ASKED = {"role": "user", "content": "What is the weather in Paris, and 2 + 3?"}
CALLS = (
    'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris \\"\\u00e9\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as res:
        yield res


@pytest.fixture(scope="module")
def engine(model: Model) -> ChatEngine:
    return ChatEngine(model, TOOLS_JINJA)


def request(**more: Any) -> dict[str, Any]:
    return {"messages": [ASKED], "tools": [WEATHER, ADD], "tool_choice": "auto", "parallel_tool_calls": True, **more}


def told(deltas: list[Delta]) -> tuple[str, str, list[dict[str, str]]]:
    """Content, reasoning and calls."""
    calls: dict[int, dict[str, str]] = {}
    for call in (d.call for d in deltas if d.call):
        found = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
        found["arguments"] += call.arguments
        found |= {k: v for k, v in (("id", call.id), ("name", call.name)) if v}
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), list(calls.values())


def pieces(rendered: Rendered, text: str, size: int) -> list[Delta]:
    reply = Reply(rendered)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return [d for part in parts for d in reply.push(part)] + reply.push("", partial=False)


def test_a_conversation_with_calls_and_results(engine: ChatEngine) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abc", "content": "five"}
    prompt = engine.apply(request(messages=[ASKED, said, result])).prompt
    assert engine.caps["supports_tools"]
    assert engine.caps["supports_tool_calls"]
    assert '"name": "weather"' in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>' in prompt
    assert "<tool_response>\nfive\n</tool_response>" in prompt


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_come_piece_by_piece(engine: ChatEngine, size: int) -> None:
    """However the text is cut, it says the same, and no mark of a call is taken for content."""
    content, _, calls = told(pieces(engine.apply(request()), CALLS, size))
    assert content.strip() == "Wait."
    assert [call["name"] for call in calls] == ["weather", "add"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": 'Paris "é"'}, {"a": 2, "b": 3}]
    assert len({call["id"] for call in calls}) == 2
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)


def test_what_is_no_answer_of_the_template(engine: ChatEngine) -> None:
    """A call of no tool that there is, say: whoever asks goes on with it as text."""
    reply = Reply(engine.apply(request(tool_choice="required")))
    with pytest.raises(UsageError, match="does not match"):
        reply.push('<tool_call>\n{"name": "fly"}', partial=False)


@pytest.mark.parametrize("size", [2, 1000])
def test_reasoning(model: Model, size: int) -> None:
    engine = ChatEngine(model, THINKING_JINJA)
    rendered = engine.apply({"messages": [ASKED]})
    assert told(pieces(rendered, "<think>\nLet me see.\n</think>\n\nFive.", size)) == ("Five.", "Let me see.\n", [])
    quiet = engine.apply({"messages": [ASKED], "enable_thinking": False})
    assert quiet.prompt.endswith("</think>\n\n")
    assert told(pieces(quiet, "Five.", size)) == ("Five.", "", [])
    said = {"role": "assistant", "content": "Five.", "reasoning_content": "Hm."}
    assert "<think>\nHm.\n</think>" in engine.apply({"messages": [ASKED, said, ASKED]}).prompt


def test_one_tool_of_several_must_be_called(model: Model, engine: ChatEngine) -> None:
    """The prompt is the same as for all of them: what was read of it need not be read again."""
    template = ChatTemplate(model, TOOLS_JINJA)
    only = {"type": "function", "function": {"name": "add"}}
    rendered = template.rendered([ASKED], tools=[WEATHER, ADD], tool_choice=only)
    assert rendered.prompt == engine.apply(request()).prompt
    assert rendered.grammar
    assert "add" in rendered.grammar.text
    assert "weather" not in rendered.grammar.text


#
# grammars
#


@pytest.fixture(scope="module")
def kv() -> Iterator[KVFlash]:
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=2048, pool="off", n_threads=1, **ON_CPU) as res:
        yield res


def answer(kv: KVFlash, prompt: str, grammar: Grammar | str, **options: Any) -> str:
    sampling = Sampling(**{"temperature": 0, "grammar": grammar, **options})
    tokens = kv.tokenize(prompt, parse_special=True)
    events = list(kv.generate(tokens, max_tokens=120, sampling=sampling))
    return "".join(e.text for e in events if isinstance(e, Token)) + events[-1].text


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_made(kv: KVFlash, engine: ChatEngine, seed: int) -> None:
    """By a model that never heard of tools, at a temperature at which it babbles: only the grammar has it call."""
    rendered = engine.apply(request(tools=[ADD], tool_choice="required", parallel_tool_calls=False))
    text = answer(kv, rendered.prompt, rendered.grammar, temperature=1.5, seed=seed)
    content, _, calls = told(pieces(rendered, text, 5))
    assert content.strip() == ""
    if "</tool_call>" in text:
        (call,) = calls
        assert call["name"] == "add"
        assert all(type(v) is int for v in json.loads(call["arguments"]).values())
    else:
        assert text.lstrip().startswith("<tool_call>"), "between its words there may be much space"


def test_a_lazy_grammar_begins_with_its_trigger(kv: KVFlash) -> None:
    """Before that the answer is what it would be without one; from there on it is the grammar's."""
    plain = answer(kv, "On and on.", "")
    first = kv.tokenize(plain, add_special=False).tolist()
    at = next(i for i in range(3, len(first)) if first[i] not in first[:i])
    trigger = kv.model.piece(first[at]).decode()
    before = b"".join(kv.model.piece(t) for t in first[:at]).decode()
    rule = f"root ::= {json.dumps(trigger)} [xyz]+"
    lazy = answer(kv, "On and on.", Grammar(rule, lazy=True, tokens=(first[at],)))
    assert lazy.startswith(before + trigger)
    assert set(lazy[len(before + trigger) :]) <= set("xyz")
    never = answer(kv, "On and on.", Grammar('root ::= "\x01"', lazy=True, patterns=("\x01\x02",)))
    assert never == plain


#
# templates that are not trusted
#

LOOPS = {
    "for ever": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a list in lists": "{% set x = range(9999) %}{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
}
LARGE = {
    "text": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "list": "{% set ns = namespace(x=[1, 2, 3]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "range": "{% for i in range(999999999) %}{% endfor %}",
    "depth": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
}


@pytest.mark.parametrize("source", [*LOOPS.values(), *LARGE.values()], ids=[*LOOPS, *LARGE])
def test_a_template_that_takes_too_much_is_refused(model: Model, source: str) -> None:
    with pytest.raises(UnsupportedError, match=r"too long|too many|too deeply|range|too much") as caught:
        ChatEngine(model, source + "{{ messages[0].content }}", seconds=0.5).apply({"messages": [ASKED]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "[" * 5000 + "]" * 5000 + " }}", "{{ " + "{1:" * 5000,
        "{{ " + "a[" * 5000, "{{ " + "f(" * 5000, "{{ " + "not " * 100000 + "1 }}", "{{ 1" + " if 1 else 1" * 100000 + " }}",
        "{% if a %}" * 5000 + "{% endif %}" * 5000, "{% if a %}" + "{% elif a %}" * 30000 + "{% endif %}",
    ],
    ids=["parentheses", "lists", "dicts", "indexes", "calls", "not", "choices", "blocks", "elif"],
)  # fmt: skip
def test_a_template_nested_past_the_end_of_the_stack_is_refused(model: Model, source: str) -> None:
    """llama.cpp's parser recurses, without a limit of its own."""
    with pytest.raises(UsageError, match=r"cannot read the chat template: it is nested too deeply: give another one"):
        ChatTemplate(model, source)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", "Unexpected token: %} of type 9"),
        ("{{", "Unexpected EOF ...{{..."),
        ("{% include 'x' %}", "Unknown statement: include"),
        ("a {# b", "missing end of comment tag ...a {# b..."),
        ("a\0b", "the template has a zero byte"),
    ],
)
def test_a_template_that_llama_cpp_cannot_read_is_refused(model: Model, source: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        ChatTemplate(model, source)
    assert str(caught.value) == f"llama.cpp cannot read the chat template: {why}: give another one as `template`"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('no such role') }}", "Jinja Exception: no such role"),
        ("{{ messages | wordwrap(5) }}", "Unknown (built-in) filter 'wordwrap' for type Array"),
        (LARGE["range"], "it calls range() for too many items"),
    ],
)
def test_a_template_that_fails(model: Model, source: str, why: str) -> None:
    template = ChatTemplate(model, source)
    with pytest.raises(UsageError) as caught:
        template.render([ASKED])
    assert str(caught.value) == f"the chat template cannot render this conversation: {why}"


@pytest.mark.parametrize("bad", [{"messages": 5}, {"messages": [{}]}, {"messages": [ASKED], "tools": [{}]}, {}])
def test_a_request_that_is_none(engine: ChatEngine, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        engine.apply(bad)
