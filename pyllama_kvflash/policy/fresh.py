"""Guests, the units that each layer chooses under policy "fresh", and what a GPU takes to choose them and to attend to codes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

EXCHANGE = 32
"""Guests of a layer that a batch exchanges at most. Fewer come late, and more are hardly ever better."""
UNIT = 16
"""Positions of a guest."""


class Heads(NamedTuple):
    """The heads of a layer: how many have queries, how many have keys, and the values of a key, and of a value row (0: the
    keys are these rows, too).
    """

    n_query: int
    n_kv: int
    n_embd: int
    n_embd_v: int = 0

    def n_passes(self, n_tokens: int) -> int:
        """Return the passes over codes that these tokens take (kvf_gpu_attend::n_pass)."""
        share = self.n_query // self.n_kv
        return -(-n_tokens // max(1, _COLUMNS // share)) * self.n_kv * -(-share // _COLUMNS)

    @classmethod
    def of(cls, layer: Any) -> "Heads":
        """Return those of a layer of the cache (native.Layer)."""
        return cls(layer.n_head, layer.n_head_kv, layer.n_embd_head_k, layer.n_embd_v // layer.n_head_kv)


# of native/src: kvf_fresh::MOST_ASKING, KVF_GPU_PARTS, and where pieces of device memory begin
_ASKING, _PARTS, _ALIGNED = 8, 512, 256
_WORD, _POINTER = 4, 8
# kvf_gpu_attend::MOST_ROW_PART, MOST_TOKEN and COLUMNS, and the sizes of kvf_gpu_layer and kvf_gpu_coder
_ROW_PARTS, _MOST_TOKENS, _COLUMNS, _LAYER, _CODER = 1024, 128, 8, 512, 128
_SEGMENT_UNITS, _WORD_BITS = 256, 32


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """What a GPU takes of its memory, beside codes, to attend to them and to choose guests: the pieces that
    native/src/guests/gpu.cpp and coarse/gpu-coarse.cpp take.

    heads: of all layers, wherever they are. n_ctx: positions of a sequence. n_seq: sequences. n_pool: cells of the pool.
    """

    heads: tuple[Heads, ...]
    n_ctx: int
    n_seq: int
    n_pool: int
    chunk: int

    @property
    def n_bytes(self) -> int:
        """The most bytes, with a whole context of each sequence."""
        return sum(map(padded, [*self._scratch(), *self._tables(), *self._coding()]))

    def _coding(self) -> list[int]:
        """Of attention by codes: where they are, and how they are made; sums of rows; where records are; sums of attention."""
        n_row = max(h.n_kv * max(h.n_embd, h.n_embd_v) for h in self.heads)
        width = max(-(-(h.n_embd_v or h.n_embd) // 128) * 128 for h in self.heads)  # of sums
        n_query, n_layer = max(h.n_query for h in self.heads), len(self.heads)
        tables = [4 * _POINTER * n_layer * self.n_seq] * 2 + [_LAYER * n_layer, _CODER * 2 * n_layer]
        parts = _WORD * _ROW_PARTS * n_query * (2 + width)
        return [*tables, 2 * _POINTER * 2 * n_layer * n_row, _POINTER * self._n_chunks, parts, *self._passes()]

    def _passes(self) -> list[int]:
        """Of attention by codes: queries as its blocks take them, and which units the pool has."""
        n_unit = self._n_chunks * self.chunk // UNIT
        base = _WORD * (2 + -(-n_unit // _SEGMENT_UNITS))
        each = [-(-h.n_embd // 128) * 128 + -(-h.n_embd // UNIT) * 32 + base for h in self.heads]
        passes = [h.n_passes(_MOST_TOKENS) * n * _COLUMNS for h, n in zip(self.heads, each, strict=True)]
        return [max(passes), _MOST_TOKENS * _WORD * -(-n_unit // _WORD_BITS)]

    def _scratch(self) -> list[int]:
        """Of the layer that chooses: shares of the attention, and what is fetched."""
        n_unit, n_asking = self._n_chunks * self.chunk // UNIT, max(self.n_seq, _ASKING)
        n_query = max(h.n_query for h in self.heads)
        shares = [n_asking * n_query * n_unit, 2 * n_asking * n_query * _PARTS]
        keys = [self.n_seq * n_unit, self.n_seq * (n_unit // 4 + 1)]
        return [_WORD * n for n in (*shares, *keys, 2 * self._n_slot, 1, 4)]

    def _tables(self) -> list[int]:
        """Of all layers: units in slots, where these are; of all: where records are, and the blocks of guests."""
        n_table = self.n_seq * len(self.heads)
        slots, blocks = _WORD * n_table * self._n_slot, _WORD * (self.n_pool // self.chunk)
        return [slots, 2 * _POINTER * n_table, _POINTER * self.n_seq * self._n_chunks, blocks]

    @property
    def _n_chunks(self) -> int:
        return -(-self.n_ctx // self.chunk)

    @property
    def _n_slot(self) -> int:
        return self.n_pool // self.chunk * (self.chunk // UNIT)


def padded(n: int) -> int:
    """Return the bytes that a piece of n bytes takes of a GPU's memory."""
    return -(-n // _ALIGNED) * _ALIGNED
