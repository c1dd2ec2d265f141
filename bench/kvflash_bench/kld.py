"""Closeness to the full cache: the distance of next-token distributions, teacher-forced on a text."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvflash_bench.control import CONTROL_NOTE, before_answer, before_prompt, device_bytes
from kvflash_bench.grid import (
    Key,
    Result,
    Results,
    Variant,
    digest,
    machine,
    model_mark,
    setting,
)
from kvflash_bench.prompts import Prompts
from kvflash_bench.recall import open_variant
from kvflash_bench.ruler_texts import make_text
from kvflash_bench.tables import command, markdown, write_files
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Prefill, Warn
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.needle import NeedlePrompt, make_prompt

Logits = npt.NDArray[np.float32]
OnPrefill = Callable[[Prefill], None]


@dataclass(frozen=True, slots=True)
class KldCell:
    """A variant at a context. pool: tokens; None: the full cache."""

    n_ctx: int
    pool: int | None
    variant: Variant


@dataclass(frozen=True, slots=True)
class KldRow:
    """Closeness of a variant to the full f16 cache, whose own row has KLD 0 and share 1.

    share: device KV bytes divided by those of the full f16 cache.
    kld: mean of KL(full ‖ this) in nats.
    kld_99, kld_999: its 99th and 99.9th percentile; of fewer than 1,000 tokens the latter is nearly the largest.
    same_top: share of tokens with the same most likely next token.
    ppl: perplexity of the text.
    n_score: tokens that these are of.
    """

    variant: str
    kind: str
    n_ctx: int
    pool: int | None
    kv_device_bytes: int
    share: float
    kld: float
    kld_99: float
    kld_999: float
    same_top: float
    ppl: float
    prefill_s: float
    decode_s: float
    machine: str
    n_score: int


@dataclass(frozen=True, slots=True)
class LongTask:
    """A task of long answers (LONG), whose right answer is given token by token. seed: number of its text."""

    name: str
    seed: int
    haystack: str


@dataclass(frozen=True, slots=True)
class KldSweep:
    """The plan of a measurement on the first n_ctx tokens of a text; the last n_score are given one by one, as in
    decoding.

    text: None: a text of that length with codes, which ends in questions with their answers.
    task: its text is read instead, and all tokens of its right answer are given one by one, with the questions after the
        first. text and n_score then have no effect.
    """

    model: Path
    text: str | None
    contexts: tuple[int, ...]
    shares: tuple[float, ...]
    variants: tuple[Variant, ...]
    n_score: int
    common: dict[str, Any] = field(default_factory=dict)
    task: LongTask | None = None

    def cells(self) -> Iterator[KldCell]:
        """Yield all cells but the reference."""
        for n_ctx in self.contexts:
            for variant in self.variants:
                if variant.full:
                    yield KldCell(n_ctx, None, variant)
                else:
                    yield from (KldCell(n_ctx, int(n_ctx * share), variant) for share in self.shares)

    def key(self, cell: KldCell) -> Key:
        """Return the key under which a result is filed."""
        key = {
            "bench": "kld",
            "model": model_mark(self.model),
            "n_ctx": cell.n_ctx,
            "pool": cell.pool,
            "variant": cell.variant.label,
            "text": digest(self.text),
            "score": self.n_score,
            "common": setting(self.common, cell.variant, self.model),
        }
        if self.task is None:
            return key
        of_task = {"text": digest(self.task.haystack), "score": None, "task": self.task.name, "seed": self.task.seed}
        return key | of_task


def measure(sweep: KldSweep, results: Results, on_prefill: Callable[[str], OnPrefill]) -> Iterator[KldCell]:
    """Measure the missing cells, at each context the full cache first. Yields each cell that is done."""
    reference = Variant("full", "full", {"type_k": "f16", "type_v": "f16"})
    for n_ctx in sweep.contexts:
        missing = [c for c in sweep.cells() if c.n_ctx == n_ctx and results.get(sweep.key(c)) is None]
        if not missing:
            continue
        base, truth, at = _run(sweep, KldCell(n_ctx, None, reference), on_prefill("full"))
        for cell in missing:
            logits, _, now = _run(sweep, cell, on_prefill(f"{cell.variant.label} {cell.pool or ''}"))
            results.add(sweep.key(cell), {**compare(base, logits, truth), **now, "full_bytes": at["kv_device_bytes"]})
            yield cell


def _run(sweep: KldSweep, cell: KldCell, on_prefill: OnPrefill) -> tuple[Logits, npt.NDArray[np.int32], Result]:
    """Return logits (n_score, n_vocab) float32 before each of the scored tokens, those tokens (n_score,) int32, and
    figures.
    """
    with open_variant(sweep.model, cell.variant, cell.n_ctx, cell.pool or 0, sweep.common) as kv:
        prompt, scored = _tokens(sweep, kv, cell.n_ctx)
        prefill_s, warnings = 0.0, list(before_prompt(kv, cell.variant, cell.pool))
        for event in kv.prefill(prompt):
            if isinstance(event, Prefill):
                prefill_s = event.seconds
                on_prefill(event)
            elif isinstance(event, Warn):
                warnings.append(event.text)
        before_answer(kv, cell.variant)
        logits, decode_s = forced_logits(kv, scored)
        figures = {
            "kv_device_bytes": device_bytes(kv, cell.variant, cell.pool),
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "machine": machine(),
            "warnings": [*kv.warnings, *warnings],
            "n_score": len(scored),
        }
        return logits, scored, figures


def _tokens(sweep: KldSweep, kv: KVFlash, n_ctx: int) -> tuple[Tokens, Tokens]:
    """Return the token ids that are read (n,) int32, and those that are given one by one (n_score,) int32."""
    if (task := sweep.task) is not None:
        prompts = Prompts(kv.model)
        return prompts.answered(make_text(task.name, n_ctx, prompts.count, task.haystack, task.seed))
    tokens = kv.tokenize(questions(kv, n_ctx) if sweep.text is None else sweep.text)[:n_ctx]
    if sweep.text is not None and len(tokens) < n_ctx:
        msg = f"the text has {len(tokens)} tokens, and a context of {n_ctx} is asked for: give a longer text"
        raise UsageError(msg)
    return tokens[: -sweep.n_score], tokens[-sweep.n_score :]


def questions(kv: KVFlash, n_tokens: int) -> str:
    """Return a text of nearly n_tokens with 16 codes. At its end all are asked for and answered."""

    def count(text: str) -> int:
        return len(kv.tokenize(text, add_special=False))

    def end(prompt: NeedlePrompt) -> str:
        return "".join(f"{n.question} {n.answer}.\n" for n in prompt.needles)

    try:
        room = n_tokens - 1 - count(end(make_prompt(n_tokens, count)))
        prompt = make_prompt(room, count)
    except ValueError as err:
        msg = f"a context of {n_tokens} is too short for a text with questions: {err}"
        raise UsageError(msg) from None
    return prompt.text + end(prompt)


def forced_logits(kv: KVFlash, tokens: npt.NDArray[np.int32]) -> tuple[Logits, float]:
    """Return the logits before each of these tokens (n,) int32, which are given one by one, and the seconds they took."""
    logits = np.empty((len(tokens), kv.model.n_vocab), np.float32)
    begin = time.perf_counter()
    for i, token in enumerate(tokens):
        logits[i] = kv.ctx.checked_logits()
        if i + 1 < len(tokens):
            kv.decode(np.array([token], np.int32))
    return logits, time.perf_counter() - begin


def compare(base: Logits, logits: Logits, truth: npt.NDArray[np.int32]) -> dict[str, float]:
    """Return how close logits (n, n_vocab) are to the base's, and the perplexity of the true tokens (n,).

    KL(p ‖ q) = Σ p (log p - log q), where p is the base's distribution, as in llama.cpp's `--kl-divergence`.
    """
    p, q = _log_softmax(base), _log_softmax(logits)
    kld = np.maximum(np.sum(np.exp(p) * (p - q), axis=1), 0)
    return {
        "kld": float(kld.mean()),
        "kld_99": float(np.percentile(kld, 99)),
        "kld_999": float(np.percentile(kld, 99.9)),
        "same_top": float(np.mean(p.argmax(axis=1) == q.argmax(axis=1))),
        "ppl": math.exp(-float(q[np.arange(len(truth)), truth].mean())),
    }


def _log_softmax(x: Logits) -> npt.NDArray[np.float64]:
    y = x.astype(np.float64)
    y -= y.max(axis=1, keepdims=True)
    res: npt.NDArray[np.float64] = y - np.log(np.exp(y).sum(axis=1, keepdims=True))
    return res


def rows(sweep: KldSweep, results: Results) -> list[KldRow]:
    """Return all measured rows, by context and device memory."""
    found = []
    for cell in sweep.cells():
        if (r := results.get(sweep.key(cell))) is None:
            continue
        values = {f.name: r[f.name] for f in fields(KldRow) if f.name in r}
        kind = "full cache, quantised" if cell.variant.full else f"pool, {cell.variant.label}"
        share = r["kv_device_bytes"] / r["full_bytes"]
        found.append(
            KldRow(variant=cell.variant.label, kind=kind, n_ctx=cell.n_ctx, pool=cell.pool, share=share, **values)
        )
    return sorted(found, key=lambda r: (r.n_ctx, -r.share, r.kld))


def as_markdown(sweep: KldSweep, found: Sequence[KldRow]) -> str:
    """Return the table, most device memory first."""
    head = [
        "context",
        "variant",
        "pool",
        "device KV",
        "of full f16",
        "mean KLD",
        "99 % KLD",
        "99.9 % KLD",
        "same top",
        "perplexity",
    ]
    lines = [
        [
            r.n_ctx,
            r.variant,
            r.pool or "-",
            f"{r.kv_device_bytes / 2**20:.2f} MiB",
            f"{100 * r.share:.1f} %",
            f"{r.kld:.2e}",
            f"{r.kld_99:.2e}",
            f"{r.kld_999:.2e}",
            f"{100 * r.same_top:.1f} %",
            f"{r.ppl:.3f}",
        ]
        for r in found
    ]
    scored = f"The last {sweep.n_score} tokens of each context"
    if sweep.task is not None:
        n = " or ".join(str(n) for n in dict.fromkeys(r.n_score for r in found))
        scored = f"The {n} tokens after the prompt of {sweep.task.name}, text {sweep.task.seed} (right answers, and questions between them)"
    note = f"{scored}, given one by one; against the full f16 cache in the same run."
    if any(v.control for v in sweep.variants):
        note += f" {CONTROL_NOTE}"
    return markdown(head, lines) + f"\n{note} {command(found)}\n"


def write(sweep: KldSweep, results: Results) -> str:
    """Write results.md, .csv and .json. Return the Markdown."""
    found = rows(sweep, results)
    plain = [asdict(r) for r in found]
    return write_files(results, as_markdown(sweep, found), plain, {"kind": "kld", "rows": plain})
