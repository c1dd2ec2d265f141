"""What is not a model, or not all of one: a sentence that names the file, the part, and what to do."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.splits import split

from kvflash_bench.grid import model_mark
from pyllama_kvflash.errors import ModelError
from pyllama_kvflash.loading.load import check_file
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = pytest.mark.native

N = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The parts of the bundled model."""
    return split(BUNDLED_MODEL, tmp_path_factory.mktemp("parts") / "a b %05d", N)


@pytest.fixture
def files(made: list[Path], tmp_path: Path) -> list[Path]:
    """A copy of them."""
    return [Path(shutil.copy(path, tmp_path)) for path in made]


def said(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Model.load(path, no_alloc=True).close()
    text = str(caught.value)
    assert text.startswith(f"{path} cannot be loaded: it")
    assert "\n" not in text
    return text.removeprefix(f"{path} cannot be loaded: ")


def swap(a: Path, b: Path) -> None:
    middle = a.with_suffix(".tmp")
    a.rename(middle)
    b.rename(a)
    middle.rename(b)


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100_000])


def foreign(path: Path, tiny: Path) -> None:
    swap(path, split(tiny, path.with_name("other"), N)[2])


def repeated(path: Path) -> None:
    """With the tensors of the part before it, as of a model that was split elsewhere."""
    data = path.with_name(path.name.replace("00003-of", "00002-of")).read_bytes()
    key = b"split.no" + (2).to_bytes(4, "little")  # a u16
    at = data.index(key) + len(key)
    path.write_bytes(data[:at] + (2).to_bytes(2, "little") + data[at + 2 :])


THIRD: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "is missing: put it beside the others"),
    "empty": (lambda path: path.write_bytes(b"") and None, "is empty: download it again"),
    "a text": (lambda path: replace(path, b"<html>"), "is not a GGUF file: download it again"),
    "a folder": (folder, "is a directory: put the file in its place"),
    "cut off": (short, "is incomplete, with "),
    "cut in its header": (lambda path: replace(path, path.read_bytes()[:50]), "ends within its header, after 50 bytes"),
    "swapped": (
        lambda path: swap(path, path.with_name(path.name.replace("00003-of", "00002-of"))),
        "says that it is part 3",
    ),
    "a whole model": (lambda path: replace(path, BUNDLED_MODEL.read_bytes()), "is a model of one file"),
    "repeated": (repeated, "is of another model, or of another conversion"),
}


@pytest.mark.parametrize(("breaks", "words"), THIRD.values(), ids=THIRD)
def test_the_part_is_named(files: list[Path], breaks: Callable[[Path], None], words: str) -> None:
    breaks(files[2])
    number = 2 if words.startswith("says that") else 3
    text = said(files[0])
    assert text.startswith(f"its part {number} of 3, {files[number - 1]}, {words}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_as_a_part_is_not_waited_for(files: list[Path]) -> None:
    files[2].unlink()
    os.mkfifo(files[2])
    with pytest.raises(ModelError, match=r"its part 3 of 3, .*, is not a regular file"):
        check_file(files[0])


def test_a_bench_names_the_part_too(files: list[Path]) -> None:
    """It reads all parts before they are loaded."""
    files[2].unlink()
    with pytest.raises(ModelError, match=r"its part 3 of 3, .*, is missing"):
        model_mark(files[0])


def test_a_part_of_another_model_is_named(files: list[Path], tiny_path: Callable[[str], Path]) -> None:
    foreign(files[2], tiny_path("qwen3"))
    assert said(files[0]).startswith(f"its part 3 of 3, {files[2]}, is of another model")


def test_a_part_that_is_not_the_first(files: list[Path], tmp_path: Path) -> None:
    assert said(files[1]) == f"it is part 2 of 3: give the first one, {files[0].name}"
    other = files[1].rename(tmp_path / "other.gguf")
    assert said(other) == "it is part 2 of 3: give the first one, whose name ends in -00001-of-00003.gguf"
    swap(files[0], files[2])
    assert said(files[0]).startswith(
        "its header says that it is part 3 of 3: give it a name that ends in -00003-of-00003.gguf"
    )
    assert said(files[2]).startswith(
        "its header says that it is part 1 of 3: give it a name that ends in -00001-of-00003.gguf"
    )


def test_parts_that_are_joined_or_renamed(files: list[Path], tmp_path: Path) -> None:
    joined, renamed = tmp_path / "joined.gguf", tmp_path / "renamed.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in files))
    assert said(joined).startswith("it is part 1 of 3 with others joined to it: give the first part as it was")
    renamed.write_bytes(files[0].read_bytes())
    assert said(renamed).startswith(
        "its header says that it is part 1 of 3: give it a name that ends in -00001-of-00003.gguf"
    )


@pytest.mark.parametrize(
    ("arch", "kind", "words"),
    [
        ("llama", "adapter", "an adapter (LoRA): merge it"),
        ("controlvector", None, "a control vector"),
        ("clip", None, "a projector (mmproj)"),
        ("clip", "mmproj", "a projector (mmproj)"),
        ("llama", "imatrix", "an importance matrix"),
    ],
)
def test_what_is_not_a_model(tmp_path: Path, arch: str, kind: str | None, words: str) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, arch)
    if kind:
        writer.add_string("general.type", kind)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert said(path).startswith(f"it is {words}")
