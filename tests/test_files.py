"""Files that are written: whole or not at all, in the place of the right one, whatever ends the writing."""

import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, conversions, formats
from support.commands import RUNTIME, SCRIPT, Ended, check_error, ended, good, invoke

from kvflash_bench import shapes
from kvflash_bench.grid import FILES, Results
from pyllama_kvflash import KVFlash, files
from pyllama_kvflash.cli.output import Output
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.trace import TraceWriter
from pyllama_kvflash.convert import resolve
from pyllama_kvflash.convert import write as write_drafter
from pyllama_kvflash.errors import KVFlashError, OutputError, UsageError
from pyllama_kvflash.events import Done
from pyllama_kvflash.files import Uses
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.options import Spec
from pyllama_kvflash.snapshot import layout
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = pytest.mark.native

environment = commands.environment
targets = conversions.targets

OLD = b"an old one\n" * 9
Write = Callable[[Path], object]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


#
# every writer, and all that can end it
#


def write_text(path: Path) -> None:
    with Output(str(path)) as out:
        for _ in range(50):
            out.write("a new one\n")


def write_trace(path: Path) -> None:
    with TraceWriter(str(path)) as out:
        out.start(model="m")
        for i in range(50):
            out.event({"event": "token", "pos": i})


@pytest.fixture(scope="module")
def writers(targets: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Write]:
    plan = resolve(conversions.written("dense", tmp_path_factory.mktemp("drafter")), targets[True])
    small = shapes.Shape(n_layer=1, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, n_head_dim=64, n_vocab=64)

    def write_shape(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(shapes.SHAPES, "small", small)
            shapes.write_shape("small", path)

    return {
        "text": write_text,
        "trace": write_trace,
        "picture": lambda path: files.write(path, b"a picture" * 99),
        "results": lambda path: Results(path.parent).write(path.name, "| a | table |\n" * 50),
        "snapshot": lambda path: layout.write(path, *formats.made()),
        "drafter": lambda path: write_drafter(plan, path),
        "quantised drafter": lambda path: write_drafter(plan, path, "iq4_nl"),
        "shape": write_shape,
    }


EACH = ("text", "trace", "picture", "results", "snapshot", "drafter", "quantised drafter", "shape")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("each", EACH)
def test_what_replaces_a_file_takes_after_it(writers: dict[str, Write], each: str, folder: Path) -> None:
    """Through a link, and its own file stays a link; with its mode, and its owner if that is permitted."""
    (folder / "real").mkdir()
    old, link = folder / "real" / "file.gguf", folder / "file.gguf"
    link.symlink_to("real/file.gguf")
    old.write_bytes(OLD)
    old.chmod(0o604)
    owner = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(old, *owner)
    writers[each](link)
    assert old.read_bytes() != OLD
    status = old.stat()
    assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o604, *owner)
    assert link.is_symlink()
    assert (names(folder), names(old.parent)) == (["file.gguf", "real"], ["file.gguf"])


