"""Records of random keys, their geometry, and summaries of them."""

import itertools
import threading
from collections.abc import Callable, Sequence

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

from pyllama_kvflash.native import CACHE_TYPES, Layer, Record, Summaries, row_bytes
from pyllama_kvflash.native.summary import SLAB

Keys = npt.NDArray[np.float32]  # row, head of K, dimension
KINDS = ("centroid:1", "centroid:4", "centroid:16", "mean", "direction", "rows")

META = 832  # bytes of a record before its first layer
N_EMBD_V = 48
BF16 = 2**-8  # bf16 has 8 significant bits: it is at most half of the last one off, relative to what was rounded


def geometry(
    *, n_layer: int = 2, n_head: int = 4, n_head_kv: int = 2, d: int = 64, n_chunk: int = 16, type_k: str = "f16"
) -> list[Layer]:
    """Layers as a record has them: K rows and V rows in turn."""
    res, offset = [], META
    size_k = row_bytes(CACHE_TYPES[type_k], n_head_kv * d) * n_chunk
    size_v = 2 * N_EMBD_V * n_chunk
    for il in range(n_layer):
        res.append(
            Layer(
                il=il,
                type_k=CACHE_TYPES[type_k],
                type_v=CACHE_TYPES["f16"],
                n_embd_k=n_head_kv * d,
                n_embd_v=N_EMBD_V,
                n_head=n_head,
                n_head_kv=n_head_kv,
                n_embd_head_k=d,
                device=0,
                offs_k=offset,
                size_k=size_k,
                offs_v=offset + size_k,
                size_v=size_v,
            )
        )
        offset += size_k + size_v
    return res


def encode(values: Keys, type_k: str) -> Record:
    """Rows as the cache holds them."""
    kind = gguf.GGMLQuantizationType[type_k.upper()]
    return np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8).reshape(-1)


def record_of(layers: Sequence[Layer], seed: int = 0, type_k: str = "f16", n_chunk: int = 16) -> Record:
    """Random bytes, and random keys around three places, so near each other that Lloyd steps would go on changing them."""
    rng = np.random.default_rng(seed)
    res = rng.integers(0, 256, layers[-1].offs_v + layers[-1].size_v).astype(np.uint8)
    for layer in layers:
        places = 0.5 * rng.standard_normal((3, layer.n_embd_k))
        keys = places[rng.integers(0, 3, n_chunk)] + rng.standard_normal((n_chunk, layer.n_embd_k))
        res[layer.offs_k : layer.offs_k + layer.size_k] = encode(keys.astype(np.float32), type_k)
    return res


def keys_of(layer: Layer, record: Record, type_k: str = "f16") -> Keys:
    """The keys in a record."""
    raw = record[layer.offs_k : layer.offs_k + layer.size_k]
    kind = gguf.GGMLQuantizationType[type_k.upper()]
    n_chunk = layer.size_k // row_bytes(layer.type_k, layer.n_embd_k)
    flat = {"f32": np.float32, "f16": np.float16}.get(type_k)
    values = raw.view(flat) if flat else quants.dequantize(raw.reshape(n_chunk, -1), kind)
    return values.astype(np.float32).reshape(n_chunk, layer.n_head_kv, layer.n_embd_head_k)


def layer_of_keys(keys: Keys) -> tuple[list[Layer], Record]:
    """One layer, and a record with exactly these keys."""
    n_chunk, n_head_kv, d = keys.shape
    layers = geometry(n_layer=1, n_head=n_head_kv, n_head_kv=n_head_kv, d=d, n_chunk=n_chunk, type_k="f32")
    record = np.zeros(layers[-1].offs_v + layers[-1].size_v, np.uint8)
    record[META : META + layers[0].size_k] = keys.astype(np.float32).reshape(-1).view(np.uint8)
    return layers, record


def kept(layers: Sequence[Layer], kind: str, records: Sequence[Record], n_chunk: int = 16) -> Summaries:
    res = Summaries(layers, n_chunk, kind)
    for chunk, record in enumerate(records):
        res.put(chunk, record)
    return res


def bits(summaries: Summaries, layer: int | None = None, n: int | None = None) -> list[bytes]:
    """Of each chunk, in one layer or in all."""
    entries = [summaries.entry(chunk) for chunk in range(len(summaries) if n is None else n)]
    return [b"".join(x.tobytes() for x in (e if layer is None else [e[layer]])) for e in entries]


def queries(layer: Layer, seed: int = 3) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((layer.n_head, layer.n_embd_head_k)).astype(np.float32)


def asked_while_appended(
    summaries: Summaries, records: Sequence[npt.NDArray[np.uint8]], ask: Callable[[], bool]
) -> list[bool]:
    """What a thread is told that asks again and again, while chunks are appended until there are three slabs."""
    found: list[bool] = []
    stop = threading.Event()

    def asking() -> None:
        while not stop.is_set():
            found.append(ask())

    thread = threading.Thread(target=asking)
    thread.start()
    try:
        for chunk in itertools.count(len(summaries)):
            if chunk >= 3 * SLAB and len(found) >= 20:
                break
            summaries.put(chunk, records[(chunk + 1) % 8])
    finally:
        stop.set()
        thread.join()
    return found
