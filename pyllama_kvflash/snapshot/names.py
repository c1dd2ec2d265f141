"""The name of a model, in a small file beside its snapshots: they know its fingerprint only, which tells people nothing."""

import os
from contextlib import suppress
from pathlib import Path

from pyllama_kvflash import files
from pyllama_kvflash.text import printable

_FILE = "model"
_MOST = 1024  # bytes


def write_name(folder: Path, model: Path) -> None:
    """Note whose snapshots a folder has. Where it cannot be written, it goes without: nothing but a list reads it."""
    path, name = folder / _FILE, os.fsencode(model.name)
    with suppress(OSError):
        if path.is_symlink():  # writing would follow it, out of the folder
            path.unlink()
        if not path.exists() or (path.is_file() and path.read_bytes() != name):
            files.write(path, name)


def remove_name(folder: Path) -> None:
    """Remove it, and what killed processes left of one."""
    files.sweep(folder, f".{_FILE}.*.part")
    with suppress(OSError):
        (folder / _FILE).unlink()


def read_name(folder: Path) -> str | None:
    """Return the name of the model whose snapshots a folder has, in characters that can be shown; None: it is not known."""
    path = folder / _FILE
    with suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                text = file.read(_MOST).decode("utf-8", "replace")
            return printable(text) or None
    return None
