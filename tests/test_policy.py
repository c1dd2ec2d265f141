"""Ledger and plan beside a toy world that holds bytes: whatever the order of steps, no chunk is ever lost."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from support.changes import POLICY
from support.paging import FULL, Exact, Paging, check_choice, check_swaps, come_back, filled, heat_of, snapshot

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.policy import Blocks, Ledger, LedgerError, Plan, bring_in, make_room, reselect
from pyllama_kvflash.policy.ledger import _CHUNK


@pytest.mark.nightly(POLICY)
def test_nothing_is_lost_whatever_the_order() -> None:
    """The invariants hold in all runs, and the runs did page, pin, roll back and clear."""
    Paging.seen.clear()
    run_state_machine_as_test(Exact, settings=FULL)
    steps = (
        "interrupted",
        "no room",
        "pin",
        "pin ahead",
        "pin refused",
        "rollback",
        "cut brought in",
        "clear",
        "reselect",
        "read exactly",
        "settled in",
    )
    assert not [step for step in steps if not Paging.seen[step]]
    assert Paging.seen["drop"] > 1000
    assert Paging.seen["page in"] > 100


def test_free_blocks_are_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = filled(n_tokens=6 * 16 - 1)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "heat", lambda _: pytest.fail("the order was asked for, where nothing has to go"))
        assert not make_room(ledger, 2)
        assert not bring_in(ledger, [1, 5])
    assert make_room(ledger, 3).drops == (1,)


def test_bring_in_never_drops_what_it_was_asked_for() -> None:
    ledger = filled()
    for c in (1, 2):
        ledger.drop(c)
    ledger.write(2 * 16)
    for c in ledger.to_store():
        ledger.mark_stored(c)
    ledger.rate(np.arange(10.0))
    plan = bring_in(ledger, [3, 1, 4, 1, 2, 9])
    assert plan == Plan(drops=(5, 6), page_ins=(1, 2))


def test_too_little_room_drops_nothing_and_says_why() -> None:
    ledger = filled()
    ledger.pins |= {3, 4, 99}
    before = snapshot(ledger)
    with pytest.raises(PoolError, match=r"^4 more blocks .* 3 can be freed: 5 of its 8 are protected .* larger pool"):
        make_room(ledger, 4)
    assert make_room(ledger, 3).drops == (1, 2, 5)
    assert snapshot(ledger) == before


def test_a_new_chunk_has_no_score_and_scores_are_a_copy() -> None:
    ledger = filled()
    assert np.isnan(ledger.score).all()
    ledger.score[:] = 1
    ledger.candidates()[:] = False
    assert np.isnan(ledger.score).all()
    assert ledger.candidates().tolist() == [False, True, True, True, True, True, False, False]


def test_candidates_are_what_has_a_record_and_no_protection_in_or_out() -> None:
    """Not the sink, the tail, or a pin; one that is out is."""
    ledger = filled(10, n_tokens=8 * 16)
    ledger.pins.add(5)
    ledger.drop(1)
    ledger.drop(2)
    ledger.write(16)
    assert np.flatnonzero(ledger.candidates()).tolist() == [1, 2, 3, 4, 6]


def test_scores_stay_with_the_first_chunks() -> None:
    """A scoring that began before the last chunks were there says nothing of them; the next one replaces it."""
    ledger = filled(scores=[3, 1, 2])
    assert ledger.score[:3].tolist() == [3, 1, 2]
    assert np.isnan(ledger.score[3:]).all()
    ledger.rate(np.array([np.nan, 7]))
    assert ledger.score[1:3].tolist() == [7, 2]
    assert np.isnan(ledger.score[0])
    before = snapshot(ledger)
    ledger.rate(np.zeros(0))
    assert snapshot(ledger) == before
    with pytest.raises(LedgerError, match="9 scores for 8 chunks"):
        ledger.rate(np.zeros(9))
    assert snapshot(ledger) == before


def test_a_chunk_that_was_asked_for_is_hot_until_the_next_scoring() -> None:
    ledger = filled(scores=range(8))
    ledger.unrate(1)
    assert make_room(ledger, 4).drops == (2, 3, 4, 5)
    ledger.rate(np.arange(8.0))
    assert make_room(ledger, 4).drops == (1, 2, 3, 4)
    for chunk in (-1, 8):
        with pytest.raises(LedgerError, match=f"chunk {chunk} does not exist"):
            ledger.unrate(chunk)


def test_a_chunk_that_is_written_to_again_loses_its_score() -> None:
    ledger = filled(scores=range(8))
    ledger.rollback(5 * 16 + 3)
    assert ledger.score.tolist() == [0, 1, 2, 3, 4, 5]
    ledger.write(1)
    assert ledger.score[:5].tolist() == [0, 1, 2, 3, 4]
    assert np.isnan(ledger.score[5])


def test_rollback_forgets_the_scores_behind_it() -> None:
    ledger = filled(scores=range(8))
    ledger.rollback(4 * 16)
    assert ledger.score.tolist() == [0, 1, 2, 3]
    ledger.write(4 * 16)
    assert np.isnan(ledger.score[4:]).all()
    ledger.clear()
    assert len(ledger.score) == 0


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Any chunks that the rules allow, stored or not, in or out; scores with ties, infinite ones and none."""
    n, chunk = draw(st.integers(0, 14)), draw(st.sampled_from([1, 4]))
    n_tokens = n * chunk - (draw(st.integers(0, chunk - 1)) if n else 0)
    number = st.sampled_from([np.nan, np.nan, -np.inf, np.inf, 0.0, -0.0, 1.0]) | st.floats(allow_nan=False, width=16)
    chunks = np.zeros(n, _CHUNK)
    for i, row in enumerate(chunks):
        row["stored"] = (i + 1) * chunk <= n_tokens and draw(st.integers(0, 4)) > 0
        row["resident"] = not row["stored"] or draw(st.booleans())
        row["touched"] = draw(st.integers(1, 5))
        row["score"] = draw(number)
    n_block = int(np.count_nonzero(chunks["resident"])) + draw(st.integers(0, 4))
    ledger = Ledger(n_block, chunk, n_sinks=draw(st.integers(0, 2)), n_tail=draw(st.integers(0, 3)))
    ledger.pins |= draw(st.sets(st.integers(0, 16), max_size=3))
    ledger._now = (n_tokens, chunks)
    ledger._tick = 5
    ledger.check_integrity()
    return ledger


