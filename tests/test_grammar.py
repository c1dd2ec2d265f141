"""Answers that keep to a grammar, or to a JSON schema: valid, and with drafts the same as without."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import GRAMMARS, crossed
from support.commands import check_error, good, invoke
from support.drafting import WIDTH, width_noise
from support.oracles import ON_CPU, ON_GPU
from support.rounding import Chosen, held

from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.engine import generation
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.json_schema import json_grammar
from pyllama_kvflash.native import Context, Grammar, Sampler, check_grammar, either
from pyllama_kvflash.native.lib import ffi, lib
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.options import Spec

pytestmark = pytest.mark.native

environment = commands.environment

N_SCHEMAS = 200
LETTERS = 'root ::= ("ab" | "ba" | "c")+ "."'


@pytest.fixture(scope="module")
def kv() -> Iterator[KVFlash]:
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=4096, pool="off", n_threads=1, **ON_CPU) as found:
        yield found


def text_of(kv: KVFlash, prompt: Any, n: int, sampling: Sampling, **how: Any) -> str:
    """The bytes of an answer, as text."""
    events = kv.generate(prompt, max_tokens=n, sampling=sampling, **how)
    return b"".join(kv.model.piece(e.id) for e in events if isinstance(e, Token)).decode("utf-8", "replace")


#
# JSON
#


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:  # noqa: PLR0911 (one for each kind)
    """A random schema whose texts are of limited length."""
    kinds = [
        "integer",
        "boolean",
        "null",
        "enum",
        "const",
        "string",
        *(["object", "array", "anyOf"] if depth < 2 else []),
    ]
    kind = rng.choice(["object", "array"] if depth == 0 else kinds)
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, None, True, "a b"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["x", 5, {"a": [1, 2]}])}
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth + 1) for _ in range(2)]}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "object":
        names = rng.sample(["name", "size", "on", "with space", "ü"], rng.randint(1, 3))
        needed = names[: rng.randint(0, len(names))]
        properties = {name: schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
    return {"type": kind}


def keeps(value: Any, to: dict[str, Any]) -> bool:  # noqa: PLR0911 (one for each kind)
    """Whether a value is what such a schema allows."""
    if "enum" in to:
        return any(value == one and type(value) is type(one) for one in to["enum"])
    if "const" in to:
        return bool(value == to["const"])
    if "anyOf" in to:
        return any(keeps(value, one) for one in to["anyOf"])
    kind = to["type"]
    if kind == "object":
        known = (
            isinstance(value, dict) and value.keys() <= to["properties"].keys() and value.keys() >= set(to["required"])
        )
        return known and all(keeps(part, to["properties"][name]) for name, part in value.items())
    if kind == "array":
        several = isinstance(value, list) and to["minItems"] <= len(value) <= to["maxItems"]
        return several and all(keeps(part, to["items"]) for part in value)
    if kind == "string":
        return isinstance(value, str) and to["minLength"] <= len(value) <= to["maxLength"]
    types: dict[str, Any] = {"integer": int, "boolean": bool, "null": type(None)}
    return type(value) is types[kind]


@pytest.mark.nightly(GRAMMARS)
def test_random_schemas_give_valid_answers(kv: KVFlash) -> None:
    """Of a model that knows no JSON at all, drawn at random."""
    for seed in range(N_SCHEMAS):
        to = schema(random.Random(seed))
        sampling = Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=seed, grammar=json_grammar(json.dumps(to)))
        said = text_of(kv, "JSON: ", 600, sampling)
        assert keeps(json.loads(said), to), (to, said)


def test_a_grammar_may_be_large(kv: KVFlash) -> None:
    """It comes whole."""
    words = [f"word number {i}" for i in range(5000)]
    grammar = json_grammar(json.dumps({"enum": words}))
    assert len(grammar) > 1 << 16
    assert all(word in grammar for word in (words[0], words[-1]))
    said = text_of(kv, "JSON: ", 100, Sampling(temperature=1.0, seed=1, grammar=grammar))
    assert json.loads(said) in words


def test_without_a_grammar_they_are_not() -> None:
    """The test above can fail."""
    to = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    assert keeps({"a": 1}, to)
    for wrong in ({}, {"a": "1"}, {"a": True}, {"a": 1, "b": 2}, [1], None):
        assert not keeps(wrong, to)


PATTERNS = [
    r"^\d{3}-\d{4}$", r"^.{5}$", r"^[^,]{3,9}$", r"^[ -~]{8}$", r'^"a"{1,3}\\?$', r"^(\w{1,3}@){1,2}\w{2}\.(com|de)$",
    r"^a\.{2}[\]\-\\]{1,3}x$", r"^é{2}ü?$", r"^[à-üß]{3}$", r"^\s\S[\d_]\n?$", r"^(?:\$|€)[0-9]{1,4}(?:[.,][0-9]{2})?$",
    r"^\x41\u00e9$", r"^[\"'`]{4}$", r"^x{2,3}y{2}$", r"^a?b??$", r"^\/\-$", r"^\W\D$", r"^[^\\\n]{3}$", r"^$",
]  # fmt: skip
"""Those that JSON escapes something of, and what llama.cpp's own converter does not know or takes for another."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_of_a_pattern(kv: KVFlash, pattern: str) -> None:
    """Drawn at random, they are JSON, and the string is one of the pattern's."""
    grammar = json_grammar(json.dumps({"type": "string", "pattern": pattern}))
    for seed in range(8):
        sampling = Sampling(temperature=3.0, top_k=0, top_p=1, min_p=0, seed=seed, grammar=grammar)
        said = text_of(kv, "JSON: ", 200, sampling)
        assert re.fullmatch(pattern, json.loads(said)), said


