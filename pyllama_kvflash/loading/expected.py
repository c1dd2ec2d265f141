"""Measurements of caches, for `kvflash plan`: speed and divergence, each from a real run. tests/test_plan.py compares them with the
tables of docs/results.
"""

from collections.abc import Sequence

import numpy as np

FULL_CONTEXTS = (8192, 32_768, 65_536, 131_072, 262_144)
FULL_DECODE = {
    "f16": (277.2, 199.2, 140.9, 86.8, 47.6),
    "q8_0": (221.0, 125.2, 78.9, 45.9, 24.9),
}
"""Decoded tokens per second at FULL_CONTEXTS: the full cache in f16 and in q8_0. 8B shape, one H200 (docs/results/choices.md)."""
OTHER_CONTEXTS = (32_768, 131_072)
OTHER_DECODE = {"f16": (183.4, 80.3), "q4_0": (122.8, 45.6), "RAM": (3.44, 0.79)}
"""The same on one H100: the full cache in f16, in q4_0, and in q8_0 in RAM (--no-kv-offload)."""
CODED_CONTEXTS = (8192, 65_536, 131_072)
CODED_DECODE = {"f16": (273, 136, 85), "4": (222, 186, 157), "2": (218, 194, 170)}
"""The same on one H200: the full cache in f16, and a pool of 4,096 in q8_0 by the bits of its codes (docs/results/coarse.md)."""
UNCODED_CONTEXTS = (8192, 65_536, 262_144)
UNCODED_DECODE = {"q8_0": (220.4, 80.2, 24.9), "pool": (254.7, 254.3, 250.9)}
"""The same on one H200: the full cache in q8_0, and a pool of 4,096 in q8_0 without codes, policy `qk` (docs/RESULTS.md)."""
HYBRID_CONTEXTS = (8192, 65_536, 131_072, 262_144)
HYBRID_DECODE = {
    "f16": (104.6, 91.1, 82.0, 65.3),
    "q8_0": (95.1, 67.1, 50.7, 33.2),
    "q4_0": (97.5, 58.8, 42.2, 27.3),
    "4": (93.7, 89.1, 88.5, 79.6),
}
"""The same for a 27B with 48 delta nets and 16 attention layers: full caches, and a pool of 4,096 in f16 with codes of 4 bits. One
H200, one run (docs/results/cuda.md).
"""
HYBRID_FAR_CONTEXTS = (8192, 131_072)
HYBRID_FAR_DECODE = {"f16": (102.3, 80.8), "2": (94.5, 89.1)}
"""The same in another run: the full cache in f16, and a pool of 4,096 in q8_0 with codes of 2 bits."""
HYBRID_RAM_DECODE = 7.1
"""The same at 8K, with the cache in RAM (--no-kv-offload). Longer contexts are slower."""
CPU_CONTEXTS = (4096, 8192, 16_384)
CPU_DECODE = {"f16": (10.8, 6.9, 3.9), "pool": (10.5, 10.1, 9.3)}
"""The same without a GPU: the full cache in f16, and a pool of 4,096 in f16 with codes of 4 bits. Qwen2.5-Coder-0.5B, two cores, one run
(docs/results/cpu.md).
"""
RAM_RATE = 50e9
"""Bytes per second that a CPU reads from two channels of DDR4-3200: the upper bound for weights in RAM. Not measured."""
LOSSLESS = (0.46, 0.94)
"""The lowest and highest speed of lossless decoding on GPUs, relative to the full f16 cache (docs/results/lossless.md)."""
SHARES = (0.0625, 0.125)
KLD = {
    ("4", "f16"): {"prose": (0.0017, 0.0012), "code": (0.00039, 0.00036)},
    ("4", "q8_0"): {"prose": (0.0038, 0.0035), "code": (0.00081, 0.00073)},
    ("2", "f16"): {"prose": (0.0192, 0.0098), "code": (0.0056, 0.0026)},
    ("off", "f16"): {"prose": (0.109, 0.0364), "code": (0.137, 0.0836)},
}
"""Mean KL divergence from the full f16 cache, in nats, with pools of SHARES of the context, by the bits of codes and the cache
type: Qwen2.5-Coder-1.5B at 16K (docs/results/coarse.md; without codes: policy `qk`, docs/RESULTS.md).
"""
BITS = ("4", "2", "off")
"""Codes that were measured on a GPU, the most accurate first."""
FULL_KLD = {
    "f16": {"prose": 0.0, "code": 0.0},
    "q8_0": {"prose": 0.0027, "code": 0.00056},
    "q4_0": {"prose": 6.7, "code": 10.9},
}
"""The same for full caches."""


