"""Every refusal: the reason and the alternative. Errors and docs/REFUSALS.md are made from these tables."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """The reason for a refusal and the alternative, which together make a sentence. `{}` stands for a value."""

    reason: str
    alternative: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.alternative}"


_FULL = "run it with the full cache: `pool` off"
_NO_GAIN = "run it with the full cache, which is as small: `pool` off"
_OTHER = "give `policy` qk and `coarse` off"
_AGAIN = "clear the sequence and read its tokens again"
_PICKS = "by which each token picks the positions it attends to, and which a pool cannot page"

MODELS = {
    "encoder": Refusal(
        "it is an encoder, which produces no tokens, and whose tokens attend to those after them",
        "for embeddings use llama.cpp's llama-embedding, for text a decoder",
    ),
    "encoder-decoder": Refusal(
        "it is an encoder-decoder model, which reads the prompt with an encoder that keeps no KV cache",
        "use a decoder, or llama.cpp itself",
    ),
    "diffusion": Refusal(
        "it is a diffusion model, which works on all tokens at once and keeps no KV cache",
        "use llama.cpp's llama-diffusion-cli",
    ),
    "draft head": Refusal(
        "it is a draft head, which computes from the hidden states of another model",
        "run the model that it was made for",
    ),
}
"""Models that cannot be run at all, by native.Model.refusal."""

MEMORIES = {
    "llama_kv_cache_dsa": Refusal(f"beside the KV cache it keeps an index {_PICKS}", _FULL),
    "llama_kv_cache_dsa_iswa": Refusal(f"beside the KV cache and a sliding window it keeps an index {_PICKS}", _FULL),
    "llama_kv_cache_msa": Refusal(f"beside the KV cache it keeps an index of blocks {_PICKS}", _FULL),
    "llama_kv_cache_dsv4": Refusal("its rows stand for 4 or 128 positions each, and a pool's for one", _FULL),
    "llama_memory_hybrid_idx": Refusal(
        f"beside the KV cache and a recurrent state it keeps an index {_PICKS}",
        _FULL,
    ),
    "llama_memory_recurrent": Refusal("it is one recurrent state of a fixed size, with nothing to page", _NO_GAIN),
}
"""Memories that cannot be pooled, by their class in llama.cpp. Their models run with the full cache."""

WINDOWS = Refusal(
    "all attention layers have a sliding window, and so a cache that does not grow with the context", _NO_GAIN
)
"""For a memory with sliding windows that has no layer of full attention."""

_WINDOWED = {"llama_kv_cache_iswa", "llama_memory_hybrid_iswa"}

CALLS = {
    "going back in a recurrent state": Refusal(
        "the recurrent state of this model cannot go back to position {}, because it keeps no earlier state",
        _AGAIN,
    ),
    "going back in a sliding window": Refusal(
        "the sliding window before position {} is gone, because later positions have overwritten it",
        _AGAIN,
    ),
    "restoring a whole-context state": Refusal(
        "a whole-context state cannot be restored into a pool, because that re-packs the cells across chunks",
        "page in the chunks, and restore the partial state",
    ),
    "tokens that share a position (images of M-RoPE models)": Refusal(
        "position {} of sequence {} is already in the pool, which has one cell per position",
        "tokens that share a position (those of an image, for example) need the full cache",
    ),
    "tokens of several sequences": Refusal(
        "a token of a pool belongs to one sequence, not to {}",
        "decode it for each, or use the full cache",
    ),
    "sequences in streams of their own, and seq_cp() from one to another": Refusal(
        "the sequences of a pool share its cells, but this cache has a separate stream for each sequence",
        "set kv_unified, or use the full cache",
    ),
}
"""Calls of the native library that a pool refuses, in the library's own words."""

CODES = {
    "a KV cache on a device that is neither the CPU nor CUDA's": Refusal(
        "codes need a KV cache on the CPU or on a CUDA GPU, and this one is on another device",
        f"{_OTHER}, or the CPU (`n_gpu_layers` 0)",
    ),
    "a pool that is too large for a GPU's shared memory": Refusal(
        "a block of this GPU cannot choose among the {} tokens of the pool", _OTHER
    ),
    "ALiBi, which adds positions to the attention as a bias": Refusal(
        "ALiBi needs the position of each cell, which guests do not have", _OTHER
    ),
    "rows of keys that are not divided into heads": Refusal(
        "the K rows of layer {} are not divided into heads", _OTHER
    ),
    "codes (`coarse`) on a GPU older than Turing, or on one whose blocks have too little memory for the model's heads": Refusal(
        "this GPU cannot attend to codes: it is older than Turing, or its blocks have too little memory",
        f"{_OTHER}, or the CPU (`n_gpu_layers` 0)",
    ),
    "codes (`coarse`) of a model whose attention CUDA does not compute": Refusal(
        "the attention is computed on another device than that of its KV cache",
        f"{_OTHER}, or give `flash_attn` off",
    ),
}
"""Pools that cannot have codes, and so no policy fresh. The reasons are the library's own words."""

ON_DISK = Refusal(
    "layers on a GPU fetch from pinned memory, and records on disk (`disk`) cannot be pinned",
    f"{_OTHER}, or leave `disk` out",
)
"""Codes with records on disk and a layer on a GPU. The engine refuses them."""

SHIFT = Refusal(
    "a full context is not shifted, because the chunks outside the pool would have to be shifted, too",
    "use a larger `n_ctx`, which costs a pool no memory",
)
"""Context shift: llama_memory_can_shift() returns false, and the engine reports that the tokens do not fit."""


def of_model(kind: str) -> str:
    """Return why a model cannot be run, and the alternative. kind: a key of MODELS."""
    return str(MODELS[kind])


def of_codes(error: str) -> str:
    """Return why a pool cannot have codes, and the alternative. error: the library's message."""
    known = (r for r in (*CODES.values(), ON_DISK) if error == r.reason)
    return str(next(known, Refusal(error, _OTHER)))


def of_memory(memory_class: str, n_layer: int, error: str) -> str:
    """Return why a memory cannot be pooled, and the alternative.

    n_layer: layers with full attention. error: the library's message, used for a class that no table has.
    """
    empty = n_layer == 0 and memory_class in _WINDOWED
    refusal = WINDOWS if empty else MEMORIES.get(memory_class)
    return f"its memory ({memory_class}) cannot be pooled, because {refusal}" if refusal else f"{error}; {_FULL}"
