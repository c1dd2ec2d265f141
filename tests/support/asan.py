"""kvflash-fuzz under AddressSanitizer and UndefinedBehaviorSanitizer: built in a folder that outlives the clone.

Compiling llama.cpp takes minutes, so what is built is kept in $KVFLASH_ASAN_DIR, or else in $XDG_CACHE_HOME/kvflash or
~/.cache/kvflash, and a new clone compiles what differs. Nothing there can be stale: what is compiled is a copy of this clone's
sources, made equal by content, and the name of the folder holds all that no compiler reads and ninja does not see. A folder is
one process's at a time; a second process takes, and keeps, a second folder.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = Path("pyllama_kvflash/native/src")
SOURCES = (
    "CMakeLists.txt",
    "patches",
    "vendor/vendor.py",
    "vendor/llama.cpp.lock",
    "vendor/llama.cpp",
    "tests/native",
    str(NATIVE),
)
"""What kvflash-fuzz is made from."""

ADDRESS = "-fsanitize=address -fno-omit-frame-pointer"
CHECKED = "-O1;-fsanitize=undefined;-fno-sanitize-recover=undefined"
"""Of our files and those that patches change. In the rest of llama.cpp it would take most of the time to compile them all."""

GGML = "add_compile_options(-O2 -fno-sanitize=all)\n"
"""ggml is neither ours nor patched, and its arithmetic takes six times as long under the sanitizers. What it reads and
writes with memcpy() on our behalf, in tensor_get() and tensor_set(), they see nevertheless."""

OPTIONS = {
    "CMAKE_BUILD_TYPE": "RelWithDebInfo",
    "CMAKE_C_FLAGS": ADDRESS,
    "CMAKE_CXX_FLAGS": ADDRESS,
    "CMAKE_C_FLAGS_RELWITHDEBINFO": "-O0 -g1",  # no -DNDEBUG: llama.cpp's own assertions, too
    "CMAKE_CXX_FLAGS_RELWITHDEBINFO": "-O0 -g1",
    "CMAKE_EXE_LINKER_FLAGS": "-fsanitize=undefined",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_CPU_REPACK": "OFF",  # long to compile, and of no use here
    "GGML_LLAMAFILE": "OFF",
    "GGML_OPENMP": "OFF",  # its threads look like leaks
    "GGML_RPC": "OFF",  # see test_rpc.py; here, a build that has none
    "GIT_EXE": "",  # else ggml takes the commit of this repository for its own, and each one recompiles it
    "LLAMA_BUILD_COMMIT": "none",
    "KVFLASH_BUILD_FUZZ": "ON",
    "KVFLASH_CHECKED": CHECKED,
}

ENVIRONMENT = (
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "CMAKE_PREFIX_PATH",
    "CMAKE_TOOLCHAIN_FILE",
)
"""The variables that compilers and CMake go by."""

ENV = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # cmake, ninja


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def mirror(source: Path, copy: Path) -> None:
    """Make a copy equal to a file or a folder, and touch no file that already is."""
    if copy.exists() and copy.is_dir() != source.is_dir():
        remove(copy)
    if source.is_file():
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        return
    copy.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in source.iterdir()}
    for path in copy.iterdir():
        if path.name not in names:
            remove(path)
    for name in names:
        mirror(source / name, copy / name)


def key() -> str:
    """What goes into the objects and is in no source file: compilers, their environment, our options, and this CPU."""
    compilers = [os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")]
    versions = [subprocess.run([*name.split(), "--version"], capture_output=True, check=True) for name in compilers]
    cpu = Path("/proc/cpuinfo").read_text().splitlines()  # ggml is compiled for it
    parts = [
        [shutil.which(name.split()[-1]) for name in compilers],
        [res.stdout.decode() for res in versions],
        [os.environ.get(name) for name in ENVIRONMENT],
        sorted({line for line in cpu if line.startswith(("model name", "flags", "Features"))}),
        OPTIONS,
        GGML,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def home() -> Path:
    """Where builds are kept: in the clone if nothing can be written elsewhere."""
    if given := os.environ.get("KVFLASH_ASAN_DIR"):
        return Path(given).absolute()
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvflash"
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return ROOT / "build"
    return path if os.access(path, os.W_OK) else ROOT / "build"


@contextlib.contextmanager
def alone(stem: Path) -> Iterator[tuple[Path, int]]:
    """The first folder of stem-0, stem-1, ... that no other process has, and its lock."""
    for n in itertools.count():
        folder = Path(f"{stem}-{n}")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield folder, lock.fileno()
            return


@dataclass(frozen=True)
class Build:
    """A folder with a copy of the sources, and what is built from it. lock is passed on to compilers, which may outlive us."""

    folder: Path
    lock: int

    @property
    def native(self) -> Path:
        """The copy of our C++, which a test may change."""
        return self.folder / "source" / NATIVE

    @property
    def binary(self) -> Path:
        return self.folder / "build" / "kvflash-fuzz"

    def restore(self) -> None:
        """Make the copy of our C++ what it is in the clone."""
        mirror(ROOT / NATIVE, self.native)

    def make(self) -> None:
        """Build kvflash-fuzz from the copies: some minutes the first time."""
        self._run("cmake", "--build", self.binary.parent, "--target", "kvflash-fuzz", timeout=1800)

    def configure(self) -> None:
        """Make the copies what the clone holds, and set up the build."""
        self._run(sys.executable, ROOT / "vendor" / "vendor.py", "fill", timeout=300)
        for name in SOURCES:
            mirror(ROOT / name, self.folder / "source" / name)
        ggml = self.folder / "ggml.cmake"
        ggml.write_text(GGML)
        options = OPTIONS | {
            "CMAKE_PROJECT_ggml_INCLUDE": ggml,
            # of this clone: the one that built last may be gone
            "CMAKE_MAKE_PROGRAM": shutil.which("ninja", path=ENV["PATH"]),
            "Python_EXECUTABLE": sys.executable,
        }
        given = [f"-D{name}={value}" for name, value in options.items()]
        places = ["-S", self.folder / "source", "-B", self.binary.parent]
        self._run("cmake", "-G", "Ninja", *places, *given, timeout=300)

    def _run(self, *command: str | Path, timeout: float) -> None:
        """A command that must succeed."""
        pass_fds = [self.lock]
        res = subprocess.run(
            command, env=ENV, timeout=timeout, pass_fds=pass_fds, capture_output=True, text=True, check=False
        )
        assert res.returncode == 0, res.stdout[-4000:] + res.stderr[-4000:]


@contextlib.contextmanager
def built() -> Iterator[Build]:
    """kvflash-fuzz of this clone, and the sources that it was built from."""
    with alone(home() / f"asan-{key()}") as (folder, lock):
        build = Build(folder, lock)
        build.configure()
        build.make()
        yield build
