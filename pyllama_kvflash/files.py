"""Writes files. It never overwrites a file that the run reads, and replaces an old file only once the new one is complete."""

import errno
import glob
import os
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Self

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.gguf_header import parts

_ABANDONED = 24 * 3600  # seconds after which an unfinished file is removed, even if its process is alive
AHEAD = 2 * 3600
"""Seconds by which a file's time may be ahead of the clock: a request may keep a file for an hour, and clocks differ."""
_LONGEST = 200  # most bytes of a file's name in the name of its unfinished file; file systems allow 255 in all


#
# replacing a file
#


class Replacement:
    """An unfinished file beside its target. Once it is complete, it replaces the target.

    A link is followed, even to a file that does not exist yet. The new file gets the old one's mode and, if permitted, its
    owner. Other hard links of the old file keep the old contents. Used as a context manager, it ends with commit(), or with
    discard() if the block raises.

    A killed process leaves its unfinished file, .NAME.PID.XXXXXXXX.part. The next Replacement of NAME removes it.
    """

    def __init__(self, target: Path, mode: int = 0o666) -> None:
        """Create the unfinished file. mode: the file's mode, less the umask, if the target does not exist yet.

        Raises OSError if the target's folder does not exist, permission is missing, or the target is not a regular file.
        """
        self.target = Path(os.path.realpath(target))
        old = _regular(self.target)
        name = os.fsdecode(os.fsencode(self.target.name)[:_LONGEST])
        sweep(self.target.parent, f".{glob.escape(name)}.*.part")
        self.path = self.target.with_name(f".{name}.{os.getpid()}.{token_hex(4)}.part")
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode if old is None else 0o600)
        try:
            if old is not None:
                _take_after(fd, old)
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def commit(self) -> None:
        """Flush the new file to disk, then rename it over the target. Raises OSError; the old file then stays.

        If only the rename fails, as it does over a mounted file, the new file stays, and the error names it.
        """
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            self.discard()
            raise
        try:
            self.path.replace(self.target)
        except OSError as err:
            raise OSError(err.errno, f"{err.strerror}; the new file is {self.path}") from None
        _sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove the unfinished file. Harmless when called again, and after commit()."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def write(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all. A pipe or a character device is written to directly. Raises OSError."""
    if is_stream(path):
        path.write_bytes(data)
        return
    with Replacement(path) as new:
        new.path.write_bytes(data)


def is_stream(path: Path) -> bool:
    """Return whether a path is a pipe or a character device: neither can be replaced, and nothing in it can be lost."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # ValueError: a zero byte
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def standard_stream(path: Path) -> int | None:
    """Return 1 if stdout goes to this file or pipe, 2 if stderr does, else None."""
    with suppress(OSError, ValueError):
        status = path.stat()
        for fd in (1, 2):
            with suppress(OSError):  # it is closed
                if os.path.samestat(status, os.fstat(fd)) and not stat.S_ISCHR(status.st_mode):
                    return fd
    return None


def sweep(folder: Path, pattern: str) -> None:
    """Remove unfinished files whose process is gone, or that are a day old. pattern: matches their names, .NAME.PID.XXXXXXXX.part."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            pid = path.name.split(".")[-3]
            if time.time() - dated(path.lstat().st_mtime) > _ABANDONED or (pid.isdecimal() and not _alive(int(pid))):
                path.unlink()


def dated(time_s: float) -> float:
    """Return a file's time, in seconds since 1970; 0 if that is more than AHEAD in the future, as after a change of the clock."""
    return time_s if time_s <= time.time() + AHEAD else 0.0


def kind_of(mode: int) -> str:
    """Return the kind of a file, in words for a message. mode: its st_mode."""
    kinds = {
        stat.S_IFREG: "a regular file",
        stat.S_IFDIR: "a directory",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a block device",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def _regular(target: Path) -> os.stat_result | None:
    """Return the status of a file to replace; None if it does not exist. Raises OSError if it must not be replaced."""
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(status.st_mode)}, not a regular file", str(target))
    if not os.access(target, os.W_OK):  # a rename would replace a write-protected file
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return status


def _take_after(fd: int, old: os.stat_result) -> None:
    """Give a new file the owner and the mode of an old one, as far as that is permitted."""
    with suppress(OSError):
        os.fchown(fd, -1, old.st_gid)
    with suppress(OSError):
        os.fchown(fd, old.st_uid, -1)
    with suppress(OSError):  # last, because a change of the owner clears bits
        os.fchmod(fd, stat.S_IMODE(old.st_mode))


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can sync a folder
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


#
# the files that a run reads and writes
#


