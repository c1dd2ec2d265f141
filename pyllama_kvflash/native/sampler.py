"""llama.cpp's sampler chain, and its grammars."""

import math
import re
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pyllama_kvflash import errors
from pyllama_kvflash.native.context import Context
from pyllama_kvflash.native.lib import check, ffi, last_error, lib
from pyllama_kvflash.native.model import Model


@dataclass(frozen=True, slots=True)
class Grammar:
    """GBNF that an answer keeps to, from its rule `root` on.

    after: what comes before the answer, and the grammar knows. lazy: it holds from where one of the patterns (regular
    expressions, from the answer's start) or tokens is found, but not between `thinking` and one of `thought`.
    """

    text: str
    after: str = ""
    lazy: bool = False
    patterns: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    thinking: str = ""
    thought: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings that choose the next token. Names and defaults are llama.cpp's.

    temperature 0 or below: greedy. top_k 0, top_p 1, min_p 0, repeat_penalty 1, frequency_penalty and presence_penalty 0: off.
    logit_bias: (token, what is added to its logit). grammar: what the answer keeps to, as GBNF or a Grammar; "": nothing
    (json_grammar() makes one of a JSON schema). seed None: a random one. n_probs: how likely each token was by the logits, and
    how likely the n most likely ones; None: do not look.

    Raises UsageError for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | Grammar = ""
    seed: int | None = None
    n_probs: int | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        errors.check_range(self.temperature, -math.inf, 1e3, "temperature (--temp)")
        errors.check_range(self.top_k, 0, 2**31 - 1, "top_k (--top-k)")
        errors.check_range(self.top_p, 0, 1, "top_p (--top-p)")
        errors.check_range(self.min_p, 0, 1, "min_p (--min-p)")
        errors.check_range(self.repeat_penalty, 1e-3, 1e3, "repeat_penalty (--repeat-penalty)")
        errors.check_range(self.repeat_last_n, 0, 2**20, "repeat_last_n (--repeat-last-n)")
        errors.check_range(self.frequency_penalty, -2, 2, "frequency_penalty (--frequency-penalty)")
        errors.check_range(self.presence_penalty, -2, 2, "presence_penalty (--presence-penalty)")
        for _, bias in self.logit_bias:
            errors.check_range(bias, -math.inf, 1e3, "logit_bias (--logit-bias)")
        if self.n_probs is not None:
            errors.check_range(self.n_probs, 0, 2**31 - 1, "n_probs")
        if self.seed is not None:
            errors.check_range(self.seed, 0, 2**32 - 2, "seed (-s/--seed)")

    @property
    def penalises(self) -> bool:
        """Whether what was said before changes what is likely."""
        return self.repeat_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature <= 0


_DEFAULT_SEED = 0xFFFFFFFF  # makes llama.cpp draw one


class Sampler:
    """A chain built from a Sampling, in llama.cpp's order: biases, penalties, top-k, top-p, min-p, temperature, draw."""

    def __init__(self, sampling: Sampling, model: Model) -> None:
        """Raises UsageError (the grammar is none, a bias is of no token of the model)."""
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._handle: Any = ffi.gc(chain, lib.llama_sampler_free)
        self._token: Any = ffi.new("llama_token *")
        self._n_probs = sampling.n_probs
        self._grammar: Any = _grammar(sampling.grammar, model) if sampling.grammar else None
        self._plain = sampling.greedy and not (sampling.penalises or sampling.logit_bias or sampling.grammar)
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
            copied = ffi.new("struct kvf_grammar **")
            check(lib.kvf_grammar_copy(self._grammar, copied))
            res._grammar = ffi.gc(copied[0], lib.kvf_grammar_free)  # noqa: SLF001
        res._token = ffi.new("llama_token *")  # noqa: SLF001
        return res

    def sample(self, ctx: Context, i: int = -1) -> int:
        """Choose a token from the logits of token i of the last batch (-1: this sequence's last), and record it in the
        chain. Raises UsageError (the grammar lets nothing through that the model has).
        """
        native, at, _ = ctx.output
        i = at if i == -1 else i
        if self._plain:  # llama.cpp's sampler copies all candidates first: a few percent of a step on a GPU
            check(lib.kvf_argmax(native, i, self._token))
            return int(self._token[0])
        if self._grammar:
            if (status := lib.kvf_sample(native, i, self._handle, self._grammar, self._token)) == lib.KVF_E_STATE:
                raise errors.UsageError(last_error())
            check(status)
            return int(self._token[0])
        token: int = lib.llama_sampler_sample(self._handle, native, i)
        return token

    def probs(self, ctx: Context, token: int, i: int = -1) -> tuple[float, tuple[tuple[int, float], ...]] | None:
        """Return how likely a token was by the logits of token i of the last batch, before anything was done to them, and how
        likely the most likely ones were, in logarithms; None: that was not asked for.
        """
        if self._n_probs is None:
            return None
        logits = ctx.logits(i).astype(np.float64)
        logits -= logits.max()
        logits -= np.log(np.exp(logits).sum())
        n = min(self._n_probs, len(logits))
        best = np.argpartition(-logits, n - 1)[:n] if n else np.array([], int)
        best = best[np.argsort(-logits[best], kind="stable")]
        return float(logits[token]), tuple((int(t), float(logits[t])) for t in best)


