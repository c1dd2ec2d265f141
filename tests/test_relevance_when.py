"""When chunks are scored, and by what."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE, SCORING
from support.runs import SCORED, TOKENS, Open, check_residency, feed, out, read, reselects
from support.scorers import Given, Scores, oldest, other_ones, shuffled

from pyllama_kvflash import View
from pyllama_kvflash.engine.decoder import asking_parts
from pyllama_kvflash.options import Spec

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL = SCORED


def due(start: int, end: int, tau: int) -> list[tuple[int, int]]:
    """When scoring begins and is applied, one token at a time from `start`, where the pool was just chosen: with the
    queries of a token in the step after it, and a quarter of tau after the token.
    """
    res, asked = [], start + tau
    while (applied := asked + max(1, tau // 4)) <= end:
        res.append((asked, applied))
        asked = max(asked + tau, applied + 1)
    return res


@pytest.mark.usefixtures("at_one_token")
@pytest.mark.parametrize("tau", [1, 2, 3, 4, 7, 8, 12, 16, 64])
def test_scored_every_tau_tokens(opened: Open, tau: int) -> None:
    """share=0: at fixed steps, by the queries of one token, and what the text was when scoring began."""
    scorer = shuffled(0)
    kv = opened(policy=scorer, tau=tau)
    read(kv, 1300)
    scorer.views.clear()
    wanted, events = {}, []
    for end in range(1301, 1300 + 4 * max(tau, 10)):
        events += feed(kv, end)
        wanted[end] = kv.queries()  # to look at them changes nothing
    steps = due(1300, kv.n_tokens, tau)
    assert len(steps) >= 3
    assert [e.pos for e in reselects(events)] == [applied for _, applied in steps]
    assert {e.reason for e in reselects(events)} == {"decode"}
    kv.sequence.selector.cancel()  # type: ignore[union-attr]  # one more may be under way
    views = scorer.views[: len(steps)]
    assert [len(view.tokens) for view in views] == [asked + 1 for asked, _ in steps]
    for view, (asked, _) in zip(views, steps, strict=True):
        assert np.array_equal(view.tokens, TOKENS[: len(view.tokens)])
        assert view.chunk == 64
        assert len(view.queries) == 1
        assert [q.shape for q in view.queries[0]] == [(4, 64)] * 3
        for mine, want in zip(view.queries[0], wanted[asked], strict=True):
            assert np.array_equal(mine, want)


@pytest.mark.parametrize(("query", "n"), [("last", 1), ("last:4", 4), ("last:64", 64), ("question", 64)])
def test_queries_that_a_scorer_is_given(opened: Open, query: str, n: int) -> None:
    """Of the last tokens of a prompt as many as it asks for, with all keys and the room, and of none before; later one token's."""
    scorer = Given(oldest)
    scorer.query = query
    kv = opened(policy=scorer, tau=16)
    (event,) = reselects(read(kv, 2000))
    (view,) = scorer.views
    assert event.reason == "question"
    assert len(view.queries) == n
    assert view.keys is not None
    assert view.room == 10  # 16 blocks: sink, tail of 4, one to be free
    assert view.candidates.tolist() == [False, *[True] * 27, *[False] * 4]
    scorer.views.clear()
    wanted = {}
    for end in range(2001, 2100):
        kv.decode(TOKENS[end - 1 : end])
        wanted[end] = kv.queries()
    assert len(scorer.views) >= 5
    for view in scorer.views:
        assert len(view.queries) == 1
        assert view.keys is None
        for mine, want in zip(view.queries[0], wanted[len(view.tokens) - 1], strict=True):
            assert np.array_equal(mine, want)


@given(
    data=st.data(), n=st.integers(1, 40), n_tap=st.integers(1, 24), n_ubatch=st.sampled_from([1, 2, 3, 5, 8, 16, 64])
)
@settings(derandomize=True, database=None, deadline=None, max_examples=500)
def test_the_batches_that_ask_are_the_tokens_and_ask_for_the_last_of_them(
    data: st.DataObject, n: int, n_tap: int, n_ubatch: int
) -> None:
    """Whatever the tap keeps, which is those of the last tokens of a graph, and no graph has more tokens than n_ubatch."""
    n_asking = data.draw(st.integers(1, n))
    parts = asking_parts(TOKENS[:n], n_asking, n_tap, n_ubatch)
    assert np.array_equal(np.concatenate([part for part, _ in parts]), TOKENS[:n])
    asked, end = [], 0
    for part, k in parts:
        assert len(part) > 0
        end += len(part)
        last_graph = (len(part) - 1) % n_ubatch + 1
        assert 0 <= k <= min(n_tap, last_graph), "they are not kept"
        asked += range(end - k, end)
    assert asked == list(range(n - n_asking, n))
    if n_asking <= n_tap and n <= n_ubatch:
        assert len(parts) == 1, "nothing is split that need not be"


@pytest.mark.nightly(SCORING)
@pytest.mark.parametrize(
    ("query", "n", "options"),
    [
        ("last:4", 4, {"spec": Spec(kind="ngram", n_max=15)}),  # whose tap keeps 16
        ("last", 1, {"spec": Spec(kind="ngram", n_max=15)}),
        ("last:6", 6, {"n_ubatch": 4, "replay": 0}),
        ("last:6", 4, {"n_ubatch": 4}),
        ("last:100", 80, {"n_ubatch": 32, "replay": 0, "n_batch": 128}),  # all of the last batch
        ("question", 8, {"n_ubatch": 8}),
    ],
    ids=str,
)
def test_a_scorer_is_given_as_many_queries_as_it_asks_for(
    opened: Open, query: str, n: int, options: dict[str, Any]
) -> None:
    """Whatever else the tap is for, and however small a graph is; each the one that its token has."""
    seen = []
    control = {name: options[name] for name in ("replay", "n_batch") if name in options}
    for asked, more in ((query, options), (f"last:{n}", control)):
        scorer = Given(oldest)
        scorer.query = asked
        read(opened(policy=scorer, **more), 2000)
        seen.append(scorer.views[0].queries)
    assert len(seen[0]) == n
    for mine, want in zip(*seen, strict=True):
        for a, b in zip(mine, want, strict=True):
            # in other batches another chunk leaves first; another token's are further off than their largest
            assert np.abs(a - b).max() < 0.3 * np.abs(b).max()


