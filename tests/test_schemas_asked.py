"""Schemas of requests, of tools and of the command: what cannot be enforced is refused or told, and the model sees them as they are."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import serving
from support.commands import good as run
from support.gbnf import Grammar
from support.serving import TOOLS_TEMPLATE, Running, sse

from pyllama_kvflash.chat.engine import ChatTemplate
from pyllama_kvflash.native import ChatEngine, Model, Rendered, Reply
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = pytest.mark.native

environment = serving.environment
server = serving.with_tools

ROOT = Path(__file__).parent.parent
NAMED_JINJA = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Whose calls name each argument, as those of Qwen3-Coder."""
HI = [{"role": "user", "content": "hi"}]


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters, **more}}


OK = tool(
    "ok", {"type": "object", "properties": {"x": {"type": "integer", "description": "a number"}}, "required": ["x"]}
)
TREE = tool("tree", {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}})
ANYTHING = tool("anything", {"type": "object", "properties": {"v": True}})
ODD = [
    tool("foreign", {"type": "object", "properties": {"a": {"$ref": "http://example.com/a.json"}, "b": {"type": "integer"}}}),
    tool("any_type", {"type": "any"}),
    tool("boolean", True),
    tool("unique", {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as res:
        yield res


def rendered(model: Model, template: str = TOOLS_TEMPLATE, **asked: Any) -> Rendered:
    return ChatTemplate(model, template).rendered(HI, **asked)


def takes(found: Rendered, text: str) -> bool:
    assert found.grammar is not None
    return Grammar(found.grammar.text).takes(found.grammar.after + text)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


#
# tools
#


def test_an_odd_tool_does_not_loosen_the_others(model: Model) -> None:
    found = rendered(model, tools=[OK, TREE, ANYTHING, *ODD], tool_choice="required", parallel_tool_calls=False)
    good = [
        call("ok", '{"x": 5}'), call("tree", '{"kids": [{"kids": []}, {}]}'), call("anything", '{"v": [null]}'),
        call("foreign", '{"a": "free", "b": 1}'), call("any_type", '{"z": {}}'), call("boolean", "{}"), call("unique", '{"tags": [1, 1]}'),
    ]  # fmt: skip
    bad = [
        call("ok", '{"x": "5"}'), call("ok", "{}"), call("tree", '{"kids": [1]}'), call("anything", '{"w": 1}'),
        call("foreign", '{"b": "x"}'), call("any_type", "5"), call("boolean", "[]"), call("unique", '{"tags": 5}'),
    ]  # fmt: skip
    assert [text for text in good if not takes(found, text)] == []
    assert [text for text in bad if takes(found, text)] == []
    assert [warning.partition(" is not enforced")[0] for warning in found.warnings] == [
        "tool foreign: #/properties/a/$ref", "tool any_type: #/type", "tool unique: #/properties/tags/uniqueItems",
    ]  # fmt: skip


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "ok"}}])
@pytest.mark.parametrize("template", [TOOLS_TEMPLATE, NAMED_JINJA])
def test_the_model_sees_schemas_as_they_are(model: Model, template: str, choice: Any) -> None:
    """The prompt is that of the tools that cannot be called, whatever is called: what was read of it need not be read again."""
    tools = [OK, TREE, ANYTHING, *ODD]
    request = {"messages": HI, "tools": tools, "tool_choice": "none", "add_generation_prompt": True}
    plain = ChatEngine(model, template).apply(request).prompt
    assert all(json.dumps(t["function"]["parameters"]) in plain for t in tools)
    assert rendered(model, template, tools=tools, tool_choice=choice).prompt == plain
    if choice == "auto" and template == TOOLS_TEMPLATE:
        assert (
            rendered(model, template, tools=tools, tool_choice=choice, json_schema={"type": "integer"}).prompt == plain
        )


def test_arguments_that_a_template_names(model: Model) -> None:
    """There is no JSON around them. Strings are written as they are: what more is said of them is told."""
    to = {
        "type": "object", "required": ["n"],
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 3}, "p": {"type": "number", "minimum": 0}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    }  # fmt: skip
    found = rendered(
        model,
        NAMED_JINJA,
        tools=[tool("f", to), TREE, tool("text", {"properties": {"t": {"type": "string"}, "e": {"enum": ["a", 1]}}})],
        tool_choice="required",
    )

    def named(name: str, **arguments: str) -> str:
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    assert found.warnings == (
        "tool text: # is not enforced: the chat template writes each argument in a form of its own, which cannot express all of it",
    )
    for allowed in (
        named("f", n="3"),
        named("f", n="1", p="1.5"),
        named("f", n="1", kids='[{"n": 2}]'),
        named("tree", kids="[{}]"),
        named("text", t="any <text>"),
        named("text", e="b"),
    ):
        assert takes(found, allowed), allowed
    for bad in (
        named("f", n="4"),
        named("f", n="1", p="-1"),
        named("f", n="1", kids="[{}]"),
        named("f"),
        named("tree", kids="[1]"),
    ):
        assert not takes(found, bad), bad


def test_named_arguments_have_the_types_of_their_schema(model: Model) -> None:
    """A string that looks like JSON stays one."""
    kinds = {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "l": {"type": "array"},
        "u": {"type": ["integer", "null"]},
    }
    found = rendered(
        model, NAMED_JINJA, tools=[tool("f", {"type": "object", "properties": kinds})], tool_choice="required"
    )
    given = {"n": "3", "s": "12", "l": "[1]", "u": "null"}
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
    said = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    assert takes(found, said)
    calls = [delta.call for delta in Reply(found).push(said, partial=False) if delta.call]
    assert json.loads("".join(call.arguments for call in calls)) == {"n": 3, "s": "12", "l": [1], "u": None}


