"""Damaged .kvsnap files: whatever was changed, the file is refused, or holds what it held."""

import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import formats
from support.formats import (
    Record,
    assert_holds,
    codes_of,
    in_parts,
    made,
    resigned,
    sections,
    with_forged_guests,
    with_guests,
)

from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.snapshot import file as snapshot_file
from pyllama_kvflash.snapshot.file import SnapshotFile
from pyllama_kvflash.snapshot.layout import HEADER, SECTIONS, record_place, write

pytestmark = pytest.mark.native

fresh = formats.fresh
small = formats.small
snap = formats.snap

FULL = [name for name in SECTIONS if name != "sources"]  # of the files here
N_FUZZ = int(os.environ.get("KVFLASH_FUZZ_ROUNDS", "2000"))


@pytest.mark.parametrize("at", [0, 0.5, 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("name", FULL[:-1])
def test_a_byte_of_a_section(fresh: Path, name: str, at: float) -> None:
    """It is seen as the file is opened; of the codes, when they are used."""
    start, end = sections(fresh)[name]
    data = bytearray(fresh.read_bytes())
    data[start + round(at * (end - start - 1))] ^= 0x80
    fresh.write_bytes(data)
    why = re.escape(f"{fresh} is not a whole snapshot: its section {name} was changed")
    if name != "codes":
        with pytest.raises(SnapshotError, match=why):
            SnapshotFile(fresh)
        return
    file, told = SnapshotFile(fresh), list[Path]()
    file.on_damage = told.append
    for use in (lambda: codes_of(file), lambda: next(file.verify())):
        with pytest.raises(SnapshotError, match=why):
            use()
    assert told == [fresh, fresh]
    np.testing.assert_array_equal(file.record(0), made()[1][0])


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
            with pytest.raises(SnapshotError, match=f"not a whole snapshot: the record of chunk {i} was changed"):
                file.record(i)
        else:
            np.testing.assert_array_equal(file.record(i), records[i])
    done = []
    with pytest.raises(SnapshotError):
        done.extend(file.verify())


def test_more_than_all(small: Path) -> None:
    data = small.read_bytes()
    small.write_bytes(data + b"x")
    with pytest.raises(SnapshotError, match=f"it has {len(data) + 1:,} bytes, and had {len(data):,}"):
        SnapshotFile(small)


@pytest.mark.parametrize("version", [0, 4, 6, 2**31])
def test_another_version_says_so(small: Path, version: int) -> None:
    """Whatever else it has: its header may be another one."""
    data = bytearray(small.read_bytes())
    data[8:12] = version.to_bytes(4, "little")
    for each in (data, resigned(data), data[: HEADER.itemsize + 8]):
        small.write_bytes(each)
        with pytest.raises(
            SnapshotError, match=rf"by another version of kvflash \(format {version}, here 5\): remove it"
        ):
            SnapshotFile(small)


@pytest.mark.parametrize("field", ["n_layer", "n_block", "n_slot"])
def test_forged_guests(fresh: Path, field: str) -> None:
    """Digests that fit, of a table that says more than there is."""
    fresh.write_bytes(with_forged_guests(fresh, field, 1_000_000))
    with pytest.raises(SnapshotError, match=f"{fresh} is not a whole snapshot: its tables contradict each other"):
        SnapshotFile(fresh)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("n_known", 65, "64 of its 70 positions have codes, and 65 had them when the last segment began"),
        ("n_known", 2**32 - 1, "64 of its 70 positions have codes, and 4,294,967,295 had them"),  # -1, as it is stored
        ("n_tokens", 80, "80 of its 70 positions have codes, and 16 had them"),
        ("n_tokens", 15, "15 of its 70 positions have codes, and 16 had them"),
    ],
)
def test_forged_numbers_of_codes(fresh: Path, field: str, value: int, why: str) -> None:
    """No more had some before than have some now, and no more have some than there are."""
    fresh.write_bytes(with_forged_guests(fresh, field, value))
    with pytest.raises(SnapshotError, match=f"{fresh} is not a whole snapshot: {why}"):
        SnapshotFile(fresh)


def assert_read_or_told(file: SnapshotFile, records: list[Record], n_whole: int, why: str) -> None:
    """Of an open file that was changed, the first n_whole records are what they were, and the others are not read."""
    for i, record in enumerate(records):
        if i < n_whole:
            np.testing.assert_array_equal(file.record(i), record)
        else:
            with pytest.raises(SnapshotError, match=f"not a whole snapshot: the record of chunk {i} was {why}"):
                file.fill(i, np.empty_like(record))


@pytest.mark.parametrize("n", range(6))
def test_an_open_file_that_is_truncated(small: Path, n: int) -> None:
    """Within the record of chunk n, or of all of it."""
    _, records = made()
    start, (pitch, lead) = sections(small)["records"][0], record_place(made()[0].identity)
    file = SnapshotFile(small)
    os.truncate(small, start + n * pitch + lead + 100 if n < 5 else 0)
    assert_read_or_told(file, records, n % 5, "cut off while it was in use")


@pytest.mark.parametrize("how", ["zeros", "another snapshot", "grown again"])
def test_an_open_file_that_is_overwritten_in_place(small: Path, how: str) -> None:
    _, records = made()
    file, n = SnapshotFile(small), small.stat().st_size
    if how == "grown again":
        os.truncate(small, 0)
        os.truncate(small, n)
    else:
        other = small.with_name("other.kvsnap")
        write(other, *made(seed=1))
        with small.open("r+b") as out:
            out.write(bytes(n) if how == "zeros" else other.read_bytes())
    assert_read_or_told(file, records, 0, "changed")


def test_an_open_source_that_is_truncated(tmp_path: Path) -> None:
    """Its records are told, those of the other file are read."""
    last, _, records = in_parts(tmp_path, 3, 5)
    file, damaged = SnapshotFile(last), list[Path]()
    file.on_damage = damaged.append
    (first,) = file.outline.needs
    os.truncate(first, 1000)
    for i in (3, 4):
        np.testing.assert_array_equal(file.record(i), records[i])
    for i in range(3):
        with pytest.raises(
            SnapshotError, match=f"{first} is not a whole snapshot: the record of chunk {i} was cut off"
        ):
            file.record(i)
    assert set(damaged) == {first}
    with pytest.raises(SnapshotError, match="some of its records in"):
        SnapshotFile(last)


def test_a_file_that_is_cut_between_its_header_and_its_tables(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is opened."""

    def header(opened: Any) -> Any:
        res = read_header(opened)
        os.truncate(small, HEADER.itemsize + 10)
        return res

    read_header = snapshot_file._Opened._header
    monkeypatch.setattr(snapshot_file._Opened, "_header", header)
    with pytest.raises(SnapshotError, match="its section identity was cut off while it was in use"):
        SnapshotFile(small)


def test_a_disk_that_cannot_be_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SnapshotFile(small)

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    for call in (lambda: file.record(0), lambda: SnapshotFile(small)):
        with pytest.raises(SnapshotError, match=f"{small} cannot be read: Input/output error"):
            call()


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/proc/self/status"])
def test_no_regular_files(path: str) -> None:
    with pytest.raises(SnapshotError, match=path):
        SnapshotFile(Path(path))


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
    contents, codes = with_guests(contents)
    write(last, contents, records[contents.n_lent :], codes=codes)
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
            codes_of(file)
            for i in range(len(records)):
                file.record(i)
        except SnapshotError:
            assert changed != files[path]
            seen += 1
        else:
            assert_holds(file, contents, records, codes)
        path.unlink()
        path.write_bytes(files[path])
    assert seen > n // 50
