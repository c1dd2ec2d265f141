"""Lossless decoding beside llama.cpp's full cache: speed, how many drafts are right, and whether the text is the same.

python bench/lossless.py MODEL TEXT... --context 8192 --pool 512 1024 --tokens 256 --prompts 4 --seeds 0 1 2 3

Prompts are cut from the texts at even distances. Seed 0 is greedy.

other bits: llama.cpp's full cache decodes the batches that were checked once more, all of them, and so many of their tokens have
other logits. Where the text parts from that of one token at a time, the row says by how much the logits differ there, and by how
much the full cache's own differ between batches of 1 and of 9 tokens: no more means that the width of a batch is all it is.
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
from pyllama_kvflash.options import LOOKAHEAD, Spec
from pyllama_kvflash.pool.exact import ExactReader

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


@contextmanager
def batches_kept() -> Iterator[list[tuple[int, Tokens, list[Logits], int]]]:
    """Keep what is checked: position, tokens, logits of each, and how many stand."""
    found: list[tuple[int, Tokens, list[Logits], int]] = []
    decode, keep, last = ExactReader.decode, ExactReader.keep, [np.empty(0, np.int32)]

    def decoded(reader: ExactReader, pool: Context, tokens: Tokens, *args: Any) -> None:
        last[0] = tokens.copy()
        decode(reader, pool, tokens, *args)

    def kept(reader: ExactReader, pool: Context, start: int, n: int, n_batch: int) -> None:
        if n_batch <= LOOKAHEAD + 1:
            found.append((start, last[0], [pool.logits(i) for i in range(n_batch)], n))
        keep(reader, pool, start, n, n_batch)

    ExactReader.decode, ExactReader.keep = decoded, kept  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ExactReader.decode, ExactReader.keep = decode, keep  # type: ignore[method-assign]


def other_bits(kv: KVFlash, n_prompt: int, batches: list[tuple[int, Tokens, list[Logits], int]]) -> tuple[int, int]:
    """Decode the batches with the full cache, after the prompt. Returns how many tokens have other logits, and of how many."""
    kv.rollback(n_prompt)
    differ = n = 0
    for start, tokens, rows, n_kept in batches:
        kv.ctx.decode(tokens, start, ALL)
        differ += sum(not np.array_equal(kv.ctx.logits(i), row) for i, row in enumerate(rows))
        n += len(rows)
        if n_kept < len(tokens):
            kv.ctx.seq_rm(start + n_kept)
    kv.ctx.seq_rm(n_prompt)
    return differ, n


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
    parser.add_argument("--panes", type=int, default=0)
    parser.add_argument("--spec", default=None)
    args = parser.parse_args()
    print(
        f"{hardware()}\n\n{args.model.name}, prompts of {args.context - args.tokens - 16:,} tokens, -fa {args.flash_attn}\n"
    )
    print(
        "| text | pool | seed | full, tok/s | lossless, tok/s | ratio | right | tokens a round | other bits | same | apart |"
        " by width |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    options: dict[str, Any] = {"n_ctx": args.context, "flash_attn": args.flash_attn}
    spec = {"spec": Spec(kind=args.spec)} if args.spec else {}
    for text in args.texts:
        data = text.read_text(errors="replace")
        for i in range(args.prompts):
            part = data[len(data) * i // args.prompts :][: args.context * 8]
            with KVFlash.from_file(args.model, **options, pool="off") as full:
                prompt = full.tokenize(part)[: args.context - args.tokens - 16]
                wants = {seed: answer(full, prompt, args.tokens, sampling(seed)) for seed in args.seeds}
                full.rollback(len(prompt))
                noise = width_noise(full, prompt, next(iter(wants.values()))[0])
                for pool in args.pool:
                    with KVFlash.from_file(
                        args.model, **options, pool=pool, panes=args.panes, exact=True, **spec
                    ) as kv:
                        for seed, want in wants.items():
                            with batches_kept() as batches:
                                got = answer(kv, prompt, args.tokens, sampling(seed))
                            row = compare(want, got), other_bits(full, len(prompt), batches)
                            print(
                                f"| {text.stem} {i} | {pool:,} | {seed or 'greedy'} | {cells(want[2], got[2], *row, noise)} |",
                                flush=True,
                            )


def cells(full: Stats, got: Stats, parted: tuple[int, float], bits: tuple[int, int], noise: float) -> str:
    """Return the rest of a row."""
    return (
        f"{full.decode_rate:.2f} | {got.decode_rate:.2f} | {got.decode_rate / full.decode_rate:.2f} |"
        f" {100 * got.acceptance:.1f} % | {got.n_generated / max(1, got.draft_steps + got.plain_steps):.2f} |"
        f" {bits[0]} of {bits[1]} | {parted[0]} of {full.n_generated} | {parted[1]:.3f} | {noise:.3f}"
    )


def sampling(seed: int) -> Sampling:
    """Return greedy sampling for seed 0, llama.cpp's defaults for any other."""
    return Sampling(temperature=0) if seed == 0 else Sampling(seed=seed)


if __name__ == "__main__":
    main()
