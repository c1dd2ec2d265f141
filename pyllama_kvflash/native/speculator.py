"""Drafts of the next tokens, by llama.cpp's own implementations (common/speculative.h)."""

from typing import Any

import numpy as np

from pyllama_kvflash.native.context import Context
from pyllama_kvflash.native.lib import check, compute, ffi, lib, owned
from pyllama_kvflash.native.model import Tokens


class Speculator:
    """Drafts the next tokens of a sequence. It is freed before its contexts."""

    def __init__(
        self, kind: str, target: Context, drafter: Context | None, *, n_max: int, n_gram: int, window: int, p_min: float
    ) -> None:
        """Create the native drafter.

        kind: llama.cpp's name, such as "draft-simple".
        n_max: the most tokens of a draft.
        n_gram: length of an n-gram, which must occur earlier in the text.
        window: positions of the drafter's context.
        p_min: a token to which the drafter gives a lower probability ends the draft.

        Raises UnsupportedError (the drafter is of another type, or for another target) and NativeError.
        """
        name = ffi.new("char[]", kind.encode())
        params = ffi.new("struct kvf_spec_params *", [name, n_max, n_gram, window, p_min])
        out = ffi.new("struct kvf_spec **")
        made_of = target.handle, drafter.handle if drafter else ffi.NULL
        check(lib.kvf_spec_new(*made_of, params, out))
        self._handle: Any = owned(out[0], lib.kvf_spec_free, *made_of)
        self.n_max = int(lib.kvf_spec_n_max(self._handle))
        self._draft = ffi.new("llama_token[]", self.n_max)
        self._n = ffi.new("int32_t *")

    def close(self) -> None:
        """Release the native drafter. Harmless when called again."""
        self._handle = ffi.NULL

    def listen(self, target: Context, on: bool) -> None:  # noqa: FBT001 (a switch)
        """Set whether a context of the target's model outputs the features that the drafter reads.

        At first, the target does. Switch the output off for batches that are not passed to process().
        """
        check(lib.kvf_spec_listen(self._handle, target.handle, on))

    def begin(self, tokens: Tokens) -> None:
        """Start a new sequence with these decoded tokens (n,) int32."""
        check(lib.kvf_spec_begin(self._handle, _pointer(tokens), len(tokens)))

    def process(self, target: Context, tokens: Tokens, pos: int) -> None:
        """Let the drafter read tokens (n,) int32 that a context of the target's model has just decoded at pos, pos + 1, ...

        The drafter's earlier tokens from pos on are discarded.
        """
        compute(lib.kvf_spec_process, self._handle, target.handle, pos, _pointer(tokens), len(tokens))

    def draft(self, tokens: Tokens, n_kept: int, n_max: int) -> Tokens:
        """Draft at most n_max tokens, (m,) int32.

        They continue the sequence of the last call (or of begin()), cut to n_kept tokens and followed by tokens (n,) int32. The last of
        these is not decoded yet.
        """
        compute(lib.kvf_spec_draft, self._handle, n_kept, _pointer(tokens), len(tokens), n_max, self._draft, self._n)
        return np.frombuffer(ffi.buffer(self._draft, 4 * self._n[0]), np.int32).copy()

    def accept(self, n: int) -> None:
        """Report that the first n tokens of the last draft were accepted."""
        check(lib.kvf_spec_accept(self._handle, n))


def _pointer(tokens: Tokens) -> Any:
    return ffi.from_buffer("llama_token[]", np.ascontiguousarray(tokens, np.int32))
