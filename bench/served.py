"""A server that a script of this folder starts and asks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.processes import ServerProcess, server_process


class Served:
    """A server process, and requests to it."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.http = httpx.Client(base_url=process.url, timeout=None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the server answers. An error ends the script."""
        res = self.http.post(path, json=body)
        if res.is_error:
            sys.exit(f"the server answers {res.status_code}: {res.text}")
        return dict(res.json())


@contextmanager
def serving(*args: str | Path) -> Iterator[Served]:
    """Run `kvflash serve` with these arguments."""
    with server_process(*args) as process:
        served = Served(process)
        with served.http:
            yield served
