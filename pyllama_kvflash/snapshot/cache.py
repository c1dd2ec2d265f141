"""The prefix cache: a folder of snapshots, from which the longest known prefix of a text is restored.

The file of a text that continues a cached one shares the cached records, so a new turn writes only its own.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol

from pyllama_kvflash.errors import SnapshotError, UsageError, unwritten
from pyllama_kvflash.files import dated, sweep
from pyllama_kvflash.native import Model, Tokens
from pyllama_kvflash.options import Options
from pyllama_kvflash.pool.pager import Pager
from pyllama_kvflash.snapshot import layout
from pyllama_kvflash.snapshot.capture import Capture, usable
from pyllama_kvflash.snapshot.file import Outline, SnapshotFile
from pyllama_kvflash.snapshot.layout import SUFFIX, Chunks, Identity, Source, n_lent
from pyllama_kvflash.snapshot.names import remove_name, write_name
from pyllama_kvflash.text import n_common

try:
    import fcntl
except ImportError:  # Windows: two processes may then both count a file that one of them removed
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
_NAME = 32  # hex digits of a digest in a name


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache. size: bytes. used: time of last use, seconds since 1970; 0 if it lies in the future. mark: inode and size."""

    path: Path
    size: int
    used: float
    mark: tuple[int, int]


@dataclass(slots=True)
class CacheStats:
    """Counts of restore() and save(). n_tokens: positions restored instead of read again."""

    hits: int = 0
    misses: int = 0
    n_tokens: int = 0
    saves: int = 0
    damaged: int = 0


class Savable(Protocol):
    """The part of a sequence that the cache uses. KVSequence has it."""

    options: Options
    model: Model

    @property
    def identity(self) -> Identity:
        """The identity that snapshots must match to be restored here."""

    @property
    def tokens(self) -> Tokens:
        """The sequence's tokens, (n_tokens,) int32."""

    @property
    def n_tokens(self) -> int:
        """Number of the sequence's tokens."""

    @property
    def pager(self) -> Pager:
        """The sequence's pager. Raises UsageError without a pool."""

    def capture(self) -> Capture:
        """Capture the sequence as it is now."""

    def restore(self, snapshot: SnapshotFile, prompt: Tokens | None = None) -> int:
        """Replace the sequence with a snapshot. Returns how many positions were restored."""

    def clear(self) -> None:
        """Forget the sequence."""


