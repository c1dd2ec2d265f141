"""Lossless decoding beside llama.cpp's full cache: speed, how many drafts are right, and whether the text is the same.

python bench/lossless.py MODEL TEXT... --context 8192 --pool 512 1024 --tokens 256 --prompts 4 --seeds 0 1 2 3

Prompts are cut from the texts at even distances; --ruler adds texts of RULER's tasks. Seed 0 is greedy. With --drafts N each round
drafts N tokens, so that how many are right hangs on no clock, and policies can be compared beside other load.

other bits: llama.cpp's full cache decodes the batches that were checked once more, all of them, and so many of their tokens have
other logits. Where the text parts from that of one token at a time, the row says by how much the logits differ there, and by how
much the full cache's own differ between batches of 1 and of 9 tokens: no more means that the width of a batch is all it is.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvflash_bench.grid import usual_coarse
from kvflash_bench.prompts import Prompts
from kvflash_bench.ruler_texts import SAMPLE, TASKS, make_text
from kvflash_bench.steps import hardware
from kvflash_bench.tables import Live
from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.engine import generation
from pyllama_kvflash.engine.lossless import Lossless
from pyllama_kvflash.events import Stats
from pyllama_kvflash.native import ALL, LAST, Context, Record, Sampler, Tokens
from pyllama_kvflash.options import Options, Spec
from pyllama_kvflash.pool.exact import ExactReader

WIDTH = 9
COLUMNS = (
    *("text", "policy", "pool", "seed", "full, tok/s", "lossless, tok/s", "ratio", "right", "tokens a round"),
    *("other bits", "same", "apart", "by width"),
)

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
    decode, keep, last = ExactReader.decode, ExactReader.keep, [(np.empty(0, np.int32), LAST)]

    def decoded(
        reader: ExactReader,
        pool: Context,
        tokens: Tokens,
        start: int,
        records: Sequence[Record],
        outputs: int,
        **how: Any,
    ) -> None:
        last[0] = tokens.copy(), outputs
        decode(reader, pool, tokens, start, records, outputs, **how)

    def kept(reader: ExactReader, pool: Context, start: int, n: int, n_batch: int) -> None:
        if last[0][1] == ALL:
            found.append((start, last[0][0], [pool.logits(i) for i in range(n_batch)], n))
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
    kv.clear()
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


class Row(NamedTuple):
    """An answer beside the full cache's. bits: tokens with other logits, of how many. same: tokens before the texts part."""

    text: str
    policy: str
    pool: int
    seed: int
    full_rate: float
    rate: float
    right: float
    each_round: float
    bits: tuple[int, int]
    same: int
    n: int
    apart: float
    by_width: float

    def cells(self) -> list[str]:
        """Return the cells of COLUMNS."""
        return [
            *(self.text, self.policy, f"{self.pool:,}", str(self.seed or "greedy")),
            *(f"{x:.2f}" for x in (self.full_rate, self.rate, self.rate / self.full_rate)),
            *(f"{100 * self.right:.1f} %", f"{self.each_round:.2f}"),
            *(
                f"{self.bits[0]} of {self.bits[1]}",
                f"{self.same} of {self.n}",
                f"{self.apart:.3f}",
                f"{self.by_width:.3f}",
            ),
        ]


