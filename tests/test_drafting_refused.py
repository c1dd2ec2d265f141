"""What is wrong with a drafter is said in one sentence, or it no longer drafts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import drafting
from support.changes import ENGINE
from support.drafting import N_MAX, TOKENS, Knowing, run, same
from support.runs import Open
from support.scorers import shuffled

from pyllama_kvflash.errors import KVFlashError, ModelError, UnsupportedError, UsageError

pytestmark = pytest.mark.native

files = drafting.files
noise = drafting.noise
opened = drafting.opened

REFUSED: list[tuple[dict[str, Any], type[KVFlashError], tuple[str, ...]]] = [
    # options
    ({"kind": "eagle9"}, UsageError, ("`spec.kind` is 'eagle9'", "draft, dflash, eagle3, mtp, ngram")),
    ({"kind": "draft"}, UsageError, ("`spec.model`",)),
    ({"kind": "dflash"}, UsageError, ("`spec.model`",)),
    ({"kind": "ngram", "model": "draft"}, UsageError, ("takes no drafter", "`spec.model`")),
    ({"n_max": -1}, UsageError, ("`spec.n_max` is -1", "from 0 to 64")),
    ({"n_max": 65}, UsageError, ("`spec.n_max` is 65",)),
    ({"p_min": 2}, UsageError, ("`spec.p_min` is 2",)),
    ({"p_min": np.nan}, UsageError, ("`spec.p_min` is nan",)),
    ({"window": 0}, UsageError, ("`spec.window` is 0",)),
    ({"gate": -1}, UsageError, ("`spec.gate` is -1",)),
    # files
    ({"kind": "draft", "model": "missing"}, UsageError, ("missing.gguf does not exist",)),
    ({"kind": "draft", "model": "folder"}, UsageError, ("folder.gguf is a directory",)),
    ({"kind": "draft", "model": "empty"}, ModelError, ("empty.gguf is not a GGUF model: it is empty",)),
    ({"kind": "draft", "model": "text"}, ModelError, ("text.gguf is not a GGUF model: it begins with",)),
    ({"kind": "draft", "model": "half"}, ModelError, ("half.gguf cannot be loaded",)),
    ({"kind": "draft", "model": "some bytes"}, ModelError, ("some bytes.gguf cannot be loaded",)),
    ({"kind": "dflash", "model": "dflash without an end"}, ModelError, ("an end.gguf cannot be loaded",)),
    # drafters for something else
    ({"kind": "draft", "model": "wordless"}, UnsupportedError, ("wordless.gguf", "same vocabulary")),
    ({"kind": "draft", "model": "needle-draft"}, UnsupportedError, ("same vocabulary",)),
    ({"kind": "draft", "model": "many more tokens"}, UnsupportedError, ("same vocabulary",)),
    ({"kind": "dflash", "model": "more tokens, dflash"}, UnsupportedError, ("has 520 tokens, and the target's 512",)),
    ({"kind": "draft", "model": "qwen35"}, UnsupportedError, ("qwen35.gguf", "has a recurrent state")),
    ({"kind": "draft", "model": "dflash"}, UnsupportedError, ("dflash.gguf", "is of another type")),
    ({"kind": "dflash", "model": "draft"}, UnsupportedError, ("draft.gguf", "names no layers of the target")),
    ({"kind": "eagle3", "model": "draft"}, UnsupportedError, ("draft.gguf", "names no layers of the target")),
    ({"kind": "eagle3", "model": "dflash"}, KVFlashError, ("dflash.gguf", "not eagle3")),
    ({"kind": "mtp", "model": "draft"}, UnsupportedError, ("draft.gguf", "no heads")),
    ({"kind": "mtp"}, UnsupportedError, ("qwen3.gguf", "no heads")),
    (
        {"kind": "dflash", "model": "narrow"},
        UnsupportedError,
        ("narrow.gguf", "a target with embeddings of size 128", "has 256"),
    ),
    (
        {"kind": "dflash", "model": "wide"},
        UnsupportedError,
        ("wide.gguf", "a target with embeddings of size 512", "has 256"),
    ),
    ({"kind": "dflash", "model": "layer 9"}, UnsupportedError, ("layer 9 of its target, which has 3",)),
    ({"kind": "dflash", "model": "last layer"}, UnsupportedError, ("the output of the target's last layer",)),
    ({"kind": "dflash", "model": "layer -1"}, UnsupportedError, ("layer -1 of its target, which has 3",)),
    ({"kind": "dflash", "model": "maskless"}, UnsupportedError, ("maskless.gguf", "no mask token")),
]


@pytest.mark.parametrize(("spec", "error", "words"), REFUSED, ids=[str(spec) for spec, *_ in REFUSED])
def test_refused(opened: Open, spec: dict[str, Any], error: type[KVFlashError], words: tuple[str, ...]) -> None:
    """In a sentence that names the file or the option, before the first token."""
    with pytest.raises(error) as info:
        opened("qwen3", spec)
    text = str(info.value)
    for word in words:
        assert word in text
    assert "\n" not in text
    assert "ASSERT" not in text


def test_refused_together_with_something_else(opened: Open) -> None:
    for options in ({"n_ubatch": N_MAX + 1}, {"n_batch": N_MAX + 1}):
        with pytest.raises(
            UsageError, match=rf"{N_MAX} tokens only if `n_batch` and `n_ubatch` are at least {N_MAX + 2}"
        ):
            opened("qwen35", {}, **options)


@pytest.mark.sampled(ENGINE)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"n_ubatch": N_MAX}),
        ("qwen3", {"n_ubatch": N_MAX + 1}),
        ("qwen3", {"n_batch": N_MAX}),
        ("gemma4", {"n_ubatch": 2}),
        ("qwen35", {"n_ubatch": N_MAX + 2}),
    ],
    ids=str,
)
def test_small_batches(
    opened: Open,
    noise: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
) -> None:
    """There is room for a draft in a graph, or there are none."""
    prompt, script = TOKENS[:300], TOKENS[300:350].tolist()
    small: dict[str, Any] = {"pool": 256, "n_batch": 64, **options}
    want = run(opened(name, policy=shuffled(1), **small), monkeypatch, prompt, script, max_tokens=50)
    Knowing(monkeypatch, TOKENS.tolist(), wrong=0.2)
    got = run(opened(name, {}, policy=shuffled(1), **small), monkeypatch, prompt, script, max_tokens=50)
    assert got.done.stats.reselects > 2
    same(got, want, noise(name, "f16"))
    assert (got.done.stats.accepted > 10) == (options not in ({"n_ubatch": 2}, {"n_ubatch": N_MAX}, {"n_batch": N_MAX}))


@pytest.mark.sampled(ENGINE)
@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "draft", "model": "nan"},
        {"kind": "draft", "model": "nan", "p_min": 0.5},
        {"kind": "draft", "model": "inf"},
        {"kind": "dflash", "model": "nan dflash"},
        {"kind": "draft", "model": "more tokens"},
        {"kind": "draft", "model": "fewer tokens"},
        {"kind": "dflash", "model": "fewer tokens, dflash"},
    ],
    ids=str,
)
def test_bad_drafters_change_nothing(
    opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    """Guesses that are no numbers or no tokens, and a text of tokens that the drafter does not know."""
    prompt, script = (
        np.array([*TOKENS[:100], 509, 508], np.int32),
        [*TOKENS[100:110].tolist(), 509, *TOKENS[110:120].tolist()],
    )
    want = run(opened("qwen3"), monkeypatch, prompt, script, max_tokens=len(script))
    same(run(opened("qwen3", spec), monkeypatch, prompt, script, max_tokens=len(script)), want, noise("qwen3", "f16"))
