"""Models of real shapes with random weights, written in seconds: for speed and exactness, never for quality.

Their vocabulary has only token ids, 0 to n_vocab - 1. Matrices are Q4_0. The same name always gives the same bytes.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvflash_bench.shape_tensors import BLOCK, BLOCK_BYTES, Heads, Shape, Tensor, keys, tensors
from pyllama_kvflash.errors import OutputError, UsageError, unwritten
from pyllama_kvflash.files import Replacement

VERSION = 1  # of the written files: a kept file is used again only if it has this version
_SCALE = 0.004  # a matrix of 4,096 columns then keeps the size of what it multiplies
_N_RANDOM = 932_051  # random blocks, 16 MB; prime, so that no row of a matrix copies another

_HYBRID = Shape(
    n_layer=64, n_embd=5120, n_ff=17408, n_head=24, n_head_kv=4, n_head_dim=256,
    interval=4, n_state=128, n_group=16, n_value=48,
)  # fmt: skip
_TINY_HYBRID = Shape(
    n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_head_dim=64, n_vocab=512,
    interval=2, n_state=64, n_group=2, n_value=4,
)  # fmt: skip

SHAPES = {
    "8b": Shape(n_layer=36, n_embd=4096, n_ff=12288, n_head=32, n_head_kv=8, n_head_dim=128),
    "70b": Shape(n_layer=80, n_embd=8192, n_ff=28672, n_head=64, n_head_kv=8, n_head_dim=128),
    "27b-hybrid": _HYBRID,
    "27b-mtp": replace(_HYBRID, n_mtp=1),
    "35b-a3b": Shape(
        n_layer=40, n_embd=2048, n_ff=512, n_head=16, n_head_kv=2, n_head_dim=256,
        interval=4, n_state=128, n_group=16, n_value=32, n_expert=256, n_used=8,
    ),
    "26b-a4b": Shape(
        family="gemma4", n_layer=30, n_embd=2816, n_ff=2112, n_head=16, n_head_kv=2, n_head_dim=512,
        interval=6, n_window=1024, window=Heads(16, 8, 256), n_expert=128, n_used=8, n_ff_expert=704,
    ),
    "laguna": Shape(
        family="laguna", n_layer=40, n_embd=2048, n_ff=8192, n_head=48, n_head_kv=8, n_head_dim=128,
        interval=4, n_window=512, window=Heads(64, 8, 128), n_expert=256, n_used=8, n_ff_expert=512,
    ),
    "tiny": Shape(n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_head_dim=64, n_vocab=512),
    "tiny-hybrid": _TINY_HYBRID,
    "tiny-mtp": replace(_TINY_HYBRID, n_mtp=1),
    "tiny-moe": Shape(
        n_layer=4, n_embd=256, n_ff=64, n_head=4, n_head_kv=2, n_head_dim=64, n_vocab=512,
        interval=2, n_state=64, n_group=2, n_value=4, n_expert=8, n_used=2,
    ),
    "tiny-gemma4": Shape(
        family="gemma4", n_layer=4, n_embd=256, n_ff=128, n_head=4, n_head_kv=1, n_head_dim=128, n_vocab=512,
        interval=2, n_window=256, window=Heads(4, 2, 64), n_expert=8, n_used=2, n_ff_expert=64,
    ),
    "tiny-laguna": Shape(
        family="laguna", n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_head_dim=64, n_vocab=512,
        interval=2, n_window=256, window=Heads(8, 2, 64), n_expert=8, n_used=2, n_ff_expert=64,
    ),
}  # fmt: skip
"""The shapes by name: dense models of 8B and 70B, a 27B hybrid with 16 attention layers, the same with a head that predicts
one token further, a 35B one with experts and 10 such layers, Gemma 4 26B-A4B, of whose layers 5 have full attention, Laguna
XS.2, with 10 of these, and small ones for tests on a CPU."""


#
# files
#


@contextmanager
def shape_file(name: str, folder: Path | None) -> Iterator[Path]:
    """Yield the file of a shape: in a folder, where it is kept and used again; None: in a temporary one that is
    removed.

    Raises UsageError (no such shape, no room, no gguf) and OutputError.
    """
    if folder is not None:
        path = kept_file(name, folder)
        if not path.exists():
            write_shape(name, path)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="kvflash-") as temporary:
        path = Path(temporary) / f"{name}.gguf"
        write_shape(name, path)
        yield path


def kept_file(name: str, folder: Path) -> Path:
    """Return the file of a shape in a folder that keeps it."""
    return folder / f"kvflash-{name}-v{VERSION}.gguf"


def write_shape(name: str, path: Path, vocabulary: Path | None = None) -> None:
    """Write the model of a shape to a file, whole or not at all. Raises as shape_file does.

    vocabulary: a model file whose tokens it gets; None: token ids alone.
    """
    shape = shape_named(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_room(name, shape, path.parent)
        with Replacement(path) as new:
            _write(name, shape, new.path, vocabulary, weights=True)
    except OSError as err:
        raise OutputError(unwritten(path, err)) from None


def write_outline(shape: Shape, path: Path) -> None:
    """Write a model's metadata, with a hole in place of its weights: enough to plan by, and not to run. It takes no room."""
    _write("outline", shape, path, None, weights=False)
    with path.open("r+b") as file:
        file.truncate(shape.n_bytes)


