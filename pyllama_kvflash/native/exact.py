"""A paned context: it computes what a stock context does, with the KV of only a few layers on the device at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native.context import LAST, Context, Record
from pyllama_kvflash.native.geometry import PaneInfo, PaneParams
from pyllama_kvflash.native.lib import check, compute, ffi, lib
from pyllama_kvflash.native.model import Model, Tokens


class ExactContext(Context):
    """Decodes batches against all earlier positions, whose rows it reads from the records of a pooled context.

    On a CPU its logits and records equal a stock cache's, bit for bit. It has one sequence at a time, and holds that sequence's
    recurrent state and sliding window.
    """

    def __init__(self, model: Model, panes: PaneParams, **options: Any) -> None:
        """options: arguments of Context, the same as for the pooled context. Raises UnsupportedError and NativeError (memory)."""
        super().__init__(model, panes=panes, **options)

    def decode_into(
        self, pool: Context, tokens: Tokens, pos: int, records: Sequence[Record], outputs: int = LAST
    ) -> None:
        """Decode a batch of the pooled context's sequence, at positions pos, pos + 1, ...

        tokens: (n,) int32, at most a ubatch. records: (record_bytes,) uint8 for each chunk, up to the last one of this batch. The rows
        of earlier positions are read from them. This batch's rows and headers are written to them, by wait_whole() at the latest.

        The recurrent state and sliding window must have been restored (restore_partial). Raises Interrupted and NativeError; the
        records are then invalid from pos on.
        """
        self.compute(pool, tokens, pos, records, outputs)
        pool.computed(self.handle, len(tokens))

    def compute(self, pool: Context, tokens: Tokens, pos: int, records: Sequence[Record], outputs: int) -> None:
        """Compute the batch of decode_into(). Another thread may use the pooled context meanwhile. Afterwards, call the pooled context's
        computed(), so that this batch counts as its last one.
        """
        buf = ffi.from_buffer("int32_t[]", tokens)
        held = [ffi.from_buffer(record) for record in records]
        place = pool.handle, pool.seq, pos, buf, len(tokens), outputs
        size = min((len(record) for record in records), default=0)
        compute(lib.kvf_decode_exact, self.handle, *place, ffi.new("void *[]", held), len(held), size)

    def pace(self, *, paced: bool) -> None:
        """Set whether batches leave room on the device's queue and bus for another thread's work."""
        check(lib.kvf_pace_exact(self.handle, paced))

    def wait_whole(self, n_ahead: int = 0) -> int:
        """Wait for all batches except the last n_ahead (at most three). Returns how many positions, counted from the first, are in the
        records.
        """
        end = ffi.new("llama_pos *")
        compute(lib.kvf_wait_exact, self.handle, n_ahead, end)
        return int(end[0])

    def mass(self, back: int, n_piece: int) -> npt.NDArray[np.float32]:
        """Return the attention of the last decoded token, or of the token `back` places before it: (n_tapped, n_piece) float32.

        A piece is PaneParams.mass_piece positions. Each value is the share of one of the first n_piece pieces, summed over the heads of
        a tapped layer.
        """
        res = np.empty((len(self.tapped()), n_piece), np.float32)
        check(lib.kvf_get_mass(self.handle, back, ffi.from_buffer("float[]", res), n_piece))
        return res

    def pane_info(self) -> PaneInfo:
        """Return the size of the panes, and the bytes copied to and from them."""
        out = ffi.new("struct kvf_pane_info *")
        check(lib.kvf_get_pane_info(self.handle, out))
        return PaneInfo(
            bytes=out.bytes, n_bytes=out.n_bytes, n_pane=out.n_pane, n_layer=out.n_layer, n_stream=out.n_stream
        )
