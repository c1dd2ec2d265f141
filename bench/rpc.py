"""What RPC costs: speed, round trips and bytes with layers on servers of this machine, as Markdown.

    .venv/bin/python bench/rpc.py MODEL.gguf

A relay between kvflash and each server counts messages and bytes, and holds each message back for half of a given round trip. Its own
processing is in the row "relay". A round trip is a message that the client waits for an answer to. All of it runs on the CPU: what
more machines would gain is not seen here, only what the protocol costs.
"""

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from ctypes import Array
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from kvflash_bench.grid import cpu_name
from kvflash_bench.tables import Live
from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.events import Token

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.rpc import HOST, Servers

MIB = 2**20
GREEDY = Sampling(temperature=0.0)
WARM_UP = 4  # tokens of an answer that are not counted
TEXT = Path(__file__).parents[1] / "docs" / "ARCHITECTURE.md"


@dataclass(frozen=True)
class Case:
    """What is measured. rtt: milliseconds of a round trip that the relay adds; None: no relay."""

    title: str
    n_servers: int = 2
    rtt: float | None = 0.0
    options: tuple[tuple[str, Any], ...] = ()


POOL = (("pool", 1024), ("policy", "qk"))
CASES = [
    Case("full cache, this process", 0, None),
    Case("full cache, 1 server", 1, None),
    Case("full cache, 2 servers", 2, None),
    Case("full cache, relay"),
    Case("full cache, 0.2 ms", rtt=0.2),
    Case("full cache, 1 ms", rtt=1.0),
    Case("pool qk, this process", 0, None, POOL),
    Case("pool qk, 2 servers", 2, None, POOL),
    Case("pool qk, relay", options=POOL),
    Case("pool qk, 1 ms", rtt=1.0, options=POOL),
    Case("pool qk, 2 panes, relay", options=(*POOL, ("panes", 2))),
    Case("pool qk, 2 panes, 1 ms", rtt=1.0, options=(*POOL, ("panes", 2))),
    Case("pool qk, prompt through the pool, relay", options=(*POOL, ("prefill", "pool"))),
    Case("pool lru, relay", options=(("pool", 1024), ("policy", "lru"))),
]


#
# the relay
#


class Relay:
    """Passes connections on to a server, in a process of its own. counts: messages and bytes there, and back."""

    def __init__(self, endpoint: str, seconds: float) -> None:
        self.counts: Array[int] = multiprocessing.Array("q", 4)  # type: ignore[assignment]
        listening = socket.create_server((HOST, 0))
        self.endpoint = f"{HOST}:{listening.getsockname()[1]}"
        run = (listening, endpoint, seconds, self.counts)
        self._process = multiprocessing.get_context("fork").Process(target=_relay, args=run, daemon=True)
        self._process.start()
        listening.close()


def _relay(listening: socket.socket, endpoint: str, seconds: float, counts: "Array[int]") -> None:
    host, port = endpoint.split(":")
    while True:
        client, _ = listening.accept()
        server = socket.create_connection((host, int(port)))
        for here, there, i, n_head in ((client, server, 0, 1), (server, client, 2, 0)):
            for sock in (here, there):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
            messages = Messages(n_head)
            threading.Thread(target=_receive, args=(here, queue, messages, counts, i), daemon=True).start()
            threading.Thread(target=_send, args=(there, queue, seconds), daemon=True).start()


class Messages:
    """Counts the messages of a stream: n_head bytes, a size of 8 bytes, and so many bytes."""

    def __init__(self, n_head: int) -> None:
        self._n_head, self._head, self._left = n_head, b"", 0

    def count(self, data: bytes) -> int:
        """Return how many messages end in the data that comes next."""
        n, at = 0, 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                n += self._left == 0
                continue
            step = self._n_head + 8 - len(self._head)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == self._n_head + 8:
                self._left = int.from_bytes(self._head[self._n_head :], "little")
                self._head = b""
                n += self._left == 0
        return n


def _receive(
    sock: socket.socket, queue: "SimpleQueue[tuple[float, bytes]]", messages: Messages, counts: "Array[int]", i: int
) -> None:
    while data := sock.recv(MIB):
        queue.put((time.perf_counter(), data))
        counts[i] += messages.count(data)
        counts[i + 1] += len(data)
    queue.put((time.perf_counter(), b""))


