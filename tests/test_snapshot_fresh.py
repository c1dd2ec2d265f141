"""Snapshots of a pool in which each layer chooses: its codes come back, and guests where they were.

That what follows is what would have followed is tested in test_snapshot.py, with the other policies.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import snapshots
from support.changes import ENGINE
from support.cuts import cut_off_at_every_line
from support.formats import codes_of, sections
from support.oracles import ON_GPU
from support.runs import Open
from support.snapshots import FRESH, MORE, TOKENS, answer, assert_same, go_on, read, seen, whole

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import AllocationError, SnapshotError
from pyllama_kvflash.native.guests import Guests
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.pool.guests import GuestRoom
from pyllama_kvflash.pool.host_store import HostStore
from pyllama_kvflash.snapshot.cache import PrefixCache
from pyllama_kvflash.snapshot.file import SnapshotFile
from pyllama_kvflash.snapshot.layout import record_place

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("wordless"), pytest.mark.sampled(ENGINE)]

snap = snapshots.snap
wordless = snapshots.wordless

SMALL: dict[str, Any] = {**snapshots.SMALL, **FRESH}
EXACT: dict[str, Any] = {"prefill": "exact"}
PLAIN: dict[str, Any] = {"policy": "lru", "coarse": "off"}
N = 1500  # tokens: 23 chunks and a part of one, in 16 blocks


@pytest.fixture(scope="module")
def saved(tiny_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of N tokens that were read exactly."""
    res = tmp_path_factory.mktemp("saved") / "text.kvsnap"
    with KVFlash.from_file(tiny_path("qwen3"), **{**SMALL, **EXACT}) as kv:
        read(kv, N).save(res)
    return res


@pytest.fixture
def never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes of the file are put back: those of later chunks alone are made."""
    only_made_from(monkeypatch, 23)


def only_made_from(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Codes of the first n chunks are not made."""
    put = Guests.put

    def checked(self: Guests, layers: range, first: int, records: Any) -> None:
        assert first >= n, "codes were made again"
        put(self, layers, first, records)

    monkeypatch.setattr(Guests, "put", checked)


def room(kv: KVFlash) -> GuestRoom:
    res = kv.pager.guests
    assert res is not None
    return res


def codes(kv: KVFlash) -> list[bytes]:
    """The codes of each layer."""
    return [part.tobytes() for part in room(kv).native.saved_codes(room(kv).native.info().n)]


