"""The host store: a place for a record is given once and never moves, and running out of memory loses nothing."""

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import CHECK

from pyllama_kvflash.errors import HostMemoryError
from pyllama_kvflash.pool import host_memory as module
from pyllama_kvflash.pool.host_memory import HostMemory
from pyllama_kvflash.pool.host_store import HostStore

N = 64  # bytes of a record


def mark(chunk: int, round_: int = 0) -> int:
    return (chunk * 7 + round_ * 31) % 251


def shut(store: HostStore) -> None:
    store.close()
    store.memory.close()


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


def test_views_hold_while_the_store_grows() -> None:
    """The very array that put() gave stays the record, however many slabs come after it."""
    store = HostStore(HostMemory(N))
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
    store = HostStore(HostMemory(N))
    before = {place(store.put(chunk)) for chunk in range(100)}
    kept = {place(store.get(chunk)) for chunk in range(40)}
    held = store.memory.held_bytes
    store.forget(40)
    assert len(store) == 40
    assert store.used_bytes == 40 * N
    assert 40 not in store
    free = before - kept | free_places(store)
    assert {place(store.put(chunk)) for chunk in range(40, 100)} <= free
    assert store.memory.held_bytes == held
    store.forget(0)
    for chunk in range(100):
        store.put(chunk)
    assert store.memory.held_bytes == held


def test_neighbouring_chunks_are_beside_each_other_where_others_were_forgotten() -> None:
    """One copy then has many of them, as in new memory."""
    memory = HostMemory(N)
    memory.expect(100)
    first, second = HostStore(memory), HostStore(memory)
    for chunk in range(20):
        first.put(chunk)
        second.put(chunk)
    for store in (first, second):
        store.forget(0)
    assert np.all(np.diff([place(first.put(chunk)) for chunk in range(100)]) == N)


def free_places(store: HostStore) -> set[int]:
    """Places that were never given."""
    return {place(row) for slab in store.memory._slabs for row in slab.reshape(-1, N)} - {
        place(entry.record) for entry in store._entries.values()
    }


def test_reserved_places_need_no_more_memory(full: SimpleNamespace) -> None:
    store = HostStore(HostMemory(N))
    store.memory.reserve(50)
    held, full.left = store.memory.held_bytes, 0
    for chunk in range(50):
        store.put(chunk)
    assert store.memory.held_bytes == held >= 50 * N
    store.memory.reserve(0)


def test_pages_are_committed_at_once(full: SimpleNamespace) -> None:
    """By numpy.full and by nothing else: zeros() and empty() would fail when a record is written, too late."""
    store = HostStore(HostMemory(N))
    store.put(0)
    assert full.left == 1_000_000 - 1


def test_no_memory_is_an_error_of_ours_and_loses_nothing(full: SimpleNamespace) -> None:
    store = HostStore(HostMemory(1 << 20))
    for chunk in range(8):
        store.put(chunk)[:] = mark(chunk)
    held, full.left = store.memory.held_bytes, 0
    for failing in (lambda: store.put(8), lambda: store.memory.reserve(1)):
        with pytest.raises(HostMemoryError, match=r"another 1\.0 MiB .* with 8\.0 MiB held") as err:
            failing()
        assert err.value.__suppress_context__
        assert "\n" not in str(err.value)
    assert 8 not in store
    assert (len(store), store.memory.held_bytes) == (8, held)
    assert all((store.get(chunk) == mark(chunk)).all() for chunk in range(8))
    full.left = 1  # memory is there again
    store.put(8)
    assert 8 in store


#
# the limit
#


@pytest.mark.parametrize("step", ["expect", "reserve", "put"])
@pytest.mark.parametrize("rest", [0, N - 1])  # no room for a part of a record
def test_limit_refuses_before_anything_is_taken(memory: "Memory", step: str, rest: int) -> None:
    store = memory.store(limit=5 * N + rest)
    for chunk in range(4):
        store.put(chunk)[:] = mark(chunk)
    store.memory.reserve(1)
    held, n_calls = store.memory.held_bytes, len(memory.sizes)
    if step == "put":
        store.put(4)
    more = {
        "expect": lambda: store.memory.expect(2),
        "reserve": lambda: store.memory.reserve(2),
        "put": lambda: store.put(5),
    }
    for _ in range(2):
        with pytest.raises(HostMemoryError) as err:
            more[step]()
        assert re.fullmatch(
            r"6 chunk records take 0\.38 KiB of host memory, and 0\.3\d KiB are allowed: raise `host_limit"
            r"`, keep the rest in a file \(`disk`\), use a shorter context or a smaller cache type \(`type_k`, `type_v`\)",
            str(err.value),
        )
    assert len(memory.sizes) == n_calls, "no memory was asked for"
    assert store.memory.held_bytes == held == 5 * N
    assert all((store.get(chunk) == mark(chunk)).all() for chunk in range(4))
    store.memory.expect(1 - (step == "put"))  # up to the limit it goes on
    store.put(4)
    assert len(store) == 5


