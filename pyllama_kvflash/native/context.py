"""A llama.cpp context: its KV cache, stock or pooled, and the computation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import errors
from pyllama_kvflash.native.device import planned_host
from pyllama_kvflash.native.geometry import KVBytes, Layer, PaneParams, PoolInfo, PoolParams
from pyllama_kvflash.native.handle import Handle, Output
from pyllama_kvflash.native.lib import CACHE_TYPES, check, compute, ffi, lib, owned, unless_forked
from pyllama_kvflash.native.model import Model, Tokens
from pyllama_kvflash.native.partial import PartialState

Record = npt.NDArray[np.uint8]

NONE, LAST, ALL = int(lib.KVF_OUTPUTS_NONE), int(lib.KVF_OUTPUTS_LAST), int(lib.KVF_OUTPUTS_ALL)
"""The tokens of a batch that get logits: none, the last, all."""


def _fields(struct: Any, cls: type[Any]) -> Any:
    return cls(**{name: getattr(struct, name) for name in cls.__dataclass_fields__})


class Context(PartialState):
    """A view of a llama.cpp context, for the first of its sequences. sequence() returns the views for the others.

    Do not use it in two threads at once. Any thread may close it. It is a context manager.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int = 1,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str = "auto",
        offload_kqv: bool = True,
        n_seq: int = 1,
        n_rollback: int = 0,
        pool: PoolParams | None = None,
        panes: PaneParams | None = None,
        lodges: "Context | None" = None,
        other: "Context | None" = None,
        mtp: bool = False,
        n_outputs: int = 0,
    ) -> None:
        """Create the native context.

        n_ctx: logical positions of a sequence.
        n_seq: sequences, which share the cells.
        n_rollback: by how many of a batch's last tokens a recurrent state can be rolled back; never by the whole batch.
        pool, panes: at most one of the two. With neither, the cache is a stock one with a cell for each position.
        lodges: for a pool: a paned context of the same model, which must outlive this one. While the paned context is idle, a GPU keeps
            the codes in its panes, if the panes are large enough.
        other: for a drafter: the context of its target.
        mtp: for a drafter: whether it consists of a model's own heads for further tokens.
        n_outputs: for a drafter: the most tokens of a batch that get logits; 0: all.

        Raises UnsupportedError (the memory cannot be pooled, the cache type cannot be used) and NativeError (memory).
        """
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx if pool or panes else n_ctx * n_seq
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch
        params.n_seq_max = n_seq
        params.n_rs_seq = n_rollback
        params.n_outputs_max = params.n_outputs_max_per_seq = n_outputs
        params.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP if mtp else lib.LLAMA_CONTEXT_TYPE_DEFAULT
        made_of = model.handle, other.handle if other else ffi.NULL
        params.ctx_other = made_of[1]
        params.kv_unified = n_seq > 1
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k = CACHE_TYPES[type_k]
        params.type_v = CACHE_TYPES[type_v]
        params.flash_attn_type = getattr(lib, f"LLAMA_FLASH_ATTN_TYPE_{_FLASH_ATTN[flash_attn]}")
        params.offload_kqv = offload_kqv
        model.rope.apply(params)
        params.swa_full = False
        p_pool = p_panes = ffi.NULL
        if panes is not None:
            p_panes = ffi.new("struct kvf_pane_params *", asdict(panes))
        if pool is not None:
            p_pool = ffi.new(
                "struct kvf_pool_params *", {**asdict(pool), "panes": lodges.handle if lodges else ffi.NULL}
            )
        p_params, out = ffi.new("struct llama_context_params *", params), ffi.new("struct llama_context **")
        compute(lib.kvf_context_new, made_of[0], p_params, p_pool, p_panes, out)
        self._shared = Handle(owned(out[0], lib.llama_free, *made_of))
        self.seq = 0
        self.n_seq = n_seq
        self.n_ubatch = n_ubatch
        self.model = model
        self.n_ctx = int(lib.llama_n_ctx(self.handle))  # of a stock cache: of all sequences, rounded up to 256
        self.n_rollback = int(lib.llama_n_rs_seq(self.handle))  # 0 if llama.cpp cannot roll this recurrent state back
        self.pooled = pool is not None
        self.pool = pool  # its parameters; None: a stock or a paned context
        tap = pool or panes
        self.q_tap, self._q_every = (tap.q_tap, tap.q_every) if tap else (0, 1)
        self._tapped: list[Layer] | None = None  # cached, since they never change

    def sequence(self, seq: int) -> Self:
        """Return the view of sequence `seq`, from 0 to n_seq - 1. The view decodes, moves and removes only that sequence's positions.

        Raises UsageError.
        """
        if not 0 <= seq < self.n_seq:
            msg = f"there is no sequence {seq}: the context has {self.n_seq}"
            raise errors.UsageError(msg)
        res = copy(self)
        res.seq = seq
        return res

    @property
    def handle(self) -> Any:
        """The native context. Raises UsageError once it is closed."""
        native = self._shared.native
        if native is None:
            msg = f"the context of {self.model.path} is closed: open it again"
            raise errors.UsageError(msg)
        return native

    def close(self) -> None:
        """Free the context and all its sequences, once no thread has a call under way. Harmless when called again."""
        self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    #
    # computation
    #

    def decode(self, tokens: Tokens, pos: int, outputs: int = LAST) -> None:
        """Decode tokens (n,) int32 at positions pos, pos + 1, ...

        Raises PoolError (no free block; nothing has changed), Interrupted (part of the batch may be in the cache: remove it with
        seq_rm) and NativeError.
        """
        buf = ffi.from_buffer("int32_t[]", tokens)
        compute(lib.kvf_decode, self.handle, self.seq, pos, buf, len(tokens), outputs)
        self.computed(self.handle, len(tokens))
        self._shared.batch = {self.seq: (pos, len(tokens))}

    def computed(self, native: Any, n: int, n_batch: int | None = None) -> None:
        """Record that a native context computed a batch of this sequence, of which the first n tokens are kept.

        native: this context's, or a paned context's. n_batch: the tokens of the batch; None: n.
        """
        self._shared.computed(native, {self.seq: (n - 1, (n_batch or n) - n)})

    def keep(self, n: int) -> None:
        """Keep only the first n of the sequence's tokens in the last batch. All must have logits. Raises the errors of seq_rm()."""
        start, n_batch = self._shared.batch[self.seq]
        if n < n_batch:
            self.seq_rm(start + n)
        self._shared.kept(self.seq, n_batch - n)

    def decode_each(self, seqs: Sequence[int], pos: Sequence[int], tokens: Sequence[Tokens]) -> None:
        """Decode tokens of several sequences in one batch. All get logits. Raises the errors of decode().

        pos: the position of each sequence's first token. tokens: (n,) int32 for each sequence, at most n_ubatch in all.
        """
        sizes = [len(part) for part in tokens]
        ends = np.cumsum(sizes)
        n = int(ends[-1])
        where = np.concatenate([np.arange(at, at + size) for at, size in zip(pos, sizes, strict=True)])
        each = np.repeat(seqs, sizes).tolist(), where.tolist(), np.concatenate(tokens).tolist()
        compute(lib.kvf_decode_each, self.handle, *each, n)
        places = zip(seqs, ends.tolist(), sizes, strict=True)
        self._shared.computed(self.handle, {seq: (end - 1, n - end, end - size) for seq, end, size in places})
        self._shared.batch = dict(zip(seqs, zip(pos, sizes, strict=True), strict=True))

    @property
    def output(self) -> Output:
        """The place of this sequence's last output. Raises UsageError if the sequence was not in the last batch."""
        own = self.handle  # raises if it is closed
        if not self._shared.outputs:
            return Output(own, -1, 0)  # nothing was decoded: the library raises the error
        if self.seq not in self._shared.outputs:
            msg = f"sequence {self.seq} was not in the last batch: what was computed then is another one's"
            raise errors.UsageError(msg)
        return self._shared.outputs[self.seq]

    @contextmanager
    def same_output(self) -> Iterator[None]:
        """Let another context compute within the block. Afterwards, logits() and queries() of all sequences return this context's last
        results again.
        """
        before = {seq: o for seq, o in self._shared.outputs.items() if o.native == self.handle}
        yield
        self._shared.outputs = before

    def synchronize(self) -> None:
        """Wait for the computation of this sequence's last token. Raises NativeError."""
        check(lib.kvf_synchronize(self.output.native))

    def logits(self, i: int = -1) -> npt.NDArray[np.float32]:
        """Return a copy of the logits of this sequence's token i in the last batch (-1: its last), (n_vocab,) float32. They may be NaN.
        Raises UsageError (the token has no logits) and NativeError.
        """
        output = self.output
        check(lib.kvf_synchronize(output.native))
        ptr = lib.llama_get_logits_ith(output.native, output.row(i))
        if ptr == ffi.NULL:
            msg = f"token {i} of the last batch has no logits"
            raise errors.UsageError(msg)
        buf = ffi.buffer(ptr, self.model.n_vocab * 4)
        return np.frombuffer(buf, np.float32).copy()

    def checked_logits(self, i: int = -1) -> npt.NDArray[np.float32]:
        """Return logits(i). Also raises BadLogitsError if they are NaN or infinite."""
        check(lib.kvf_argmax(self.output.native, self.output.row(i), ffi.new("llama_token *")))
        return self.logits(i)

    def clear(self) -> None:
        """Remove this sequence from the cache."""
        if self.n_seq == 1:
            check(lib.kvf_clear(self.handle))
        else:
            check(lib.kvf_clear_seq(self.handle, self.seq))
        self._shared.outputs.pop(self.seq, None)

    def seq_rm(self, start: int, end: int = -1) -> None:
        """Remove positions [start, end); end -1: up to the last. Raises UnsupportedError if a state cannot be rolled back."""
        check(lib.kvf_seq_rm(self.handle, self.seq, start, end))

    def attn_seq_rm(self, start: int, end: int) -> None:
        """Remove positions [start, end) from the full-attention cache only, as an eviction would from a stock cache."""
        check(lib.kvf_attn_seq_rm(self.handle, self.seq, start, end))

    def set_width(self, n_kv: int) -> None:
        """Make the attention read at least n_kv cells from now on. A restored sequence needs the PoolInfo.n_kv that it was saved with."""
        check(lib.kvf_set_width(self.handle, n_kv))

    #
    # geometry
    #

    @property
    def memory_class(self) -> str:
        """The class name of llama.cpp's memory, e.g. `llama_kv_cache_iswa`."""
        name: str = ffi.string(lib.kvf_memory_class(self.handle)).decode()
        return name

    def layers(self) -> list[Layer]:
        """Return the layers of the full-attention cache, in ascending order."""
        res = []
        out = ffi.new("struct kvf_layer *")
        for i in range(lib.kvf_n_layer(self.handle)):
            check(lib.kvf_get_layer(self.handle, i, out))
            res.append(_fields(out, Layer))
        return res

    def tapped(self) -> list[Layer]:
        """Return the layers whose queries are kept for queries()."""
        if self._tapped is None:
            self._tapped = self.layers()[self._q_every // 2 :: self._q_every]
        return self._tapped

    def kv_bytes(self) -> KVBytes:
        """Return the device bytes of the cache."""
        out = ffi.new("struct kvf_kv_bytes *")
        check(lib.kvf_get_kv_bytes(self.handle, out))
        res: KVBytes = _fields(out, KVBytes)
        return res

    def compute_bytes(self, device: int | None = None) -> int:
        """Return the bytes of the compute buffers; for a model loaded with no_alloc, the expected bytes. device: an index into
        native.devices(); None: all devices.
        """
        if device is None:
            return sum(self.compute_bytes(i) for i in range(lib.ggml_backend_dev_count()))
        if device == planned_host():
            return 0  # the compute buffers of a planned machine's host are unknown here
        out = ffi.new("uint64_t *")
        check(lib.kvf_get_compute_bytes(self.handle, device, out))
        return int(out[0]) + (self._halves() if planned_host() and device == 0 else 0)

    def _halves(self) -> int:
        """Return the bytes of a layer's K and V in f16: CUDA's flash attention converts other types to f16, in its buffers."""
        n, kept = self.pool.n_pool if self.pool else self.n_ctx, (CACHE_TYPES["f16"], -1)
        rows = [((layer.type_k, layer.n_embd_k), (layer.type_v, layer.n_embd_v)) for layer in self.layers()]
        return 2 * n * max((sum(width for kind, width in each if kind not in kept) for each in rows), default=0)

    #
    # pool
    #

    def pool_info(self) -> PoolInfo:
        """Return the size and use of the pool."""
        out = ffi.new("struct kvf_pool_info *")
        check(lib.kvf_get_pool_info(self.handle, out))
        res: PoolInfo = _fields(out, PoolInfo)
        return res

    def blocks(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return two arrays (n_block,) int32: the chunk that this sequence has in each block (-1: none), and how many cells of the block
        are in use.
        """
        n = self.pool_info().n_block
        chunks, n_used, seqs = (np.empty(n, np.int32) for _ in range(3))
        out = [ffi.from_buffer("int32_t[]", a) for a in (chunks, n_used, seqs)]
        check(lib.kvf_blocks(self.handle, *out, n))
        chunks[seqs != self.seq] = -1
        n_used[seqs != self.seq] = 0
        return chunks, n_used

    def block_of(self, chunk: int) -> int:
        """Return the block of a chunk; -1: it is not resident."""
        out = ffi.new("int32_t *")
        check(lib.kvf_block_of(self.handle, self.seq, chunk, out))
        return int(out[0])

    # Copies overlap the computation if the device can do that. begin_read() and page_in() return at once; the record
    # must not change until wait() has returned. A caller that only decodes and moves chunks need not wait.

    def begin_read(self, chunk: int, record: Record) -> int:
        """Begin to copy a resident chunk into its record, (record_bytes,) uint8. Returns a ticket for wait()."""
        ticket = ffi.new("uint64_t *")
        dst = ffi.from_buffer(record, require_writable=True)
        check(lib.kvf_read(self.handle, self.seq, chunk, dst, len(record), ticket))
        return int(ticket[0])

    def wait(self, ticket: int = 0) -> None:
        """Wait for the copies up to a ticket; with 0, for all copies."""
        check(lib.kvf_wait(self.handle, ticket))

    def read(self, chunk: int, record: Record) -> None:
        """Copy a resident chunk into its record, (record_bytes,) uint8."""
        self.wait(self.begin_read(chunk, record))

    def drop(self, chunk: int) -> None:
        """Free the block of a resident chunk. The caller must have the chunk's record, or have begun to read it."""
        check(lib.kvf_drop(self.handle, self.seq, chunk))

    def page_in(self, chunk: int, record: Record, block: int = -1) -> int:
        """Copy a record into a free block (-1: the first). The next decode waits for the copy, and sees the chunk. Returns the block.

        Raises RecordError and PoolError.
        """
        inout = ffi.new("int32_t *", block)
        check(lib.kvf_page_in(self.handle, self.seq, chunk, ffi.from_buffer(record), len(record), inout))
        return int(inout[0])

    def host_buffer(self, size: int) -> Record:
        """Return host memory, (size,) uint8, for fast copies to and from a device: pinned, if that matters. Raises MemoryError."""
        out = ffi.new("struct kvf_host **")
        try:
            check(lib.kvf_host_new(self.handle, size, out))
        except errors.NativeError as err:
            raise MemoryError(str(err)) from None
        if out[0] == ffi.NULL:
            return np.full(size, 0, np.uint8)  # zeros() would commit the pages only when they are written
        handle = out[0]
        free = unless_forked(lambda _: lib.kvf_host_free(handle))
        base = ffi.gc(ffi.cast("char *", lib.kvf_host_base(handle)), free, size)
        return np.frombuffer(ffi.buffer(base, size), np.uint8)  # keeps `base`, and so the memory, alive

    @property
    def pinned(self) -> bool:
        """Whether host_buffer() returns pinned memory."""
        return self.host_buffer(4096).base is not None

    def copy_rate(self, size: int, n: int, *, to_device: bool) -> float:
        """Measure the bus: copy a block of `size` bytes n times, and return the bytes per second."""
        seconds = ffi.new("double *")
        compute(lib.kvf_time_copies, self.handle, size, n, to_device, seconds)
        return size * n / float(seconds[0])

    def scribble(self, byte: int) -> None:
        """Overwrite all free blocks. For tests: nothing may ever read them."""
        check(lib.kvf_scribble(self.handle, byte))

    def begin_queries(self, into: npt.NDArray[np.float32], back: int = 0) -> int:
        """Begin to read the queries of this sequence's last token in the last batch, or of the token `back` places before it.

        into: float32; receives all tapped layers' queries in a row, in the basis of the cached K. Returns a ticket for wait().
        """
        ticket = ffi.new("uint64_t *")
        dst = ffi.from_buffer("float[]", into, require_writable=True)
        native, _, at, _ = self.output
        check(lib.kvf_q(native, at + back, dst, into.size, ticket))
        return int(ticket[0])

    def query_scales(self) -> npt.NDArray[np.float32]:
        """Return each tapped layer's factor of q·k before the softmax, (n_tapped,) float32."""
        res = np.empty(len(self.tapped()), np.float32)
        check(lib.kvf_q_scale(self.output.native, ffi.from_buffer("float[]", res), len(res)))
        return res

    def queries(self, back: int = 0) -> list[npt.NDArray[np.float32]]:
        """Return the queries of the last decoded token, or of the token `back` places before it, as begin_queries() reads them: for each
        tapped layer, an array (n_head, n_embd_head_k) float32.
        """
        shapes = [(layer.n_head, layer.n_embd_head_k) for layer in self.tapped()]
        into = np.empty(sum(n * m for n, m in shapes), np.float32)
        if ticket := self.begin_queries(into, back):
            self.wait(ticket)
        return split_queries(into, shapes)


def split_queries(flat: npt.NDArray[np.float32], shapes: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.float32]]:
    """Split the result of begin_queries() into an array (n_head, n_embd_head_k) for each tapped layer."""
    parts = np.split(flat, np.cumsum([n * m for n, m in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


_FLASH_ATTN = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}
