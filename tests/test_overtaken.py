"""A sequence goes on with whoever changed it last. What has lost it says so at its next step, once, and changes nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE, crossed
from support.runs import GREEDY, LRU, SCORED, TOKENS, Open, spell, turn

from pyllama_kvflash import KVFlash, Prefill, Token
from pyllama_kvflash.engine import decoder
from pyllama_kvflash.engine.generation import Generation, step_together
from pyllama_kvflash.errors import InUseError, KVFlashError, PoolError
from pyllama_kvflash.policy import QkCos

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL: dict[str, Any] = LRU
LOST = "another call has taken or changed this sequence in the meantime, so this one cannot continue: .*n_parallel"


@pytest.fixture(autouse=True)
def wordless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have no vocabulary: every answer is what follows in TOKENS."""
    spell(monkeypatch)


def answering(kv: KVFlash, n: int = 900, **options: Any) -> Generation:
    """An answer that has begun, after so many tokens."""
    run = kv.generation(TOKENS[:n], **{"max_tokens": 50, "sampling": GREEDY, **options})
    while run.reading:
        turn(run)
    return run


def state(kv: KVFlash) -> tuple[list[int], int | None, bytes]:
    """What nothing may change that has lost the sequence."""
    where = kv.residency().resident.tobytes() if kv.pager else b""
    return kv.tokens.tolist(), kv.sequence.pending, where


def lost(kv: KVFlash, call: Callable[[], object]) -> None:
    """A call says that it has lost the sequence, and leaves it as it is."""
    before, holder = state(kv), kv.sequence.holder
    with pytest.raises(InUseError, match=LOST):
        call()
    assert state(kv) == before
    assert kv.sequence.holder is holder


OVERTAKES: dict[str, Callable[[KVFlash, Path], object]] = {
    "generate": lambda kv, _: next(iter(kv.generate(TOKENS[:70], max_tokens=3, sampling=GREEDY))),
    "an answer that goes on": lambda kv, _: next(iter(kv.generate([1], max_tokens=3, sampling=GREEDY, append=True))),
    "generation": lambda kv, _: kv.generation(TOKENS[:70], max_tokens=3, sampling=GREEDY),
    "prefill": lambda kv, _: next(iter(kv.prefill(TOKENS[:70]))),
    "decode": lambda kv, _: kv.decode(TOKENS[:1]),
    "decode_each": lambda kv, _: kv.decode_each({0: 1}),
    "clear": lambda kv, _: kv.clear(),
    "rollback": lambda kv, _: kv.rollback(kv.n_tokens - 5),
    "rollback to where it is": lambda kv, _: kv.rollback(kv.n_tokens),
    "restore": lambda kv, file: kv.restore(file),
}


@pytest.mark.parametrize("name", OVERTAKES)
def test_what_begins_or_changes_a_sequence_takes_it(opened: Open, tmp_path: Path, name: str) -> None:
    kv, file = opened(), tmp_path / "text.kvsnap"
    run = answering(kv)
    turn(run)
    kv.save(file)
    OVERTAKES[name](kv, file)
    calls = [run.step, run.draft, run.recover]
    for call in (*calls, lambda: step_together([run])):
        lost(kv, call)
    again = answering(kv)
    assert turn(again) == [int(TOKENS[kv.n_tokens])], "the next one is as if nothing had been"


LEAVES: dict[str, Callable[[KVFlash, Path], object]] = {
    "pin": lambda kv, _: kv.pin(128, 192),
    "unpin": lambda kv, _: kv.unpin(128, 192),
    "page_in": lambda kv, _: kv.page_in(1),
    "page_out": lambda kv, _: kv.page_out(1),
    "reselect": lambda kv, _: kv.reselect(),
    "use": lambda kv, _: kv.use(QkCos()),
    "save": lambda kv, file: kv.save(file),
    "capture": lambda kv, _: kv.capture(),
    "stats": lambda kv, _: kv.stats(),
    "expect": lambda kv, _: kv.expect(64),
    "logits": lambda kv, _: kv.sequence.pending is None or kv.logits(),
    "queries": lambda kv, _: kv.sequence.pending is None or kv.queries(),
    "residency": lambda kv, _: kv.residency(),
    "check_integrity": lambda kv, _: kv.check_integrity(),
    "begun, but not asked for an event": lambda kv, _: (kv.generate(TOKENS[:5]), kv.prefill(TOKENS[:5])),
}
TOO_MANY = np.zeros(10**5, np.int32)
FAILS: dict[str, Callable[[KVFlash, Path], object]] = {
    "rollback": lambda kv, _: kv.rollback(10**6),
    "decode": lambda kv, _: kv.decode(TOO_MANY),
    "generate": lambda kv, _: next(iter(kv.generate(TOO_MANY))),
    "an empty prompt": lambda kv, _: next(iter(kv.generate([]))),
    "prefill": lambda kv, _: next(iter(kv.prefill(TOO_MANY))),
    "restore": lambda kv, file: kv.restore(file.with_name("none.kvsnap")),
}


