"""The sequence: it grows, goes back and is cleared. Equal logits mean equal bits.

Chunks that are dropped and brought back leave no trace but their block, and in most tests here they come back to the one
that they had.
"""

from typing import Any

import numpy as np
import pytest
from support import tiny
from support.changes import ENGINE

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.runs import GREEDY, LRU, TOKENS, Open, feed, logits_of, out, text_of

from pyllama_kvflash import Sampling, Token
from pyllama_kvflash.errors import UnsupportedError, UsageError
from pyllama_kvflash.native import ALL, NONE
from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL = LRU


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """1,400 tokens with four codes."""
    return needles.document(1400, seed=3)


def test_without_append_the_sequence_is_new(opened: Open, document: NeedlePrompt) -> None:
    kv = opened("needle")
    fresh = text_of(list(kv.generate("A map is", max_tokens=12, sampling=GREEDY)))
    list(kv.generate(document.text, max_tokens=1))
    assert kv.stats().pages_out > 0
    assert text_of(list(kv.generate("A map is", max_tokens=12, sampling=GREEDY))) == fresh
    assert kv.stats().pages_out == 0
    kv.check_integrity()


def test_clear_forgets_all_but_pins(opened: Open) -> None:
    kv = opened(pool=1024)
    kv.pin(128, 256)
    first = logits_of(kv, 2048)
    kv.clear()
    assert kv.n_tokens == 0
    assert len(kv.residency().resident) == 0
    kv.check_integrity()
    assert np.array_equal(logits_of(kv, 2048), first)
    assert not {2, 3} & set(out(kv))


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
def test_pool_that_holds_everything_equals_the_full_cache(opened: Open, name: str) -> None:
    pool, full = opened(name), opened(name, pool="off")
    assert np.array_equal(logits_of(pool, 640), logits_of(full, 640))
    assert np.array_equal(logits_of(pool, 700, 1), logits_of(full, 700, 1))
    assert out(pool) == []
    pool.decode(TOKENS[700:732], ALL)
    full.decode(TOKENS[700:732], ALL)
    for i in range(32):
        assert np.array_equal(pool.logits(i), full.logits(i))
    pool.check_integrity()


def test_which_tokens_have_logits(opened: Open) -> None:
    kv = opened()
    with pytest.raises(UsageError, match="no logits"):
        kv.logits()
    kv.decode(TOKENS[:8], NONE)
    with pytest.raises(UsageError, match="no logits"):
        kv.logits()
    kv.decode(TOKENS[8:16])
    assert kv.logits().shape == (tiny.N_VOCAB,)
    with pytest.raises(UsageError, match="no logits"):
        kv.logits(0)
    kv.decode(TOKENS[16:24], ALL)
    assert np.array_equal(kv.logits(7), kv.logits())
    assert not np.array_equal(kv.logits(6), kv.logits())
    with pytest.raises(UsageError, match="no logits"):
        kv.logits(8)


