"""Clients that others wrote, each as its users call it, against a running server: a small real model, and a template with tools.

What the model says does not matter. What matters: what it calls has the types that were asked for, what a tool finds comes
back under the id of its call, and every answer has all that its client reads.
"""

import asyncio
import importlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import httpx
import openai
from pydantic import BaseModel
from support import real, serving
from support.changes import SERVE
from support.serving import NAME, Running

from pyllama_kvflash import KVFlash
from pyllama_kvflash.native import ChatEngine, Model
from pyllama_kvflash.serve.scheduler import Scheduler

# what others' code warns of is theirs: it differs by version
pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.nightly(SERVE)]

environment = serving.environment
model = real.model

KEY = "a-key"
TEMPLATE = (Path(__file__).parent / "data" / "tools.jinja").read_text()
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
QUIET = {
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LLM_LOAD_PLUGINS": "",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: None) -> None:
    """Nothing of the caller's settings, and no way to another machine."""
    for name in list(os.environ):
        if name.startswith(("ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_", "LLM_")):
            monkeypatch.delenv(name)
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
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
    with Running(scheduler, key=KEY, n_predict=64, template=TEMPLATE) as running:
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


def test_the_template_has_tools(model: Path) -> None:
    """As llama.cpp reads it, so that tools are not just text of the prompt."""
    with Model.load(model, no_alloc=True) as loaded:
        caps = ChatEngine(loaded, TEMPLATE).caps
    assert caps["supports_tools"]
    assert caps["supports_tool_calls"]


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


def test_openai_tools_streamed(client: openai.OpenAI) -> None:
    """A call in parts, its result told, and an answer to that."""
    ask = {**CHAT, "tools": TOOLS[:1], "max_tokens": 64, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False))
    assert chunks[-1].choices == []
    check_usage(chunks[-1].usage)
    choices = [c.choices[0] for c in chunks[:-1]]
    assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]
    assert not "".join(c.delta.content or "" for c in choices)
    parts = [call for c in choices for call in c.delta.tool_calls or ()]
    assert len(parts) > 3, "as it is written"
    assert {part.index for part in parts} == {0}
    assert [part.id for part in parts if part.id] == [parts[0].id]
    assert [part.function.name for part in parts if part.function.name] == ["weather"]
    arguments = "".join(part.function.arguments or "" for part in parts)
    check_arguments(arguments)
    call = {"id": parts[0].id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    told = [
        *ask["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": FOUND},
    ]
    chunks = list(client.chat.completions.create(**{**ask, "messages": told, "max_tokens": 12}, tool_choice="none"))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert not any(c.choices[0].delta.tool_calls for c in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason in {"stop", "length"}
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 50, "what both turns begin with is read once"


def test_openai_streams_with_events(client: openai.OpenAI) -> None:
    """Its own helper, which puts the parts together and parses them."""
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(**CHAT, tools=tools, tool_choice=choice, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        res = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = res.choices[0].message.tool_calls
    assert call.function.parsed_arguments == check_arguments(call.function.arguments)
    assert res.choices[0].finish_reason == "tool_calls"


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


def test_openai_logprobs_and_several_answers(client: openai.OpenAI) -> None:
    ask = {**CHAT, "temperature": 1, "seed": 1, "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 3}
    res = client.chat.completions.create(**ask)
    assert [c.index for c in res.choices] == [0, 1]
    for choice in res.choices:
        told = choice.logprobs.content
        assert 1 <= len(told) <= 4
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in told)
        said = b"".join(bytes(token.bytes) for token in told).decode("utf-8", "replace")
        assert said.startswith(choice.message.content.rstrip("\ufffd"))
    check_usage(res.usage, 8)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert {c.choices[0].index for c in chunks} == {0, 1}
    assert (
        sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == res.usage.completion_tokens
    )


def test_openai_asynchronously(server: Running) -> None:
    async def ask() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            ask = {**CHAT, "tools": TOOLS[:1], "parallel_tool_calls": False}
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**ask, tool_choice="required"),
                client.chat.completions.create(**CHAT, max_tokens=6, stream=True),
            )
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask())
    (call,) = whole.choices[0].message.tool_calls
    check_arguments(call.function.arguments)
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}


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


def test_anthropic_parses_an_answer_into_a_class(claude: Any) -> None:
    res = claude.messages.parse(**MESSAGE, output_format=Weather)
    assert isinstance(res.parsed_output, Weather)
    assert res.stop_reason == "end_turn"


