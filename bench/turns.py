r"""Turns after a long text, in the server: seconds until each is read, warm, after a branch and after a restart, way beside way.

python bench/turns.py 27b-hybrid --tokens 65536 --turn 500 --shape-dir /dev/shm/kvflash-shapes \
    --way "full=--kvflash off -ctk q8_0 -ctv q8_0" --way "pool=--kvflash 4K -ctk q8_0 -ctv q8_0" -- -ub 512

A model file, or a shape, which gets the bundled model's tokens. A turn is the text before, the answer to it, and --turn new tokens; it is
answered with 16 tokens. The branch leaves out the last two turns and asks something else. The server writes what it read into a folder,
is started again, and takes the next turn. What follows -- goes to all servers. "again": tokens of a turn that the server had read before.
"""

import argparse
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvflash_bench.shapes import SHAPES, kept_file, write_shape
from kvflash_bench.steps import hardware
from kvflash_bench.tables import Live
from pyllama_kvflash.needle import BUNDLED_MODEL
from served import Served, serving

N_ANSWER = 16
N_WORDS = 4000  # tokens that are used: the bundled model has more


class Conversation:
    """A text of token ids that grows turn by turn."""

    def __init__(self, server: Served, tokens: list[int], way: str, table: Live) -> None:
        self.tokens = tokens
        self._server, self._way, self._table = server, way, table

    def take(self, kind: str, new: list[int]) -> None:
        """Take a turn, and print it."""
        self.tokens = [*self.tokens, *new]
        body = {"prompt": self.tokens, "n_predict": N_ANSWER, "ignore_eos": True, "n_probs": 1, "temperature": 0}
        begin = time.perf_counter()
        found = self._server.post("/completion", body)
        seconds = time.perf_counter() - begin
        t, n = found["timings"], len(self.tokens)
        rate = 1000 / t["predicted_per_token_ms"]
        read, answered = t["prompt_ms"] / 1000, t["predicted_ms"] / 1000
        times = (f"{s:.2f}" for s in (read, answered, seconds))
        self._table.row(self._way, kind, f"{n:,}", f"{n - t['prompt_n']:,}", *times, f"{rate:.1f}")
        self.tokens += [each["id"] for each in found["completion_probabilities"]]


def measure(model: Path, way: str, options: list[str], n: int, n_turn: int, table: Live) -> None:
    """Take all turns in one way."""
    rng = np.random.default_rng(0)

    def words(k: int) -> list[int]:
        return [int(i) for i in rng.integers(10, N_WORDS, k)]

    with tempfile.TemporaryDirectory() as folder:
        command = (model, "-np", "1", "--prefix-cache", folder, *options)
        with serving(*command) as server:
            talk = Conversation(server, [], way, table)
            talk.take("first", words(n))
            for _ in range(2):
                talk.take("turn", words(n_turn))
            kept = talk.tokens
            for _ in range(2):
                talk.take("turn", words(n_turn))
            last, talk.tokens = talk.tokens, kept
            talk.take("branch", words(n_turn))
            talk.take("turn of it", words(n_turn))
            held = re.findall(r"checkpoint_bytes (\d+)", server.http.get("/metrics").text)
            print(
                f"{way}: checkpoints take {int(held[0]) >> 20 if held else '?'} MiB of RAM", file=sys.stderr, flush=True
            )
        with serving(*command) as server:
            again = Conversation(server, talk.tokens, way, table)
            again.take("restarted", words(n_turn))
            again.tokens = last
            again.take("the other branch", words(n_turn))


def main() -> None:
    """Print a table, a row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file, or a shape")
    parser.add_argument("--shape-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--turn", type=int, default=500)
    parser.add_argument("--way", action="append", required=True, metavar="NAME=OPTIONS")
    own, _, more = shlex.join(sys.argv[1:]).partition(" -- ")
    args, options = parser.parse_args(shlex.split(own)), shlex.split(more)
    model = Path(args.model)
    if args.model in SHAPES:
        model = kept_file(f"{args.model}-worded", args.shape_dir)
        if not model.exists():
            write_shape(args.model, model, BUNDLED_MODEL)
    options = ["-c", str(args.tokens + 10 * (args.turn + 2 * N_ANSWER)), *options]
    print(f"{args.model}, a turn of {args.turn:,} tokens; {hardware()}\n")
    table = Live("", "", "tokens", "again", "read s", "answer s", "all s", "tok/s")
    for each in args.way:
        way, _, given = each.partition("=")
        measure(model, way, [*options, *shlex.split(given)], args.tokens, args.turn, table)


if __name__ == "__main__":
    main()
