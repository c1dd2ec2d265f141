"""Ollama's API: it says what the OpenAI protocol says, in lines of JSON."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support import serving
from support.changes import GRAMMARS, SERVE
from support.oracles import ON_CPU
from support.serving import NAME, Running
from support.serving import TOOLS_TEMPLATE as TEMPLATE

from pyllama_kvflash import Sampling
from pyllama_kvflash.native import ChatEngine, Model, Rendered
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.serve.job import Finished, Reading, Text, Timing
from pyllama_kvflash.serve.protocols import ollama_request
from pyllama_kvflash.serve.protocols.ollama_response import ChatReply, GenerateReply
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, PreparedRequest

pytestmark = pytest.mark.native

environment = serving.environment

THINKING = TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' + (message.content or '') }}",
    "{{- '<|im_start|>assistant\\n' }}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content }}"
    "{{- message.content or '' }}",
)
ASKS = [{"role": "user", "content": "What is the code of the old mill?"}]
GREEDY = {"temperature": 0, "num_predict": 8}
ADD = {
    "name": "add",
    "description": "Add numbers.",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a", "b"]},
}
TOOLS = [{"type": "function", "function": ADD}]
SCHEMA = {"type": "object", "properties": {"code": {"enum": ["red", "blue"]}}, "required": ["code"]}
DURATIONS = "load_duration", "prompt_eval_duration", "eval_duration"
COUNTS = "prompt_eval_count", "prompt_eval_cached_count", "eval_count"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(template=TEMPLATE, **ON_CPU) as running:
        yield running


def post(server: Running, path: str = "/api/chat", **body: Any) -> Any:
    res = server.http.post(path, json={"model": "any", "stream": False, "options": GREEDY, **body})
    assert res.status_code == 200, res.text
    assert res.headers["content-type"] == "application/json"
    return res.json()


def lines(server: Running, path: str = "/api/chat", **body: Any) -> list[Any]:
    res = server.http.post(path, json={"model": "any", "options": GREEDY, **body})
    assert res.status_code == 200, res.text
    assert res.headers["content-type"] == "application/x-ndjson"
    assert res.text.endswith("}\n")
    return [json.loads(line) for line in res.text.splitlines()]


def openai(server: Running, **body: Any) -> Any:
    res = server.post({"messages": ASKS, "max_tokens": 8, **body}, "/v1/chat/completions")
    assert res.status_code == 200, res.text
    return res.json()


#
# answers
#


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_it_says_what_the_openai_protocol_says(server: Running, system: str) -> None:
    messages = [{"role": "system", "content": system}, *ASKS] if system else ASKS
    said = openai(server, messages=messages)
    text = said["choices"][0]["message"]["content"]
    assert text
    whole = post(server, messages=messages)
    assert whole["message"] == {"role": "assistant", "content": text}
    assert "".join(line["message"]["content"] for line in lines(server, messages=messages)) == text
    prompt = {"prompt": ASKS[0]["content"], "system": system}
    generated = post(server, "/api/generate", **prompt)
    assert generated["response"] == text
    assert "".join(line["response"] for line in lines(server, "/api/generate", **prompt)) == text
    for found in (whole, generated):
        assert (found["prompt_eval_count"], found["eval_count"]) == (said["usage"]["prompt_tokens"], 8)


def test_the_form_of_an_answer(server: Running) -> None:
    whole, (*parts, last) = post(server, messages=ASKS), lines(server, messages=ASKS)
    for line in (whole, *parts, last):
        assert line["model"] == f"{NAME}:latest"
        assert line["created_at"].endswith("Z")
        assert line["message"]["role"] == "assistant"
    assert [line["done"] for line in parts] == [False] * len(parts)
    assert set(parts[0]) == {"model", "created_at", "message", "done"}
    for end in (whole, last):
        assert (end["done"], end["done_reason"]) == (True, "length")
        assert all(type(end[name]) is int and end[name] >= 0 for name in (*DURATIONS, *COUNTS))
        assert end["total_duration"] == sum(end[name] for name in DURATIONS)
        assert end["prompt_eval_duration"] > 0
    assert last["message"]["content"] == ""


def test_a_prompt_as_it_is(server: Running) -> None:
    """With its special tokens: a client may render the conversation itself."""
    rendered = f"<|im_start|>user\n{ASKS[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    found = post(server, "/api/generate", prompt=rendered, raw=True)
    same = post(server, messages=ASKS)
    assert found["response"] == same["message"]["content"]
    assert found["prompt_eval_count"] == same["prompt_eval_count"]
    plain = server.text(prompt="The sea", max_tokens=8)
    assert post(server, "/api/generate", prompt="The sea", raw=True)["response"] == plain


@pytest.mark.sampled(SERVE, GRAMMARS)
@pytest.mark.parametrize("how", [{}, {"raw": True}, {"messages": ASKS}])
def test_an_answer_of_a_form(server: Running, how: dict[str, Any]) -> None:
    path, body = ("/api/chat", how) if "messages" in how else ("/api/generate", {"prompt": "The code?", **how})
    key = ("message", "content") if "messages" in how else ("response",)

    def said(form: Any) -> Any:
        found = post(server, path, **body, format=form, options={"temperature": 0, "num_predict": 200})
        for name in key:
            found = found[name]
        return found

    assert json.loads(said(SCHEMA))["code"] in {"red", "blue"}
    assert said("json").lstrip().startswith("{")
    assert said("") == said(None)


def test_a_suffix_fills_in_the_middle(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is that of /v1/completions with a suffix."""
    asked = []

    def infill(kv: Any, prefix: str, suffix: str, *, at: str) -> list[int]:
        asked.append((prefix, suffix, at))
        return list(map(int, kv.tokenize("The sea")))

    monkeypatch.setattr(ollama_request, "infill", infill)
    found = post(server, "/api/generate", prompt="def f(", suffix="return x")
    assert asked == [("def f(", "return x", "suffix")]
    assert found["response"] == server.text(prompt="The sea", max_tokens=8)