class Bench:
    """The engines of a process, and what they are to answer."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Open the full cache, and an engine for each policy and pool."""
        self.args = args
        options: dict[str, Any] = {"n_ctx": args.context, "flash_attn": args.flash_attn, "n_threads": args.threads}
        more = {"spec": Spec(kind=args.spec)} if args.spec else {}
        self.full = KVFlash.from_file(args.model, **options, pool="off")
        self.pools: dict[tuple[str, int], KVFlash] = {}
        for policy, n in itertools.product(args.policies, args.pool):
            own = {"policy": policy, "pool": n, "panes": args.panes, "mode": "lossless"}
            own["coarse"] = usual_coarse(policy)
            kv = KVFlash.from_file(args.model, **options, **own, **more)
            if args.drafts:
                kv.decoder.lossless = Lossless(kv.sequence, kv.decoder.drafts, args.drafts)
            self.pools[policy, n] = kv

    def prompt(self, source: Path | str, i: int) -> Tokens:
        """Return the i-th prompt of a text, or of a task of RULER."""
        args, most = self.args, self.args.context - self.args.tokens - 16
        if isinstance(source, str):
            prompts = Prompts(self.full.model)
            return prompts.first(make_text(source, most, prompts.count, SAMPLE.read_text(), i)[0])
        data = source.read_text(errors="replace")
        return self.full.tokenize(data[len(data) * i // args.prompts :][: args.context * 8])[:most]

    def rows(self, source: Path | str, i: int, seeds: Sequence[int]) -> Iterator[Row]:
        """Answer a prompt with each seed, policy and pool."""
        full, n, prompt = self.full, self.args.tokens, self.prompt(source, i)
        wants = {seed: answer(full, prompt, n, sampling(seed)) for seed in seeds}
        full.rollback(len(prompt))
        noise = width_noise(full, prompt, max((ids for ids, *_ in wants.values()), key=len))
        name = f"{source if isinstance(source, str) else source.stem} {i}"
        for ((policy, pool), kv), (seed, want) in itertools.product(self.pools.items(), wants.items()):
            with batches_kept() as batches:
                got = answer(kv, prompt, n, sampling(seed))
            s, bits = got[2], other_bits(full, len(prompt), batches)
            each = s.n_generated / max(1, s.draft_steps + s.plain_steps)
            rates = want[2].decode_rate, s.decode_rate, s.acceptance, each
            same, apart = compare(want, got)
            yield Row(name, policy, pool, seed, *rates, bits, same, len(want[0]), apart, noise)


_bench: Bench | None = None  # of this process


def _open(args: argparse.Namespace) -> None:
    global _bench  # noqa: PLW0603 (a worker has one)
    _bench = Bench(args)


def _rows(job: tuple[Path | str, int, Sequence[int]]) -> list[Row]:
    if _bench is None:
        msg = "the worker was not opened"
        raise AssertionError(msg)
    return list(_bench.rows(*job))


def jobs(args: argparse.Namespace) -> list[tuple[Path | str, int, Sequence[int]]]:
    """Return all prompts: source, number, seeds."""
    sources = [(text, args.prompts) for text in args.texts] + [
        (task, args.ruler) for task in args.tasks or TASKS if args.ruler
    ]
    found = [(source, i) for source, n in sources for i in range(n)]
    by_turns = itertools.cycle([seed] for seed in args.seeds)
    return [(*job, next(by_turns) if args.one_seed else args.seeds) for job in found]


def totals(rows: Sequence[Row]) -> Iterator[str]:
    """Return a sentence for each policy and pool."""
    for policy, pool in sorted({(row.policy, row.pool) for row in rows}):
        of = [row for row in rows if (row.policy, row.pool) == (policy, pool)]
        parted = [row for row in of if row.same < row.n]
        bits = [sum(row.bits[i] for row in of) for i in (0, 1)]
        ratio = np.median([row.rate / row.full_rate for row in of])
        yield (
            f"{policy}, pool {pool:,}: {len(of)} answers of {sum(row.n for row in of):,} tokens, {len(of) - len(parted)} the same throughout;"
            f" {bits[0]} of {bits[1]:,} checked tokens have other bits; where {len(parted)} part, logits differ by at most"
            f" {max((row.apart for row in parted), default=0):.2f}, by width alone {max((row.by_width for row in of), default=0):.2f};"
            f" drafts right, in the mean {100 * np.mean([row.right for row in of]):.1f} %;"
            f" median of the full cache's speed {ratio:.2f}"
        )


def main() -> None:
    """Print a row for each prompt, pool and seed, as soon as it is there, and then what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--pool", type=int, nargs="+", default=[1024])
    parser.add_argument("--policies", nargs="+", default=[Options().policy])
    parser.add_argument("--drafts", type=int, default=0, help="tokens a round; 0: as many as pay")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=1, help="of each text")
    parser.add_argument("--ruler", type=int, default=0, help="of each task of RULER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--one-seed", action="store_true", help="a prompt has one of the seeds, by turns")
    parser.add_argument("-t", dest="threads", type=int, default=None)
    parser.add_argument("-fa", dest="flash_attn", default="auto")
    parser.add_argument("--tasks", nargs="*", default=(), help="those of --ruler; all if none is named")
    parser.add_argument("--panes", type=int, default=0)
    parser.add_argument("--spec", default=None)
    parser.add_argument("--processes", type=int, default=1, help="beside each other: then speeds say little")
    args = parser.parse_args()
    print(
        f"{hardware()}\n\n{args.model.name}, prompts of {args.context - args.tokens - 16:,} tokens, -fa {args.flash_attn}\n"
    )
    table = Live(*COLUMNS)
    found: list[Row] = []
    fresh = multiprocessing.get_context("spawn")  # a GPU's state does not survive a fork
    with ProcessPoolExecutor(args.processes, fresh, _open, (args,)) as workers:
        for job in as_completed([workers.submit(_rows, job) for job in jobs(args)]):
            found += job.result()
            for row in job.result():
                table.row(*row.cells())
    print("", *totals(found), sep="\n")


def sampling(seed: int) -> Sampling:
    """Return greedy sampling for seed 0, llama.cpp's defaults for any other."""
    return Sampling(temperature=0) if seed == 0 else Sampling(seed=seed)


if __name__ == "__main__":
    main()
