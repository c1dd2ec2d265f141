"""Resolve a drafter's metadata from config.json and the weights: the keys that llama.cpp's dflash.cpp and
speculative.cpp read.

docs/CONVERT.md has the table of keys. Nothing is assumed: a value that the computation needs is in config.json or
follows from a shape; otherwise it is an error.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyllama_kvflash.convert.config import Config, Found
from pyllama_kvflash.convert.rope import rope_keys, rope_sections
from pyllama_kvflash.convert.weights import Weights
from pyllama_kvflash.errors import ModelError, UnsupportedError

Value = bool | int | float | str | list[int] | list[bool]

DFLASH = ("DFlashDraftModel", "DFlash2DraftModel")
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel", "LingDSparkModel")
GEMMA = "Gemma4DSparkModel"

_ELSEWHERE = {  # dflash architectures with a different packing or naming of weights
    "DeepseekV4DSparkModel",
    "DeepseekV4ForCausalLM",
    "MuseGlimmerAssistantModel",
}
_ACTIVATIONS = {"silu", "gelu", "gelu_pytorch_tanh"}  # llama_model_dflash::load_arch_hparams
_BLOCK = re.compile(r"layers\.([0-9]{1,9})\.")


class Size(NamedTuple):
    """A dimension, with its name for messages: ("intermediate_size", 128)."""

    key: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A resolved drafter.

    keys: metadata without the prefix "dflash.".
    sizes: dimensions of tensors, by the names that layout.py uses.
    neox: True if the rotated halves of a head lie one after the other, as llama.cpp wants them; False if their
        elements alternate.
    own_embeddings, own_head: whether to use the embeddings, or the head, in the weights instead of the target's.
    rope_factors: divisors of the rope frequencies, (head_dim / 2,), or [].
    """

    architecture: str
    n_layer: int
    keys: dict[str, Value]
    sizes: dict[str, Size]
    mask_token: int
    dspark: bool
    dflash2: bool
    gemma: bool
    neox: bool
    own_embeddings: bool
    own_head: bool
    rope_factors: list[float]

    @property
    def n_rot(self) -> int:
        """The number of elements of a head that RoPE rotates."""
        n = self.keys.get("rope.dimension_count")
        return n if isinstance(n, int) else self.size("head_dim")

    def size(self, name: str) -> int:
        """Return a dimension by its name."""
        return self.sizes[name].value


def read_drafter(config: Config, weights: Weights, *, mrope: bool) -> Drafter:
    """Return the resolved drafter. mrope: whether its target uses M-RoPE. Raises ModelError and UnsupportedError."""
    architecture = _architecture(config)
    gemma = architecture == GEMMA
    dspark = architecture in DSPARK or gemma or weights.get("markov_head.markov_w1.weight") is not None
    conv = config.find("dflash_config.conv_kernel_size", "conv_kernel_size")
    dflash2 = conv is not None or weights.some("candidate_selector.") is not None
    _refuse(config, weights, gemma=gemma)
    sizes = _sizes(config, weights, gemma=gemma, dspark=dspark)
    if dflash2:
        sizes |= _dflash2_sizes(config, sizes)
    n_layer = _n_layer(config, weights)
    n_vocab, n_vocab_draft = sizes["vocab"].value, sizes["draft vocab"].value
    mask = _mask(config, n_vocab)
    head_dim = sizes["head_dim"].value
    if head_dim % 2:
        msg = f"{config.path}: {sizes['head_dim'].key} is {head_dim}, and must be even: its halves are rotated"
        raise ModelError(msg)
    rope, factors = rope_keys(config, head_dim, gemma=gemma)
    keys: dict[str, Value] = {
        "block_count": n_layer,
        "context_length": config.size("max_position_embeddings").value,
        "embedding_length": sizes["hidden"].value,
        "feed_forward_length": sizes["ffn"].value,
        "attention.head_count": sizes["heads"].value,
        "attention.head_count_kv": sizes["kv heads"].value,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.positive("rms_norm_eps", "norm_eps"),
        **rope,
        **rope_sections(config, head_dim, mrope=mrope),
        **_speculation(config, dspark=dspark, dflash2=dflash2, conf=weights.some("confidence_head.proj") is not None),
        **_scales(config, sizes["hidden"].value, gemma=gemma),
        **_windows(config, n_layer),
        **_causal(config),
    }
    return Drafter(
        architecture=architecture,
        n_layer=n_layer,
        keys=keys,
        sizes=sizes,
        mask_token=mask,
        dspark=dspark,
        dflash2=dflash2,
        gemma=gemma,
        neox=config.flag("rope_is_neox_style") is not False,
        own_embeddings=config.flag("has_embed_tokens") is not False,
        own_head=architecture not in DSPARK or n_vocab_draft < n_vocab,
        rope_factors=factors,
    )


def _architecture(config: Config) -> str:
    found = config.maybe_texts("architectures")
    name = found.value[0] if found and found.value else ""
    known = (*DFLASH, *DSPARK, GEMMA)
    if name in _ELSEWHERE:
        msg = (
            f"{config.path.parent} is a {name}, which this converter cannot read: use llama.cpp's convert_hf_to_gguf.py"
        )
        raise UnsupportedError(msg)
    if name not in known:
        what = f"its architecture is {name}" if name else "it names no architecture"
        msg = f"{config.path.parent} is not a DFlash drafter: {what} in config.json, and those are {', '.join(known)}"
        raise ModelError(msg)
    return str(name)