def shape_named(name: str) -> Shape:
    """Return a shape by its name. Raises UsageError."""
    if name not in SHAPES:
        msg = f"{name!r} is not a shape: there are {', '.join(SHAPES)}"
        raise UsageError(msg)
    return SHAPES[name]


def _check_room(name: str, shape: Shape, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < shape.n_bytes:
        msg = (
            f"the model of shape {name} takes {shape.n_bytes / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB free:"
            " give a folder with more room with `shape_dir`"
        )
        raise UsageError(msg)


def _write(name: str, shape: Shape, path: Path, vocabulary: Path | None, *, weights: bool) -> None:
    import gguf  # noqa: PLC0415 (half a second)

    file = gguf.GGUFWriter(path, shape.arch)
    file.add_string("general.name", f"random weights, shape {name}")
    file.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_0))
    if vocabulary is None:
        file.add_string("tokenizer.ggml.model", "none")
    else:
        fields = gguf.GGUFReader(vocabulary).fields
        shape = replace(shape, n_vocab=len(fields["tokenizer.ggml.tokens"].data))
        for key, field in fields.items():
            if key.startswith("tokenizer.ggml"):
                file.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    add: dict[type, Any] = {
        bool: file.add_bool,
        int: file.add_uint32,
        float: file.add_float32,
        str: file.add_string,
        list: file.add_array,
    }
    for key, value in keys(shape).items():
        add[type(value)](f"{shape.arch}.{key}", value)
    listed = list(tensors(shape))
    for tensor in listed:
        _announce(file, tensor, gguf.GGMLQuantizationType.Q4_0)
    try:
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_ti_data_to_file()
        if not weights:
            return
        blocks = _blocks(max(t.n_bytes for t in listed if t.kind == "q4_0"))
        for i, tensor in enumerate(listed):
            file.write_tensor_data(_data(tensor, i, blocks))
    finally:
        file.close()


def _announce(file: Any, tensor: Tensor, q4_0: Any) -> None:
    rows, n = tensor.shape[:0:-1], tensor.shape[0]
    if tensor.kind == "q4_0":
        shape = (*rows, n // BLOCK * BLOCK_BYTES)
        file.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.n_bytes, raw_dtype=q4_0)
    else:
        file.add_tensor_info(tensor.name, (*rows, n), np.dtype(np.float32), tensor.n_bytes)


@cache
def _random_blocks() -> npt.NDArray[np.uint8]:
    blocks = np.random.default_rng(0).integers(0, 256, (_N_RANDOM, BLOCK_BYTES), np.uint8)
    # 4 bits are -8 to 7: without -8 the mean is 0, and the output depends on the input
    blocks |= ((blocks & 0x0F) == 0) * np.uint8(0x08)
    blocks |= ((blocks & 0xF0) == 0) * np.uint8(0x80)
    blocks[:, :2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
    return blocks.reshape(-1)


def _blocks(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return random blocks that fit tensors of n_bytes, starting at any of the first ones. Drawing all would take
    minutes.
    """
    return np.resize(_random_blocks(), _N_RANDOM * BLOCK_BYTES + n_bytes)


def _data(tensor: Tensor, i: int, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return the values of the i-th tensor."""
    if tensor.kind == "q4_0":
        start = i * 40_503 % _N_RANDOM * BLOCK_BYTES  # tensors of one size do not copy each other
        return blocks[start : start + tensor.n_bytes]
    n = int(np.prod(tensor.shape))
    noise = np.random.default_rng(i).standard_normal(n)
    values = {
        "ones": np.ones(n),
        "zeros": np.zeros(n),
        "scale": np.full(n, n**-0.5),
        "quarter": np.where(np.arange(n) < n // 4, 1.0, 1e30),  # divisors of frequencies: the others do not turn
        "half": 0.5 * noise,
        "router": noise / math.sqrt(tensor.shape[0]),
        "decay": -0.01 - 0.05 * np.abs(noise),  # a state fades slowly
    }
    return values[tensor.kind].astype(np.float32)
