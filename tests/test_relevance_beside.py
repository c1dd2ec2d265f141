"""A scoring that runs beside decode, and a plan that is spread over steps: what may happen while they are under way."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE, SCORING
from support.cuts import cut_off_at_every_line
from support.runs import (
    SCORED,
    TOKENS,
    Decoded,
    Open,
    check_residency,
    feed,
    out,
    place_by_hand,
    plain,
    read,
    reselects,
)
from support.scorers import Given, Scores, oldest, other_ones, shuffled

from pyllama_kvflash import KVFlash, View
from pyllama_kvflash.policy import State
from pyllama_kvflash.pool import flights

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("at_one_token")]

SMALL = SCORED


#
# between the beginning of a scoring and its end
#


class Held(Given):
    """Keeps its answer back until it is told, so that a scoring is under way for as long as a test wants."""

    def __init__(self) -> None:
        super().__init__(other_ones)
        self.go = threading.Event()
        self.go.set()

    def score(self, view: View) -> Scores:
        assert self.go.wait(30)
        return super().score(view)


START = 1296  # where the pool was just chosen; with tau=16, queries are asked for at 1312, scored at 1313, due at 1316, copied from 1317 on
PHASES = {"asked": 1312, "scored": 1313, "in flight": 1317}


def begun(opened: Open, monkeypatch: pytest.MonkeyPatch, phase: str) -> tuple[KVFlash, Held]:
    """A run in which the queries were just asked for, or a scoring began, or chunks of its plan are on their way in."""
    monkeypatch.setattr(flights, "FLIGHT_BYTES", 1)  # one chunk a step
    scorer = Held()
    kv = opened(policy=scorer, tau=16, replay=0)
    assert len(reselects(read(kv, START))) == 1
    assert reselects(feed(kv, PHASES[phase])) == [] or phase == "in flight"
    selector = kv.sequence.selector
    assert selector is not None
    assert (selector._ticket is not None, selector._job is not None) == (phase == "asked", phase == "scored")
    assert np.count_nonzero(kv.residency().state == State.IN_FLIGHT) == (phase == "in flight")
    assert (len(kv.pager.flights.saved().page_ins) >= 2) == (phase == "in flight")
    return kv, scorer


# what is done, and whether that ends what was begun
CHANGES: dict[str, tuple[Callable[[KVFlash], Any], bool]] = {
    "rollback by one": (lambda kv: kv.rollback(kv.n_tokens - 1), True),
    "rollback into what is out": (lambda kv: kv.rollback(200), True),
    "rollback to nothing": (lambda kv: kv.rollback(0), True),
    "clear": (lambda kv: kv.clear(), True),
    "pin": (lambda kv: kv.pin(300, 400), False),
    "page in": (lambda kv: kv.page_in(out(kv)[-1]), False),
    "page out": (lambda kv: kv.page_out(int(np.nanargmax(kv.residency().score))), False),  # the first of the plan
    "unpin": (lambda kv: kv.unpin(0, 16384), False),
    "prompt": (lambda kv: read(kv, kv.n_tokens + 64), True),
    "reselect": (lambda kv: kv.reselect(), True),
}


@pytest.mark.nightly(SCORING)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_a_scoring_is_under_way(
    opened: Open, monkeypatch: pytest.MonkeyPatch, change: str, phase: str
) -> None:
    """What was scored for another sequence is never applied; what still holds is, and nothing is lost by it."""
    act, ends_it = CHANGES[change]
    kv, scorer = begun(opened, monkeypatch, phase)
    act(kv)
    if change != "unpin":
        assert not np.any(kv.residency().state == State.IN_FLIGHT)
    kv.check_integrity()
    done, at = kv.stats().reselects, kv.n_tokens
    events = reselects(feed(kv, max(at, 1100) + 50))
    assert kv.stats().reselects == done + len(events)
    first = at + 20 if ends_it else {"in flight": 1312 + 20}.get(phase, 1316)
    if at >= 1100:
        assert [e.pos for e in events] == list(range(first, kv.n_tokens + 1, 16))
    for event in events:
        assert len(event.scores) <= -(-kv.n_tokens // 64)
    check_residency(kv)
    for view in scorer.views:
        assert np.array_equal(view.tokens, TOKENS[: len(view.tokens)])
    assert kv.policy == "given"


@pytest.mark.parametrize("change", [c for c in CHANGES if c not in {"unpin", "prompt"}])
def test_what_comes_after_a_change_is_what_comes_once_all_has_landed(
    opened: Open, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A change while chunks are on their way in, and the same change once they are there: the same logits."""
    act, _ = CHANGES[change]
    runs = [begun(opened, monkeypatch, "in flight")[0] for _ in range(2)]
    runs[1].pager.settle()
    for one in runs:
        act(one)
        one.check_integrity()
    assert out(runs[0]) == out(runs[1])
    for _ in range(10):
        logits = []
        for one in runs:
            feed(one, one.n_tokens + 1)
            logits.append(one.logits())
        if change == "reselect":  # the plan was cut short, so chunks lie in other blocks
            assert np.abs(logits[0] - logits[1]).max() < 0.02
        else:
            assert np.array_equal(*logits)
    assert out(runs[0]) == out(runs[1])


def test_a_prompt_that_is_given_up_is_no_end_of_scoring(opened: Open) -> None:
    """Between its batches nothing is under way, also where it was before: the tokens of the answer count."""
    for n in (1, 2):
        scorer = Given(oldest)
        kv = opened(policy=scorer, tau=16)
        feed(kv, 1280, 64)
        run = kv.prefill(TOKENS[1280:2000])
        while kv.n_tokens < 1280 + 64 * n:
            next(run)
        next(e for e in run if type(e).__name__ == "Prefill")
        at = kv.n_tokens
        assert [e.pos for e in reselects(feed(kv, at + 40))] == [at + 20, at + 36]
        check_residency(kv)


