"""Turn token bytes into text that can be shown."""

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
    """Return how many leading elements two arrays (n,) and (m,) share: tokens of texts, digests of records."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


_UNSHOWN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of characters that do something to a terminal or a log, and of half surrogate pairs: bytes of a path that are not UTF-8."""


def printable(text: object, keep: str = "") -> str:
    """Return a name or a message as it can be shown and sent: what cannot be shown becomes U+FFFD, apart from `keep`."""
    return "".join("\ufffd" if unicodedata.category(c) in _UNSHOWN and c not in keep else c for c in str(text))


def to_json(value: Any, **form: Any) -> str:
    """Return a value as JSON, which has no NaN and no infinity: null takes their place. form: options of json.dumps."""
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
    """Return the bytes at the end of a text that begin a character and do not complete it; b"" if there are none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-_MOST_BYTES:])
    return decoder.getstate()[0]


class TextStream:
    """Joins token bytes into text. It holds back what may be the beginning of a UTF-8 sequence or of a stop string.

    stop: the stop string that was found; None: none yet.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Raises UsageError for a stop string that is not Unicode text."""
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
        if found:  # take the one that is complete first, however the bytes are cut
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
        """Go on after the bytes of a text whose whole characters were shown before this began."""
        self._decode(unfinished(data))

    def flush(self, *, goes_on: bool = False) -> str:
        """Return the text held back, at the end of the generation.

        An incomplete UTF-8 sequence becomes U+FFFD. goes_on: leave it out, since the text may continue with the rest of it.
        """
        rest = self._held + ("" if goes_on else self._decode(b"", final=True))
        self._held = ""
        return "" if self.stopped else rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
