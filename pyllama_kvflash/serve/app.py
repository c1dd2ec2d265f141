"""The HTTP application: routes, handlers, and how answers are sent."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.serve import llama_server, ollama, webui
from pyllama_kvflash.serve.exchange import Exchange, Stream
from pyllama_kvflash.serve.http import Guard, JSONResponse, Prefixed, body_of, on_error, on_http, on_request_error
from pyllama_kvflash.serve.job import Job, NotReady, Phase
from pyllama_kvflash.serve.log import LEFT, Logged, entry_of, shown_body
from pyllama_kvflash.serve.prompt import PromptBuilder
from pyllama_kvflash.serve.protocols import responses_response
from pyllama_kvflash.serve.protocols.answer_fields import MAX_SEED
from pyllama_kvflash.serve.protocols.fields import parse_json
from pyllama_kvflash.serve.protocols.protocol import PreparedRequest
from pyllama_kvflash.serve.protocols.reply import AnswerProtocol
from pyllama_kvflash.serve.protocols.request_error import Answered, RequestError, invalid
from pyllama_kvflash.serve.protocols.responses_store import ResponseStore
from pyllama_kvflash.serve.protocols.table import ANSWERS
from pyllama_kvflash.serve.scheduler import Scheduler
from pyllama_kvflash.serve.settings import Settings

WARNING = "KVFlash-Warning"
"""The response header with a request's warnings: unknown fields, ignored parts, and schema constraints that are not enforced."""

_MAX_HEADER = 2_000  # characters of the header WARNING
_MAX_LOGGED = 1_000  # distinct warnings that are logged
_READERS = 2  # threads that tokenize requests: each takes some 75 bytes of memory per character

