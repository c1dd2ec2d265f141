"""Saving: what is under way, what stops it, and that a file is the old one or the new one, and whole."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import snapshots
from support.changes import ENGINE
from support.runs import Open
from support.snapshots import MORE, TOKENS, answer, assert_same, go_on, read, whole

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.snapshot.capture import Capture

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

snap = snapshots.snap
wordless = snapshots.wordless

SMALL = snapshots.SMALL


def test_an_empty_sequence(opened: Open, snap: Path) -> None:
    kv = opened()
    for n in (None, 0):
        with pytest.raises(UsageError, match="there is nothing to save: the context is empty"):
            kv.save(snap, n)
    assert not snap.exists()


def test_the_full_cache(opened: Open, snap: Path) -> None:
    kv = read(opened(pool="off"), 100)
    for what in (lambda: kv.save(snap), lambda: kv.restore(snap), kv.capture):
        with pytest.raises((UsageError, SnapshotError)) as err:
            what()
        assert "snapshots=True" in str(err.value) or not snap.exists()
    with pytest.raises(UsageError, match=r"open the model with snapshots \(snapshots=True\)"):
        kv.save(snap)
    assert kv.n_tokens == 100


def test_progress(opened: Open, snap: Path) -> None:
    kv, told = read(opened(), 300), []
    kv.save(snap, on_record=lambda *done: told.append(done))
    assert told == [(i, 5) for i in range(1, 6)]


def test_a_full_disk(opened: Open, snap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence; nothing is left, what was there stays, and the sequence goes on."""
    kv = read(opened(), 300)
    kv.save(snap)
    before = snap.read_bytes()
    read(kv, 400)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SnapshotError) as err:
            kv.save(snap)
    assert str(err.value) == f"{snap} cannot be written: No space left on device; free some, or write elsewhere"
    assert os.listdir(snap.parent) == [snap.name]  # noqa: PTH208
    assert snap.read_bytes() == before
    kv.save(snap)
    assert len(whole(snap).contents.tokens) == 400


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, ValueError])
def test_a_save_that_is_broken_off(opened: Open, snap: Path, error: type[BaseException]) -> None:
    """By whoever is told of its progress."""
    kv = read(opened(), 300)

    def stop(done: int, of: int) -> None:
        if done == 3:
            raise error

    with pytest.raises(error):
        kv.save(snap, on_record=stop)
    assert list(snap.parent.iterdir()) == []
    kv.rollback(100)
    assert kv.pager.records.memory._held == []
    kv.save(snap)
    whole(snap)


CHANGES: dict[str, Callable[[KVFlash], Any]] = {
    "goes on": lambda kv: [*kv.prefill(MORE[:400])],
    "is rolled back": lambda kv: kv.rollback(900),
    "is cleared": lambda kv: kv.clear(),
    "is another text": lambda kv: [kv.clear(), [*kv.prefill(MORE[:1400])]],
    "is rolled back and goes another way": lambda kv: [kv.rollback(900), [*kv.prefill(MORE[:800])]],
}


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("begun", [True, False], ids=["in a thread", "later"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_capture_is_of_its_moment(opened: Open, snap: Path, change: str, begun: bool) -> None:
    """Whatever the sequence does while, or before, it is written."""
    kv, control = (opened(policy="lru") for _ in range(2))
    for one in (kv, control):
        answer(read(one, 1300), MORE[:70])
    capture = kv.capture()
    held = threading.Event()
    if begun:

        class Slow(Capture):
            """Waits for the change."""

            def write(self, path: Path, *_: Any) -> int:
                held.wait(30)
                return Capture.write(self, path)

        future = Slow(capture.contents, capture.full, capture.last, capture.store, capture.holder).begin(snap)
    CHANGES[change](kv)
    kv.check_integrity()
    held.set()
    if begun:
        future.result(30)
    else:
        capture.write(snap)
    whole(snap)
    kv.check_integrity()
    kv.restore(snap)
    assert_same(go_on(kv), go_on(control))


def test_a_thread_writes_while_the_sequence_goes_on(opened: Open, tmp_path: Path) -> None:
    """Over and over, with nothing between the two."""
    kv = opened(policy="lru")
    for i in range(6):
        kv.clear()
        for _ in kv.prefill(np.roll(TOKENS, i)[:1200]):
            pass
        path = tmp_path / f"{i}.kvsnap"
        future = kv.capture().begin(path)
        kv.rollback(500)
        for _ in kv.prefill(MORE[:600]):
            pass
        kv.check_integrity()
        future.result(30)
        assert np.array_equal(whole(path).contents.tokens, np.roll(TOKENS, i)[:1200])
    assert kv.pager.records._holders == []
    kv.pager.records.memory.reserve(0)
    assert kv.pager.records.memory._held == []


# a process that has a sequence, and has a child of its own save it, which it kills after so many seconds, from the
# beginning or from when it writes
SAVES = """
import os, pathlib, signal, sys, time
from pyllama_kvflash import KVFlash
from support import snapshots
model, out = sys.argv[1:]
options = snapshots.SMALL | {"n_ctx": 4096, "pool": 4096, "policy": "lru", "snapshots": True}
with KVFlash.from_file(model, **options) as kv:
    for _ in kv.prefill(snapshots.TOKENS[:4000]):
        pass
    print(flush=True)
    for line in sys.stdin:
        n_tokens, seconds, since = line.split()
        begun = time.monotonic()
        if not (child := os.fork()):
            kv.save(out, int(n_tokens))
            os._exit(0)
        ended = False
        while since == "writing" and not ended and not any(pathlib.Path(out).parent.glob(".*.part")):
            ended = os.waitpid(child, os.WNOHANG)[0] == child
        if float(seconds) >= 0 and not ended:
            time.sleep(float(seconds))
            os.kill(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        print(time.monotonic() - begun, flush=True)
"""
N_KILLS = int(os.environ.get("KVFLASH_KILL_ROUNDS", "20"))


def test_killed(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    """At any moment of a save: the file is the old one or the new one, whole, or is not there if there was none."""
    out = tmp_path / "text.kvsnap"
    command = [sys.executable, "-c", SAVES, tiny_path("qwen3"), out]
    # a forked process has no GPU
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "CUDA_VISIBLE_DEVICES": ""}
    rng, left, kept = random.Random(0), 0, 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        saver.stdout.readline()

        def save(n_tokens: int, seconds: float = -1, since: str = "beginning") -> float:
            assert saver.stdin is not None
            assert saver.stdout is not None
            print(n_tokens, seconds, since, file=saver.stdin, flush=True)
            return float(saver.stdout.readline())

        usual = min(save(4000) for _ in range(3))
        before = 4000
        for i in range(N_KILLS):
            if i % 3 == 0:
                out.unlink()
                before = 0
            n = 3200 if before == 4000 else 4000
            if i % 2:  # however busy the machine is, some are killed in the writing
                save(n, rng.choice([0, 0, 0.1 * usual]), "writing")
            else:
                save(n, rng.uniform(0, 1.1 * usual))
            if out.exists():
                found = len(whole(out).contents.tokens)
                assert found in {before, n}
                kept += found == before
                before = found
            else:
                assert before == 0
            parts = [path for path in tmp_path.iterdir() if path != out]
            assert all(path.name.startswith(f".{out.name}.") and path.suffix == ".part" for path in parts)
            left += len(parts)
            for path in parts:
                path.unlink()
            if not before:
                save(4000)
                before = 4000
    assert left, "all were killed before or after the writing"
    assert kept