_QUOTED = r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|<[^>]*>|#[^\n]*'
_PARTS = re.compile(_QUOTED + r"|\{\s*([0-9]+)\s*(?:,\s*([0-9]*)\s*)?\}|::=|[()]", re.DOTALL)
"""What a grammar quotes, how often something may come, where a rule begins, and groups."""
_MAX_GROUPS, _MAX_RULES = 200, 20_000


def _check_size(text: str) -> None:
    """Raise UsageError for a grammar of which llama.cpp would make rules until no memory is left, or call itself until no
    stack is: it does not look at these.
    """
    depth = n_rules = 0
    for found in _PARTS.finditer(text):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        n_rules += found[0] == "::="
        if depth > _MAX_GROUPS or n_rules > _MAX_RULES:
            what = (
                f"its groups are more than {_MAX_GROUPS} deep"
                if depth > _MAX_GROUPS
                else f"it has more than {_MAX_RULES:,} rules"
            )
            msg = f"the grammar cannot be used: {what}"
            raise errors.UsageError(msg)
        low, high = found[1] or "0", found[2] or ""
        if max(len(low), len(high)) > 9 or (high and int(high) < int(low)):  # noqa: PLR2004 (digits)
            msg = f"the grammar cannot be used: nothing can come {''.join(found[0].split())[:50]} times"
            raise errors.UsageError(msg)


_NAMES = re.compile(_QUOTED + r"|([a-zA-Z][a-zA-Z0-9-]*)", re.DOTALL)


def either(one: str, other: str) -> str:
    """Return the grammar of the texts of two grammars (GBNF)."""

    def renamed(text: str, prefix: str) -> str:
        return _NAMES.sub(lambda found: f"{prefix}-{found[1]}" if found[1] else found[0], text)

    return f"root ::= a-root | b-root\n{renamed(one, 'a')}\n{renamed(other, 'b')}"


def _grammar(grammar: str | Grammar, model: Model) -> Any:
    given = grammar if isinstance(grammar, Grammar) else Grammar(grammar)
    _check_size(given.text)
    found, params = ffi.new("struct kvf_grammar **"), ffi.new("struct kvf_grammar_params *")
    keep = params.text, params.after, params.thinking = [_text(t) for t in (given.text, given.after, given.thinking)]
    patterns, thought = ([_text(t) for t in texts] for texts in (given.patterns, given.thought))
    lists = ffi.new("char *[]", patterns), ffi.new("char *[]", thought), ffi.new("llama_token[]", list(given.tokens))
    params.lazy = given.lazy
    params.patterns, params.thought, params.tokens = lists
    params.n_patterns, params.n_thought, params.n_tokens = len(patterns), len(thought), len(given.tokens)
    try:
        check(lib.kvf_grammar_new(model.vocab, params, found))
    except errors.UsageError as err:
        msg = f"the grammar cannot be used: {err}"
        raise errors.UsageError(msg) from None
    del keep  # the library has copied all of it
    return ffi.gc(found[0], lib.kvf_grammar_free)


def check_grammar(grammar: str, model: Model) -> None:
    """Raise UsageError unless a grammar (GBNF) can be used with a model."""
    _grammar(grammar, model)


def _text(text: str) -> Any:
    """Return a text for C, which takes its first zero byte for its end."""
    if "\0" in text:
        msg = "the grammar cannot be used: it has a zero byte"
        raise errors.UsageError(msg)
    try:
        return ffi.new("char[]", text.encode())
    except UnicodeEncodeError:
        msg = "the grammar cannot be used: it is not Unicode text"
        raise errors.UsageError(msg) from None


def _biases(biases: tuple[tuple[int, float], ...], model: Model) -> tuple[int, int, Any]:
    for token, _ in biases:
        if not 0 <= token < model.n_vocab:
            msg = f"logit_bias is for token {token}: ids are 0 to {model.n_vocab - 1}"
            raise errors.UsageError(msg)
    return model.n_vocab, len(biases), ffi.new("struct llama_logit_bias[]", list(biases))


def _clone(sampler: Any) -> Any:
    return ffi.gc(lib.llama_sampler_clone(sampler), lib.llama_sampler_free)