def damage(path: Path, section: str, to: Path) -> Path:
    """A copy in which a bit of a section is flipped."""
    start, end = sections(path)[section]
    data = bytearray(path.read_bytes())
    data[(start + end) // 2] ^= 4
    to.write_bytes(data)
    return to


#
# where it was
#


def test_with_columns_of_values(opened: Open, snap: Path) -> None:
    """Without flash attention, a unit's rows of V are not in one piece."""
    kv = opened(flash_attn="off")
    answer(read(kv, N), MORE[100:130], 5)
    kv.save(snap)
    want = go_on(kv)
    kv.restore(snap)
    assert_same(go_on(kv), want)


def test_what_is_saved_is_of_that_moment(opened: Open, snap: Path) -> None:
    """Whatever comes before it is written: the codes are another text's by then."""
    kv = read(opened(), N)
    capture, before = kv.capture(), seen(kv)
    want = go_on(kv)
    kv.clear()
    answer(kv, MORE[:1500], 5, append=False)
    capture.write(snap)
    kv.restore(snap)
    assert_same(seen(kv), before)
    assert_same(go_on(kv), want)


@pytest.mark.usefixtures("never_made")
def test_codes_are_not_made_again(opened: Open, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is chosen twice: the units in the slots are the file's. Threads read the records, all of which are used."""
    kv, ahead = opened(**EXACT), list[HostStore]()
    read_ahead = HostStore.read_ahead
    monkeypatch.setattr(HostStore, "read_ahead", lambda store: (ahead.append(store), read_ahead(store)))
    kv.restore(saved)
    assert ahead == [kv.pager.records]
    contents = SnapshotFile(saved).contents
    assert contents.guests is not None
    assert room(kv).native.info().n == contents.guests.n_tokens == 23 * 64
    assert room(kv).form == contents.guests.form == CoarseForm(4, 4)
    blocks, units = room(kv).native.tables()
    np.testing.assert_array_equal(blocks, contents.guests.blocks)
    np.testing.assert_array_equal(units, contents.guests.units)
    n_fetched = room(kv).native.n_fetched()
    kv.decode([7])
    most = units.size * (1 + ON_GPU)  # each slot once; a GPU fills free slots with any units, and then exchanges some
    assert room(kv).native.n_fetched() <= n_fetched + most
    kv.check_integrity()


#
# a part of it
#


@pytest.mark.parametrize("options", [{}, EXACT, {"chunk": 16, "n_batch": 64}], ids=str)
@pytest.mark.parametrize("how", ["restored", "saved"])
def test_a_part_has_the_first_part_of_the_codes(
    opened: Open, snap: Path, how: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks alone, and no guests' tables: they are chosen by the next token."""
    kv = read(opened(snapshots=True, **options), N)
    before, n_chunk = room(kv), kv.options.chunk
    n = 1300 // n_chunk * n_chunk
    n_saved = min(n, before.native.info().n)
    want = [part.tobytes() for part in before.native.saved_codes(n_saved)]
    only_made_from(monkeypatch, n_saved // n_chunk)
    if how == "saved":
        kv.save(snap, n)
        cut = whole(snap).contents.guests
        assert cut is not None
        assert (len(cut.blocks), cut.units.size) == (0, 0)
        kv.restore(snap)
    else:
        kv.save(snap)
        assert kv.restore(snap, np.concatenate([TOKENS[:1310], MORE])) == n
    assert [part.tobytes() for part in room(kv).native.saved_codes(n_saved)] == want
    assert room(kv).native.info().n == n, "chunks that had no codes got them"
    assert (room(kv).native.tables()[1] == -1).all()
    assert len(room(kv).native.tables()[0])
    kv.check_integrity()
    kv.decode(MORE[:3])
    assert (room(kv).native.tables()[1] >= 0).all()
    kv.check_integrity()


#
# elsewhere
#

ELSEWHERE: list[dict[str, Any]] = [{"pool": 768}, {"pool": 1280}, {"n_parallel": 2}, {"pool": 2048, "n_parallel": 2}]


@pytest.mark.usefixtures("never_made")
@pytest.mark.parametrize("options", ELSEWHERE, ids=str)
def test_another_pool(opened: Open, saved: Path, options: dict[str, Any]) -> None:
    """What must be there, and guests in the rest of its share, chosen by the next token; the same codes."""
    kv = opened(**EXACT, **options)
    one = kv.sequences[-1]
    assert one.restore(saved) == N
    ledger = one.pager.ledger
    np.testing.assert_array_equal(one.residency().resident, ledger.protected())
    blocks, units = room(one).native.tables()
    assert one.pager.moves.n_in == ledger.n_resident, "nothing came in to leave at once"
    assert len(blocks) == ledger.n_guests == ledger.n_share - ledger.n_resident > 0
    assert (units == -1).all()
    assert codes(one) == [part.tobytes() for part in codes_of(SnapshotFile(saved))]
    one.check_integrity()
    assert len(answer(one, MORE[:70])) == 40
    one.check_integrity()
    again = opened(**EXACT, **options).sequences[-1]
    again.restore(saved)
    answer(again, MORE[:70])
    assert_same(seen(again), seen(one))


def test_a_file_of_another_policy(opened: Open, saved: Path, snap: Path) -> None:
    """Codes are made of its records; they are those of the same text that was read with policy fresh, bit for bit."""
    lru, kv, want = opened(**PLAIN, **EXACT), opened(**EXACT), opened(**EXACT)
    read(lru, N).save(snap)
    kv.restore(snap)
    want.restore(saved)
    assert codes(kv) == codes(want)
    kv.check_integrity()
    for one in (kv, want):
        answer(one, MORE[:70], 10)
    assert_same_choice(kv, want)


def assert_same_choice(kv: KVFlash, want: KVFlash) -> None:
    """The same units in all layers, and logits to the bit."""
    for mine, its in zip(room(kv).native.tables(), room(want).native.tables(), strict=True):
        np.testing.assert_array_equal(mine, its)
    np.testing.assert_array_equal(kv.logits(), want.logits())


@pytest.mark.parametrize("policy", ["lru", "qk"])
def test_a_file_with_guests_and_another_policy(opened: Open, saved: Path, snap: Path, policy: str) -> None:
    """Without codes, they are ignored, and so is what became of the codes; the most recent chunks have their blocks."""
    kv = opened(policy=policy, coarse="off", **EXACT)
    assert kv.restore(damage(saved, "codes", snap)) == N
    assert kv.residency().resident.tolist() == [True] + [False] * 9 + [True] * 14
    assert len(answer(kv, MORE[:70])) == 40
    kv.check_integrity()


@pytest.mark.parametrize("coarse", ["4,2", "2"])
def test_codes_of_other_bits(opened: Open, saved: Path, snap: Path, coarse: str) -> None:
    """They are made anew, as for a file that has none."""
    kv, want, lru = opened(coarse=coarse, **EXACT), opened(coarse=coarse, **EXACT), opened(**PLAIN, **EXACT)
    read(lru, N).save(snap)
    for one, path in ((kv, saved), (want, snap)):
        one.restore(path)
        one.check_integrity()
        answer(one, MORE[:70], 10)
    assert room(kv).form != SnapshotFile(saved).contents.guests.form  # type: ignore[union-attr]
    assert codes(kv) == codes(want)
    assert_same_choice(kv, want)


#
# damage
#


def assert_usable(kv: KVFlash) -> None:
    """The sequence is empty, and reads a text as a new one does."""
    assert kv.n_tokens == 0
    assert (room(kv).native.info().n, room(kv).native.info().n_block) == (0, 0)
    assert kv.pager.records.memory.n_used == 0
    kv.check_integrity()


@pytest.mark.parametrize("section", ["guests", "codes"])
def test_a_damaged_section(opened: Open, saved: Path, snap: Path, section: str) -> None:
    kv, want = opened(**EXACT), opened(**EXACT)
    with pytest.raises(SnapshotError, match=f"{snap} is not a whole snapshot: its section {section} was changed"):
        kv.restore(damage(saved, section, snap))
    assert_usable(kv)
    for one in (kv, want):
        answer(read(one, N), MORE[:70], 10)
    assert_same(seen(kv), seen(want))


@pytest.mark.parametrize("chunk", [0, 7, 22, 23], ids=["sink", "guest", "tail", "unsealed"])
def test_a_damaged_record(opened: Open, saved: Path, snap: Path, chunk: int) -> None:
    """Guests may be fetched from any of them, so all are read at once."""
    file = SnapshotFile(saved)
    pitch, lead = record_place(file.contents.identity)
    data = bytearray(saved.read_bytes())
    data[sections(saved)["records"][0] + chunk * pitch + lead + 5000] ^= 4
    snap.write_bytes(data)
    kv = opened(**EXACT)
    for _ in range(2):
        with pytest.raises(SnapshotError, match=f"not a whole snapshot: the record of chunk {chunk} was changed"):
            kv.restore(snap)
        assert_usable(kv)
    assert kv.restore(saved) == N


def test_codes_have_no_room(opened: Open, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(guests: Guests, layer: int, n: int, codes: object) -> None:
        raise AllocationError("out of memory")

    kv = opened(**EXACT)
    with monkeypatch.context() as patch:
        patch.setattr(Guests, "restore_codes", refused)
        with pytest.raises(SnapshotError, match=f"{saved} cannot be used: there is no memory for its codes"):
            kv.restore(saved)
    assert_usable(kv)
    assert kv.restore(saved) == N


def test_a_restore_is_cut_off_at_every_line(opened: Open, saved: Path) -> None:
    """Ctrl-C comes between any two lines: the sequence is empty, or whole, and restored once more it is what it was."""
    kv = opened(**EXACT)
    kv.restore(saved)
    want = seen(kv)

    def check(kv: KVFlash) -> None:
        kv.check_integrity()
        assert kv.n_tokens in {0, N}
        kv.restore(saved)
        kv.check_integrity()

    files = ("pool/guests.py", "saved_pool.py", "native/guests.py", "capture.py")
    kv, places = cut_off_at_every_line(lambda: kv, lambda kv: kv.restore(saved), check, files=files, step=3)
    assert len(places) > 30
    assert_same(seen(kv), want)


#
# the prefix cache
#


def test_the_cache_keeps_codes_for_each_text(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where records are in another file. A warm turn goes on from the codes, and one with damaged codes is cold."""
    kv, cache = opened(snapshots=True), PrefixCache(tmp_path, 1 << 40)
    first = cache.save(read(kv, N))
    branch = np.concatenate([TOKENS[:1400], MORE[:500]])
    kv.clear()
    for _ in kv.prefill(branch):
        pass
    second, before = cache.save(kv), seen(kv)
    assert first
    assert second
    assert SnapshotFile(second).outline.needs == {first}
    assert cache.restore(kv, np.concatenate([branch, MORE[:9]])) == 1900
    assert_same(seen(kv), before)
    saved = SnapshotFile(first).contents.guests
    assert saved
    with monkeypatch.context() as patch:
        only_made_from(patch, saved.n_tokens // 64)
        other = opened(snapshots=True)
        assert cache.restore(other, np.concatenate([TOKENS[:1450], MORE[500:900]])) == 22 * 64
        assert len(answer(other, MORE[500:700])) == 40
        other.check_integrity()
    damage(second, "codes", second)
    assert cache.restore(kv, np.concatenate([branch, MORE[:9]])) == 1400 // 64 * 64
    assert cache.stats.damaged == 1
    assert not second.exists()
    kv.check_integrity()
