"""What a grammar costs: tokens a second of JSON by a schema, beside an answer without one, by turns in one process.

python bench/grammar.py model.gguf --rounds 5 -- pool=1024 n_threads=2

Both answers are greedy, and none ends before its tokens are there.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from typing import Any

from pyllama_kvflash import KVFlash
from pyllama_kvflash.bench.steps import hardware
from pyllama_kvflash.events import Token
from pyllama_kvflash.native import Sampling, json_grammar

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


def timed(kv: KVFlash, sampling: Sampling, n: int) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, and the tokens."""
    times, ids = [], []
    for event in kv.generate(PROMPT, max_tokens=n, sampling=sampling):
        if isinstance(event, Token):
            times.append(time.perf_counter())
            ids.append(event.id)
    return times[-1] - times[0], ids


def main() -> None:
    """Print a line for each round, and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    own, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(shlex.split(own))
    options: dict[str, Any] = {key: json.loads(value) for key, value in (word.split("=") for word in more.split())}
    print(hardware(), f"{args.model}, {args.tokens} tokens, {more}\n", sep="\n")
    ratios = []
    with KVFlash.from_file(args.model, **{"n_ctx": 4096, "pool": 1024, **options}) as kv:
        ends = tuple((t, -1e9) for t in range(kv.model.n_vocab) if kv.model.is_eog(t))
        plain = Sampling(temperature=0, logit_bias=ends)
        ruled = Sampling(temperature=0, logit_bias=ends, grammar=json_grammar(json.dumps(SCHEMA)))
        for i in range(args.rounds + 1):
            (with_rules, said), (without, other) = timed(kv, ruled, args.tokens), timed(kv, plain, args.tokens)
            rate = (len(said) - 1) / with_rules, (len(other) - 1) / without
            print(
                f"{rate[0]:.1f} tokens/s with the grammar, {rate[1]:.1f} without: {rate[0] / rate[1]:.3f}",
                "" if i else "(not counted)",
            )
            ratios += [rate[0] / rate[1]] if i else []
    print(f"\nmedian {statistics.median(ratios):.3f} of the speed without")


if __name__ == "__main__":
    main()