def test_looking_and_paging_leave_it(opened: Open, tmp_path: Path) -> None:
    """Between the batches of a prompt and the steps of an answer; and so does what fails before it changes anything."""
    kv = opened(**{**SCORED, "policy": "qk"})
    run = kv.generation(TOKENS[:1400], max_tokens=30, sampling=GREEDY)
    got: list[int] = []
    for act in (*LEAVES.values(), *LEAVES.values()):
        if kv.n_tokens > 256:
            act(kv, tmp_path / "text.kvsnap")
        got += turn(run)
    for act in FAILS.values():
        with pytest.raises(KVFlashError):
            act(kv, tmp_path / "text.kvsnap")
    while not run.ended:
        got += turn(run)
    assert got == TOKENS[1400:1430].tolist()


@pytest.mark.parametrize("append", [False, True])
def test_two_that_take_turns(opened: Open, append: bool) -> None:
    """The one that began last goes on; the other ends with one error, and is over."""
    kv, alone = opened(), opened()
    want = [e.id for e in alone.generate(TOKENS[:300], max_tokens=8, sampling=GREEDY) if isinstance(e, Token)]
    runs = {
        "a": kv.generate(TOKENS[500:900], max_tokens=8, sampling=GREEDY),
        "b": kv.generate(TOKENS[:300], max_tokens=8, sampling=GREEDY, append=append),
    }
    got: dict[str, list[Any]] = {"a": [], "b": []}
    for _ in range(40):
        for name, events in runs.items():
            try:
                event = next(events)
                got[name] += [event.id] if isinstance(event, Token) else []
            except StopIteration:
                got[name].append("stop")
            except InUseError:
                got[name].append("lost")
    assert [x for x in got["a"] if x != "stop"] == ["lost"], "its first batch was read, and no more"
    answer = [x for x in got["b"] if x != "stop"]
    assert (answer == want) if not append else len(answer) == 8
    assert kv.sequence.pending == answer[-1]


def batches(events: Iterator[Any]) -> Iterator[Prefill]:
    return (e for e in events if isinstance(e, Prefill))


@pytest.mark.parametrize(("prefill", "name"), crossed(["pool", "exact"], OVERTAKES))
def test_a_prompt_between_its_batches(opened: Open, tmp_path: Path, prefill: str, name: str) -> None:
    """As prefill(), generate() and a generation read it."""
    kv, file = opened(prefill=prefill, n_ubatch=64), tmp_path / "text.kvsnap"
    for begin in (
        lambda: kv.prefill(TOKENS[:1400]),
        lambda: kv.generate(TOKENS[:1400], sampling=GREEDY),
        lambda: kv.generation(TOKENS[:1400], sampling=GREEDY).read(),
    ):
        answering(kv, 300)
        kv.save(file)
        kv.clear()
        events = begin()
        next(batches(events))
        OVERTAKES[name](kv, file)
        lost(kv, lambda events=events: next(events))  # type: ignore[misc]
        assert list(events) == []


def test_reading_after_an_error_goes_on_from_there(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python generator that has raised is over: reading does not wait for it for ever."""
    kv = opened()
    run, advance = kv.generation(TOKENS[:300], max_tokens=3, sampling=GREEDY), decoder.advance

    def full(*_: Any) -> Any:
        msg = "no room"
        raise PoolError(msg)

    n_failed = 0
    got: list[int] = []
    while not run.ended and n_failed < 20:
        if run.reading:
            monkeypatch.setattr(decoder, "advance", full)
            with pytest.raises(PoolError):
                list(run.read())
            n_failed += 1
            monkeypatch.setattr(decoder, "advance", advance)
        got += turn(run)
    assert n_failed == 5, "once for each batch"
    assert got == TOKENS[300:303].tolist()
    assert list(run.read()) == [], "there is nothing to read"
    assert kv.tokens.tolist() == TOKENS[:302].tolist()


def test_one_of_several_that_step_together(opened: Open) -> None:
    """Nothing is decoded for any; the others go on alone or together, as if nothing had been."""
    kv = opened(n_parallel=3, pool=1536)
    runs = [s.generation(TOKENS[: 100 * i], max_tokens=9) for i, s in zip((1, 2, 3), kv.sequences, strict=True)]
    for run in runs:
        while run.reading:
            list(run.read())
    step_together(runs)
    kv.sequences[1].rollback(150)
    before = [state(s) for s in kv.sequences]
    with pytest.raises(InUseError, match=LOST):
        step_together(runs)
    assert [state(s) for s in kv.sequences] == before
    lost(kv.sequences[1], runs[1].step)
    assert step_together([]) == []
    while not runs[0].ended:
        step_together([runs[0], runs[2]])
    assert [s.n_tokens for s in kv.sequences] == [108, 150, 308]