def test_limit_holds_for_what_is_taken_not_only_for_what_is_used(memory: "Memory") -> None:
    """Slabs add up to 1/16, and never more than is allowed."""
    store = memory.store(limit=100 * N + 7)
    for chunk in range(100):
        store.put(chunk)
        assert store.memory.held_bytes <= 100 * N
    assert max(memory.sizes) > N, "there were slabs of several records"
    with pytest.raises(HostMemoryError, match="101 chunk records"):
        store.put(100)
    store.forget(50)
    store.memory.reserve(50)  # forgotten places count no more
    assert store.memory.held_bytes == 100 * N


#
# memory that is taken ahead
#


class Memory:
    """An allocator that can be told to wait, to fail, and what it was asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.threads: list[str] = []
        self.slabs: list[weakref.ref[np.ndarray[Any, Any]]] = []
        self.fail: Callable[[int], bool] = lambda _: False  # by the number of the call
        self.gates: dict[int, threading.Event] = {}
        self.stores: list[HostStore] = []

    def __call__(self, size: int) -> np.ndarray[Any, Any]:
        i = len(self.sizes)
        self.sizes.append(size)
        self.threads.append(threading.current_thread().name)
        if gate := self.gates.get(i):
            assert gate.wait(10)
        if self.fail(i):
            raise MemoryError
        slab = np.full(size, 255, np.uint8)
        self.slabs.append(weakref.ref(slab))
        return slab

    def store(self, limit: int | None = None, n_growers: int = 1) -> HostStore:
        self.stores.append(HostStore(HostMemory(N, self, limit, n_growers=n_growers)))
        return self.stores[-1]

    def gate(self, i: int) -> threading.Event:
        """Call i waits for it."""
        return self.gates.setdefault(i, threading.Event())


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """Slabs that are taken ahead are of four records."""
    monkeypatch.setattr(module, "_SLAB", 4 * N + 1)
    res = Memory()
    yield res
    for gate in res.gates.values():
        gate.set()
    for store in res.stores:
        shut(store)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_expected_memory_is_taken_in_slabs_beside(memory: Memory) -> None:
    """Each of twice the records of the one before: few copies are then enough for many records."""
    store = memory.store()
    store.memory.expect(14)
    until(lambda: len(memory.slabs) == 3)
    assert memory.sizes == [4 * N, 8 * N, 2 * N]
    assert all(name.startswith("kvflash-host") for name in memory.threads)
    store.memory.reserve(3)
    assert store.memory.held_bytes == 4 * N, "only what is needed now"
    store.memory.reserve(14)
    places = {place(store.put(chunk)) for chunk in range(14)}
    assert len(places) == 14
    assert min(np.diff(sorted(places))) >= N, "two records overlap"
    for chunk in range(14):
        store.get(chunk)[:] = mark(chunk)
    assert all((store.get(chunk) == mark(chunk)).all() for chunk in range(14))
    assert len(memory.sizes) == 3, "nothing more was taken"
    assert store.memory.held_bytes == store.used_bytes == 14 * N


def test_several_slabs_are_taken_at_once(memory: Memory) -> None:
    """Places come in the order of the slabs, whichever is there first."""
    store = memory.store(n_growers=3)
    gate = memory.gate(0)
    store.memory.expect(28)
    until(lambda: len(memory.slabs) == 2)
    assert sorted(memory.sizes) == [4 * N, 8 * N, 16 * N]
    threading.Timer(0.1, gate.set).start()
    store.memory.reserve(4)
    assert store.memory.held_bytes == 4 * N
    store.memory.reserve(28)
    for chunk in range(28):
        store.put(chunk)[:] = mark(chunk)
    assert all((store.get(chunk) == mark(chunk)).all() for chunk in range(28))
    assert store.memory.held_bytes == 28 * N


def test_nothing_waits_for_memory_that_is_not_needed_yet(memory: Memory) -> None:
    store = memory.store()
    store.memory.reserve(2)
    gate = memory.gate(2)
    store.memory.expect(6)
    until(lambda: len(memory.sizes) == 3)  # it is being taken
    store.put(0)
    store.put(1)
    store.memory.reserve(0)
    store.memory.expect(4)
    assert len(memory.slabs) == 2
    threading.Timer(0.1, gate.set).start()
    store.put(2)
    assert len(memory.slabs) == 3, "this one did wait"


def test_what_is_expected_is_taken_once(memory: Memory) -> None:
    store = memory.store()
    store.memory.reserve(1)
    for _ in range(3):
        store.memory.expect(5)
    store.memory.reserve(5)
    store.memory.expect(5)
    for chunk in range(3):
        store.put(chunk)
    store.memory.expect(2)
    store.forget(1)
    store.memory.expect(4)
    store.memory.expect(0)
    store.memory.reserve(4)
    assert memory.sizes == [N, 4 * N]
    store.memory.expect(6)
    store.memory.reserve(6)
    assert memory.sizes == [N, 4 * N, 2 * N]
    assert store.memory.held_bytes == 7 * N


def test_no_memory_ahead_is_said_when_it_is_needed(memory: Memory) -> None:
    """In one sentence, once; what came before is there, and the store goes on when memory is there again."""
    store = memory.store()
    memory.fail = lambda i: i == 1
    store.memory.expect(12)
    store.memory.reserve(4)
    for chunk in range(4):
        store.put(chunk)[:] = mark(chunk)
    with pytest.raises(HostMemoryError, match=r"^no host memory for another 0\.0 MiB .* with 0\.0 MiB held: ") as err:
        store.memory.reserve(1)
    assert err.value.__suppress_context__
    assert "\n" not in str(err.value)
    assert (len(store), store.memory.held_bytes) == (4, 4 * N)
    assert all((store.get(chunk) == mark(chunk)).all() for chunk in range(4))

    store.memory.reserve(1)
    assert memory.threads[-1] == threading.current_thread().name, "what was expected is forgotten"
    store.memory.expect(8)
    for chunk in range(4, 12):
        store.put(chunk)[:] = mark(chunk)
    assert all((store.get(chunk) == mark(chunk)).all() for chunk in range(12))
    assert store.memory.held_bytes == 12 * N


def test_no_thread_to_take_memory_ahead(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        msg = "can't start new thread"
        raise RuntimeError(msg)

    store = memory.store()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        store.memory.expect(10)
    assert memory.sizes == []
    store.memory.reserve(3)
    assert store.memory.held_bytes == 3 * N


def test_close_gives_the_memory_back(memory: Memory) -> None:
    store = memory.store()
    store.memory.expect(8)
    for chunk in range(6):
        store.put(chunk)
    until(lambda: len(memory.slabs) == 2)
    shut(store)
    gc.collect()
    assert [slab() for slab in memory.slabs] == [None, None]
    assert len(store) == store.used_bytes == store.memory.held_bytes == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("kvflash-host")]
    shut(store)  # harmless


def test_close_while_memory_is_being_taken(memory: Memory) -> None:
    """It ends the slab that is being taken, and begins no other."""
    store = memory.store()
    gate = memory.gate(0)
    store.memory.expect(12)
    until(lambda: len(memory.sizes) == 1)
    threading.Timer(0.1, gate.set).start()
    shut(store)
    gc.collect()
    assert len(memory.sizes) == 1
    assert [slab() for slab in memory.slabs] == [None]
    assert not [t for t in threading.enumerate() if t.name.startswith("kvflash-host")]


#
# all together
#

steps = st.lists(
    st.tuples(st.just("put"), st.integers(0, 60))
    | st.tuples(st.sampled_from(["forget", "reserve", "expect"]), st.integers(0, 70)),
    max_size=200,
)


@given(steps=steps)
@CHECK
def test_records_are_what_was_written_last(steps: list[tuple[str, int]]) -> None:
    """Against a dict: any order of put, forget, reserve and expect."""
    store, want = HostStore(HostMemory(16)), dict[int, int]()
    for i, (step, n) in enumerate(steps):
        if step == "put":
            want[n] = mark(n, i)
            store.put(n)[:] = want[n]
        elif step == "forget":
            want = {chunk: value for chunk, value in want.items() if chunk < n}
            store.forget(n)
        elif step == "expect":
            store.memory.expect(n)
        else:
            store.memory.reserve(n)
            assert store.memory.held_bytes - store.used_bytes >= n * 16
        assert len(store) == len(want)
    assert all(chunk in store and (store.get(chunk) == value).all() for chunk, value in want.items())
    assert len({place(store.get(chunk)) for chunk in want}) == len(want)
    shut(store)
