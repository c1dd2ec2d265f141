"""Snapshots that cannot be used, or whose damage is found late: it is said in one sentence, and a run goes on without them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import snapshots
from support.changes import ENGINE
from support.runs import Open
from support.snapshots import GREEDY, MORE, TOKENS, Odd, answer, assert_same, go_on, ids, read

from pyllama_kvflash import Done, KVFlash, Reselect, Warn
from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.events import Event
from pyllama_kvflash.snapshot.file import SnapshotFile
from pyllama_kvflash.snapshot.layout import record_place

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

saved = snapshots.saved
snap = snapshots.snap
wordless = snapshots.wordless

SMALL = snapshots.SMALL


#
# what cannot be used
#


def usable_afterwards(kv: KVFlash) -> None:
    """The sequence is empty, and reads a text as a new one does."""
    assert kv.n_tokens == 0
    kv.check_integrity()
    read(kv, 300)
    kv.check_integrity()


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "cache types": (
        {"type_k": "q8_0", "type_v": "q8_0"},
        r"its layers or cache types differ \(`type_k`, `type_v`\)",
    ),
    "chunk": ({"chunk": 32}, r"its chunks have 64 positions, and 32 here \(chunk\)"),
    "flash attention": ({"flash_attn": "off"}, r"its cache has another layout or rotation: flags \d, and \d here"),
    "context": (
        {"n_ctx": 1536, "pool": 1024},
        "it has 2,000 positions, and the context has 1,536: use a larger `n_ctx`",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_snapshot_of_another_cache(opened: Open, saved: Path, what: str) -> None:
    options, why = OTHERS[what]
    kv = read(opened(**options), 100)
    with pytest.raises(SnapshotError, match=why) as err:
        kv.restore(saved)
    assert f"{saved} cannot be used: " in str(err.value)
    usable_afterwards(kv)


def test_a_snapshot_of_other_weights(saved: Path, tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    data = bytearray(tiny_path("qwen3").read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with KVFlash.from_file(path, **SMALL) as kv:
        with pytest.raises(SnapshotError, match="it was made with another model"):
            kv.restore(saved)
        usable_afterwards(kv)


def test_a_snapshot_of_another_text(opened: Open, saved: Path) -> None:
    kv = opened()
    with pytest.raises(SnapshotError, match="of its 2,000 tokens the first 0 are those of this text"):
        kv.restore(saved, MORE)
    usable_afterwards(kv)


def test_a_pool_that_has_no_room(opened: Open, saved: Path) -> None:
    """The other sequence holds what a restored one needs at once: it is said, and both go on."""
    first, second = opened(n_parallel=2, pool=1024, n_batch=64, pins=((0, 300),)).sequences
    read(first, 300)
    second.restore(saved)
    first.check_integrity()
    second.check_integrity()
    assert first.n_tokens == 300
    assert second.residency().resident[[0, 28, 29, 30, 31]].all()


def test_pins_that_a_smaller_pool_has_no_room_for(opened: Open, snap: Path) -> None:
    kv, new = opened(pool=4096), opened(pool=768)
    kv.pin(0, 1900)
    read(kv, 3000).save(snap)
    with pytest.raises(SnapshotError, match="are protected"):
        new.restore(snap)
    usable_afterwards(new)
    read(new, 2000)
    assert not new.pager.ledger.pins


NO_FILES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "missing": (lambda _: None, SnapshotError, "cannot be read: No such file"),
    "empty": (lambda path: path.touch(), SnapshotError, "it has 0 bytes, fewer than a header"),
    "short": (lambda path: path.write_bytes(b"\x93KVSNAP\n"), SnapshotError, "it has 8 bytes, fewer than a header"),
    "text": (lambda path: path.write_text("a text\n" * 1000), SnapshotError, "does not begin with the magic bytes"),
    "directory": (lambda path: path.mkdir(), UsageError, "is a directory: give the name of a snapshot in it"),
}


@pytest.mark.parametrize("what", NO_FILES)
def test_no_snapshot(opened: Open, snap: Path, what: str) -> None:
    make, error, why = NO_FILES[what]
    make(snap)
    kv = opened()
    with pytest.raises(error, match=why) as err:
        kv.restore(snap)
    assert str(snap) in str(err.value)
    assert "\n" not in str(err.value)
    usable_afterwards(kv)


def test_the_sequence_stays_if_the_file_cannot_be_opened(opened: Open, snap: Path) -> None:
    kv = read(opened(), 300)
    with pytest.raises(SnapshotError):
        kv.restore(snap)
    assert kv.n_tokens in {0, 300}
    kv.check_integrity()


#
# damage that is found when a record is used
#


def damaged(path: Path, chunk: int, to: Path) -> SnapshotFile:
    """A copy in which a bit of a chunk's record is flipped."""
    file = SnapshotFile(path)
    pitch, lead = record_place(file.contents.identity)
    data = bytearray(path.read_bytes())
    data[int(file.header["sections"][-1]["offset"]) + chunk * pitch + lead + 5000] ^= 4
    to.write_bytes(data)
    return SnapshotFile(to)