def _send(sock: socket.socket, queue: "SimpleQueue[tuple[float, bytes]]", seconds: float) -> None:
    while True:
        came, data = queue.get()
        if (left := came + seconds / 2 - time.perf_counter()) > 0:
            time.sleep(left)
        if not data:
            sock.shutdown(socket.SHUT_WR)
            return
        sock.sendall(data)


#
# a case
#


def measure(case: Case, args: argparse.Namespace) -> dict[str, float]:
    """Read a prompt and answer. The process ends then: devices that were added stay."""
    n_prompt, n_answer, endpoints = args.prompt, args.answer, args.endpoints
    relays = [] if case.rtt is None else [Relay(e, case.rtt / 1000) for e in endpoints[: case.n_servers]]
    rpc = tuple(relay.endpoint for relay in relays) or tuple(endpoints[: case.n_servers])
    options = {"pool": "off", "n_ctx": n_prompt + n_answer + 256, "opening": 0, "n_threads": args.threads}
    options |= dict(case.options)
    with KVFlash.from_file(args.model, rpc=rpc, **options) as kv:
        prompt = np.resize(kv.tokenize(TEXT.read_text("utf-8")), n_prompt)
        reading = _timed(relays, lambda: [None for _ in kv.prefill(prompt[:-1])])
        events = kv.generate(prompt[-1:], max_tokens=n_answer, sampling=GREEDY, append=True)
        for _ in range(WARM_UP):
            _until_token(events)
        before = kv.stats().pages_in
        answering = _timed(relays, lambda: [_until_token(events) for _ in range(n_answer - WARM_UP)])
        pages = kv.stats().pages_in - before
        n = n_answer - WARM_UP
        return {
            "prefill": n_prompt / reading[0],
            "prefill_trips": reading[3],
            "prefill_bytes": (reading[2] + reading[4]) / n_prompt,
            "decode": n / answering[0],
            "messages": answering[1] / n,
            "trips": answering[3] / n,
            "bytes": (answering[2] + answering[4]) / n,
            "pages": pages,
        }


def _until_token(events: Any) -> None:
    next(event for event in events if isinstance(event, Token))


def _timed(relays: list[Relay], call: Callable[[], Any]) -> list[float]:
    """Return the seconds of a call, and what went through the relays meanwhile."""
    before, begin = _counts(relays), time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    return [seconds, *(_counts(relays) - before)]


def _counts(relays: list[Relay]) -> Any:
    return sum((np.array(relay.counts[:]) for relay in relays), np.zeros(4))


#
# the table
#


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--answer", type=int, default=68, help="tokens")
    parser.add_argument("--threads", type=int, default=1, help="of this process, and of each server")
    parser.add_argument("--only", default="", help="rows that have this in their name")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--endpoints", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case = next(case for case in CASES if case.title == args.case)
        print(json.dumps(measure(case, args)))
        return

    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} processors; `{' '.join(['bench/rpc.py', *sys.argv[1:]])}`\n")
    columns = (
        "prefill tok/s",
        "KiB a prompt token",
        "decode tok/s",
        "round trips a token",
        "messages",
        "KiB a token",
        "pages in",
    )
    table = Live("", *columns)
    with tempfile.TemporaryDirectory() as folder, Servers(2, Path(folder), args.threads) as servers:
        for case in (case for case in CASES if args.only in case.title):
            table.row(*_cells(case, _measured(case, args, servers.endpoints)))


def _measured(case: Case, args: argparse.Namespace, endpoints: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, args.model, "--case", case.title, "--endpoints", *endpoints]
    command += ["--prompt", str(args.prompt), "--answer", str(args.answer), "--threads", str(args.threads)]
    res = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(res.stdout))


def _cells(case: Case, found: dict[str, float]) -> list[str]:
    counted = case.rtt is not None
    return [
        case.title,
        f"{found['prefill']:.0f}",
        f"{found['prefill_bytes'] / 1024:,.1f}" if counted else "",
        f"{found['decode']:.1f}",
        *(f"{found[key]:.1f}" if counted else "" for key in ("trips", "messages")),
        f"{found['bytes'] / 1024:,.1f}" if counted else "",
        f"{found['pages']:.0f}" if "pool" in case.title else "",
    ]


if __name__ == "__main__":
    main()
