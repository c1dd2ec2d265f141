"""The index by which each layer chooses its guests, under policy "fresh": how a key becomes a few bits."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

EXCHANGE = 32
"""Guests of a layer that a batch exchanges at most. Fewer come late, and more are hardly ever better (docs/RESULTS.md)."""
BITS = (1, 2, 4)
"""Bits that an index may have for each value of a key."""
SMALL_HEAD = 96
"""Heads of up to so many values have 2 bits a value in their index; larger ones, whose values say less each, have 1."""
GROUP = 64
"""Positions whose codes lie together in an index."""
REACH = {4: 2.7, 2: 1.6, 1: 0.8}
"""Standard deviations of a component that its codes reach, by its bits: near Max (1960)'s best for normal values."""


@dataclass(frozen=True, slots=True)
class IndexForm:
    """How an index keeps keys: how many of their principal components, those that differ most first, have 4, 2 and 1 bits."""

    n_four: int
    n_two: int
    n_one: int

    @classmethod
    def of(cls, n_embd_head: int, bits: int = 0) -> "IndexForm":
        """Return the form for keys of n_embd_head values, with so many bits a value in all; 0: what their size asks for.

        Of the bits a quarter are in components of 4 bits each, and an eighth in components of 1; with 4 bits a value all
        components have 4. docs/RESULTS.md has what was measured.
        """
        n = n_embd_head * (bits or (2 if n_embd_head <= SMALL_HEAD else 1))
        if n >= 4 * n_embd_head:
            return cls(n_embd_head, 0, 0)
        n_four, n_one = max(1, n // 16), n // 32 * 4
        return cls(n_four, (n - 4 * n_four - n_one) // 4 * 2, n_one)

    @property
    def n_comp(self) -> int:
        """Components that are kept."""
        return self.n_four + self.n_two + self.n_one

    @property
    def n_bits(self) -> int:
        """Bits of a key."""
        return 4 * self.n_four + 2 * self.n_two + self.n_one

    def n_bytes(self, n_head_kv: int, n_embd_head: int, n: int) -> int:
        """Return the bytes of a layer's index of n positions: their codes, and each head's mean, basis and steps."""
        codes = -(-n // GROUP) * GROUP * self.n_bits // 8
        return n_head_kv * (codes + 4 * (n_embd_head + n_embd_head * self.n_comp + self.n_comp))

    def basis(self, cov: Floats) -> tuple[Floats, Floats]:
        """Return the components as a basis (n_head, d, n_comp), and the steps of their codes (n_head, n_comp).

        cov: the covariance of the keys of each head, (n_head, d, d).
        """
        values, vectors = np.linalg.eigh(cov.astype(np.float64))
        bits = np.repeat([4, 2, 1], [self.n_four, self.n_two, self.n_one])
        reach = np.array([REACH[int(b)] / ((2.0**b - 1) / 2) for b in bits])
        spread = np.sqrt(np.maximum(values[:, ::-1][:, : self.n_comp], 0))
        return vectors[:, :, ::-1][:, :, : self.n_comp].astype(np.float32), (spread * reach).astype(np.float32)
