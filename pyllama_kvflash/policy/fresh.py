"""The index by which each layer chooses its guests, under policy "fresh": how a key becomes a few bits."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import UsageError

Floats = npt.NDArray[np.float32]

EXCHANGE = 8
"""Guests of a layer that a batch exchanges at most."""
SMALL_HEAD = 96
"""Heads of up to so many values have principal components as their index; larger ones a bit a value."""
REACH = 3.0
"""Standard deviations of a component that its codes reach."""
_FORM = re.compile(r"(?:p([1-9]\d{0,2}))?b([124])")
_SEED = 7


@dataclass(frozen=True, slots=True)
class IndexForm:
    """How an index keeps keys: about the mean of their head, in components of n_bit bits (1, 2 or 4).

    n_comp: so many principal components of the keys; 0: all values, after a rotation that spreads them evenly.
    """

    n_bit: int
    n_comp: int = 0

    @property
    def name(self) -> str:
        """The name that parse() takes, such as "p32b4" or "b1"."""
        return f"p{self.n_comp}b{self.n_bit}" if self.n_comp else f"b{self.n_bit}"

    @classmethod
    def parse(cls, name: str) -> "IndexForm":
        """Return the form of a name: "pN" for N principal components, "bB" for B bits. Raises UsageError."""
        found = _FORM.fullmatch(name)
        if found is None:
            msg = f"{name!r} is not an index of keys: give b1, b2 or b4 (bits of a value), or p32b4 (bits of 32 components)"
            raise UsageError(msg)
        return cls(int(found[2]), int(found[1] or 0))

    @classmethod
    def usual(cls, n_embd_head: int) -> "IndexForm":
        """Return the form for heads of so many values: docs/RESULTS.md has what each costs and gives."""
        return cls(4, min(32, n_embd_head)) if n_embd_head <= SMALL_HEAD else cls(1)

    def fits(self, n_embd_head: int) -> bool:
        """Return whether keys of so many values have as many components."""
        return self.n_comp <= n_embd_head


def principal(cov: Floats, n_comp: int, n_bit: int) -> tuple[Floats, Floats]:
    """Return the n_comp directions in which keys differ most, as a basis (n_head, d, n_comp), and the steps of their codes
    (n_head, n_comp).

    cov: the covariance of the keys of each head, (n_head, d, d).
    """
    values, vectors = np.linalg.eigh(cov.astype(np.float64))
    spread = np.sqrt(np.maximum(values[:, -n_comp:], 0))
    step = REACH * spread / ((2**n_bit - 1) / 2)
    return vectors[:, :, -n_comp:].astype(np.float32), step.astype(np.float32)


def rotation(d: int) -> Floats:
    """Return an orthogonal basis (d, d) in which the values of any key are of like size: signs, then Hadamard matrices.

    A d that is not a power of 2 has blocks of powers of 2.
    """
    res = np.zeros((d, d), np.float32)
    at = 0
    while at < d:
        n = 1 << ((d - at).bit_length() - 1)
        block = np.ones((1, 1), np.float32)
        while len(block) < n:
            block = np.block([[block, block], [block, -block]])
        res[at : at + n, at : at + n] = block / np.sqrt(np.float32(n))
        at += n
    signs = np.random.default_rng(_SEED).choice(np.array([-1, 1], np.float32), d)
    return signs[:, None] * res
