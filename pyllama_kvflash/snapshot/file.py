"""Read a .kvsnap file: its tables at once, each record when it is used."""

import os
import stat
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self
from weakref import finalize

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.native import Notes, Record, Taken, Tokens, noted
from pyllama_kvflash.native.checksum import Checksum
from pyllama_kvflash.snapshot import layout
from pyllama_kvflash.snapshot.layout import CHUNK, DIGEST, HEADER, SOURCE, START, Chunks, Contents, Identity, Source
from pyllama_kvflash.snapshot.saved_guests import SavedGuests

_LOOK_SECONDS = 0.002  # polling interval for a record that another thread reads
_BLOCK = 1 << 20  # bytes that are read and then summed at a time, so that they are still in the processor's cache


class OrphanError(SnapshotError):
    """A file depends on records in another file, which is gone or was changed."""


class UnreadableError(SnapshotError):
    """A file that may be intact cannot be read here, because of its permissions, a disk error or another format.

    reason: why, in a few words.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Opened:
    """A file with a valid header, open while this object lives.

    Other processes may change the file meanwhile, so its bytes are copied before they are checked, and never mapped: truncating a
    mapped file would kill the process. A file that is replaced or deleted stays readable.
    """

    def __init__(self, path: Path) -> None:
        """Open a file. Raises SnapshotError, which names the fault."""
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block for ever
        except (FileNotFoundError, ValueError) as err:  # ValueError: a name with a zero byte
            msg = f"{path} cannot be read: {getattr(err, 'strerror', None) or err}"
            raise SnapshotError(msg) from None
        except OSError as err:
            raise self._unreadable(err) from None
        self._fd = fd
        finalize(self, os.close, fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise self.damaged("it is not a regular file")
        self.n_bytes = status.st_size
        self.mark = status.st_ino, status.st_size
        self.header = self._header()
        self.start = int(self.header["sections"][-1]["offset"])

    def damaged(self, what: str) -> SnapshotError:
        return SnapshotError(f"{self.path} is not a whole snapshot: {what}")

    def _unreadable(self, err: OSError) -> UnreadableError:
        reason = err.strerror or str(err)
        return UnreadableError(f"{self.path} cannot be read: {reason}", reason)

    def _header(self) -> npt.NDArray[Any]:
        start = self._beginning(START)
        if start["magic"].tobytes() != layout.MAGIC:
            raise self.damaged("it does not begin with the magic bytes")
        version = int(start["version"])
        if version != layout.VERSION:
            msg = f"{self.path} was written by another version of kvflash (format {version}, here {layout.VERSION}): remove it, or save it anew"
            raise UnreadableError(msg, "it was written by another version of kvflash")
        header = self._beginning(HEADER)
        if header["digest"].tobytes() != layout.digest(header.tobytes()[:-DIGEST]) or header["version"] != version:
            raise self.damaged("its header was changed")
        if header["file_bytes"] != self.n_bytes or header["header_bytes"] != header.itemsize:
            raise self.damaged(f"it has {self.n_bytes:,} bytes, and had {header['file_bytes']:,}")
        return header

    def _beginning(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if self.n_bytes < dtype.itemsize:
            raise self.damaged(f"it has {self.n_bytes:,} bytes, fewer than a header")
        raw = np.empty(dtype.itemsize, np.uint8)
        self.read(0, raw, "its header")
        res: npt.NDArray[Any] = raw.view(dtype)[0]
        return res

    def read(self, start: int, into: Record, what: str) -> bytes:
        """Copy bytes into an array (n,) uint8, unchecked. Returns their checksum. Any thread may call this.

        what: the part of the file, for a message. Raises SnapshotError if the file is too short.
        """
        if start + len(into) > self.n_bytes:
            raise self.damaged(f"{what} is cut off")
        res = Checksum()
        for first in range(0, len(into), _BLOCK):
            block = into[first : first + _BLOCK].data
            n = 0
            while n < len(block):
                try:
                    more = os.preadv(self._fd, [block[n:]], start + first + n)
                except OSError as err:
                    raise self._unreadable(err) from None
                if not more:
                    raise self.damaged(f"{what} was cut off while it was in use")
                n += more
            res.update(block)
        return res.digest()

    def entry(self, name: str) -> npt.NDArray[Any]:
        """Return a section's offset, size and digest."""
        res: npt.NDArray[Any] = self.header["sections"][layout.SECTIONS.index(name)]
        return res

    def section(self, name: str) -> bytes:
        """Return the bytes of a section, checked against its digest. Raises SnapshotError."""
        entry = self.entry(name)
        if int(entry["offset"]) + int(entry["size"]) > self.n_bytes:
            raise self.damaged(f"its section {name} is cut off")
        raw = np.empty(int(entry["size"]), np.uint8)
        self.read(int(entry["offset"]), raw, f"its section {name}")
        if entry["digest"].tobytes() != layout.digest(raw):
            raise self.damaged(f"its section {name} was changed")
        return raw.tobytes()

    def contents(self, *without: str) -> Contents:
        """Return the contents of the file's tables. without: sections to treat as empty. Raises SnapshotError."""
        raw = {name: b"" if name in without else self.section(name) for name in layout.TABLES}
        try:
            return _contents(raw)
        except (ValueError, IndexError, KeyError):  # the digests match, but write() never makes such tables
            raise self.damaged("its tables contradict each other") from None


