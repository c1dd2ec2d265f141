"""The summaries of keys that a run keeps for its scorer."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE
from support.runs import MODELS, SCORED, TOKENS, Open, check_residency, feed, out, read, reselects

from pyllama_kvflash import KVFlash, View
from pyllama_kvflash.errors import HostMemoryError
from pyllama_kvflash.native import Summaries
from pyllama_kvflash.policy import Qk
from pyllama_kvflash.policy.scorers import FADES

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL = SCORED


@pytest.mark.parametrize("name", MODELS)
def test_summaries_follow_the_sequence(opened: Open, name: str) -> None:
    kv, control = opened(name), opened(name)
    other = TOKENS[::-1].copy()
    read(kv, 2000)

    def kept(one: KVFlash) -> Summaries:
        assert one.pager.summaries is not None
        return one.pager.summaries

    kv.pager.wait_stored()
    assert len(kept(kv)) == 31
    if name == "qwen35":
        kv.clear()
    else:
        kv.rollback(1940 if name == "gemma4" else 700)
    at = kv.n_tokens
    assert len(kept(kv)) == at // 64
    feed(control, at, 64)
    for one in (kv, control):
        for pos in range(at, at + 500, 50):
            one.decode(other[pos : pos + 50])
    n = (at + 500) // 64
    for one in (kv, control):
        one.pager.wait_stored()
    assert len(kept(kv)) == len(kept(control)) == n
    fresh = Summaries(kv.ctx.layers(), 64, "centroid:4")
    for chunk in range(n):
        fresh.put(chunk, kv.pager.records.get(chunk))
    for chunk in range(n):
        for mine, want in zip(kept(kv).entry(chunk), fresh.entry(chunk), strict=True):
            assert np.array_equal(mine, want), chunk
    kv.clear()
    assert len(kept(kv)) == 0


@pytest.mark.nightly(ENGINE)
def test_no_host_memory_for_summaries(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything is lost, and the run goes on once there is some."""
    kv, control = opened(), opened()
    feed(kv, 1500, 50)
    feed(control, 1500, 50)

    def none(_self: Summaries, n: int) -> None:
        if n > 1500 // 64:  # for those before it was taken
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Summaries, "reserve", none)
        with pytest.raises(HostMemoryError, match=r"no host memory for [\d.]+ MiB of key summaries: use `policy` lru"):
            feed(kv, 1600, 50)
        at = kv.n_tokens
        assert at == 1500
        for one in (kv, control):  # it settles what is under way
            check_residency(one)
        with pytest.raises(HostMemoryError):
            kv.decode(TOKENS[at : at + 50])
        assert kv.n_tokens == at
    for _ in range(20):
        for one in (kv, control):
            feed(one, one.n_tokens + 50, 50)
        assert np.array_equal(kv.logits(), control.logits())
    assert out(kv) == out(control)


def summarised(kv: KVFlash) -> None:
    """Wait for the threads that summarise chunks."""
    for each in kv.pager.summarising:
        each.result()


def test_a_summary_that_cannot_be_made_is_made_later(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its thread, memory runs out, or there is no thread for the layers: an error of one sentence, or none."""
    kv = opened(tau=16)
    read(kv, 1300)
    feed(kv, 1310)
    summarised(kv)
    put, n = Summaries.put, 0

    def fails(self: Summaries, chunk: int, record: Any) -> None:
        nonlocal n
        n += 1
        if n == 1:
            raise MemoryError
        put(self, chunk, record)

    class NoThreads:
        def map(self, *_: object) -> None:
            msg = "can't start new thread"
            raise RuntimeError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(Summaries, "put", fails)
        patch.setattr(kv.pager._summariser, "_threads", NoThreads())
        with pytest.raises(HostMemoryError, match=r"no host memory for [\d.]+ MiB of key summaries: use `policy` lru"):
            feed(kv, 1400)
        at = kv.n_tokens
        assert 1344 <= at < 1400
        assert len(reselects(feed(kv, 1415))) >= 2
        summarised(kv)
        assert n == 3  # once, and again without threads; then the next chunk
    check_residency(kv)
    assert kv.policy == "qk"
    assert len(kv.pager.summaries) == kv.n_tokens // 64  # type: ignore[arg-type]


def test_qk_scores_what_a_fresh_run_would(opened: Open) -> None:
    """The scores in an event are those of Qk on the records, whatever was evicted and brought back before; or what is left of the
    scores before them, if that is more.
    """
    kv = opened(tau=1 << 20)
    read(kv, 2900)
    feed(kv, 3000)  # the scores are those of another token
    queries, kept = kv.queries(), []
    fresh = Summaries(kv.ctx.layers(), 64, "centroid:4")
    for chunk in range(3000 // 64):
        fresh.put(chunk, kv.pager.records.get(chunk))
    for _ in range(40):
        before = kv.residency().score
        event = kv.reselect()
        assert event is not None
        mask = np.array([s is not None for s in event.scores])
        seen = View(TOKENS[:3000], 64, np.zeros(len(mask), np.int64), mask, [queries], fresh, n_whole=3000 // 64)
        now = Qk().score(seen)
        want = np.fmax(now, FADES * before)
        got = np.array([np.nan if s is None else s for s in event.scores])
        assert np.allclose(got[mask], want[mask], rtol=1e-4)
        kept.append(int(np.count_nonzero(want[mask] > now[mask])))
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0
    assert kept[-1] == 0, "it never fades"
