"""Codes of all positions: keys and values in a few bits, by which positions outside the pool are attended to."""

from dataclasses import dataclass
from typing import Self

from pyllama_kvflash.policy.fresh import UNIT, Heads, padded

FORMS = ("4", "4,2", "2")
"""Bits of keys and values, or of keys, values: the closest first."""
CHOICES = ("auto", "off", *FORMS)
"""What `coarse` may be."""
SEGMENT = 4096
"""Positions whose rows have a mean of their own: kvf_codes::SEGMENT."""
_TILE = 64 * UNIT  # positions of a tile: kvf_codes::TILE
_PADDED = 16  # values of a row
_SCALE, _MEAN = 2, 4  # bytes


@dataclass(frozen=True, slots=True)
class CoarseForm:
    """Bits of the code of each value of a key and of a value row."""

    k: int
    v: int

    @classmethod
    def of(cls, coarse: str) -> Self | None:
        """Return the form that an option asks for; None: "off"."""
        if coarse == "off":
            return None
        k, _, v = coarse.partition(",")
        return cls(int(k), int(v or k))

    def n_bytes(self, heads: Heads, n: int) -> int:
        """Return the bytes of the codes of n positions in a layer."""
        return sum(self._pieces(heads, -(-n // UNIT) * UNIT, n))

    def gpu_bytes(self, heads: Heads, n_ctx: int) -> int:
        """Return the bytes that a GPU takes for those of a whole context: of whole tiles, each piece from a place of its own on."""
        return sum(map(padded, self._pieces(heads, -(-n_ctx // _TILE) * _TILE, n_ctx)))

    def _pieces(self, heads: Heads, n_row: int, n: int) -> list[int]:
        """Return the bytes of levels, of a scale for each row, of means, and of spreads, of keys and of values."""
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
