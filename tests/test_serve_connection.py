"""Connections to the server: how many, how long, closed by halves, compressed, and below a prefix of paths."""

import contextlib
import gzip
import http.client
import json
import resource
import socket

import pytest

pytest.importorskip("httpx")

import httpx
from click.testing import CliRunner
from support import serving
from support.changes import SERVE
from support.processes import server_process
from support.serving import Running, begun, stream, until

from pyllama_kvflash.cli import main
from pyllama_kvflash.serve.server import raise_file_limit

pytestmark = pytest.mark.native

environment = serving.environment
server = serving.server

JSON = {"Content-Type": "application/json"}
ASK = {"prompt": "On and on.", "max_tokens": 40, "temperature": 0}


def request(body: bytes = json.dumps(ASK).encode(), *, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(running: Running) -> socket.socket:
    url = httpx.URL(running.url)
    return socket.create_connection((url.host, url.port), timeout=60)


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def answer(data: bytes) -> bytes:
    """The body of the answer after any interim responses."""
    head, _, body = data.partition(b"\r\n\r\n")
    return answer(body) if head == b"HTTP/1.1 100 Continue" else body


#
# open files
#


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] in {hard, 10_240}
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] in {hard, 10_240}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.nightly(SERVE)
def test_no_file_is_left_for_a_connection() -> None:
    """One line, whatever asyncio says of each; and when clients leave, the next ones are answered."""
    limited = ["sh", "-c", 'ulimit -n 60; exec "$@"', "sh"]
    with server_process("-c", "512", "--prefix-cache", "off", "-t", "1", before=limited) as process:
        url = httpx.URL(process.url)
        clients = [socket.create_connection((url.host, url.port), timeout=60) for _ in range(70)]
        until(lambda: bool(process.said))
        for client in clients:
            client.close()
        assert httpx.get(f"{process.url}/health", timeout=60).status_code == 200
    (line,) = process.said
    assert line.startswith("kvflash: warning: new connections have to wait: Too many open files; raise the limit")


#
# keep-alive
#


def test_a_connection_is_used_again(server: Running) -> None:
    url = httpx.URL(server.url)
    with contextlib.closing(http.client.HTTPConnection(url.host, url.port, timeout=60)) as client:
        used = set()
        for path in ("/health", "/v1/models", "/nothing"):
            client.request("GET", path)
            assert client.getresponse().read()
            used.add(client.sock)
        assert len(used) == 1
        assert used != {None}


def test_a_connection_without_a_request_is_closed() -> None:
    """After an answer, and before the first request; an answer itself may take longer."""
    with Running(keep_alive=0.1) as running:
        for data in (b"", b"GET / HT"):
            with connect(running) as client:
                client.sendall(data)
                assert rest(client) == b""
        with connect(running) as client:
            client.sendall(request(json.dumps({**ASK, "max_tokens": 200}).encode()))
            assert json.loads(answer(rest(client)))["usage"]["completion_tokens"] == 200