@pytest.mark.parametrize("cut", [192, 128, 100, 65, 64, 1, 0])
def test_rollback_into_a_chunk_that_is_out(opened: Open, cut: int) -> None:
    """It comes back, and going on is as if the sequence had never gone further; what is full again is sealed anew."""
    kv, control = opened(), opened()
    feed(control, cut, 64)
    feed(kv, cut, 64)
    feed(kv, 1500, 64)
    assert {1, 2} <= set(out(kv))
    kv.rollback(cut)
    assert kv.n_tokens == cut
    kv.check_integrity()
    assert out(kv) == []
    stale = kv.pager.records.get(0).copy() if cut >= 64 else None

    for size in (1, 64, 64):
        assert np.array_equal(logits_of(kv, kv.n_tokens + size), logits_of(control, control.n_tokens + size))
    assert np.array_equal(logits_of(kv, 1200), logits_of(control, 1200))
    assert out(kv) == out(control)
    for one in (kv, control):
        one.pager.wait_stored()
    for chunk in range(1200 // 64):
        assert np.array_equal(kv.pager.records.get(chunk), control.pager.records.get(chunk))
    if stale is not None:
        assert np.array_equal(kv.pager.records.get(0), stale)
    kv.check_integrity()


def test_rollback_and_another_continuation(opened: Open) -> None:
    """Records of what was rolled back are void: the new continuation's are stored in their place."""
    kv, control = opened(), opened()
    feed(kv, 100, 64)
    feed(kv, 1000, 64)
    kv.rollback(100)
    feed(control, 100, 64)
    other = TOKENS[::-1]
    for at in range(100, 1500, 50):
        for one in (kv, control):
            one.decode(other[at : at + 50])
    for one in (kv, control):
        one.pager.wait_stored()  # a GPU's copies run beside the computation
    for chunk in range(1500 // 64):
        head = kv.pager.records.get(chunk)[:1024]
        assert np.array_equal(head, control.pager.records.get(chunk)[:1024])
    assert out(kv) == out(control)
    kv.check_integrity()


@pytest.mark.parametrize("n", [-1, 101])
def test_rollback_to_where_there_is_nothing(opened: Open, n: int) -> None:
    kv = opened()
    feed(kv, 100, 64)
    with pytest.raises(UsageError, match=rf"cannot roll back to {n} positions: there are 100"):
        kv.rollback(n)
    assert kv.n_tokens == 100
    kv.rollback(100)
    kv.check_integrity()


def test_recurrent_state_cannot_go_back(opened: Open) -> None:
    kv, control = opened("qwen35"), opened("qwen35")
    feed(kv, 1000, 64)
    feed(control, 1000, 64)
    for cut in (999, 500, 70):
        with pytest.raises(UnsupportedError, match=rf"recurrent state .* cannot go back to position {cut}"):
            kv.rollback(cut)
        assert kv.n_tokens == 1000
        kv.check_integrity()
    kv.rollback(1000)  # nothing to do
    assert np.array_equal(logits_of(kv, 1400), logits_of(control, 1400))
    kv.rollback(0)
    assert np.array_equal(logits_of(kv, 300), logits_of(opened("qwen35"), 300))


@pytest.mark.nightly(ENGINE)
def test_sliding_window_cannot_go_back_beyond_what_it_holds(opened: Open) -> None:
    """Where it cannot, it says so; where it can, going on is as if the sequence had never gone further."""
    end = 20 * 64
    for back in (64, 256, 512):
        kv, control = (opened("gemma4", pool="off", n_ctx=2048) for _ in range(2))
        feed(kv, end, 64)
        try:
            kv.rollback(end - back)
        except UnsupportedError:
            assert kv.n_tokens == end
            continue
        feed(control, end - back, 64)
        assert np.array_equal(logits_of(kv, end - back + 64), logits_of(control, end - back + 64)), (
            f"{back} positions back"
        )


def test_context_is_full(opened: Open) -> None:
    kv = opened(n_ctx=1024)
    feed(kv, 1000, 64)
    with pytest.raises(UsageError, match="25 tokens after the 1,000 in the context do not fit the context of 1,024"):
        kv.decode(TOKENS[:25])
    with pytest.raises(UsageError, match="do not fit the context"):
        next(kv.prefill(TOKENS[:100]))
    assert kv.n_tokens == 1000
    kv.decode(TOKENS[:24])
    with pytest.raises(UsageError, match="1 token after the 1,024 in the context does not fit"):
        kv.decode(TOKENS[:1])
    kv.check_integrity()


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3", []),
        ("qwen3", [-1]),
        ("qwen3", list(range(65))),
        ("qwen35", [5, 10**6, 5]),
        ("gemma4", [tiny.N_VOCAB]),
    ],
    ids=["none", "negative", "many", "among", "beyond"],
)
def test_bad_batch_changes_nothing(opened: Open, name: str, tokens: list[int]) -> None:
    kv, control = opened(name), opened(name)
    feed(kv, 1000, 64)
    feed(control, 1000, 64)
    with pytest.raises(UsageError):
        kv.decode(tokens)
    assert kv.n_tokens == 1000
    kv.check_integrity()
    assert np.array_equal(logits_of(kv, 1200), logits_of(control, 1200))


@pytest.mark.parametrize("prompt", ["", b"", [], np.array([], np.int32)], ids=["str", "bytes", "list", "array"])
def test_empty_prompt(opened: Open, prompt: Any) -> None:
    kv = opened("needle")
    with pytest.raises(UsageError, match="the prompt is empty"):
        list(kv.generate(prompt, max_tokens=1))
    greedy = Sampling(temperature=0)
    want = [e.id for e in kv.generate("a", max_tokens=2, sampling=greedy) if isinstance(e, Token)]
    got = [e.id for e in kv.generate("a", max_tokens=1, sampling=greedy) if isinstance(e, Token)]
    got += [e.id for e in kv.generate(prompt, max_tokens=1, sampling=greedy, append=True) if isinstance(e, Token)]
    assert got == want, "it goes on after the token that was produced"
    kv.rollback(kv.n_tokens - 1)
    with pytest.raises(UsageError, match="the prompt is empty"):
        list(kv.generate(prompt, max_tokens=1, append=True))
