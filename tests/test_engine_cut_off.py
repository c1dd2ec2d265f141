"""Going on after whatever went wrong: Ctrl-C at any place, or no memory. Equal logits mean equal bits."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import ENGINE
from support.cuts import cut_off, cut_off_at_every_line, no_memory
from support.runs import GREEDY, LRU, TOKENS, Open, check_residency, feed, logits_of, out, text_of

from pyllama_kvflash import Done, KVFlash, Paged, Prefill, Token
from pyllama_kvflash.errors import HostMemoryError, NativeError, PoolError
from pyllama_kvflash.native.lib import lib
from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL = LRU


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """1,400 tokens with four codes."""
    return needles.document(1400, seed=3)


def test_interrupt_in_a_loop_over_events(opened: Open) -> None:
    """What Ctrl-C does to a script: the loop ends between two events, and the sequence stands."""
    kv, control = opened(), opened()
    feed(control, 2560, 64)

    def loop(last: Callable[[Any], bool]) -> None:
        for event in kv.prefill(TOKENS[kv.n_tokens : 2560]):
            if last(event):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(lambda event: isinstance(event, Prefill) and event.done == 1280)
    assert kv.n_tokens == 1280
    check_residency(kv)
    with pytest.raises(KeyboardInterrupt):
        loop(lambda event: isinstance(event, Paged))
    assert 1280 <= kv.n_tokens <= 1280 + 64
    check_residency(kv)
    feed(kv, 2560, 64)
    assert np.array_equal(kv.logits(), control.logits())


TINY: dict[str, Any] = {"n_ctx": 4096, "pool": 256, "chunk": 16, "n_batch": 16}  # 16 blocks, as many batches a second


def before_decode(kv: KVFlash) -> None:
    feed(kv, (kv.n_tokens // 16 + 1) * 16, 16)  # the next batch begins a chunk, and seals it


def before_page_in(kv: KVFlash) -> None:
    """Chunk 5 is out, and there is no free block for it."""
    kv.page_out(5)
    while kv.pager.ledger.n_free:
        kv.page_in(next(c for c in reversed(out(kv)) if c != 5))


def before_rollback(kv: KVFlash) -> None:
    """The chunk that 101 cuts through, and one before it, are out; the last one is not full."""
    if kv.n_tokens > 200:
        kv.clear()
    feed(kv, 185, 16)
    kv.page_out(4)
    kv.page_out(6)


def before_clear(kv: KVFlash) -> None:
    feed(kv, 101, 16)


OPERATIONS: dict[str, tuple[Callable[[KVFlash], None], Callable[[KVFlash], None]]] = {
    "page_in": (before_page_in, lambda kv: kv.page_in(5)),
    "decode": (before_decode, lambda kv: kv.decode(TOKENS[kv.n_tokens : kv.n_tokens + 16])),
    "rollback": (before_rollback, lambda kv: kv.rollback(101)),
    "clear": (before_clear, lambda kv: kv.clear()),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cut_off_at_every_line(opened: Open, operation: str) -> None:
    """Ctrl-C in a script comes between any two lines: the next call puts things right."""
    prepare, act = OPERATIONS[operation]
    control = opened(**{**TINY, "n_ctx": 16384})

    def fresh() -> KVFlash:
        kv = opened(**{**TINY, "n_ctx": 16384})
        feed(kv, 400, 16)
        return kv

    def check(kv: KVFlash) -> None:
        kv.check_integrity()
        feed(kv, kv.n_tokens + 16, 16)
        kv.check_integrity()

    kv, places = cut_off_at_every_line(fresh, act, check, prepare=prepare)
    assert len(places) >= 30, "nothing was cut off"
    if operation == "decode":
        assert np.array_equal(logits_of(kv, kv.n_tokens + 16, 16)[-1], logits_of(control, kv.n_tokens, 16)[-1])


def test_cut_off_batch_of_a_recurrent_model(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state has seen tokens that it should not have: it says so, until it is cleared."""
    kv = opened("qwen35")
    want = logits_of(kv, 500)
    with monkeypatch.context() as patch:
        cut_off(kv.ctx, "decode", "after", patch)
        with pytest.raises(KeyboardInterrupt):
            kv.decode(TOKENS[500:564])
    for _ in range(2):
        with pytest.raises(NativeError, match=r"memory cannot be rolled back: call clear\(\) and start again"):
            kv.decode(TOKENS[500:564])
    kv.clear()
    kv.check_integrity()
    assert np.array_equal(logits_of(kv, 500), want)


@pytest.fixture
def stop() -> Iterator[Callable[[], None]]:
    """What Ctrl-C calls within interruptible(); undone after the test."""
    yield lambda: lib.kvf_interrupt(True)
    lib.kvf_interrupt(False)


def test_interrupted_generation_ends_with_done(opened: Open, stop: Callable[[], None], document: NeedlePrompt) -> None:
    kv = opened("needle")
    events = []
    for event in kv.generate(document.text, max_tokens=4):
        events.append(event)
        if isinstance(event, Prefill) and event.done == 640:
            stop()
    last = events[-1]
    assert isinstance(last, Done)
    assert last.reason == "interrupted"
    assert (last.stats.n_prompt, last.stats.n_generated) == (640, 0)
    assert kv.n_tokens == 640
    lib.kvf_interrupt(False)

    events = []
    for event in kv.generate("The secret code for the", max_tokens=20, sampling=GREEDY):
        events.append(event)
        if sum(isinstance(e, Token) for e in events) == 5:
            stop()
    last = events[-1]
    assert isinstance(last, Done)
    assert (last.reason, last.stats.n_generated) == ("interrupted", 5)
    lib.kvf_interrupt(False)
    kv.clear()
    whole = text_of(list(kv.generate("The secret code for the", max_tokens=20, sampling=GREEDY)))
    assert whole.startswith(text_of(events))


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
def test_out_of_host_memory_loses_nothing(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kv, control = opened(name, **TINY), opened(name, **TINY)
    feed(kv, 350, 10)
    want = logits_of(control, 700, 10)
    with monkeypatch.context() as patch:
        patch.setattr(kv.pager.records.memory, "_allocate", no_memory)
        with pytest.raises(
            HostMemoryError, match=r"no host memory for another [\d.]+ MiB of chunk records, with [\d.]+ MiB held"
        ):
            feed(kv, 700, 10)
        at = kv.n_tokens
        assert 350 <= at < 700
        held = kv.host_bytes
        check_residency(kv, 16)
        for _ in range(2):  # still none
            with pytest.raises(HostMemoryError):
                kv.decode(TOKENS[at : at + 10])
        assert (kv.n_tokens, kv.host_bytes) == (at, held)
        check_residency(kv, 16)
    got = logits_of(kv, 700, 10)
    assert np.array_equal(got, want[-len(got) :])
    assert out(kv) == out(control)


def test_batch_for_which_the_pool_has_no_room(opened: Open) -> None:
    kv = opened()
    feed(kv, 2000, 64)
    kv.pager.ledger.pins |= set(range(100))  # behind the engine, which would not allow it
    at = kv.n_tokens
    with pytest.raises(PoolError, match="more blocks of the pool are needed"):
        feed(kv, 4000, 64)
    kv.check_integrity()
    assert kv.n_tokens >= at
    kv.pager.ledger.pins.clear()
    feed(kv, 4000, 64)
    check_residency(kv)
