"""Two RPC servers on loopback, each with some layers: exact prompts, the pool, snapshots, and a server that is lost meanwhile."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE
from support.oracles import N_THREADS
from support.rpc import HOST, SECONDS, Servers, accepts, closed_port, skip_without_rpc

from pyllama_kvflash import KVFlash, native
from pyllama_kvflash.errors import DeviceLostError, KVFlashError
from pyllama_kvflash.events import Done, Token
from pyllama_kvflash.loading.planning import planned
from pyllama_kvflash.native import Sampling
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.device import RESERVE, DeviceBytes
from pyllama_kvflash.policy.sizing import LEAST_PANES, n_panes

pytestmark = pytest.mark.native

GREEDY = Sampling(temperature=0.0)
N_PROMPT, N_ANSWER = 1500, 24
PROMPT = "The captain told the crew what the harbour looked like in the old days, and the crew sang songs."
OPTIONS = {"n_ctx": 4096, "n_batch": 512, "n_threads": N_THREADS, "policy": "qk"}
FULL = OPTIONS | {"pool": "off"}
POOL = OPTIONS | {"pool": 768}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    skip_without_rpc()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with Servers(2, tmp_path, N_THREADS) as res:
        yield res


def check(name: str, servers: Servers, *more: object) -> None:
    """Run one of the checks below in a process of its own: a device that was added stays."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, name, ",".join(servers.endpoints), *map(str, more)]
    res = subprocess.run(command, env=env, timeout=SECONDS, capture_output=True, text=True, check=False)
    assert res.returncode == 0, res.stdout + res.stderr
    assert "Traceback" not in res.stderr, res.stderr


#
# two servers
#


def test_two_servers(servers: Servers, tmp_path: Path) -> None:
    check("two", servers, tmp_path)


def check_planned(kv: KVFlash, options: dict[str, Any]) -> None:
    """What is planned without weights is what is taken: batches follow each other on several devices, so some have buffers at a time."""
    found = planned(BUNDLED_MODEL, Options(**options)).memory
    assert sum(need.buffers for need in found) == kv.stats().compute_bytes
    assert sum(need.kv + need.panes for need in found) == kv.stats().kv_device_bytes + kv.stats().pane_bytes


def check_two(endpoints: str, folder: str) -> None:
    """Layers on both: the exact prompt is the full cache's, bit for bit; snapshots go out and in, with servers or without."""
    rpc, snapshot = tuple(endpoints.split(",")), Path(folder) / "two.kvsnap"
    with KVFlash.from_file(BUNDLED_MODEL, **FULL, rpc=rpc) as kv:
        there = {i for i, device in enumerate(native.devices()) if device.description in rpc}
        assert {layer.device for layer in kv.ctx.layers()} == there
        check_planned(kv, {**FULL, "rpc": rpc})
        prompt = text_of(kv)
        for _ in kv.prefill(prompt):
            pass
        want = kv.logits()
    with KVFlash.from_file(BUNDLED_MODEL, **POOL, rpc=rpc) as kv:
        check_planned(kv, {**POOL, "rpc": rpc})
        assert {layer.device for layer in kv.ctx.layers()} == there
        assert any("all layers, which spares the network" in note for note in kv.notes)
        for _ in kv.prefill(prompt):
            pass
        np.testing.assert_array_equal(kv.logits(), want)
        kv.save(snapshot)
        tokens = answer(kv)
        assert kv.stats().pages_in > 0
        kv.check_integrity()
    for places in {"rpc": rpc, "panes": 2}, {"n_gpu_layers": 0}:
        with KVFlash.from_file(BUNDLED_MODEL, **POOL, **places) as kv:
            assert kv.restore(snapshot) == N_PROMPT
            kv.check_integrity()
            if "rpc" in places:
                assert answer(kv) == tokens


def text_of(kv: KVFlash) -> npt.NDArray[np.int32]:
    """A prompt that the pool cannot hold."""
    res = kv.tokenize(f"{PROMPT}\n" * N_PROMPT)[:N_PROMPT]
    assert len(res) == N_PROMPT
    return res


def answer(kv: KVFlash) -> list[int]:
    """The tokens of a short answer."""
    events = kv.generate("The crew sang songs", max_tokens=N_ANSWER, sampling=GREEDY, append=True)
    return [event.id for event in events if isinstance(event, Token)]


@pytest.mark.parametrize("pool", ["auto", 2048])
@pytest.mark.parametrize(("free", "panes"), [(2**30, 28), (RESERVE + 2**20, 14), (0, LEAST_PANES)])
def test_servers_keep_the_layers_that_fit(pool: int | str, free: int, panes: int) -> None:
    """What is streamed goes through the network with each batch, whoever names a pool."""
    memory = [DeviceBytes("RPC0", gpu=True, free=free, token_bytes=1024, remote=True)]
    assert n_panes(0, pool, memory, 1024, 28) == panes
    assert n_panes(3, pool, memory, 1024, 28) == 3


