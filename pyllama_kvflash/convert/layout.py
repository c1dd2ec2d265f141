"""The tensors of a drafter: their names in the source and in GGUF, and the shapes that config.json gives them.

Names and shapes follow llama_model_dflash::load_arch_tensors
(vendor/llama.cpp/src/models/dflash.cpp).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.convert.hparams import Drafter, Size
from pyllama_kvflash.convert.weights import Stored, Weights
from pyllama_kvflash.errors import ModelError

_UNUSED = (".rotary_emb.inv_freq", "t2d")  # name endings of unused tensors
_ORDINALS = ("first", "second", "third")


class Slot(NamedTuple):
    """A tensor that llama.cpp loads.

    dims: in torch's order, each a name in Drafter.sizes, or names as a product or a sum: "heads*head_dim", "hidden+rank".
    needed: whether the tensor must exist.
    """

    source: str
    name: str
    dims: tuple[str, ...]
    needed: bool = True


class Tensor(NamedTuple):
    """A tensor to write.

    shape: in torch's order.
    keep: whether the tensor is written as f32 or i64, whatever the type of the file.
    stored: the source of the data; None: `values`.
    rows: for each row of a matrix, or element of a vector, the stored row that goes there; None: the stored order.
    """

    name: str
    shape: tuple[int, ...]
    keep: bool
    stored: Stored | None = None
    values: npt.NDArray[np.float32] | npt.NDArray[np.int64] | None = None
    rows: npt.NDArray[np.int64] | None = None


def plan_tensors(drafter: Drafter, weights: Weights) -> list[Tensor]:
    """Return all tensors of the file. Raises ModelError for a tensor that is missing, unknown, or of another shape."""
    res = []
    left = {name for name in weights.tensors if not name.endswith(_UNUSED)}
    if drafter.rope_factors:
        factors = np.array(drafter.rope_factors, np.float32)
        res.append(Tensor("rope_freqs.weight", factors.shape, keep=True, values=factors))
    for slot in slots(drafter):
        stored = weights.get(slot.source)
        if stored is None:
            if slot.needed:
                msg = f"{weights.folder} has no tensor {slot.source}: the weights are not complete"
                raise ModelError(msg)
            continue
        _check_shape(slot, stored, drafter)
        left.discard(slot.source)
        if slot.name:
            res.append(_tensor(slot, stored, drafter))
    if left:
        name = weights.tensors[min(left)].name
        msg = f"{name} is in the weights, and is not part of a {drafter.architecture} that llama.cpp knows"
        raise ModelError(msg)
    return res


def slots(drafter: Drafter) -> Iterator[Slot]:
    """Yield every tensor that a drafter may have. Tensors with the name "" are checked, but not written."""
    d = drafter
    reduced = d.size("draft vocab") < d.size("vocab")
    yield Slot("fc.weight", "fc.weight", ("hidden", "captured*hidden"))
    yield Slot("hidden_norm.weight", "enc.output_norm.weight", ("hidden",))
    yield Slot("norm.weight", "output_norm.weight", ("hidden",))
    embeddings = "token_embd.weight" if d.own_embeddings else ""
    yield Slot("embed_tokens.weight", embeddings, ("vocab", "hidden"), needed=False)
    yield Slot("lm_head.weight", "output.weight" if d.own_head else "", ("draft vocab", "hidden"), needed=reduced)
    yield Slot("d2t", "d2t", ("draft vocab",), needed=reduced)
    for i in range(d.n_layer):
        parts = (*_block(d), *(_convolutions() if d.dflash2 else ()))
        yield from (s._replace(source=f"layers.{i}.{s.source}", name=f"blk.{i}.{s.name}") for s in parts)
    if d.dspark:
        yield Slot("markov_head.markov_w1.weight", "markov_w1.weight", ("vocab", "rank"))
        yield Slot("markov_head.markov_w2.weight", "markov_w2.weight", ("draft vocab", "rank"))
        yield Slot("confidence_head.proj.weight", "conf_proj.weight", ("one", "hidden+rank"), needed=False)
        yield Slot("confidence_head.proj.bias", "conf_proj.bias", ("one",), needed=False)
    if d.dflash2:
        selector = "candidate_selector."
        yield Slot(f"{selector}predecessor_codebook", "selector_predecessor.weight", ("vocab", "selector"))
        yield Slot(f"{selector}successor_codebook", "selector_successor.weight", ("vocab", "selector"))
        yield Slot(f"{selector}hidden_projection.weight", "selector_hidden.weight", ("selector", "hidden"))


def _block(d: Drafter) -> Iterator[Slot]:
    """Yield the tensors of a block, with sources and names that lack the block's prefix. In a Gemma 4 drafter, keys also serve as values."""
    yield Slot("input_layernorm.weight", "attn_norm.weight", ("hidden",))
    yield Slot("self_attn.q_proj.weight", "attn_q.weight", ("heads*head_dim", "hidden"))
    yield Slot("self_attn.k_proj.weight", "attn_k.weight", ("kv heads*head_dim", "hidden"))
    if not d.gemma:
        yield Slot("self_attn.v_proj.weight", "attn_v.weight", ("kv heads*head_dim", "hidden"))
    yield Slot("self_attn.o_proj.weight", "attn_output.weight", ("hidden", "heads*head_dim"))
    yield Slot("self_attn.q_norm.weight", "attn_q_norm.weight", ("head_dim",))
    yield Slot("self_attn.k_norm.weight", "attn_k_norm.weight", ("head_dim",))
    yield Slot("self_attn.sinks", "attn_sinks.weight", ("heads",), needed=False)
    if d.gemma:
        yield Slot("post_attention_layernorm.weight", "post_attention_norm.weight", ("hidden",))
        yield Slot("pre_feedforward_layernorm.weight", "ffn_norm.weight", ("hidden",))
        yield Slot("post_feedforward_layernorm.weight", "post_ffw_norm.weight", ("hidden",))
        yield Slot("layer_scalar", "layer_output_scale.weight", ("one",), needed=False)
    else:
        yield Slot("post_attention_layernorm.weight", "ffn_norm.weight", ("hidden",))
    yield Slot("mlp.gate_proj.weight", "ffn_gate.weight", ("ffn", "hidden"))
    yield Slot("mlp.up_proj.weight", "ffn_up.weight", ("ffn", "hidden"))
    yield Slot("mlp.down_proj.weight", "ffn_down.weight", ("hidden", "ffn"))


