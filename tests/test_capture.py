"""A capture holds the places of its records until it is written, cannot be, or is garbage."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.runs import LRU, Open, read

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = pytest.mark.native

SMALL = LRU


def held_up(kv: KVFlash) -> bool:
    """Whether somebody holds places: those of a forgotten text are not used again, and its records stay as they are."""
    memory = kv.pager.records.memory
    n = memory.n_used
    kv.clear()
    memory.reserve(1)
    return memory.n_used == n


def no_thread(*_: Any) -> None:
    msg = "can't start new thread"
    raise RuntimeError(msg)


def test_it_holds_until_it_is_written(opened: Open, tmp_path: Path) -> None:
    kv = opened()
    read(kv, 900)
    capture = kv.capture()
    record = capture.records[3].copy()
    assert held_up(kv)
    assert np.array_equal(capture.records[3], record)
    capture.write(tmp_path / "text.kvsnap")
    read(kv, 900)
    assert not held_up(kv)
    capture.release()  # harmless


@pytest.mark.parametrize("how", ["capture", "cache"])
def test_it_lets_go_if_no_thread_can_start(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As a machine without memory for one has it."""
    kv = opened(snapshots=True)
    read(kv, 900)
    cache = PrefixCache(tmp_path / "cache", 1 << 30)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", no_thread)
        with pytest.raises(SnapshotError, match="cannot be written: can't start new thread"):
            cache.begin(kv) if how == "cache" else kv.capture().begin(tmp_path / "text.kvsnap")
    assert not held_up(kv)
    cache.close()


def test_it_lets_go_when_nobody_writes_it(opened: Open) -> None:
    kv = opened()
    read(kv, 900)
    capture = kv.capture()
    del capture
    gc.collect()
    assert not held_up(kv)
