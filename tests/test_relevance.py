"""What a scorer does to a run: which chunks come back and when, what is run again, and what it may never do."""

import _thread
import dataclasses
import itertools
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from test_engine import GREEDY, NoMemory, check_residency, out, text_of

from pyllama_kvflash import Done, KVFlash, Paged, Reselect, Sampling, Token, View, Warn, registry
from pyllama_kvflash.demo import answer_all, ask, positions
from pyllama_kvflash.errors import HostMemoryError, NativeError, PoolError, UsageError
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import Context, Model, PoolParams, Summaries, summary
from pyllama_kvflash.native.lib import lib
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt
from pyllama_kvflash.policy import Qk, Schedule, State

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


@pytest.fixture
def opened(tiny_path: Callable[[str], Path]) -> Iterator[Open]:
    """Open a tiny model, or the needle model, as SMALL says unless told otherwise; closed after the test."""
    held: list[KVFlash] = []

    def open_(name: str = "qwen3", **options: Any) -> KVFlash:
        path = BUNDLED_MODEL if name == "needle" else tiny_path(name)
        held.append(KVFlash.from_file(path, **{**SMALL, **options}))
        return held[-1]

    yield open_
    for kv in held:
        kv.close()


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
    assert all(recall(document, policy="qk", share=0.05))


@pytest.mark.parametrize("cache", ["q8_0", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_quantised_keys_are_found_as_well(document: NeedlePrompt, cache: str) -> None:
    assert all(recall(document, type_k=cache, type_v=cache))


@pytest.mark.parametrize(
    "options", [{"qk_summary": "exact"}, {"qk_summary": "minmax"}, {"qk_query": "question"}, {"chunk": 16}], ids=str
)
def test_other_ways_of_qk_find_them_too(document: NeedlePrompt, options: dict[str, Any]) -> None:
    assert all(recall(document, **options))


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
    with KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, "n_ctx": 4224}) as kv:
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


