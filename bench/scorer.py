"""What relevance costs: scoring, summarising and drafting, by context, as Markdown on stdout.

python bench/scorer.py                 qk on random keys, two shapes, and needle-7m as its own drafter
python bench/scorer.py --plot FILE     and a picture of a drafter's rescore by context
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvflash_bench.grid import machine
from kvflash_bench.tables import markdown
from pyllama_kvflash import KVFlash, native
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Qk, View
from pyllama_kvflash.scorers.reader import Reader

CHUNK = 64
SHAPES = {"needle-7m": (6, 2, 6, 64), "36 layers of 8 x 128": (36, 8, 32, 128)}  # layers, KV heads, heads, width


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", metavar="FILE", help="draw the drafter's rescore by context")
    args = parser.parse_args()
    print(
        markdown(
            ["shape", "context", "one rescore", "at a question", "a chunk's summary", "summaries", "of K"],
            qk(args.threads),
        )
    )
    print(
        markdown(
            ["decode at 32K, pool of 2,048", "lru", "qk", "qk ÷ lru", "reselects", "page-ins"],
            [beside_decode(args.threads)],
        )
    )
    points = list(drafter(args.threads))
    rows = [[f"{n:,}", f"{1e3 * first:.0f} ms", f"{1e3 * again:.1f} ms"] for n, first, again in points]
    print(markdown(["drafter's context", "first", "after 64 more tokens"], rows))
    print(f"{machine()}, {args.threads} threads for qk and the drafter")
    if args.plot:
        plot(points, args.plot)


def qk(threads: int) -> Iterator[list[str]]:
    """Rescore all chunks of a context: with one query, as while decoding, and as at the end of a prompt."""
    for name, (n_layer, n_head_kv, n_head, width) in SHAPES.items():
        for context in (65536, 262144):
            layers = geometry(n_layer, n_head_kv, n_head, width)
            n, records = context // CHUNK, random_records(layers)
            summaries = native.Summaries(layers, CHUNK, "centroid:4")
            summaries.reserve(n)
            begin = time.perf_counter()
            for chunk in range(n):
                summaries.put(chunk, records[chunk % len(records)])
            summary_s = (time.perf_counter() - begin) / n
            with ThreadPoolExecutor(threads) as pool:
                view = make_view(layers, summaries, pool.map, records)
                decode_s = least(lambda view=view: Qk().score(view(1, close=False)))
                question_s = least(lambda view=view: Qk().score(view(4, close=True)), times=2)
            size, keys = summaries.n_bytes, n * sum(layer.size_k for layer in layers)
            yield [
                name,
                f"{context:,}",
                f"{1e3 * decode_s:.1f} ms",
                f"{1e3 * question_s:.0f} ms",
                f"{1e3 * summary_s:.2f} ms",
                f"{size / 2**20:.0f} MiB",
                f"{100 * size / keys:.2f} %",
            ]


def beside_decode(threads: int, n: int = 512, rounds: int = 5) -> list[str]:
    """Milliseconds a token of needle-7m with lru and with qk, in turns: what scoring and paging in take from decode."""
    with contextlib.ExitStack() as stack:
        kvs = {
            policy: stack.enter_context(
                KVFlash.from_file(BUNDLED_MODEL, n_ctx=40960, pool=2048, policy=policy, coarse="off", n_threads=threads)
            )
            for policy in ("lru", "qk")
        }
        tokens = np.random.default_rng(3).integers(300, 4000, 32768 + n * rounds).astype(np.int32)
        seconds: dict[str, list[float]] = {policy: [] for policy in kvs}
        for kv in kvs.values():
            for _ in kv.prefill(tokens[:32768]):
                pass
        before = kvs["qk"].stats()
        for i in range(rounds):
            for policy in sorted(kvs, reverse=bool(i % 2)):
                begin = time.perf_counter()
                for token in tokens[kvs[policy].n_tokens :][:n]:
                    kvs[policy].decode(np.array([token], np.int32))
                    kvs[policy].logits()
                seconds[policy].append((time.perf_counter() - begin) / n)
        stats = kvs["qk"].stats()
    lru, scored = (1e3 * statistics.median(seconds[policy]) for policy in ("lru", "qk"))
    counts = [f"{stats.reselects - before.reselects}", f"{stats.pages_in - before.pages_in}"]
    return [f"{n * rounds} tokens", f"{lru:.3f} ms", f"{scored:.3f} ms", f"{scored / lru:.3f}", *counts]


def make_view(
    layers: list[native.Layer], summaries: native.Summaries, each: Any, records: list[native.Record]
) -> Callable[..., View]:
    """A view of random queries; close: with the keys of a pool of 4,096 tokens to look at again."""
    rng = np.random.default_rng(7)
    n = len(summaries)

    def view(n_queries: int, *, close: bool) -> View:
        queries = [
            [rng.standard_normal((x.n_head, x.n_embd_head_k)).astype(np.float32) for x in layers]
            for _ in range(n_queries)
        ]
        candidates = np.ones(n, np.bool_)
        candidates[[0, *range(n - 4, n)]] = False
        keys = native.Keys(layers, CHUNK, lambda chunk: records[chunk % len(records)]) if close else None
        return View(np.zeros(0, np.int32), CHUNK, np.zeros(n, np.int64), candidates, queries, summaries, 58, keys, each)

    return view


def geometry(n_layer: int, n_head_kv: int, n_head: int, width: int) -> list[native.Layer]:
    """Layers of f16 keys, one after the other in a record, without values."""
    size = CHUNK * n_head_kv * width * 2
    common: dict[str, Any] = {
        "type_k": native.CACHE_TYPES["f16"],
        "type_v": -1,
        "n_embd_k": n_head_kv * width,
        "n_embd_v": 0,
        "device": 0,
    }
    heads = {"n_head": n_head, "n_head_kv": n_head_kv, "n_embd_head_k": width}
    return [
        native.Layer(il=i, offs_k=i * size, size_k=size, offs_v=0, size_v=0, **common, **heads) for i in range(n_layer)
    ]


def random_records(layers: list[native.Layer], n: int = 8) -> list[native.Record]:
    """Records of random keys."""
    rng = np.random.default_rng(5)
    size = sum(layer.size_k for layer in layers)
    return [rng.standard_normal(size // 2).astype(np.float16).view(np.uint8) for _ in range(n)]


def drafter(threads: int) -> Iterator[tuple[int, float, float]]:
    """Seconds that needle-7m takes to score its own context at first, and again after 64 more tokens."""
    with KVFlash.from_file(BUNDLED_MODEL, pool=1024, n_ctx=2048) as kv:
        rng = np.random.default_rng(3)
        tokens = rng.integers(300, kv.model.n_vocab, 70_000).astype(np.int32)
        for context in (4096, 8192, 16384, 32768, 65536):
            options = Options(pool=1024, n_ctx=context + 1024, n_threads=threads)
            scorer = Reader(BUNDLED_MODEL, kv.model, options, KVFlash.open)
            try:
                first = timed(scorer, tokens[:context])
                again = statistics.median(timed(scorer, tokens[: context + 64 * i]) for i in range(1, 8))
            finally:
                scorer.close()
            yield context, first, again


def timed(scorer: Reader, tokens: Any) -> float:
    """Seconds of one score."""
    n = -(-len(tokens) // CHUNK)
    view = View(tokens, CHUNK, np.zeros(n, np.int64), np.ones(n, np.bool_))
    begin = time.perf_counter()
    scorer.score(view)
    return time.perf_counter() - begin


def least(f: Callable[[], Any], times: int = 5) -> float:
    """Seconds of the fastest of some calls."""

    def once() -> float:
        begin = time.perf_counter()
        f()
        return time.perf_counter() - begin

    return min(once() for _ in range(times))


def plot(points: Iterable[tuple[int, float, float]], path: str) -> None:
    """Seconds by context, the first score and the next ones."""
    from kvflash_bench.plot import figure  # noqa: PLC0415 (only for those who want a picture)

    fig = figure(7, 3.6)
    axis = fig.subplots()
    found = list(points)
    x = [p[0] for p in found]
    for i, (label, color) in enumerate((("first score", "#555555"), ("after 64 more tokens", "#e0702a")), 1):
        axis.plot(x, [1e3 * p[i] for p in found], "o-", label=label, color=color)
    axis.set_yscale("log")
    axis.set_xticks(x, [f"{n // 1024}K" for n in x])
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("ms")
    axis.set_title(f"A drafter's score (needle-7m as its own, pool of 2,048), {machine()}", fontsize=8, loc="left")
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
    fig.savefig(path)


if __name__ == "__main__":
    main()
