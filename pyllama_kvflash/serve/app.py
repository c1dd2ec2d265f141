"""HTTP: the routes, access control, and how answers are sent."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pyllama_kvflash.chat import ChatTemplate, check_text
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.native import Sampling, Tokens
from pyllama_kvflash.serve import about, schema
from pyllama_kvflash.serve.exchange import Exchange, Stream
from pyllama_kvflash.serve.fault import Fault, invalid
from pyllama_kvflash.serve.job import Finished, Job
from pyllama_kvflash.serve.replies import Reply
from pyllama_kvflash.serve.scheduler import NotReady, Phase, QueueFull, Scheduler

_BODY_SECONDS = 60.0  # within which a body must arrive
_READERS = 2  # requests tokenized at once: a text takes some 75 bytes per character meanwhile

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    name: of the model, in the protocol.
    sampling: the defaults for requests.
    n_predict: the most tokens of an answer; -1: what the context holds.
    max_body: the most bytes of a request's body.
    api_key: the key that requests must send; None: anyone may.
    template: a chat template in place of the model's own.
    """

    name: str
    sampling: Sampling
    n_predict: int = -1
    max_body: int = 32 << 20
    api_key: str | None = None
    template: str | None = None


class Server:
    """The HTTP handlers. note: called with a line about each answer."""

    def __init__(self, scheduler: Scheduler, settings: Settings, note: Note = lambda _: None) -> None:
        self._scheduler, self._settings, self._note = scheduler, settings, note
        self._template: ChatTemplate | None = None
        self._readers = ThreadPoolExecutor(_READERS, "kvflash-read")
        self._created = int(time.time())

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/props", self._props),
            Route("/slots", self._slots),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        handlers = {Fault: _on_fault, HTTPException: _on_http, Exception: _on_error}
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # they take the subclass
        app.router.redirect_slashes = False
        return _Guard(app, self._settings.api_key)

    #
    # about the server
    #

    async def _health(self, _request: Request) -> Response:
        state = self._scheduler.phase
        if state != Phase.READY:
            return JSONResponse({"status": state.value}, 503)
        f, n_busy = self._scheduler.metrics.figures, self._scheduler.n_busy
        waiting = max(0, self._scheduler.n_admitted - n_busy)
        return JSONResponse(
            {"status": "ok", "sequences": f.sequences, "busy": n_busy, "idle": f.sequences - n_busy, "queue": waiting}
        )

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse(self._scheduler.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, _request: Request) -> Response:
        model = {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "kvflash"}
        if kv := self._scheduler.kv:
            model["context_length"] = kv.options.n_ctx
        return JSONResponse({"object": "list", "data": [model]})

    async def _props(self, _request: Request) -> Response:
        s = self._settings
        return JSONResponse(about.props(self._ready(), s.name, s.sampling, s.template))

    async def _slots(self, _request: Request) -> Response:
        return JSONResponse(about.slots(self._ready(), self._scheduler.busy))

    def _ready(self) -> KVFlash:
        """Return the engine. Raises Fault."""
        if self._scheduler.phase != Phase.READY or self._scheduler.kv is None:
            raise _not_ready(self._scheduler.phase)
        return self._scheduler.kv

    async def _tokenize(self, request: Request) -> Response:
        return await self._asked(request, about.tokenized)

    async def _detokenize(self, request: Request) -> Response:
        return await self._asked(request, about.detokenized)

    async def _asked(self, request: Request, answer: Callable[[KVFlash, dict[str, Any]], dict[str, Any]]) -> Response:
        """Answer from the model's vocabulary, beside the scheduler's thread."""

        def found() -> dict[str, Any]:
            try:
                return answer(kv, schema.parse_json(body))
            except KVFlashError as err:
                raise invalid(str(err)) from None

        async with self._admitted(request) as (kv, body):
            res = await asyncio.get_running_loop().run_in_executor(self._readers, found)
        self._scheduler.leave()
        return JSONResponse(res)

    #
    # answers
    #

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        try:
            async with self._admitted(request) as (kv, body):
                understood = partial(self._understood, kv, body, chat=chat)
                ask, tokens, stop = await asyncio.get_running_loop().run_in_executor(self._readers, understood)
                exchange = Exchange(self._scheduler)
                job = Job(tokens, ask.sampling, self._limit(ask.max_tokens), stop, exchange.notify)
        except Fault as fault:
            self._scheduler.metrics.request("invalid" if fault.status < 429 else "rejected")  # noqa: PLR2004
            raise
        exchange.submit(job)
        reply = Reply(self._settings.name, chat=chat)
        if ask.stream:
            return Stream(exchange, reply, self._log, include_usage=ask.include_usage)
        with exchange:
            text, done = await exchange.whole(request.receive)
        if done is None:
            return Response(status_code=499)  # nobody is there to read it
        self._log(done)
        return JSONResponse(reply.whole(text, done))

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[tuple[KVFlash, bytes]]:
        """Take a place in the queue, and yield the engine and the body. Gives the place up if the block fails."""
        if self._scheduler.phase != Phase.READY:  # before megabytes are sent for nothing
            raise _not_ready(self._scheduler.phase)
        body = await _body(request, self._settings.max_body)
        try:
            self._scheduler.admit()
        except NotReady:
            raise _not_ready(self._scheduler.phase) from None
        except QueueFull as full:
            msg = f"as many requests wait as may: try again in {full.seconds} s"
            raise Fault(429, msg, code="queue_full", headers={"Retry-After": str(full.seconds)}) from None
        try:
            if self._scheduler.kv is None:
                raise _not_ready(self._scheduler.phase)
            yield self._scheduler.kv, body
        except BaseException:
            self._scheduler.leave()
            raise

    def _understood(self, kv: KVFlash, body: bytes, *, chat: bool) -> tuple[schema.Ask, Tokens, tuple[str, ...]]:
        """Return the request, its prompt's tokens (n,) int32, and the strings that end the answer. Raises Fault."""
        ask = schema.parse(
            schema.parse_json(body),
            chat=chat,
            defaults=self._settings.sampling,
            n_vocab=kv.model.n_vocab,
        )
        stop = ask.stop
        try:
            if chat:
                self._template = self._template or ChatTemplate.of(kv.model, self._settings.template)
                tokens = self._template.tokens(kv.model, ask.messages)
                stop += self._template.stop
            elif isinstance(ask.prompt, str):
                check_text(ask.prompt, "the prompt")
                tokens = kv.tokenize(ask.prompt)
            else:
                tokens = np.array(ask.prompt, np.int32)
        except KVFlashError as err:
            raise invalid(str(err), "messages" if chat else "prompt") from None
        _check_length(len(tokens), kv.options.n_ctx)
        return ask, tokens, stop

    def _limit(self, max_tokens: int | None) -> int:
        """Return the most tokens of an answer; -1: as many as fit."""
        most = self._settings.n_predict
        if max_tokens is None or most < 0:
            return most if max_tokens is None else max_tokens
        return min(max_tokens, most)

    def _log(self, done: Finished) -> None:
        self._note(
            f"{done.n_prompt:,} tokens of prompt ({done.n_cached:,} known), {done.n_answer:,} of answer in"
            f" {done.seconds:.1f} s: {done.reason}"
        )


