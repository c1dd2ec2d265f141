"""The order of samplers, by llama.cpp's names."""

from collections.abc import Iterable

from pyllama_kvflash import errors

_NAMES = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
_LETTERS = dict(zip("edskypmxt", _NAMES, strict=True))
_OTHER_NAMES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical_p": "typ_p"}
_KNOWN = {name: name for name in _NAMES} | {name.replace("_", ""): name for name in _NAMES} | _OTHER_NAMES


def order_of(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return llama.cpp's own names of samplers. given: names, or one text with ; between them.

    Raises UsageError for an unknown name, and for one given twice.
    """
    names = [name for name in given.split(";") if name.strip()] if isinstance(given, str) else list(given)
    res = tuple(_KNOWN.get(str(name).strip().lower().replace("-", "_"), "") for name in names)
    known = ", ".join(_NAMES)
    if "" in res:
        msg = f"`samplers` has {str(names[res.index('')])[:40]!r}, which is not a sampler: the names are {known}"
        raise errors.UsageError(msg)
    if twice := [name for name in res if res.count(name) > 1]:
        msg = f"`samplers` has {twice[0]} twice: name each of {known} once, or leave it out"
        raise errors.UsageError(msg)
    return res


def order_of_letters(letters: str) -> tuple[str, ...] | None:
    """Return the names for llama.cpp's short form, such as "kpt"; None if it has an unknown letter."""
    return tuple(_LETTERS[c] for c in letters) if set(letters) <= set(_LETTERS) else None
