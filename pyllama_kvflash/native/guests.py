"""Guests, in blocks of the pool, are units of 16 positions that each layer chooses in the graph. Codes are kept for all positions."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native.context import Context, Record
from pyllama_kvflash.native.lib import check, compute, ffi, lib, mapped

UNIT = int(lib.KVF_UNIT)
"""Positions of a guest."""

_COPIERS = 4  # threads: a layer of 64K tokens has some 64 MiB


@dataclass(frozen=True, slots=True)
class CodesInfo:
    """The codes and the guests of a sequence.

    bytes: size of the codes in host memory.
    device_bytes: size of codes, and of buffers for choosing, on GPUs, over all sequences.
    n: positions with codes.
    n_known: positions with codes when the last segment of 4,096 began; they determine the segment's means.
    n_block: guest blocks.
    n_slot: guest slots of a layer.
    """

    bytes: int
    device_bytes: int
    n: int
    n_known: int
    n_block: int
    n_slot: int


def choice_bytes(heads: Sequence[tuple[int, int, int, int]], n_ctx: int, n_seq: int, n_pool: int, chunk: int) -> int:
    """Return the size in bytes of a GPU's buffers for attending to codes and choosing guests, not counting the codes.

    heads: for each layer, on whichever device: query heads, key heads, elements of a key row and of a value row (0: the keys serve as values).
    n_ctx: positions of each of n_seq sequences. n_pool: cells of the pool.
    """
    each = ffi.new("struct kvf_heads[]", [tuple(h) for h in heads])
    return int(lib.kvf_choice_bytes(each, len(heads), n_ctx, n_seq, n_pool, chunk))


def codes_bytes(heads: tuple[int, int, int, int], bits: tuple[int, int], n: int, *, on_gpu: bool) -> int:
    """Return the bytes of the codes of n positions of a layer, in host memory or on a GPU. heads: the layer's, as in choice_bytes().
    bits: of the keys' codes and the values' codes, as in PoolParams.
    """
    return int(lib.kvf_codes_bytes(ffi.new("struct kvf_heads *", tuple(heads)), *bits, n, on_gpu))


def _addresses(records: Sequence[Record]) -> list[object]:
    return [ffi.from_buffer(record) for record in records]


class Guests:
    """The codes and the guests of one sequence of a pooled context. Raises NativeError and PoolError."""

    def __init__(self, ctx: Context) -> None:
        """ctx: the sequence's view of a context whose PoolParams have codes."""
        self._ctx = ctx
        self.layers = ctx.layers()

    #
    # codes
    #

    def info(self) -> CodesInfo:
        """Return the current codes and guests."""
        out = ffi.new("struct kvf_codes_info *")
        check(lib.kvf_codes_info(self._ctx.handle, self._ctx.seq, out))
        return CodesInfo(**{name: getattr(out, name) for name in CodesInfo.__dataclass_fields__})

    def n_fetched(self) -> int:
        """Return the number of guests copied from records so far, over all sequences and layers. Waits for the GPU."""
        out = ffi.new("uint64_t *")
        check(lib.kvf_guests_fetched(self._ctx.handle, out))
        return int(out[0])

    def put(self, layers: range, first: int, records: Sequence[Record]) -> None:
        """Make the codes of chunks first, first + 1, ... from their records, in these layers. Threads may take different layers."""
        at, where = _addresses(records), (layers.start, len(layers))
        compute(lib.kvf_codes_put, self._ctx.handle, self._ctx.seq, *where, first, at, len(at))

    def cover(self, first: int, records: Sequence[Record]) -> None:
        """Allow chunks first, first + 1, ... as guests. They must have codes in all layers.

        Their records must not move until the sequence is cut to fewer positions.
        """
        at = _addresses(records)
        check(lib.kvf_codes_cover(self._ctx.handle, self._ctx.seq, first, at, len(at)))

    def saved_codes(self, n: int) -> list[Record]:
        """Return a copy of the codes of the first n positions: (n_bytes,) uint8 for each layer."""

        def saved(layer: int) -> Record:
            res = np.empty(self._code_size(layer, n), np.uint8)
            check(lib.kvf_codes_get(self._ctx.handle, self._ctx.seq, layer, n, ffi.from_buffer(res), len(res)))
            return res

        with ThreadPoolExecutor(_COPIERS, "kvflash-codes") as threads:
            return list(mapped(threads, saved, range(len(self.layers))))

    def restore_codes(self, layer: int, n: int, saved: Record) -> None:
        """Restore a layer's codes of the first n positions, from saved_codes(). Then call cover() for the chunks.

        Threads may take different layers.
        """
        src = ffi.from_buffer(saved[: self._code_size(layer, n)])
        compute(lib.kvf_codes_set, self._ctx.handle, self._ctx.seq, layer, n, src, len(src))

    def code_sizes(self, n: int) -> tuple[int, ...]:
        """Return the bytes of the codes of n positions, for each layer."""
        return tuple(self._code_size(layer, n) for layer in range(len(self.layers)))

    def _code_size(self, layer: int, n: int) -> int:
        out = ffi.new("size_t *")
        check(lib.kvf_codes_size(self._ctx.handle, self._ctx.seq, layer, n, out))
        return int(out[0])

    #
    # guests
    #

    def resize(self, n: int, blocks: Sequence[int] | None = None) -> None:
        """Set the number of guest blocks to n. The first ones stay, and free blocks are added. blocks: the blocks to take, which only a
        sequence without guest blocks may choose; None: the first free ones.

        The next batch fills the new slots. Raises PoolError, and changes nothing, if too few blocks are free.
        """
        check(lib.kvf_set_guests(self._ctx.handle, self._ctx.seq, n, ffi.NULL if blocks is None else list(blocks)))

    def tables(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the guest blocks (n_block,), and the unit in each slot of each layer (n_layer, n_slot); -1: empty."""
        info = self.info()
        blocks = np.empty(info.n_block, np.int32)
        units = np.empty((len(self.layers), info.n_slot), np.int32)
        to = ffi.from_buffer("int32_t[]", blocks), len(blocks), ffi.from_buffer("int32_t[]", units), units.size
        check(lib.kvf_get_guests(self._ctx.handle, self._ctx.seq, *to))
        return blocks, units

    def place(self, units: npt.NDArray[np.int32]) -> None:
        """Copy units (n_layer, n_slot) from their records into the slots; -1 leaves a slot empty."""
        flat = np.ascontiguousarray(units, np.int32)
        check(lib.kvf_place_guests(self._ctx.handle, self._ctx.seq, ffi.from_buffer("int32_t[]", flat), flat.size))
