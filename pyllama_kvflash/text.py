"""Text: token bytes as text that can be shown, printable names, JSON, and common beginnings."""

import codecs
import json
import math
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import encoded


def n_common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return how many leading elements two arrays share. a: (n,). b: (m,). The elements are tokens, or digests of records."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


_UNSHOWN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters that control a terminal or a log, and of surrogates, which stand for bytes of a path that are not UTF-8."""


def printable(text: object, keep: str = "") -> str:
    """Return a name or a message that is safe to show and send. Unsafe characters become U+FFFD, except those in `keep`."""
    return "".join("\ufffd" if unicodedata.category(c) in _UNSHOWN and c not in keep else c for c in str(text))


def is_json(value: Any) -> bool:
    """Return whether a value of JSON's types has only numbers that JSON has: no NaN and no infinities."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def to_json(value: Any, **form: Any) -> str:
    """Return a value as JSON, with null for NaN and infinities, which JSON lacks. form: options of json.dumps."""
    try:
        return json.dumps(value, allow_nan=False, **form)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **form)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_MOST_BYTES = 4  # of a character in UTF-8


def unfinished(data: bytes) -> bytes:
    """Return the bytes of an incomplete character at the end of a text in UTF-8; b"" if the last character is complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-_MOST_BYTES:])
    return decoder.getstate()[0]


class TextStream:
    """Joins token bytes into text. It holds back what may be the beginning of a UTF-8 sequence or of a stop string.

    stop: the stop string that was found; None: none yet.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """stop: strings that end the text. Raises UsageError for one that is not Unicode text."""
        for text in stop:
            encoded(text, "a stop string")
        self.stop: str | None = None
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stop = [s for s in stop if s]
        self._held = ""

    def push(self, piece: bytes) -> str:
        """Return the text that can be shown after these bytes. A stop string is not shown."""
        self._held += self._decode(piece)
        if not self._stop:
            shown, self._held = self._held, ""
            return shown
        found = [(i + len(s), i, s) for s in self._stop if (i := self._held.find(s)) >= 0]
        if found:  # take the string that ends first, so that the result does not depend on how the bytes arrive
            _, start, self.stop = min(found)
            shown, self._held = self._held[:start], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop is not None

    def go_on(self, data: bytes) -> None:
        """Continue a text whose complete characters have been shown. data: the bytes of that text."""
        self._decode(unfinished(data))

    def flush(self, *, goes_on: bool = False) -> str:
        """At the end of the generation, return the text that was held back.

        An incomplete UTF-8 sequence becomes U+FFFD. goes_on: the text may continue, so leave the sequence out.
        """
        rest = self._held + ("" if goes_on else self._decode(b"", final=True))
        self._held = ""
        return "" if self.stopped else rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
