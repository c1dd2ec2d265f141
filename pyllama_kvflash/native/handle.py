"""The native context shared by several views, and the place of each sequence's last output."""

from typing import Any, NamedTuple


class Output(NamedTuple):
    """The place of the logits and queries of a sequence's last token.

    native: the native context that computed them.
    first, last: the token's index in that context's last batch, counted from the first token and from the last.
    base: the index of the sequence's first token in the batch.
    """

    native: Any
    first: int
    last: int
    base: int = 0

    def row(self, i: int) -> int:
        """Return the batch index of the sequence's token i; -1: of its last token."""
        return self.first if i == -1 else self.base + i


class Handle:
    """State that the views of a context share: the native context, and the last token of each sequence.

    native: the native context; None once closed. It is freed when no call uses it, and no outputs of other contexts refer to it.
    """

    def __init__(self, handle: Any) -> None:
        self.native = handle
        self.outputs: dict[int, Output] = {}  # by sequence
        self.batch: dict[int, tuple[int, int]] = {}  # the last one: first position and number of tokens, by sequence

    def close(self) -> None:
        """Release the native context. Harmless when called again."""
        self.native = None
        self.outputs = {}

    def computed(self, native: Any, outputs: dict[int, tuple[int, int] | tuple[int, int, int]]) -> None:
        """Record a native context's batch, which replaces that context's earlier outputs.

        outputs: {sequence: (first, last, base) of its Output}.
        """
        kept = {seq: o for seq, o in self.outputs.items() if o.native != native}
        self.outputs = kept | {seq: Output(native, *at) for seq, at in outputs.items()}

    def kept(self, seq: int, n_dropped: int) -> None:
        """Record that the last n_dropped tokens of a sequence in the last batch were rejected."""
        native, first, last, base = self.outputs[seq]
        self.outputs = self.outputs | {seq: Output(native, first - n_dropped, last + n_dropped, base)}
