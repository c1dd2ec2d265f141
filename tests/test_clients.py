"""Clients that others wrote, each as its users call it, against a running server: a small real model, and a template with tools.

What the model says does not matter. What matters: what it calls has the types that were asked for, what a tool finds comes
back under the id of its call, and every answer has all that its client reads.
"""

import importlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

pytest.importorskip("openai")

import openai
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from support import real, serving
from support.changes import SERVE
from support.serving import NAME, TOOLS_TEMPLATE, Running

from pyllama_kvflash import KVFlash
from pyllama_kvflash.serve.scheduler import Scheduler

# what others' code warns of is theirs: it differs by version
pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.nightly(SERVE)]

environment = serving.environment
model = real.model

KEY = "a-key"
CITIES = ["Bergen", "Lima", "Pune"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ABOUT = "The weather of the next days."
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": ABOUT, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
]
ASKED = "What will the weather be in Lima in the next 3 days?"
FOUND = '{"sky": "clear", "degrees": 21}'


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch, environment: None) -> None:
    """Nothing of the caller's settings, and no way to another machine."""
    for name in list(os.environ):
        if name.startswith("ANTHROPIC_"):
            monkeypatch.delenv(name)
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def looked_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        assert host in {"127.0.0.1", b"127.0.0.1"}, f"it looks for {host}"
        return look_up(host, *args, **kwargs)

    def connected(own: socket.socket, address: Any) -> None:
        assert own.family not in {socket.AF_INET, socket.AF_INET6} or address[0] == "127.0.0.1", f"it asks {address}"
        connect(own, address)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(socket.socket, "connect", connected)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    def open_model(progress: Any) -> KVFlash:
        return KVFlash.from_file(
            model, progress=progress, n_ctx=4096, pool=1024, n_batch=128, n_threads=1, n_parallel=2
        )

    scheduler = Scheduler(open_model, n_queue=8)
    with Running(scheduler, api_key=KEY, n_predict=64, template=TOOLS_TEMPLATE) as running:
        yield running


def library(name: str) -> ModuleType:
    """A client that not everybody has."""
    why = f"{name} is not installed: pip install 'pyllama-kvflash[clients]'"
    pytest.importorskip(name, reason=why)
    return importlib.import_module(name)


def check_arguments(given: Any) -> dict[str, Any]:
    """They are those of the schema, however they are told."""
    found = json.loads(given) if isinstance(given, str) else given
    assert list(found) == ["city", "days"]
    assert found["city"] in CITIES
    assert type(found["days"]) is int
    assert 1 <= found["days"] <= 7
    return dict(found)


def check_usage(usage: Any, n_answer: int = 64) -> None:
    assert 0 < usage.completion_tokens <= n_answer
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


#
# openai
#


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as res:
        yield res


CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": ASKED}], "temperature": 0}


def test_openai_chat(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [NAME]
    res = client.chat.completions.create(**CHAT, max_tokens=8)
    assert (res.object, res.model) == ("chat.completion", NAME)
    (choice,) = res.choices
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.message.tool_calls is None
    assert choice.finish_reason in {"stop", "length"}
    check_usage(res.usage, 8)
    completion = client.completions.create(model=NAME, prompt="The sea is", max_tokens=4, temperature=0)
    assert completion.choices[0].text
    check_usage(completion.usage, 4)


class Weather(BaseModel):
    city: Literal["Bergen", "Lima"]
    days: int
    dry: bool


def test_openai_parses_an_answer_into_a_class(client: openai.OpenAI) -> None:
    res = client.chat.completions.parse(**CHAT, response_format=Weather, max_tokens=64)
    assert isinstance(res.choices[0].message.parsed, Weather)
    assert res.choices[0].finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**CHAT, response_format=Weather, max_tokens=3)


def test_openai_raises_what_the_server_refuses(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="must be from 0 to 2") as bad:
        client.chat.completions.create(**{**CHAT, "temperature": 3})
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").chat.completions.create(**CHAT)
    with pytest.raises(openai.InternalServerError, match="this server has no embeddings"):  # 501, as llama-server's
        client.embeddings.create(model=NAME, input="x")
    assert server.idle()


#
# the Responses API
#


EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
CITY: Any = openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}


def test_openai_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model=NAME, input="Hi. " * 40, max_output_tokens=8, temperature=0)
    assert first.output_text
    assert first.usage is not None
    then = client.responses.create(model=NAME, input="And?", previous_response_id=first.id, max_output_tokens=8)
    assert then.usage is not None
    assert then.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=NAME, input="And?", previous_response_id=first.id)


def test_events_have_what_the_schema_requires(server: Running) -> None:
    """Strictly: the library itself takes events without fields that it requires."""
    for more in ({}, {"tools": [CITY], "tool_choice": "required"}):
        body = {"input": "Hi", "stream": True, "max_output_tokens": 64, "temperature": 0, **more}
        lines = server.post(body, "/v1/responses").text.splitlines()
        kinds = set()
        for line in lines:
            if line.startswith("data: "):
                event = EVENT.validate_json(line.removeprefix("data: "))
                kinds.add(event.type)
        assert {
            "response.created",
            "response.function_call_arguments.delta" if more else "response.output_text.delta",
        } <= kinds


