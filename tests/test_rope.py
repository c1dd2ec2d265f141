"""Contexts beyond training: RoPE scaled by options is what a file can say, in the pool, in an exact pass and in the full cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, tiny
from support.oracles import ON_GPU
from support.runs import Logits, Open, read

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.native import Rope

pytestmark = pytest.mark.native

environment = commands.environment
SMALL: dict[str, Any] = {
    "n_ctx": 4096,
    "n_threads": 1,
    "pool": 256,
    "chunk": 16,
    "n_batch": 64,
    "n_ubatch": 64,
    "share": 0,
}
FULL = {"pool": "off"}
YARN = Rope(scaling="yarn", scale=4, orig_ctx=1024)
ALL = {
    "linear": Rope(scaling="linear", scale=4),
    "yarn": YARN,
    "yarn, all": Rope(scaling="yarn", scale=2, ext_factor=0.5, attn_factor=1.2, beta_slow=2, beta_fast=16),
    "base": Rope(freq_base=5e5),
}
N = 900


def logits(kv: KVFlash) -> Logits:
    """The logits after a prompt of more than three pools."""
    read(kv, N)
    return kv.logits()


@pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order")
@pytest.mark.parametrize("rope", ALL.values(), ids=ALL)
def test_a_prompt_is_the_full_caches(opened: Open, rope: Rope) -> None:
    want = logits(opened(rope=rope, **FULL))
    assert np.array_equal(logits(opened(rope=rope)), want)
    assert not np.array_equal(logits(opened(**FULL)), want)


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (Rope(scaling="linear", scale=4), {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
        (YARN, {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 1024}),
        (Rope(freq_base=5e5), {"rope__freq_base": 5e5}),
    ],
    ids=["linear", "yarn", "base"],
)  # fmt: skip
def test_options_are_what_a_file_says(opened: Open, tmp_path: Path, rope: Rope, keys: dict[str, Any]) -> None:
    path = tmp_path / "scaled.gguf"
    writer = tiny.Writer(path, "qwen3")
    tiny.MODELS["qwen3"](writer)
    for name in keys.keys() & {"rope__freq_base"}:
        writer._file.kv_data[0].pop(f"qwen3.{name.replace('__', '.')}")
    writer.keys(**keys)
    writer.close()
    with KVFlash.from_file(path, **(SMALL | FULL)) as kv:
        want = logits(kv)
    assert np.array_equal(logits(opened(rope=rope, **FULL)), want)


def test_a_snapshot_is_of_one_scaling(opened: Open, tmp_path: Path) -> None:
    kv = opened(rope=YARN, snapshots=True)
    read(kv, N)
    kv.save(tmp_path / "yarn.kvsnap")
    assert opened(rope=YARN, snapshots=True).restore(tmp_path / "yarn.kvsnap") == N
    for rope in (None, Rope(scaling="yarn", scale=2, orig_ctx=1024)):
        with pytest.raises(SnapshotError, match=r"with another model, or another scaling of RoPE"):
            opened(rope=rope, snapshots=True).restore(tmp_path / "yarn.kvsnap")


def test_warnings(opened: Open) -> None:
    longer = f"a context of {2 * tiny.N_CTX:,} tokens is longer than the {tiny.N_CTX:,} the model was trained on"
    assert any(longer in text and "`rope.scaling` yarn" in text for text in opened(n_ctx=2 * tiny.N_CTX).warnings)
    scaled = Rope(scaling="yarn", scale=2)
    assert not opened(n_ctx=2 * tiny.N_CTX, rope=scaled).warnings
    (beyond,) = opened(n_ctx=3 * tiny.N_CTX, rope=scaled).warnings
    assert f"scaled by `rope.scale` to {2 * tiny.N_CTX:,}" in beyond
    (short,) = opened(n_ctx=tiny.N_CTX, rope=scaled).warnings
    assert short.startswith("`rope.scale` is for contexts beyond")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scaling": "ntk", "scale": 2}, "`rope.scaling` is 'ntk'"),
        ({"scaling": "yarn"}, "there is no scale: give `rope.scale`"),
        ({"scaling": "none", "scale": 2}, "`rope.scale` does nothing"),
        ({"scale": 0.5}, "`rope.scale` is 0.5"),
        ({"scale": float("nan")}, "`rope.scale` is nan"),
        ({"freq_base": -1}, "`rope.freq_base` is -1"),
        ({"freq_base": 0.5}, "`rope.freq_base` is 0.5"),
        ({"attn_factor": -0.5}, "`rope.attn_factor` is -0.5"),
        ({"scaling": "linear", "scale": 2, "ext_factor": 1}, "`rope.ext_factor` applies only to YaRN"),
        ({"beta_fast": -2}, "`rope.beta_fast` is -2"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Rope(**given)
    assert words in str(caught.value)


#
# the command line
#


def test_a_part_of_yarn_without_yarn_is_warned_of(opened: Open) -> None:
    said = "does nothing: it belongs to YaRN, which this model does not use"
    for rope in (Rope(beta_fast=16), Rope(orig_ctx=1024), Rope(scale=2, beta_slow=2)):
        assert any(said in text for text in opened(rope=rope, n_ctx=2 * tiny.N_CTX).warnings)
    for rope in (Rope(attn_factor=1.2), Rope(beta_fast=16, ext_factor=1, scale=2), YARN):
        assert not any(said in text for text in opened(rope=rope, n_ctx=2 * tiny.N_CTX).warnings)
