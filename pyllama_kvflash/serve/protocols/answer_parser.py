"""Parses an answer as it grows: its content, its reasoning, and its tool calls."""

import json
from collections.abc import Collection, Iterable
from typing import Any

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Delta, Rendered, Reply
from pyllama_kvflash.serve.job import Finished
from pyllama_kvflash.serve.protocols.fields import is_object

COMPLETE = {"eos", "stop"}
"""Reasons for the end of an answer that mean that the model completed it."""


class AnswerParser:
    """One answer as it grows. calls: the tool calls so far, each with id, name and arguments."""

    def __init__(self, rendered: Rendered | None, stop: Collection[str] = ()) -> None:
        """rendered: the prompt, which knows the format of its answer; None: the answer is all content.

        stop: the client's stop strings. They may end the answer anywhere, even within a call.
        """
        self._reply = Reply(rendered) if rendered and rendered.parser else None
        self._stop = stop
        self._raw: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[dict[str, str]] = []

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def called(self, done: Finished) -> bool:
        """Whether the answer has ended with complete calls."""
        return bool(self.calls) and self._complete(done)

    def _complete(self, done: Finished) -> bool:
        return done.reason in COMPLETE and done.stop not in self._stop

    def push(self, text: str) -> list[Delta]:
        """Add text. Returns the new parts of the answer."""
        return self._kept(self._parsed(text, partial=True))

    def end(self, done: Finished) -> list[Delta]:
        """End the answer. Returns the parts that were held back."""
        cut_off = not self._complete(done) and (bool(self.calls) or done.reason not in COMPLETE)
        res = self._kept(self._parsed("", partial=cut_off))
        if not cut_off and self._reply:  # the parser may report half a call as a call, or drop it
            self.calls = [call for call in self.calls if is_object(call["arguments"])]
            if not self.calls and not self.reasoning and (rest := self._dropped()):
                res += self._kept([Delta(rest)])
        return res

    def _parsed(self, text: str, *, partial: bool) -> list[Delta]:
        self._raw.append(text)
        if self._reply is not None:
            try:
                return self._reply.push(text, partial=partial)
            except UsageError:  # not the template's format: the rest is content
                self._reply, text = None, self._unsent()
                self.calls = [call for call in self.calls if is_object(call["arguments"])]
        return [Delta(text)] if text else []

    def _dropped(self) -> str:
        """Return the raw text that follows the content; "" if the raw text does not begin with the content."""
        raw, content = "".join(self._raw).lstrip(), self.content.lstrip()
        return raw[len(content) :].rstrip() if raw.startswith(content) else ""

    def _unsent(self) -> str:
        """Return the raw text that follows the content sent so far or, without content, the reasoning sent so far."""
        raw = "".join(self._raw)
        for sent in (self.content, self.reasoning):
            if sent:
                return raw[raw.find(sent) + len(sent) :] if sent in raw else raw
        return raw

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


def arguments_of(call: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of a call; {} if the answer was cut off within them."""
    try:
        found = json.loads(call["arguments"])
        found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))  # without lone surrogates
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def call_objects(calls: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return calls in the form of the OpenAI protocol."""
    return [
        {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls
    ]
