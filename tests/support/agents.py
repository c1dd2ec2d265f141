"""An agent's session, recorded as the messages of its turns, and what a server reads of each."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
SESSION = json.loads((DATA / "agent-session.json").read_text("utf-8"))
TEMPLATE = (DATA / "agent.jinja").read_text("utf-8")
TINY_TEMPLATE = TEMPLATE.replace("<|im_start|>", "[MASK]").replace("<|im_end|>", "[END]")
"""With the special tokens of tiny.worded."""

Messages = list[dict[str, Any]]


def conversations() -> Iterator[tuple[str, Messages]]:
    """The kind of each turn, and the whole conversation that it sends.

    start and compact begin one; tool adds a call and its result, question an answer and the next question, without the reasoning
    of all answers so far; retry sends the same once more; system has another system message.
    """
    messages: Messages = []
    for turn in SESSION["turns"]:
        if turn["kind"] in {"start", "compact"}:
            messages = []
        messages = [*messages, *turn.get("add", [])]
        if "system" in turn:
            messages[0] = {**messages[0], "content": turn["system"]}
        if turn.get("drop_reasoning"):
            messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
        yield turn["kind"], messages


def body(messages: Messages, **more: Any) -> dict[str, Any]:
    """A turn as a request."""
    return {"messages": messages, "tools": SESSION["tools"], "max_tokens": 8, "temperature": 0, **more}


@dataclass(frozen=True)
class Turn:
    """What came of a turn. known: tokens that were not read. common: those that the sequence had at the same place."""

    n_prompt: int
    known: int
    common: int
    seconds: float = 0.0
    kind: str = ""

    @property
    def read(self) -> int:
        """Tokens that were read."""
        return self.n_prompt - self.known

    @property
    def plain(self) -> int:
        """Tokens that a cache reads that goes back to wherever two texts differ."""
        return self.n_prompt - self.common

    @property
    def again(self) -> int:
        """Of these, those that the sequence had at the same place."""
        return max(0, self.common - self.known)


def replay(ask: Callable[[Messages], Turn], end: int | None = None) -> list[Turn]:
    """Ask each turn of the session, up to one."""
    return [replace(ask(messages), kind=kind) for kind, messages in list(conversations())[:end]]


def usage(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of a prompt, and those of them that were not read."""
    return answer["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