class PrefixCache:
    """Snapshots in a folder: one sub-folder for each model and kind of cache, one file for each text.

    A file's name is the digest of the chain of its tokens.

    Any number of processes may use a folder. Files appear and vanish as a whole; a file that is removed while in use stays
    readable for its user. Nothing outside the folder is touched, and no link in it is followed. Only the calling thread uses
    a sequence; begin() writes the file in another thread.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        """folder: created if it is missing. limit: the most bytes of all files; the least recently used are evicted first.

        Raises UsageError.
        """
        self.folder = Path(folder).expanduser()
        self.limit = limit
        self.stats = CacheStats()
        self._outlines: dict[Path, dict[Path, Outline]] = {}  # by sub-folder
        self._mutex = Lock()
        self._writer = ThreadPoolExecutor(1, "kvflash-cache")
        if limit <= 0:
            msg = f"the prefix cache is limited to {limit:,} bytes: give more, such as 20GiB"
            raise UsageError(msg)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _homes(self.folder)
        except OSError as err:
            msg = f"{self.folder} cannot be the prefix cache: {err.strerror or err}"
            raise UsageError(msg) from None

    #
    # a sequence
    #

    def match(self, sequence: Savable, tokens: Tokens) -> int:
        """Return how many tokens of a text (n,) int32, counted from the first, are cached for this sequence."""
        return max((n for n, _ in self._matches(sequence.identity, tokens)), default=0)

    def restore(self, sequence: Savable, tokens: Tokens) -> int:
        """Replace a sequence with the longest cached prefix of a text. Returns the number of positions.

        If that is 0, nothing is cached, and the sequence is now empty. If a file proves unusable, the next best one is taken; a file
        with a damaged record is removed.
        """
        found = sorted(self._matches(sequence.identity, tokens), key=lambda match: match[0], reverse=True)
        for _, path in found:
            try:
                file = SnapshotFile(path)
                file.on_damage = self._discard
                n = sequence.restore(file, tokens)
            except SnapshotError:
                continue
            _touch(path)
            self.stats.hits += 1
            self.stats.n_tokens += n
            return n
        sequence.clear()
        self.stats.misses += 1
        return 0

    def save(self, sequence: Savable) -> Path | None:
        """Save a sequence. Returns the file; None if it would be larger than the cache.

        Raises SnapshotError and UsageError.
        """
        path = self._path(sequence)
        if not self._wanted(path, sequence, 0):
            return path if _exists(path) else None
        return self._write(sequence.capture(), path, 0, sequence.model.path)

    def begin(self, sequence: Savable, keep_s: float = 0.0) -> Future[Path] | None:
        """Save a sequence in a thread, while it continues. Returns a future with the file; None if there is nothing to write.

        keep_s: for this many seconds the file counts as just used, and is evicted last.

        Raises SnapshotError and UsageError.
        """
        path = self._path(sequence)
        if not self._wanted(path, sequence, keep_s):
            return None
        capture = sequence.capture()
        return capture.submit(self._writer, path, partial(self._write, capture, path, keep_s, sequence.model.path))

    def close(self) -> None:
        """Wait for the files being written."""
        self._writer.shutdown()

    def _wanted(self, path: Path, sequence: Savable, keep_s: float) -> bool:
        """Return whether to write a sequence's file: not if it exists, or would be too large. Touches an existing file."""
        pager = sequence.pager
        codes = pager.guests.n_bytes(pager.ledger.n_tokens) if pager.guests else 0
        if pager.ledger.n_chunks * pager.records.record_bytes + codes > self.limit:
            return False
        if _exists(path):
            _touch(path, time.time() + keep_s)
            return False
        return True

    def _write(self, capture: Capture, path: Path, keep_s: float, model: Path) -> Path:
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if path.is_symlink():  # writing would follow it, out of the folder
                path.unlink()
        except OSError as err:
            capture.release()
            raise SnapshotError(unwritten(path.parent, err)) from None
        capture.write(path, choose=partial(self._sources, path.parent))
        write_name(path.parent, model)
        self.stats.saves += 1
        _touch(path, time.time() + keep_s)
        self._supersede(path)
        self.evict()
        return path

    def _sources(self, home: Path, chunks: Chunks) -> list[Source]:
        """Return the files that already have the records of the first chunks.

        The last source is dropped as long as it supplies no more records than the new file must write. So files have few sources,
        even after many turns; and a record is only rewritten into a file that writes at least twice as many as the old one supplied.
        """
        n, best = 0, None
        for file in self._known(home):
            n_same = n_common(file.checksums, chunks["checksum"])
            if n_same > n:
                with suppress(SnapshotError):  # one of its own sources cannot be used
                    file.check_sources()
                    n, best = n_same, file
        if best is None:
            return []
        res, start = [], 0
        for source in (*best.sources, best.as_source):
            if start < n:
                res.append(replace(source, end=min(source.end, n)))
            start = source.end
        while res and n_lent(res) - n_lent(res[:-1]) <= len(chunks) - n_lent(res):
            res.pop()
        return res

    def _path(self, sequence: Savable) -> Path:
        """Return the path of a sequence's file. Raises UsageError if the sequence is empty."""
        identity = sequence.identity
        if not sequence.n_tokens:
            msg = "there is nothing to save: the context is empty"
            raise UsageError(msg)
        chain = layout.chain(identity, sequence.tokens, sequence.options.chunk)
        return self._home(identity) / f"{chain[-1].hex()[:_NAME]}{SUFFIX}"

    def _home(self, identity: Identity) -> Path:
        return self.folder / layout.digest(identity.raw, bytes([layout.VERSION])).hex()[:_NAME]

    def _matches(self, identity: Identity, tokens: Tokens) -> list[tuple[int, Path]]:
        """Return the files with a prefix of a text, each with the length of that prefix in tokens."""
        res = []
        for file in self._known(self._home(identity)):
            with suppress(SnapshotError):  # it has another text, or one of its sources cannot be used
                n = usable(file, identity, tokens)
                file.check_sources()
                res.append((n, file.path))
        return res

    def _known(self, home: Path) -> list[Outline]:
        """Return the outlines of a sub-folder's files. Damaged files are left out; verify() reports them."""
        res = []
        with self._mutex:
            known, self._outlines[home] = self._outlines.get(home, {}), {}
            for entry in _files(home):
                file = known.get(entry.path)
                with suppress(SnapshotError, OSError):
                    if file is None or file.mark != entry.mark:
                        file = Outline.of(entry.path)
                    self._outlines[home][entry.path] = file
                    res.append(file)
        return res

    def _supersede(self, path: Path) -> None:
        """Remove the files that a new file replaces.

        An old file is replaced if its text is a prefix of the new one's, if the new file has all its states, and if no file needs it.
        The new file inherits the latest time of use.
        """
        files = {file.path: file for file in self._known(path.parent)}
        needed = {source for file in files.values() for source in file.needs}
        new = files.pop(path, None)
        for old in files.values():
            if (
                new is not None
                and old.path not in needed
                and n_common(new.tokens, old.tokens) == len(old.tokens)
                and set(old.states) <= set(new.states)
                and not old.identity.difference(new.identity)
            ):
                with suppress(OSError):
                    _touch(path, old.path.stat().st_mtime)
                self.remove(old.path)

    def remove(self, path: Path) -> list[Path]:
        """Remove a file, and the files that need its records. Returns the files removed."""
        gone = [path, *(file.path for file in self._known(path.parent) if path in file.needs)]
        return [p for p in gone if _unlinked(p)]

    def _discard(self, path: Path) -> None:
        """Remove a file that proved damaged."""
        if self.remove(path):
            self.stats.damaged += 1

    #
    # the folder
    #

    def entries(self) -> list[Entry]:
        """Return all files, the most recently used first."""
        found = [entry for home in _folders(self.folder) for entry in _files(home)]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def unreadable(self) -> list[str]:
        """Return a sentence for each sub-folder that cannot be read; entries() lacks its files."""
        res = []
        for home in _folders(self.folder):
            try:
                for entry in os.scandir(home):
                    with suppress(FileNotFoundError):  # another process has removed it
                        entry.stat(follow_symlinks=False)
            except OSError as err:
                res.append(f"{home} cannot be read: {err.strerror or err}")
        return res

    def evict(self, limit: int | None = None) -> list[Path]:
        """Remove leftovers of killed processes, then the least recently used files, until the rest fits the limit.

        limit: bytes; None: the cache's own. Using a file counts as using its sources. Returns the files removed. Raises SnapshotError
        if the folder cannot be written.
        """
        removed: list[Path] = []
        with self._lock():
            for home in _folders(self.folder):
                sweep(home, f".*{SUFFIX}.*.part")
            total = 0
            for entry, file in self._by_use():
                if entry.path in removed:
                    continue
                total += entry.size
                if total > (self.limit if limit is None else limit) or (file and file.is_orphan):
                    removed += self.remove(entry.path)
                    total -= entry.size
        return removed

    def empty(self) -> list[Path]:
        """Remove all files, the names of models, and the emptied sub-folders.

        An unfinished file stays while its process lives. Returns the snapshots removed. Raises the errors of evict().
        """
        removed = self.evict(0)
        for home in _folders(self.folder):
            remove_name(home)
            with suppress(OSError):  # the folder has a foreign file, or a new one
                home.rmdir()
        with suppress(OSError):
            (self.folder / _LOCK).unlink()
        return removed

    def _by_use(self) -> list[tuple[Entry, Outline | None]]:
        """Return all files, the most recently used first; sources come before the files that need them."""
        files = {file.path: file for home in _folders(self.folder) for file in self._known(home)}
        entries = self.entries()
        used = {entry.path: entry.used for entry in entries}
        for path, file in files.items():
            for source in file.needs:
                used[source] = max(used.get(source, 0.0), used.get(path, 0.0))

        def order(entry: Entry) -> tuple[float, int]:
            file = files.get(entry.path)
            return -used[entry.path], len(file.sources) if file else 0

        return [(entry, files.get(entry.path)) for entry in sorted(entries, key=order)]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one process at a time remove files."""
        if fcntl is None:
            yield
            return
        with ExitStack() as stack:
            try:
                file = stack.enter_context((self.folder / _LOCK).open("a"))
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as err:
                raise SnapshotError(unwritten(self.folder, err)) from None
            yield


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError):
        return _homes(folder)
    return []


def _homes(folder: Path) -> list[Path]:
    """Return the sub-folders of the cache. Raises OSError."""
    with os.scandir(folder) as found:
        return sorted(Path(p.path) for p in found if len(p.name) == _NAME and p.is_dir(follow_symlinks=False))


def _files(home: Path) -> list[Entry]:
    res = []
    with suppress(OSError):
        for entry in os.scandir(home):
            with suppress(OSError):
                if (
                    entry.name.endswith(SUFFIX)
                    and not entry.name.startswith(".")
                    and entry.is_file(follow_symlinks=False)
                ):
                    status = entry.stat(follow_symlinks=False)
                    mark = status.st_ino, status.st_size
                    res.append(Entry(Path(entry.path), status.st_size, dated(status.st_mtime), mark))
    return res


def _touch(path: Path, until: float | None = None) -> None:
    """Set a file's time of use, in seconds since 1970 (None: now), unless the file already has a later one."""
    with suppress(OSError):
        now = time.time()
        os.utime(path, (now, max(now if until is None else until, dated(path.stat().st_mtime))))


def _exists(path: Path) -> bool:
    with suppress(OSError):  # writing the file reports the error
        return path.exists()
    return False


def _unlinked(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
