"""Scorers that fail, and scorers that others wrote."""

import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import ENGINE
from support.runs import SCORED, Open, check_residency, feed, out, read, reselects
from support.scorers import Given, Scores, boom, oldest, registered

from pyllama_kvflash import Reselect, View, Warn, registry
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Summaries
from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL = SCORED


@pytest.fixture(scope="module")
def short() -> NeedlePrompt:
    """2,048 tokens with four codes."""
    return needles.document(2048)


#
# scorers that fail
#

BROKEN: dict[str, tuple[Callable[[View], Any], str]] = {
    "raises": (boom, "it failed with ValueError: no such luck"),
    "short": (lambda v: np.zeros(len(v.candidates) - 1), "it gave scores of shape"),
    "matrix": (lambda v: np.zeros((len(v.candidates), 1)), "it gave scores of shape"),
    "scalar": (lambda _: 1.0, "it gave scores of shape ()"),
    "none": (lambda _: None, "it gave scores of shape ()"),
    "text": (lambda v: ["a"] * len(v.candidates), "it failed with ValueError"),
    "nan": (lambda v: np.full(len(v.candidates), np.nan), "not a number"),
    "one nan": (lambda v: np.where(np.arange(len(v.candidates)) == 5, np.nan, 0.0), "not a number"),
    "assertion": (lambda v: np.testing.assert_equal(len(v.candidates), 0), "it failed with AssertionError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_qk_takes_over_from_a_scorer_that_fails(opened: Open, kind: str) -> None:
    give, says = BROKEN[kind]
    kv = opened(policy=Given(give))
    assert kv.policy == "given"
    events = read(kv, 1300)
    (warning,) = [e for e in events if isinstance(e, Warn)]
    assert warning.text.startswith("given cannot score: ")
    assert says in warning.text
    assert warning.text.endswith("; using qk")
    assert kv.policy == "qk"
    assert len(reselects(events, "question")) == 1
    check_residency(kv)


@pytest.mark.usefixtures("at_one_token")
def test_a_scorer_that_fails_while_decoding(opened: Open) -> None:
    """One warning, among the events of the step; the run goes on, and is scored every 16 tokens, within them from then on."""
    n = 0

    def later(view: View) -> Scores:
        nonlocal n
        n += 1
        return boom(view) if n > 3 else oldest(view)

    kv = opened(policy=Given(later), tau=16, again=0)
    read(kv, 2000)
    events = feed(kv, 2200)
    warnings = [e for e in events if isinstance(e, Warn)]
    assert len(warnings) == 1
    assert [e.pos for e in reselects(events)] == [2020, 2036, 2052, *range(2064, 2201, 16)]
    at = events.index(warnings[0])
    assert isinstance(events[at + 1], Reselect)
    assert kv.policy == "qk"
    assert kv.stats().summary_bytes > 0
    check_residency(kv)
    assert len(kv.pager.summaries) == 2200 // 64  # type: ignore[arg-type]
    fresh = Summaries(kv.ctx.layers(), 64, "centroid:4")
    for chunk in range(2200 // 64):
        fresh.put(chunk, kv.pager.records.get(chunk))
        for mine, its in zip(kv.pager.summaries.entry(chunk), fresh.entry(chunk), strict=True):  # type: ignore[union-attr]
            assert np.array_equal(mine, its)


def test_a_scorer_that_fails_is_closed(opened: Open) -> None:
    closed = []

    class Closing(Given):
        def close(self) -> None:
            closed.append(1)

    kv = opened(policy=Closing(boom))
    read(kv, 2000)
    assert closed == [1]
    kv.close()
    assert closed == [1]
    kv = opened(policy=Closing(oldest))
    read(kv, 2000)
    assert closed == [1]
    kv.close()
    assert closed == [1, 1]


def test_ctrl_c_while_a_scorer_runs(opened: Open) -> None:
    """The wait for it ends; the sequence stands, and the next scoring is one of its own."""
    go, main = threading.Event(), threading.get_ident()
    cut = False

    def slow(view: View) -> Scores:
        nonlocal cut
        if cut:
            cut = False
            signal.pthread_kill(main, signal.SIGINT)  # a real one: only that ends a wait for a lock
            assert go.wait(30)
        return oldest(view)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        kv = opened(policy=Given(slow), tau=16)
        read(kv, 2000)
        feed(kv, 2015)
        cut = True
        with pytest.raises(KeyboardInterrupt):
            feed(kv, 2060)
        at = kv.n_tokens
        assert 2016 <= at <= 2020
        go.set()
        check_residency(kv)
        events = feed(kv, 2100)
        assert len(reselects(events)) >= 4
        check_residency(kv)
    finally:
        signal.signal(signal.SIGINT, previous)
        go.set()


#
# scorers of others
#


def test_a_scorer_of_ones_own(opened: Open) -> None:
    scorer = Given(oldest)
    kv = opened(policy=scorer)
    assert kv.policy == "given"
    read(kv, 3000)
    assert out(kv)[0] > 5
    assert scorer.views
    assert scorer.views[0].summaries is None


@pytest.mark.parametrize("kind", ["centroid:1", "centroid:16", "mean", "direction", "rows"])
def test_a_scorer_may_ask_for_summaries(opened: Open, kind: str) -> None:
    class Asking(Given):
        summary = kind
        query = "last:3"

    def first_head(view: View) -> Scores:
        assert view.summaries is not None
        n = np.flatnonzero(view.candidates)[-1] + 1  # later ones may not be there yet
        found = view.summaries.score(0, view.queries[-1][0], n)[0]
        return np.append(found, [0.0] * (len(view.candidates) - n)).astype(np.float64)

    scorer = Asking(first_head)
    kv = opened(policy=scorer, tau=16)
    read(kv, 1300)
    assert kv.policy == "given"
    assert len(scorer.views[-1].queries) == 3
    feed(kv, 1400)
    assert kv.policy == "given"
    assert len(scorer.views) > 5
    assert kv.stats().summary_bytes > 0


def test_a_summary_that_does_not_exist_is_refused(opened: Open) -> None:
    class Asking(Given):
        summary = "median"

    with pytest.raises(UsageError, match="'median' is not a summary of keys"):
        opened(policy=Asking(oldest))


def test_registered_scorers(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        msg = "no licence"
        raise RuntimeError(msg)

    registered(monkeypatch, mine=lambda: Given(oldest), fails=fails, nothing=lambda: None, number=7, text=lambda: "qk")
    assert registry.policy_names() == (*registry.BUILT_IN, "fails", "gone", "mine", "nothing", "number", "text")
    kv = opened(policy="mine")
    read(kv, 3000)
    assert kv.policy == "given"
    assert out(kv)[0] > 5
    assert opened(policy="qk").policy == "qk"  # ours, not theirs
    for name, says in {
        "fails": r"policy 'fails', which third_party:fails registers, cannot be loaded: RuntimeError: no licence",
        "gone": r"policy 'gone', .* cannot be loaded: ModuleNotFoundError",
        "number": r"policy 'number', .* cannot be loaded: TypeError",
        "nothing": r"policy 'nothing', .* gave a NoneType: it must have name, summary, query and score\(\)",
        "text": r"policy 'text', .* gave a str",
    }.items():
        with pytest.raises(UsageError, match=says):
            opened(policy=name)
    with pytest.raises(UsageError, match=r"`policy` .*'other'.* mine"):
        opened(policy="other")
