"""A Vulkan device: records are the same bytes after out and in, and logits are the stock cache's within that device's noise.

Its sums may have another order with another width or number of tokens, so nothing else is compared bit for bit. Each check runs
in a process of its own, in which no other GPU is seen. Mesa's lavapipe, which computes on the CPU, will do: `make test-vulkan`.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import LIBRARY
from support.models import model_file
from support.oracles import CACHES, N_THREADS, Case, Run, difference, read_exactly
from support.snapshots import assert_same, seen

from pyllama_kvflash import Done, KVFlash, native
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.native import Model, Record
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.nightly(LIBRARY)]

TIMEOUT = 3600  # lavapipe compiles a shader for up to a minute, once
N_POOL, N_SMALL = 2048, 512
N_PROMPT, N_STEPS = 700, 20
TEXT = "The code of the harbour is 8264. " * 90
MORE = "What is the code of the harbour?"
CLOSE = 0.02  # relative RMS; some 0.005 of it were measured where only the order of sums was another
UNCODED = "codes need a KV cache on the CPU or on a CUDA GPU, and this one is on another device"
NO_DEVICE = "the library sees no Vulkan device: make test-vulkan"


def device() -> int:
    """The first Vulkan device, -1 if there is none."""
    return next((i for i, device in enumerate(native.devices()) if device.name.startswith("Vulkan")), -1)


@pytest.fixture(scope="module", autouse=True)
def _seen() -> None:
    if device() < 0:
        pytest.skip(NO_DEVICE)


def alone(*args: object) -> None:
    """Run this file as a program."""
    res = subprocess.run(
        [sys.executable, __file__, *map(str, args)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=TIMEOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(res.stdout)
    assert res.returncode == 0, res.stdout


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["qwen3", "gemma4", "qwen35"])
def test_pool(tiny_path: Callable[[str], Path], name: str, cache: str) -> None:
    """What check_pool() does."""
    alone("pool", model_file(name, tiny_path), cache)


def test_engine() -> None:
    """What check_engine() does."""
    alone("engine")


#
# checks
#


def check_pool(path: str, cache: str) -> None:
    """Masks, eviction, paging and the exact pass."""
    with Model.load(Path(path)) as model:
        case = Case(model, CACHES[cache], n_prompt=N_PROMPT, n_steps=N_STEPS)
        with case.stock() as run:
            assert {layer.device for layer in run.ctx.layers()} == {device()}
        print("noise:", case.noise)
        check_out_and_in(case)
        check_eviction(case)
        check_exact_pass(case)


def check_out_and_in(case: Case) -> None:
    """With all resident, the pool says what the stock cache says; so it does after all was out, overwritten, and in again."""
    for elsewhere in (False, True):
        with case.pool(N_POOL) as run:
            run.feed(case.n_prompt)
            blocks = {c: run.ctx.block_of(c) for c in run.resident()}
            records = run.out(list(blocks))
            if elsewhere:
                blocks = dict(zip(blocks, reversed(blocks.values()), strict=True))
            for c, block in blocks.items():
                run.ctx.page_in(c, records[c], block)
            for c, record in records.items():
                np.testing.assert_array_equal(run.read(c), record, f"chunk {c}")
            print("out and in:", case.assert_close(run.feed(case.n_steps, 1)))


def check_eviction(case: Case) -> None:
    """The pool is the stock cache with the same positions removed."""
    with case.pool(N_SMALL, n_batch=128) as run, case.stock(n_batch=128) as other:
        logits, schedule, _ = run.feed_through(1000, N_STEPS)
        print("eviction:", case.assert_close(logits, other.replay(schedule)))
    assert sum(len(step.drops) for step in schedule) > 5


def check_exact_pass(case: Case) -> None:
    """Layers by turns in a pane: what the stock cache says, and records that the pool takes."""
    n = case.n_prompt
    with case.pool(N_POOL) as run, case.pool(N_POOL, n_batch=100) as other:
        for each in (run, other):
            each.feed(n)
        want, also = ([each.read(c) for c in range(n // each.chunk)] for each in (run, other))
        records, logits = read_exactly(case, run, n)
        print("exact pass:", case.assert_close(logits[None], case.stock_logits[-case.n_steps - 1 : -case.n_steps]))
        noise, got = distance(run, also, want), distance(run, records, want)
        print(f"its records: {got:.3g}; noise: {noise:.3g}")
        assert got <= 2 * noise + 1e-4  # some rounded the other way


def distance(run: Run, got: list[Record], want: list[Record]) -> float:
    """The relative RMS of the values in records."""
    head = run.ctx.pool_info().meta_bytes
    a, b = (np.concatenate([values(record[head:], run) for record in records[: len(want)]]) for records in (got, want))
    return float(np.sqrt(np.sum((a - b) ** 2) / np.sum(b**2)))


def values(data: Record, run: Run) -> npt.NDArray[np.float64]:
    """The numbers in rows of F16 or Q8_0."""
    if run.ctx.layers()[0].type_k == native.CACHE_TYPES["f16"]:
        return data.view(np.float16).astype(np.float64)
    blocks = data.reshape(-1, 34)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float64)
    return (scales * blocks[:, 2:].view(np.int8)).ravel()


def check_engine() -> None:
    """Policy auto is qk there, fresh is refused in a sentence, and a snapshot has all: it goes on from there."""
    options = {"n_ctx": 2048, "n_batch": 64, "pool": 512, "n_threads": N_THREADS}
    with KVFlash.from_file(BUNDLED_MODEL, **options) as kv:
        assert kv.options.policy == "qk"
    with pytest.raises(UnsupportedError, match=f"{UNCODED}; give `policy` qk"):
        KVFlash.from_file(BUNDLED_MODEL, policy="fresh", **options)

    with tempfile.TemporaryDirectory() as folder, KVFlash.from_file(BUNDLED_MODEL, policy="lru", **options) as kv:
        *_, done = kv.generate(TEXT, max_tokens=4)
        assert isinstance(done, Done)
        assert done.stats.pages_in + done.stats.pages_out > 0
        kv.save(f"{folder}/text.kvsnap")
        with KVFlash.from_file(BUNDLED_MODEL, policy="lru", **options) as other:
            other.restore(f"{folder}/text.kvsnap")
            assert_same(seen(other), seen(kv))
            for one in (kv, other):
                list(one.generate(MORE, append=True, max_tokens=0))
            got = difference(other.logits()[None], kv.logits()[None])
        print("restored:", got)
        assert got.rms < CLOSE


if __name__ == "__main__":
    {"pool": check_pool, "engine": check_engine}[sys.argv[1]](*sys.argv[2:])
