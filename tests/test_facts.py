"""Documents of facts: determinism, spans, keys, decoys, depths, lengths, errors.  No native code but for the control."""

import hashlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_kvflash.needle import BUNDLED_MODEL, MAX_DECOYS, MAX_FACTS, NeedlePrompt, facts, make_facts, words

CODE = re.compile(r"The secret code for the (\w+ \w+) is (\d{7})\.")
MENTIONS = [re.compile(re.sub(r"\{\w+\}", r"[\\w ]+", template)) for template in facts._MENTIONS]


def count_words(text: str) -> int:
    return len(text.split())


def count_with_bos(text: str) -> int:
    """A counter that adds a token to every text: counts of lines exceed the count of their text."""
    return count_words(text) + 1


def told(prompt: NeedlePrompt) -> list[tuple[str, str]]:
    """Key and code of every line that tells one, facts and decoys."""
    return [(m[1], m[2]) for line in prompt.text.splitlines() if (m := CODE.fullmatch(line))]


def decoys(prompt: NeedlePrompt) -> list[tuple[str, int]]:
    """Line and start of every decoy: a code that is not asked for, or a mention of a key that is."""
    keys = {n.key for n in prompt.needles}
    found = []
    for line in re.finditer(r".+", prompt.text):
        code = CODE.fullmatch(line[0])
        # the prose has some words of the keys: it may mention one by chance, though not in these sentences
        mention = any(sentence.fullmatch(line[0]) for sentence in MENTIONS) and any(key in line[0] for key in keys)
        if mention or (code and code[1] not in keys):
            found.append((line[0], line.start()))
    return found


def shares(line: str, key: str) -> bool:
    return any(re.search(rf"\b{word}\b", line) for word in key.split())


def depths(prompt: NeedlePrompt) -> list[float]:
    return [n.start / len(prompt.text) for n in prompt.needles]


@pytest.mark.parametrize(("n_facts", "n_decoys"), [(1, 0), (8, 2), (64, 2), (5, 8)])
def test_document_reads_as_promised(n_facts: int, n_decoys: int) -> None:
    prompt = make_facts(8000, count_words, n_facts=n_facts, n_decoys=n_decoys, seed=3)
    assert prompt.seed == 3
    assert prompt.text.isascii()
    assert prompt.text.endswith(".\n")
    assert "\n\n" not in prompt.text
    assert not re.search(r"[{}]|  ", prompt.text)
    lines = prompt.text.splitlines()
    assert len(prompt.needles) == n_facts
    for n in prompt.needles:
        assert n.statement == f"The secret code for the {n.key} is {n.answer}."
        assert n.question == f"Question: what is the secret code for the {n.key}? Answer:"
        assert prompt.text[n.start : n.end] == n.statement
        assert lines.count(n.statement) == 1
        assert prompt.text.count(n.answer) == 1
    starts = [n.start for n in prompt.needles]
    assert starts == sorted(starts)


def test_same_text_in_every_process_and_python_version() -> None:
    digest = hashlib.sha256()
    variants: tuple[dict[str, Any], ...] = ({}, {"seed": 2}, {"n_facts": 64}, {"n_decoys": 8})
    for options in variants:
        prompt = make_facts(4096, count_words, **options)
        digest.update(prompt.text.encode())
        digest.update(repr(prompt.needles).encode())
    assert digest.hexdigest()[:12] == "737a2163a550"


def test_equal_arguments_give_equal_prompts() -> None:
    assert make_facts(3000, count_words, seed=5) == make_facts(3000, count_words, seed=5)


def test_seeds_differ() -> None:
    assert len({make_facts(1500, count_words, seed=seed).text for seed in range(20)}) == 20


def test_facts_and_decoys_do_not_depend_on_length() -> None:
    short, long = (make_facts(size, count_words, seed=4) for size in (1500, 9000))
    assert [(n.key, n.answer) for n in short.needles] == [(n.key, n.answer) for n in long.needles]
    assert sorted(line for line, _ in decoys(short)) == sorted(line for line, _ in decoys(long))
    assert depths(short) == pytest.approx(depths(long), abs=0.15)


@pytest.mark.parametrize("seed", range(10))
def test_no_key_and_no_code_is_told_twice(seed: int) -> None:
    prompt = make_facts(16_000, count_words, n_facts=MAX_FACTS, n_decoys=MAX_DECOYS, seed=seed)
    keys, codes = zip(*told(prompt), strict=True)
    assert len(set(keys)) == len(keys) > 4 * MAX_FACTS
    assert len(set(codes)) == len(codes)
    for key in keys:
        adjective, noun = key.split()
        assert adjective in words.TRAINED_ADJECTIVES
        assert noun in words.TRAINED_NOUNS
        assert not words.is_held_out_pair(adjective, noun)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("n_decoys", [0, 1, 2, 3, 7])
def test_a_fact_has_its_decoys_elsewhere(n_decoys: int, seed: int) -> None:
    prompt = make_facts(2000, count_words, n_facts=1, n_decoys=n_decoys, seed=seed)
    fact = prompt.needles[0]
    found = decoys(prompt)
    assert len(found) == n_decoys
    for line, start in found:
        assert shares(line, fact.key)
        assert fact.answer not in line
        # Two places apart, less the prose that did not fit before the later one.
        assert abs(count_words(prompt.text[:start]) - count_words(prompt.text[: fact.start])) >= 64


