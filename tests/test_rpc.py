"""A device of another machine: the RPC backend, and a server on loopback that computes on the CPU.

A device that was added stays, so what is checked runs in processes of its own. Copies go through a thread and a socket:
here "begun" is not "done", without a GPU.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import transfers
from support.changes import LIBRARY
from support.oracles import CACHES, N_THREADS, Case, Logits, Run, assert_equal, difference

from pyllama_kvflash import KVFlash, native
from pyllama_kvflash.errors import KVFlashError, UnsupportedError
from pyllama_kvflash.native import ExactContext, Model, PaneParams
from pyllama_kvflash.native.lib import _kvflash

pytestmark = pytest.mark.native

HOST = "127.0.0.1"
TIMEOUT = 60
CPU = 0  # enum ggml_backend_dev_type
N_POOL = 1024
N_PROMPT, N_STEPS = 700, 20
CLOSE = 1e-3  # relative RMS: the same arithmetic, in graphs that are cut elsewhere

# where the layers of the attention cache are, for models and numbers of layers to offload (-1: all, 2: the output and
# the last layer)
PLACES = {
    ("qwen3", -1): ["there", "there", "there"],
    ("qwen3", 2): ["host", "host", "there"],
    ("gemma4", -1): ["there", "there"],
}


#
# processes
#


def closed_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def running(*args: str, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """This file as a program, ended at the end."""
    with subprocess.Popen([sys.executable, __file__, *args], stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


def accepts(endpoint: str) -> bool:
    """Whether a server listens there."""
    host, port = endpoint.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        native.add_rpc(f"{HOST}:{closed_port()}")
    except UnsupportedError as err:
        pytest.skip(str(err))
    except KVFlashError:
        pass  # there is no server, but it was looked for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server's endpoint."""
    endpoint, path = f"{HOST}:{closed_port()}", tmp_path_factory.mktemp("rpc") / "log"
    with path.open("wb") as log, running("serve", endpoint, log=log) as process:
        end = time.monotonic() + TIMEOUT
        while not accepts(endpoint):
            assert process.poll() is None, path.read_text()
            assert time.monotonic() < end, path.read_text()
            time.sleep(0.05)
        yield endpoint


def serve(endpoint: str) -> None:
    """Serve the CPU until killed."""
    libraries = Path(_kvflash.__file__).parent

    def load(name: str) -> ctypes.CDLL:
        return ctypes.CDLL(str(next(libraries.glob(f"*{name}.[sd]*"))))

    find = load("ggml").ggml_backend_dev_by_type
    find.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(find(CPU))
    start = load("ggml-rpc").ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    start.restype = None
    start(endpoint.encode(), None, N_THREADS, len(devices), devices)


#
# checks
#


@pytest.mark.nightly(LIBRARY)
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize(("name", "n_gpu_layers"), PLACES)
def test_pool(server: str, tiny_path: Callable[[str], Path], name: str, n_gpu_layers: int, cache: str) -> None:
    """What check() does, in a process of its own."""
    command = [sys.executable, __file__, "check", server, str(tiny_path(name)), str(n_gpu_layers), cache]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    res = subprocess.run(
        command, env=env, timeout=TIMEOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert res.returncode == 0, res.stdout


def check(endpoint: str, path: str, n_gpu_layers: str, cache: str) -> None:
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
            transfers.check_a_chunk_on_its_way_in_is_seen_from_its_commit_on(model, cache)
            transfers.check_queries_are_those_of_the_token_before_the_next(model)
    with Model.load(Path(path), n_gpu_layers=0) as model, Case(model, CACHES[cache]).stock() as run:
        got = difference(stock, feed(run))
        print(got)
        assert got.rms < CLOSE, str(got)


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
        options = {"type_k": case.cache.type, "type_v": case.cache.type, "flash_attn": case.cache.flash_attn}
        panes = PaneParams(n_pane=1)
        with ExactContext(case.model, panes, n_ctx=4096, n_ubatch=256, n_threads=N_THREADS, **options) as exact:
            records, logits = [np.zeros_like(own[0]) for _ in range(N_PROMPT // run.chunk + 1)], []
            for pos in range(0, N_PROMPT, 256):
                n = min(256, N_PROMPT - pos)
                n_chunks = -(-(pos + n) // run.chunk)
                exact.decode_into(run.ctx, run.tokens[pos : pos + n], pos, records[:n_chunks])
                logits.append(run.ctx.logits())
            assert_equal(logits[-1], stock[1])  # of 512 tokens, in two graphs, and then of the rest
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
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        check(*sys.argv[2:])
