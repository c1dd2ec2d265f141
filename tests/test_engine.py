"""The Python API: events, the sequence, residency, and going on after whatever went wrong.

Equal logits mean equal bits: chunks that are dropped and brought back leave no trace but their block, and in most tests
here they come back to the block that they had.
"""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from test_cli import Geometry, model_file

import pyllama_kvflash.engine.engine
from pyllama_kvflash import Done, KVFlash, KVFlashError, Paged, Prefill, Sampling, Token, as_dict
from pyllama_kvflash.errors import (
    HostMemoryError,
    Interrupted,
    ModelError,
    NativeError,
    PoolError,
    UnsupportedError,
    UsageError,
)
from pyllama_kvflash.native import ALL, NONE, Model
from pyllama_kvflash.native.lib import lib
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt
from pyllama_kvflash.policy import LedgerError, State

pytestmark = pytest.mark.native

Logits = npt.NDArray[np.float32]
Open = Callable[..., KVFlash]

TOKENS = np.random.default_rng(5).integers(0, tiny.N_VOCAB, 20_000).astype(np.int32)
# 12 blocks, 7 of them evictable; what a scorer does is tested in test_relevance.py
SMALL: dict[str, Any] = {"n_ctx": 16384, "pool": 768, "n_batch": 64, "n_threads": 1, "policy": "lru"}
GREEDY = Sampling(temperature=0)
README = Path(__file__).parent.parent / "README.md"


def feed(kv: KVFlash, end: int, size: int = 64) -> Logits:
    """Decode TOKENS from where the sequence is up to `end`, in batches; the last logits of each."""
    res = []
    while kv.n_tokens < end:
        kv.decode(TOKENS[kv.n_tokens : min(kv.n_tokens + size, end)])
        res.append(kv.logits())
    return np.array(res)


