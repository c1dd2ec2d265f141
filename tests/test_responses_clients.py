"""Clients of OpenAI's Responses API that others wrote: what a model must say is kept by grammars, so any model will do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
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
