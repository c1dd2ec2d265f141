"""The memory of a context: its layers, bytes, pool and panes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolParams:
    """The parameters of a pool.

    n_pool: cells, a multiple of 256.
    n_chunk: positions in a block: 16, 32 or 64.
    q_tap: how many tokens at the end of a ubatch keep their queries for queries(); 0: none.
    fingerprint: the model's, written to every record.
    q_every: queries are kept in every q_every-th layer.
    n_exchange: the most guests that a layer exchanges in a ubatch.
    coarse_k, coarse_v: bits of the codes of keys and values, 2 or 4; 0: no codes, and no guests.
    """

    n_pool: int
    n_chunk: int = 64
    q_tap: int = 0
    fingerprint: int = 0
    q_every: int = 1
    n_exchange: int = 0
    coarse_k: int = 0
    coarse_v: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaneParams:
    """The parameters of a paned context, see ExactContext.

    n_pane: panes of a device, each for one layer at a time. With 1, the computation waits for every layer; with as many as there are
        layers, nothing is streamed.
    q_tap, q_every: as in PoolParams.
    mass_piece: over how many positions the attention of tapped tokens is summed; 0: it is not kept.
    least_bytes: the least size of a GPU's panes, so that codes can share their memory.
    """

    n_pane: int = 2
    q_tap: int = 0
    q_every: int = 1
    mass_piece: int = 0
    least_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaneInfo:
    """The panes of a context.

    bytes: size of all panes, on all devices.
    n_bytes: bytes copied so far, in both directions.
    n_pane: panes of the device with the most.
    n_layer: layers that the graph reads.
    n_stream: devices that copy while they compute.
    """

    bytes: int
    n_bytes: int
    n_pane: int
    n_layer: int
    n_stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """The current state of the pool.

    n_kv: cells that the attention reads for each token.
    n_copy: how many copies it takes to move a chunk.
    record_bytes: bytes of a chunk's record; the first meta_bytes hold no K or V rows.
    """

    n_pool: int
    n_chunk: int
    n_block: int
    n_block_free: int
    n_kv: int
    n_layer: int
    n_copy: int
    record_bytes: int
    meta_bytes: int
    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the attention cache: its index in the model, row sizes (elements) and place in a record (bytes).

    device: the device of its memory, as an index into devices().
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
    """Device bytes of the cache: full attention (the pool, if there is one), sliding window, recurrent state."""

    attn: int
    swa: int
    recurrent: int
