"""HTTP: the routes, access control, and how answers are sent."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.native import Sampling
from pyllama_kvflash.serve import llama_server, ollama, webui
from pyllama_kvflash.serve.exchange import Exchange, Stream
from pyllama_kvflash.serve.http import Guard, JSONResponse, Prefixed, body_of, on_error, on_http, on_request_error
from pyllama_kvflash.serve.job import Job, broken
from pyllama_kvflash.serve.log import Logged, entry_of, shown_body
from pyllama_kvflash.serve.prompt import PromptBuilder
from pyllama_kvflash.serve.protocols import responses_response
from pyllama_kvflash.serve.protocols.answer_fields import MAX_SEED
from pyllama_kvflash.serve.protocols.fields import parse_json
from pyllama_kvflash.serve.protocols.protocol import AnswerProtocol, PreparedRequest
from pyllama_kvflash.serve.protocols.request_error import Answered, RequestError, invalid
from pyllama_kvflash.serve.protocols.responses_store import ResponseStore
from pyllama_kvflash.serve.protocols.table import ANSWERS
from pyllama_kvflash.serve.scheduler import NotReady, Phase, QueueFull, Scheduler

WARNING = "KVFlash-Warning"
"""The header that names the parts of the request's schemas that are not enforced."""

_MAX_HEADER = 2_000  # characters of that header
_MAX_LOGGED = 1_000  # different warnings that are logged
_READERS = 2  # requests tokenized at once: that takes some 75 bytes a character

