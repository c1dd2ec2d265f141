"""llama.cpp's sampler chain."""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import errors
from pyllama_kvflash.native.context import Context
from pyllama_kvflash.native.grammar import Follower, Grammar, unusable
from pyllama_kvflash.native.lib import check, ffi, last_error, lib
from pyllama_kvflash.native.model import Model

MAX_BIASES = 1024  # tokens of a logit_bias
MAX_PROBS = 1024  # likely tokens that are told with each token of an answer

_COLD = 2.0**-30
"""A temperature below it is greedy. Logits are float32: those of 1 or more that differ do so by 2^-23 or more, and that
divided by this is 128, where exp(-128) is 0 in float32: a draw takes the most likely token, too. Divided by far less, logits
are infinite, their differences are not numbers, and any token is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings that choose the next token. Names and defaults are llama.cpp's.

    temperature 0, or so near to 0 that only the most likely token has a chance: greedy. top_k 0, top_p 1, min_p 0,
    repeat_penalty 1, frequency_penalty and presence_penalty 0: off.
    logit_bias: (token, what is added to its logit). grammar: what the answer keeps to, as GBNF or a Grammar; "": nothing
    (json_grammar() makes one of a JSON schema). seed None: a random one. n_probs: how likely each token was by the logits, and
    how likely the n most likely ones, 1,024 at most; None: do not look. logit_bias has 1,024 tokens at most.

    Raises UsageError for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # last tokens that repeat_penalty and the others penalize; 0: off
    frequency_penalty: float = 0.0  # for each time that a token was generated; 0: off
    presence_penalty: float = 0.0  # for tokens already generated; 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit); 15043+1, 15043-inf in text
    grammar: str | Grammar = ""
    seed: int | None = None
    n_probs: int | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        errors.check_range(self.temperature, 0, 1e3, "temperature", "0 is greedy")
        errors.check_range(self.top_k, 0, 2**31 - 1, "top_k")
        errors.check_range(self.top_p, 0, 1, "top_p")
        errors.check_range(self.min_p, 0, 1, "min_p")
        errors.check_range(self.repeat_penalty, 1e-3, 1e3, "repeat_penalty")
        errors.check_range(self.repeat_last_n, 0, 2**20, "repeat_last_n")
        errors.check_range(self.frequency_penalty, -2, 2, "frequency_penalty")
        errors.check_range(self.presence_penalty, -2, 2, "presence_penalty")
        if len(self.logit_bias) > MAX_BIASES:
            msg = (
                f"logit_bias has {len(self.logit_bias):,} tokens, and may have {MAX_BIASES:,}, since each is"
                " looked at for every token of the answer: use a grammar for more"
            )
            raise errors.UsageError(msg)
        for _, bias in self.logit_bias:
            errors.check_range(bias, -math.inf, 1e3, "logit_bias")
        if self.n_probs is not None:
            errors.check_range(self.n_probs, 0, MAX_PROBS, "n_probs", "each token of the answer is told with so many")
        if self.seed is not None:
            errors.check_range(self.seed, 0, 2**32 - 2, "seed")

    @property
    def penalises(self) -> bool:
        """Whether what was said before changes what is likely."""
        return self.repeat_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _COLD


_DEFAULT_SEED = 0xFFFFFFFF  # makes llama.cpp draw one


class Sampler:
    """A chain built from a Sampling, in llama.cpp's order: biases, penalties, top-k, top-p, min-p, temperature, draw."""

    def __init__(self, sampling: Sampling, model: Model) -> None:
        """Raises UsageError (the grammar is none, a bias is of no token of the model)."""
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._handle: Any = ffi.gc(chain, lib.llama_sampler_free)
        self._token: Any = ffi.new("llama_token *")
        self._n_probs = sampling.n_probs
        self._grammar = Follower(sampling.grammar, model) if sampling.grammar else None
        self._plain = sampling.greedy and not (sampling.penalises or sampling.logit_bias)
        self._top_k = 0 if sampling.penalises or sampling.logit_bias else sampling.top_k
        if sampling.logit_bias:
            self._add(lib.llama_sampler_init_logit_bias(*_biases(sampling.logit_bias, model)))
        if sampling.penalises:
            penalties = sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty
            self._add(lib.llama_sampler_init_penalties(model.n_vocab, sampling.repeat_last_n, *penalties))
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
        res._handle = _clone(self._handle)  # noqa: SLF001
        if self._grammar:
            res._grammar = self._grammar.fork()  # noqa: SLF001
        res._token = ffi.new("llama_token *")  # noqa: SLF001
        return res

    def sample(self, ctx: Context, i: int = -1) -> int:
        """Choose a token from the logits of the sequence's token i in the last batch (-1: its last), and record it in the
        chain. Raises UsageError (the grammar lets nothing through that the model has).
        """
        output = ctx.output
        native, i = output.native, output.row(i)
        if self._grammar:
            chain, handle = ffi.NULL if self._plain else self._handle, self._grammar.handle
            status = lib.kvf_sample(native, i, chain, self._top_k, handle, self._token)
            if status == lib.KVF_E_ARGUMENT:
                raise unusable(last_error())
            if status == lib.KVF_E_STATE:
                raise errors.UsageError(last_error())
            check(status)
            return int(self._token[0])
        if self._plain:  # llama.cpp's sampler copies all candidates first: a few percent of a step on a GPU
            check(lib.kvf_argmax(native, i, self._token))
            return int(self._token[0])
        token: int = lib.llama_sampler_sample(self._handle, native, i)
        return token

    def probs(self, ctx: Context, token: int, i: int = -1) -> tuple[float, tuple[tuple[int, float], ...]] | None:
        """Return how likely a token was by the logits of token i of the last batch, before anything was done to them, and how
        likely the most likely ones were, in logarithms; None: that was not asked for.
        """
        if self._n_probs is None:
            return None
        logits = ctx.logits(i)
        top = logits.max()
        total = math.log(np.exp(logits - top).sum(dtype=np.float64)) + float(top)
        best = most(logits, self._n_probs)
        return float(logits[token]) - total, tuple((int(t), float(logits[t]) - total) for t in best)


_BLOCK = 64


def most(values: npt.NDArray[np.float32], n: int) -> npt.NDArray[np.intp]:
    """Return where the n largest of values (m,) are, the largest first; all of them if they are fewer.

    Sorts little: the n-th largest of the maxima of blocks leaves a few candidates.
    """
    n, n_blocks = min(n, len(values)), len(values) // _BLOCK
    if n == 0:
        return np.empty(0, np.intp)
    among = values if n > n_blocks else values[: n_blocks * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    least = np.partition(among, len(among) - n)[len(among) - n]
    found = np.flatnonzero(values >= least)
    res: npt.NDArray[np.intp] = found[np.argsort(-values[found], kind="stable")[:n]]
    return res


def _biases(biases: tuple[tuple[int, float], ...], model: Model) -> tuple[int, int, Any]:
    for token, _ in biases:
        if not 0 <= token < model.n_vocab:
            msg = f"logit_bias is for token {token:,}: ids are 0 to {model.n_vocab - 1:,}"
            raise errors.UsageError(msg)
    return model.n_vocab, len(biases), ffi.new("struct llama_logit_bias[]", list(biases))


def _clone(sampler: Any) -> Any:
    return ffi.gc(lib.llama_sampler_clone(sampler), lib.llama_sampler_free)
