"""The tiny models up to their first attention layer, in numpy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from support import tiny

Array = npt.NDArray[np.float64]


def rms_norm(x: Array, weight: Array | float = 1.0) -> Array:
    """RMS norm over the last dimension."""
    return np.asarray(x / np.sqrt(np.mean(x**2, -1, keepdims=True) + tiny.EPS) * weight)


def rope(x: Array, pos: int, base: float, n_rot: int) -> Array:
    """NeoX rotary embedding of the first n_rot channels: i turns with i + n_rot/2."""
    half = n_rot // 2
    turn = np.exp(1j * pos * base ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:n_rot]) * turn
    return np.concatenate([turned.real, turned.imag, x[..., n_rot:]], -1)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Array) -> Array:
    """The tanh approximation."""
    return np.asarray(x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def hadamard(n: int) -> Array:
    """The orthogonal matrix with which llama.cpp turns Q and K of a quantised cache."""
    res = np.ones((1, 1))
    while len(res) < n:
        res = np.block([[res, res], [res, -res]])
    return np.asarray(res / np.sqrt(n))


class Reference:
    """Up to the first attention layer, in numpy, from the tensors of the file."""

    def __init__(self, path: Path) -> None:
        self.tensors = {t.name: np.asarray(t.data, np.float64) for t in gguf.GGUFReader(path).tensors}

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name + ".weight"]

    def ffn(self, blk: str, h: Array, act: Callable[[Array], Array] = silu) -> Array:
        """A gated feed-forward network."""
        return self[blk + "ffn_down"] @ (act(self[blk + "ffn_gate"] @ h) * (self[blk + "ffn_up"] @ h))

    def heads(self, blk: str, which: str, h: Array, n_dim: int) -> Array:
        """Normalised Q or K, before RoPE."""
        return rms_norm((self[f"{blk}attn_{which}"] @ h).reshape(-1, n_dim), self[f"{blk}attn_{which}_norm"])

    def qwen3(self, token: int, pos: int, which: str = "q") -> Array:
        """Q or K of layer 0, which depends on the token and its position alone."""
        h = rms_norm(self["token_embd"][token], self["blk.0.attn_norm"])
        return rope(self.heads("blk.0.", which, h, 64), pos, 1e6, 64)

    def qwen35(self, token: int, pos: int) -> Array:
        """Q of layer 1 for a token that is alone: the delta net of layer 0 starts from nothing."""
        x, n_group, n_value, n_state = self["token_embd"][token], 2, 4, 64
        h = rms_norm(x, self["blk.0.attn_norm"])
        mixed = silu((self["blk.0.attn_qkv"] @ h) * self["blk.0.ssm_conv1d"][:, -1])
        q, k, v = np.split(mixed.reshape(-1, n_state), [n_group, 2 * n_group])
        q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
        qk = np.tile(np.sum(q * k, -1), n_value // n_group) * n_state**-0.5
        beta = 1 / (1 + np.exp(-(self["blk.0.ssm_beta"] @ h)))
        out = rms_norm((qk * beta)[:, None] * v, self["blk.0.ssm_norm"])
        out *= silu(self["blk.0.attn_gate"] @ h).reshape(out.shape)
        x = x + self["blk.0.ssm_out"] @ out.ravel()
        x = x + self.ffn("blk.0.", rms_norm(x, self["blk.0.post_attention_norm"]))
        h = rms_norm(x, self["blk.1.attn_norm"])
        q = (self["blk.1.attn_q"] @ h).reshape(-1, 2, 64)[:, 0]  # the other half is the gate
        return rope(rms_norm(q, self["blk.1.attn_q_norm"]), pos, 1e6, 32)

    def gemma4(self, token: int, pos: int) -> Array:
        """Q of layer 1 for a token that is alone: the attention of layer 0 returns its V."""
        x = self["token_embd"][token] * np.sqrt(256)
        h = rms_norm(x, self["blk.0.attn_norm"])
        v = np.repeat(rms_norm((self["blk.0.attn_v"] @ h).reshape(2, 64)), 2, axis=0)
        x = x + rms_norm(self["blk.0.attn_output"] @ v.ravel(), self["blk.0.post_attention_norm"])
        h = rms_norm(x, self["blk.0.ffn_norm"])
        x = x + rms_norm(self.ffn("blk.0.", h, gelu), self["blk.0.post_ffw_norm"])
        h = rms_norm(x, self["blk.1.attn_norm"])
        return rope(self.heads("blk.1.", "q", h, 128), pos, 1e6, 128)


def error(got: npt.NDArray[Any], want: Array) -> float:
    """RMS of the difference, relative to the reference's."""
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
