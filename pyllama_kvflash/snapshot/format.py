"""The layout of a .kvsnap file, see docs/SNAPSHOT_FORMAT.md: written whole or not at all, and read by pages."""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.native import Record, Tokens

SUFFIX = ".kvsnap"
MAGIC = b"\x93KVSNAP\n"
VERSION = 1
DIGEST = 32  # bytes of a blake2b digest
PAGE = 4096  # a record's rows begin on one, as in host memory

SECTIONS = ("identity", "sequence", "tokens", "chunks", "plan", "states", "records")

_SECTION = np.dtype([("offset", "<u8"), ("size", "<u8"), ("digest", "V32")])
HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("file_bytes", "<u8"),
        ("sections", _SECTION, len(SECTIONS)),
        ("digest", "V32"),  # of all before
    ]
)
LAYER = np.dtype(
    [
        (name, "<i4")
        for name in ("il", "type_k", "type_v", "n_embd_k", "n_embd_v", "n_head", "n_head_kv", "n_embd_head_k")
    ]
)
IDENTITY = np.dtype(
    [
        ("fingerprint", "<u8"),
        ("record_bytes", "<u8"),
        ("meta_bytes", "<u4"),
        ("chunk", "<u4"),
        ("n_layer", "<u4"),
        ("flags", "<u4"),
        ("memory", "S32"),  # its class in llama.cpp
    ]
)
SEQUENCE = np.dtype(
    [
        ("n_tokens", "<u4"),
        ("n_ctx", "<u4"),
        ("n_pool", "<u4"),
        ("n_kv", "<u4"),  # width of the attention graph
        ("tick", "<u8"),
        ("n_state", "<u4"),
        ("pending", "<i4"),  # a token that was produced, and is not decoded yet, -1: none
    ]
)
CHUNK = np.dtype(
    [
        ("chain", "V32"),  # digest of the chain before and of this chunk's tokens
        ("digest", "V32"),  # of its record
        ("state", "<i1"),  # policy.State
        ("pinned", "<i1"),
        ("age", "<i2"),  # batches since it set out to come back, if it is on its way
        ("block", "<i4"),  # -1: none
        ("touched", "<i8"),
        ("score", "<f8"),
    ]
)
STATE = np.dtype([("pos", "<u4"), ("reserved", "<u4"), ("size", "<u8")])

Chunks = npt.NDArray[Any]
"""Of dtype CHUNK."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a record can be used with. bytes: as in a file; layers and fields as numpy records."""

    raw: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """By name, for a sentence about what differs."""
        head = np.frombuffer(self.raw, IDENTITY, 1)[0]
        res: dict[str, Any] = {name: head[name].item() for name in IDENTITY.names or ()}
        res["layers"] = np.frombuffer(self.raw, LAYER, -1, IDENTITY.itemsize).tolist()
        return res

    def difference(self, other: "Identity") -> str | None:
        """The first field in which another one differs, and how; None: none does."""
        if self.raw == other.raw:
            return None
        mine, its = self.fields, other.fields
        if mine["fingerprint"] != its["fingerprint"]:
            return "it is of another model"
        for name, words in _DIFFERENCES.items():
            if mine[name] != its[name]:
                return words.format(mine[name], its[name])
        return "its layers or cache types are others (-ctk, -ctv)"


_DIFFERENCES = {
    "memory": "it is of a memory of class {}, and this one is {}",
    "chunk": "its chunks have {} positions, and {} here (--kvflash-chunk)",
    "layers": "its layers or cache types are others (-ctk, -ctv)",
    "flags": "its cache is laid out or rotated otherwise: flags {}, and {} here (-fa, -ctk, -ctv)",
}


def chain(identity: Identity, tokens: Tokens, chunk: int) -> list[bytes]:
    """For each chunk of tokens (n,) int32, the last one partly filled perhaps: a digest of all tokens up to its end, for this
    model and cache.
    """
    last, res = hashlib.blake2b(identity.raw, digest_size=DIGEST).digest(), []
    raw = np.ascontiguousarray(tokens, "<i4").tobytes()
    for at in range(0, len(raw), 4 * chunk):
        last = hashlib.blake2b(last + raw[at : at + 4 * chunk], digest_size=DIGEST).digest()
        res.append(last)
    return res