#
# a server that is lost
#


def is_lost(error: BaseException, endpoints: str) -> bool:
    """Whether an error is one sentence, which names the second server."""
    message = str(error)
    return message.startswith(f"the RPC server {endpoints.split(',')[1]} is gone, ") and "\n" not in message


@pytest.mark.sampled(ENGINE)
@pytest.mark.parametrize("cache", ["full", "pool"])
@pytest.mark.parametrize("when", ["prompt", "answer", "idle"])
def test_a_lost_server(servers: Servers, when: str, cache: str) -> None:
    check("lost", servers, servers.running[1].pid, when, cache)


def check_lost(endpoints: str, pid: str, when: str, cache: str) -> None:
    """An error, whatever is called; what was said before is there; and it can be closed."""

    def lose() -> None:
        os.kill(int(pid), signal.SIGKILL)
        end = time.monotonic() + SECONDS
        while accepts(endpoints.split(",")[1]):
            assert time.monotonic() < end

    rpc = tuple(endpoints.split(","))
    kv = KVFlash.from_file(BUNDLED_MODEL, **{"full": FULL, "pool": POOL}[cache], rpc=rpc)
    prompt = text_of(kv)
    got: list[object] = []
    if when == "idle":
        lose()

    def listen() -> None:
        for event in kv.generate(prompt, max_tokens=1000, sampling=GREEDY):
            got.append(event)
            n_tokens = len([event for event in got if isinstance(event, Token)])
            if (when, len(got)) == ("prompt", 1) or (when, n_tokens) == ("answer", 5):
                lose()

    with pytest.raises(DeviceLostError) as caught:
        listen()
    assert is_lost(caught.value, endpoints), caught.value
    assert not any(isinstance(event, Done) for event in got)
    assert len([event for event in got if isinstance(event, Token)]) >= (5 if when == "answer" else 0)
    for call in (lambda: answer(kv), kv.clear, native.devices):
        with pytest.raises(DeviceLostError):
            call()
    assert kv.tokenize("all that needs no device is there").size
    kv.close()
    with pytest.raises(KVFlashError, match="RPC"):
        KVFlash.from_file(BUNDLED_MODEL, **FULL, rpc=rpc)  # it is still gone


@contextlib.contextmanager
def program(servers: Servers, *args: object) -> Iterator[subprocess.Popen[str]]:
    """The command line with the bundled model and its layers on the servers."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "1000"}
    command = [sys.executable, "-m", "pyllama_kvflash", *args, "--rpc", ",".join(servers.endpoints), "--kvflash", "off"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(list(map(str, command)), env=env, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def check_ending(servers: Servers, process: subprocess.Popen[str], errors: str) -> None:
    """The program ended with the error's exit code, and said why as its last word."""
    assert process.returncode == DeviceLostError.exit_code, errors
    assert errors.splitlines()[-1].startswith(f"kvflash: error: the RPC server {servers.endpoints[1]} is gone, "), (
        errors
    )
    assert "Traceback" not in errors


def test_run_keeps_the_text_so_far(servers: Servers) -> None:
    with program(servers, "run", "-n", "-1", "-p", PROMPT, "--temp", "0") as process:
        assert process.stdout is not None
        begin = process.stdout.read(10)
        servers.kill(1)
        more, errors = process.communicate(timeout=SECONDS)
    check_ending(servers, process, errors)
    assert len((begin + more).strip()) >= len(begin.strip()) > 0


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_serve_fails_its_requests_and_ends(servers: Servers) -> None:
    port = closed_port()
    with program(servers, "serve", "--port", port) as process:
        wait_for(lambda: accepts(f"{HOST}:{port}") and health(port))
        body = json.dumps({"prompt": PROMPT, "max_tokens": -1, "stream": True, "temperature": 0}).encode()
        with urllib.request.urlopen(f"http://{HOST}:{port}/v1/completions", body, timeout=SECONDS) as response:
            lines = [response.readline()]
            servers.kill(1)
            lines += response.readlines()
        _, errors = process.communicate(timeout=SECONDS)
    check_ending(servers, process, errors)
    last = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")][-1]
    assert " is gone, " in last["error"]["message"]


def health(port: int) -> bool:
    """Whether the server is ready."""
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=SECONDS) as response,
    ):
        return bool(response.status == 200)
    return False


if __name__ == "__main__":
    {"two": check_two, "lost": check_lost}[sys.argv[1]](*sys.argv[2:])
