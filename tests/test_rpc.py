"""A device of another machine: the RPC backend, and a server on loopback that computes on the CPU.

A device that was added stays, so what is checked runs in processes of its own. Copies go through a thread and a socket:
here "begun" is not "done", without a GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import transfers
from support.changes import LIBRARY
from support.oracles import CACHES, N_THREADS, ON_GPU, Case, Logits, Run, assert_equal, difference, read_exactly
from support.rpc import HOST, SECONDS, Servers, closed_port, skip_without_rpc

from pyllama_kvflash import KVFlash, native
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.native import Model

pytestmark = pytest.mark.native

N_POOL = 1024
N_PROMPT, N_STEPS = 700, 20
# relative RMS: the same arithmetic, in graphs that are cut elsewhere. It is 0 on a machine without a GPU, and was up to 0.009 on
# one with an H200, for a reason that was not found
CLOSE = 0.05 if ON_GPU else 1e-3

# where the layers of the attention cache are, for models and numbers of layers to offload (-1: all, 2: the output and
# the last layer)
PLACES = {
    ("qwen3", -1): ["there", "there", "there"],
    ("qwen3", 2): ["host", "host", "there"],
    ("gemma4", -1): ["there", "there"],
}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    skip_without_rpc()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server's endpoint."""
    with Servers(1, tmp_path_factory.mktemp("rpc"), N_THREADS) as servers:
        yield servers.endpoints[0]


#
# checks
#


@pytest.mark.nightly(LIBRARY)
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize(("name", "n_gpu_layers"), PLACES)
def test_pool(server: str, tiny_path: Callable[[str], Path], name: str, n_gpu_layers: int, cache: str) -> None:
    """What check() does, in a process of its own."""
    command = [sys.executable, __file__, server, str(tiny_path(name)), str(n_gpu_layers), cache, str(CLOSE)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    res = subprocess.run(
        command, env=env, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert res.returncode == 0, res.stdout


def check(endpoint: str, path: str, n_gpu_layers: str, cache: str, close: str) -> None:
    """A model with these layers on the server: the pool is as exact there as it is here."""
    host = next(i for i, device in enumerate(native.devices()) if not device.gpu)
    there = len(native.devices())
    native.add_rpc(endpoint)
    native.add_rpc(endpoint)  # once more is no other device
    assert [(device.description, device.gpu) for device in native.devices()[there:]] == [(endpoint, True)]

    name, places = Path(path).stem, {"host": host, "there": there}
    with Model.load(Path(path), n_gpu_layers=int(n_gpu_layers)) as model:
        case = Case(model, CACHES[cache])
        with case.stock() as run:
            want = [places[place] for place in PLACES[name, int(n_gpu_layers)]]
            assert [layer.device for layer in run.ctx.layers()] == want
            stock = feed(run)
        check_all_resident(case, stock)
        check_eviction(case)
        check_out_and_in(case, stock)
        check_exact_pass(case, stock)
        if cache == "f16":  # the others take their time on the CPU, and go the same way
            transfers.check_a_chunk_may_be_dropped_and_overwritten_while_it_is_read(model, cache)
            transfers.check_a_chunk_is_seen_from_the_next_batch_on(model, cache)
            transfers.check_queries_are_those_of_the_token_before_the_next(model)
    with Model.load(Path(path), n_gpu_layers=0) as model, Case(model, CACHES[cache]).stock() as run:
        got = difference(stock, feed(run))
        print(got)
        assert got.rms < float(close), str(got)


def feed(run: Run) -> Logits:
    """A prompt, and tokens one by one."""
    return np.concatenate([run.feed(N_PROMPT), run.feed(N_STEPS, 1)])


def check_all_resident(case: Case, stock: Logits) -> None:
    """The pool is the stock cache."""
    with case.pool(N_POOL) as run:
        assert_equal(feed(run), stock)


def check_eviction(case: Case) -> None:
    """The pool is the stock cache with the same positions removed."""
    with case.pool(512, n_batch=128) as run, case.stock(n_batch=128) as other:
        logits, schedule, _ = run.feed_through(1000, N_STEPS)
        assert_equal(logits, other.replay(schedule))
    assert sum(len(step.drops) for step in schedule) > 5


def check_out_and_in(case: Case, stock: Logits) -> None:
    """All out, overwritten, and in again: the same bytes, the same logits."""
    with case.pool(N_POOL) as run:
        prompt = run.feed(N_PROMPT)
        places = {c: run.ctx.block_of(c) for c in run.resident()}
        records = run.out(list(places))
        for c, block in places.items():
            run.ctx.page_in(c, records[c], block)
        for c, record in records.items():
            np.testing.assert_array_equal(run.read(c), record, f"chunk {c}")
        assert_equal(np.concatenate([prompt, run.feed(N_STEPS, 1)]), stock)


def check_exact_pass(case: Case, stock: Logits) -> None:
    """Layers by turns in the panes of their device: what the stock cache says, and the pool's records."""
    with case.pool(N_POOL) as run:
        run.feed(N_PROMPT)
        own = [run.read(chunk) for chunk in range(N_PROMPT // run.chunk)]
        records, logits = read_exactly(case, run, N_PROMPT)
        assert_equal(logits, stock[1])  # of 512 tokens, in two graphs, and then of the rest
        for record, want in zip(records, own, strict=False):
            np.testing.assert_array_equal(record, want)


def test_no_server(tiny_path: Callable[[str], Path]) -> None:
    """One sentence: who does not answer, and what to do."""
    endpoint = f"{HOST}:{closed_port()}"
    with pytest.raises(KVFlashError) as caught:
        KVFlash.from_file(tiny_path("qwen3"), rpc=(endpoint,))
    message = str(caught.value)
    assert message.startswith(f"the RPC server {endpoint} "), message
    assert "rpc-server there" in message, message
    assert "\n" not in message
    assert "fatal" not in message


if __name__ == "__main__":
    check(*sys.argv[1:])
