"""An agent's session with tools: each turn's time to the first token, warm against cold, and whether the text is the same.

python bench/agent.py MODEL.gguf -f long.txt --turns 20 --tokens 30000 --cold-every 5 -- --kvflash 2K -t 2

In each turn the model must call a tool, which reads some more of the text; the conversation grows to about --tokens. The
warm server keeps what it read, in memory and on disk. The cold one has no cache, and is asked something else before each turn,
so that it reads all of it again; it is given the same conversation, every so many turns. What follows -- goes to both servers.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvflash_bench.steps import hardware

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.processes import server_process

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read the next lines of a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 40}, "line": {"type": "integer"}},
            "required": ["path", "line"],
        },
    },
}
SYSTEM = "You are an agent. Read the book with the tool, and remember who is who."
CHARACTERS = 4.0  # of a token, about


@dataclass
class Turn:
    """What came of a turn. seconds: to the first token. said: the message, without the names of calls."""

    seconds: float
    n_prompt: int
    n_cached: int
    message: dict[str, Any]

    @property
    def said(self) -> tuple[Any, ...]:
        """The text of the turn."""
        calls = self.message.get("tool_calls", [])
        return self.message.get("content"), *((c["function"]["name"], c["function"]["arguments"]) for c in calls)


@contextmanager
def served(model: str, cache: str, args: list[str]) -> Iterator[httpx.Client]:
    """A server process, and a client of it."""
    with (
        server_process(model, "-np", "1", "--temp", "0", "--prefix-cache", cache, *args) as server,
        httpx.Client(base_url=server.url, timeout=None) as http,
    ):
        yield http


def turn(http: httpx.Client, messages: list[dict[str, Any]]) -> Turn:
    """Ask for the next message of a conversation."""
    body = {
        "messages": messages, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    begin, seconds = time.perf_counter(), 0.0
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    with http.stream("POST", "/v1/chat/completions", json=body) as res:
        if res.is_error:
            sys.exit(f"the server answers {res.status_code}: {res.read().decode()}")
        for line in res.iter_lines():
            if found := re.fullmatch(r": prefill (\d+)/(\d+)", line):
                seconds = time.perf_counter() - begin if found[1] == found[2] else seconds
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if usage := event.get("usage"):
                return Turn(seconds, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], message)
            take(message, event["choices"][0]["delta"])
    msg = "the stream ended early"
    raise RuntimeError(msg)


def take(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a piece of a stream to a message."""
    message["content"] += delta.get("content") or ""
    for piece in delta.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        function = calls[piece["index"]]["function"]
        function["name"] += piece["function"].get("name", "")
        function["arguments"] += piece["function"]["arguments"]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-f", "--file", required=True, help="text that the tool reads")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=30000, help="of the conversation at its end, about")
    parser.add_argument("--first", type=int, default=8000, help="tokens that the first turn has already, about")
    parser.add_argument("--cold-every", type=int, default=5, help="turns of which one is repeated by the cold server")
    own, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    args, serve = parser.parse_args(shlex.split(own)), shlex.split(more)

    book = Path(args.file).read_text("utf-8")
    first = int(args.first * CHARACTERS)
    each = int((args.tokens - args.first) / args.turns * CHARACTERS)
    said: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": book[:first]}]
    options = ["-c", str(args.tokens + args.tokens // 8), *serve]
    print(
        f"{hardware()}\n{' '.join(sys.argv)}\n\n| turn | tokens | known | warm s | cold s | text |\n|---|---|---|---|---|---|"
    )
    with (
        tempfile.TemporaryDirectory() as cache,
        served(args.model, cache, options) as warm,
        served(args.model, "off", options) as cold,
    ):
        for i in range(1, args.turns + 1):
            found, again = turn(warm, said), None
            if i == 1 or i % args.cold_every == 0:
                cold.post("/v1/completions", json={"prompt": "Something else.", "max_tokens": 1})
                again = turn(cold, said)
            same = "" if again is None else "the same" if again.said == found.said else f"{found.said} / {again.said}"
            shown = "" if again is None else f"{again.seconds:.1f}"
            print(f"| {i} | {found.n_prompt} | {found.n_cached} | {found.seconds:.1f} | {shown} | {same} |", flush=True)
            start = first + (i - 1) * each
            said.append(found.message)
            for call in found.message.get("tool_calls", []):
                result = {"role": "tool", "tool_call_id": call["id"], "content": book[start : start + each]}
                said.append(result)


if __name__ == "__main__":
    main()
