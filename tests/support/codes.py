"""Codes of rows in numpy, from their bytes: what native/src/coarse/codes.h says of them, written a second time."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native import Layer

Floats = npt.NDArray[np.float32]

UNIT, SEGMENT = 16, 4096
STEPS = {4: np.float32(0.3352), 2: np.float32(0.9957)}  # of a standard deviation


def width_of(d: int) -> int:
    return -(-d // 16) * 16


def levels(bits: int) -> Floats:
    """Of each code, in steps."""
    return np.arange(1 << bits, dtype=np.float32) - np.float32(((1 << bits) - 1) / 2)


def blocks_of(d: int) -> list[int]:
    """Powers of two that add up to d, the largest first."""
    return [1 << i for i in range(d.bit_length() - 1, -1, -1) if d >> i & 1]


def signs(d: int) -> Floats:
    with np.errstate(over="ignore"):
        x = (np.arange(d, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.where((x ^ x >> np.uint64(31)) & np.uint64(1), 1, -1).astype(np.float32)


def rotation(d: int) -> Floats:
    """The matrix (d, d) that rotates a row from the left."""
    res, at = np.zeros((d, d), np.float64), 0
    for n in blocks_of(d):
        h = np.ones((1, 1))
        while len(h) < n:
            h = np.block([[h, h], [h, -h]])
        res[at : at + n, at : at + n] = h / np.sqrt(n)
        at += n
    return (res * signs(d)).astype(np.float32)


class Coded(NamedTuple):
    """The codes of rows: what these are divided by (n_head, d), rotated means (n_segment, n_head, width), scales and codes of each
    position (n, n_head[, width]).
    """

    spread: Floats
    means: Floats
    scales: Floats
    codes: npt.NDArray[np.uint8]
    bits: int
    d: int

    def rows(self) -> Floats:
        """The rows that these stand for, (n, n_head, d)."""
        x = levels(self.bits)[self.codes] * self.scales[..., None]
        x += self.means[np.arange(len(x)) // SEGMENT]
        return (x[..., : self.d] @ rotation(self.d)) * self.spread


def encoded(x: Floats, bits: int, *, spreads: bool) -> Coded:
    """The codes of rows (n, n_head, d), all of which are in the first segment and tell its mean."""
    n_head, d = x.shape[1:]
    width, turn = width_of(d), rotation(d)
    deviation = np.sqrt(np.maximum(np.mean(x.astype(np.float64) ** 2, 0) - np.mean(x.astype(np.float64), 0) ** 2, 0))
    spread = (
        np.sqrt(np.maximum(deviation, 0.01 * deviation.max(-1, keepdims=True))) if spreads else np.ones((n_head, d))
    )
    turned = (x / spread) @ turn.T
    mean = (np.mean(x.astype(np.float64), 0) / spread) @ turn.T
    y = turned - mean
    scales = (np.sqrt(np.mean(y**2, -1)) * STEPS[bits]).astype(np.float16).astype(np.float32)
    found = np.clip(np.floor(y / scales[..., None]) + (1 << bits - 1), 0, (1 << bits) - 1)
    pad = [(0, 0), (0, 0), (0, width - d)]
    means = np.pad(mean[None], pad).astype(np.float32)
    return Coded(spread.astype(np.float32), means, scales, np.pad(found, pad).astype(np.uint8), bits, d)


def unpacked(raw: npt.NDArray[np.uint8], layer: Layer, n: int, bits: tuple[int, int]) -> Iterator[Coded]:
    """The codes of keys, and of values if there are any, from the bytes of n positions."""
    n_head = layer.n_head_kv
    forms = [(layer.n_embd_head_k, bits[0])] + [(layer.n_embd_v // n_head, bits[1])] * (layer.n_embd_v > 0)
    means: list[list[bytes]] = [[] for _ in forms]
    scales: list[list[bytes]] = [[] for _ in forms]
    codes: list[list[bytes]] = [[] for _ in forms]
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return raw[at - size : at].tobytes()

    spreads = [np.frombuffer(take(4 * n_head * d), np.float32).reshape(n_head, d) for d, _ in forms]
    for u in range(n // UNIT):
        for i, (d, _) in enumerate(forms):
            if u % (SEGMENT // UNIT) == 0:
                means[i].append(take(4 * n_head * width_of(d)))
        for i, (d, b) in enumerate(forms):
            for _ in range(n_head):
                scales[i].append(take(2 * UNIT))
                codes[i].append(take(width_of(d) * UNIT * b // 8))
    assert at == len(raw), f"{len(raw) - at} bytes too many"
    for i, (d, b) in enumerate(forms):
        width, each = width_of(d), 8 // b
        packed = np.frombuffer(b"".join(codes[i]), np.uint8).reshape(n // UNIT, n_head, width // (4 * each), UNIT, 4)
        parts = np.stack([packed >> b * m & (1 << b) - 1 for m in range(each)], 3)  # ..., m, position, value
        rows = parts.transpose(0, 4, 1, 2, 3, 5).reshape(n, n_head, width)
        scale = np.frombuffer(b"".join(scales[i]), np.float16).reshape(n // UNIT, n_head, UNIT)
        yield Coded(
            spreads[i],
            np.frombuffer(b"".join(means[i]), np.float32).reshape(-1, n_head, width),
            scale.transpose(0, 2, 1).reshape(n, n_head).astype(np.float32),
            rows,
            b,
            d,
        )