PROPERTY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.nightly(POLICY)
@given(ledger=ledgers())
@PROPERTY
def test_heat_is_the_order_of_scores_and_then_of_use(ledger: Ledger) -> None:
    heat, order = ledger.heat(), [heat_of(ledger, c) for c in range(ledger.n_chunks)]
    assert np.isfinite(heat).all()
    for a in range(ledger.n_chunks):
        for b in range(ledger.n_chunks):
            assert (heat[a] < heat[b]) == (order[a] < order[b])


@pytest.mark.nightly(POLICY)
@given(ledger=ledgers(), n_free=st.integers(0, 6))
@PROPERTY
def test_reselect_is_the_best_choice_whatever_the_ledger(ledger: Ledger, n_free: int) -> None:
    before, protected = snapshot(ledger), ledger.protected()
    stays = {c for c in range(ledger.n_chunks) if ledger.resident[c] and not ledger.candidates()[c]}
    plan = reselect(ledger, n_free)
    assert snapshot(ledger) == before
    check_choice(ledger, plan, n_free)
    assert plan == reselect(ledger, n_free)
    for chunk in plan.drops:
        ledger.drop(chunk)
    ledger.check_integrity()
    for chunk in plan.page_ins:
        ledger.page_in(chunk)
    ledger.check_integrity()
    assert not plan or ledger.n_free >= n_free
    assert (ledger.resident[sorted(stays)]).all()
    assert not protected[list(plan.drops)].any()


@pytest.mark.nightly(POLICY)
@given(ledger=ledgers(), n_free=st.integers(0, 6), n_most=st.integers(0, 6))
@PROPERTY
def test_reselect_brings_in_no_more_than_it_is_told_to(ledger: Ledger, n_free: int, n_most: int) -> None:
    """The hottest of what would come in for the coldest of what would go, and the blocks that are to be free are."""
    before, stays = snapshot(ledger), ledger.protected() & (ledger.resident)
    plan, whole = reselect(ledger, n_free, n_most), reselect(ledger, n_free)
    assert snapshot(ledger) == before
    assert len(plan.page_ins) <= n_most
    check_swaps(ledger, plan, whole, n_free, n_most)
    if n_most >= len(whole.page_ins):
        assert plan == whole
    heat = ledger.heat()
    for new in plan.page_ins:
        assert all(heat[new] >= heat[old] for old in plan.drops)
    for chunk in plan.drops:
        ledger.drop(chunk)
    for chunk in plan.page_ins:
        ledger.page_in(chunk)
    ledger.check_integrity()
    assert not plan or ledger.n_free >= n_free
    assert (ledger.resident[stays]).all()


def test_a_chunk_without_a_record_never_leaves() -> None:
    ledger = Ledger(8, 16, n_sinks=1, n_tail=2)
    ledger.write(8 * 16)
    assert ledger.to_store() == list(range(8))
    assert not ledger.evictable().any()
    with pytest.raises(LedgerError, match="chunk 4 has no record: it would be lost"):
        ledger.drop(4)
    ledger.mark_stored(4)
    ledger.drop(4)