def test_anthropic_asynchronously(server: Running) -> None:
    anthropic = library("anthropic")

    async def ask() -> Any:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token=KEY, max_retries=0) as client:
            return await client.messages.create(
                **MESSAGE, tools=CUSTOM, tool_choice={"type": "tool", "name": "weather"}
            )

    res = asyncio.run(ask())
    for call in res.content:
        assert (call.type, call.name) == ("tool_use", "weather")
    check_arguments(res.content[0].input)


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


def test_ollama_keeps_to_a_class(local_ollama: Any) -> None:
    res = local_ollama.chat("any", CHAT["messages"], format=Weather.model_json_schema(), options=OPTIONS)
    assert isinstance(Weather.model_validate_json(res.message.content), Weather)


def test_ollama_raises_what_the_server_refuses(local_ollama: Any) -> None:
    ollama = library("ollama")
    with pytest.raises(ollama.ResponseError, match="no embeddings") as none:
        local_ollama.embed("any", "x")
    assert none.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="temperature is 9"):
        local_ollama.chat("any", CHAT["messages"], options={"temperature": 9})
    with pytest.raises(ollama.ResponseError, match="give one of"):
        list(local_ollama.chat("any", [{"role": "x", "content": ""}], stream=True))


#
# llm
#


@pytest.fixture
def local(server: Running, tmp_path: Path) -> Any:
    """Its model that talks to the server, as its users write it down."""
    llm = library("llm")
    lines = {
        "model_id": "local", "model_name": NAME, "api_base": f"{server.url}/v1", "api_key_name": "local",
        "supports_tools": True, "supports_schema": True,
    }  # fmt: skip
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([lines]))
    (tmp_path / "keys.json").write_text(json.dumps({"local": KEY}))
    return llm.get_model("local")


@pytest.mark.parametrize("stream", [True, False])
def test_llm_prompts(local: Any, stream: bool) -> None:
    res = local.prompt(ASKED, stream=stream, max_tokens=8, temperature=0)
    parts = list(res)
    assert "".join(parts) == res.text()
    assert not stream or len(parts) > 1
    assert 0 < res.usage().output <= 8
    talk = local.conversation()
    assert talk.prompt(ASKED, stream=stream, max_tokens=4, temperature=0).text()
    assert talk.prompt("And then?", system="Be brief.", stream=stream, max_tokens=4, temperature=0).text()


def test_llm_has_an_answer_in_the_form_of_a_class(local: Any) -> None:
    for stream in (True, False):
        res = local.prompt(ASKED, schema=Weather, stream=stream, temperature=0, max_tokens=64)
        assert Weather.model_validate_json(res.text())


