"""The demonstration: one long prompt, the same questions, with the full cache and with a pool."""

from collections.abc import Callable
from dataclasses import dataclass

from pyllama_kvflash.engine import KVFlash
from pyllama_kvflash.errors import Interrupted
from pyllama_kvflash.events import Done, Prefill, Stats, Token
from pyllama_kvflash.native import Sampling
from pyllama_kvflash.needle import Needle, NeedlePrompt

ANSWER_TOKENS = 8
QUESTION_ROOM = 64  # positions for a question and its answer


@dataclass(frozen=True, slots=True)
class Answers:
    """What one configuration said. answers: one text for each needle; stats: of prompt and answers together."""

    name: str
    answers: tuple[str, ...]
    stats: Stats

    def found(self, needles: tuple[Needle, ...]) -> list[bool]:
        """Which codes were told right."""
        return [needle.answer in answer for needle, answer in zip(needles, self.answers, strict=True)]


def run_full(kv: KVFlash, prompt: NeedlePrompt, on_prefill: Callable[[Prefill], None]) -> Answers:
    """All questions, with the full cache."""
    return _ask_all("full cache", kv, prompt, _prefill(kv, prompt, on_prefill), recall=False)


def run_pool(kv: KVFlash, prompt: NeedlePrompt, on_prefill: Callable[[Prefill], None]) -> tuple[Answers, Answers]:
    """All questions with the pool as its policy leaves it, then with the chunk that holds the answer brought back."""
    prefill_s = _prefill(kv, prompt, on_prefill)
    return (
        _ask_all(f"pool, {kv.options.policy}", kv, prompt, prefill_s, recall=False),
        _ask_all("pool, chunk brought back", kv, prompt, prefill_s, recall=True),
    )


def positions(kv: KVFlash, prompt: NeedlePrompt) -> list[tuple[int, int]]:
    """Positions [start, end) of every needle in the sequence, BOS counted."""
    at = [len(kv.tokenize(prompt.text[: n.start])) for n in prompt.needles]
    return [
        (start, start + len(kv.tokenize(n.statement, add_special=False)))
        for start, n in zip(at, prompt.needles, strict=True)
    ]


def _prefill(kv: KVFlash, prompt: NeedlePrompt, on_prefill: Callable[[Prefill], None]) -> float:
    kv.clear()
    seconds = 0.0
    for event in kv.prefill(kv.tokenize(prompt.text)):
        if isinstance(event, Prefill):
            seconds = event.seconds
            on_prefill(event)
    return seconds


def _ask_all(name: str, kv: KVFlash, prompt: NeedlePrompt, prefill_s: float, *, recall: bool) -> Answers:
    end = kv.n_tokens
    answers, n_decoded, decode_s = [], 0, 0.0
    spans = positions(kv, prompt)
    for needle, (first, last) in zip(prompt.needles, spans, strict=True):
        if recall:
            for chunk in range(first // kv.options.chunk, (last - 1) // kv.options.chunk + 1):
                kv.page_in(chunk)
        text, stats = _ask(kv, needle.question)
        answers.append(text)
        n_decoded += stats.n_generated - 1
        decode_s += stats.decode_s
        kv.rollback(end)
    stats = kv.stats(n_prompt=end, n_generated=n_decoded + 1, prefill_s=prefill_s, decode_s=decode_s)
    return Answers(name, tuple(answers), stats)


def _ask(kv: KVFlash, question: str) -> tuple[str, Stats]:
    text = ""
    greedy = Sampling(temperature=0)
    for event in kv.generate(question, max_tokens=ANSWER_TOKENS, sampling=greedy, stop=["\n"], append=True):
        if isinstance(event, Token | Done):
            text += event.text
        if isinstance(event, Done):
            if event.reason == "interrupted":
                raise Interrupted(event.reason)
            return text.strip(), event.stats
    msg = "the engine stopped without a last event"
    raise AssertionError(msg)
