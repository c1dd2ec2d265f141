"""RoPE for contexts longer than a model's training. Names are llama.cpp's."""

import hashlib
from dataclasses import astuple, dataclass
from typing import Any

from pyllama_kvflash.errors import UsageError, check_choice, check_range
from pyllama_kvflash.native.lib import lib

SCALINGS = ("", "none", "linear", "yarn")
_MOST = 1 << 20  # largest scale or factor: no model has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """RoPE settings: how positions rotate keys and queries. Defaults are the model's.

    "linear" divides positions by the scale (Chen et al. 2023, https://arxiv.org/abs/2306.15595); "yarn" does so only for dimensions
    that rotate slowly, and sharpens attention (Peng et al. 2023, https://arxiv.org/abs/2309.00071).
    """

    scaling: str = ""  # "none", "linear" or "yarn"; "": the model's, linear if it has none
    scale: float = 0.0  # context length as a multiple of the trained one; 0: the model's
    freq_base: float = 0.0  # the base of the frequencies; 0: the model's
    orig_ctx: int = 0  # YaRN: tokens of the trained context; 0: from the model's file
    ext_factor: float = -1.0  # YaRN: the share of extrapolation, 0 is interpolation alone; -1: the model's, or 1
    attn_factor: float = -1.0  # YaRN: the scale of attention; -1: the model's, or 1
    beta_slow: float = -1.0  # YaRN: dimensions with fewer rotations are interpolated; -1: the model's, or 1
    beta_fast: float = -1.0  # YaRN: dimensions with more rotations are not interpolated; -1: the model's, or 32

    def __post_init__(self) -> None:
        """Check every value. Raises UsageError."""
        check_choice(self.scaling, SCALINGS, "rope.scaling")
        if self.scale:
            check_range(self.scale, 1, _MOST, "rope.scale", "4 makes the context four times as long")
        if self.scaling in ("linear", "yarn") and not self.scale:
            msg = f"`rope.scaling` is {self.scaling!r}, and there is no scale: give `rope.scale`, such as 4 for four times the context of training"
            raise UsageError(msg)
        if self.scaling == "none" and self.scale > 1:
            msg = "`rope.scaling` is 'none', so `rope.scale` does nothing: leave one of the two out"
            raise UsageError(msg)
        if self.freq_base:
            check_range(self.freq_base, 2, 1e12, "rope.freq_base", "10,000 is usual, 0 is the model's")
        check_range(self.orig_ctx, 0, 1 << 30, "rope.orig_ctx", "0 is the model's")
        for name in ("ext_factor", "attn_factor", "beta_slow", "beta_fast"):
            value = getattr(self, name)
            if value != -1:
                check_range(value, 0, _MOST, f"rope.{name}", "-1 is the model's")
                if self.scaling in ("none", "linear"):
                    msg = f"`rope.{name}` applies only to YaRN, and `rope.scaling` is {self.scaling!r}: give yarn, or leave `rope.{name}` out"
                    raise UsageError(msg)

    def apply(self, params: Any) -> None:
        """Write the settings to a llama_context_params."""
        if self.scaling:
            params.rope_scaling_type = getattr(lib, f"LLAMA_ROPE_SCALING_TYPE_{self.scaling.upper()}")
        params.rope_freq_base = self.freq_base
        params.rope_freq_scale = 1 / self.scale if self.scale else 0.0
        params.yarn_orig_ctx = self.orig_ctx
        for name in ("ext_factor", "attn_factor", "beta_slow", "beta_fast"):
            setattr(params, f"yarn_{name}", getattr(self, name))

    def reach(self, n_ctx_train: int) -> int:
        """Return the context length that these settings are meant for. n_ctx_train: the model's trained context."""
        return round((self.orig_ctx or n_ctx_train) * self.scale) if self.scale > 1 else n_ctx_train

    def mark(self, fingerprint: int) -> int:
        """Return a model's fingerprint (64 bits), combined with these settings if they change the model's keys."""
        if self == Rope():
            return fingerprint
        own = fingerprint.to_bytes(8, "little") + repr(astuple(self)).encode()
        return int.from_bytes(hashlib.blake2b(own, digest_size=8).digest(), "little")
