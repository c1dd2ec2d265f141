"""A server that is killed in the middle of an answer, and started again: what it had read is warm."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import serving, tiny
from support.changes import SERVE
from support.processes import server_process
from support.serving import begun, parse_metrics, tokens_of, until

from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.nightly(SERVE)]

environment = serving.environment
N_PROMPT, N_TURN = 1500, 500
CHUNK = 64
FAMILIES = {"dense": "qwen3", "hybrid": "qwen35", "sliding window": "gemma4"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind of memory, with a vocabulary."""
    folder = tmp_path_factory.mktemp("families")
    for kind, name in FAMILIES.items():
        tiny.write_worded(folder / f"{kind}.gguf", name, tiny.MODELS[name])
    return {kind: folder / f"{kind}.gguf" for kind in FAMILIES}


class Served:
    """A server process, and what it is asked."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.http = process, httpx.Client(base_url=url, timeout=60)

    def close(self) -> None:
        self.http.close()

    def cached(self, prompt: list[int]) -> int:
        """Tokens of a prompt that need not be read."""
        res = self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0})
        assert res.status_code == 200, res.text
        return int(res.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def wait_for_saves(self, n: int) -> None:
        until(lambda: parse_metrics(self.http.get("/metrics").text)["prefix_cache_saves_total"] >= n)

    def kill_while_it_answers(self, prompt: list[int], n_saves: int) -> None:
        """Once an answer has begun, and what was read for it is on disk."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 3000, "stream": True, "temperature": 0}
        with contextlib.suppress(httpx.HTTPError), self.http.stream("POST", "/v1/completions", json=body) as res:
            parts = res.iter_text()
            begun(parts)
            self.wait_for_saves(n_saves)
            self.process.send_signal(signal.SIGKILL)
            assert "[DONE]" not in "".join(parts)
        assert self.process.wait(30) == -signal.SIGKILL


@contextlib.contextmanager
def served(model: Path, cache: Path, *args: str) -> Iterator[Served]:
    options = ["-c", "6K", "--kvflash", "1K", "-b", "256", "-t", "1", "-np", "1", "--cache-min", "256"]
    with (
        server_process(model, *options, "--prefix-cache", cache, *args) as server,
        contextlib.closing(Served(server.process, server.url)) as res,
    ):
        yield res


def prompt_of(n: int, seed: int) -> list[int]:
    """Token ids that every vocabulary here has, and no end of a text."""
    return [t % 250 for t in tokens_of(n, seed)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_next_turn_is_warm(paths: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """The turn that was cut off is warm to its end when it is asked again, and so is the one after it."""
    first, second = prompt_of(N_PROMPT, 1), prompt_of(N_TURN, 2)
    with served(paths[kind], tmp_path) as server:
        assert server.cached(first) == 0
        server.wait_for_saves(1)
        server.kill_while_it_answers([*first, *second], 2)
    with served(paths[kind], tmp_path) as server:
        n = server.cached([*first, *second, *prompt_of(20, 3)])
        assert n == N_PROMPT + N_TURN
    with served(paths[kind], tmp_path) as server:
        n = server.cached([*first, *second])
        assert n >= N_PROMPT, "a state that cannot go back is taken from the turn before"
        if kind == "dense":
            assert n > N_PROMPT + N_TURN - 1 - CHUNK, "a snapshot is cut to whole chunks"


def test_two_models_by_turns_on_one_folder(paths: dict[str, Path], tmp_path: Path) -> None:
    """Neither takes the other's text for its own, and each finds its own again."""
    prompt = prompt_of(N_PROMPT, 1)
    for n_known in (0, N_PROMPT):
        for model in (paths["dense"], BUNDLED_MODEL):
            with served(model, tmp_path) as server:
                n = server.cached([*prompt, *prompt_of(9, n_known)])
                assert n > n_known - CHUNK if n_known else n <= 1, "the first token may be common"
                server.wait_for_saves(0 if n_known else 1)
