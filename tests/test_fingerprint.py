"""The number that tells models apart, without llama.cpp. tests/test_models_apart.py: what is kept under it."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.splits import change, split

from pyllama_kvflash import fingerprint as marks
from pyllama_kvflash.fingerprint import fingerprint
from pyllama_kvflash.gguf_header import Header, read_parts
from pyllama_kvflash.needle import BUNDLED_MODEL

LARGE, SMALL, STACKED = "large", "small", "experts"
N_EXPERT = 16


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Of tensors of a matrix, of a few values, and of several matrices."""
    return write(tmp_path / "model.gguf")


def write(path: Path, key: str = "as it was") -> Path:
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", key)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    for name, shape in ((LARGE, (64, 1024)), (SMALL, (24,)), (STACKED, (N_EXPERT, 16, 256))):
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few bytes are read that a small model is not read whole."""
    monkeypatch.setattr(marks, "_MOST", 36 << 10)
    monkeypatch.setattr(marks, "_SAMPLE", 256)


def test_it_is_stable() -> None:
    """Snapshots are known by it: this number may change only with docs/SNAPSHOT_FORMAT.md."""
    data = BUNDLED_MODEL.read_bytes()
    header = Header.read(BUNDLED_MODEL)
    n = len(header.raw)
    begin = len(data).to_bytes(8, "little") + n.to_bytes(8, "little") + data[:n]
    want = hashlib.blake2b(begin + data[header.data :], digest_size=8).digest()
    assert fingerprint(BUNDLED_MODEL) == int.from_bytes(want, "little")


def test_names_and_times_do_not_count(model: Path, tmp_path: Path) -> None:
    first = split(model, tmp_path / "a", 2)[0]
    (tmp_path / "b").mkdir()
    assert fingerprint(split(model, tmp_path / "b" / "other %05d name\n", 2)[0]) == fingerprint(first)
    before = fingerprint(model)
    assert fingerprint(model.rename(tmp_path / "renamed")) == before


def test_what_is_not_gguf_is_read_as_it_is(tmp_path: Path) -> None:
    path, seen = tmp_path / "model.gguf", set()
    data = b"GGUF" + bytes(range(100))
    for i in range(-1, len(data)):
        path.write_bytes(bytes(b ^ (i == j) for j, b in enumerate(data)))
        seen.add(fingerprint(path))
    assert len(seen) == len(data) + 1


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("form", ["one file", "two parts", "a first part without tensors"])
def test_it_sees_each_tensor(model: Path, tmp_path: Path, form: str) -> None:
    """The ends of a large one, all of a small one, and each expert."""
    files = [model] if form == "one file" else split(model, tmp_path / "m", 2, empty_first=form.startswith("a first"))
    assert [path for path, _ in read_parts(files[0])] == files
    size = 64 * 1024 * 4
    expert = 16 * 256 * 4
    places = [(LARGE, 0), (LARGE, size - 1), *((SMALL, i) for i in (0, 50, 95))]
    places += [(STACKED, i * expert) for i in range(N_EXPERT)]
    seen = {fingerprint(files[0])}
    for name, at in places:
        path = next(p for p in files if name in {t.name for t in gguf.GGUFReader(p).tensors})
        change(path, name, at)
        seen.add(fingerprint(files[0]))
        change(path, name, at)
    assert len(seen) == 1 + len(places)


@pytest.mark.usefixtures("sampled")
def test_it_sees_metadata_sizes_and_forms(model: Path, tmp_path: Path) -> None:
    seen = [fingerprint(model), fingerprint(write(tmp_path / "key", key="as it is!"))]
    for n, empty in ((2, False), (2, True), (3, False)):
        parts = split(model, tmp_path / f"{n}{empty}", n, empty_first=empty)
        seen.append(fingerprint(parts[0]))
        with parts[-1].open("ab") as file:
            file.write(bytes(32))
        seen.append(fingerprint(parts[0]))
    assert len(set(seen)) == len(seen)


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("other", [lambda x: x + 1e-3, lambda x: -x, lambda x: np.roll(x, 1, 0)])
def test_it_sees_a_tensor_that_was_trained_or_merged(
    model: Path,
    other: Callable[[np.ndarray], np.ndarray],  # type: ignore[type-arg]
) -> None:
    for i in range(3):
        before = fingerprint(model)
        tensor = gguf.GGUFReader(model, "r+").tensors[i]
        tensor.data[:] = other(tensor.data)
        tensor.data.flush()
        assert fingerprint(model) != before


def test_a_large_model_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 192 MiB in a matrix and 512 experts; nothing of it is on the disk."""
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, shape in (("a", (1 << 12, 1 << 13)), ("b", (512, 1 << 7, 1 << 8)), ("c", (64,))):
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, Header.read(path).needed())
    taken: list[int] = []

    class Digest:
        def __init__(self, **_: int) -> None:
            self.update = lambda data: taken.append(len(data))

        def digest(self) -> bytes:
            return bytes(8)

    monkeypatch.setattr(hashlib, "blake2b", Digest)
    fingerprint(path)
    assert path.stat().st_size > 192 << 20
    assert 24 << 20 < sum(taken) < 33 << 20
