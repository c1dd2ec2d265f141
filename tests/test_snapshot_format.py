"""The .kvsnap file: what is written is read again, and nothing is ever half of one."""

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import formats
from support.formats import (
    N_CHUNK,
    Record,
    assert_holds,
    codes_of,
    identity_with,
    in_parts,
    made,
    sections,
    verified,
    with_guests,
)

from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.native.checksum import checksum
from pyllama_kvflash.snapshot.file import OrphanError, Outline, SnapshotFile
from pyllama_kvflash.snapshot.layout import DIGEST, Source, chain, record_place, write

pytestmark = pytest.mark.native

fresh = formats.fresh
small = formats.small
snap = formats.snap


#
# the file
#


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 70, 640, 1000])
@pytest.mark.parametrize("n_state", [0, 1, 2])
def test_what_is_written_is_read_again(snap: Path, n_tokens: int, n_state: int) -> None:
    contents, records = made(n_tokens, n_state if n_tokens > N_CHUNK else min(n_state, 1), seed=n_tokens)
    told: list[int] = []
    size = write(snap, contents, records, told.append)
    assert size == snap.stat().st_size
    assert told == list(range(1, len(records) + 1))
    file = SnapshotFile(snap)
    assert file.n_bytes == size
    assert list(file.verify()) == told
    assert_holds(file, contents, records)


def test_guests_are_read_again(fresh: Path) -> None:
    contents, records = made()
    contents, codes = with_guests(contents)
    file = verified(fresh)
    assert_holds(file, contents, records, codes)
    assert [part.dtype for part in codes_of(file)] == [np.uint8, np.uint8]


def test_the_layout_is_that_of_version_5(fresh: Path) -> None:
    """Read by hand: whoever changes a field raises the version."""
    contents, records = made()
    contents, of_layers = with_guests(contents)
    saved = contents.guests
    assert saved is not None
    data = fresh.read_bytes()
    assert struct.unpack_from("<8sIIQ", data) == (b"\x93KVSNAP\n", 5, 584, len(data))
    assert data[552:584] == sha256(data[:552])
    raw = []
    for i in range(11):
        offset, size, check = struct.unpack_from("<QQ32s", data, 24 + 48 * i)
        assert offset % 8 == 0
        raw.append(data[offset : offset + size])
        assert i >= 9 or check == sha256(raw[i])
    identity, sequence, tokens, chunks, scoring, sources, stops, states, guests, codes, rows = raw

    assert struct.unpack_from("<QQIIII32s", identity) == (
        *(0x1234_5678_9ABC_DEF0, 300, 128, 16, 2, 0),
        b"llama_kv_cache".ljust(32, b"\0"),
    )
    assert struct.unpack_from("<16i", identity, 64) == (0, 1, 1, 64, 64, 4, 2, 32, 1, 1, 1, 64, 64, 4, 2, 32)
    assert struct.unpack("<IIIIQiI", sequence) == (70, 4096, 1024, 256, 99, 7, 32)
    assert struct.unpack("<70i", tokens) == tuple(contents.tokens)
    assert struct.unpack_from("<IIdd", scoring) == (5, 2, 0.25, 0.5)
    assert scoring[24:] == contents.scoring.scores.tobytes()
    assert sources == b""
    assert struct.unpack("<IIQIIQ", stops) == (16, 0, 10, 70, 0, 13)
    assert states == b"".join(blob for _, blob in contents.states)
    sums = [checksum(part) for part in of_layers]
    assert struct.unpack_from("<8IQQ16s16s", guests) == (0, 4, 2, 64, 16, 2, 3, 12, 101, 60, *sums)
    assert struct.unpack_from("<27i", guests, 80) == (*saved.blocks, *saved.units.ravel())
    assert len(guests) == 80 + 4 * 27
    assert data[24 + 48 * 9 + 16 :][:32] == sha256(b"".join(sums))
    assert codes == b"".join(part.tobytes() for part in of_layers)

    link = sha256(identity)
    for i, record in enumerate(records):
        chained, check, resident, pinned, reserved, block, touched, score = struct.unpack_from(
            "<32s16s?bhiqd", chunks, 72 * i
        )
        link = sha256(link + tokens[64 * i : 64 * (i + 1)])
        assert chained == link
        assert check == checksum(record)
        assert rows[8192 * i + 3968 : 8192 * i + 4268] == record.tobytes()
        had = contents.chunks[i]
        assert (resident, pinned, reserved, block, touched) == tuple(
            had[name] for name in ("resident", "pinned", "reserved", "block", "touched")
        )
        assert score == had["score"] or np.isnan(had["score"])
    assert len(chunks) == 72 * 5


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize(("record_bytes", "meta_bytes"), [(300, 128), (4096, 64), (99136, 832), (5000, 4096)])
def test_rows_begin_on_a_page(snap: Path, record_bytes: int, meta_bytes: int) -> None:
    contents, records = made(record_bytes=record_bytes, meta_bytes=meta_bytes)
    write(snap, contents, records)
    pitch, lead = record_place(contents.identity)
    start, end = sections(snap)["records"]
    assert start % 4096 == pitch % 4096 == 0
    assert end == start + 5 * pitch == snap.stat().st_size
    assert (lead + meta_bytes) % 4096 == 0
    data = snap.read_bytes()
    for i, record in enumerate(records):
        at = start + i * pitch + lead
        assert data[at : at + record_bytes] == record.tobytes()


