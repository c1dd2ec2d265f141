"""Grammars (GBNF) that constrain an answer. Each is checked and compiled once per model."""

import re
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self
from weakref import WeakKeyDictionary, proxy

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import errors
from pyllama_kvflash.native.lib import check, ffi, lib
from pyllama_kvflash.native.model import Model


@dataclass(frozen=True, slots=True)
class Grammar:
    """GBNF that constrains an answer, starting at the rule `root`.

    after: text that the grammar accepts before the answer begins. lazy: the grammar applies only from the first match of one of
    `patterns` (regular expressions; ^ is the answer's start), or from the first of `tokens`. What lies between `thinking` and one
    of `thought` does not count.
    """

    text: str
    after: str = ""
    lazy: bool = False
    patterns: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    thinking: str = ""
    thought: tuple[str, ...] = ()


_QUOTED = r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|<[^>]*>|#[^\n]*'
_PARTS = re.compile(_QUOTED + r"|\{\s*([0-9]+)\s*(?:,\s*([0-9]*)\s*)?\}|::=|[()]", re.DOTALL)
"""Quoted parts of a grammar, repetitions, definitions of rules, and parentheses."""
_MAX_GROUPS, _MAX_RULES, _MAX_REPEATED = 200, 20_000, 1_000_000


def _check_size(text: str) -> None:
    """Raise UsageError for a grammar that would exhaust llama.cpp's memory or stack. llama.cpp checks neither."""
    depth = n_rules = n_repeated = 0
    before = ""  # the last literal, class or group
    for found in _PARTS.finditer(text):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        n_rules += found[0] == "::="
        if found[1] is None:
            before = found[0]
            if depth > _MAX_GROUPS:
                raise unusable(f"its groups are more than {_MAX_GROUPS} deep")
            if n_rules > _MAX_RULES:
                raise unusable(f"it has more than {_MAX_RULES:,} rules")
            continue
        low, high = found[1], found[2] or ""
        if max(len(low), len(high)) > 9 or (high and int(high) < int(low)):  # noqa: PLR2004 (digits)
            raise unusable(f"nothing can come {''.join(found[0].split())[:50]} times")
        n_repeated += max(int(low), int(high or 0)) * len(before)
        if n_repeated > _MAX_REPEATED:
            raise unusable(f"what it repeats comes to more than {_MAX_REPEATED:,} characters")


def unusable(why: str) -> errors.UsageError:
    """Return the error for a grammar that cannot be used."""
    return errors.UsageError(f"the grammar cannot be used: {why}")


_NAMES = re.compile(_QUOTED + r"|([a-zA-Z][a-zA-Z0-9-]*)", re.DOTALL)


def either(one: str, other: str) -> str:
    """Return a grammar (GBNF) that accepts the texts of either of two grammars."""

    def renamed(text: str, prefix: str) -> str:
        return _NAMES.sub(lambda found: f"{prefix}-{found[1]}" if found[1] else found[0], text)

    return f"root ::= a-root | b-root\n{renamed(one, 'a')}\n{renamed(other, 'b')}"


_N_KEPT = 32  # compiled grammars of a model: enough for agents' tools and for waiting requests
_COMPILERS: WeakKeyDictionary[Model, Callable[[Grammar], Any]] = WeakKeyDictionary()
_MUTEX = threading.Lock()


def _compiled(grammar: str | Grammar, model: Model) -> Any:
    """Return a compiled grammar in its initial state. Raises UsageError."""
    with _MUTEX:
        compiler = _COMPILERS.get(model) or _COMPILERS.setdefault(model, _compiler(model))
    return compiler(grammar if isinstance(grammar, Grammar) else Grammar(grammar))


def _compiler(model: Model) -> Callable[[Grammar], Any]:
    """Return a function that compiles grammars for a model, and keeps the most recently used ones. It does not keep the model alive."""
    out = ffi.new("struct kvf_tokens **")
    check(lib.kvf_tokens_new(model.vocab, out))
    tokens = ffi.gc(out[0], lib.kvf_tokens_free)
    model = proxy(model)
    return lru_cache(maxsize=_N_KEPT)(lambda grammar: _new(grammar, model, tokens))


def _new(given: Grammar, model: Model, tokens: Any) -> Any:
    _check_size(given.text)
    found, params = ffi.new("struct kvf_grammar **"), ffi.new("struct kvf_grammar_params *")
    keep = params.text, params.after, params.thinking = [_text(t) for t in (given.text, given.after, given.thinking)]
    patterns, thought = ([_text(t) for t in texts] for texts in (given.patterns, given.thought))
    lists = ffi.new("char *[]", patterns), ffi.new("char *[]", thought), ffi.new("llama_token[]", list(given.tokens))
    params.lazy = given.lazy
    params.patterns, params.thought, params.tokens = lists
    params.n_patterns, params.n_thought, params.n_tokens = len(patterns), len(thought), len(given.tokens)
    try:
        check(lib.kvf_grammar_new(tokens, model.vocab, params, found))
    except errors.UsageError as err:
        raise unusable(re.sub(r" at\s*$", " at its end", str(err))) from None
    del keep  # the library has copied all of it
    res = ffi.gc(found[0], lib.kvf_grammar_free)
    if not (given.lazy or given.after) and all(model.is_eog(int(t)) for t in np.flatnonzero(_mask(res, model.n_vocab))):
        raise unusable("it allows no token, so that every answer would be empty")
    return res


class Follower:
    """The state of a text within a grammar. Several threads may follow texts of the same grammar."""

    def __init__(self, grammar: str | Grammar, model: Model) -> None:
        """Begin a text. Raises UsageError if the grammar cannot be used with the model."""
        self._n_vocab = model.n_vocab
        self.handle = _copy(_compiled(grammar, model))

    def fork(self) -> Self:
        """Return a copy in the same state."""
        res = copy(self)
        res.handle = _copy(self.handle)
        return res

    def accept(self, token: int) -> None:
        """Advance by a token. A token that is not allowed ends the text."""
        check(lib.kvf_grammar_accept(self.handle, token))

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return the mask of the tokens that may follow, (n_vocab,) bool. A lazy grammar must have begun to apply."""
        return _mask(self.handle, self._n_vocab)


def _mask(handle: Any, n_vocab: int) -> npt.NDArray[np.bool_]:
    words = np.zeros(-(-n_vocab // 64), "<u8")
    check(lib.kvf_grammar_mask(handle, ffi.from_buffer("uint64_t[]", words), len(words)))
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:n_vocab].astype(bool)


def _copy(handle: Any) -> Any:
    out = ffi.new("struct kvf_grammar **")
    check(lib.kvf_grammar_copy(handle, out))
    return ffi.gc(out[0], lib.kvf_grammar_free)


def check_grammar(grammar: str | Grammar, model: Model) -> None:
    """Compile a grammar (GBNF) for a model, so that later uses start at once. Raises UsageError if it cannot be used."""
    _compiled(grammar, model)


def _text(text: str) -> Any:
    """Return a text for C. Raises UsageError if the text has a zero byte, which would end it there, or is not Unicode."""
    if "\0" in text:
        raise unusable("it has a zero byte")
    try:
        return ffi.new("char[]", text.encode())
    except UnicodeEncodeError:
        raise unusable("it is not Unicode text") from None
