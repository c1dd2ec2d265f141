"""Every error this package raises on purpose, with the exit code that `kvflash` gives it.

    KVFlashError                1
    ├── UsageError              2   an option, an argument or the prompt is at fault; the engine or model is closed
    │   └── InUseError          2   another thread uses the engine, or another call has taken over the sequence
    ├── ModelError              1   the file is not a model, is damaged, or cannot be loaded
    │   └── UnsupportedError    1   the model is fine, but does not support what is asked
    ├── PoolError               1   the pool has no room for a batch, a pin or a page-in
    ├── RecordError             1   the bytes are not a record of this chunk, model and cache
    ├── ScorerError             1   a scorer cannot score: qk takes its place, with a warning
    ├── HostMemoryError         1   there is no host memory for another record; nothing was lost
    ├── SnapshotError           1   a snapshot is damaged, belongs to something else, or cannot be written; the run continues
    ├── OutputError             1   a result could not be written
    ├── NativeError             1   the computation failed
    │   ├── AllocationError     1   the native library could not allocate memory on the host or a device
    │   ├── BadLogitsError      1   the model's logits are NaN or infinite: no token can be chosen
    │   └── DeviceLostError     1   an RPC server is gone, with the data that it held
    └── Interrupted           130   stopped by the user; what was produced is kept

Messages are one sentence or two: what is wrong, the value, the fix. They name options as Python does, such as `n_ctx`; the
command line replaces these names by its own (cli/flags.py).
"""

import errno
import math
import re
from typing import ClassVar


class KVFlashError(Exception):
    """Base of all errors of this package."""

    exit_code: ClassVar[int] = 1


class UsageError(KVFlashError):
    """An option, an argument or the prompt is at fault."""

    exit_code = 2


class InUseError(UsageError):
    """Another thread uses the engine, or another call has taken over the sequence. Nothing was changed."""


class ModelError(KVFlashError):
    """The model file is missing, damaged, or cannot be loaded."""


class UnsupportedError(ModelError):
    """The model does not support what is asked: its memory cannot be pooled, or its state cannot be rolled back."""


class PoolError(KVFlashError):
    """The pool has no room for a batch, a pin or a page-in."""


class RecordError(KVFlashError):
    """The bytes are not a record of this chunk, model and cache."""


class ScorerError(KVFlashError):
    """A scorer cannot score: its model does not load, or it did not return one score for each chunk."""


class HostMemoryError(KVFlashError):
    """There is no host memory for another record. Nothing was lost: the batch that needed the memory was not decoded."""


class SnapshotError(KVFlashError):
    """A snapshot is damaged, belongs to another model, cache or text, or cannot be written. The run continues without it."""


class OutputError(KVFlashError):
    """A result could not be written: the disk is full, or the path cannot be written to."""


class NativeError(KVFlashError):
    """The computation failed in the native library."""


class AllocationError(NativeError):
    """The native library could not allocate memory on the host or a device."""


class BadLogitsError(NativeError):
    """No token can be chosen: a logit is NaN or +infinity, or none is finite. The weights are damaged, or a value overflowed f16."""


class DeviceLostError(NativeError):
    """An RPC server is gone, with the weights and the part of the KV cache that it held. The engine has to be loaded again."""


class Interrupted(KVFlashError):  # noqa: N818 (nobody made an error)
    """Stopped by Ctrl-C. The engine can continue from where it was."""

    exit_code = 130


_LARGE = 10**15  # floats from here on are shown with an exponent
_LONG = 10**30  # integers from here on are shown as a power of ten


def number(value: float) -> str:
    """Return a number as people write it: "4,294,967,295", "0.3" or "1e-40"."""
    if isinstance(value, float):
        if not value.is_integer() or abs(value) >= _LARGE:
            return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:,.12g}")
        value = int(value)
    if abs(value) < _LONG:
        return f"{value:,}"
    return f"{'-' if value < 0 else ''}10^{math.floor(math.log10(abs(value)))}"


def counted(n: int, what: str) -> str:
    """Return a number of things as people write it: "1 token" or "2,048 tokens"."""
    return f"{number(n)} {what}{'' if n == 1 else 's'}"


def check_range(value: float, low: float, high: float, name: str, hint: str = "") -> None:
    """Raise UsageError unless `low` <= `value` <= `high`; NaN also fails. name: the option's name. hint: ends the message."""
    if not low <= value <= high:
        raise UsageError(out_of_range(value, low, high, f"`{name}`") + (f": {hint}" if hint else ""))


def out_of_range(value: float, low: float, high: float, name: str) -> str:
    """Return the sentence for a number that is not between `low` and `high`."""
    bound = f"{number(high)} or less" if low == -math.inf else f"from {number(low)} to {number(high)}"
    return f"{name} is {number(value)}, and must be {bound}"


def unwritten(path: object, err: OSError) -> str:
    """Return the sentence for a file or folder that cannot be written, and for a full disk what helps."""
    full = "; free some, or write elsewhere" if err.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{path} cannot be written: {err.strerror or err}{full}"


def check_choice(value: object, allowed: tuple[object, ...], name: str) -> None:
    """Raise UsageError unless `value` is one of `allowed`. name: the option's name."""
    if value not in allowed:
        msg = f"`{name}` is {value!r}, and must be one of {', '.join(map(str, allowed))}"
        raise UsageError(msg)


def encoded(text: str, what: str) -> bytes:
    """Return a text in UTF-8. Raises UsageError for half of a surrogate pair, which Python and JSON allow but UTF-8 does not.

    what: the text's name in the message.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as err:
        msg = f"{what} is not Unicode text: half of a surrogate pair at character {err.start:,}"
        raise UsageError(msg) from None