#
# half-closed clients
#


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("body", [ASK, {**ASK, "stream": True}])
def test_a_client_that_only_sends_no_more_is_answered(server: Running, version: str, body: dict[str, object]) -> None:
    """As `nc` does at the end of its input."""
    with connect(server) as client:
        client.sendall(request(json.dumps(body).encode(), version=version))
        client.shutdown(socket.SHUT_WR)
        data = rest(client)
    assert version == "1.1" or b" 100 " not in data, "older clients do not know it"
    if "stream" in body:
        assert data.endswith(b"data: [DONE]\n\n" + (b"\r\n0\r\n\r\n" if version == "1.1" else b""))
    else:
        assert json.loads(answer(data))["usage"]["completion_tokens"] == ASK["max_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_left_is_noticed_while_it_waits(streamed: bool) -> None:
    """It looks as one that only sends no more, until something is written to it."""
    with Running(n_parallel=1) as running, stream(running) as parts:
        begun(parts)
        for last in (socket.SHUT_WR, None):
            with connect(running) as client:
                client.sendall(request(json.dumps({**ASK, "stream": streamed}).encode()))
                until(lambda: running.health()["queue"] == 1)
                if last is not None:
                    client.shutdown(last)
                    if streamed:
                        while b"waiting" not in client.recv(4096):
                            pass
                    else:
                        assert client.recv(4096).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
                    assert running.health()["queue"] == 1, "it waits"
            until(lambda: running.health()["queue"] == 0)
        assert running.health()["busy"] == 1


def test_a_body_is_asked_for_if_the_client_waits(server: Running) -> None:
    head, _, body = request().partition(b"\r\n\r\n")
    with connect(server) as client:
        client.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    with connect(server) as client:
        client.sendall(head.replace(b"Length: ", b"Length: 9999999") + b"\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413 "), "it need not send what is too large"


#
# what is not HTTP
#


@pytest.mark.parametrize(
    ("parts", "status", "words"),
    [
        ([b"\x16\x03\x01 nothing\r\n\r\n"], 400, "the request is not HTTP/1.1: illegal request line"),
        ([b"GET / HTTP/1.1\r\n\r\n"], 400, "Missing mandatory Host: header"),
        ([b"GET /" + b"a" * 20_000], 431, "the limit is 16 KiB"),
        ([b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000], 431, "the limit is 16 KiB"),
        ([b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], 400, "chunk"),
    ],
)
def test_bytes_that_are_not_http(server: Running, parts: list[bytes], status: int, words: str) -> None:
    with connect(server) as client:
        for part in parts:
            client.sendall(part)
        data = rest(client)
    assert data.startswith(f"HTTP/1.1 {status} ".encode())
    error = json.loads(answer(data))["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_client_that_offers_another_protocol(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """As Java's, and `curl --http2`: it is answered by HTTP/1.1, without a word about it."""
    for other in ("h2c", "websocket"):
        res = server.http.get("/health", headers={"Connection": "Upgrade", "Upgrade": other})
        assert (res.status_code, res.http_version) == (200, "HTTP/1.1")
    assert not caplog.records


#
# compressed bodies
#


@pytest.mark.parametrize("path", ["/tokenize", "/api/show"])
def test_a_compressed_body_is_refused(server: Running, path: str) -> None:
    """Before it is read: a few bytes may stand for gigabytes."""
    body = json.dumps({"content": "The sea", "model": "x"}).encode()
    assert server.http.post(path, content=body, headers={**JSON, "Content-Encoding": "identity"}).status_code == 200
    res = server.http.post(path, content=gzip.compress(body), headers={**JSON, "Content-Encoding": "gzip"})
    assert (res.status_code, res.headers["Accept-Encoding"]) == (415, "identity")
    assert "Content-Encoding 'gzip' is not supported: send the body as it is" in res.text


#
# a prefix of paths
#


def test_paths_begin_with_a_prefix() -> None:
    with Running(api_prefix="/a/llm", api_key="secret") as running, httpx.Client(base_url=running.url) as stranger:
        assert running.text(prompt="x", max_tokens=1)
        assert running.http.get("/v1/models").status_code == 200
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/static/page.js").status_code == 200
        assert stranger.get("/v1/models").status_code == 401
        host = running.url.removesuffix("/a/llm")
        page = httpx.get(running.url, follow_redirects=True)
        assert (page.status_code, page.url) == (200, f"{running.url}/")
        assert httpx.get(running.url).headers["location"] == f"{host}/a/llm/".removeprefix(host)
        assert 'data-needs-key="yes"' in page.text
        for path in ("/health", "/", "/a/llmx", "/a", "/llm/health", "/a/llm/a/llm/health"):
            res = httpx.get(host + path)
            assert res.status_code == (401 if path.startswith("/a/llm/") else 404), path
        res = httpx.get(f"{host}/health")
        message = "/health is not a path of this server: its paths begin with /a/llm/"
        assert res.json()["error"]["message"] == message
        assert httpx.get(f"{host}/api/tags").json() == {"error": message.replace("/health", "/api/tags")}
        res = running.post({}, "/v1/messages")
        assert res.json()["type"] == "error", "errors are those of the protocol"
        assert "POST /a/llm/v1/messages 400" in running.notes[-1]


@pytest.mark.parametrize("prefix", ["llm", "/a b", "/..", "/a/./b", "/a//b", "http://host/llm", "/ä", "/a?b", "/a%20b"])
def test_a_prefix_that_is_none(prefix: str) -> None:
    res = CliRunner().invoke(main, ["serve", "--api-prefix", prefix])
    assert res.exit_code == 2
    assert "is not a prefix of paths" in res.output
