"""What a scorer does to a run: which chunks come back and when, what is run again, and what it may never do."""

import _thread
import dataclasses
import itertools
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from test_engine import GREEDY, CutAtLine, NoMemory, check_residency, cut_off, out, place, text_of

from pyllama_kvflash import Done, KVFlash, Paged, Reselect, Sampling, Token, View, Warn, registry
from pyllama_kvflash.bench.demo import answer_all, positions
from pyllama_kvflash.errors import HostMemoryError, NativeError, PoolError, RecordError, UsageError
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import Context, Model, PoolParams, Summaries, summary
from pyllama_kvflash.native.lib import lib
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt
from pyllama_kvflash.options import Spec
from pyllama_kvflash.policy import Qk, Schedule, State, n_queries
from pyllama_kvflash.pool import pager
from pyllama_kvflash.pool.selector import FADES

pytestmark = pytest.mark.native

Scores = npt.NDArray[np.float64]
Open = Callable[..., KVFlash]

TOKENS = np.random.default_rng(5).integers(0, tiny.N_VOCAB, 20_000).astype(np.int32)
SMALL: dict[str, Any] = {"n_ctx": 16384, "pool": 1024, "n_batch": 64, "n_threads": 1, "share": 0}  # 16 blocks
MODELS = ["qwen3", "qwen35", "gemma4"]


class Given:
    """A scorer that gives what a function says, and keeps what it was shown."""

    name = "given"
    summary: str | None = None
    query = "last"

    def __init__(self, give: Callable[[View], Any]) -> None:
        self.give = give
        self.views: list[View] = []

    def score(self, view: View) -> Scores:
        self.views.append(view)
        res: Scores = self.give(view)
        return res


def shuffled(seed: int) -> Given:
    """Scores that mean nothing, other ones each time."""
    rng = np.random.default_rng(seed)
    return Given(lambda view: rng.random(len(view.candidates)))


def oldest(view: View) -> Scores:
    """The contrary of recency: what is far back comes in."""
    return -np.arange(len(view.candidates), dtype=np.float64)


def feed(kv: KVFlash, end: int, size: int = 1) -> list[Event]:
    """Decode TOKENS from where the sequence is up to `end`; what happened."""
    res: list[Event] = []
    while kv.n_tokens < end:
        res += kv.decode(TOKENS[kv.n_tokens : min(kv.n_tokens + size, end)])
    return res


def read(kv: KVFlash, end: int) -> list[Event]:
    """The same as a prompt."""
    return list(kv.prefill(TOKENS[kv.n_tokens : end]))


def reselects(events: Sequence[Event], reason: str | None = None) -> list[Reselect]:
    return [e for e in events if isinstance(e, Reselect) and reason in {None, e.reason}]


def plain(event: Event) -> Event:
    """Without times."""
    names = {"seconds", "score_s", "apply_s", "prefill_s", "decode_s", "reselect_s"}
    zero = {f.name: 0.0 for f in dataclasses.fields(event) if f.name in names}
    if isinstance(event, Done):
        stats = {f.name: 0.0 for f in dataclasses.fields(event.stats) if f.name in names}
        return dataclasses.replace(event, stats=dataclasses.replace(event.stats, **stats))
    return dataclasses.replace(event, **zero)


#
# what it is for
#


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """4,096 tokens with eight codes."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(4096, lambda s: len(model.tokenize(s, add_special=False)), n_needles=8, seed=2)


@pytest.fixture(scope="module")
def short() -> NeedlePrompt:
    """2,048 tokens with four codes."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(2048, lambda s: len(model.tokenize(s, add_special=False)), n_needles=4, seed=2)


def recall(document: NeedlePrompt, **options: Any) -> list[bool]:
    """Which codes are told right, with a pool of a quarter of the text."""
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, "n_batch": 0, "n_ctx": 4224, **options}) as kv:
        return answer_all(kv, document, lambda _: None).found(document.needles)


def test_what_the_full_cache_finds_is_found_through_a_quarter_of_it(document: NeedlePrompt) -> None:
    assert all(recall(document, pool="off"))
    assert all(recall(document, policy="qk-zmax", share=0.05))


def test_mass_finds_more_than_chance(document: NeedlePrompt) -> None:
    """Not all: in this model a single head finds a code, and has one vote of many. Controls find 4 at most."""
    assert sum(recall(document, policy="qk")) >= 5


QUARTER: dict[str, Any] = {"pool": 512, "n_ctx": 2176}  # of the short text


@pytest.mark.parametrize("policy", ["qk", "qk-zmax"])
@pytest.mark.parametrize("cache", ["q8_0", "q4_0"])
def test_quantised_keys_are_found_as_well(short: NeedlePrompt, cache: str, policy: str) -> None:
    assert all(recall(short, **QUARTER, policy=policy, type_k=cache, type_v=cache))


@pytest.mark.parametrize(
    "options",
    [
        {"qk_summary": "exact"},
        {
            "qk_summary": "minmax",
            "tau": 4,
        },  # a bound: asked more often, it takes the code away before all of it is told
        {"qk_query": "question"},
        {"chunk": 16},
    ],
    ids=str,
)
def test_other_ways_of_zmax_find_them_too(short: NeedlePrompt, options: dict[str, Any]) -> None:
    assert all(recall(short, **QUARTER, policy="qk-zmax", **options))


def test_the_scores_find_them_in_the_short_text_too(short: NeedlePrompt) -> None:
    """With two blocks for what a question needs: no other order finds more than what lies in its window."""
    for policy in ("lru", shuffled(1), Given(oldest)):
        assert sum(recall(short, **QUARTER, policy=policy, tau=64)) <= 1