@pytest.mark.parametrize("each", EACH)
def test_a_link_to_nothing_makes_its_file(writers: dict[str, Write], each: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, real = tmp_path / "file.gguf", tmp_path / "real" / "new.gguf"
    link.symlink_to("real/new.gguf")
    writers[each](link)
    assert link.is_symlink()
    assert real.stat().st_size > 100
    assert real.stat().st_mode & 0o777 == (0o600 if each == "snapshot" else 0o666 & ~umask())


def umask() -> int:
    os.umask(now := os.umask(0))
    return now


@contextmanager
def files_of_at_most(n: int) -> Iterator[None]:
    """Let no file grow beyond n bytes: writing then fails in the middle, in Python and in C++, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("each", EACH)
def test_writing_that_is_cut_off_loses_nothing(writers: dict[str, Write], each: str, tmp_path: Path) -> None:
    """After any number of bytes."""
    path = tmp_path / "file.gguf"
    writers[each](path)
    size = path.stat().st_size
    for n in (0, 1, size // 3, size // 2, size - 1):
        path.write_bytes(OLD)
        with files_of_at_most(n), pytest.raises(KVFlashError if each != "picture" else OSError):
            writers[each](path)
        assert path.read_bytes() == OLD
        assert names(tmp_path) == ["file.gguf"]
    writers[each](path)
    assert path.stat().st_size == size


@contextmanager
def another_user() -> Iterator[None]:
    """Be one who may not do everything."""
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if os.getresuid()[2] == 0:
            os.setresuid(0, 0, 0)


@pytest.mark.parametrize("each", EACH)
def test_a_folder_of_others(writers: dict[str, Write], each: str, folder: Path) -> None:
    """Nothing is half replaced; neither is a file that is protected, in a folder of one's own."""
    path = folder / "file.gguf"
    writers[each](path)  # and loads what it imports
    path.write_bytes(OLD)
    path.chmod(0o666)
    protected = 0o644 if os.geteuid() == 0 else 0o444  # from others, or from oneself
    for folder_mode, mode in ((0o555, 0o666), (0o777, protected)):
        path.chmod(mode)
        folder.chmod(folder_mode)
        error = OSError if each == "picture" else KVFlashError
        with another_user(), pytest.raises(error, match="Permission denied"):
            writers[each](path)
        assert path.read_bytes() == OLD
        assert names(folder) == ["file.gguf"]


@pytest.mark.parametrize("each", EACH)
def test_not_a_regular_file(writers: dict[str, Write], each: str, tmp_path: Path) -> None:
    """A device, a pipe and a folder stay what they are; a text and a picture are written to the first two."""
    pipe, folder, heard = tmp_path / "pipe", tmp_path / "folder", []
    os.mkfifo(pipe)
    folder.mkdir()
    error = OSError if each == "picture" else KVFlashError
    if each in {"text", "trace", "picture"}:
        reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()), daemon=True)
        reader.start()
        writers[each](pipe)
        reader.join(30)
        writers[each](Path("/dev/null"))
        assert len(heard[0]) > 100
        with pytest.raises(error, match="No space left"):
            writers[each](Path("/dev/full"))
    else:
        reading = os.open(pipe, os.O_RDWR)  # so that one that writes there does not wait
        with pytest.raises(error, match="it is a pipe, not a regular file"):
            writers[each](pipe)
        os.close(reading)
        with pytest.raises(error, match="it is a device, not a regular file"):
            writers[each](Path("/dev/null"))
    with pytest.raises(error, match="Is a directory"):
        writers[each](folder)
    assert pipe.is_fifo()
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert names(tmp_path) == ["folder", "pipe"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", place]
    with suppress(FileNotFoundError):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            try:
                yield place
            finally:
                subprocess.run(["umount", place], check=True)
            return
    pytest.skip("no disk may be mounted here")


RUN = ("run", "-p", "The secret code", "-c", "1K", "-n", "8", "--temp", "0", "-q")


def test_a_full_disk(tiny_disk: Path) -> None:
    """A real one: each old file is there, whole, and the disk as full as before."""
    old = {option: tiny_disk / option.strip("-") for option in ("-o", "--trace", "--save-snapshot")}
    for path in old.values():
        path.write_bytes(OLD)
    with suppress(OSError), (tiny_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    answer = good(*RUN).stdout
    for option, path in old.items():
        for at in (path, path.with_name("new")):
            res = ended(invoke(*RUN, option, at))
            check_error(Ended(res.code, "", res.err), RUNTIME, f"{at} cannot be written: No space left")
            assert res.out == answer
        assert path.read_bytes() == OLD
    res = ended(invoke(*RUN, *(word for option, path in old.items() for word in (option, path))))
    assert (res.code, res.out, res.err.count("No space left")) == (RUNTIME, answer, 3)
    assert names(tiny_disk) == sorted(["filler", *(path.name for path in old.values())])


def test_killed(tmp_path: Path) -> None:
    """kill -9 of a run: what its files replace is there, and the next run clears away what it left."""
    (answer := tmp_path / "answer").write_bytes(OLD)
    (trace := tmp_path / "trace").write_bytes(OLD)
    command = [SCRIPT, "run", "-p", "The secret code", "-c", "32K", "-n", "-1", "-q", "-o", answer, "--trace", trace]
    with subprocess.Popen(command) as child:
        deadline = time.monotonic() + 60
        while not all(any(p.stat().st_size for p in tmp_path.glob(f".{n}.*")) for n in ("answer", "trace")):
            assert child.poll() is None
            assert time.monotonic() < deadline
        child.kill()
    assert answer.read_bytes() == trace.read_bytes() == OLD
    assert len(names(tmp_path)) == 4
    good(*RUN, "-o", answer, "--trace", trace)
    assert names(tmp_path) == ["answer", "trace"]
    assert answer.read_text() == good(*RUN).stdout


#
# an answer's file
#


@contextmanager
def stopped() -> Iterator[None]:
    """Expect that Ctrl-C ends the block."""
    with pytest.raises(KeyboardInterrupt):
        yield


def test_a_new_file_is_seen_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with stopped(), Output(str(path)) as out:
        out.write("some")
        assert path.read_text() == "some"
        out.write(" text")
        raise KeyboardInterrupt
    assert path.read_text() == "some text"
    with stopped(), Output(str(tmp_path / "never")):
        raise KeyboardInterrupt
    with Output(str(tmp_path / "nothing")):
        pass
    assert names(tmp_path) == ["new"]


def test_an_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_bytes(OLD)
    with stopped(), Output(str(path)) as out:
        out.write("half")
        raise KeyboardInterrupt
    with Output(str(path)):
        pass  # nothing was written
    assert path.read_bytes() == OLD
    with Output(str(path)) as out:
        out.write("whole")
        assert path.read_bytes() == OLD
        out.close()
        assert path.read_text() == "whole"
    assert names(tmp_path) == ["answer"]


def test_an_answer_that_was_stopped_before_it_began_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_bytes(OLD)
    write_events = sys.modules[commands.main.commands["run"].callback.__module__]._write
    for reason, want in (("interrupted", OLD), ("stop", b"\n")):
        with Output(str(path)) as out:
            write_events(iter([Done(reason, "", None)]), out, Reporter(quiet=True), as_json=False, as_jsonl=False)
        assert path.read_bytes() == want


def test_the_file_that_stdout_goes_to_is_stdout(tmp_path: Path) -> None:
    """It is not replaced below what others write there."""
    log = tmp_path / "log"
    code = "import sys; from pyllama_kvflash.cli.output import Output\nfor name in sys.argv[1:]:\n with Output(name) as o: o.write(name)"
    with log.open("w") as file:
        file.write("before ")
        file.flush()
        args = [sys.executable, "-c", code, "/dev/stdout", "/dev/stderr", str(log), "-"]
        subprocess.run(args, stdout=file, stderr=file, check=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        file.write("")
    assert log.read_text() == f"before /dev/stdout/dev/stderr{log}-"
    assert names(tmp_path) == ["log"]


#
# a replacement
#


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    """Of the same name alone, and of no process that lives."""
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid = int(gone.stdout)
    for name in (f".a[b].{pid}.0123abcd.part", f".other.{pid}.0123abcd.part", f".a[b].{os.getpid()}.0123abcd.part"):
        (tmp_path / name).touch()
    files.write(tmp_path / "a[b]", b"new")
    assert names(tmp_path) == sorted([f".a[b].{os.getpid()}.0123abcd.part", f".other.{pid}.0123abcd.part", "a[b]"])


@contextmanager
def ended_early(path: Path) -> Iterator[None]:
    """As `kvflash run` does before it saves a snapshot."""
    with Output(str(path)) as out:
        out.write("a new one")
        out.close()
        yield


def test_a_rename_that_fails_keeps_the_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a mounted file, say: hours of work are not thrown away for a name."""
    path = tmp_path / "answer"
    path.write_bytes(OLD)

    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    words = r"answer cannot be written: Device or resource busy; the new file is "
    with pytest.raises(OutputError, match=words) as err, ended_early(path):
        pass
    kept = Path(str(err.value).rpartition(" ")[2])
    assert kept.read_text() == "a new one"
    assert names(tmp_path) == sorted([kept.name, "answer"])
    assert path.read_bytes() == OLD


#
# what is read, and what is written
#


def test_names_without_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that answers to names of any case, two outputs to be made may be one file."""
    exists = Path.exists

    def any_case(path: Path) -> bool:
        return exists(path) or path.name.lower() in {name.lower() for name in os.listdir(path.parent)}  # noqa: PTH208

    uses = Uses()
    uses.write("-o", tmp_path / "Both")
    uses.write("--trace", tmp_path / "both")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", any_case)
        with pytest.raises(UsageError, match="--save-snapshot and -o are one file"):
            uses.write("--save-snapshot", tmp_path / "bOTH")
    assert names(tmp_path) == []


#
# from Python
#


def test_a_snapshot_is_not_saved_over_a_model(tmp_path: Path) -> None:
    """Nor over the draft or the scorer model; a capture that cannot be written lets its records go."""
    paths = {name: tmp_path / f"{name}.gguf" for name in ("model", "draft", "scorer")}
    for path in paths.values():
        path.write_bytes(BUNDLED_MODEL.read_bytes())
    before = BUNDLED_MODEL.read_bytes()
    options = {"n_ctx": 1024, "pool": 768, "n_batch": 64, "n_threads": 1, "snapshots": True}
    with KVFlash.from_file(
        paths["model"],
        policy="drafter",
        scorer_model=str(paths["scorer"]),
        spec=Spec(kind="draft", model=str(paths["draft"])),
        **options,
    ) as kv:
        for _ in kv.prefill(np.arange(100, 300)):
            pass
        for name, path in paths.items():
            link = tmp_path / f"{name}.link"
            link.symlink_to(path)
            for save in (kv.save, kv.capture().write, lambda p: kv.capture().begin(p).result(30)):
                with pytest.raises(UsageError, match=f"the snapshot .* would overwrite the file of the {name}"):
                    save(link)
        assert kv.pager.records._holders == []
        assert {path.read_bytes() for path in paths.values()} == {before}
        assert kv.save(tmp_path / "s.kvsnap") > 0


def test_the_cache_follows_no_link_when_it_writes(tmp_path: Path) -> None:
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=1024, pool=768, n_batch=64, n_threads=1, snapshots=True) as kv:
        for _ in kv.prefill(np.arange(100, 300)):
            pass
        cache = PrefixCache(tmp_path / "cache", 1 << 30)
        path = cache._path(kv)  # type: ignore[arg-type]
        path.parent.mkdir()
        path.symlink_to(tmp_path / "elsewhere")
        assert cache.save(kv) == path  # type: ignore[arg-type]
    assert not path.is_symlink()
    assert names(tmp_path) == ["cache"]


def test_a_bench_writes_the_files_that_it_declares() -> None:
    """No others, so that all are compared with what it reads."""
    sources = [path.read_text("utf-8") for path in Path(shapes.__file__).parent.rglob("*.py")]
    assert {name for text in sources for name in re.findall(r'(?:results|self)\.write\("(\w+\.\w+)"', text)} == set(
        FILES
    )