def _refuse(config: Config, weights: Weights, *, gemma: bool) -> None:
    """Raise UnsupportedError or ModelError for a drafter that cannot be converted correctly."""
    if config.find("quantization_config"):
        msg = f"{config.path} has a quantization_config: give the drafter's weights before they were quantised"
        raise UnsupportedError(msg)
    if (weights.folder / "mask_embedding.pt").exists():
        msg = f"{weights.folder} has a mask_embedding.pt, which only torch can read: use llama.cpp's convert_hf_to_gguf.py"
        raise UnsupportedError(msg)
    markov = config.maybe_text("dflash_config.markov_head_type", "markov_head_type")
    if markov not in (None, "vanilla"):
        msg = f"{config.path}: markov_head_type is {markov}, and llama.cpp computes vanilla alone"
        raise UnsupportedError(msg)
    if not gemma:
        return
    types = config.maybe_texts("layer_types")
    if types and set(types.value) != {"full_attention"}:
        msg = f"{config.path}: layer_types has {sorted(set(types.value))}, and llama.cpp computes full_attention alone here"
        raise UnsupportedError(msg)
    if weights.get("lm_head.weight") is None and not config.flag("tie_word_embeddings"):
        msg = f"{weights.folder} has no tensor lm_head.weight, and config.json no tie_word_embeddings = true"
        raise ModelError(msg)
    if config.maybe_number("final_logit_softcapping"):
        msg = f"{config.path}: final_logit_softcapping is set, which llama.cpp does not compute for a {GEMMA}"
        raise UnsupportedError(msg)


def _named(found: Found) -> Size:
    return Size(found.key, found.value)


def _sizes(config: Config, weights: Weights, *, gemma: bool, dspark: bool) -> dict[str, Size]:
    hidden = _named(config.size("hidden_size"))
    kv_heads = _named(config.size("num_global_key_value_heads" if gemma else "num_key_value_heads"))
    vocab = _named(config.size("vocab_size"))
    draft = Size("draft_vocab_size", config.maybe_size("draft_vocab_size") or 0)
    if draft.value > vocab.value:
        msg = f"{config.path}: draft_vocab_size is {draft.value}, more than vocab_size = {vocab.value}"
        raise ModelError(msg)
    return {
        "hidden": hidden,
        "heads": _named(config.size("num_attention_heads")),
        "kv heads": kv_heads,
        "head_dim": _head_dim(config, weights, kv_heads, gemma=gemma),
        "ffn": _named(config.size("intermediate_size")),
        "captured": Size("the number of target_layer_ids", len(_target_layers(config))),
        "vocab": vocab,
        "draft vocab": draft if draft.value else vocab,
        "one": Size("1", 1),
        **({"rank": _rank(config, weights)} if dspark else {}),
    }