def test_options_without_an_effect(server: Running) -> None:
    """One that the server does not know, and a context that it has not, are named; options of loading are not.
    Nor has raw text a system prompt.
    """
    options = {**GREEDY, "num_gpu": 1, "typical_p": 1.0, "mirostat": 0, "num_ctx": 4096, "use_mmap": True}
    body = {"messages": ASKS, "stream": False, "keep_alive": "5m", "truncate": True, "think": False}
    quiet = server.http.post("/api/chat", json={**body, "options": options})
    assert "kvflash-warning" not in quiet.headers
    options |= {"num_ctx": 8192, "temprature": 1}
    warned = server.http.post("/api/chat", json={**body, "options": options}).headers["kvflash-warning"]
    assert "options.num_ctx" in warned
    assert "4,096" in warned
    assert "'options.temprature' is not a known field" in warned
    raw = {"prompt": "x", "raw": True, "system": "Be brief.", "options": GREEDY}
    assert "system is left out" in server.http.post("/api/generate", json=raw).headers["kvflash-warning"]


#
# tools
#


def test_a_call_and_its_result(server: Running) -> None:
    alone = {"tool_choice": "required", "parallel_tool_calls": False}
    asked = {"messages": ASKS, "tools": TOOLS, **alone, "options": {"temperature": 0, "num_predict": 300}}
    for found in (post(server, **asked), lines(server, **asked)[-2]):
        call = found["message"]["tool_calls"][0]["function"]
        assert (call["name"], call["index"]) == ("add", 0)
        assert call["arguments"] in ({"a": 1, "b": 3}, {"a": 2, "b": 3})


def test_results_go_to_their_calls_without_ids() -> None:
    """By name, and else in the order of the calls; the model is told the same as over the OpenAI protocol."""
    messages: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "tool_calls": [
                {"function": {"name": "add", "arguments": {"a": 1, "b": 3}}},
                {"function": {"name": "now"}},
                {"id": "mine", "function": {"name": "add", "arguments": '{"a": 2}'}},
            ],
        },
        {"role": "tool", "tool_name": "now", "content": "noon"},
        {"role": "tool", "content": "4"},
        {"role": "tool", "tool_call_id": "mine", "content": "5"},
        {"role": "tool", "tool_name": "other", "content": "6"},
    ]
    assistant, *results = ollama_request._messages(messages)
    first, second, third = assistant["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in (first, second, third)] == [{"a": 1, "b": 3}, {}, {"a": 2}]
    assert all(c["id"].isalnum() and len(c["id"]) == 9 for c in (first, second)), "as Mistral's templates demand"
    assert [r["tool_call_id"] for r in results] == [second["id"], first["id"], "mine", "call"]
    assert [r.get("name") for r in results] == ["now", None, None, "other"]


#
# an answer as it grows
#


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as found:
        yield found


def rendered(model: Model, source: str) -> Rendered:
    return ChatEngine(model, source).apply({"messages": ASKS, "tools": TOOLS, "tool_choice": "auto"})


def reply(found: Rendered | None, kind: type[ChatReply] = ChatReply) -> ChatReply:
    return kind("m:1", PreparedRequest(ParsedRequest(sampling=Sampling()), [], Sampling(), (), found))  # type: ignore[arg-type]


def done(reason: str = "eos") -> Finished:
    return Finished(reason, 9, 4, 3, 2.0, timing=Timing(n_read=5, read_s=0.5, n_answer=3, answer_s=0.25))


def written(own: ChatReply, text: str, end: Finished) -> list[Any]:
    parts = own.first() + own.reading(Reading(1, 9)) + own.alive()
    parts += b"".join(own.text(Text(text[i : i + 3])) for i in range(0, len(text), 3)) + own.end(end) + own.last()
    return [json.loads(line) for line in parts.decode().splitlines()]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 3}}\n</tool_call>'


