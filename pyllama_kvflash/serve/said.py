"""What an answer says, piece by piece: its content, its reasoning, and the tools that it calls."""

from collections.abc import Iterable
from typing import Any

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Delta, Rendered, Reply
from pyllama_kvflash.serve.job import Finished

COMPLETE = {"eos", "stop"}
"""Reasons after which an answer is as long as the model meant it to be."""


class Said:
    """One answer as it grows. calls: those so far, each with id, name and arguments."""

    def __init__(self, rendered: Rendered | None) -> None:
        """rendered: the prompt, which says how to parse its answer; None: it is all content."""
        self._reply = Reply(rendered) if rendered and rendered.parser else None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[dict[str, str]] = []

    @property
    def content(self) -> str:
        """All of its content."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """All of its reasoning."""
        return "".join(self._reasoning)

    def push(self, text: str) -> list[Delta]:
        """Return what more text adds."""
        return self._kept(self._parsed(text, partial=True))

    def end(self, done: Finished) -> list[Delta]:
        """Return what was held back, at the end of the answer."""
        return self._kept(self._parsed("", partial=done.reason not in COMPLETE))

    def _parsed(self, text: str, *, partial: bool) -> list[Delta]:
        if self._reply is not None:
            try:
                return self._reply.push(text, partial=partial)
            except UsageError:  # not what the template asks for: from here on all is content
                self._reply = None
        return [Delta(text)] if text else []

    def _kept(self, deltas: Iterable[Delta]) -> list[Delta]:
        res = list(deltas)
        for delta in res:
            self._content.append(delta.content)
            self._reasoning.append(delta.reasoning)
            if call := delta.call:
                if call.index == len(self.calls):
                    self.calls.append({"id": call.id, "name": call.name, "arguments": ""})
                found = self.calls[call.index]
                found.update({"id": call.id or found["id"], "name": call.name or found["name"]})
                found["arguments"] += call.arguments
        return res


def call_objects(calls: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return calls as the OpenAI protocol has them."""
    return [
        {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls
    ]
