"""Long prompts through a fixed pool of KV cache.

    from pyllama_kvflash import KVFlash, Token

    with KVFlash.from_file("model.gguf", n_ctx=65536, pool=2048) as kv:
        for event in kv.generate(prompt, max_tokens=64):
            if isinstance(event, Token):
                print(event.text, end="")

The names in `__all__` are the public interface. Errors are in `pyllama_kvflash.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pyllama_kvflash.engine.engine import KVFlash
    from pyllama_kvflash.engine.sequence import KVSequence
    from pyllama_kvflash.errors import KVFlashError
    from pyllama_kvflash.events import Done, Event, Paged, Prefill, Reselect, Stats, Token, Warn, as_dict
    from pyllama_kvflash.native import Rope, Sampling
    from pyllama_kvflash.options import Options
    from pyllama_kvflash.policy import Scorer, View
    from pyllama_kvflash.pool.residency import Residency

_HOME = {
    "Done": "events",
    "Event": "events",
    "KVFlash": "engine.engine",
    "KVFlashError": "errors",
    "KVSequence": "engine.sequence",
    "Options": "options",
    "Paged": "events",
    "Prefill": "events",
    "Reselect": "events",
    "Residency": "pool.residency",
    "Scorer": "policy",
    "View": "policy",
    "Warn": "events",
    "Rope": "native",
    "Sampling": "native",
    "Stats": "events",
    "Token": "events",
    "as_dict": "events",
}

__all__ = [
    "Done",
    "Event",
    "KVFlash",
    "KVFlashError",
    "KVSequence",
    "Options",
    "Paged",
    "Prefill",
    "Reselect",
    "Residency",
    "Rope",
    "Sampling",
    "Scorer",
    "Stats",
    "Token",
    "View",
    "Warn",
    "__version__",
    "as_dict",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that policies and `--help` work without the compiled part."""
    if name not in _HOME:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
