"""The batches of an exact pass follow each other without the host waiting: what comes between two of them, and a device that is late."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE
from support.cuts import cut_off_at_every_line
from support.oracles import ON_GPU
from support.runs import BY_SIXTEEN, TOKENS, Open, check_residency, feed, read

from pyllama_kvflash import KVFlash, Prefill
from pyllama_kvflash.native import ExactContext, Record
from pyllama_kvflash.pool.host_memory import HostMemory

pytestmark = [
    pytest.mark.native,
    pytest.mark.sampled(ENGINE),
    pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order"),
]

CHUNK, N_UBATCH = 16, 64
FIRST, END = 41, 41 + 17 * N_UBATCH + 9  # no batch ends where a chunk does

SMALL: dict[str, Any] = {**BY_SIXTEEN, "pool": 512, "prefill": "exact", "tau": 1000, "again": 0}


class Late:
    """A device that has a batch's rows in the records only when they are waited for, as a GPU may: until then they are noise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_stream: int) -> None:
        self.ahead: list[tuple[int, list[tuple[Record, Record]]]] = []  # end, and records with what they will be
        self.most = 0
        decode, info = ExactContext.decode_into, ExactContext.pane_info
        late = self

        def decode_into(
            ctx: ExactContext, pool: Any, tokens: Any, pos: int, records: Sequence[Record], *rest: Any
        ) -> None:
            late.show(late.ahead)
            late.whole = late.whole if late.ahead else pos
            decode(ctx, pool, tokens, pos, records, *rest)
            late.ahead.append((pos + len(tokens), [(r, r.copy()) for r in records[pos // CHUNK :]]))
            late.most = max(late.most, len(late.ahead))
            for _, batch in late.ahead:
                for record, _ in batch:
                    record[:] = 0xA5

        def wait_whole(_: ExactContext, n_ahead: int = 0) -> int:
            done = late.ahead[: max(0, len(late.ahead) - n_ahead)]
            late.show(done)
            late.whole = done[-1][0] if done else late.whole
            del late.ahead[: len(done)]
            return late.whole

        self.whole = 0
        monkeypatch.setattr(ExactContext, "decode_into", decode_into)
        monkeypatch.setattr(ExactContext, "wait_whole", wait_whole)
        monkeypatch.setattr(ExactContext, "pane_info", lambda ctx: replace(info(ctx), n_stream=n_stream))

    @staticmethod
    def show(batches: Sequence[tuple[int, list[tuple[Record, Record]]]]) -> None:
        for _, batch in batches:
            for record, content in batch:
                record[:] = content


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Late]:
    return lambda n_stream: Late(monkeypatch, n_stream)


def check_same(kv: KVFlash, control: KVFlash) -> None:
    """Logits, records, their summaries, residency, and what is decoded next."""
    assert np.array_equal(kv.tokens, control.tokens)
    assert np.array_equal(kv.logits(), control.logits())
    n = kv.n_tokens // CHUNK
    for chunk in range(n):
        np.testing.assert_array_equal(kv.pager.records.get(chunk), control.pager.records.get(chunk), err_msg=f"{chunk}")
    np.testing.assert_array_equal(kv.residency().resident, control.residency().resident)
    summaries = [one.pager.summaries for one in (kv, control)]
    for chunk in range(n if summaries[0] else 0):
        for got, want in zip(*(one.entry(chunk) for one in summaries if one), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"summary of {chunk}")
    for one in (kv, control):
        check_residency(one, CHUNK)
        feed(one, one.n_tokens + 20)
    assert np.array_equal(kv.logits(), control.logits())


@pytest.mark.parametrize("n_stream", [0, 1, 2, 5])
@pytest.mark.parametrize("policy", ["lru", "qk"])
def test_a_late_device_changes_nothing(opened: Open, late: Callable[[int], Late], policy: str, n_stream: int) -> None:
    """As many batches are under way as there are devices, and one more, but no more than four. What is not whole is not read."""
    control, kv = opened(policy=policy), opened(policy=policy)
    for end in (FIRST, END):
        read(control, end)
    device = late(n_stream)
    read(kv, FIRST)
    events = [e for e in read(kv, END) if isinstance(e, Prefill)]
    assert device.most == min(3, n_stream) + 1
    assert not device.ahead
    assert events[-1].done == END - FIRST
    assert [e.done for e in events[:3]] == [N_UBATCH, 2 * N_UBATCH, 3 * N_UBATCH], (
        "only what is whole is said to be read"
    )
    check_same(kv, control)


def prompt_with(kv: KVFlash, act: Callable[[KVFlash], object], at: int = 5) -> None:
    """Read the prompt; act once so many batches are said to be read."""
    done = []
    for event in kv.prefill(TOKENS[FIRST:END]):
        done += [event.done] if isinstance(event, Prefill) else []
        if isinstance(event, Prefill) and len(done) == at + 1:
            act(kv)
    assert done[-1] == END - FIRST


BETWEEN: dict[str, Callable[[KVFlash], object]] = {
    "residency": lambda kv: kv.residency(),
    "integrity": lambda kv: kv.check_integrity(),
    "pin": lambda kv: kv.pin(0, CHUNK),
}


@pytest.mark.parametrize("what", [*BETWEEN, "save"])
def test_what_comes_between_two_batches(opened: Open, late: Callable[[int], Late], tmp_path: Path, what: str) -> None:
    """It sees all that was read, in the pool's state after a batch; the pass goes on as if nothing had been."""
    control, kv = opened(policy="lru"), opened(policy="lru")
    path = tmp_path / "a.kvfs"
    act = BETWEEN.get(what, lambda one: one.save(path))
    read(control, FIRST)
    if what == "pin":
        control.pin(0, CHUNK)
    read(control, END)
    device = late(2)
    read(kv, FIRST)
    seen: list[int] = []

    def between(one: KVFlash) -> None:
        act(one)
        seen.append(one.n_tokens)
        assert not device.ahead, "the pass was ended"
        one.check_integrity()

    prompt_with(kv, between)
    assert seen == [FIRST + 8 * N_UBATCH], "three batches were under way"
    if what == "save":
        other = opened(policy="lru")
        assert other.restore(path) == seen[0]
        read(other, END)
        check_same(other, control)
    else:
        check_same(kv, control)


@pytest.mark.parametrize("n_stream", [1, 2])
def test_only_this_pass_is_said_to_be_read(opened: Open, monkeypatch: pytest.MonkeyPatch, n_stream: int) -> None:
    """By the library itself, which knows the end of a longer text before."""
    info = ExactContext.pane_info
    monkeypatch.setattr(ExactContext, "pane_info", lambda ctx: replace(info(ctx), n_stream=n_stream))
    kv = opened(policy="qk")
    read(kv, END)
    for n in (END, 9 * N_UBATCH + 3):
        kv.clear()
        read(kv, FIRST)
        done = [e.done for e in read(kv, FIRST + n) if isinstance(e, Prefill)]
        n_batch = -(-n // N_UBATCH)
        assert done == [*(N_UBATCH * i for i in range(1, n_batch - n_stream)), n]
        check_residency(kv, CHUNK)


@pytest.mark.parametrize(
    ("policy", "then"),
    # with codes an answer in between is seen: means of keys are those of what was there when it began
    [("qk", "answers"), *itertools.product(["fresh", "qk"], ["goes on", "rolls back", "clears", "closes"])],
)
def test_a_pass_that_is_left(
    opened: Open, late: Callable[[int], Late], monkeypatch: pytest.MonkeyPatch, then: str, policy: str
) -> None:
    """Its batches are kept, and whatever follows waits for them first."""
    control, kv = opened(policy=policy), opened(policy=policy)
    device = late(2)
    read(kv, FIRST)
    events = kv.prefill(TOKENS[FIRST:END])
    while not (isinstance(event := next(events), Prefill) and event.done == 6 * N_UBATCH):
        pass
    events.close()
    assert kv.n_tokens == FIRST + 8 * N_UBATCH
    assert device.ahead
    if then == "closes":
        close, left = HostMemory.close, []
        monkeypatch.setattr(HostMemory, "close", lambda memory: (left.append(len(device.ahead)), close(memory)))
        kv.close()
        assert left == [0], "the records were freed while they were written to"
        return
    if then == "rolls back":
        kv.rollback(FIRST + 2 * N_UBATCH)
    elif then == "clears":
        kv.clear()
        read(kv, FIRST)
    elif then == "answers":
        feed(kv, FIRST + 8 * N_UBATCH + 3)
        kv.rollback(FIRST + 8 * N_UBATCH)
    assert then == "goes on" or not device.ahead
    read(kv, END)
    for end in (FIRST, END):
        read(control, end)
    check_same(kv, control)


@pytest.mark.nightly(ENGINE)
@pytest.mark.slow
def test_a_pass_that_is_cut_off_at_every_line(opened: Open, late: Callable[[int], Late]) -> None:
    """Whole batches stay, and the rest is read as if there had been no cut."""
    control = opened(policy="lru")
    wanted = {}
    for end in (FIRST, FIRST + 4 * N_UBATCH, FIRST + 5 * N_UBATCH):
        read(control, end)
        wanted[end] = control.logits()
    late(2)

    def act(kv: KVFlash) -> None:
        read(kv, FIRST + 4 * N_UBATCH)

    def prepare(kv: KVFlash) -> None:
        if kv.n_tokens:
            kv.rollback(FIRST)
        else:
            read(kv, FIRST)

    def check(kv: KVFlash) -> None:
        assert (kv.n_tokens - FIRST) % N_UBATCH == 0
        kv.check_integrity()
        if kv.n_tokens < FIRST + 4 * N_UBATCH:
            act(kv)
        assert np.array_equal(kv.logits(), wanted[kv.n_tokens]) or kv.n_tokens == FIRST + 4 * N_UBATCH
        read(kv, FIRST + 5 * N_UBATCH)
        assert np.array_equal(kv.logits(), wanted[kv.n_tokens])
        check_residency(kv, CHUNK)

    files = ("pool/exact.py", "pool/step.py", "sequence.py", "pager.py", "decoder.py")
    _, places = cut_off_at_every_line(lambda: opened(policy="lru"), act, check, prepare=prepare, files=files, step=3)
    assert len(places) >= 20, "nothing was cut off"
