"""The server process: its socket, its event loop, its signals."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from pyllama_kvflash.errors import Interrupted, UsageError, number
from pyllama_kvflash.serve.scheduler import Phase, Scheduler

_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 5  # for answers that are ready to be sent
_BACKLOG = 128

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers.

    Its own handler would silently refuse new connections while answers are finished.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Made before the model is loaded, it detects an address in use early. Raises UsageError."""
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


def run(
    app: ASGIApp, scheduler: Scheduler, listening: socket.socket, *, grace: float, note: Callable[[str], None]
) -> None:
    """Serve until a signal comes or the scheduler fails. grace: seconds for running answers to finish after a signal.

    Raises the scheduler's error, such as one of loading the model.
    """
    asyncio.run(_run(app, scheduler, listening, grace, note))
    if scheduler.error is not None:
        raise scheduler.error


async def _run(
    app: ASGIApp, scheduler: Scheduler, listening: socket.socket, grace: float, note: Callable[[str], None]
) -> None:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Uvicorn(config)
    with _signals() as asked:
        scheduler.start()
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await _until_signal(scheduler, asked, note)
        await _wind_up(scheduler, grace, note)
        server.should_exit = True
        await serving


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
    """Wait for a signal, or for the scheduler's end. Notes when the model is loaded."""
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
