"""The demonstration: one long prompt and the same questions, once with the full cache and once with a pool."""

from collections.abc import Callable
from dataclasses import dataclass

from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import Interrupted
from pyllama_kvflash.events import Done, Prefill, Stats, Token
from pyllama_kvflash.native import Sampling
from pyllama_kvflash.needle import Needle, NeedlePrompt

ANSWER_TOKENS = 8
QUESTION_ROOM = 64  # positions for a question and its answer


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one configuration. answers: one for each needle. stats: for the prompt and all answers together."""

    name: str
    answers: tuple[str, ...]
    stats: Stats

    def found(self, needles: tuple[Needle, ...]) -> list[bool]:
        """Return for each needle whether its code was found."""
        return [needle.answer in answer for needle, answer in zip(needles, self.answers, strict=True)]


def read(kv: KVFlash, prompt: NeedlePrompt, on_prefill: Callable[[Prefill], None]) -> float:
    """Read the text. Returns the seconds that it took."""
    kv.clear()
    seconds = 0.0
    for event in kv.prefill(kv.tokenize(prompt.text)):
        if isinstance(event, Prefill):
            seconds = event.seconds
            on_prefill(event)
    return seconds


def ask_all(
    kv: KVFlash, prompt: NeedlePrompt, prefill_s: float, on_answer: Callable[[int], None] = lambda _: None
) -> Answers:
    """Ask each question after the text, as if it were the only one. prefill_s: from read(). on_answer: called with the number of answers so far."""
    end, n_decoded, decode_s = kv.n_tokens, 0, 0.0
    answers: list[str] = []
    for needle in prompt.needles:
        text, stats = ask(kv, needle.question)
        answers.append(text)
        n_decoded += stats.n_generated - 1
        decode_s += stats.decode_s
        kv.rollback(end)
        on_answer(len(answers))
    stats = kv.stats(n_prompt=end, n_generated=n_decoded + 1, prefill_s=prefill_s, decode_s=decode_s)
    name = "full cache" if kv.n_pool is None else f"pool, {kv.policy}"
    return Answers(name, tuple(answers), stats)


def positions(kv: KVFlash, prompt: NeedlePrompt) -> list[tuple[int, int]]:
    """Return the positions [start, end) of every needle in the sequence, counting BOS."""
    at = [len(kv.tokenize(prompt.text[: n.start])) for n in prompt.needles]
    return [
        (start, start + len(kv.tokenize(n.statement, add_special=False)))
        for start, n in zip(at, prompt.needles, strict=True)
    ]


def ask(kv: KVFlash, question: str) -> tuple[str, Stats]:
    """Ask a question after the text in the context. Returns the greedy answer up to the end of its line, and its stats."""
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
