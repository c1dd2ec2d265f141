"""The server from its beginning to its end: requests that wait, signals, the command, and clients of all kinds at once."""

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

import httpx
from click.testing import CliRunner
from support import serving
from support.commands import SCRIPT
from support.processes import server_process
from support.serving import Running, begun, long_text, open_needle, sse, stream, until

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli import main
from pyllama_kvflash.errors import ModelError
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.serve.scheduler import Scheduler

pytestmark = pytest.mark.native

document = serving.document
environment = serving.environment
server = serving.server


#
# a queue
#


def test_a_full_queue_and_clients_that_leave() -> None:
    """Streaming or not, running or waiting: its place is free at the next turn."""
    with Running(n_parallel=1, n_queue=1) as running:
        with stream(running) as parts:
            begun(parts)
            with pytest.raises(httpx.ReadTimeout):
                running.post({"prompt": "waits"}, timeout=0.1)
            until(lambda: running.health()["queue"] == 0)
            with stream(running) as waits:
                assert next(waits).startswith("data: ")
                until(lambda: running.health()["queue"] == 1)
                full = running.post({"prompt": "x"})
                assert full.status_code == 429
                assert 1 <= int(full.headers["retry-after"]) <= 60
                assert full.json()["error"] == {
                    "message": f"the queue is full: try again in {full.headers['retry-after']} s",
                    "type": "rate_limit_error", "param": None, "code": "queue_full",
                }  # fmt: skip
            until(lambda: running.health()["queue"] == 0)
            assert running.health()["busy"] == 1
        until(lambda: running.health()["idle"] == 1)
        with pytest.raises(httpx.ReadTimeout):
            running.post({"prompt": "On", "max_tokens": 3500}, timeout=0.2)
        until(lambda: running.health()["idle"] == 1)
        assert running.text(prompt="x")
        found = running.metrics()
        assert found['requests_total{outcome="cancelled"}'] == 4
        assert found['requests_total{outcome="rejected"}'] == 1
        assert found['requests_total{outcome="ok"}'] == 1


def test_metrics(server: Running) -> None:
    before = server.metrics()
    text = f"Metrics. {long_text(2600)}"
    server.text(prompt=text, max_tokens=10)
    server.text(prompt=text, max_tokens=10)
    until(server.idle)
    until(lambda: server.metrics()["decode_tokens_total"] - before["decode_tokens_total"] >= 18)
    until(lambda: server.metrics()["sequences_busy"] == 0)
    after = server.metrics()
    gained = {name: after[name] - before[name] for name in after}
    assert gained['requests_total{outcome="ok"}'] == 2
    assert gained["prefill_tokens_total"] > 2500
    assert 18 <= gained["decode_tokens_total"] <= 20
    assert gained['prefix_cache_hits_total{source="memory"}'] >= 1
    assert gained['prefix_cache_tokens_total{source="memory"}'] > 2500
    assert gained["guests_fetched_total"] > 5
    assert after["pool_cells"] == 2048
    assert after["context"] == 4096
    assert after["chunks"] >= after["chunks_resident"] > 0
    for name in ("prefill_seconds_total", "decode_seconds_total", "host_bytes", "kv_device_bytes"):
        assert after[name] > 0


def test_while_it_loads() -> None:
    gate = threading.Event()

    def open_(progress: Callable[[float], None]) -> KVFlash:
        gate.wait()
        return open_needle()(progress)

    with Running(Scheduler(open_, n_queue=1), ready=False) as running:
        try:
            res = running.http.get("/health")
            assert (res.status_code, res.json()) == (503, {"status": "loading"})
            res = running.post({"prompt": "x"})
            assert (res.status_code, res.json()["error"]["message"]) == (
                503, "the model is loading: try again in a few seconds",
            )  # fmt: skip
            assert res.headers["retry-after"]
            assert running.http.get("/v1/models").status_code == 200
            assert running.metrics()["pool_cells"] == 0
        finally:
            gate.set()
        until(lambda: running.http.get("/health").status_code == 200)
        assert running.text(prompt="x")


def test_a_model_that_does_not_load() -> None:
    def open_(progress: Callable[[float], None]) -> KVFlash:
        raise ModelError("it is broken")

    with Running(Scheduler(open_, n_queue=1)) as running:
        assert running.http.get("/health").json() == {"status": "failed"}
        assert running.post({"prompt": "x"}).status_code == 503
        assert str(running.scheduler.error) == "it is broken"