def test_every_fact_has_its_decoys() -> None:
    prompt = make_facts(8000, count_words, n_facts=MAX_FACTS, n_decoys=3)
    found = [line for line, _ in decoys(prompt)]
    assert len(found) == 3 * MAX_FACTS
    for n in prompt.needles:
        adjective, noun = n.key.split()
        codes = [line for line in found if CODE.fullmatch(line)]
        assert any(f" {adjective} " in line for line in codes)
        assert any(f" {noun} " in line for line in codes)
        assert sum(n.key in line for line in found) == 1  # the mention


def test_a_mention_tells_no_number() -> None:
    prompt = make_facts(16_000, count_words, n_facts=MAX_FACTS, n_decoys=MAX_DECOYS)
    mentions = [line for line, _ in decoys(prompt) if not CODE.fullmatch(line)]
    assert all(any(sentence.fullmatch(line) for line in mentions) for sentence in MENTIONS)
    assert not any(re.search(r"\d", line) for line in mentions)


def test_all_kinds_of_decoys_with_one_decoy_a_fact() -> None:
    kinds = set()
    for seed in range(20):
        prompt = make_facts(500, count_words, n_facts=1, n_decoys=1, seed=seed)
        ((line, _),) = decoys(prompt)
        adjective, noun = prompt.needles[0].key.split()
        kinds.add((f" {adjective} " in line, bool(re.search(rf" {noun}\b", line))))
    assert kinds == {(True, False), (False, True), (True, True)}


def test_depths_are_random() -> None:
    samples = [depths(make_facts(4000, count_words, n_decoys=0, seed=seed)) for seed in range(40)]
    assert len({round(sample[0], 2) for sample in samples}) > 10
    gaps = [b - a for sample in samples for a, b in itertools.pairwise(sample)]
    assert min(gaps) < 0.03  # even depths are 0.125 apart
    assert max(gaps) > 0.3
    flat = sorted(depth for sample in samples for depth in sample)
    assert flat[0] < 0.05
    assert flat[-1] > 0.93
    assert sum(flat) / len(flat) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("n_facts", [1, 8, 64])
@pytest.mark.parametrize("n_tokens", [4096, 8192, 65536])
def test_length(n_tokens: int, n_facts: int) -> None:
    prompt = make_facts(n_tokens, count_words, n_facts=n_facts)
    assert n_tokens - 100 <= prompt.n_tokens == count_words(prompt.text) <= n_tokens


@pytest.mark.parametrize("count", [count_with_bos, len, lambda text: len(text.split()) + 2 * text.count("\n")])
def test_counters_that_do_not_add_up(count: Callable[[str], int]) -> None:
    prompt = make_facts(20_000, count)
    assert 19_900 <= prompt.n_tokens == count(prompt.text) <= 20_000


def test_smallest_document_is_the_facts_and_decoys_alone() -> None:
    with pytest.raises(ValueError, match=r"n_tokens is 10, .* 3 facts with 2 decoys each alone take \d+") as error:
        make_facts(10, count_words, n_facts=3)
    needed = re.search(r"take (\d+)", str(error.value))
    assert needed
    prompt = make_facts(int(needed[1]), count_words, n_facts=3)
    assert prompt.n_tokens == int(needed[1])
    assert len(prompt.text.splitlines()) == 9
    assert all(prompt.text[n.start : n.end] == n.statement for n in prompt.needles)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_facts": 0}, "n_facts is 0: choose a number from 1 to 64"),
        ({"n_facts": MAX_FACTS + 1}, "n_facts is 65"),
        ({"n_decoys": -1}, "n_decoys is -1: choose a number from 0 to 8"),
        ({"n_decoys": MAX_DECOYS + 1}, "n_decoys is 9"),
        ({"seed": -1}, "seed is -1: choose 0 or more"),
        ({"n_tokens": -5}, "n_tokens is -5, but the 8 facts with 2 decoys each alone take"),
        ({"n_tokens": 100}, "raise n_tokens to .* or lower n_facts or n_decoys"),
        ({"count": lambda _: 0}, "count gave 0"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"n_tokens": 1000, "count": count_words} | options
    with pytest.raises(ValueError, match=message):
        make_facts(**arguments)


@settings(max_examples=60, deadline=None)
@given(
    n_tokens=st.integers(0, 6000),
    n_facts=st.integers(1, MAX_FACTS),
    n_decoys=st.integers(0, MAX_DECOYS),
    seed=st.integers(0, 2**64),
)
def test_any_document(n_tokens: int, n_facts: int, n_decoys: int, seed: int) -> None:
    n_tokens += 15 * n_facts * (1 + n_decoys)
    prompt = make_facts(n_tokens, count_words, n_facts=n_facts, n_decoys=n_decoys, seed=seed)
    assert n_tokens - 100 <= prompt.n_tokens == count_words(prompt.text) <= n_tokens
    assert len(decoys(prompt)) == n_facts * n_decoys
    assert len({key for key, _ in told(prompt)}) == len(told(prompt))
    end = 0
    for n in prompt.needles:
        assert n.start >= end
        assert prompt.text[n.start : n.end] == n.statement
        end = n.end


@pytest.mark.native
def test_the_full_cache_finds_all_facts() -> None:
    from support import needles  # noqa: PLC0415

    from pyllama_kvflash import KVFlash  # noqa: PLC0415 (the other tests run where nothing was built)

    with KVFlash.from_file(BUNDLED_MODEL, pool="off", n_ctx=2112, n_threads=1) as kv:
        prompt = make_facts(2048, lambda text: len(kv.tokenize(text, add_special=False)))
        found = needles.answers(kv, prompt)
    assert all(found.found(prompt.needles)), found.answers
