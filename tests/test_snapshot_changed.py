"""Snapshots that others truncate, overwrite, replace or delete while they are in use: never a crash, never another text."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import snapshots
from support.changes import ENGINE
from support.runs import Open
from support.snapshots import GREEDY, MORE, TOKENS, Odd, answer, assert_same, go_on, ids, read

from pyllama_kvflash import KVFlash, Warn
from pyllama_kvflash.errors import HostMemoryError, SnapshotError
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.snapshot.cache import PrefixCache
from pyllama_kvflash.snapshot.file import SnapshotFile

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("wordless"), pytest.mark.sampled(ENGINE)]

saved = snapshots.saved
wordless = snapshots.wordless

SMALL = snapshots.SMALL
LARGE = 1 << 40


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


def overwrite(path: Path) -> None:
    """In place, with a file of the same size."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"another file")
    other.replace(path)


CHANGES = {"truncated": truncate, "overwritten": overwrite}
"""What loses bytes."""
HARMLESS = {"replaced": replace, "deleted": Path.unlink}
"""What an open file outlives."""

each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@pytest.fixture
def snap(saved: Path, tmp_path: Path) -> Path:
    """A snapshot of 2,000 tokens that may be changed."""
    res = tmp_path / "text.kvsnap"
    res.write_bytes(saved.read_bytes())
    return res


def cold(opened: Open, **options: object) -> list[int]:
    """What follows without a snapshot."""
    return answer(opened(**options), [*TOKENS[:2000], *MORE[:100]], append=False)


