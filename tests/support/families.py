"""More tiny models: one for each further family that is supported, by name in tiny.MODELS.

Where there is no QK norm, the scale of Q sets how sharp attention is. Windows are so small that a short run leaves them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from support.tiny import Writer

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_HEAD_DIM = 256, 512, 4, 2, 64
N_EXPERT, N_USED, N_FF_EXP = 4, 2, 128
N_STATE, N_GROUP, N_VALUE = 64, 2, 4  # of a delta net: state size, key heads, value heads
N_SWA = 128
SWA_PATTERN = [False, True, False]
LONG_CTX = 1024  # from here on phi3 takes its long factors: fewer than a context's positions, more than a pool's cells

EXPERTS: dict[str, Any] = {
    "expert_count": N_EXPERT,
    "expert_used_count": N_USED,
    "expert_feed_forward_length": N_FF_EXP,
}
SIGMOID: dict[str, Any] = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5}
DELTA_NET: dict[str, Any] = {
    "ssm__conv_kernel": 4,
    "ssm__inner_size": N_STATE * N_VALUE,
    "ssm__state_size": N_STATE,
    "ssm__time_step_rank": N_VALUE,
    "ssm__group_count": N_GROUP,
    "full_attention_interval": 2,
}
YARN: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 16.0,
    "rope__scaling__original_context_length": 256,
}


def geometry(w: "Writer", n_layer: int, *, embd_scale: float = 1.0, n_head: Any = N_HEAD, **keys: Any) -> None:
    """The metadata that every transformer has, at one size for all of them, and more of it; embeddings and output."""
    w.geometry(
        n_layer=n_layer,
        n_embd=N_EMBD,
        n_ff=N_FF,
        n_head=n_head,
        n_head_kv=N_HEAD_KV,
        n_head_dim=N_HEAD_DIM,
        rope=1e6,
    )
    w.keys(**keys)
    w.head(N_EMBD, embd_scale)


def attention(w: "Writer", blk: str, *, bias: bool = False) -> None:
    """Grouped-query attention without QK norm."""
    for name, n_head, sharp in (("q", N_HEAD, 2.0), ("k", N_HEAD_KV, 1.0), ("v", N_HEAD_KV, 1.0)):
        w.random(f"{blk}attn_{name}.weight", N_EMBD, n_head * N_HEAD_DIM, scale=sharp * N_EMBD**-0.5)
        if bias:
            w.random(f"{blk}attn_{name}.bias", n_head * N_HEAD_DIM, scale=0.5)
    w.random(blk + "attn_output.weight", N_HEAD * N_HEAD_DIM, N_EMBD)


def normed_attention(w: "Writer", blk: str, *, n_head: int = N_HEAD, gate: bool = False) -> None:
    """Grouped-query attention with QK norm. gate: Q carries an output gate."""
    w.attention(blk, N_EMBD, n_head, N_HEAD_KV, N_HEAD_DIM, q_norm=2.0, gate=gate)


def norms(w: "Writer", blk: str, *names: str) -> None:
    """Norms of the embedding."""
    for name in names:
        w.norm(f"{blk}{name}.weight", N_EMBD)


def experts(w: "Writer", blk: str, *, shared: bool = False, bias: bool = False, probs: bool = False) -> None:
    """A router and its experts. shared: one more for all tokens; probs: a bias that the choice sees, the weights do not."""
    w.random(blk + "ffn_gate_inp.weight", N_EMBD, N_EXPERT)
    for name, n_in, n_out in (("gate", N_EMBD, N_FF_EXP), ("up", N_EMBD, N_FF_EXP), ("down", N_FF_EXP, N_EMBD)):
        w.random(f"{blk}ffn_{name}_exps.weight", n_in, n_out, N_EXPERT)
        if bias:
            w.random(f"{blk}ffn_{name}_exps.bias", n_out, N_EXPERT, scale=0.1)
        if shared:
            w.random(f"{blk}ffn_{name}_shexp.weight", n_in, n_out)
    if bias:
        w.random(blk + "ffn_gate_inp.bias", N_EXPERT, scale=0.1)
    if probs:
        w.random(blk + "exp_probs_b.bias", N_EXPERT, scale=0.1)


def dense_layers(w: "Writer", *, bias: bool = False) -> None:
    """Attention without QK norm and a feed-forward network."""
    for i in range(2):
        blk = f"blk.{i}."
        norms(w, blk, "attn_norm", "ffn_norm")
        attention(w, blk, bias=bias)
        w.ffn(blk, N_EMBD, N_FF)


def qwen2(w: "Writer") -> None:
    """Biases of Q, K and V."""
    geometry(w, 2)
    dense_layers(w, bias=True)


def llama(w: "Writer") -> None:
    """Frequency factors of RoPE, as Llama 3 has them."""
    geometry(w, 2)
    w.tensor("rope_freqs.weight", np.geomspace(1, 8, N_HEAD_DIM // 2).astype(np.float32))
    dense_layers(w)


def mistral3(w: "Writer") -> None:
    """YaRN, and Q scaled by its position."""
    geometry(w, 2, attention__temperature_scale=0.1, **YARN)
    dense_layers(w)


def phi3(w: "Writer") -> None:
    """Q, K and V in one matrix; long RoPE, whose factors follow from the size of the context."""
    geometry(w, 2, rope__scaling__original_context_length=LONG_CTX, rope__scaling__attn_factor=1.2)
    for name, factor in (("long", 8), ("short", 2)):
        w.tensor(f"rope_factors_{name}.weight", np.geomspace(1, factor, N_HEAD_DIM // 2).astype(np.float32))
    for i in range(2):
        blk = f"blk.{i}."
        norms(w, blk, "attn_norm", "ffn_norm")
        w.random(blk + "attn_qkv.weight", N_EMBD, (N_HEAD + 2 * N_HEAD_KV) * N_HEAD_DIM, scale=1.5 * N_EMBD**-0.5)
        w.random(blk + "attn_output.weight", N_HEAD * N_HEAD_DIM, N_EMBD)
        w.random(blk + "ffn_up.weight", N_EMBD, 2 * N_FF)
        w.random(blk + "ffn_down.weight", N_FF, N_EMBD)


def gemma3(w: "Writer") -> None:
    """Full attention and a sliding window in turn, QK norm, norms after each block."""
    geometry(
        w,
        3,
        embd_scale=0.1,
        attention__sliding_window=N_SWA,
        attention__sliding_window_pattern=SWA_PATTERN,
        rope__freq_base_swa=1e4,
    )
    for i in range(3):
        blk = f"blk.{i}."
        norms(w, blk, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        normed_attention(w, blk)
        w.ffn(blk, N_EMBD, N_FF)


def qwen3moe(w: "Writer") -> None:
    """QK norm, experts."""
    geometry(w, 2, **EXPERTS)
    for i in range(2):
        blk = f"blk.{i}."
        norms(w, blk, "attn_norm", "ffn_norm")
        normed_attention(w, blk)
        experts(w, blk)


def gpt_oss(w: "Writer") -> None:
    """Full attention and a sliding window in turn, attention sinks, experts with biases."""
    geometry(
        w,
        3,
        attention__sliding_window=N_SWA,
        attention__sliding_window_pattern=SWA_PATTERN,
        **EXPERTS,
        **YARN,
    )
    for i in range(3):
        blk = f"blk.{i}."
        norms(w, blk, "attn_norm", "post_attention_norm")
        attention(w, blk, bias=True)
        w.random(blk + "attn_output.bias", N_EMBD, scale=0.1)
        w.random(blk + "attn_sinks.weight", N_HEAD, scale=1.0)
        experts(w, blk, bias=True)


def laguna(w: "Writer") -> None:
    """Full attention, its output gated for each channel; a dense layer, then experts and a shared one."""
    geometry(w, 2, leading_dense_block_count=1, **EXPERTS, **SIGMOID, **YARN)
    for i in range(2):
        laguna_layer(w, i, N_HEAD, N_HEAD * N_HEAD_DIM)


def laguna_swa(w: "Writer") -> None:
    """Full attention and a sliding window in turn, which differ in heads and RoPE, the output gated for each head."""
    n_head = [N_HEAD, 2 * N_HEAD, N_HEAD]
    geometry(
        w,
        3,
        n_head=n_head,
        leading_dense_block_count=1,
        attention__sliding_window=N_SWA,
        attention__sliding_window_pattern=SWA_PATTERN,
        rope__dimension_count=N_HEAD_DIM // 2,
        rope__dimension_count_swa=N_HEAD_DIM,
        rope__freq_base_swa=1e4,
        **EXPERTS,
        **SIGMOID,
        **YARN,
    )
    for i, n in enumerate(n_head):
        laguna_layer(w, i, n, n)


def laguna_layer(w: "Writer", i: int, n_head: int, n_gate: int) -> None:
    """A layer of either."""
    blk = f"blk.{i}."
    norms(w, blk, "attn_norm", "ffn_norm")
    normed_attention(w, blk, n_head=n_head)
    w.random(blk + "attn_gate.weight", N_EMBD, n_gate)
    if i == 0:
        w.ffn(blk, N_EMBD, N_FF)
    else:
        experts(w, blk, shared=True, probs=True)


def qwen35moe(w: "Writer") -> None:
    """Gated delta net and attention in turn, experts and a shared one."""
    geometry(w, 4, rope__dimension_sections=[8, 4, 4, 0], rope__dimension_count=32, **DELTA_NET, **EXPERTS)
    qwen_hybrid_layers(w, fused=False)


def qwen3next(w: "Writer") -> None:
    """As qwen35moe, with RoPE of one dimension, and alpha and beta of the delta net in one matrix."""
    geometry(w, 4, rope__dimension_count=16, **DELTA_NET, **EXPERTS)
    qwen_hybrid_layers(w, fused=True)


def qwen_hybrid_layers(w: "Writer", *, fused: bool) -> None:
    """The layers of either."""
    w.keys(expert_shared_feed_forward_length=N_FF_EXP)
    for i in range(4):
        blk = f"blk.{i}."
        norms(w, blk, "attn_norm", "post_attention_norm")
        if i % 2:
            normed_attention(w, blk, gate=True)
        else:
            w.delta_net(blk, N_EMBD, N_STATE, N_GROUP, N_VALUE, fused=fused)
        experts(w, blk, shared=True)
        w.random(blk + "ffn_gate_inp_shexp.weight", N_EMBD)


def deepseek2(w: "Writer") -> None:
    """Latent attention (MLA): one row for all heads is K and V at once; a dense layer, then experts and a shared one."""
    n_layer, n_nope, n_rope, n_value, n_lora_q, n_lora_kv = 2, 32, 64, 32, 64, 64
    w.geometry(
        n_layer=n_layer,
        n_embd=N_EMBD,
        n_ff=N_FF,
        n_head=N_HEAD,
        n_head_kv=1,
        n_head_dim=n_lora_kv + n_rope,
        n_head_dim_v=n_lora_kv,
        rope=1e4,
    )
    w.keys(
        leading_dense_block_count=1,
        expert_shared_count=1,
        attention__q_lora_rank=n_lora_q,
        attention__kv_lora_rank=n_lora_kv,
        attention__key_length_mla=n_nope + n_rope,
        attention__value_length_mla=n_value,
        rope__dimension_count=n_rope,
        **EXPERTS,
        **SIGMOID,
    )
    w.head(N_EMBD)
    for i in range(n_layer):
        blk = f"blk.{i}."
        norms(w, blk, "attn_norm", "ffn_norm")
        w.norm(blk + "attn_q_a_norm.weight", n_lora_q, 2.0)
        w.norm(blk + "attn_kv_a_norm.weight", n_lora_kv)
        w.random(blk + "attn_q_a.weight", N_EMBD, n_lora_q)
        w.random(blk + "attn_q_b.weight", n_lora_q, N_HEAD * (n_nope + n_rope))
        w.random(blk + "attn_kv_a_mqa.weight", N_EMBD, n_lora_kv + n_rope)
        w.random(blk + "attn_k_b.weight", n_nope, n_lora_kv, N_HEAD)
        w.random(blk + "attn_v_b.weight", n_lora_kv, n_value, N_HEAD)
        w.random(blk + "attn_output.weight", N_HEAD * n_value, N_EMBD)
        if i == 0:
            w.ffn(blk, N_EMBD, N_FF)
        else:
            experts(w, blk, shared=True, probs=True)


MODELS: dict[str, Callable[["Writer"], None]] = {
    "qwen2": qwen2,
    "llama": llama,
    "mistral3": mistral3,
    "phi3": phi3,
    "gemma3": gemma3,
    "qwen3moe": qwen3moe,
    "gpt-oss": gpt_oss,
    "laguna": laguna,
    "laguna-swa": laguna_swa,
    "qwen35moe": qwen35moe,
    "qwen3next": qwen3next,
    "deepseek2": deepseek2,
}
"""The models by their name, which is their architecture but for those in ARCHS."""

ARCHS = {"laguna-swa": "laguna"}
