"""Tiny models with random weights, one for each class of memory: for exactness, where no text is needed.

They have no vocabulary but token ids 0 to N_VOCAB - 1. Matrices are F16, since llama.cpp crashes on models that are all
F32. The same name always gives the same bytes.
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from support import families

N_VOCAB = 512
N_CTX = 262144
EPS = 1e-6


class Writer:
    """A GGUF file being written. Shapes are in GGML's order, the contiguous dimension first."""

    def __init__(self, path: Path, arch: str) -> None:
        self._file = gguf.GGUFWriter(path, arch)
        self._arch = arch
        self._rng = np.random.default_rng(zlib.crc32(arch.encode()))

    def keys(self, **values: bool | float | str | Sequence[int]) -> None:
        """Metadata of the architecture; `__` in a name stands for a dot."""
        for name, value in values.items():
            key = f"{self._arch}.{name.replace('__', '.')}"
            add: Any = {
                bool: self._file.add_bool,
                int: self._file.add_uint32,
                float: self._file.add_float32,
                str: self._file.add_string,
                list: self._file.add_array,
            }[type(value)]
            add(key, value)

    def geometry(
        self,
        *,
        n_layer: int,
        n_embd: int,
        n_ff: int,
        n_head: int | list[int],
        n_head_kv: int,
        n_head_dim: int,
        rope: float,
        n_head_dim_v: int | None = None,
    ) -> None:
        """The metadata that every transformer has. n_head: also one for each layer; n_head_dim_v None: as K."""
        self.keys(
            context_length=N_CTX,
            embedding_length=n_embd,
            block_count=n_layer,
            feed_forward_length=n_ff,
            vocab_size=N_VOCAB,
            attention__head_count=n_head,
            attention__head_count_kv=n_head_kv,
            attention__key_length=n_head_dim,
            attention__value_length=n_head_dim_v or n_head_dim,
            attention__layer_norm_rms_epsilon=EPS,
            rope__freq_base=rope,
        )
        self._file.add_string("tokenizer.ggml.model", "none")

    def tensor(self, name: str, value: npt.NDArray[Any]) -> None:
        """A tensor as it is."""
        self._file.add_tensor(name, value)

    def random(self, name: str, *shape: int, scale: float | None = None) -> None:
        """A normal tensor, F16 if it is a matrix but no bias; scale None: rows keep the size of what they multiply."""
        values = self._normal(*shape) * (shape[0] ** -0.5 if scale is None else scale)
        f16 = len(shape) > 1 and shape[0] >= 32 and not name.endswith(".bias")
        self.tensor(name, values.astype(np.float16 if f16 else np.float32))

    def norm(self, name: str, n: int, scale: float = 1.0) -> None:
        """The weights of a norm, around scale."""
        self.tensor(name, (scale * (1 + 0.1 * self._normal(n))).astype(np.float32))

    def decay(self, name: str, n: int) -> None:
        """Negative numbers near zero: a state that fades slowly."""
        self.tensor(name, (-0.01 - 0.05 * np.abs(self._normal(n))).astype(np.float32))

    def head(self, n_embd: int, embd_scale: float = 1.0) -> None:
        """Embeddings and output."""
        self.random("token_embd.weight", n_embd, N_VOCAB, scale=embd_scale)
        self.norm("output_norm.weight", n_embd)
        self.random("output.weight", n_embd, N_VOCAB)

    def ffn(self, blk: str, n_embd: int, n_ff: int) -> None:
        """A gated feed-forward network."""
        self.random(blk + "ffn_gate.weight", n_embd, n_ff)
        self.random(blk + "ffn_up.weight", n_embd, n_ff)
        self.random(blk + "ffn_down.weight", n_ff, n_embd)

    def attention(
        self, blk: str, n_embd: int, n_head: int, n_head_kv: int, n_head_dim: int, *, q_norm: float, gate: bool = False
    ) -> None:
        """Grouped-query attention with QK norm; q_norm sets how sharp it is. gate: Q carries an output gate."""
        self.random(blk + "attn_q.weight", n_embd, n_head * n_head_dim * (2 if gate else 1))
        self.random(blk + "attn_k.weight", n_embd, n_head_kv * n_head_dim)
        self.random(blk + "attn_v.weight", n_embd, n_head_kv * n_head_dim)
        self.random(blk + "attn_output.weight", n_head * n_head_dim, n_embd)
        self.norm(blk + "attn_q_norm.weight", n_head_dim, q_norm)
        self.norm(blk + "attn_k_norm.weight", n_head_dim)

    def delta_net(
        self, blk: str, n_embd: int, n_state: int, n_group: int, n_value: int, *, fused: bool = False
    ) -> None:
        """A gated delta net: its state size, key heads and value heads. fused: alpha and beta are one matrix."""
        n_mixed = n_state * (2 * n_group + n_value)
        self.random(blk + "attn_qkv.weight", n_embd, n_mixed)
        self.random(blk + "attn_gate.weight", n_embd, n_state * n_value)
        self.random(blk + "ssm_conv1d.weight", 4, n_mixed, scale=0.5)
        self.random(blk + "ssm_dt.bias", n_value, scale=0.5)
        self.decay(blk + "ssm_a", n_value)
        if fused:
            self.random(blk + "ssm_ba.weight", n_embd, 2 * n_value)
        else:
            self.random(blk + "ssm_beta.weight", n_embd, n_value)
            self.random(blk + "ssm_alpha.weight", n_embd, n_value)
        self.norm(blk + "ssm_norm.weight", n_state)
        self.random(blk + "ssm_out.weight", n_state * n_value, n_embd)

    def close(self) -> None:
        """Write the file."""
        self._file.write_header_to_file()
        self._file.write_kv_data_to_file()
        self._file.write_tensors_to_file()
        self._file.close()

    def _normal(self, *shape: int) -> npt.NDArray[np.float64]:
        return self._rng.standard_normal(shape[::-1])


