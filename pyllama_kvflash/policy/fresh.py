"""The size and exchange of guests (the units that each layer chooses under policy "fresh"), and the heads of a layer."""

from typing import Any, NamedTuple

EXCHANGE = 32
"""How many guests a layer exchanges in a batch, at most. With fewer, guests come late; more hardly ever help."""
UNIT = 16
"""Positions in a guest."""


class Heads(NamedTuple):
    """The heads of a layer: the numbers of query heads and of key heads, and the elements of one head's key and value (n_embd_v 0:
    the keys serve as values).
    """

    n_query: int
    n_kv: int
    n_embd: int
    n_embd_v: int = 0

    @classmethod
    def of(cls, layer: Any) -> "Heads":
        """Return the heads of a layer of the cache (native.Layer)."""
        return cls(layer.n_head, layer.n_head_kv, layer.n_embd_head_k, layer.n_embd_v // layer.n_head_kv)
