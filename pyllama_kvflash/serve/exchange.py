"""The handler's end of a job: it receives the scheduler's updates, and cancels the job if the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyllama_kvflash.serve.job import Failed, Finished, Job, Reading, Text, Update
from pyllama_kvflash.serve.log import LEFT, Entry
from pyllama_kvflash.serve.protocols.protocol import Reply
from pyllama_kvflash.serve.protocols.request_error import RequestError
from pyllama_kvflash.serve.scheduler import Scheduler

_ALIVE_SECONDS = 10.0  # without data on a stream, until a keep-alive event is sent
_PROBE_SECONDS = 0.5  # the same for a client that sends no more, and may have left


class Exchange:
    """The handler's end of one request. Make it in the event loop that handles the request."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update | None] = asyncio.Queue()  # None: look at the client
        self._patience = _ALIVE_SECONDS
        self._gone = False
        self._job: Job | None = None
        self._n_left = 0  # answers that have not ended

    def notify(self, update: Update) -> None:
        """Take an update. The scheduler's thread calls this."""
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    def submit(self, job: Job) -> None:
        """Submit the job, and the jobs that follow it, to the scheduler."""
        self._job = job
        following: Job | None = job
        while following is not None:
            self._n_left, following = self._n_left + 1, following.then
        self._scheduler.submit(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the job, however the block ends: its client needs no more of it."""
        if self._job is not None:
            self._scheduler.cancel(self._job)

    async def updates(self, receive: Receive) -> AsyncGenerator[Update | None, None]:
        """Yield updates up to the last one, or until the client leaves. Yields None after some seconds without an update."""
        watch = asyncio.create_task(self._watch(receive))
        update: Update | None = None
        try:
            while self._n_left and not isinstance(update, Failed):
                try:
                    update = await asyncio.wait_for(self._updates.get(), self._patience)
                except TimeoutError:
                    update = None
                if self._gone:
                    return
                if isinstance(update, Finished):  # no answer follows an interrupted one
                    self._n_left = 0 if update.reason == "interrupted" else self._n_left - 1
                yield update
        finally:
            watch.cancel()

    def left(self, last: Update | None) -> bool:
        """Return whether the client left before its answers had ended. last: the last of the updates."""
        return self._n_left > 0 and not isinstance(last, Failed)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())[
            "type"
        ] != "http.disconnect":  # it has closed its half: only a write shows whether it left
            self._patience = _PROBE_SECONDS
            self._updates.put_nowait(None)
        self._gone = True
        self._updates.put_nowait(None)

    async def whole(self, reply: Reply, entry: Entry, receive: Receive) -> bool:
        """Pass all updates to a reply. entry: gets the answers. Returns whether the client is still there. Raises RequestError."""
        async with aclosing(self.updates(receive)) as updates:
            async for update in updates:
                if isinstance(update, Text):
                    reply.text(update)
                elif isinstance(update, Failed):
                    raise _request_error(update)
                elif isinstance(update, Finished):
                    entry.finished(update)
                    reply.end(update)
        return not self._n_left


def _request_error(failed: Failed) -> RequestError:
    return RequestError(failed.status, failed.message)


class Stream(Response):
    """A response that is sent as it grows.

    It notices at once that the client has left. Starlette's own notices only at its next write.
    """

    def __init__(
        self,
        exchange: Exchange,
        reply: Reply,
        entry: Entry,
        headers: Mapping[str, str],
        media: str,
    ) -> None:
        """entry: gets the answers. headers: added to those of a stream. media: its type."""
        more = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type=media, headers={**headers, **more})
        del self.headers["content-length"]
        self._exchange, self._reply, self._entry = exchange, reply, entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the whole stream."""
        update: Update | None = None
        with self._exchange, suppress(OSError):  # the client is gone
            async with aclosing(self._exchange.updates(receive)) as updates:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": self._reply.first(), "more_body": True})
                async for update in updates:
                    if data := self._event(update):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                if self._exchange.left(update):
                    self._entry.status = LEFT
                data = self._reply.last() if isinstance(update, Finished) else b""
                await send({"type": "http.response.body", "body": data})

    def _event(self, update: Update | None) -> bytes:
        match update:
            case Text():
                return self._reply.text(update)
            case Reading():
                return self._reply.reading(update)
            case Finished():
                self._entry.finished(update)
                return self._reply.end(update)
            case Failed():
                self._entry.error = update.message
                return self._reply.failed(_request_error(update))
        return self._reply.alive()
