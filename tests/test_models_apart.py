"""The KV of a model is never taken for another one's, which differs in one thing."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import families, tiny
from support.rewritten import rewritten
from support.splits import change, split

from kvflash_bench.grid import Variant, setting
from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.fingerprint import fingerprint
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"n_ctx": 512, "pool": 512, "n_threads": 1, "n_batch": 64, "snapshots": True, "prefill": "pool"}
TEXT = np.random.default_rng(7).integers(0, 4000, 70).astype(np.int32)
MATRIX, NORM = "blk.5.attn_v.weight", "blk.5.attn_norm.weight"
"""Of the last layer: in the second part of two."""


def copied(path: Path) -> Path:
    path.write_bytes(BUNDLED_MODEL.read_bytes())
    return path


def changed(path: Path, name: str) -> Path:
    change(path, name, 100)
    return path


def longer(path: Path) -> Path:
    with path.open("ab") as file:
        file.write(bytes(32))
    return path


def in_two(path: Path, *, empty_first: bool = False, other: bool = False) -> Path:
    first, second = split(BUNDLED_MODEL, path, 2, empty_first=empty_first)
    if other:
        change(second, MATRIX, 100)
    return first


MODELS: dict[str, Callable[[Path], Path]] = {
    "the model": copied,
    "a metadata key": lambda path: rewritten(path, {"general.name": "another"}),
    "the rope": lambda path: rewritten(path, {"qwen3.rope.freq_base": 1e6}),
    "the tokenizer": lambda path: rewritten(path, {"tokenizer.ggml.bos_token_id": 4089}),
    "the template": lambda path: rewritten(path, template="{{ messages[0].content }}"),
    "a byte of a matrix": lambda path: changed(copied(path), MATRIX),
    "a byte of a norm": lambda path: changed(copied(path), NORM),
    "the size": lambda path: longer(copied(path)),
    "two parts": in_two,
    "another second part": lambda path: in_two(path, other=True),
    "a first part without tensors": lambda path: in_two(path, empty_first=True),
    "that, and another second part": lambda path: in_two(path, empty_first=True, other=True),
}


def test_only_the_diagonal_hits(tmp_path: Path) -> None:
    """A folder shared by 12 models: the files of each for each, by the cache and by restore()."""
    shared = PrefixCache(tmp_path / "cache", 1 << 40)
    with ExitStack() as stack:
        kvs = []
        for i, make in enumerate(MODELS.values()):
            (tmp_path / str(i)).mkdir()
            path = make(tmp_path / str(i) / "model.gguf")
            kvs.append(stack.enter_context(KVFlash.from_file(path, **SMALL)))
        files = []
        for kv in kvs:
            assert shared.match(kv, TEXT) == shared.restore(kv, TEXT) == 0
            list(kv.prefill(TEXT))
            files.append(shared.save(kv))
            kv.clear()
        assert len(set(files)) == len(MODELS)
        for i, kv in enumerate(kvs):
            for j, file in enumerate(files):
                if i == j:
                    assert kv.restore(file, TEXT) == 64
                else:
                    with pytest.raises(SnapshotError, match="another model"):
                        kv.restore(file, TEXT)
            kv.clear()
            assert shared.restore(kv, TEXT) == 64


def test_a_context_with_other_factors_of_rope_is_another_one(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    """phi3 takes the long ones by the size of the context: its keys differ from the first token on."""
    texts, cache, n = TEXT % tiny.N_VOCAB, PrefixCache(tmp_path, 1 << 40), families.LONG_CTX
    contexts = n // 2, n, n + 256, 2 * n
    with ExitStack() as stack:
        kvs = [
            stack.enter_context(KVFlash.from_file(tiny_path("phi3"), **{**SMALL, "n_ctx": n_ctx})) for n_ctx in contexts
        ]
        files = []
        for kv in kvs:
            list(kv.prefill(texts))
            kv.save(tmp_path / f"{kv.options.n_ctx}.kvsnap")
            files.append(tmp_path / f"{kv.options.n_ctx}.kvsnap")
            cache.save(kv)
        assert len(cache.entries()) == 2
        for i, kv in enumerate(kvs):
            for j, file in enumerate(files):
                if (i < 2) == (j < 2):
                    assert kv.restore(file, texts) == 64
                else:
                    with pytest.raises(SnapshotError, match=r"factors of RoPE.*`n_ctx`"):
                        kv.restore(file, texts)


def test_a_result_is_of_a_scorer_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given, as a variant's own, or found beside the model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model, scorer, other = tmp_path / "m.gguf", copied(tmp_path / "m-draft.gguf"), in_two(tmp_path / "other")
    marks = [f"{fingerprint(path):016x}" for path in (scorer, other)]
    drafter, qk = Variant.parse("drafter"), Variant.parse("qk")
    own = Variant.parse(f"drafter/scorer_model={other.name}")
    assert [setting({}, variant, model).get("scorer_model") for variant in (drafter, own, qk)] == [*marks, None]
    assert setting({"scorer_model": str(other)}, drafter, model)["scorer_model"] == marks[1]
    scorer.unlink()
    assert "scorer_model" not in setting({}, drafter, model)