#
# the end
#


def test_stopping_lets_answers_be_finished() -> None:
    with Running() as running, stream(running, 400) as parts:
        text = begun(parts)
        running.scheduler.stop()
        assert running.http.get("/health").json() == {"status": "stopping"}
        refused = running.post({"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["message"][:22]) == (503, "the server is stopping")
        events, _ = sse(text + "".join(parts))
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streams", [True, False])
def test_ending_ends_several_answers(streams: bool) -> None:
    """The one under way as it is; those after it never come."""
    with Running(n_parallel=1) as running:
        results: list[Any] = []
        body = {"prompt": "On and on", "max_tokens": 3500, "n": 3, "temperature": 1, "stream": streams}
        asking = threading.Thread(target=lambda: results.append(running.post(body)))
        asking.start()
        until(lambda: running.health()["busy"] == 1)
        running.scheduler.end()
        asking.join(30)
        assert results[0].status_code == 200
        if streams:
            assert results[0].text.endswith("data: [DONE]\n\n")
        else:
            assert [c["finish_reason"] for c in results[0].json()["choices"]] == ["stop"]


SERVER = ("-c", "8K", "--kvflash", "2K", "-t", "1", "--prefix-cache", "off")


@pytest.mark.parametrize(("number", "grace"), [(signal.SIGTERM, "30"), (signal.SIGINT, "0.2")])
def test_signals(number: signal.Signals, grace: str) -> None:
    """What runs is finished in time, or ended; the exit code is 0, and nothing looks like an error."""
    with server_process(*SERVER, "--grace", grace, "-np", "2") as server:
        body = {"prompt": "On", "max_tokens": 300 if grace == "30" else 7000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as res:
            parts = res.iter_text()
            text = begun(parts)
            server.process.send_signal(number)
            text += "".join(parts)
        assert text.endswith("data: [DONE]\n\n")
        assert f'"finish_reason":"{"length" if grace == "30" else "stop"}"' in text
        assert server.ended() == 0, server.said
        rest = "".join(server.said)
        assert "Traceback" not in rest
        assert "rror" not in rest


def test_a_second_signal_ends_at_once() -> None:
    with server_process(*SERVER, "--grace", "60") as server:
        body = {"prompt": "On", "max_tokens": 8000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as res:
            parts = res.iter_text()
            begun(parts)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            assert server.ended(10) == 130


#
# the command
#


def refusal(*args: str) -> str:
    """The sentence with which `kvflash serve` refuses."""
    res = CliRunner().invoke(main, ["serve", "--prefix-cache", "off", *args])
    assert isinstance(res.exception, SystemExit), repr(res.exception)
    assert res.exit_code == 2, res.output
    assert "Traceback" not in res.output
    return res.output


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--kvflash", "1K"),
        ("--prefix-cache", "there"),
        ("--kvflash", "off"),
    ],
)
def test_prompts_are_kept_on_disk_but_for_the_full_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        res = CliRunner().invoke(main, ["serve", "--port", str(taken.getsockname()[1]), *options])
    assert res.exit_code == 2
    assert ("a prefix cache keeps the chunks of a pool, and --kvflash is off" in res.output) == ("off" in options)


def test_refusals_of_the_command(tmp_path: Path) -> None:
    assert "none.gguf does not exist" in refusal("none.gguf")
    assert "-n/--predict is 0" in refusal("-n", "0")
    assert "--temp is nan" in refusal("--temp", "nan")
    assert "cannot be read: No such file" in refusal("--chat-template-file", str(tmp_path / "x"))
    (tmp_path / "y").write_bytes(b"\xff")
    assert "is not UTF-8 text: byte 0xff" in refusal("--chat-template-file", str(tmp_path / "y"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use; choose another" in refusal("--port", str(taken.getsockname()[1]))
    assert "cannot listen on no.such.host.invalid:0" in refusal("--port", "0", "--host", "no.such.host.invalid")


def test_a_model_that_cannot_be_served_ends_the_command(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(BUNDLED_MODEL.read_bytes()[:5000])
    done = subprocess.run(
        [SCRIPT, "serve", broken, "--port", "0", "--prefix-cache", "off"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"error: {broken} cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr
