"""The prefix cache: a folder of snapshots, of which the one with the longest prefix of a text is put back."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.saved import SavedSequence
from pyllama_kvflash.snapshot import format as layout
from pyllama_kvflash.snapshot.format import SUFFIX, Identity, SnapshotFile
from pyllama_kvflash.snapshot.ledger import usable
from pyllama_kvflash.text import n_common

try:
    import fcntl
except ImportError:  # Windows: two processes may then both count a file that one of them removed
    fcntl = None  # type: ignore[assignment]

_NAME = 32  # hex digits of a digest that a name has
_ABANDONED = 24 * 3600  # seconds after which an unfinished file is nobody's, if its process cannot be asked for


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache. used: when, seconds since 1970."""

    path: Path
    size: int
    used: float


@dataclass(slots=True)
class CacheStats:
    """What became of restore() and save(). n_tokens: positions that were not read again."""

    hits: int = 0
    misses: int = 0
    n_tokens: int = 0
    saves: int = 0
    damaged: int = 0


class PrefixCache:
    """Snapshots in a folder, one sub-folder for each model and kind of cache, named by the digest of the chain of their tokens.

    Any number of processes may use a folder: files appear whole, and vanish whole; one that is removed while it is in use
    stays for who uses it. Nothing outside the folder is touched, and no link in it is followed.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        """folder: is made. limit: bytes of all files; the one that was used longest ago goes first. Raises UsageError."""
        self.folder = Path(folder).expanduser()
        self.limit = limit
        self.stats = CacheStats()
        self._open: dict[tuple[Path, int, int], SnapshotFile] = {}  # by path, inode and time of change
        if limit <= 0:
            msg = f"the prefix cache is limited to {limit} bytes: give 20GiB, say (--prefix-cache-size)"
            raise UsageError(msg)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            msg = f"{self.folder} cannot be the prefix cache: {err.strerror or err}"
            raise UsageError(msg) from None

    #
    # a sequence
    #

    def match(self, sequence: SavedSequence, tokens: Tokens) -> int:
        """How many tokens of a text the cache has for this sequence, 0: none."""
        return max((n for n, _ in self._matches(sequence.identity, tokens)), default=0)

    def restore(self, sequence: SavedSequence, tokens: Tokens) -> int:
        """Put the longest prefix of a text into a sequence, in place of what is there. How many positions it has, 0: none, and
        the sequence is empty. A file that turns out to be damaged is removed, and the next best one taken.
        """
        found = sorted(self._matches(sequence.identity, tokens), key=lambda match: match[0], reverse=True)
        for _, file in found:
            try:
                n = sequence.restore(file, tokens)
            except SnapshotError:
                continue
            with suppress(OSError):
                os.utime(file.path)
            self.stats.hits += 1
            self.stats.n_tokens += n
            return n
        sequence.clear()
        self.stats.misses += 1
        return 0

    def save(self, sequence: SavedSequence) -> Path | None:
        """Keep a sequence as it is now. Its file; None: it is larger than the cache. Raises SnapshotError and UsageError."""
        path, pager = self._path(sequence), sequence.pager
        if pager.ledger.n_chunks * pager.store.record_bytes > self.limit:
            return None
        if path.exists():
            with suppress(OSError):
                os.utime(path)
            return path
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as err:
            msg = f"{path.parent} cannot be made: {err.strerror or err}"
            raise SnapshotError(msg) from None
        sequence.save(path)
        self.stats.saves += 1
        self._supersede(path, sequence.identity)
        self.evict()
        return path

    def _path(self, sequence: SavedSequence) -> Path:
        """Of the file of a sequence. Raises UsageError if there is nothing in it."""
        identity = sequence.identity
        if not sequence.n_tokens:
            msg = "there is nothing to save: the context is empty"
            raise UsageError(msg)
        chain = layout.chain(identity, sequence.tokens, sequence.options.chunk)
        return self._home(identity) / f"{chain[-1].hex()[:_NAME]}{SUFFIX}"

    def _home(self, identity: Identity) -> Path:
        return self.folder / layout.digest(identity.raw).hex()[:_NAME]

    def _matches(self, identity: Identity, tokens: Tokens) -> list[tuple[int, SnapshotFile]]:
        """Files that have a prefix of a text, and how much of it."""
        res = []
        for entry in _files(self._home(identity)):
            try:
                file = self._opened(entry.path)
                res.append((usable(file, identity, tokens), file))
            except SnapshotError:
                continue  # of another text, or damaged: verify() says so
        return res

    def _opened(self, path: Path) -> SnapshotFile:
        try:
            status = path.stat()
        except OSError as err:  # another process has removed it
            msg = f"{path} cannot be read: {err.strerror or err}"
            raise SnapshotError(msg) from None
        key = path, status.st_ino, status.st_size
        if key not in self._open:
            self._open = {k: file for k, file in self._open.items() if k[0] != path}
            self._open[key] = file = SnapshotFile(path)
            file.on_damage = partial(self._discard, path)
        return self._open[key]

    def _discard(self, path: Path) -> None:
        if self.remove(path):
            self.stats.damaged += 1

    def remove(self, path: Path) -> bool:
        """Remove a file. Whether there was one."""
        self._open = {key: file for key, file in self._open.items() if key[0] != path}
        try:
            path.unlink()
        except OSError:
            return False
        return True

    def _supersede(self, path: Path, identity: Identity) -> None:
        """Remove the files whose text this one begins with, if it can be cut wherever they end."""
        try:
            new = self._opened(path)
        except SnapshotError:
            return
        stops = {pos for pos, _ in new.contents.states}
        for entry in _files(path.parent):
            if entry.path == path:
                continue
            try:
                old = self._opened(entry.path)
            except SnapshotError:
                continue
            same = n_common(new.contents.tokens, old.contents.tokens) == len(old.contents.tokens)
            if same and not old.contents.identity.difference(identity) and {p for p, _ in old.contents.states} <= stops:
                self.remove(entry.path)

    #
    # the folder
    #

    def entries(self) -> list[Entry]:
        """All files, the one that was used last first."""
        found = [entry for home in _folders(self.folder) for entry in _files(home)]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def evict(self, limit: int | None = None) -> list[Path]:
        """Remove what was used longest ago until the rest has no more bytes than the limit, and what killed processes left
        behind. What was removed.
        """
        removed = []
        with self._lock():
            for home in _folders(self.folder):
                _sweep(home)
            total = 0
            for entry in self.entries():
                total += entry.size
                if total > (self.limit if limit is None else limit) and self.remove(entry.path):
                    removed.append(entry.path)
                    total -= entry.size
        return removed

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One process at a time removes files."""
        if fcntl is None:
            yield
            return
        with (self.folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(p for p in folder.iterdir() if len(p.name) == _NAME and p.is_dir() and not p.is_symlink())
    return []


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
                    res.append(Entry(Path(entry.path), status.st_size, status.st_mtime))
    return res


def _sweep(home: Path) -> None:
    """Remove unfinished files whose process is gone."""
    for path in home.glob(f".*{SUFFIX}.*.part"):
        with suppress(OSError):
            pid = path.name.split(".")[-3]
            if time.time() - path.lstat().st_mtime > _ABANDONED or (pid.isdecimal() and not _alive(int(pid))):
                path.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
