"""Snapshot files of a model that there is not, with random contents."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_kvflash.native.checksum import checksum
from pyllama_kvflash.policy import Scoring
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.snapshot.file import SnapshotFile
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
    write,
)
from pyllama_kvflash.snapshot.saved_guests import GUESTS, SavedGuests

Record = npt.NDArray[np.uint8]

N_CHUNK = 16


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
    chunks["checksum"] = [np.void(checksum(record)) for record in records]
    chunks["resident"], chunks["pinned"] = rng.integers(0, 2, n), rng.integers(0, 2, n)
    chunks["reserved"], chunks["block"] = rng.integers(0, 4, n), rng.integers(-1, 8, n)
    chunks["touched"], chunks["score"] = rng.integers(0, 9, n), rng.choice([np.nan, -np.inf, 0.5, 3.0], n)
    sequence = np.zeros((), SEQUENCE)
    sequence["n_tokens"], sequence["n_ctx"], sequence["n_pool"], sequence["n_kv"] = n_tokens, 4096, 1024, 256
    sequence["tick"], sequence["pending"], sequence["opens_until"] = 99, 7, 32
    ends = [*list(range(N_CHUNK, n_tokens, N_CHUNK))[: n_state - 1], n_tokens]
    states = tuple((pos, rng.bytes(10 + 3 * i)) for i, pos in enumerate(ends[:n_state]))
    scoring = Scoring(
        5, rng.random(12, np.float32) if seed % 2 else None, None if seed % 2 else rng.random(n), 0.25, 0.5
    )
    return Contents(identity, sequence, tokens, chunks, states, scoring), records


def with_guests(contents: Contents, seed: int = 0) -> tuple[Contents, list[Record]]:
    """Contents with guests by chance, and codes of their two layers."""
    rng, n = np.random.default_rng(seed), len(contents.tokens) // N_CHUNK
    codes = [rng.integers(0, 256, size, np.uint8) for size in (101, 60)]
    blocks, units = rng.permutation(8)[:3].astype(np.int32), rng.integers(-1, n, (2, 12)).astype(np.int32)
    sums = tuple(checksum(part) for part in codes)
    guests = SavedGuests(CoarseForm(4, 2), n * N_CHUNK, N_CHUNK, (101, 60), blocks, units, sums)
    return replace(contents, guests=guests), codes


def codes_of(file: SnapshotFile) -> list[Record]:
    """The codes of all layers."""
    return [file.codes(layer) for layer in range(len(file.contents.guests.sizes))] if file.contents.guests else []


def assert_holds(
    file: SnapshotFile, contents: Contents, records: list[Record], codes: list[Record] | None = None
) -> None:
    """To the bit."""
    got = file.contents
    assert got.identity == contents.identity
    assert got.sequence.tobytes() == contents.sequence.tobytes()
    np.testing.assert_array_equal(got.tokens, contents.tokens, strict=True)
    assert got.chunks.tobytes() == contents.chunks.tobytes()
    assert got.states == contents.states
    np.testing.assert_equal(asdict(got.scoring), asdict(contents.scoring))
    assert got.sources == contents.sources
    np.testing.assert_equal(got.guests and asdict(got.guests), contents.guests and asdict(contents.guests))
    np.testing.assert_equal(codes_of(file), codes or [])
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


@pytest.fixture
def fresh(snap: Path) -> Path:
    """The same with guests."""
    contents, records = made()
    contents, codes = with_guests(contents)
    write(snap, contents, records, codes=codes)
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


def with_forged_guests(path: Path, field: str, value: int) -> bytearray:
    """The bytes of a file that says something else of its guests, with digests that fit."""
    start, end = sections(path)["guests"]
    data = bytearray(path.read_bytes())
    guests = np.frombuffer(data, GUESTS, 1, start).copy()
    guests[field] = value
    data[start : start + GUESTS.itemsize] = guests.tobytes()
    header = np.frombuffer(data, HEADER, 1).copy()
    header["sections"]["digest"][0, SECTIONS.index("guests")] = np.void(digest(bytes(data[start:end])))
    data[: HEADER.itemsize] = header.tobytes()
    return resigned(data)


def verified(path: Path) -> SnapshotFile:
    """A file whose records were all checked."""
    res = SnapshotFile(path)
    for _ in res.verify():
        pass
    return res


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
