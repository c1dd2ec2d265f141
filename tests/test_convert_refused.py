"""`kvflash convert-draft`: drafters and places that are refused, in one sentence and with no file left."""

import errno
import os
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import drafters

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import conversions
from support.commands import RUNTIME, check_error, invoke
from support.conversions import Edit, edited, written

from pyllama_kvflash.convert import resolve, write
from pyllama_kvflash.errors import KVFlashError, ModelError, OutputError

pytestmark = pytest.mark.native

targets = conversions.targets


#
# what is wrong with a drafter
#


def key(name: str, value: Any = None) -> Edit:
    """Set a key of the config, "a.b" in an object; None: take it out."""

    def edit(config: drafters.Config, _: drafters.Tensors) -> None:
        *outer, last = name.split(".")
        for part in outer:
            config = config[part]
        if value is None:
            del config[last]
        else:
            config[last] = value

    return edit


def tensor(name: str, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None) -> Edit:
    """Change a tensor; None: take it out."""

    def edit(_: drafters.Config, tensors: drafters.Tensors) -> None:
        old = tensors.pop(name)
        if change:
            tensors[name] = change(old)

    return edit


def added(name: str, *shape: int) -> Edit:
    return lambda _, tensors: tensors.update({name: np.ones(shape, np.float32)})


def put(value: float, *at: int) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    def change(old: npt.NDArray[Any]) -> npt.NDArray[Any]:
        old[at] = value
        return old

    return change


def block_gone(_: drafters.Config, tensors: drafters.Tensors) -> None:
    for name in [n for n in tensors if n.startswith("layers.1.")]:
        del tensors[name]


