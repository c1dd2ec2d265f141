"""The .kvsnap file: what is written is read again, what was changed is seen, and nothing is ever half of one."""

import hashlib
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.policy import Scoring
from pyllama_kvflash.pool.store import HostMemory, HostStore
from pyllama_kvflash.snapshot.file import OrphanError, Outline, SnapshotFile
from pyllama_kvflash.snapshot.layout import (
    CHUNK,
    DIGEST,
    HEADER,
    IDENTITY,
    LAYER,
    SECTIONS,
    SEQUENCE,
    Contents,
    Identity,
    Source,
    chain,
    digest,
    record_place,
    write,
)

pytestmark = pytest.mark.native

Record = npt.NDArray[np.uint8]

N_CHUNK = 16
FULL = [name for name in SECTIONS if name != "sources"]  # of the files here
N_FUZZ = int(os.environ.get("KVFLASH_FUZZ_ROUNDS", "2000"))


#
# snapshots of nothing
#


def identity_with(**values: Any) -> Identity:
    """Of a model that there is not: two layers, records of 300 bytes of which 128 come before the rows."""
    head = np.zeros((), IDENTITY)
    head["fingerprint"], head["record_bytes"], head["meta_bytes"] = 0x1234_5678_9ABC_DEF0, 300, 128
    head["chunk"], head["n_layer"], head["flags"], head["memory"] = N_CHUNK, 2, 0, b"llama_kv_cache"
    layers = np.array([(0, 1, 1, 64, 64, 4, 2, 32), (1, 1, 1, 64, 64, 4, 2, 32)], LAYER)
    for name, value in values.items():
        if name in (LAYER.names or ()):
            layers[name] = value
        else:
            head[name] = value
    return Identity(head.tobytes() + layers.tobytes())


