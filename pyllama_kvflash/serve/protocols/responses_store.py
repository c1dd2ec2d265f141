"""Stores responses, so that later requests can continue them."""

import json
import logging
import os
import re
import secrets
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from pyllama_kvflash.files import Replacement, dated, sweep

MAX_RESPONSES = 1_000
MAX_BYTES = 64 << 20
"""Limits for the responses in memory, and for the files in the folder."""

FOLDER = "responses"
"""The folder's name within the folder of the prefix cache."""

_DIGITS = 32  # hexadecimal digits of a response's id
_ID = re.compile(rf"resp_([0-9a-f]{{{_DIGITS}}})")
_ITEM_ID = re.compile(rf"(?:msg|rs|fc)_([0-9a-f]{{{_DIGITS}}})_[0-9]{{1,9}}")

log = logging.getLogger("kvflash.serve")


def new_id() -> str:
    """Return an id for a response."""
    return f"resp_{secrets.token_hex(_DIGITS // 2)}"


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an output item, made from the response's id. kind: msg, rs or fc."""
    return f"{kind}_{response_id.removeprefix('resp_')}_{index}"


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored response. items: the conversation before it, without instructions. response: the object that was sent."""

    items: list[dict[str, Any]]
    response: dict[str, Any]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The items of the conversation, including those of the response."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Responses in memory, and in files if there is a folder for them. The oldest responses are removed first.

    Any thread may use a store, and several processes may share its folder. Files are written in a thread of the store.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """folder: created when it is needed; None: memory only."""
        self._folder = folder
        self._texts: OrderedDict[str, bytes] = OrderedDict()  # JSON, by id
        self._size = 0
        self._lock = Lock()
        self._writer = ThreadPoolExecutor(1, "kvflash-responses")

    def close(self) -> None:
        """Wait for the files being written."""
        self._writer.shutdown()

    def keep(self, kept: Kept) -> None:
        """Store a response, unless it is larger than the store."""
        name = str(kept.response["id"])
        text = json.dumps({"items": kept.items, "response": kept.response}, separators=(",", ":")).encode()
        if len(text) > MAX_BYTES:
            return
        with self._lock:
            self._texts[name] = text
            self._size += len(text)
            while len(self._texts) > MAX_RESPONSES or self._size > MAX_BYTES:
                self._size -= len(self._texts.popitem(last=False)[1])
        if self._folder is not None:
            self._writer.submit(self._write, self._folder, name, text)

    def get(self, name: str) -> Kept | None:
        """Return the response with this id; None if it is not stored."""
        if not _ID.fullmatch(name):  # the id becomes the name of a file
            return None
        with self._lock:
            text = self._texts.get(name)
        if text is None and self._folder is not None:
            with suppress(OSError):
                text = _path(self._folder, name).read_bytes()
        try:
            found = json.loads(text or b"")
            return Kept(found["items"], found["response"])
        except (ValueError, KeyError, TypeError):  # none, or a damaged file
            return None

    def item(self, name: str) -> dict[str, Any] | None:
        """Return the output item with this id; None: it is not stored."""
        match = _ITEM_ID.fullmatch(name)
        kept = self.get(f"resp_{match[1]}") if match else None
        return None if kept is None else next((i for i in kept.response["output"] if i.get("id") == name), None)

    def delete(self, name: str) -> bool:
        """Delete a response. Returns whether it was stored."""
        found = self.get(name) is not None
        if found:
            with self._lock:
                self._size -= len(self._texts.pop(name, b""))
            if self._folder is not None:
                self._writer.submit(_remove, _path(self._folder, name)).result()  # after the file is written
        return found

    def _write(self, folder: Path, name: str, text: bytes) -> None:
        """Write a response's file, and remove the oldest files beyond the limits."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with Replacement(_path(folder, name), 0o600) as new:
                new.path.write_bytes(text)
            evict(folder)
        except OSError as err:
            log.warning("the response %s could not be written: %s", name, err.strerror or err)


def evict(folder: Path, most: int = MAX_RESPONSES, size: int = MAX_BYTES) -> int:
    """Remove partial files of killed processes from a folder, then the oldest responses beyond the limits `most` and `size`.

    most: number of responses that may stay; 0 also removes the folder if it is then empty. size: number of bytes that may stay.
    Returns the number of responses removed.
    """
    found = []
    sweep(folder, ".resp_*.part")
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):  # another process has removed it
                if _ID.fullmatch(entry.name.removesuffix(".json")) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((dated(status.st_mtime), status.st_size, Path(entry.path)))
    n = total = removed = 0
    for _, n_bytes, path in sorted(found, reverse=True):
        n, total = n + 1, total + n_bytes
        if n > most or total > size:
            removed += _remove(path)
    if not most:
        with suppress(OSError):
            folder.rmdir()
    return removed


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