async def _body(request: Request, limit: int) -> bytes:
    """Return a request's body. Raises Fault.

    It must be labelled JSON: a browser does not send that for a foreign page without asking the server first.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        msg = "the body must be JSON, and say so: send the header Content-Type: application/json"
        raise Fault(415, msg, code="unsupported_media_type")
    size = request.headers.get("content-length", "0")
    if size.isdecimal() and int(size) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise Fault(408, f"the body did not come within {_BODY_SECONDS:.0f} s", code="timeout") from None
    except ClientDisconnect:
        raise Fault(400, "the client left before it had sent the body") from None
    return bytes(body)


def _too_large(limit: int) -> Fault:
    return Fault(413, f"the body is larger than {limit} bytes: shorten it, or raise --max-body", code="body_too_large")


def _check_length(n: int, n_ctx: int) -> None:
    if n == 0:
        msg = "the prompt is empty: give at least one character"
        raise invalid(msg)
    if n > n_ctx:
        msg = f"the prompt is {n} tokens, and the context {n_ctx}: shorten it, or start the server with a larger -c"
        raise invalid(msg, code="context_length_exceeded")


def _not_ready(state: Phase) -> Fault:
    what = "the model is loading" if state == Phase.LOADING else "the server is stopping"
    return Fault(503, f"{what}: try again in a few seconds", code="unavailable", headers={"Retry-After": "5"})


async def _on_fault(_request: Request, fault: Fault) -> Response:
    return fault.response()


async def _on_http(request: Request, err: HTTPException) -> Response:
    if err.status_code == 404:  # noqa: PLR2004
        return Fault(404, f"there is no {request.url.path[:200]} here", code="not_found").response()
    msg = f"{request.url.path[:200]} does not take {request.method}: {err.detail}"
    return Fault(err.status_code, msg, code="method_not_allowed", headers=err.headers).response()


async def _on_error(_request: Request, _err: Exception) -> Response:
    return Fault(500, "an error in the server: its log has the details").response()


class _Guard:
    """Refuses requests without the key, except to /health."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._digest = hashlib.sha256(f"Bearer {key}".encode()).digest() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        msg = "no valid API key: send the header Authorization: Bearer KEY"
        fault = Fault(401, msg, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await fault.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if self._digest is None:
            return True
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        return hmac.compare_digest(hashlib.sha256(given).digest(), self._digest)  # digests hide even the key's length