def test_the_process_goes_on(tmp_path: Path) -> None:
    """As another program's `cp` or `rsync --inplace` begins: it ended the process with SIGBUS."""
    code = f"""
import os
from pyllama_kvflash import KVFlash, Sampling, Token
kv = KVFlash.from_file({str(BUNDLED_MODEL)!r}, n_ctx=2048, pool=768, n_threads=1, n_batch=256, opening=0)
text = "".join(f"The sea number {{i}} is blue and the sky {{i * 7 % 13}} is wide. " for i in range(60))
for _ in kv.generate(text, max_tokens=0):
    pass
kv.save("a.kvsnap")
more = kv.tokenize(" The sea number 3 is", add_special=False)
def say(tokens, append=True):
    events = list(kv.generate(tokens, max_tokens=8, append=append, sampling=Sampling(temperature=0)))
    return [e.id for e in events if isinstance(e, Token)]
warm = say(more)
kv.restore("a.kvsnap")
tokens = [*kv.tokens, *more]
cold = say(tokens, append=False)
kv.restore("a.kvsnap")
os.truncate("a.kvsnap", 5000)
got = say(more)
assert got in (warm, cold), (got, warm, cold)
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


@each_change
@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_changed_between_open_and_restore(
    opened: Open, snap: Path, policy: str, change: Callable[[Path], None]
) -> None:
    kv, file = opened(policy=policy), SnapshotFile(snap)
    change(snap)
    with pytest.raises(SnapshotError, match="not a whole snapshot: the record of chunk 0 was"):
        kv.restore(file)
    assert kv.n_tokens == 0
    assert kv.pager.records.memory.n_used == 0
    kv.check_integrity()
    assert answer(kv, [*TOKENS[:2000], *MORE[:100]], append=False) == cold(opened, policy=policy)


@each_change
def test_changed_after_a_restore(opened: Open, snap: Path, change: Callable[[Path], None]) -> None:
    """Nothing but what is resident was read by then."""
    kv = opened(policy=Odd("oldest"))
    kv.restore(snap)
    change(snap)
    events = list(kv.generate(MORE[:100], max_tokens=40, sampling=GREEDY, append=True))
    (warning,) = [event.text for event in events if isinstance(event, Warn)]
    assert "the restored text is read again" in warning
    assert ids(events) == cold(opened, policy=Odd("oldest"))
    kv.check_integrity()


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize(("prefill", "change"), [("pool", truncate), ("pool", overwrite), ("exact", truncate)])
def test_changed_while_records_are_read_ahead(
    opened: Open, snap: Path, prefill: str, change: Callable[[Path], None]
) -> None:
    """In threads, for summaries: it is the right text whether they were quick enough or not."""
    kv = opened(policy="qk", prefill=prefill)
    if prefill == "exact":
        read(kv, 2000).save(snap)
    control = opened(policy="qk", prefill=prefill)
    control.restore(snap)
    kv.restore(snap)
    change(snap)
    assert answer(kv, MORE[:100]) in (answer(control, MORE[:100]), cold(opened, policy="qk", prefill=prefill))
    kv.check_integrity()


@each_change
@pytest.mark.parametrize("when", ["before", "after"])
def test_changed_before_a_capture_is_written(
    opened: Open, snap: Path, change: Callable[[Path], None], when: str
) -> None:
    """No file of it is written, and the text goes on."""
    kv, control = opened(policy="lru"), opened(policy="lru")
    kv.restore(snap)
    control.restore(snap)
    if when == "before":
        change(snap)
    capture = kv.capture()
    if when == "after":
        change(snap)
    with pytest.raises(SnapshotError, match=f"{snap} is not a whole snapshot: the record of chunk"):
        capture.write(snap.with_name("new.kvsnap"))
    assert list(snap.parent.iterdir()) == [snap]
    kv.check_integrity()
    assert answer(kv, MORE[:100]) == answer(control, MORE[:100])


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_a_name_that_goes_or_gets_another_file(
    opened: Open, saved: Path, snap: Path, policy: str, change: Callable[[Path], None]
) -> None:
    kv, control = opened(policy=policy), opened(policy=policy)
    kv.restore(snap)
    control.restore(saved)
    change(snap)
    assert_same(go_on(kv), go_on(control))


@pytest.mark.parametrize("another", [False, True], ids=["gone", "replaced"])
def test_a_snapshot_is_of_the_model_that_was_loaded(
    saved: Path, tiny_path: Callable[[str], Path], tmp_path: Path, another: bool
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_path("qwen3").read_bytes())
    with KVFlash.from_file(path, **SMALL) as kv:
        read(kv, 100)
        path.unlink()
        if another:
            path.write_bytes(tiny_path("gemma4").read_bytes())
        kv.save(tmp_path / "a.kvsnap")
        assert kv.restore(saved)
    assert SnapshotFile(tmp_path / "a.kvsnap").contents.identity == SnapshotFile(saved).contents.identity


#
# the prefix cache
#


def two_turns(kv: KVFlash, folder: Path) -> tuple[PrefixCache, Path, Path]:
    """A cache with a text of 2,000 tokens, of which another file has the first 1,280."""
    cache = PrefixCache(folder, LARGE)
    first = cache.save(read(kv, 1280))
    last = cache.save(read(kv, 2000))
    assert first
    assert last
    assert SnapshotFile(last).contents.n_lent == 20
    return cache, first, last


@each_change
@pytest.mark.parametrize("which", ["its own records", "records of its source"])
def test_a_cached_text_is_changed_in_use(
    opened: Open, tmp_path: Path, which: str, change: Callable[[Path], None]
) -> None:
    """The text is read anew, and the file and what needs it are removed; the one that is whole stays."""
    kv = opened(policy=Odd("oldest"), pool=768)
    cache, first, last = two_turns(opened(policy="lru", pool=768), tmp_path)
    text = np.concatenate([TOKENS[:2000], MORE[:100]])
    assert cache.restore(kv, text) == 2000
    changed = first if which == "records of its source" else last
    change(changed)
    chunk = next(c for c in range(0 if changed == first else 20, 31) if ~kv.residency().resident[c])
    with pytest.raises(SnapshotError, match=f"{changed} is not a whole snapshot: the record of chunk {chunk} was"):
        kv.page_in(chunk)
    assert [entry.path for entry in cache.entries()] == ([] if changed == first else [first])
    assert cache.stats.damaged == 1
    if changed == first:  # the oldest are asked for
        events = list(kv.generate(MORE[:100], max_tokens=20, sampling=GREEDY, append=True))
        assert [event for event in events if isinstance(event, Warn)]
        assert ids(events) == answer(opened(policy=Odd("oldest"), pool=768), text, 20, append=False)
    kv.check_integrity()


def test_a_turn_is_written_after_its_source_was_changed(opened: Open, tmp_path: Path) -> None:
    """Its first records are in the source, or it is an error: no file says that it has what it has not."""
    kv = opened(policy="lru")
    cache, first, last = two_turns(kv, tmp_path)
    assert cache.restore(kv, np.concatenate([TOKENS[:2000], MORE[:100]])) == 2000
    answer(kv, MORE[:100])
    truncate(first)
    with pytest.raises(SnapshotError, match=f"{first} is not a whole snapshot: the record of chunk"):
        cache.save(kv)
    assert not [entry.path for entry in cache.entries() if entry.path in {first, last}]
    assert not list(tmp_path.rglob("*.part"))


#
# memory
#


def test_what_a_restore_takes(opened: Open, snap: Path) -> None:
    """Places for all its records, which are free again when it is forgotten."""
    kv = opened(policy="lru")
    kv.restore(snap)
    record = kv.pager.records.record_bytes
    assert kv.pager.records.memory.n_used == 31
    assert 31 * record <= kv.host_bytes <= 33 * record
    for _ in range(3):
        kv.restore(snap)
        assert kv.host_bytes <= 33 * record
    kv.clear()
    assert kv.pager.records.memory.n_used == 0


def test_a_limit_that_a_snapshot_does_not_fit(opened: Open, snap: Path, tmp_path: Path) -> None:
    """It is told at once, as it is when the text is read; with a disk for the rest it is put back."""
    control = opened(policy="lru")
    limit = 20 * control.pager.records.record_bytes
    kv, spilling = opened(policy="lru", host_limit=limit), opened(policy="lru", host_limit=limit, disk=tmp_path)
    with pytest.raises(SnapshotError, match=r"text\.kvsnap cannot be used: 32 chunk records take .*`disk`"):
        kv.restore(snap)
    assert kv.n_tokens == kv.host_bytes == 0
    with pytest.raises(HostMemoryError, match="chunk records take"):
        read(kv, 2000)
    for one in (control, spilling):
        assert one.restore(snap) == 2000
    assert spilling.host_bytes <= limit
    assert_same(go_on(spilling), go_on(control))


def test_files_are_closed_once_they_are_read(opened: Open, tmp_path: Path) -> None:
    """A server that restores all day has no more files open at its end."""

    def n_open() -> int:
        return sum(str(tmp_path) in os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())

    cache, _, _ = two_turns(opened(policy="lru"), tmp_path)
    lazy, eager = opened(policy="lru"), opened(policy="qk")
    for _ in range(3):
        for kv in (lazy, eager):
            assert cache.restore(kv, np.concatenate([TOKENS[:2000], MORE[:100]])) == 2000
    eager.pager.wait_stored()
    assert n_open() == 2, "one sequence may still read from two files"
    lazy.clear()
    assert n_open() == 0
