"""Lossless answers: their tokens, chosen by the logits that another answer of the same text was chosen by."""

from collections.abc import Callable
from typing import Any

import pytest

from pyllama_kvflash import KVFlash, Sampling, Token
from support.drafting import WIDTH, width_noise
from support.rounding import Chosen, held
from support.runs import GREEDY


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
