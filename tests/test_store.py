"""The host store: a place for a record is given once and never moves, and running out of memory loses nothing."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllama_kvflash import store as module
from pyllama_kvflash.errors import HostMemoryError
from pyllama_kvflash.store import HostStore

CHECK = settings(derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])

N = 64  # bytes of a record


def mark(chunk: int, round_: int = 0) -> int:
    return (chunk * 7 + round_ * 31) % 251


def place(record: np.ndarray[Any, Any]) -> int:
    return int(record.__array_interface__["data"][0])


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """numpy.full of the store: `left` more calls succeed."""
    state = SimpleNamespace(left=1_000_000)

    def limited(*args: Any) -> np.ndarray[Any, Any]:
        if state.left == 0:
            raise MemoryError
        state.left -= 1
        return np.full(*args)

    monkeypatch.setattr(module, "np", SimpleNamespace(full=limited, uint8=np.uint8))
    return state


def test_a_new_store_is_empty_and_holds_nothing() -> None:
    store = HostStore(N)
    assert len(store) == store.used_bytes == store.held_bytes == 0
    assert 0 not in store
    with pytest.raises(KeyError):
        store.get(0)


def test_a_chunk_keeps_its_place() -> None:
    store = HostStore(N)
    first = store.put(3)
    assert first.shape == (N,)
    assert first.dtype == np.uint8
    assert first.flags.c_contiguous
    first[:] = 9
    assert place(store.put(3)) == place(store.get(3)) == place(first)
    assert (store.get(3) == 9).all()
    assert len(store) == 1
    assert 3 in store
    assert 2 not in store


def test_views_hold_while_the_store_grows() -> None:
    """The very array that put() gave stays the record, however many slabs come after it."""
    store = HostStore(N)
    views = []
    for chunk in range(2000):
        views.append(store.put(chunk))
        views[-1][:] = mark(chunk)
    for chunk, view in enumerate(views):
        assert place(view) == place(store.get(chunk))
        assert (view == mark(chunk)).all()
    places = sorted(place(view) for view in views)
    assert min(np.diff(places)) >= N, "two records overlap"


def test_forgotten_places_are_used_again() -> None:
    store = HostStore(N)
    before = {place(store.put(chunk)) for chunk in range(100)}
    kept = {place(store.get(chunk)) for chunk in range(40)}
    held = store.held_bytes
    store.forget(40)
    assert len(store) == 40
    assert store.used_bytes == 40 * N
    assert 40 not in store
    assert {place(store.put(chunk)) for chunk in range(40, 100)} <= before - kept | free_places(store)
    assert store.held_bytes == held
    store.forget(0)
    for chunk in range(100):
        store.put(chunk)
    assert store.held_bytes == held


def free_places(store: HostStore) -> set[int]:
    """Places that were never given."""
    return {place(row) for slab in store._slabs for row in slab} - {place(r) for r in store._records.values()}


def test_forget_takes_the_first_chunk_and_all_later_ones() -> None:
    store = HostStore(N)
    for chunk in (9, 2, 5, 4):
        store.put(chunk)[:] = mark(chunk)
    store.forget(5)
    assert [chunk for chunk in range(12) if chunk in store] == [2, 4]
    assert (store.get(4) == mark(4)).all()
    store.forget(100)
    assert len(store) == 2


def test_memory_stays_within_a_tenth_of_the_records() -> None:
    store = HostStore(N)
    for chunk in range(5000):
        store.put(chunk)
        assert store.used_bytes == (chunk + 1) * N
        assert store.used_bytes <= store.held_bytes
        if chunk + 1 >= 200:
            assert store.held_bytes <= store.used_bytes * 1.10


def test_memory_stays_within_a_tenth_after_reserving_a_batch() -> None:
    """As the engine does: room for 8 chunks, which are then written."""
    store = HostStore(N)
    for chunk in range(0, 4000, 8):
        store.reserve(8)
        for c in range(chunk, chunk + 8):
            store.put(c)
        if len(store) >= 200:
            assert store.held_bytes <= store.used_bytes * 1.10


def test_reserved_places_need_no_more_memory(full: SimpleNamespace) -> None:
    store = HostStore(N)
    store.reserve(50)
    held, full.left = store.held_bytes, 0
    for chunk in range(50):
        store.put(chunk)
    assert store.held_bytes == held >= 50 * N
    store.reserve(0)


def test_pages_are_committed_at_once(full: SimpleNamespace) -> None:
    """By numpy.full and by nothing else: zeros() and empty() would fail when a record is written, too late."""
    store = HostStore(N)
    store.put(0)
    assert full.left == 1_000_000 - 1


def test_no_memory_is_an_error_of_ours_and_loses_nothing(full: SimpleNamespace) -> None:
    store = HostStore(1 << 20)
    for chunk in range(8):
        store.put(chunk)[:] = mark(chunk)
    held, full.left = store.held_bytes, 0
    for failing in (lambda: store.put(8), lambda: store.reserve(1)):
        with pytest.raises(HostMemoryError, match=r"another 1\.0 MiB .* with 8\.0 MiB held") as err:
            failing()
        assert err.value.__suppress_context__
        assert "\n" not in str(err.value)
    assert 8 not in store
    assert (len(store), store.held_bytes) == (8, held)
    assert all((store.get(chunk) == mark(chunk)).all() for chunk in range(8))
    full.left = 1  # memory is there again
    store.put(8)
    assert 8 in store


def test_no_memory_in_the_middle_of_a_reservation(full: SimpleNamespace) -> None:
    """What was taken by then stays usable."""
    store = HostStore(N)
    full.left = 2
    with pytest.raises(HostMemoryError):
        store.reserve(100)
    assert len(store) == 0
    held = store.held_bytes
    for chunk in range(held // N):
        store.put(chunk)
    assert store.held_bytes == held


steps = st.lists(
    st.tuples(st.just("put"), st.integers(0, 60))
    | st.tuples(st.sampled_from(["forget", "reserve"]), st.integers(0, 70)),
    max_size=200,
)


@given(steps=steps)
@CHECK
def test_records_are_what_was_written_last(steps: list[tuple[str, int]]) -> None:
    """Against a dict: any order of put, forget and reserve."""
    store, want = HostStore(16), dict[int, int]()
    for i, (step, n) in enumerate(steps):
        if step == "put":
            want[n] = mark(n, i)
            store.put(n)[:] = want[n]
        elif step == "forget":
            want = {chunk: value for chunk, value in want.items() if chunk < n}
            store.forget(n)
        else:
            store.reserve(n)
            assert store.held_bytes - store.used_bytes >= n * 16
        assert len(store) == len(want)
    assert all(chunk in store and (store.get(chunk) == value).all() for chunk, value in want.items())
    assert len({place(store.get(chunk)) for chunk in want}) == len(want)