def test_a_quote_of_a_pattern_does_not_end_the_string(kv: KVFlash) -> None:
    """A quote that ends the string may be followed by what the pattern does not have."""
    to = {
        "type": "object", "properties": {"a": {"type": "string", "pattern": "^.{1,20}$"}, "b": {"type": "integer"}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    grammar = json_grammar(json.dumps(to))
    for seed in range(20):
        sampling = Sampling(
            temperature=1.0, top_k=0, top_p=1, min_p=0, seed=seed, grammar=grammar, logit_bias=quotes(kv)
        )
        said = json.loads(text_of(kv, "JSON: ", 200, sampling))
        assert said.keys() == {"a", "b"}


def quotes(kv: KVFlash) -> tuple[tuple[int, float], ...]:
    """Makes the tokens likely that are one."""
    return tuple((t, 9.0) for t in range(kv.model.n_vocab) if kv.model.piece(t) == b'"')


#
# grammars
#


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_keeps_to_its_grammar_and_ends_with_it(kv: KVFlash, temperature: float) -> None:
    said = text_of(
        kv, "Say: ", 400, Sampling(temperature=temperature, seed=3, grammar='root ::= [0-9]{3} "-" [x-z]{2}')
    )
    assert len(said) == 6
    assert said[:3].isdigit()
    assert said[3] == "-"
    assert set(said[4:]) <= set("xyz")


def test_what_the_model_says_anyway_is_not_changed(kv: KVFlash) -> None:
    """A grammar of everything: the same tokens, drawn from the same numbers."""
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
        plain, free = (text_of(kv, "Once ", 40, Sampling(**sampling, grammar=g)) for g in ("", "root ::= [^\\x00]*"))
        assert plain == free


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= foo", "rule 'foo' is not defined"),
        ('x ::= "a"', "there is no rule 'root'"),
        ('root ::= "a', "unexpected end of input"),
        ('root ::= root "a"', "refer to themselves"),
        ("root ::= [a-z", "unexpected end of input"),
        ("", None),
        ('# a comment\n\nroot ::= "a" # another\n', None),
        ('root ::= "\0"', "zero byte"),
        ('root ::= "\udfff"', "not Unicode text"),
        ('root ::= "a"{2,1}', "nothing can come {2,1} times"),  # of which llama.cpp makes rules until no memory is left
        ('root ::= ("a" "b"){\n5 , 0}', "nothing can come {5,0} times"),
        ('root ::= ("a"{2}){9223372036854775808}', "nothing can come {9223372036854775808} times"),
        ('root ::= "{2,1}\\"{2,1}" [{2,1}\\]{2,1}] "a"{1,2} "b"{0,0} "c"{3} "d"{2,} # {2,1}\n', None),
        ("root", "expecting ::= at its end"),
        ("root ::=", "it allows no token"),
        ('root ::= a | ""\na ::= # nothing', "it allows no token"),
    ],
)
def test_bad_grammars(kv: KVFlash, grammar: str, words: str | None) -> None:
    sampling = Sampling(grammar=grammar)
    if words is None:
        assert kv.generation([1], sampling=sampling)
        return
    with pytest.raises(UsageError, match="the grammar cannot be used: ") as error:
        kv.generation([1], sampling=sampling)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.nightly(GRAMMARS)
@pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order")
@pytest.mark.parametrize(
    ("how", "sampling", "lazy"),
    crossed(
        [{"mode": "lossless"}, {"spec": Spec(kind="ngram", n_max=4, gate=0)}, {"opening": 20}],
        [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}],
        [False, True],
    ),
)
def test_drafts_keep_to_it_too(kv: KVFlash, how: dict[str, Any], sampling: dict[str, Any], lazy: bool) -> None:
    """Losslessly drafted through the pool, and by n-grams: the text of plain decoding, but for what the width of a batch
    does to logits. Also where the grammar begins only after some tokens, as that of a tool's call does.
    """
    small: dict[str, Any] = {"n_ctx": 2048, "n_threads": 1, "flash_attn": "off", "chunk": 16, "tail": 2}
    full = {**small, "pool": "off"}
    pooled = {**small, "pool": 256, "n_ubatch": 64} if "spec" not in how else full
    chosen = Chosen(width_noise(BUNDLED_MODEL, WIDTH, full))
    prompt = list(range(10, 110)) * 6
    grammar: str | Grammar = LETTERS
    if lazy:
        with KVFlash.from_file(BUNDLED_MODEL, **full) as one:
            events = list(one.generate(prompt, max_tokens=20, sampling=Sampling(**sampling)))
        plain = [e.id for e in events if isinstance(e, Token)]
        at = next(i for i, t in enumerate(plain) if i > 2 and t not in plain[:i] and kv.model.piece(t).isascii())
        trigger = kv.model.piece(plain[at]).decode()
        grammar = Grammar(f"root ::= {json.dumps(trigger)} [abc]+", lazy=True, tokens=(plain[at],))
    said = []
    for options in (full, {**pooled, **how}):
        with KVFlash.from_file(BUNDLED_MODEL, **options) as one, held(chosen):
            said.append(text_of(one, prompt, 20, Sampling(**sampling, grammar=grammar)))
    assert said[0] == said[1]
    kept = said[0].partition(trigger)[2] if lazy else said[0]
    assert kept
    assert set(kept) <= set("abc" if lazy else "abc.")
    assert chosen.n_held >= 5


#
# biases and penalties
#


def test_a_bias_makes_a_token_certain_or_impossible(kv: KVFlash) -> None:
    greedy = {"temperature": 0.0}
    (other,) = (e.id for e in kv.generate("Once ", max_tokens=1, sampling=Sampling(**greedy)) if isinstance(e, Token))
    forced = [
        e.id
        for e in kv.generate("Once ", max_tokens=5, sampling=Sampling(logit_bias=((77, 1000.0),)))
        if isinstance(e, Token)
    ]
    assert forced == [77] * 5
    banned = Sampling(**greedy, logit_bias=((int(other), -float("inf")),))
    assert other not in [e.id for e in kv.generate("Once ", max_tokens=20, sampling=banned) if isinstance(e, Token)]
    with pytest.raises(UsageError, match="logit_bias is for token 4,096: ids are 0 to 4,095"):
        kv.generation([1], sampling=Sampling(logit_bias=((4096, 1.0),)))


