"""Answers in the form of the Anthropic protocol: a message of content blocks, or events of a stream."""

import secrets
from typing import Any

from pyllama_kvflash.native import Delta
from pyllama_kvflash.serve.job import Finished, Reading, Text
from pyllama_kvflash.serve.protocols.answer_parser import AnswerParser, arguments_of
from pyllama_kvflash.serve.protocols.protocol import PreparedRequest, TooLong
from pyllama_kvflash.serve.protocols.reply import Reply, event
from pyllama_kvflash.serve.protocols.request_error import RequestError, invalid

_REASONS = {
    "eos": "end_turn",
    "stop": "end_turn",
    "interrupted": "end_turn",
    "length": "max_tokens",
    "context": "max_tokens",
}


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(err: RequestError) -> dict[str, Any]:
    """Return the error object to send."""
    usual = "api_error" if err.status >= 500 else "invalid_request_error"  # noqa: PLR2004
    return {"type": "error", "error": {"type": _TYPES.get(err.status, usual), "message": err.message}}


def too_long(err: TooLong) -> RequestError:
    """Return the error for a prompt that does not fit, in the words that clients of the protocol look for."""
    n = err.n_ctx + 1 if err.n is None else err.n
    return invalid(f"prompt is too long: {n} tokens > {err.n_ctx} maximum", "messages")


class AnthropicReply(Reply):
    """A Reply of the Anthropic protocol."""

    def __init__(self, model: str, found: PreparedRequest) -> None:
        """model: the model's name. found: the request."""
        super().__init__(model, found)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._block: tuple[str, int] | None = None  # the type of the open block, and the index of its call
        self._n_blocks = 0

    def first(self) -> bytes:
        """Begin the stream."""
        usage = {"input_tokens": self._n_prompt, "output_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage))

    def text(self, text: Text) -> bytes:
        """Add text to the answer."""
        return b"".join(self._delta(delta) for delta in self._parser.push(text.text))

    def end(self, done: Finished) -> bytes:
        """End the answer."""
        res = b"".join(self._delta(delta) for delta in self._parser.end(done)) + self._closed()
        reason, stop = self._reason(done)
        self._whole = self._message(_content(self._parser), reason, stop, _usage(done))
        return res + _event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=_usage(done))

    def last(self) -> bytes:
        """End the stream."""
        return _event("message_stop")

    def failed(self, err: RequestError) -> bytes:
        """End the stream after an error."""
        return event(error_body(err), "error")

    def reading(self, reading: Reading) -> bytes:  # noqa: ARG002 (the protocol has no event for it)
        """Keep the stream alive."""
        return self.alive()

    def alive(self) -> bytes:
        """Keep the stream alive with an event that clients know."""
        return _event("ping")

    def _message(
        self, content: list[Any], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _reason(self, done: Finished) -> tuple[str, str | None]:
        """Return why the answer ended and, if a stop string of the client ended it, that string."""
        if self._parser.called(done):
            return "tool_use", None
        if done.stop in self._found.parsed.stop:
            return "stop_sequence", done.stop
        return _REASONS[done.reason], None

    #
    # blocks
    #

    def _delta(self, delta: Delta) -> bytes:
        if call := delta.call:
            start = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            more = {"type": "input_json_delta", "partial_json": call.arguments}
            return self._in_block(("tool_use", call.index), start, more)
        if delta.reasoning:
            start = {"type": "thinking", "thinking": "", "signature": ""}
            return self._in_block(("thinking", 0), start, {"type": "thinking_delta", "thinking": delta.reasoning})
        return self._in_block(("text", 0), {"type": "text", "text": ""}, {"type": "text_delta", "text": delta.content})

    def _in_block(self, block: tuple[str, int], start: dict[str, Any], more: dict[str, Any]) -> bytes:
        res = b""
        if block != self._block:
            res = self._closed() + _event("content_block_start", index=self._n_blocks, content_block=start)
            self._block = block
        return res + _event("content_block_delta", index=self._n_blocks, delta=more)

    def _closed(self) -> bytes:
        if self._block is None:
            return b""
        self._block, self._n_blocks = None, self._n_blocks + 1
        return _event("content_block_stop", index=self._n_blocks - 1)


def _content(answer: AnswerParser) -> list[dict[str, Any]]:
    """Return the blocks of a whole answer."""
    res: list[dict[str, Any]] = []
    if answer.reasoning:
        res.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        res.append({"type": "text", "text": answer.content})
    return res + [
        {"type": "tool_use", "id": c["id"], "name": c["name"], "input": arguments_of(c)} for c in answer.calls
    ]


def _usage(done: Finished) -> dict[str, int]:
    return {
        "input_tokens": done.n_prompt - done.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.n_cached,
        "output_tokens": done.n_answer,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
