"""llama.cpp's sampler chain."""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import errors
from pyllama_kvflash.native.context import Context
from pyllama_kvflash.native.grammar import Follower, Grammar, unusable
from pyllama_kvflash.native.lib import check, ffi, last_error, lib
from pyllama_kvflash.native.model import Model, Tokens
from pyllama_kvflash.native.order import order_of

MAX_BIASES = 1024  # tokens of a logit_bias
MAX_PROBS = 1024  # likely tokens reported with each token of an answer
MAX_BREAKERS = 32  # of DRY: llama.cpp compares each one with every token of the vocabulary
MAX_BREAKER_BYTES = 40  # of each one: llama.cpp's limit
RANGES: dict[str, tuple[type[int | float], float, float]] = {
    "repeat_last_n": (int, 0, 2**20),
    "dry_multiplier": (float, 0, 100),
    "dry_base": (float, 1, 100),
    "dry_allowed_length": (int, 0, 2**20),
    "dry_penalty_last_n": (int, 0, 2**20),
    "top_n_sigma": (float, -1, 1000),
    "typical_p": (float, 0, 1),
    "min_keep": (int, 0, 2**20),
    "xtc_probability": (float, 0, 1),
    "xtc_threshold": (float, 0, 1),
    "dynatemp_range": (float, 0, 1000),
    "dynatemp_exponent": (float, 0, 100),
    "mirostat": (int, 0, 2),
    "mirostat_tau": (float, 0, 100),
    "mirostat_eta": (float, 0, 100),
}
"""Fields of Sampling that the protocols pass on unchanged, each with its type, least and largest value."""

_COLD = 2.0**-30
"""Temperatures below this are greedy. Distinct float32 logits of 1 or more differ by at least 2^-23. Divided by this, that is
128, and exp(-128) is 0 in float32: a draw would take the most likely token, too. At much lower temperatures logits become
infinite, their differences NaN, and any token could be drawn."""

