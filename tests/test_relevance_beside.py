"""A scoring that runs beside decode: what may happen while it is under way."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import SCORING
from support.cuts import cut_off_at_every_line
from support.runs import (
    SCORED,
    TOKENS,
    Open,
    check_residency,
    feed,
    out,
    read,
    reselects,
)
from support.scorers import Given, Scores, oldest, other_ones, shuffled

from pyllama_kvflash import KVFlash, View

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


START = 1296  # where the pool was just chosen; with tau=16, queries are asked for at 1312, scored at 1313, due at 1316
PHASES = {"asked": 1312, "scored": 1313}


def begun(opened: Open, phase: str) -> tuple[KVFlash, Held]:
    """A run in which the queries were just asked for, or a scoring began."""
    scorer = Held()
    kv = opened(policy=scorer, tau=16, replay=0)
    assert len(reselects(read(kv, START))) == 1
    assert reselects(feed(kv, PHASES[phase])) == []
    selector = kv.sequence.selector
    assert selector is not None
    assert (selector._ticket is not None, selector._job is not None) == (phase == "asked", phase == "scored")
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
    kv, scorer = begun(opened, phase)
    act(kv)
    kv.check_integrity()
    done, at = kv.stats().reselects, kv.n_tokens
    events = reselects(feed(kv, max(at, 1100) + 50))
    assert kv.stats().reselects == done + len(events)
    first = at + 20 if ends_it else 1316
    if at >= 1100:
        assert [e.pos for e in events] == list(range(first, kv.n_tokens + 1, 16))
    for event in events:
        assert len(event.scores) <= -(-kv.n_tokens // 64)
    check_residency(kv)
    for view in scorer.views:
        assert np.array_equal(view.tokens, TOKENS[: len(view.tokens)])
    assert kv.policy == "given"


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
    kv, scorer = begun(opened, "asked")
    scorer.go.clear()
    feed(kv, 1313)
    threading.Timer(0.2, scorer.go.set).start()
    begin = time.monotonic()
    kv.rollback(1000)
    assert time.monotonic() - begin > 0.1
    assert len(scorer.views[-1].tokens) == 1313
    kv.check_integrity()


def test_close_while_a_scorer_runs(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, scorer = begun(opened, "asked")
    scorer.go.clear()
    feed(kv, 1313)
    threading.Timer(0.2, scorer.go.set).start()
    kv.close()
    kv.close()
    assert len(scorer.views[-1].tokens) == 1313
    assert [t for t in threading.enumerate() if t.name.startswith("kvflash")] == []


def test_cut_off_at_every_line_between_two_scorings(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C anywhere from one plan to the next: nothing is lost, and chunks are scored as before."""

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
