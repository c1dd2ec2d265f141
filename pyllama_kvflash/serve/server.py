"""The server process: its socket, its event loop, its signals."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pyllama_kvflash.errors import Interrupted, UsageError, number
from pyllama_kvflash.serve.connection import Connection
from pyllama_kvflash.serve.job import Phase
from pyllama_kvflash.serve.scheduler import Scheduler

_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 5  # time at the end to send answers that are ready
_BACKLOG = 128
_QUIET_SECONDS = 60.0  # between two warnings that no connection can be accepted
_MOST_FILES = 10_240  # the most that macOS grants, whatever its hard limit says

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers.

    Uvicorn's handler would silently refuse new connections while running answers finish.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError.

    Call it before loading the model, so that an address in use is reported early.
    """
    res: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        res = socket.socket(family, kind, proto)
        res.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        res.bind(address)
        res.listen(_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as err:  # a bad host name raises UnicodeError
        if res is not None:
            res.close()
        what = getattr(err, "strerror", None) or err
        msg = f"cannot listen on {host}:{port}: {what}; choose another --host or --port"
        raise UsageError(msg) from None
    return res


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit: each connection takes a file, and the soft limit is often 1,024."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource  # noqa: PLC0415

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for most in (hard, _MOST_FILES):
            if soft == resource.RLIM_INFINITY or 0 <= most <= soft:
                return
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                return


def config(app: ASGIApp, *, keep_alive: float, close: int = _CLOSE_SECONDS) -> uvicorn.Config:
    """Return uvicorn's settings.

    keep_alive: seconds until a connection without a request is closed. close: seconds to send the last answers when the server ends.
    """
    return uvicorn.Config(
        app,
        http=Connection,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # uvicorn works with any number
        timeout_graceful_shutdown=close,
    )


def run(
    app: ASGIApp,
    scheduler: Scheduler,
    listening: socket.socket,
    *,
    grace: float,
    keep_alive: float,
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Serve until a signal comes or the scheduler fails.

    grace: seconds for running answers to finish after a signal. keep_alive: as for config(). note: called with lines about the
    server's state. warn: called with warnings. Raises the error that ended the scheduler, such as a failure to load the model.
    """

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(_Exceptions(warn))
        with _signals() as asked:
            scheduler.start()
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            await _until_signal(scheduler, asked, note)
            await _wind_up(scheduler, grace, note)
            server.should_exit = True
            await serving

    raise_file_limit()
    server = _Uvicorn(config(app, keep_alive=keep_alive))
    asyncio.run(serve())
    if scheduler.error is not None:
        raise scheduler.error


class _Exceptions:
    """The event loop's exception handler. It warns at most once a minute that no connection can be accepted.

    asyncio tries to accept again each second, and may report an exception for each place in the backlog.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._quiet_until = warn, 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        err = context.get("exception")
        if not isinstance(err, OSError) or "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + _QUIET_SECONDS
            fix = (
                "raise the limit (ulimit -n, LimitNOFILE= of systemd), or lower --keep-alive"
                if err.errno == errno.EMFILE
                else "the system is short of resources: close other programs"
            )
            self._warn(f"new connections have to wait: {err.strerror or err}; {fix}")


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Yield an event that the first signal sets; the second signal ends the process."""
    asked = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            os._exit(Interrupted.exit_code)  # a batch may be one long native call, which cannot be interrupted
        asked.set()

    previous = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def _until_signal(scheduler: Scheduler, asked: threading.Event, note: Callable[[str], None]) -> None:
    """Wait for a signal, or for the scheduler's end. Calls `note` when the model is loaded."""
    loading = True
    while not asked.is_set() and scheduler.phase in {Phase.LOADING, Phase.READY}:
        if loading and scheduler.phase == Phase.READY:
            loading = False
            note("ready")
        await asyncio.sleep(_POLL_SECONDS)


async def _wind_up(scheduler: Scheduler, grace: float, note: Callable[[str], None]) -> None:
    """Let answers finish for `grace` seconds, then end them as they are."""
    was_loading = scheduler.phase == Phase.LOADING
    scheduler.stop()
    if n := scheduler.n_admitted:
        note(
            f"stopping: {n} request{'s' if n > 1 else ''} may take {number(grace)} s more; a second signal ends at once"
        )
    deadline = asyncio.get_running_loop().time() + (0 if was_loading else grace)
    while scheduler.n_admitted and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 (of another thread)
        await asyncio.sleep(_POLL_SECONDS)
    scheduler.end()
    await asyncio.to_thread(scheduler.join)
