"""Models of real shapes with random weights, written in seconds: for speed and exactness, never for quality.

Their vocabulary has only token ids, 0 to n_vocab - 1. Matrices are Q4_0. The same name always gives the same bytes.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import OutputError, UsageError
from pyllama_kvflash.files import Replacement

VERSION = 1  # of the written files: a kept file is used again only if it has this version
N_CTX = 1 << 21  # positions that the models claim to be trained for
ALIGNMENT = 32

_HEADER = 1 << 20  # most bytes of metadata and padding
_BLOCK, _BLOCK_BYTES = 32, 18  # elements and bytes of a block of Q4_0: an f16 scale, then 32 numbers of 4 bits
_SCALE = 0.004  # a matrix of 4,096 columns then keeps the size of what it multiplies
_N_RANDOM = 932_051  # random blocks, 16 MB; prime, so that no row of a matrix copies another


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The geometry of a model: a qwen3, or a qwen35 if interval is above 1; with experts, the moe of these. Sizes are
    numbers of elements.

    interval: every interval-th layer has full attention; the others are gated delta nets.
    n_state, n_group, n_value: a delta net has n_group key heads and n_value value heads of n_state.
    n_expert: experts of n_ff each; a token takes n_used of them, and in a hybrid one more that all tokens take.
    """

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_head_dim: int
    n_vocab: int = 32768
    interval: int = 1
    n_state: int = 0
    n_group: int = 0
    n_value: int = 0
    n_expert: int = 0
    n_used: int = 0

    @property
    def arch(self) -> str:
        """llama.cpp's name for the architecture."""
        return ("qwen35" if self.interval > 1 else "qwen3") + ("moe" if self.n_expert else "")

    @property
    def n_bytes(self) -> int:
        """Approximate size of the file in bytes, never too low."""
        return _HEADER + sum(t.n_bytes + ALIGNMENT for t in tensors(self))


SHAPES = {
    "8b": Shape(n_layer=36, n_embd=4096, n_ff=12288, n_head=32, n_head_kv=8, n_head_dim=128),
    "70b": Shape(n_layer=80, n_embd=8192, n_ff=28672, n_head=64, n_head_kv=8, n_head_dim=128),
    "27b-hybrid": Shape(
        n_layer=64, n_embd=5120, n_ff=17408, n_head=24, n_head_kv=4, n_head_dim=256,
        interval=4, n_state=128, n_group=16, n_value=48,
    ),
    "35b-a3b": Shape(
        n_layer=40, n_embd=2048, n_ff=512, n_head=16, n_head_kv=2, n_head_dim=256,
        interval=4, n_state=128, n_group=16, n_value=32, n_expert=256, n_used=8,
    ),
    "tiny": Shape(n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_head_dim=64, n_vocab=512),
    "tiny-hybrid": Shape(
        n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_head_dim=64, n_vocab=512,
        interval=2, n_state=64, n_group=2, n_value=4,
    ),
    "tiny-moe": Shape(
        n_layer=4, n_embd=256, n_ff=64, n_head=4, n_head_kv=2, n_head_dim=64, n_vocab=512,
        interval=2, n_state=64, n_group=2, n_value=4, n_expert=8, n_used=2,
    ),
}  # fmt: skip
"""The shapes by name: dense models of 8B and 70B, a 27B hybrid with 16 attention layers, a 35B one with experts and 10 such
layers, and three for tests on a CPU."""