def _opened(path: Path, source: Source) -> _Opened:
    """Open a source of the file at `path`. Raises OrphanError, or UnreadableError if the source may still be intact."""
    try:
        its = path.with_name(source.name)
        if not its.is_symlink() and (found := _Opened(its)).header["digest"].tobytes() == source.header:
            return found
    except UnreadableError:
        raise
    except (SnapshotError, ValueError):  # ValueError: not a file name
        pass
    msg = f"{path} has some of its records in {source.name}, which is gone from that folder, or was changed"
    raise OrphanError(msg)


@dataclass(frozen=True, slots=True)
class Outline:
    """The tables of a file that show whether it can be used for a text.

    mark: inode and size.
    header: digest of the header.
    tokens: (n_tokens,) int32.
    checksums: those of the records, (n_chunks,) V16.
    states: positions of the states outside chunks; empty for a plain cache.
    """

    path: Path
    mark: tuple[int, int]
    header: bytes
    identity: Identity
    tokens: Tokens
    checksums: Chunks
    states: tuple[int, ...]
    sources: tuple[Source, ...]

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the outline of a file without keeping it open, since there may be many. Raises SnapshotError."""
        own = _Opened(path)
        return cls._of(own, own.contents("states", "guests"))

    @classmethod
    def _of(cls, own: _Opened, contents: Contents) -> Self:
        return cls(
            path=own.path,
            mark=own.mark,
            header=own.header["digest"].tobytes(),
            identity=contents.identity,
            tokens=contents.tokens,
            checksums=contents.chunks["checksum"].copy(),
            states=tuple(pos for pos, _ in contents.states),
            sources=contents.sources,
        )

    @property
    def stops(self) -> tuple[int, ...]:
        """The positions at which the snapshot can be cut, ascending; the last one is its end."""
        n, chunk = len(self.tokens), int(self.identity.fields["chunk"])
        return self.states or (*range(chunk, n, chunk), n)

    @property
    def as_source(self) -> Source:
        """The file as a source for another one, with the records that it holds itself."""
        return Source(self.path.name, self.header, layout.n_lent(self.sources), len(self.checksums))

    @property
    def needs(self) -> frozenset[Path]:
        """The other files that hold records of this one."""
        return frozenset(self.path.parent / source.name for source in self.sources)

    @property
    def is_orphan(self) -> bool:
        """Whether the file can never be used, because it depends on records in another file that is gone."""
        with suppress(UnreadableError):
            try:
                self.check_sources()
            except OrphanError:
                return True
        return False

    def check_sources(self) -> None:
        """Raise OrphanError or UnreadableError unless all sources exist and can be read."""
        for source in self.sources:
            _opened(self.path, source)


class SnapshotFile:
    """An open snapshot. Codes and records are read and checked when they are used, in any thread; everything else, when it is opened.

    The object keeps the file and its sources open while it lives, so they may be renamed, replaced or deleted.
    """

    def __init__(self, path: Path) -> None:
        """Open a file. Raises SnapshotError, which names the fault, and OrphanError if a source is gone."""
        self.path = path
        self.on_damage: Callable[[Path], None] | None = None  # called with the file whose record or codes are damaged
        own = _Opened(path)
        self.header = own.header
        self.contents = own.contents()
        self._check_records(own)
        self._codes = self._places_of_codes(own)
        self._pitch, self._lead = layout.record_place(self.contents.identity)
        sources = self.contents.sources
        self._parts = [*(_opened(path, source) for source in sources), own]
        self._firsts = [*(s.first for s in sources), self.contents.n_lent]  # chunk of the first record in each
        self._ends = [s.end for s in sources]

    def _check_records(self, own: _Opened) -> None:
        entry, chunks = self.header["sections"][-1], self.contents.chunks
        if entry["digest"].tobytes() != layout.digest(chunks["checksum"].tobytes()):
            raise own.damaged("the checksums of its records were changed")
        if own.start + int(entry["size"]) > own.n_bytes:
            raise own.damaged("its records are cut off")

    def _places_of_codes(self, own: _Opened) -> list[tuple[int, int, bytes]]:
        """Return the offset, size and checksum of each layer's codes; [] if there are none."""
        guests, entry = self.contents.guests, own.entry("codes")
        if guests is None:
            return []
        n, n_coded, n_known = len(self.contents.tokens), guests.n_tokens, guests.n_known
        if not n_known <= n_coded <= n:
            raise own.damaged(
                f"{n_coded:,} of its {n:,} positions have codes, and {n_known:,} had them when the last segment began"
            )
        is_sum = entry["digest"].tobytes() == layout.digest(*guests.checksums)
        if not is_sum or not guests.sizes or sum(guests.sizes) != entry["size"]:
            raise own.damaged("the checksums of its codes were changed")
        starts = accumulate(guests.sizes[:-1], initial=int(entry["offset"]))
        return list(zip(starts, guests.sizes, guests.checksums, strict=True))

    @property
    def n_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._parts[-1].n_bytes

    @property
    def outline(self) -> Outline:
        """The outline of this file."""
        return Outline._of(self._parts[-1], self.contents)  # noqa: SLF001 (of this module)

    def record(self, i: int) -> Record:
        """Return a checked copy of the record of chunk i, (record_bytes,) uint8. Any thread may call this.

        Raises SnapshotError if the record is damaged or cut off.
        """
        res = np.empty(self.contents.identity.fields["record_bytes"], np.uint8)
        self.fill(i, res)
        return res

    def fill(self, i: int, place: Record) -> None:
        """Read the record of chunk i into a place (record_bytes,) uint8, and check it there. Any thread may call this.

        Raises SnapshotError; the place then holds no valid record.
        """
        k = bisect_right(self._ends, i)
        part, start = self._parts[k], self._parts[k].start + (i - self._firsts[k]) * self._pitch + self._lead
        with self._reporting(part):
            if part.read(start, place, f"the record of chunk {i}") != self.contents.chunks["checksum"][i].tobytes():
                raise part.damaged(f"the record of chunk {i} was changed")

    def codes(self, layer: int) -> Record:
        """Return a checked copy of the codes of a layer, (n_bytes,) uint8; contents.guests has the size. Any thread may call this.

        Raises SnapshotError if the codes are damaged or cut off.
        """
        own, (start, size, found) = self._parts[-1], self._codes[layer]
        res = np.empty(size, np.uint8)
        with self._reporting(own):
            if own.read(start, res, "its section codes") != found:
                raise own.damaged("its section codes was changed")
        return res

    @contextmanager
    def _reporting(self, part: _Opened) -> Iterator[None]:
        """Report a damaged file to on_damage."""
        try:
            yield
        except UnreadableError:
            raise
        except SnapshotError:
            if self.on_damage:
                self.on_damage(part.path)
            raise

    def verify(self) -> Iterator[int]:
        """Check the codes, then the file's own records one by one. Yields the number of records checked. Raises SnapshotError."""
        for layer in range(len(self._codes)):
            self.codes(layer)
        n = self.contents.n_lent
        for i in range(n, len(self.contents.chunks)):
            self.record(i)
            yield i - n + 1


