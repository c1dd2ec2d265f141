"""What a context's memory is like: its layers, its bytes, its pool."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolParams:
    """A pool of n_pool cells (a multiple of 256) in blocks of n_chunk (16, 32 or 64) positions. q_tap: of how many last tokens of
    a batch queries() has any, and q_every: in every how many of the layers.
    """

    n_pool: int
    n_chunk: int = 64
    q_tap: int = 0
    fingerprint: int = 0
    q_every: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """The pool as it is now. n_kv: cells the attention reads for each token; record_bytes: of one chunk; n_landing: blocks
    that chunks are on their way into; n_copy: copies that moving a chunk takes.
    """

    n_pool: int
    n_chunk: int
    n_block: int
    n_block_free: int
    n_landing: int
    n_kv: int
    n_layer: int
    n_copy: int
    record_bytes: int
    meta_bytes: int
    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the attention cache: its place in the model, row sizes (elements) and place in a record (bytes).

    device: whose memory it is in, an index into devices().
    """

    il: int
    type_k: int
    type_v: int
    n_embd_k: int
    n_embd_v: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    device: int
    offs_k: int
    size_k: int
    offs_v: int
    size_v: int


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Device bytes of the cache: full attention (the pool), sliding window, recurrent state."""

    attn: int
    swa: int
    recurrent: int
