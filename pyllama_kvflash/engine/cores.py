"""Warn, once for each sequence, of threads that wait for cores which other programs use."""

from contextlib import suppress
from pathlib import Path

from pyllama_kvflash.events import Warn
from pyllama_kvflash.native import devices
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.cores import CoreWatch

_TASKS = Path("/proc/self/task")


class Cores:
    """Watches the threads of a sequence's steps. With a GPU, or with one thread, there is nothing to say.

    on_cpu: whether no layer is computed on a GPU.
    """

    def __init__(self, options: Options) -> None:
        """options: resolved."""
        self._n_threads = options.n_threads or 1
        self.on_cpu = options.on_cpu or not any(device.gpu for device in devices())
        self._watch = CoreWatch() if self._n_threads > 1 and self.on_cpu else None

    def after_step(self) -> list[Warn]:
        """Return a warning if it is time for it."""
        return self._look() if self._watch and self._watch.due() else []

    def after_batch(self) -> list[Warn]:
        """Return a warning if it is time for it. A batch of a prompt takes so long that each is looked at."""
        return self._look() if self._watch and not self._watch.over else []

    def _look(self) -> list[Warn]:
        if self._watch is None:
            return []
        share = self._watch.look(thread_times())
        if share is None:
            return []
        return [
            Warn(
                f"threads wait for a core {100 * share:.0f} % of the time, as beside another busy program: `n_threads` is"
                f" {self._n_threads}, and a smaller one is faster then"
            )
        ]


def thread_times() -> tuple[float, float] | None:
    """Return the seconds that the threads of this process worked, and that they waited for a core. None: the system does not
    say.
    """
    worked = waited = 0
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # it has ended
                on_core, in_queue, *_ = (task / "schedstat").read_bytes().split()
                worked, waited = worked + int(on_core), waited + int(in_queue)
    return (worked / 1e9, waited / 1e9) if worked else None