def test_a_call_or_an_answer_keeps_to_its_schema(model: Model) -> None:
    found = rendered(
        model, tools=[OK, TREE], tool_choice="auto", json_schema={"type": "number", "minimum": 0, "maximum": 1}
    )
    for allowed in (call("ok", '{"x": 5}'), "0.25", "1"):
        assert takes(found, allowed), allowed
    for bad in (call("ok", '{"x": []}'), "-0.25", "1.5", '"x"'):
        assert not takes(found, bad), bad


#
# over HTTP
#


def post(server: Running, **more: Any) -> Any:
    return server.post({"messages": HI, "max_tokens": 8, **more}, "/v1/chat/completions")


def test_one_odd_tool_is_answered_and_told(server: Running) -> None:
    res = post(server, tools=[OK, *ODD[:2]])
    assert res.status_code == 200, res.text
    assert res.headers["KVFlash-Warning"] == (
        "tool foreign: #/properties/a/$ref is not enforced: 'http://example.com/a.json' is not in this document: put what it"
        ' names in $defs | tool any_type: #/type is not enforced: "any" is not a type: give one of null, boolean, integer,'
        " number, string, array, object"
    )
    said = [note for note in server.notes if note.startswith("warning: tool any_type")]
    assert len(said) == 1
    streamed = post(server, tools=[OK, *ODD[:2]], stream=True)
    assert streamed.headers["KVFlash-Warning"] == res.headers["KVFlash-Warning"]
    assert sse(streamed.text)[0][-1] == "[DONE]"
    assert [note for note in server.notes if note.startswith("warning: tool any_type")] == said, "the log says it once"
    assert "KVFlash-Warning" not in post(server, tools=[OK, TREE, ANYTHING]).headers


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"properties": {"a": {"$ref": "http://example.com/"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, "/properties/a/uniqueItems"),
        ({"type": "string"}, ""),
    ],
)
def test_a_strict_tool_is_refused_by_name(server: Running, parameters: Any, place: str) -> None:
    res = post(server, tools=[OK, tool("odd", parameters, strict=True)])
    assert res.status_code == 400
    assert res.json()["error"]["param"] == f"tools[1].function.parameters{place}"
    asked = {"name": "odd", "input_schema": parameters, "strict": True}
    res = server.post({"messages": HI, "max_tokens": 8, "tools": [asked]}, "/v1/messages")
    assert res.status_code == 400
    assert f"#{place}: " in res.json()["error"]["message"]


def form(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "t", "strict": strict, "schema": schema}}


BAD = [
    ({"type": "integer", "minimum": 5, "maximum": 3}, "/minimum", "minimum is 5, above maximum, 3"),
    (
        {"properties": {"a/b": {"type": "string", "minLength": 2, "maxLength": 1}}},
        "/properties/a~1b/minLength",
        "above maxLength",
    ),
    ({"properties": {"a": {"enum": []}}}, "/properties/a/enum", "at least one value"),
    ({"type": "array", "contains": {"type": "null"}}, "/contains", "cannot be enforced"),
]


@pytest.mark.parametrize(("schema", "place", "words"), BAD)
def test_what_a_strict_answer_cannot_be_kept_to_is_refused(
    server: Running, schema: Any, place: str, words: str
) -> None:
    res = post(server, response_format=form(schema))
    assert res.status_code == 400
    error = res.json()["error"]
    assert error["param"] == f"response_format.json_schema.schema{place}"
    assert words in error["message"]
    assert "grammar" not in error["message"]


def test_what_another_answer_cannot_be_kept_to_is_told(server: Running) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 1, "contains": {"const": 1}}
    want = "#/contains is not enforced: items are not counted by their schema"
    asked: list[dict[str, Any]] = [
        {"response_format": form(schema, strict=False)}, {"response_format": {"type": "json_object", "schema": schema}}, {"json_schema": schema},
    ]  # fmt: skip
    for more in asked:
        res = post(server, **more)
        assert (res.status_code, res.headers["KVFlash-Warning"]) == (200, want)
    res = server.post({"prompt": "x", "max_tokens": 2, "json_schema": schema})
    assert (res.status_code, res.headers["KVFlash-Warning"]) == (200, want)
    body = {"messages": HI, "max_tokens": 8, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    res = server.post(body, "/v1/messages")
    assert (res.status_code, res.headers["KVFlash-Warning"]) == (200, want)


def test_a_warning_fits_a_header(server: Running) -> None:
    """Whatever names the schema has."""
    names = {f"line\nbreak é😀 {i}" * 9: {"type": "array", "uniqueItems": True} for i in range(40)}
    res = post(server, json_schema={"type": "object", "properties": names})
    assert res.status_code == 200, res.text
    assert len(res.headers["KVFlash-Warning"]) == 2003
    assert "line?break \\xe9\\U0001f600 0" in res.headers["KVFlash-Warning"]
    assert all("\n" not in note for note in server.notes)


#
# the command, and the documents
#


def test_the_command_warns_of_what_is_not_enforced() -> None:
    schema = '{"type": "array", "items": {"const": 1}, "maxItems": 2, "uniqueItems": true}'
    done = run("run", BUNDLED_MODEL, "-p", "x", "-n", "8", "-j", schema)
    assert done.stderr.count("kvflash: warning: #/uniqueItems is not enforced: items are not compared\n") == 1


def test_the_table_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "schemas.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