class Filling:
    """A function that reads a record into its place and checks it there, so that no second copy is held.

    Only one thread reads the record, and others wait: if the file changed meanwhile, a second read would damage a record in use.
    """

    def __init__(self, file: SnapshotFile, chunk: int) -> None:
        self._file, self._chunk = file, chunk
        self._done = False
        self._notes: Notes = {}

    def __call__(self, place: Record) -> None:
        """Fill the place, if it is not filled yet. Raises SnapshotError. Any thread may call this."""
        while not self._done:
            try:
                noted(self._notes, self._chunk, lambda: self._fill(place))
            except Taken:
                time.sleep(_LOOK_SECONDS)

    def _fill(self, place: Record) -> None:
        if not self._done:  # another thread may have read it before the note was made
            self._file.fill(self._chunk, place)
            self._done = True


def _contents(raw: dict[str, bytes]) -> Contents:
    """Return the contents of sections whose digests were checked. Raises ValueError, IndexError or KeyError for inconsistent tables."""
    at, states = 0, []
    for head in np.frombuffer(raw["stops"], layout.STOP):
        states.append((int(head["pos"]), raw["states"][at : at + int(head["size"])]))
        at += int(head["size"])
    return Contents(
        identity=Identity(raw["identity"]),
        sequence=np.frombuffer(raw["sequence"], layout.SEQUENCE)[0],
        tokens=np.frombuffer(raw["tokens"], "<i4").astype(np.int32),
        chunks=np.frombuffer(raw["chunks"], CHUNK),
        states=tuple(states),
        scoring=layout.unpacked(raw["scoring"]),
        sources=tuple(
            Source(s["name"].decode(), s["header"].tobytes(), int(s["first"]), int(s["end"]))
            for s in np.frombuffer(raw["sources"], SOURCE)
        ),
        guests=SavedGuests.unpacked(raw["guests"]),
    )
