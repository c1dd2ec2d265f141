"""tests/native/fuzz.cpp on the tiny models, under AddressSanitizer (with leaks) and UndefinedBehaviorSanitizer."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the sanitizers of GCC and Clang on Linux"),
]

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "pyllama_kvflash" / "native" / "src"
BUILD = ROOT / "build" / "asan"
NATIVE = BUILD / "native"
"""What is built: a copy of SOURCE that test_mutants.py may change without compiling llama.cpp again."""

SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
OPTIMIZE = "-O1 -g1"  # no -DNDEBUG: llama.cpp's own assertions, too

GGML = BUILD / "ggml.cmake"
GGML_OPTIONS = "add_compile_options(-O2 -fno-sanitize=all)\n"
"""ggml is neither ours nor patched, and its arithmetic takes six times as long under the sanitizers. What it reads and
writes with memcpy() on our behalf, in tensor_get() and tensor_set(), they see nevertheless."""

ENV = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # cmake, ninja


def copy_sources() -> None:
    """Make NATIVE equal to SOURCE, and touch nothing that already is."""
    NATIVE.mkdir(parents=True, exist_ok=True)
    for path in SOURCE.iterdir():
        copy = NATIVE / path.name
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            shutil.copyfile(path, copy)


def run(*command: str | Path, timeout: float) -> None:
    """A command that must succeed."""
    res = subprocess.run(command, env=ENV, timeout=timeout, capture_output=True, text=True, check=False)
    assert res.returncode == 0, res.stdout[-4000:] + res.stderr[-4000:]


@functools.cache
def configure() -> None:
    """Set up the build directory, which is kept from run to run."""
    BUILD.mkdir(parents=True, exist_ok=True)
    if not GGML.exists():
        GGML.write_text(GGML_OPTIONS)
    options = {
        "CMAKE_BUILD_TYPE": "RelWithDebInfo",
        "CMAKE_C_FLAGS": SANITIZE,
        "CMAKE_CXX_FLAGS": SANITIZE,
        "CMAKE_C_FLAGS_RELWITHDEBINFO": OPTIMIZE,
        "CMAKE_CXX_FLAGS_RELWITHDEBINFO": OPTIMIZE,
        "CMAKE_PROJECT_ggml_INCLUDE": GGML,
        "BUILD_SHARED_LIBS": "OFF",
        "GGML_CPU_REPACK": "OFF",  # long to compile, and of no use here
        "GGML_LLAMAFILE": "OFF",
        "GGML_OPENMP": "OFF",  # its threads look like leaks
        "GGML_RPC": "OFF",  # see test_rpc.py; here, a build that has none
        "GIT_EXE": "",  # else ggml takes the commit of this repository for its own, and each one recompiles it
        "LLAMA_BUILD_COMMIT": "none",
        "KVFLASH_BUILD_FUZZ": "ON",
        "KVFLASH_NATIVE": NATIVE,
        "Python_EXECUTABLE": sys.executable,
    }
    run(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        ROOT,
        "-B",
        BUILD,
        *(f"-D{key}={val}" for key, val in options.items()),
        timeout=300,
    )


def build() -> None:
    """Build kvflash-fuzz from NATIVE: some minutes the first time."""
    configure()
    run("cmake", "--build", BUILD, "--target", "kvflash-fuzz", timeout=1800)


def fuzz(model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run kvflash-fuzz; stderr, the sanitizers', joins stdout."""
    env = ENV | {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [BUILD / "kvflash-fuzz", model, *options]
    return subprocess.run(
        command, env=env, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def _built():
    copy_sources()
    build()


@pytest.mark.parametrize("cache", ["f16", "q8_0", "q4_0", "f16 --no-fa"])
@pytest.mark.parametrize("model", ["qwen3", "qwen35", "gemma4"])
def test_fuzz(tiny_path: Callable[[str], Path], model: str, cache: str) -> None:
    seed = 1 + 3 * ["f16", "q8_0", "q4_0", "f16 --no-fa"].index(cache) + ["qwen3", "qwen35", "gemma4"].index(model)

    res = fuzz(tiny_path(model), "--seed", str(seed), "--steps", "290", "--type", *cache.split())
    assert res.returncode == 0, res.stdout[-8000:]

    # of each run, so that none passes because it did nothing
    for what in [
        "beside landings",
        "cancelled",
        "evicted",
        "layouts",
        "mirrored",
        "paged in",
        "read late",
        "wrong calls",
    ]:
        assert f" {what} " in res.stdout