def test_controls_find_what_lies_in_their_window_and_by_chance(document: NeedlePrompt) -> None:
    """The pool that forgets, and scores that mean nothing: it is the scores that find the codes."""
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, "n_ctx": 4224, "policy": "lru"}) as kv:
        spans = positions(kv, document)
        found = answer_all(kv, document, lambda _: None).found(document.needles)
        end = kv.n_tokens
    seen = [start < 64 or stop > end - 1024 for start, stop in spans]
    assert not any(f and not s for f, s in zip(found, seen, strict=True))
    assert sum(seen) <= 3
    assert sum(recall(document, policy=shuffled(1))) <= 4


def test_a_question_brings_back_the_chunk_of_its_code(document: NeedlePrompt) -> None:
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, "n_ctx": 4224, "policy": "qk-zmax"}) as kv:
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
    """Bit for bit, and without a reselect: there is nothing to choose."""
    want = opened(name, policy="lru")
    wanted = []
    read(want, 700)
    for end in range(701, 780):
        feed(want, end)
        wanted.append(want.logits())
    for policy in ("qk", "qk-cos", shuffled(0)):
        kv = opened(name, policy=policy, tau=8)
        events = read(kv, 700)
        for end, logits in zip(range(701, 780), wanted, strict=True):
            events += feed(kv, end)
            assert np.array_equal(kv.logits(), logits), f"{policy} at {end}"
        assert reselects(events) == []
        assert [e for e in events if isinstance(e, Paged)] == []
        assert kv.stats().reselects == 0
        assert kv.reselect() is None
        if isinstance(policy, Given):
            assert policy.views == []


@pytest.mark.parametrize("again", [0, 0.03])
@pytest.mark.parametrize("share", [0, 0.05])
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
    assert len(reselects(runs[0], "prefill")) > 3
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


def test_pins_hold_with_qk(opened: Open) -> None:
    kv = opened(tau=16, pins=((200, 201),))
    read(kv, 2000)
    n = 0
    while kv.n_tokens < 5000:
        n += len(reselects(feed(kv, kv.n_tokens + 100), "decode"))
        assert not {0, 3} & set(out(kv))
    assert n > 180
    check_residency(kv)


def test_too_many_pins_raise_the_pool_or_are_refused(opened: Open) -> None:
    kv = opened(pool=768, n_batch=0, pins=((0, 64 * 12),))
    assert any("768 tokens is too small: raised to 1280" in text for text in kv.warnings)
    assert kv.n_pool == 1280
    read(kv, 4000)
    feed(kv, 4200)
    assert not set(range(12)) & set(out(kv))
    check_residency(kv)

    kv = opened(n_batch=0, tau=16)
    read(kv, 3000)
    before = (kv.pager.ledger.pins.copy(), kv.residency().state.tolist(), kv.n_batch)
    with pytest.raises(PoolError, match=r"pinning 64:2000 makes 31 pinned chunks, for which a pool of \d+"):
        kv.pin(64, 2000)
    assert (kv.pager.ledger.pins, kv.residency().state.tolist(), kv.n_batch) == before
    feed(kv, 3100)
    check_residency(kv)


def test_batches_shrink_with_the_pins(opened: Open) -> None:
    """A batch of any size from n_batch finds room, whatever is pinned, down to one chunk."""
    kv = opened(n_batch=0)
    assert kv.n_batch == 256  # a quarter of the pool
    assert kv.pager.n_batch == 512  # 16 blocks: sink, tail of 4, 2 to spare, 1 since a batch may begin within a chunk
    sizes = []
    try:
        for i in range(100):
            kv.pin(640 * i + 64, 640 * i + 65)
            sizes.append(kv.n_batch)
    except PoolError:
        pass
    assert sizes == [256, 256, 256, 256, 192, 128, 64]
    events = read(kv, 3000)
    done = [0, *(e.done for e in events if type(e).__name__ == "Prefill")]
    assert max(b - a for a, b in itertools.pairwise(done)) == 64
    feed(kv, 5001, 63)
    check_residency(kv)
    kv.unpin(0, 16384)
    assert kv.n_batch == 256
    read(kv, 8000)
    check_residency(kv)


#
# the end of a prompt is run again
#


class Decoded:
    """Counts what a context decodes, and keeps which chunk lay in which block before it did."""

    def __init__(self, kv: KVFlash, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int]] = []  # position, tokens
        self.blocks: list[npt.NDArray[np.int32]] = []
        decode = kv.ctx.decode

        def call(tokens: Any, pos: int, outputs: int) -> None:
            self.calls.append((pos, len(tokens)))
            self.blocks.append(kv.ctx.blocks()[0])
            decode(tokens, pos, outputs)

        monkeypatch.setattr(kv.ctx, "decode", call)

    @property
    def n_tokens(self) -> int:
        return sum(n for _, n in self.calls)


def place_by_hand(kv: KVFlash, blocks: npt.NDArray[np.int32]) -> None:
    """Make the pool hold these chunks in these blocks, by the calls of the level below."""
    for chunk in kv.ctx.blocks()[0]:
        if chunk >= 0:
            kv.ctx.drop(int(chunk))
    for block, chunk in enumerate(blocks):
        if chunk >= 0:
            kv.ctx.page_in(int(chunk), kv.pager.records.get(int(chunk)), block)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("n_batch", "replay"), [(64, 64), (256, 128), (64, 32)])
