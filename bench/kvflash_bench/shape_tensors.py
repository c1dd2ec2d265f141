"""Geometries of models, and what their files hold: tensors and metadata, by architecture."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

N_CTX = 1 << 21  # positions that the models claim to be trained for
ALIGNMENT = 32
HEADER = 1 << 20  # most bytes of metadata and padding
BLOCK, BLOCK_BYTES = 32, 18  # elements and bytes of a block of Q4_0: an f16 scale, then 32 numbers of 4 bits

_ROPE = {"qwen": 1e7, "gemma4": 1e6, "laguna": 5e5}  # base frequency of full attention
_ROPE_WINDOW = 1e4

Family = Literal["qwen", "gemma4", "laguna"]
Value = bool | int | float | str | list[int] | list[bool]


class Heads(NamedTuple):
    """Those of an attention layer: how many, of K and V, and their size."""

    n: int
    n_kv: int
    n_dim: int


_NO_HEADS = Heads(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The geometry of a model. Sizes are numbers of elements.

    family: qwen is a qwen3, or a qwen35 if interval is above 1; with experts, the moe of these. The others have experts.
    n_ff: of a dense network, which gemma4 has in each layer beside the experts, and laguna in its first one.
    n_head, n_head_kv, n_head_dim: of full attention.
    interval: every interval-th layer has full attention, the first of laguna; the others are gated delta nets, or attend
        within a window.
    n_state, n_group, n_value: a delta net has n_group key heads and n_value value heads of n_state.
    n_expert: experts of n_ff_expert each, 0: of n_ff; a token takes n_used of them, and in a hybrid and in laguna one more
        that all tokens take.
    n_mtp: heads of a hybrid that predict further tokens: attention layers after the others.
    n_window, window: tokens that the other layers of gemma4 and laguna attend to, and their heads.
    """

    family: Family = "qwen"
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_head_dim: int
    n_vocab: int = 32768
    interval: int = 1
    n_state: int = 0
    n_group: int = 0
    n_value: int = 0
    n_expert: int = 0
    n_used: int = 0
    n_ff_expert: int = 0
    n_mtp: int = 0
    n_window: int = 0
    window: Heads = _NO_HEADS

    @property
    def hybrid(self) -> bool:
        """Whether it has delta nets."""
        return self.family == "qwen" and self.interval > 1

    @property
    def arch(self) -> str:
        """llama.cpp's name for the architecture."""
        if self.family != "qwen":
            return self.family
        return ("qwen35" if self.hybrid else "qwen3") + ("moe" if self.n_expert else "")

    @property
    def n_bytes(self) -> int:
        """Approximate size of the file in bytes, never too low."""
        return HEADER + sum(t.n_bytes + ALIGNMENT for t in tensors(self))

    def is_full(self, il: int) -> bool:
        """Whether a layer has full attention."""
        return il >= self.n_layer or (il + (self.family != "laguna")) % self.interval == 0

    def heads(self, il: int) -> Heads:
        """Return the heads of a layer that has attention."""
        return Heads(self.n_head, self.n_head_kv, self.n_head_dim) if self.is_full(il) else self.window


class Tensor(NamedTuple):
    """A tensor to be written.

    shape: in GGML's order, the contiguous dimension first.
    kind: "q4_0", or the kind of its f32 values.
    """

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def n_bytes(self) -> int:
        """Bytes of its data."""
        n = int(np.prod(self.shape))
        return n // BLOCK * BLOCK_BYTES if self.kind == "q4_0" else 4 * n


