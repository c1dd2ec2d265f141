"""The answers on which speculative decoding is measured: texts, tokens and figures of the answers, and costs of
batches.
"""

import time
from collections.abc import Callable, Generator, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np

from kvflash_bench.grid import Result, digest
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import Interrupted, UnsupportedError, UsageError
from pyllama_kvflash.events import Done, Prefill, Token
from pyllama_kvflash.native import ALL, Sampling
from pyllama_kvflash.needle import Needle, make_prompt

TEXTS = ("copy", "entropy", "needles")
ANSWER = 16  # tokens of an answer to a question
COUNTS = ("drafted", "accepted", "draft_steps", "plain_steps", "gated_steps")  # counters of events.Stats

_SEED = 2  # of documents and of the sampler: with it, needle-7m keeps copying and draws no end of text
_REPEATED = 8  # times that a copy-heavy text repeats the line that it continues with
_LINE = 64  # most tokens of such a line, or of a question
_DOCUMENT = 4  # pools that the questions' document fills; the other texts begin with half a pool
_TURN = 64  # tokens of a turn
_TRIES = 9  # batches timed for each width

OnPrefill = Callable[[Prefill], None]
Answers = tuple[list[list[int]], list[Result]]  # tokens and figures of each
Turns = Generator[None, None, Answers]


def context(text: str, pool: int, n: int) -> int:
    """Return the most positions that a text and its answer take. n: as for in_turns."""
    return _DOCUMENT * pool + _LINE + ANSWER if text == "needles" else pool // 2 + _LINE * _REPEATED + n


def make_text(kv: KVFlash, text: str, pool: int, questions: int) -> tuple[str, tuple[Needle, ...]]:
    """Return a prompt, and the questions about it. Raises UsageError."""

    def count(part: str) -> int:
        return len(kv.tokenize(part, add_special=False))

    try:
        if text == "needles":
            prompt = make_prompt(_DOCUMENT * pool, count, n_needles=questions, seed=_SEED)
            return prompt.text, prompt.needles
        prompt = make_prompt(pool // 2, count, n_needles=1, seed=_SEED, drop=text == "entropy")
    except ValueError as err:
        asked = f" and {questions} questions (`questions`)" if text == "needles" else ""
        msg = f"no text can be made for a pool of {pool} (`pool`){asked}: {err}"
        raise UsageError(msg) from None
    return prompt.text + (f"{prompt.needles[0].statement}\n" * _REPEATED if text == "copy" else ""), ()


def in_turns(kvs: Sequence[KVFlash], text: str, pool: int, n: int, on_prefill: OnPrefill) -> list[Answers]:
    """Return each model's answers to a text's prompt; the models take turns of some tokens each.

    n: tokens of the one answer, or number of questions.
    """
    running = {i: _all(kv, text, pool, n, on_prefill) for i, kv in enumerate(kvs)}
    found: dict[int, Answers] = {}
    while running:
        for i in tuple(running):
            try:
                next(running[i])
            except StopIteration as end:
                found[i] = end.value
                del running[i]
    return [found[i] for i in range(len(kvs))]


def _all(kv: KVFlash, text: str, pool: int, n: int, on_prefill: OnPrefill) -> Turns:
    prompt, needles = make_text(kv, text, pool, n)
    greedy = Sampling(temperature=0)
    if not needles:
        hot = Sampling(temperature=2, top_k=0, top_p=1, min_p=0, seed=_SEED)
        sampling = hot if text == "entropy" else greedy
        tokens, answer = yield from _answer(kv, prompt, on_prefill, max_tokens=n, sampling=sampling)
        return [tokens], [answer]
    for event in kv.prefill(kv.tokenize(prompt)):
        if isinstance(event, Prefill):
            on_prefill(event)
    end, texts, answers = kv.n_tokens, [], []
    for needle in needles:
        yield
        kv.rollback(end)
        asked = {"max_tokens": ANSWER, "sampling": greedy, "stop": ["\n"], "append": True}
        tokens, answer = yield from _answer(kv, needle.question, on_prefill, **asked)
        texts.append(tokens)
        answers.append({**answer, "found": needle.answer in kv.detokenize(tokens)})
    return texts, answers


def _answer(
    kv: KVFlash, prompt: str, on_prefill: OnPrefill, **options: Any
) -> Generator[None, None, tuple[list[int], Result]]:
    """Return the tokens and figures of an answer. Its seconds start at the first token, without the others' turns."""
    tokens: list[int] = []
    begin = seconds = 0.0
    for event in kv.generate(prompt, **options):
        if isinstance(event, Token):
            tokens.append(event.id)
            if len(tokens) == 1:
                begin = time.perf_counter()
            elif len(tokens) % _TURN == 0:
                seconds += time.perf_counter() - begin
                yield
                begin = time.perf_counter()
        elif isinstance(event, Prefill):
            on_prefill(event)
        elif isinstance(event, Done):
            if tokens:
                seconds += time.perf_counter() - begin
            if event.reason == "interrupted":
                raise Interrupted(event.reason)
            counts = {name: getattr(event.stats, name) for name in COUNTS}
            mark = digest(" ".join(map(str, tokens)))
            return tokens, {"n": len(tokens), "decode_s": seconds, **counts, "mark": mark}
    msg = "the engine stopped without a last event"
    raise AssertionError(msg)


def difference(text: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index of the first token at which two texts differ, None if they do not."""
    return next((i for i, (a, b) in enumerate(zip_longest(text, right)) if a != b), None)


def batch_costs(kv: KVFlash, widths: Sequence[int]) -> dict[int, float]:
    """Return what batches of these widths cost after the present text, in single tokens, by width. All are rolled back.

    The result is empty if the model cannot go back.
    """
    start = kv.n_tokens
    seconds: dict[int, list[float]] = {n: [] for n in (1, *widths)}
    try:
        for _ in range(_TRIES):
            for n, found in seconds.items():
                for _ in range(2):  # the first one of a width builds its graph
                    begin = time.perf_counter()
                    kv.decode(np.zeros(n, np.int32), ALL)
                    kv.ctx.synchronize()
                    took = time.perf_counter() - begin
                    kv.rollback(start)
                found.append(took)
    except UnsupportedError:
        return {}
    return {n: median(seconds[n]) / median(seconds[1]) for n in widths}