def test_the_end_is_run_as_on_a_pool_that_was_chosen_before(
    opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, n_batch: int, replay: int
) -> None:
    """Bit for bit where no state is kept beside the chunks: the first run of the end leaves nothing behind."""
    start, end = 1472, 1472 + replay
    kv = opened(name, policy=Given(oldest), n_batch=n_batch, replay=replay, prefill_reselect=False)
    seen = Decoded(kv, monkeypatch)
    events = read(kv, end)
    (chosen,) = reselects(events)
    assert (chosen.reason, chosen.pos) == ("question", end)
    assert {1, 2, 3} <= set(chosen.page_ins)
    assert seen.calls[-1] == (start, replay)
    assert seen.n_tokens == end + replay
    first = next(i for i, (pos, _) in enumerate(seen.calls) if pos == start)
    assert [n for _, n in seen.calls[first:-1]] == [replay]  # "last": the queries of one token

    control = opened(name, policy="lru", n_batch=n_batch)
    for pos, n in seen.calls[:first]:
        control.decode(TOKENS[pos : pos + n])
    blocks = seen.blocks[-1]
    place_by_hand(control, blocks)
    assert np.array_equal(control.ctx.blocks()[0], blocks)
    control.ctx.decode(TOKENS[start:end], start, 1)
    same, want = kv.logits(), control.ctx.logits()
    if name == "gemma4":  # the sliding window may lie in other cells, and sums run in another order
        assert np.abs(same - want).max() < 0.02
    else:
        assert np.array_equal(same, want)
    kv.check_integrity()

    other = opened(name, policy="lru", n_batch=n_batch)
    for pos, n in seen.calls[: first + 1]:
        other.decode(TOKENS[pos : pos + n])
    assert np.abs(other.logits() - want).max() > 0.05, "and what is resident does matter"


def test_the_end_by_public_calls(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page the same chunks, go back, decode the end: the same logits."""
    kv, control = opened(policy=Given(oldest), prefill_reselect=False), opened(policy="lru")
    seen = Decoded(kv, monkeypatch)
    (chosen,) = reselects(read(kv, 2560))
    for pos, n in seen.calls[:-1]:
        control.decode(TOKENS[pos : pos + n])
    for chunk in chosen.drops:
        control.page_out(chunk)
    for chunk in chosen.page_ins:
        control.page_in(chunk)
    control.rollback(2496)
    control.decode(TOKENS[2496:2560])
    assert np.array_equal(kv.logits(), control.logits())
    assert out(kv) == out(control)


@pytest.mark.parametrize("name", MODELS)
def test_without_replay_nothing_is_run_again(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kv = opened(name, replay=0, policy=Given(oldest))
    seen = Decoded(kv, monkeypatch)
    events = read(kv, 2500)
    assert len(reselects(events, "question")) == 1
    assert seen.n_tokens == 2500
    assert [pos for pos, _ in seen.calls] == sorted(pos for pos, _ in seen.calls)
    kv.check_integrity()


def test_what_was_resident_is_not_run_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the choice brings nothing in, the first run was right."""
    newest = Given(lambda view: np.arange(len(view.candidates), dtype=np.float64))
    kv = opened(policy=newest, prefill_reselect=False)
    seen = Decoded(kv, monkeypatch)
    (chosen,) = reselects(read(kv, 2500), "question")
    assert chosen.page_ins == ()
    assert seen.n_tokens == 2500


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 2, 10, 64, 65])
def test_short_prompts_after_a_long_text(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, n: int) -> None:
    """A replay longer than the prompt runs all of it again, and no more."""
    kv = opened(name, replay=64, policy=shuffled(2))
    read(kv, 1300)
    seen = Decoded(kv, monkeypatch)
    events = read(kv, 1300 + n)
    assert kv.n_tokens == 1300 + n
    assert len(reselects(events, "question")) == 1
    assert seen.n_tokens == n + min(n, 64)
    check_residency(kv)
    kv.decode(TOKENS[kv.n_tokens : kv.n_tokens + 1])
    assert np.all(np.isfinite(kv.logits()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {"replay": 1 << 20, "n_batch": 0, "pool": 2048},
        {"replay": 1 << 20, "n_batch": 1024, "n_ubatch": 64, "tail": 16, "pool": 3072},
        {"replay": 1, "qk_query": "last:1"},
        {"replay": 64, "qk_query": "question"},
        {"replay": 0, "qk_query": "question"},
        {"replay": 2, "qk_query": "last:999"},
    ],
    ids=str,
)
def test_replay_of_any_length(opened: Open, name: str, options: dict[str, Any]) -> None:
    kv = opened(name, **options)
    end = options.get("pool", 1024) + 500
    events = read(kv, end)
    assert len(reselects(events, "question")) == 1
    assert kv.n_tokens == end
    feed(kv, end + 100)
    check_residency(kv)


@pytest.mark.parametrize("name", ["qwen35", "gemma4"])
def test_partial_state_goes_back(tiny_model: Callable[[str], Model], name: str) -> None:
    """What no chunk holds, saved and restored: going on from there gives the same."""
    pool = PoolParams(n_pool=1024)
    with Context(tiny_model(name), n_ctx=4096, n_batch=64, n_ubatch=64, pool=pool) as ctx:
        for pos in range(0, 640, 64):
            ctx.decode(TOKENS[pos : pos + 64], pos)
        state = ctx.save_partial()
        assert len(state) > 1000
        wanted = []
        for pos in range(640, 700):
            ctx.decode(TOKENS[pos : pos + 1], pos)
            wanted.append(ctx.logits())
        for _ in range(2):
            ctx.restore_partial(state, 640)
            got = []
            for pos in range(640, 700):
                ctx.decode(TOKENS[pos : pos + 1], pos)
                got.append(ctx.logits())
            assert np.array_equal(got, wanted)
        assert ctx.blocks()[1].sum() == 700
        for bad in (state[:-1], state[:10], bytes(len(state)), state + b"!"):
            with pytest.raises((NativeError, RecordError), match=r"the state cannot be restored|this is no state of"):
                ctx.restore_partial(bad, 640)
            ctx.restore_partial(state, 640)


