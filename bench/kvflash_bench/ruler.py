"""RULER's tasks: texts of each, read and answered with each variant. It can be resumed, text by text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_bench.control import before_answer, before_prompt
from kvflash_bench.grid import Key, Result, Results, Variant, digest, machine, model_mark, setting
from kvflash_bench.prompts import Prompts
from kvflash_bench.questions import Question, Questions
from kvflash_bench.recall import open_variant
from kvflash_bench.ruler_texts import GROUPS, make_text, task_named
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Prefill, Token, Warn
from pyllama_kvflash.json_schema import json_grammar
from pyllama_kvflash.native import Sampling, Tokens

OnPrefill = Callable[[Prefill], None]

_mark = cache(digest)  # every text's key has it

_PREFIX = "niah_"  # prefix of RULER's names, left out here


def parse_tasks(text: str) -> tuple[str, ...]:
    """Parse names of tasks and of groups of them, with commas between; RULER's own names work, too.

    Raises UsageError for an unknown one.
    """
    names = [part.strip().removeprefix(_PREFIX) for part in text.split(",")]
    found = tuple(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))
    for task in found:
        task_named(task)
    return found


@dataclass(frozen=True, slots=True)
class Cell:
    """A variant at one context and pool, opened once for all texts. pool None: any, since the full cache has none."""

    n_ctx: int
    pool: int | None
    variant: Variant

    @property
    def label(self) -> str:
        """Name in progress and warnings."""
        return f"{self.variant.label} {self.n_ctx:,}/{self.pool or 'full'}"


@dataclass(frozen=True, slots=True)
class Ruler:
    """The plan of a measurement: a text of each task for each seed. Raises UsageError."""

    model: Path
    contexts: tuple[int, ...]
    pools: tuple[int, ...]
    variants: tuple[Variant, ...]
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    haystack: str
    common: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there is something to measure."""
        if any(v.policy == "oracle" for v in self.variants):
            msg = "the oracle is told where codes are, and has no place among RULER's tasks: leave it out of `variants`"
            raise UsageError(msg)
        if not any(True for _ in self.cells()):
            msg = "there is nothing to measure: no pool of `pools` is smaller than a context of `contexts`"
            raise UsageError(msg)

    def cells(self) -> Iterator[Cell]:
        """Yield all cells, shorter contexts first, the full cache once for each."""
        for n_ctx in sorted(self.contexts):
            for variant in self.variants:
                for pool in (None,) if variant.full else self.pools:
                    if pool is None or pool < n_ctx:
                        yield Cell(n_ctx, pool, variant)

    def texts(self) -> list[tuple[str, int]]:
        """Return task and seed of all texts of a cell: of all tasks for one seed, then for the next."""
        return [(task, seed) for seed in self.seeds for task in self.tasks]

    def key(self, cell: Cell, task: str, seed: int) -> Key:
        """Return the key under which a result is filed: all that it depends on."""
        return {
            "bench": "ruler",
            "model": model_mark(self.model),
            "n_ctx": cell.n_ctx,
            "pool": cell.pool,
            "variant": cell.variant.label,
            "task": task,
            "seed": seed,
            "haystack": _mark(self.haystack),
            "common": setting(self.common, cell.variant, self.model),
        }

    def missing(self, results: Results, cell: Cell) -> list[tuple[str, int]]:
        """Return the texts of a cell that are not measured."""
        return [text for text in self.texts() if results.get(self.key(cell, *text)) is None]


def measure(ruler: Ruler, results: Results, on_prefill: Callable[[str], OnPrefill]) -> Iterator[tuple[Cell, Result]]:
    """Measure what is missing. Yields the cell and the result of each text that is done.

    All texts of a cell are made before the first of them is read, so that one that is too short for a task fails at
    once.
    """
    made: dict[tuple[int, str, int], Questions] = {}
    for cell in ruler.cells():
        missing = ruler.missing(results, cell)
        if not missing:
            continue
        with open_variant(ruler.model, cell.variant, cell.n_ctx, cell.pool or 0, ruler.common) as kv:
            prompts = Prompts(kv.model)
            for task, seed in missing:
                if (cell.n_ctx, task, seed) not in made:
                    text = make_text(task, cell.n_ctx, prompts.count, ruler.haystack, seed)
                    made[cell.n_ctx, task, seed] = text
            for task, seed in missing:
                show = on_prefill(f"{cell.label} {task} {seed}")
                result = run_text(kv, cell, prompts, made[cell.n_ctx, task, seed], show)
                results.add(ruler.key(cell, task, seed), result)
                yield cell, result


def run_text(kv: KVFlash, cell: Cell, prompts: Prompts, questions: Questions, on_prefill: OnPrefill) -> Result:
    """Read a text and answer its questions, each after the answer to the one before. Returns plain JSON values."""
    warnings = [*kv.warnings, *before_prompt(kv, cell.variant, cell.pool)]
    first, *then = questions
    prefill_s = _read(kv, prompts.first(first), on_prefill, warnings)
    n_tokens = kv.n_tokens
    before_answer(kv, cell.variant)
    said = [answer(kv, first.n_new, _grammar(first))]
    for question in then:
        _read(kv, np.array([*said[-1].pending, *prompts.further(question)], np.int32), on_prefill, warnings)
        said.append(answer(kv, question.n_new, _grammar(question)))
    scores = [q.score(a.text, q.expected) for a, q in zip(said, questions, strict=True)]
    n_decoded, decode_s = sum(max(0, a.n_tokens - 1) for a in said), sum(a.seconds for a in said)
    return {
        "answers": [a.text for a in said],
        "expected": [list(q.expected) for q in questions],
        "scores": scores,
        "score": sum(scores) / len(scores),
        "n_tokens": n_tokens,
        "n_decoded": n_decoded,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "machine": machine(),
        "warnings": [*warnings, *(w for a in said for w in a.warnings)],
    }


def _read(kv: KVFlash, tokens: Tokens, on_prefill: OnPrefill, warnings: list[str]) -> float:
    """Read tokens after what is there. Return the seconds it took."""
    seconds = 0.0
    for event in kv.prefill(tokens):
        if isinstance(event, Prefill):
            seconds = event.seconds
            on_prefill(event)
        elif isinstance(event, Warn):
            warnings.append(event.text)
    return seconds


@dataclass(frozen=True, slots=True)
class Said:
    """An answer.

    pending: its last token, which is not decoded yet, unless it ended the text.
    seconds: time without the first token, which comes out of what was read.
    """

    text: str
    n_tokens: int
    pending: tuple[int, ...]
    seconds: float
    warnings: tuple[str, ...]


def _grammar(question: Question) -> str:
    """Return the grammar (GBNF) of its answer, "" if there is none."""
    return json_grammar(question.schema) if question.schema else ""


def answer(kv: KVFlash, n_new: int, grammar: str = "") -> Said:
    """Return the greedy answer to what was just read: what KVSequence.generate() says after its own prompt."""
    sampling = Sampling(temperature=0, grammar=grammar)
    run = kv.generation(np.empty(0, np.int32), max_tokens=n_new, sampling=sampling)
    text = "".join(token.text for token in run.answer.shown())
    warnings: list[str] = []
    while not run.ended:
        for event in run.step():
            if isinstance(event, Warn):
                warnings.append(event.text)
            elif isinstance(event, Token):
                text += event.text
    said = run.answer
    text += said.flush()
    return Said(text, said.n_tokens, () if said.token is None else (said.token,), run.decode_s, tuple(warnings))
