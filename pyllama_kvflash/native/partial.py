"""The state of a sequence outside its chunks: a recurrent state, a sliding window."""

from typing import Any

import numpy as np

from pyllama_kvflash.native.lib import check, ffi, lib

StateBytes = bytes | memoryview
"""A recurrent state or a sliding window, as bytes."""


class PartialState:
    """The part of a context that saves the state outside chunks, restores it, and copies it to another context of the model."""

    seq: int

    @property
    def handle(self) -> Any:
        """The native context."""
        raise NotImplementedError

    def n_partial(self) -> int:
        """Return the bytes of the state outside chunks (recurrent, sliding window); 0 for a plain cache."""
        size = ffi.new("size_t *")
        check(lib.kvf_partial_size(self.handle, self.seq, size))
        return int(size[0])

    def save_partial(self) -> StateBytes:
        """Return the state outside chunks; it is empty for a plain cache."""
        res = np.empty(self.n_partial(), np.uint8).data  # `bytes` would be zeroed first, and a 27B model has 150 MiB
        check(lib.kvf_partial_get(self.handle, self.seq, ffi.from_buffer(res), len(res)))
        return res

    def restore_partial(self, state: StateBytes, pos: int) -> None:
        """Roll back to the first pos positions. state: what save_partial() returned at that length. Raises NativeError."""
        check(lib.kvf_partial_set(self.handle, self.seq, pos, ffi.from_buffer(state), len(state)))

    def take_partial(self, other: "PartialState", pos: int) -> None:
        """Roll back to the first pos positions, with another context's state of this sequence. Raises NativeError.

        Recurrent states are copied on their device. Through host memory, copying a 27B model's states would take a quarter of a second.
        """
        check(lib.kvf_partial_copy(other.handle, self.handle, self.seq, pos))
