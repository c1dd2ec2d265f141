"""Codes of all positions: keys and values in a few bits, by which positions outside the pool are attended to."""

from dataclasses import dataclass
from typing import Self

from pyllama_kvflash.policy.fresh import UNIT, Heads

FORMS = ("4", "4,2", "2")
"""Bits of keys and values, or of keys, values: the closest first."""
CHOICES = ("auto", "off", *FORMS)
"""What `coarse` may be."""
SEGMENT = 4096
"""Positions whose rows have a mean of their own: kvf_codes::SEGMENT."""
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
        """Return the bytes of the codes of n positions in a layer: levels, a scale for each row, means, and spreads."""
        n_row, n_segment = -(-n // UNIT) * UNIT, -(-n // SEGMENT)
        each = [(heads.n_embd, self.k)] + [(heads.n_embd_v, self.v)] * (heads.n_embd_v > 0)
        width = [(-(-d // _PADDED) * _PADDED, bits) for d, bits in each]
        fixed = _MEAN * sum(d for d, _ in each)
        return heads.n_kv * (fixed + sum(n_row * (_SCALE + d * bits // 8) + n_segment * d * _MEAN for d, bits in width))

    def __str__(self) -> str:
        return (
            f"{self.k} bits of keys and values" if self.k == self.v else f"{self.k} bits of keys and {self.v} of values"
        )
