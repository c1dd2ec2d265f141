"""An HTTP/1.1 connection: its idle timeout, half-closed clients, and bytes that are not HTTP."""

import asyncio
import json
import sys
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pyllama_kvflash.serve.protocols.request_error import RequestError

_FIRST_PROBE, _LAST_PROBE = 0.05, 1.0  # seconds between two probes of a client that may have left; the pause doubles


class Connection(H11Protocol):
    """Uvicorn's h11 protocol, which is used even if httptools is installed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        super().connection_made(transport)  # type: ignore[arg-type]  # a socket has a Transport
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        super().data_received(data)
        self._expect()

    def _expect(self) -> None:
        """Start the idle timeout if no request is in progress. Uvicorn alone would wait forever for the first request."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes a bool
        """Handle the end of the client's data. Returns whether to keep the connection: True if a complete request awaits its answer.

        A client that has closed both directions looks the same as one that waits, until something is written to it.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        cycle.keep_alive = False
        cycle.message_event.set()  # wakes receive(), so that the stream sends keep-alive events more often
        self._probe(_FIRST_PROBE)
        return True

    def _probe(self, seconds: float) -> None:
        """Write interim responses (100 Continue) until the answer begins. If the client has left, the client's system resets the connection."""
        if self.cycle.response_started or self.transport.is_closing():
            return
        if self.cycle.scope["http_version"] == "1.1":  # older clients do not know interim responses
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event) or b"")
        self.loop.call_later(seconds, self._probe, min(2 * seconds, _LAST_PROBE))

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (the exception says more)
        """Send the error object of a refused request, in answer to bytes that are not HTTP."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:  # an answer has begun
            self.transport.close()
            return
        why = sys.exc_info()[1]
        status = getattr(why, "error_status_hint", 400)
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            err = RequestError(status, "the request line and headers are too long: the limit is 16 KiB")
        else:
            err = RequestError(status, f"the request is not HTTP/1.1: {' '.join(str(why).split())[:200]}")
        data = json.dumps(err.body()).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data))), ("Connection", "close")]
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        for event in (head, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Return False: a client that offers HTTP/2 or a WebSocket gets an HTTP/1.1 answer."""
        return False
