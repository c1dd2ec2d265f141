"""RPC servers on loopback that compute on the CPU, each in a process of its own. As a program: one of them."""

import ctypes
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

from pyllama_kvflash import native
from pyllama_kvflash.errors import KVFlashError, UnsupportedError
from pyllama_kvflash.native.lib import _kvflash

HOST = "127.0.0.1"
SECONDS = 60  # after which something hangs
CPU = 0  # enum ggml_backend_dev_type


def closed_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


def accepts(endpoint: str) -> bool:
    """Whether a server listens there."""
    host, port = endpoint.split(":")
    try:
        with socket.create_connection((host, int(port))):
            return True
    except OSError:
        return False


def skip_without_rpc() -> None:
    """Skip the test if this build has no RPC backend."""
    try:
        native.add_rpc(f"{HOST}:{closed_port()}")
    except UnsupportedError as err:
        pytest.skip(str(err))
    except KVFlashError:
        pass  # there is no server, but it was looked for


class Servers:
    """Some servers, ended at the end. folder: for their logs."""

    def __init__(self, n: int, folder: Path, n_threads: int) -> None:
        self.endpoints = [f"{HOST}:{closed_port()}" for _ in range(n)]
        self.running: list[subprocess.Popen[bytes]] = []
        for i, endpoint in enumerate(self.endpoints):
            with (folder / f"{i}.log").open("wb") as log:
                command = [sys.executable, __file__, endpoint, str(n_threads)]
                self.running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        try:
            for i in range(n):
                self._wait(i, folder / f"{i}.log")
        except BaseException:
            self.__exit__()
            raise

    def _wait(self, i: int, log: Path) -> None:
        end = time.monotonic() + SECONDS
        while not accepts(self.endpoints[i]):
            assert self.running[i].poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)

    def kill(self, i: int) -> None:
        """Have one gone at once."""
        self.running[i].kill()
        self.running[i].wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for i in range(len(self.running)):
            self.kill(i)


def serve(endpoint: str, n_threads: int) -> None:
    """Serve the CPU until killed."""
    libraries = Path(_kvflash.__file__).parent

    def load(name: str) -> ctypes.CDLL:
        return ctypes.CDLL(str(next(libraries.glob(f"*{name}.[sd]*"))))

    find = load("ggml").ggml_backend_dev_by_type
    find.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(find(CPU))
    start = load("ggml-rpc").ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    start.restype = None
    start(endpoint.encode(), None, n_threads, len(devices), devices)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