MALFORMED: list[tuple[str, Edit, tuple[str, ...]]] = [
    # a config value that the shapes contradict: the key, its value, and the shape
    ("dense", key("hidden_size", 128), ("fc.weight is 64 x 320", "hidden_size = 128")),
    ("dense", key("head_dim", 16), ("q_proj.weight is 128 x 64", "num_attention_heads = 4, head_dim = 16", "64")),
    ("dense", key("num_attention_heads", 8), ("q_proj.weight is 128 x 64", "num_attention_heads = 8, head_dim = 32")),
    ("dense", key("num_key_value_heads", 4), ("k_proj.weight is 64 x 64", "num_key_value_heads = 4, head_dim = 32")),
    ("dense", key("intermediate_size", 192), ("gate_proj.weight is 160 x 64", "intermediate_size = 192")),
    ("dense", key("num_hidden_layers", 3), ("num_hidden_layers = 3", "2 blocks", "layers.1")),
    ("dense", key("dflash_config.target_layer_ids", [1, 2, 3]), ("fc.weight is 64 x 320", "target_layer_ids = 3", "192")),
    ("a3b", key("vocab_size", 400), ("embed_tokens.weight is 320 x 64", "vocab_size = 400")),
    ("dflash2", key("dflash_config.conv_kernel_size", 3), ("base_kernel is 2 x 2 x 64", "conv_kernel_size = 3")),
    ("dflash2", key("dflash_config.conv_group_size", 8), ("kernel_projection.weight is 16 x 64", "conv_group_size = 8")),
    ("dflash2", key("dflash_config.selector_rank", 16), ("codebook is 320 x 32", "selector_rank = 16")),
    ("dspark", key("markov_rank", 16), ("markov_w1.weight is 320 x 32", "markov_rank = 16")),
    ("speculator", key("draft_vocab_size", 64), ("lm_head.weight is 96 x 64", "draft_vocab_size = 64")),
    ("gemma4", key("num_global_key_value_heads", 2), ("k_proj.weight is 64 x 64", "num_global_key_value_heads = 2")),
    # keys that are missing, or of another type
    *[
        ("dense", key(name), (f"has no {name}",))
        for name in (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
            *("rms_norm_eps", "max_position_embeddings", "vocab_size"),
        )
    ],
    ("dense", key("block_size"), ("has no dflash_config.block_size (nor block_size)",)),
    ("dense", key("rope_theta"), ("has no rope_parameters.full_attention.rope_theta", "rope_theta")),
    ("dense", key("dflash_config"), ("dflash_config.target_layer_ids",)),
    ("dense", key("dflash_config.mask_token_id"), ("has no dflash_config.mask_token_id",)),
    ("dflash2", key("dflash_config.selector_top_k"), ("has no dflash_config.selector_top_k",)),
    ("dense", key("hidden_size", "64"), ("hidden_size", '"64"', "a whole number")),
    ("dense", key("rope_theta", 0), ("rope_theta is 0", "a number above 0")),
    ("a3b", key("rope_scaling.factor", -4.0), ("factor is -4.0", "a number above 0")),
    ("dense", key("hidden_size", True), ("hidden_size is true",)),
    ("dense", key("num_hidden_layers", 0), ("num_hidden_layers is 0", "from 1 on")),
    ("dense", key("num_hidden_layers", 2**31 - 2), ("num_hidden_layers = 2147483646", "2 blocks")),
    ("dense", key("hidden_size", 2**40), ("hidden_size is 1099511627776",)),
    ("dense", key("rms_norm_eps", float("nan")), ("rms_norm_eps is NaN", "a number above 0")),
    ("dense", key("dflash_config.target_layer_ids", []), ("target_layer_ids is []", "a list of whole numbers")),
    ("dense", key("dflash_config.target_layer_ids", [1, 2, 3, 4, -1]), ("target_layer_ids", "whole numbers")),
    ("dense", key("dflash_config.target_layer_ids", [1, 2, 3, 4, 64]), ("go up to 64", "layers 0 to 63")),
    ("dense", key("dflash_config.mask_token_id", 320), ("mask_token_id is 320", "0 to 319")),
    ("dense", key("vocab_size", 400), ("vocab_size is 400", "320 tokens", "made for")),
    ("dense", key("head_dim", 33), ("head_dim is 33", "even")),
    ("dense", key("hidden_act", "relu"), ("activation is relu", "silu")),
    ("dense", key("use_sliding_window", 1), ("use_sliding_window is 1", "true or false")),
    ("swa", key("layer_types", ["full_attention"]), ("layer_types has 1 entries", "num_hidden_layers is 3")),
    ("swa", key("layer_types", "all"), ("layer_types", "a list of strings")),
    ("dense", key("partial_rotary_factor", 1.5), ("partial_rotary_factor is 1.5",)),
    ("dense", key("partial_rotary_factor", 0.001), ("of a head of", "must be a positive even number")),
    ("dense", key("rope_scaling", {"rope_type": "llama3", "factor": 8.0}), ("rope_type is llama3", "yarn")),
    ("a3b", key("rope_scaling.factor"), ("has no", "factor")),
    ("swa", key("rope_parameters", {"sliding_attention": {"rope_theta": 1e4}}), ("sliding_attention", "one for both")),
    ("dflash2", key("dflash_config.selector_top_k", 8), ("hidden_size = 64", "selector_top_k = 8", "72")),
    ("dflash2", key("dflash_config.conv_group_size", 48), ("hidden_size = 64 is not a multiple", "conv_group_size = 48")),
    ("dspark", key("markov_head_type", "gated"), ("markov_head_type is gated", "vanilla")),
    ("speculator", key("draft_vocab_size", 999), ("draft_vocab_size is 999", "vocab_size = 320")),
    ("gemma4", tensor("lm_head.weight"), ("has no tensor lm_head.weight", "tie_word_embeddings")),
    ("gemma4", key("final_logit_softcapping", 30.0), ("final_logit_softcapping", "Gemma4DSparkModel")),
    ("gemma4", key("rope_parameters.full_attention.rope_type", "yarn"), ("rope_type is yarn", "proportionally")),
    ("gemma4", key("rope_parameters.full_attention.rope_type", "default"), ("rope_type is default", "proportionally")),
    # other architectures
    ("dense", key("architectures", ["LlamaForCausalLM"]), ("is not a DFlash drafter", "LlamaForCausalLM", "DFlashDraftModel")),
    ("dense", key("architectures"), ("is not a DFlash drafter", "names no architecture")),
    ("dense", key("architectures", "DFlashDraftModel"), ("architectures", "a list of strings")),
    ("dense", key("architectures", ["DeepseekV4DSparkModel"]), ("DeepseekV4DSparkModel", "convert_hf_to_gguf.py")),
    ("dense", key("quantization_config", {"quant_method": "fp8"}), ("quantization_config", "before they were quantised")),
    # tensors
    ("dense", tensor("fc.weight"), ("has no tensor fc.weight", "not complete")),
    ("dense", tensor("layers.1.mlp.up_proj.weight"), ("has no tensor layers.1.mlp.up_proj.weight",)),
    ("dense", block_gone, ("num_hidden_layers = 2", "1 blocks", "layers.0")),
    ("dense", added("layers.0.self_attn.q_proj.bias", 128), ("layers.0.self_attn.q_proj.bias", "not part of")),
    ("dense", added(f"layers.{'9' * 5000}.x", 1), ("layers.999", "not part of")),
    ("dense", added("new\nline", 1), ("header is not a list of tensors",)),
    ("dense", key("hidden_act", "si\nlu"), ('"si\\nlu"', "a string")),
    ("dense", added("model.norm.weight", 64), ("norm.weight", "is stored twice")),
    ("dense", tensor("norm.weight", lambda t: t[:32]), ("norm.weight is 32", "hidden_size = 64")),
    ("dense", tensor("norm.weight", lambda t: t[None]), ("norm.weight is 1 x 64", "makes it 64")),
    ("dense", tensor("layers.0.mlp.down_proj.weight", lambda t: t.T), ("down_proj.weight is 160 x 64", "64")),
    ("speculator", tensor("d2t"), ("has no tensor d2t",)),
    ("speculator", tensor("d2t", put(9999, 5)), ("d2t maps token 5 to 10004", "0 to 319")),
    ("speculator", tensor("d2t", lambda t: t * 0 - np.arange(len(t))), ("maps two tokens to one token",)),
    ("speculator", tensor("d2t", lambda t: t.astype(np.float32)), ("d2t is of type BF16", "I64")),
    ("dflash2", tensor("candidate_selector.hidden_projection.weight"), ("has no tensor candidate_selector",)),
    ("gemma4", tensor("layers.1.post_feedforward_layernorm.weight"), ("layers.1.post_feedforward_layernorm",)),
    # weights that are no numbers, found while they are written
    ("dense", tensor("fc.weight", put(np.nan, 3, 7)), ("fc.weight has a weight that is nan", "row 3")),
    ("dense", tensor("layers.1.mlp.up_proj.weight", put(np.inf, 159, 63)), ("layers.1.mlp.up_proj.weight", "inf", "row 159")),
    ("dense", tensor("norm.weight", put(-np.inf, 9)), ("norm.weight has a weight that is -inf", "row 9")),
    ("swa", tensor("layers.0.self_attn.k_proj.weight", put(np.nan, 1, 1)), ("k_proj.weight has a weight that is nan",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "words"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed(name: str, edit: Edit, words: tuple[str, ...], tmp_path: Path, targets: dict[bool, Path]) -> None:
    source, out = edited(name, edit, tmp_path), tmp_path / "draft.gguf"
    res = invoke("convert-draft", source.folder, "--target", targets[name in drafters.MROPE], "-o", out)
    check_error(res, RUNTIME, *words)
    assert res.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {source.folder.name}


def test_a_weight_that_f16_has_not(tmp_path: Path, targets: dict[bool, Path]) -> None:
    source = edited("dense", tensor("fc.weight", put(1e6, 0, 0)), tmp_path)
    plan = resolve(source, targets[True])
    for outtype in ("f16", "q8_0", "q4_0"):
        with pytest.raises(
            ModelError, match=r"fc\.weight has a weight of .*, and f16 ends at 65,504: use `outtype` bf16"
        ):
            write(plan, tmp_path / "d.gguf", outtype)
    write(plan, tmp_path / "d.gguf", "bf16")


HEADER = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ("is empty",)),
        (b"\x10\0\0", ("header is longer than the file",)),
        (b"\xff" * 8 + b"{}", ("header would be",)),
        (b"\x40\0\0\0\0\0\0\0{}", ("header is longer",)),
        (b"\x02\0\0\0\0\0\0\0[]", ("header is not a list of tensors",)),
        (b"\x02\0\0\0\0\0\0\0{{", ("header is not a list of tensors",)),
        (b"\x02\0\0\0\0\0\0\0{}", ("has no weights",)),
        (b"\x07\0\0\0\0\0\0\0" + b'{"a":1}', ("header is not a list of tensors",)),
        (len(HEADER).to_bytes(8, "little") + HEADER + b"1234567", ("is cut off", "ends at byte 8", "has 7")),
        (len(HEADER).to_bytes(8, "little") + HEADER.replace(b"[2]", b"[3]") + b"12345678", ("is damaged", "8 bytes")),
        (len(HEADER).to_bytes(8, "little") + HEADER.replace(b"[2]", b"-22"), ("header is not a list",)),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ("header",)),
    ],
)
def test_damaged_safetensors(data: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    source = written("dense", tmp_path)
    (source.folder / "model.safetensors").write_bytes(data)
    check_error(invoke("convert-draft", source.folder, "--dry-run"), RUNTIME, *words)


def test_cut_off_while_it_is_read(tmp_path: Path, targets: dict[bool, Path]) -> None:
    source = written("dense", tmp_path)
    plan = resolve(source, targets[True])
    path = source.folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match="has become shorter"):
        write(plan, tmp_path / "d.gguf")
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        write(plan, tmp_path / "d.gguf")
    assert not list(tmp_path.glob("*d.gguf*"))