def test_a_call_comes_whole_and_a_part_of_one_does_not(model: Model) -> None:
    """Its arguments are an object, so a client could not see that they are not all there."""
    own = reply(rendered(model, TEMPLATE))
    *_, call, last = written(own, f"So. {CALL}", done())
    assert call["message"]["tool_calls"][0]["function"] == {"index": 0, "name": "add", "arguments": {"a": 1, "b": 3}}
    assert last["model"] == "m:1"
    assert own.whole()["message"]["content"].strip() == "So."
    cut = reply(rendered(model, TEMPLATE))
    assert not [line for line in written(cut, CALL[:50], done("length")) if "tool_calls" in line["message"]]
    assert "tool_calls" not in cut.whole()["message"]
    assert cut.whole()["done_reason"] == "length"


@pytest.mark.parametrize("kind", [ChatReply, GenerateReply])
def test_reasoning_is_apart(model: Model, kind: type[ChatReply]) -> None:
    own = reply(rendered(model, THINKING), kind)
    found = [line.get("message", line) for line in written(own, "<think>\nHm.\n</think>\n\nSo it is.", done())]
    key = "content" if kind is ChatReply else "response"
    whole = own.whole().get("message", own.whole())
    assert (whole["thinking"].strip(), whole[key].strip()) == ("Hm.", "So it is.")
    assert "".join(line.get("thinking", "") for line in found) == whole["thinking"]
    assert "".join(line[key] for line in found) == whole[key]


#
# about the server, and what it refuses
#


def test_about_the_model(server: Running) -> None:
    (listed,) = server.http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == f"{NAME}:latest"
    assert len(listed["digest"]) == 64
    details = {"format": "gguf", "family": "qwen3", "parameter_size": "6.97M", "quantization_level": "Q8_0"}
    assert details.items() <= listed["details"].items()
    (runs,) = server.http.get("/api/ps").json()["models"]
    assert listed.items() <= runs.items()
    assert (runs["context_length"], runs["size_vram"]) == (4096, 0)
    shown = server.http.post("/api/show", json={"model": "whatever"}).json()
    assert shown["details"] == listed["details"]
    assert shown["template"] == TEMPLATE
    assert shown["capabilities"] == ["completion", "tools"]
    info = shown["model_info"]
    assert info["general.architecture"] == "qwen3"
    assert (info["qwen3.context_length"], info["qwen3.block_count"]) == (4096, 6)
    assert "num_ctx                        4096" in shown["parameters"].splitlines()


def test_probes_find_a_server(server: Running) -> None:
    for path in ("/", "/api/version", "/api/tags"):
        assert server.http.head(path).status_code == 200
    version = server.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "VS Code asks for it"


@pytest.mark.parametrize(("path", "key", "said"), [
    ("/api/chat", "message", {"role": "assistant", "content": ""}), ("/api/generate", "response", ""),
])  # fmt: skip
def test_nothing_to_say_loads_the_model(server: Running, path: str, key: str, said: Any) -> None:
    """It is loaded, and stays so."""
    for body, reason in [({}, "load"), ({"messages": [], "prompt": "", "keep_alive": -1}, "load"),
                         ({"keep_alive": 0}, "unload"), ({"keep_alive": "0s", "stream": True}, "unload")]:  # fmt: skip
        found = post(server, path, **body)
        assert (found[key], found["done"], found["done_reason"]) == (said, True, reason)
    assert server.idle()
