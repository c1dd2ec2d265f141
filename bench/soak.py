"""Clients that come and go: `kvflash serve` as a process of its own, its memory and open files watched from outside.

python bench/soak.py --clients 200 --seconds 300
python bench/soak.py --worst    and one more client that sends the worst grammars, one after the other

Each client asks at random for whole answers and streams, has tools called over both protocols, leaves in the middle, sends nonsense, or stops half way through a
request. Every answer has to be whole, or an error of the protocol; codes found are counted, as are those missed. Printed is also
how long the others' answers took.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from kvflash_bench.steps import hardware
from pyllama_kvflash import KVFlash
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support.processes import server_process  # noqa: E402

_WATCH_SECONDS = 1.0
_JSON = {"Content-Type": "application/json"}

_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"const": 3}}, "required": ["a", "b"]}
_ASKED = {"messages": [{"role": "user", "content": "What is 1 + 3?"}], "max_tokens": 200}

ANSWERED = {"found", "missed", "calls", "calls cut off"}

Document = tuple[str, str]
"""A prompt that ends with a question, and the code that answers it."""

Sample = tuple[float, dict[str, int], float, int]
"""Seconds, memory(), bytes taken for records, descriptors."""


def documents() -> list[Document]:
    """Of 1,000 to 4,000 tokens, which share their beginnings."""
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=512, pool="off") as kv:
        made = make_prompt(4000, lambda s: len(kv.tokenize(s, add_special=False)), n_needles=8, seed=11)
    lines = made.text.splitlines(keepends=True)
    texts = ["".join(lines[: len(lines) * n // 4]) for n in (1, 2, 3, 4)]
    return [(text + n.question, n.answer) for text in texts for n in made.needles if n.statement in text]


class Client:
    """One of them. outcomes: how often what came of a request; errors: what must not be."""

    def __init__(self, http: httpx.AsyncClient, known: list[Document], seed: int, outcomes: Counter[str]) -> None:
        self._http, self._known, self._rng = http, known, random.Random(seed)
        self._outcomes = outcomes
        self.errors: list[str] = []
        self.waits: list[float] = []  # seconds of each answer
        self._kinds = [self._whole, self._stream, self._call, self._message, self._leave, self._nonsense, self._half]

    async def run(self, end: float) -> None:
        """Until then."""
        while time.monotonic() < end:
            what, begin = self._rng.choice(self._kinds), time.monotonic()
            try:
                outcome = await what()
                self._outcomes[outcome] += 1
                if outcome in ANSWERED:
                    self.waits.append(time.monotonic() - begin)
            except Exception as err:  # noqa: BLE001 (told at the end)
                self.errors.append(f"{what.__name__}: {err!r}")

    def _body(self, **extra: Any) -> tuple[dict[str, Any], str]:
        text, answer = self._rng.choice(self._known)
        return {"prompt": text, "max_tokens": 7, "temperature": 0, **extra}, answer

    async def _refused(self, res: httpx.Response) -> str:
        if res.status_code != 429 or res.json()["error"]["code"] != "queue_full":
            msg = f"{res.status_code}: {res.text[:200]}"
            raise ValueError(msg)
        await asyncio.sleep(self._rng.random() * 2)
        return "refused"

    async def _whole(self) -> str:
        body, answer = self._body()
        res = await self._http.post("/v1/completions", json=body)
        if res.status_code != 200:
            return await self._refused(res)
        return "found" if answer in res.json()["choices"][0]["text"] else "missed"

    async def _stream(self) -> str:
        body, answer = self._body(stream=True)
        res = await self._http.post("/v1/completions", json=body)
        if res.status_code != 200:
            return await self._refused(res)
        events = [line[6:] for line in res.text.splitlines() if line.startswith("data: ")]
        if events[-1] != "[DONE]" or json.loads(events[-2])["choices"][0]["finish_reason"] not in {"length", "stop"}:
            msg = f"a stream that is not whole: {events[-2:]}"
            raise ValueError(msg)
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        return "found" if answer in text else "missed"

    async def _call(self) -> str:
        """A tool that must be called, over one of the protocols."""
        tool = {"type": "function", "function": {"name": "add", "parameters": _SCHEMA}}
        body = {**_ASKED, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1}
        res = await self._http.post("/v1/chat/completions", json=body)
        if res.status_code != 200:
            return await self._refused(res)
        choice = res.json()["choices"][0]
        if choice["finish_reason"] == "length":
            return "calls cut off"
        (call,) = choice["message"]["tool_calls"]
        return self._called(json.loads(call["function"]["arguments"]))

    async def _message(self) -> str:
        tool = {"name": "add", "input_schema": _SCHEMA}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        body = {**_ASKED, "tools": [tool], "tool_choice": choice, "temperature": 1, "stream": True}
        res = await self._http.post("/v1/messages", json=body)
        if res.status_code != 200:
            if res.json()["error"]["type"] == "rate_limit_error":
                await asyncio.sleep(self._rng.random() * 2)
                return "refused"
            raise ValueError(res.text[:200])
        events = [json.loads(line[6:]) for line in res.text.splitlines() if line.startswith("data: ")]
        reason = next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
        if reason == "max_tokens":
            return "calls cut off"
        parts = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
        return self._called(json.loads("".join(parts)))

    @staticmethod
    def _called(arguments: dict[str, Any]) -> str:
        if arguments["a"] not in {1, 2} or arguments["b"] != 3:
            msg = f"a call that its schema does not allow: {arguments}"
            raise ValueError(msg)
        return "calls"

    async def _leave(self) -> str:
        body, _ = self._body(stream=True, max_tokens=500)
        n = self._rng.randrange(30)
        try:
            async with asyncio.timeout(self._rng.random() * 8):
                async with self._http.stream("POST", "/v1/completions", json=body) as res:
                    async for _ in res.aiter_text():
                        n -= 1
                        if n < 0:
                            break
        except TimeoutError:
            pass
        return "left"

    async def _nonsense(self) -> str:
        bodies = [
            self._rng.randbytes(50),
            json.dumps({"prompt": "x", "stop": ["a"] * 5}).encode()[: self._rng.randrange(40)],
            b'{"prompt": "../../../etc/passwd", "model": "/etc/passwd", "n_predict": "/root"}',
            b'{"prompt": [1e99]}',
            b"[" * 100_000,
            json.dumps({"prompt": "x" * 1_000_000}).encode(),
        ]
        paths = ["/v1/completions", "/v1/chat/completions", "/../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd"]
        res = await self._http.post(self._rng.choice(paths), content=self._rng.choice(bodies), headers=_JSON)
        if not 400 <= res.status_code < 500 or not res.json()["error"]["message"]:
            msg = f"nonsense got {res.status_code}: {res.text[:200]}"
            raise ValueError(msg)
        return "nonsense"

    async def _half(self) -> str:
        """Half a request, and then nothing more."""
        _, writer = await asyncio.open_connection(self._http.base_url.host, self._http.base_url.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
        data = (head + b'{"prompt": "')[: self._rng.randrange(1, len(head) + 12)]
        writer.write(self._rng.randbytes(200) + b"\r\n\r\n" if self._rng.random() < 0.3 else data)
        await writer.drain()
        await asyncio.sleep(self._rng.random())
        writer.close()
        return "broken off"


class Worst(Client):
    """One that asks for nothing but grammars that take long."""

    def __init__(self, http: httpx.AsyncClient, known: list[Document], seed: int, outcomes: Counter[str]) -> None:
        super().__init__(http, known, seed, outcomes)
        self._kinds = [self._grammar]
        self._n = 0

    async def _grammar(self) -> str:
        """The next of them."""
        name, asked = WORST[self._n % len(WORST)]
        self._n += 1
        body = {**_ASKED, "messages": [{"role": "user", "content": f"Pick {self._n}."}], "temperature": 1.5, **asked}
        res = await self._http.post("/v1/chat/completions", json=body)
        if res.status_code == 429:
            return await self._refused(res)
        if res.status_code not in {200, 400}:
            msg = f"{name} got {res.status_code}: {res.text[:200]}"
            raise ValueError(msg)
        return f"worst: {name}: {res.status_code}"


def _formatted(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}}


def _object(names: int, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"name {i}": schema for i in range(names)}, **more}


_TEXT = {"type": "string"}
WORST: list[tuple[str, dict[str, Any]]] = [
    ("4,000 values", _formatted({"enum": [f"value number {i}" for i in range(4000)]})),
    ("2,000 values of many letters", _formatted({"enum": [chr(0x4E00 + i) + str(i) for i in range(2000)]})),
    ("a string of 1,500", _formatted({"type": "string", "maxLength": 1500})),
    ("300 optional properties", _formatted(_object(300, _TEXT))),
    ("an anyOf of 500", _formatted({"anyOf": [_object(2, {"const": i}) for i in range(500)]})),
    ("repetitions in repetitions", _formatted({"type": "array", "items": {"type": "array", "items": {**_TEXT, "maxLength": 200}, "maxItems": 200}, "maxItems": 200})),
    ("a pattern", _formatted({**_TEXT, "pattern": "^((a|ab|abc|b|bc|c){1,40}){1,40}$"})),
    ("ambiguous rules", {"grammar": "\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} r{i + 1} | ""' for i in range(16)), "r16 ::= [^x]?"])}),
    ("20,000 rules", {"grammar": "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1} | [^b] r{i + 1}' for i in range(19_000)), 'r19000 ::= "a"'])}),
    ("letters of letters", {"grammar": "root ::= (a | b | c)*\na ::= [^\\n]* b\nb ::= [^\\n]* c | [a-z]+\nc ::= [^\\n]+"}),
    ("200 tools", {"tools": [{"type": "function", "function": {"name": f"tool_{i}", "parameters": _object(20, _TEXT)}} for i in range(200)], "tool_choice": "required"}),
    ("20 logprobs", {"logprobs": True, "top_logprobs": 20}),
    ("300 biases", {"logit_bias": {str(i): 1 for i in range(300)}}),
]  # fmt: skip


def memory(pid: int) -> dict[str, int]:
    """Bytes: resident, and how much of that is of no file."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon")}


