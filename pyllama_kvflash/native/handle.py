"""The native context behind several views of it, and where the last token of each sequence was computed."""

from typing import Any, NamedTuple


class Output(NamedTuple):
    """Where the logits and queries of a sequence's last token are.

    native: the context that computed it.
    first, last: the token's place in that context's last batch, counted from its first token and from its last.
    """

    native: Any
    first: int
    last: int


class Handle:
    """State that the views of a context share: the native context, and the last token of each sequence.

    native: None once it was let go of. It is freed when no call uses it, and no other context has its outputs.
    """

    def __init__(self, handle: Any) -> None:
        self.native = handle
        self.outputs: dict[int, Output] = {}  # by sequence

    def close(self) -> None:
        """Let go of the native context. Harmless when called again."""
        self.native = None
        self.outputs = {}

    __del__ = close  # as part of a circle: before Python takes apart what the context is made of

    def computed(self, native: Any, outputs: dict[int, tuple[int, int]]) -> None:
        """Record a batch of a native context: {sequence: index from the first token, and from the last}.

        It replaces what that context computed before.
        """
        kept = {seq: o for seq, o in self.outputs.items() if o.native != native}
        self.outputs = kept | {seq: Output(native, *at) for seq, at in outputs.items()}
