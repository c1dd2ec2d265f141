"""EAGLE-3 and MTP: drafters that read what the target computes, fed on the pool as with the full cache.

Random weights guess wrong, so nearly every guess is taken back again; what they are fed must not disturb the target.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny, tiny_drafters
from support.changes import DRAFTS

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.drafting import width_noise
from support.rounding import Chosen, held
from support.runs import turn

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.events import Done, Stats, Token
from pyllama_kvflash.native import Model, Sampling
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt
from pyllama_kvflash.options import Spec

pytestmark = pytest.mark.native

OPTIONS: dict[str, Any] = {"n_ctx": 4096, "n_threads": 1, "policy": "lru", "n_batch": 256}
PROMPT = np.random.default_rng(3).integers(0, tiny.N_VOCAB, 1500).astype(np.int32)


@pytest.fixture
def no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have no tokenizer: their tokens are numbers."""
    monkeypatch.setattr(Model, "is_eog", lambda *_: False)
    monkeypatch.setattr(Model, "piece", lambda *_, **__: b"")


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path, no_text: None) -> Iterator[tuple[Path, Spec]]:
    """A model, and how it drafts."""
    path = tmp_path / "target.gguf"
    if request.param == "mtp":
        tiny_drafters.mtp(path)
        yield path, Spec(kind="mtp", n_max=2, gate=0)
    else:
        tiny.write("qwen3", path)
        drafter = tmp_path / "eagle3.gguf"
        tiny_drafters.eagle3(drafter, n_embd_target=256)
        yield path, Spec(kind="eagle3", model=str(drafter), n_max=4, gate=0)


@dataclass
class Answer:
    """To PROMPT, greedily."""

    ids: list[int]
    stats: Stats


def answer(path: Path, chosen: Chosen, n: int = 90, **options: Any) -> Answer:
    with KVFlash.from_file(path, **OPTIONS, **options) as kv, held(chosen):
        events = list(kv.generate(PROMPT, max_tokens=n, sampling=Sampling(temperature=0)))
        if kv.n_pool:
            kv.check_integrity()
    done = events[-1]
    assert isinstance(done, Done)
    return Answer([e.id for e in events if isinstance(e, Token)], done.stats)


@pytest.mark.nightly(DRAFTS)
@pytest.mark.parametrize(("pool", "prefill"), [("off", "exact"), (768, "exact"), (768, "pool")])
@pytest.mark.parametrize("pair", ["eagle3", "mtp"], indirect=True)
def test_the_answer_is_the_one_without_drafts(pair: tuple[Path, Spec], pool: int | str, prefill: str) -> None:
    """Of a dense and of a hybrid model, whose recurrent state goes back at nearly every step, with chunks evicted: each token
    by the logits without drafts, but for what the width of a batch does to them.
    """
    path, spec = pair
    options = {"pool": pool, "prefill": prefill, "opening": 0}
    chosen = Chosen(width_noise(path, spec.n_max + 1, {**OPTIONS, **options}))
    want, got = answer(path, chosen, **options), answer(path, chosen, **options, spec=spec)
    assert got.ids == want.ids
    assert chosen.n_held == len(chosen.rows) == len(want.ids) == 90
    assert got.stats.draft_steps > 70
    assert got.stats.drafted >= got.stats.draft_steps
    assert (got.stats.chunks > got.stats.resident) == (pool != "off")


DFLASH = Path(__file__).parent / "data" / "needle-dflash-2m-q8_0.gguf"  # trained for needle-7m, see docs/RESULTS.md