class Tensor(NamedTuple):
    """A tensor to be written.

    shape: in GGML's order, the contiguous dimension first.
    kind: "q4_0", or the kind of its f32 values.
    """

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def n_bytes(self) -> int:
        """Bytes of its data."""
        n = int(np.prod(self.shape))
        return n // _BLOCK * _BLOCK_BYTES if self.kind == "q4_0" else 4 * n


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Yield all tensors of a model, in the order of the file."""
    s = shape
    yield Tensor("token_embd.weight", (s.n_embd, s.n_vocab), "q4_0")
    yield Tensor("output_norm.weight", (s.n_embd,), "ones")
    yield Tensor("output.weight", (s.n_embd, s.n_vocab), "q4_0")
    for i in range(s.n_layer):
        full = (i + 1) % s.interval == 0
        parts = [*(_attention(s) if full else _delta_net(s)), *_feed_forward(s)]
        yield from (Tensor(f"blk.{i}.{name}", dims, kind) for name, dims, kind in parts)


def _attention(s: Shape) -> Iterator[Tensor]:
    """Yield grouped-query attention with QK norm. In a hybrid, Q carries an output gate."""
    n_q, n_kv = s.n_head * s.n_head_dim, s.n_head_kv * s.n_head_dim
    yield Tensor("attn_q.weight", (s.n_embd, n_q * (2 if s.interval > 1 else 1)), "q4_0")
    yield Tensor("attn_k.weight", (s.n_embd, n_kv), "q4_0")
    yield Tensor("attn_v.weight", (s.n_embd, n_kv), "q4_0")
    yield Tensor("attn_output.weight", (n_q, s.n_embd), "q4_0")
    yield Tensor("attn_q_norm.weight", (s.n_head_dim,), "ones")
    yield Tensor("attn_k_norm.weight", (s.n_head_dim,), "ones")


def _delta_net(s: Shape) -> Iterator[Tensor]:
    n_mixed, n_inner = s.n_state * (2 * s.n_group + s.n_value), s.n_state * s.n_value
    yield Tensor("attn_qkv.weight", (s.n_embd, n_mixed), "q4_0")
    yield Tensor("attn_gate.weight", (s.n_embd, n_inner), "q4_0")
    yield Tensor("ssm_conv1d.weight", (4, n_mixed), "half")
    yield Tensor("ssm_dt.bias", (s.n_value,), "half")
    yield Tensor("ssm_a", (s.n_value,), "decay")
    yield Tensor("ssm_beta.weight", (s.n_embd, s.n_value), "q4_0")
    yield Tensor("ssm_alpha.weight", (s.n_embd, s.n_value), "q4_0")
    yield Tensor("ssm_norm.weight", (s.n_state,), "ones")
    yield Tensor("ssm_out.weight", (n_inner, s.n_embd), "q4_0")


def _feed_forward(s: Shape) -> Iterator[Tensor]:
    hybrid = s.interval > 1
    yield Tensor("attn_norm.weight", (s.n_embd,), "ones")
    yield Tensor("post_attention_norm.weight" if hybrid else "ffn_norm.weight", (s.n_embd,), "ones")
    shared = (("_shexp", ()),) if hybrid else ()
    for kind, many in (("_exps", (s.n_expert,)), *shared) if s.n_expert else (("", ()),):
        yield Tensor(f"ffn_gate{kind}.weight", (s.n_embd, s.n_ff, *many), "q4_0")
        yield Tensor(f"ffn_up{kind}.weight", (s.n_embd, s.n_ff, *many), "q4_0")
        yield Tensor(f"ffn_down{kind}.weight", (s.n_ff, s.n_embd, *many), "q4_0")
    if s.n_expert:
        yield Tensor("ffn_gate_inp.weight", (s.n_embd, s.n_expert), "router")
    if s.n_expert and hybrid:
        yield Tensor("ffn_gate_inp_shexp.weight", (s.n_embd,), "half")


def _keys(s: Shape) -> dict[str, int | float | list[int]]:
    """Return the metadata of the architecture."""
    res: dict[str, int | float | list[int]] = {
        "context_length": N_CTX,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff,
        "vocab_size": s.n_vocab,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.n_head_dim,
        "attention.value_length": s.n_head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
    }
    if s.n_expert:
        res |= {"expert_count": s.n_expert, "expert_used_count": s.n_used}
        res |= {"expert_feed_forward_length": s.n_ff, "expert_shared_feed_forward_length": s.n_ff}
    if s.interval == 1:
        return res
    n_rope = s.n_head_dim // 8  # pairs: a quarter of a head is rotated, as in the real ones, in three parts
    return {
        **res,
        "rope.dimension_count": 2 * n_rope,
        "rope.dimension_sections": [n_rope - 2 * (n_rope // 3), n_rope // 3, n_rope // 3, 0],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": s.n_state * s.n_value,
        "ssm.state_size": s.n_state,
        "ssm.time_step_rank": s.n_value,
        "ssm.group_count": s.n_group,
        "full_attention_interval": s.interval,
    }


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
        msg = f"{path} cannot be written: {err.strerror}"
        raise OutputError(msg) from None


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
    add: dict[type, Any] = {int: file.add_uint32, float: file.add_float32, list: file.add_array}
    for key, value in _keys(shape).items():
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
        shape = (*rows, n // _BLOCK * _BLOCK_BYTES)
        file.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.n_bytes, raw_dtype=q4_0)
    else:
        file.add_tensor_info(tensor.name, (*rows, n), np.dtype(np.float32), tensor.n_bytes)


@cache
def _random_blocks() -> npt.NDArray[np.uint8]:
    blocks = np.random.default_rng(0).integers(0, 256, (_N_RANDOM, _BLOCK_BYTES), np.uint8)
    # 4 bits are -8 to 7: without -8 the mean is 0, and the output depends on the input
    blocks |= ((blocks & 0x0F) == 0) * np.uint8(0x08)
    blocks |= ((blocks & 0xF0) == 0) * np.uint8(0x80)
    blocks[:, :2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
    return blocks.reshape(-1)


def _blocks(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return random blocks that fit tensors of n_bytes, starting at any of the first ones. Drawing all would take
    minutes.
    """
    return np.resize(_random_blocks(), _N_RANDOM * _BLOCK_BYTES + n_bytes)


def _data(tensor: Tensor, i: int, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return the values of the i-th tensor."""
    if tensor.kind == "q4_0":
        start = i * 40_503 % _N_RANDOM * _BLOCK_BYTES  # tensors of one size do not copy each other
        return blocks[start : start + tensor.n_bytes]
    n = int(np.prod(tensor.shape))
    noise = np.random.default_rng(i).standard_normal(n)
    values = {
        "ones": np.ones(n),
        "half": 0.5 * noise,
        "router": noise / math.sqrt(tensor.shape[0]),
        "decay": -0.01 - 0.05 * np.abs(noise),  # a state fades slowly
    }
    return values[tensor.kind].astype(np.float32)
