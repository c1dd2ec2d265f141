"""Objects of the OpenAI protocol that answer a request."""

import json
import secrets
import time
from typing import Any

from pyllama_kvflash.serve.job import Finished

_REASONS = {"eos": "stop", "stop": "stop", "interrupted": "stop", "length": "length", "context": "length"}


class Reply:
    """The answer to one request, whole or in chunks."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._same = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, done: Finished) -> dict[str, Any]:
        """Return the whole answer as one object."""
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": _REASONS[done.reason]}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._same, "object": kind, "choices": [choice], "usage": usage(done)}

    def first(self) -> bytes:
        """Return the event that begins a stream."""
        return self._chunk({"role": "assistant", "content": ""} if self._chat else "")

    def text(self, text: str) -> bytes:
        """Return an event with more of the text."""
        return self._chunk({"content": text} if self._chat else text)

    def last(self, done: Finished, *, include_usage: bool) -> bytes:
        """Return the events that end a stream."""
        res = self._chunk({} if self._chat else "", _REASONS[done.reason])
        if include_usage:
            res += event({**self._same, "object": self._kind, "choices": [], "usage": usage(done)})
        return res + DONE

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, delta: dict[str, Any] | str, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta" if self._chat else "text": delta, "logprobs": None, "finish_reason": reason}
        return event({**self._same, "object": self._kind, "choices": [choice]})


DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def comment(text: str) -> bytes:
    """Return a comment, which clients ignore and which keeps the connection alive."""
    return f": {text}\n\n".encode()


def usage(done: Finished) -> dict[str, Any]:
    """Return the token counts of a request."""
    return {
        "prompt_tokens": done.n_prompt,
        "completion_tokens": done.n_answer,
        "total_tokens": done.n_prompt + done.n_answer,
        "prompt_tokens_details": {"cached_tokens": done.n_cached},
    }
