"""Which chunks are resident: what moves them, what holds them, and how it is seen that ledger and pool differ."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE
from support.runs import LRU, Open, check_residency, feed, logits_of, out

from pyllama_kvflash.errors import PoolError, UsageError
from pyllama_kvflash.policy import LedgerError

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL = LRU


#
# residency
#


def test_residency(opened: Open) -> None:
    kv = opened()
    empty = kv.residency()
    assert all(getattr(empty, f.name).shape == (0,) for f in dataclasses.fields(empty))
    for end in (1, 63, 64, 65, 500, 768, 769, 2000):
        feed(kv, end, 64)
        check_residency(kv)
    kv.page_in(10)
    kv.page_out(20)
    kv.pin(128, 129)
    check_residency(kv)
    assert kv.residency().protected[2]
    kv.rollback(1100)
    check_residency(kv)
    table = kv.residency().to_dict()
    assert {len(column) for column in table.values()} == {18}
    assert table["chunk"].tolist() == list(range(18))
    assert np.array_equal(table["block"], kv.residency().block)


def test_page_out_and_in_leaves_no_trace(opened: Open) -> None:
    kv, control = opened(), opened()
    feed(kv, 700, 64)
    feed(control, 700, 64)
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
    assert np.array_equal(logits_of(kv, 760, 1), logits_of(control, 760, 1))


@pytest.mark.parametrize("chunk", [0, 28, 29, 30, 31])
def test_protected_chunks_stay(opened: Open, chunk: int) -> None:
    kv = opened()
    feed(kv, 2000, 64)
    assert len(kv.residency().resident) == 32
    with pytest.raises(PoolError, match=rf"chunk {chunk} cannot leave the pool"):
        kv.page_out(chunk)
    check_residency(kv)


@pytest.mark.parametrize("chunk", [-1, 32, 10**9])
def test_chunks_that_do_not_exist(opened: Open, chunk: int) -> None:
    kv = opened()
    feed(kv, 2000, 64)
    for call in (kv.page_in, kv.page_out):
        with pytest.raises(UsageError, match=rf"there is no chunk {chunk:,}: the sequence has 32 of 64 tokens"):
            call(chunk)
    check_residency(kv)


def test_pins(opened: Open) -> None:
    kv = opened(pool=1024)
    feed(kv, 2000, 64)
    assert {5, 6} <= set(out(kv))
    kv.pin(5 * 64 + 1, 6 * 64 + 1)  # two chunks, which come back
    assert not {5, 6} & set(out(kv))
    with pytest.raises(PoolError, match="chunk 5 cannot leave the pool"):
        kv.page_out(5)
    feed(kv, 4000, 64)
    assert not {5, 6} & set(out(kv))
    check_residency(kv)
    kv.unpin(5 * 64, 6 * 64)
    feed(kv, 6000, 64)
    assert 5 in out(kv)
    assert 6 not in out(kv)
    check_residency(kv)


def test_pins_ahead_of_what_is_written(opened: Open) -> None:
    kv = opened(pool=1024)
    kv.pin(1000, 1100)
    kv.check_integrity()
    feed(kv, 500, 64)
    kv.check_integrity()
    feed(kv, 4000, 64)
    assert not {15, 16, 17} & set(out(kv))
    assert 18 in out(kv)
    check_residency(kv)


def test_too_many_pins_pin_nothing(opened: Open) -> None:
    kv = opened(pool=1024)
    feed(kv, 3000, 64)
    kv.pin(640, 641)
    before = (kv.pager.ledger.pins.copy(), out(kv))
    with pytest.raises(PoolError, match=r"pinning 0:2048 .*need a pool of [\d,]+ tokens.*1,024"):
        kv.pin(0, 2048)
    assert (kv.pager.ledger.pins, out(kv)) == before
    with pytest.raises(PoolError):
        kv.pin(8000, 16384)  # ahead
    assert (kv.pager.ledger.pins, out(kv)) == before
    check_residency(kv)
    feed(kv, 5000, 64)  # and nothing is stuck
    check_residency(kv)


@pytest.mark.parametrize(("start", "end"), [(5, 5), (6, 5), (-1, 5), (0, 16385)])
def test_pins_that_are_no_range(opened: Open, start: int, end: int) -> None:
    kv = opened()
    with pytest.raises(
        UsageError, match=rf"pin {start}:{end} is not a range of positions: give 0 <= start < end <= 16384"
    ):
        kv.pin(start, end)


def test_no_pool(opened: Open) -> None:
    kv = opened(pool="off")
    feed(kv, 200, 64)
    assert kv.n_pool is None
    for call in (kv.residency, kv.check_integrity, lambda: kv.page_in(0), lambda: kv.page_out(0), lambda: kv.pin(0, 1)):
        with pytest.raises(UsageError, match="no pool"):
            call()
    stats = kv.stats()
    assert (stats.n_pool, stats.chunks, stats.host_bytes, stats.pages_out) == (None, 0, 0, 0)
    kv.rollback(100)
    feed(kv, 200, 64)


#
# integrity
#


def test_check_integrity_sees_a_chunk_dropped_behind_the_engine(opened: Open) -> None:
    kv = opened()
    feed(kv, 700, 64)
    kv.ctx.drop(3)
    with pytest.raises(LedgerError, match=r"differ about chunks \[3\]"):
        kv.check_integrity()


def test_check_integrity_sees_a_chunk_brought_in_behind_the_engine(opened: Open) -> None:
    kv = opened()
    feed(kv, 700, 64)
    kv.page_out(3)
    kv.ctx.page_in(3, kv.pager.records.get(3))
    with pytest.raises(LedgerError, match=r"differ about chunks \[3\]"):
        kv.check_integrity()


def test_check_integrity_sees_positions_removed_behind_the_engine(opened: Open) -> None:
    kv = opened()
    feed(kv, 700, 64)
    kv.ctx.attn_seq_rm(200, 210)
    with pytest.raises(LedgerError, match="chunk 3 has 54 cells in the pool, and 64 positions"):
        kv.check_integrity()


def test_check_integrity_sees_a_lost_record(opened: Open) -> None:
    kv = opened()
    feed(kv, 700, 64)
    del kv.pager.records._entries[4]
    with pytest.raises(LedgerError, match=r"no record in the store for chunks \[4\]"):
        kv.check_integrity()