_LOWEST = 2.0**-22
"""The lowest dynamic temperature, as a share of the highest: practically 0 in float32, but logits stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for choosing the next token. Names and defaults are llama.cpp's.

    A temperature is greedy if it is 0, or so low that only the most likely token has a chance. These values turn a sampler off: top_k 0,
    top_p 1, min_p 0, repeat_penalty 1, frequency_penalty and presence_penalty 0, and the defaults of typical_p, top_n_sigma,
    xtc_probability, dry_multiplier, dynatemp_range and mirostat.
    samplers: the samplers in their order, as names or as one text with ; between them. Those left out are not applied. mirostat
    replaces all samplers except the temperature.
    logit_bias: (token, bias added to its logit), 1,024 at most.
    grammar: constrains the answer: GBNF (json_grammar() makes it from a JSON schema) or a Grammar; "": no constraint.
    n_probs: report log-probabilities, from the raw logits, of each token and of the n_probs most likely ones (1,024 at most).

    Raises UsageError for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # last tokens considered by repeat_penalty, frequency_penalty and presence_penalty; 0: off
    frequency_penalty: float = 0.0  # penalty for each earlier occurrence of a token in the answer; 0: off
    presence_penalty: float = 0.0  # penalty for tokens already in the answer; 0: off
    dry_multiplier: float = 0.0  # DRY's penalty for a token that would repeat a sequence of the text; 0: off
    dry_base: float = 1.75  # factor of that penalty for each token beyond dry_allowed_length
    dry_allowed_length: int = 2  # longest sequence that may be repeated without penalty, in tokens
    dry_penalty_last_n: int = 64  # last tokens, of the prompt too, in which DRY looks for repetitions; 0: off
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")  # texts at which a repeated sequence ends
    top_n_sigma: float = -1.0  # keep logits within so many standard deviations of the largest one; 0 or below: off
    typical_p: float = 1.0  # keep this share of the probability, in tokens of typical surprise; 1: off
    min_keep: int = 0  # the fewest tokens that top_p, min_p, typical_p and XTC keep
    xtc_probability: float = 0.0  # how often XTC removes likely tokens; 0: never
    xtc_threshold: float = (
        0.1  # XTC removes tokens of at least this probability, except the least likely; above 0.5: off
    )
    dynatemp_range: float = 0.0  # temperature varies by up to this, lower when the model is confident; 0: constant
    dynatemp_exponent: float = 1.0  # how the temperature follows the entropy
    mirostat: int = 0  # 1 or 2: keep the surprise of the answer at mirostat_tau; 0: off
    mirostat_tau: float = 5.0  # mirostat's target surprise of a token, in bits
    mirostat_eta: float = 0.1  # mirostat's learning rate
    samplers: str | tuple[str, ...] = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
    """The order of samplers. Those left out are not applied."""
    ignore_eos: bool = False  # never draw a token that ends the answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias added to its logit); 15043+1, 15043-inf in text
    grammar: str | Grammar = ""
    seed: int | None = None  # None: a random one
    n_probs: int | None = None  # None: no probabilities are reported

    def __post_init__(self) -> None:
        """Check every value."""
        errors.check_range(self.temperature, 0, 1e3, "temperature", "0 is greedy")
        errors.check_range(self.top_k, 0, 2**31 - 1, "top_k")
        errors.check_range(self.top_p, 0, 1, "top_p")
        errors.check_range(self.min_p, 0, 1, "min_p")
        errors.check_range(self.repeat_penalty, 1e-3, 1e3, "repeat_penalty")
        errors.check_range(self.frequency_penalty, -2, 2, "frequency_penalty")
        errors.check_range(self.presence_penalty, -2, 2, "presence_penalty")
        for name, (_, low, high) in RANGES.items():
            errors.check_range(getattr(self, name), low, high, name)
        order_of(self.samplers)
        _check_breakers(self.dry_sequence_breakers)
        if len(self.logit_bias) > MAX_BIASES:
            msg = (
                f"logit_bias has {len(self.logit_bias):,} tokens, and may have {MAX_BIASES:,}, since each is"
                " looked at for every token of the answer: use a grammar for more"
            )
            raise errors.UsageError(msg)
        for _, bias in self.logit_bias:
            errors.check_range(bias, -math.inf, 1e3, "logit_bias")
        if self.n_probs is not None:
            errors.check_range(
                self.n_probs, 0, MAX_PROBS, "n_probs", "so many likely tokens are reported with each token"
            )
        if self.seed is not None:
            errors.check_range(self.seed, 0, 2**32 - 2, "seed", "leave it out for a random one")

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the probabilities, by a penalty."""
        return self.repeat_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)

    @property
    def active(self) -> tuple[str, ...]:
        """The samplers that have an effect, in their order."""
        off = {
            "penalties": not self.penalises,
            "dry": not (self.dry_multiplier and self.dry_penalty_last_n),
            "top_n_sigma": self.top_n_sigma <= 0,
            "top_k": self.top_k == 0,
            "typ_p": self.typical_p == 1,
            "top_p": self.top_p == 1,
            "min_p": self.min_p == 0,
            "xtc": self.xtc_probability == 0 or self.xtc_threshold > 0.5,  # noqa: PLR2004 (llama.cpp's)
            "temperature": False,
        }
        return ("temperature",) if self.mirostat else tuple(name for name in order_of(self.samplers) if not off[name])

    @property
    def greedy(self) -> bool:
        """Whether sampling is deterministic: it takes the most likely of the tokens that the samplers keep."""
        cold = self.temperature + (0 if self.mirostat else self.dynatemp_range) < _COLD
        names = self.active
        return cold and "temperature" in names and "xtc" not in names[: names.index("temperature")]


_DEFAULT_SEED = 0xFFFFFFFF  # makes llama.cpp draw one
_MIROSTAT_M = 100  # likely tokens from which mirostat 1 estimates; llama.cpp's
_CHANGING = {"penalties", "dry", "typ_p"}  # samplers that can change which token is the most likely


