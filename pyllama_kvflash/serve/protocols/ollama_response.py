"""Answers in the form of Ollama's API: whole objects, or lines of JSON."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pyllama_kvflash.native import Delta
from pyllama_kvflash.serve.job import Finished, Reading, Text, TokenLogprob
from pyllama_kvflash.serve.protocols.answer_parser import AnswerParser, arguments_of
from pyllama_kvflash.serve.protocols.fields import is_object
from pyllama_kvflash.serve.protocols.openai_response import chat_logprobs
from pyllama_kvflash.serve.protocols.protocol import PreparedRequest
from pyllama_kvflash.serve.protocols.reply import REASONS, Reply
from pyllama_kvflash.serve.protocols.request_error import RequestError
from pyllama_kvflash.text import to_json

MEDIA = "application/x-ndjson"


def error_body(err: RequestError) -> dict[str, Any]:
    """Return the error object to send."""
    return {"error": err.message}


def tagged(name: str) -> str:
    """Return a model's name with a tag: some clients add ":latest" to an untagged name, and then look for the tagged name."""
    return name if ":" in name else f"{name}:latest"


def moment(seconds: float | None = None) -> str:
    """Return a time in ISO 8601. seconds: the time since 1970; None: now."""
    found = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return found.isoformat(timespec="microseconds").replace("+00:00", "Z")


def loaded(name: str, key: str, *, unload: bool) -> dict[str, Any]:
    """Return the answer to a request that only loads the model, or unloads it. key: "message" or "response"."""
    said = {"role": "assistant", "content": ""} if key == "message" else ""
    reason = "unload" if unload else "load"
    return {"model": tagged(name), "created_at": moment(), key: said, "done": True, "done_reason": reason}


class ChatReply(Reply):
    """A Reply of /api/chat."""

    def __init__(self, model: str, found: PreparedRequest) -> None:
        """model: the model's name. found: the request."""
        super().__init__(tagged(model), found)
        self._logprobs: list[TokenLogprob] | None = None if found.parsed.sampling.n_probs is None else []

    def text(self, text: Text) -> bytes:
        """Add text to the answer."""
        if self._logprobs is not None:
            self._logprobs += text.logprobs
        said = [_said(delta) for delta in self._parser.push(text.text) if delta.call is None]
        if text.logprobs and not said:
            said = [("", "")]  # the parser holds the text back, but its tokens are sent
        return b"".join(self._line(*s, logprobs=() if i else text.logprobs) for i, s in enumerate(said))

    def end(self, done: Finished) -> bytes:
        """End the answer. Calls are sent here, since Ollama's protocol cannot send a call in parts."""
        res = b"".join(self._line(*_said(delta)) for delta in self._parser.end(done) if delta.call is None)
        answer, calls = self._parser, _calls(self._parser)
        said = self._content(answer.content, answer.reasoning, calls)
        logprobs = {} if self._logprobs is None else {"logprobs": _shown(self._logprobs)}
        self._whole = {**self._head(), **said, **_end(done), **logprobs}
        if calls:
            res += _json({**self._head(), **self._content("", "", calls), "done": False})
        return res + _json({**self._head(), **self._content("", "", ()), **_end(done)})

    def failed(self, err: RequestError) -> bytes:
        """End the stream after an error."""
        return _json(error_body(err))

    def reading(self, reading: Reading) -> bytes:  # noqa: ARG002 (the protocol has no line for it)
        """Keep the stream alive."""
        return self.alive()

    def alive(self) -> bytes:
        """Keep the stream alive with a space before the next line. JSON readers skip it; an empty line would break clients."""
        return b" "

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": moment()}

    def _content(self, content: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the part of a line that holds the answer; in /api/chat, this is a message."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}

    def _line(self, content: str, thinking: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        line = {**self._head(), **self._content(content, thinking, ()), "done": False}
        return _json({**line, "logprobs": _shown(logprobs)} if logprobs else line)


class GenerateReply(ChatReply):
    """A Reply of /api/generate."""

    def _content(self, content: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002 (there are no tools)
        return {"response": content, "thinking": thinking} if thinking else {"response": content}


def _said(delta: Delta) -> tuple[str, str]:
    """Return a delta's content and reasoning."""
    return delta.content, delta.reasoning


def _calls(answer: AnswerParser) -> list[dict[str, Any]]:
    """Return the complete calls. A call that was cut off is left out: its arguments would be sent as an object, and clients would run it."""
    return [
        {"id": call["id"], "function": {"index": i, "name": call["name"], "arguments": arguments_of(call)}}
        for i, call in enumerate(answer.calls)
        if is_object(call["arguments"])
    ]


def _shown(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = chat_logprobs(logprobs)["content"]
    return shown


def _end(done: Finished) -> dict[str, Any]:
    """Return the last line's fields: the reason, token counts, and times in nanoseconds. Time in the queue counts as loading."""
    read, answer = round(done.timing.read_s * 1e9), round(done.timing.answer_s * 1e9)
    load = max(0, round(done.seconds * 1e9) - read - answer)
    return {
        "done": True,
        "done_reason": REASONS[done.reason],
        "total_duration": load + read + answer,
        "load_duration": load,
        "prompt_eval_count": done.n_prompt,
        "prompt_eval_cached_count": done.n_cached,
        "prompt_eval_duration": read,
        "eval_count": done.n_answer,
        "eval_duration": answer,
    }


def _json(value: dict[str, Any]) -> bytes:
    return to_json(value).encode() + b"\n"
