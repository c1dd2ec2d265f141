"""The rope.* keys of a drafter, from config.json. A DFlash drafter has one rope, for windowed and full attention."""

from typing import Any

from pyllama_kvflash.convert.config import Config
from pyllama_kvflash.errors import ModelError, UnsupportedError, number

_PARAMETERS = ("rope_parameters", "rope_scaling")  # in transformers 5, and before
_WHERE = (*(f"{p}.full_attention" for p in _PARAMETERS), *_PARAMETERS)
"""Where parameters may be, the more specific places first: those for full attention, then those for all layers."""
_N_SECTIONS = 4  # time, height, width, extra
_NOT_ROTATED = 1e30  # as a divisor, it makes a frequency practically 0

Keys = dict[str, Any]


def rope_keys(config: Config, head_dim: int, *, gemma: bool) -> tuple[Keys, list[float]]:
    """Return the keys, and the divisors of the frequencies: either head_dim / 2 of them or none. Raises ModelError and UnsupportedError."""
    theta = config.positive(*(f"{p}.rope_theta" for p in _WHERE), "rope_theta")
    _check_one_rope(config, theta)
    kind = config.maybe_text(*(f"{p}.{name}" for p in _WHERE for name in ("rope_type", "type"))) or "default"
    partial = config.maybe_number(*(f"{p}.partial_rotary_factor" for p in _WHERE), "partial_rotary_factor")
    if partial is not None and not 0 < partial <= 1:
        msg = f"{config.path}: partial_rotary_factor is {partial}, and must be above 0 and at most 1"
        raise ModelError(msg)
    keys: Keys = {"rope.freq_base": theta}
    if gemma:
        keys["rope.dimension_count"] = head_dim
        return keys, _proportional(config, head_dim, kind, partial)
    if partial is not None:
        keys["rope.dimension_count"] = _n_rot(config, head_dim, partial)
    return keys | _scaling(config, kind), []


def rope_sections(config: Config, head_dim: int, *, mrope: bool) -> Keys:
    """Return the key of M-RoPE's sections; {} without M-RoPE. If the target uses M-RoPE, the drafter puts all pairs into the first section, time."""
    if mrope:
        return {"rope.dimension_sections": [head_dim // 2, 0, 0, 0]}
    names = [f"{p}.mrope_section" for p in _PARAMETERS]
    if not config.find(*names):
        return {}
    sections = config.sizes(*names).value
    return {"rope.dimension_sections": (sections + [0] * _N_SECTIONS)[:_N_SECTIONS]}


def _check_one_rope(config: Config, theta: float) -> None:
    local = config.maybe_number(*(f"{p}.sliding_attention.rope_theta" for p in _PARAMETERS))
    if local is not None and local != theta:
        msg = f"{config.path}: sliding_attention has rope_theta = {number(local)}, full_attention {number(theta)}"
        raise UnsupportedError(f"{msg}, and a DFlash drafter has one for both in llama.cpp")


def _scaling(config: Config, kind: str) -> Keys:
    """Return the keys of a scaled rope: linear, or YaRN (Peng et al. 2023)."""
    if kind == "default":
        return {}
    if kind not in ("linear", "yarn"):
        msg = f"{config.path}: rope_type is {kind}, and llama.cpp's DFlash computes default, linear and yarn"
        raise UnsupportedError(msg)
    keys: Keys = {"rope.scaling.type": kind, "rope.scaling.factor": config.positive(*(f"{p}.factor" for p in _WHERE))}
    if kind == "linear":
        return keys
    original = [f"{p}.original_max_position_embeddings" for p in _WHERE]
    keys["rope.scaling.original_context_length"] = config.size(*original, "original_max_position_embeddings").value
    optional = {
        "yarn_ext_factor": ("extrapolation_factor",),
        "yarn_attn_factor": ("attention_factor", "attn_factor"),
        "yarn_beta_fast": ("beta_fast",),
        "yarn_beta_slow": ("beta_slow",),
    }
    for key, names in optional.items():
        value = config.maybe_number(*(f"{p}.{name}" for name in names for p in _WHERE))
        if value is not None:
            keys[f"rope.scaling.{key}"] = value
    return keys


def _proportional(config: Config, head_dim: int, kind: str, partial: float | None) -> list[float]:
    """Return the divisors of Gemma 4's rope, (head_dim / 2,) or []: the first pairs are rotated, the others are not."""
    if kind == "default" and partial in (None, 1):
        return []
    if kind != "proportional" or partial is None:
        what = f"rope_type is {kind}" if partial is not None else "partial_rotary_factor is missing"
        msg = f"{config.path}: {what}, and a Gemma 4 drafter rotates proportionally: give rope_type proportional and a partial_rotary_factor"
        raise UnsupportedError(msg)
    n = _n_rot(config, head_dim, partial) // 2
    return [1.0] * n + [_NOT_ROTATED] * (head_dim // 2 - n)


def _n_rot(config: Config, head_dim: int, partial: float) -> int:
    """Return how many elements of a head are rotated, rounded down as in transformers. Raises ModelError for 0 or an odd number."""
    n = int(head_dim * partial)
    if not n or n % 2:
        msg = f"{config.path}: partial_rotary_factor = {partial} of a head of {head_dim} is {n}, and must be a positive even number"
        raise ModelError(msg)
    return n
