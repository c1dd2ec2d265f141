"""Texts with codes in them, for the bundled model."""

import functools
from typing import Any

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli.needles import Answers, ask_all, read
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt
from support.runs import GREEDY, Open, text_of


@functools.cache
def document(n_tokens: int, n_needles: int = 4, seed: int = 2) -> NeedlePrompt:
    """So many tokens with so many codes."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(
            n_tokens, lambda text: len(model.tokenize(text, add_special=False)), n_needles=n_needles, seed=seed
        )


def answers(kv: KVFlash, prompt: NeedlePrompt) -> Answers:
    """Of all its questions, once it is read."""
    return ask_all(kv, prompt, read(kv, prompt, lambda _: None))


def n_found(opened: Open, text: NeedlePrompt, **options: Any) -> int:
    """Of the needles, through a pool of a quarter of the text."""
    kv = opened("needle", pool=512, n_ctx=4096, opening=0, **options)
    n = 0
    for needle in text.needles:
        kv.clear()
        n += needle.answer in text_of(list(kv.generate(text.text + needle.question, max_tokens=12, sampling=GREEDY)))
    return n
