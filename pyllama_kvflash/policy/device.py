"""The bytes of an engine on a device: one record, for planning, loading and every report of memory."""

from dataclasses import dataclass, replace
from typing import Any, Self

RESERVE = 512 << 20
"""Bytes left to the computation and to other programs."""

PURPOSES = {
    "weights": "weights",
    "kv": "KV",
    "coarse": "codes",
    "states": "states",
    "panes": "layers of an exact pass",
    "buffers": "buffers",
    "drafter": "drafter",
    "records": "records",
    "checkpoints": "checkpoints",
    "program": "program",
}
"""The fields of DeviceBytes that add up, each with its name for users."""


def mib(n: int) -> str:
    """Return a number of bytes in whole MiB, as text for notes."""
    return f"{n / 2**20:.0f} MiB"


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A device, and the bytes of an engine there, with a full context.

    remote: whether the device is on an RPC server, so that copies go through a network.
    free: free bytes before the bytes below are allocated.
    token_bytes: KV of one token in what is being sized (the pool, the full cache or the panes).
    kv: the full-attention cache: the pool, or the full cache.
    coarse: codes of all positions, with a GPU's buffers for attending to them.
    states: sliding windows and recurrent states.
    panes: layers of an exact pass.
    buffers: compute buffers as allocated; only a part of the host's buffers is touched.
    drafter: all memory of a draft model.
    records: records of chunks, in host memory. checkpoints: copies of states, in host memory.
    program: Python and its libraries, or the GPU's driver.
    """

    name: str
    gpu: bool
    remote: bool = False
    free: int = 0
    token_bytes: int = 0
    weights: int = 0
    kv: int = 0
    coarse: int = 0
    states: int = 0
    panes: int = 0
    buffers: int = 0
    drafter: int = 0
    records: int = 0
    checkpoints: int = 0
    program: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by purpose, without zeros."""
        return {name: size for name in PURPOSES if (size := getattr(self, name))}

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the bytes of all purposes, and their sum, as plain JSON values."""
        its = {name: getattr(self, name) for name in PURPOSES}
        return {"name": self.name, "gpu": self.gpu, **its, "total": self.total}

    @property
    def room(self) -> int:
        """Free bytes that remain beside all parts except codes."""
        return max(0, self.free - self.total + self.coarse)

    @property
    def half(self) -> int:
        """Half of the room that remains after codes and the reserve."""
        return max(0, self.room - self.coarse - RESERVE) // 2

    @property
    def tokens(self) -> int:
        """Tokens that fit into `half`."""
        return self.half // self.token_bytes

    def __add__(self, other: "DeviceBytes") -> Self:
        """Return this device with the other's bytes added, purpose by purpose."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in PURPOSES})
