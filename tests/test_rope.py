"""Contexts beyond training: RoPE scaled by options is what a file can say, in the pool, in an exact pass and in the full cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, tiny
from support.commands import USAGE, check_error, good, invoke
from support.oracles import ON_GPU
from support.runs import Logits, Open, read

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli import main, params
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
        with pytest.raises(SnapshotError, match=r"of another model, or of another scaling of RoPE"):
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
        ({"scaling": "linear", "scale": 2, "ext_factor": 1}, "`rope.ext_factor` is of YaRN"),
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


def rope_of(*args: str) -> Rope | None:
    context = main.commands["run"].make_context("run", ["-p", "x", *args])
    with context:
        found: Rope | None = params.resolve({**context.params, "spec": None})["rope"]
    return found


def test_the_names_are_those_of_llama_cpp() -> None:
    assert rope_of() is None
    assert rope_of("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "32K") == Rope(
        scaling="yarn", scale=4, orig_ctx=32768
    )
    assert rope_of("--rope-freq-scale", "0.25", "--rope-freq-base", "1e6") == Rope(scale=4, freq_base=1e6)
    rest = ("--yarn-ext-factor", "0", "--yarn-attn-factor", "1", "--yarn-beta-slow", "2", "--yarn-beta-fast", "16")
    assert rope_of(*rest) == Rope(ext_factor=0, attn_factor=1, beta_slow=2, beta_fast=16)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_ROPE_SCALING_TYPE", "linear")
    monkeypatch.setenv("LLAMA_ARG_ROPE_SCALE", "2")
    assert rope_of() == Rope(scaling="linear", scale=2)
    assert rope_of("--rope-freq-scale", "0.25") == Rope(scaling="linear", scale=4), "what is typed is meant"
    monkeypatch.delenv("LLAMA_ARG_ROPE_SCALE")
    monkeypatch.setenv("LLAMA_ARG_ROPE_FREQ_SCALE", "0.5")
    assert rope_of() == Rope(scaling="linear", scale=2)
    assert rope_of("--rope-scale", "8") == Rope(scaling="linear", scale=8)


def test_a_part_of_yarn_without_yarn_is_warned_of(opened: Open) -> None:
    said = "does nothing: it is of YaRN, which this model does not have"
    for rope in (Rope(beta_fast=16), Rope(orig_ctx=1024), Rope(scale=2, beta_slow=2)):
        assert any(said in text for text in opened(rope=rope, n_ctx=2 * tiny.N_CTX).warnings)
    for rope in (Rope(attn_factor=1.2), Rope(beta_fast=16, ext_factor=1, scale=2), YARN):
        assert not any(said in text for text in opened(rope=rope, n_ctx=2 * tiny.N_CTX).warnings)


def test_faults_have_the_names_of_the_command_line(environment: None) -> None:
    run = ("run", "-p", "x", "-n", "1", "-c", "1K")
    check_error(invoke(*run, "--rope-scaling", "yarn"), USAGE, "--rope-scaling is 'yarn'", "give --rope-scale")
    check_error(invoke(*run, "--rope-freq-scale", "4"), USAGE, "--rope-freq-scale is 4", "0.25 for --rope-scale 4")
    both = ("--rope-freq-scale", "0.5", "--rope-scale", "2")
    check_error(invoke(*run, *both), USAGE, "only one of the two")
    check_error(invoke(*run, "--set", "rope.scale=4"), USAGE, "give --rope-scale")
    assert "--rope-scale is for contexts beyond" in good(*run, "--rope-scaling", "yarn", "--rope-scale", "2").stderr
