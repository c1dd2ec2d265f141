"""Lossless decoding beside llama.cpp's full cache: speed, how many drafts are right, and whether the text is the same.

python bench/lossless.py MODEL TEXT... --context 8192 --pool 512 1024 --tokens 256 --prompts 4 --seeds 0 1 2 3

Prompts are cut from the texts at even distances. Seed 0 is greedy. Where two texts part, the row says by how much the logits
differ there, and by how much the full cache's own differ between batches of 1 and of 9 tokens: no more means a near tie.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.bench.steps import hardware
from pyllama_kvflash.engine import generation
from pyllama_kvflash.events import Stats
from pyllama_kvflash.native import ALL, Context, Sampler, Tokens
from pyllama_kvflash.options import Spec

WIDTH = 9

Logits = npt.NDArray[np.float32]


@contextmanager
def rows_kept() -> Iterator[list[Logits]]:
    """Keep the logits that each token is chosen by."""
    rows: list[Logits] = []

    class Keeping(Sampler):
        forked = False

        def fork(self) -> Any:
            res = super().fork()
            res.forked = True
            return res

        def sample(self, ctx: Context, i: int = -1) -> int:
            if not self.forked:
                rows.append(ctx.logits(i).astype(np.float16))
            return super().sample(ctx, i)

    before, generation.Sampler = generation.Sampler, Keeping  # type: ignore[misc]
    try:
        yield rows
    finally:
        generation.Sampler = before  # type: ignore[misc]


def answer(kv: KVFlash, prompt: Tokens, n: int, sampling: Sampling) -> tuple[list[int], list[Logits], Stats]:
    """Return the tokens of an answer, the logits that each was chosen by, and its stats."""
    with rows_kept() as rows:
        events = list(kv.generate(prompt, max_tokens=n, sampling=sampling))
    return [e.id for e in events if isinstance(e, Token)], rows, events[-1].stats  # type: ignore[union-attr]


def width_noise(kv: KVFlash, prompt: Tokens, ids: list[int]) -> float:
    """Return the largest difference of the full cache's logits between batches of 1 and of WIDTH tokens."""
    found = []
    start = len(prompt)
    for size in (1, WIDTH):
        if kv.n_tokens > start:
            kv.rollback(start)
        rows: list[Logits] = []
        for at in range(0, len(ids) // WIDTH * WIDTH, size):
            kv.decode(np.array(ids[at : at + size], np.int32), ALL)
            rows += [kv.logits(i) for i in range(size)]
        found.append(np.array(rows))
    return float(np.abs(found[0] - found[1]).max())


def compare(
    full: tuple[list[int], list[Logits], Stats], got: tuple[list[int], list[Logits], Stats]
) -> tuple[int, float]:
    """Return at which token two answers part (their length: nowhere), and how far their logits are apart there."""
    n = next((i for i, (a, b) in enumerate(zip(full[0], got[0], strict=False)) if a != b), len(full[0]))
    rows = full[1][min(n, len(full[1]) - 1)], got[1][min(n, len(got[1]) - 1)]
    return n, float(np.abs(rows[0].astype(np.float32) - rows[1].astype(np.float32)).max())


def main() -> None:
    """Print a row for each prompt, pool and seed, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--pool", type=int, nargs="+", default=[1024])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("-fa", dest="flash_attn", default="auto")
    parser.add_argument("--spec", default=None)
    args = parser.parse_args()
    print(
        f"{hardware()}\n\n{args.model.name}, prompts of {args.context - args.tokens - 16:,} tokens, -fa {args.flash_attn}\n"
    )
    print(
        "| text | pool | seed | full, tok/s | lossless, tok/s | ratio | right | tokens a round | same | apart | by width |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    options: dict[str, Any] = {"n_ctx": args.context, "flash_attn": args.flash_attn}
    for text in args.texts:
        data = text.read_text(errors="replace")
        for i in range(args.prompts):
            part = data[len(data) * i // args.prompts :][: args.context * 8]
            control = {}
            with KVFlash.from_file(args.model, **options, pool="off") as kv:
                prompt = kv.tokenize(part)[: args.context - args.tokens - 16]
                for seed in args.seeds:
                    full = answer(kv, prompt, args.tokens, sampling(seed))
                    kv.rollback(len(prompt))
                    control[seed] = full, width_noise(kv, prompt, full[0])
            for pool in args.pool:
                spec = {"spec": Spec(kind=args.spec)} if args.spec else {}
                with KVFlash.from_file(args.model, **options, pool=pool, exact=True, **spec) as kv:
                    for seed, (full, noise) in control.items():
                        got = answer(kv, prompt, args.tokens, sampling(seed))
                        n, apart = compare(full, got)
                        s, rate = got[2], full[2].decode_rate
                        print(
                            f"| {text.stem} {i} | {pool:,} | {seed or 'greedy'} | {rate:.2f} | {s.decode_rate:.2f} |"
                            f" {s.decode_rate / rate:.2f} | {100 * s.acceptance:.1f} % |"
                            f" {s.n_generated / max(1, s.draft_steps + s.plain_steps):.2f} | {n} of {len(full[0])} |"
                            f" {apart:.3f} | {noise:.3f} |",
                            flush=True,
                        )


def sampling(seed: int) -> Sampling:
    """Return greedy sampling for seed 0, llama.cpp's defaults for any other."""
    return Sampling(temperature=0) if seed == 0 else Sampling(seed=seed)


if __name__ == "__main__":
    main()
