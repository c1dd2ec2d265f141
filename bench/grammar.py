"""What a grammar costs: tokens a second of JSON by a schema, beside an answer without one, by turns in one process.

python bench/grammar.py model.gguf --rounds 5 -- pool=1024 n_threads=2
python bench/grammar.py --shape 8b model.gguf    random weights, with the tokens of the model

Answers are greedy, or drawn with --temp; one that ends is followed by another. Without --temp there is no chain of samplers
either: what is compared with is llama.cpp's fastest way to choose a token.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvflash_bench.shapes import write_shape
from kvflash_bench.steps import hardware
from pyllama_kvflash import KVFlash
from pyllama_kvflash.events import Token
from pyllama_kvflash.json_schema import json_grammar
from pyllama_kvflash.native import Sampling

SCHEMA = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z ]{2,20}$"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["sailor", "captain", "landlord", "whale"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
PROMPT = "All who are in Moby-Dick, as JSON:\n"


def rate(kv: KVFlash, sampling: Sampling, n: int) -> float:
    """Tokens a second, from the first token of each answer to its last."""
    seconds, n_timed = 0.0, 0
    while n_timed < n:  # an answer that ends is followed by another one
        kv.clear()
        times = [
            time.perf_counter() for e in kv.generate(PROMPT, max_tokens=n, sampling=sampling) if isinstance(e, Token)
        ]
        seconds, n_timed = seconds + times[-1] - times[0], n_timed + len(times) - 1
    return n_timed / seconds


@contextmanager
def model_of(args: argparse.Namespace) -> Iterator[Path]:
    """The model to measure."""
    if args.shape is None:
        yield Path(args.model)
        return
    with tempfile.TemporaryDirectory(dir=args.shape_dir) as folder:
        path = Path(folder) / f"{args.shape}.gguf"
        write_shape(args.shape, path, Path(args.model))
        yield path


def main() -> None:
    """Print a line for each round, and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--shape")
    parser.add_argument("--shape-dir", type=Path)
    own, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(shlex.split(own))
    options: dict[str, Any] = {key: json.loads(value) for key, value in (word.split("=") for word in more.split())}
    print(hardware(), "python bench/grammar.py " + " ".join(sys.argv[1:]) + "\n", sep="\n")
    ratios = []
    with model_of(args) as path, KVFlash.from_file(path, **{"n_ctx": 4096, "pool": 1024, **options}) as kv:
        plain = Sampling(temperature=args.temp, seed=1)
        ruled = replace(plain, grammar=json_grammar(json.dumps(SCHEMA)))
        for i in range(args.rounds + 1):
            with_it, without = rate(kv, ruled, args.tokens), rate(kv, plain, args.tokens)
            print(
                f"{with_it:.1f} tokens/s with the grammar, {without:.1f} without: {with_it / without:.3f}",
                "" if i else "(not counted)",
            )
            ratios += [with_it / without] if i else []
    print(f"\nmedian {statistics.median(ratios):.3f} of the speed without")


if __name__ == "__main__":
    main()
