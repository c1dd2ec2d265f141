"""EAGLE-3 and MTP: drafters that read what the target computes, fed on the pool as with the full cache.

Random weights guess wrong, so nearly every guess is taken back again; what they are fed must not disturb the target.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafters

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from pyllama_kvflash import KVFlash
from pyllama_kvflash.drafting import Spec
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.events import Done, Stats, Token
from pyllama_kvflash.native import Model, Sampling

pytestmark = pytest.mark.native

PROMPT = np.random.default_rng(3).integers(0, tiny.N_VOCAB, 1500).astype(np.int32)


@pytest.fixture(autouse=True)
def no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have no tokenizer: their tokens are numbers."""
    monkeypatch.setattr(Model, "is_eog", lambda *_: False)
    monkeypatch.setattr(Model, "piece", lambda *_: b"")


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Spec]]:
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


def answer(path: Path, n: int = 90, **options: Any) -> tuple[list[int], Stats]:
    """The greedy answer to PROMPT, and its figures."""
    with KVFlash.from_file(path, n_ctx=4096, n_threads=1, policy="lru", n_batch=256, **options) as kv:
        events = list(kv.generate(PROMPT, max_tokens=n, sampling=Sampling(temperature=0)))
        if kv.n_pool:
            kv.check_integrity()
    done = events[-1]
    assert isinstance(done, Done)
    return [e.id for e in events if isinstance(e, Token)], done.stats


@pytest.mark.parametrize("pool", ["off", 768])
@pytest.mark.parametrize("pair", ["eagle3", "mtp"], indirect=True)
def test_the_answer_is_the_one_without_drafts(pair: tuple[Path, Spec], pool: int | str) -> None:
    """Of a dense and of a hybrid model, whose recurrent state goes back at nearly every step, with chunks evicted."""
    path, spec = pair
    want, _ = answer(path, pool=pool)
    got, stats = answer(path, pool=pool, spec=spec)
    assert got == want
    assert stats.draft_steps > 70
    assert stats.drafted >= stats.draft_steps
    assert (stats.pages_out > 0) == (pool != "off")


def test_a_model_without_heads_says_so(tiny_path: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot draft as mtp: it has no heads that predict further tokens"):
        KVFlash.from_file(tiny_path("qwen3"), n_ctx=1024, spec=Spec(kind="mtp"))
