"""The name of a model, in a small file beside its snapshots. The snapshots themselves have only the model's fingerprint."""

import os
from contextlib import suppress
from pathlib import Path

from pyllama_kvflash import files
from pyllama_kvflash.text import printable

_FILE = "model"
_MOST = 1024  # bytes


def write_name(folder: Path, model: Path) -> None:
    """Write the model's name into a folder of its snapshots. A failure is ignored, because the name is shown only in listings."""
    path, name = folder / _FILE, os.fsencode(model.name)
    with suppress(OSError):
        if path.is_symlink():  # writing would follow it, out of the folder
            path.unlink()
        if not path.exists() or (path.is_file() and path.read_bytes() != name):
            files.write(path, name)


def remove_name(folder: Path) -> None:
    """Remove the name, and leftovers of killed processes."""
    files.sweep(folder, f".{_FILE}.*.part")
    with suppress(OSError):
        (folder / _FILE).unlink()


def read_name(folder: Path) -> str | None:
    """Return the name of the model whose snapshots are in a folder, in printable characters; None if it is unknown."""
    path = folder / _FILE
    with suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                text = file.read(_MOST).decode("utf-8", "replace")
            return printable(text) or None
    return None