def _convolutions() -> Iterator[Slot]:
    for source, name in (("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")):
        yield Slot(f"{source}.base_kernel", f"{name}_base", ("two", "kernel", "hidden"))
        yield Slot(f"{source}.kernel_projection.weight", f"{name}_proj.weight", ("two*kernel*groups", "hidden"))


def _check_shape(slot: Slot, stored: Stored, drafter: Drafter) -> None:
    dims = [_dim(dim, drafter) for dim in slot.dims]
    want = tuple(dim.value for dim in dims)
    if stored.shape == want:
        return
    if len(stored.shape) != len(want):
        msg = f"{stored.name} is {stored.size}, and config.json makes it {' x '.join(map(str, want))}"
        raise ModelError(f"{msg} ({', '.join(dim.key for dim in dims)})")
    i = next(i for i, n in enumerate(want) if stored.shape[i] != n)
    msg = f"{stored.name} is {stored.size}, and config.json makes its {_ORDINALS[i]} dimension {want[i]}: {dims[i].key}"
    raise ModelError(msg)


def _dim(dim: str, drafter: Drafter) -> Size:
    """Return a dimension, whose name shows its factors: "num_attention_heads = 4, head_dim = 32"."""
    sums = [[drafter.sizes[name] for name in part.split("*")] for part in dim.split("+")]
    names = [f"{s.key} = {s.value}" for part in sums for s in part if not s.key.isdecimal()]
    return Size(", ".join(names), sum(math.prod(s.value for s in part) for part in sums))


def _tensor(slot: Slot, stored: Stored, drafter: Drafter) -> Tensor:
    """Return the tensor to write. Vectors, norms and names that do not end in ".weight" stay f32, as in upstream's
    converter.
    """
    if slot.source == "d2t":
        return Tensor(slot.name, stored.shape, keep=True, values=_targets(stored, drafter))
    stored.check_floats()
    keep = len(stored.shape) < 2 or slot.name.endswith("_norm.weight") or not slot.name.endswith(".weight")  # noqa: PLR2004
    rows = None
    if not drafter.neox and slot.name.endswith(
        ("attn_q.weight", "attn_k.weight", "attn_q_norm.weight", "attn_k_norm.weight")
    ):
        rows = _halves(stored.shape[0], drafter.size("head_dim"), drafter.n_rot)
    return Tensor(slot.name, stored.shape, keep, stored, rows=rows)


def _targets(stored: Stored, drafter: Drafter) -> npt.NDArray[np.int64]:
    """Return the target's id for each token of the drafter, (n,) int64. The source stores the offset from the drafter's id."""
    offsets = stored.integers()
    ids = offsets + np.arange(len(offsets))
    n_vocab = drafter.size("vocab")
    outside = (ids < 0) | (ids >= n_vocab)
    if outside.any():
        i = int(outside.argmax())
        msg = f"{stored.name} maps token {i} to {ids[i]}, and the target's are 0 to {n_vocab - 1} (vocab_size = {n_vocab})"
        raise ModelError(msg)
    if len(np.unique(ids)) != len(ids):
        msg = f"{stored.name} maps two tokens to one token of the target"
        raise ModelError(msg)
    return ids


def _halves(n: int, head_dim: int, n_rot: int) -> npt.NDArray[np.int64]:
    """Return the order of rows, (n,) int64, that puts the halves of each head's rotated rows one after the other.

    In the source, the first n_rot rows of a head are rotated in adjacent pairs. In the new order, they are 0, 2, 4, ...,
    1, 3, 5, ...; the other rows follow unchanged.
    """
    head = np.arange(head_dim)
    head[:n_rot] = head[:n_rot].reshape(-1, 2).T.reshape(-1)
    return (np.arange(0, n, head_dim)[:, None] + head).reshape(-1).astype(np.int64)