@pytest.mark.usefixtures("beside")
def test_a_reselect_tells_what_it_did(opened: Open) -> None:
    """Scores of the chunks that compete, None for the others; what it dropped is out and what it brought is in."""
    kv = opened(tau=16, again=0)
    read(kv, 2000)
    events = []
    for end in range(2001, 2200):
        now = reselects(feed(kv, end))
        events += now
        for event in now:
            where = kv.residency()
            assert np.all(~where.resident[list(event.drops)])
            assert np.all(where.resident[list(event.page_ins)])
            kv.check_integrity()
    assert len(events) == 12
    for event in events:
        n = len(event.scores)
        assert n == -(-event.pos // 64)  # as it was when the scoring began: a token ago they were asked for
        none = {i for i, s in enumerate(event.scores) if s is None}
        assert none == {0, *range(n - 4, n)}
        assert event.score_s > 0
        assert event.apply_s > 0
    last = kv.reselect()
    assert last is not None
    assert last.reason == "decode"
    where = kv.residency()
    rated = [i for i, s in enumerate(last.scores) if s is not None]
    assert [last.scores[i] for i in rated] == where.score[rated].tolist()
    resident = [i for i in rated if where.resident[i]]
    gone = [i for i in rated if ~where.resident[i]]
    assert min(where.score[resident]) >= max(where.score[gone])
    assert len(resident) >= 9  # 16 blocks: sink, tail of 4, one free, and one that could be free
    assert len(resident) + len(gone) == len(rated), "by hand, all of it is done at once"


@pytest.mark.nightly(SCORING)
@pytest.mark.parametrize("device", ["cpu", "beside"])
@pytest.mark.parametrize("swaps", [1, 3, None])
def test_few_chunks_come_back_while_decoding(
    opened: Open, request: pytest.FixtureRequest, device: str, swaps: int | None
) -> None:
    """At most as many as `swaps`, with scores that want all others in; a prompt, and who asks by hand,
    has the best there are.
    """
    request.getfixturevalue("beside" if device == "beside" else "at_one_token")
    scorer = Given(other_ones)
    scorer.summary = "mean"
    kv = opened(policy=scorer, chunk=16, **({} if swaps is None else {"swaps": swaps}))
    events = reselects(read(kv, 4000))
    assert max(len(e.page_ins) for e in events) > 20
    moved = [(len(e.page_ins), len(e.drops)) for e in reselects(feed(kv, 4200), "decode")]
    assert len(moved) >= 20
    assert {n for n, _ in moved} == {swaps or kv.options.n_swaps}
    assert all(n_in - 1 <= n_out <= n_in + 1 for n_in, n_out in moved)
    last = kv.reselect()
    assert last is not None
    assert len(last.page_ins) > 20
    check_residency(kv, 16)


@pytest.mark.usefixtures("at_one_token")
def test_scoring_does_not_hold_up_decode(opened: Open) -> None:
    """While a scorer takes its time, tokens are decoded; only the step where its plan is due waits for it."""
    begun, go, order = threading.Event(), threading.Event(), []

    def slow(view: View) -> Scores:
        begun.set()
        assert go.wait(30)
        order.append("scored")
        return oldest(view)

    kv = opened(policy=Given(slow), tau=32)
    go.set()
    read(kv, 2000)
    go.clear()
    order.clear()
    begun.clear()
    assert feed(kv, 2033) == []
    assert begun.wait(30)
    for end in range(2034, 2040):  # a lag of 8
        assert feed(kv, end) == []
        order.append(str(end))
    threading.Timer(0.2, go.set).start()
    begin = time.monotonic()
    (event,) = reselects(feed(kv, 2040))
    assert time.monotonic() - begin > 0.1
    assert event.pos == 2040
    assert order == [*map(str, range(2034, 2040)), "scored"]
    check_residency(kv)


def test_lru_is_never_asked(opened: Open) -> None:
    kv = opened(policy="lru", tau=1)
    events = read(kv, 2000) + feed(kv, 2100)
    assert reselects(events) == []
    assert kv.reselect() is None
    assert kv.queries() == []
    assert kv.stats().summary_bytes == 0


def test_reselect_by_hand(opened: Open) -> None:
    kv = opened(tau=1 << 20, policy="qk-cos")  # whose scores are of now, and not of what was before
    read(kv, 2000)
    hottest = int(np.nanargmax(kv.residency().score))
    kv.page_out(hottest)
    first = kv.reselect()
    assert first is not None
    assert hottest in first.page_ins
    assert np.all(kv.residency().resident[list(first.page_ins)]), "at once"
    again = kv.reselect()
    assert again is not None
    assert again.scores == first.scores
    assert (again.drops, again.page_ins) == ((), ())
    kv.page_in(out(kv)[0])
    assert kv.reselect() is not None
    check_residency(kv)
    full = opened(pool="off")
    feed(full, 100, 50)
    assert full.reselect() is None
