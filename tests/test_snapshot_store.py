"""The store of records that come from a file."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.formats import Record

from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.pool.host_memory import HostMemory
from pyllama_kvflash.pool.host_store import HostStore

pytestmark = pytest.mark.native

N = 64


def put(store: HostStore, *chunks: int) -> None:
    for chunk in chunks:
        store.put(chunk)[:] = chunk


def lent(value: int) -> Record:
    res = np.full(N, value, np.uint8)
    res.flags.writeable = False
    return res


@pytest.fixture
def store() -> Iterator[HostStore]:
    """Of records of 64 bytes."""
    memory = HostMemory(N)
    res = HostStore(memory)
    yield res
    res.close()
    memory.close()


def test_a_lent_record_is_checked_once(store: HostStore) -> None:
    checked: list[Record] = []
    record = lent(5)
    store.lend(3, record, b"digest", checked.append)
    assert 3 in store
    assert len(store) == 1
    assert checked == []
    for _ in range(3):
        assert store.get(3) is record
    assert len(checked) == 1
    assert checked[0] is record
    assert store.memory.n_used == 0


def test_a_lent_record_that_is_wrong_is_never_given(store: HostStore) -> None:
    def wrong(record: Record) -> None:
        raise SnapshotError("it was changed")

    store.lend(0, lent(1), b"digest", wrong)
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
    """None has it before it is checked; once, if that was begun ahead."""
    done, n, begun, checking = [], 8, threading.Barrier(8), threading.Event()

    def check(record: Record) -> None:
        checking.set()
        threading.Event().wait(0.05)
        done.append(1)

    def ask() -> None:
        begun.wait()
        store.get(0)
        assert done
        done_by.append(1)

    done_by: list[int] = []
    store.lend(0, lent(1), b"digest", check)
    if ahead:
        store.check_ahead()
        assert checking.wait(30)
    threads = [threading.Thread(target=ask) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done_by) == n
    assert len(done) == 1 or not ahead
    n_checked = len(done)
    store.get(0)
    assert len(done) == n_checked


def test_a_lent_place_is_not_used_again(store: HostStore) -> None:
    record = lent(9)
    store.lend(0, record, b"digest", lambda _: None)
    store.lend(1, lent(8), b"digest", lambda _: None)
    store.forget(1)
    assert 1 not in store
    assert store.get(0) is record
    store.forget(0)
    assert store.memory.n_used == 0
    put(store, *range(20))
    assert (record == 9).all()
    assert store.memory.n_used == 20


def test_digests(store: HostStore) -> None:
    """Computed once for a record that does not change, known of a lent one, and forgotten with it."""
    computed: list[int] = []

    def compute(record: Record) -> bytes:
        computed.append(int(record[0]))
        return bytes(record[:1])

    def digests() -> list[bytes]:
        return [store.digest(chunk, store.get(chunk), compute) for chunk in range(3)]

    put(store, 0, 1)
    store.lend(2, lent(7), b"known", lambda _: None)
    for _ in range(2):
        assert digests() == [b"\0", b"\1", b"known"]
    assert computed == [0, 1]
    store.forget(1)
    for chunk in (1, 2):
        store.put(chunk)[:] = 50 + chunk
    assert digests() == [b"\0", bytes([51]), bytes([52])]
    assert computed == [0, 1, 51, 52]


def test_the_digest_of_a_record_that_was_forgotten(store: HostStore) -> None:
    """Is that of the record, not of what has its number now."""
    put(store, 3)
    holder = store.hold()
    old = store.get(3)
    store.forget(0)
    store.put(3)[:] = 99
    for record, first in ((old, b"\3"), (store.get(3), b"c"), (old, b"\3")):
        assert store.digest(3, record, lambda r: bytes(r[:1])) == first
    store.forget(0)
    assert store.digest(3, old, lambda r: bytes(r[:1])) == b"\3"
    store.release(holder)


@pytest.mark.parametrize("again", [True, False])
def test_a_record_that_is_forgotten_while_its_digest_is_computed(store: HostStore, again: bool) -> None:
    """By a thread that saves it: the digest is known of what was saved, and of nothing else."""
    put(store, 3)
    holder = store.hold()

    def compute(record: Record) -> bytes:
        res = bytes(record[:1])
        store.forget(0)
        if again:
            store.put(3)[:] = 99
        return res

    assert store.digest(3, store.get(3), compute) == b"\3"
    store.put(3)[:] = 99
    assert store.digest(3, store.get(3), lambda r: bytes(r[:1])) == b"c"
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


def test_places_that_were_held_are_used_again(store: HostStore) -> None:
    put(store, *range(64))
    held = store.memory.held_bytes
    holder = store.hold()
    store.forget(0)
    store.release(holder)
    put(store, *range(64))
    assert store.memory.held_bytes == held


def test_what_is_not_held_is_used_again_at_once(store: HostStore) -> None:
    put(store, 0)
    holder = store.hold()
    store.release(holder)
    store.forget(0)
    assert store.memory.n_used == 0


def test_a_lent_record_is_left_where_it_is_when_held(store: HostStore) -> None:
    record = lent(3)
    store.lend(0, record, b"digest", lambda _: None)
    holder = store.hold()
    store.forget(0)
    store.release(holder)
    assert store.memory.n_used == 0
    put(store, 0)
    assert (record == 3).all()


def test_a_store_that_is_closed_lets_go_of_what_was_lent() -> None:
    memory = HostMemory(N)
    store = HostStore(memory)
    store.lend(0, lent(1), b"digest", lambda _: None)
    store.close()
    assert len(store) == 0
    assert 0 not in store
    memory.close()
