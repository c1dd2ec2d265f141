"""The tokens that a grammar allows: those that llama.cpp's own code allows, for grammars and texts at random."""

import codecs
import ctypes
import json
import random
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.json_schema import json_grammar
from pyllama_kvflash.native import Follower, Grammar, Model, check_grammar
from pyllama_kvflash.native.lib import _kvflash, ffi
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = pytest.mark.native


class TokenData(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class TokenDataArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class Stock:
    """llama.cpp's own grammar sampler, which asks every token."""

    def __init__(self, grammar: str, model: Model) -> None:
        self.lib = ctypes.CDLL(_kvflash.__file__)
        self.lib.llama_sampler_init_grammar.restype = ctypes.c_void_p
        vocab = ctypes.c_void_p(int(ffi.cast("uintptr_t", model.vocab)))
        self.n_vocab = model.n_vocab
        made = self.lib.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
        assert made, grammar
        self.sampler = ctypes.c_void_p(made)

    def allowed(self) -> npt.NDArray[np.bool_]:
        rows = np.zeros(self.n_vocab, np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")]))
        rows["id"], rows["logit"] = np.arange(self.n_vocab), 1.0
        data = (TokenData * self.n_vocab).from_buffer(rows)
        self.lib.llama_sampler_apply(self.sampler, ctypes.byref(TokenDataArray(data, self.n_vocab, -1, False)))
        return np.isfinite(rows["logit"])

    def accept(self, token: int) -> None:
        self.lib.llama_sampler_accept(self.sampler, ctypes.c_int32(token))

    def close(self) -> None:
        self.lib.llama_sampler_free(self.sampler)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(BUNDLED_MODEL) as found:
        yield found


def expression(rng: random.Random, depth: int, rules: list[str]) -> str:
    """GBNF at random, of a few letters, so that there is much to confuse."""
    kind = rng.choice(["text", "class", "sequence", "either", "some", "rule"] if depth else ["text", "class"])
    if kind == "text":
        return json.dumps("".join(rng.choice("ab e1é\U0001f600") for _ in range(rng.randint(1, 3))), ensure_ascii=False)
    if kind == "class":
        return rng.choice(["[a-e]", "[^a]", "[0-9é]", ".", "[^\\x00-\\x7F]", "[\\U0001F600-\\U0001F64F]", "[^\\n ]"])
    if kind == "rule" and rules:
        return rng.choice(rules)
    parts = [expression(rng, depth - 1, rules) for _ in range(rng.randint(2, 4))]
    if kind == "either":
        return f"({' | '.join(parts)})"
    return f"({' '.join(parts)}){rng.choice(['', '?', '*', '+', '{1,3}'])}" if kind == "some" else " ".join(parts)


def grammars() -> Iterator[str]:
    for seed in range(60):
        rng, rules, lines = random.Random(seed), list[str](), list[str]()
        for i in range(rng.randint(0, 3)):
            lines.append(f'r{i} ::= [abe1é ] {expression(rng, 2, [*rules, f"r{i}"])} | "{rng.choice("ab1")}"')
            rules.append(f"r{i}")
        yield "\n".join([f"root ::= {expression(rng, 3, rules)}", *lines])
    for schema in (
        {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]},
        {"enum": ["red", "reddish", "redder", "re", "green", 7, None]},
        {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{2,5}$"}, "maxItems": 3},
        {"type": ["number", "boolean"]},
        {},
    ):
        yield json_grammar(json.dumps(schema))
    # of items that are tokens, and of what may be empty in several ways
    yield 'root ::= (<[70]> | !<[71]> | "ab") "."'
    yield 'root ::= a a "x"?\na ::= "" | "e" a | b\nb ::= "" | "1"'
    yield 'root ::= a "."\na ::= b a | "e"\nb ::= "1"?'  # a rule that begins with itself, and ends with it


def is_utf8(text: bytes, *, whole: bool) -> bool:
    """Whether a text is; whole: it does not end within a character."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text, whole)
    except UnicodeDecodeError:
        return False
    return True


def test_the_tokens_are_those_of_llama_cpp(model: Model) -> None:
    """After each token of texts at random, also within a character.

    It allows bytes of no UTF-8 text, too, and counts no part of a character as "any token but this one".
    """
    n_compared = n_ended = 0
    for i, grammar in enumerate(grammars()):
        rng = random.Random(i)
        for _ in range(3):
            stock, ours, text = Stock(grammar, model), Follower(grammar, model), b""
            for _ in range(12):
                want, found = stock.allowed(), ours.allowed()
                differ = np.flatnonzero(want != found)
                pieces = [model.piece(int(t), special=True) for t in differ]
                assert not any(is_utf8(text + p, whole="!<[" in grammar) for p in pieces), (grammar, text)
                n_compared += 1
                token = int(rng.choice(np.flatnonzero(found)))
                if model.is_eog(token):
                    n_ended += 1
                    break
                other = ours.fork()
                text += model.piece(token, special=True)
                stock.accept(token)
                ours.accept(token)
                assert np.array_equal(other.allowed(), found)  # it is where it was
            stock.close()
    assert n_compared > 1000
    assert n_ended > 20


def text_tokens(model: Model, text: str) -> list[int]:
    """A token for each byte, so that a text is cut within its characters, too."""
    single = {model.piece(t, special=True): t for t in reversed(range(model.n_vocab))}
    return [single[bytes([b])] for b in text.encode()]


def takes(model: Model, grammar: str | Grammar, text: str) -> bool:
    """Whether a text is one of a grammar's."""
    place = Follower(grammar, model)
    for token in text_tokens(model, text):
        if not place.allowed()[token]:
            return False
        place.accept(token)
    return any(bool(ok) and model.is_eog(t) for t, ok in enumerate(place.allowed()))


def test_a_large_enum_is_a_tree(model: Model) -> None:
    """Values that begin alike are looked at once: 19,998 of them, and a value that begins another."""
    grammar = json_grammar(json.dumps({"enum": [*(f"value number {i}" for i in range(19_998)), "value", ""]}))
    for text in ('"value number 0"', '"value number 19997"', '"value"', '""'):
        assert takes(model, grammar, text)
    for text in ('"value number 20000"', '"value number"', '"valu"', "value", '"value" '):
        assert not takes(model, grammar, text)


def test_a_grammar_that_is_too_ambiguous_says_so(model: Model) -> None:
    """Each rule may be empty or names the next twice: after a letter there are 2 ** 40 ways to have come there."""
    rules = [f'r{i} ::= r{i + 1} r{i + 1} | ""' for i in range(40)]
    with pytest.raises(UsageError, match="too ambiguous"):
        check_grammar("\n".join(["root ::= r0", *rules, 'r40 ::= "a"?']), model)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= a\na ::= b "x"\nb ::= "" c\nc ::= a | "y"', "from the left"),
        ('root ::= a\na ::= b b a "x" | "y"\nb ::= c?\nc ::= "z"?', "from the left"),  # after what may be empty
        ("root ::= a\na ::= root", "and to nothing else"),
        ("root ::= " + "a{2000} " * 600 + '\na ::= "b"', "repeats comes to more than 1,000,000"),
        ('root ::= "abcdefghij"{2000} ' * 60, "repeats comes to more than 1,000,000"),
    ],
)
def test_grammars_that_are_refused(model: Model, grammar: str, words: str) -> None:
    with pytest.raises(UsageError, match="the grammar cannot be used: ") as error:
        check_grammar(grammar, model)
    assert words in str(error.value)


