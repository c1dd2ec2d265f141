"""Lossless decoding and the meter with policy fresh: what is drafted through guests of each layer's own choice is checked
against everything, and what is checked chooses nothing.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, lossless, snapshots
from support.changes import ENGINE
from support.cuts import cut_off_at_every_line
from support.lossless import answer, chosen_alike
from support.oracles import ON_GPU
from support.rounding import Chosen, held
from support.runs import BY_SIXTEEN, MODELS, TOKENS, Open, check_residency, read, turn

from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.events import Checked
from pyllama_kvflash.native.guests import UNIT
from pyllama_kvflash.policy.lookahead import Length, Lookahead
from pyllama_kvflash.pool.sequence import PooledSequence

pytestmark = [
    pytest.mark.native,
    pytest.mark.sampled(ENGINE),
    pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order"),
]

environment = commands.environment
known = lossless.known
wordless = snapshots.wordless

CHUNK = 16
SMALL: dict[str, Any] = {**BY_SIXTEEN, "pool": 256, "panes": 2, "mode": "lossless", "policy": "fresh"}  # 16 blocks
FULL = {**SMALL, "pool": "off", "mode": "fast", "policy": "lru"}
SEED = Sampling(temperature=1.0, seed=1)


def guests(kv: KVFlash) -> Any:
    """The unit in each slot of each layer, all of which are units of chunks that stand, and none of them twice."""
    room = kv.pager.guests
    assert room is not None
    assert room.native.info().n <= kv.pager.ledger.n_sealed * CHUNK
    units = room.native.tables()[1]
    for row in units:
        there = row[row >= 0]
        assert len(set(there.tolist())) == len(there)
        assert (there < kv.pager.ledger.n_sealed * CHUNK // UNIT).all()
    return units


def check(kv: KVFlash) -> None:
    check_residency(kv, CHUNK)
    assert guests(kv).size


#
# the text
#


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_the_full_caches(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Greedy and with a seed, in a second turn, and after a rollback to where the index is shorter; if the model can go back."""
    monkeypatch.setattr(Lookahead, "next", Length(3))  # no clock
    kv, full, chosen = opened(name), opened(name, **FULL), known(name)
    for n, sampling in ((700, SEED), (820, lossless.GREEDY), (500, SEED)):
        for one in (kv, full):
            if one.n_tokens > n:
                one.clear() if one.sequence.stateful else one.rollback(n)
            read(one, n)
        chosen.rows.clear()
        want, got = (chosen_alike(chosen, one, TOKENS[:3], 50, sampling, append=True) for one in (full, kv))
        assert got == want
        assert kv.decoder.lossless is not None
        assert kv.decoder.lossless.stats.drafted > 0
        check(kv)


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("name", MODELS)
def test_sequences_take_turns(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without flash attention, which sums in f16: where two share a window's cells, these are in another order."""
    monkeypatch.setattr(Lookahead, "next", Length(3))  # no clock
    plain: dict[str, Any] = {"flash_attn": "off"}
    kv, texts = opened(name, n_parallel=2, pool=512, **plain), (TOKENS[:700], TOKENS[700:1300])
    chosen = [known(name, **plain) for _ in texts]
    want = [chosen_alike(c, opened(name, **FULL, **plain), text, 60) for c, text in zip(chosen, texts, strict=True)]
    runs = []
    for s, c, text in zip(kv.sequences, chosen, texts, strict=True):
        with held(c):
            runs.append(s.generation(text, max_tokens=60, sampling=lossless.GREEDY))
    got: list[list[int]] = [[], []]
    while not all(run.ended for run in runs):
        for i, run in enumerate(runs):
            got[i] += [] if run.ended else turn(run)
    assert got == want
    assert all(run.draft_stats and run.draft_stats.drafted for run in runs)


@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen3", marks=pytest.mark.nightly), pytest.param("qwen35", marks=pytest.mark.nightly(ENGINE))],
)
def test_cut_off_at_every_line(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What is left is the beginning of what would have been, and goes on as that."""
    monkeypatch.setattr(Lookahead, "next", Length(3))
    chosen = known(name)
    want = [*TOKENS[:400].tolist(), *chosen_alike(chosen, opened(name, **FULL), TOKENS[:400], 30)]

    def begun() -> KVFlash:
        kv = opened(name)
        read(kv, 399)
        return kv

    def act(kv: KVFlash) -> None:
        with held(chosen):
            answer(kv, want[399:400], 6, append=True)

    def checked(kv: KVFlash) -> None:
        left = [*kv.tokens.tolist(), *([] if kv.sequence.pending is None else [kv.sequence.pending])]
        n = len(left)
        assert left == want[:n]
        with held(chosen, n - 399):
            assert answer(kv, want[n : n + 1], 6, append=True) == want[n + 1 : n + 7]
        check(kv)
        kv.clear()
        read(kv, 399)

    _, places = cut_off_at_every_line(begun, act, checked, step=int(os.environ.get("KVFLASH_CUT_STEP", "61")))
    assert len({place.partition(":")[0] for place in places}) > 5, "cut off in few files"


#
# what a check leaves
#


@pytest.mark.parametrize("how", [{}, {"mode": "fast", "meter": 1.0}], ids=["lossless", "meter"])
def test_a_check_chooses_nothing(
    opened: Open, wordless: None, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """It does not even keep queries, or what they attend to."""
    kv = opened(**how)
    exact = kv.sequence.reads_exactly.ctx
    assert kv.ctx.q_tap == exact.q_tap == 0
    monkeypatch.setattr(PooledSequence, "reselect_now", None)
    monkeypatch.setattr(PooledSequence, "attended", None)
    read(kv, 707)
    before = guests(kv)
    if how:
        kv.sequence.seen_exactly(700, 7, kv.ctx.save_partial())
    else:
        kv.decode(TOKENS[707:711])  # no chunk begins
    assert np.array_equal(guests(kv), before)
    answer(kv, TOKENS[:20], 40, append=True)
    check(kv)


@pytest.mark.parametrize("name", MODELS)
def test_a_trial_leaves_guests_of_what_stands(opened: Open, name: str) -> None:
    """Though it fills chunks: these are gone with it. What it chose is as good as put there by hand."""
    kv, other = opened(name, mode="fast"), opened(name, mode="fast")
    for one in (kv, other):
        read(one, 700)
    before, n_sealed = guests(kv), kv.pager.ledger.n_sealed
    kv.sequence.begin_trial(40)
    for i in range(40):
        kv.ctx.decode(TOKENS[1000 + i : 1001 + i], 700 + i)
        guests(kv)
    kv.sequence.recover()
    assert kv.n_tokens == 700
    assert kv.pager.ledger.n_sealed == n_sealed
    after = guests(kv)
    assert not np.isin(after, before).all(), "nothing was chosen"
    check(kv)
    ours, theirs = kv.pager.guests, other.pager.guests
    assert ours is not None
    assert theirs is not None
    theirs.resize(kv.pager.ledger.n_guests)
    theirs.native.place(after)
    for at in range(700, 730):  # makes the same room, too
        for one in (kv, other):
            one.decode(TOKENS[at : at + 1])
        assert np.array_equal(guests(kv), guests(other))
        np.testing.assert_allclose(kv.logits(), other.logits(), rtol=0, atol=1e-4)  # other cells


#
# the meter
#


def test_the_meter_says_the_agreement(opened: Open, wordless: None) -> None:
    """Of tokens that are those without it; and of some, but not all, it finds that they are the full cache's."""
    kv, control = opened(mode="fast", meter=1.0), opened(mode="fast")
    events = list(kv.generate(TOKENS[:700], max_tokens=120, sampling=lossless.GREEDY))
    assert [e.id for e in events if hasattr(e, "id")] == answer(control, TOKENS[:700], 120)
    assert np.array_equal(guests(kv), guests(control))
    found, stats = [e for e in events if isinstance(e, Checked)], events[-1].stats  # type: ignore[union-attr]
    assert stats.checked == sum(e.n for e in found) >= 48
    assert stats.agreed == sum(e.agreed for e in found)
    assert 0 < stats.agreement < 1
    assert all(e.kld > 0 for e in found)
