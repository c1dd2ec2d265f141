"""A Hub on this machine that speaks as much of the API of huggingface.co as its library asks."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from pyllama_kvflash.needle import BUNDLED_MODEL
from support.commands import TIMEOUT

MIB = 1 << 20


@dataclass
class Repo:
    """A repository of the fake Hub."""

    files: dict[str, bytes]
    branches: tuple[str, ...] = ("main",)
    error: tuple[int, str] | None = None  # status, X-Error-Code

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(self.files.values()) + str(sorted(self.files)).encode()).hexdigest()


@dataclass
class Hub:
    """The fake Hub: its repositories, what was asked of it, and what is to go wrong."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    truncate: dict[str, int] = field(default_factory=dict)  # file: how much of it the next answer has
    stall: threading.Event | None = None
    bad_token: bool = False
    down: bool = False

    def paths(self, method: str) -> list[str]:
        return [path for m, path, _ in self.asked if m == method]

    def downloads(self) -> list[str]:
        return [path.rpartition("/resolve/")[2].partition("/")[2] for path in self.paths("GET") if "/resolve/" in path]


class Handler(BaseHTTPRequestHandler):
    """Answers as huggingface.co does."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        api = re.fullmatch(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>.+))?", path)
        match = api or re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", path)
        repo = self.hub.repos.get(match["repo"]) if match else None
        if error := self._problem(repo, (match and match["revision"]) or "main", listing=api is not None):
            self._error(*error)
        elif match and repo and not api:
            self._file(repo, match["file"])
        elif match and repo:
            self._json(self._tree(repo) if match["what"] == "tree" else self._info(match["repo"], repo))

    def _problem(self, repo: Repo | None, revision: str, *, listing: bool) -> tuple[int, str] | None:
        if self.hub.down:
            return 503, ""
        if self.hub.bad_token and self.headers.get("Authorization"):
            return 401, "Invalid"
        if repo is None:
            return 404, "RepoNotFound"
        if repo.error and not (listing and repo.error[1] == "GatedRepo"):  # of a gated one the API tells, too
            return repo.error
        return None if revision in (*repo.branches, repo.commit) else (404, "RevisionNotFound")

    def _info(self, name: str, repo: Repo) -> dict[str, Any]:
        siblings = [{"rfilename": file} for file in repo.files]
        return {"id": name, "modelId": name, "sha": repo.commit, "private": False, "tags": [], "siblings": siblings}

    def _tree(self, repo: Repo) -> list[dict[str, Any]]:
        return [{"type": "file", "path": p, "size": len(d), "oid": _etag(d)} for p, d in repo.files.items()]

    def _file(self, repo: Repo, name: str) -> None:
        data = repo.files.get(name)
        if data is None:
            self._error(404, "EntryNotFound", repo.commit)
            return
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data)) + 1, len(data))
        is_part = start > 0 or end < len(data)
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "GET":
            self._body(data[start:end], self.hub.truncate.pop(name, None))

    def _body(self, data: bytes, end: int | None) -> None:
        self.wfile.write(data[: MIB if self.hub.stall else end])
        if self.hub.stall:
            self.hub.stall.wait(TIMEOUT)
        self.close_connection = end is not None

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, code: str, commit: str = "") -> None:
        message = "Invalid credentials in Authorization header" if code == "Invalid" else ""
        self.send_response(status)
        for name, value in (("X-Error-Code", code), ("X-Error-Message", message), ("X-Repo-Commit", commit)):
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def fake() -> Iterator[Hub]:
    """A Hub with the bundled model, as one file and in a folder, and repositories that are of no use."""
    model = BUNDLED_MODEL.read_bytes()
    needle = {
        "README.md": b"# Needle",
        "needle-F16.gguf": b"GGUF",
        "needle-Q8_0.gguf": model,
        "mmproj-F16.gguf": b"GGUF",
    }
    split = {f"Q4_K_M/big-Q4_K_M-0000{i}-of-00003.gguf": b"part %d" % i for i in (1, 2, 3)}
    res = Hub(
        repos={
            "test/needle": Repo(needle, ("main", "v1")),
            "test/split": Repo(split),
            "test/torn": Repo({n: d for n, d in split.items() if "00003-of" not in n}),
            "test/weights": Repo({"config.json": b"{}", "model.safetensors": b"0"}),
            "test/gated": Repo(needle, error=(403, "GatedRepo")),
            "test/private": Repo(needle, error=(401, "RepoNotFound")),
        }
    )
    handler = type("_Handler", (Handler,), {"hub": res})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        res.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield res
        if res.stall:
            res.stall.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def environ(fake: Hub, tmp_path: Path) -> dict[str, str]:
    """An environment whose Hub is the fake one, with an empty cache."""
    drop = ("HF_", "HUGGING", "KVFLASH_", "LLAMA_ARG_", "TRANSFORMERS_")
    res = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    res |= {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": fake.url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return res | {"LLAMA_ARG_THREADS": "1", "COLUMNS": "300", "NO_PROXY": "127.0.0.1"}