def test_what_is_out_comes_back_for_a_shorter_text(opened: Open, document: NeedlePrompt) -> None:
    """A conversation that goes back: what is left would fit, but was out for what was asked of the longer text."""
    kv = opened("needle", n_ctx=8192, pool=2048, n_batch=0)
    text = kv.tokenize(document.text)
    kept = [n for n in document.needles if document.text.index(n.statement) < 0.35 * len(document.text)]
    assert len(kept) >= 2
    n_kept = 28 * 64
    for needle in kept:
        kv.clear()
        late = document.needles[-1]
        list(kv.generate(np.append(text, kv.tokenize(late.question, add_special=False)), max_tokens=8, sampling=GREEDY))
        kv.rollback(n_kept)
        assert np.count_nonzero(kv.residency().state == State.OUT) > 4
        question = kv.tokenize(needle.question, add_special=False)
        events = list(kv.generate(question, max_tokens=8, sampling=GREEDY, append=True))
        assert needle.answer in "".join(e.text for e in events if isinstance(e, Token))
        assert kv.pager.ledger.n_resident == kv.pager.ledger.n_chunks, "there is room for all"


def test_partial_state_of_a_plain_cache_is_empty(tiny_model: Callable[[str], Model]) -> None:
    with Context(tiny_model("qwen3"), n_ctx=4096, n_batch=64, n_ubatch=64, pool=PoolParams(n_pool=1024)) as ctx:
        ctx.decode(TOKENS[:64], 0)
        assert ctx.save_partial() == b""


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_at_the_end_of_a_prompt(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    """Wherever Ctrl-C comes, the sequence stands, at the beginning of the part that is run again or at its end."""
    for nth in range(1, 4):
        kv = opened(name, policy=shuffled(1))
        read(kv, 1472)
        decode, n = kv.ctx.decode, 0

        def call(*args: Any, decode: Any = decode, nth: int = nth) -> None:
            nonlocal n
            n += 1
            if n == nth and when == "before":
                raise KeyboardInterrupt
            decode(*args)
            if n == nth and when == "after":
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(kv.ctx, "decode", call)
            if nth < 3:
                with pytest.raises(KeyboardInterrupt):
                    read(kv, 1536)
                assert kv.n_tokens == 1472
                kv.check_integrity()
            else:
                read(kv, 1536)  # two calls: the first time, and again
        feed(kv, 1600)
        check_residency(kv)


#
# when
#


def due(start: int, end: int, tau: int) -> list[tuple[int, int]]:
    """When scoring begins and is applied, one token at a time from `start`, where the pool was just chosen: with the
    queries of a token in the step after it, and a quarter of tau after the token.
    """
    res, asked = [], start + tau
    while (applied := asked + max(1, tau // 4)) <= end:
        res.append((asked, applied))
        asked = max(asked + tau, applied + 1)
    return res


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
    kv._selector.cancel()  # type: ignore[union-attr]  # one more may be under way
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
    """Of the last tokens of a prompt as many as it asks for, with all keys and the room; later one token's."""
    scorer = Given(oldest)
    scorer.query = query
    kv = opened(policy=scorer, tau=16, prefill_reselect=False)
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
    kv: Any = types.SimpleNamespace(
        ctx=types.SimpleNamespace(q_tap=n_tap), options=types.SimpleNamespace(n_ubatch=n_ubatch)
    )
    parts = KVFlash._asking(kv, TOKENS[:n], n_asking)
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
        read(opened(policy=scorer, prefill_reselect=False, **more), 2000)
        seen.append(scorer.views[0].queries)
    assert len(seen[0]) == n
    for mine, want in zip(*seen, strict=True):
        for a, b in zip(mine, want, strict=True):
            # in other batches another chunk leaves first; another token's are further off than their largest
            assert np.abs(a - b).max() < 0.3 * np.abs(b).max()


@pytest.mark.parametrize("query", ["last", "last:2", "last:9"])
def test_a_scorer_that_takes_over_is_given_as_many_as_it_asks_for(opened: Open, query: str) -> None:
    """Fewer than the tap keeps, or more."""
    kv, scorer = opened(), Given(oldest)
    scorer.query = query
    assert kv.ctx.q_tap == 4
    kv.use(scorer)
    read(kv, 2000)
    assert len(scorer.views[-1].queries) == n_queries(query)


@pytest.mark.parametrize("device", ["cpu", "beside"])
@pytest.mark.parametrize("n_batch", [64, 512])
def test_prompts_are_scored_after_each_batch(
    opened: Open, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str, n_batch: int
) -> None:
    """By its own queries on a CPU, which is done with it by then, and otherwise by those of the batch before it: what is
    chosen is there for the next one.
    """
    if device == "beside":
        request.getfixturevalue("beside")
    scorer = Given(lambda v: -(np.arange(len(v.candidates)) ** 2.0))
    kv = opened(policy=scorer, n_batch=n_batch)
    decode, wanted = kv.ctx.decode, {}

    def call(tokens: Any, pos: int, outputs: int) -> None:
        decode(tokens, pos, outputs)
        wanted[pos + len(tokens)] = kv.ctx.queries()

    monkeypatch.setattr(kv.ctx, "decode", call)
    end = 1664 + 3 * n_batch
    events = reselects(read(kv, end + 1), "prefill")
    # the first batch that drops a chunk is the first whose queries are asked for
    first, lag = n_batch * (1024 // n_batch + 1), n_batch if device == "beside" else 0
    assert [e.pos for e in events] == [at for at in wanted if first + lag <= at < end - 63 or at == end + 1 - 64]
    views = scorer.views[: len(events)]
    assert [len(v.tokens) for v in views] == [e.pos for e in events]
    ends = sorted(wanted)
    for view in views:
        assert len(view.queries) == 1
        asked = ends[ends.index(len(view.tokens)) - (device == "beside")]
        for mine, want in zip(view.queries[0], wanted[asked], strict=True):
            assert np.array_equal(mine, want)
    for view, event in zip(views, events, strict=True):
        n, n_known = len(view.candidates), max(np.flatnonzero(view.candidates)) + 1
        assert n == -(-len(view.tokens) // 64)
        assert np.flatnonzero(view.candidates).tolist() == list(range(1, n_known))
        assert n_known == min(n - 4, view.n_whole)
        assert len(event.scores) == n
        assert event.scores[1:n_known] == tuple(-float(i * i) for i in range(1, n_known))
        assert set(event.scores[n_known : n - 4]) <= {np.median(event.scores[1:n_known])}  # neither hot nor cold
        assert set(event.scores[n - 4 :]) == {None}
        assert len(event.page_ins) <= len(event.drops)
    assert out(kv)[0] > 5


@pytest.mark.parametrize("under_way", [2016, 2017])
@pytest.mark.parametrize(
    ("device", "again", "lag"), [("cpu", 0.03, 0), ("cpu", 0, 0), ("beside", 0.03, 0), ("beside", 0, 1)]
)
def test_another_scorer_takes_over_by_hand(
    opened: Open, request: pytest.FixtureRequest, under_way: int, device: str, again: float, lag: int
) -> None:
    """What it needs is made of the records that are there, and it is asked from then on: when is its own. Within the token where that
    may have to be decoded again, else beside a device.
    """
    if device == "beside":
        request.getfixturevalue("beside")
    scorer = Given(oldest)
    kv = opened(policy=scorer, tau=16, again=again)
    read(kv, 2000)
    feed(kv, under_way)  # its queries were asked for, or the scoring has begun
    kv.use(Qk())
    assert kv.policy == "qk"
    n = len(scorer.views)
    events = reselects(feed(kv, 2100))
    assert events[0].pos == under_way + 16 + lag
    assert len(scorer.views) == n
    assert kv.stats().summary_bytes > 0
    check_residency(kv)
    kv.use(scorer)
    assert kv.stats().summary_bytes == 0
    # without a summary it may be slow, and goes on beside decode: on a CPU, which it takes time from, for longer
    assert reselects(feed(kv, 2200))[0].pos == 2100 + 16 + (4 if device == "cpu" else 1)
    assert len(scorer.views) > n
    for other in (opened(policy="lru"), opened(pool="off")):
        with pytest.raises(UsageError, match="has no scorer to replace"):
            other.use(Qk())


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
            assert np.all(where.state[list(event.drops)] == State.OUT)
            assert np.all(where.state[list(event.page_ins)] == State.OUT)  # copied beside the next step
            kv.check_integrity()
            assert np.all(kv.residency().state[list(event.page_ins)] == State.RESIDENT)
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
    resident = [i for i in rated if where.state[i] == State.RESIDENT]
    gone = [i for i in rated if where.state[i] == State.OUT]
    assert min(where.score[resident]) >= max(where.score[gone])
    assert len(resident) >= 9  # 16 blocks: sink, tail of 4, one free, and one that could be free
    assert len(resident) + len(gone) == len(rated), "by hand, all of it is done at once"


@pytest.mark.parametrize("policy", ["qk", "qk-zmax", "qk-cos"])
def test_on_a_cpu_the_pool_changes_at_the_token_that_was_asked(opened: Open, policy: str) -> None:
    """Every tau tokens, by the queries of the token just decoded, and nothing is under way after it. Once: what comes after a token
    was decoded again is tested in test_again.py.
    """
    kv = opened(policy=policy, tau=8, again=0)
    read(kv, 2000)
    n_in = 0
    for end in range(2001, 2100):
        events = reselects(feed(kv, end))
        assert [e.pos for e in events] == ([end] if (end - 2000) % 8 == 0 else [])
        assert not kv.pager.in_motion
        for event in events:
            where = kv.residency()
            assert np.all(where.state[list(event.drops)] == State.OUT)
            assert np.all(where.state[list(event.page_ins)] == State.RESIDENT)
            n_in += len(event.page_ins)
            check_residency(kv)
    assert n_in > 10


@pytest.mark.parametrize("device", ["cpu", "beside"])
@pytest.mark.parametrize("swaps", [1, 3, None])
def test_few_chunks_come_back_while_decoding(
    opened: Open, request: pytest.FixtureRequest, device: str, swaps: int | None
) -> None:
    """At most as many as `swaps`, with scores that want all others in; a prompt, and who asks by hand,
    has the best there are.
    """
    if device == "beside":
        request.getfixturevalue("beside")
    scorer = Given(other_ones)
    scorer.summary = "mean"
    kv = opened(policy=scorer, chunk=16, **({} if swaps is None else {"swaps": swaps}))
    events = reselects(read(kv, 4000))
    assert max(len(e.page_ins) for e in events) > 20
    moved = [(len(e.page_ins), len(e.drops)) for e in reselects(feed(kv, 4200), "decode")]
    assert len(moved) >= 20
    assert {n for n, _ in moved} == {swaps or kv.options.swaps}
    assert all(n_in - 1 <= n_out <= n_in + 1 for n_in, n_out in moved)
    last = kv.reselect()
    assert last is not None
    assert len(last.page_ins) > 20
    check_residency(kv, 16)


def test_the_share_of_what_is_no_candidate_is_known(opened: Open) -> None:
    """A scorer is told how many chunks have a summary, and the scales of this model, at the end of a prompt and later."""
    scorer = shuffled(0)
    scorer.summary = "mean"
    kv = opened(policy=scorer, tau=4)
    read(kv, 2000)
    feed(kv, 2100)
    assert len(scorer.views) > 20
    for view in scorer.views:
        assert view.summaries is not None
        assert np.allclose(view.scales, 1 / 8)
        assert view.n_whole in {len(view.tokens) // 64 - 1, len(view.tokens) // 64}
        assert len(view.summaries) >= view.n_whole
        assert not view.candidates[view.n_whole :].any()
    assert scorer.views[-1].n_whole == 2100 // 64


@pytest.mark.parametrize("policy", ["qk", "qk-zmax"])
def test_what_was_scored_and_is_no_candidate_now_has_no_score(opened: Open, policy: str) -> None:
    """Pinned in between: what is left of its score is nobody's."""
    kv = opened(policy=policy, tau=4)
    read(kv, 2000)
    feed(kv, 2010)
    scored = kv.residency().score
    chunk = next(c for c in range(1, 20) if c not in out(kv) and not np.isnan(scored[c]))
    kv.pin(64 * chunk, 64 * chunk + 1)
    for event in reselects(feed(kv, 2020)):
        assert {i for i, s in enumerate(event.scores) if s is None} == {
            0,
            chunk,
            *range(len(event.scores) - 4, len(event.scores)),
        }


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


def test_a_costly_scorer_is_asked_less_often(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of powers of two, so that it takes no more than its share; without one, every tau tokens. Times are given."""
    step, scored = Schedule.step, Schedule.scored
    monkeypatch.setattr(Schedule, "step", lambda self, n, _s: step(self, n, n * 0.001))
    monkeypatch.setattr(Schedule, "scored", lambda self, *_: scored(self, 0.02, 0.0))
    kv = opened(policy=Given(oldest), tau=16, share=0.2)
    read(kv, 1300)
    at = [e.pos for e in reselects(feed(kv, 2100))]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert gaps
    assert min(gaps) > 16
    interval = kv._selector.schedule.interval  # type: ignore[union-attr]
    assert interval % 16 == 0
    assert (interval // 16).bit_count() == 1
    kv = opened(policy=Given(oldest), tau=16, share=0)
    read(kv, 1300)
    at = [e.pos for e in reselects(feed(kv, 1400))]
    assert {b - a for a, b in itertools.pairwise(at)} == {16}


def test_lru_is_never_asked(opened: Open) -> None:
    kv = opened(policy="lru", tau=1)
    events = read(kv, 2000) + feed(kv, 2100)
    assert reselects(events) == []
    assert kv.reselect() is None
    assert kv.queries() == []
    assert kv.stats().summary_bytes == 0


def test_reselect_by_hand(opened: Open) -> None:
    kv = opened(tau=1 << 20, policy="qk-zmax")  # whose scores are of now, and not of what was before
    read(kv, 2000)
    first = kv.reselect()
    assert first is not None
    assert first.page_ins
    assert np.all(kv.residency().state[list(first.page_ins)] == State.RESIDENT), "at once"
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


def test_reselect_where_nothing_is_written(opened: Open) -> None:
    kv = opened()
    assert kv.reselect() is None
    read(kv, 2000)
    kv.clear()
    assert kv.reselect() is None


def test_decode_tells_what_moved(opened: Open) -> None:
    kv = opened(policy="lru")
    assert kv.decode(TOKENS[:64]) == []
    events = feed(kv, 2048, 64)
    assert {type(e) for e in events} == {Paged}
    assert [c for e in events if isinstance(e, Paged) for c in e.drops] == out(kv)


#
# scorers that fail
#


def boom(_view: View) -> Scores:
    msg = "no such luck"
    raise ValueError(msg)


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


def test_qk_finds_the_codes_after_a_scorer_failed(opened: Open, short: NeedlePrompt) -> None:
    kv = opened("needle", policy=Given(boom), n_batch=128, n_ctx=4224)
    answers = answer_all(kv, short, lambda _: None)
    assert kv.policy == "qk"
    assert all(answers.found(short.needles))
    check_residency(kv)


def test_a_scorer_that_fails_while_decoding(opened: Open) -> None:
    """One warning, among the events of the step; the run goes on, and is scored every 16 tokens, within them from then on."""
    n = 0

    def later(view: View) -> Scores:
        nonlocal n
        n += 1
        return boom(view) if n > 3 else oldest(view)

    kv = opened(policy=Given(later), tau=16, prefill_reselect=False, again=0)
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


def test_infinite_scores_are_scores(opened: Open) -> None:
    kv = opened(policy=Given(lambda v: np.where(np.arange(len(v.candidates)) < 4, np.inf, -np.inf)))
    read(kv, 3000)
    assert kv.policy == "given"
    assert not {1, 2, 3} & set(out(kv))
    check_residency(kv)


def test_ctrl_c_while_a_scorer_runs(opened: Open) -> None:
    """The wait for it ends; the sequence stands, and the next scoring is one of its own."""
    go = threading.Event()
    cut = False

    def slow(view: View) -> Scores:
        nonlocal cut
        if cut:
            cut = False
            _thread.interrupt_main(signal.SIGINT)
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


def test_interrupted_scorer_ends_a_generation(opened: Open) -> None:
    """Ctrl-C of the command line: a flag, which the engine sees in its next decode."""
    kv = opened("needle", policy=Given(lambda v: (lib.kvf_interrupt(True), oldest(v))[1]), tau=16)
    try:
        events = list(kv.generate(TOKENS[:2000] % 500, max_tokens=8))
    finally:
        lib.kvf_interrupt(False)
    assert isinstance(events[-1], Done)
    assert events[-1].reason == "interrupted"
    kv.check_integrity()


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


@pytest.mark.parametrize("kind", ["centroid:1", "centroid:16", "mean", "direction", "minmax", "exact"])
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

    with pytest.raises(UsageError, match="'median' is no summary of keys"):
        opened(policy=Asking(oldest))


def registered(monkeypatch: pytest.MonkeyPatch, **made: Any) -> None:
    """Entry points of a package that is not there."""
    module = types.ModuleType("third_party")
    for name, value in made.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "third_party", module)
    points = {name: EntryPoint(name, f"third_party:{name}", registry.GROUP) for name in made}
    points["gone"] = EntryPoint("gone", "no_such_package:make", registry.GROUP)
    points["qk"] = EntryPoint("qk", "no_such_package:make", registry.GROUP)
    monkeypatch.setattr(registry, "registered", lambda: points)


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
    with pytest.raises(UsageError, match=r"policy .*'other'.* mine"):
        opened(policy="other")


#
# between the beginning of a scoring and its end
#


def other_ones(view: View) -> Scores:
    """Random scores, the same ones for the same text."""
    return np.random.default_rng(len(view.tokens)).random(len(view.candidates))


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
    monkeypatch.setattr(pager, "FLIGHT_BYTES", 1)  # one chunk a step
    scorer = Held()
    kv = opened(policy=scorer, tau=16, prefill_reselect=False, replay=0)
    assert len(reselects(read(kv, START))) == 1
    assert reselects(feed(kv, PHASES[phase])) == [] or phase == "in flight"
    selector = kv._selector
    assert selector is not None
    assert (selector._ticket is not None, selector._job is not None) == (phase == "asked", phase == "scored")
    assert np.count_nonzero(kv.residency().state == State.IN_FLIGHT) == (phase == "in flight")
    assert (len(kv.pager.todo[1]) >= 2) == (phase == "in flight")
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


@pytest.mark.parametrize("phase", ["asked", "scored"])
@pytest.mark.parametrize("change", ["rollback by one", "rollback into what is out", "rollback to nothing", "clear"])
def test_what_comes_after_a_change_is_what_comes_without_a_scoring(
    opened: Open, monkeypatch: pytest.MonkeyPatch, change: str, phase: str
) -> None:
    """Logits after a cancelled scoring are those of a run in which none was begun."""
    act, _ = CHANGES[change]
    kv, _ = begun(opened, monkeypatch, phase)
    control = opened(policy=Given(other_ones), tau=1 << 20, prefill_reselect=False, replay=0)
    read(control, START)
    feed(control, kv.n_tokens)
    for one in (kv, control):
        act(one)
    for _ in range(15):
        for one in (kv, control):
            feed(one, one.n_tokens + 1)
        assert np.array_equal(kv.logits(), control.logits())
    assert out(kv) == out(control)


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
    """Between its batches something is always under way, with no step of an answer where it would be due."""
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


@pytest.mark.parametrize("phase", ["asked", "in flight"])
def test_close_while_copies_are_under_way(opened: Open, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    kv, _ = begun(opened, monkeypatch, phase)
    kv.close()
    kv.close()
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
        monkeypatch.setattr(pager, "FLIGHT_BYTES", flight)
        kv = opened(policy=Given(other_ones), tau=64, prefill_reselect=False, replay=0)
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


def test_chunks_on_their_way_in_are_scored(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is not done when the next scoring begins: they compete as all others do, and none is hot unasked."""
    monkeypatch.setattr(pager, "FLIGHT_BYTES", 1)
    kv = opened(policy=Given(other_ones), tau=4, prefill_reselect=False)
    read(kv, 1300)
    n = 0
    for _ in range(20):
        n += bool(kv.pager.todo[1])
        for event in reselects(feed(kv, kv.n_tokens + 1)):
            last = len(event.scores)
            assert {i for i, s in enumerate(event.scores) if s is None} == {0, *range(last - 4, last)}
    assert n >= 5
    kv.pager.settle()
    where = kv.residency()
    assert not np.any(np.isnan(where.score[1:-4]))


def as_it_was(control: KVFlash, blocks: npt.NDArray[np.int32]) -> None:
    """Make the pool hold these chunks in these blocks, by the calls of the level below."""
    have = control.ctx.blocks()[0]
    differ = np.flatnonzero(have != blocks)
    for chunk in have[differ]:
        if chunk >= 0:
            control.ctx.drop(int(chunk))
    for block in differ:
        if blocks[block] >= 0:
            control.ctx.page_in(int(blocks[block]), control.pager.records.get(int(blocks[block])), int(block))


def same_by_hand(kv: KVFlash, control: KVFlash, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """The next n tokens have, to the bit, the logits of a run whose pool is made what it was at every step by hand."""
    with monkeypatch.context() as patch:
        seen = Decoded(kv, patch)
        for _ in range(n):
            pos = kv.n_tokens
            feed(kv, pos + 1)
            want = seen.blocks[-1]
            as_it_was(control, want)
            control.ctx.decode(TOKENS[pos : pos + 1], pos, 1)
            assert np.array_equal(kv.logits(), control.ctx.logits()), pos


def test_a_chunk_on_its_way_in_is_seen_from_the_next_step_on(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly: each step attends to what was resident when it was submitted, and to nothing else."""
    (kv, _), (control, _) = begun(opened, monkeypatch, "in flight"), begun(opened, monkeypatch, "in flight")
    control.pager.settle()
    same_by_hand(kv, control, monkeypatch, 10)
    check_residency(kv)


FLIGHT_STEPS = [
    "ctx.commit",
    "ctx.begin_page_in",
    "ctx.drop",
    "ctx.decode",
    "ledger.begin_page_in",
    "ledger.commit_page_in",
    "ledger.drop",
    "ledger.write",
    "store.get",
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", FLIGHT_STEPS)
def test_a_spread_plan_that_is_cut_off(opened: Open, monkeypatch: pytest.MonkeyPatch, step: str, when: str) -> None:
    """Wherever Ctrl-C comes, the sequence stands before or after the step, and goes on exactly; it is scored again."""
    (kv, _), (control, _) = begun(opened, monkeypatch, "in flight"), begun(opened, monkeypatch, "in flight")
    control.pager.settle()
    if "commit" in step:  # they land at the next step
        same_by_hand(kv, control, monkeypatch, 1)
    start = kv.n_tokens
    with monkeypatch.context() as patch:
        cut_off(*place(kv, step), when, patch)
        with pytest.raises(KeyboardInterrupt):
            feed(kv, start + 1)
    assert kv.n_tokens in {start, start + 1}
    if kv.n_tokens == start + 1:
        kv.rollback(start)
    kv.check_integrity()
    same_by_hand(kv, control, monkeypatch, 5)
    assert reselects(feed(kv, start + 50))
    check_residency(kv)


class CutWithin(CutAtLine):
    """The same, of the files that move chunks and score."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if Path(frame.f_code.co_filename).name not in {"selector.py", "pager.py"}:
            return None
        return super().__call__(frame, event, arg)


def test_cut_off_at_every_line_between_two_scorings(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C anywhere from one plan to the next: nothing is lost, and chunks are scored as before."""
    monkeypatch.setattr(pager, "FLIGHT_BYTES", 1)

    def fresh() -> KVFlash:
        kv = opened(policy=shuffled(0), tau=4, n_ctx=1 << 17, pool=256, chunk=16, n_batch=16, n_threads=1)
        feed(kv, 320, 16)
        return kv

    kv, lost, n = fresh(), [], 0
    while n < 3000:
        n += 1
        cut = CutWithin(n)
        sys.settrace(cut)
        try:
            feed(kv, kv.n_tokens + 8)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if cut.where is None:
            break
        try:
            kv.check_integrity()
            assert reselects(feed(kv, kv.n_tokens + 12)), "it is never scored again"
            kv.check_integrity()
            if kv.n_tokens > 1000:
                kv.rollback(320)
        except Exception as err:  # noqa: BLE001 (all of them are counted)
            lost.append(f"{cut.where}: {err!r}")
            kv = fresh()
    assert n > 150, "nothing was cut off"
    assert lost == []
    assert kv.pager.summaries is None


def test_a_spread_plan_leaves_a_block_for_the_chunk_that_begins(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes, with chunks that begin and are pinned meanwhile."""
    monkeypatch.setattr(pager, "FLIGHT_BYTES", 1)
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


#
# summaries
#


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
        with pytest.raises(HostMemoryError, match=r"no host memory for [\d.]+ MiB of key summaries: use --qk-summary"):
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

    def fails(self: Summaries, chunk: int, record: Any, threads: Any = None) -> None:
        nonlocal n
        n += 1
        if n == 1:
            raise MemoryError
        if threads:
            msg = "can't start new thread"
            raise RuntimeError(msg)
        put(self, chunk, record)

    with monkeypatch.context() as patch:
        patch.setattr(Summaries, "put", fails)
        patch.setattr(kv.pager._summariser, "_layer_threads", object())
        with pytest.raises(HostMemoryError, match=r"no host memory for [\d.]+ MiB of key summaries: use --qk-summary"):
            feed(kv, 1400)
        at = kv.n_tokens
        assert 1344 <= at < 1400
        assert len(reselects(feed(kv, 1415))) >= 2
        summarised(kv)
        assert n == 5  # once, and again with threads and without; then the next chunk, both ways
    check_residency(kv)
    assert kv.policy == "qk"
    assert len(kv.pager.summaries) == kv.n_tokens // 64  # type: ignore[arg-type]


def test_no_host_memory_for_another_slab(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 257th chunk needs one; half of it must not be left."""
    kv = opened(n_ctx=32768, chunk=16, pool=512, n_batch=256)
    data = np.resize(TOKENS, 6000)
    for pos in range(0, 4096, 128):
        kv.decode(data[pos : pos + 128])
    kv.pager.wait_stored()
    assert len(kv.pager.summaries) == 256  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(summary, "np", NoMemory())
        with pytest.raises(HostMemoryError, match="key summaries"):
            kv.decode(data[4096:4224])
        assert kv.n_tokens == 4096
    for pos in range(4096, 6000, 112):
        kv.decode(data[pos : pos + 112])
    assert kv.reselect() is not None
    check_residency(kv, 16)


def test_no_host_memory_for_the_summaries_of_qk_when_it_takes_over(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scorer fails, and there is no memory for its substitute either: an error of one sentence, and no loss."""
    kv = opened(policy=Given(boom), tau=1 << 20)
    feed(kv, 2000, 50)

    def none(_self: Summaries, _n: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Summaries, "reserve", none)
        with pytest.raises(HostMemoryError):
            kv.reselect()
        check_residency(kv)
    assert kv.reselect() is not None
    assert kv.policy == "qk"
    feed(kv, 2100)
    check_residency(kv)


def test_a_scorer_without_memory(opened: Open) -> None:
    """As any other failure: the scores are not worth the run."""

    def none(_view: View) -> Scores:
        raise MemoryError

    kv = opened(policy=Given(none), tau=16)
    events = read(kv, 2000)
    assert sum(isinstance(e, Warn) for e in events) == 1
    assert kv.policy == "qk"


def test_a_scorer_that_raises_an_error_of_this_package(opened: Open) -> None:
    def refuses(_view: View) -> Scores:
        msg = "queries have another shape"
        raise UsageError(msg)

    kv = opened(policy=Given(refuses), tau=16)
    events = read(kv, 2000)
    assert sum(isinstance(e, Warn) for e in events) == 1
    assert kv.policy == "qk"


def test_qk_scores_what_a_fresh_run_would(opened: Open) -> None:
    """The scores in an event are those of Qk on the records, whatever was evicted and brought back before; or what is left of the
    scores before them, if that is more.
    """
    kv = opened(tau=1 << 20)
    read(kv, 3000)
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


def test_tokens_of_a_generation_are_those_of_the_sequence(opened: Open, document: NeedlePrompt) -> None:
    scorer = Given(oldest)
    kv = opened("needle", policy=scorer, tau=16, n_batch=0)
    events = list(kv.generate(document.text, max_tokens=60, sampling=GREEDY))
    ids = [e.id for e in events if isinstance(e, Token)]
    assert kv.tokens.tolist() == [*kv.tokenize(document.text).tolist(), *ids[:-1]]
    assert scorer.views[-1].tokens.tolist() == kv.tokens.tolist()[: len(scorer.views[-1].tokens)]
