"""The end of a prompt is run again, on the chunks that its question chose."""

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import ENGINE, SCORING, crossed
from support.runs import (
    GREEDY,
    MODELS,
    SCORED,
    TOKENS,
    Decoded,
    Open,
    check_residency,
    place_by_hand,
    read,
    reselects,
)
from support.scorers import Given, oldest, shuffled

from pyllama_kvflash import Token
from pyllama_kvflash.errors import NativeError, RecordError
from pyllama_kvflash.native import Context, Model, PoolParams
from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL = SCORED


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """4,096 tokens with eight codes."""
    return needles.document(4096, n_needles=8)


@pytest.mark.parametrize(("name", "sizes"), crossed(MODELS, [(64, 64), (256, 128), (64, 32)]))
def test_the_end_is_run_as_on_a_pool_that_was_chosen_before(
    opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, sizes: tuple[int, int]
) -> None:
    """Bit for bit where no state is kept beside the chunks: the first run of the end leaves nothing behind."""
    n_batch, replay = sizes
    start, end = 1472, 1472 + replay
    kv = opened(name, policy=Given(oldest), n_batch=n_batch, replay=replay)
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


@pytest.mark.parametrize("name", MODELS)
def test_without_replay_nothing_is_run_again(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kv = opened(name, replay=0, policy=Given(oldest))
    seen = Decoded(kv, monkeypatch)
    events = read(kv, 2500)
    assert len(reselects(events, "question")) == 1
    assert seen.n_tokens == 2500
    assert [pos for pos, _ in seen.calls] == sorted(pos for pos, _ in seen.calls)
    kv.check_integrity()


@pytest.mark.parametrize(("n", "name"), crossed([1, 2, 10, 64, 65], MODELS))
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
        for bad in (state[:-1], state[:10], bytes(len(state)), bytes(state) + b"!"):
            with pytest.raises(
                (NativeError, RecordError), match=r"the state cannot be restored|this is not a state of"
            ):
                ctx.restore_partial(bad, 640)
            ctx.restore_partial(state, 640)


@pytest.mark.nightly(SCORING)
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
        assert np.count_nonzero(~kv.residency().resident) > 4
        question = kv.tokenize(needle.question, add_special=False)
        events = list(kv.generate(question, max_tokens=8, sampling=GREEDY, append=True))
        assert needle.answer in "".join(e.text for e in events if isinstance(e, Token))
        assert kv.pager.ledger.n_resident == kv.pager.ledger.n_chunks, "there is room for all"
