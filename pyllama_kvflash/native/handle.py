"""The native context behind several views of it, and where the last token of each sequence was computed."""

from typing import Any, NamedTuple


class Output(NamedTuple):
    """Where the logits and queries of a sequence's last token are.

    native: the context that computed it.
    first, last: the token's place in that context's last batch, counted from its first token and from its last.
    base: the place of the sequence's first token in the batch.
    """

    native: Any
    first: int
    last: int
    base: int = 0

    def row(self, i: int) -> int:
        """Return where the sequence's token i is in the batch; -1: its last one."""
        return self.first if i == -1 else self.base + i


class Handle:
    """State that the views of a context share: the native context, and the last token of each sequence.

    native: None once it was let go of. It is freed when no call uses it, and no other context has its outputs.
    """

    def __init__(self, handle: Any) -> None:
        self.native = handle
        self.outputs: dict[int, Output] = {}  # by sequence
        self.batch: dict[int, tuple[int, int]] = {}  # the last one: first position and number of tokens, by sequence

    def close(self) -> None:
        """Let go of the native context. Harmless when called again."""
        self.native = None
        self.outputs = {}

    def computed(self, native: Any, outputs: dict[int, tuple[int, int] | tuple[int, int, int]]) -> None:
        """Record a batch of a native context: {sequence: index from the first token, from the last, and `base`}.

        It replaces what that context computed before.
        """
        kept = {seq: o for seq, o in self.outputs.items() if o.native != native}
        self.outputs = kept | {seq: Output(native, *at) for seq, at in outputs.items()}

    def kept(self, seq: int, n_dropped: int) -> None:
        """Record that the last n_dropped tokens of a sequence in the last batch do not stand."""
        native, first, last, base = self.outputs[seq]
        self.outputs = self.outputs | {seq: Output(native, first - n_dropped, last + n_dropped, base)}
