"""The server's log: one line for each request, for people or as JSON."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyllama_kvflash.errors import number
from pyllama_kvflash.serve.job import Finished
from pyllama_kvflash.text import printable

Write = Callable[[str], None]

FORMATS = "text", "json"

_ENTRY = "kvflash.entry"  # key of the entry in an ASGI scope
_MAX_CLIENT, _MAX_PATH, _MAX_BODY = 40, 100, 4_000  # characters that are shown
_REFUSED = 400  # lowest status of an error
LEFT = 499
"""Status of a request whose client left before the end of the answer."""


@dataclass(slots=True)
class Entry:
    """The log entry of a request.

    time: ISO 8601. client: the User-Agent header without comments. status: the HTTP status; LEFT: the client left early.
    n_prompt, n_cached: tokens of the prompt, and how many of them were cached. n_answer: tokens of all answers.
    first_s: seconds until the first token, including the time in the queue; None: there is no answer.
    answer_s: seconds spent decoding answers. seconds: time of the whole request. reason: why the last answer ended.
    error: why the request was refused, or failed.
    """

    time: str
    client: str
    method: str
    path: str
    status: int = LEFT
    n_prompt: int = 0
    n_cached: int = 0
    n_answer: int = 0
    first_s: float | None = None
    answer_s: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    error: str = ""

    def finished(self, done: Finished) -> None:
        """Add the figures of an answer that has ended."""
        if self.first_s is None:
            self.n_prompt, self.n_cached, self.first_s = done.n_prompt, done.n_cached, done.first_s
        self.n_answer += done.n_answer
        self.answer_s += done.timing.answer_s
        self.reason = done.reason

    @property
    def shown(self) -> bool:
        """Whether the request is logged. Polling by the page or a monitor is not, unless it fails."""
        return self.method == "POST" or self.status >= _REFUSED

    def __str__(self) -> str:
        """Return the line for people."""
        head = f"{self.time[11:19]} {self.client} {self.method} {self.path} {self.status}"
        parts = []
        if self.first_s is not None:
            parts += [
                f"prompt {self.n_prompt:,} ({self.n_cached:,} cached, {self.n_prompt - self.n_cached:,} read)",
                f"answer {self.n_answer:,}",
                f"first token {self.first_s:.2f} s",
            ]
            if self.answer_s and self.n_answer > 1:
                # reading the prompt gives the first token
                parts.append(f"{(self.n_answer - 1) / self.answer_s:.1f} tok/s")
        parts.append(f"{self.seconds:.2f} s")
        if self.reason:
            parts.append(self.reason)
        return f"{head}: {', '.join(parts)}{f': {self.error}' if self.error else ''}"


def entry_of(scope: Scope) -> Entry:
    """Return the entry of a request."""
    entry: Entry = scope[_ENTRY]
    return entry


class Logged:
    """An ASGI application whose requests are logged."""

    def __init__(self, app: ASGIApp, write: Write, form: str) -> None:
        """write: takes a line. form: one of FORMATS."""
        self._app, self._write, self._form = app, write, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it when its last byte is sent or the client has left."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, now = time.perf_counter(), datetime.now(UTC).astimezone().isoformat(timespec="milliseconds")
        entry = scope[_ENTRY] = Entry(now, _client(scope), scope["method"], _printable(scope["path"], _MAX_PATH))

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            entry.seconds = time.perf_counter() - begin
            if entry.shown:
                self._write(str(entry) if self._form == "text" else json.dumps(_rounded(asdict(entry))))


def _client(scope: Scope) -> str:
    """Return the client's name from the User-Agent header, such as "OpenAI/Python 3.57.0" or "claude-cli/2.0.1"."""
    agent = re.sub(r"\s*\(.*?\)", "", Headers(scope=scope).get("user-agent", ""))
    return _printable(agent, _MAX_CLIENT) or "-"


def _printable(text: str, most: int) -> str:
    return printable(text[:most]).strip()


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}


_SECRET = re.compile(r"(?i)(api[-_ ]?key|authorization|password|passwd|secret|credential|bearer|access[-_ ]?token)")


def shown_body(body: bytes) -> str:
    """Return a body for the log: JSON on one line, with *** as the value of each field whose name suggests a secret."""
    try:
        text = json.dumps(_without_secrets(json.loads(body)), ensure_ascii=False)
    except (ValueError, RecursionError):
        text = body[:_MAX_BODY].decode("utf-8", "replace")
    more = f"... ({number(len(text))} characters)" if len(text) > _MAX_BODY else ""
    return _printable(text, _MAX_BODY) + more


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "***" if _SECRET.search(k) else _without_secrets(v) for k, v in value.items()}
    return [_without_secrets(v) for v in value] if isinstance(value, list) else value
