"""The store of records that come from a file."""

import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.formats import Record

from pyllama_kvflash.errors import HostMemoryError, SnapshotError
from pyllama_kvflash.pool.host_memory import HostMemory
from pyllama_kvflash.pool.host_store import HostStore

pytestmark = pytest.mark.native

N = 64


def put(store: HostStore, *chunks: int) -> None:
    for chunk in chunks:
        store.put(chunk)[:] = chunk


def lent(value: int, filled: list[int] | None = None) -> Callable[[Record], None]:
    """Fills a place with a value, and says so in a list."""

    def fill(place: Record) -> None:
        place[:] = value
        if filled is not None:
            filled.append(value)

    return fill


@pytest.fixture
def store() -> Iterator[HostStore]:
    """Of records of 64 bytes."""
    memory = HostMemory(N)
    res = HostStore(memory)
    yield res
    res.close()
    memory.close()


def test_a_lent_record_is_read_once(store: HostStore) -> None:
    """When it is used, into a place that it has from the beginning."""
    filled: list[int] = []
    store.lend(3, b"checksum", lent(5, filled))
    assert 3 in store
    assert len(store) == store.memory.n_used == 1
    assert filled == []
    first = store.get(3)
    for _ in range(3):
        assert store.get(3) is first
    assert (first == 5).all()
    assert filled == [5]


def test_a_lent_record_that_is_wrong_is_never_given(store: HostStore) -> None:
    def wrong(_: Record) -> None:
        raise SnapshotError("it was changed")

    store.lend(0, b"checksum", wrong)
    put(store, 1)
    for _ in range(3):
        with pytest.raises(SnapshotError, match="it was changed"):
            store.get(0)
    assert store.get(1)[0] == 1
    store.forget(0)
    put(store, 0)
    assert store.get(0)[0] == 0


@pytest.mark.parametrize("ahead", [True, False])
def test_many_threads_ask_for_a_lent_record(store: HostStore, ahead: bool) -> None:
    """None has it before it is there; read once, if that was begun ahead."""
    done, n, begun, reading = [], 8, threading.Barrier(8), threading.Event()

    def fill(_: Record) -> None:
        reading.set()
        threading.Event().wait(0.05)
        done.append(1)

    def ask() -> None:
        begun.wait()
        store.get(0)
        assert done
        done_by.append(1)

    done_by: list[int] = []
    store.lend(0, b"checksum", fill)
    if ahead:
        store.read_ahead()
        assert reading.wait(30)
    threads = [threading.Thread(target=ask) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done_by) == n
    assert len(done) == 1 or not ahead
    n_read = len(done)
    store.get(0)
    assert len(done) == n_read


def test_lent_records_count_for_the_limit() -> None:
    memory = HostMemory(N, limit=3 * N)
    store = HostStore(memory)
    for chunk in range(3):
        store.lend(chunk, b"checksum", lent(chunk))
    with pytest.raises(HostMemoryError, match="4 chunk records take"):
        store.lend(3, b"checksum", lent(3))
    assert [int(store.get(chunk)[0]) for chunk in range(3)] == [0, 1, 2]
    store.close()
    memory.close()


def test_a_place_is_not_written_to_once_it_is_another_ones(store: HostStore) -> None:
    """A thread that reads ahead is waited for before its place is given away."""
    reading, go_on = threading.Event(), threading.Event()

    def fill(place: Record) -> None:
        reading.set()
        assert go_on.wait(30)
        place[:] = 7

    store.lend(0, b"checksum", fill)
    store.read_ahead()
    assert reading.wait(30)
    threading.Timer(0.05, go_on.set).start()
    store.forget(0)
    put(store, 0)
    assert go_on.is_set()
    assert (store.get(0) == 0).all()


def test_checksums(store: HostStore) -> None:
    """Computed once for a record that does not change, known of a lent one, and forgotten with it."""
    computed: list[int] = []

    def compute(record: Record) -> bytes:
        computed.append(int(record[0]))
        return bytes(record[:1])

    def sums() -> list[bytes]:
        return [store.stored(chunk).summed(compute) for chunk in range(3)]

    put(store, 0, 1)
    store.lend(2, b"known", lent(7))
    for _ in range(2):
        assert sums() == [b"\0", b"\1", b"known"]
    assert computed == [0, 1]
    store.forget(1)
    for chunk in (1, 2):
        store.put(chunk)[:] = 50 + chunk
    assert sums() == [b"\0", bytes([51]), bytes([52])]
    assert computed == [0, 1, 51, 52]


@pytest.mark.parametrize("again", [True, False])
def test_a_record_that_is_forgotten_while_its_checksum_is_computed(store: HostStore, again: bool) -> None:
    """By a thread that saves it: the checksum is known of what was saved, and of nothing else."""
    put(store, 3)
    holder = store.hold()

    def compute(record: Record) -> bytes:
        res = bytes(record[:1])
        store.forget(0)
        if again:
            store.put(3)[:] = 99
        return res

    assert store.stored(3).summed(compute) == b"\3"
    store.put(3)[:] = 99
    assert store.stored(3).summed(lambda r: bytes(r[:1])) == b"c"
    store.release(holder)


def test_what_is_held_stays_until_it_is_released(store: HostStore) -> None:
    put(store, *range(10))
    views = [store.get(chunk) for chunk in range(10)]
    one, two = store.hold(), store.hold()
    store.forget(4)
    assert len(store) == 4
    for chunk in range(4, 30):
        store.put(chunk)[:] = 99
    store.forget(20)
    for chunk in range(20, 40):
        store.put(chunk)[:] = 98
    assert [int(view[0]) for view in views] == list(range(10))
    n_used = store.memory.n_used
    store.release(one)
    store.release(one)
    assert store.memory.n_used == n_used, "somebody else still reads it"
    store.release(two)
    store.memory.reserve(0)
    assert store.memory.n_used == len(store) == 40
    store.forget(0)
    assert store.memory.n_used == 0


def test_a_lent_record_stays_while_it_is_held(store: HostStore) -> None:
    """Also one that is read only then."""
    store.lend(0, b"checksum", lent(3))
    holder, stored = store.hold(), store.stored(0)
    store.forget(0)
    put(store, 0)
    stored.see()
    assert (stored.record == 3).all()
    assert (store.get(0) == 0).all()
    store.release(holder)
    store.memory.reserve(0)
    assert store.memory.n_used == 1


def test_a_store_that_is_closed_lets_go_of_what_was_lent() -> None:
    memory = HostMemory(N)
    store = HostStore(memory)
    store.lend(0, b"checksum", lent(1))
    store.close()
    assert len(store) == 0
    assert 0 not in store
    memory.close()
