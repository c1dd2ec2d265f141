"""Bodies that went wrong: each gets an answer, or an error of the protocol that it was sent in. bench/fuzz_server.py: many more."""

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support import alike, serving
from support.bodies import COUNT, GOOD, MESSAGE, OLLAMA_CHAT, RESPONSES, bodies, body, fault
from support.changes import SERVE
from support.serving import TOOLS_TEMPLATE, Running, until

from pyllama_kvflash.serve.protocols.fields import MAX_DEPTH

pytestmark = [pytest.mark.native, pytest.mark.slow]

environment = serving.environment

N = 300
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(n_predict=2, template=TOOLS_TEMPLATE) as running:
        yield running


def test_what_they_are_made_of_is_good(server: Running) -> None:
    """So that what is wrong with them is what was done to them."""
    for path, good in GOOD:
        res = server.http.post(path, json={**good, **({} if "token" in path else {"max_tokens": 1})})
        assert res.status_code == 200, (path, good, res.text)
        assert not fault(path, 200, res.text)


@pytest.mark.parametrize("seed", range(14, 26))
def test_protocols_make_the_same_prompt(server: Running, seed: int) -> None:
    """Of a conversation that each can say: with tools, a picture in a result, a last message that may be empty."""

    def post(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        res = server.http.post(path, json=body)
        return res.status_code, res.json()

    assert alike.difference(post, alike.conversation(random.Random(seed))) == ""


@pytest.mark.nightly(SERVE)
@pytest.mark.parametrize("seed", [2, 3])
def test_each_is_answered(server: Running, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    statuses: Counter[int] = Counter()
    for i, request in enumerate(bodies(N, seed)):
        res = server.http.post(request.path, content=request.data, headers=JSON)
        why = fault(request.path, res.status_code, res.text)
        assert not why, f"number {i} of seed {seed}: {why}: {request.path} {request.data[:500]!r}"
        statuses[res.status_code] += 1
    assert statuses[200] > N // 20, "some are still good"
    assert statuses[400] > N // 2
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    until(server.idle)


HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {**HELLO, "chat_template_kwargs": {"a": {"b": [1]}}}, ""),
        ("/v1/chat/completions", {**HELLO, "grammar": 'root ::= "a"{2,1}'}, "nothing can come {2,1} times"),
        ("/v1/chat/completions", {**HELLO, "grammar": "root ::= [z-a]"}, "it allows no token"),
        ("/v1/chat/completions", {**HELLO, "grammar": 'root ::= "\udfff"'}, "not Unicode text"),
        ("/v1/chat/completions", {**HELLO, "json_schema": {"type": "a" * 10_000}}, "..."),
        (MESSAGE, {**HELLO, "tools": [{"name": "a", "type": []}]}, "tools[0].type is []"),
        (
            MESSAGE,
            {**HELLO, "output_config": {"format": {"type": "json_schema"}}},
            "output_config.format has no schema",
        ),
        (
            MESSAGE,
            {**HELLO, "output_format": {"type": "json_schema", "schema": {"type": "x"}}},
            "schema cannot be used",
        ),
    ],
)
def test_what_did_harm_once(server: Running, path: str, body: dict[str, Any], words: str) -> None:
    """Ended the server, took all memory, was an error of the server's own, or was ignored."""
    res = server.http.post(path, content=json.dumps(body), headers=JSON)
    assert res.status_code == (400 if words else 200), res.text
    assert not fault(path, res.status_code, res.text)
    assert words in res.text


FORMS = {
    "/v1/completions": '{"prompt": "x", "max_tokens": 1, "json_schema": %s}',
    "/v1/chat/completions": '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "a", "parameters": %s}}]}',
    MESSAGE: '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [{"name": "a", "input_schema": %s}]}',
}  # fmt: skip


@pytest.mark.parametrize("path", FORMS)
def test_nested_about_as_deeply_as_can_be_read(server: Running, path: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is read has to be written again for the library, which calls itself for each level."""
    for n in (MAX_DEPTH - 10, MAX_DEPTH, 999, 5000, 90_000):
        res = server.http.post(path, content=FORMS[path] % ('{"items":' * n + "{}" + "}" * n), headers=JSON)
        assert not fault(path, res.status_code, res.text), n
        assert ("nested too deeply" in res.text) == (n >= MAX_DEPTH), n
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_body_is_made_again() -> None:
    assert [body(5, i) for i in range(50)] == list(bodies(50, 5))
    assert len({request.data for request in bodies(50, 5)}) > 40
    assert body(5, 1) != body(6, 1)


ERROR = '{"error": {"message": "no", "type": "invalid_request_error", "param": null, "code": null}}'


@pytest.mark.parametrize(
    ("path", "status", "text", "words"),
    [
        ("/tokenize", 400, ERROR, ""),
        ("/tokenize", 500, ERROR, "status 500"),
        (MESSAGE, 400, ERROR, "Anthropic"),
        (COUNT, 400, '{"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}', ""),
        ("/tokenize", 400, '{"error": "no"}', "no error object"),
        (OLLAMA_CHAT, 400, '{"error": "no"}', ""),
        (OLLAMA_CHAT, 400, ERROR, "a message"),
        (OLLAMA_CHAT, 200, '{"done": false}\n{"done": true}\n', ""),
        (OLLAMA_CHAT, 200, '{"done": false}\n{"error": "no"}\n', ""),
        (OLLAMA_CHAT, 200, '{"done": false}\n{"done": false}\n', "does not end"),
        ("/tokenize", 400, '{"error": {"message": "no"}}', "OpenAI"),
        ("/tokenize", 400, ERROR.replace('"no"', '"a\\nb"'), "several lines"),
        ("/tokenize", 400, ERROR.replace('"no"', f'"{"a" * 1000}"'), "1000 characters"),
        ("/v1/completions", 200, f"data: {ERROR}\n\ndata: [DONE]\n\n", ""),
        ("/v1/completions", 200, f"data: {ERROR.replace('invalid_request', 'server')}\n\n", "server_error"),
        ("/v1/completions", 200, 'data: {"choices": []}\n\n', "does not end"),
        (RESPONSES, 200, 'data: {"type": "response.completed", "sequence_number": 0}\n\n', ""),
        (RESPONSES, 200, 'data: {"type": "response.completed", "sequence_number": 1}\n\n', "without their numbers"),
        (RESPONSES, 200, 'data: {"type": "response.created", "sequence_number": 0}\n\n', "does not end"),
    ],
)
def test_what_an_answer_may_be(path: str, status: int, text: str, words: str) -> None:
    why = fault(path, status, text)
    assert words in why
    assert bool(why) == bool(words)