def resident_chunk(file: Path) -> int:
    """In the middle of those in the pool."""
    chunks = np.flatnonzero(SnapshotFile(file).contents.chunks["resident"])
    return int(chunks[len(chunks) // 2])


@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_a_damaged_record_that_comes_back_at_once(opened: Open, saved: Path, snap: Path, policy: str) -> None:
    chunk = resident_chunk(saved)
    kv = opened(policy=policy)
    with pytest.raises(SnapshotError, match=f"not a whole snapshot: the record of chunk {chunk} was changed"):
        kv.restore(damaged(saved, chunk, snap))
    usable_afterwards(kv)


def first_out(file: Path) -> int:
    """The first chunk that is out."""
    return int(np.flatnonzero(~SnapshotFile(file).contents.chunks["resident"])[0])


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("policy", ["qk", "oldest"])
def test_a_damaged_record_is_read_anew(opened: Open, saved: Path, snap: Path, policy: str) -> None:
    """Found by a summary, or when it comes in: there is a warning, and the answer of a run that read all of it at once."""
    options = {"policy": Odd("oldest") if policy == "oldest" else policy}
    kv, cold = opened(**options), opened(**options)
    chunk = first_out(saved)
    kv.restore(damaged(saved, chunk, snap))
    events = list(kv.generate(MORE[:100], max_tokens=40, sampling=GREEDY, append=True))
    (warning,) = [event.text for event in events if isinstance(event, Warn)]
    assert f"the record of chunk {chunk} was changed; the restored text is read again" in warning
    assert ids(events) == answer(cold, [*TOKENS[:2000], *MORE[:100]], append=False)
    assert_same(go_on(kv), go_on(cold))
    kv.check_integrity()


@pytest.mark.usefixtures("wordless")
def test_a_damaged_record_that_another_prompt_shares_is_read_anew(opened: Open, saved: Path, snap: Path) -> None:
    """Found as the text is cut to what both begin with, which is out: there is the same warning."""
    kv, cold = opened(policy="lru"), opened(policy="lru")
    chunk = first_out(saved)
    kv.restore(damaged(saved, chunk, snap))
    prompt = [*TOKENS[: 64 * chunk + 40], *MORE[:100]]
    events = list(kv.generate(prompt, max_tokens=20, sampling=GREEDY))
    (warning,) = [event.text for event in events if isinstance(event, Warn)]
    assert f"the record of chunk {chunk} was changed; the restored text is read again" in warning
    assert events[0] == Warn(warning), "before anything is read"
    done = events[-1]
    assert isinstance(done, Done)
    assert done.stats.n_prompt == len(prompt)
    assert ids(events) == answer(cold, prompt, 20, append=False)
    kv.check_integrity()


@pytest.mark.usefixtures("wordless")
def test_a_damaged_record_is_found_in_the_middle_of_an_answer(opened: Open, saved: Path, snap: Path) -> None:
    """The answer goes on as that of a run which read all of it up to there."""
    kv, cold = (opened(policy=Odd("chance")) for _ in range(2))

    def run() -> list[Event]:
        return list(kv.generate(MORE[:100], max_tokens=80, sampling=GREEDY, append=True))

    kv.restore(saved)
    never_in = ~kv.residency().resident
    want = run()
    at = next(i for i, e in enumerate(want) if isinstance(e, Reselect) and e.reason == "decode")
    for event in want[:at]:
        if isinstance(event, Reselect):
            never_in[list(event.page_ins)] = False
    first = want[at]
    assert isinstance(first, Reselect)
    chunk = next(c for c in first.page_ins if c < len(never_in) and never_in[c])
    kv.restore(damaged(saved, chunk, snap))
    events = run()
    (at,) = [i for i, e in enumerate(events) if isinstance(e, Warn)]
    got, n = ids(events), len(ids(events[:at]))
    assert len(got) == 80
    assert n > 10
    assert got[:n] == ids(want)[:n]
    text = [*TOKENS[:2000], *MORE[:100], *got[:n]]
    assert got[n:] in (answer(cold, text, 80 - n, append=False), answer(cold, text[:-1], 80 - n + 1, append=False)[1:])
    kv.check_integrity()


def test_a_damaged_record_that_is_asked_for(opened: Open, saved: Path, snap: Path) -> None:
    """Whoever asks is told, as often as he asks, and what does not need it goes on."""
    kv, chunk = opened(policy="lru"), first_out(saved)
    kv.restore(damaged(saved, chunk, snap))
    for _ in range(2):
        with pytest.raises(SnapshotError, match=f"the record of chunk {chunk} was changed"):
            kv.page_in(chunk)
        kv.check_integrity()
        with pytest.raises(SnapshotError, match=f"the record of chunk {chunk} was changed"):
            kv.pin(64 * chunk, 64 * chunk + 1)
        kv.check_integrity()
    with pytest.raises(SnapshotError, match=f"the record of chunk {chunk} was changed"):
        kv.save(snap.with_name("again.kvsnap"))
    assert [path.name for path in snap.parent.iterdir()] == [snap.name]
    read(kv, 2300)
    kv.check_integrity()


@pytest.mark.parametrize("then", ["clear", "restore", "close"])
def test_a_damaged_record_does_not_matter_to_what_comes_instead(
    opened: Open, saved: Path, snap: Path, then: str
) -> None:
    """Its summary, in a thread, has found it by then."""
    kv = opened(policy="qk")
    kv.restore(damaged(saved, first_out(saved), snap))
    for summary in kv.pager.summarising:
        assert isinstance(summary.exception(), SnapshotError)
    if then == "clear":
        kv.clear()
        usable_afterwards(kv)
    elif then == "restore":
        assert kv.restore(saved) == 2000
        kv.check_integrity()
    else:
        kv.close()


@pytest.mark.usefixtures("wordless")
def test_a_file_that_is_removed_after_it_was_restored(opened: Open, saved: Path, snap: Path) -> None:
    """Its map stays."""
    snap.write_bytes(saved.read_bytes())
    kv, control = opened(), opened()
    kv.restore(snap)
    snap.unlink()
    control.restore(saved)
    assert_same(go_on(kv), go_on(control))