def n_open(folder: Path) -> int:
    """Files of a folder that this process has open."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += str(fd.readlink()).startswith(str(folder))
    return found


def test_files_are_open_as_long_as_somebody_holds_them(tmp_path: Path) -> None:
    last, _, records = in_parts(tmp_path, 2, 4, 5)
    file = SnapshotFile(last)
    assert n_open(tmp_path) == 3
    fill, place = partial(file.fill, 0), np.empty_like(records[0])
    del file
    fill(place)
    np.testing.assert_array_equal(place, records[0])
    assert n_open(tmp_path) == 3
    del fill
    assert n_open(tmp_path) == 0


def test_a_file_that_is_refused_is_closed(tmp_path: Path) -> None:
    last, _, _ = in_parts(tmp_path, 2, 5)
    for name in ("cut", "short", "other"):
        data = bytearray(last.read_bytes())
        data[100 if name == "other" else 700] ^= 1
        (tmp_path / name).write_bytes(data[: 100 if name == "short" else len(data)])
        with pytest.raises(SnapshotError):
            SnapshotFile(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SnapshotError, match="it is not a regular file"):
        SnapshotFile(tmp_path / "pipe")
    outline = Outline.of(last)
    assert not outline.is_orphan
    assert n_open(tmp_path) == 0


#
# writing
#


class Stop(Exception):  # noqa: N818 (no error)
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, OSError(5, "Input/output error")])
@pytest.mark.parametrize("at", [0, 3])
def test_nothing_is_left_of_a_write_that_failed(snap: Path, error: Any, at: int) -> None:
    """Not even of the file's place on the disk, and what had the name has it still."""
    old, (contents, records) = made(seed=1), made()

    def some() -> Iterator[Record]:
        yield from records[:at]
        raise error

    for before in ([], [snap]):
        want = SnapshotError if isinstance(error, OSError) else error
        with pytest.raises(want):
            write(snap, contents, some())
        assert list(snap.parent.iterdir()) == before
        if before:
            assert_holds(verified(snap), *old)
        write(snap, *old)


def test_a_file_is_its_owner_s(small: Path) -> None:
    assert small.stat().st_mode & 0o777 == 0o600