@pytest.mark.parametrize(
    ("penalty", "want"),
    [
        ({}, [70, 70, 70, 70, 70]),
        ({"frequency_penalty": 1.0}, [70, 71, 70, 71, 70]),
        ({"presence_penalty": 1.0}, [70, 71, 70, 70, 70]),
    ],
)
def test_penalties(kv: KVFlash, monkeypatch: pytest.MonkeyPatch, penalty: dict[str, float], want: list[int]) -> None:
    """What is taken from a token that was said: for each time, or once."""

    class Known(Sampler):
        """Of logits that are always 5 for token 70, 4.5 for 71, and 0 for others."""

        def sample(self, ctx: Context, i: int = -1) -> int:
            row = np.zeros(kv.model.n_vocab, np.float32)
            row[[70, 71]] = 5.0, 4.5
            ffi.memmove(lib.llama_get_logits_ith(ctx.output.native, ctx.output.row(i)), row, row.nbytes)
            return super().sample(ctx, i)

    monkeypatch.setattr(generation, "Sampler", Known)
    events = kv.generate("Once ", max_tokens=5, sampling=Sampling(temperature=0.0, **penalty))
    assert [e.id for e in events if isinstance(e, Token)] == want


#
# the command
#


def test_the_command_takes_a_schema(tmp_path: Path) -> None:
    to = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(to))
    for given in (("--json-schema", json.dumps(to)), ("-jf", str(file))):
        said = good("run", "-p", "A number: ", "-c", "512", "-n", "80", "--temp", "0", *given).stdout
        assert list(json.loads(said)) == ["n"]
    grammar = tmp_path / "a.gbnf"
    grammar.write_text('root ::= "yes" | "no"')
    for given in (("--grammar", grammar.read_text()), ("--grammar-file", str(grammar))):
        assert good("run", "-p", "Is it? ", "-c", "512", *given).stdout.strip() in {"yes", "no"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--grammar", "root ::= a"), "rule 'a' is not defined"),
        (("-j", "{"), "the JSON schema cannot be used"),
        (("-j", "{}", "--grammar", 'root ::= "a"'), "several grammars are given"),
        (("--grammar", ""), "the grammar is empty"),
        (("--grammar-file", "/dev/null"), "the grammar is empty"),
        (("-j", ""), "it is not JSON"),
        (("--grammar-file", "/nonexistent"), "the grammar file /nonexistent cannot be read"),
        (("-jf", "/nonexistent"), "the JSON schema file /nonexistent cannot be read"),
        (("--set", "sampling.logit_bias=x"), "is not a bias"),
        (("--set", "sampling.logit_bias=5+inf"), "is not a bias"),
        (("--set", "sampling.logit_bias=99999999+1"), "ids are 0 to 4,095"),
        (("--set", "sampling.presence_penalty=3"), "--set sampling.presence_penalty is 3"),
    ],
)
def test_bad_options(args: tuple[str, ...], words: str) -> None:
    check_error(invoke("run", "-p", "x", "-c", "512", *args), 2, words)


#
# grammars that are not trusted
#


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "200 deep"),
        (
            "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(100_000)), 'r100000 ::= "a"']),
            "20,000 rules",
        ),
    ],
)
def test_a_grammar_that_would_end_the_process(kv: KVFlash, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_grammar(text, kv.model)


def test_a_grammar_of_which_each_rule_names_the_next_twice(kv: KVFlash) -> None:
    """To go down into each of them again would take years."""
    rules = [f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(60)]
    check_grammar("\n".join(["root ::= r0", *rules, 'r60 ::= "a"']), kv.model)
    with pytest.raises(UsageError, match="from the left"):
        check_grammar("\n".join(["root ::= r0", *rules, 'r60 ::= "a" | root "b"']), kv.model)


def test_usual_grammars_are_not_too_large(kv: KVFlash) -> None:
    quoted = 'root ::= "(" [(] | ' + "(" * 150 + '"a"' + ")" * 150
    check_grammar(quoted + " | [)]" * 300 + ' | "("' * 300 + " # ((", kv.model)


def test_a_grammar_of_either() -> None:
    one, other = 'root ::= a-b [^"root]\na-b ::= "root" | ( root )? # root', 'root ::= "\\"root"'
    assert either(one, other) == (
        'root ::= a-root | b-root\na-root ::= a-a-b [^"root]\na-a-b ::= "root" | ( a-root )? # root\nb-root ::= "\\"root"'
    )
