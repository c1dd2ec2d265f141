"""tests/native/fuzz.cpp on the tiny models, under AddressSanitizer (with leaks) and UndefinedBehaviorSanitizer.

Its oracles can fail: each of the mutants, small changes to our C++, makes them. Changed are the copies that are built here,
and only .cpp files: llama.cpp includes the headers. What lies in patches/ is out of reach.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
"""What is built: a copy of SOURCE that a mutant may change without compiling llama.cpp again."""

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
def _built() -> Iterator[None]:
    copy_sources()
    build()
    yield
    copy_sources()


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
        "closer",
        "evicted",
        "layouts",
        "masses",
        "mirrored",
        "paged in",
        "read late",
        "wrong calls",
    ]:
        assert f" {what} " in res.stdout
    if model != "qwen3":
        assert " states " in res.stdout
        assert " wrong states " in res.stdout


#
# mutants
#


@dataclass(frozen=True)
class Mutant:
    """In a file, old becomes new, where $ is old again. old occurs once, however it is spaced."""

    breaks: str
    file: str
    old: str
    new: str
    model: str = field(default="qwen3", kw_only=True)
    options: tuple[str, ...] = field(default=(), kw_only=True)

    def apply(self) -> None:
        """Write the changed copy."""
        pattern = r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", self.old))
        name = f"kvflash-{self.file}.cpp"
        text, n = re.subn(pattern, lambda m: self.new.replace("$", m[0]), (SOURCE / name).read_text())
        assert n == 1, f"{self.old!r} occurs {n} times in {name}"
        (NATIVE / name).write_text(text)


SEEDS = ("4", "5", "9")  # small chunks, large pools: the first seed finds most mutants
LAYERS = "for (const auto & layer : kv.layers) { add("

MUTANTS = [
    # placement
    Mutant("rows are placed one too far", "pool", "block*n_chunk + pos%n_chunk", "block*n_chunk + (pos + 1)%n_chunk"),
    Mutant("used blocks are given out", "pool", "b_next < n_block(kv) && !is_free(kv, b_next)", "false"),
    Mutant("two chunks share a block", "pool", "block = b_next++;", "block = b_next;"),
    Mutant("a chunk ends a row too late", "pool", "it->first >= p0 +", "it->first > p0 +"),
    Mutant("one row in a block is none", "pool", "!cells.is_empty(block*kv.pool_chunk + i)", "i > 0 && $"),
    Mutant("the next context is pooled, too", "pool", "scope::~scope() { g_setup = nullptr;", "scope::~scope() {"),
    # records
    Mutant(
        "rows go to and come from the next block",
        "move",
        "r.dev + block*r.size",
        "r.dev + (block ^ 1)*r.size",
    ),
    Mutant(
        "the last row is not copied",
        "record",
        "ggml_row_size(layer.k->type, layer.k->ne[0])*kv.pool_chunk); if",
        "ggml_row_size(layer.k->type, layer.k->ne[0])*(kv.pool_chunk - 1)); if",
    ),
    Mutant(
        "the last layer is not copied",
        "record",
        LAYERS,
        "for (const auto & layer : kv.layers) { if (&layer == &kv.layers.back()) { break; } add(",
    ),
    Mutant(
        "K and V change places",
        "record",
        LAYERS,
        "for (auto layer : kv.layers) { std::swap(layer.k, layer.v); add(",
    ),
    Mutant(
        "a column is not copied",
        "record",
        "i < layer.v->ne[0]; ++i",
        "i < layer.v->ne[0] - 1; ++i",
        options=("--no-fa",),
    ),
    Mutant(
        "layers share the rows of the first",
        "record",
        LAYERS,
        "for (const auto & each : kv.layers) { (void) each; const auto & layer = kv.layers[0]; add(",
    ),
    Mutant("records of other types are taken", "record", "got.type_k != want.type_k", "false"),
    Mutant("metadata is not cleared", "record", "memset(dst, 0, meta_bytes(kv));", ""),
    Mutant("records of other models are taken", "record", "got.fingerprint != want.fingerprint", "false"),
    # paging
    Mutant("a drop forgets the last row", "record", "cells.rm(idx);", "if (i + 1 < kv.pool_chunk) { $ }"),
    Mutant(
        "a page-in moves positions",
        "record",
        "chunk*(llama_pos) kv.pool_chunk + i);",
        "chunk*(llama_pos) kv.pool_chunk + i + 1);",
    ),
    Mutant("a page-in fills up a chunk", "record", "if (rec.mask & (1ull << i))", "if (true)"),
    Mutant("a page-in forgets the tokens", "record", "cells.ext_set(idx, ext);", ""),
    Mutant("a page-in overwrites a chunk", "record", "if (!is_free(kv, block))", "if (false)"),
    Mutant("used blocks are scribbled on", "record", "if (!is_free(kv, b)) { continue; }", ""),
    # copies under way
    Mutant("a block may be used while a chunk lands", "pool", "return !mover(kv).is_landing(block);", "return true;"),
    Mutant("a chunk lands twice", "record", "if (mover(kv).landing_of(seq, chunk)) {", "if (false) {"),
    Mutant("queries lie upon each other", "move", "to += r.size;", ""),
    Mutant("clear leaves what is landing", "api", "llama_kvflash::mover(*kv).landings.clear();", ""),
    Mutant("the width of the graph is made up", "record", "res.n_kv = kv.pool_n_kv;", "res.n_kv = kv.get_size();"),
    # summaries
    Mutant("a share is of one chunk's own", "score", "dst[c] += sums[c] / all;", "dst[c] += sums[c];"),
    Mutant("a row counts as one key", "score", "res[g] = res[g] * scale + count;", "res[g] = res[g] * scale;"),
    Mutant("the last query alone counts", "score", "dst[c] = std::max(dst[c], mine[c]);", "dst[c] = mine[c];"),
    Mutant("all layers have the first one's scale", "api", "q[i], n_q, scales[i], dst", "q[i], n_q, scales[0], dst"),
    Mutant(
        "an edge has a key too many", "score", "if (t < n_edge) { sums[1] += e; }", "if (t <= n_edge) { sums[1] += e; }"
    ),
    Mutant("the last keys are all keys", "score", "if (t >= k.n - n_edge) { sums[2] += e; }", "sums[2] += e;"),
    # the sliding window
    Mutant(
        "a window is packed",
        "window",
        "bool own = head.size == kv.get_size();",
        "bool own = false;",
        model="gemma4",
    ),
    Mutant(
        "a window's columns are all the first",
        "window",
        "ggml_backend_tensor_set(t, in + from, at, n);",
        "ggml_backend_tensor_set(t, in, at, n);",
        model="gemma4",
        options=("--no-fa",),
    ),
    Mutant(
        "the size of a window is believed",
        "window",
        "size != sizeof(head) + head.n_cell",
        "size > (1u << 30) + head.n_cell",
        model="gemma4",
    ),
    # the C API
    Mutant(
        "a shortage is not reported",
        "api",
        "case 1: throw kvf_failure(KVF_E_NO_BLOCK",
        "case 1: break; case 99: throw kvf_failure(KVF_E_NO_BLOCK",
    ),
    Mutant("an old error stays", "api", "g_error.clear();", ""),
    Mutant("the mirror forgets a position less", "api", "kv.seq_rm(seq, p0, p1);", "kv.seq_rm(seq, p0, p1 - 1);"),
    Mutant(
        "a failed rollback is not reported",
        "api",
        "!llama_memory_seq_rm(llama_get_memory(ctx), seq, p0, p1)",
        "$ && false",
        model="qwen35",
    ),
]


@pytest.mark.parametrize(("model", "options"), sorted({(mutant.model, mutant.options) for mutant in MUTANTS}))
def test_unchanged(tiny_path: Callable[[str], Path], model: str, options: tuple[str, ...]) -> None:
    copy_sources()
    build()
    for seed in SEEDS:
        res = fuzz(tiny_path(model), "--seed", seed, *options)
        assert res.returncode == 0, res.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks.replace(" ", "-"))
def test_mutant(tiny_path: Callable[[str], Path], mutant: Mutant) -> None:
    copy_sources()
    mutant.apply()
    build()
    for seed in SEEDS:
        res = fuzz(tiny_path(mutant.model), "--seed", seed, *mutant.options)
        if res.returncode != 0:
            break
    assert res.returncode != 0, res.stdout
    assert re.search(r"1 failure: |ERROR: AddressSanitizer|runtime error: |Assertion ", res.stdout), res.stdout