def test_openai_responses_with_tools(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "tools": [CITY], "tool_choice": "required", "parallel_tool_calls": False}
    given: list[Any] = [{"role": "user", "content": "Which city?"}]
    with client.responses.stream(input=given, **asked) as stream:
        for _ in stream:
            pass
        found = stream.get_final_response()
    call = found.output[0]
    assert call.type == "function_call"
    assert set(call.parsed_arguments) == {"city", "days", "dry"}
    given += [*found.output, {"type": "function_call_output", "call_id": call.call_id, "output": "clear"}]
    after = client.responses.create(input=given, **{**asked, "tool_choice": "none"}, max_output_tokens=4)
    assert after.output_text


#
# anthropic
#

MESSAGE: dict[str, Any] = {
    "model": NAME, "max_tokens": 64, "messages": CHAT["messages"], "extra_body": {"temperature": 0},
}  # fmt: skip
CUSTOM: list[Any] = [{"name": "weather", "description": ABOUT, "input_schema": SCHEMA}]


@pytest.fixture
def claude(server: Running) -> Iterator[Any]:
    """Its client, which sends the key as x-api-key."""
    with library("anthropic").Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as res:
        yield res


def test_anthropic_messages(claude: Any) -> None:
    res = claude.messages.create(**{**MESSAGE, "max_tokens": 8}, system="Be brief.")
    assert (res.type, res.role, res.model) == ("message", "assistant", NAME)
    assert [block.type for block in res.content] == ["text"]
    assert res.stop_reason in {"end_turn", "max_tokens"}
    assert 0 < res.usage.output_tokens <= 8
    n = claude.messages.count_tokens(model=NAME, messages=MESSAGE["messages"], system="Be brief.").input_tokens
    assert n == res.usage.input_tokens + res.usage.cache_read_input_tokens


def test_anthropic_tools_streamed(claude: Any) -> None:
    ask = {**MESSAGE, "tools": CUSTOM}
    must = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(**ask, tool_choice=must) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("input_json") > 3
    (call,) = first.content
    assert (call.type, call.name, first.stop_reason) == ("tool_use", "weather", "tool_use")
    check_arguments(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": FOUND}]}
    told = [
        *MESSAGE["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = claude.messages.create(**{**ask, "messages": told, "max_tokens": 12}, tool_choice={"type": "none"})
    assert [block.type for block in last.content] == ["text"]
    assert last.usage.cache_read_input_tokens > 50
    with claude.messages.stream(**{**MESSAGE, "max_tokens": 6}) as stream:
        assert "".join(stream.text_stream) == stream.get_final_text()


def test_anthropic_raises_what_the_server_refuses(claude: Any) -> None:
    anthropic = library("anthropic")
    with pytest.raises(anthropic.BadRequestError) as bad:
        claude.messages.create(**{**MESSAGE, "messages": []})
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="another").messages.create(**MESSAGE)


#
# ollama
#


@pytest.fixture
def local_ollama(server: Running) -> Iterator[Any]:
    """Its client. The key goes into a header, as Ollama's own cloud has it."""
    client = library("ollama").Client(host=server.url, headers={"Authorization": f"Bearer {KEY}"})
    yield client
    client.close()


OPTIONS = {"temperature": 0, "num_predict": 64}


def test_ollama_finds_the_model(local_ollama: Any, model: Path) -> None:
    (found,) = local_ollama.list().models
    assert (found.model, found.details.format) == (f"{NAME}:latest", "gguf")
    assert local_ollama.ps().models[0].context_length == 4096
    shown = local_ollama.show("any")
    assert shown.modelinfo[f"{found.details.family}.context_length"] == 4096
    assert "tools" in shown.capabilities


def test_ollama_chats(local_ollama: Any) -> None:
    ask = {"model": "any", "messages": CHAT["messages"], "options": {**OPTIONS, "num_predict": 8}}
    whole = local_ollama.chat(**ask)
    parts = list(local_ollama.chat(**ask, stream=True))
    assert whole.message.content
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert 0 < parts[-1].eval_count <= 8
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count
    assert local_ollama.generate("any", ASKED, options=ask["options"]).response == whole.message.content


def test_ollama_calls_a_function(local_ollama: Any) -> None:
    """Without ids, and arguments that are an object. Its class has no tool_choice, which the server takes."""

    def weather(city: str, days: int) -> str:
        """Tell the weather.

        Args:
            city: where
            days: how many
        """
        return f"{city}, {days}: clear"

    tool = importlib.import_module("ollama._utils").convert_function_to_tool(weather).model_dump(exclude_none=True)
    body = {
        "messages": CHAT["messages"],
        "tools": [tool],
        "tool_choice": "required",
        "options": OPTIONS,
        "stream": False,
    }
    first = importlib.import_module("ollama").ChatResponse(
        **local_ollama._request_raw("POST", "/api/chat", json=body).json()
    )
    call = first.message.tool_calls[0].function
    assert (call.name, set(call.arguments)) == ("weather", {"city", "days"})
    result = {"role": "tool", "tool_name": call.name, "content": weather(**call.arguments)}
    told = [*CHAT["messages"], first.message, result]
    last = local_ollama.chat("any", told, tools=[weather], options={**OPTIONS, "num_predict": 8})
    assert last.message.content or last.message.tool_calls
    assert last.prompt_eval_count > first.prompt_eval_count


def test_ollama_raises_what_the_server_refuses(local_ollama: Any) -> None:
    ollama = library("ollama")
    with pytest.raises(ollama.ResponseError, match="no embeddings") as none:
        local_ollama.embed("any", "x")
    assert none.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="temperature is 9"):
        local_ollama.chat("any", CHAT["messages"], options={"temperature": 9})
    with pytest.raises(ollama.ResponseError, match="give one of"):
        list(local_ollama.chat("any", [{"role": "x", "content": ""}], stream=True))
