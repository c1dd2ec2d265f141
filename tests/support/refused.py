"""Tiny models of the kinds that are refused, beside those in tiny.MODELS. As small as llama.cpp loads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from support import tiny
from support.tiny import Writer

N_EMBD, N_FF, N_HEAD, N_HEAD_DIM, N_LAYER = 64, 64, 2, 32, 2
N_EXPERT = 2


def geometry(w: Writer, *, n_head_kv: Any = N_HEAD, n_head_dim: int = N_HEAD_DIM, n_layer: int = N_LAYER) -> None:
    """The metadata that every transformer has."""
    w.geometry(
        n_layer=n_layer,
        n_embd=N_EMBD,
        n_ff=N_FF,
        n_head=N_HEAD,
        n_head_kv=n_head_kv,
        n_head_dim=n_head_dim,
        rope=1e4,
    )


def attention(w: Writer, blk: str, *, out: str = "attn_output") -> None:
    """Plain multi-head attention."""
    for name in ("attn_q", "attn_k", "attn_v", out):
        w.random(f"{blk}{name}.weight", N_EMBD, N_EMBD)


def experts(w: Writer, blk: str) -> None:
    """Experts and a shared one."""
    w.random(blk + "ffn_gate_inp.weight", N_EMBD, N_EXPERT)
    for name, n_in, n_out in (("gate", N_EMBD, N_FF), ("up", N_EMBD, N_FF), ("down", N_FF, N_EMBD)):
        w.random(f"{blk}ffn_{name}_exps.weight", n_in, n_out, N_EXPERT)
        w.random(f"{blk}ffn_{name}_shexp.weight", n_in, n_out)


def layer_norm(w: Writer, name: str) -> None:
    """A norm with a bias."""
    w.norm(name + ".weight", N_EMBD)
    w.random(name + ".bias", N_EMBD, scale=0.1)


def bert(w: Writer) -> None:
    """An encoder: it has no memory at all."""
    n_ctx = 512
    w.keys(
        context_length=n_ctx,
        embedding_length=N_EMBD,
        block_count=N_LAYER,
        feed_forward_length=N_FF,
        vocab_size=tiny.N_VOCAB,
        attention__head_count=N_HEAD,
        attention__layer_norm_epsilon=1e-6,
    )
    w._file.add_tokenizer_model("none")
    w._file.add_token_type_count(2)
    w.random("token_embd.weight", N_EMBD, tiny.N_VOCAB, scale=1.0)
    w.tensor("token_types.weight", np.ones((2, N_EMBD), np.float32))
    w.tensor("position_embd.weight", np.zeros((n_ctx, N_EMBD), np.float32))
    layer_norm(w, "token_embd_norm")
    for i in range(N_LAYER):
        blk = f"blk.{i}."
        attention(w, blk)
        layer_norm(w, blk + "attn_output_norm")
        w.random(blk + "ffn_up.weight", N_EMBD, N_FF)
        w.random(blk + "ffn_down.weight", N_FF, N_EMBD)
        layer_norm(w, blk + "layer_output_norm")


def t5_encoder(w: Writer) -> None:
    """The half of T5 that reads."""
    geometry(w)
    w.keys(attention__relative_buckets_count=32)
    w.random("token_embd.weight", N_EMBD, tiny.N_VOCAB, scale=1.0)
    w.random("output.weight", N_EMBD, tiny.N_VOCAB)
    w.norm("enc.output_norm.weight", N_EMBD)
    for i in range(N_LAYER):
        t5_layer(w, f"enc.blk.{i}.")


def t5(w: Writer) -> None:
    """An encoder, and a decoder that attends to what it has read."""
    t5_encoder(w)
    w.norm("dec.output_norm.weight", N_EMBD)
    for i in range(N_LAYER):
        blk = f"dec.blk.{i}."
        t5_layer(w, blk)
        w.norm(blk + "cross_attn_norm.weight", N_EMBD)
        for name in "qkvo":
            w.random(f"{blk}cross_attn_{name}.weight", N_EMBD, N_EMBD)


def t5_layer(w: Writer, blk: str) -> None:
    """What is the same in both halves."""
    w.norm(blk + "attn_norm.weight", N_EMBD)
    attention(w, blk, out="attn_o")
    w.random(blk + "attn_rel_b.weight", N_HEAD, 32)
    w.norm(blk + "ffn_norm.weight", N_EMBD)
    w.random(blk + "ffn_up.weight", N_EMBD, N_FF)
    w.random(blk + "ffn_down.weight", N_FF, N_EMBD)


def diffusion(w: Writer) -> None:
    """Attention in both directions: llada and dream are alike."""
    geometry(w)
    w.head(N_EMBD)
    for i in range(N_LAYER):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", N_EMBD)
        attention(w, blk)
        w.norm(blk + "ffn_norm.weight", N_EMBD)
        w.ffn(blk, N_EMBD, N_FF)


def bidirectional(w: Writer) -> None:
    """A decoder made an encoder: it keeps a cache, and each token of a batch attends to all of them."""
    w.keys(attention__causal=False)
    diffusion(w)


def eagle3(w: Writer) -> None:
    """A draft head: it computes from three layers of another model."""
    geometry(w, n_layer=1)
    w.keys(target_layers=[0, 1, 2], target_hidden_size=N_EMBD)
    w.head(N_EMBD)
    w.random("fc.weight", 3 * N_EMBD, N_EMBD)
    blk = "blk.0."
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        w.norm(f"{blk}{name}.weight", N_EMBD)
    for name in ("attn_q", "attn_k", "attn_v"):
        w.random(f"{blk}{name}.weight", 2 * N_EMBD, N_EMBD)
    w.random(blk + "attn_output.weight", N_EMBD, N_EMBD)
    w.ffn(blk, N_EMBD, N_FF)


def gemma2(w: Writer) -> None:
    """Nothing but sliding windows: llama_kv_cache_iswa, half of it empty."""
    geometry(w)
    w.keys(attention__sliding_window=128, attention__sliding_window_pattern=0)
    w.random("token_embd.weight", N_EMBD, tiny.N_VOCAB, scale=0.1)
    w.norm("output_norm.weight", N_EMBD)
    for i in range(N_LAYER):
        blk = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            w.norm(f"{blk}{name}.weight", N_EMBD)
        attention(w, blk)
        w.ffn(blk, N_EMBD, N_FF)


def lfm2(w: Writer) -> None:
    """Convolutions, and attention that is all windows: llama_memory_hybrid_iswa."""
    n_conv = 3
    geometry(w, n_head_kv=[0, N_HEAD])
    w.keys(attention__sliding_window=128, shortconv__l_cache=n_conv)
    w.random("token_embd.weight", N_EMBD, tiny.N_VOCAB, scale=1.0)
    w.random("output.weight", N_EMBD, tiny.N_VOCAB)
    w.norm("token_embd_norm.weight", N_EMBD)
    for i in range(N_LAYER):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", N_EMBD)
        w.norm(blk + "ffn_norm.weight", N_EMBD)
        w.ffn(blk, N_EMBD, N_FF)
        if i == 0:
            w.tensor(blk + "shortconv.conv.weight", np.ones((N_EMBD, n_conv), np.float32))
            w.random(blk + "shortconv.in_proj.weight", N_EMBD, 3 * N_EMBD)
            w.random(blk + "shortconv.out_proj.weight", N_EMBD, N_EMBD)
        else:
            w.attention(blk, N_EMBD, N_HEAD, N_HEAD, N_HEAD_DIM, q_norm=1.0)


def minimax_m3(w: Writer) -> None:
    """Attention on the blocks of positions that an indexer picks: llama_kv_cache_msa."""
    n_head_kv = 1
    geometry(w, n_head_kv=n_head_kv)
    w.keys(
        leading_dense_block_count=1,
        expert_count=N_EXPERT,
        expert_used_count=1,
        expert_feed_forward_length=N_FF,
        expert_shared_count=1,
        expert_gating_func=2,
        rope__dimension_count=N_HEAD_DIM,
        attention__indexer__head_count=n_head_kv,
        attention__indexer__key_length=32,
        attention__indexer__top_k=2,
        attention__indexer__block_size=32,
        attention__indexer__local_blocks=1,
    )
    w.head(N_EMBD)
    for i in range(N_LAYER):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", N_EMBD)
        w.attention(blk, N_EMBD, N_HEAD, n_head_kv, N_HEAD_DIM, q_norm=1.0)
        w.norm(blk + "ffn_norm.weight", N_EMBD)
        if i == 0:
            w.ffn(blk, N_EMBD, N_FF)
            continue
        experts(w, blk)
        w.random(blk + "exp_probs_b.bias", N_EXPERT, scale=0.1)
        w.random(blk + "indexer.q_proj.weight", N_EMBD, n_head_kv * 32)
        w.random(blk + "indexer.k_proj.weight", N_EMBD, 32)
        w.norm(blk + "indexer.q_norm.weight", 32)
        w.norm(blk + "indexer.k_norm.weight", 32)


def deepseek4(w: Writer) -> None:
    """Rows that sum up 4 or 128 positions, and a window: llama_kv_cache_dsv4."""
    n_dim, n_lora_q, n_group, n_lora_o, n_hyper, n_indexer_dim = 64, 32, 2, 32, 4, 64
    n_mix = (2 + n_hyper) * n_hyper
    geometry(w, n_head_kv=1, n_head_dim=n_dim)
    w.keys(
        leading_dense_block_count=0,
        expert_count=N_EXPERT,
        expert_used_count=1,
        expert_feed_forward_length=N_FF,
        expert_shared_count=1,
        expert_gating_func=4,
        expert_weights_norm=True,
        expert_weights_scale=1.0,
        swiglu_clamp_exp=[10.0] * N_LAYER,
        attention__q_lora_rank=n_lora_q,
        attention__sliding_window=128,
        attention__output_group_count=n_group,
        attention__output_lora_rank=n_lora_o,
        attention__compress_rope_freq_base=1e4,
        attention__compress_ratios=[4, 128],
        attention__indexer__head_count=2,
        attention__indexer__key_length=n_indexer_dim,
        attention__indexer__top_k=32,
        hyper_connection__count=n_hyper,
        hyper_connection__sinkhorn_iterations=2,
        hyper_connection__epsilon=1e-6,
        hash_layer_count=0,
        rope__dimension_count=32,
    )
    w.head(N_EMBD)
    w.random("output_hc_fn.weight", n_hyper * N_EMBD, n_hyper)
    w.random("output_hc_base.weight", n_hyper)
    w.random("output_hc_scale.weight", 1)
    for i in range(N_LAYER):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", N_EMBD)
        w.norm(blk + "attn_q_a_norm.weight", n_lora_q)
        w.norm(blk + "attn_kv_a_norm.weight", n_dim)
        w.norm(blk + "ffn_norm.weight", N_EMBD)
        w.random(blk + "attn_sinks.weight", N_HEAD)
        w.random(blk + "attn_q_a.weight", N_EMBD, n_lora_q)
        w.random(blk + "attn_q_b.weight", n_lora_q, N_HEAD * n_dim)
        w.random(blk + "attn_kv.weight", N_EMBD, n_dim)
        w.random(blk + "attn_output_a.weight", N_HEAD * n_dim // n_group, n_lora_o, n_group)
        w.random(blk + "attn_output_b.weight", n_group * n_lora_o, N_EMBD)
        for name in ("hc_attn", "hc_ffn"):
            w.random(f"{blk}{name}_fn.weight", n_hyper * N_EMBD, n_mix)
            w.random(f"{blk}{name}_base.weight", n_mix)
            w.random(f"{blk}{name}_scale.weight", 3)
        compressor(w, blk + "attn_compressor", n_dim, 128 if i else 4)
        if i == 0:
            w.random(blk + "indexer.proj.weight", N_EMBD, 2)
            w.random(blk + "indexer.attn_q_b.weight", n_lora_q, 2 * n_indexer_dim)
            compressor(w, blk + "indexer_compressor", n_indexer_dim, 4)
        experts(w, blk)
        w.random(blk + "exp_probs_b.bias", N_EXPERT, scale=0.1)


def compressor(w: Writer, name: str, n_dim: int, ratio: int) -> None:
    """What makes one row of ratio positions."""
    n_row = n_dim * (2 if ratio == 4 else 1)
    w.random(name + "_kv.weight", N_EMBD, n_row)
    w.random(name + "_gate.weight", N_EMBD, n_row)
    w.tensor(name + "_ape.weight", np.zeros((ratio, n_row), np.float32))
    w.norm(name + "_norm.weight", n_dim)


MODELS: dict[str, Callable[[Writer], None]] = {
    "bert": bert,
    "llama": bidirectional,
    "t5": t5,
    "t5encoder": t5_encoder,
    "llada": diffusion,
    "dream": diffusion,
    "eagle3": eagle3,
    "gemma2": gemma2,
    "lfm2": lfm2,
    "minimax-m3": minimax_m3,
    "deepseek4": deepseek4,
}
"""The models by their architecture."""


def write(name: str, path: Path) -> None:
    """Write a model to a file."""
    writer = Writer(path, name)
    MODELS[name](writer)
    writer.close()
