"""What a GPU does for a decoded token: the time in its kernels and copies, and where it waits, policy beside policy.

Needs PyTorch with CUDA, whose profiler sees all kernels of the process, those of CUDA graphs, too. Recording takes time
itself, so compare the columns with each other, and the first table, which is not recorded, with other benches.

python bench/timeline.py 8b --context 65536 --pool 4096 --variants lru/coarse=off fresh/coarse=4
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvflash_bench.grid import Variant
from kvflash_bench.recall import open_variant
from kvflash_bench.shapes import SHAPES, shape_file
from kvflash_bench.steps import decode_steps, hardware
from kvflash_bench.tables import markdown

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cuda_runtime", "cuda_driver")
LONG_GAP = 5.0  # microseconds without a kernel or a copy
FEWEST = 3  # ends of tokens that a trace needs


@dataclass(slots=True)
class Token:
    """Microseconds of a token: from the copy of the logits of the token before to that of its own.

    busy: by kind of work. gaps: (how long, what was before it, what came after it), those above LONG_GAP.
    host: of CUDA calls, by name.
    """

    all: float
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gaps: list[tuple[float, str, str]] = field(default_factory=list)
    host: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def idle(self) -> float:
        """Time in which nothing runs."""
        return self.all - sum(self.busy.values())


def name_of(event: dict[str, Any]) -> str:
    """Return a short name of a kernel or a copy."""
    text = re.sub(r"\(.*|<.*|^void ", "", event["name"]) if event["cat"] == "kernel" else event["name"]
    return str(text).replace("(anonymous namespace)::", "")[:40]


def tokens_of(events: Sequence[dict[str, Any]], logits_bytes: int) -> list[Token]:
    """Cut a trace at the copies of the logits."""
    work = sorted((e for e in events if e.get("cat") in GPU), key=lambda e: e["ts"])
    calls = [e for e in events if e.get("cat") in HOST]
    ends = [e["ts"] + e["dur"] for e in work if "DtoH" in e["name"] and e["args"].get("bytes") == logits_bytes]
    if len(ends) < FEWEST:
        sizes = sorted({(e["name"], e["args"].get("bytes")) for e in work if "DtoH" in e["name"]}, key=str)
        msg = f"the trace has {len(ends)} copies of {logits_bytes} bytes, the logits, among {sizes}"
        raise SystemExit(msg)
    res = []
    for begin, end in pairwise(ends):
        token, at, last = Token(end - begin), begin, "logits"
        for e in work:
            stop, name = e["ts"] + e["dur"], name_of(e)
            if stop <= begin or e["ts"] >= end:
                continue
            if e["ts"] - at > LONG_GAP:
                token.gaps.append((e["ts"] - at, last, name))
            token.busy[name] += max(0.0, min(stop, end) - max(e["ts"], at))  # what overlaps counts once
            at, last = max(at, stop), name
        for call in calls:
            if begin <= call["ts"] < end:
                token.host[call["name"]] += call["dur"]
        res.append(token)
    return res


def recorded(decode: Callable[[], object]) -> list[dict[str, Any]]:
    """Return what the profiler saw."""
    import torch  # noqa: PLC0415 (only the machine with a GPU has it)
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    torch.cuda.init()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        decode()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


def run(path: Path, variant: Variant, args: argparse.Namespace) -> tuple[float, list[Token]]:
    """Return milliseconds a token without the profiler, and the tokens that it saw."""
    common = {"n_ubatch": args.ubatch, "type_k": args.ct, "type_v": args.ct}
    with open_variant(path, variant, args.context + 4 * args.tokens + 256, args.pool, common) as kv:
        for _ in kv.prefill(np.random.default_rng(0).integers(0, kv.model.n_vocab, args.context, dtype=np.int32)):
            pass
        plain = median(decode_steps(kv, args.tokens, []).seconds)
        events = recorded(lambda: decode_steps(kv, args.tokens, []))
        if args.nodes:
            show_nodes(str(variant.label), events, args.nodes)
        return 1e3 * plain, tokens_of(events, 4 * kv.model.n_vocab)


def show_nodes(label: str, events: Sequence[dict[str, Any]], n: int) -> None:
    """Print n kernels from the middle of the trace on: when they begin, how long they take, on which stream."""
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    some = kernels[len(kernels) // 2 :][:n]
    print(f"\n{label}, µs")
    for e in some:
        args = e["args"]
        print(
            f"{e['ts'] - some[0]['ts']:8.1f} {e['dur']:6.1f}  stream {args.get('stream')} {name_of(e)} {args.get('grid')}"
        )


def table(head: str, rows: dict[str, list[float]], labels: Sequence[str], least: float) -> None:
    """Print the rows with a value of at least `least`, the largest first."""
    shown = sorted((row for row in rows.items() if max(row[1]) >= least), key=lambda row: -max(row[1]))
    print("\n" + markdown([head, *labels], [[name, *(f"{value:,.1f}" for value in values)] for name, values in shown]))


def show(found: dict[str, tuple[float, list[Token]]]) -> None:
    """Print the tables, a column for each variant."""
    labels, all_tokens = list(found), [tokens for _, tokens in found.values()]

    def each(value: Callable[[Token], float]) -> list[float]:
        return [median(map(value, tokens)) for tokens in all_tokens]

    def by_name(of: Callable[[Token], dict[str, float]]) -> dict[str, list[float]]:
        names = {name for tokens in all_tokens for token in tokens for name in of(token)}
        return {name: each(lambda t, name=name: of(t).get(name, 0.0)) for name in names}

    def gaps(token: Token) -> dict[str, float]:
        res: dict[str, float] = defaultdict(float)
        for size, before, after in token.gaps:
            res[f"{before} → {after}"] += size
        return res

    table("ms a token", {"not recorded": [ms for ms, _ in found.values()]}, labels, 0)
    whole = {"all": each(lambda t: t.all), "nothing runs": each(lambda t: t.idle)}
    table("µs a token, recorded", whole, labels, 0)
    table("kernels and copies, µs a token", by_name(lambda t: t.busy), labels, 5)
    table(f"gaps above {LONG_GAP:.0f} µs, µs a token", by_name(gaps), labels, 1)
    table("CUDA calls of the host, µs a token", by_name(lambda t: t.host), labels, 5)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, or a shape with random weights")
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--pool", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--variants", nargs="+", default=["lru/prefill=pool", "fresh/prefill=pool"])
    parser.add_argument("--nodes", type=int, default=0, help="print so many kernels of the middle of the trace, too")
    parser.add_argument("-ub", "--ubatch", type=int, default=2048)
    parser.add_argument("-ct", default="q8_0")
    parser.add_argument("--shape-dir", type=Path, default=None)
    args = parser.parse_args()
    with ExitStack() as stack:
        shaped = args.model in SHAPES
        path = stack.enter_context(shape_file(args.model, args.shape_dir)) if shaped else Path(args.model)
        found = {text: run(path, Variant.parse(text), args) for text in args.variants}
    print(f"{args.model}, {args.context:,} tokens, pool of {args.pool:,}, {args.ct}, {hardware()}")
    show(found)


if __name__ == "__main__":
    main()
