"""Records on their way from a file to their places: read there by one thread, whoever asks, and wherever Ctrl-C comes."""

import itertools
import os
import threading
import time
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import formats
from support.cuts import CutAtLine, traced
from support.formats import made

from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.snapshot.file import Filling, SnapshotFile
from pyllama_kvflash.snapshot.layout import write

pytestmark = pytest.mark.native

small = formats.small
snap = formats.snap

CHUNK, SECONDS = 2, 30


class Slow:
    """Reads of a file that take a while. n: so many there were. fail: the first ones, which fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: int = 0) -> None:
        self.n, self._fail, self._preadv = 0, fail, os.preadv
        self.reading = threading.Event()
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: Sequence[Any], at: int) -> int:
        self.n += 1
        self.reading.set()
        time.sleep(0.05)
        if self.n <= self._fail:
            raise OSError(5, "Input/output error")
        return self._preadv(fd, buffers, at)


def test_a_record_is_read_into_its_place(snap: Path) -> None:
    """Nothing as large is held beside it: threads that read would have one each, beyond what the limit of host memory counts."""
    size = 8 << 20
    contents, records = made(record_bytes=size)
    write(snap, contents, records)
    fill, place = Filling(SnapshotFile(snap), CHUNK), np.empty(size, np.uint8)
    tracemalloc.start()
    try:
        fill(place)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(place, records[CHUNK])
    assert peak < size // 8


def test_many_threads_fill_a_place(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them reads the record, and it is there when any of them goes on. What becomes of the file later does not matter to it."""
    _, records = made()
    fill, place, n = Filling(SnapshotFile(small), CHUNK), np.zeros_like(records[CHUNK]), 8
    slow, begun = Slow(monkeypatch), threading.Barrier(n)

    def ask(_: int) -> None:
        begun.wait()
        fill(place)
        np.testing.assert_array_equal(place, records[CHUNK])

    with ThreadPoolExecutor(n) as threads:
        list(threads.map(ask, range(n)))
    with small.open("r+b") as file:
        file.write(bytes(small.stat().st_size))
    fill(place)
    np.testing.assert_array_equal(place, records[CHUNK])
    assert slow.n == 1


def test_who_waited_tries_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the thread that read the record had no luck."""
    _, records = made()
    fill, place = Filling(SnapshotFile(small), CHUNK), np.zeros_like(records[CHUNK])
    slow = Slow(monkeypatch, fail=1)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(fill, place)
        assert slow.reading.wait(SECONDS)
        fill(place)
        assert isinstance(first.exception(), SnapshotError)
    np.testing.assert_array_equal(place, records[CHUNK])
    assert slow.n == 2


@pytest.mark.parametrize("then", ["another thread", "the same one"])
def test_ctrl_c_at_any_line(small: Path, then: str) -> None:
    """Whoever asks next fills the place."""
    _, records = made()
    file = SnapshotFile(small)
    for at in itertools.count(1):
        fill, place, line = Filling(file, CHUNK), np.zeros_like(records[CHUNK]), itertools.count(1)
        cut = CutAtLine(lambda *_, at=at, line=line: next(line) == at, ("file.py", "notes.py"))
        with suppress(KeyboardInterrupt), traced(cut):
            fill(place)
        if cut.where is None:
            break
        if then == "another thread":
            with ThreadPoolExecutor(1) as thread:
                thread.submit(fill, place).result(SECONDS)
        fill(place)
        np.testing.assert_array_equal(place, records[CHUNK])
    assert at > 20
