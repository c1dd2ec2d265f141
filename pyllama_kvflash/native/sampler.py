"""llama.cpp's sampler chain."""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

from pyllama_kvflash import errors
from pyllama_kvflash.native.context import Context
from pyllama_kvflash.native.lib import check, ffi, lib


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings that choose the next token. Names and defaults are llama.cpp's.

    temperature 0 or below: greedy. top_k 0, top_p 1, min_p 0, repeat_penalty 1: off. seed None: a random one.

    Raises UsageError for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        errors.check_range(self.temperature, -math.inf, 1e3, "temperature (--temp)")
        errors.check_range(self.top_k, 0, 2**31 - 1, "top_k (--top-k)")
        errors.check_range(self.top_p, 0, 1, "top_p (--top-p)")
        errors.check_range(self.min_p, 0, 1, "min_p (--min-p)")
        errors.check_range(self.repeat_penalty, 1e-3, 1e3, "repeat_penalty (--repeat-penalty)")
        errors.check_range(self.repeat_last_n, 0, 2**20, "repeat_last_n (--repeat-last-n)")
        if self.seed is not None:
            errors.check_range(self.seed, 0, 2**32 - 2, "seed (-s/--seed)")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature <= 0


_DEFAULT_SEED = 0xFFFFFFFF  # makes llama.cpp draw one


class Sampler:
    """A chain built from a Sampling, in llama.cpp's order: penalties, top-k, top-p, min-p, temperature, draw."""

    def __init__(self, sampling: Sampling, n_vocab: int) -> None:
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._handle: Any = ffi.gc(chain, lib.llama_sampler_free)
        self._token: Any = ffi.new("llama_token *")
        self._plain = sampling.greedy and sampling.repeat_penalty == 1.0
        if sampling.repeat_penalty != 1.0:
            self._add(
                lib.llama_sampler_init_penalties(n_vocab, sampling.repeat_last_n, sampling.repeat_penalty, 0.0, 0.0)
            )
        if sampling.greedy:
            self._add(lib.llama_sampler_init_greedy())
            return
        self._add(lib.llama_sampler_init_top_k(sampling.top_k))
        self._add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
        self._add(lib.llama_sampler_init_min_p(sampling.min_p, 1))
        self._add(lib.llama_sampler_init_temp(sampling.temperature))
        self._add(lib.llama_sampler_init_dist(_DEFAULT_SEED if sampling.seed is None else sampling.seed))

    def _add(self, smpl: Any) -> None:
        lib.llama_sampler_chain_add(self._handle, smpl)

    def fork(self) -> Self:
        """Return a sampler that is where this one is: given the same logits, it draws the same tokens from here on."""
        res = copy(self)
        res._handle = ffi.gc(lib.llama_sampler_clone(self._handle), lib.llama_sampler_free)  # noqa: SLF001
        res._token = ffi.new("llama_token *")  # noqa: SLF001
        return res

    def sample(self, ctx: Context, i: int = -1) -> int:
        """Choose a token from the logits of token i of the last batch (-1: this sequence's last), and record it in the
        chain.
        """
        native, at, _ = ctx.output
        i = at if i == -1 else i
        if self._plain:  # llama.cpp's sampler copies all candidates first: a few percent of a step on a GPU
            check(lib.kvf_argmax(native, i, self._token))
            return int(self._token[0])
        token: int = lib.llama_sampler_sample(self._handle, native, i)
        return token
