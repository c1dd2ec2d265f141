"""Drafts of which a given share is right, on a model of a real shape with random weights: about speed alone.

python bench/forced.py --shape 8b --contexts 65536 131072 --pool 4096 -ub 2048 -ct q8_0 --accepted 0.8 0.9 0.95

Lossless decoding, unless --spec is given. What is chosen is a list of random tokens, whatever the logits are; a drafted token is the next one of that list with the given
probability. All is computed as usual: the pool drafts as its policy has it, the exact pass checks, the number of drafts chooses itself. Beside it, in one
run: the full cache where it fits, the pool without checks, and streaming of one token a pass (nothing drafted), for an eighth of
the tokens. Each cache reads its prompt once.

--spec mtp: speculative decoding in place of lossless, with the model's own heads, in the full cache and in pools; its gate is as usual:

    python bench/forced.py --shape 27b-mtp --spec mtp --n-max 3 --contexts 65536 --accepted 0.75

--clients 2 4: so many texts of that length, whose answers take turns, as in the server; the tok/s are those of all.

said, taken: device memory in MiB that `kvflash inspect` says, and by how much free memory is less once all is done.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_bench.grid import usual_coarse
from kvflash_bench.shapes import shape_file
from kvflash_bench.steps import hardware
from kvflash_bench.tables import Live
from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.engine import generation
from pyllama_kvflash.engine.generation import step_together
from pyllama_kvflash.engine.lossless import Lossless
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.loading.planning import planned
from pyllama_kvflash.native import Context, Model, Sampler, devices
from pyllama_kvflash.options import Options, Spec
from pyllama_kvflash.policy.lookahead import Length, Lookahead
from pyllama_kvflash.pool.speculation import Drafts

COLUMNS = (
    *("context", "clients", "cache", "prefill tok/s", "accepted", "tok/s", "of full", "tokens a round"),
    *("device KV, MiB", "said", "taken"),
)

N_WORDS = 500  # tokens that are used: every vocabulary has them


@contextmanager
def forced(text: Any, accepted: float | None, start: int = 0) -> Iterator[None]:
    """Have every answer be `text`, (n,) int32. accepted: probability that a drafted token is right; None: draft nothing. start:
    tokens before it.
    """
    right = np.random.default_rng(1).random(len(text)) < (accepted or 0)  # the same ones, however is drafted

    class Forced(Sampler):
        """Draws the text; one that was forked, for drafts, a wrong token now and then."""

        forked, taken = False, 0

        def fork(self) -> Any:
            res = super().fork()
            res.forked = True
            return res

        def sample(self, ctx: Context, i: int = -1) -> int:
            super().sample(ctx, i)
            at = min(self.taken, len(text) - 1)
            self.taken += 1
            return int(text[at]) if right[at] or not self.forked else (int(text[at]) + 1) % N_WORDS

    def guessed(drafts: Drafts, history: Any, token: int, at_most: int) -> Any:
        n = len(guess(drafts, history, token, at_most))  # it takes its time
        at = len(history) - start
        return np.where(right[at : at + n], text[at : at + n], (text[at : at + n] + 1) % N_WORDS).astype(np.int32)

    kept = generation.Sampler, Lookahead.next, Model.is_eog, Model.piece
    guess, Drafts.guess = Drafts.guess, guessed  # type: ignore[method-assign]
    generation.Sampler = Forced  # type: ignore[misc]
    Model.is_eog = lambda *_: False  # type: ignore[method-assign]
    Model.piece = lambda *_, **__: b""  # type: ignore[method-assign]
    if accepted is None:
        Lookahead.next = Length(0)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        generation.Sampler, Lookahead.next, Model.is_eog, Model.piece = kept  # type: ignore[misc, method-assign]
        Drafts.guess = guess  # type: ignore[method-assign]


def decode(kv: KVFlash, text: Any, accepted: float | None) -> tuple[float, float]:
    """Return tokens a second and tokens a round. The context stays as it is."""
    start = kv.n_tokens
    with forced(text, accepted, start):
        run = kv.generate(text[-1:], max_tokens=len(text), sampling=Sampling(temperature=0), append=True)
        events = [next(event for event in run if isinstance(event, Token))]
        begin = time.perf_counter()  # before it, a checkpoint of recurrent states may be made
        events += run
    seconds = time.perf_counter() - begin
    n, s = sum(isinstance(e, Token) for e in events), events[-1].stats  # type: ignore[union-attr]
    kv.rollback(start)
    return (n - 1) / seconds, n / ((s.draft_steps + s.plain_steps) or n)


def decode_all(kv: KVFlash, text: Any, accepted: float | None) -> tuple[float, float]:
    """Return tokens a second of all sequences, and tokens a round of each, where their answers take turns. They stay as they are."""
    starts, n_rounds = [s.n_tokens for s in kv.sequences], 0
    with forced(text, accepted):
        greedy = Sampling(temperature=0)
        runs = [s.generation(text[-1:], max_tokens=len(text), sampling=greedy) for s in kv.sequences]
        for run in runs:
            while run.reading:
                list(run.read())
        begin = time.perf_counter()
        while left := [run for run in runs if not run.ended]:
            n_rounds += len(left)
            if kv.decoder.lossless:
                for run, following in zip(left, [*left[1:], left[0]], strict=True):
                    run.step(following)
            else:
                step_together(left)
        seconds = time.perf_counter() - begin
    for s, start in zip(kv.sequences, starts, strict=True):
        s.rollback(start)
    return len(runs) * len(text) / seconds, len(runs) * len(text) / n_rounds


def ways_to_decode(kv: KVFlash, accepted: list[float]) -> list[tuple[str, float | None, bool]]:
    """Return a name, the share of right drafts, and whether is drafted beside checks."""
    if spec := kv.options.spec:
        return [("", None, False), *((f"{spec.kind} of {spec.n_max or 'any number'}, ", a, False) for a in accepted)]
    res: list[tuple[str, float | None, bool]] = [("", None, False)]
    if kv.n_pool:
        res += [("lossless, ", a, False) for a in (None, *accepted)]
    if kv.n_pool and kv.sequence.reads_exactly.streams:
        res += [("lossless, beside checks, ", a, True) for a in accepted]
    return res


@contextmanager
def drafting(kv: KVFlash, *, drafted: bool) -> Iterator[None]:
    """Decode plainly, unless `drafted`."""
    drafts = [s.decoder.drafts for s in kv.sequences]
    for s in kv.sequences if not drafted else ():
        s.decoder.drafts = None
    yield
    for s, each in zip(kv.sequences, drafts, strict=True):
        s.decoder.drafts = each


class Alone(Lossless):
    """Drafts nothing beside a check."""

    _goes_on = False  # type: ignore[assignment]


def free() -> int:
    """Return the free bytes of all GPUs."""
    return sum(device.free for device in devices() if device.gpu)


def main() -> None:
    """Print a row for each way, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--shape-dir", type=Path, default=None)
    parser.add_argument("--contexts", type=int, nargs="+", default=[65536])
    parser.add_argument("--pool", type=int, default=4096)
    parser.add_argument("--policies", nargs="+", default=[Options().policy])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--accepted", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    parser.add_argument("--panes", type=int, nargs="+", default=[2, 999])
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--spec", default=None, choices=["mtp"])
    parser.add_argument("--n-max", type=int, default=0)
    parser.add_argument("--gate", type=float, default=1.0, help="0: always draft")
    parser.add_argument("--coarse", default=None)
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("-ct", default="f16")
    args = parser.parse_args()
    print(f"{args.shape}, pool {args.pool:,}, {args.ct}, {args.tokens} tokens; {hardware()}\n")
    table, rng = Live(*COLUMNS), np.random.default_rng(0)
    with ExitStack() as stack:
        path = stack.enter_context(shape_file(args.shape, args.shape_dir))
        for n, clients in itertools.product(args.contexts, args.clients):
            options: dict[str, Any] = {"n_ctx": n + args.tokens + 64, "n_ubatch": args.ub, "n_parallel": clients}
            options |= {"type_k": args.ct, "type_v": args.ct}
            options["spec"] = Spec(kind=args.spec, n_max=args.n_max, gate=args.gate) if args.spec else None
            ways: list[tuple[str, dict[str, Any]]] = [("full", {"pool": "off"})]
            for policy, panes in itertools.product(args.policies, args.panes[: 1 if args.spec else None]):
                own = {"pool": clients * args.pool, "panes": panes, "policy": policy, "opening": 0}
                own |= {"coarse": args.coarse or usual_coarse(policy)} | ({} if args.spec else {"mode": "lossless"})
                ways.append((f"{policy}, {panes} panes", own))
            base = None
            for name, own in ways:
                before = free()
                try:
                    said = sum(need.total for need in planned(path, Options(**options, **own)).memory if need.gpu)
                    with KVFlash.from_file(path, **options, **own) as kv:
                        prompt = rng.integers(0, N_WORDS, n, dtype=np.int32)
                        text = rng.integers(0, N_WORDS, args.tokens, dtype=np.int32)
                        begin = time.perf_counter()
                        for s in kv.sequences:
                            list(s.prefill(prompt))
                        read = clients * n / (time.perf_counter() - begin)
                        for how, a, beside in ways_to_decode(kv, args.accepted):
                            for s in kv.sequences if not args.spec else ():
                                s.decoder.lossless = (Lossless if beside else Alone)(s.sequence, None) if how else None
                            some = text[: len(text) // 8] if how and a is None else text
                            with drafting(kv, drafted=a is not None):
                                rate, each = (decode if clients == 1 else decode_all)(kv, some, a)
                            base = rate if name == "full" and a is None else base
                            share = f"{rate / base:.2f}" if base else "-"
                            speed = [f"{read:,.0f}", "-" if a is None else a, f"{rate:.1f}", share, f"{each:.2f}"]
                            sizes = (f"{b / 2**20:,.0f}" for b in (kv.resident_bytes, said, before - free()))
                            table.row(f"{n:,}", clients, f"{how}{name}", *speed, *sizes)
                except KVFlashError as err:
                    table.row(f"{n:,}", clients, name, err)


if __name__ == "__main__":
    main()
