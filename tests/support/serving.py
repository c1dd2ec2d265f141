"""A server or a scheduler in this process, its clients, and what one who asks alone is answered."""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)  # who imports this file needs no such line
pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx
import uvicorn

from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.engine.writer import Writer
from pyllama_kvflash.events import Token
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt
from pyllama_kvflash.serve.app import Server
from pyllama_kvflash.serve.job import Failed, Finished, Job, Phase, Text, Update
from pyllama_kvflash.serve.scheduler import Scheduler
from pyllama_kvflash.serve.server import bound, config
from pyllama_kvflash.serve.settings import Settings
from support import needles
from support.commands import forget_settings
from support.rounding import Chosen, relative_rms
from support.runs import GREEDY

T = TypeVar("T")

NAME = BUNDLED_MODEL.stem
SMALL: dict[str, Any] = {"n_ctx": 4096, "pool": 2048, "n_batch": 128, "n_threads": 1, "n_parallel": 2}
N_CODE = 5  # tokens of a code and of the end of its line: what follows is less certain
TOOLS_TEMPLATE = (Path(__file__).resolve().parents[1] / "data" / "tools.jinja").read_text("utf-8")
# As the model was trained: a question, its answer, a line's end.
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'assistant' }}{% endfor %}"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's settings."""
    forget_settings(monkeypatch)
    for name in list(os.environ):
        if name.startswith("OPENAI_") or name.lower().endswith("_proxy"):
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
        self, scheduler: Scheduler | None = None, *, ready: bool = True, n_queue: int = 8, keep_alive: float = 75.0, **options: Any
    ) -> None:  # fmt: skip
        """options: of Settings, and of the engine."""
        own = {f.name: options.pop(f.name) for f in fields(Settings) if f.name in options}
        settings = Settings(NAME, Sampling(), **{"max_body": 1 << 20, "template": TEMPLATE, **own})
        self.scheduler = scheduler or Scheduler(open_needle(**options), n_queue=n_queue)
        self.notes: list[str] = []
        self._handlers = Server(self.scheduler, settings, self.notes.append)
        app = self._handlers.app()
        self._socket = bound("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}{settings.api_prefix}"
        self._server = uvicorn.Server(config(app, keep_alive=keep_alive, close=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self.scheduler.start()
        self._thread.start()
        until(lambda: self._server.started)
        if ready:
            until(lambda: self.scheduler.phase != Phase.LOADING)
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self.http = httpx.Client(base_url=self.url, timeout=60, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.scheduler.end()
        assert self.scheduler.join(30)
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._handlers.close()

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
def with_tools() -> Iterator[Running]:
    """One whose template has tools, for all that leave it as it was."""
    with Running(template=TOOLS_TEMPLATE, max_body=64 << 10) as running:
        yield running


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    return needles.document(2400, seed=3)


def long_text(n: int) -> str:
    """About n tokens."""
    return "The old mill by the river. " * (n // 7)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Whoever has a text that another one had goes on as that one, from logits that differ by rounding.

    That comes to 0.025 of the logits at most; one token more or less at the end of a prompt, to several times as much.
    """
    res, write = Chosen(0.05, relative_rms), Writer.write

    def held(writer: Writer) -> None:
        sequence = writer.decoder.sequence
        res.hold(sequence.ctx, -1, tuple(sequence.tokens.tolist()))
        write(writer)

    monkeypatch.setattr(Writer, "write", held)
    return res


def alone(prompts: list[Any], max_tokens: int, **options: Any) -> list[str]:
    """What each is answered by itself."""
    res = []
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, **options}) as kv:
        for prompt in prompts:
            kv.clear()
            events = list(kv.generate(prompt, max_tokens=max_tokens, sampling=GREEDY))
            res.append("".join(e.text for e in events if isinstance(e, Token)) + events[-1].text)
    return res


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


def between_turns(scheduler: Scheduler, call: Callable[[KVFlash], T]) -> list[T]:
    """What a call gives for each sequence, made in the thread that has the engine."""
    return scheduler.query(lambda slots: [call(slot.seq) for slot in slots]).result(60)


def check_all(scheduler: Scheduler) -> None:
    """Ledger, store and pool of each sequence agree."""
    between_turns(scheduler, lambda seq: seq.check_integrity())


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return [4088, *np.random.default_rng(seed).integers(0, 4000, n - 1).tolist()]
