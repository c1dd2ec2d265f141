"""The memory of a context: its layers, its bytes, its pool."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolParams:
    """The parameters of a pool.

    n_pool: cells, a multiple of 256.
    n_chunk: positions in a block: 16, 32 or 64.
    q_tap: how many last tokens of a ubatch keep their queries for queries(); 0: none.
    fingerprint: of the model, written to every record.
    q_every: queries are kept in every q_every-th layer.
    n_exchange: guests of a layer that a ubatch exchanges at most.
    coarse_k, coarse_v: bits of the codes, 2 or 4, by which positions outside the pool are attended to; 0: they are not, and
        there are no guests.
    late: guests are chosen after the attention, for the next token, rather than before it.
    """

    n_pool: int
    n_chunk: int = 64
    q_tap: int = 0
    fingerprint: int = 0
    q_every: int = 1
    n_exchange: int = 0
    coarse_k: int = 0
    coarse_v: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaneParams:
    """The parameters of a paned context, which computes what a stock one does with a few layers on the device at a time.

    n_pane: layers of a device that are there at once. 1: the computation waits for each; as many as there are: nothing is
        streamed.
    q_tap, q_every: as in PoolParams.
    mass_piece: what the tokens of the tap attend to is kept, summed over so many positions; 0: it is not.
    least_bytes: of the panes of a GPU, for codes that are to lie there.
    """

    n_pane: int = 2
    q_tap: int = 0
    q_every: int = 1
    mass_piece: int = 0
    least_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaneInfo:
    """The panes of a context.

    bytes: of all of them, on all devices.
    n_bytes: copied so far, in both directions.
    n_pane: panes of the device that has the most.
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
    """The pool as it is now.

    n_landing: blocks that chunks are on their way into.
    n_kv: cells that the attention reads for each token.
    n_copy: copies that moving a chunk takes.
    record_bytes: bytes of the record of one chunk, of which the first meta_bytes hold no K or V rows.
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
    """One layer of the attention cache: its place in the model, its row sizes (elements) and its place in a record
    (bytes).

    device: index into devices() of the memory that it is in.
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
