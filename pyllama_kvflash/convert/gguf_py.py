"""Load gguf, an optional extra."""

from typing import Any

from pyllama_kvflash.errors import UsageError


def load_gguf() -> Any:
    """Return the gguf module. Raises UsageError if it is not installed."""
    try:
        import gguf  # noqa: PLC0415 (an optional extra)
    except ImportError:
        msg = "convert-draft needs gguf: pip install 'pyllama-kvflash[convert]'"
        raise UsageError(msg) from None
    return gguf
