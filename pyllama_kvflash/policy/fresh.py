"""The index by which each layer chooses its guests, under policy "fresh": how a key becomes a few bits."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

EXCHANGE = 32
"""Guests of a layer that a batch exchanges at most. Fewer come late, and more are hardly ever better."""
BITS = (1, 2, 4)
"""Bits that an index may have for each value of a key."""
SMALL_HEAD = 96
"""Heads of up to so many values have 2 bits a value in their index; larger ones, whose values say less each, have 1."""
GROUP = 64
"""Positions whose codes lie together in an index."""
UNIT = 16
"""Positions of a guest."""
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
        components have 4.
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

    @property
    def n_words(self) -> int:
        """Products of four components at once, of a GPU: make_words() of native/src/kvflash-gpu.cpp."""
        whole, halves = self.n_four, self.n_four + self.n_two // 2
        shifts = [1 if i < whole else 2 if i < halves else 4 for i in range(halves + self.n_one // 4)]
        return -(-sum(max(shifts[i : i + 4]) for i in range(0, len(shifts), 4)) // 8) * 8

    def n_bytes(self, heads: "Heads", n: int) -> int:
        """Return the bytes of a layer's index of n positions: their codes, and each head's mean, basis and steps."""
        codes = -(-n // GROUP) * GROUP * self.n_bits // 8
        return heads.n_kv * (codes + 4 * (heads.n_embd + heads.n_embd * self.n_comp + self.n_comp))

    def basis(self, variances: Floats, components: Floats) -> tuple[Floats, Floats]:
        """Return the first components as a basis (n_head, d, n_comp), and the steps of their codes (n_head, n_comp).

        components: principal components of the keys of each head, (n_head, d, d), one a row, those of the largest variances
        (n_head, d) first.
        """
        bits = np.repeat([4, 2, 1], [self.n_four, self.n_two, self.n_one])
        reach = np.array([REACH[int(b)] / ((2.0**b - 1) / 2) for b in bits])
        steps = np.sqrt(variances[:, : self.n_comp]) * reach
        return components[:, : self.n_comp].swapaxes(1, 2), steps.astype(np.float32)


class Heads(NamedTuple):
    """The heads of a layer: how many have queries, how many have keys, and the values of a key, and of a value row (0: the
    keys are these rows, too).
    """

    n_query: int
    n_kv: int
    n_embd: int
    n_embd_v: int = 0

    @classmethod
    def of(cls, layer: Any) -> "Heads":
        """Return those of a layer of the cache (native.Layer)."""
        return cls(layer.n_head, layer.n_head_kv, layer.n_embd_head_k, layer.n_embd_v // layer.n_head_kv)


# of native/src: kvf_fresh::MOST_ASKING, KVF_GPU_PARTS, kvf_index::MOST_SAMPLES, and where pieces of device memory begin
_ASKING, _PARTS, _SAMPLES, _ALIGNED = 8, 512, 4096, 256
_WORD, _POINTER = 4, 8
# kvf_gpu_attend::MOST_ROW_PART, and the sizes of kvf_gpu_layer and kvf_gpu_coder
_ROW_PARTS, _LAYER, _CODER = 1024, 512, 128


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """What a GPU takes of its memory so that layers choose there: the pieces that native/src/kvflash-gpu.cpp takes.

    form: None: by codes (`coarse`), whose own bytes do not count here. heads: of all layers, wherever they are. n_ctx: positions of
    a sequence. n_seq: sequences. n_pool: cells of the pool.
    """

    form: IndexForm | None
    heads: tuple[Heads, ...]
    n_ctx: int
    n_seq: int
    n_pool: int
    chunk: int

    def n_bytes(self, here: Collection[int]) -> int:
        """Return the most bytes that a GPU with these layers takes: with a whole context of each sequence in its index."""
        pieces = [*self._scratch(), *self._tables(), *map(self._basis, self.heads), *map(self._drift, self.heads)]
        fixed = sum(map(_padded, pieces))
        if self.form is None:
            return fixed + sum(map(_padded, self._coding()))
        codes = self.n_seq * sum(_padded(self._codes(self.heads[i])) for i in here)
        return codes + fixed + _WORD * self._n_value * _SAMPLES

    def _codes(self, heads: Heads) -> int:
        """Four nibbles of a position lie together."""
        n_bits = self.form.n_bits if self.form else 0
        return heads.n_kv * -(-self._n_chunks * self.chunk // GROUP) * GROUP * -(-n_bits // 16) * 2

    def _coding(self) -> list[int]:
        """Of attention by codes: where they are, and how they are made; sums of rows; where records are; sums of attention."""
        n_row = max(h.n_kv * max(h.n_embd, h.n_embd_v) for h in self.heads)
        width = max(-(-(h.n_embd_v or h.n_embd) // 128) * 128 for h in self.heads)  # of sums
        n_query, n_layer = max(h.n_query for h in self.heads), len(self.heads)
        tables = [4 * _POINTER * n_layer * self.n_seq] * 2 + [_LAYER * n_layer, _CODER * 2 * n_layer]
        parts = _WORD * _ROW_PARTS * n_query * (2 + width)
        return [*tables, 2 * _POINTER * 2 * n_layer * n_row, _POINTER * self._n_chunks, parts]

    def _basis(self, heads: Heads) -> int:
        """Of the keys of all sequences in a layer: means, bases and steps."""
        n_comp = self.form.n_comp if self.form else 0
        return _WORD * self.n_seq * heads.n_kv * (heads.n_embd + heads.n_embd * n_comp + n_comp)

    def _drift(self, heads: Heads) -> int:
        """Of the predicted queries of all sequences in a layer: what they lack, and what they miss all the same."""
        return _WORD * self.n_seq * heads.n_query * (heads.n_embd + 1)

    def _scratch(self) -> list[int]:
        """Of the layer that chooses: shares of the attention, the words of a product, what is fetched; of a new index: moments."""
        n_unit, n_asking = self._n_chunks * self.chunk // UNIT, max(self.n_seq, _ASKING)
        n_query = max(h.n_query for h in self.heads)
        shares = [n_asking * n_query * n_unit, 2 * n_asking * n_query * _PARTS]
        keys = [self.n_seq * n_unit, self.n_seq * (n_unit // 4 + 1)]
        moves = [2 * self._n_slot, 1]
        cov = max(h.n_kv * h.n_embd**2 for h in self.heads)
        n_word = 4 * self.form.n_words if self.form else 0
        return [_WORD * n for n in (*shares, *keys, *moves, 4, n_word, self._n_value, cov)]

    def _tables(self) -> list[int]:
        """Of all layers: units in slots, where indexes are; of all: where records are, and the blocks of guests."""
        n_index = self.n_seq * len(self.heads)
        slots, blocks = _WORD * n_index * self._n_slot, _WORD * (self.n_pool // self.chunk)
        keys = 6 * _POINTER * len(self.heads)  # how they lie in records
        return [slots, 6 * _POINTER * n_index, _POINTER * self.n_seq * self._n_chunks, blocks, keys]

    @property
    def _n_chunks(self) -> int:
        return -(-self.n_ctx // self.chunk)

    @property
    def _n_slot(self) -> int:
        return self.n_pool // self.chunk * (self.chunk // UNIT)

    @property
    def _n_value(self) -> int:
        return max(h.n_kv * h.n_embd for h in self.heads)


def _padded(n: int) -> int:
    return -(-n // _ALIGNED) * _ALIGNED
