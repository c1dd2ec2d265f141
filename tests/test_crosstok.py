"""Every character has one token, scores go where the text is, and a growing text costs only what is new."""

import itertools
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.properties import CHECK
from support.texts import SAMPLE, cut

from pyllama_kvflash.scorers.crosstok import Retokenizer, Spans, char_spans, spread

chars = st.sampled_from([*SAMPLE, "\ufffd"]) | st.characters(exclude_categories=["Cs"])
texts = st.text(chars, max_size=40)
broken = st.lists(texts.map(str.encode) | st.binary(max_size=4) | st.sampled_from([b"\xe2\x82", b"\xf0\x9f", b"\xed"]))
cuts = st.lists(st.integers(0, 160), max_size=40)


def check_partition(spans: Spans, length: int) -> None:
    assert spans.dtype == np.int64
    assert (spans[0, 0], spans[-1, 1]) == (0, length)
    assert (spans[1:, 0] == spans[:-1, 1]).all()
    assert (spans[:, 0] <= spans[:, 1]).all()


#
# char_spans
#


@given(data=st.one_of(texts.map(str.encode), broken.map(b"".join)), at=cuts)
@example(data=b"a\xf0\x9f", at=[1, 2, 3])
@CHECK
def test_spans_are_a_partition_of_the_text(data: bytes, at: list[int]) -> None:
    pieces = cut(data, at)
    spans = char_spans(pieces)
    assert spans.shape == (len(pieces), 2)
    check_partition(spans, len(data.decode("utf-8", "replace")))
    assert all(start == end for piece, (start, end) in zip(pieces, spans, strict=True) if not piece)


@given(text=texts, at=cuts)
@CHECK
def test_a_character_belongs_to_the_token_that_completes_it(text: str, at: list[int]) -> None:
    pieces = cut(text.encode(), at)
    complete = [len(done.decode("utf-8", "ignore")) for done in itertools.accumulate(pieces)]
    assert char_spans(pieces)[:, 1].tolist() == complete


#
# spread
#


def spread_slowly(scores: list[float], spans_from: Spans, spans_to: Spans) -> list[float]:
    """By the definition, character by character, on a text of length_from * length_to."""
    n_from, n_to = int(spans_from[-1, 1]), int(spans_to[-1, 1])
    sources = [(s * max(n_to, 1), e * max(n_to, 1), x) for (s, e), x in zip(spans_from.tolist(), scores, strict=True)]
    sources = [(s, e, x) for s, e, x in sources if s < e]
    res = []
    for start, end in (spans_to * n_from).tolist():
        overlap = [x for s, e, x in sources if s < end and start < e]
        place = [x for s, e, x in sources if s <= start < e]
        res.append(max(overlap) if overlap else (place or [sources[-1][2]])[0] if sources else max(scores))
    return res


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=20)


def spans_of(lengths: list[int]) -> Spans:
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.stack([ends - lengths, ends], axis=1)


@given(lengths_from=sizes, lengths_to=sizes, data=st.data())
@example(lengths_from=[0, 0], lengths_to=[2], data=None)
@example(lengths_from=[0, 2], lengths_to=[0, 0], data=None)
@example(lengths_from=[2, 0], lengths_to=[2, 0, 0], data=None)
@settings(CHECK, max_examples=500)
def test_spread_is_as_defined(lengths_from: list[int], lengths_to: list[int], data: st.DataObject | None) -> None:
    n = len(lengths_from)
    scores = [-1.0, -2.0] if data is None else data.draw(st.lists(st.floats(-9, 9), min_size=n, max_size=n))
    res = spread(scores, spans_of(lengths_from), spans_of(lengths_to))
    assert res.dtype == np.float64
    assert res.tolist() == spread_slowly(scores, spans_of(lengths_from), spans_of(lengths_to))


#
# Retokenizer
#


class Toy:
    """A tokenizer that notes what it is given. `split` cuts, and may change, the text."""

    def __init__(self, split: Callable[[bytes], list[bytes]]) -> None:
        self.split = split
        self.given: list[bytes] = []
        self._ids: dict[bytes, int] = {}

    def tokenize(self, text: bytes) -> list[int]:
        text.decode()  # no part of a character
        self.given.append(text)
        return [self._ids.setdefault(piece, len(self._ids)) for piece in self.split(text)]

    def piece(self, token: int) -> bytes:
        return list(self._ids)[token]

    def pieces(self, tokens: npt.NDArray[np.int32]) -> list[bytes]:
        return [self.piece(t) for t in tokens.tolist()]


LONGEST = 6
WORDS = ["a€".encode(), b"ab", b"aba", b"ba", b"bab ab", "€".encode(), "€a".encode(), "😀😀".encode()[2:6], b"  "]


def greedy(text: bytes) -> list[bytes]:
    """The longest word first; a token does not depend on what is before it."""
    pieces, i = [], 0
    while i < len(text):
        pieces.append(max((w for w in WORDS if text.startswith(w, i)), key=len, default=text[i : i + 1]))
        i += len(pieces[-1])
    return pieces


def spaced(text: bytes) -> list[bytes]:
    return greedy(b" " + text) if text else []


