"""Thousands of bodies that went wrong, sent to a server of its own: each gets an answer or an error of its protocol.

python bench/fuzz_server.py -n 10000

Made of good bodies by tests/support/bodies.py. Some are compressed, and some clients close their half of the connection. Between
them all that can be looked at is, and conversations are sent in each protocol (tests/support/alike.py). Ends with 1 if an answer was none of
the protocol, NaN or an infinity was in one, protocols made different prompts of a conversation, the server's log has a
traceback, or its memory grew by more than 5 % after the first tenth of them.
"""

import argparse
import gzip
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support import alike  # noqa: E402
from support.bodies import Request, bodies, fault, parsed  # noqa: E402
from support.processes import server_process  # noqa: E402

from pyllama_kvflash.serve.protocols.responses_store import MAX_BYTES  # noqa: E402

_GROWTH = 1.05
_REQUEST = re.compile(r"\d\d:\d\d:\d\d \S+ (POST|GET) /\S* \d{3}: |warning: .* has no effect$")
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""glibc gives back what is free, so that what is in memory is what the server holds."""
_LIMIT = 8 << 20  # KiB of address space: what takes more should not take those who share the machine with it


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


class Sender:
    """Sends them one by one. counts: answers by path and status; wrong: those that must not be."""

    def __init__(self, url: str) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()
        self.how: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0, -1
        self._http = httpx.Client(base_url=url, timeout=60)

    def send(self, number: int, request: Request) -> None:
        """One of them."""
        self.how.update(request.how)
        begin = time.monotonic()
        try:
            res = self._sent(number, request)
            why = fault(request.path, res.status_code, res.text)
        except httpx.HTTPError as err:
            why, status = repr(err), 0
        except (ValueError, TypeError, AttributeError) as err:
            why, status = f"no JSON, or none of the protocol: {err!r}: {res.text[:200]}", res.status_code
        else:
            status = res.status_code
            self.counts[request.path, status] += 1
        self.slowest = max(self.slowest, (time.monotonic() - begin, number))
        if why:
            self.wrong.append(
                f"{number} ({', '.join(request.how)}): {status}, {why}\n    {request.path} {request.data[:300]!r}"
            )

    def _sent(self, number: int, request: Request) -> httpx.Response:
        headers, data = {"Content-Type": "application/json"}, request.data
        if number % 8 == 0:
            headers["Content-Encoding"], data = "gzip", gzip.compress(data)
        if number % 50 == 0:
            return _half_closed(self._http.base_url, request.path, headers, data)
        return self._http.post(request.path, content=data, headers=headers)

    def look(self) -> None:
        """Look at all that can be looked at."""
        for path in LOOKS:
            res = self._http.get(path)
            self.counts[path, res.status_code] += 1
            if res.status_code != 200 or (path != "/metrics" and not isinstance(parsed(res.text), dict | list)):
                self.wrong.append(f"{path}: {res.status_code} {res.text[:300]}")
            if re.search(r" (nan|[+-]?inf)$", res.text, re.MULTILINE | re.IGNORECASE):
                self.wrong.append(f"{path} has a figure that is none")

    def agree(self, rng: random.Random) -> None:
        """Send a conversation in each protocol."""
        if why := alike.difference(self._asked, alike.conversation(rng)):
            self.wrong.append(why)

    def _asked(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        res = self._http.post(path, json=body)
        self.counts[path, res.status_code] += 1
        return res.status_code, parsed(res.text)


LOOKS = ("/v1/models", "/models", "/props", "/slots", "/health", "/metrics", "/api/tags", "/api/ps", "/api/version", "/kvflash/pool",
         "/lora-adapters")  # fmt: skip
_LOOK, _AGREE = 100, 20  # requests between two looks, and two conversations


def _half_closed(url: httpx.URL, path: str, headers: dict[str, str], data: bytes) -> httpx.Response:
    """Post a body and close the half of the connection that sends."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {url.host}",
        f"Content-Length: {len(data)}",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
    with socket.create_connection((url.host, url.port or 80), timeout=60) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        client.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: client.recv(1 << 16), b""))
    while found.startswith(b"HTTP/1.1 100 "):
        found = found.partition(b"\r\n\r\n")[2]
    head, _, body = found.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = b"".join(_chunks(body))
    return httpx.Response(int(head.split()[1] if head else 0), content=body)


def _chunks(body: bytes) -> list[bytes]:
    res = []
    while body:
        size, _, body = body.partition(b"\r\n")
        res.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return res