def test_cancel_waits_for_the_scorer(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from under a thread that reads it."""
    kv, scorer = begun(opened, monkeypatch, "asked")
    scorer.go.clear()
    feed(kv, 1313)
    threading.Timer(0.2, scorer.go.set).start()
    begin = time.monotonic()
    kv.rollback(1000)
    assert time.monotonic() - begin > 0.1
    assert len(scorer.views[-1].tokens) == 1313
    kv.check_integrity()


def test_close_while_a_scorer_runs(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, scorer = begun(opened, monkeypatch, "asked")
    scorer.go.clear()
    feed(kv, 1313)
    threading.Timer(0.2, scorer.go.set).start()
    kv.close()
    kv.close()
    assert len(scorer.views[-1].tokens) == 1313
    assert [t for t in threading.enumerate() if t.name.startswith("kvflash")] == []


#
# plans that are spread over steps
#


def test_a_spread_plan_reaches_what_one_that_is_applied_at_once_does(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step one chunk more, with a block free at every one, and at the end the same chunks."""
    runs = []
    for flight in (1, 1 << 40):
        monkeypatch.setattr(flights, "FLIGHT_BYTES", flight)
        kv = opened(policy=Given(other_ones), tau=64, replay=0)
        read(kv, 1312)
        feed(kv, 1391)
        before = kv.residency().state
        (event,) = reselects(feed(kv, 1392))
        assert len(event.page_ins) >= 4
        n_in, n_out = kv.stats().pages_in, kv.stats().pages_out
        states = [kv.residency().state]
        while kv.n_tokens < 1408:  # no chunk begins before
            feed(kv, kv.n_tokens + 1)
            assert kv.pager.ledger.n_free >= 1
            states.append(kv.residency().state)
        runs.append((plain(event), before.tolist(), states[-1].tolist()))
        brought = [np.count_nonzero(s[list(event.page_ins)] == State.RESIDENT) for s in states]
        flying = [np.count_nonzero(s == State.IN_FLIGHT) for s in states]
        n = len(event.page_ins)
        if flight == 1:
            assert brought[: n + 2] == [0, *range(n + 1)]  # each beside a step of its own
            assert flying[: n + 2] == [0, *[1] * n, 0]
        else:
            assert (brought[:3], flying[:3]) == ([0, 0, n], [0, n, 0])
        assert kv.stats().pages_in - n_in == n
        assert kv.stats().pages_out - n_out <= len(event.drops)
        check_residency(kv)
    assert runs[0] == runs[1]


def same_by_hand(kv: KVFlash, control: KVFlash, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """The next n tokens have, to the bit, the logits of a run whose pool is made what it was at every step by hand."""
    with monkeypatch.context() as patch:
        seen = Decoded(kv, patch)
        for _ in range(n):
            pos = kv.n_tokens
            feed(kv, pos + 1)
            want = seen.blocks[-1]
            place_by_hand(control, want)
            control.ctx.decode(TOKENS[pos : pos + 1], pos, 1)
            assert np.array_equal(kv.logits(), control.ctx.logits()), pos


def test_a_chunk_on_its_way_in_is_seen_from_the_next_step_on(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly: each step attends to what was resident when it was submitted, and to nothing else."""
    (kv, _), (control, _) = begun(opened, monkeypatch, "in flight"), begun(opened, monkeypatch, "in flight")
    control.pager.settle()
    same_by_hand(kv, control, monkeypatch, 10)
    check_residency(kv)


def test_cut_off_at_every_line_between_two_scorings(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C anywhere from one plan to the next: nothing is lost, and chunks are scored as before."""
    monkeypatch.setattr(flights, "FLIGHT_BYTES", 1)

    def fresh() -> KVFlash:
        kv = opened(policy=shuffled(0), tau=4, n_ctx=1 << 17, pool=256, chunk=16, n_batch=16, n_threads=1)
        feed(kv, 320, 16)
        return kv

    def check(kv: KVFlash) -> None:
        kv.check_integrity()
        assert reselects(feed(kv, kv.n_tokens + 12)), "it is never scored again"
        kv.check_integrity()
        if kv.n_tokens > 1000:
            kv.rollback(320)

    moves_and_scores = ("selector.py", "pager.py")
    kv, places = cut_off_at_every_line(fresh, lambda kv: feed(kv, kv.n_tokens + 8), check, files=moves_and_scores)
    assert len(places) >= 100, "nothing was cut off"
    assert kv.pager.summaries is None


@pytest.mark.nightly(ENGINE)
def test_a_spread_plan_leaves_a_block_for_the_chunk_that_begins(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes, with chunks that begin and are pinned meanwhile."""
    monkeypatch.setattr(flights, "FLIGHT_BYTES", 1)
    rng = np.random.default_rng(1)
    kv = opened(policy=shuffled(5), tau=64, swaps=1 << 20, pool=512, chunk=16, n_batch=16)
    feed(kv, 1600, 16)
    n_flying = 0
    while kv.n_tokens < 6000:
        feed(kv, kv.n_tokens + 1, int(rng.integers(1, 5)))
        size = int(rng.choice([1, 1, 7, 16]))
        feed(kv, kv.n_tokens + size, size)
        n_flying += bool(kv.pager.ledger.n_in_flight)
    assert n_flying > 300
    check_residency(kv, 16)
