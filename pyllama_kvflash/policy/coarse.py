"""Codes of all positions: keys and values in a few bits. Layers attend to positions outside the pool by their codes."""

from dataclasses import dataclass
from typing import Self

from pyllama_kvflash.policy.fresh import UNIT, Heads, padded

FORMS = ("4", "4,2", "2")
"""Bits of keys and values, or of keys, values: the most accurate first."""
CHOICES = ("auto", "off", *FORMS)
"""The values of `coarse`."""
SEGMENT = 4096
"""Positions that share a mean row: kvf_codes::SEGMENT."""
_TILE = 64 * UNIT  # positions of a tile: kvf_codes::TILE
_PADDED = 16  # values of a row
_SCALE, _MEAN = 2, 4  # bytes


@dataclass(frozen=True, slots=True)
class CoarseForm:
    """Bits per element of a key row, and of a value row."""

    k: int
    v: int

    @classmethod
    def of(cls, coarse: str) -> Self | None:
        """Return the form for a value of `coarse`; None for "off"."""
        if coarse == "off":
            return None
        k, _, v = coarse.partition(",")
        return cls(int(k), int(v or k))

    def n_bytes(self, heads: Heads, n: int) -> int:
        """Return the bytes of the codes of n positions in a layer."""
        return sum(self._pieces(heads, -(-n // UNIT) * UNIT, n))

    def gpu_bytes(self, heads: Heads, n_ctx: int) -> int:
        """Return the bytes of a full context's codes on a GPU, where rows come in whole tiles and each piece is aligned."""
        return sum(map(padded, self._pieces(heads, -(-n_ctx // _TILE) * _TILE, n_ctx)))

    def _pieces(self, heads: Heads, n_row: int, n: int) -> list[int]:
        """Return the bytes of the pieces, for keys and then for values: levels, a scale for each row, means, and spreads."""
        each = [(heads.n_embd, self.k)] + [(heads.n_embd_v, self.v)] * (heads.n_embd_v > 0)
        res = []
        for d, bits in each:
            width, n_segment = -(-d // _PADDED) * _PADDED, -(-n // SEGMENT)
            res += [n_row * width * bits // 8, n_row * _SCALE, n_segment * width * _MEAN, d * _MEAN]
        return [heads.n_kv * size for size in res]

    def __str__(self) -> str:
        return (
            f"{self.k} bits of keys and values" if self.k == self.v else f"{self.k} bits of keys and {self.v} of values"
        )
