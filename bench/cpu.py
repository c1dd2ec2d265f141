"""Decode speed and memory on this CPU, as Markdown: full cache and pool in one run.

    make bench            or            .venv/bin/python bench/cpu.py --contexts 4096 16384

The model has random weights (8 layers, 512 wide, 16 query and 8 KV heads of 64, f16 KV): it measures speed and memory,
never quality. For each context three caches are filled, then take turns at decoding, so that a busy machine is unfair to
none: the full cache; the pool; and a full cache that is only as large as the pool, which is the speed a pool can reach.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvflash_bench.grid import cpu_name
from kvflash_bench.plot import figure
from kvflash_bench.steps import WARM_UP, decode_steps
from kvflash_bench.tables import markdown
from pyllama_kvflash import KVFlash, native
from pyllama_kvflash.events import Prefill

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import tiny

MIB = 2**20
COLUMNS = (
    "context", "full cache ms/tok", "pool ms/tok", "full cache of pool size ms/tok", "full ÷ pool", "pool ÷ pool-sized",
    "prefill full tok/s", "prefill pool tok/s", "device KV full MiB", "pool MiB", "host ÷ records",
)  # fmt: skip
GEOMETRY = {"n_layer": 8, "n_embd": 512, "n_ff": 1024, "n_head": 16, "n_head_kv": 8, "n_head_dim": 64}


@dataclass
class Row:
    """One context: milliseconds a decoded token, prompt tokens a second, bytes."""

    context: int
    decode_ms: dict[str, float]
    prefill: dict[str, float]
    device: dict[str, int]
    host: int
    records: int


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 32768], help="prompt lengths")
    parser.add_argument("--pool", type=int, default=1024, help="tokens")
    parser.add_argument("--steps", type=int, default=16, help="tokens that a cache decodes in its turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each; the median counts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw decode time against context (needs matplotlib)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.gguf"
        writer = tiny.Writer(path, "qwen3")
        tiny.qwen3(writer, **GEOMETRY)
        writer.close()
        rows = [measure(path, n, args) for n in args.contexts]
    report(rows, args)
    if args.plot:
        plot(rows, args)


def measure(path: Path, context: int, args: argparse.Namespace) -> Row:
    """Fill the three caches, then let them take turns."""
    rng = np.random.default_rng(context)
    tokens = rng.integers(0, tiny.N_VOCAB, context, dtype=np.int32)
    turns = (args.steps + WARM_UP) * args.rounds
    caches = {
        "full": KVFlash.from_file(path, n_ctx=context + turns, pool="off", n_threads=args.threads),
        "pool": KVFlash.from_file(
            path,
            n_ctx=context + turns,
            pool=args.pool,
            policy="lru",
            coarse="off",
            prefill="pool",
            n_threads=args.threads,
        ),
        "small": KVFlash.from_file(path, n_ctx=args.pool, pool="off", n_threads=args.threads),
    }
    start = args.pool - args.steps - WARM_UP  # of the small cache, which is kept as full as the pool is
    prefill = {name: fill(kv, tokens[:start] if name == "small" else tokens) for name, kv in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    order = list(caches)
    for _ in range(args.rounds):
        for name in order:
            times[name].append(decode(caches[name], args.steps))
        caches["small"].rollback(start)
        order.append(order.pop(0))  # the one before leaves its data in the processor's caches: take turns in that, too
    stats = {name: kv.stats() for name, kv in caches.items()}
    caches["pool"].check_integrity()
    for kv in caches.values():
        kv.close()
    return Row(
        context,
        {name: 1e3 * statistics.median(t) for name, t in times.items()},
        prefill,
        {name: s.kv_device_bytes for name, s in stats.items()},
        stats["pool"].host_bytes,
        stats["pool"].stored,
    )


def fill(kv: KVFlash, tokens: native.Tokens) -> float:
    """Prompt tokens a second."""
    seconds = 1.0
    for event in kv.prefill(tokens):
        if isinstance(event, Prefill):
            seconds = event.seconds
            print(f"\r{event.done:,}/{event.total:,} tokens", end="\r", file=sys.stderr, flush=True)
    return len(tokens) / seconds


def decode(kv: KVFlash, steps: int) -> float:
    """Seconds a token."""
    return statistics.fmean(decode_steps(kv, steps, []).seconds)


def report(rows: list[Row], args: argparse.Namespace) -> None:
    """The table, the machine and the command."""
    print(
        f"Machine: {cpu_name()}, {args.threads} threads, Linux {platform.release()}, Python {platform.python_version()}."
    )
    print(f"Command: `{' '.join(['python', *sys.argv])}`. Pool: {args.pool} tokens.\n")
    lines = []
    for r in rows:
        d = r.decode_ms
        record = r.device["pool"] * 64 // args.pool  # the K and V rows of a chunk
        cells = [
            f"{r.context:,}",
            *(f"{d[k]:.2f}" for k in ("full", "pool", "small")),
            f"**{d['full'] / d['pool']:.1f}**",
            f"{d['pool'] / d['small']:.3f}",
            *(f"{r.prefill[k]:,.0f}" for k in ("full", "pool")),
            *(f"{r.device[k] / MIB:.1f}" for k in ("full", "pool")),
            f"{r.host / (r.records * record):.3f}",
        ]
        lines.append(cells)
    print(markdown(COLUMNS, lines))
    print(
        "The pooled prefill attends to the pool only: it is faster because it computes less, and not quality-neutral."
    )


def plot(rows: list[Row], args: argparse.Namespace) -> None:
    """Milliseconds a token against context."""
    fig = figure(7, 3.6)
    ax = fig.subplots()
    x = [r.context for r in rows]
    for name, label, color in (("full", "full cache", "#555555"), ("pool", f"pool of {args.pool:,}", "#e0702a")):
        y = [r.decode_ms[name] for r in rows]
        ax.plot(x, y, marker="o", color=color)
        ax.annotate(
            f"{label}: {y[-1]:.1f} ms", (x[-1], y[-1]), (-8, 8), textcoords="offset points", ha="right", color=color
        )
    ax.set_xlabel("context, tokens")
    ax.set_ylabel("ms a decoded token")
    ax.set_ylim(0)
    ax.set_xticks(x, [f"{n // 1024}K" for n in x])
    ax.set_title(f"8 layers, 8 KV heads of 64, f16 KV; {args.threads} threads of {cpu_name()}", fontsize=9, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(args.plot)


if __name__ == "__main__":
    main()
