"""What a scorer is for, and what it may not change. test_relevance_when.py has when it scores."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import ENGINE, SCORING, crossed
from support.oracles import assert_same
from support.runs import (
    GREEDY,
    MODELS,
    SCORED,
    Open,
    check_residency,
    feed,
    logits_of,
    out,
    plain,
    read,
    reselects,
    text_of,
)
from support.scorers import Given, shuffled

from pyllama_kvflash import KVFlash, Paged, Reselect, Sampling
from pyllama_kvflash.cli.needles import positions
from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt
from pyllama_kvflash.policy import Schedule

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL = SCORED


#
# what it is for
#


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """4,096 tokens with eight codes."""
    return needles.document(4096, n_needles=8)


@pytest.fixture(scope="module")
def short() -> NeedlePrompt:
    """2,048 tokens with four codes."""
    return needles.document(2048)


def recall(document: NeedlePrompt, **options: Any) -> list[bool]:
    """Which codes are told right, with a pool of a quarter of the text."""
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, "n_batch": 0, "n_ctx": 4224, **options}) as kv:
        return needles.answers(kv, document).found(document.needles)


@pytest.mark.nightly(SCORING)
def test_what_the_full_cache_finds_is_found_through_a_quarter_of_it(document: NeedlePrompt) -> None:
    assert all(recall(document, pool="off"))
    assert all(recall(document, policy="fresh", prefill="exact"))


@pytest.mark.nightly(ENGINE)
def test_lossless_answers_are_the_full_caches_whatever_the_pool_has(document: NeedlePrompt) -> None:
    """On any device, and on several. The controls below find few through such a pool."""
    assert all(recall(document, policy="lru", prefill="exact", mode="lossless"))


QUARTER: dict[str, Any] = {"pool": 512, "n_ctx": 2176}  # of the short text


@pytest.mark.nightly(SCORING)
@pytest.mark.parametrize(("cache", "policy"), crossed(["q8_0", "q4_0"], ["qk", "fresh"]))
def test_quantised_keys_are_found_as_well(short: NeedlePrompt, cache: str, policy: str) -> None:
    assert all(recall(short, **QUARTER, policy=policy, type_k=cache, type_v=cache))


@pytest.mark.nightly(SCORING)
def test_controls_find_what_lies_in_their_window_and_by_chance(document: NeedlePrompt) -> None:
    """The pool that forgets, and scores that mean nothing: it is the scores that find the codes."""
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, "n_ctx": 4224, "policy": "lru"}) as kv:
        spans = positions(kv, document)
        found = needles.answers(kv, document).found(document.needles)
        end = kv.n_tokens
    seen = [start < 64 or stop > end - 1024 for start, stop in spans]
    assert not any(f and not s for f, s in zip(found, seen, strict=True))
    assert sum(seen) <= 3
    assert sum(recall(document, policy=shuffled(1))) <= 4


@pytest.mark.nightly(ENGINE)
def test_a_question_brings_back_the_chunk_of_its_code(document: NeedlePrompt) -> None:
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, "n_ctx": 4224, "prefill": "exact"}) as kv:
        spans = positions(kv, document)
        for _ in kv.prefill(kv.tokenize(document.text)):
            pass
        end = kv.n_tokens
        for needle, (start, stop) in zip(document.needles, spans, strict=True):
            events = list(kv.generate(needle.question, max_tokens=8, sampling=GREEDY, stop=["\n"], append=True))
            assert needle.answer in text_of(events)
            chunks = set(range(start // 64, (stop - 1) // 64 + 1))
            assert not chunks & set(out(kv)), needle.key
            (found,) = reselects(events, "question")
            assert found.pos >= end
            kv.rollback(end)
            kv.check_integrity()


#
# what it may not change
#


@pytest.mark.parametrize("name", MODELS)
def test_scoring_changes_nothing_where_all_is_resident(opened: Open, name: str) -> None:
    """Bit for bit, and without a reselect: there is nothing to choose. On a GPU but for rounding: a graph that keeps queries fuses
    other nodes.
    """
    want = opened(name, policy="lru")
    read(want, 700)
    wanted = logits_of(want, 780, 1)
    for policy in ("qk", "qk-cos", shuffled(0)):
        kv = opened(name, policy=policy, tau=8)
        events, logits = read(kv, 700), []
        while kv.n_tokens < 780:
            events += feed(kv, kv.n_tokens + 1)
            logits.append(kv.logits())
        assert_same(np.array(logits), wanted)
        assert reselects(events) == []
        assert [e for e in events if isinstance(e, Paged)] == []
        assert kv.stats().reselects == 0
        assert kv.reselect() is None
        if isinstance(policy, Given):
            assert policy.views == []


@pytest.mark.nightly(SCORING)
@pytest.mark.usefixtures("at_one_token")
@pytest.mark.parametrize(("share", "again"), crossed([0, 0.05], [0, 0.03]))
def test_the_same_seed_gives_the_same_events(
    opened: Open, short: NeedlePrompt, monkeypatch: pytest.MonkeyPatch, share: float, again: float
) -> None:
    """Of whatever kind, at the same positions. Times vary by a third: they are what `share` is measured by, and those of
    a machine that does other things as well would prove nothing.
    """
    step, scored = Schedule.step, Schedule.scored
    runs = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(Schedule, "step", lambda self, n, _s, r=rng: step(self, n, n * r.uniform(0.001, 0.0013)))
        monkeypatch.setattr(Schedule, "scored", lambda self, *_, r=rng: scored(self, r.uniform(0.0012, 0.00145), 0.0))
        kv = opened("needle", share=share, n_batch=128, tau=16, again=again)
        prompt = short.text + short.needles[2].question
        events = list(kv.generate(prompt, max_tokens=150, sampling=Sampling(temperature=0.8, seed=7)))
        runs.append([plain(e) for e in events])
    (question,) = reselects(runs[0], "question")
    scored_at = [e.pos for e in reselects(runs[0], "decode") if e.pos != question.pos]
    # every 16 tokens, or every 32 once that is measured: at the end of the prompt, if its last token may be decoded again
    assert len(set(scored_at)) == (9 if share == 0 else 4 if again else 5)
    assert (len(scored_at) == len(set(scored_at))) == (again == 0), "and once more where a token was decoded again"
    assert sum(bool(e.page_ins) for e in reselects(runs[0])) >= 3
    for other in runs[1:]:
        assert [type(e) for e in other] == [type(e) for e in runs[0]]
        assert other == runs[0]


def protected(kv: KVFlash, pos: int) -> set[int]:
    """The first chunk, and the last four of pos positions."""
    n = -(-pos // 64)
    return {0, *range(max(0, n - 4), n)}


@pytest.mark.nightly(ENGINE)
def test_sinks_tail_and_pins_never_leave(opened: Open) -> None:
    """Whatever the scores say: over 3,000 tokens, scored every 16."""
    kv = opened(policy=shuffled(3), tau=16, pins=((200, 201), (4000, 4100)))  # the second ahead of the text
    pins = {3, 62, 63, 64}
    events = read(kv, 2000)
    kv.pin(640, 700)
    pins |= {10}
    assert 10 not in out(kv)
    while kv.n_tokens < 5000:
        events = feed(kv, kv.n_tokens + 50)
        for event in events:
            if isinstance(event, Paged | Reselect):
                assert not set(event.drops) & (pins | protected(kv, event.pos))
        assert not pins & set(out(kv))
        check_residency(kv)
    stats = kv.stats()
    assert stats.reselects > 180
    assert stats.pages_in > 500, "the scores do move chunks"


def test_too_many_pins_raise_the_pool_or_are_refused(opened: Open) -> None:
    kv = opened(pool=768, n_batch=0, pins=((0, 64 * 12),))
    assert any("768 tokens is too small: raised to 1,280" in text for text in kv.warnings)
    assert kv.n_pool == 1280
    read(kv, 4000)
    feed(kv, 4200)
    assert not set(range(12)) & set(out(kv))
    check_residency(kv)

    kv = opened(n_batch=0, tau=16)
    read(kv, 3000)
    before = (kv.pager.ledger.pins.copy(), kv.residency().resident.tolist(), kv.n_batch)
    with pytest.raises(PoolError, match=r"pinning 64:2000 makes 31 pinned chunks, which need a pool of \d+"):
        kv.pin(64, 2000)
    assert (kv.pager.ledger.pins, kv.residency().resident.tolist(), kv.n_batch) == before
    feed(kv, 3100)
    check_residency(kv)