def warm(url: str) -> None:
    """Ask for the most of everything, in all threads of the server at once: what it takes then it may keep."""
    text = "The old mill by the river. " * 18_000
    tool = {"description": "It.", "parameters": {"type": "object", "properties": {"a": {"enum": list(range(300))}}}}
    tools = [{"type": "function", "function": {**tool, "name": f"tool{i}"}} for i in range(256)]
    largest = [
        ("/tokenize", {"content": text, "with_pieces": True}),
        ("/tokenize", {"content": "a" * 480_000, "with_pieces": True}),  # no words: all at once
        ("/detokenize", {"tokens": [100] * 100_000}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": [100] * 4090, "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello. " * 1_000}], "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}], "tools": tools, "tool_choice": "required"},
        ),
        ("/v1/completions", {"prompt": "x", "json_schema": {"enum": list(range(50_000))}}),
    ]
    with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(4) as clients:
        for path, body in largest:
            list(clients.map(lambda _, path=path, body=body: http.post(path, json=body), range(6)))
        kept = {"input": [{"role": "user", "content": "x", "other": text}], "max_output_tokens": 1}
        for _ in range(MAX_BYTES // len(text) + 1):
            http.post("/v1/responses", json=kept)


def alive(pid: int) -> bool:
    """Whether a process has not ended."""
    return Path(f"/proc/{pid}/statm").read_text().split()[0] != "0"


def fuzz(url: str, pid: int, n: int, seed: int, first: int, path: str | None) -> bool:
    """Print what became of them. Returns whether all is well."""
    warm(url)
    sender, begin = Sender(url), time.monotonic()
    sizes = []
    tenth = max(1, n // 10)
    for i, request in enumerate(bodies(first + n, seed, path)):
        if i < first:
            continue
        sender.send(i, request)
        if i % _LOOK == 0:
            sender.look()
        if i % _AGREE == 0:
            sender.agree(random.Random(f"{seed}/{i}/agree"))
        if sender.wrong and not alive(pid):
            print("the server died of the last of these", *sender.wrong, sep="\n  ")
            return False
        if (i + 1 - first) % tenth == 0:
            sizes.append(resident(pid))
            print(f"  {i + 1:,}: RSS {sizes[-1] / 2**20:.1f} MiB, {len(sender.wrong)} wrong", flush=True)
    print(
        f"{n:,} bodies of seed {seed} in {time.monotonic() - begin:.0f} s; the slowest, {sender.slowest[1]},", end=" "
    )
    print(f"took {sender.slowest[0]:.2f} s")
    print("what was wrong with them:", ", ".join(f"{n} {what}" for what, n in sender.how.most_common()))
    for status in sorted({status for _, status in sender.counts}):
        found = {path: n for (path, s), n in sorted(sender.counts.items()) if s == status}
        print(f"  {status}: {sum(found.values())} ({', '.join(f'{path} {n}' for path, n in found.items())})")
    growth = sizes[-1] / sizes[0]
    print(
        f"RSS {sizes[0] / 2**20:.1f} MiB after a tenth, {sizes[-1] / 2**20:.1f} at the end: {100 * (growth - 1):+.1f} %"
    )
    print(f"{len(sender.wrong)} wrong answers", *sender.wrong[:20], sep="\n  ")
    return not sender.wrong and growth <= _GROWTH


def main() -> None:
    """One server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--path", help="only bodies of this endpoint")
    args, extra = parser.parse_known_args()
    options = ["-c", "4096", "--kvflash", "2048", "-np", "2", "-t", "1", "-n", "2", "--max-body", "512KiB",
               "--chat-template-file", str(TESTS / "data" / "tools.jinja"), *extra]  # fmt: skip
    print("kvflash serve", *options)
    limited = ["sh", "-c", f'ulimit -v {_LIMIT}; exec "$@"', "sh"]
    with server_process(*options, before=limited, env={**os.environ, **_ALLOCATOR}) as server:
        well = fuzz(server.url, server.process.pid, args.n, args.seed, args.first, args.path)
        server.process.terminate()
        code = server.ended(60)
    odd = [line.rstrip() for line in server.said if line.strip() and not _REQUEST.search(line)]
    print(f"exit code {code}; {len(odd)} lines of its log that are not of a request", *odd[:60], sep="\n  ")
    sys.exit(0 if well and code == 0 and not any("Traceback" in line for line in odd) else 1)


if __name__ == "__main__":
    main()