@pytest.mark.nightly(DRAFTS)
def test_a_trained_dflash_is_right_as_often_through_the_pool() -> None:
    """Of what it guesses of codes, and the codes are those of plain decoding: 4 questions about a text of 4 pools."""
    found: dict[str, list[tuple[list[int], int, int]]] = {}
    for name, pool, spec in (("plain", "off", False), ("full", "off", True), ("pool", 512, True)):
        how = {"spec": Spec(kind="dflash", model=str(DFLASH), n_max=7, gate=0)} if spec else {}
        options: dict[str, Any] = {"n_ctx": 2304, "pool": pool, "chunk": 32, "n_threads": 1, "flash_attn": "off"}
        options |= {"opening": 0, **how}
        with KVFlash.from_file(BUNDLED_MODEL, **options) as kv:
            text = make_prompt(2048, lambda part, kv=kv: len(kv.tokenize(part, add_special=False)), n_needles=4, seed=2)
            for _ in kv.prefill(kv.tokenize(text.text)):
                pass
            end, res = kv.n_tokens, []
            for needle in text.needles:
                kv.rollback(end)
                asked = {"max_tokens": 16, "sampling": Sampling(temperature=0), "stop": ["\n"], "append": True}
                events = list(kv.generate(needle.question, **asked))
                stats = events[-1].stats  # type: ignore[union-attr]
                res.append(([e.id for e in events if isinstance(e, Token)], stats.drafted, stats.accepted))
            found[name] = res
    assert [ids for ids, *_ in found["full"]] == [ids for ids, *_ in found["pool"]]
    assert [ids for ids, *_ in found["full"]] == [ids for ids, *_ in found["plain"]]
    full, pool = (sum(a for *_, a in found[n]) for n in ("full", "pool"))
    assert full / sum(d for _, d, _ in found["full"]) > 0.2
    assert abs(full - pool) <= 1, (
        "one guess may be the other way: what the drafter reads of the pool's layers is not the same"
    )


def test_a_model_without_heads_says_so(tiny_path: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot draft as mtp: it has no heads that predict further tokens"):
        KVFlash.from_file(tiny_path("qwen3"), n_ctx=1024, spec=Spec(kind="mtp"))


def by_turns(kv: KVFlash, prompts: list[Any], n: int) -> list[tuple[list[int], int]]:
    """Answers of the sequences, a batch or a step of each in turn: their tokens, and how many guesses were right."""
    runs = [
        s.generation(p, max_tokens=n, sampling=Sampling(temperature=0))
        for s, p in zip(kv.sequences, prompts, strict=True)
    ]
    ids: list[list[int]] = [[] for _ in runs]
    while going := [i for i, run in enumerate(runs) if not run.ended]:
        for i in going:
            ids[i] += turn(runs[i])
    stats = [run.draft_stats for run in runs]
    return [(tokens, found.accepted if found else 0) for tokens, found in zip(ids, stats, strict=True)]


@pytest.mark.nightly(DRAFTS)
def test_sequences_of_a_pool_read_their_own_features() -> None:
    """A trained drafter is right as often for two sequences by turns as for each alone, and the codes are the same."""
    spec = Spec(kind="dflash", model=str(DFLASH), n_max=7, gate=0)
    options: dict[str, Any] = {"n_ctx": 2304, "pool": 2048, "n_threads": 1, "policy": "lru", "spec": spec}
    prompts, alone = [], []
    with KVFlash.from_file(BUNDLED_MODEL, **options) as kv:
        for seed in (2, 3):
            text = make_prompt(
                800, lambda part, kv=kv: len(kv.tokenize(part, add_special=False)), n_needles=1, seed=seed
            )
            needle = text.needles[0]
            prompts.append(kv.tokenize(text.text + f"{needle.statement}\n" * 8))
            kv.clear()
            alone += by_turns(kv, prompts[-1:], 32)
    with KVFlash.from_file(BUNDLED_MODEL, **options, n_parallel=2) as kv:
        both = by_turns(kv, prompts, 32)
        for sequence in kv.sequences:
            sequence.check_integrity()
    assert [ids for ids, _ in both] == [ids for ids, _ in alone]
    assert sum(n for _, n in alone) > 8, "else there is nothing to compare"
    assert abs(sum(n for _, n in both) - sum(n for _, n in alone)) <= 2