Note = Callable[[str], None]
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    name: the model's name in the protocol.
    sampling: the defaults for requests.
    n_predict: the most tokens of an answer; -1: until the context is full.
    max_body: the most bytes of a request's body.
    api_key: the key that requests must send; None: no key is needed.
    template: a chat template in place of the model's own.
    webui: whether there is a page at /.
    strict: whether a field that the server does not know is refused; else it is named in a header and in the log.
    log_format: of the lines about requests, "text" or "json". log_bodies: whether the log has the requests' bodies.
    responses: the folder in which responses are kept; None: they are kept in memory only.
    api_prefix: what all paths begin with, as in "/llm"; "" for nothing.
    """

    name: str
    sampling: Sampling
    n_predict: int = -1
    max_body: int = 32 << 20
    api_key: str | None = None
    template: str | None = None
    webui: bool = True
    strict: bool = False
    log_format: str = "text"
    log_bodies: bool = False
    responses: Path | None = None
    api_prefix: str = ""


class Server:
    """The HTTP handlers. note: called with warnings and bodies. log: called with a line about each request; None: note is."""

    def __init__(
        self, scheduler: Scheduler, settings: Settings, note: Note = lambda _: None, log: Note | None = None
    ) -> None:
        self._scheduler, self._settings, self._note, self._log = scheduler, settings, note, log or note
        self._responses = ResponseStore(settings.responses)
        self._prompts = PromptBuilder(
            settings.name, settings.sampling, settings.template, self._responses, strict=settings.strict
        )
        self._readers = ThreadPoolExecutor(_READERS, "kvflash-read")
        self._created = int(time.time())
        self._logged: set[str] = set()

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/apply-template", self._apply_template, methods=["POST"]),
            Route("/lora-adapters", self._adapters),
            *(Route(path, self._unsupported, methods=["POST"]) for path in llama_server.UNSUPPORTED),
            Route("/props", self._props),
            Route("/slots", self._slots),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            *(Route(path, self._answers(protocol), methods=["POST"]) for path, protocol in ANSWERS.items()),
            Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
            Route("/v1/responses/{name}", self._kept, methods=["GET", "DELETE"]),
        ]
        s = self._settings
        read = partial(body_of, limit=s.max_body)
        routes += ollama.routes(self._ready, read, s.name, s.sampling, s.template)
        if s.webui:
            routes += webui.routes(self._scheduler, s.name, read, needs_key=bool(s.api_key))
        handlers = {RequestError: on_request_error, HTTPException: on_http, Exception: on_error}
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # handlers take the subclass
        app.router.redirect_slashes = False
        guarded = Guard(app, s.api_key, {"/health", *(webui.OPEN if s.webui else ())})
        return Logged(Prefixed(guarded, s.api_prefix) if s.api_prefix else guarded, self._log, s.log_format)

    def close(self) -> None:
        """End the threads that read requests, after the requests they have, and write responses that are kept."""
        self._readers.shutdown(wait=False)
        self._responses.close()

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
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._settings.name:
            msg = f"{name[:100]!r} is not the model of this server: it is {self._settings.name!r}"
            raise RequestError(404, msg, param="model", code="model_not_found")
        return JSONResponse(self._about())

    def _about(self) -> dict[str, Any]:
        model = {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "kvflash"}
        if kv := self._scheduler.kv:
            model["context_length"] = kv.options.n_ctx
        return model

    async def _adapters(self, _request: Request) -> Response:
        return JSONResponse([])  # there are none

    async def _unsupported(self, request: Request) -> Response:
        raise RequestError(501, llama_server.UNSUPPORTED[request.url.path], code="not_implemented")

    async def _apply_template(self, request: Request) -> Response:
        return await self._from_vocabulary(request, self._prompts.apply_template)

    async def _props(self, _request: Request) -> Response:
        s, kv = self._settings, self._ready()
        return JSONResponse(llama_server.props(kv, s.name, s.sampling, s.template, self._prompts.caps(kv)))

    async def _slots(self, _request: Request) -> Response:
        return JSONResponse(llama_server.slots(self._ready(), self._scheduler.busy))

    def _ready(self) -> KVFlash:
        """Return the engine. Raises RequestError."""
        if self._scheduler.phase != Phase.READY or self._scheduler.kv is None:
            raise _not_ready(self._scheduler.phase)
        return self._scheduler.kv

    async def _tokenize(self, request: Request) -> Response:
        return await self._from_vocabulary(request, llama_server.tokenize)

    async def _detokenize(self, request: Request) -> Response:
        return await self._from_vocabulary(request, llama_server.detokenize)

    async def _from_vocabulary(
        self, request: Request, answer: Callable[[KVFlash, dict[str, Any]], dict[str, Any]]
    ) -> Response:
        """Answer from the model's vocabulary or template, in a reader's thread."""

        def found() -> dict[str, Any]:
            try:
                return answer(kv, parse_json(body))
            except KVFlashError as err:
                raise invalid(str(err)) from None

        async with self._admitted(request) as (kv, body):
            res = await asyncio.get_running_loop().run_in_executor(self._readers, found)
        self._scheduler.leave()
        return JSONResponse(res)

    #
    # answers
    #

    def _answers(self, protocol: AnswerProtocol) -> Handler:
        """Return the handler for requests of a protocol."""

        async def handle(request: Request) -> Response:
            try:
                async with self._admitted(request) as (kv, body):
                    found = await self._prepared(kv, body, protocol)
                    exchange = Exchange(self._scheduler)
                    job = self._job(found, exchange)
                    reply = protocol.reply(self._settings.name, found)
            except Answered as known:
                return JSONResponse(known.body)
            except RequestError as err:
                self._scheduler.metrics.request("invalid" if err.status < 429 else "rejected")  # noqa: PLR2004
                raise
            headers = self._warned(found.warnings)
            entry = entry_of(request.scope)
            exchange.submit(job)
            if found.parsed.stream:
                return Stream(exchange, reply, entry, headers, protocol.media)
            with exchange:
                done = await exchange.whole(reply, entry, request.receive)
            if not done:
                return Response(status_code=499)  # the client is gone
            return JSONResponse(reply.whole(), headers=headers)

        return handle

    def _warned(self, warnings: Sequence[str]) -> dict[str, str]:
        """Log each warning once. Returns the header with all of them."""
        for warning in warnings:
            if warning not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(warning)
                self._note(f"warning: {warning}")
        header = " | ".join(warnings).encode("ascii", "backslashreplace").decode()
        return {WARNING: header if len(header) <= _MAX_HEADER else f"{header[:_MAX_HEADER]}..."} if header else {}

    async def _prepared(self, kv: KVFlash, body: bytes, protocol: AnswerProtocol) -> PreparedRequest:
        """Check a body and tokenize its prompt, in a reader's thread. Raises RequestError."""
        prepare = partial(self._prompts.prepare, kv, body, protocol)
        return await asyncio.get_running_loop().run_in_executor(self._readers, prepare)

    async def _count(self, request: Request) -> Response:
        async with self._admitted(request) as (kv, body):
            n = await asyncio.get_running_loop().run_in_executor(self._readers, self._prompts.count, kv, body)
        self._scheduler.leave()
        return JSONResponse({"input_tokens": n})

    async def _kept(self, request: Request) -> Response:
        """Show or delete a response that is kept."""
        name = str(request.path_params["name"])
        found = await asyncio.get_running_loop().run_in_executor(
            self._readers, responses_response.deleted if request.method == "DELETE" else responses_response.shown,
            self._responses, name,
        )  # fmt: skip
        return JSONResponse(found)

    def _job(self, found: PreparedRequest, exchange: Exchange) -> Job:
        """Return the job of a request. Each further answer is another job after it."""
        parsed, job = found.parsed, None
        for i in reversed(range(parsed.n)):
            seed = found.sampling.seed
            sampling = found.sampling if seed is None else replace(found.sampling, seed=(seed + i) % MAX_SEED)
            limit = self._limit(parsed.max_tokens)
            job = Job(
                found.tokens, sampling, limit, found.stop, exchange.notify,
                preserved=found.rendered.preserved if found.rendered else (), pin_seconds=parsed.pin_seconds, then=job,
                begins=found.begins,
                slot=parsed.id_slot, reuse=parsed.cache_prompt,
            )  # fmt: skip
        if job is None:
            msg = "a request without an answer"
            raise AssertionError(msg)
        return job

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[tuple[KVFlash, bytes]]:
        """Take a place in the queue. Yields the engine and the body. If the block fails, the place is given up."""
        if self._scheduler.phase != Phase.READY:  # before the client sends megabytes in vain
            raise _not_ready(self._scheduler.phase)
        body = await body_of(request, self._settings.max_body)
        if self._settings.log_bodies:
            self._note(f"{request.method} {request.url.path[:100]} body: {shown_body(body)}")
        try:
            self._scheduler.admit()
        except NotReady:
            raise _not_ready(self._scheduler.phase) from None
        except QueueFull as full:
            msg = f"the queue is full: try again in {full.seconds} s"
            raise RequestError(429, msg, code="queue_full", headers={"Retry-After": str(full.seconds)}) from None
        try:
            if self._scheduler.kv is None:
                raise _not_ready(self._scheduler.phase)
            yield self._scheduler.kv, body
        except BaseException:
            self._scheduler.leave()
            raise

    def _limit(self, max_tokens: int | None) -> int:
        """Return the most tokens of an answer; -1: until the context is full."""
        most = self._settings.n_predict
        if max_tokens is None or most < 0:
            return most if max_tokens is None else max_tokens
        return min(max_tokens, most)


def _not_ready(state: Phase) -> RequestError:
    if state == Phase.FAILED:
        return RequestError(503, broken(None).message, code="unavailable")
    what = "the model is loading" if state == Phase.LOADING else "the server is stopping"
    return RequestError(503, f"{what}: try again in a few seconds", code="unavailable", headers={"Retry-After": "5"})
