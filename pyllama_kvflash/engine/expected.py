"""What was measured of caches, for `kvflash plan`: speeds and answers of a real run each. tests/test_plan.py compares them with the
tables of docs/results.
"""

import numpy as np

CONTEXTS = (8192, 32_768, 65_536, 131_072, 262_144)
DECODE = {
    "f16": (277.2, 199.2, 140.9, 86.8, 47.6),
    "q8_0": (221.0, 125.2, 78.9, 45.9, 24.9),
    "pool": (218.0, 211.1, 201.2, 190.1, 184.3),
}
"""Tokens a second of answers at CONTEXTS: the full cache in f16 and in q8_0, and a pool of 4,096 in q8_0 with policy fresh. 8B shape, one H200
(docs/results/choices.md).
"""
OTHER_CONTEXTS = (32_768, 131_072)
OTHER_DECODE = {"f16": (183.4, 80.3), "q4_0": (122.8, 45.6), "RAM": (3.44, 0.79)}
"""The same of a run on one H100: the full cache in f16, in q4_0, and in q8_0 in RAM (--no-kv-offload)."""
LOSSLESS = (0.26, 0.93)
"""The least and the most of lossless decoding, times the full cache's, on GPUs (docs/results/fresh-lossless.md)."""
SHARES = (0.0625, 0.125, 0.281)
KLD = {
    "f16": {"prose": (0.0330, 0.0117, 0.0034), "code": (0.0133, 0.0049, 0.0012)},
    "q8_0": {"prose": (0.0343, 0.0134, 0.0055), "code": (0.0129, 0.0051, 0.0016)},
}
"""Mean KL divergence from the full f16 cache, in nats, through pools of SHARES of the context, by cache type:
Qwen2.5-Coder-1.5B at 16K (docs/results/fresh.md).
"""
FULL_KLD = {
    "f16": {"prose": 0.0, "code": 0.0},
    "q8_0": {"prose": 0.0027, "code": 0.0006},
    "q4_0": {"prose": 6.7, "code": 10.9},
}
"""The same of full caches."""


def speed(kind: str, n_ctx: int) -> float:
    """Return how many times as fast answers are as with the full f16 cache on the same GPU, at the end of a context.

    kind: "f16", "q8_0", "q4_0", "RAM" or "pool". Between measured contexts it is interpolated; beyond them it is the nearest.
    """
    contexts, rates = (CONTEXTS, DECODE) if kind in DECODE else (OTHER_CONTEXTS, OTHER_DECODE)
    ratios = [rate / full for rate, full in zip(rates[kind], rates["f16"], strict=True)]
    return float(np.interp(np.log2(max(1, n_ctx)), np.log2(contexts), ratios))


def divergence(share: float, type_k: str = "f16") -> dict[str, float] | None:
    """Return the mean KL divergence of long answers by the pool's share of the context, for prose and code; None below what was
    measured. Above, it is that of the largest measured share. type_k: "f16" or "q8_0".
    """
    if share < SHARES[0]:
        return None
    at = np.log(np.clip(share, SHARES[0], SHARES[-1]))
    return {text: float(np.exp(np.interp(at, np.log(SHARES), np.log(known)))) for text, known in KLD[type_k].items()}