def digest(data: Any) -> bytes:
    """Of bytes, or of an array's."""
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds, but for the records. chunks: CHUNK, one for each chunk with a position; plan: chunks to drop and to
    bring in that are still to come; states: (position, bytes) of what no chunk holds, the last one at n_tokens.
    """

    identity: Identity
    sequence: npt.NDArray[Any]
    tokens: Tokens
    chunks: Chunks
    plan: tuple[tuple[int, ...], tuple[int, ...]]
    states: tuple[tuple[int, bytes], ...]


def record_place(identity: Identity) -> tuple[int, int]:
    """Bytes from one record to the next, and those before the first one's head: so that the rows begin on a page."""
    fields = identity.fields
    lead = -fields["meta_bytes"] % PAGE
    return -(-(lead + fields["record_bytes"]) // PAGE) * PAGE, lead


#
# writing
#


def write(
    path: Path, contents: Contents, records: Iterable[Record], on_record: Callable[[int], None] | None = None
) -> int:
    """Write a file under another name, and rename it once it is whole and on the disk; the bytes it has.

    records: of all chunks, in order, whose digests the chunks have. on_record: called with how many are written. Raises
    SnapshotError; nothing is left behind then, nor if the process is killed, but for a file named `.*.part`.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{token_hex(4)}.part")
    try:
        with open(part, "xb", opener=_private) as file:
            size = _write(file, contents, records, on_record)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except OSError as err:
        msg = f"{path} cannot be written: {err.strerror or err}"
        raise SnapshotError(msg) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return size


def _write(file: Any, contents: Contents, records: Iterable[Record], on_record: Callable[[int], None] | None) -> int:
    pitch, lead = record_place(contents.identity)
    header, at = np.zeros((), HEADER), HEADER.itemsize
    for i, raw in enumerate(_small(contents)):
        header["sections"][i] = (at, len(raw), np.void(digest(raw)))
        file.seek(at)
        file.write(raw)
        at += -(-len(raw) // 8) * 8
    start = -(-at // PAGE) * PAGE
    end = start + len(contents.chunks) * pitch
    file.truncate(end)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, end)  # a full disk says so now
    for i, record in enumerate(records):
        file.seek(start + i * pitch + lead)
        file.write(record)
        if on_record:
            on_record(i + 1)
    header["sections"][-1] = (start, end - start, np.void(digest(contents.chunks["digest"].tobytes())))
    header["magic"], header["version"] = np.void(MAGIC), VERSION
    header["header_bytes"], header["file_bytes"] = HEADER.itemsize, end
    header["digest"] = np.void(digest(header.tobytes()[:-DIGEST]))
    file.seek(0)
    file.write(header.tobytes())
    return end


def _small(contents: Contents) -> list[bytes]:
    """All sections but the records."""
    plan = b"".join(np.array([len(part), *part], "<i4").tobytes() for part in contents.plan)
    heads = np.array([(pos, 0, len(blob)) for pos, blob in contents.states], STATE)
    return [
        contents.identity.raw,
        contents.sequence.tobytes(),
        np.ascontiguousarray(contents.tokens, "<i4").tobytes(),
        contents.chunks.tobytes(),
        plan,
        heads.tobytes() + b"".join(blob for _, blob in contents.states),
    ]


def _private(name: str, flags: int) -> int:
    """A text is nobody else's."""
    return os.open(name, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


#
# reading
#


class SnapshotFile:
    """A file that was opened: everything is checked but the records, which are mapped, and checked when they are used.

    A record is a view into the map, which stays as long as any view does, whatever becomes of the file's name.
    """

    def __init__(self, path: Path) -> None:
        """Raises SnapshotError, with what is wrong with it."""
        self.path = path
        self.on_damage: Callable[[], None] | None = None  # called when a record is not what was written
        try:
            if path.exists() and not path.is_file():  # to open a pipe would be to wait for ever
                raise self._damaged("it is no regular file")
            with path.open("rb") as file:
                n = os.fstat(file.fileno()).st_size
                if n < HEADER.itemsize:
                    raise self._damaged(f"it has {n} bytes, fewer than a header")
                self._map = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as err:  # ValueError: a name with a zero byte, or a special file
            msg = f"{path} cannot be read: {getattr(err, 'strerror', None) or err}"
            raise SnapshotError(msg) from None
        self.header = self._header(n)
        raw = {name: self._section(i) for i, name in enumerate(SECTIONS[:-1])}
        self.contents = self._contents(raw)
        self._start = int(self.header["sections"][-1]["offset"])
        self._pitch, self._lead = record_place(self.contents.identity)
        self._record_bytes = self.contents.identity.fields["record_bytes"]
        self._check_records()

    def _damaged(self, what: str) -> SnapshotError:
        return SnapshotError(f"{self.path} is no whole snapshot: {what}")

    def _header(self, n: int) -> npt.NDArray[Any]:
        header = self._map[: HEADER.itemsize].view(HEADER)[0]
        if header["magic"].tobytes() != MAGIC:
            raise self._damaged("it does not begin with the magic bytes")
        if header["version"] != VERSION:
            msg = f"{self.path} has format {header['version']}, and this version reads {VERSION}: save it anew"
            raise SnapshotError(msg)
        if header["digest"].tobytes() != digest(self._map[: HEADER.itemsize - DIGEST]):
            raise self._damaged("its header was changed")
        if header["file_bytes"] != n or header["header_bytes"] != HEADER.itemsize:
            raise self._damaged(f"it has {n} bytes, and had {header['file_bytes']}")
        res: npt.NDArray[Any] = header
        return res

    def _section(self, i: int) -> bytes:
        entry = self.header["sections"][i]
        start, size = int(entry["offset"]), int(entry["size"])
        if start + size > len(self._map):
            raise self._damaged(f"its section {SECTIONS[i]} is cut off")
        raw = self._map[start : start + size].tobytes()
        if entry["digest"].tobytes() != digest(raw):
            raise self._damaged(f"its section {SECTIONS[i]} was changed")
        return raw

    def _contents(self, raw: dict[str, bytes]) -> Contents:
        """Sections that have the digests they should have: what they say is what was written."""
        identity = Identity(raw["identity"])
        sequence = np.frombuffer(raw["sequence"], SEQUENCE)[0]
        numbers = np.frombuffer(raw["plan"], "<i4").tolist()
        n = numbers[0]
        heads = np.frombuffer(raw["states"], STATE, int(sequence["n_state"]))
        at, states = heads.nbytes, []
        for head in heads:
            states.append((int(head["pos"]), raw["states"][at : at + int(head["size"])]))
            at += int(head["size"])
        return Contents(
            identity=identity,
            sequence=sequence,
            tokens=np.frombuffer(raw["tokens"], "<i4").astype(np.int32),
            chunks=np.frombuffer(raw["chunks"], CHUNK),
            plan=(tuple(numbers[1 : 1 + n]), tuple(numbers[2 + n :])),
            states=tuple(states),
        )

    def _check_records(self) -> None:
        entry, chunks = self.header["sections"][-1], self.contents.chunks
        if entry["digest"].tobytes() != digest(chunks["digest"].tobytes()):
            raise self._damaged("the digests of its records were changed")
        if self._start + int(entry["size"]) > len(self._map):
            raise self._damaged("its records are cut off")

    @property
    def n_bytes(self) -> int:
        """Of the file."""
        return len(self._map)

    def record(self, i: int) -> Record:
        """The record of chunk i, (record_bytes,) uint8, read only; not checked."""
        start = self._start + i * self._pitch + self._lead
        return self._map[start : start + self._record_bytes]

    def check(self, i: int, record: Record) -> None:
        """Raise SnapshotError unless these are the bytes that were written as the record of chunk i."""
        if digest(record) != self.contents.chunks["digest"][i].tobytes():
            if self.on_damage:
                self.on_damage()
            raise self._damaged(f"the record of chunk {i} was changed")

    def verify(self) -> Iterator[int]:
        """Check all records, one by one: how many are done. Raises SnapshotError."""
        for i in range(len(self.contents.chunks)):
            self.check(i, self.record(i))
            yield i + 1
