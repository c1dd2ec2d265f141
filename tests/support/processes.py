"""`kvflash serve` as a process of its own, for tests and benches."""

import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.commands import SCRIPT

_READY_SECONDS = 300  # within which a server must be ready


class ServerProcess:
    """A server that is ready. url: without /v1. began: the lines of its log until then. said: those since; all of them once
    ended() has returned.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, began: list[str]) -> None:
        self.process, self.url, self.began = process, url, began
        self.said: list[str] = []
        # a pipe that nobody reads would fill up and stop the server
        self._reader = threading.Thread(target=self.said.extend, args=(process.stderr,), daemon=True)
        self._reader.start()

    def ended(self, seconds: float = 30) -> int:
        """Wait for its end, and return its exit code."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code


@contextmanager
def server_process(
    *args: str | Path, before: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server on a port of its own; SIGTERM when the block is left. before: a command that runs it. env: all of its environment.

    Raises RuntimeError if it does not become ready.
    """
    command = [*before, str(SCRIPT), "serve", *map(str, args), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        server: ServerProcess | None = None
        late = threading.Timer(_READY_SECONDS, process.kill)  # ends the reading of its lines
        late.start()
        try:
            lines = []
            for line in process.stderr or ():
                lines.append(line)
                if line == "kvflash: ready\n":
                    break
            found = re.search(r"listening on (http://\S+)/v1", "".join(lines))
            if found is None:
                raise RuntimeError("".join(lines))
            late.cancel()
            server = ServerProcess(process, found[1], lines)
            yield server
        finally:
            late.cancel()
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            finally:
                if server is not None:
                    server.ended()  # before its pipe is closed