#
# tensors
#


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Yield all tensors of a model, in the order of the file."""
    s = shape
    yield Tensor("token_embd.weight", (s.n_embd, s.n_vocab), "q4_0")
    yield Tensor("output_norm.weight", (s.n_embd,), "ones")
    yield Tensor("output.weight", (s.n_embd, s.n_vocab), "q4_0")
    if s.family == "gemma4":
        yield Tensor("rope_freqs.weight", (s.n_head_dim // 2,), "quarter")
    for il in range(s.n_layer + s.n_mtp):
        yield from (Tensor(f"blk.{il}.{name}", dims, kind) for name, dims, kind in _LAYERS[s.family](s, il))


def _qwen(s: Shape, il: int) -> Iterator[Tensor]:
    yield from _attention(s, il) if s.is_full(il) else _delta_net(s)
    yield from _norms(s, "attn_norm", "post_attention_norm" if s.hybrid else "ffn_norm")
    if not s.n_expert:
        yield from _network(s, "", s.n_ff)
    else:
        yield from _experts(s, shared=s.hybrid)
    if s.n_expert and s.hybrid:
        yield Tensor("ffn_gate_inp_shexp.weight", (s.n_embd,), "half")
    if il >= s.n_layer:
        yield Tensor("nextn.eh_proj.weight", (2 * s.n_embd, s.n_embd), "q4_0")
        yield from _norms(s, "nextn.enorm", "nextn.hnorm")


def _gemma4(s: Shape, il: int) -> Iterator[Tensor]:
    yield from _attention(s, il)
    yield from _norms(s, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    yield from _norms(s, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    yield from _network(s, "", s.n_ff)
    yield Tensor("ffn_gate_up_exps.weight", (s.n_embd, 2 * s.n_ff_expert, s.n_expert), "q4_0")
    yield Tensor("ffn_down_exps.weight", (s.n_ff_expert, s.n_embd, s.n_expert), "q4_0")
    yield Tensor("ffn_down_exps.scale", (s.n_expert,), "ones")
    yield Tensor("ffn_gate_inp.weight", (s.n_embd, s.n_expert), "half")  # what it multiplies has length 1
    yield Tensor("ffn_gate_inp.scale", (s.n_embd,), "ones")
    yield Tensor("layer_output_scale.weight", (1,), "ones")


def _laguna(s: Shape, il: int) -> Iterator[Tensor]:
    yield from _attention(s, il)
    yield Tensor("attn_gate.weight", (s.n_embd, s.heads(il).n), "q4_0")
    yield from _norms(s, "attn_norm", "ffn_norm")
    if il == 0:
        yield from _network(s, "", s.n_ff)
    else:
        yield from _experts(s, shared=True)
        yield Tensor("exp_probs_b.bias", (s.n_expert,), "zeros")


_LAYERS: dict[Family, Callable[[Shape, int], Iterator[Tensor]]] = {"qwen": _qwen, "gemma4": _gemma4, "laguna": _laguna}


def _attention(s: Shape, il: int) -> Iterator[Tensor]:
    """Yield grouped-query attention with QK norm. In a hybrid, Q carries an output gate; in gemma4, K is also V where
    attention is full, and Q is scaled by its norm alone.
    """
    heads, gemma4 = s.heads(il), s.family == "gemma4"
    n_q, n_kv = heads.n * heads.n_dim, heads.n_kv * heads.n_dim
    yield Tensor("attn_q.weight", (s.n_embd, n_q * (2 if s.hybrid else 1)), "q4_0")
    yield Tensor("attn_k.weight", (s.n_embd, n_kv), "q4_0")
    if not (gemma4 and s.is_full(il)):
        yield Tensor("attn_v.weight", (s.n_embd, n_kv), "q4_0")
    yield Tensor("attn_output.weight", (n_q, s.n_embd), "q4_0")
    yield Tensor("attn_q_norm.weight", (heads.n_dim,), "scale" if gemma4 else "ones")
    yield Tensor("attn_k_norm.weight", (heads.n_dim,), "ones")


def _delta_net(s: Shape) -> Iterator[Tensor]:
    n_mixed, n_inner = s.n_state * (2 * s.n_group + s.n_value), s.n_state * s.n_value
    yield Tensor("attn_qkv.weight", (s.n_embd, n_mixed), "q4_0")
    yield Tensor("attn_gate.weight", (s.n_embd, n_inner), "q4_0")
    yield Tensor("ssm_conv1d.weight", (4, n_mixed), "half")
    yield Tensor("ssm_dt.bias", (s.n_value,), "half")
    yield Tensor("ssm_a", (s.n_value,), "decay")
    yield Tensor("ssm_beta.weight", (s.n_embd, s.n_value), "q4_0")
    yield Tensor("ssm_alpha.weight", (s.n_embd, s.n_value), "q4_0")
    yield Tensor("ssm_norm.weight", (s.n_state,), "ones")
    yield Tensor("ssm_out.weight", (n_inner, s.n_embd), "q4_0")


def _norms(s: Shape, *names: str) -> Iterator[Tensor]:
    for name in names:
        yield Tensor(f"{name}.weight", (s.n_embd,), "ones")


def _network(s: Shape, kind: str, n_ff: int, *many: int) -> Iterator[Tensor]:
    yield Tensor(f"ffn_gate{kind}.weight", (s.n_embd, n_ff, *many), "q4_0")
    yield Tensor(f"ffn_up{kind}.weight", (s.n_embd, n_ff, *many), "q4_0")
    yield Tensor(f"ffn_down{kind}.weight", (n_ff, s.n_embd, *many), "q4_0")


def _experts(s: Shape, *, shared: bool) -> Iterator[Tensor]:
    """Yield experts and their router. shared: one more, for all tokens."""
    n_ff = s.n_ff_expert or s.n_ff
    yield from _network(s, "_exps", n_ff, s.n_expert)
    if shared:
        yield from _network(s, "_shexp", n_ff)
    yield Tensor("ffn_gate_inp.weight", (s.n_embd, s.n_expert), "router")


#
# metadata
#


def keys(shape: Shape) -> dict[str, Value]:
    """Return the metadata of the architecture."""
    s = shape
    res: dict[str, Value] = {
        "context_length": N_CTX,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer + s.n_mtp,
        "feed_forward_length": s.n_ff,
        "vocab_size": s.n_vocab,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.n_head_dim,
        "attention.value_length": s.n_head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": _ROPE[s.family],
    }
    if s.n_expert:
        n_ff = s.n_ff_expert or s.n_ff
        res |= {"expert_count": s.n_expert, "expert_used_count": s.n_used}
        res |= {"expert_feed_forward_length": n_ff, "expert_shared_feed_forward_length": n_ff}
    if s.hybrid:
        res |= _hybrid_keys(s)
    if s.n_mtp:
        res["nextn_predict_layers"] = s.n_mtp
    if s.n_window:
        res |= _window_keys(s) | (_gemma4_keys(s) if s.family == "gemma4" else _laguna_keys(s))
    return res


def _hybrid_keys(s: Shape) -> dict[str, Value]:
    n_rope = s.n_head_dim // 8  # pairs: a quarter of a head is rotated, as in the real ones, in three parts
    return {
        "rope.dimension_count": 2 * n_rope,
        "rope.dimension_sections": [n_rope - 2 * (n_rope // 3), n_rope // 3, n_rope // 3, 0],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": s.n_state * s.n_value,
        "ssm.state_size": s.n_state,
        "ssm.time_step_rank": s.n_value,
        "ssm.group_count": s.n_group,
        "full_attention_interval": s.interval,
    }


def _window_keys(s: Shape) -> dict[str, Value]:
    layers = range(s.n_layer)
    return {
        "attention.head_count": [s.heads(il).n for il in layers],
        "attention.head_count_kv": [s.heads(il).n_kv for il in layers],
        "attention.sliding_window": s.n_window,
        "attention.sliding_window_pattern": [not s.is_full(il) for il in layers],
        "attention.key_length_swa": s.window.n_dim,
        "attention.value_length_swa": s.window.n_dim,
        "rope.dimension_count_swa": s.window.n_dim,
        "rope.freq_base_swa": _ROPE_WINDOW,
    }


def _gemma4_keys(s: Shape) -> dict[str, Value]:
    return {
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rope.dimension_count": s.n_head_dim,
    }


def _laguna_keys(s: Shape) -> dict[str, Value]:
    return {
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "rope.dimension_count": s.n_head_dim // 2,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }
