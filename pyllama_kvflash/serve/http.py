"""HTTP around the handlers: bodies, error responses, and access."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette import responses
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pyllama_kvflash.serve.log import entry_of
from pyllama_kvflash.serve.protocols import anthropic_response, ollama_response
from pyllama_kvflash.serve.protocols.request_error import RequestError
from pyllama_kvflash.text import to_json

Read = Callable[[Request], Awaitable[bytes]]
"""A function that returns a request's body. Raises RequestError."""


class JSONResponse(responses.JSONResponse):
    """A JSON response, with null for NaN and infinities, which JSON lacks."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return to_json(content, ensure_ascii=False, separators=(",", ":")).encode()


_BODY_SECONDS = 60.0  # time limit for receiving a body
_BROWSER = {"origin", "referer", "sec-fetch-site"}
"""Headers of browsers: each browser sends at least one of them with a POST on behalf of a foreign page."""


async def body_of(request: Request, limit: int) -> bytes:
    """Return a request's body. limit: most bytes. Raises RequestError.

    A browser must declare the body as JSON: it sends JSON for a foreign page only after asking the server (CORS preflight).
    Other clients, such as curl -d, need not declare it.
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    if not declared and _BROWSER.intersection(request.headers.keys()):
        msg = "the body is not declared as JSON: send the header Content-Type: application/json"
        raise RequestError(415, msg, code="unsupported_media_type")
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        msg = f"Content-Encoding {encoding[:100]!r} is not supported: send the body as it is"
        raise RequestError(415, msg, code="unsupported_media_type", headers={"Accept-Encoding": "identity"})
    size = request.headers.get("content-length", "0")
    if size.isdecimal() and int(size) > limit:
        raise _too_large(limit)
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise RequestError(
            408, f"the body did not arrive within {_BODY_SECONDS:.0f} s: send it again", code="timeout"
        ) from None
    except ClientDisconnect:
        raise RequestError(400, "the client left before the end of the body") from None
    return bytes(data)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        413, f"the body is larger than {limit:,} bytes: shorten it, or raise --max-body", code="body_too_large"
    )


#
# error responses
#


def _response(scope: Scope, err: RequestError) -> Response:
    """Return the response for an error, in the form of the path's protocol, and add the error to the log entry."""
    path = scope["path"]
    entry_of(scope).error = err.message
    if path.startswith("/v1/messages"):
        body = anthropic_response.error_body(err)
    elif path.startswith("/api/"):
        body = ollama_response.error_body(err)
    else:
        body = err.body()
    # ASCII, because a message may quote a lone surrogate
    return Response(to_json(body), err.status, err.headers, "application/json")


async def on_request_error(request: Request, err: RequestError) -> Response:
    """Answer a request that is refused."""
    return _response(request.scope, err)


async def on_http(request: Request, err: HTTPException) -> Response:
    """Answer a request for an unknown path or method."""
    path = request.url.path
    if err.status_code == 404:  # noqa: PLR2004
        return _response(request.scope, _not_a_path(f"{path[:200]} is not a path of this server"))
    msg = f"{path[:200]} does not take {request.method}: {err.detail}"
    return _response(request.scope, RequestError(err.status_code, msg, code="method_not_allowed", headers=err.headers))


async def on_error(request: Request, _err: Exception) -> Response:
    """Answer a request that failed because of a bug."""
    return _response(request.scope, RequestError(500, "an error in the server: its log has the details"))


#
# paths
#


class Prefixed:
    """An ASGI application whose paths all begin with a prefix, such as "/llm"."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as if its path had no prefix."""
        app, path = self._app, scope["path"]
        if path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path.removeprefix(self._prefix)}
        elif path == self._prefix:
            app = RedirectResponse(f"{path}/")  # the page's links are relative to it
        else:
            app = _response(
                scope, _not_a_path(f"{path[:200]} is not a path of this server: its paths begin with {self._prefix}/")
            )
        await app(scope, receive, send)


def _not_a_path(msg: str) -> RequestError:
    return RequestError(404, msg, code="not_found")


#
# access
#


class Guard:
    """An ASGI application that refuses requests without the API key, except those to the paths in `free`.

    If the server has no key, it refuses requests that reach this machine under a foreign host name.
    """

    def __init__(self, app: ASGIApp, key: str | None, free: Collection[str]) -> None:
        self._app, self._free = app, free
        self._digest = hashlib.sha256(os.fsencode(key)).digest() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        err = None if scope["type"] != "http" or scope["path"] in self._free else self._refused(scope)
        app = self._app if err is None else _response(scope, err)
        await app(scope, receive, send)

    def _refused(self, scope: Scope) -> RequestError | None:
        headers = dict(reversed(scope["headers"]))  # the first header of each name
        if self._digest is None:
            return _foreign_host(headers.get(b"host", b"").decode("latin-1"), scope.get("server"))
        bearer = headers.get(b"authorization", b"")
        given = bearer[7:] if bearer[:7] == b"Bearer " else headers.get(b"x-api-key", b"")
        if hmac.compare_digest(hashlib.sha256(given).digest(), self._digest):  # digests hide even the key's length
            return None
        msg = "no valid API key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
        return RequestError(401, msg, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _foreign_host(host: str, server: tuple[str, int | None] | None) -> RequestError | None:
    """Return the error for a request to a loopback address under a foreign host name; None: the request may pass.

    A foreign page may let its host name resolve to 127.0.0.1 (DNS rebinding). The browser then takes this server for the
    page's own, and lets the page read this server's answers. An IP address or localhost in the Host header rules that attack out.
    """
    name = (host.rpartition(":")[0] if re.search(r":\d*$", host) else host).strip("[]").lower().rstrip(".")
    if not server or not _is_loopback(server[0]) or not name or name == "localhost" or name.endswith(".localhost"):
        return None
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return None
    msg = f"the Host header names {name[:100]!r}, not this machine: use localhost, or start the server with --api-key"
    return RequestError(403, msg, code="unknown_host")


def _is_loopback(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback  # ::ffff:127.0.0.1, where the server listens on ::