def fickle(text: bytes) -> list[bytes]:
    """All cuts depend on the whole of it, and some tokens are empty."""
    seed = zlib.crc32(text)
    return cut(text, [(seed >> i) % (len(text) + 1) for i in range(len(text) // 2 + 1)])


def lowered(text: bytes) -> list[bytes]:
    """Changes letters, and the length."""
    return greedy(text.replace(b"b", b"BB").replace("😀".encode(), b"A").lower())


letters = st.text("ab€😀 ", max_size=24)
edits = st.lists(st.tuples(st.integers(0, 120), letters, st.sampled_from([0, 0, 0, 1, 2, 30]), st.booleans()))


def versions(steps: list[tuple[int, str, int, bool]]) -> list[str | bytes]:
    """Texts, each of the one before: something put in near the end or anywhere, instead of so many characters."""
    text, res = "", list[str | bytes]()
    for at, new, gone, anywhere in steps:
        i = max(min(at, len(text)) if anywhere else len(text) - gone, 0)
        text = text[:i] + new + text[i + gone :]
        res.append(text.encode() if at % 2 else text)
    return res


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def as_text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode("utf-8", "replace")


@pytest.mark.parametrize("split", [greedy, spaced, fickle, lowered])
@given(steps=edits, overlap=st.sampled_from([0, 1, 3, 16]))
@example(steps=[(0, "a", 0, False), (0, "", 1, False)], overlap=0)  # only the space that was put before it is left
@example(steps=[(0, "aaaa", 0, False), (0, "b", 0, False)], overlap=3)  # in step again, but by chance
@CHECK
def test_tokens_spell_the_text_whatever_happens_to_it(
    split: Callable[[bytes], list[bytes]], steps: list[tuple[int, str, int, bool]], overlap: int
) -> None:
    toy = Toy(split)
    other = Retokenizer(toy.tokenize, toy.piece, overlap)
    for version in versions(steps):
        before = other.tokens
        unchanged = other.update(version)
        text = as_text(version)
        assert other.tokens.dtype == np.int32
        assert other.spans.shape == (len(other.tokens), 2)
        assert unchanged == common(before.tolist(), other.tokens.tolist())
        pieces = toy.pieces(other.tokens)
        spelt = b"".join(pieces)
        assert spelt == b"".join(split(text.encode()))
        if split in {greedy, fickle}:
            assert spelt == text.encode()
        if pieces:  # a space that the tokenizer puts before the text is no part of it
            put = spelt.endswith(text.encode()) and spelt[: len(spelt) - len(text.encode())] == b" "
            assert other.spans.tolist() == np.maximum(char_spans(pieces) - put, 0).tolist()
            check_partition(other.spans, len(spelt.decode()) - put)


@given(steps=edits)
@CHECK
def test_tokens_are_those_of_the_whole_text(steps: list[tuple[int, str, int, bool]]) -> None:
    """If a token depends on no more than the overlap: here, on the bytes of the longest one."""
    for split in (greedy, spaced):
        toy = Toy(split)
        other = Retokenizer(toy.tokenize, toy.piece, LONGEST)
        for version in versions(steps):
            other.update(version)
            assert toy.pieces(other.tokens) == split(as_text(version).encode())


@pytest.mark.parametrize("split", [greedy, fickle])
@given(
    start=st.text("ab€😀 ", min_size=60, max_size=200), steps=st.lists(letters, max_size=6), overlap=st.integers(0, 9)
)
@CHECK
def test_an_append_costs_what_is_new(
    split: Callable[[bytes], list[bytes]], start: str, steps: list[str], overlap: int
) -> None:
    toy = Toy(split)
    other = Retokenizer(toy.tokenize, toy.piece, overlap)
    other.update(start)
    for new in steps:
        pieces = toy.pieces(other.tokens)
        toy.given.clear()
        first = max(len(pieces) - overlap, 0)
        while first and not is_text(b"".join(pieces[:first])):  # a character is not cut
            first -= 1
        start += new
        unchanged = other.update(start)
        assert toy.given == ([b"".join(pieces[first:]) + new.encode()] if new else [])
        assert unchanged >= first


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_tokens_are_kept_in_a_rollback() -> None:
    toy = Toy(greedy)
    other = Retokenizer(toy.tokenize, toy.piece, 2)
    other.update("xyz" * 10)
    old = other.tokens
    assert other.update("xyz" * 10) == 30
    assert len(toy.given) == 1  # nothing was new
    assert other.update("xyz" * 5) == 15
    assert other.update("xyz" * 4 + "Xyz") == 12
    assert toy.given[1:] == [b"yz", b"yzXyz"]
    assert other.update("") == 0
    assert other.tokens.shape == (0,)
    assert len(old) == 30  # what was handed out stays as it was


def test_an_error_of_the_tokenizer_changes_nothing() -> None:
    toy = Toy(greedy)
    other = Retokenizer(toy.tokenize, toy.piece, 2)
    other.update("xyz")

    def fail(_: bytes) -> list[bytes]:
        raise RuntimeError("no tokens")

    toy.split = fail
    with pytest.raises(RuntimeError, match="no tokens"):
        other.update("xyzz")
    toy.split = greedy
    assert toy.pieces(other.tokens) == [b"x", b"y", b"z"]
    assert other.update("xyzz") == 3
