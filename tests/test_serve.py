"""The server: what clients of the OpenAI protocol get, and that nothing they do stops it."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("openai")

import httpx
import openai
from support import serving
from support.rounding import Chosen
from support.serving import NAME, SMALL, Running, alone, long_text, sse, until

from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = pytest.mark.native

chosen = serving.chosen
document = serving.document
environment = serving.environment
server = serving.server


#
# answers
#


def test_a_completion_is_what_generate_says(server: Running, chosen: Chosen) -> None:
    text = long_text(300)
    (want,) = alone([text], 16)
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        tokens = model.tokenize(text).tolist()
    res = server.post({"prompt": text}).json()
    assert res["object"] == "text_completion"
    assert res["choices"] == [{"index": 0, "text": want, "logprobs": None, "finish_reason": "length"}]
    assert chosen.n_held == 16
    assert res["usage"]["completion_tokens"] == 16, "as the protocol has it, where nothing is asked for"
    assert server.text(prompt=tokens) == want
    assert server.text(prompt=[text]) == want
    assert server.text(prompt=text, max_tokens=3) == server.text(prompt=text, max_tokens=3, stop="\n\n\n")
    cut = want[3:6]
    assert server.text(prompt=text, stop=[cut, "never"]) == want[: want.index(cut)]


def test_a_stream_is_the_whole_in_parts(server: Running, chosen: Chosen) -> None:
    body = {"prompt": "A stream. " + long_text(600), "max_tokens": 20}
    whole = server.post(body).json()
    server.post({"prompt": "another", "max_tokens": 1})
    body["prompt"] = "New: " + body["prompt"]
    whole = server.post(body).json()
    res = server.post(
        {**body, "prompt": "New: " + body["prompt"], "stream": True, "stream_options": {"include_usage": True}}
    )
    assert res.headers["content-type"].startswith("text/event-stream")
    events, comments = sse(res.text)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 20
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert len({e["id"] for e in events[:-1]}) == 1
    assert all("usage" not in e for e in events[:-2])
    total = events[-2]["usage"]["prompt_tokens"]
    assert comments[-1] == f"prefill {total}/{total}"
    assert len(comments) >= 4, "batches of 128"
    n_held = chosen.n_held
    events, _ = sse(server.post({**body, "stream": True}).text)
    assert chosen.n_held == n_held + 20
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == whole["choices"][0]["text"]


def test_limit_of_the_server() -> None:
    with Running(n_predict=5) as running:
        res = [running.post({"prompt": "x", "max_tokens": n}).json()["usage"]["completion_tokens"] for n in (3, 50)]
        assert res == [3, 5]
        body = {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "A win"}, {"type": "text", "text": "ter"}]}
            ]
        }
        res = running.post(body, "/v1/chat/completions").json()
        assert res["usage"]["completion_tokens"] == 5
        assert res["choices"][0]["message"]["role"] == "assistant"


def test_the_context_ends_an_answer() -> None:
    with Running(n_ctx=512, pool="off") as running:
        res = running.post({"prompt": [100] * 510, "max_tokens": 50}).json()
        assert res["choices"][0]["finish_reason"] in {"length", "stop"}
        assert res["usage"]["completion_tokens"] <= 3
        res = running.post({"prompt": [100] * 513, "max_tokens": 50})
        assert res.status_code == 400
        assert res.json()["error"]["code"] == "context_length_exceeded"
        assert "513 tokens, and the context 512" in res.json()["error"]["message"]


#
# errors
#

SAYS = {"messages": [{"role": "user", "content": "x"}]}


TO = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": TO}}},
        {"response_format": {"type": "json_object", "schema": TO}},
        {"json_schema": TO},
        {"response_format": {"type": "text"}, "grammar": 'root ::= "{\\"n\\":" [0-9] "}"'},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_the_form_that_is_asked_for(server: Running, form: dict[str, Any], stream: bool) -> None:
    body = {**SAYS, "temperature": 1, "seed": 3, "max_tokens": 100, **form, "stream": stream}
    res = server.post(body, "/v1/chat/completions")
    assert res.status_code == 200, res.text
    if stream:
        parts = [event["choices"][0]["delta"] for event in sse(res.text)[0][:-1]]
        said = "".join(part.get("content") or "" for part in parts)
    else:
        said = res.json()["choices"][0]["message"]["content"]
    value = json.loads(said)
    assert list(value) == ["n"]
    assert type(value["n"]) is int


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"a":' * 5000, b"[" * 60000, b'{"prompt": 1' + b"0" * 5000 + b"}"],
)
def test_bodies_that_are_no_object(server: Running, data: bytes) -> None:
    res = server.http.post("/v1/completions", content=data, headers={"Content-Type": "application/json; charset=utf-8"})
    assert res.status_code == 400
    assert res.json()["error"]["message"].startswith("the body is ")


def test_tokens_there_and_back(server: Running) -> None:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        for text in ("The secret code of red sand is 123.", "ü ↑ 日本", ""):
            want = model.tokenize(text, add_special=False, parse_special=True).tolist() if text else []
            found = server.post({"content": text}, "/tokenize").json()["tokens"]
            assert found == want
            assert server.post({"tokens": found}, "/detokenize").json()["content"].strip() == text
        begun = server.post({"content": "a", "add_special": True}, "/tokenize").json()["tokens"]
        assert begun == model.tokenize("a").tolist()
        for part in server.post({"content": "ü a", "with_pieces": True}, "/tokenize").json()["tokens"]:
            piece = part["piece"]
            data = bytes(piece) if isinstance(piece, list) else piece.encode()
            assert data == model.piece(part["id"], special=True)


def test_what_the_server_is(server: Running) -> None:
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == SMALL["n_ctx"]
    assert props["total_slots"] == len(props["default_generation_settings"]) == 2
    assert props["model_alias"] == NAME
    assert props["kvflash"]["pool"] == SMALL["pool"]
    assert server.text(prompt=long_text(40), max_tokens=3)
    until(server.idle)
    slots = server.http.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert not any(slot["is_processing"] for slot in slots)
    assert max(slot["n_tokens"] for slot in slots) > 30
    assert server.http.post("/props").status_code == 405


def test_other_statuses(server: Running) -> None:
    http = server.http
    res = http.get("/v1/nothing")
    assert (res.status_code, res.json()["error"]["message"]) == (404, "/v1/nothing is not a path of this server")
    res = http.get("/v1/completions")
    assert (res.status_code, res.headers["allow"]) == (405, "POST")
    assert "does not take GET" in res.json()["error"]["message"]
    assert http.post("/health").status_code == 405
    for mark in ("Origin", "Referer", "Sec-Fetch-Site"):
        headers = {"Content-Type": "text/plain", mark: "null"}
        res = http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert (res.status_code, res.json()["error"]["type"]) == (415, "invalid_request_error")
    as_curl = {"Content-Type": "application/x-www-form-urlencoded"}
    assert http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=as_curl).status_code == 200
    res = http.post("/v1/completions", json={"prompt": "x" * (65 << 10)})
    assert (res.status_code, "larger than 65,536 bytes" in res.text) == (413, True)

    def chunks() -> Iterator[bytes]:
        for _ in range(70):
            yield b"x" * 1024

    res = http.post("/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})
    assert res.status_code == 413, "a body of unknown length, too"
    assert server.idle()


def test_a_body_that_does_not_come(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllama_kvflash.serve.http._BODY_SECONDS", 0.1)
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(head.encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection((host, int(port)), timeout=30) as gone:
        gone.sendall(head.encode() + b"{")
    assert server.idle()


def test_an_engine_error_as_clients_see_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise NativeError("the device has no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(type(server.scheduler.kv.ctx), "decode", broken)
        res = server.post({"prompt": "x"})
        assert res.status_code == 500
        assert res.json()["error"] == {
            "message": "the device has no memory left", "type": "server_error", "param": None, "code": None,
        }  # fmt: skip
        events, _ = sse(server.post({"prompt": "x", "stream": True}).text)
        assert events[1:] == [{"error": res.json()["error"]}, "[DONE]"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            parts = client.completions.create(model=NAME, prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="no memory left"):
                list(parts)
    assert server.text(prompt="x")
    assert server.idle()


def test_key() -> None:
    with Running(api_key="secret") as running, httpx.Client(base_url=running.url) as http:
        assert http.get("/health").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer secret2"},
        ):
            for path in ("/v1/models", "/metrics", "/nothing"):
                res = http.get(path, headers=headers)
                assert res.status_code == 401
                assert res.json()["error"]["type"] == "authentication_error"
                assert "WWW-Authenticate" in res.headers
            assert http.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 401
        assert running.text(prompt="x")


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        ("localhost:8080", True), ("LOCALHOST.", True), ("app.localhost", True), ("127.0.0.1", True), ("[::1]:80", True),
        ("192.168.1.2:8080", True), ("", True), ("evil.example:8080", False), ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False), ("evil.example:", False),
    ],
)  # fmt: skip
def test_a_foreign_page_cannot_have_its_name_point_here(server: Running, host: str, taken: bool) -> None:
    res = server.http.get("/v1/models", headers={"Host": host})
    assert res.status_code == (200 if taken else 403)
    if not taken:
        assert res.json()["error"]["code"] == "unknown_host"
        assert "start the server with --api-key" in res.json()["error"]["message"]
    assert server.http.get("/health", headers={"Host": host}).status_code == 200