def made(n_tokens: int = 70, n_state: int = 2, seed: int = 0, **values: Any) -> tuple[Contents, list[Record]]:
    """Contents by chance, and records."""
    rng, identity = np.random.default_rng(seed), identity_with(**values)
    n = -(-n_tokens // N_CHUNK)
    tokens = rng.integers(0, 500, n_tokens).astype(np.int32)
    records = [rng.integers(0, 256, identity.fields["record_bytes"], np.uint8) for _ in range(n)]
    chunks = np.zeros(n, CHUNK)
    chunks["chain"] = [np.void(link) for link in chain(identity, tokens, N_CHUNK)]
    chunks["digest"] = [np.void(digest(record)) for record in records]
    chunks["state"], chunks["pinned"] = rng.integers(0, 3, n), rng.integers(0, 2, n)
    chunks["reserved"], chunks["block"] = rng.integers(0, 4, n), rng.integers(-1, 8, n)
    chunks["touched"], chunks["score"] = rng.integers(0, 9, n), rng.choice([np.nan, -np.inf, 0.5, 3.0], n)
    sequence = np.zeros((), SEQUENCE)
    sequence["n_tokens"], sequence["n_ctx"], sequence["n_pool"], sequence["n_kv"] = n_tokens, 4096, 1024, 256
    sequence["tick"], sequence["pending"] = 99, 7
    ends = [*list(range(N_CHUNK, n_tokens, N_CHUNK))[: n_state - 1], n_tokens]
    states = tuple((pos, rng.bytes(10 + 3 * i)) for i, pos in enumerate(ends[:n_state]))
    scoring = Scoring(
        5, rng.random(12, np.float32) if seed % 2 else None, None if seed % 2 else rng.random(n), 0.25, 0.5
    )
    return Contents(identity, sequence, tokens, chunks, ((1, 3), (2,)), states, scoring), records


def assert_holds(file: SnapshotFile, contents: Contents, records: list[Record]) -> None:
    """To the bit."""
    got = file.contents
    assert got.identity == contents.identity
    assert got.sequence.tobytes() == contents.sequence.tobytes()
    np.testing.assert_array_equal(got.tokens, contents.tokens, strict=True)
    assert got.chunks.tobytes() == contents.chunks.tobytes()
    assert got.plan == contents.plan
    assert got.states == contents.states
    np.testing.assert_equal(asdict(got.scoring), asdict(contents.scoring))
    assert got.sources == contents.sources
    for i, record in enumerate(records):
        np.testing.assert_array_equal(file.record(i), record, strict=True)


@pytest.fixture
def snap(tmp_path: Path) -> Path:
    """A name."""
    return tmp_path / "text.kvsnap"


@pytest.fixture
def small(snap: Path) -> Path:
    """A file of five chunks."""
    write(snap, *made())
    return snap


def sections(path: Path) -> dict[str, tuple[int, int]]:
    """Where each begins and ends."""
    table = SnapshotFile(path).header["sections"]
    return {
        name: (int(offset), int(offset + size))
        for name, offset, size in zip(SECTIONS, table["offset"], table["size"], strict=True)
    }


def resigned(data: bytearray) -> bytearray:
    """With a header that has the digest of what it says now."""
    data[HEADER.itemsize - DIGEST : HEADER.itemsize] = digest(bytes(data[: HEADER.itemsize - DIGEST]))
    return data


def verified(path: Path) -> SnapshotFile:
    """A file whose records were all checked."""
    res = SnapshotFile(path)
    for _ in res.verify():
        pass
    return res


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


@pytest.mark.parametrize("plan", [((), ()), ((5,), ()), ((), (1, 2, 3)), ((0, 1), (2, 3, 4))])
def test_plans(snap: Path, plan: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    contents, records = made()
    write(snap, replace(contents, plan=plan), records)
    assert SnapshotFile(snap).contents.plan == plan


def test_the_layout_is_that_of_version_1(small: Path) -> None:
    """Read by hand: whoever changes a field raises the version."""
    contents, records = made()
    data = small.read_bytes()
    assert struct.unpack_from("<8sIIQ", data) == (b"\x93KVSNAP\n", 1, 536, len(data))
    assert data[504:536] == sha256(data[:504])
    raw = []
    for i in range(10):
        offset, size, check = struct.unpack_from("<QQ32s", data, 24 + 48 * i)
        assert offset % 8 == 0
        raw.append(data[offset : offset + size])
        assert i == 9 or check == sha256(raw[i])
    identity, sequence, tokens, chunks, plan, scoring, sources, stops, states, rows = raw

    assert struct.unpack_from("<QQIIII32s", identity) == (
        *(0x1234_5678_9ABC_DEF0, 300, 128, 16, 2, 0),
        b"llama_kv_cache".ljust(32, b"\0"),
    )
    assert struct.unpack_from("<16i", identity, 64) == (0, 1, 1, 64, 64, 4, 2, 32, 1, 1, 1, 64, 64, 4, 2, 32)
    assert struct.unpack("<IIIIQi", sequence) == (70, 4096, 1024, 256, 99, 7)
    assert struct.unpack("<70i", tokens) == tuple(contents.tokens)
    assert struct.unpack("<5i", plan) == (2, 1, 3, 1, 2)
    assert struct.unpack_from("<IIdd", scoring) == (5, 2, 0.25, 0.5)
    assert scoring[24:] == contents.scoring.scores.tobytes()
    assert sources == b""
    assert struct.unpack("<IIQIIQ", stops) == (16, 0, 10, 70, 0, 13)
    assert states == b"".join(blob for _, blob in contents.states)

    link = sha256(identity)
    for i, record in enumerate(records):
        chained, check, state, pinned, reserved, block, touched, score = struct.unpack_from(
            "<32s32sbbhiqd", chunks, 88 * i
        )
        link = sha256(link + tokens[64 * i : 64 * (i + 1)])
        assert chained == link
        assert check == sha256(record.tobytes())
        assert rows[8192 * i + 3968 : 8192 * i + 4268] == record.tobytes()
        had = contents.chunks[i]
        assert (state, pinned, reserved, block, touched) == tuple(
            had[name] for name in ("state", "pinned", "reserved", "block", "touched")
        )
        assert score == had["score"] or np.isnan(had["score"])
    assert len(chunks) == 88 * 5


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


def test_the_same_contents_give_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.kvsnap", "b.kvsnap")]
    for path in paths:
        write(path, *made())
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_record_is_a_view_that_nobody_can_write_to(small: Path) -> None:
    file = SnapshotFile(small)
    record = file.record(0)
    assert record.base is not None
    assert not record.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        record[0] = 1


def test_a_view_stays_when_the_file_goes(small: Path) -> None:
    _, records = made()
    views = [SnapshotFile(small).record(i) for i in range(5)]
    small.unlink()
    for view, record in zip(views, records, strict=True):
        np.testing.assert_array_equal(view, record)


def test_a_view_stays_when_another_file_takes_the_name(small: Path) -> None:
    _, records = made()
    file = SnapshotFile(small)
    write(small, *made(seed=1))
    for i, record in enumerate(records):
        np.testing.assert_array_equal(file.record(i), record)
    assert_holds(verified(small), *made(seed=1))


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


def in_parts(folder: Path, *ends: int, n_state: int = 0) -> tuple[Path, Contents, list[Record]]:
    """A file of some chunks whose records are in as many files, each with those from where the one before ends."""
    contents, records = made(ends[-1] * N_CHUNK, n_state)
    sources: tuple[Source, ...] = ()
    for i, end in enumerate(ends):
        path, first = folder / f"{i}.kvsnap", sources[-1].end if sources else 0
        n = end * N_CHUNK
        part = replace(contents, tokens=contents.tokens[:n], chunks=contents.chunks[:end], sources=sources)
        write(path, part, records[first:end])
        sources = (*sources, SnapshotFile(path).outline.as_source)
        assert sources[-1] == Source(path.name, SnapshotFile(path).outline.header, first, end)
    return path, part, records[:end]


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
        file.check(i, file.record(i))
    with pytest.raises(SnapshotError, match=f"{source} is no whole snapshot: the record of chunk 7 was changed"):
        file.check(7, file.record(7))
    assert told == [source]


#
# damage
#


@pytest.mark.parametrize("at", [0, 0.5, 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("name", FULL[:-1])
def test_a_byte_of_a_section(small: Path, name: str, at: float) -> None:
    start, end = sections(small)[name]
    data = bytearray(small.read_bytes())
    data[start + round(at * (end - start - 1))] ^= 0x80
    small.write_bytes(data)
    with pytest.raises(SnapshotError, match=f"{small} is no whole snapshot: its section {name} was changed"):
        SnapshotFile(small)


@pytest.mark.parametrize("chunk", range(5))
def test_a_byte_of_a_record(small: Path, chunk: int) -> None:
    """It is seen when the record is checked, and all others can be used."""
    contents, records = made()
    pitch, lead = record_place(contents.identity)
    start, _ = sections(small)["records"]
    data = bytearray(small.read_bytes())
    data[start + chunk * pitch + lead + 299] ^= 1
    small.write_bytes(data)
    file = SnapshotFile(small)
    for i in range(5):
        if i == chunk:
            with pytest.raises(SnapshotError, match=f"no whole snapshot: the record of chunk {i} was changed"):
                file.check(i, file.record(i))
        else:
            file.check(i, file.record(i))
            np.testing.assert_array_equal(file.record(i), records[i])
    done = []
    with pytest.raises(SnapshotError):
        done.extend(file.verify())


@pytest.mark.parametrize("at", range(0, HEADER.itemsize, 7))
def test_a_byte_of_the_header(small: Path, at: int) -> None:
    data = bytearray(small.read_bytes())
    data[at] ^= 0x10
    small.write_bytes(data)
    with pytest.raises(SnapshotError, match=str(small)) as err:
        SnapshotFile(small)
    assert "\n" not in str(err.value)


def test_bytes_between_sections_say_nothing(small: Path) -> None:
    used = np.zeros(small.stat().st_size, bool)
    used[: HEADER.itemsize] = True
    for start, end in sections(small).values():
        used[start:end] = True
    data = np.frombuffer(small.read_bytes(), np.uint8).copy()
    assert 0 < np.count_nonzero(~used) < 5000
    data[~used] ^= 0xFF
    small.write_bytes(data.tobytes())
    assert_holds(verified(small), *made())


def test_cut_off_at_every_border(small: Path) -> None:
    data = small.read_bytes()
    borders = {0, 1, HEADER.itemsize, len(data) - 4096, *(at for pair in sections(small).values() for at in pair)}
    for n in sorted({max(0, at + d) for at in borders for d in (-1, 0, 1)} - {len(data), len(data) + 1}):
        small.write_bytes(data[:n])
        with pytest.raises(SnapshotError, match=f"{small} is no whole snapshot: it has {n} bytes"):
            SnapshotFile(small)


def test_more_than_all(small: Path) -> None:
    data = small.read_bytes()
    small.write_bytes(data + b"x")
    with pytest.raises(SnapshotError, match=f"it has {len(data) + 1} bytes, and had {len(data)}"):
        SnapshotFile(small)


@pytest.mark.parametrize("version", [0, 2, 2**31])
def test_another_version_says_so(small: Path, version: int) -> None:
    """Whatever else it has: its header may be another one."""
    data = bytearray(small.read_bytes())
    data[8:12] = version.to_bytes(4, "little")
    for each in (data, resigned(data), data[: HEADER.itemsize + 8]):
        small.write_bytes(each)
        with pytest.raises(SnapshotError, match=f"has format {version}, and this version reads 1: save it anew"):
            SnapshotFile(small)


@pytest.mark.parametrize("i", range(len(FULL) - 2))
def test_sections_that_changed_places(small: Path, i: int) -> None:
    one, two = (sections(small)[name] for name in FULL[i : i + 2])
    data = bytearray(small.read_bytes())
    swapped = data[:]
    swapped[one[0] : one[0] + two[1] - two[0]] = data[slice(*two)]
    small.write_bytes(swapped)
    with pytest.raises(SnapshotError, match="was changed"):
        SnapshotFile(small)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/proc/self/status"])
def test_no_regular_files(path: str) -> None:
    with pytest.raises(SnapshotError, match=path):
        SnapshotFile(Path(path))


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="it is no regular file"):
        SnapshotFile(tmp_path)


@pytest.mark.parametrize("path", ["x" * 300, "missing/text.kvsnap"], ids=["long", "missing"])
def test_a_name_that_no_file_can_have(tmp_path: Path, path: str) -> None:
    for call in (SnapshotFile, lambda name: write(name, *made())):
        with pytest.raises(SnapshotError) as err:
            call(tmp_path / path)
        assert "\n" not in str(err.value)


MUTATIONS: list[Callable[[random.Random, bytearray, list[int]], None]] = []


def mutation(f: Callable[[random.Random, bytearray, list[int]], None]) -> None:
    MUTATIONS.append(f)


@mutation
def flip(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


@mutation
def flip_what_is_small(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    data[rng.randrange(borders[-2])] ^= 1 << rng.randrange(8)


@mutation
def flip_at_a_border(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    data[min(len(data) - 1, max(0, rng.choice(borders) + rng.randrange(-4, 4)))] ^= rng.randrange(1, 256)


@mutation
def cut(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    del data[rng.randrange(len(data)) :]


@mutation
def cut_at_a_border(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    del data[max(0, rng.choice(borders) + rng.randrange(-1, 2)) :]


@mutation
def take_out(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice([1, 8, 4096])]


@mutation
def put_in(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.choice([1, 8, 4096]))


@mutation
def swap(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    n = rng.choice([1, 8, 300, 4096])
    a, b = (rng.randrange(max(1, len(data) - n)) for _ in range(2))
    data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]


@mutation
def swap_pages(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    a, b = (4096 * rng.randrange(len(data) // 4096) for _ in range(2))
    data[a : a + 4096], data[b : b + 4096] = data[b : b + 4096], data[a : a + 4096]


@mutation
def empty(rng: random.Random, data: bytearray, borders: list[int]) -> None:
    at, n = rng.randrange(len(data)), rng.choice([8, 512, 4096])
    data[at : at + n] = bytes(len(data[at : at + n]))


@pytest.fixture
def fast() -> Iterator[Path]:
    """A folder in memory, if there is one."""
    shm = Path("/dev/shm")
    with TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("ends", [(5,), (3, 5)], ids=["one file", "two files"])
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_fuzz(fast: Path, mutate: Callable[[random.Random, bytearray, list[int]], None], ends: tuple[int, ...]) -> None:
    """Damage is seen, or there is none: whatever is done to a file, nothing wrong is read from it, and nothing else raised."""
    last, contents, records = in_parts(fast, *ends, n_state=2)
    files = {path: path.read_bytes() for path in fast.iterdir()}
    borders = {
        path: sorted({0, HEADER.itemsize, *(at for pair in sections(path).values() for at in pair)}) for path in files
    }
    rng, seen = random.Random(f"{mutate.__name__} {len(ends)}"), 0
    n = -(-N_FUZZ // len(MUTATIONS) // 2)
    for _ in range(n):
        path = rng.choice(sorted(files))
        changed = bytearray(files[path])
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            if changed:
                mutate(rng, changed, [at for at in borders[path] if at <= len(changed)] or [0])
        path.write_bytes(changed)
        try:
            file = SnapshotFile(last)
            for i in range(len(records)):
                file.check(i, file.record(i))
        except SnapshotError:
            assert changed != files[path]
            seen += 1
        else:
            assert_holds(file, contents, records)
        path.unlink()
        path.write_bytes(files[path])
    assert seen > n // 50


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
    assert mine.difference(identity_with(fingerprint=1)) == "it is of another model"
    assert mine.difference(identity_with(type_k=8)) == "its layers or cache types are others (-ctk, -ctv)"


def test_the_reason_says_which_number_is_whose() -> None:
    """As usable() asks: of the file, for what is here."""
    assert (
        identity_with(chunk=16).difference(identity_with(chunk=32))
        == "its chunks have 16 positions, and 32 here (--kvflash-chunk)"
    )


#
# the store
#

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
    store.hold()
    old = store.get(3)
    store.forget(0)
    store.put(3)[:] = 99
    for record, first in ((old, b"\3"), (store.get(3), b"c"), (old, b"\3")):
        assert store.digest(3, record, lambda r: bytes(r[:1])) == first
    store.forget(0)
    assert store.digest(3, old, lambda r: bytes(r[:1])) == b"\3"
    store.release()


@pytest.mark.parametrize("again", [True, False])
def test_a_record_that_is_forgotten_while_its_digest_is_computed(store: HostStore, again: bool) -> None:
    """By a thread that saves it: the digest is known of what was saved, and of nothing else."""
    put(store, 3)
    store.hold()

    def compute(record: Record) -> bytes:
        res = bytes(record[:1])
        store.forget(0)
        if again:
            store.put(3)[:] = 99
        return res

    assert store.digest(3, store.get(3), compute) == b"\3"
    store.put(3)[:] = 99
    assert store.digest(3, store.get(3), lambda r: bytes(r[:1])) == b"c"
    store.release()


def test_what_is_held_stays_until_it_is_released(store: HostStore) -> None:
    put(store, *range(10))
    views = [store.get(chunk) for chunk in range(10)]
    store.hold()
    store.hold()
    store.forget(4)
    assert len(store) == 4
    for chunk in range(4, 30):
        store.put(chunk)[:] = 99
    store.forget(20)
    for chunk in range(20, 40):
        store.put(chunk)[:] = 98
    assert [int(view[0]) for view in views] == list(range(10))
    n_used = store.memory.n_used
    store.release()
    assert store.memory.n_used == n_used, "somebody else still reads it"
    store.release()
    store.memory.reserve(0)
    assert store.memory.n_used == len(store) == 40
    store.forget(0)
    assert store.memory.n_used == 0


def test_places_that_were_held_are_used_again(store: HostStore) -> None:
    put(store, *range(64))
    held = store.memory.held_bytes
    store.hold()
    store.forget(0)
    store.release()
    put(store, *range(64))
    assert store.memory.held_bytes == held


def test_what_is_not_held_is_used_again_at_once(store: HostStore) -> None:
    put(store, 0)
    store.hold()
    store.release()
    store.forget(0)
    assert store.memory.n_used == 0


def test_a_lent_record_is_left_where_it_is_when_held(store: HostStore) -> None:
    record = lent(3)
    store.lend(0, record, b"digest", lambda _: None)
    store.hold()
    store.forget(0)
    store.release()
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