class Sampler:
    """A chain built from a Sampling, as llama.cpp builds it: biases, the samplers in their order, and a draw."""

    def __init__(self, sampling: Sampling, model: Model) -> None:
        """Raises UsageError (the grammar is invalid, or combined with ignore_eos; a bias names an unknown token)."""
        check_ends(sampling)
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._handle: Any = ffi.gc(chain, lib.llama_sampler_free)
        self._token: Any = ffi.new("llama_token *")
        self._n_probs = sampling.n_probs
        self._grammar = Follower(sampling.grammar, model) if sampling.grammar else None
        biases, names = _biases(sampling, model), _needed(sampling)
        self._plain = sampling.greedy and not (biases or names)
        self._top_k = sampling.top_k if names[:1] == ("top_k",) and not biases else 0
        self._dry_at = bool(biases) + names.index("dry") if "dry" in names else None  # its place in the chain
        self._n_dry = sampling.dry_penalty_last_n
        if biases:
            given = ffi.new("struct llama_logit_bias[]", biases)
            self._add(lib.llama_sampler_init_logit_bias(model.n_vocab, len(biases), given))
        for name in names:
            self._add(_MAKE[name](sampling, model))
        self._add(_draw(sampling, model))

    def _add(self, smpl: Any) -> None:
        lib.llama_sampler_chain_add(self._handle, smpl)

    def read(self, tokens: Tokens) -> None:
        """Read the tokens (n,) before the answer. DRY looks for repetitions in them, too, while penalties count only the answer."""
        if self._dry_at is not None:
            dry = lib.llama_sampler_chain_get(self._handle, self._dry_at)
            for token in tokens[-self._n_dry :].tolist():
                lib.llama_sampler_accept(dry, token)

    def fork(self) -> Self:
        """Return a copy in the same state: given the same logits, it draws the same tokens from here on."""
        res = copy(self)
        res._handle = _clone(self._handle)  # noqa: SLF001
        if self._grammar:
            res._grammar = self._grammar.fork()  # noqa: SLF001
        res._token = ffi.new("llama_token *")  # noqa: SLF001
        return res

    def sample(self, ctx: Context, i: int = -1) -> int:
        """Choose a token from the logits of the sequence's token i in the last batch (-1: its last), and record the choice in the chain.

        Raises BadLogitsError (NaN, for example), NativeError and UsageError (the grammar allows no token of the vocabulary).
        """
        output = ctx.output
        # llama.cpp's sampler copies all candidates first: a few percent of a step on a GPU
        chain = ffi.NULL if self._plain else self._handle
        grammar = self._grammar.handle if self._grammar else ffi.NULL
        status = lib.kvf_sample(output.native, output.row(i), chain, self._top_k, grammar, self._token)
        if self._grammar and status == lib.KVF_E_ARGUMENT:
            raise unusable(last_error())
        if self._grammar and status == lib.KVF_E_STATE:
            raise errors.UsageError(last_error())
        check(status)
        return int(self._token[0])

    def probs(self, ctx: Context, token: int, i: int = -1) -> tuple[float, tuple[tuple[int, float], ...]] | None:
        """Return the log-probability of a token, and the n_probs most likely tokens with theirs; None if n_probs is None. All come from
        the raw logits of the sequence's token i in the last batch (-1: its last).
        """
        if self._n_probs is None:
            return None
        logits = ctx.logits(i)
        top = logits.max()
        total = math.log(np.exp(logits - top).sum(dtype=np.float64)) + float(top)
        best = most(logits, self._n_probs)
        return float(logits[token]) - total, tuple((int(t), float(logits[t]) - total) for t in best)


def top_probability(ctx: Context, i: int = -1) -> float:
    """Return the probability of the most likely token after the sequence's token i in the last batch (-1: its last), accurate to 1 part
    in 10,000. Raises BadLogitsError (NaN, for example).
    """
    output, res = ctx.output, ffi.new("float *")
    check(lib.kvf_top_probability(output.native, output.row(i), res))
    return float(res[0])


_BLOCK = 64


