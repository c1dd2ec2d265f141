"""Recall: ask for codes hidden in a long text, one by one, and find out what lost those that are not found."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvflash_bench.control import control_options
from kvflash_bench.grid import Variant, machine, usual_coarse
from pyllama_kvflash.cli.needles import ask, positions
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.events import Prefill, Warn
from pyllama_kvflash.needle import NeedlePrompt
from pyllama_kvflash.policy import Qk, Scorer, Scores, View

BLAMES = ("replay", "summary", "query", "scorer", "prefill")


@dataclass(slots=True)
class Oracle:
    """A control that knows where the answer is: the wanted chunks are hottest, then the most recent ones."""

    name: str = "oracle"
    summary: str | None = None
    query: str = "last"
    wanted: set[int] = field(default_factory=set)

    def score(self, view: View) -> Scores:
        """Return 1 for the wanted chunks, and less for the others."""
        scores: Scores = view.touched / (view.touched.max(initial=0) + 1.0)
        scores[[c for c in self.wanted if c < len(scores)]] = 1.0
        return scores


def open_variant(path: Any, variant: Variant, n_ctx: int, pool: int, common: dict[str, Any]) -> KVFlash:
    """Open the model as a variant has it. `common`: options of all variants. Raises what KVFlash.from_file does.

    Answers are decoded through the pool from their first token on, and other policies than fresh see nothing outside it, since that
    is what variants are compared by, unless one says otherwise (opening=32, coarse=4). A control's pool holds all: see bench.control.
    """
    options = {"opening": 0, "coarse": usual_coarse(variant.policy), **common, **variant.options, "n_ctx": n_ctx}
    if variant.full:
        return KVFlash.from_file(path, **{**options, "pool": "off"})
    options["policy"] = Oracle() if variant.policy == "oracle" else variant.policy
    if variant.control:
        return KVFlash.from_file(path, **control_options(options, pool))
    return KVFlash.from_file(path, **{**options, "pool": pool})


def run_cell(
    kv: KVFlash, prompt: NeedlePrompt, on_prefill: Callable[[Prefill], None], session: int = 0
) -> dict[str, Any]:
    """Read the text, ask for every code from the end of the text, and find out what lost those that are not found.

    session: ask for this many codes once more, one after the other without going back. Returns plain JSON values.
    """
    kv.clear()
    begin = time.perf_counter()
    warnings = list(kv.warnings)
    for event in kv.prefill(kv.tokenize(prompt.text)):
        if isinstance(event, Prefill):
            on_prefill(event)
        elif isinstance(event, Warn):
            warnings.append(event.text)
    prefill_s = time.perf_counter() - begin
    end = kv.n_tokens
    spans = positions(kv, prompt)
    found, answers, resident = [], [], []
    lost: dict[str, str] = {}
    begin = time.perf_counter()
    for needle, span in zip(prompt.needles, spans, strict=True):
        text = _asked(kv, needle.question, _chunks(kv, span))
        found.append(needle.answer in text)
        answers.append(text)
        resident.append(_is_resident(kv, span))
        kv.rollback(end)
    answer_s = (time.perf_counter() - begin) / len(prompt.needles)
    stats = kv.stats()
    if isinstance(kv.scorer, Qk):
        missed = [i for i, hit in enumerate(found) if not hit]
        lost = {str(i): _blame(kv, prompt.needles[i].question, prompt.needles[i].answer, spans[i], end) for i in missed}
    return {
        "found": found,
        "resident": resident,
        "answers": answers,
        "expected": [n.answer for n in prompt.needles],
        "position": [start for start, _ in spans],
        "lost": lost,
        "session": _session(kv, prompt, spans, session),
        "n_tokens": end,
        "prefill_s": prefill_s,
        "answer_s": answer_s,
        "score_ms": 1e3 * stats.reselect_s / stats.reselects if stats.reselects else 0.0,
        "kv_device_bytes": stats.device_kv_bytes,
        "kv_full_bytes": stats.kv_full_bytes,
        "summary_bytes": stats.summary_bytes,
        "host_bytes": stats.host_bytes,
        "machine": machine(),
        "warnings": warnings,
    }


def _asked(kv: KVFlash, question: str, wanted: set[int]) -> str:
    if isinstance(kv.scorer, Oracle):
        kv.scorer.wanted = wanted
    return ask(kv, question)[0]


def _chunks(kv: KVFlash, span: tuple[int, int]) -> set[int]:
    return set(range(span[0] // kv.options.chunk, (span[1] - 1) // kv.options.chunk + 1))


def _is_resident(kv: KVFlash, span: tuple[int, int]) -> bool:
    if kv.n_pool is None:
        return True
    return bool(np.all(kv.residency().resident[list(_chunks(kv, span))]))


def _blame(kv: KVFlash, question: str, answer: str, span: tuple[int, int], end: int) -> str:
    """Return what lost a needle: the first of BLAMES whose repair finds it.

    replay: ask once more, with the chosen chunks resident from the beginning.
    summary: score with all keys.
    query: score with all keys, and with the queries of the whole question.
    scorer: force the chunk in. The way that scores become one was to blame.
    prefill: nothing finds it, because the text was read without the chunk.
    """
    mine = kv.scorer
    rounds: list[tuple[str, Scorer]] = [
        *([("replay", mine)] if mine is not None else []),
        ("summary", Qk("rows")),
        ("query", Qk("rows", query="question")),
        ("scorer", Oracle()),
    ]
    res = "prefill"
    for name, scorer in rounds:
        kv.use(scorer)
        text = _asked(kv, question, _chunks(kv, span))
        kv.rollback(end)
        if answer in text:
            res = name
            break
    if mine is not None:
        kv.use(mine)
    return res


def _session(kv: KVFlash, prompt: NeedlePrompt, spans: list[tuple[int, int]], n: int) -> dict[str, int]:
    """Ask for n codes, spread over the text, one after the other. Return how many are found, and how many have all
    their chunks resident.
    """
    n = min(n, len(spans))
    which = [i * len(spans) // n for i in range(n)]
    found = resident = 0
    for i in which:
        text = _asked(kv, prompt.needles[i].question, _chunks(kv, spans[i]))
        found += prompt.needles[i].answer in text
        resident += _is_resident(kv, spans[i])
    return {"asked": n, "found": found, "resident": resident}
