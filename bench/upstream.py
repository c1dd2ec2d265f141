"""Whether the patches leave a stock context alone: the same logits, bit for bit, at the same speed, as Markdown.

    .venv/bin/python bench/upstream.py

Builds llama.cpp of the pin without patches in build/upstream (some minutes the first time), with the options of our own
build, and links tests/native/plain.cpp with it and with the installed library. Both then run the tiny models: a prompt of
500 tokens in batches, 40 tokens one by one, and what else a stock cache can do. Speed is CPU time of one thread, the two
libraries by turns.
"""

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvflash_bench.grid import machine
from kvflash_bench.tables import markdown
from pyllama_kvflash.native.lib import _kvflash

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support import refused, tiny

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "upstream"
SOURCE = BUILD / "llama.cpp"
CACHES = ("f16", "f16-nofa", "q8_0")
RUN = ("500", "128", "40")  # tokens of the prompt, of a batch, one by one
SPEED = ("512", "256", "64")
GEOMETRY = {"n_layer": 8, "n_embd": 1024, "n_ff": 2048, "n_head": 16, "n_head_kv": 8, "n_head_dim": 64}
NO_DECODERS = {"bert", "llama", "t5", "t5encoder", "llada", "dream", "eagle3"}
"""Models of refused.py of which a stock context makes nothing."""

CMAKE = """\
cmake_minimum_required(VERSION 3.26...4.0)
project(upstream LANGUAGES C CXX)
set(LLAMA_ALL_WARNINGS OFF)
set(LLAMA_BUILD_COMMIT 0c1e57098)
set(GIT_EXE "")
add_subdirectory(llama.cpp EXCLUDE_FROM_ALL)
"""
"""As our own CMakeLists.txt, but for the RPC backend."""


@dataclass(frozen=True)
class Result:
    """What a run wrote: its logits (empty: it failed), what it did beside decoding, and its times."""

    logits: bytes
    did: tuple[str, ...]
    prefill_s: float
    decode_s: float


def main() -> None:
    """Build, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="of each library, for the speed")
    args = parser.parse_args()
    build()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = Path(_kvflash.__file__).parent
        stock = driver(SOURCE, BUILD / "build" / "bin", folder / "upstream")
        patched = driver(ROOT / "vendor" / "llama.cpp", ours, folder / "patched")
        print(markdown(["model", *CACHES, "besides"], equality(stock, patched, folder)))
        print(
            markdown(
                ["CPU time of 1 thread", "upstream", "patched", "ratio", "its quartiles"],
                speed(stock, patched, folder, args.turns),
            )
        )
        print(machine())


def build() -> None:
    """Libllama without patches."""
    if not SOURCE.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        spec = importlib.util.spec_from_file_location("vendor", ROOT / "vendor" / "vendor.py")
        if spec is None or spec.loader is None:
            sys.exit("vendor/vendor.py is missing")
        vendor: Any = importlib.util.module_from_spec(spec)
        sys.modules["vendor"] = vendor
        spec.loader.exec_module(vendor)
        layout = vendor.Layout(ROOT)
        partial = BUILD / ".llama.cpp"
        shutil.rmtree(partial, ignore_errors=True)
        vendor._build(layout, vendor.Pin.read(layout), [], partial)  # noqa: SLF001 (its commands patch the tree)
        partial.rename(SOURCE)
    (BUILD / "CMakeLists.txt").write_text(CMAKE)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # cmake, ninja
    options = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_RPC=OFF", "-DGGML_CUDA=OFF")
    for command in (
        ("cmake", *options, "-S", BUILD, "-B", BUILD / "build"),
        ("nice", "-n", "10", "cmake", "--build", BUILD / "build", "-j1", "--target", "llama"),
    ):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout[-4000:] + done.stderr[-4000:])


def driver(source: Path, libraries: Path, target: Path) -> Path:
    """plain.cpp, linked with one of the two."""
    if (b"kvf_error" in (libraries / "libllama.so").read_bytes()) != (source != SOURCE):
        sys.exit(f"{libraries} holds the other libllama")
    include = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
    link = [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [compiler, "-O2", "-std=c++17", ROOT / "tests" / "native" / "plain.cpp", *include, *link, "-o", target],
        check=True,
    )
    return target


def run(program: Path, model: Path, cache: str, sizes: Sequence[str], out: Path | None = None) -> Result:
    """One run. out: where to write the logits, None: speed only."""
    env = os.environ | {"GGML_NO_BACKTRACE": "1"}
    command = [program, model, cache, *sizes, out or "-"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return Result(b"", (), 0, 0)
    prefill, decode, *did = done.stdout.split()
    return Result(out.read_bytes() if out else b"", tuple(did), float(prefill), float(decode))


def equality(stock: Path, patched: Path, folder: Path) -> list[list[str]]:
    """For each model and cache, whether the logits are equal."""
    writers = dict.fromkeys(sorted(tiny.MODELS.keys() - {"unheard-of"}), tiny.write)
    writers |= {name: refused.write for name in refused.MODELS if name not in NO_DECODERS}
    rows, seen = [], {}
    for name, write in writers.items():
        model = folder / f"{name}.gguf"
        write(name, model)
        cells, did = [], ""
        for cache in CACHES:
            want, got = (run(program, model, cache, RUN, folder / "logits") for program in (stock, patched))
            cells.append(compared(want, got))
            did = did or ", ".join(got.did)
            seen[name, cache] = got.logits
        rows.append([name, *cells, did])
        model.unlink()
    if seen["qwen3", "f16"] == seen["qwen3", "q8_0"]:
        sys.exit("the comparison cannot fail: f16 and q8_0 give equal logits")
    return rows


def compared(want: Result, got: Result) -> str:
    """Upstream's run and ours, in two words."""
    if not want.logits:
        return "only ours runs" if got.logits else "neither runs"
    same = (want.logits, want.did) == (got.logits, got.did)
    return f"{len(want.logits) // (4 * tiny.N_VOCAB)} equal" if same else "**differs**" if got.logits else "**fails**"


def speed(stock: Path, patched: Path, folder: Path, turns: int) -> list[list[str]]:
    """Prefill and decode, by turns: the ratio of the medians, and the quartiles of the ratios of neighbouring runs."""
    model = folder / "speed.gguf"
    writer = tiny.Writer(model, "qwen3")
    tiny.qwen3(writer, **GEOMETRY)
    writer.close()
    pairs = []
    for i in range(turns):
        order = (stock, patched) if i % 2 == 0 else (patched, stock)
        found = {program: run(program, model, "f16", SPEED) for program in order}
        pairs.append((found[stock], found[patched]))
    rows = []
    for what, n in (("prefill_s", int(SPEED[0])), ("decode_s", int(SPEED[2]))):
        times = [(getattr(a, what) / n * 1e3, getattr(b, what) / n * 1e3) for a, b in pairs]
        a, b = (statistics.median(t) for t in zip(*times, strict=True))
        low, _, high = statistics.quantiles([y / x for x, y in times], n=4)
        name = f"{what.removesuffix('_s')}, {n} tokens"
        rows.append([name, f"{a:.3f} ms a token", f"{b:.3f} ms a token", f"{b / a:.3f}", f"{low:.3f} to {high:.3f}"])
    return rows


if __name__ == "__main__":
    main()
