"""Every error this package raises on purpose, with the exit code `kvflash` gives it.

    KVFlashError                1
    ├── UsageError              2   an option, an argument or the prompt is at fault; the engine or model is closed
    │   └── InUseError          2   another thread uses the engine, or another call has taken over the sequence
    ├── ModelError              1   the file is not a model, is damaged, or cannot be loaded
    │   └── UnsupportedError    1   the model is fine, but this cannot be done with it
    ├── PoolError               1   the pool has no room for a batch, a pin or a page-in
    ├── RecordError             1   bytes that are not a record of this chunk, model and cache
    ├── ScorerError             1   a scorer cannot score: qk takes its place, with a warning
    ├── HostMemoryError         1   no host memory for another record; nothing was lost
    ├── SnapshotError           1   a snapshot is damaged, of something else, or cannot be written; the run continues
    ├── OutputError             1   a result could not be written
    ├── NativeError             1   the computation failed
    │   ├── AllocationError     1   the native library got no memory, of the host or of a device
    │   ├── BadLogitsError      1   the model's logits are NaN or infinite: no token can be chosen
    │   └── DeviceLostError     1   an RPC server is gone, and what it held
    └── Interrupted           130   stopped by the user; what was produced is kept

Messages are one sentence or two: what is wrong, the value, the fix. They name options as Python does, `n_ctx`; the command
line shows its own names there (cli/flags.py).
"""

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
    """The model cannot do what was asked: its memory cannot be pooled, or its state cannot go back."""


class PoolError(KVFlashError):
    """The pool has no room for a batch, a pin or a page-in."""


class RecordError(KVFlashError):
    """Bytes that are not a record of this chunk, model and cache."""


class ScorerError(KVFlashError):
    """A scorer cannot score: its model does not load, or it did not return one score for each chunk."""


class HostMemoryError(KVFlashError):
    """No host memory for another record. Nothing was lost: the batch that needed it was not decoded."""


class SnapshotError(KVFlashError):
    """A snapshot is damaged, of another model, cache or text, or cannot be written. The run continues without it."""


class OutputError(KVFlashError):
    """A result could not be written: the disk is full, or the path cannot be written to."""


class NativeError(KVFlashError):
    """The computation failed in the native library."""


class AllocationError(NativeError):
    """The native library got no memory, of the host or of a device."""


class BadLogitsError(NativeError):
    """Logits are NaN or +infinity, or none is finite: damaged weights, or an overflow of f16. No token can be chosen by them."""


class DeviceLostError(NativeError):
    """An RPC server is gone, and with it weights and a part of the KV cache: the engine has to be loaded again."""


class Interrupted(KVFlashError):  # noqa: N818 (not an error of anybody's)
    """Stopped by Ctrl-C. The engine can continue from where it was."""

    exit_code = 130


_LARGE = 10**15  # a float beyond it has no digits to tell
_LONG = 10**30  # an integer beyond it is not read digit by digit


def number(value: float) -> str:
    """Return a number as people write it: 4,294,967,295, 0.3, 1e-40."""
    if isinstance(value, float):
        if not value.is_integer() or abs(value) >= _LARGE:
            return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:,.12g}")
        value = int(value)
    if abs(value) < _LONG:
        return f"{value:,}"
    return f"{'-' if value < 0 else ''}10^{math.floor(math.log10(abs(value)))}"


def counted(n: int, what: str) -> str:
    """Return a number of things as people write it: 1 token, 2,048 tokens."""
    return f"{number(n)} {what}{'' if n == 1 else 's'}"


def check_range(value: float, low: float, high: float, name: str, hint: str = "") -> None:
    """Raise UsageError unless low <= value <= high; NaN fails. name: of an option. hint: a usual value."""
    if not low <= value <= high:
        raise UsageError(out_of_range(value, low, high, f"`{name}`") + (f": {hint}" if hint else ""))


def out_of_range(value: float, low: float, high: float, name: str) -> str:
    """Return the sentence for a number that is not from low to high."""
    bound = f"{number(high)} or less" if low == -math.inf else f"from {number(low)} to {number(high)}"
    return f"{name} is {number(value)}, and must be {bound}"


def check_choice(value: object, allowed: tuple[object, ...], name: str) -> None:
    """Raise UsageError unless value is one of `allowed`. name: of an option."""
    if value not in allowed:
        msg = f"`{name}` is {value!r}, and must be one of {', '.join(map(str, allowed))}"
        raise UsageError(msg)


def encoded(text: str, what: str) -> bytes:
    """Return a text in UTF-8. Raises UsageError if it has none: Python, and JSON, allow half of a surrogate pair.

    what: the text, for the message.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as err:
        msg = f"{what} is not Unicode text: half of a surrogate pair at character {err.start:,}"
        raise UsageError(msg) from None