@pytest.mark.parametrize("share", [0, 0.05])
def test_the_same_seed_gives_the_same_events(
    opened: Open, document: NeedlePrompt, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Of whatever kind, at the same positions. Times vary by a third: they are what `share` is measured by, and those of
    a machine that does other things as well would prove nothing.
    """
    step, scored = Schedule.step, Schedule.scored
    runs = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(Schedule, "step", lambda self, n, _s, r=rng: step(self, n, n * r.uniform(0.001, 0.0013)))
        monkeypatch.setattr(Schedule, "scored", lambda self, _s, r=rng: scored(self, r.uniform(0.0012, 0.00145)))
        kv = opened("needle", share=share, n_batch=0, tau=16)
        prompt = document.text + document.needles[2].question
        events = list(kv.generate(prompt, max_tokens=150, sampling=Sampling(temperature=0.8, seed=7)))
        runs.append([plain(e) for e in events])
    assert len(reselects(runs[0], "prefill")) > 3
    assert len(reselects(runs[0], "question")) == 1
    assert len(reselects(runs[0], "decode")) == (9 if share == 0 else 4)  # every 16 tokens, or every 32
    assert sum(bool(e.page_ins) for e in reselects(runs[0])) >= 3
    assert [type(e) for e in runs[0]] == [type(e) for e in runs[1]]
    assert runs[0] == runs[1]


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
    assert kv.n_batch == 512  # 16 blocks: sink, tail of 4, 2 to spare, 1 since a batch may begin within a chunk
    sizes = []
    try:
        for i in range(100):
            kv.pin(640 * i + 64, 640 * i + 65)
            sizes.append(kv.n_batch)
    except PoolError:
        pass
    assert sizes == [448, 384, 320, 256, 192, 128, 64]
    events = read(kv, 3000)
    done = [0, *(e.done for e in events if type(e).__name__ == "Prefill")]
    assert max(b - a for a, b in itertools.pairwise(done)) == 64
    feed(kv, 5001, 63)
    check_residency(kv)
    kv.unpin(0, 16384)
    assert kv.n_batch == 512
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
            kv.ctx.page_in(int(chunk), kv.pager.store.get(int(chunk)), block)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("n_batch", "replay"), [(64, 64), (256, 128), (64, 32)])
def test_the_end_is_run_as_on_a_pool_that_was_chosen_before(
    opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, n_batch: int, replay: int
) -> None:
    """Bit for bit where no state is kept beside the chunks: the first run of the end leaves nothing behind."""
    start, end = 2496, 2496 + replay
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
    kv = opened(policy=Given(lambda view: np.arange(len(view.candidates), dtype=np.float64)))
    seen = Decoded(kv, monkeypatch)
    (chosen,) = reselects(read(kv, 2500), "question")
    assert chosen.page_ins == ()
    assert seen.n_tokens == 2500


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 2, 10, 64, 65])
def test_short_prompts_after_a_long_text(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, n: int) -> None:
    """A replay longer than the prompt runs all of it again, and no more."""
    kv = opened(name, replay=64, policy=shuffled(2))
    read(kv, 2500)
    seen = Decoded(kv, monkeypatch)
    events = read(kv, 2500 + n)
    assert kv.n_tokens == 2500 + n
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
    events = read(kv, 5000)
    assert len(reselects(events, "question")) == 1
    assert kv.n_tokens == 5000
    feed(kv, 5100)
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
            if name == "gemma4":  # the window may lie in other cells
                assert np.abs(np.array(got) - np.array(wanted)).max() < 0.02
            else:
                assert np.array_equal(got, wanted)
        assert ctx.blocks()[1].sum() == 700
        for bad in (state[:-1], state[:10], bytes(len(state)), state + b"!"):
            with pytest.raises(NativeError, match="the state cannot be restored"):
                ctx.restore_partial(bad, 640)
            ctx.restore_partial(state, 640)


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
        read(kv, 2496)
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
                    read(kv, 2560)
                assert kv.n_tokens == 2496
                kv.check_integrity()
            else:
                read(kv, 2560)  # two calls: the first time, and again
        feed(kv, 2700)
        check_residency(kv)


#
# when
#


def test_scored_every_tau_tokens(opened: Open) -> None:
    """share=0: at fixed steps, with one token from the beginning of a scoring to its plan."""
    scorer = shuffled(0)
    kv = opened(policy=scorer, tau=16)
    read(kv, 2000)
    scorer.views.clear()
    events = reselects(feed(kv, 2100))
    assert [e.pos for e in events] == [2017, 2033, 2049, 2065, 2081, 2097]
    assert {e.reason for e in events} == {"decode"}
    assert [len(view.tokens) for view in scorer.views] == [2016, 2032, 2048, 2064, 2080, 2096]
    for view in scorer.views:
        assert np.array_equal(view.tokens, TOKENS[: len(view.tokens)])
        assert view.chunk == 64
        assert len(view.queries) == 1
        assert view.queries[0][0].shape == (4, 64)


@pytest.mark.parametrize(("query", "n"), [("last", 1), ("last:4", 4), ("last:64", 64), ("question", 64)])
def test_queries_that_a_scorer_is_given(opened: Open, query: str, n: int) -> None:
    """Of the last tokens of a prompt as many as it asks for, with all keys and the room; later the last token's."""
    scorer = Given(oldest)
    scorer.query = query
    kv = opened(policy=scorer, tau=16, prefill_reselect=False)
    (event,) = reselects(read(kv, 2000))
    (view,) = scorer.views
    assert event.reason == "question"
    assert len(view.queries) == n
    assert view.keys is not None
    assert view.room == 10  # 16 blocks: sink, tail of 4, one to be free
    scorer.views.clear()
    wanted = {}
    for end in range(2001, 2200):
        kv.decode(TOKENS[end - 1 : end])
        wanted[end] = kv.queries()
    assert len(scorer.views) >= 12
    for view in scorer.views:
        assert len(view.queries) == 1
        assert view.keys is None
        for mine, want in zip(view.queries[0], wanted[len(view.tokens)], strict=True):
            assert np.array_equal(mine, want)


def test_another_scorer_takes_over_by_hand(opened: Open) -> None:
    """What it needs is made of the records that are there, and it is asked from then on."""
    scorer = Given(oldest)
    kv = opened(policy=scorer, tau=16)
    read(kv, 2000)
    feed(kv, 2016)  # a scoring is under way
    kv.use(Qk())
    assert kv.policy == "qk"
    n = len(scorer.views)
    events = reselects(feed(kv, 2100))
    assert events[0].pos == 2016 + 17
    assert len(scorer.views) == n
    assert kv.stats().summary_bytes > 0
    check_residency(kv)
    kv.use(scorer)
    assert kv.stats().summary_bytes == 0
    feed(kv, 2200)
    assert len(scorer.views) > n
    for other in (opened(policy="lru"), opened(pool="off")):
        with pytest.raises(UsageError, match="has no scorer to replace"):
            other.use(Qk())


def test_a_reselect_tells_what_it_did(opened: Open) -> None:
    """Scores of the chunks that compete, None for the others; what it dropped is out and what it brought is in."""
    kv = opened(tau=16)
    read(kv, 2000)
    for event in reselects(feed(kv, 2200)):
        n = len(event.scores)
        assert n == -(-(event.pos - 1) // 64)  # as it was when the scoring began
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


def test_scoring_does_not_hold_up_decode(opened: Open) -> None:
    """While a scorer takes its time, tokens are decoded; only the step where its plan is due waits for it."""
    go, order = threading.Event(), []

    def slow(view: View) -> Scores:
        order.append("begun")
        assert go.wait(30)
        order.append("scored")
        return oldest(view)

    kv = opened(policy=Given(slow), tau=16, share=0.5)
    go.set()
    read(kv, 2000)
    kv._selector.schedule._costs.clear()  # type: ignore[union-attr]
    go.clear()
    order.clear()
    feed(kv, 2016)
    for end in range(2017, 2024):  # a lag of 8
        assert feed(kv, end) == [] or end == 2024
        order.append(str(end))
    go.set()
    (event,) = reselects(feed(kv, 2024))
    assert event.pos == 2024
    assert [x for x in order if x != "begun"] == [*map(str, range(2017, 2024)), "scored"]
    check_residency(kv)


def test_a_costly_scorer_is_asked_less_often(opened: Open) -> None:
    """In steps of powers of two, so that it takes no more than its share; without one, every tau tokens."""

    def costly(view: View) -> Scores:
        time.sleep(0.02)
        return oldest(view)

    kv = opened(policy=Given(costly), tau=16, share=0.2)
    read(kv, 2000)
    at = [e.pos for e in reselects(feed(kv, 4000))]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert gaps
    assert min(gaps) > 16
    interval = kv._selector.schedule.interval  # type: ignore[union-attr]
    assert interval % 16 == 0
    assert (interval // 16).bit_count() == 1
    kv = opened(policy=Given(costly), tau=16, share=0)
    read(kv, 2000)
    at = [e.pos for e in reselects(feed(kv, 2100))]
    assert {b - a for a, b in itertools.pairwise(at)} == {16}


def test_lru_is_never_asked(opened: Open) -> None:
    kv = opened(policy="lru", tau=1)
    events = read(kv, 2000) + feed(kv, 2100)
    assert reselects(events) == []
    assert kv.reselect() is None
    assert kv.queries() == []
    assert kv.stats().summary_bytes == 0


def test_reselect_by_hand(opened: Open) -> None:
    kv = opened(tau=1 << 20)
    read(kv, 2000)
    first = kv.reselect()
    assert first is not None
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
def test_qk_takes_over_from_a_scorer_that_fails(opened: Open, short: NeedlePrompt, kind: str) -> None:
    give, says = BROKEN[kind]
    kv = opened("needle", policy=Given(give), n_batch=0, n_ctx=4224)
    assert kv.policy == "given"
    events = list(kv.prefill(kv.tokenize(short.text)))
    (warning,) = [e for e in events if isinstance(e, Warn)]
    assert warning.text.startswith("given cannot score: ")
    assert says in warning.text
    assert warning.text.endswith("; using qk")
    assert kv.policy == "qk"
    end = kv.n_tokens
    for needle in short.needles[:2]:
        assert needle.answer in ask(kv, needle.question)[0]
        kv.rollback(end)
    check_residency(kv)


def test_a_scorer_that_fails_while_decoding(opened: Open) -> None:
    """One warning, among the events of the step; the run goes on, and is scored at the same steps."""
    n = 0

    def later(view: View) -> Scores:
        nonlocal n
        n += 1
        return boom(view) if n > 3 else oldest(view)

    kv = opened(policy=Given(later), tau=16, prefill_reselect=False)
    read(kv, 2000)
    events = feed(kv, 2200)
    warnings = [e for e in events if isinstance(e, Warn)]
    assert len(warnings) == 1
    assert [e.pos for e in reselects(events)] == list(range(2017, 2201, 16))
    at = events.index(warnings[0])
    assert isinstance(events[at + 1], Reselect)
    assert kv.policy == "qk"
    assert kv.stats().summary_bytes > 0
    assert len(kv.pager.summaries) == 2200 // 64  # type: ignore[arg-type]
    check_residency(kv)
    control = opened(tau=1 << 20)
    read(control, 2200)
    for mine, its in zip(kv.pager.summaries.entry(3), control.pager.summaries.entry(3), strict=True):  # type: ignore[union-attr]
        assert mine.shape == its.shape


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
        assert at in {2016, 2017}
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
        n = len(view.tokens) // 64
        found = view.summaries.score(0, view.queries[-1][0], n)[0]
        return np.append(found, [0.0] * (len(view.candidates) - n)).astype(np.float64)

    scorer = Asking(first_head)
    kv = opened(policy=scorer, tau=16)
    read(kv, 2000)
    assert kv.policy == "given"
    assert len(scorer.views[-1].queries) == 3
    feed(kv, 2100)
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
    monkeypatch.setattr(registry, "_registered", lambda: points)


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


class Held(Given):
    """Keeps its answer back until it is told, so that a scoring is under way for as long as a test wants."""

    def __init__(self) -> None:
        super().__init__(oldest)
        self.go = threading.Event()
        self.go.set()

    def score(self, view: View) -> Scores:
        assert self.go.wait(30)
        return super().score(view)


def begun(opened: Open, name: str = "qwen3") -> tuple[KVFlash, Held]:
    """A run in which a scoring was begun with the last token, and is due with the next."""
    scorer = Held()
    kv = opened(name, policy=scorer, tau=16)
    read(kv, 2000)
    feed(kv, 2016)
    assert kv._selector._job is not None  # type: ignore[union-attr]
    return kv, scorer


CHANGES: dict[str, tuple[Callable[[KVFlash], None], bool]] = {
    "rollback by one": (lambda kv: kv.rollback(2015), True),
    "rollback into what is out": (lambda kv: kv.rollback(500), True),
    "rollback to nothing": (lambda kv: kv.rollback(0), True),
    "clear": (lambda kv: kv.clear(), True),
    "pin": (lambda kv: kv.pin(1000, 1100), False),
    "page in": (lambda kv: kv.page_in(out(kv)[-1]), False),
    "page out": (lambda kv: kv.page_out(int(np.flatnonzero(kv.pager.ledger.evictable())[0])), False),
    "unpin": (lambda kv: kv.unpin(0, 16384), False),
    "prompt": (lambda kv: [None for _ in kv.prefill(TOKENS[2016:2080])] and None, True),
    "reselect": (lambda kv: kv.reselect() and None, True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_a_scoring_is_under_way(opened: Open, change: str) -> None:
    """What was scored for another sequence is never applied; what still holds is, and nothing is lost by it."""
    act, ends_it = CHANGES[change]
    kv, scorer = begun(opened)
    act(kv)
    kv.check_integrity()
    done = kv.stats().reselects
    at = kv.n_tokens
    events = reselects(feed(kv, at + 1))
    assert (len(events) == 0) == ends_it
    assert kv.stats().reselects == done + (not ends_it)
    for event in events:
        assert len(event.scores) <= -(-kv.n_tokens // 64)
    events = reselects(feed(kv, at + 200 if at else 2200))
    check_residency(kv)
    if ends_it and at >= 1000:
        assert events[0].pos == at + 17
    for view in scorer.views:
        assert np.array_equal(view.tokens, TOKENS[: len(view.tokens)])
    assert kv.policy == "given"


@pytest.mark.parametrize("change", ["rollback by one", "rollback into what is out", "rollback to nothing", "clear"])
def test_what_comes_after_a_change_is_what_comes_without_a_scoring(opened: Open, change: str) -> None:
    """Logits after a cancelled scoring are those of a run in which none was begun."""
    act, _ = CHANGES[change]
    kv, _ = begun(opened)
    control = opened(policy=Given(oldest), tau=1 << 20)
    read(control, 2000)
    feed(control, 2016)
    for one in (kv, control):
        act(one)
    for _ in range(15):
        for one in (kv, control):
            feed(one, one.n_tokens + 1)
        assert np.array_equal(kv.logits(), control.logits())
    assert out(kv) == out(control)


def test_cancel_waits_for_the_scorer(opened: Open) -> None:
    """Nothing is taken from under a thread that reads it."""
    kv, scorer = begun(opened)
    feed(kv, 2031)
    scorer.go.clear()
    feed(kv, 2032)
    threading.Timer(0.2, scorer.go.set).start()
    begin = time.monotonic()
    kv.rollback(1000)
    assert time.monotonic() - begin > 0.1
    assert len(scorer.views[-1].tokens) == 2032
    kv.check_integrity()


def test_close_while_a_scorer_runs(opened: Open) -> None:
    kv, scorer = begun(opened)
    feed(kv, 2031)
    scorer.go.clear()
    feed(kv, 2032)
    threading.Timer(0.2, scorer.go.set).start()
    kv.close()
    kv.close()
    assert len(scorer.views[-1].tokens) == 2032
    assert [t for t in threading.enumerate() if t.name.startswith("kvflash")] == []


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
    assert len(kept(kv)) == len(kept(control)) == n
    fresh = Summaries(kv.ctx.layers(), 64, "centroid:4")
    for chunk in range(n):
        fresh.put(chunk, kv.pager.store.get(chunk))
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

    def none(_self: Summaries, _n: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Summaries, "reserve", none)
        with pytest.raises(HostMemoryError, match=r"no host memory for [\d.]+ MiB of key summaries: use --qk-summary"):
            feed(kv, 1600, 50)
        at = kv.n_tokens
        assert at == 1500
        check_residency(kv)
        with pytest.raises(HostMemoryError):
            kv.decode(TOKENS[at : at + 50])
        assert kv.n_tokens == at
    for _ in range(20):
        for one in (kv, control):
            feed(one, one.n_tokens + 50, 50)
        assert np.array_equal(kv.logits(), control.logits())
    assert out(kv) == out(control)


def test_no_host_memory_for_another_slab(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 257th chunk needs one; half of it must not be left."""
    kv = opened(n_ctx=32768, chunk=16, pool=512, n_batch=256)
    data = np.resize(TOKENS, 6000)
    for pos in range(0, 4096, 128):
        kv.decode(data[pos : pos + 128])
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
    """The scores in an event are those of Qk on the records, whatever was evicted and brought back before."""
    kv = opened(tau=1 << 20)
    read(kv, 3000)
    queries = kv.queries()
    event = kv.reselect()
    assert event is not None
    fresh = Summaries(kv.ctx.layers(), 64, "centroid:4")
    for chunk in range(3000 // 64):
        fresh.put(chunk, kv.pager.store.get(chunk))
    mask = np.array([s is not None for s in event.scores])
    want = Qk().score(View(TOKENS[:3000], 64, np.zeros(len(mask), np.int64), mask, [queries], fresh))
    got = np.array([np.nan if s is None else s for s in event.scores])
    assert np.allclose(got[mask], want[mask])


def test_tokens_of_a_generation_are_those_of_the_sequence(opened: Open, document: NeedlePrompt) -> None:
    scorer = Given(oldest)
    kv = opened("needle", policy=scorer, tau=16, n_batch=0)
    events = list(kv.generate(document.text, max_tokens=60, sampling=GREEDY))
    ids = [e.id for e in events if isinstance(e, Token)]
    assert kv.tokens.tolist() == [*kv.tokenize(document.text).tolist(), *ids[:-1]]
    assert scorer.views[-1].tokens.tolist() == kv.tokens.tolist()[: len(scorer.views[-1].tokens)]