def most(values: npt.NDArray[np.float32], n: int) -> npt.NDArray[np.intp]:
    """Return the indices of the n largest values, or of all if there are fewer, the largest first. values: (m,).

    Only a few values are sorted: those below the n-th largest block maximum are excluded first.
    """
    n, n_blocks = min(n, len(values)), len(values) // _BLOCK
    if n == 0:
        return np.empty(0, np.intp)
    among = values if n > n_blocks else values[: n_blocks * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    least = np.partition(among, len(among) - n)[len(among) - n]
    found = np.flatnonzero(values >= least)
    res: npt.NDArray[np.intp] = found[np.argsort(-values[found], kind="stable")[:n]]
    return res


def check_ends(sampling: Sampling) -> None:
    """Raise UsageError if ignore_eos would keep an answer from ending where its grammar does."""
    if sampling.ignore_eos and sampling.grammar:
        msg = "`ignore_eos` and a grammar cannot be combined: an answer ends where its grammar does"
        raise errors.UsageError(msg)


def _check_breakers(breakers: tuple[str, ...]) -> None:
    if len(breakers) > MAX_BREAKERS:
        msg = f"`dry_sequence_breakers` has {len(breakers):,} texts, and may have {MAX_BREAKERS}: leave some out"
        raise errors.UsageError(msg)
    for breaker in breakers:
        data = errors.encoded(breaker, "a text of `dry_sequence_breakers`")
        if not 1 <= len(data) <= MAX_BREAKER_BYTES or b"\0" in data:
            msg = (
                f"`dry_sequence_breakers` has {breaker[:MAX_BREAKER_BYTES]!r}: give texts of 1 to {MAX_BREAKER_BYTES}"
                " bytes without NUL"
            )
            raise errors.UsageError(msg)


def _needed(sampling: Sampling) -> tuple[str, ...]:
    """Return the samplers that can change the chosen token, in their order."""
    if sampling.mirostat:
        return () if sampling.greedy else ("temperature",)
    if not sampling.greedy:
        return sampling.active
    names = sampling.active[: sampling.active.index("temperature")]
    while names and names[-1] not in _CHANGING:  # it never changes the most likely token
        names = names[:-1]
    return names


def _dry(s: Sampling, model: Model) -> Any:
    breakers = [ffi.new("char[]", breaker.encode()) for breaker in s.dry_sequence_breakers]
    settings = s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n
    return lib.llama_sampler_init_dry(model.vocab, *settings, breakers, len(breakers))


def _penalties(s: Sampling, model: Model) -> Any:
    penalties = s.repeat_penalty, s.frequency_penalty, s.presence_penalty
    return lib.llama_sampler_init_penalties(model.n_vocab, s.repeat_last_n, *penalties)


def _temperature(s: Sampling, _model: Model) -> Any:
    change = 0.0 if s.mirostat else s.dynatemp_range
    lowest, highest = s.temperature - change, s.temperature + change
    if highest < _COLD:
        return lib.llama_sampler_init_temp_ext(0.0, 0.0, 1.0)
    if lowest < highest * _LOWEST:
        lowest = highest * _LOWEST
        return lib.llama_sampler_init_temp_ext((highest + lowest) / 2, (highest - lowest) / 2, s.dynatemp_exponent)
    return lib.llama_sampler_init_temp_ext(s.temperature, change, s.dynatemp_exponent)


_MAKE: dict[str, Callable[[Sampling, Model], Any]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": lambda s, _: lib.llama_sampler_init_top_n_sigma(s.top_n_sigma),
    "top_k": lambda s, _: lib.llama_sampler_init_top_k(s.top_k),
    "typ_p": lambda s, _: lib.llama_sampler_init_typical(s.typical_p, s.min_keep),
    "top_p": lambda s, _: lib.llama_sampler_init_top_p(s.top_p, s.min_keep),
    "min_p": lambda s, _: lib.llama_sampler_init_min_p(s.min_p, s.min_keep),
    "xtc": lambda s, _: lib.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, s.min_keep, _seed(s)),
    "temperature": _temperature,
}
"""Functions that make llama.cpp's samplers, by name."""


def _draw(s: Sampling, model: Model) -> Any:
    """Return a new sampler that chooses among the tokens that the other samplers keep."""
    if s.greedy:
        return lib.llama_sampler_init_greedy()
    if s.mirostat == 1:
        return lib.llama_sampler_init_mirostat(model.n_vocab, _seed(s), s.mirostat_tau, s.mirostat_eta, _MIROSTAT_M)
    if s.mirostat:
        return lib.llama_sampler_init_mirostat_v2(_seed(s), s.mirostat_tau, s.mirostat_eta)
    return lib.llama_sampler_init_dist(_seed(s))


def _seed(sampling: Sampling) -> int:
    return _DEFAULT_SEED if sampling.seed is None else sampling.seed


def _biases(sampling: Sampling, model: Model) -> list[tuple[int, float]]:
    """Return the logit biases by token, each token once."""
    for token, _ in sampling.logit_bias:
        if not 0 <= token < model.n_vocab:
            msg = f"logit_bias is for token {token:,}: ids are 0 to {model.n_vocab - 1:,}"
            raise errors.UsageError(msg)
    ends = dict.fromkeys(model.ends, -math.inf) if sampling.ignore_eos else {}
    return [(token, bias) for token, bias in sampling.logit_bias if token not in ends] + list(ends.items())


def _clone(sampler: Any) -> Any:
    return ffi.gc(lib.llama_sampler_clone(sampler), lib.llama_sampler_free)
