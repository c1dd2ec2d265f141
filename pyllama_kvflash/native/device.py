"""The devices that the library sees, and their memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pyllama_kvflash.errors import NativeError, encoded
from pyllama_kvflash.native.lib import check, ffi, init, lib


@dataclass(frozen=True, slots=True)
class Device:
    """A backend device. free, total: its memory in bytes; for the CPU, the host's."""

    name: str
    description: str
    gpu: bool
    free: int
    total: int

    @property
    def remote(self) -> bool:
        """Whether the device belongs to an RPC server."""
        return self.name.startswith("RPC")


_PLANNED: list[Device] = []  # the result of devices() within pretending()


@contextmanager
def pretending(gpu: int, ram: int) -> Iterator[None]:
    """Make devices() report a GPU and RAM of these sizes in bytes, to plan for another machine. With gpu 0, there is no GPU.

    Only models loaded with no_alloc may be used meanwhile. If this machine has no GPU, the CPU's weights count as the planned GPU's,
    except for those that llama.cpp keeps on the host (Model.weights()).
    """
    before = list(_PLANNED)  # calls may be nested
    _PLANNED.clear()
    here = devices()
    if gpu and not any(device.gpu for device in here):
        here = [Device("GPU", "a GPU", gpu=True, free=gpu, total=gpu), *here]
    first = next((i for i, device in enumerate(here) if device.gpu), None)
    for i, device in enumerate(here):
        size = gpu if i == first else 0 if device.gpu else ram
        _PLANNED.append(replace(device, free=size, total=size))
    try:
        yield
    finally:
        _PLANNED[:] = before


def planned_host() -> int | None:
    """Return the index of the planned machine's host, if that machine has a GPU and this one has none; else None."""
    if len(_PLANNED) <= lib.ggml_backend_dev_count():
        return None
    return next(i for i, device in enumerate(_PLANNED) if not device.gpu)


def devices() -> list[Device]:
    """Return all devices in llama.cpp's order: GPUs, the CPU, then devices of RPC servers.

    Raises DeviceLostError.
    """
    if _PLANNED:
        return list(_PLANNED)
    init()
    res = []
    free, total = ffi.new("size_t *"), ffi.new("size_t *")
    for i in range(lib.ggml_backend_dev_count()):
        dev = lib.ggml_backend_dev_get(i)
        check(lib.kvf_device_memory(i, free, total))
        gpu = _is_gpu(i)
        n_free = int(free[0]) if gpu else _host_available(int(free[0]))
        name = ffi.string(lib.ggml_backend_dev_name(dev)).decode()
        res.append(Device(name, ffi.string(lib.ggml_backend_dev_description(dev)).decode(), gpu, n_free, int(total[0])))
    return res


def gpus() -> set[int]:
    """Return the indices of GPUs in devices(). Their memory is not queried, because a server may be busy, or gone."""
    return {i for i in range(lib.ggml_backend_dev_count()) if _is_gpu(i)}


def _is_gpu(i: int) -> bool:
    kind = lib.ggml_backend_dev_type(lib.ggml_backend_dev_get(i))
    return kind not in {lib.GGML_BACKEND_DEVICE_TYPE_CPU, lib.GGML_BACKEND_DEVICE_TYPE_ACCEL}  # the latter: BLAS


def _host_available(fallback: int) -> int:
    """Return the bytes that the kernel can provide without swapping. ggml reports only unused pages, without the page cache."""
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
        msg = (
            f"the RPC server {endpoint} (`rpc`) does not answer: start llama.cpp's rpc-server there, which serves one client"
            " at a time, or leave it out"
        )
        raise NativeError(msg) from None
    _servers.add(endpoint)