@dataclass(frozen=True, slots=True)
class _Use:
    """A file that is read or written.

    name: the option that names the file, or the file's purpose. mark: see _mark(). updates: see Uses.write().
    """

    name: str
    path: Path
    mark: tuple[object, ...]
    updates: str = ""

    @classmethod
    def of(cls, name: str, path: str | Path, updates: str = "") -> Self:
        return cls(name, Path(path), _mark(Path(path)), updates)


@dataclass(slots=True)
class Uses:
    """The files that a run reads, those that it writes, and the folders that it manages.

    Each file is compared with the others as soon as it is added: by inode, through links, and without regard to case if the
    file system ignores case. Only regular files, and files that do not exist yet, can be the same: two outputs may go to
    /dev/null.
    """

    _reads: list[_Use] = field(default_factory=list)
    _writes: list[_Use] = field(default_factory=list)
    _folders: list[tuple[str, Path]] = field(default_factory=list)

    def read(self, name: str, *paths: str | Path) -> None:
        """Add files that are read. name: for messages. Raises UsageError if one of them is written, too."""
        for path in paths:
            use = _Use.of(name, path)
            for other in self._writes:
                if other.updates != name and _same(other, use):
                    raise _overwritten(other, use)
            self._reads.append(use)

    def write(self, name: str, *paths: str | Path, updates: str = "") -> None:
        """Add files that are written. name: for messages.

        updates: the name of an input that an output may replace, because the input is read from its old inode to the end.

        Raises UsageError if an output is also read, is also another output, or is in a managed folder.
        """
        for path in paths:
            use = _Use.of(name, path, updates)
            for other in self._reads:
                if other.name != updates and _same(other, use):
                    raise _overwritten(use, other)
            for other in self._writes:
                if other.name != name and _same(other, use):
                    msg = f"{name} and {other.name} are one file, {path}: give each a file of its own"
                    raise UsageError(msg)
            for folder_name, folder in self._folders:
                _check_outside(use, folder_name, folder)
            self._writes.append(use)

    def manage(self, name: str, folder: Path) -> None:
        """Add a folder in which the run creates and removes files. Raises UsageError if an output is in it."""
        for use in self._writes:
            _check_outside(use, name, folder)
        self._folders.append((name, folder))


def model_parts(path: str | Path) -> list[Path]:
    """Return the files of a model: the file itself, or all parts of a split GGUF."""
    return [Path(part) for part in parts(str(path))]


def check_outputs(outputs: Iterable[tuple[str, Path]], inputs: Iterable[tuple[str, Path]]) -> None:
    """Raise UsageError if an output is also an input. Each file comes with a name for the message."""
    uses = Uses()
    for name, path in inputs:
        uses.read(name, path)
    for name, path in outputs:
        uses.write(name, path)


def _overwritten(output: _Use, read: _Use) -> UsageError:
    its = "" if read.path == output.path else f", {read.path}"
    return UsageError(f"{output.name} {output.path} would overwrite the file of {read.name}{its}: give another file")


def _check_outside(use: _Use, name: str, folder: Path) -> None:
    real, home = Path(os.path.realpath(use.path)), Path(os.path.realpath(folder))
    if home in real.parents or any(_same_folder(parent, home) for parent in real.parents):
        msg = f"{use.name} {use.path} is in the folder of {name}, {folder}, in which files are created and removed: give another place"
        raise UsageError(msg)


def _same_folder(a: Path, b: Path) -> bool:
    with suppress(OSError):
        return a.samefile(b)
    return False


def _mark(path: Path) -> tuple[object, ...]:
    """Return the identity of a file: its device and inode or, if it does not exist yet, its folder's device and inode, with the file's name.

    (): the file is not a regular file, and is the same as no other.
    """
    try:
        real = Path(os.path.realpath(path))
        with suppress(FileNotFoundError):
            status = real.stat()
            return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else ()
        folder = real.parent.stat()
    except (OSError, ValueError):  # nothing can be written there; ValueError: a zero byte
        return ()
    return folder.st_dev, folder.st_ino, real.name


def _same(a: _Use, b: _Use) -> bool:
    if a.mark == b.mark:
        return a.mark != ()
    if len(a.mark) != len(b.mark) or a.mark[:2] != b.mark[:2]:
        return False
    return str(a.mark[-1]).casefold() == str(b.mark[-1]).casefold() and _ignores_case(
        Path(os.path.realpath(a.path)).parent
    )


def _ignores_case(folder: Path) -> bool:
    """Return whether a folder ignores the case of names, by creating a temporary file in it."""
    with suppress(OSError), tempfile.NamedTemporaryFile(prefix=".kvflash-case-", dir=folder) as file:
        return Path(file.name).with_name(Path(file.name).name.swapcase()).exists()
    return False