@pytest.mark.parametrize(
    ("n_before", "n", "states", "n_free"),
    [
        (0, 1, "R", 7),
        (0, 16, "O", 8),
        (0, 17, "OR", 7),
        (0, 100 * 16 + 15, 100 * "O" + "R", 7),  # many more than there are blocks
        (32, 16, "RRO", 6),
        (32, 40, "RROOR", 5),
        (40, 1, "RRR", 5),
        (40, 8, "RRO", 6),  # the block of the chunk that is full now is free
        (40, 9, "RROR", 5),  # and taken by the next one
        (40, 1000, "RR" + 63 * "O", 6),
    ],
)
def test_what_was_computed_elsewhere_is_out_but_for_the_chunk_that_is_written(
    n_before: int, n: int, states: str, n_free: int
) -> None:
    """Full chunks have their records; what was there before, and full, is as it was."""
    ledger = Ledger(8, 16, n_sinks=1, n_tail=2)
    if n_before:
        ledger.write(n_before)
        for c in ledger.to_store():
            ledger.mark_stored(c)
        ledger.rate(np.arange(ledger.n_chunks, dtype=np.float64))
    before, touched = ledger.n_sealed, ledger.touched
    ledger.append(n)
    ledger.check_integrity()
    assert (ledger.n_tokens, ledger.n_chunks, ledger.n_free) == (n_before + n, len(states), n_free)
    assert ledger.resident.tolist() == [letter == "R" for letter in states]
    assert ledger.stored.tolist() == [c < (n_before + n) // 16 for c in range(len(states))]
    assert ledger.to_store() == []
    assert ledger.touched[:before].tolist() == touched[:before].tolist()
    assert (ledger.touched[before:] > touched.max(initial=0)).all()
    assert ledger.score[:before].tolist() == list(range(before))
    assert np.isnan(ledger.score[before:]).all()


def test_a_trial_has_its_blocks_whatever_is_computed_beneath_it() -> None:
    """However many of the tried positions are appended, and until it ends, other sequences find the same blocks free."""
    blocks = Blocks(12)
    mine, other = (Ledger(blocks, 4, n_sinks=1, n_tail=1) for _ in range(2))
    mine.write(10)
    assert (blocks.n_free, blocks.n_spare) == (9, 6)
    mine.try_out(9)  # chunk 2 goes on, 3 and 4 begin
    assert (mine.n_tried, other.n_free, blocks.n_spare) == (2, 7, 4)
    for n, n_tried in [(1, 2), (1, 3), (1, 2), (4, 2), (2, 2)]:
        assert not mine.needs_block
        mine.append(n)
        assert (mine.n_tried, other.n_free) == (n_tried, 7)
        mine.check_integrity()
    with pytest.raises(LedgerError, match="8 new chunks, 7 free blocks"):
        other.try_out(32)
    mine.try_out(0)
    assert (mine.n_tried, other.n_free) == (0, 9)
    mine.try_out(30)
    mine.clear()
    assert blocks.n_free == 12


@pytest.mark.parametrize("n", [0, 30, 40, 5 * 16, 9 * 16, 12 * 16 + 3, 12 * 16 + 7])
def test_rollback_of_what_was_computed_elsewhere(n: int) -> None:
    """To a chunk's end, or into one that is there; into one that is out it must come back first, as ever."""
    ledger = filled(n_tokens=2 * 16 + 8)
    ledger.append(10 * 16)
    ledger.check_integrity()
    if n % 16 and not ledger.holds(n // 16):
        with pytest.raises(LedgerError):
            ledger.rollback(n)
        come_back(ledger, n // 16)
    ledger.rollback(n)
    ledger.check_integrity()
    assert (ledger.n_tokens, ledger.n_chunks) == (n, -(-n // 16))
    assert ledger.stored.tolist() == [c < n // 16 for c in range(ledger.n_chunks)]
    ledger.write(16)
    assert ledger.resident[n // 16 :].all()
    ledger.append(16)
    ledger.check_integrity()


def test_a_record_of_a_chunk_that_was_cut_is_void() -> None:
    """Cut through and written again, a chunk is stored anew before it can leave."""
    ledger = filled()
    ledger.rollback(3 * 16 + 1)
    assert ledger.stored.tolist() == [True, True, True, False]
    ledger.write(15)
    assert ledger.to_store() == [3]


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("n_tokens", 8 * 16 + 1, "8 chunks for 129 positions"),
        ("n_tokens", 8 * 16 - 1, "a record of a chunk that is not sealed"),
        ("n_block", 7, "more than the pool"),
        ("resident", [True, True, False, *[True] * 5], "neither resident nor stored"),
    ],
)
def test_integrity_check_sees_a_contradiction(attribute: str, value: Any, why: str) -> None:
    ledger = filled()
    ledger.check_integrity()
    if attribute == "n_block":
        ledger.blocks.n = value
    elif attribute == "n_tokens":
        ledger._now = (value, ledger._now[1])
    else:
        ledger._resident[:] = value
    if "resident" in why:
        ledger._stored[2] = False
    with pytest.raises(LedgerError, match=why):
        ledger.check_integrity()
