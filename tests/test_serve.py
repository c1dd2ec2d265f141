"""The server: what clients of the OpenAI protocol get, and that nothing they do stops it."""

import contextlib
import itertools
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import httpx
import openai
import uvicorn
from click.testing import CliRunner
from rounding import Chosen, relative_rms

from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.cli import main
from pyllama_kvflash.engine import engine
from pyllama_kvflash.errors import ModelError, NativeError, PoolError, SnapshotError, UnsupportedError
from pyllama_kvflash.events import Token
from pyllama_kvflash.native import Context, Model, Sampler
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt
from pyllama_kvflash.serve.app import Server, Settings
from pyllama_kvflash.serve.job import Failed, Finished, Job, Reading, Text, Update
from pyllama_kvflash.serve.scheduler import NotReady, Phase, QueueFull, Scheduler
from pyllama_kvflash.serve.server import bound
from pyllama_kvflash.serve.slot import Slot

pytestmark = pytest.mark.native

NAME = BUNDLED_MODEL.stem
SMALL: dict[str, Any] = {"n_ctx": 4096, "pool": 2048, "n_batch": 128, "n_threads": 1, "n_parallel": 2}
GREEDY = Sampling(temperature=0)
N_CODE = 5  # tokens of a code and of the end of its line: what follows is less certain
# As the model was trained: a question, its answer, a line's end.
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'assistant' }}{% endfor %}"
SCRIPT = Path(sys.executable).with_name("kvflash")
SOAK_SECONDS = float(os.environ.get("KVFLASH_SOAK_SECONDS", "6"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's settings."""
    for name in list(os.environ):
        if name.startswith(("KVFLASH_", "LLAMA_ARG_", "OPENAI_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def open_needle(**options: Any) -> Callable[[Callable[[float], None]], KVFlash]:
    return lambda progress: KVFlash.from_file(BUNDLED_MODEL, progress=progress, **{**SMALL, **options})


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


class Running:
    """A server in a thread of this process, on a port of its own."""

    def __init__(
        self, scheduler: Scheduler | None = None, *, ready: bool = True, n_queue: int = 8, key: str | None = None,
        n_predict: int = -1, max_body: int = 1 << 20, template: str | None = TEMPLATE, **options: Any,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler or Scheduler(open_needle(**options), n_queue=n_queue)
        self.notes: list[str] = []
        settings = Settings(NAME, Sampling(), n_predict, max_body, key, template)
        app = Server(self.scheduler, settings, self.notes.append).app()
        self._socket = bound("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self.scheduler.start()
        self._thread.start()
        until(lambda: self._server.started)
        if ready:
            until(lambda: self.scheduler.phase != Phase.LOADING)
        self.http = httpx.Client(
            base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.scheduler.end()
        assert self.scheduler.join(30)
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def post(self, body: Any, path: str = "/v1/completions", **kwargs: Any) -> Any:
        return self.http.post(path, json={"temperature": 0, **body}, **kwargs)

    def text(self, **body: Any) -> str:
        res = self.post(body)
        assert res.status_code == 200, res.text
        return str(res.json()["choices"][0]["text"])

    def health(self) -> dict[str, Any]:
        return dict(self.http.get("/health").json())

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.http.get("/metrics").text)

    def idle(self) -> bool:
        return self.health() == {"status": "ok", "sequences": 2, "busy": 0, "idle": 2, "queue": 0}


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text: every line is a comment or a sample, every metric has its type before it."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if match := re.fullmatch(r"# (HELP|TYPE) (kvflash_\w+) (.+)", line):
            if match[1] == "TYPE":
                kinds[match[2]] = match[3]
            continue
        match = re.fullmatch(r"(kvflash_\w+)(\{\w+=\"\w+\"\})? ([0-9.e+-]+)", line)
        assert match, line
        assert kinds[match[1]] == ("counter" if match[1].endswith("_total") else "gauge")
        found[match[1].removeprefix("kvflash_") + (match[2] or "")] = float(match[3])
    return found


def sse(text: str) -> tuple[list[Any], list[str]]:
    """Events (JSON, but for the last one) and comments of a stream."""
    events, comments = [], []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(": "):
            comments.append(block[2:])
        else:
            assert block.startswith("data: "), block
            events.append(block[6:])
    return [json.loads(e) if e != "[DONE]" else e for e in events], comments


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One for all that leave it as it was."""
    with Running(max_body=64 << 10) as running:
        yield running


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(2400, lambda s: len(model.tokenize(s, add_special=False)), n_needles=4, seed=3)


def long_text(n: int) -> str:
    """About n tokens."""
    return "The old mill by the river. " * (n // 7)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Whoever has a text that another one had goes on as that one, from logits that differ by rounding.

    That comes to 0.025 of the logits at most; one token more or less at the end of a prompt, to several times as much.
    """
    res, take = Chosen(0.05, relative_rms), Slot.take

    def held(slot: Slot) -> None:
        res.hold(slot.seq.ctx, -1, tuple(slot.seq.tokens.tolist()))
        take(slot)

    monkeypatch.setattr(Slot, "take", held)
    return res


def alone(prompts: list[Any], max_tokens: int, chosen: Chosen | None = None, **options: Any) -> list[str]:
    """What each is answered by itself."""
    res = []
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, **options}) as kv, pytest.MonkeyPatch.context() as patch:

        class Held(Sampler):
            def sample(self, ctx: Context, i: int = -1) -> int:
                if chosen is not None:
                    chosen.hold(ctx, i, tuple(kv.tokens.tolist()))
                return super().sample(ctx, i)

        patch.setattr(engine, "Sampler", Held)
        for prompt in prompts:
            events = list(kv.generate(prompt, max_tokens=max_tokens, sampling=GREEDY))
            res.append("".join(e.text for e in events if isinstance(e, Token)) + events[-1].text)
    return res


#
# answers
#


def test_three_turns(document: NeedlePrompt) -> None:
    """With OpenAI's own client: each question is answered, only what is new is read, and a fresh server says the same."""
    needles = [document.needles[i] for i in (1, 3, 0)]
    messages: list[Any] = []
    with contextlib.ExitStack() as stack:
        warm = stack.enter_context(Running())
        client = stack.enter_context(openai.OpenAI(base_url=f"{warm.url}/v1", api_key="-", max_retries=0))
        for turn, needle in enumerate(needles):
            messages.append({"role": "user", "content": (document.text if turn == 0 else "") + needle.question})
            ask = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 12, "stop": ["\n"]}
            res = client.chat.completions.create(**ask)
            choice = res.choices[0]
            assert choice.message.content == f" {needle.answer}."
            assert choice.finish_reason == "stop"
            cached = res.usage.prompt_tokens_details.cached_tokens
            assert cached == 0 if turn == 0 else cached > 2400
            assert res.usage.total_tokens == res.usage.prompt_tokens + res.usage.completion_tokens
            with Running() as cold, openai.OpenAI(base_url=f"{cold.url}/v1", api_key="-", max_retries=0) as other:
                again = other.chat.completions.create(**ask)
                assert again.choices[0].message.content == choice.message.content
                assert again.usage.prompt_tokens == res.usage.prompt_tokens
                assert again.usage.prompt_tokens_details.cached_tokens == 0
            chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage.completion_tokens == res.usage.completion_tokens
            messages.append({"role": "assistant", "content": choice.message.content})


def test_a_completion_is_what_generate_says(server: Running, chosen: Chosen) -> None:
    text = long_text(300)
    (want,) = alone([text], 16, chosen)
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


@pytest.mark.usefixtures("chosen")
def test_seeds_and_samplers(server: Running) -> None:
    start = "Nobody remembers a"
    ask = {"prompt": start, "temperature": 1.5, "max_tokens": 12}
    same = [server.text(**ask, seed=-(2**40)) for _ in range(2)]
    assert same[0] == same[1]
    assert len({server.text(**ask) for _ in range(4)}) > 1
    assert server.text(**ask, top_k=1) == server.text(prompt=start, max_tokens=12)
    assert server.text(**ask, top_p=0, min_p=0, repeat_penalty=1.0) == server.text(prompt=start, max_tokens=12)


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


def test_the_context_ends_an_answer(server: Running) -> None:
    n = SMALL["n_ctx"] - 2
    res = server.post({"prompt": [100] * n, "max_tokens": 50}).json()
    assert res["choices"][0]["finish_reason"] in {"length", "stop"}
    assert res["usage"]["completion_tokens"] <= 3
    res = server.post({"prompt": [100] * (n + 3), "max_tokens": 50})
    assert res.status_code == 400
    assert res.json()["error"]["code"] == "context_length_exceeded"
    assert "4097 tokens, and the context 4096" in res.json()["error"]["message"]


def test_a_model_without_a_template_has_a_plain_one() -> None:
    with Running(template=None) as running:
        res = running.post(
            {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}, "/v1/chat/completions"
        )
        assert res.status_code == 200
    with Running(template="{{ raise_exception('roles must alternate') }}") as running:
        res = running.post({"messages": [{"role": "user", "content": "hello"}]}, "/v1/chat/completions")
        assert res.status_code == 400
        assert "roles must alternate" in res.json()["error"]["message"]
        assert running.idle()


#
# errors
#

SAYS = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "at least one message"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "x"}, "messages", "array"),
        ({"messages": [1]}, "messages[0]", "an integer: give an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "give one of system"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is null"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only text"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0]", "tool_calls"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
        ({**SAYS, "temperature": 2.5}, "temperature", "2.5, and must be from 0 to 2"),
        ({**SAYS, "temperature": "1"}, "temperature", "a string: give a number"),
        ({**SAYS, "temperature": True}, "temperature", "true or false: give a number"),
        ({**SAYS, "temperature": 10**400}, "temperature", "give a number"),
        ({**SAYS, "temperature": float("nan")}, "temperature", "must be from 0 to 2"),
        ({**SAYS, "top_p": -1}, "top_p", "must be from 0 to 1"),
        ({**SAYS, "top_k": 1.5}, "top_k", "a number: give an integer"),
        ({**SAYS, "top_k": 10**400}, "top_k", "must be from 0"),
        ({**SAYS, "min_p": float("inf")}, "min_p", "must be from 0 to 1"),
        ({**SAYS, "seed": "a"}, "seed", "give an integer"),
        ({**SAYS, "max_tokens": 0}, "max_tokens", "must be 1 or more"),
        ({**SAYS, "max_completion_tokens": -4}, "max_completion_tokens", "must be 1 or more"),
        ({**SAYS, "stop": 5}, "stop", "neither a string"),
        ({**SAYS, "stop": ["a"] * 5}, "stop", "up to 4"),
        ({**SAYS, "stop": "a" * 1000}, "stop", "longer than 500"),
        ({**SAYS, "n": 2}, "n", "n is not supported"),
        ({**SAYS, "n": True}, "n", "n is not supported"),
        ({**SAYS, "tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        ({**SAYS, "logprobs": True}, "logprobs", "logprobs is not supported"),
        ({**SAYS, "response_format": {"type": "json_object"}}, "response_format", 'give {"type": "text"}'),
        ({**SAYS, "frequency_penalty": 0.5}, "frequency_penalty", "or give 0"),
        ({**SAYS, "presence_penalty": -1}, "presence_penalty", "or give 0"),
        ({**SAYS, "max_token": 5}, "max_token", "there is no field 'max_token'"),
        ({**SAYS, "\udc80": 5}, "\udc80", "there is no field"),
        ({**SAYS, "stream": "yes"}, "stream", "give true or false"),
        ({**SAYS, "stream_options": {}}, "stream_options", "stream: true"),
        ({**SAYS, "stream": True, "stream_options": 1}, "stream_options", "an integer"),
    ],
)  # fmt: skip
def test_bad_chats(server: Running, body: dict[str, Any], param: str, words: str) -> None:
    data = json.dumps(body)
    res = server.http.post("/v1/chat/completions", content=data, headers={"Content-Type": "application/json"})
    assert res.status_code == 400, res.text
    error = res.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt must be"),
        ({"prompt": ""}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": ["a", "b"]}, "one prompt a request"),
        ({"prompt": [1, 2.5]}, "prompt must be"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": [-1]}, "token -1 is not in the vocabulary"),
        ({"prompt": [4096000]}, "ids are 0 to 4095"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": "x", "echo": True}, "echo is not supported"),
        ({"prompt": "x", "best_of": 3}, "best_of is not supported"),
        ({"prompt": "x", "suffix": "y"}, "suffix is not supported"),
        ({"prompt": "x", "logprobs": 5}, "logprobs is not supported"),
        ({"prompt": "x", "messages": []}, "there is no field 'messages'"),
    ],
)
def test_bad_completions(server: Running, body: dict[str, Any], words: str) -> None:
    data = json.dumps(body)
    res = server.http.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
    assert res.status_code == 400
    assert words in res.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    body = {
        "prompt": "x", "n": 1, "best_of": 1, "echo": False, "logprobs": None, "logit_bias": {}, "presence_penalty": 0.0,
        "frequency_penalty": 0, "suffix": None, "user": "me", "stream": False, "stream_options": None, "stop": None,
    }  # fmt: skip
    assert server.post({**body, "model": NAME}).status_code == 200


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"a":' * 5000, b"[" * 60000, b'{"prompt": 1' + b"0" * 5000 + b"}"],
)
def test_bodies_that_are_no_object(server: Running, data: bytes) -> None:
    res = server.http.post("/v1/completions", content=data, headers={"Content-Type": "application/json; charset=utf-8"})
    assert res.status_code == 400
    assert res.json()["error"]["message"].startswith("the body is ")


def test_other_statuses(server: Running) -> None:
    http = server.http
    res = http.post("/v1/completions", json={"prompt": "x", "model": "gpt-4"})
    assert (res.status_code, res.json()["error"]["code"]) == (404, "model_not_found")
    res = http.get("/v1/nothing")
    assert (res.status_code, res.json()["error"]["message"]) == (404, "there is no /v1/nothing here")
    res = http.get("/v1/completions")
    assert (res.status_code, res.headers["allow"]) == (405, "POST")
    assert "does not take GET" in res.json()["error"]["message"]
    assert http.post("/health").status_code == 405
    res = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert (res.status_code, res.json()["error"]["type"]) == (415, "invalid_request_error")
    res = http.post("/v1/completions", json={"prompt": "x" * (65 << 10)})
    assert (res.status_code, "larger than 65536 bytes" in res.text) == (413, True)

    def chunks() -> Iterator[bytes]:
        for _ in range(70):
            yield b"x" * 1024

    res = http.post("/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})
    assert res.status_code == 413, "a body of unknown length, too"
    assert server.idle()


def test_a_body_that_does_not_come(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllama_kvflash.serve.app._BODY_SECONDS", 0.1)
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(head.encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection((host, int(port)), timeout=30) as gone:
        gone.sendall(head.encode() + b"{")
    with socket.create_connection((host, int(port)), timeout=30) as odd:
        odd.sendall(b"\x16\x03\x01 nothing of HTTP\r\n\r\n")
        assert odd.recv(4096).startswith(b"HTTP/1.1 400 ")
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


def test_a_client_that_leaves_while_its_prompt_is_read(server: Running) -> None:
    read = server.metrics()["prefill_tokens_total"]
    with pytest.raises(httpx.ReadTimeout):
        server.post({"prompt": "Read, read. " + long_text(3800)}, timeout=0.2)
    until(server.idle)
    assert server.metrics()["prefill_tokens_total"] - read < 3000


def test_models(server: Running) -> None:
    found = server.http.get("/v1/models").json()
    assert [m["id"] for m in found["data"]] == [NAME]
    assert found["data"][0]["context_length"] == 4096


def test_key() -> None:
    with Running(key="secret") as running, httpx.Client(base_url=running.url) as http:
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


#
# a queue
#


@contextlib.contextmanager
def stream(running: Running, n_tokens: int = 3000) -> Iterator[Iterator[str]]:
    """A request that goes on for a while: what comes of it. The client leaves at the end."""
    body = {"prompt": "On and on.", "max_tokens": n_tokens, "stream": True, "temperature": 0}
    with running.http.stream("POST", "/v1/completions", json=body) as res:
        assert res.status_code == 200
        yield res.iter_text()


def begun(parts: Iterator[str]) -> str:
    """What a stream says until there is an answer in it: its first event comes before anybody looked at the request."""
    text = ""
    while text.count("data: ") < 2:
        text += next(parts)
    return text


def test_a_full_queue_and_clients_that_leave() -> None:
    """Streaming or not, running or waiting: its place is free at the next turn."""
    with Running(n_parallel=1, n_queue=1) as running:
        with stream(running) as parts:
            begun(parts)
            with pytest.raises(httpx.ReadTimeout):
                running.post({"prompt": "waits"}, timeout=0.1)
            until(lambda: running.health()["queue"] == 0)
            with stream(running) as waits:
                assert next(waits).startswith("data: ")
                until(lambda: running.health()["queue"] == 1)
                full = running.post({"prompt": "x"})
                assert full.status_code == 429
                assert 1 <= int(full.headers["retry-after"]) <= 60
                assert full.json()["error"] == {
                    "message": f"as many requests wait as may: try again in {full.headers['retry-after']} s",
                    "type": "rate_limit_error", "param": None, "code": "queue_full",
                }  # fmt: skip
            until(lambda: running.health()["queue"] == 0)
            assert running.health()["busy"] == 1
        until(lambda: running.health()["idle"] == 1)
        with pytest.raises(httpx.ReadTimeout):
            running.post({"prompt": "On", "max_tokens": 3500}, timeout=0.2)
        until(lambda: running.health()["idle"] == 1)
        assert running.text(prompt="x")
        found = running.metrics()
        assert found['requests_total{outcome="cancelled"}'] == 4
        assert found['requests_total{outcome="rejected"}'] == 1
        assert found['requests_total{outcome="ok"}'] == 1


def test_one_that_waits_is_answered() -> None:
    with Running(n_parallel=1) as running:
        first = Asked(running.scheduler, tokens_of(10), 200)
        assert running.text(prompt="x")
        assert isinstance(first.updates[-1], Finished), "one after the other"


def test_metrics(server: Running) -> None:
    before = server.metrics()
    text = f"Metrics. {long_text(2600)}"
    server.text(prompt=text, max_tokens=10)
    server.text(prompt=text, max_tokens=10)
    until(server.idle)
    until(lambda: server.metrics()["decode_tokens_total"] - before["decode_tokens_total"] >= 18)
    until(lambda: server.metrics()["sequences_busy"] == 0)
    after = server.metrics()
    gained = {name: after[name] - before[name] for name in after}
    assert gained['requests_total{outcome="ok"}'] == 2
    assert gained["prefill_tokens_total"] > 2500
    assert 18 <= gained["decode_tokens_total"] <= 20
    assert gained['prefix_cache_hits_total{source="memory"}'] >= 1
    assert gained['prefix_cache_tokens_total{source="memory"}'] > 2500
    assert gained["pages_out_total"] > 5
    assert after["pool_cells"] == 2048
    assert after["context"] == 4096
    assert after["chunks"] >= after["chunks_resident"] > 0
    for name in ("prefill_seconds_total", "decode_seconds_total", "host_bytes", "kv_device_bytes"):
        assert after[name] > 0


def test_while_it_loads() -> None:
    gate = threading.Event()

    def open_(progress: Callable[[float], None]) -> KVFlash:
        gate.wait()
        return open_needle()(progress)

    with Running(Scheduler(open_, n_queue=1), ready=False) as running:
        try:
            res = running.http.get("/health")
            assert (res.status_code, res.json()) == (503, {"status": "loading"})
            res = running.post({"prompt": "x"})
            assert (res.status_code, res.json()["error"]["message"]) == (
                503, "the model is loading: try again in a few seconds",
            )  # fmt: skip
            assert res.headers["retry-after"]
            assert running.http.get("/v1/models").status_code == 200
            assert running.metrics()["pool_cells"] == 0
        finally:
            gate.set()
        until(lambda: running.http.get("/health").status_code == 200)
        assert running.text(prompt="x")


def test_a_model_that_does_not_load() -> None:
    def open_(progress: Callable[[float], None]) -> KVFlash:
        raise ModelError("it is broken")

    with Running(Scheduler(open_, n_queue=1)) as running:
        assert running.http.get("/health").json() == {"status": "failed"}
        assert running.post({"prompt": "x"}).status_code == 503
        assert str(running.scheduler.error) == "it is broken"


#
# the scheduler
#


class Asked:
    """A job, and what was said to it. on: called with each update, in the scheduler's thread."""

    def __init__(
        self, scheduler: Scheduler, tokens: Any, max_tokens: int = 12, on: Callable[[Update], None] = lambda _: None
    ) -> None:
        self.updates: list[Update] = []
        self._end = threading.Event()
        self._on = on
        self.job = Job(np.asarray(tokens, np.int32), GREEDY, max_tokens, (), self._notify)
        scheduler.admit()
        scheduler.submit(self.job)

    def _notify(self, update: Update) -> None:
        self._on(update)
        self.updates.append(update)
        if isinstance(update, Finished | Failed):
            self._end.set()

    @property
    def end(self) -> Update:
        assert self._end.wait(60), "it never ended"
        return self.updates[-1]

    @property
    def done(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end

    @property
    def failed(self) -> Failed:
        assert isinstance(self.end, Failed), self.end
        return self.end

    @property
    def text(self) -> str:
        assert self.done
        return "".join(u.text for u in self.updates if isinstance(u, Text))


@contextlib.contextmanager
def scheduling(**options: Any) -> Iterator[Scheduler]:
    names = ("n_queue", "cache", "cache_min")
    own = {name: options.pop(name) for name in names if name in options}
    open_ = options.pop("open_", None) or open_needle(**options)
    scheduler = Scheduler(open_, **{"n_queue": 100, **own})
    scheduler.start()
    until(lambda: scheduler.phase != Phase.LOADING)
    try:
        yield scheduler
    finally:
        scheduler.end()
        assert scheduler.join(30)


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return [4088, *np.random.default_rng(seed).integers(0, 4000, n - 1).tolist()]


def test_many_at_once_say_what_each_says_alone(chosen: Chosen) -> None:
    """More than there are sequences, of all lengths; with a full cache, so that rounding is all that differs."""
    prompts = [tokens_of(n, n) for n in (5, 700, 130, 64, 300, 1)]
    want = alone(prompts, 10, chosen, pool="off")
    with scheduling(pool="off", n_parallel=3) as scheduler:
        asked = [Asked(scheduler, prompt, 10) for prompt in prompts]
        assert [a.text for a in asked] == want
        assert [a.done.n_prompt for a in asked] == [5, 700, 130, 64, 300, 1]
    assert chosen.n_held == 6 * 10


def test_a_long_prompt_does_not_stop_an_answer() -> None:
    """One token of the answer for each batch of the prompt, and a short prompt that comes later is answered before."""
    order: list[str] = []
    with scheduling(n_parallel=3) as scheduler:
        first = Asked(scheduler, tokens_of(20), 60, lambda u: order.append("answer") if isinstance(u, Text) else None)
        until(lambda: "answer" in order)
        long = Asked(
            scheduler, tokens_of(3000, 1), 2, lambda u: order.append("read") if isinstance(u, Reading) else None
        )
        until(lambda: "read" in order)
        short = Asked(
            scheduler, tokens_of(40, 2), 1, lambda u: order.append("short") if isinstance(u, Finished) else None
        )
        assert first.done.n_answer == 60
        assert long.done.n_answer == short.done.n_answer + 1 == 2
    reads = [i for i, what in enumerate(order) if what == "read"]
    assert len(reads) == 24, "batches of 128"
    assert order.index("short") < reads[-2]
    between = [order[a:b].count("answer") for a, b in itertools.pairwise(reads)]
    assert sum(between) >= 20
    assert max(between) <= 3


def test_which_sequence_is_taken(chosen: Chosen) -> None:
    with scheduling(n_parallel=3) as scheduler:
        a, b = tokens_of(300, 1), tokens_of(300, 2)
        assert Asked(scheduler, a).done.n_cached == 0
        assert Asked(scheduler, b).done.n_cached == 0
        assert [s.n_tokens > 0 for s in scheduler.kv.sequences] == [True, True, False], (
            "BOS alone is no reason to take one"
        )
        assert Asked(scheduler, a).done.n_cached == 299, "one token is left, for its logits"
        assert Asked(scheduler, [*b[:200], *tokens_of(50, 3)]).done.n_cached == 200
        assert Asked(scheduler, tokens_of(100, 4)).done.n_cached == 0
        assert Asked(scheduler, a[:100]).done.n_cached == 99
        (want,) = alone([tokens_of(200, 5)], 12, chosen)
        n_held = chosen.n_held
        assert Asked(scheduler, tokens_of(200, 5)).text == want
        assert chosen.n_held == n_held + 12


def test_a_state_that_cannot_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent model reads all of a prompt again, unless it goes on from where it was."""

    def cannot(*_: Any) -> None:
        raise UnsupportedError("this state cannot go back")

    with scheduling() as scheduler:
        monkeypatch.setattr(type(scheduler.kv), "rollback", cannot)
        prompt = tokens_of(200, 1)
        first = Asked(scheduler, prompt, 4)
        kept = scheduler.kv.sequences[0].tokens.tolist()
        assert first.done.n_cached == 0
        again = Asked(scheduler, prompt, 4)
        assert again.text == first.text
        assert again.done.n_cached == 0
        assert Asked(scheduler, [*kept, 5, 6], 4).done.n_cached == len(kept)


@pytest.fixture(scope="module")
def questions() -> list[list[int]]:
    """Prompts with answers that are no matter of rounding."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        document = make_prompt(400, lambda s: len(model.tokenize(s, add_special=False)), n_needles=3, seed=5)
        return [model.tokenize(document.text + needle.question).tolist() for needle in document.needles]


def test_an_engine_error_while_a_prompt_is_read(questions: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends this request; the others say what they would have said."""
    want = alone(questions, N_CODE)
    with scheduling(n_parallel=3) as scheduler:
        victim = scheduler.kv.sequences[1]
        decode = type(victim.ctx).decode

        def fails(self: Any, *args: Any) -> Any:
            if self.seq == 1 and victim.n_tokens > 300:
                raise NativeError("no luck")
            return decode(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(type(victim.ctx), "decode", fails)
            asked = [Asked(scheduler, prompt, N_CODE) for prompt in questions]
            assert asked[1].failed == Failed(500, "no luck")
            assert [asked[0].text, asked[2].text] == [want[0], want[2]]
            assert victim.n_tokens == 0
        assert [a.text for a in [Asked(scheduler, prompt, N_CODE) for prompt in questions]] == want


@pytest.mark.parametrize("when", ["before", "after", "within"])
def test_an_engine_error_in_a_step(questions: list[list[int]], monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Of all that answer, whenever it comes: it ends one request, and no token of the others is lost, or decoded twice."""
    want = alone(questions, N_CODE)
    with scheduling(n_parallel=3) as scheduler:
        kv = scheduler.kv
        victim, each = kv.sequences[1], type(kv).decode_each
        written = type(victim.pager).written

        def fails(self: Any, tokens: Any) -> Any:
            late = 1 in tokens and victim.n_tokens > len(questions[1])
            if late and when == "before":
                raise PoolError("no room")
            res = each(self, tokens)
            if late and when == "after":
                raise PoolError("no room")
            return res

        def fails_to_write(self: Any, n_tokens: int) -> Any:
            if self is victim.pager and n_tokens == 1:
                raise PoolError("no room")
            return written(self, n_tokens)

        with monkeypatch.context() as patch:
            patch.setattr(type(kv), "decode_each", fails)
            if when == "within":
                patch.setattr(type(victim.pager), "written", fails_to_write)
            asked = [Asked(scheduler, prompt, N_CODE) for prompt in questions]
            assert asked[1].failed.status == 503
            assert [asked[0].text, asked[2].text] == [want[0], want[2]]
        assert [a.text for a in [Asked(scheduler, prompt, N_CODE) for prompt in questions]] == want
        until(lambda: scheduler.n_busy == 0)
        for s in kv.sequences:
            s.check_integrity()


def test_a_bug_ends_one_and_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with scheduling() as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(type(scheduler.kv), "decode_each", lambda *_: 1 / 0)
            failed = Asked(scheduler, tokens_of(10)).failed
        assert failed.status == 500
        assert "ZeroDivisionError" in caplog.text
        assert "Zero" not in failed.message
        assert Asked(scheduler, tokens_of(10)).done


def test_idle_sequences_give_their_memory() -> None:
    """What they keep is worth having only while there is room."""
    with scheduling() as scheduler:
        record = scheduler.kv.ctx.pool_info().record_bytes
    with scheduling(host_limit=40 * record) as scheduler:
        assert Asked(scheduler, tokens_of(1600, 1)).done
        assert Asked(scheduler, tokens_of(1600, 2)).done.n_cached <= 1
        failed = Asked(scheduler, tokens_of(3200, 3)).failed
        assert failed.status == 503
        assert "chunk records take" in failed.message
        assert Asked(scheduler, tokens_of(500, 2)).done


def test_the_end_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that cannot even be cleared: all hear of it, nobody waits for ever."""

    def broken(*_: Any) -> Any:
        raise NativeError("the device is gone")

    with scheduling() as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(type(scheduler.kv.ctx), "decode", broken)
            patch.setattr(type(scheduler.kv), "clear", broken)
            asked = [Asked(scheduler, tokens_of(10, i)) for i in range(4)]
            assert {a.failed.status for a in asked} == {500}
            assert scheduler.join(30)
        assert scheduler.phase == Phase.FAILED
        assert str(scheduler.error) == "the device is gone"
        with pytest.raises(NotReady):
            scheduler.admit()
        scheduler.kv.close()


class FakeCache:
    """Keeps tokens, and reads them again: what a real one does, without its speed."""

    def __init__(self) -> None:
        self.known: list[list[int]] = []
        self.calls: Counter[str] = Counter()
        self.error: Exception | None = None

    def _best(self, tokens: Any) -> list[int]:
        def common(known: list[int]) -> list[int]:
            n = min(len(known), len(tokens))
            differ = np.flatnonzero(np.array(known[:n]) != tokens[:n])
            return known[: int(differ[0]) if len(differ) else n]

        return max(map(common, self.known), key=len, default=[])

    def match(self, sequence: KVFlash, tokens: Any) -> int:
        self.calls["match"] += 1
        return len(self._best(tokens))

    def restore(self, sequence: KVFlash, tokens: Any) -> int:
        self.calls["restore"] += 1
        sequence.clear()
        best = self._best(tokens)
        for i in range(0, len(best), 64):
            sequence.decode(best[i : i + 64])
        if self.error:
            raise self.error
        return len(best)

    def begin(self, sequence: KVFlash) -> Future[None]:
        self.calls["save"] += 1
        res: Future[None] = Future()
        if self.error and self.calls["save"] % 2:
            res.set_exception(self.error)
        elif self.error:
            raise self.error
        else:
            self.known.append(sequence.tokens.tolist())
            res.set_result(None)
        return res


def test_prefixes_on_disk(chosen: Chosen) -> None:
    cache = FakeCache()
    a, b, c = (tokens_of(400, i) for i in range(3))
    with scheduling(cache=cache, cache_min=300, n_parallel=1) as scheduler:
        want = Asked(scheduler, a).text
        until(lambda: cache.calls["save"] == 1)
        assert Asked(scheduler, a).done.n_cached == 399
        assert cache.calls["save"] == 1, "nothing new"
        assert Asked(scheduler, b).done.n_cached == 1, "BOS"
        until(lambda: cache.calls["save"] == 2)
        assert cache.calls["restore"] == 0
        again = Asked(scheduler, [*a, *c[:50]])
        assert again.done.n_cached == 400
        n_held = chosen.n_held
        assert Asked(scheduler, a).text == want
        assert chosen.n_held == n_held + 12
        assert Asked(scheduler, tokens_of(100, 9)).done.n_cached == 1
        until(lambda: scheduler.n_busy == 0)
        assert cache.calls == {"match": 6, "restore": 1, "save": 2}
        found = parse_metrics(scheduler.metrics.text())
        assert found['prefix_cache_hits_total{source="disk"}'] == 1
        assert found['prefix_cache_tokens_total{source="disk"}'] == 400
        assert found['prefix_cache_hits_total{source="memory"}'] == 2
        assert found["prefix_cache_misses_total"] == 3


@pytest.mark.parametrize("error", [SnapshotError("it is damaged"), OSError(28, "no space"), PoolError("no room")])
def test_a_cache_that_fails_is_no_reason_to_stop(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    cache = FakeCache()
    a, b = tokens_of(400, 1), tokens_of(400, 2)
    with scheduling(cache=cache, cache_min=300, n_parallel=1) as scheduler:
        want = Asked(scheduler, a).text
        assert Asked(scheduler, b).done
        until(lambda: cache.calls["save"] == 2)
        cache.error = error
        again = Asked(scheduler, a)
        assert again.text == want
        assert again.done.n_cached == 0
        until(lambda: cache.calls["save"] == 3)
        assert Asked(scheduler, tokens_of(20, 3)).done
    assert "the prefix cache could not be read" in caplog.text
    assert "the prefix cache could not be written" in caplog.text


def test_the_cache_of_snapshots(questions: list[list[int]], tmp_path: Path) -> None:
    """What one server read is there for the next one, even if it was ended at once."""
    cache = pytest.importorskip("pyllama_kvflash.snapshot.cache").PrefixCache
    with scheduling(cache=cache(tmp_path, 1 << 30), cache_min=300) as scheduler:
        want = Asked(scheduler, questions[0], N_CODE).text
    with scheduling(cache=cache(tmp_path, 1 << 30), cache_min=300) as scheduler:
        again = Asked(scheduler, questions[0], N_CODE)
        assert again.text == want
        assert again.done.n_cached >= 256
        assert parse_metrics(scheduler.metrics.text())['prefix_cache_hits_total{source="disk"}'] == 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_damage_that_is_found_in_an_answer(
    after: bool, chosen: Chosen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The text so far is read again, and the answer goes on; the other one is not touched."""
    prompts = [tokens_of(200, 1), tokens_of(300, 2)]
    want = alone(prompts, 30, chosen, pool="off")
    with scheduling(pool="off", n_parallel=2) as scheduler:
        until(lambda: scheduler.kv is not None)
        decode_each, broken = KVFlash.decode_each, []

        def damaged(self: KVFlash, tokens: dict[int, int]) -> Any:
            lengths = {i: self.sequences[i].n_tokens for i in tokens}
            if lengths.get(1, 0) == 310 and len(broken) < 2:  # with the other one, and again when tried alone
                broken.append(tokens)
                if after:
                    decode_each(self, tokens)
                msg = "the record of chunk 3 was changed"
                raise SnapshotError(msg)
            return decode_each(self, tokens)

        monkeypatch.setattr(KVFlash, "decode_each", damaged)
        asked = [Asked(scheduler, prompt, 30) for prompt in prompts]
        assert [a.text for a in asked] == want
        assert [a.done.n_answer for a in asked] == [30, 30]
        assert len(broken) == 2
        assert chosen.n_held == 2 * 30
    assert caplog.text.count("the record of chunk 3 was changed; the text is read again") == 1


def test_admission() -> None:
    with scheduling(n_queue=1, n_parallel=1) as scheduler:
        scheduler.admit()
        scheduler.admit()
        with pytest.raises(QueueFull):
            scheduler.admit()
        scheduler.leave()
        scheduler.admit()
        scheduler.leave()
        scheduler.leave()
        assert scheduler.n_admitted == 0


#
# the end
#


def test_stopping_lets_answers_be_finished() -> None:
    with Running() as running, stream(running, 400) as parts:
        text = begun(parts)
        running.scheduler.stop()
        assert running.http.get("/health").json() == {"status": "stopping"}
        refused = running.post({"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["message"][:22]) == (503, "the server is stopping")
        events, _ = sse(text + "".join(parts))
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_ending_ends_answers_as_they_are() -> None:
    with Running(n_parallel=1) as running:
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(running.post({"prompt": "x"})))
        with stream(running, 3500) as parts:
            text = begun(parts)
            waiting.start()
            until(lambda: running.health()["queue"] == 1)
            running.scheduler.end()
            text += "".join(parts)
        waiting.join(30)
        assert results[0].status_code == 503
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in text
        assert running.scheduler.join(30)
        assert running.scheduler.phase == Phase.CLOSED


@contextlib.contextmanager
def process(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvflash serve` as a process of its own, ready, and its address."""
    command = [SCRIPT, "serve", "--port", "0", "-c", "8K", "--kvflash", "2K", "-t", "1", "--prefix-cache", "off", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proc:
        try:
            lines = []
            for line in proc.stderr:
                lines.append(line)
                if line == "kvflash: ready\n":
                    break
            url = re.search(r"listening on (http://\S+)/v1", "".join(lines))
            assert url, lines
            yield proc, url[1]
        finally:
            proc.kill()
            proc.wait()


@pytest.mark.parametrize(("number", "grace"), [(signal.SIGTERM, "30"), (signal.SIGINT, "0.2")])
def test_signals(number: signal.Signals, grace: str) -> None:
    """What runs is finished in time, or ended; the exit code is 0, and nothing looks like an error."""
    with process("--grace", grace, "-np", "2") as (proc, url):
        body = {"prompt": "On", "max_tokens": 300 if grace == "30" else 7000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as res:
            parts = res.iter_text()
            text = begun(parts)
            proc.send_signal(number)
            text += "".join(parts)
        assert text.endswith("data: [DONE]\n\n")
        assert f'"finish_reason":"{"length" if grace == "30" else "stop"}"' in text
        rest = proc.stderr.read()
        assert proc.wait(30) == 0, rest
        assert "Traceback" not in rest
        assert "rror" not in rest


def test_a_second_signal_ends_at_once() -> None:
    with process("--grace", "60") as (proc, url):
        body = {"prompt": "On", "max_tokens": 8000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as res:
            parts = res.iter_text()
            begun(parts)
            proc.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert proc.poll() is None
            proc.send_signal(signal.SIGTERM)
            assert proc.wait(10) == 130


#
# the command
#


def refusal(*args: str) -> str:
    """The sentence with which `kvflash serve` refuses."""
    res = CliRunner().invoke(main, ["serve", "--prefix-cache", "off", *args])
    assert isinstance(res.exception, SystemExit), repr(res.exception)
    assert res.exit_code == 2, res.output
    assert "Traceback" not in res.output
    return res.output


def test_refusals_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none.gguf does not exist" in refusal("none.gguf")
    assert "-n/--predict is 0" in refusal("-n", "0")
    assert "temperature (--temp) is nan" in refusal("--temp", "nan")
    assert "cannot be read: No such file" in refusal("--chat-template-file", str(tmp_path / "x"))
    (tmp_path / "y").write_bytes(b"\xff")
    assert "it is not UTF-8 text" in refusal("--chat-template-file", str(tmp_path / "y"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use; choose another" in refusal("--port", str(taken.getsockname()[1]))
    assert "cannot listen on no.such.host.invalid:0" in refusal("--port", "0", "--host", "no.such.host.invalid")
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "kvflash serve needs starlette: pip install 'pyllama-kvflash[serve]'" in refusal()


def test_a_model_that_cannot_be_served_ends_the_command(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(BUNDLED_MODEL.read_bytes()[:5000])
    done = subprocess.run(
        [SCRIPT, "serve", broken, "--port", "0", "--prefix-cache", "off"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"error: {broken} cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr


#
# for a long time
#


class Client(threading.Thread):
    """Asks at random: answers in full or in streams, leaves in the middle, sends nonsense. Notes what should not be."""

    def __init__(self, running: Running, documents: list[tuple[str, str]], seed: int, end: float) -> None:
        super().__init__()
        self._running, self._documents, self._end = running, documents, end
        self._rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._running.url, timeout=60) as http:
            while time.monotonic() < self._end:
                what = self._rng.choice(
                    (self._whole, self._whole, self._stream, self._stream, self._leave, self._nonsense)
                )
                try:
                    self.outcomes[what(http)] += 1
                except Exception as err:  # noqa: BLE001 (told at the end)
                    self.errors.append(f"{what.__name__}: {err!r}")

    def _body(self, **extra: Any) -> tuple[dict[str, Any], str]:
        text, answer = self._rng.choice(self._documents)
        return {"prompt": text, "max_tokens": 7, "temperature": 0, **extra}, answer

    def _check(self, text: str, answer: str) -> str:
        if answer in text:
            return "right"
        return "wrong"

    def _refused(self, res: Any) -> str:
        assert res.status_code == 429, res.text
        assert res.json()["error"]["code"] == "queue_full"
        time.sleep(0.05)
        return "refused"

    def _whole(self, http: Any) -> str:
        body, answer = self._body()
        res = http.post("/v1/completions", json=body)
        if res.status_code != 200:
            return self._refused(res)
        return self._check(res.json()["choices"][0]["text"], answer)

    def _stream(self, http: Any) -> str:
        body, answer = self._body(stream=True)
        res = http.post("/v1/completions", json=body)
        if res.status_code != 200:
            return self._refused(res)
        events, _ = sse(res.text)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] in {"length", "stop"}
        return self._check("".join(e["choices"][0]["text"] for e in events[:-1]), answer)

    def _leave(self, http: Any) -> str:
        body, _ = self._body(stream=True, max_tokens=500)
        if self._rng.random() < 0.5:
            with contextlib.suppress(httpx.TimeoutException):
                http.post("/v1/completions", json=body, timeout=self._rng.random() * 0.3 + 0.01)
            return "left"
        with http.stream("POST", "/v1/completions", json=body) as res:
            parts = res.iter_text()
            for _ in range(self._rng.randrange(1, 30)):
                next(parts, "")
        return "left"

    def _nonsense(self, http: Any) -> str:
        body = json.dumps({"prompt": "x", "stop": [self._rng.choice("abc")] * 5}).encode()
        data = bytes(self._rng.randbytes(50)) if self._rng.random() < 0.5 else body[: self._rng.randrange(len(body))]
        res = http.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
        assert res.status_code in {400, 429}, res.text
        assert res.json()["error"]["message"]
        return "nonsense"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it looks at the memory of this process")
def test_soak(document: NeedlePrompt) -> None:
    """Clients that come and go: every answer is whole, or an error, memory does not grow, and all is idle at the end."""
    lines = document.text.splitlines(keepends=True)
    texts = ["".join(lines[: len(lines) * n // 4]) for n in (2, 3, 4)]
    documents = [(text + n.question, n.answer) for text in texts for n in document.needles if n.statement in text]
    with Running(n_parallel=3, n_queue=4, n_ctx=4096, pool=6144) as running:
        for text, answer in documents:
            assert answer in running.text(prompt=text, max_tokens=7)
        levels = []
        for _ in range(4):
            end = time.monotonic() + SOAK_SECONDS / 4
            clients = [Client(running, documents, len(levels) * 100 + i, end) for i in range(6)]
            for client in clients:
                client.start()
            for client in clients:
                client.join(120)
                assert not client.is_alive()
            errors = [error for client in clients for error in client.errors]
            assert not errors, errors[:5]
            outcomes = sum((client.outcomes for client in clients), Counter())
            levels.append(resident_bytes())
            print(f"soak: {dict(outcomes)}, RSS {levels[-1] / 2**20:.1f} MiB")
            assert outcomes["right"] >= 9 * outcomes["wrong"]
        until(lambda: running.health() == {"status": "ok", "sequences": 3, "busy": 0, "idle": 3, "queue": 0})
        assert running.scheduler.n_admitted == 0
        for s in running.scheduler.kv.sequences:
            s.check_integrity()
        assert levels[-1] <= levels[1] + (16 << 20)
