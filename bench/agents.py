"""An agent's recorded session of 20 turns, replayed against a model: what each turn reads, what of that it had read before.

python bench/agents.py MODEL.gguf -- --kvflash 2K -t 2          a server for each way: the full cache, and this pool by each policy
python bench/agents.py --tiny hybrid                            a tiny random model: dense, hybrid, sliding-window or mamba
python bench/agents.py --tiny hybrid -- --set checkpoint_limit=0

The session is tests/data/agent-session.json: calls of tools and their results, reasoning that is dropped with the next question, a
retry, a system line that changes, a compaction. Its messages are sent as they are recorded, whatever the model answers. What
follows -- goes to the server. "plain" is what a cache would read that goes back to wherever two prompts differ.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_bench.steps import hardware
from kvflash_bench.tables import markdown
from pyllama_kvflash.text import n_common
from served import Served, serving

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import agents, tiny

TINY = {"dense": "qwen3", "hybrid": "qwen35", "sliding-window": "gemma4", "mamba": "mamba"}
POLICIES = ("fresh", "qk", "lru")


class Asked:
    """A server that is asked turn after turn."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._text = np.zeros(0, np.int64)  # of the turn before

    def __call__(self, messages: agents.Messages) -> agents.Turn:
        """Take a turn."""
        prompt, begin = self._tokens(messages), time.perf_counter()
        found = self._server.post("/v1/chat/completions", agents.body(messages))
        seconds = time.perf_counter() - begin
        n_prompt, known = agents.usage(found)
        common, self._text = n_common(self._text, prompt[:-1]), prompt
        return agents.Turn(n_prompt, known, common, seconds)

    def _tokens(self, messages: agents.Messages) -> Any:
        text = self._server.post("/apply-template", agents.body(messages))["prompt"]
        return np.array(self._server.post("/tokenize", {"content": text, "parse_special": True})["tokens"])


@contextmanager
def served(model: Path, template: str, options: list[str]) -> Iterator[Asked]:
    """A server process with one sequence and nothing on disk, with a chat template."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(template)
        file.flush()
        given = ["-np", "1", "--prefix-cache", "off", "--chat-template-file", file.name]
        with serving(model, *given, *options) as server:
            yield Asked(server)


def show(turns: dict[str, list[agents.Turn]]) -> None:
    """Print the table: the tokens that each turn reads."""
    rows = [
        [i, row[0].kind, f"{row[0].n_prompt:,}", f"{row[0].plain:,}", *(f"{t.read:,}" for t in row)]
        for i, row in enumerate(zip(*turns.values(), strict=True), 1)
    ]
    first = next(iter(turns.values()))
    prompts, plain = (sum(of) for of in zip(*((t.n_prompt, t.plain) for t in first), strict=True))
    rows.append(["all", "", f"{prompts:,}", f"{plain:,}", *(f"{sum(t.read for t in ts):,}" for ts in turns.values())])
    rows.append(["seconds", "", "", "", *(f"{sum(t.seconds for t in ts):.1f}" for ts in turns.values())])
    print("\n" + markdown(["turn", "", "tokens", "plain", *turns], rows))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tiny", choices=TINY, help="in the place of a model")
    own, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    args, options = parser.parse_args(shlex.split(own)), shlex.split(more)
    if bool(args.model) == bool(args.tiny):
        parser.error("give a model, or --tiny")
    template = agents.TINY_TEMPLATE if args.tiny else agents.TEMPLATE
    print(f"{hardware()}\n{' '.join(sys.argv)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "tiny.gguf"
        if args.tiny:
            name = TINY[args.tiny]
            tiny.write_worded(model, name, tiny.MODELS[name])
        options = ["-c", "32768" if args.tiny else "16384", *options]
        ways = {"off": [*options, "--kvflash", "off"]}
        if args.tiny != "mamba":  # that cannot be pooled
            pool = options if "--kvflash" in options else [*options, "--kvflash", "2K"]
            ways |= {policy: [*pool, "--kvflash-policy", policy] for policy in POLICIES}
        turns = {}
        for name, given in ways.items():
            with served(model, template, given) as asked:
                turns[name] = agents.replay(asked)
    show(turns)


if __name__ == "__main__":
    main()
