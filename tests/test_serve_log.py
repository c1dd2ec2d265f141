"""The server's log: a line for each request that says who asked for what, and how it was served."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support import serving
from support.serving import Running, begun, stream, until

from pyllama_kvflash.serve.log import shown_body

pytestmark = [pytest.mark.native]

environment = serving.environment

BODY: dict[str, Any] = {"prompt": "On and on and on.", "max_tokens": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running() as res:
        yield res


@pytest.fixture
def running(server: Running) -> Running:
    """Whose log is empty."""
    server.notes.clear()
    return server


def lines(running: Running, n: int) -> list[str]:
    until(lambda: len(running.notes) >= n)  # a line comes after the last byte of its answer
    return running.notes


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer(running: Running, stream: bool) -> None:
    agent = {"User-Agent": "some-agent/1.2 (linux; x)"}
    assert running.post({**BODY, "stream": stream}, headers=agent).status_code == 200
    (line,) = lines(running, 1)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d some-agent/1\.2 POST /v1/completions 200: prompt (\d+) \(\d+ cached, \d+ read\), answer 3,"
        r" first token [\d.]+ s, [\d.]+ tok/s, [\d.]+ s, length",
        line,
    ), line


@pytest.mark.slow
def test_refusals_have_their_reason(running: Running) -> None:
    running.post({**BODY, "max_tokens": 0}, headers={"User-Agent": ""})
    running.post({}, "/v1/nothing", headers={"User-Agent": "a\tb"})
    running.http.get("/health")
    running.http.get("/v1/chat/completions", headers={"User-Agent": "c" * 50})
    found = [line[9:].partition(",")[0] for line in lines(running, 3)]
    assert [line.partition(":")[0] for line in found] == [
        "- POST /v1/completions 400",
        "a\ufffdb POST /v1/nothing 404",
        f"{'c' * 40} GET /v1/chat/completions 405",
    ]
    assert running.notes[0].endswith("max_tokens is 0, and must be 1 or more, or -1 for as many as fit")
    assert running.notes[1].endswith("/v1/nothing is not a path of this server")


@pytest.mark.slow
def test_a_client_that_leaves_a_stream(running: Running) -> None:
    with stream(running) as parts:
        begun(parts)
    assert " POST /v1/completions 499: " in lines(running, 1)[0]


@pytest.mark.slow
def test_no_key_and_bodies() -> None:
    with Running(api_key="a-key", log_bodies=True) as running:
        assert httpx.post(f"{running.url}/v1/completions", json=BODY).status_code == 401
        running.post({**BODY, "api_key": "a-key"})
        refused, body, unknown, answered = lines(running, 4)
    assert "401" in refused
    assert "no valid API key" in refused
    assert body.startswith('POST /v1/completions body: {"temperature": 0, "prompt": "On and on and on."')
    assert "'api_key' is not a known field" in unknown
    assert "200" in answered
    assert "a-key" not in "".join(running.notes)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"a": 1, "API_KEY": "x", "b": [{"password": {"c": 2}}], "max_tokens": 3}',
         '{"a": 1, "API_KEY": "***", "b": [{"password": "***"}], "max_tokens": 3}'),
        (b"no\nJSON\xff", "no\ufffdJSON\ufffd"),
        (b'"' + b"a" * 5000 + b'"', '"' + "a" * 3999 + "... (5,002 characters)"),
    ],
)  # fmt: skip
def test_a_body_without_secrets(body: bytes, shown: str) -> None:
    assert shown_body(body) == shown
