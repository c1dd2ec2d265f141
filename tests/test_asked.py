"""What is asked of an answer: its temperature, its length, its likely tokens, its texts; and one that goes on after half a character."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.commands import check_error, kvflash
from support.runs import GREEDY

from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.errors import UsageError, number
from pyllama_kvflash.events import Done, Probs
from pyllama_kvflash.native import Sampler
from pyllama_kvflash.native.sampler import MAX_PROBS, most
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"n_ctx": 1024, "pool": 512, "n_threads": 1, "opening": 0}
HALF = "ab\ud83d"
TEXT = "a€😀é日本語!"  # the model spells all but the first and the last in bytes


@pytest.fixture(scope="module")
def kv() -> Iterator[KVFlash]:
    with KVFlash.from_file(BUNDLED_MODEL, **SMALL) as kv:
        yield kv


#
# temperatures
#


@pytest.mark.parametrize("temperature", [2**-30 - 2**-60, 1e-12, 1e-30, 1e-37, 1e-38, 1e-40, 1e-45, 1e-320, 0.0])
def test_so_cold_that_it_is_greedy(kv: KVFlash, temperature: float) -> None:
    """Logits divided by 1e-38 are infinite, and any token was drawn."""
    cold = Sampling(temperature=temperature, seed=1, top_k=0, top_p=1, min_p=0)
    assert cold.greedy
    kv.clear()
    kv.decode(kv.tokenize("The code of the"))
    assert Sampler(cold, kv.model).sample(kv.ctx) == int(kv.logits().argmax())


@pytest.mark.parametrize("temperature", [2**-30, 1e-6, 1e-3])
def test_a_draw_at_the_threshold_takes_the_most_likely_token_too(kv: KVFlash, temperature: float) -> None:
    """So nothing jumps there."""
    cold = Sampling(temperature=temperature, seed=1, top_k=0, top_p=1, min_p=0)
    assert not cold.greedy
    kv.clear()
    kv.decode(kv.tokenize("The code of the"))
    for seed in range(8):
        assert Sampler(replace(cold, seed=seed), kv.model).sample(kv.ctx) == int(kv.logits().argmax())


#
# how long
#


def test_lengths(kv: KVFlash) -> None:
    """0 reads the prompt alone; what is not a token count is refused, and nothing is forgotten for it."""
    (done,) = [event for event in kv.generate("The code", max_tokens=0) if isinstance(event, Done)]
    assert (done.reason, done.text, done.stats.n_generated) == ("length", "", 0)
    tokens = kv.tokens
    assert len(tokens) > 1
    for n, said in ((-5, "-5"), (-2, "-2"), (2**31, "2,147,483,648")):
        with pytest.raises(UsageError, match=rf"^`max_tokens` is {said}, and must be from 0 to 2,147"):
            next(kv.generate("another text", max_tokens=n))
        np.testing.assert_array_equal(kv.tokens, tokens)
    *_, done = kv.generate([66] * 1000, max_tokens=-1, sampling=GREEDY)
    assert isinstance(done, Done)
    assert done.reason in {"context", "eos"}


#
# half a character
#


def spelt(monkeypatch: pytest.MonkeyPatch, kv: KVFlash, text: str) -> list[int]:
    """Have the model say a text, whatever it is asked. Returns its tokens."""
    tokens = kv.tokenize(text, add_special=False).tolist()
    script = iter(tokens)
    monkeypatch.setattr(Sampler, "sample", lambda *_: next(script))
    return tokens


def said(kv: KVFlash, prompt: str, n: int, **asked: Any) -> tuple[str, list[Token], Done]:
    events = list(kv.generate(prompt, max_tokens=n, **asked))
    shown = [event for event in events if isinstance(event, Token | Done)]
    assert isinstance(shown[-1], Done)
    return "".join(event.text for event in shown), [e for e in shown if isinstance(e, Token)], shown[-1]


@pytest.mark.parametrize("n", range(1, len(TEXT.encode())))
def test_an_answer_cut_in_a_character_goes_on_with_it(monkeypatch: pytest.MonkeyPatch, kv: KVFlash, n: int) -> None:
    n_all = len(spelt(monkeypatch, kv, TEXT))
    assert n_all == len(TEXT.encode())
    first, tokens, done = said(kv, "x", n)
    assert first == TEXT.encode()[:n].decode(errors="ignore")
    assert (len(tokens), done.reason) == (n, "length")
    second, _, _ = said(kv, "", n_all - n, append=True)
    assert first + second == TEXT


def test_half_a_character_before_a_prompt_is_not_part_of_its_answer(
    monkeypatch: pytest.MonkeyPatch, kv: KVFlash
) -> None:
    spelt(monkeypatch, kv, "é")
    assert said(kv, "x", 1)[0] == ""
    assert said(kv, "y", 1, append=True)[0] == "\ufffd"


def test_a_chat_that_goes_on_after_half_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends back what it got, and joins it to what comes; streamed or not. Each token is told with its bytes."""
    pytest.importorskip("starlette")
    from support.serving import Running, sse  # noqa: PLC0415 (an extra)

    with Running(n_parallel=1, opening=0) as server:
        assert server.scheduler.kv
        user = {"role": "user", "content": "x"}
        for stream in (False, True):
            spelt(monkeypatch, server.scheduler.kv, "a€")
            body = {"messages": [user], "max_tokens": 3, "stream": stream, "logprobs": True}
            res = server.http.post("/v1/chat/completions", json=body)
            if stream:
                choices = [c for event in sse(res.text)[0] if isinstance(event, dict) for c in event["choices"]]
                first = "".join(c["delta"].get("content") or "" for c in choices)
                told = [t for c in choices for t in (c.get("logprobs") or {}).get("content", ())]
            else:
                (choice,) = res.json()["choices"]
                first, told = choice["message"]["content"], choice["logprobs"]["content"]
            assert first == "a"
            assert [t["bytes"] for t in told] == [[97], [0xE2], [0x82]]
            spelt(monkeypatch, server.scheduler.kv, "€!")
            asked = [user, {"role": "assistant", "content": first}]
            res = server.http.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 4})
            assert first + res.json()["choices"][0]["message"]["content"] == "a€!"


