"""Synthetic DFlash drafters as their makers publish them, config.json and safetensors, and their target. numpy only.

They are tiny, and have what the published ones have: names, nesting, types. The same name always gives the same bytes.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Config = dict[str, Any]
Tensors = dict[str, npt.NDArray[Any]]

N_VOCAB, N_DRAFT_VOCAB = 320, 96
N_EMBD, N_TARGET_LAYER = 64, 64
MASK = 315
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
N_MERGES = N_VOCAB - 8 - 256  # four special tokens, and four that no text has


CARD = """---
license: apache-2.0
base_model: owner/Target-27B
tags:
- speculative-decoding
language: en
---
# A drafter
"""


#
# files
#


def write_safetensors(path: Path, tensors: Tensors, dtype: str = "BF16") -> None:
    """Write tensors; floats as `dtype`, BF16 by leaving out the lower half."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        kind, raw = _packed(tensor, dtype)
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _packed(tensor: npt.NDArray[Any], dtype: str) -> tuple[str, bytes]:
    if tensor.dtype == np.int64:
        return "I64", tensor.tobytes()
    f32 = tensor.astype("<f4")
    if dtype == "BF16":
        return dtype, (f32.view("<u4") >> 16).astype("<u2").tobytes()
    return dtype, f32.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def write_drafter(name: str, folder: Path) -> None:
    """Write a drafter's folder."""
    config, tensors, dtype = DRAFTERS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "README.md").write_text(CARD)
    if name != "a3b":
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return
    names = list(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file, some in parts.items():
        write_safetensors(folder / file, {n: tensors[n] for n in some}, dtype)
    weight_map = {n: file for file, some in parts.items() for n in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


#
# the target
#


def byte_symbols() -> list[str]:
    """GPT-2's printable symbol of each byte, in the order of its vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) for b in shown] + [chr(256 + i) for i in range(len(hidden))]


def merges() -> list[str]:
    """Pairs of letters, the most common first in no language."""
    letters = "etaoinsrhl"
    return [f"{a} {b}" for a in letters for b in letters][:N_MERGES]


def tokens() -> list[str]:
    """The vocabulary, without those that pad it."""
    return [*byte_symbols(), *(m.replace(" ", "") for m in merges()), *SPECIAL]


def write_target_folder(folder: Path, *, mrope: bool) -> None:
    """What upstream's converter reads of a target: config.json and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    rope = {"rope_type": "default", "rope_theta": 1e7} | ({"mrope_section": [11, 11, 10]} if mrope else {})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": N_VOCAB,
        "hidden_size": N_EMBD,
        "num_hidden_layers": N_TARGET_LAYER,
        "rope_parameters": rope,
    }
    (folder / "config.json").write_text(json.dumps(config))
    added = [
        {"id": 256 + N_MERGES + i, "content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}
        for i, text in enumerate(SPECIAL)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {text: i for i, text in enumerate(tokens()[: -len(SPECIAL)])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges(), "byte_fallback": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 4096}))


def write_target(path: Path, *, mrope: bool, **changed: Any) -> None:
    """The target's GGUF, without weights. changed: metadata to write instead; None: none of this key."""
    import gguf  # noqa: PLC0415 (upstream's converter is run with its own)

    file = gguf.GGUFWriter(path, "qwen35" if mrope else "qwen3")
    padding = [f"[PAD{i}]" for i in range(len(tokens()), N_VOCAB)]
    kinds = [1] * (256 + N_MERGES) + [3] * len(SPECIAL) + [5] * len(padding)
    values: dict[str, Any] = {
        f"{file.arch}.embedding_length": N_EMBD,
        f"{file.arch}.block_count": N_TARGET_LAYER,
        **({f"{file.arch}.rope.dimension_sections": [11, 11, 10, 0]} if mrope else {}),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens(), *padding],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges(),
        "tokenizer.ggml.eos_token_id": N_VOCAB - 6,
        "tokenizer.ggml.padding_token_id": N_VOCAB - 8,
        **{key.replace("__", "."): value for key, value in changed.items()},
    }
    add: dict[type, Any] = {int: file.add_uint32, str: file.add_string, bytes: file.add_string, list: file.add_array}
    for key, value in values.items():
        if value is not None:
            add[type(value)](key, value)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    file.close()


#
# drafters
#

Drafter = tuple[Config, Tensors, str]


def _config(n_layer: int, n_head: int, n_head_kv: int, head_dim: int, n_ff: int, **more: Any) -> Config:
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 16, 31, 46, 61]},
        "dtype": "bfloat16",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": N_EMBD,
        "intermediate_size": n_ff,
        "layer_types": ["full_attention"] * n_layer,
        "max_position_embeddings": 4096,
        "max_window_layers": n_layer,
        "model_type": "qwen3",
        "num_attention_heads": n_head,
        "num_hidden_layers": n_layer,
        "num_key_value_heads": n_head_kv,
        "num_target_layers": N_TARGET_LAYER,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": N_VOCAB,
        **more,
    }


def _nested(config: Config, **more: Any) -> Config:
    return config | {"dflash_config": config["dflash_config"] | more}


class _Random:
    def __init__(self, name: str) -> None:
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))

    def matrix(self, *shape: int) -> npt.NDArray[np.float32]:
        return (self._rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def norm(self, n: int) -> npt.NDArray[np.float32]:
        return (1 + 0.1 * self._rng.standard_normal(n)).astype(np.float32)


def _weights(name: str, c: Config, prefix: str = "", *, kv: bool = True) -> Tensors:
    """What all drafters have. kv: values beside the keys."""
    rng = _Random(name)
    d, hd = c["hidden_size"], c.get("global_head_dim") or c["head_dim"]
    n_q, n_kv = c["num_attention_heads"] * hd, (c.get("num_global_key_value_heads") or c["num_key_value_heads"]) * hd
    ids = (
        c.get("dflash_config", {}).get("target_layer_ids")
        or c.get("target_layer_ids")
        or c["aux_hidden_state_layer_ids"]
    )
    res = {"fc.weight": rng.matrix(d, len(ids) * d), "hidden_norm.weight": rng.norm(d), "norm.weight": rng.norm(d)}
    for i in range(c["num_hidden_layers"]):
        blk = f"layers.{i}."
        res[f"{blk}input_layernorm.weight"] = rng.norm(d)
        res[f"{blk}self_attn.q_proj.weight"] = rng.matrix(n_q, d)
        res[f"{blk}self_attn.k_proj.weight"] = rng.matrix(n_kv, d)
        if kv:
            res[f"{blk}self_attn.v_proj.weight"] = rng.matrix(n_kv, d)
        res[f"{blk}self_attn.o_proj.weight"] = rng.matrix(d, n_q)
        res[f"{blk}self_attn.q_norm.weight"] = rng.norm(hd)
        res[f"{blk}self_attn.k_norm.weight"] = rng.norm(hd)
        res[f"{blk}post_attention_layernorm.weight"] = rng.norm(d)
        res[f"{blk}mlp.gate_proj.weight"] = rng.matrix(c["intermediate_size"], d)
        res[f"{blk}mlp.up_proj.weight"] = rng.matrix(c["intermediate_size"], d)
        res[f"{blk}mlp.down_proj.weight"] = rng.matrix(d, c["intermediate_size"])
    return {prefix + key: value for key, value in res.items()}


def dense() -> Drafter:
    """As for a dense 27B: five layers of the target, bf16, no embeddings of its own."""
    config = _config(2, 4, 2, 32, 160)
    return config, _weights("dense", config), "BF16"


def a3b() -> Drafter:
    """As for a 35B-A3B: heads wider than the embedding, YaRN, two files, f16, its own embeddings and head."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32.0}
    config = _config(3, 8, 2, 16, 96, rope_scaling=yarn)
    tensors = _weights("a3b", config, "model.")
    rng = _Random("a3b head")
    tensors["model.embed_tokens.weight"] = rng.matrix(N_VOCAB, N_EMBD)
    tensors["lm_head.weight"] = rng.matrix(N_VOCAB, N_EMBD)
    return config, tensors, "F16"


def gemma() -> Drafter:
    """As for a gemma: scaled embeddings, soft-capped logits, half of each head rotated, f32; FFN rows of no whole number of blocks."""
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    config = _nested(
        _config(2, 2, 1, 32, 80, rope_parameters=rope, partial_rotary_factor=0.5),
        final_logit_softcapping=30.0,
        input_embedding_scale=8.0,
        output_multiplier=0.5,
        attention_value_scale=0.75,
    )
    return config, _weights("gemma", config), "F32"


def swa() -> Drafter:
    """Windows in two of three layers, sinks, pairs of a head in turns."""
    config = _config(
        3, 4, 2, 32, 128,
        use_sliding_window=True,
        sliding_window=128,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        is_causal=False,
        rope_is_neox_style=False,
    )  # fmt: skip
    tensors = _weights("swa", config)
    rng = _Random("swa sinks")
    tensors |= {f"layers.{i}.self_attn.sinks": rng.norm(4) for i in range(3)}
    return config, tensors, "BF16"


def dflash2() -> Drafter:
    """Convolutions around every sublayer, and a selector of candidates; windows in all layers."""
    config = _config(2, 4, 2, 32, 128, architectures=["DFlash2DraftModel"])
    del config["block_size"]
    config = _nested(
        config,
        block_size=8,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=32,
        selector_top_k=4,
        use_swa=True,
        swa_window_size=256,
        causal=True,
    )
    tensors, rng = _weights("dflash2", config), _Random("dflash2 heads")
    for i in range(2):
        for part in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{i}.{part}.base_kernel"] = rng.matrix(2, 2, N_EMBD)
            tensors[f"layers.{i}.{part}.kernel_projection.weight"] = rng.matrix(2 * 2 * N_EMBD // 16, N_EMBD)
    tensors["candidate_selector.predecessor_codebook"] = rng.matrix(N_VOCAB, 32)
    tensors["candidate_selector.successor_codebook"] = rng.matrix(N_VOCAB, 32)
    tensors["candidate_selector.hidden_projection.weight"] = rng.matrix(32, N_EMBD)
    return config, tensors, "BF16"


def dspark() -> Drafter:
    """A Markov head and a confidence head, keys at the top level."""
    config = _config(
        2, 4, 2, 32, 128,
        architectures=["Qwen3DSparkModel"],
        model_type="qwen3_dspark",
        target_layer_ids=[2, 30, 58],
        mask_token_id=MASK,
        markov_rank=32,
        markov_head_type="vanilla",
    )  # fmt: skip
    del config["dflash_config"]
    tensors, rng = _weights("dspark", config), _Random("dspark heads")
    tensors["markov_head.markov_w1.weight"] = rng.matrix(N_VOCAB, 32)
    tensors["markov_head.markov_w2.weight"] = rng.matrix(N_VOCAB, 32)
    tensors["confidence_head.proj.weight"] = rng.matrix(1, N_EMBD + 32)
    tensors["confidence_head.proj.bias"] = rng.norm(1)
    tensors["embed_tokens.weight"] = rng.matrix(N_VOCAB, N_EMBD)
    tensors["lm_head.weight"] = rng.matrix(N_VOCAB, N_EMBD)
    return config, tensors, "BF16"


def speculator() -> Drafter:
    """A DSpark with a vocabulary of its own, in the nesting of speculators; no confidence head."""
    whole = _config(2, 4, 2, 32, 128)
    top = {
        "architectures": ["DSparkSpeculator"],
        "model_type": "dspark_speculator",
        "aux_hidden_state_layer_ids": [3, 31, 59],
        "mask_token_id": MASK,
        "block_size": 8,
        "draft_vocab_size": N_DRAFT_VOCAB,
    }
    drop = ("architectures", "auto_map", "dflash_config", "block_size", "model_type")
    inner = {key: value for key, value in whole.items() if key not in drop}
    tensors, rng = _weights("speculator", inner | top), _Random("speculator heads")
    ids = np.sort(np.random.default_rng(7).choice(N_VOCAB, N_DRAFT_VOCAB, replace=False))
    tensors["d2t"] = (ids - np.arange(N_DRAFT_VOCAB)).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(N_VOCAB), ids).astype(np.int64)
    tensors["lm_head.weight"] = rng.matrix(N_DRAFT_VOCAB, N_EMBD)
    tensors["markov_head.markov_w1.weight"] = rng.matrix(N_VOCAB, 32)
    tensors["markov_head.markov_w2.weight"] = rng.matrix(N_DRAFT_VOCAB, 32)
    return top | {"transformer_layer_config": inner}, tensors, "BF16"


def gemma4() -> Drafter:
    """A DSpark for Gemma 4: its keys are its values, four norms a block, a part of each head rotated."""
    config = _config(
        2, 4, 2, 32, 128,
        architectures=["Gemma4DSparkModel"],
        model_type="gemma4_dspark",
        attention_k_eq_v=True,
        global_head_dim=64,
        num_global_key_value_heads=1,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters={"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}},
        sliding_window=512,
    )  # fmt: skip
    tensors, rng = _weights("gemma4", config, kv=False), _Random("gemma4 more")
    for i in range(2):
        tensors[f"layers.{i}.pre_feedforward_layernorm.weight"] = rng.norm(N_EMBD)
        tensors[f"layers.{i}.post_feedforward_layernorm.weight"] = rng.norm(N_EMBD)
        tensors[f"layers.{i}.layer_scalar"] = rng.norm(1)
    tensors["embed_tokens.weight"] = rng.matrix(N_VOCAB, N_EMBD)
    tensors["lm_head.weight"] = rng.matrix(N_VOCAB, N_EMBD)
    tensors["markov_head.markov_w1.weight"] = rng.matrix(N_VOCAB, 32)
    tensors["markov_head.markov_w2.weight"] = rng.matrix(N_VOCAB, 32)
    tensors["confidence_proj.weight"] = rng.matrix(1, N_EMBD + 32)
    tensors["confidence_proj.bias"] = rng.norm(1)
    return config, tensors, "BF16"


DRAFTERS = {
    "dense": dense,
    "a3b": a3b,
    "gemma": gemma,
    "swa": swa,
    "dflash2": dflash2,
    "dspark": dspark,
    "speculator": speculator,
    "gemma4": gemma4,
}
MROPE = {"dense", "a3b"}  # drafters whose target has M-RoPE