def out(kv: KVFlash) -> list[int]:
    """The chunks that are out."""
    return [int(c) for c in np.flatnonzero(kv.residency().state == State.OUT)]


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """1,400 tokens with four codes."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(1400, lambda s: len(model.tokenize(s, add_special=False)), n_needles=4, seed=3)


def text_of(events: list[Any]) -> str:
    return "".join(e.text for e in events if isinstance(e, Token | Done))


#
# what the README shows
#


def test_readme_example(
    document: NeedlePrompt, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it saves a snapshot
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    prompt = document.text + document.needles[-1].question
    for block in blocks:
        code = block.replace('"model.gguf"', repr(str(BUNDLED_MODEL)))
        exec(compile(code, str(README), "exec"), {"prompt": prompt})
    assert document.needles[-1].answer in capsys.readouterr().out


#
# events
#


def test_events_come_in_order(opened: Open, document: NeedlePrompt) -> None:
    kv = opened("needle")
    events = list(kv.generate(document.text, max_tokens=80, sampling=GREEDY))
    kinds = [type(e) for e in events]
    first_token = kinds.index(Token)
    assert Prefill not in kinds[first_token:]
    assert set(kinds[:first_token]) == {Prefill, Paged}
    assert kinds[-1] is Done
    assert kinds.count(Done) == 1

    n = len(kv.tokenize(document.text))
    prefill = [e for e in events if isinstance(e, Prefill)]
    assert [e.done for e in prefill] == [*range(64, n, 64), n]
    assert {e.total for e in prefill} == {n}
    assert all(a.seconds < b.seconds and a.host_bytes <= b.host_bytes for a, b in itertools.pairwise(prefill))
    assert {e.resident_bytes for e in prefill} == {kv.resident_bytes}

    paged = [e for e in events if isinstance(e, Paged)]
    assert [e.pos for e in paged] == sorted({e.pos for e in paged})
    gone = [c for e in paged for c in e.drops]
    assert len(gone) == len(set(gone))
    assert all(0 < c < e.pos // 64 - 3 for e in paged for c in e.drops)  # neither the sink nor the tail
    assert all(e.page_ins == () for e in paged)
    assert gone == out(kv)

    done = events[-1]
    assert isinstance(done, Done)
    assert done.reason in {"length", "eos"}
    stats = done.stats
    tokens = [e for e in events if isinstance(e, Token)]
    assert (stats.n_prompt, stats.n_generated) == (n, len(tokens))
    assert (stats.n_ctx, stats.n_pool) == (16384, 768)
    assert (stats.pages_out, stats.pages_in) == (len(gone), 0)
    assert stats.chunks == len(kv.residency().state)
    assert stats.resident == stats.chunks - len(gone)
    assert stats.stored == kv.n_tokens // 64
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert stats.prefill_rate == pytest.approx(n / stats.prefill_s)
    assert stats.seed is None
    assert text_of(events) == kv.detokenize([e.id for e in tokens])


def test_events_are_frozen_and_plain(opened: Open) -> None:
    kv = opened("needle")
    events = list(kv.generate("The secret code for the", max_tokens=4, sampling=Sampling(seed=3)))
    for event in events:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, dataclasses.fields(event)[0].name, None)
        assert json.loads(json.dumps(as_dict(event)))["event"] == type(event).__name__.lower()
    last = as_dict(events[-1])
    assert last["stats"]["seed"] == 3
    assert {"prefill_rate", "decode_rate", "kv_device_bytes"} <= set(last["stats"])


def test_prompt_as_text_bytes_or_tokens(opened: Open) -> None:
    kv = opened("needle")
    text = "The secret code for the red boat"
    forms = [text, text.encode(), kv.tokenize(text), kv.tokenize(text).tolist(), tuple(kv.tokenize(text).tolist())]
    texts = [text_of(list(kv.generate(form, max_tokens=8, sampling=GREEDY))) for form in forms]
    assert len(set(texts)) == 1
    assert texts[0]


def test_bytes_that_are_no_text(opened: Open) -> None:
    kv = opened("needle")
    assert isinstance(list(kv.generate(b"\xff\xfe\x80abc", max_tokens=2))[-1], Done)


def test_reasons(opened: Open) -> None:
    kv = opened("needle", n_ctx=256, pool="off")

    def last(**kwargs: Any) -> Done:
        event = list(kv.generate("The secret code for the", sampling=GREEDY, **kwargs))[-1]
        assert isinstance(event, Done)
        return event

    assert last(max_tokens=3).reason == "length"
    assert last(max_tokens=0).stats.n_generated == 0
    assert last(max_tokens=8, stop=[" "]).reason == "stop"
    assert last(max_tokens=-1).reason in {"context", "eos"}


def test_tokens_round_trip(opened: Open) -> None:
    kv = opened("needle")
    text = "The map is worn. 12345, grün, ßäö — 漢字 🙂\n\n  two  spaces"
    ids = kv.tokenize(text)
    assert ids.dtype == np.int32
    assert kv.detokenize(ids) == text
    assert len(kv.tokenize(text, add_special=False)) == len(ids) - 1  # BOS
    assert len(kv.tokenize("", add_special=False)) == 0
    assert kv.tokenize(text.encode()).tolist() == ids.tolist()


#
# the sequence
#


def test_append_and_rollback(opened: Open, document: NeedlePrompt) -> None:
    kv = opened("needle", pool=2048, n_ctx=4096)
    done = list(kv.generate(document.text, max_tokens=0))[-1]
    assert isinstance(done, Done)
    end = kv.n_tokens
    assert end == done.stats.n_prompt == len(kv.tokenize(document.text))
    for needle in [*document.needles, document.needles[0]]:
        events = list(kv.generate(needle.question, max_tokens=8, sampling=GREEDY, stop=["\n"], append=True))
        assert needle.answer in text_of(events)
        question = len(kv.tokenize(needle.question, add_special=False))
        last = events[-1]
        assert isinstance(last, Done)
        assert last.stats.n_prompt == question
        assert kv.n_tokens >= end + question
        kv.rollback(end)
        assert kv.n_tokens == end
        kv.check_integrity()


def test_without_append_the_sequence_is_new(opened: Open, document: NeedlePrompt) -> None:
    kv = opened("needle")
    fresh = text_of(list(kv.generate("The map is", max_tokens=12, sampling=GREEDY)))
    list(kv.generate(document.text, max_tokens=1))
    assert kv.stats().pages_out > 0
    assert text_of(list(kv.generate("The map is", max_tokens=12, sampling=GREEDY))) == fresh
    assert kv.stats().pages_out == 0
    kv.check_integrity()


def test_clear_forgets_all_but_pins(opened: Open) -> None:
    kv = opened(pool=1024)
    kv.pin(128, 256)
    first = feed(kv, 2048)
    kv.clear()
    assert kv.n_tokens == 0
    assert len(kv.residency().state) == 0
    kv.check_integrity()
    assert np.array_equal(feed(kv, 2048), first)
    assert not {2, 3} & set(out(kv))


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
def test_pool_that_holds_everything_equals_the_full_cache(opened: Open, name: str) -> None:
    pool, full = opened(name), opened(name, pool="off")
    assert np.array_equal(feed(pool, 640), feed(full, 640))
    assert np.array_equal(feed(pool, 700, 1), feed(full, 700, 1))
    assert out(pool) == []
    pool.decode(TOKENS[700:732], ALL)
    full.decode(TOKENS[700:732], ALL)
    for i in range(32):
        assert np.array_equal(pool.logits(i), full.logits(i))
    pool.check_integrity()


def test_prefill_equals_decode(opened: Open) -> None:
    one, other = opened(), opened()
    events = list(one.prefill(TOKENS[:1500]))
    feed(other, 1500)
    assert np.array_equal(one.logits(), other.logits())
    assert out(one) == out(other) == [c for e in events if isinstance(e, Paged) for c in e.drops]


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


def test_logits_are_a_copy(opened: Open) -> None:
    kv = opened()
    kv.decode(TOKENS[:8])
    first = kv.logits()
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(kv.logits(), kept)


@pytest.mark.parametrize(("sinks", "cut"), [(1, 100), (0, 64), (0, 32), (0, 1), (0, 0)])
def test_rollback_into_a_chunk_that_is_out(opened: Open, sinks: int, cut: int) -> None:
    """It comes back, and going on is as if the sequence had never gone further; what is full again is sealed anew."""
    kv, control = opened(sinks=sinks), opened(sinks=sinks)
    feed(control, cut)
    feed(kv, cut)
    feed(kv, 1500)
    assert {sinks, 1} <= set(out(kv))
    kv.rollback(cut)
    assert kv.n_tokens == cut
    kv.check_integrity()
    assert out(kv) == []
    stale = kv.pager.records.get(0).copy() if cut >= 64 else None

    for size in (1, 64, 64):
        assert np.array_equal(feed(kv, kv.n_tokens + size), feed(control, control.n_tokens + size))
    assert np.array_equal(feed(kv, 1200), feed(control, 1200))
    assert out(kv) == out(control)
    for chunk in range(1200 // 64):
        assert np.array_equal(kv.pager.records.get(chunk), control.pager.records.get(chunk))
    if stale is not None:
        assert np.array_equal(kv.pager.records.get(0), stale)
    kv.check_integrity()


def test_rollback_and_another_continuation(opened: Open) -> None:
    """Records of what was rolled back are void: the new continuation's are stored in their place."""
    kv, control = opened(), opened()
    feed(kv, 1000)
    kv.rollback(100)
    feed(control, 100)
    other = TOKENS[::-1]
    for at in range(100, 1500, 50):
        for one in (kv, control):
            one.decode(other[at : at + 50])
    for chunk in range(1500 // 64):
        head = kv.pager.records.get(chunk)[:1024]
        assert np.array_equal(head, control.pager.records.get(chunk)[:1024])
    assert out(kv) == out(control)
    kv.check_integrity()


def test_rollback_keeps_the_tail_resident(opened: Open) -> None:
    kv = opened()
    feed(kv, 3000)
    kv.rollback(1234)
    kv.check_integrity()
    state = kv.residency().state
    assert len(state) == 20
    assert all(state[-4:] == State.RESIDENT)
    feed(kv, 1400)
    kv.check_integrity()


@pytest.mark.parametrize("n", [-1, 101])
def test_rollback_to_where_there_is_nothing(opened: Open, n: int) -> None:
    kv = opened()
    feed(kv, 100)
    with pytest.raises(UsageError, match=rf"cannot roll back to {n} positions: there are 100"):
        kv.rollback(n)
    assert kv.n_tokens == 100
    kv.rollback(100)
    kv.check_integrity()


def test_recurrent_state_cannot_go_back(opened: Open) -> None:
    kv, control = opened("qwen35"), opened("qwen35")
    feed(kv, 1000)
    feed(control, 1000)
    for cut in (999, 500, 70):
        with pytest.raises(UnsupportedError, match=rf"recurrent state .* cannot go back to position {cut}"):
            kv.rollback(cut)
        assert kv.n_tokens == 1000
        kv.check_integrity()
    kv.rollback(1000)  # nothing to do
    assert np.array_equal(feed(kv, 1400), feed(control, 1400))
    kv.rollback(0)
    assert np.array_equal(feed(kv, 300), feed(opened("qwen35"), 300))


def test_sliding_window_cannot_go_back_beyond_what_it_holds(opened: Open) -> None:
    """Where it cannot, it says so; where it can, going on is as if the sequence had never gone further."""
    end = 20 * 64
    for back in (64, 256, 512):
        kv, control = (opened("gemma4", pool="off", n_ctx=2048) for _ in range(2))
        feed(kv, end)
        try:
            kv.rollback(end - back)
        except UnsupportedError:
            assert kv.n_tokens == end
            continue
        feed(control, end - back)
        assert np.array_equal(feed(kv, end - back + 64), feed(control, end - back + 64)), f"{back} positions back"


def test_context_is_full(opened: Open) -> None:
    kv = opened(n_ctx=1024)
    feed(kv, 1000)
    with pytest.raises(UsageError, match="25 tokens after the 1000 in the context do not fit the context of 1024"):
        kv.decode(TOKENS[:25])
    with pytest.raises(UsageError, match="do not fit the context"):
        next(kv.prefill(TOKENS[:100]))
    assert kv.n_tokens == 1000
    kv.decode(TOKENS[:24])
    with pytest.raises(UsageError, match="after the 1024 in the context do not fit"):
        kv.decode(TOKENS[:1])
    kv.check_integrity()


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
@pytest.mark.parametrize(
    "tokens",
    [[], [tiny.N_VOCAB], [-1], [5, 10**6, 5], list(range(65))],
    ids=["none", "beyond", "negative", "among", "many"],
)
def test_bad_batch_changes_nothing(opened: Open, name: str, tokens: list[int]) -> None:
    kv, control = opened(name), opened(name)
    feed(kv, 1000)
    feed(control, 1000)
    with pytest.raises(UsageError):
        kv.decode(tokens)
    assert kv.n_tokens == 1000
    kv.check_integrity()
    assert np.array_equal(feed(kv, 1200), feed(control, 1200))


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


def test_prompt_too_long_leaves_the_sequence(opened: Open) -> None:
    kv = opened("needle", n_ctx=1024, pool="off")
    list(kv.generate("a b c", max_tokens=1))
    n = kv.n_tokens
    for append in (True, False):
        with pytest.raises(UsageError, match="do not fit the context of 1024"):
            list(kv.generate("word " * 1024, append=append))
        assert kv.n_tokens == n


#
# residency
#


def check_residency(kv: KVFlash, chunk: int = 64) -> None:
    kv.check_integrity()
    where = kv.residency()
    n = -(-kv.n_tokens // chunk)
    for field in dataclasses.fields(where):
        assert getattr(where, field.name).shape == (n,), field.name
    types = [str(getattr(where, f.name).dtype) for f in dataclasses.fields(where)]
    assert types == ["int8", "int32", "bool", "bool", "bool", "float64"]
    assert set(np.unique(where.state)) <= {State.OUT, State.RESIDENT}
    resident = where.state == State.RESIDENT
    assert np.array_equal(where.block >= 0, resident)
    assert len(set(where.block[resident])) == np.count_nonzero(resident)  # no block holds two
    assert np.all(where.block < kv.ctx.pool_info().n_block)
    assert np.array_equal(where.sealed, np.arange(n) < kv.n_tokens // chunk)
    assert np.array_equal(where.stored, where.sealed)
    assert np.all(resident[where.protected])
    assert np.all(where.protected[-4:])
    assert where.protected[0]
    stats = kv.stats()
    assert (stats.chunks, stats.resident) == (n, np.count_nonzero(resident))
    assert [kv.ctx.block_of(c) for c in range(n)] == where.block.tolist()


def test_residency(opened: Open) -> None:
    kv = opened()
    empty = kv.residency()
    assert all(getattr(empty, f.name).shape == (0,) for f in dataclasses.fields(empty))
    for end in (1, 63, 64, 65, 500, 768, 769, 2000):
        feed(kv, end)
        check_residency(kv)
    kv.page_in(10)
    kv.page_out(20)
    kv.pin(128, 129)
    check_residency(kv)
    assert kv.residency().protected[2]
    kv.rollback(1100)
    check_residency(kv)


def test_residency_arrays_are_copies(opened: Open) -> None:
    kv = opened()
    feed(kv, 1500)
    where = kv.residency()
    for field in dataclasses.fields(where):
        getattr(where, field.name)[:] = 0
    check_residency(kv)


def test_page_out_and_in_leaves_no_trace(opened: Open) -> None:
    kv, control = opened(), opened()
    feed(kv, 700)
    feed(control, 700)
    for chunk in (3, 5):
        kv.page_out(chunk)
        kv.page_out(chunk)  # harmless
    assert out(kv) == [3, 5]
    check_residency(kv)
    for chunk in (3, 5):  # to the first free block, which is its own
        kv.page_in(chunk)
        kv.page_in(chunk)  # harmless
    assert out(kv) == []
    check_residency(kv)
    assert (kv.stats().pages_out, kv.stats().pages_in) == (2, 2)
    assert np.array_equal(feed(kv, 760, 1), feed(control, 760, 1))


def test_page_in_makes_room(opened: Open) -> None:
    kv = opened()
    feed(kv, 2000)
    before = out(kv)
    kv.page_in(before[3])
    assert before[3] not in out(kv)
    assert len(out(kv)) in {len(before), len(before) - 1}  # a free block, or one for another
    check_residency(kv)
    for chunk in before:
        kv.page_in(chunk)
        check_residency(kv)
    assert kv.residency().state[before[-1]] == State.RESIDENT


@pytest.mark.parametrize("chunk", [0, 28, 29, 30, 31])
def test_protected_chunks_stay(opened: Open, chunk: int) -> None:
    kv = opened()
    feed(kv, 2000)
    assert len(kv.residency().state) == 32
    with pytest.raises(PoolError, match=rf"chunk {chunk} cannot leave the pool"):
        kv.page_out(chunk)
    check_residency(kv)


@pytest.mark.parametrize("chunk", [-1, 32, 10**9])
def test_chunks_that_do_not_exist(opened: Open, chunk: int) -> None:
    kv = opened()
    feed(kv, 2000)
    for call in (kv.page_in, kv.page_out):
        with pytest.raises(UsageError, match=rf"there is no chunk {chunk}: the sequence has 32 of 64 tokens"):
            call(chunk)
    check_residency(kv)


def test_pins(opened: Open) -> None:
    kv = opened(pool=1024)
    feed(kv, 2000)
    assert {5, 6} <= set(out(kv))
    kv.pin(5 * 64 + 1, 6 * 64 + 1)  # two chunks, which come back
    assert not {5, 6} & set(out(kv))
    with pytest.raises(PoolError, match="chunk 5 cannot leave the pool"):
        kv.page_out(5)
    feed(kv, 4000)
    assert not {5, 6} & set(out(kv))
    check_residency(kv)
    kv.unpin(5 * 64, 6 * 64)
    feed(kv, 6000)
    assert 5 in out(kv)
    assert 6 not in out(kv)
    check_residency(kv)


def test_pins_ahead_of_what_is_written(opened: Open) -> None:
    kv = opened(pool=1024)
    kv.pin(1000, 1100)
    kv.check_integrity()
    feed(kv, 500)
    kv.check_integrity()
    feed(kv, 4000)
    assert not {15, 16, 17} & set(out(kv))
    assert 18 in out(kv)
    check_residency(kv)


def test_pins_of_the_options(opened: Open) -> None:
    kv = opened(pool=1024, pins=((1000, 1100), (256, 257)))
    feed(kv, 4000)
    assert not {4, 15, 16, 17} & set(out(kv))
    with pytest.raises(UsageError, match="pin 5:5"):
        opened(pins=((5, 5),))
    with pytest.raises(UsageError, match="pin 0:16385"):
        opened(pins=((0, 16385),))


def test_too_many_pins_pin_nothing(opened: Open) -> None:
    kv = opened(pool=1024)
    feed(kv, 3000)
    kv.pin(640, 641)
    before = (kv.pager.ledger.pins.copy(), out(kv))
    with pytest.raises(PoolError, match=r"pinning 0:2048 .*a pool of \d+ tokens is needed.*1024"):
        kv.pin(0, 2048)
    assert (kv.pager.ledger.pins, out(kv)) == before
    with pytest.raises(PoolError):
        kv.pin(8000, 16384)  # ahead
    assert (kv.pager.ledger.pins, out(kv)) == before
    check_residency(kv)
    feed(kv, 5000)  # and nothing is stuck
    check_residency(kv)


def test_as_many_pins_as_fit_never_stop_the_pool(opened: Open) -> None:
    kv = opened(pool=1024)
    n = 0
    try:
        for n in range(100):
            kv.pin(64 * (2 * n + 1), 64 * (2 * n + 1) + 1)
    except PoolError:
        pass
    assert 0 < n < 16
    feed(kv, 4000)
    for chunk in out(kv):
        kv.page_in(chunk)
    feed(kv, 5000, 17)
    check_residency(kv)
    assert not {2 * i + 1 for i in range(n)} & set(out(kv))


@pytest.mark.parametrize(("start", "end"), [(5, 5), (6, 5), (-1, 5), (0, 16385)])
def test_pins_that_are_no_range(opened: Open, start: int, end: int) -> None:
    kv = opened()
    with pytest.raises(UsageError, match=rf"pin {start}:{end} is no range"):
        kv.pin(start, end)


def test_no_pool(opened: Open) -> None:
    kv = opened(pool="off")
    feed(kv, 200)
    assert kv.n_pool is None
    for call in (kv.residency, kv.check_integrity, lambda: kv.page_in(0), lambda: kv.page_out(0), lambda: kv.pin(0, 1)):
        with pytest.raises(UsageError, match="no pool"):
            call()
    stats = kv.stats()
    assert (stats.n_pool, stats.chunks, stats.host_bytes, stats.pages_out) == (None, 0, 0, 0)
    kv.rollback(100)
    feed(kv, 200)


#
# integrity
#


def test_check_integrity_sees_a_chunk_dropped_behind_the_engine(opened: Open) -> None:
    kv = opened()
    feed(kv, 700)
    kv.ctx.drop(3)
    with pytest.raises(LedgerError, match=r"differ about chunks \[3\]"):
        kv.check_integrity()


def test_check_integrity_sees_a_chunk_brought_in_behind_the_engine(opened: Open) -> None:
    kv = opened()
    feed(kv, 700)
    kv.page_out(3)
    kv.ctx.page_in(3, kv.pager.records.get(3))
    with pytest.raises(LedgerError, match=r"differ about chunks \[3\]"):
        kv.check_integrity()


def test_check_integrity_sees_positions_removed_behind_the_engine(opened: Open) -> None:
    kv = opened()
    feed(kv, 700)
    kv.ctx.attn_seq_rm(200, 210)
    with pytest.raises(LedgerError, match="chunk 3 has 54 cells in the pool, and 64 positions"):
        kv.check_integrity()


def test_check_integrity_sees_a_lost_record(opened: Open) -> None:
    kv = opened()
    feed(kv, 700)
    del kv.pager.records._entries[4]
    with pytest.raises(LedgerError, match=r"no record in the store for chunks \[4\]"):
        kv.check_integrity()


#
# going on after what went wrong
#


def test_interrupt_in_a_loop_over_events(opened: Open) -> None:
    """What Ctrl-C does to a script: the loop ends between two events, and the sequence stands."""
    kv, control = opened(), opened()
    feed(control, 2560)

    def loop(last: Callable[[Any], bool]) -> None:
        for event in kv.prefill(TOKENS[kv.n_tokens : 2560]):
            if last(event):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(lambda event: isinstance(event, Prefill) and event.done == 1280)
    assert kv.n_tokens == 1280
    check_residency(kv)
    with pytest.raises(KeyboardInterrupt):
        loop(lambda event: isinstance(event, Paged))
    assert 1280 <= kv.n_tokens <= 1280 + 64
    check_residency(kv)
    feed(kv, 2560)
    assert np.array_equal(kv.logits(), control.logits())


def test_interrupt_in_a_loop_over_tokens(opened: Open) -> None:
    kv = opened("needle")
    whole = text_of(list(kv.generate("The secret code for the", max_tokens=32, sampling=GREEDY)))
    seen = ""

    def loop() -> None:
        nonlocal seen
        for event in kv.generate("The secret code for the", max_tokens=32, sampling=GREEDY):
            seen += event.text if isinstance(event, Token) else ""
            if len(seen) > 10:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert seen
    assert whole.startswith(seen)
    kv.check_integrity()
    assert text_of(list(kv.generate("The secret code for the", max_tokens=32, sampling=GREEDY))) == whole


def cut_off(target: Any, name: str, when: str, monkeypatch: pytest.MonkeyPatch, at: int = 1) -> None:
    """The at-th call of a method raises KeyboardInterrupt, before or after it did its work."""
    method = getattr(target, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and when == "before":
            raise KeyboardInterrupt
        res = method(*args, **kwargs)
        if calls == at and when == "after":
            raise KeyboardInterrupt
        return res

    monkeypatch.setattr(target, name, call)


STEPS = [
    "ctx.decode",
    "ctx.drop",
    "ctx.begin_read",
    "ledger.drop",
    "ledger.write",
    "ledger.store",
    "store.put",
    "memory.reserve",
]


def place(kv: KVFlash, step: str) -> tuple[Any, str]:
    owner, name = step.split(".")
    return {"ctx": kv.ctx, "ledger": kv.pager.ledger, "store": kv.pager.records, "memory": kv.pager.records.memory}[
        owner
    ], name


TINY: dict[str, Any] = {"n_ctx": 4096, "pool": 256, "chunk": 16, "n_batch": 16}  # 16 blocks, as many batches a second


@pytest.fixture(scope="module")
def reference(tiny_path: Callable[[str], Path]) -> Iterator[tuple[KVFlash, Logits]]:
    """A run of 800 tokens in batches of 10, and its logits."""
    with KVFlash.from_file(tiny_path("qwen3"), **{**SMALL, **TINY}) as kv:
        yield kv, feed(kv, 800, 10)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_batch_that_is_cut_off(
    opened: Open, reference: tuple[KVFlash, Logits], monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    """Wherever Ctrl-C comes within a step, the sequence stands before or after it, and going on gives the same."""
    control, want = reference
    kv = opened(**TINY)
    feed(kv, 400, 10)
    n_cut = 0
    for _ in range(8):  # batches that begin and seal chunks, and such that do not
        with monkeypatch.context() as patch:
            cut_off(*place(kv, step), when, patch)
            start = kv.n_tokens
            try:
                kv.decode(TOKENS[start : start + 10])
            except KeyboardInterrupt:
                n_cut += 1
                assert kv.n_tokens in {start, start + 10}
        if n_cut % 2:
            check_residency(kv, 16)  # else, the next step has to recover by itself
        feed(kv, start + 10, 10)
    assert n_cut >= 4
    got = feed(kv, 800, 10)
    assert np.array_equal(got, want[-len(got) :])
    assert out(kv) == out(control)
    for chunk in range(800 // 16):
        assert np.array_equal(kv.pager.records.get(chunk), control.pager.records.get(chunk))
    check_residency(kv, 16)


def bring_both(kv: KVFlash) -> None:
    """The first finds a free block, the second needs another's."""
    kv.page_in(3)
    kv.page_in(4)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "step",
    ["ctx.begin_page_in", "ctx.commit", "ctx.drop", "ledger.begin_page_in", "ledger.commit_page_in", "store.get"],
)
def test_page_in_that_is_cut_off(opened: Open, monkeypatch: pytest.MonkeyPatch, step: str, when: str) -> None:
    kv = opened()
    feed(kv, 768)  # the pool is full
    kv.page_out(3)
    kv.page_out(4)
    feed(kv, 830)
    with monkeypatch.context() as patch:
        cut_off(*place(kv, step), when, patch)
        with pytest.raises(KeyboardInterrupt):
            bring_both(kv)
    bring_both(kv)
    check_residency(kv)
    assert not {3, 4} & set(out(kv))
    feed(kv, 2000)
    check_residency(kv)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "step", ["ctx.seq_rm", "ledger.rollback", "store.forget", "ctx.begin_page_in", "ctx.commit", "ctx.attn_seq_rm"]
)
def test_rollback_that_is_cut_off(opened: Open, monkeypatch: pytest.MonkeyPatch, step: str, when: str) -> None:
    """It happened, or it did not; and it can be done again."""
    kv, control = opened(sinks=0), opened(sinks=0)
    feed(kv, 100)
    feed(kv, 1500)
    feed(control, 100)
    with monkeypatch.context() as patch:
        cut_off(*place(kv, step), when, patch)
        with pytest.raises(KeyboardInterrupt):
            kv.rollback(100)
    assert kv.n_tokens in {100, 1500}
    assert len(kv.residency().state) == -(-kv.n_tokens // 64)
    kv.check_integrity()
    kv.rollback(100)
    kv.check_integrity()
    assert np.abs(feed(kv, 400) - feed(control, 400)).max() < 0.02  # chunks may have changed blocks


def test_clear_that_is_cut_off(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = opened()
    want = feed(kv, 1500)
    for step in ("ctx.clear", "ledger.clear", "store.forget"):
        for when in ("before", "after"):
            with monkeypatch.context() as patch:
                cut_off(*place(kv, step), when, patch)
                with pytest.raises(KeyboardInterrupt):
                    kv.clear()
            kv.clear()
            kv.check_integrity()
            assert np.array_equal(feed(kv, 1500), want)


PACKAGE = str(Path(pyllama_kvflash.__file__).parent)


class CutAtLine:
    """A trace function that raises KeyboardInterrupt at the n-th line of the package that is run."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.where: str | None = None

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.n -= 1
            if self.n == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self


def before_decode(kv: KVFlash) -> None:
    feed(kv, (kv.n_tokens // 16 + 1) * 16, 16)  # the next batch begins a chunk, and seals it


def before_page_in(kv: KVFlash) -> None:
    """Chunk 5 is out, and there is no free block for it."""
    kv.page_out(5)
    while kv.pager.ledger.n_free:
        kv.page_in(next(c for c in reversed(out(kv)) if c != 5))


def before_rollback(kv: KVFlash) -> None:
    """The chunk that 101 cuts through, and one before it, are out; the last one is not full."""
    if kv.n_tokens > 200:
        kv.clear()
    feed(kv, 185, 16)
    kv.page_out(4)
    kv.page_out(6)


def before_clear(kv: KVFlash) -> None:
    feed(kv, 101, 16)


OPERATIONS: dict[str, tuple[Callable[[KVFlash], None], Callable[[KVFlash], None]]] = {
    "decode": (before_decode, lambda kv: kv.decode(TOKENS[kv.n_tokens : kv.n_tokens + 16])),
    "page_in": (before_page_in, lambda kv: kv.page_in(5)),
    "rollback": (before_rollback, lambda kv: kv.rollback(101)),
    "clear": (before_clear, lambda kv: kv.clear()),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cut_off_at_every_line(opened: Open, operation: str) -> None:
    """Ctrl-C in a script comes between any two lines: the next call puts things right."""
    prepare, act = OPERATIONS[operation]
    control = opened(**{**TINY, "n_ctx": 16384})
    kv, lost = opened(**{**TINY, "n_ctx": 16384}), []
    feed(kv, 400, 16)
    for n in range(1, 1000):
        prepare(kv)
        cut = CutAtLine(n)
        sys.settrace(cut)
        try:
            act(kv)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if cut.where is None:
            break
        try:
            kv.check_integrity()
            feed(kv, kv.n_tokens + 16, 16)
            kv.check_integrity()
        except Exception as err:  # noqa: BLE001 (all of them are counted)
            lost.append(f"{cut.where}: {err!r}")
            kv = opened(**{**TINY, "n_ctx": 16384})
            feed(kv, 400, 16)
    assert n > 30, "nothing was cut off"
    assert lost == []
    if operation == "decode":
        assert np.array_equal(feed(kv, kv.n_tokens + 16, 16)[-1], feed(control, kv.n_tokens, 16)[-1])


def test_cut_off_batch_of_a_recurrent_model(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state has seen tokens that it should not have: it says so, until it is cleared."""
    kv = opened("qwen35")
    want = feed(kv, 500)
    with monkeypatch.context() as patch:
        cut_off(kv.ctx, "decode", "after", patch)
        with pytest.raises(KeyboardInterrupt):
            kv.decode(TOKENS[500:564])
    for _ in range(2):
        with pytest.raises(NativeError, match=r"memory cannot go back: clear\(\) and start again"):
            kv.decode(TOKENS[500:564])
    kv.clear()
    kv.check_integrity()
    assert np.array_equal(feed(kv, 500), want)


def test_recurrent_model_goes_on_where_nothing_was_decoded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, control = opened("qwen35"), opened("qwen35")
    feed(kv, 1000)
    feed(control, 1000)
    with monkeypatch.context() as patch:
        cut_off(kv.ctx, "decode", "before", patch)
        with pytest.raises(KeyboardInterrupt):
            kv.decode(TOKENS[1000:1064])
    check_residency(kv)
    assert np.array_equal(feed(kv, 1500), feed(control, 1500))


@pytest.fixture
def stop() -> Iterator[Callable[[], None]]:
    """What Ctrl-C calls within interruptible(); undone after the test."""
    yield lambda: lib.kvf_interrupt(True)
    lib.kvf_interrupt(False)


def test_interrupted_decode(opened: Open, stop: Callable[[], None]) -> None:
    kv, control = opened(), opened()
    feed(kv, 1000)
    feed(control, 1000)
    stop()
    with pytest.raises(Interrupted):
        kv.decode(TOKENS[1000:1064])
    assert kv.n_tokens == 1000
    check_residency(kv)
    lib.kvf_interrupt(False)
    assert np.array_equal(feed(kv, 1500), feed(control, 1500))


def test_interrupted_generation_ends_with_done(opened: Open, stop: Callable[[], None], document: NeedlePrompt) -> None:
    kv = opened("needle")
    events = []
    for event in kv.generate(document.text, max_tokens=4):
        events.append(event)
        if isinstance(event, Prefill) and event.done == 640:
            stop()
    last = events[-1]
    assert isinstance(last, Done)
    assert last.reason == "interrupted"
    assert (last.stats.n_prompt, last.stats.n_generated) == (640, 0)
    assert kv.n_tokens == 640
    lib.kvf_interrupt(False)

    events = []
    for event in kv.generate("The secret code for the", max_tokens=20, sampling=GREEDY):
        events.append(event)
        if sum(isinstance(e, Token) for e in events) == 5:
            stop()
    last = events[-1]
    assert isinstance(last, Done)
    assert (last.reason, last.stats.n_generated) == ("interrupted", 5)
    lib.kvf_interrupt(False)
    whole = text_of(list(kv.generate("The secret code for the", max_tokens=20, sampling=GREEDY)))
    assert whole.startswith(text_of(events))


class NoMemory:
    """numpy, without any for new arrays."""

    def __getattr__(self, name: str) -> Any:
        if name in {"full", "empty", "zeros", "ones"}:
            raise MemoryError
        return getattr(np, name)


def no_memory(_size: int) -> Any:
    raise MemoryError


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
def test_out_of_host_memory_loses_nothing(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kv, control = opened(name, **TINY), opened(name, **TINY)
    feed(kv, 350, 10)
    want = feed(control, 700, 10)
    with monkeypatch.context() as patch:
        patch.setattr(kv.pager.records.memory, "_allocate", no_memory)
        with pytest.raises(
            HostMemoryError, match=r"no host memory for another [\d.]+ MiB of chunk records, with [\d.]+ MiB held"
        ):
            feed(kv, 700, 10)
        at = kv.n_tokens
        assert 350 <= at < 700
        held = kv.host_bytes
        check_residency(kv, 16)
        for _ in range(2):  # still none
            with pytest.raises(HostMemoryError):
                kv.decode(TOKENS[at : at + 10])
        assert (kv.n_tokens, kv.host_bytes) == (at, held)
        check_residency(kv, 16)
    got = feed(kv, 700, 10)
    assert np.array_equal(got, want[-len(got) :])
    assert out(kv) == out(control)


def test_batch_for_which_the_pool_has_no_room(opened: Open) -> None:
    kv = opened()
    feed(kv, 2000)
    kv.pager.ledger.pins |= set(range(100))  # behind the engine, which would not allow it
    at = kv.n_tokens
    with pytest.raises(PoolError, match="more blocks of the pool are needed"):
        feed(kv, 4000)
    kv.check_integrity()
    assert kv.n_tokens >= at
    kv.pager.ledger.pins.clear()
    feed(kv, 4000)
    check_residency(kv)


#
# figures
#


@pytest.mark.parametrize("name", ["needle", "qwen3", "qwen35", "gemma4"])
@pytest.mark.parametrize(("cache", "block_bytes"), [("f16", 64), ("q8_0", 34), ("q4_0", 18)])
def test_device_bytes_are_those_of_the_pool(
    opened: Open, tiny_path: Callable[[str], Path], name: str, cache: str, block_bytes: int
) -> None:
    token_bytes = Geometry.read(model_file(name, tiny_path)).token_bytes(block_bytes)
    kv = opened(name, type_k=cache, type_v=cache, n_ctx=5000)
    assert kv.resident_bytes == 768 * token_bytes
    feed(kv, 1500)
    stats = kv.stats()
    assert stats.kv_device_bytes == kv.resident_bytes == 768 * token_bytes
    assert stats.kv_full_bytes == 5120 * token_bytes  # in steps of 256 cells
    assert (stats.other_device_bytes > 0) == (name in {"qwen35", "gemma4"})
    full = opened(name, type_k=cache, type_v=cache, n_ctx=5000, pool="off")
    assert full.stats().kv_device_bytes == full.stats().kv_full_bytes == stats.kv_full_bytes


def test_host_bytes_are_those_of_the_records(opened: Open) -> None:
    kv = opened(chunk=16)
    record = kv.pager.records.record_bytes
    rows = 16 * kv.resident_bytes // 768
    assert rows < record < 1.25 * rows  # the head of a record is small, even of a small one
    assert kv.host_bytes == 0
    for end in range(64, 4096, 64):
        kv.decode(TOKENS[end - 64 : end], NONE)
        n = end // 16
        assert kv.host_bytes >= n * record
        if n >= 80:  # the first slabs are of eight records
            assert kv.host_bytes <= n * record * 1.10, f"{n} records"
    before = kv.host_bytes
    kv.rollback(1000)
    feed(kv, 4000)
    assert kv.host_bytes == before  # places are used again


#
# opening and closing
#


def test_context_manager_and_closing_twice(tiny_path: Callable[[str], Path]) -> None:
    with KVFlash.from_file(tiny_path("qwen3"), **SMALL) as kv:
        kv.decode(TOKENS[:8])
        kv.close()
        kv.close()
    kv.close()
    with pytest.raises(ZeroDivisionError), KVFlash.from_file(str(tiny_path("qwen3")), **SMALL) as kv:
        _ = 1 / 0
    for closed in (kv.ctx, kv.model):
        with pytest.raises(UsageError, match="is closed"):
            _ = closed.handle


AFTER_CLOSE = """
import sys
from pyllama_kvflash import KVFlash
kv = KVFlash.from_file(sys.argv[1], n_ctx=4096, pool=1024, n_threads=1)
kv.decode(kv.tokenize("one two three"))
kv.close()
try:
    {call}
except Exception as err:
    print("said so", type(err).__name__)
"""


@pytest.mark.parametrize(
    "call",
    [
        "kv.tokenize('a b c')",
        "kv.detokenize([5, 6])",
        "list(kv.generate('a'))",
        "kv.decode([1])",
        "kv.logits()",
        "kv.clear()",
        "kv.rollback(1)",
        "kv.residency()",
        "kv.stats()",
    ],
)
def test_use_after_close_is_an_error(call: str) -> None:
    """In a process of its own: what is freed must not be read."""
    code = AFTER_CLOSE.format(call=call)
    res = subprocess.run(
        [sys.executable, "-c", code, BUNDLED_MODEL], capture_output=True, text=True, timeout=60, check=False
    )
    assert res.returncode == 0, res.stderr
    assert res.stdout.startswith("said so")


BAD_TOKEN = """
import sys
from pyllama_kvflash import KVFlash, KVFlashError
with KVFlash.from_file(sys.argv[1], n_ctx=1024, pool="off", n_threads=1) as kv:
    try:
        {call}
    except KVFlashError as err:
        print("said so")
"""


@pytest.mark.parametrize(
    "call", ["kv.detokenize([10**6])", "kv.detokenize([-1])", "list(kv.generate([10**6]))", "list(kv.generate([-1]))"]
)
def test_tokens_that_do_not_exist(call: str) -> None:
    code = BAD_TOKEN.format(call=call)
    res = subprocess.run(
        [sys.executable, "-c", code, BUNDLED_MODEL], capture_output=True, text=True, timeout=60, check=False
    )
    assert (res.returncode, res.stdout) == (0, "said so\n"), res.stderr


@pytest.mark.parametrize(
    "call", ["kv.tokenize('a')", "kv.detokenize([5])", "list(kv.generate('a'))", "list(kv.generate([5]))"]
)
def test_model_without_a_vocabulary(tiny_path: Callable[[str], Path], call: str) -> None:
    code = BAD_TOKEN.format(call=call)
    res = subprocess.run(
        [sys.executable, "-c", code, tiny_path("qwen3")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (res.returncode, res.stdout) == (0, "said so\n"), res.stderr


def test_progress_of_loading(tiny_path: Callable[[str], Path]) -> None:
    seen: list[float] = []
    KVFlash.from_file(tiny_path("qwen3"), progress=seen.append, **SMALL).close()
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_of_progress_ends_the_load(tiny_path: Callable[[str], Path], error: type[BaseException]) -> None:
    def stop_it(_done: float) -> None:
        raise error("enough")

    with pytest.raises(error, match="enough"):
        KVFlash.from_file(tiny_path("qwen3"), progress=stop_it, **SMALL)
    KVFlash.from_file(tiny_path("qwen3"), **SMALL).close()


@pytest.mark.parametrize(
    "options",
    [
        {"pool": 0},
        {"pool": -1},
        {"pool": "lots"},
        {"n_ctx": -1},
        {"n_ctx": 1 << 40},
        {"n_batch": -1},
        {"n_ubatch": 0},
        {"chunk": 48},
        {"policy": "best"},
        {"type_k": "q9"},
        {"flash_attn": "maybe"},
        {"n_threads": 0},
        {"tail": 0},
        {"sinks": -1},
    ],
    ids=lambda o: "_".join(f"{k}={v}" for k, v in o.items()),
)
def test_bad_options(tiny_path: Callable[[str], Path], options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(UsageError, match=re.escape(name)) as caught:
        KVFlash.from_file(tiny_path("qwen3"), **{**SMALL, **options})
    assert str(value) in str(caught.value)


def test_bad_files(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        KVFlash.from_file(tmp_path / "none.gguf")
    with pytest.raises(UsageError, match="is a directory"):
        KVFlash.from_file(tmp_path)
    with pytest.raises(ModelError, match="unknown model architecture"):
        KVFlash.from_file(tiny_path("unheard-of"))
    for name in ("mamba", "deepseek32"):
        with pytest.raises(UnsupportedError, match="cannot be pooled"):
            KVFlash.from_file(tiny_path(name), **SMALL)
    with pytest.raises(KVFlashError, match="flash_attn"):
        KVFlash.from_file(tiny_path("qwen3"), **SMALL, type_v="q8_0", flash_attn="off")


def test_refused_memory_runs_with_the_full_cache(opened: Open) -> None:
    kv = opened("mamba", pool="off", n_ctx=1024)
    assert feed(kv, 200).shape == (4, tiny.N_VOCAB)
    assert kv.n_pool is None


def test_two_at_once(opened: Open) -> None:
    """Two models in one process do not meet."""
    one, two, alone = opened(), opened("qwen35"), opened()
    for end in range(64, 1600, 64):
        feed(one, end)
        feed(two, end)
    feed(alone, one.n_tokens)
    assert np.array_equal(one.logits(), alone.logits())
    one.check_integrity()
    two.check_integrity()
