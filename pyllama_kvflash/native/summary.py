"""Summaries of the keys of chunks, and the scores of queries against them."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native.context import Record
from pyllama_kvflash.native.geometry import Layer
from pyllama_kvflash.native.lib import check, ffi, lib

_KINDS: dict[str, tuple[int, int]] = {
    "centroid": (lib.KVF_SUMMARY_CENTROIDS, 0),
    "mean": (lib.KVF_SUMMARY_MEAN, 1),
    "direction": (lib.KVF_SUMMARY_DIRECTION, 1),
    "rows": (lib.KVF_SUMMARY_ROWS, 0),
}

SLAB = 256  # chunks


class Summaries:
    """Summaries of chunks 0, 1, 2 ... of a sequence, in every scored layer, as bf16 in slabs that never move.

    The kinds:

    - "centroid:N": k-means with N = 1, 2, 4, 8 or 16 (farthest-point seeds, two Lloyd steps), each centroid scaled to
      the mean length of its keys;
    - "mean"; "direction": the mean scaled to length 1; "rows": all keys.

    One thread may score while another appends, because existing entries do not change. A summary depends only on the
    record's bytes.
    """

    def __init__(self, layers: Sequence[Layer], n_chunk: int, kind: str) -> None:
        """layers: those of a pooled context. n_chunk: positions of a chunk. Raises UsageError and UnsupportedError."""
        match = re.fullmatch(r"(?:(centroid):(\d{1,2}))|(mean|direction|rows)", kind)
        if match is None:
            msg = f"{kind!r} is not a summary of keys: give centroid:N, mean, direction or rows"
            raise UsageError(msg)
        self.kind = kind
        self._kind, n_row = _KINDS[match[1] or match[3]]
        self._n_row = int(match[2]) if match[2] else n_row or n_chunk
        if self._n_row > n_chunk:
            msg = f"{kind} is too many for chunks of {n_chunk} keys: give {match[1]}:{n_chunk} at most"
            raise UsageError(msg)
        self._n_chunk = n_chunk
        self._layers = [ffi.new("struct kvf_layer *", asdict(layer)) for layer in layers]
        self._shapes = [(layer.n_head, layer.n_embd_head_k) for layer in layers]
        self._sizes = [self._size(layer) for layer in self._layers]
        self._slabs: list[list[npt.NDArray[np.uint16]]] = []
        self._places: dict[int, tuple[int, Any]] = {}  # by layer: the number of slabs, and their addresses for C
        self._n = 0

    def _size(self, layer: Any) -> int:
        out = ffi.new("size_t *")
        check(lib.kvf_summary_size(layer, SLAB, self._n_row, out))
        return int(out[0])

    def __len__(self) -> int:
        return self._n

    @property
    def n_layer(self) -> int:
        """Number of summarised layers."""
        return len(self._layers)

    @property
    def n_bytes(self) -> int:
        """Host memory of all slabs, in bytes."""
        return len(self._slabs) * 2 * sum(self._sizes)

    @property
    def chunk_bytes(self) -> float:
        """Host memory of one chunk's summary, in bytes."""
        return 2 * sum(self._sizes) / SLAB

    def reserve(self, n: int) -> None:
        """Allocate memory for the first n chunks. Several threads may call this, and may then allocate one slab too many. Raises
        MemoryError.
        """
        while len(self._slabs) * SLAB < n:
            self._slabs.append([np.full(size, 0, np.uint16) for size in self._sizes])  # zeros() would commit later

    def put(self, chunk: int, record: Record) -> None:
        """Summarise the next chunk, or an earlier one again. record: the chunk's, (record_bytes,) uint8. Raises UsageError."""
        if not 0 <= chunk <= self._n:
            msg = f"chunk {chunk} cannot be summarised yet: chunk {self._n} is next"
            raise UsageError(msg)
        self.reserve(chunk + 1)
        self._write(chunk, record)
        self._n = max(self._n, chunk + 1)

    def put_all(self, n: int, record: Callable[[int], Record], threads: Executor) -> None:
        """Make the missing summaries of the first n chunks, in threads. record: returns the record of a chunk."""
        self.reserve(n)
        deque(threads.map(lambda chunk: self._write(chunk, record(chunk)), range(self._n, n)), maxlen=0)
        self._n = max(self._n, n)

    def _write(self, chunk: int, record: Record) -> None:
        # all layers in one call: taking and releasing the interpreter's lock often would slow the computing thread down
        slab, at = divmod(chunk, SLAB)
        src, layers, n_chunk = ffi.from_buffer(record), self._layers, self._n_chunk
        to = [ffi.from_buffer("uint16_t[]", rows) for rows in self._slabs[slab]]
        check(lib.kvf_summarise(layers, len(layers), n_chunk, src, len(record), self._kind, self._n_row, to, at, SLAB))

    def truncate(self, n: int) -> None:
        """Keep only the summaries of the first n chunks."""
        self._n = min(self._n, n)
        del self._slabs[-(-self._n // SLAB) :]
        self._places.clear()

    def score(self, layer: int, q: npt.NDArray[np.float32], n: int | None = None) -> npt.NDArray[np.float32]:
        """Return each head's largest product with a row of each chunk's summary, (n_head, n) float32.

        q: queries (n_head, n_embd_head_k) of a layer.
        n: score the first n chunks; None: all.
        """
        n = self._n if n is None else n
        if q.shape != self._shapes[layer] or not 0 <= n <= self._n:
            raise self._misfit(layer, q, n)
        q = np.ascontiguousarray(q, np.float32)
        res = np.empty((len(q), n), np.float32)
        pq, to = ffi.from_buffer("float[]", q), ffi.from_buffer("float[]", res)
        for begin in range(0, n, SLAB):
            rows = ffi.from_buffer("uint16_t[]", self._slabs[begin // SLAB][layer])
            count = min(SLAB, n - begin)
            check(lib.kvf_score(self._layers[layer], rows, count, self._n_row, pq, to + begin, n))
        return res

    def mass(
        self,
        layers: Sequence[int],
        queries: Sequence[npt.NDArray[np.float32]],
        scales: Sequence[float],
        n: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return each chunk's share of the attention to the first n chunks, summed over heads: (len(layers), n) float32.

        A row of a summary counts once for each key that it represents.

        queries: (n_query, n_head, n_embd_head_k) for each of the layers; a chunk gets its largest share over the queries.
        scales: the factor of q·k in each layer.
        """
        n = self._n if n is None else n
        qs = [np.ascontiguousarray(q, np.float32) for q in queries]
        for layer, q, _ in zip(layers, qs, scales, strict=True):
            if q.shape[1:] != self._shapes[layer] or len(q) != len(qs[0]) or not 0 <= n <= self._n:
                raise self._misfit(layer, q, n)
        res = np.empty((len(qs), n), np.float32)
        slabs = [self._pointers(layer, -(-n // SLAB)) for layer in layers]
        check(
            lib.kvf_mass(
                [self._layers[layer] for layer in layers],
                len(qs),
                slabs,
                SLAB,
                n,
                self._n_row,
                [ffi.from_buffer("float[]", q) for q in qs],
                len(qs[0]) if qs else 1,
                list(scales),
                ffi.from_buffer("float[]", res),
            )
        )
        return res

    def _misfit(self, layer: int, q: npt.NDArray[np.float32], n: int) -> UsageError:
        has = f"{self._shapes[layer]} for each token, and {self._n} chunks"
        return UsageError(f"queries {q.shape} for {n} chunks do not fit layer {layer}, which has {has}")

    def _pointers(self, layer: int, n: int) -> Any:
        """Return the addresses of the first n slabs of a layer. Slabs never move."""
        known = self._places.get(layer)
        if known is None or known[0] != n:
            rows = [ffi.from_buffer("uint16_t[]", slab[layer]) for slab in self._slabs[:n]]
            known = self._places[layer] = n, ffi.new("uint16_t *[]", rows)
        return known[1]

    def entry(self, chunk: int) -> list[npt.NDArray[np.float32]]:
        """Return the summary of a chunk: for each layer (n_head_kv, n_row, n_embd_head_k) float32. For tests and inspection."""
        slab, i = divmod(chunk, SLAB)
        res = []
        for layer, rows in zip(self._layers, self._slabs[slab], strict=True):
            panels = rows.reshape(-1, layer.n_head_kv, layer.n_embd_head_k + 1, 16)[:, :, :-1]
            flat = panels.transpose(1, 0, 3, 2).reshape(layer.n_head_kv, -1, layer.n_embd_head_k)
            mine = flat[:, i * self._n_row : (i + 1) * self._n_row].astype(np.uint32) << 16
            res.append(mine.view(np.float32))
        return res


class Keys:
    """All keys of chunks, read from their records on demand: exact, but slow for many keys."""

    def __init__(self, layers: Sequence[Layer], n_chunk: int, record: Callable[[int], Record]) -> None:
        """record: returns the record of a chunk."""
        self._layers = [ffi.new("struct kvf_layer *", asdict(layer)) for layer in layers]
        self._n_chunk = n_chunk
        self._record = record

    @property
    def n_layer(self) -> int:
        """Number of scored layers."""
        return len(self._layers)

    def score(
        self, layer: int, q: npt.NDArray[np.float32], chunks: Sequence[int], scale: float = 0.0, edge: int = 0
    ) -> npt.NDArray[np.float32]:
        """Return each query's largest product with a key of each chunk, (n_token * n_head, len(chunks)) float32.

        q: queries (n_token, n_head, n_embd_head_k) of a layer.
        scale: if given, return the logarithm of the sum of exp(scale * product) over the chunk's keys instead.
        edge: if given, return three such arrays, (3, ...): over all keys, over the first `edge` keys, and over the last `edge` keys.
        """
        q = np.ascontiguousarray(q, np.float32)
        mine = self._layers[layer]
        if q.ndim != 3 or q.shape[1:] != (mine.n_head, mine.n_embd_head_k):  # noqa: PLR2004
            msg = f"queries {q.shape} are not those of layer {layer}"
            raise UsageError(msg)
        res = np.empty((3 if edge else 1, q.shape[0] * q.shape[1], len(chunks)), np.float32)
        pq, to = ffi.from_buffer("float[]", q), ffi.from_buffer("float[]", res)
        records = [ffi.from_buffer(self._record(int(chunk))) for chunk in chunks]
        size = len(records[0]) if records else 0
        check(lib.kvf_score_keys(mine, self._n_chunk, records, len(records), size, pq, len(q), scale, edge, to))
        return res if edge else res[0]