def qwen3(
    w: Writer,
    *,
    n_embd: int = 256,
    n_ff: int = 512,
    n_layer: int = 3,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_head_dim: int = 64,
) -> None:
    """Dense: llama_kv_cache. The benchmarks ask for larger ones."""
    w.geometry(
        n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=n_head_kv, n_head_dim=n_head_dim, rope=1e6
    )
    w.head(n_embd)
    for i in range(n_layer):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", n_embd)
        w.attention(blk, n_embd, n_head, n_head_kv, n_head_dim, q_norm=2.0)
        w.norm(blk + "ffn_norm.weight", n_embd)
        w.ffn(blk, n_embd, n_ff)


def qwen35(w: Writer, n_mtp: int = 0) -> None:
    """Gated delta net and attention in turn: llama_memory_hybrid. n_mtp: heads that predict further tokens."""
    n_embd, n_ff, n_layer, n_head, n_head_kv, n_head_dim = 256, 512, 4, 4, 2, 64
    n_state, n_group, n_value = 64, 2, 4  # of the delta net: state size, key heads, value heads
    w.geometry(
        n_layer=n_layer + n_mtp,
        n_embd=n_embd,
        n_ff=n_ff,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_head_dim=n_head_dim,
        rope=1e6,
    )
    w.keys(
        rope__dimension_sections=[8, 4, 4, 0],
        rope__dimension_count=32,
        ssm__conv_kernel=4,
        ssm__inner_size=n_state * n_value,
        ssm__state_size=n_state,
        ssm__time_step_rank=n_value,
        ssm__group_count=n_group,
        full_attention_interval=2,
    )
    w.head(n_embd)
    for i in range(n_layer):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", n_embd)
        w.norm(blk + "post_attention_norm.weight", n_embd)
        if i % 2:
            w.attention(blk, n_embd, n_head, n_head_kv, n_head_dim, q_norm=2.0, gate=True)
        else:
            w.delta_net(blk, n_embd, n_state, n_group, n_value)
        w.ffn(blk, n_embd, n_ff)
    if not n_mtp:
        return
    w.keys(nextn_predict_layers=n_mtp)
    for i in range(n_layer, n_layer + n_mtp):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", n_embd)
        w.norm(blk + "post_attention_norm.weight", n_embd)
        w.attention(blk, n_embd, n_head, n_head_kv, n_head_dim, q_norm=2.0, gate=True)
        w.ffn(blk, n_embd, n_ff)
        w.random(blk + "nextn.eh_proj.weight", 2 * n_embd, n_embd)
        w.norm(blk + "nextn.enorm.weight", n_embd)
        w.norm(blk + "nextn.hnorm.weight", n_embd)