#
# how likely
#


def test_likely_tokens_are_as_with_exact_arithmetic(kv: KVFlash) -> None:
    kv.clear()
    kv.decode(kv.tokenize("The code of the"))
    logits = kv.logits().astype(np.float64)
    want = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    for n in (0, 1, 20, MAX_PROBS):
        found = Sampler(Sampling(n_probs=n), kv.model).probs(kv.ctx, 7)
        assert found is not None
        probs = Probs(*found)
        best = np.argsort(-logits, kind="stable")[:n]
        assert [t for t, _ in probs.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in probs.top], want[best], atol=1e-5)
        assert probs.logprob == pytest.approx(want[7], abs=1e-5)


@pytest.mark.parametrize("m", [1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("n_values", [2, 50, 1 << 30])
def test_the_most_of_many(m: int, n_values: int) -> None:
    """Many of them the same: the first ones first."""
    values = np.random.default_rng(m).integers(0, n_values, m).astype(np.float32)
    for n in (0, 1, 3, 20, 1024):
        np.testing.assert_array_equal(most(values, n), np.argsort(-values, kind="stable")[:n])


#
# texts
#

TEXTS: dict[str, tuple[Callable[[KVFlash], Any], str]] = {
    "prompt": (lambda kv: next(kv.generate(HALF)), "the text"),
    "appended": (lambda kv: next(kv.generate(HALF, append=True)), "the text"),
    "tokenize": (lambda kv: kv.tokenize(HALF), "the text"),
    "stop": (lambda kv: next(kv.generate("x", stop=["a", HALF])), "a stop string"),
}


@pytest.mark.parametrize("where", TEXTS)
def test_half_a_surrogate_pair(kv: KVFlash, where: str) -> None:
    call, what = TEXTS[where]
    with pytest.raises(
        UsageError, match=f"^{what} is not Unicode text: half of a surrogate pair at character 2$"
    ) as err:
        call(kv)
    assert err.value.__suppress_context__


@pytest.mark.parametrize(
    "args", [(b"-p", b"a\xffb"), (b"-p", b"a", b"-r", b"\xff"), (b"-p", b"a", b"--grammar", b"root ::= \xff")]
)
def test_options_that_are_not_text(args: tuple[bytes, ...]) -> None:
    check_error(kvflash("run", BUNDLED_MODEL, "-n", "1", *args), 2, "text")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_message_that_is_not_text(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    """Whatever the locale has Python make of it: those before it are answered, and it is named."""
    monkeypatch.setenv("PYTHONIOENCODING", f"utf-8:{errors}")
    done = kvflash("chat", BUNDLED_MODEL, "-c", "512", "-n", "1", "-q", stdin=b"The code\n\xff\nThe code\n")
    assert done.code == 2
    assert done.err.count("line 2 of stdin is not UTF-8 text: byte 0xff at offset 0") == 1
    assert len(done.out.splitlines()) == 1


#
# numbers
#

NUMBERS: list[tuple[float, str]] = [
    (0, "0"), (-5, "-5"), (1000, "1,000"), (2**31 - 1, "2,147,483,647"), (2**64, "18,446,744,073,709,551,616"),
    (10**400, "10^400"), (-(10**40), "-10^40"), (1e9, "1,000,000,000"), (4294967295.0, "4,294,967,295"), (5.0, "5"),
    (0.1 + 0.2, "0.3"), (2.5, "2.5"), (1234.5, "1,234.5"), (1e-40, "1e-40"), (1e300, "1e300"), (-1e-9, "-1e-9"),
    (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), (True, "1"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_numbers_as_people_write_them(value: float, text: str) -> None:
    assert number(value) == text
