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
from pyllama_kvflash.serve.protocols.reply import Reply
from pyllama_kvflash.serve.protocols.request_error import RequestError
from pyllama_kvflash.serve.scheduler import Scheduler

_ALIVE_SECONDS = 10.0  # of silence on a stream before a keep-alive event is sent
_PROBE_SECONDS = 0.5  # instead, once the client has closed its sending half and may have left


class Exchange:
    """The handler's end of one job. Create it in the event loop that handles the request."""

    def __init__(self, scheduler: Scheduler, reply: Reply, entry: Entry) -> None:
        """reply: formats the answers. entry: the request's log entry, which collects the answers' figures."""
        self._scheduler, self.reply, self.entry = scheduler, reply, entry
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update | None] = asyncio.Queue()  # None: check whether the client has left
        self._patience = _ALIVE_SECONDS
        self._gone = False
        self._job: Job | None = None
        self._n_left = 0  # answers that have not ended
        self._failed: Failed | None = None

    def notify(self, update: Update) -> None:
        """Queue an update. The scheduler's thread calls this."""
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    def submit(self, job: Job) -> None:
        """Submit the job to the scheduler."""
        self._job, self._n_left = job, 1 + len(job.others)
        self._scheduler.submit(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the job, however the block ends. A job that has ended is not affected."""
        if self._job is not None:
            self._scheduler.cancel(self._job)

    async def events(self, receive: Receive) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream until it ends or the client leaves. Some events are empty."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            yield self.reply.first()
            while self._n_left and not self._failed:
                try:
                    update = await asyncio.wait_for(self._updates.get(), self._patience)
                except TimeoutError:
                    update = None
                if self._gone:
                    self.entry.status = LEFT
                    return
                yield self._event(update)
            if not self._failed:
                yield self.reply.last()
        finally:
            watch.cancel()

    def _event(self, update: Update | None) -> bytes:
        match update:
            case Text():
                return self.reply.text(update)
            case Reading():
                return self.reply.reading(update)
            case Finished():  # no answer follows an interrupted one
                self._n_left = 0 if update.reason == "interrupted" else self._n_left - 1
                self.entry.finished(update)
                return self.reply.end(update)
            case Failed():
                self._failed, self.entry.error = update, update.message
                return self.reply.failed(RequestError(update.status, update.message))
        return self.reply.alive()

    async def whole(self, receive: Receive) -> bool:
        """Wait for all answers. Returns False if the client left first. Raises RequestError if the request failed."""
        with self:
            async with aclosing(self.events(receive)) as events:
                async for _ in events:
                    pass
        if self._failed:
            raise RequestError(self._failed.status, self._failed.message)
        return not self._n_left

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            # the client has closed its sending half: only a write can show whether it has left
            self._patience = _PROBE_SECONDS
            self._updates.put_nowait(None)
        self._gone = True
        self._updates.put_nowait(None)


class Stream(Response):
    """A response that is sent as it grows.

    Unlike Starlette's StreamingResponse, it notices at once when the client leaves, not only at its next write.
    """

    def __init__(self, exchange: Exchange, headers: Mapping[str, str], media: str) -> None:
        """headers: extra response headers. media: the media type."""
        more = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type=media, headers={**headers, **more})
        del self.headers["content-length"]
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the whole stream."""
        with self._exchange, suppress(OSError):  # the client is gone
            async with aclosing(self._exchange.events(receive)) as events:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in events:
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
