"""Answers in the form of OpenAI's Responses API: a response of output items, or events of a stream."""

import time
from typing import Any

from pyllama_kvflash.native import Delta
from pyllama_kvflash.serve.job import Finished, Reading, Text
from pyllama_kvflash.serve.protocols.answer_parser import AnswerParser
from pyllama_kvflash.serve.protocols.fields import is_object
from pyllama_kvflash.serve.protocols.protocol import PreparedRequest
from pyllama_kvflash.serve.protocols.reply import Reply, event
from pyllama_kvflash.serve.protocols.request_error import RequestError
from pyllama_kvflash.serve.protocols.responses_request import Asked, not_kept, packed
from pyllama_kvflash.serve.protocols.responses_store import Kept, ResponseStore, item_id, new_id

_EVENT_SECONDS = 30.0  # of silence, after which an event says that the response is still in progress
_CUT_OFF = {"length", "context"}
"""Reasons that make a response incomplete."""


class ResponsesReply(Reply):
    """A Reply of the Responses API."""

    def __init__(self, model: str, found: PreparedRequest) -> None:
        """model: the model's name. found: the request."""
        super().__init__(model, found)
        self._asked: Asked = found.parsed.extra
        self._same = {
            **self._asked.echo,
            "id": new_id(),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "temperature": found.sampling.temperature,
            "top_p": found.sampling.top_p,
        }
        self._id = str(self._same["id"])
        self._items: list[_Item] = []
        self._open: _Item | None = None  # the last of them
        self._n_events = 0
        self._last_event = time.monotonic()
        self._n_reasoning = 0  # tokens
        self._whole = self._object("in_progress")

    def first(self) -> bytes:
        """Begin the stream."""
        return self._event("response.created", response=self._whole) + self._event(
            "response.in_progress", response=self._whole
        )

    def text(self, text: Text) -> bytes:
        """Add text to the answer."""
        deltas = self._parser.push(text.text)
        if any(delta.reasoning for delta in deltas):
            self._n_reasoning = text.timing.n_answer
        return b"".join(self._delta(delta) for delta in deltas)

    def end(self, done: Finished) -> bytes:
        """End the answer, and store the response."""
        res = b"".join(self._delta(delta) for delta in self._parser.end(done))
        if not self._items:
            res += self._begun(_Item(self._id, 0, ("msg", 0), self._parser, self._asked))
        status = "incomplete" if done.reason in _CUT_OFF else "completed"
        res += self._ended(status)
        output = [item.object() for item in self._items if item.is_in(self._parser)]
        self._whole = self._object(status, output, self._usage(done))
        if self._asked.store is not None:
            self._asked.store.keep(Kept(self._asked.items, self._whole))
        return res + self._event(f"response.{status}", response=self._whole)

    def failed(self, err: RequestError) -> bytes:
        """End the stream after an error."""
        code = "server_error" if err.status >= 500 else "invalid_prompt"  # noqa: PLR2004
        output = [item.object() for item in self._items]
        response = {**self._object("failed", output), "error": {"code": code, "message": err.message}}
        return self._event("response.failed", response=response)

    def reading(self, reading: Reading) -> bytes:
        """Report in a comment, which clients ignore, how much of the prompt is read."""
        return super().reading(reading) + self._still()

    def alive(self) -> bytes:
        """Keep the stream alive with a comment."""
        return super().alive() + self._still()

    def _still(self) -> bytes:
        """Return an event if the last one was long ago, since Codex gives up on a stream that has only comments."""
        if time.monotonic() - self._last_event < _EVENT_SECONDS:
            return b""
        return self._event("response.in_progress", response=self._whole)

    def _object(
        self, status: str, output: list[dict[str, Any]] | None = None, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the response as it is now."""
        return {
            **self._same,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output or [],
            "usage": usage,
        }

    def _usage(self, done: Finished) -> dict[str, Any]:
        return {
            "input_tokens": done.n_prompt,
            "input_tokens_details": {"cached_tokens": done.n_cached, "cache_write_tokens": 0},
            "output_tokens": done.n_answer,
            "output_tokens_details": {"reasoning_tokens": self._n_reasoning},
            "total_tokens": done.n_prompt + done.n_answer,
        }

    #
    # items
    #

    def _delta(self, delta: Delta) -> bytes:
        """Add to the open item, or begin another item."""
        call, res = delta.call, b""
        more = call.arguments if call else delta.reasoning or delta.content
        key = ("fc", call.index) if call else ("rs" if delta.reasoning else "msg", 0)
        if not call and not more:
            return b""
        if self._open is None or self._open.key != key:
            res = self._ended("completed") + self._begun(
                _Item(self._id, len(self._items), key, self._parser, self._asked)
            )
        item = self._items[-1]
        item.text += more
        return res + (self._event(f"{item.name}.delta", delta=more, **item.likely, **item.place) if more else b"")

    def _begun(self, item: "_Item") -> bytes:
        self._open = item
        self._items.append(item)
        res = self._event("response.output_item.added", output_index=item.index, item=item.object())
        if part := item.part():
            res += self._event("response.content_part.added", part=part, **item.place)
        return res

    def _ended(self, status: str) -> bytes:
        """End the open item."""
        if self._open is None:
            return b""
        item, self._open = self._open, None
        item.end(status)
        res = self._event(f"{item.name}.done", **item.whole, **item.place)
        if part := item.part():
            res += self._event("response.content_part.done", part=part, **item.place)
        return res + self._event("response.output_item.done", output_index=item.index, item=item.object())

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._n_events += 1
        self._last_event = time.monotonic()
        return event({"type": kind, "sequence_number": self._n_events - 1, **fields}, kind)


_NAMES = {
    "msg": "response.output_text",
    "rs": "response.reasoning_text",
    "fc": "response.function_call_arguments",
}
"""Names of the events with an item's text, by its kind."""


class _Item:
    """An output item as it grows. key: the item's kind (msg, rs or fc), and for fc the index of the call, else 0. text: the text so far."""

    def __init__(self, response: str, index: int, key: tuple[str, int], parser: AnswerParser, asked: Asked) -> None:
        self.key, self.index = key, index
        self.text = ""
        self._id, self._status, self._packed = item_id(key[0], response, index), "in_progress", asked.packed
        self._call = parser.calls[key[1]] if key[0] == "fc" else None

    @property
    def name(self) -> str:
        """The name, without .delta or .done, of the events that carry the item's text."""
        return _NAMES[self.key[0]]

    @property
    def place(self) -> dict[str, Any]:
        """The fields that say which part of the response an event is about."""
        res = {"item_id": self._id, "output_index": self.index}
        return res if self._call else {**res, "content_index": 0}

    @property
    def likely(self) -> dict[str, Any]:
        """The field of log probabilities, which events with an answer's text must have. It is empty, since none can be requested."""
        return {"logprobs": []} if self.key[0] == "msg" else {}

    @property
    def whole(self) -> dict[str, Any]:
        """The fields that hold the whole text in the text's last event."""
        if self._call:
            return {"name": self._call["name"], "arguments": self.text}
        return {"text": self.text, **self.likely}

    def end(self, status: str) -> None:
        """End the item. status: ignored for a call, which is complete if its arguments are complete."""
        self._status = status if self._call is None else "completed" if is_object(self.text) else "incomplete"

    def is_in(self, parser: AnswerParser) -> bool:
        """Whether the item is part of the answer: the parser may have dropped a broken call."""
        return self._call is None or any(call is self._call for call in parser.calls)

    def part(self) -> dict[str, Any] | None:
        """Return the item's content; None: a call has no content."""
        match self.key[0]:
            case "msg":
                return {"type": "output_text", "text": self.text, "annotations": [], **self.likely}
            case "rs":
                return {"type": "reasoning_text", "text": self.text}
        return None

    def object(self) -> dict[str, Any]:
        """Return the item as it is now."""
        res = {"id": self._id, "status": self._status}
        content = [] if self._status == "in_progress" else [self.part()]
        if self._call:
            named = {"call_id": self._call["id"], "name": self._call["name"], "arguments": self.text}
            return {"type": "function_call", **res, **named}
        if self.key[0] == "msg":
            return {"type": "message", **res, "role": "assistant", "content": content}
        sealed = {"encrypted_content": packed(self.text)} if self._packed else {}
        return {"type": "reasoning", **res, "summary": [], "content": content, **sealed}


def shown(store: ResponseStore, name: str) -> dict[str, Any]:
    """Return a stored response, for GET. Raises RequestError."""
    kept = store.get(name)
    if kept is None:
        raise not_kept(name, "ask again")
    return kept.response


def deleted(store: ResponseStore, name: str) -> dict[str, Any]:
    """Delete a stored response, and return the answer to DELETE. Raises RequestError."""
    if not store.delete(name):
        raise not_kept(name, "there is nothing to delete")
    return {"id": name, "object": "response", "deleted": True}
