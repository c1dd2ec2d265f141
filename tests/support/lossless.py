"""Lossless answers: their tokens, chosen by the logits that another answer of the same text was chosen by."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyllama_kvflash import KVFlash, Sampling, Token
from support.drafting import WIDTH, width_noise
from support.rounding import Chosen, held, relative_rms
from support.runs import BY_SIXTEEN, GREEDY, Open, read

CHUNK, N_POOL = 16, 256

SMALL: dict[str, Any] = {**BY_SIXTEEN, "pool": N_POOL, "panes": 2, "mode": "lossless"}
FULL = {**SMALL, "pool": "off", "mode": "fast"}
"""Options of the tests, and of the full cache beside them."""


def answer(kv: KVFlash, prompt: Any, n: int, sampling: Sampling = GREEDY, **how: Any) -> list[int]:
    return [e.id for e in kv.generate(prompt, max_tokens=n, sampling=sampling, **how) if isinstance(e, Token)]


def chosen_alike(chosen: Chosen, kv: KVFlash, *args: Any, **how: Any) -> list[int]:
    """An answer whose tokens are chosen by the logits that are known for them."""
    with held(chosen):
        return answer(kv, *args, **how)


@pytest.fixture
def known(request: pytest.FixtureRequest, tiny_path: Any, needle_path: Any) -> Callable[..., Chosen]:
    """Logits that answers are chosen by, all those of a model, so that a near tie is the same for all. The full cache's options
    are FULL of the test's module.
    """

    def known_of(name: str = "qwen3", **options: Any) -> Chosen:
        path = needle_path if name == "needle" else tiny_path(name)
        return Chosen(width_noise(path, WIDTH, {**request.module.FULL, **options}))

    return known_of


def rows_apart(kv: KVFlash, plain: KVFlash, first: int) -> float:
    """How far the records from chunk `first` on are from those of the same text, read as a prompt; what the pool holds of a
    chunk is what its record has.
    """
    list(plain.prefill(kv.tokens))
    got, want = ([one.pager.records.get(c) for c in range(kv.n_tokens // CHUNK)] for one in (kv, plain))
    there = np.zeros_like(got[0])
    n_meta = kv.ctx.pool_info().meta_bytes
    for chunk, record in enumerate(got):
        assert np.array_equal(record[:n_meta], want[chunk][:n_meta])
        if kv.ctx.block_of(chunk) >= 0:
            kv.ctx.read(chunk, there)
            assert np.array_equal(there, record), f"chunk {chunk} in the pool"
    rows = [np.concatenate([record[n_meta:].view(np.float16) for record in part[first:]]) for part in (got, want)]
    return relative_rms(*(part.astype(np.float32) for part in rows))


def width_apart(opened: Open, name: str) -> float:
    """What the width of a batch does to rows: four times what is seen, for it has a tail."""
    narrow, wide = opened(name, mode="fast"), opened(name, mode="fast")
    for at in (600, *range(603, 700, 3)):
        read(narrow, at)
    read(wide, narrow.n_tokens)
    return 4 * rows_apart(narrow, wide, 600 // CHUNK)
