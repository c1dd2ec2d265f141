"""What of the prefix cache cannot be read is not damaged: it is said, and stays."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import CLI, SNAPSHOT
from support.runs import Open

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli import main
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"n_ctx": 4096, "pool": 768, "n_threads": 1, "n_batch": 256, "snapshots": True}
SMALL |= {"prefill": "pool"}
LARGE = 1 << 40
TEXT, OTHER = np.random.default_rng(7).integers(0, 4000, (2, 1500)).astype(np.int32)
BEGUN = 1280  # tokens of TEXT in a file of its own; the whole text has its records there


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(KVFlash.from_file(BUNDLED_MODEL, **SMALL))


@pytest.fixture
def kv(opened: Open) -> KVFlash:
    return opened()


def read(kv: KVFlash, tokens: Any) -> KVFlash:
    """In place of what is there."""
    kv.clear()
    for _ in kv.prefill(tokens):
        pass
    return kv


def cache_command(folder: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["cache", *args, "--prefix-cache", str(folder)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A cache's folder with three files, of which two have records in the first, and the name of that."""
    folder = tmp_path_factory.mktemp("cache")
    with KVFlash.from_file(BUNDLED_MODEL, **SMALL) as kv:
        cache = PrefixCache(folder, LARGE)
        first = cache.save(read(kv, TEXT[:BEGUN]))
        assert first
        for text in (np.concatenate([TEXT[:BEGUN], OTHER[:150]]), TEXT):
            assert cache.save(read(kv, text))
    return folder, first.relative_to(folder)


@pytest.fixture
def filled(made: tuple[Path, Path], tmp_path: Path) -> tuple[PrefixCache, Path]:
    """Such a cache in tmp_path, and its first file."""
    folder, first = made
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return PrefixCache(tmp_path, LARGE), tmp_path / first


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, path: Path, code: int) -> None:
    """Let a function of os fail for a file or folder, whoever runs the test."""
    real: Callable[..., Any] = getattr(os, name)

    def failing(at: Any = ".", *rest: Any, **more: Any) -> Any:
        if not isinstance(at, int) and Path(at) == path:
            raise OSError(code, os.strerror(code), str(path))
        return real(at, *rest, **more)

    monkeypatch.setattr(os, name, failing)


@pytest.mark.sampled(CLI, SNAPSHOT)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_opened_stays(
    filled: tuple[PrefixCache, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """And so do those that have records in it."""
    cache, first = filled
    refuse(monkeypatch, "open", first, code)
    done = cache_command(tmp_path, "verify", "--remove")
    assert done.exit_code == 1
    assert f"{first} cannot be read: {os.strerror(code)}" in done.stderr
    assert "none damaged, 3 cannot be read\n" in done.stderr
    assert cache.evict() == []
    assert len(cache.entries()) == 3
    done = cache_command(tmp_path, "ls")
    assert done.exit_code == 0
    assert "damaged" not in done.stdout
    assert f"cannot be read: {os.strerror(code)}" in " ".join(done.stdout.split())


def test_a_disk_that_fails_while_a_file_is_read_removes_nothing(
    kv: KVFlash, filled: tuple[PrefixCache, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = filled
    entries = len(cache.entries())
    real = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if offset > 100_000:  # of the records
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert cache.restore(kv, TEXT) == 0
    assert (cache.stats.damaged, len(cache.entries())) == (0, entries)
    done = cache_command(tmp_path, "verify", "--remove")
    assert "Input/output error" in done.stderr
    assert f"none damaged, {entries} cannot be read\n" in done.stderr
    assert len(cache.entries()) == entries


def test_a_file_of_a_later_version_stays(kv: KVFlash, tmp_path: Path) -> None:
    cache = PrefixCache(tmp_path, LARGE)
    path = cache.save(read(kv, TEXT[:200]))
    assert path
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    assert "none damaged, 1 cannot be read" in cache_command(tmp_path, "verify", "--remove").stderr
    assert "cannot be read: it was written by another version of kvflash" in " ".join(
        cache_command(tmp_path, "ls").stdout.split()
    )
    assert path.exists()


@pytest.mark.parametrize(
    "command", [("cache", "ls"), ("cache", "verify"), ("cache", "rm", "--all"), ("serve",), ("run", "-p", "x")]
)
def test_a_folder_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    refuse(monkeypatch, "scandir", tmp_path, errno.EACCES)
    done = CliRunner().invoke(main, [*command, "--prefix-cache", str(tmp_path)])
    assert done.exit_code == 2
    assert done.output == f"kvflash: error: {tmp_path} cannot be the prefix cache: Permission denied\n"


#
# what cannot be written
#


@pytest.mark.sampled(CLI, SNAPSHOT)
@pytest.mark.parametrize("what", ["the lock", "the folder of a model", "the file of a text"])
def test_a_cache_that_cannot_be_written_costs_no_answer(
    kv: KVFlash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    text, folder = tmp_path / "text", tmp_path / "cache"
    text.write_text(kv.detokenize(TEXT[:1100].tolist()))
    run = ("run", "-f", str(text), "-no-cnv", "-c", "8K", "-n", "2", "--temp", "0", "-t", "1")
    want = CliRunner().invoke(main, run).stdout
    folder.mkdir()
    if what == "the lock":
        (folder / ".lock").mkdir()
    real = Path.mkdir

    def refused(path: Path, *args: Any, **more: Any) -> None:
        if what == "the folder of a model" and path.parent == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        real(path, *args, **more)

    def hidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    if what == "the file of a text":
        monkeypatch.setattr(Path, "is_symlink", hidden)
    done = CliRunner().invoke(main, [*run, "--prefix-cache", str(folder)])
    assert done.stdout == want
    assert done.exit_code == 0
    assert "kvflash: warning: the text was not added to the prefix cache: " in done.stderr
    assert " cannot be written: " in done.stderr


def test_a_cache_that_cannot_be_locked_is_said(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    done = cache_command(tmp_path, "rm", "--all")
    assert done.exit_code == 1
    assert done.output == f"kvflash: error: {tmp_path} cannot be written: Is a directory\n"