def test_files_that_are_missing(tmp_path: Path) -> None:
    folder = written("a3b", tmp_path).folder
    (folder / "model-00002-of-00002.safetensors").unlink()
    check_error(
        invoke("convert-draft", folder, "--dry-run"), RUNTIME, "model-00002-of-00002.safetensors does not exist"
    )
    index = folder / "model.safetensors.index.json"
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 7}}'):
        index.write_text(text)
        check_error(invoke("convert-draft", folder, "--dry-run"), RUNTIME, "index.json is damaged")
    for path in folder.glob("model*"):
        path.unlink()
    check_error(invoke("convert-draft", folder, "--dry-run"), RUNTIME, "has no model.safetensors")
    (folder / "pytorch_model.bin").touch()
    check_error(invoke("convert-draft", folder, "--dry-run"), RUNTIME, "pytorch_model.bin is torch's format")
    for text, words in (
        ("", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("{" * 9, "is not JSON"),
        ("[" * 10**5, "is not JSON"),
    ):
        (folder / "config.json").write_text(text)
        check_error(invoke("convert-draft", folder, "--dry-run"), RUNTIME, words)
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    check_error(invoke("convert-draft", folder, "--dry-run"), RUNTIME, "is not JSON")
    (folder / "config.json").unlink()
    check_error(invoke("convert-draft", folder, "--dry-run"), RUNTIME, "has no config.json")


def test_quantised_weights(tmp_path: Path, targets: dict[bool, Path]) -> None:
    source = written("dense", tmp_path)
    path = source.folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F8E4"', 1))
    check_error(
        invoke("convert-draft", source.folder, "--target", targets[True], "-o", tmp_path / "d.gguf"),
        RUNTIME,
        "fc.weight is of type F8E4",
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokenizer__ggml__tokens": None}, ("has no tokenizer",)),
        ({"qwen3__embedding_length": 128}, ("hidden_size is 64", "embedding_length = 128")),
        ({"qwen3__block_count": 40}, ("target_layer_ids go up to 61", "layers 0 to 39")),
        ({"tokenizer__ggml__tokens": ["a", "b"]}, ("vocab_size is 320", "2 tokens")),
    ],
)
def test_another_target(changed: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    drafters.write_target(target, mrope=False, **changed)
    res = invoke("convert-draft", written("gemma", tmp_path).folder, "--target", target, "-o", tmp_path / "d.gguf")
    check_error(res, RUNTIME, *words, str(target))


def test_noise(tmp_path: Path, targets: dict[bool, Path]) -> None:
    """Bytes changed at random in config.json, the header, or the target: it converts, or says one sentence."""
    rng, source = random.Random(5), written("dflash2", tmp_path)
    target = tmp_path / "target.gguf"
    target.write_bytes(targets[False].read_bytes())
    files = [source.folder / "config.json", source.folder / "model.safetensors", target]
    good = 0
    for _ in range(240):
        path = rng.choice(files)
        whole = path.read_bytes()
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(min(len(data), 5000))] = rng.choice([0, 255, *b'0129"[]{},.-', rng.randrange(256)])
        path.write_bytes(data)
        try:
            write(resolve(source, target), tmp_path / "d.gguf")
            good += 1
        except KVFlashError as err:
            assert str(err)  # noqa: PT017
        path.write_bytes(whole)
    assert 0 < good < 240


#
# what is wrong with the output
#


def test_full_disk(tmp_path: Path, targets: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plan, out = resolve(written("dense", tmp_path), targets[True]), tmp_path / "d.gguf"
    out.write_bytes(b"the old one")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match=r"d\.gguf cannot be written: No space left on device"):
            write(plan, out)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1000))
        with pytest.raises(OutputError, match=r"the drafter takes 0\.00 GiB, and .* has 0\.00 GiB free"):
            write(plan, out)
    assert out.read_bytes() == b"the old one"
    assert [p.name for p in tmp_path.glob(".*")] == []
