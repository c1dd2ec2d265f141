"""The layout of a .kvsnap file (see docs/SNAPSHOT_FORMAT.md), and its atomic writing."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import SnapshotError, unwritten
from pyllama_kvflash.files import Replacement
from pyllama_kvflash.native import Record, StateBytes, Tokens
from pyllama_kvflash.native.checksum import CHECKSUM
from pyllama_kvflash.policy import Scoring
from pyllama_kvflash.snapshot.saved_guests import SavedGuests

SUFFIX = ".kvsnap"
MAGIC = b"\x93KVSNAP\n"
VERSION = 5
DIGEST = 32  # bytes of a SHA-256, of tables and tokens. Records and codes are much larger, and have faster checksums
PAGE = 4096  # bytes; a record's rows begin on a page, as in host memory

_PRIVATE = 0o600  # the file's mode: only the owner may read it, because it holds a text

EXACT = 1 << 31  # in an identity's flags: prompts are read exactly, not through the pool
LONG = 1 << 30  # keys have the long factors of RoPE

TABLES = ("identity", "sequence", "tokens", "chunks", "scoring", "sources", "stops", "states", "guests")
SECTIONS = (*TABLES, "codes", "records")

START = np.dtype([("magic", "V8"), ("version", "<u4"), ("header_bytes", "<u4"), ("file_bytes", "<u8")])
_SECTION = np.dtype([("offset", "<u8"), ("size", "<u8"), ("digest", "V32")])
HEADER = np.dtype([*START.descr, ("sections", _SECTION, len(SECTIONS)), ("digest", "V32")])
"""A header begins with the fields of START, and ends with the digest of everything before it."""
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
        ("memory", "S32"),  # the memory's class in llama.cpp
    ]
)
SEQUENCE = np.dtype(
    [
        ("n_tokens", "<u4"),
        ("n_ctx", "<u4"),
        ("n_pool", "<u4"),
        ("n_kv", "<u4"),  # width of the attention graph
        ("tick", "<u8"),
        ("pending", "<i4"),  # a token that was produced but not decoded yet; -1: none
        ("opens_until", "<u4"),  # the position up to which an answer is decoded losslessly
    ]
)
CHUNK = np.dtype(
    [
        ("chain", "V32"),  # digest of the chain so far and this chunk's tokens
        ("checksum", f"V{CHECKSUM}"),  # of its record
        ("resident", "|b1"),
        ("pinned", "<i1"),
        ("reserved", "<i2"),  # 0
        ("block", "<i4"),  # -1: none
        ("touched", "<i8"),
        ("score", "<f8"),
    ]
)
SCORING = np.dtype(
    [
        ("n_since", "<u4"),  # tokens since the scoring began
        ("what", "<u4"),  # what follows this head: 0 nothing, 1 queries (f4), 2 scores (f8)
        ("cost_s", "<f8"),  # seconds of a scoring; 0: not measured
        ("step_s", "<f8"),  # seconds of a token
    ]
)
SOURCE = np.dtype(
    [
        ("name", "S64"),
        ("header", "V32"),  # digest of the source's header
        ("first", "<u4"),  # chunk of the first record in the source
        ("end", "<u4"),  # the source supplies the records of chunks before this one, from the previous source's end on
    ]
)
STOP = np.dtype([("pos", "<u4"), ("reserved", "<u4"), ("size", "<u8")])

Chunks = npt.NDArray[Any]
"""Array (n_chunks,) of dtype CHUNK."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The model and cache that records belong to. raw: an IDENTITY and its LAYERs, as in a file."""

    raw: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by name, for a message about a difference."""
        head = np.frombuffer(self.raw, IDENTITY, 1)[0]
        res: dict[str, Any] = {name: head[name].item() for name in IDENTITY.names or ()}
        res["layers"] = np.frombuffer(self.raw, LAYER, -1, IDENTITY.itemsize).tolist()
        return res

    def difference(self, other: "Identity") -> str | None:
        """Return the first difference from another identity, in words; None if they are equal."""
        if self.raw == other.raw:
            return None
        mine, its = self.fields, other.fields
        if mine["fingerprint"] != its["fingerprint"]:
            return "it was made with another model, or another scaling of RoPE (`rope.scaling`)"
        if (mine["flags"] ^ its["flags"]) & EXACT:
            was, now = (_READ[bool(fields["flags"] & EXACT)] for fields in (mine, its))
            return f"its prompts were read {was}, and here they are read {now} (`prefill`)"
        if (mine["flags"] ^ its["flags"]) & LONG:
            was, now = ("long" if fields["flags"] & LONG else "short" for fields in (mine, its))
            return f"its keys have the {was} factors of RoPE, and a context of this size has the {now} ones (`n_ctx`)"
        for name, words in _DIFFERENCES.items():
            if mine[name] != its[name]:
                return words.format(mine[name], its[name])
        return "its layers or cache types differ (`type_k`, `type_v`)"


_READ = {False: "through the pool", True: "exactly"}

_DIFFERENCES = {
    "memory": "its memory is of class {}, and here it is {}",
    "chunk": "its chunks have {} positions, and {} here (chunk)",
    "layers": "its layers or cache types differ (`type_k`, `type_v`)",
    "flags": "its cache has another layout or rotation: flags {}, and {} here (`flash_attn`, `type_k`, `type_v`)",
}


def chain(identity: Identity, tokens: Tokens, chunk: int) -> list[bytes]:
    """Return for each chunk a digest of the identity and of all tokens up to the chunk's end. tokens: (n,) int32.

    The last chunk may be partly filled.
    """
    last, res = digest(identity.raw), []
    raw = np.ascontiguousarray(tokens, "<i4").tobytes()
    for at in range(0, len(raw), 4 * chunk):
        last = digest(last + raw[at : at + 4 * chunk])
        res.append(last)
    return res


def digest(*parts: Any) -> bytes:
    """Return the SHA-256 of all parts together. parts: bytes, or arrays."""
    res = hashlib.sha256()
    for part in parts:
        res.update(part)
    return res.digest()


@dataclass(frozen=True, slots=True)
class Source:
    """Another file in the same folder that holds records of this one.

    header: the digest at the end of the source's header.
    first: chunk of the first record in the source.
    end: the source supplies the records of chunks up to `end`, exclusive, from the previous source's `end` on (the first: from 0).
    """

    name: str
    header: bytes
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a file, without the records and the codes.

    tokens: (n_tokens,) int32.
    chunks: (n_chunks,) CHUNK, one for each chunk with a position.
    states: (position, bytes) of the states outside chunks; the last position is n_tokens.
    sources: files with the records of the first chunks.
    guests: None if the sequence had neither guests nor codes.
    """

    identity: Identity
    sequence: npt.NDArray[Any]
    tokens: Tokens
    chunks: Chunks
    states: tuple[tuple[int, StateBytes], ...]
    scoring: Scoring = field(default_factory=Scoring)
    sources: tuple[Source, ...] = ()
    guests: SavedGuests | None = None

    @property
    def n_lent(self) -> int:
        """The number of chunks, from the first on, whose records are in other files."""
        return n_lent(self.sources)


