"""Warn, once per sequence, if threads wait for cores that other programs use."""

from contextlib import suppress
from pathlib import Path

from pyllama_kvflash.events import Warn
from pyllama_kvflash.native import devices
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.cores import CoreWatch

_TASKS = Path("/proc/self/task")
_LONG_S = 60.0  # seconds of work on a prompt before a warning is worthwhile


class Cores:
    """Watches the threads of a sequence's steps. Never warns with a GPU or with a single thread.

    on_cpu: whether all layers are computed on the CPU.
    """

    def __init__(self, options: Options) -> None:
        """options: from Options.resolved()."""
        self._n_threads = options.n_threads or 1
        self.on_cpu = options.on_cpu or not any(device.gpu for device in devices())
        watched = self._n_threads > 1 and self.on_cpu
        self._steps = CoreWatch() if watched else None
        self._batches = CoreWatch() if watched else None

    def after_step(self) -> list[Warn]:
        """Return a warning if one is due."""
        return self._look(self._steps) if self._steps and self._steps.due() else []

    def after_batch(self) -> list[Warn]:
        """Return a warning if one is due and the prompt takes long. Looks every time, because batches take long."""
        return self._look(self._batches, _LONG_S) if self._batches and not self._batches.over else []

    def _look(self, watch: CoreWatch, *least: float) -> list[Warn]:
        share = watch.look(thread_times(), *least)
        if share is None:
            return []
        for each in filter(None, (self._steps, self._batches)):
            each.over = True
        return [
            Warn(
                f"threads wait for a core {100 * share:.0f} % of the time, as they do beside another busy program:"
                f" `n_threads` is {self._n_threads}, and fewer would be faster"
            )
        ]


def thread_times() -> tuple[float, float] | None:
    """Return the seconds that this process's threads worked, and the seconds that they waited for a core; None if unknown."""
    worked = waited = 0
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # the thread has ended
                on_core, in_queue, *_ = (task / "schedstat").read_bytes().split()
                worked, waited = worked + int(on_core), waited + int(in_queue)
    return (worked / 1e9, waited / 1e9) if worked else None
