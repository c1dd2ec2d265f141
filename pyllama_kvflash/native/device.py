"""The devices that the library sees, and their memory."""

from dataclasses import dataclass
from pathlib import Path

from pyllama_kvflash.errors import NativeError, encoded
from pyllama_kvflash.native.lib import check, ffi, init, lib


@dataclass(frozen=True, slots=True)
class Device:
    """A backend device. free and total are in bytes; for the CPU, of host memory."""

    name: str
    description: str
    gpu: bool
    free: int
    total: int


def devices() -> list[Device]:
    """Return all devices in llama.cpp's order: GPUs, the CPU, then those of RPC servers."""
    init()
    res = []
    free, total = ffi.new("size_t *"), ffi.new("size_t *")
    for i in range(lib.ggml_backend_dev_count()):
        dev = lib.ggml_backend_dev_get(i)
        lib.ggml_backend_dev_memory(dev, free, total)
        gpu = lib.ggml_backend_dev_type(dev) != lib.GGML_BACKEND_DEVICE_TYPE_CPU
        n_free = int(free[0]) if gpu else _host_available(int(free[0]))
        name = ffi.string(lib.ggml_backend_dev_name(dev)).decode()
        res.append(Device(name, ffi.string(lib.ggml_backend_dev_description(dev)).decode(), gpu, n_free, int(total[0])))
    return res


def _host_available(fallback: int) -> int:
    """Return the bytes that the kernel can give without swapping: ggml reports unused pages only, without the page
    cache.
    """
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return fallback


_servers: set[str] = set()  # adding a server again would add its devices again


def add_rpc(endpoint: str) -> None:
    """Add the devices of an RPC server (host:port) to this process. Raises NativeError and UnsupportedError."""
    init()
    if endpoint in _servers:
        return
    try:
        check(lib.kvf_add_rpc(encoded(endpoint, "`rpc`")))
    except NativeError:
        msg = f"the RPC server {endpoint} (`rpc`) does not answer: start llama.cpp's rpc-server there, or leave it out"
        raise NativeError(msg) from None
    _servers.add(endpoint)