def n_lent(sources: Sequence[Source]) -> int:
    """Return the number of chunks, from the first on, whose records are in these sources."""
    return sources[-1].end if sources else 0


def record_place(identity: Identity) -> tuple[int, int]:
    """Return the bytes from one record's start to the next one's, and the bytes before the first record.

    So the rows of each record begin on a page.
    """
    fields = identity.fields
    lead = -fields["meta_bytes"] % PAGE
    return -(-(lead + fields["record_bytes"]) // PAGE) * PAGE, lead


#
# writing
#


def write(
    path: Path,
    contents: Contents,
    records: Iterable[Record],
    on_record: Callable[[int], None] | None = None,
    codes: Sequence[Record] = (),
) -> int:
    """Write a file under another name, and rename it once it is complete and on disk. Returns its size in bytes.

    records: those of the chunks from contents.n_lent on, in order; contents.chunks has their checksums.
    on_record: called with the number of records written.
    codes: those of each layer, if contents.guests describes codes; contents.guests has their checksums.

    Raises SnapshotError, and then leaves nothing behind. A killed process leaves only a file named `.*.part`.
    """
    try:
        with Replacement(path, _PRIVATE) as new, new.path.open("wb") as file:
            return _write(file, contents, records, on_record, codes)
    except OSError as err:
        raise SnapshotError(unwritten(path, err)) from None


def _write(
    file: Any,
    contents: Contents,
    records: Iterable[Record],
    on_record: Callable[[int], None] | None,
    codes: Sequence[Record],
) -> int:
    pitch, lead = record_place(contents.identity)
    header, at = np.zeros((), HEADER), HEADER.itemsize
    of_codes = contents.guests.checksums if contents.guests else ()
    for i, (parts, signed) in enumerate([*(([raw], [raw]) for raw in _tables(contents)), (codes, of_codes)]):
        size = sum(map(len, parts))
        header["sections"][i] = (at, size, np.void(digest(*signed)))
        file.seek(at)
        for part in parts:
            file.write(part)
        at += -(-size // 8) * 8
    start = -(-at // PAGE) * PAGE
    end = start + (len(contents.chunks) - contents.n_lent) * pitch
    file.truncate(end)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, end)  # a full disk fails here
    for i, record in enumerate(records):
        file.seek(start + i * pitch + lead)
        file.write(record)
        if on_record:
            on_record(i + 1)
    header["sections"][-1] = (start, end - start, np.void(digest(contents.chunks["checksum"].tobytes())))
    header["magic"], header["version"] = np.void(MAGIC), VERSION
    header["header_bytes"], header["file_bytes"] = HEADER.itemsize, end
    header["digest"] = np.void(digest(header.tobytes()[:-DIGEST]))
    file.seek(0)
    file.write(header.tobytes())
    return end


def _tables(contents: Contents) -> list[bytes]:
    """Return all sections except the codes and the records."""
    return [
        contents.identity.raw,
        contents.sequence.tobytes(),
        np.ascontiguousarray(contents.tokens, "<i4").tobytes(),
        contents.chunks.tobytes(),
        _packed(contents.scoring),
        np.array([(s.name.encode(), np.void(s.header), s.first, s.end) for s in contents.sources], SOURCE).tobytes(),
        np.array([(pos, 0, len(blob)) for pos, blob in contents.states], STOP).tobytes(),
        b"".join(blob for _, blob in contents.states),
        contents.guests.packed() if contents.guests else b"",
    ]


def _packed(scoring: Scoring) -> bytes:
    head, rest = np.zeros((), SCORING), b""
    head["n_since"], head["cost_s"], head["step_s"] = scoring.n_since, scoring.cost_s, scoring.step_s
    if scoring.scores is not None:
        head["what"], rest = 2, scoring.scores.astype("<f8").tobytes()
    elif scoring.queries is not None:
        head["what"], rest = 1, scoring.queries.astype("<f4").tobytes()
    return head.tobytes() + rest


def unpacked(raw: bytes) -> Scoring:
    """Return the scoring in a file section."""
    head, rest = np.frombuffer(raw, SCORING, 1)[0], raw[SCORING.itemsize :]
    return Scoring(
        n_since=int(head["n_since"]),
        queries=np.frombuffer(rest, "<f4").astype(np.float32) if head["what"] == 1 else None,
        scores=np.frombuffer(rest, "<f8").astype(np.float64) if head["what"] == 2 else None,  # noqa: PLR2004
        cost_s=float(head["cost_s"]),
        step_s=float(head["step_s"]),
    )