def test_a_grammar_of_great_depth_does_not_keep_all_that_it_saw(model: Model) -> None:
    """Each level of brackets is another state; what is kept of them is limited, and the place in the text is not lost."""
    place = Follower('root ::= "[" root "]" | "x"', model)
    opening, closing, x = (text_tokens(model, c)[0] for c in "[]x")
    n = 30_000
    for _ in range(n):
        place.accept(opening)
    place.accept(x)
    for i in range(n):
        if i % 1000 == 0:
            assert np.flatnonzero(place.allowed()).tolist() == [closing]
        place.accept(closing)
    assert all(model.is_eog(int(t)) for t in np.flatnonzero(place.allowed()))


@pytest.mark.parametrize(
    ("patterns", "before"),
    [
        (("<call>",), "some words, <cal, and then "),
        (("<call>",), "é" * 20_000),  # a word is found however much comes before it
        ((r"words?(<call>)",), "a" * 9000 + "<call> word"),  # of an expression, as much as is near
        ((r"^\s*(<call>)",), "\n "),
        ((r"^\s+<call>$", "<call>$"), "\na "),
    ],
)
def test_where_a_lazy_grammar_begins(model: Model, patterns: tuple[str, ...], before: str) -> None:
    lazy = Grammar('root ::= "<call>" [0-9]+', lazy=True, patterns=patterns)
    place = Follower(lazy, model)
    for token in text_tokens(model, before + "<call>"):
        place.accept(token)
    digits = set(text_tokens(model, "0123456789"))
    assert digits <= set(np.flatnonzero(place.allowed()).tolist())
    assert text_tokens(model, "a")[0] not in np.flatnonzero(place.allowed())


def test_what_only_looks_like_its_beginning_is_text(model: Model) -> None:
    lazy = Grammar('root ::= "<call>1"', lazy=True, patterns=("<call>|<cart>",))
    place = Follower(lazy, model)
    for token in text_tokens(model, "a <cart> and a <call>"):
        place.accept(token)
    assert np.flatnonzero(place.allowed()).tolist() == [
        t for t in range(model.n_vocab) if model.piece(t, special=True) == b"1"
    ]
