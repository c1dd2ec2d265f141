"""`kvflash convert-draft`: what upstream's converter writes, in llama.cpp, or one sentence and no file."""

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from support import drafters

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import conversions
from support.commands import RUNTIME, check_error, invoke
from support.conversions import written
from support.golden_drafters import GOLDEN, describe

from pyllama_kvflash import native
from pyllama_kvflash.convert import OUTTYPES, find_source, gguf_file, resolve, write
from pyllama_kvflash.errors import ModelError
from pyllama_kvflash.native import Model
from pyllama_kvflash.native.lib import lib

pytestmark = pytest.mark.native

targets = conversions.targets

RUNS = json.loads(GOLDEN.read_text())


def converted(name: str, outtype: str, tmp_path: Path, targets: dict[bool, Path]) -> Path:
    out = tmp_path / f"{name}-{outtype}.gguf"
    write(resolve(written(name, tmp_path), targets[name in drafters.MROPE]), out, outtype)
    return out


def tensors_of(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


#
# what is written
#


@pytest.mark.parametrize("run", list(RUNS))
def test_as_upstream(run: str, tmp_path: Path, targets: dict[bool, Path]) -> None:
    """Every key with its type and value, every tensor with its type, shape and bytes.

    tests/support/golden_drafters.py ran upstream's converter of the pinned sdist, on these drafters.
    """
    name, outtype = run.split()
    found = json.loads(json.dumps(describe(gguf.GGUFReader(converted(name, outtype, tmp_path, targets)))))
    assert found["keys"] == RUNS[run]["keys"]
    assert found["tensors"] == RUNS[run]["tensors"]


def test_the_table_has_every_key() -> None:
    page = (Path(__file__).parent.parent / "docs" / "CONVERT.md").read_text()
    table = set(re.findall(r"`([\w.*]+)`", "".join(re.findall(r"^\|[^|]*\|", page, re.MULTILINE))))
    table |= {"attention.value_length", "rope.scaling.*"}
    for run in RUNS.values():
        keys = {key.removeprefix("dflash.") for key in run["keys"] if key.startswith("dflash.")}
        assert {re.sub(r"^rope\.scaling\..*", "rope.scaling.*", key) for key in keys} <= table


@pytest.mark.parametrize("name", list(drafters.DRAFTERS))
def test_llama_cpp_loads_it(name: str, tmp_path: Path, targets: dict[bool, Path]) -> None:
    path = converted(name, "auto", tmp_path, targets)
    for no_alloc in (True, False):
        with Model.load(path, no_alloc=no_alloc) as model:
            assert model.refusal == "draft head"
            assert model.n_vocab == drafters.N_VOCAB
            assert model.has_tokenizer
            assert model.meta("dflash.block_size") == str(RUNS[f"{name} auto"]["keys"]["dflash.block_size"][1])


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_every_type_loads(outtype: str, tmp_path: Path, targets: dict[bool, Path]) -> None:
    path = converted("dense", outtype, tmp_path, targets)
    with Model.load(path) as model:
        assert model.n_params
    exact, found = tensors_of(converted("dense", "f32", tmp_path, targets)), tensors_of(path)
    worst = max(float(np.abs(exact[name] - found[name]).max()) for name in exact)
    assert worst <= {"f32": 0, "bf16": 0, "f16": 1e-3, "q8_0": 0.01}.get(outtype, 0.15)
    for name, values in exact.items():
        if name.endswith("norm.weight"):
            np.testing.assert_array_equal(found[name], values)


def test_tokenizer_is_the_targets(tmp_path: Path, targets: dict[bool, Path]) -> None:
    """Byte for byte, with bytes that are no UTF-8, a template, and a mask that is the drafter's."""
    target = tmp_path / "odd.gguf"
    drafters.write_target(
        target,
        mrope=False,
        tokenizer__chat_template=b"{{ x }}\xff",
        tokenizer__ggml__mask_token_id=3,
        tokenizer__ggml__pre="llama4",
    )
    out = tmp_path / "draft.gguf"
    write(resolve(written("gemma", tmp_path), target), out)
    theirs, ours = gguf.GGUFReader(target).fields, gguf.GGUFReader(out).fields
    keys = {key for key in theirs if key.startswith("tokenizer.")}
    assert keys == {key for key in ours if key.startswith("tokenizer.")}
    for key in keys - {"tokenizer.ggml.mask_token_id"}:
        assert [p.tobytes() for p in ours[key].parts] == [p.tobytes() for p in theirs[key].parts]
        assert ours[key].types == theirs[key].types
    assert ours["tokenizer.ggml.mask_token_id"].contents() == drafters.MASK


#
# the command
#


def test_command(tmp_path: Path, targets: dict[bool, Path]) -> None:
    source, out = written("dense", tmp_path), tmp_path / "draft.gguf"
    res = invoke("convert-draft", source.folder, "--target", targets[True], "-o", out, "--outtype", "Q8_0")
    assert res.exit_code == 0, res.output
    assert res.stdout == ""
    assert "draft.gguf: DFlashDraftModel, 25 tensors" in res.stderr
    assert out.read_bytes() == converted("dense", "q8_0", tmp_path, targets).read_bytes()
    assert not list(tmp_path.glob(".*"))
    quiet = invoke("convert-draft", source.folder, "--target", targets[True], "-o", out, "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_quantiser_of_llama_cpp(tmp_path: Path, targets: dict[bool, Path]) -> None:
    """Of a file of the stored type; nothing is left of that. Norms stay as they are."""
    folder, out = written("dense", tmp_path).folder, tmp_path / "draft.gguf"
    assert invoke("convert-draft", folder, "--target", targets[True], "-o", out, "--outtype", "q4_k_m").exit_code == 0
    assert not list(tmp_path.glob(".*"))
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert found["output_norm.weight"] == "F32"
    assert {kind for kind in found.values() if kind != "F32"} <= {"Q4_K", "Q6_K", "Q5_0", "Q8_0"}
    assert "BF16" not in found.values()
    assert out.stat().st_size < converted("dense", "bf16", tmp_path, targets).stat().st_size
    with native.Model.load(out) as model:
        assert model.refusal == "draft head"


def test_quantiser_that_fails(tmp_path: Path, targets: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(OUTTYPES) - {"auto", *gguf_file.TYPES}:
        assert hasattr(lib, f"LLAMA_FTYPE_MOSTLY_{name.upper()}"), name
    with pytest.raises(ModelError, match="failed to"):
        native.quantize(tmp_path / "none.gguf", tmp_path / "out.gguf", "q6_k", 1)
    folder, out = written("dense", tmp_path).folder, tmp_path / "draft.gguf"

    def quantize(_src: Path, dst: Path, _ftype: str, _n_threads: int) -> None:
        dst.write_bytes(b"GGUF, a half")
        msg = "no room for the other half"
        raise ModelError(msg)

    monkeypatch.setattr(native, "quantize", quantize)
    check_error(
        invoke("convert-draft", folder, "--target", targets[True], "-o", out, "--outtype", "q6_k"),
        RUNTIME,
        "the other half",
    )
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_runs_without_a_compiler() -> None:
    blocked = "import sys; sys.modules['pyllama_kvflash.native'] = sys.modules['cffi'] = sys.modules['torch'] = None; "
    command = [sys.executable, "-c", f"{blocked}import pyllama_kvflash.convert"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


#
# the Hub
#


def hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_from_the_hub(tmp_path: Path, targets: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = written("dense", tmp_path).folder, list[Any]()

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns, revision))
        return str(folder)

    hub(monkeypatch, download)
    source = find_source("hf:owner/Draft-27B-DFlash")
    assert asked[0][0] == "owner/Draft-27B-DFlash"
    assert {"config.json", "*.safetensors", "*.safetensors.index.json"} <= set(asked[0][1])
    write(resolve(source, targets[True]), tmp_path / "d.gguf")
    assert find_source("hf:owner/Draft-27B-DFlash@v2").name == source.name
    assert [revision for *_, revision in asked] == [None, "v2"]
    assert "Draft 27B" in gguf.GGUFReader(tmp_path / "d.gguf").fields["general.name"].contents()
