"""Clients of OpenAI's Responses API that others wrote: what a model must say is kept by grammars, so any model will do."""

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from support import serving
from support.changes import SERVE
from support.serving import NAME, Running

# what others' code warns of is theirs: it differs by version
pytestmark = [pytest.mark.native, pytest.mark.filterwarnings("default"), pytest.mark.nightly(SERVE)]

environment = serving.environment

TEMPLATE = (Path(__file__).parent / "data" / "tools.jinja").read_text("utf-8")


EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


class Weather(BaseModel):
    city: Literal["Lima"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(template=TEMPLATE) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as res:
        yield res


def test_openai_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model=NAME, input="Hi. " * 40, max_output_tokens=8, temperature=0)
    assert first.output_text
    assert first.usage is not None
    then = client.responses.create(model=NAME, input="And?", previous_response_id=first.id, max_output_tokens=8)
    assert then.usage is not None
    assert then.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not kept here"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=NAME, input="And?", previous_response_id=first.id)


def test_events_have_what_the_schema_requires(server: Running) -> None:
    """Strictly: the library itself takes events without fields that it requires."""
    tool: Any = openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}
    for more in ({}, {"tools": [tool], "tool_choice": "required"}):
        body = {"input": "Hi", "stream": True, "max_output_tokens": 200, "temperature": 0, **more}
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


def test_openai_structured(client: openai.OpenAI) -> None:
    res = client.responses.parse(model=NAME, input="Hi", text_format=Weather)
    assert res.output_parsed == Weather(city="Lima")
    with client.responses.stream(model=NAME, input="Hi", text_format=Weather) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        found = stream.get_final_response()
    assert found.output_parsed == Weather(city="Lima")
    assert said == found.output_text


def test_openai_tools(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}
    asked: Any = {"model": NAME, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    given: list[Any] = [{"role": "user", "content": "Which city?"}]
    with client.responses.stream(input=given, **asked) as stream:
        for _ in stream:
            pass
        found = stream.get_final_response()
    call = found.output[0]
    assert call.type == "function_call"
    assert call.parsed_arguments == {"city": "Lima"}
    given += [*found.output, {"type": "function_call_output", "call_id": call.call_id, "output": "clear"}]
    after = client.responses.create(input=given, **{**asked, "tool_choice": "none"}, max_output_tokens=4)
    assert after.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents(server: Running, monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    pytest.importorskip("agents")
    agents = importlib.import_module("agents")

    def weather(city: Literal["Lima"]) -> str:
        """It."""
        return f"clear in {city}"

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            agent = agents.Agent(
                name="Forecaster",
                instructions="Call the tool, then answer.",
                model=agents.OpenAIResponsesModel(NAME, client),
                model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
                tools=[agents.function_tool(weather)],
                output_type=Weather,
            )
            if not stream:
                return await agents.Runner.run(agent, "Which city?")
            res = agents.Runner.run_streamed(agent, "Which city?")
            assert [event async for event in res.stream_events()]
            return res

    res = asyncio.run(run())
    assert [item.type for item in res.new_items[:2]] == ["tool_call_item", "tool_call_output_item"]
    assert res.new_items[1].output == "clear in Lima"
    assert res.final_output == Weather(city="Lima")
