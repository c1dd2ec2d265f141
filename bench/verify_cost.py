"""What checking a draft costs: batches of the draft and one more against single tokens, full cache and pool, one run.

Needs a shape of `kvflash bench speed` (random weights: this is about time).

    python bench/verify_cost.py --shape 8b --contexts 8192,65536
"""

import argparse
from pathlib import Path

import numpy as np

from pyllama_kvflash import KVFlash
from pyllama_kvflash.bench.answers import batch_costs
from pyllama_kvflash.bench.shapes import shape_file
from pyllama_kvflash.bench.steps import hardware
from pyllama_kvflash.options import Spec

WIDTHS = (2, 3, 5, 9, 17)


def main() -> None:
    """A row for each cache and context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--shape-dir", type=Path, default=None)
    parser.add_argument("--contexts", default="8192,65536")
    parser.add_argument("--pool", type=int, default=4096)
    args = parser.parse_args()
    contexts = [int(n) for n in args.contexts.split(",")]
    rng = np.random.default_rng(0)
    print("| cache | tokens | " + " | ".join(f"{n} tokens" for n in WIDTHS) + " |\n" + "|---" * (2 + len(WIDTHS)) + "|")
    with shape_file(args.shape, args.shape_dir) as path:
        for pool in ("off", args.pool):
            spec = Spec(kind="ngram", n_max=max(WIDTHS) - 1)
            common = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on", "n_batch": 2048, "n_ubatch": 2048}
            with KVFlash.from_file(path, n_ctx=max(contexts) + 256, pool=pool, spec=spec, **common) as kv:
                for n in contexts:
                    for _ in kv.prefill(rng.integers(0, kv.model.n_vocab, n - kv.n_tokens, dtype=np.int32)):
                        pass
                    costs = " | ".join(f"{cost:.2f}" for cost in batch_costs(kv, WIDTHS).values())
                    print(f"| {'full' if pool == 'off' else f'pool {pool}'} | {n:,} | {costs} |", flush=True)
    print(f"\nIn single tokens. {hardware()}")


if __name__ == "__main__":
    main()
