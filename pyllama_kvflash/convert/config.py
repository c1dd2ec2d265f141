"""A drafter's config.json: values with checked types, and errors that name the key."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from pyllama_kvflash.errors import ModelError

_NESTED = ("text_config", "transformer_layer_config")  # objects whose values count as top-level ones
_MAX_INT = (1 << 31) - 2  # sizes are 32-bit numbers in llama.cpp, and layers are counted from 1 there
_MAX_NUMBER = 1e30  # other numbers are float32


class Found(NamedTuple):
    """A value, and the key under which it was found: "dflash_config.block_size"."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Config:
    """The values of a config.json. A key with a dot is inside an object: "dflash_config.block_size".

    Getters take several keys and use the first that exists and is not null. They raise ModelError, which names the
    key, for a value of another type, and for a missing key unless the getter then returns None.
    """

    path: Path
    values: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the config.json of a folder. Raises ModelError."""
        path = folder / "config.json"
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            msg = f"{folder} has no config.json: give the drafter's folder, or hf:owner/repo"
            raise ModelError(msg) from None
        except OSError as err:
            msg = f"{path} cannot be read: {err.strerror}"
            raise ModelError(msg) from None
        except (ValueError, RecursionError) as err:
            msg = f"{path} is not JSON: {err}"
            raise ModelError(msg) from None
        if not isinstance(values, dict):
            msg = f"{path} is not a JSON object: it is a {type(values).__name__}"
            raise ModelError(msg)
        for name in _NESTED:
            if isinstance(values.get(name), dict):
                values = values | values[name]
        return cls(path, values)

    def find(self, *keys: str) -> Found | None:
        """Return the value of the first key that exists; None if none does."""
        for key in keys:
            value: Any = self.values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return Found(key, value)
        return None

    def need(self, *keys: str) -> Found:
        """Return the value of the first key that exists. Raises ModelError if none does."""
        found = self.find(*keys)
        if found is None:
            others = f" (nor {', '.join(keys[1:])})" if keys[1:] else ""
            msg = f"{self.path} has no {keys[0]}{others}: the file is not complete, or not that of a drafter"
            raise ModelError(msg)
        return found

    def size(self, *keys: str, low: int = 1) -> Found:
        """Return a whole number >= `low`."""
        return self._checked(_whole(low), f"a whole number from {low} on", self.need(*keys))

    def maybe_size(self, *keys: str, low: int = 1) -> int | None:
        """Return a whole number >= `low`; None if the key is missing."""
        return self.size(*keys, low=low).value if self.find(*keys) else None

    def maybe_number(self, *keys: str) -> float | None:
        """Return a finite number; None if the key is missing."""
        found = self.find(*keys)
        return float(self._checked(_finite, "a number", found).value) if found else None

    def positive(self, *keys: str) -> float:
        """Return a number above 0."""
        return float(self._checked(lambda v: _finite(v) and v > 0, "a number above 0", self.need(*keys)).value)

    def flag(self, *keys: str) -> bool | None:
        """Return true or false; None if the key is missing."""
        found = self.find(*keys)
        return bool(self._checked(lambda v: isinstance(v, bool), "true or false", found).value) if found else None

    def maybe_text(self, *keys: str) -> str | None:
        """Return a string; None if the key is missing."""
        found = self.find(*keys)
        return str(self._checked(_printable, "a string", found).value) if found else None

    def sizes(self, *keys: str) -> Found:
        """Return a list of at least one whole number >= 0."""
        whole = _whole(0)
        return self._checked(
            lambda v: isinstance(v, list) and bool(v) and all(map(whole, v)),
            "a list of whole numbers",
            self.need(*keys),
        )

    def maybe_texts(self, *keys: str) -> Found | None:
        """Return a list of strings; None if the key is missing."""
        found = self.find(*keys)
        good = lambda v: isinstance(v, list) and all(map(_printable, v))  # noqa: E731
        return self._checked(good, "a list of strings", found) if found else None

    def _checked(self, good: Callable[[Any], bool], what: str, found: Found) -> Found:
        if not good(found.value):
            msg = f"{self.path}: {found.key} is {json.dumps(found.value)[:80]}, and must be {what}"
            raise ModelError(msg)
        return found


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= _MAX_INT


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and -_MAX_NUMBER < value < _MAX_NUMBER  # both are false for NaN


def _printable(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()