def _head_dim(config: Config, weights: Weights, kv_heads: Size, *, gemma: bool) -> Size:
    """Return the size of a head, from config.json or, if that has none, from the number of rows of k_proj."""
    name = "global_head_dim" if gemma else "head_dim"
    if config.find(name):
        return _named(config.size(name))
    k_proj = weights.get("layers.0.self_attn.k_proj.weight")
    rows = k_proj.shape[0] if k_proj and k_proj.shape else 0
    if k_proj is None or not rows or rows % kv_heads.value:
        where = (
            f"k_proj has {rows} rows, no multiple of {kv_heads.key} = {kv_heads.value}" if rows else "k_proj is missing"
        )
        msg = f"{config.path} has no {name}, and it does not follow from the weights: {where}"
        raise ModelError(msg)
    return Size(f"{name} (from {k_proj.name})", rows // kv_heads.value)


def _rank(config: Config, weights: Weights) -> Size:
    """Return the rank of the Markov head: from config.json, else the number of columns of its first matrix, as in llama.cpp."""
    if config.find("markov_rank", "dflash_config.markov_rank"):
        return _named(config.size("markov_rank", "dflash_config.markov_rank"))
    w1 = weights.get("markov_head.markov_w1.weight")
    return Size("the columns of markov_w1", w1.shape[-1] if w1 and w1.shape else 0)


def _dflash2_sizes(config: Config, sizes: dict[str, Size]) -> dict[str, Size]:
    """Return the sizes of the convolutions and the selector, checked as in llama_model_dflash::load_arch_tensors."""
    hidden = sizes["hidden"]
    kernel, group, rank, top_k = (
        _named(config.size(f"dflash_config.{name}", name))
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    )
    if hidden.value % group.value:
        msg = f"{config.path}: hidden_size = {hidden.value} is not a multiple of {group.key} = {group.value}"
        raise ModelError(msg)
    if hidden.value < top_k.value * (top_k.value + 1):
        msg = f"{config.path}: hidden_size = {hidden.value} is too small for {top_k.key} = {top_k.value}"
        raise ModelError(f"{msg}, whose lattice takes {top_k.value * (top_k.value + 1)}")
    groups = Size(f"hidden_size / {group.key}", hidden.value // group.value)
    return {"kernel": kernel, "groups": groups, "selector": rank, "two": Size("2", 2)}


def _n_layer(config: Config, weights: Weights) -> int:
    n = config.size("num_hidden_layers").value
    blocks = {int(m[1]) for name in weights.tensors if (m := _BLOCK.match(name))}
    if len(blocks) != n or max(blocks) != n - 1:
        last = f", the last of them layers.{max(blocks)}" if blocks else ""
        msg = f"config.json says num_hidden_layers = {n}, and the weights have {len(blocks)} blocks{last}"
        raise ModelError(msg)
    return int(n)


def _target_layers(config: Config) -> list[int]:
    """Return the indices of the target's layers whose input is captured. The input of layer i + 1 is the output of layer i."""
    if config.find("aux_hidden_state_layer_ids"):  # these count inputs already
        return list(config.sizes("aux_hidden_state_layer_ids").value)
    return [i + 1 for i in config.sizes("dflash_config.target_layer_ids", "target_layer_ids").value]


def _mask(config: Config, n_vocab: int) -> int:
    mask = config.size("dflash_config.mask_token_id", "mask_token_id", low=0)
    if mask.value >= n_vocab:
        msg = f"{config.path}: {mask.key} is {mask.value}, and tokens are 0 to {n_vocab - 1} (vocab_size = {n_vocab})"
        raise ModelError(msg)
    return int(mask.value)


def _speculation(config: Config, *, dspark: bool, dflash2: bool, conf: bool) -> dict[str, Value]:
    """Return the keys that common/speculative.cpp reads, and the parameters of DFlash2's convolution and selector."""
    res: dict[str, Value] = {
        "block_size": config.size("dflash_config.block_size", "block_size").value,
        "target_layers": _target_layers(config),
    }
    if dspark:
        anchor = config.flag("sample_from_anchor")
        eagle = config.find("transformer_layer_config", "aux_hidden_state_layer_ids") is not None
        res["sample_from_anchor"] = not eagle if anchor is None else anchor
        res["has_confidence_head"] = conf
    if dflash2:
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            res[name] = config.size(f"dflash_config.{name}", name).value
    return res


def _scales(config: Config, n_embd: int, *, gemma: bool) -> dict[str, Value]:
    """Return the keys of the scale factors and the activation, leaving out default values: a factor of 1, no cap, silu."""
    if gemma:  # as in Gemma: embeddings times the root of their size, unscaled attention
        return {"embedding_scale": n_embd**0.5, "attention.scale": 1.0, "hidden_activation": _activation(config, GEMMA)}
    res: dict[str, Value | None] = {
        "attention.value_scale": config.maybe_number("dflash_config.attention_value_scale"),
        "logit_scale": config.maybe_number("dflash_config.output_multiplier", "output_multiplier"),
        "final_logit_softcapping": _softcap(config),
        "embedding_scale": config.maybe_number("dflash_config.input_embedding_scale", "input_embedding_scale"),
        "hidden_activation": None if (act := _activation(config, "")) == "silu" else act,
    }
    return {key: value for key, value in res.items() if value is not None}


def _softcap(config: Config) -> float | None:
    value = config.maybe_number("dflash_config.final_logit_softcapping", "final_logit_softcapping")
    return value if value is not None and value > 0 else None


def _activation(config: Config, kind: str) -> str:
    act = config.maybe_text("hidden_activation", "hidden_act") or ("gelu_pytorch_tanh" if kind == GEMMA else "silu")
    if act not in _ACTIVATIONS or (kind == GEMMA and act != "gelu_pytorch_tanh"):
        msg = f"{config.path}: the activation is {act}, and llama.cpp computes {', '.join(sorted(_ACTIVATIONS))} here"
        raise UnsupportedError(msg)
    return act


def _windows(config: Config, n_layer: int) -> dict[str, Value]:
    """Return the keys of the sliding window and of the layers that have one; {} if there is none."""
    own = config.flag("dflash_config.use_swa") or False
    if not own and not config.flag("use_sliding_window"):
        return {}
    window = config.maybe_size("dflash_config.swa_window_size") or config.maybe_size("sliding_window")
    if not window:
        return {}
    pattern = [True] * n_layer if own else _pattern(config, n_layer)
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}


def _pattern(config: Config, n_layer: int) -> list[bool]:
    types = config.maybe_texts("layer_types")
    if types is None:  # as in transformers' Qwen3Config: the first max_window_layers have full attention
        first = config.size("layer_types", "max_window_layers", low=0).value
        return [i >= first for i in range(n_layer)]
    if len(types.value) != n_layer:
        msg = f"{config.path}: layer_types has {len(types.value)} entries, and num_hidden_layers is {n_layer}"
        raise ModelError(msg)
    return [kind == "sliding_attention" for kind in types.value]


def _causal(config: Config) -> dict[str, Value]:
    value: Any = config.flag("is_causal", "dflash_config.causal")
    return {} if value is None else {"attention.causal": value}
