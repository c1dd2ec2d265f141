"""What an engine holds in device memory, and what all programs do."""

from dataclasses import dataclass

from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.native import devices


@dataclass(frozen=True, slots=True)
class DeviceKV:
    """Device bytes of full-attention KV: the pool or the full cache, codes with what attending to them takes, the panes."""

    pool: int
    codes: int
    panes: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.pool + self.codes + self.panes


def device_kv(kv: KVFlash) -> DeviceKV:
    """Return what the engine holds now."""
    stats = kv.stats()
    return DeviceKV(stats.kv_device_bytes, stats.coarse_bytes, stats.pane_bytes)


def device_used() -> int | None:
    """Return the bytes in use in all GPUs' memory, whoever uses them, or None without a GPU."""
    gpus = [d for d in devices() if d.gpu]
    return sum(d.total - d.free for d in gpus) if gpus else None
