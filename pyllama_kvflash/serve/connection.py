"""One connection of HTTP/1.1: bytes that are not HTTP, and clients that close their half of it."""

import asyncio
import json
import sys
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pyllama_kvflash.serve.protocols.request_error import RequestError

_FIRST_PROBE, _LAST_PROBE = 0.05, 1.0  # seconds until a client that may have left is written to again


class Connection(H11Protocol):
    """Uvicorn's protocol by h11, whether httptools is installed or not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        super().connection_made(transport)  # type: ignore[arg-type]  # of a socket it is a Transport
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Take the next bytes."""
        super().data_received(data)
        self._expect()

    def _expect(self) -> None:
        """Close the connection if nothing of the next request comes in time. Uvicorn waits for the first one for ever."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes a bool
        """Return whether to keep the connection: the client has sent its whole request, and may still wait for the answer.

        A client that has closed both halves looks the same until something is written to it.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        cycle.keep_alive = False
        cycle.message_event.set()  # receive() returns once more, so that a stream writes more often
        self._probe(_FIRST_PROBE)
        return True

    def _probe(self, seconds: float) -> None:
        """Write an interim response, again and again until the answer begins. It fails once the client's system has refused one."""
        if self.cycle.response_started or self.transport.is_closing():
            return
        if self.cycle.scope["http_version"] == "1.1":  # older clients do not know interim responses
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event) or b"")
        self.loop.call_later(seconds, self._probe, min(2 * seconds, _LAST_PROBE))

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (it does not say why)
        """Answer bytes that are not HTTP, as other requests that are refused."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:  # an answer was begun
            self.transport.close()
            return
        why = sys.exc_info()[1]
        status = getattr(why, "error_status_hint", 400)
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            err = RequestError(status, "the request's line and headers are too long: the limit is 16 KiB")
        else:
            err = RequestError(status, f"the request is not HTTP/1.1: {' '.join(str(why).split())[:200]}")
        data = json.dumps(err.body()).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data))), ("Connection", "close")]
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        for event in (head, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Return False: a client that offers HTTP/2 or a WebSocket is answered by HTTP/1.1."""
        return False
