"""The beginning of an answer: its first tokens are the full cache's, whatever the pool holds, and then it goes on fast."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, snapshots
from support.changes import ENGINE
from support.commands import good
from support.cuts import cut_off
from support.drafting import width_noise
from support.oracles import ON_GPU
from support.rounding import Chosen, held
from support.runs import BY_SIXTEEN, GREEDY, TOKENS, Open, check_residency

from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Context
from pyllama_kvflash.options import Options
from pyllama_kvflash.pool.exact import ExactReader

pytestmark = [pytest.mark.native, pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order")]

environment = commands.environment
wordless = snapshots.wordless

N = 20
N_BATCHES = 1000 // 64 + 1  # of the prompt
SMALL: dict[str, Any] = {**BY_SIXTEEN, "pool": 256, "policy": "lru", "opening": N}
FULL = {**SMALL, "pool": "off"}


def answer(kv: KVFlash, prompt: Any, n: int, sampling: Sampling = GREEDY, **how: Any) -> list[int]:
    return [e.id for e in kv.generate(prompt, max_tokens=n, sampling=sampling, **how) if isinstance(e, Token)]


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Position and width of each batch that an exact pass computes."""
    found: list[tuple[int, int]] = []
    decode = ExactReader.decode

    def decoded(reader: ExactReader, pool: Context, tokens: Any, start: int, *args: Any, **how: Any) -> None:
        found.append((start, len(tokens)))
        decode(reader, pool, tokens, start, *args, **how)

    monkeypatch.setattr(ExactReader, "decode", decoded)
    return found


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=1)], ids=["greedy", "seed 1"])
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_the_first_tokens_are_the_full_caches(
    opened: Open, tiny_path: Callable[[str], Path], wordless: None, name: str, sampling: Sampling
) -> None:
    """Of two answers, but for what the width of a batch does to logits; that which begins fast parts sooner."""
    chosen = Chosen(width_noise(tiny_path(name), 9, FULL))
    kv, full, fast = opened(name, **SMALL), opened(name, **FULL), opened(name, **{**SMALL, "opening": 0})
    for text in (TOKENS[:1000], TOKENS[1000:1100]):
        chosen.rows.clear()
        found = []
        for one in (full, kv):
            with held(chosen):
                found.append(answer(one, text, N + 1, sampling, append=True))
        assert found[0] == found[1]
        check_residency(kv, 16)
    assert chosen.n_held == 2 * (N + 1)
    assert answer(fast, TOKENS[:1000], N + 1, sampling) != answer(full, TOKENS[:1000], N + 1, sampling)


def test_the_clock_changes_nothing(
    opened: Open, wordless: None, widths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many tokens are drafted does not follow from what they take: the same batches, and the same bits."""
    kv, again, clock = opened(**SMALL), opened(**SMALL), time.perf_counter
    got = answer(kv, TOKENS[:1000], N + 1)
    n = len(widths)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() ** 2)
    assert answer(again, TOKENS[:1000], N + 1) == got
    assert widths[n:] == widths[:n]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3", {"opening": 0}),
        ("qwen3", {"prefill": "pool"}),
        ("qwen3", {"pool": "off"}),
        ("qwen35", {}),  # its state would have to be kept for every draft
    ],
)
def test_where_there_is_none(opened: Open, wordless: None, name: str, how: dict[str, Any]) -> None:
    kv = opened(name, **{**SMALL, **how})
    assert not kv.decoder.opens_losslessly
    assert len(answer(kv, TOKENS[:600], 5)) == 5


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    ("of", "name", "when"),
    [
        ("sequence", "arrive", "before"),
        ("sequence", "arrive", "after"),
        ("sequence", "extend", "before"),
        ("decoder", "decode_exactly", "before"),
        ("decoder", "decode_exactly", "after"),
    ],
)
def test_an_answer_that_was_cut_off_goes_on(
    opened: Open, wordless: None, monkeypatch: pytest.MonkeyPatch, of: str, name: str, when: str, at: int
) -> None:
    """Wherever Ctrl-C comes in its beginning: what was shown stands, and what follows it is decoded losslessly, too."""
    kv, shown = opened(**SMALL), []
    with monkeypatch.context() as patch:
        of_prompt = {"extend": N_BATCHES, "arrive": 1}.get(name, 0)  # the pool has a prompt once, after its last batch
        cut_off(getattr(kv, of), name, when, patch, at + of_prompt)
        events = kv.generate(TOKENS[:1000], max_tokens=40, sampling=GREEDY)
        with pytest.raises(KeyboardInterrupt):
            shown.extend(event.id for event in events if isinstance(event, Token))
    rest = answer(kv, np.empty(0, np.int32), 30, append=True)
    assert len(rest) == 30
    text = [*kv.tokens.tolist(), rest[-1]]
    assert text[: 1000 + len(shown)] == [*TOKENS[:1000].tolist(), *shown]
    assert text[-30:] == rest
    assert kv.sequence.n_exact >= 1000 + min(len(shown), N)
    check_residency(kv, 16)


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize(("n", "saved"), [(3, True), (15, False), (40, True)])
def test_an_answer_that_is_broken_off_opens_no_longer(
    opened: Open, wordless: None, widths: list[tuple[int, int]], tmp_path: Path, n: int, saved: bool
) -> None:
    """In its opening or after it: the batches, and so the tokens, of an answer that was not, also from a snapshot."""
    options = {**SMALL, "snapshots": True}
    kv, whole = opened(**options), opened(**options)
    want = answer(whole, TOKENS[:1000], 60)
    n_batches = len(widths)
    events = kv.generate(TOKENS[:1000], max_tokens=60, sampling=GREEDY)
    shown = [next(e for e in events if isinstance(e, Token)) for _ in range(n)]
    events.close()
    if saved:
        kv.save(tmp_path / "broken-off.kvsnap")
        kv = opened(**options)
        kv.restore(tmp_path / "broken-off.kvsnap")
    left = 60 - (kv.n_tokens - 1000) - 1
    rest = answer(kv, np.empty(0, np.int32), left, append=True)
    assert [*kv.tokens.tolist()[1000:], rest[-1]] == want
    assert [e.id for e in shown] == want[:n]
    assert widths[n_batches:] == widths[:n_batches]


def test_it_is_said() -> None:
    args = ("run", "-p", "Hello", "--kvflash", "512", "-c", "2K", "-n", "4", "--temp", "0", "-v")
    for few in (("--kvflash-policy", "qk"), ("--kvflash-coarse", "2")):
        assert "the first 32 tokens of an answer are lossless" in good(*args, *few).stderr
    assert "of an answer are lossless" not in good(*args).stderr, "keys of 4 bits"
    assert "the first 5 tokens" in good(*args, "--set", "opening=5").stderr
    assert "of an answer are lossless" not in good(*args, "--set", "opening=0").stderr


def test_bad_openings() -> None:
    with pytest.raises(UsageError, match=r"`opening` is -2"):
        Options(opening=-2)
