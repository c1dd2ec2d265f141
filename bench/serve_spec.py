"""Servers that answer in different ways, in one process and by turns: tokens a second of all clients.

python bench/serve_spec.py --clients 1,2,4 --tokens 256                     the bundled needle-7m, without and with --spec ngram
python bench/serve_spec.py -m model.gguf --draft-max 3 --pool 4096
python bench/serve_spec.py -m model.gguf --ways full,lossless --context 16384 --pool 8192 --text novel.txt

Each client asks for the continuation of its own text, which repeats a line, or is a part of --text; the requests go through the
scheduler, as those of HTTP do. "full" holds everything; "lossless" has panes of two layers. All give the same text, but for near ties.
"""

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvflash_bench.answers import make_text
from kvflash_bench.steps import hardware
from kvflash_bench.tables import Live
from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.options import Spec
from pyllama_kvflash.serve.job import Failed, Finished, Job, Text, Update
from pyllama_kvflash.serve.scheduler import Scheduler


@dataclass
class Client:
    """A request, and what came back."""

    text: str = ""
    done: Finished | None = None
    failed: Failed | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def hear(self, update: Update) -> None:
        """Take an update; called by the scheduler's thread."""
        if isinstance(update, Text):
            self.text += update.text
        elif isinstance(update, Finished | Failed):
            if isinstance(update, Finished):
                self.done = update
            else:
                self.failed = update
            self.ended.set()


def ask(scheduler: Scheduler, prompts: list[Any], n_tokens: int) -> tuple[float, list[str]]:
    """Have a server answer all prompts at once. Return tokens a second, prompts included in the time, and the texts."""
    clients = [Client() for _ in prompts]
    begin = time.perf_counter()
    for client, tokens in zip(clients, prompts, strict=True):
        scheduler.admit()
        scheduler.submit(Job(tokens, Sampling(temperature=0), n_tokens, (), client.hear))
    for client in clients:
        client.ended.wait()
        if client.failed:
            raise SystemExit(client.failed.message)
    seconds = time.perf_counter() - begin
    return sum(c.done.n_answer for c in clients if c.done) / seconds, [c.text for c in clients]


def opened(path: Path, options: dict[str, Any]) -> Scheduler:
    """Return a server that is ready."""

    def open_(_progress: Callable[[float], None]) -> KVFlash:
        return KVFlash.from_file(path, **options)

    scheduler = Scheduler(open_, n_queue=64)
    scheduler.start()
    while scheduler.phase.value == "loading":
        time.sleep(0.05)
    if scheduler.error:
        raise SystemExit(str(scheduler.error))
    return scheduler


def texts(kv: KVFlash, text: Path | None, n_tokens: int, n: int) -> list[Any]:
    """Return prompts of n clients, n_tokens or a little fewer each: the same lines after different beginnings, or parts of a text."""
    if text is None:
        tokens = kv.tokenize(make_text(kv, "copy", n_tokens, 0)[0])
        return [np.concatenate([tokens[:1], tokens[1 + 16 * i :]]).astype(np.int32) for i in range(n)]
    tokens = kv.tokenize(text.read_text(encoding="utf-8", errors="replace")[: 6 * n * n_tokens])
    return [tokens[i * n_tokens : (i + 1) * n_tokens] for i in range(n)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument(
        "--ways",
        default="none,ngram",
        help="of none, ngram, full and lossless; the first is what others are compared with",
    )
    parser.add_argument("--clients", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pool", type=int, default=2048)
    parser.add_argument("--context", type=int, default=0, help="tokens of each prompt; 0: those of the pool by clients")
    parser.add_argument("--text", type=Path, default=None, help="which prompts are parts of; none: lines that repeat")
    parser.add_argument("--draft-max", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    counts = [int(n) for n in args.clients.split(",")]
    n_tokens = args.context or args.pool // max(counts)
    options: dict[str, Any] = {"n_ctx": max(16384, n_tokens + args.tokens + 64), "n_parallel": max(counts)}
    ways: dict[str, dict[str, Any]] = {
        "none": {"pool": args.pool},
        "ngram": {"pool": args.pool, "spec": Spec(kind="ngram", n_max=args.draft_max)},
        "full": {"pool": "off"},
        "lossless": {"pool": args.pool, "mode": "lossless", "panes": 2},
    }
    servers = {name: opened(args.model, {**options, **ways[name]}) for name in args.ways.split(",")}
    first, *others = servers
    kv = servers[first].kv
    if kv is None:
        raise SystemExit("the model was closed")
    print(
        f"{args.model.name}, {n_tokens:,} tokens, pool {args.pool:,}, {args.tokens} tokens each, --draft-max {args.draft_max}; {hardware()}"
    )
    print()
    table = Live("clients", first, *(title for name in others for title in (name, "times as fast", "same text")))
    for n in counts:
        prompts = texts(kv, args.text, n_tokens, n)
        rates: dict[str, list[float]] = {name: [] for name in servers}
        said: dict[str, list[str]] = {}
        for i in range(args.rounds + 1):
            for name, server in servers.items():
                rate, said[name] = ask(server, prompts, args.tokens)
                if i:  # the first round reads the prompts; the others find them in the sequences
                    rates[name].append(rate)
        base, cells = median(rates[first]), list[str]()
        for name in others:
            rate, same = median(rates[name]), sum(a == b for a, b in zip(said[first], said[name], strict=True))
            cells += [f"{rate:.0f} tok/s", f"{rate / base:.2f}", f"{same} of {n}"]
        table.row(n, f"{base:.0f} tok/s", *cells)
    for server in servers.values():
        server.end()
        server.join(30)


if __name__ == "__main__":
    main()
