"""One prompt and its answer, step by step: what callers with turns of their own use."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE
from support.cuts import cut_off_at_every_line
from support.runs import GREEDY, Open, turn

from pyllama_kvflash import KVFlash, Prefill, Token
from pyllama_kvflash.engine import decoder
from pyllama_kvflash.engine.generation import Generation, step_together
from pyllama_kvflash.errors import PoolError, SnapshotError
from pyllama_kvflash.needle import make_prompt
from pyllama_kvflash.options import Spec

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {
    "n_ctx": 4096,
    "pool": 2048,
    "n_batch": 128,
    "n_threads": 1,
    "policy": "lru",
    "prefill": "pool",
}
N = 12


def prompt_of(kv: KVFlash, seed: int = 1) -> Any:
    """A text with a code, and the question about it: its answer is no matter of rounding."""
    made = make_prompt(400, lambda s: len(kv.tokenize(s, add_special=False)), n_needles=1, seed=seed)
    return kv.tokenize(made.text + made.needles[0].question)


def copied(kv: KVFlash, seed: int) -> Any:
    """A text that repeats a line, which the model goes on to copy."""
    made = make_prompt(300, lambda s: len(kv.tokenize(s, add_special=False)), n_needles=1, seed=seed)
    return kv.tokenize(made.text + f"{made.needles[0].statement}\n" * 8)


def generated(kv: KVFlash, prompt: Any, n: int = N) -> list[int]:
    return [e.id for e in kv.generate(prompt, max_tokens=n, sampling=GREEDY) if isinstance(e, Token)]


def finish(run: Generation) -> list[int]:
    """Its tokens from here on."""
    res: list[int] = []
    while not run.ended:
        res += turn(run)
    return res


def finish_reading(run: Generation) -> list[int]:
    """The first token of its answer."""
    res: list[int] = []
    while run.reading:
        res += turn(run)
    return res


def test_a_generation_says_what_generate_says(opened: Open) -> None:
    kv = opened("needle")
    prompt = prompt_of(kv)
    want = generated(kv, prompt)
    kv.clear()
    run = kv.generation(prompt, max_tokens=N, sampling=GREEDY)
    batches = []
    while run.reading:
        batches += [e.done for e in run.read() if isinstance(e, Prefill)]
    assert batches == [*range(128, len(prompt), 128), len(prompt)], "each call reads one batch"
    assert (run.n_prompt, run.n_text, kv.n_tokens) == (len(prompt), len(prompt), len(prompt))
    assert [run.answer.token, *finish(run)][: len(want)] == want
    assert run.answer.reason == "length"
    assert kv.sequence.pending == want[-1], "the last token is not decoded, and another call goes on from it"


def test_an_empty_prompt_goes_on_by_the_last_logits_or_after_the_pending_token(opened: Open) -> None:
    kv = opened("needle")
    prompt = prompt_of(kv)
    want = generated(kv, prompt)
    kv.clear()
    list(kv.prefill(prompt))
    none = np.empty(0, np.int32)
    first = kv.generation(none, max_tokens=5, sampling=GREEDY)
    assert not first.reading
    got = [e.id for e in first.answer.shown()] + finish(first)
    second = kv.generation(none, max_tokens=N - 5, sampling=GREEDY)
    assert [*got, *finish(second)] == want


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_step_that_failed_can_be_taken_again(opened: Open, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """No token is lost or decoded twice, whether the batch was decoded or not."""
    kv = opened("needle")
    prompt = prompt_of(kv)
    want = generated(kv, prompt)
    kv.clear()
    run, advance, n_failed = kv.generation(prompt, max_tokens=N, sampling=GREEDY), decoder.advance, 0

    def fails(*args: Any) -> Any:
        nonlocal n_failed
        if after:
            advance(*args)
        n_failed += 1
        msg = "no room"
        raise PoolError(msg)

    got: list[int] = []
    while not run.ended:
        if not run.reading:
            with monkeypatch.context() as patch:
                patch.setattr(decoder, "advance", fails)
                with pytest.raises(PoolError):
                    run.step()
        got += turn(run)
    assert got == want
    assert n_failed == N - 1
    assert kv.tokens.tolist() == [*prompt.tolist(), *want[:-1]]


#
# several, with drafts
#

SPEC = Spec(kind="ngram", n_max=4, gate=0)


def begun(kv: KVFlash, prompts: list[Any]) -> list[Generation]:
    """An answer of each sequence, with its first token."""
    runs = []
    for sequence, prompt in zip(kv.sequences, prompts, strict=True):
        sequence.clear()
        runs.append(sequence.generation(prompt, max_tokens=N, sampling=GREEDY))
        finish_reading(runs[-1])
    return runs


def together(runs: list[Generation]) -> None:
    """To the end, in as few batches as can be."""
    while going := [run for run in runs if not run.ended]:
        alone = [run.draft() for run in going]
        assert not any(alone), "what n-grams draft shares a batch"
        step_together(going)


def test_drafts_of_several_are_checked_in_one_batch(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, plain = opened("needle", n_parallel=3, spec=SPEC), opened("needle")
    prompts = [copied(kv, seed) for seed in (1, 2, 3)]
    want = []
    for prompt in prompts:
        want.append(generated(plain, prompt))
        plain.clear()
    advance, shared = decoder.advance, []

    def counted(parts: Any, *args: Any) -> Any:
        shared.append(sum(part.draft for part in parts))
        return advance(parts, *args)

    monkeypatch.setattr(decoder, "advance", counted)
    runs = begun(kv, prompts)
    shared.clear()
    together(runs)
    assert [s.tokens[len(prompt) :].tolist() for s, prompt in zip(kv.sequences, prompts, strict=True)] == [
        tokens[:-1] for tokens in want
    ]
    assert max(shared) == 3
    assert len(shared) < N - 1, "copied text takes fewer steps than it has tokens"


@pytest.mark.nightly(ENGINE)
def test_a_step_of_several_is_cut_off_at_every_line(opened: Open) -> None:
    """Wherever that is, the sequences go on, and say the same when they are asked again."""
    kv = opened("needle", n_parallel=2, spec=SPEC)
    prompts = [copied(kv, seed) for seed in (1, 2)]
    runs = begun(kv, prompts)
    together(runs)
    want = [s.tokens.tolist() for s in kv.sequences]

    def prepare(kv: KVFlash) -> None:
        runs[:] = begun(kv, prompts)

    def check(kv: KVFlash) -> None:
        for s, text in zip(kv.sequences, want, strict=True):
            s.check_integrity()
            assert s.tokens.tolist() == text[: s.n_tokens], "only what stands is kept"
        kv.decode_each({0: 17, 1: 23})
        for s in kv.sequences:
            s.check_integrity()

    files = ("step.py", "steps.py", "writer.py", "generation.py", "decoder.py", "sequence.py")
    _, places = cut_off_at_every_line(
        lambda: kv, lambda _: step_together(runs), check, prepare=prepare, files=files, step=9
    )
    assert any("step.py" in place for place in places)
    prepare(kv)
    together(runs)
    assert [s.tokens.tolist() for s in kv.sequences] == want


@pytest.mark.parametrize("when", ["reading", "before", "after"])
def test_what_is_damaged_is_read_anew(opened: Open, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """In the prompt, and in a step whose token was decoded, or not: the text is whole, and the answer the same."""
    kv = opened("needle", pool="off")
    prompt = prompt_of(kv)
    want = generated(kv, prompt)
    kv.clear()
    run, advance = kv.generation(prompt, max_tokens=N, sampling=GREEDY), decoder.advance

    def damaged(*args: Any) -> Any:
        if when == "after":
            advance(*args)
        msg = "record 1 was changed"
        raise SnapshotError(msg)

    got, n = [], 0
    while not run.ended:
        if n == (1 if when == "reading" else 9):
            with monkeypatch.context() as patch:
                patch.setattr(decoder, "advance", damaged)
                with pytest.raises(SnapshotError):
                    list(run.read() if run.reading else run.step())
            run.recover()
            assert run.reading
            assert kv.n_tokens == 0
        n += 1
        got += turn(run)
    assert got == want
    assert kv.tokens.tolist() == [*prompt.tolist(), *want[:-1]]


def test_sequences_of_a_pool_draft_each_for_itself(opened: Open) -> None:
    """By turns, with a gate that is always open: the text of plain decoding, and some guesses are right."""
    kv = opened("needle", n_parallel=2, spec=Spec(kind="ngram", n_max=4, gate=0))
    prompts = [copied(kv, seed) for seed in (1, 2)]
    control = opened("needle")
    want = [generated(control, prompt, 40) for prompt in prompts]
    runs = [s.generation(p, max_tokens=40, sampling=GREEDY) for s, p in zip(kv.sequences, prompts, strict=True)]
    got: list[list[int]] = [[], []]
    while going := [i for i, run in enumerate(runs) if not run.ended]:
        for i in going:
            got[i] += turn(runs[i])
    assert got == want
    for run in runs:
        assert run.draft_stats is not None
        assert run.draft_stats.accepted > 10