GEMMA4_SWA = 512


def gemma4(w: Writer) -> None:
    """Sliding window and full attention in turn, the last two layers reusing KV: llama_kv_cache_iswa."""
    n_embd, n_ff, n_layer, n_head, n_head_kv, n_head_dim, n_head_dim_swa = 256, 512, 6, 4, 2, 128, 64
    w.geometry(
        n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=n_head_kv, n_head_dim=n_head_dim, rope=1e6
    )
    w.keys(
        attention__sliding_window=GEMMA4_SWA,
        attention__sliding_window_pattern=[i % 2 == 0 for i in range(n_layer)],
        attention__shared_kv_layers=2,
        attention__key_length_swa=n_head_dim_swa,
        attention__value_length_swa=n_head_dim_swa,
        rope__freq_base_swa=1e4,
        rope__dimension_count=n_head_dim,
        rope__dimension_count_swa=n_head_dim_swa,
        embedding_length_per_layer_input=0,
        final_logit_softcapping=30.0,
    )
    w.head(n_embd, embd_scale=0.1)
    w.tensor("rope_freqs.weight", np.ones(n_head_dim // 2, np.float32))
    for i in range(n_layer):
        blk = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            w.norm(f"{blk}{name}.weight", n_embd)
        w.attention(blk, n_embd, n_head, n_head_kv, n_head_dim if i % 2 else n_head_dim_swa, q_norm=0.2)
        w.ffn(blk, n_embd, n_ff)


def mamba(w: Writer) -> None:
    """Nothing but a recurrent state: llama_memory_recurrent, which has no cache to pool."""
    n_embd, n_inner, n_state, n_rank, n_layer = 64, 128, 16, 4, 2
    w.geometry(n_layer=n_layer, n_embd=n_embd, n_ff=0, n_head=1, n_head_kv=0, n_head_dim=64, rope=1e4)
    w.keys(ssm__conv_kernel=4, ssm__inner_size=n_inner, ssm__state_size=n_state, ssm__time_step_rank=n_rank)
    w.head(n_embd)
    for i in range(n_layer):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", n_embd)
        w.random(blk + "ssm_in.weight", n_embd, 2 * n_inner)
        w.random(blk + "ssm_conv1d.weight", 4, n_inner)
        w.random(blk + "ssm_conv1d.bias", n_inner)
        w.random(blk + "ssm_x.weight", n_inner, n_rank + 2 * n_state)
        w.random(blk + "ssm_dt.weight", n_rank, n_inner)
        w.random(blk + "ssm_dt.bias", n_inner)
        w.tensor(blk + "ssm_a", np.full((n_inner, n_state), -1, np.float32))
        w.norm(blk + "ssm_d", n_inner)
        w.random(blk + "ssm_out.weight", n_inner, n_embd)


def deepseek32(w: Writer) -> None:
    """Latent attention on the tokens that an indexer picks: llama_kv_cache_dsa, two caches in step."""
    n_embd, n_ff, n_layer, n_head, n_nope, n_rope, n_value = 64, 64, 2, 2, 32, 32, 32
    n_lora_q, n_lora_kv, n_indexer_head, n_indexer_dim = 32, 64, 2, 64
    w.geometry(
        n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=1, n_head_dim=n_lora_kv + n_rope, rope=1e4
    )
    w.keys(
        leading_dense_block_count=n_layer,
        expert_feed_forward_length=n_ff,
        expert_shared_count=1,
        expert_gating_func=2,
        attention__q_lora_rank=n_lora_q,
        attention__kv_lora_rank=n_lora_kv,
        attention__key_length_mla=n_nope + n_rope,
        attention__value_length_mla=n_value,
        attention__indexer__head_count=n_indexer_head,
        attention__indexer__key_length=n_indexer_dim,
        attention__indexer__top_k=32,
        rope__dimension_count=n_rope,
    )
    w.head(n_embd)
    for i in range(n_layer):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", n_embd)
        w.norm(blk + "attn_q_a_norm.weight", n_lora_q)
        w.norm(blk + "attn_kv_a_norm.weight", n_lora_kv)
        w.random(blk + "attn_q_a.weight", n_embd, n_lora_q)
        w.random(blk + "attn_q_b.weight", n_lora_q, n_head * (n_nope + n_rope))
        w.random(blk + "attn_kv_a_mqa.weight", n_embd, n_lora_kv + n_rope)
        w.random(blk + "attn_k_b.weight", n_nope, n_lora_kv, n_head)
        w.random(blk + "attn_v_b.weight", n_lora_kv, n_value, n_head)
        w.random(blk + "attn_output.weight", n_head * n_value, n_embd)
        w.norm(blk + "indexer.k_norm.weight", n_indexer_dim)
        w.random(blk + "indexer.k_norm.bias", n_indexer_dim)
        w.random(blk + "indexer.proj.weight", n_embd, n_indexer_head)
        w.random(blk + "indexer.attn_k.weight", n_embd, n_indexer_dim)
        w.random(blk + "indexer.attn_q_b.weight", n_lora_q, n_indexer_head * n_indexer_dim)
        w.norm(blk + "ffn_norm.weight", n_embd)
        w.ffn(blk, n_embd, n_ff)


def qwen4exp(w: Writer) -> None:
    """Delta net, and attention on the tokens that an indexer picks: llama_memory_hybrid_idx, a kind of hybrid."""
    n_embd, n_ff, n_layer, n_head, n_head_dim, n_expert, n_indexer_head, n_indexer_dim = 64, 64, 2, 2, 64, 2, 2, 64
    n_state, n_group, n_value, n_hyper, n_rank = 64, 1, 1, 2, 32
    w.geometry(n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=1, n_head_dim=n_head_dim, rope=1e6)
    w.keys(
        rope__dimension_sections=[8, 4, 4, 0],
        rope__dimension_count=32,
        ssm__conv_kernel=4,
        ssm__inner_size=n_state * n_value,
        ssm__state_size=n_state,
        ssm__time_step_rank=n_value,
        ssm__group_count=n_group,
        full_attention_interval=2,
        hyper_connection__count=n_hyper,
        hyper_connection__low_rank=n_rank,
        attention__indexer__head_count=n_indexer_head,
        attention__indexer__key_length=n_indexer_dim,
        attention__indexer__top_k=32,
        expert_count=n_expert,
        expert_used_count=1,
        expert_feed_forward_length=n_ff,
        expert_shared_feed_forward_length=n_ff,
    )
    w.random("token_embd.weight", n_embd, N_VOCAB, scale=1.0)
    w.random("output.weight", n_embd, N_VOCAB)
    w.norm("output_hc_norm.weight", n_embd * n_hyper)
    w.random("output_hc_down.weight", n_embd * n_hyper, n_rank)
    w.random("output_hc_up.weight", n_rank, n_embd * n_hyper)
    for i in range(n_layer):
        blk = f"blk.{i}."
        for name in ("hc_attn", "hc_ffn"):
            w.norm(f"{blk}{name}_norm.weight", n_embd * n_hyper)
            w.random(f"{blk}{name}_down.weight", n_embd * n_hyper, n_rank)
            w.random(f"{blk}{name}_up.weight", n_rank, n_embd * n_hyper)
            w.random(f"{blk}{name}_inject.weight", n_embd * n_hyper, n_hyper)
        if i % 2:
            w.attention(blk, n_embd, n_head, 1, n_head_dim, q_norm=1.0, gate=True)
            w.random(blk + "indexer.q_proj.weight", n_embd, n_indexer_head * n_indexer_dim)
            w.random(blk + "indexer.k_proj.weight", n_embd, n_indexer_dim)
            w.norm(blk + "indexer.q_norm.weight", n_indexer_dim)
            w.norm(blk + "indexer.k_norm.weight", n_indexer_dim)
        else:
            w.delta_net(blk, n_embd, n_state, n_group, n_value)
        w.random(blk + "ffn_gate_inp.weight", n_embd, n_expert)
        w.random(blk + "ffn_gate_inp_shexp.weight", n_embd)
        for name, n_in, n_out in (("gate", n_embd, n_ff), ("up", n_embd, n_ff), ("down", n_ff, n_embd)):
            w.random(f"{blk}ffn_{name}_exps.weight", n_in, n_out, n_expert)
            w.random(f"{blk}ffn_{name}_shexp.weight", n_in, n_out)


def unheard_of(w: Writer) -> None:
    """An architecture that llama.cpp does not know."""
    w.geometry(n_layer=1, n_embd=64, n_ff=64, n_head=1, n_head_kv=1, n_head_dim=64, rope=1e4)
    w.head(64)


MODELS: dict[str, Callable[[Writer], None]] = {
    "qwen3": qwen3,
    "qwen35": qwen35,
    "gemma4": gemma4,
    "mamba": mamba,
    "deepseek32": deepseek32,
    "qwen4exp": qwen4exp,
    "unheard-of": unheard_of,
    **families.MODELS,
}
"""The models by their name, which is their architecture but for those in families.ARCHS."""


def write(name: str, path: Path) -> None:
    """Write a model to a file."""
    writer = Writer(path, families.ARCHS.get(name, name))
    MODELS[name](writer)
    writer.close()


#
# with a vocabulary, and what drafts for them
#


def written(w: Writer, name: str) -> npt.NDArray[Any]:
    """A tensor that a file will have: what is done to it is done to the file."""
    (res,) = [part[name].tensor for part in w._file.tensors if name in part]
    assert res is not None
    return res


def worded(w: Writer) -> None:
    """A vocabulary of the 256 bytes and pairs of letters, for a model that is written but for it. The last token ends a
    text, and is never likely; the one before is the mask of a drafter.
    """
    file = w._file
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(c) for c in shown] + [chr(256 + i) for i in range(256 - len(shown))]
    tokens = [*tokens, *(a + b for a in "etaoinshrdlu" for b in "abcdefghijklmnopqrstuvwxyz")][: N_VOCAB - 2]
    del file.kv_data[0]["tokenizer.ggml.model"]  # none
    file.add_string("tokenizer.ggml.model", "gpt2")
    file.add_string("tokenizer.ggml.pre", "qwen2")
    file.add_token_list([*tokens, "[MASK]", "[END]"])
    file.add_token_types([1] * len(tokens) + [3, 3])
    file.add_token_merges([f"{t[0]} {t[1]}" for t in tokens[256:]])
    file.add_mask_token_id(N_VOCAB - 2)
    file.add_eos_token_id(N_VOCAB - 1)
    if any("output.weight" in part for part in file.tensors):
        written(w, "output.weight")[-1] = 0


def write_worded(path: Path, arch: str, model: Callable[[Writer], None]) -> None:
    """Write a model with a vocabulary to a file."""
    writer = Writer(path, arch)
    model(writer)
    worded(writer)
    writer.close()


def dflash(w: Writer, *, n_embd: int = 256, layers: Sequence[int] = (1, 2), n_layer: int = 1, block: int = 16) -> None:
    """A DFlash drafter that reads these layers of its target. It shares the target's embeddings and output."""
    n_ff, n_head, n_head_kv, n_head_dim = 128, 2, 1, 64
    w.geometry(
        n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=n_head_kv, n_head_dim=n_head_dim, rope=1e6
    )
    w.keys(block_size=block, target_layers=list(layers))
    w.random("fc.weight", len(layers) * n_embd, n_embd)
    w.norm("enc.output_norm.weight", n_embd)
    w.norm("output_norm.weight", n_embd)
    for i in range(n_layer):
        blk = f"blk.{i}."
        w.norm(blk + "attn_norm.weight", n_embd)
        w.attention(blk, n_embd, n_head, n_head_kv, n_head_dim, q_norm=2.0)
        w.norm(blk + "ffn_norm.weight", n_embd)
        w.ffn(blk, n_embd, n_ff)
