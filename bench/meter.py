"""The meter against the truth: what it says of an answer, and what the full cache says of every token of it.

python bench/meter.py MODEL TEXT... --context 4096 --pool 512 --tokens 256 --prompts 4 --shares 1 0.05

The last rows are all answers of a share together, as in a server. Greedy, so each token is the one that the pool finds most likely. The truth: the full cache reads the prompt and the answer, token
by token; how many tokens are those that it finds most likely.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_bench.grid import usual_coarse
from kvflash_bench.steps import hardware
from kvflash_bench.tables import Live
from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.options import Options


def truth(kv: KVFlash, prompt: Any, ids: list[int]) -> float:
    """Return the share of the tokens after the first that the full cache finds most likely. The prompt is read."""
    kv.rollback(len(prompt))
    n = 0
    for token, following in itertools.pairwise(ids):
        kv.decode(np.array([token], np.int32))
        n += int(kv.ctx.checked_logits().argmax()) == following
    return n / (len(ids) - 1)


def main() -> None:
    """Print a row for each prompt and share, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--pool", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.05])
    parser.add_argument("--policy", default=Options().policy)
    parser.add_argument("-t", dest="threads", type=int, default=None)
    parser.add_argument("-fa", dest="flash_attn", default="auto")
    args = parser.parse_args()
    print(
        f"{hardware()}\n\n{args.model.name}, context {args.context:,}, {args.policy} with a pool of {args.pool:,}, -fa {args.flash_attn}\n"
    )
    table = Live("text", "share", "checked", "the meter says", "KLD", "the full cache says", "of the time", "tok/s")
    options: dict[str, Any] = {
        "n_ctx": args.context,
        "n_threads": args.threads,
        "flash_attn": args.flash_attn,
        "opening": 0,
    }
    own = {"policy": args.policy, "coarse": usual_coarse(args.policy), "pool": args.pool}
    sums: dict[float, list[list[float]]] = {share: [] for share in args.shares}
    for text in args.texts:
        data = text.read_text(errors="replace")
        for i in range(args.prompts):
            part = data[len(data) * i // args.prompts :][: args.context * 8]
            found = []
            for share in args.shares:
                with KVFlash.from_file(args.model, **options, **own, meter=share) as kv:
                    prompt = kv.tokenize(part)[: args.context - args.tokens - 16]
                    events = list(kv.generate(prompt, max_tokens=args.tokens, sampling=Sampling(temperature=0)))
                    found.append((share, [e.id for e in events if isinstance(e, Token)], events[-1].stats))  # type: ignore[union-attr]
            with KVFlash.from_file(args.model, **options, pool="off") as kv:
                list(kv.prefill(prompt))
                for share, ids, s in found:
                    said, true = 100 * (s.agreement or 0), truth(kv, prompt, ids)
                    time_s = s.prefill_s + s.decode_s
                    sums[share].append([s.checked, s.agreed, true * (len(ids) - 1), len(ids) - 1, s.check_s, time_s])
                    shares = (
                        f"{said:.1f} %",
                        f"{s.kld or 0:.4f}",
                        f"{100 * true:.1f} %",
                        f"{100 * s.check_s / time_s:.1f} %",
                    )
                    table.row(f"{text.stem} {i}", f"{share:g}", s.checked, *shares, f"{s.decode_rate:.2f}")
    for share, rows in sums.items():
        checked, agreed, right, n, check_s, time_s = np.sum(rows, axis=0)
        said = f"{100 * agreed / max(1, checked):.1f} %"
        true, of_time = f"{100 * right / n:.1f} %", f"{100 * check_s / time_s:.1f} %"
        table.row("all", f"{share:g}", f"{checked:.0f}", said, "-", true, of_time, "-")


if __name__ == "__main__":
    main()
