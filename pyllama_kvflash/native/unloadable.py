"""Diagnose the files of a model that llama.cpp does not load: its own errors name neither sizes nor parts."""

import stat
from pathlib import Path

from pyllama_kvflash.gguf_header import MAGIC, SPLIT, Header, parts

_PROJECTOR = "a projector (mmproj) for pictures or sound, which are not supported: give the model that it is for"
_ADAPTER = "an adapter (LoRA): merge it into its model with llama.cpp's llama-export-lora, and give the result"
_OTHERS = {
    (b"general.type", b"adapter"): _ADAPTER,
    (b"general.type", b"mmproj"): _PROJECTOR,
    (b"general.type", b"imatrix"): "an importance matrix, for quantising a model: give the model itself",
    (b"general.architecture", b"clip"): _PROJECTOR,
    (b"general.architecture", b"controlvector"): "a control vector, which is not supported: give the model alone",
}
"""Kinds of GGUF files that are not models, by a key and its value."""

_PADDING = 1 << 16  # most zero bytes between two files that were joined
_FOREIGN = "is of another model, or of another conversion: download all parts from one place"


def why_unloadable(path: Path) -> str:
    """Return the fault of a model's files, and the remedy; "" if there is no fault, or it is unknown."""
    try:
        header = Header.read(path)
    except ValueError:
        return ""
    except (EOFError, OSError):
        return f"it {why}" if (why := _damage(path)) else ""
    for (key, value), what in _OTHERS.items():
        if header.values.get(key) == value:
            return f"it is {what}"
    if header.split[1] > 1:
        return _why_not_first(path, header) or _why_not_whole(path, header)
    return f"it {why}" if (why := _damage(path)) else ""


def _why_not_first(path: Path, header: Header) -> str:
    """Return why a file is not a first part under its proper name; "" if it is."""
    no, n = header.split
    name = SPLIT.fullmatch(path.name)
    end = f"-{no + 1:05}-of-{n:05}.gguf"
    if no == 0 and _is_joined(path, header):
        return (
            f"it is part 1 of {n} with others joined to it: give the first part as it was, with the others beside it, or"
            " merge them with llama.cpp's llama-gguf-split"
        )
    if name and path.name.endswith(end):
        return f"it is part {no + 1} of {n}: give the first one, {parts(path.name)[0]}" if no else ""
    if no == 0 or name:
        return f"its header says that it is part {no + 1} of {n}: give it a name that ends in {end}, since parts are found by their names"
    return f"it is part {no + 1} of {n}: give the first one, whose name ends in -00001-of-{n:05}.gguf"


def _is_joined(path: Path, header: Header) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(header.needed())
            return file.read(_PADDING).lstrip(b"\0").startswith(MAGIC)
    except (OSError, ValueError):
        return False


def _why_not_whole(path: Path, first: Header) -> str:
    """Return the first fault found in the parts; "" if there is none, or it is unknown."""
    n, seen = first.split[1], set[bytes]()
    for i, name in enumerate(parts(str(path))):
        part = Path(name)
        why = _damage(part)
        if not why:
            try:
                header = Header.read(part)
            except (OSError, EOFError, ValueError):
                return ""
            why = _why_not_part(header, first, i, part)
            why = why or (_FOREIGN if any(tensor.name in seen for tensor in header.tensors) else "")
            seen |= {tensor.name for tensor in header.tensors}
        if why:
            return f"its part {i + 1} of {n}, {part}, {why}"
    found, wanted = len(seen), first.values.get(b"split.tensors.count", 0)
    return (
        f"its parts have {found} tensors instead of {wanted!r}: download all parts from one place"
        if found != wanted
        else ""
    )


def _why_not_part(header: Header, first: Header, i: int, path: Path) -> str:
    """Return why a file is not part i, counted from 0, of the first part's model; "" if it is."""
    (no, n), wanted = header.split, first.split[1]
    if n == 1:
        return "is a model of one file: put the part in its place"
    other = any(
        header.values.get(key, value) != value
        for key, value in first.values.items()
        if key in (b"split.tensors.count", b"general.architecture")
    )
    if n != wanted or other:
        return _FOREIGN
    if no != i:
        return f"says that it is part {no + 1}: name it {parts(path.name)[no]}"
    return ""


def _damage(path: Path) -> str:
    """Return the fault of a single file, and the remedy; "" if it is complete, or the fault is unknown."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            what = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            return f"is {what}: put the file in its place"
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
        if magic != MAGIC:
            return f"is {'not a GGUF file' if magic else 'empty'}: download it again"
        return _cut(path, status.st_size)
    except FileNotFoundError:
        return "is missing: put it beside the others, under this name"
    except OSError as err:
        return f"cannot be read: {err.strerror}"


def _cut(path: Path, size: int) -> str:
    try:
        need = Header.read(path).needed()
    except EOFError:
        return f"ends within its header, after {size:,} bytes, so it is incomplete or damaged: download it again"
    except ValueError:
        return ""
    return f"is incomplete, with {size:,} of {need:,} bytes: download it again" if size < need else ""
