"""A paned context: it computes what a stock context does, with a few layers of its KV on the device at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native.context import LAST, Context, Record
from pyllama_kvflash.native.geometry import PaneInfo, PaneParams
from pyllama_kvflash.native.lib import check, compute, ffi, lib
from pyllama_kvflash.native.model import Model, Tokens


class ExactContext(Context):
    """Decodes batches against all earlier positions, whose rows it takes from the records of a pooled context.

    On a CPU its logits and records are a stock cache's, bit for bit. It has one sequence at a time, and holds the state that
    is not in the full-attention cache (recurrent, sliding window) for that one only.
    """

    def __init__(self, model: Model, panes: PaneParams, **options: Any) -> None:
        """options: those of Context, as for the pooled context. Raises UnsupportedError and NativeError (memory)."""
        super().__init__(model, panes=panes, **options)

    def decode_into(
        self, pool: Context, tokens: Tokens, pos: int, records: Sequence[Record], outputs: int = LAST
    ) -> None:
        """Decode tokens (n,) int32, at most a ubatch, of the pooled context's sequence, at positions pos, pos + 1, ...

        records: (record_bytes,) uint8 for each chunk, up to the last one of this batch. The rows of earlier positions are
        read from them; heads and rows of this batch are written to them, by wait_whole() at the latest.

        State that is not in the full-attention cache must have been put in (restore_partial). Raises Interrupted and
        NativeError; the records then have no meaning from pos on.
        """
        self.compute(pool, tokens, pos, records, outputs)
        pool.computed(self.handle, len(tokens))

    def compute(self, pool: Context, tokens: Tokens, pos: int, records: Sequence[Record], outputs: int) -> None:
        """Compute what decode_into() does, perhaps while another thread uses the pooled context, of which Context.computed() then
        makes it the last batch.
        """
        buf = ffi.from_buffer("int32_t[]", tokens)
        held = [ffi.from_buffer(record) for record in records]
        place = pool.handle, pool.seq, pos, buf, len(tokens), outputs
        size = min((len(record) for record in records), default=0)
        compute(lib.kvf_decode_exact, self.handle, *place, ffi.new("void *[]", held), len(held), size)

    def pace(self, *, paced: bool) -> None:
        """Have batches leave room on the device's queue and bus for what another thread launches meanwhile."""
        check(lib.kvf_pace_exact(self.handle, paced))

    def wait_whole(self, n_ahead: int = 0) -> int:
        """Wait for all batches but the last n_ahead, of which there are at most three. Returns how many positions, from the
        first, the records have.
        """
        end = ffi.new("llama_pos *")
        compute(lib.kvf_wait_exact, self.handle, n_ahead, end)
        return int(end[0])

    def mass(self, back: int, n_piece: int) -> npt.NDArray[np.float32]:
        """Return what the last token decoded, or the token `back` before it, attends to: (n_tapped, n_piece) float32.

        Each is the share of the attention that the first n_piece pieces of PaneParams.mass_piece positions have, summed over
        the heads of a tapped layer.
        """
        res = np.empty((len(self.tapped()), n_piece), np.float32)
        check(lib.kvf_get_mass(self.handle, back, ffi.from_buffer("float[]", res), n_piece))
        return res

    def pane_info(self) -> PaneInfo:
        """Return the size of the panes, and how many bytes were copied to and from them."""
        out = ffi.new("struct kvf_pane_info *")
        check(lib.kvf_get_pane_info(self.handle, out))
        return PaneInfo(
            bytes=out.bytes, n_bytes=out.n_bytes, n_pane=out.n_pane, n_layer=out.n_layer, n_stream=out.n_stream
        )
