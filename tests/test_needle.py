"""Needle prompts: determinism, spans, depths, lengths, held-out keys, errors.  No model, no native code."""

import ast
import hashlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_kvflash import needle
from pyllama_kvflash.needle import MAX_NEEDLES, NeedlePrompt, make_prompt, words

# The pre-tokenizer of llama-bpe for ASCII: one piece is one token or a few.
PIECES = re.compile(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def count_pieces(text: str) -> int:
    return len(PIECES.findall(text))


def depths(prompt: NeedlePrompt) -> list[float]:
    """Position of every needle in the prose alone, 0 to 1."""
    lengths = [n.end - n.start + 1 if n.end > n.start else 0 for n in prompt.needles]
    prose = len(prompt.text) - sum(lengths)
    return [(n.start - sum(lengths[:i])) / prose for i, n in enumerate(prompt.needles)]


def held_out(key: str) -> bool:
    adjective, noun = key.split()
    return (
        adjective in words.HELD_OUT_ADJECTIVES
        or noun in words.HELD_OUT_NOUNS
        or words.is_held_out_pair(adjective, noun)
    )


def test_document_reads_as_promised() -> None:
    prompt = make_prompt(2000, count_pieces, n_needles=4, seed=3)
    assert prompt.seed == 3
    assert prompt.text.isascii()
    assert prompt.text.endswith(".\n")
    assert "\n\n" not in prompt.text
    assert not re.search(r"[{}]|  ", prompt.text)
    lines = prompt.text.splitlines()
    for n in prompt.needles:
        assert re.fullmatch(r"[1-9][0-9]{6}", n.answer)
        assert n.statement == f"The secret code for the {n.key} is {n.answer}."
        assert n.question == f"Question: what is the secret code for the {n.key}? Answer:"
        assert lines.count(n.statement) == 1
        assert prompt.text.count(n.answer) == 1


def test_the_bundled_model_knows_the_prose() -> None:
    """Byte for byte that of its training: words, templates and their order."""
    prose, rng = hashlib.sha256(), random.Random(0)
    for _ in range(3000):
        prose.update("|".join(words.paragraph(rng)).encode())
    assert prose.hexdigest()[:12] == "4c608c14e699"


def test_seeds_differ() -> None:
    texts = {make_prompt(1500, count_pieces, seed=seed).text for seed in range(20)}
    assert len(texts) == 20


def test_keys_do_not_depend_on_length() -> None:
    short, long = (make_prompt(size, count_pieces, seed=4) for size in (1000, 9000))
    assert [(n.key, n.answer) for n in short.needles] == [(n.key, n.answer) for n in long.needles]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("n_tokens", [500, 1024, 4096, 16384, 65536])
def test_length_and_depths(n_tokens: int, drop: bool) -> None:
    prompt = make_prompt(n_tokens, count_pieces, n_needles=16, drop=drop)
    assert prompt.n_tokens == count_pieces(prompt.text)
    assert n_tokens - 50 <= prompt.n_tokens <= n_tokens
    even = [(i + 0.5) / 16 for i in range(16)]
    assert depths(prompt) == pytest.approx(even, abs=70 / n_tokens + 0.008)


def test_drop_leaves_only_the_needles_out() -> None:
    kept, dropped = (make_prompt(2048, count_pieces, seed=9, drop=drop) for drop in (False, True))
    assert [(n.key, n.answer, n.question) for n in dropped.needles] == [
        (n.key, n.answer, n.question) for n in kept.needles
    ]
    assert "secret code" not in dropped.text
    for n in dropped.needles:
        assert n.answer not in dropped.text
        assert n.start == n.end
        assert n.start == 0 or dropped.text[n.start - 1] == "\n"


def test_held_out_keys_are_not_trained_ones() -> None:
    seen = {False: set[str](), True: set[str]()}
    for seed in range(30):
        for choice, keys in seen.items():
            prompt = make_prompt(1024, count_pieces, seed=seed, held_out=choice)
            keys.update(n.key for n in prompt.needles)
    assert all(held_out(key) for key in seen[True])
    assert not any(held_out(key) for key in seen[False])
    assert seen[True].isdisjoint(seen[False])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_needles": 0}, "n_needles is 0: choose a number from 1 to 1000"),
        ({"n_needles": -2}, "n_needles is -2"),
        ({"n_needles": MAX_NEEDLES + 1}, "n_needles is 1001"),
        ({"seed": -1}, "seed is -1"),
        ({"n_tokens": -5}, "n_tokens is -5, but the 16 needles alone take"),
        ({"n_tokens": 200}, "raise n_tokens to .* or lower n_needles"),
        ({"count": lambda _: 0}, "count gave 0"),
        (
            {"count": lambda text: 1 + 2000 * (text.count("\n") > 16)},
            "no document fits it in 8 tries, as count",
        ),
        (
            {"count": lambda text: 2000 if text and "secret" not in text else 1, "drop": True},
            "too few for one",
        ),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"n_tokens": 1000, "count": count_pieces} | options
    with pytest.raises(ValueError, match=message):
        make_prompt(**arguments)


@settings(max_examples=60, deadline=None)
@given(
    n_tokens=st.integers(20, 6000),
    n_needles=st.integers(1, 40),
    seed=st.integers(0, 2**64),
    choice=st.booleans(),
    drop=st.booleans(),
)
def test_any_document(n_tokens: int, n_needles: int, seed: int, choice: bool, drop: bool) -> None:
    n_tokens += 20 * n_needles
    prompt = make_prompt(n_tokens, count_pieces, n_needles=n_needles, seed=seed, held_out=choice, drop=drop)
    assert n_tokens - 100 <= prompt.n_tokens == count_pieces(prompt.text) <= n_tokens
    assert prompt.text.endswith("\n")
    assert len(prompt.needles) == n_needles
    assert len({n.key for n in prompt.needles}) == n_needles
    end = 0
    for n in prompt.needles:
        assert n.start >= end
        assert prompt.text[n.start : n.end] == ("" if drop else n.statement)
        assert held_out(n.key) == choice
        end = n.end


def test_imports_nothing_else_from_the_package() -> None:
    for path in Path(needle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, path
                assert node.level == 1 or not (node.module or "").startswith("pyllama_kvflash"), path
            elif isinstance(node, ast.Import):
                assert not any(name.name.startswith("pyllama_kvflash") for name in node.names), path
