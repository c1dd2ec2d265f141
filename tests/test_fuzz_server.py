"""Bodies that went wrong: each gets an answer, or an error of the protocol that it was sent in. bench/fuzz_server.py: many more."""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from support import serving
from support.bodies import COUNT, GOOD, MESSAGE, bodies, body, fault
from support.serving import Running, until

pytestmark = [pytest.mark.native, pytest.mark.slow]

environment = serving.environment

N = 300
TEMPLATE = (Path(__file__).parent / "data" / "tools.jinja").read_text()
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(n_predict=2, template=TEMPLATE) as running:
        yield running


def test_what_they_are_made_of_is_good(server: Running) -> None:
    """So that what is wrong with them is what was done to them."""
    for path, good in GOOD:
        res = server.http.post(path, json={**good, **({} if "token" in path else {"max_tokens": 1})})
        assert res.status_code == 200, (path, good, res.text)
        assert not fault(path, 200, res.text)


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
        ("/tokenize", 400, '{"error": {"message": "no"}}', "OpenAI"),
        ("/tokenize", 400, ERROR.replace('"no"', '"a\\nb"'), "several lines"),
        ("/tokenize", 400, ERROR.replace('"no"', f'"{"a" * 1000}"'), "1000 characters"),
        ("/v1/completions", 200, f"data: {ERROR}\n\ndata: [DONE]\n\n", ""),
        ("/v1/completions", 200, f"data: {ERROR.replace('invalid_request', 'server')}\n\n", "server_error"),
        ("/v1/completions", 200, 'data: {"choices": []}\n\n', "does not end"),
    ],
)
def test_what_an_answer_may_be(path: str, status: int, text: str, words: str) -> None:
    why = fault(path, status, text)
    assert words in why
    assert bool(why) == bool(words)
