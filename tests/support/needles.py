"""Texts with codes in them, for the bundled model."""

import functools

from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt


@functools.cache
def document(n_tokens: int, n_needles: int = 4, seed: int = 2) -> NeedlePrompt:
    """So many tokens with so many codes."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(
            n_tokens, lambda text: len(model.tokenize(text, add_special=False)), n_needles=n_needles, seed=seed
        )