def speed(kind: str, n_ctx: int, coarse: str = "off") -> float:
    """Return the decode speed at the end of a context, relative to the full f16 cache on the same GPU.

    kind: "f16", "q8_0", "q4_0", "RAM" or "pool". coarse: a pool's codes: "4", "2" or "off". Speeds are interpolated between measured
    contexts; beyond them, the nearest one counts.
    """
    if kind in FULL_DECODE:
        return _ratio(FULL_CONTEXTS, FULL_DECODE[kind], FULL_DECODE["f16"], n_ctx)
    if kind != "pool":
        return _ratio(OTHER_CONTEXTS, OTHER_DECODE[kind], OTHER_DECODE["f16"], n_ctx)
    if coarse != "off":
        return _ratio(CODED_CONTEXTS, CODED_DECODE[coarse], CODED_DECODE["f16"], n_ctx)
    beside_q8_0 = _ratio(UNCODED_CONTEXTS, UNCODED_DECODE["pool"], UNCODED_DECODE["q8_0"], n_ctx)
    return beside_q8_0 * speed("q8_0", n_ctx)


def hybrid_speed(kind: str, n_ctx: int, coarse: str = "off") -> float | None:
    """Return speed() for a model with recurrent states; None if it was not measured."""
    if kind == "RAM":
        return HYBRID_RAM_DECODE / HYBRID_DECODE["f16"][0]
    if kind == "pool" and coarse == "2":
        return _ratio(HYBRID_FAR_CONTEXTS, HYBRID_FAR_DECODE["2"], HYBRID_FAR_DECODE["f16"], n_ctx)
    rates = HYBRID_DECODE.get(coarse if kind == "pool" else kind)
    return None if rates is None else _ratio(HYBRID_CONTEXTS, rates, HYBRID_DECODE["f16"], n_ctx)


def cpu_speed(kind: str, n_ctx: int) -> float | None:
    """Return speed() without a GPU. kind: "f16" or "pool"; other kinds give None, because they were not measured."""
    rates = CPU_DECODE.get(kind)
    return None if rates is None else _ratio(CPU_CONTEXTS, rates, CPU_DECODE["f16"], n_ctx)


def _ratio(contexts: Sequence[int], rates: Sequence[float], full: Sequence[float], n_ctx: int) -> float:
    ratios = [rate / its for rate, its in zip(rates, full, strict=True)]
    return float(np.interp(np.log2(max(1, n_ctx)), np.log2(contexts), ratios))


def divergence(share: float, coarse: str, type_k: str = "f16") -> dict[str, float] | None:
    """Return the mean KL divergence of long answers, in prose and in code; None if it was not measured.

    share: the pool's share of the context. Above the largest measured share, the values of that share are returned; below the smallest,
    None. coarse: "4", "2" or "off". type_k: "f16" or "q8_0".
    """
    if share < SHARES[0] or (coarse, type_k) not in KLD:
        return None
    at, known = np.log(np.clip(share, SHARES[0], SHARES[-1])), KLD[coarse, type_k]
    return {text: float(np.exp(np.interp(at, np.log(SHARES), np.log(each)))) for text, each in known.items()}
