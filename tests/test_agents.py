"""An agent's turns, by a server: what is read again when a conversation goes another way, and two agents by turns."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import agents, serving, tiny
from support.agents import Messages, Turn
from support.changes import ENGINE, SERVE
from support.serving import Running, between_turns

from pyllama_kvflash import KVFlash
from pyllama_kvflash.serve.scheduler import Scheduler
from pyllama_kvflash.snapshot.cache import PrefixCache
from pyllama_kvflash.text import n_common

pytestmark = pytest.mark.native

environment = serving.environment
KINDS = {"dense": "qwen3", "hybrid": "qwen35", "sliding window": "gemma4", "mamba": "mamba"}
SMALL: dict[str, Any] = {"n_ctx": 12288, "pool": 2048, "n_batch": 256, "n_ubatch": 256, "n_threads": 1}
OPENER = 7  # tokens of the beginning of an answer, "[MASK]assistant\n": a checkpoint is before it
CHUNK = 64


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a kind of memory, with a vocabulary."""
    folder = tmp_path_factory.mktemp("kinds")

    def path(kind: str) -> Path:
        res = folder / f"{kind}.gguf"
        if not res.exists():
            tiny.write_worded(res, KINDS[kind], tiny.MODELS[KINDS[kind]])
        return res

    return path


class Agents:
    """A server, and what its sequences had before each turn."""

    def __init__(self, server: Running) -> None:
        self._server = server

    def texts(self) -> list[np.ndarray[Any, Any]]:
        """The tokens of each sequence."""
        return between_turns(self._server.scheduler, lambda seq: seq.tokens)

    def ask(self, messages: Messages) -> Turn:
        """Take a turn. What is common is what the sequence had that has most of the prompt."""
        before = self.texts()
        res = self._server.post(agents.body(messages), "/v1/chat/completions")
        assert res.status_code == 200, res.text
        n_prompt, known = agents.usage(res.json())
        changed = [t for t, old in zip(self.texts(), before, strict=True) if not np.array_equal(t, old)]
        prompt = (changed or before)[0][:n_prompt]  # a retry is answered as before
        return Turn(n_prompt, known, max(n_common(text, prompt[:-1]) for text in before))


@contextmanager
def served(path: Path, cache: PrefixCache | None = None, **options: Any) -> Iterator[Agents]:
    def open_(progress: Callable[[float], None]) -> KVFlash:
        return KVFlash.from_file(path, progress=progress, **{**SMALL, **options})

    scheduler = Scheduler(open_, n_queue=8, cache=cache, cache_min=64)
    with Running(scheduler, template=agents.TINY_TEMPLATE, webui=False) as server:
        yield Agents(server)


@pytest.fixture(scope="module")
def alone(paths: Callable[[str], Path]) -> Callable[[str], list[int]]:
    """How many tokens a server of a kind reads of each of three turns, if it has one agent."""

    @functools.cache
    def reads(kind: str) -> list[int]:
        with served(paths(kind)) as server:
            return [turn.read for turn in agents.replay(server.ask, 3)]

    return reads


def check_turns(kind: str, turns: list[Turn]) -> None:
    """Dense models read nothing again. Others read from the last checkpoint on: the beginning of an answer, since a checkpoint is
    before it, and all where the first message is another one, since the first checkpoint is at its end.
    """
    for i, turn in enumerate(turns):
        where = f"turn {i + 1}, {turn}"
        if kind == "dense":
            assert turn.known == (turn.common if turn.common > 1 else 0), where
        elif turn.kind == "system":
            assert turn.known == 0, where
        else:
            assert turn.again <= OPENER, where


@pytest.mark.nightly(SERVE, ENGINE)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hybrid", {}), ("sliding window", {}), ("sliding window", {"pool": "off"}), ("hybrid", {"pool": "off"}),
        ("dense", {}), ("dense", {"policy": "qk"}), ("dense", {"policy": "lru"}), ("dense", {"pool": "off"}), ("mamba", {"pool": "off"}),
    ],
    ids=str,
)  # fmt: skip
def test_no_token_is_read_again_without_need(paths: Callable[[str], Path], kind: str, options: dict[str, Any]) -> None:
    """In a session of calls, dropped reasoning, a retry, another system line and a compaction."""
    with served(paths(kind), **options) as server:
        turns = agents.replay(server.ask)
        check_turns(kind, turns)
        assert {turn.kind for turn in turns} == {"start", "tool", "question", "retry", "system", "compact"}
        assert len(turns) == 20
        by_kind = {turn.kind: turn for turn in turns}
        assert by_kind["compact"].known > 1000, "the system message and the tools stay"
        assert by_kind["question"].known > 1000


#
# two agents by turns
#


def another(messages: Messages) -> Messages:
    """The same conversation of another agent: the same system message and tools, other questions."""
    return [{**m, "content": f"In the other project: {m['content']}"} if m["role"] == "user" else m for m in messages]


def by_turns(server: Agents, n: int) -> dict[str, list[Turn]]:
    """Two agents that begin with the same system message, each with n turns."""
    res: dict[str, list[Turn]] = {"one": [], "other": []}
    for _, messages in list(agents.conversations())[:n]:
        res["one"].append(server.ask(messages))
        res["other"].append(server.ask(another(messages)))
    return res


@pytest.mark.parametrize("kind", ["dense", pytest.param("hybrid", marks=pytest.mark.nightly(SERVE))])
def test_two_agents_on_two_sequences_keep_their_own(
    paths: Callable[[str], Path], alone: Callable[[str], list[int]], kind: str
) -> None:
    """Though they share more than their conversations are long, at first. Each is read as if it were alone."""
    with served(paths(kind), n_parallel=2) as server:
        both = by_turns(server, 3)
    assert [turn.read for turn in both["one"]] == alone(kind)
    for turns in both.values():
        assert turns[0].known == 0, "the second agent takes the empty sequence"
        for turn in turns[1:]:
            assert turn.again <= (0 if kind == "dense" else OPENER)


@pytest.mark.nightly(SERVE, ENGINE)
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_two_agents_on_one_sequence(
    paths: Callable[[str], Path], alone: Callable[[str], list[int]], kind: str, tmp_path: Path
) -> None:
    """What they share stays in memory; the rest of each comes back from disk, all but the end of a chunk and a beginning of an
    answer. Without a disk it is read again.
    """
    with served(paths(kind), n_parallel=1) as server:
        for turn in [turn for turns in by_turns(server, 2).values() for turn in turns][1:]:
            assert 1000 < turn.known < 1700, "the system message and the tools"
    with served(paths(kind), PrefixCache(tmp_path, 1 << 30), n_parallel=1, snapshots=True) as server:
        both = by_turns(server, 3)
    again = {"dense": 0, "hybrid": OPENER}[kind]
    for turn, read in zip(both["one"][1:], alone(kind)[1:], strict=True):
        assert turn.read <= read + CHUNK + again