def test_it_is_on_the_disk_before_it_has_its_name(snap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the folder after that."""
    calls: list[tuple[str, bool]] = []
    fsync = os.fsync

    def seen(fd: int) -> None:
        calls.append(("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file", snap.exists()))  # noqa: PTH112
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    write(snap, *made())
    assert calls == [("file", False), ("folder", True)]


def test_a_system_without_fallocate(snap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    write(snap, *made())
    assert_holds(verified(snap), *made())


#
# records in other files
#


def test_records_of_other_files(tmp_path: Path) -> None:
    path, contents, records = in_parts(tmp_path, 40, 41, 60, 70)
    assert_holds(SnapshotFile(path), contents, records)
    sizes = [end - start for each in sorted(tmp_path.iterdir()) for start, end in [sections(each)["records"]]]
    assert sizes == [n * 8192 for n in (40, 1, 19, 10)], "each record once"
    assert len(list(SnapshotFile(path).verify())) == 10, "those that it has itself"


def test_a_part_of_another_file_s_records(snap: Path) -> None:
    """Which has others after them, that are not of this text."""
    _, whole, records = in_parts(snap.parent, 40, 70)
    source = SnapshotFile(snap.with_name("1.kvsnap")).outline.as_source
    zero = SnapshotFile(snap.with_name("0.kvsnap")).outline.as_source
    mine = replace(whole, sources=(zero, replace(source, end=50)))
    write(snap, mine, records[50:])
    assert_holds(SnapshotFile(snap), mine, records)


@pytest.mark.parametrize("change", ["gone", "another", "damaged", "linked", "cut"])
def test_a_file_that_has_records_is_not_what_it_was(tmp_path: Path, change: str) -> None:
    path, _, _ = in_parts(tmp_path, 40, 41, 70)
    source = tmp_path / "1.kvsnap"
    if change == "gone":
        source.unlink()
    elif change == "another":
        write(source, *made(41 * N_CHUNK, 0, seed=1))
    elif change == "linked":
        source.rename(tmp_path / "elsewhere")
        source.symlink_to(tmp_path / "elsewhere")
    elif change == "cut":
        source.write_bytes(source.read_bytes()[:-1])
    else:
        source.write_bytes(b"x" + source.read_bytes()[1:])
    with pytest.raises(
        OrphanError, match=r"2.kvsnap has some of its records in 1.kvsnap, which is gone from that folder, or"
    ):
        SnapshotFile(path)
    assert Outline.of(path).is_orphan


@pytest.mark.parametrize("name", ["../0.kvsnap", "/dev/zero", "", ".", ".."])
def test_a_source_is_a_file_of_the_same_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    _, contents, records = in_parts(tmp_path, 40, 70)
    header = SnapshotFile(tmp_path / "0.kvsnap").outline.header
    write(folder / "x.kvsnap", replace(contents, sources=(Source(name, header, 0, 40),)), records[40:])
    with pytest.raises(OrphanError):
        SnapshotFile(folder / "x.kvsnap")
    assert Outline.of(folder / "x.kvsnap").is_orphan


def test_damage_of_another_file_s_record_is_said_of_that_file(tmp_path: Path) -> None:
    path, _, _ = in_parts(tmp_path, 40, 70)
    source, told = tmp_path / "0.kvsnap", []
    pitch, lead = record_place(SnapshotFile(source).contents.identity)
    data = bytearray(source.read_bytes())
    data[sections(source)["records"][0] + 7 * pitch + lead + 5] ^= 1
    source.write_bytes(data)
    file = SnapshotFile(path)
    file.on_damage = told.append
    for i in (6, 8, 41):
        file.record(i)
    with pytest.raises(SnapshotError, match=f"{source} is not a whole snapshot: the record of chunk 7 was changed"):
        file.record(7)
    assert told == [source]


#
# what is the same
#


def common(a: list[bytes], b: list[bytes]) -> int:
    """How many links two chains begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_chain_tells_where_two_texts_part() -> None:
    identity, rng = identity_with(), np.random.default_rng(0)
    text = rng.integers(0, 500, 100).astype(np.int32)
    links = chain(identity, text, N_CHUNK)
    assert len(links) == 7
    assert len(set(links)) == 7
    assert {len(link) for link in links} == {DIGEST}
    for n in range(101):
        assert common(chain(identity, text[:n], N_CHUNK), links) == (7 if n == 100 else n // N_CHUNK)
    for at in range(100):
        other = text.copy()
        other[at] += 1
        assert common(chain(identity, other, N_CHUNK), links) == at // N_CHUNK


def test_a_chain_is_of_a_model_and_cache() -> None:
    text = np.arange(64, dtype=np.int32)
    links = chain(identity_with(), text, N_CHUNK)
    for values in ({"fingerprint": 1}, {"type_k": 8}, {"flags": 1}, {"memory": b"other"}):
        assert not set(links) & set(chain(identity_with(**values), text, N_CHUNK))
    assert chain(identity_with(), text.astype(np.int64), N_CHUNK) == links


def test_an_identity_is_the_same_or_says_what_differs() -> None:
    mine = identity_with()
    assert mine.difference(identity_with()) is None
    assert (
        mine.difference(identity_with(fingerprint=1))
        == "it was made with another model, or another scaling of RoPE (`rope.scaling`)"
    )
    assert mine.difference(identity_with(type_k=8)) == "its layers or cache types differ (`type_k`, `type_v`)"


def test_the_reason_says_which_number_is_whose() -> None:
    """As usable() asks: of the file, for what is here."""
    assert (
        identity_with(chunk=16).difference(identity_with(chunk=32))
        == "its chunks have 16 positions, and 32 here (chunk)"
    )
