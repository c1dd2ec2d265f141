"""The kernels of GPUs by which layers choose, compiled for the CPU: tests/native/cuda says how."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import pytest

from pyllama_kvflash.native.lib import ffi, lib

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "tests" / "native" / "cuda"
SOURCES = ROOT / "pyllama_kvflash" / "native" / "src"
GGML = ROOT / "vendor" / "llama.cpp" / "ggml"


def build_kernels(folder: Path, changes: Mapping[str, Callable[[str], str]] = MappingProxyType({})) -> Path:
    """Compile the kernels, and return the library. Some seconds.

    What they do where there are many units they do from 4 on, and where there are many pieces of a context, from 4 on, too; batches
    of more than 16 tokens are many. changes: of files, by name.
    """
    fewer = (
        ("FEW = 1024", "FEW = 4"),
        ("MOST_PART = 128", "MOST_PART = 4"),
        ("MOST_ROW_PART = 1024", "MOST_ROW_PART = 32"),
    )
    small = {"guests/choose.cuh": fewer[:1], "guests/gpu.h": fewer[1:]}
    library = folder / "kernels.so"
    for source in (
        *SOURCES.glob("*/*.cu*"),
        SOURCES / "guests/gpu.h",
    ):  # this folder comes before that of the sources
        name, text = str(source.relative_to(SOURCES)), source.read_text()
        if (CUDA / name).exists():  # these have instructions of GPUs
            continue
        for old, new in small.get(name, ()):
            assert old in text
            text = text.replace(old, new)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(changes.get(name, str)(text))
    options = ["-std=c++17", "-O2", "-g", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-fPIC", "-shared"]
    options.append(
        "-U_FORTIFY_SOURCE"
    )  # Ubuntu's GCC defines it, and its longjmp() aborts on a jump to another fiber's stack
    options.append(
        "-ffp-contract=off"
    )  # GCC would make one operation of __fmul_rn() and __fadd_rn(), where the processor has it
    ours = Path(
        str(import_module("pyllama_kvflash.native._kvflash").__file__)
    ).parent  # the loader has the library of this name already
    paths = [folder, CUDA, SOURCES, GGML / "include", GGML / "src"]
    command: list[str | Path] = [os.environ.get("CXX", "c++"), *options, *(f"-I{path}" for path in paths)]
    command += [ROOT / "tests" / "native" / "kernels.cpp", ours / "libggml-base.so", "-o", library]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' library."""
    if not GGML.exists():
        pytest.skip("there is no vendored tree, as where libraries were built elsewhere")
    return build_kernels(tmp_path_factory.mktemp("kernels"))


@contextmanager
def host_kernels(library: Path) -> Iterator[None]:
    """Pools in host memory that are made meanwhile choose by the kernels."""
    kernels = ctypes.CDLL(str(library)).kvflash_host_kernels
    kernels.restype = ctypes.c_void_p
    lib.kvf_set_host_kernels(ffi.cast("void *", kernels()))
    try:
        yield
    finally:
        lib.kvf_set_host_kernels(ffi.NULL)
