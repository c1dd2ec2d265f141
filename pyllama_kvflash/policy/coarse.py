"""Codes of all positions: keys and values in a few bits, by which layers attend to positions outside the pool."""

from typing import NamedTuple, Self

FORMS = ("4", "4,2", "2")
"""Bits of keys and values ("4", "2"), or of keys and of values ("4,2"), the most accurate first."""
CHOICES = ("auto", "off", *FORMS)
"""The values of `coarse`."""


class CoarseForm(NamedTuple):
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

    def __str__(self) -> str:
        return (
            f"{self.k} bits of keys and values" if self.k == self.v else f"{self.k} bits of keys and {self.v} of values"
        )
