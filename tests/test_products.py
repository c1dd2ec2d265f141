"""Products with codes, by each set of instructions that coarse/products.cpp has loops for, are numpy's to the last bit."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

ROOT = Path(__file__).resolve().parent.parent
LLAMA = ROOT / "vendor" / "llama.cpp"
CXX = os.environ.get("CXX", "c++")
UNIT = 16  # positions

NAMES = ("vnni", "avx2", "dotprod", "neon", "any")
"""Sets of instructions; a processor has some of them."""


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """What tests/native/products.cpp exports."""
    if not LLAMA.exists() or not shutil.which(CXX.split()[0]):
        pytest.skip("there is no vendored tree, or no compiler")
    library = tmp_path_factory.mktemp("products") / "products.so"
    folders = [ROOT / "pyllama_kvflash" / "native" / "src", LLAMA / "include", LLAMA / "ggml" / "include"]
    options = ["-std=c++17", "-O2", "-w", "-fPIC", "-shared"]
    options += [f"-I{folder}" for folder in folders]
    subprocess.run([*CXX.split(), *options, ROOT / "tests" / "native" / "products.cpp", "-o", library], check=True)
    res = ctypes.CDLL(str(library))
    res.loops_name.restype = ctypes.c_char_p
    res.loops_are_here.restype = ctypes.c_bool
    return res


def names(loops: ctypes.CDLL) -> list[str]:
    res: list[str] = []
    while name := loops.loops_name(len(res)):
        res.append(name.decode())
    return res


def pack(codes: npt.NDArray[np.uint8], n_bit: int) -> npt.NDArray[np.uint8]:
    """Of units, positions and values: as the comment on kvf_codes says that they lie."""
    n_unit, _, width = codes.shape
    each = 8 // n_bit
    parts = (
        codes.reshape(n_unit, UNIT, width // (4 * each), each, 4) << (np.arange(each, dtype=np.uint8) * n_bit)[:, None]
    )
    return np.ascontiguousarray(np.bitwise_or.reduce(parts, axis=3).transpose(0, 2, 1, 3))


def run(
    loops: ctypes.CDLL, i: int, codes: npt.NDArray[np.uint8], n_bit: int, x: npt.NDArray[np.int8], n: int
) -> list[int]:
    """Products with keys if x is queries [n][width], else sums of values."""
    n_unit, _, width = codes.shape
    of_keys = x.ndim == 2
    res = np.full(n_unit * n * UNIT if of_keys else n * width, -1, np.int32)
    packed = pack(codes, n_bit)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (packed, x, res)]
    loops.loops_run(i, ctypes.c_bool(of_keys), pointers[0], n_unit, n_bit, width, pointers[1], n, pointers[2])
    return res.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_numbers(loops: ctypes.CDLL, name: str) -> None:
    if name not in names(loops) or not loops.loops_are_here(i := names(loops).index(name)):
        pytest.skip(f"this processor has no {name}")
    rng = np.random.default_rng(1)
    for n_bit in (2, 4):
        for width in (16, 80, 128):
            for n in range(1, 9):
                n_unit = n % 4 + 1
                codes = rng.integers(0, 2**n_bit, (n_unit, UNIT, width), np.uint8)
                queries = rng.integers(-127, 128, (n, width), np.int8)
                weights = rng.integers(-127, 128, (n_unit, n, UNIT), np.int8)
                if n == 2:  # as large as they may be
                    codes[:], queries[0], queries[1], weights[:] = 2**n_bit - 1, 127, -127, 127
                # the byte of a position stands four times, 4 apart
                times = np.repeat(weights.reshape(n_unit, n, 4, 1, 4), 4, axis=3)
                keys = np.einsum("uli,ni->unl", codes.astype(int), queries.astype(int))
                values = np.einsum("uli,unl->ni", codes.astype(int), weights.astype(int))
                assert run(loops, i, codes, n_bit, queries, n) == keys.ravel().tolist(), (n_bit, width, n)
                assert run(loops, i, codes, n_bit, times, n) == values.ravel().tolist(), (n_bit, width, n)


def test_all_of_them_are_named(loops: ctypes.CDLL) -> None:
    """And the plain ones come last: a processor that has none of the others has those."""
    found = names(loops)
    assert set(found) <= set(NAMES)
    assert found[-1] == "any"
    assert loops.loops_are_here(len(found) - 1)