@pytest.mark.parametrize("stream", [True, False])
def test_llm_runs_a_tool(local: Any, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to call it, once: llm leaves that to the model, and this one is too small to see it."""
    ran: list[tuple[Any, ...]] = []

    def weather(city: Literal["Bergen", "Lima"], days: int) -> str:
        """The weather of the next days."""
        ran.append((city, days))
        return FOUND

    build = type(local).build_kwargs
    bodies: list[dict[str, Any]] = []

    def forced(own: Any, prompt: Any, stream: bool) -> dict[str, Any]:
        choice = "none" if bodies else "required"
        bodies.append({**build(own, prompt, stream), "tool_choice": choice, "parallel_tool_calls": False})
        return bodies[-1]

    monkeypatch.setattr(type(local), "build_kwargs", forced)
    chain = local.chain(ASKED, tools=[weather], stream=stream, options={"temperature": 0, "max_tokens": 64})
    assert chain.text()
    assert len(bodies) == 2
    ((city, days),) = ran
    assert city in {"Bergen", "Lima"}
    assert type(days) is int


#
# litellm
#


@pytest.fixture
def lite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    res = library("litellm")
    monkeypatch.setattr(res, "telemetry", False, raising=False)  # newer ones have none
    return res


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_litellm(server: Running, lite: Any, protocol: str) -> None:
    """By either protocol: whole, in parts, and with a tool whose result is told."""
    base = f"{server.url}/v1" if protocol == "openai" else server.url
    ask: dict[str, Any] = {
        "model": f"{protocol}/{NAME}", "api_base": base, "api_key": KEY, "messages": CHAT["messages"], "temperature": 0,
    }  # fmt: skip
    res = lite.completion(**ask, max_tokens=8)
    assert isinstance(res.choices[0].message.content, str)
    assert res.choices[0].finish_reason in {"stop", "length"}
    check_usage(res.usage, 8)
    parts = list(lite.completion(**ask, max_tokens=8, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in parts) == res.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == res.choices[0].finish_reason
    ask |= {"tools": TOOLS[:1], "max_tokens": 64}
    must = {**ask, "tool_choice": "required", "parallel_tool_calls": False}
    res = lite.completion(**must)
    (call,) = res.choices[0].message.tool_calls
    assert (call.function.name, res.choices[0].finish_reason) == ("weather", "tool_calls")
    check_arguments(call.function.arguments)
    parts = list(lite.completion(**must, stream=True))
    built = lite.stream_chunk_builder(parts).choices[0].message.tool_calls
    assert check_arguments(built[0].function.arguments) == check_arguments(call.function.arguments)
    assert len(built) == 1
    result = {"role": "tool", "tool_call_id": call.id, "content": FOUND}
    told = [*ask["messages"], res.choices[0].message.model_dump(exclude_none=True), result]
    res = lite.completion(**{**ask, "messages": told, "max_tokens": 12}, tool_choice="none")
    assert res.choices[0].message.content
    with pytest.raises(lite.BadRequestError):
        lite.completion(**{**ask, "top_p": 2})
    with pytest.raises(lite.AuthenticationError):
        lite.completion(**{**ask, "api_key": "another"})


#
# openai-agents
#


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_runs_its_tool(server: Running, stream: bool) -> None:
    agents = library("agents")
    ran: list[tuple[Any, ...]] = []

    def weather(city: Literal["Bergen", "Lima"], days: int) -> str:
        """The weather of the next days."""
        ran.append((city, days))
        return FOUND

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            agent = agents.Agent(
                name="Forecaster",
                instructions="Call the tool, then answer.",
                model=agents.OpenAIChatCompletionsModel(model=NAME, openai_client=client),
                model_settings=agents.ModelSettings(
                    temperature=0, max_tokens=64, tool_choice="required", parallel_tool_calls=False
                ),
                tools=[agents.function_tool(weather)],
            )
            config = agents.RunConfig(tracing_disabled=True)
            if not stream:
                return await agents.Runner.run(agent, ASKED, run_config=config, max_turns=4)
            res = agents.Runner.run_streamed(agent, ASKED, run_config=config, max_turns=4)
            assert [event async for event in res.stream_events()]
            return res

    res = asyncio.run(run())
    assert isinstance(res.final_output, str)
    kinds = [item.type for item in res.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert res.new_items[1].output == FOUND
    assert ran
    for city, days in ran:
        assert city in {"Bergen", "Lima"}
        assert type(days) is int
    assert res.context_wrapper.usage.requests == len(ran) + 1


#
# LangChain
#


@pytest.fixture
def chain(server: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Its model for a protocol. It does not close its connections itself."""
    ask: dict[str, Any] = {"model": NAME, "temperature": 0}
    if request.param == "ollama":
        headers = {"headers": {"Authorization": f"Bearer {KEY}"}}
        res = library("langchain_ollama").ChatOllama(base_url=server.url, client_kwargs=headers, num_predict=64, **ask)
        client = res._client
    elif request.param == "anthropic":
        ask |= {"api_key": KEY, "max_tokens": 64, "max_retries": 0}
        res = library("langchain_anthropic").ChatAnthropic(base_url=server.url, **ask)
        client = res._client
    else:
        ask |= {"api_key": KEY, "max_tokens": 64, "max_retries": 0, "use_responses_api": request.param == "responses"}
        client = httpx.Client()
        res = library("langchain_openai").ChatOpenAI(base_url=f"{server.url}/v1", http_client=client, **ask)
    with client:
        yield res


@pytest.mark.parametrize("chain", ["openai", "responses", "anthropic", "ollama"], indirect=True)
def test_langchain(chain: Any, request: pytest.FixtureRequest) -> None:
    """Whole, in parts, in the form of a class, and with a tool whose result is told. Ollama cannot be told to call one."""
    said = chain.invoke(ASKED)
    assert 0 < said.usage_metadata["output_tokens"] <= 64
    assert "".join(part.text for part in chain.stream(ASKED)) == said.text
    assert isinstance(chain.with_structured_output(Weather).invoke(ASKED), Weather)
    if "ollama" in request.node.name:
        return
    must = chain.bind_tools(TOOLS[:1], tool_choice="weather", parallel_tool_calls=False)
    called = must.invoke(ASKED)
    (call,) = called.tool_calls
    assert call["name"] == "weather"
    check_arguments(call["args"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": FOUND}
    assert chain.invoke([{"role": "user", "content": ASKED}, called, result]).text