def opened(pid: int) -> set[str]:
    """Regular files that it has open now."""
    res = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if fd.is_file():
                res.add(str(fd.readlink()))
        except OSError:
            continue
    return res


async def watch(http: httpx.AsyncClient, pid: int, seen: list[Sample], files: set[str]) -> None:
    """Until it is cancelled."""
    begin = time.monotonic()
    while True:
        files |= opened(pid)
        figures = (await http.get("/metrics")).text
        records = next(line for line in figures.splitlines() if line.startswith("kvflash_host_bytes "))
        n_fd = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        seen.append((time.monotonic() - begin, memory(pid), float(records.split()[1]), n_fd))
        await asyncio.sleep(_WATCH_SECONDS)


async def soak(url: str, pid: int, n_clients: int, seconds: float, *, worst: bool) -> None:
    """Print what became of it."""
    known, outcomes = documents(), Counter[str]()
    seen: list[Sample] = []
    files: set[str] = set()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=n_clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        clients = [Client(http, known, i, outcomes) for i in range(n_clients)]
        others = [Worst(http, known, n_clients, outcomes)] if worst else []
        watching = asyncio.create_task(watch(http, pid, seen, files))
        end = time.monotonic() + seconds
        await asyncio.gather(*(client.run(end) for client in [*clients, *others]))
        for _ in range(200):
            health = (await http.get("/health")).json()
            if health["busy"] == health["queue"] == 0:
                break
            await asyncio.sleep(0.1)
        watching.cancel()
    errors = [error for client in [*clients, *others] for error in client.errors]
    waits = sorted(wait for client in clients for wait in client.waits)
    shares = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
    said = ", ".join(f"{name} {waits[min(int(x * len(waits)), len(waits) - 1)]:.1f}" for name, x in shares.items())
    print(f"{len(waits)} answers, seconds: {said}")
    print(", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))
    print(f"{len(errors)} errors", *errors[:10], sep="\n  ")
    print(f"at the end: {json.dumps(health)}")
    for at, held, records, n_fd in seen[:: max(1, len(seen) // 10)]:
        sizes = (held["VmRSS"], held["RssAnon"], records)
        print(
            "  {:5.0f} s  RSS {:6.1f} MiB, of no file {:6.1f}, records {:6.1f}".format(at, *(x / 2**20 for x in sizes)),
            end="",
        )
        print(f", {n_fd} descriptors")
    print("files it had open:", *sorted({f.split("/prefix/")[0] if "/prefix/" in f else f for f in files}), sep="\n  ")


def main() -> None:
    """One server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--worst", action="store_true")
    args, extra = parser.parse_known_args()
    with TemporaryDirectory() as folder:
        options = ["-np", "4", "-c", "8192", "--kvflash", "8192", "--queue", "120", "--prefix-cache", f"{folder}/prefix",
                   "--prefix-cache-size", "64MiB", "--chat-template-file", str(TESTS / "data" / "tools.jinja"), *extra]  # fmt: skip
        print(hardware())
        print("kvflash serve", *options)
        with server_process(*options) as server:
            asyncio.run(soak(server.url, server.process.pid, args.clients, args.seconds, worst=args.worst))
            server.process.terminate()
            print("exit code", server.ended(60))
        odd = Counter(line.strip() for line in server.said if line.strip() and "tokens of prompt" not in line)
        print("lines of its log that are of no answer:", *(f"{n} x {line}" for line, n in odd.items()), sep="\n  ")


if __name__ == "__main__":
    main()
