"""A GPU says what the CPU says, stock cache and pool alike: where both were wrong, they would agree with each other.

The CPU's logits come from a process that sees no GPU. Skipped where there is none; bench/device.sh test runs these.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from test_oracles import CACHES, MEMORY, Run

from pyllama_kvflash import native
from pyllama_kvflash.native import Model

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not any(d.gpu for d in native.devices()), reason="there is no GPU"),
]

Logits = npt.NDArray[np.float32]

N_PROMPT, N_STEPS = 300, 48
# relative RMS. Rounding gives 0.001 to 0.007 on these models (F16 weights, FP16 sums on the GPU), a wrong step 0.5
CLOSE = 0.03


def logits(model: Model, cache: str, *, pool: int | None, q_tap: bool) -> Logits:
    """Of a prompt in one batch, then of tokens one by one: (1 + N_STEPS, n_vocab)."""
    with Run(model, CACHES[cache], pool=pool, q_tap=q_tap, n_ctx=4096) as run:
        return np.concatenate([run.feed(N_PROMPT), run.feed(N_STEPS, size=1)])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MEMORY)
def test_logits_are_those_of_the_cpu(
    name: str, cache: str, tiny_path: Callable[[str], Path], tiny_model: Callable[[str], Model], tmp_path: Path
) -> None:
    """Step by step, with CUDA graphs as they are by default."""
    there = tmp_path / "logits.npy"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, __file__, tiny_path(name), cache, there], env=env, check=True)
    want = np.load(there)
    for pool, q_tap in ((None, False), (1024, False), (1024, True)):
        got = logits(tiny_model(name), cache, pool=pool, q_tap=q_tap)
        off = np.sqrt(np.mean((got - want) ** 2, axis=1) / np.mean(want**2, axis=1))
        print(f"{name} {cache} pool {pool} tap {q_tap}: relative RMS {np.median(off):.4f}, worst {off.max():.4f}")
        assert off.max() < CLOSE, f"pool {pool}, tap {q_tap}: step {off.argmax()}"


if __name__ == "__main__":
    with Model.load(Path(sys.argv[1])) as on_cpu:
        np.save(sys.argv[3], logits(on_cpu, sys.argv[2], pool=None, q_tap=False))
