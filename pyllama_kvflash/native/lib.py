"""The compiled library. This is the only place that turns a status into an exception."""

import atexit
import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar
from weakref import ref

from pyllama_kvflash import errors
from pyllama_kvflash.native.notes import Notes, noted

S = TypeVar("S")
T = TypeVar("T")

# measured on two cores; with many, a thread that sleeps in the kernel may wake up late (docs/results/cpu.md)
_FEW_CORES = 8

# Threads that have finished their share wait for the others. By default, libgomp's threads spin for long, and on a busy machine
# take the core from the thread that they wait for. With this setting, which libgomp reads when it is loaded, they sleep in the
# kernel after some 20 us
if (os.cpu_count() or 1) <= _FEW_CORES and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

try:
    _kvflash: Any = import_module("pyllama_kvflash.native._kvflash")
except ImportError as err:  # a source tree that was never built
    msg = f"the compiled part of pyllama_kvflash is missing ({err}): run `pip install .` in the project"
    raise ImportError(msg) from err

ffi: Any = _kvflash.ffi
lib: Any = _kvflash.lib

_ERRORS: dict[int, type[errors.KVFlashError]] = {
    lib.KVF_E_ARGUMENT: errors.UsageError,
    lib.KVF_E_UNSUPPORTED: errors.UnsupportedError,
    lib.KVF_E_NO_BLOCK: errors.PoolError,
    lib.KVF_E_RECORD: errors.RecordError,
    lib.KVF_E_STATE: errors.PoolError,
    lib.KVF_E_MODEL: errors.ModelError,
    lib.KVF_E_MEMORY: errors.AllocationError,
    lib.KVF_E_BACKEND: errors.NativeError,
    lib.KVF_E_ABORTED: errors.Interrupted,
    lib.KVF_E_LOST: errors.DeviceLostError,
    lib.KVF_E_LOGITS: errors.BadLogitsError,
}

CACHE_TYPES: dict[str, int] = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": lib.GGML_TYPE_BF16,
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "iq4_nl": lib.GGML_TYPE_IQ4_NL,
}
"""The `ggml_type` of each cache type, by llama.cpp's name."""


def init() -> None:
    """Start the library (once). Its log is kept for error messages, but not shown."""
    lib.kvf_init()


def show_log() -> None:
    """Echo the library's log to stderr from now on."""
    lib.kvf_log_level(lib.GGML_LOG_LEVEL_INFO)


def check(status: int) -> None:
    """Raise the exception of a status that is not KVF_OK, with the library's own message."""
    if status != lib.KVF_OK:
        raise _ERRORS[status](last_error())


_EXIT_SECONDS = 30.0  # when Python exits, the longest wait for calls under way
_LOOK_SECONDS = 0.002  # polling interval of that wait
_ending = False
_under_way: Notes = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # the child has no other threads


def compute(function: Callable[..., int], *args: Any) -> None:
    """Make a native call that may take long, or that calls Python, and check() its status.

    At exit, Python waits for such calls, or the library would be unloaded while they run. New calls then raise Interrupted.
    """
    if _ending:
        msg = "interrupted: Python is about to end"
        raise errors.Interrupted(msg)
    check(noted(_under_way, object(), functools.partial(function, *args)))


def mapped(workers: ThreadPoolExecutor, f: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Call a function with each item, in threads. If none can start, for example at exit, the calling thread does it."""
    try:
        return workers.map(f, items)
    except RuntimeError:
        return map(f, items)


@atexit.register
def _end() -> None:
    """Interrupt the computations of other threads, and wait for them."""
    global _ending  # noqa: PLW0603
    _ending = True
    interrupt(True)
    if not _all_ended(_EXIT_SECONDS):
        lib.kvf_drop_rpc()  # a call may wait for a server that no longer answers
        _all_ended(_EXIT_SECONDS)


def _all_ended(seconds: float) -> bool:
    """Wait at most `seconds` for the calls under way. Returns whether all have ended."""
    deadline = time.monotonic() + seconds
    while _under_way:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def last_error() -> str:
    """Return the message of this thread's last native error. llama.cpp logs several lines; the first names the cause."""
    text = ffi.string(lib.kvf_error()).decode("utf-8", "replace")
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines()]
    return next((line for line in lines if line), "unknown error")


def unless_forked(free: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a version of `free` that does nothing in a forked process, which has neither the threads nor the device."""
    return functools.partial(_free, free, os.getpid())


def _free(free: Callable[[Any], None], pid: int, pointer: Any) -> None:
    """Free an object. At exit, Python waits for this as for compute(). From then on, only the main thread frees objects: the driver may
    be gone before other threads come to it.
    """
    if os.getpid() == pid and not (_ending and threading.current_thread() is not threading.main_thread()):
        noted(_under_way, object(), functools.partial(free, pointer))


def owned(pointer: Any, free: Callable[[Any], None], *made_of: Any) -> Any:
    """Return a native object that is freed once nothing refers to it: no variable, and no call under way in any thread.

    So closing an object only drops a reference, and frees nothing during a call. made_of: objects that the native one needs until it is
    freed. A global table holds them, not the object itself: in a garbage cycle, Python would free both in any order.
    """
    key, free, all_owned = object(), unless_forked(free), _owned

    def gone(_: object) -> None:
        free(pointer)
        del all_owned[key]

    res = ffi.cast(ffi.typeof(pointer), pointer)
    _owned[key] = ref(res, gone), made_of
    return res


_owned: dict[object, tuple[Any, Any]] = {}


def interrupt(stop: bool) -> None:  # noqa: FBT001 (a switch)
    """Make every computation and load of the process, in all models and threads, end with Interrupted, until switched off."""
    lib.kvf_interrupt(stop)


def row_bytes(cache_type: int, n: int) -> int:
    """Return the bytes of a row of n elements of a `ggml_type`."""
    return int(lib.ggml_row_size(cache_type, n))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise Interrupted in a load or the next decode (on a CPU: the running one), and KeyboardInterrupt if
    pressed twice. It affects the whole process: engines of other threads are interrupted, too, and can continue.

    Python runs its signal handlers between two bytecodes, but a batch is one call that may take a minute. So a thread
    waits for the signal's number on Python's wake-up pipe, to which the C-level handler writes at once. The Python handler
    may run while an object is freed, where exceptions cannot propagate and Python would print them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread handles signals
        return

    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        n_pressed = 0
        while signals := os.read(reader, 16):
            n_pressed += signals.count(signal.SIGINT)
            if n_pressed:
                interrupt(True)
            if n_pressed > 1:
                lib.kvf_drop_rpc()  # a call may wait for a server that no longer answers

    count = 0

    def on_sigint(_signum: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        interrupt(True)
        if count > 1:
            raise KeyboardInterrupt

    def on_unraisable(unraisable: Any) -> None:
        if not isinstance(
            unraisable.exc_value, KeyboardInterrupt
        ):  # this one is lost, but interrupt() still has effect
            previous_hook(unraisable)

    watcher = threading.Thread(target=watch, name="kvflash-sigint", daemon=True)
    previous = signal.signal(signal.SIGINT, on_sigint)
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous_hook, sys.unraisablehook = sys.unraisablehook, on_unraisable
    with contextlib.suppress(RuntimeError):  # no memory for a thread: Ctrl-C takes effect after the batch
        watcher.start()
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGINT, previous)
        os.close(writer)  # the watcher reads end of file, and ends
        if watcher.ident is not None:
            watcher.join()
        os.close(reader)
        interrupt(False)