T = TypeVar("T")
Note = Callable[[str], None]
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """The HTTP handlers.

    note: called with each warning, and with the bodies of requests if they are logged.
    log: called with one line about each request; None: `note` gets the lines.
    """

    def __init__(
        self, scheduler: Scheduler, settings: Settings, note: Note = lambda _: None, log: Note | None = None
    ) -> None:
        self._scheduler, self._settings, self._note, self._log = scheduler, settings, note, log or note
        self._responses = ResponseStore(settings.responses)
        self._prompts = PromptBuilder(settings, self._responses)
        self._readers = ThreadPoolExecutor(_READERS, "kvflash-read")
        self._created = int(time.time())
        self._logged: set[str] = set()

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        s, refused = self._settings, {**llama_server.REFUSED, **ollama.REFUSED}
        read = partial(body_of, limit=s.max_body)
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/lora-adapters", self._adapters),
            Route("/props", self._props),
            Route("/slots", self._slots),
            Route("/tokenize", self._asks(llama_server.tokenize), methods=["POST"]),
            Route("/detokenize", self._asks(llama_server.detokenize), methods=["POST"]),
            Route("/apply-template", self._asks(self._prompts.apply_template), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._asks(self._prompts.count), methods=["POST"]),
            *(Route(path, self._answers(protocol), methods=["POST"]) for path, protocol in ANSWERS.items()),
            *(Route(path, self._refuses(why), methods=[method]) for path, (method, why) in refused.items()),
            Route("/v1/responses/{name}", self._kept, methods=["GET", "DELETE"]),
            *ollama.routes(self._ready, read, s),
            *(webui.routes(self._scheduler, s, read) if s.webui else ()),
        ]
        handlers = {RequestError: on_request_error, HTTPException: on_http, Exception: on_error}
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # handlers take the subclass
        app.router.redirect_slashes = False
        guarded = Guard(app, s.api_key, {"/health", *(webui.OPEN if s.webui else ())})
        return Logged(Prefixed(guarded, s.api_prefix) if s.api_prefix else guarded, self._log, s.log_format)

    def close(self) -> None:
        """Stop the reader threads after their current requests, and wait until stored responses are written."""
        self._readers.shutdown(wait=False)
        self._responses.close()

    #
    # about the server
    #

    async def _health(self, _request: Request) -> Response:
        state = self._scheduler.phase
        if state != Phase.READY:
            return JSONResponse({"status": state.value}, 503)
        n, n_busy = self._scheduler.metrics.gauges["sequences"], self._scheduler.n_busy
        waiting = max(0, self._scheduler.n_admitted - n_busy)
        return JSONResponse({"status": "ok", "sequences": n, "busy": n_busy, "idle": n - n_busy, "queue": waiting})

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
        return JSONResponse([])  # no LoRA adapters are loaded

    async def _props(self, _request: Request) -> Response:
        kv = self._ready()
        return JSONResponse(llama_server.props(kv, self._settings, self._prompts.caps(kv)))

    async def _slots(self, _request: Request) -> Response:
        return JSONResponse(llama_server.slots(self._ready(), self._scheduler.busy))

    def _ready(self) -> KVFlash:
        """Return the engine. Raises NotReady."""
        if self._scheduler.phase != Phase.READY or self._scheduler.kv is None:
            raise NotReady(self._scheduler.phase)
        return self._scheduler.kv

    def _refuses(self, why: str) -> Handler:
        """Return a handler that refuses requests with 501. why: the message."""

        async def handle(_request: Request) -> Response:
            raise RequestError(501, why, code="not_implemented")

        return handle

    def _asks(self, answer: Callable[[KVFlash, dict[str, Any]], dict[str, Any]]) -> Handler:
        """Return a handler for requests that need only the vocabulary or the template.

        answer: called in a reader thread, with the engine and the body's JSON object. Returns the response's object.
        """

        def found(kv: KVFlash, body: bytes) -> dict[str, Any]:
            try:
                return answer(kv, parse_json(body))
            except KVFlashError as err:
                raise invalid(str(err)) from None

        async def handle(request: Request) -> Response:
            async with self._admitted(request) as (kv, body):
                res = await self._read(found, kv, body)
            self._scheduler.leave()
            return JSONResponse(res)

        return handle

    #
    # answers
    #

    def _answers(self, protocol: AnswerProtocol) -> Handler:
        """Return the handler for requests that ask for an answer. protocol: the requests' protocol."""

        async def handle(request: Request) -> Response:
            try:
                async with self._admitted(request) as (kv, body):
                    found = await self._read(self._prompts.prepare, kv, body, protocol)
                    reply = protocol.reply(self._settings.name, found)
                    exchange = Exchange(self._scheduler, reply, entry_of(request.scope))
                    job = self._job(found, exchange)
            except Answered as known:
                return JSONResponse(known.body)
            except RequestError as err:
                self._scheduler.metrics.request("invalid" if err.status < 429 else "rejected")  # noqa: PLR2004
                raise
            headers = self._warned(found.warnings)
            exchange.submit(job)
            if found.parsed.stream:
                return Stream(exchange, headers, protocol.media)
            if not await exchange.whole(request.receive):
                return Response(status_code=LEFT)
            return JSONResponse(reply.whole(), headers=headers)

        return handle

    def _warned(self, warnings: Sequence[str]) -> dict[str, str]:
        """Log each warning unless it was logged before. Returns the response header with all warnings; {} if there are none."""
        for warning in warnings:
            if warning not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(warning)
                self._note(f"warning: {warning}")
        header = " | ".join(warnings).encode("ascii", "backslashreplace").decode()
        return {WARNING: header if len(header) <= _MAX_HEADER else f"{header[:_MAX_HEADER]}..."} if header else {}

    async def _read(self, call: Callable[..., T], *args: Any) -> T:
        """Return the result of call(*args), run in a reader thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, call, *args)

    async def _kept(self, request: Request) -> Response:
        """Return or delete a stored response."""
        answer = responses_response.deleted if request.method == "DELETE" else responses_response.shown
        return JSONResponse(await self._read(answer, self._responses, str(request.path_params["name"])))

    def _job(self, found: PreparedRequest, exchange: Exchange) -> Job:
        """Return the job for a request. If the request has a seed, each further answer gets the next seed."""
        parsed, first = found.parsed, found.sampling
        seeds = [None if first.seed is None else (first.seed + i) % MAX_SEED for i in range(1, parsed.n)]
        return Job(
            found.tokens,
            first,
            self._limit(parsed.max_tokens),
            found.stop,
            exchange.notify,
            preserved=found.rendered.preserved if found.rendered else (),
            pin_seconds=parsed.pin_seconds,
            others=[replace(first, seed=seed) for seed in seeds],
            begins=found.begins,
            slot=parsed.id_slot,
            reuse=parsed.cache_prompt,
        )

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[tuple[KVFlash, bytes]]:
        """Take a place in the queue, and yield the engine and the body. If the block raises, the place is given up."""
        kv = self._ready()  # refuse before the client sends megabytes for nothing
        body = await body_of(request, self._settings.max_body)
        if self._settings.log_bodies:
            self._note(f"{request.method} {request.url.path[:100]} body: {shown_body(body)}")
        self._scheduler.admit()
        try:
            yield kv, body
        except BaseException:
            self._scheduler.leave()
            raise

    def _limit(self, max_tokens: int | None) -> int:
        """Return the limit for an answer's tokens; -1: until the context is full. max_tokens: the request's limit, if any."""
        most = self._settings.n_predict
        if max_tokens is None or most < 0:
            return most if max_tokens is None else max_tokens
        return min(max_tokens, most)
