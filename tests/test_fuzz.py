"""tests/native/fuzz.cpp on the tiny models, under AddressSanitizer (with leaks) and UndefinedBehaviorSanitizer.

It is run where our C++ has changed. Its oracles can fail: each of the mutants, small changes to our C++, makes them. Tried are those whose file has changed since
the commit that support.changes.base_commit() tells; with KVFLASH_MUTANTS=all (`make mutants`), all.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the sanitizers of GCC and Clang on Linux", allow_module_level=True)

from support import asan
from support.changes import Changes
from support.mutants import MUTANTS, SEEDS, SHARED, Mutant

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.fixture(scope="module")
def build() -> Iterator[asan.Build]:
    with asan.built() as res:
        yield res


def fuzz(build: asan.Build, model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run kvflash-fuzz; stderr, the sanitizers', joins stdout."""
    # GCC aligns vectors of AVX-512 too little on the stacks that detect uses after a return (its bug 110027); on by default since 13
    checks = "detect_leaks=1:detect_stack_use_after_return=0"
    env = asan.ENV | {"ASAN_OPTIONS": checks, "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [build.binary, model, *options]
    return subprocess.run(
        command, env=env, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.mark.nightly(SHARED, r"pyllama_kvflash/native/src/.*")
@pytest.mark.parametrize("cache", ["f16", "q8_0", "q4_0", "f16 --no-fa"])
@pytest.mark.parametrize("model", ["qwen3", "qwen35", "gemma4"])
def test_fuzz(build: asan.Build, tiny_path: Callable[[str], Path], model: str, cache: str) -> None:
    seed = 1 + 3 * ["f16", "q8_0", "q4_0", "f16 --no-fa"].index(cache) + ["qwen3", "qwen35", "gemma4"].index(model)

    res = fuzz(build, tiny_path(model), "--seed", str(seed), "--steps", "290", "--type", *cache.split())
    assert res.returncode == 0, res.stdout[-8000:]

    # of each run, so that none passes because it did nothing
    for what in [
        "closer",
        "evicted",
        "in panes",
        "layouts",
        "masses",
        "mirrored",
        "paged in",
        "read late",
        "wrong calls",
    ]:
        assert f" {what} " in res.stdout
    if model != "qwen3":
        assert " states " in res.stdout
        assert " wrong states " in res.stdout


@pytest.mark.nightly(SHARED, r"pyllama_kvflash/native/src/.*")
@pytest.mark.parametrize(
    ("model", "cache", "coarse"),
    [
        ("qwen3", "f16", "32"),
        ("qwen3", "q8_0", "4"),
        ("qwen35", "f16 --no-fa", "32"),
        ("qwen35", "q4_0", "4,2"),
        ("gemma4", "f16 --no-fa", "2"),
    ],
)
def test_codes(build: asan.Build, tiny_path: Callable[[str], Path], model: str, cache: str, coarse: str) -> None:
    """Every second one chooses after the attention."""
    seed = 3 + len(model) + len(cache)

    res = fuzz(
        build, tiny_path(model), "--seed", str(seed), "--steps", "150", "--coarse", coarse, "--type", *cache.split()
    )
    assert res.returncode == 0, res.stdout[-8000:]
    for what in ["beside", "covered", "evicted", "guests", "made anew", "moved", "paged in", "wrong calls"]:
        assert f" {what} " in res.stdout
    assert (" again " in res.stdout) == (model != "qwen35")  # a state does not go back
    assert (" far " in res.stdout) == (model == "qwen3")


#
# mutants
#

CHANGES = Changes.find(asan.ROOT, os.environ.get("KVFLASH_MUTANTS"))
TRIED = [mutant for mutant in MUTANTS if mutant.is_hidden_by(CHANGES)]


def left_out(what: str, *, unless: bool) -> list[pytest.MarkDecorator]:
    if unless or CHANGES is None:
        return []
    why = f"{what} of C++ that is as it was at {CHANGES.base[:10]}: `make mutants` tries all {len(MUTANTS)}"
    return [pytest.mark.skip(reason=why)]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(
            *kind,
            marks=left_out(
                "controls of mutants", unless=any(kind == (mutant.model, mutant.options) for mutant in TRIED)
            ),
        )
        for kind in sorted({(mutant.model, mutant.options) for mutant in MUTANTS})
    ],
)
def test_unchanged(build: asan.Build, tiny_path: Callable[[str], Path], model: str, options: tuple[str, ...]) -> None:
    build.restore()
    build.make()
    for seed in SEEDS:
        res = fuzz(build, tiny_path(model), "--seed", seed, *options)
        assert res.returncode == 0, res.stdout


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.breaks.replace(" ", "-"), marks=left_out("mutants", unless=mutant in TRIED))
        for mutant in MUTANTS
    ],
)
def test_mutant(build: asan.Build, tiny_path: Callable[[str], Path], mutant: Mutant) -> None:
    build.restore()
    mutant.apply(build.native)
    build.make()
    for seed in SEEDS:
        res = fuzz(build, tiny_path(mutant.model), "--seed", seed, *mutant.options)
        if res.returncode != 0:
            break
    assert res.returncode != 0, res.stdout
    assert re.search(r"1 failure: |ERROR: AddressSanitizer|runtime error: |Assertion ", res.stdout), res.stdout
