"""The interface of a protocol: it parses requests, and writes their answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyllama_kvflash.serve.job import Finished, Reading, Text, Timing
from pyllama_kvflash.serve.protocols.answer_parser import AnswerParser
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, PreparedRequest, Served, TooLong
from pyllama_kvflash.serve.protocols.request_error import RequestError
from pyllama_kvflash.text import to_json

REASONS = {"eos": "stop", "stop": "stop", "interrupted": "stop", "length": "length", "context": "length"}
"""The words that the OpenAI and Ollama protocols use for the reasons of events.Done."""

_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
"""Escapes for the line breaks that JSON leaves as they are. They end no line of a stream, but some clients split a stream at them."""


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event. name: its type, if any."""
    head = f"event: {name}\n" if name else ""
    data = to_json(value, ensure_ascii=False, separators=(",", ":")).translate(_BREAKS)
    return f"{head}data: {data}\n\n".encode()


def timings(timing: Timing, n_prompt: int) -> dict[str, Any]:
    """Return the times of an answer in llama-server's form. n_prompt: tokens of the prompt, including cached ones."""
    res: dict[str, Any] = {"cache_n": n_prompt - timing.n_read}
    for name, n, seconds in (
        ("prompt", timing.n_read, timing.read_s),
        ("predicted", timing.n_answer, timing.answer_s),
    ):
        res |= {
            f"{name}_n": n,
            f"{name}_ms": round(seconds * 1e3, 3),
            f"{name}_per_token_ms": round(seconds * 1e3 / n, 3) if n else 0.0,
            f"{name}_per_second": round(n / seconds, 3) if seconds else 0.0,
        }
    if timing.n_drafted:
        res |= {"draft_n": timing.n_drafted, "draft_n_accepted": timing.n_accepted}
    return res


def progress(reading: Reading) -> dict[str, Any]:
    """Return how much of a prompt is read, in llama-server's form."""
    return {
        "total": reading.total,
        "cache": reading.cached,
        "processed": reading.done,
        "time_ms": round(reading.seconds * 1e3),
    }


class Reply(ABC):
    """The answers to one request, one after another, both as events of a stream and as one object.

    The methods return the bytes of their events. Comments, which clients ignore, keep a stream alive.
    """

    def __init__(self, model: str, found: PreparedRequest) -> None:
        """model: the model's name. found: the request."""
        self._model, self._found, self._n_prompt = model, found, len(found.tokens)
        self._parser = AnswerParser(found.rendered, found.parsed.stop)
        self._whole: dict[str, Any] = {}

    def first(self) -> bytes:
        """Begin the stream. By default, this sends no event."""
        return b""

    def reading(self, reading: Reading) -> bytes:
        """Report how much of the prompt is read."""
        return f": prefill {reading.done}/{reading.total}\n\n".encode()

    def alive(self) -> bytes:
        """Keep the stream alive while nothing happens."""
        return b": waiting\n\n"

    @abstractmethod
    def text(self, text: Text) -> bytes:
        """Add text to the answer."""

    @abstractmethod
    def end(self, done: Finished) -> bytes:
        """End the answer; another answer may follow."""

    def last(self) -> bytes:
        """End the stream. By default, this sends no event."""
        return b""

    def failed(self, err: RequestError) -> bytes:
        """End the stream after an error."""
        return event(err.body())

    def whole(self) -> dict[str, Any]:
        """Return all answers as one object, once they have ended."""
        return self._whole


@dataclass(frozen=True, slots=True)
class AnswerProtocol:
    """How a protocol's requests are parsed and answered.

    parse: checks a body; raises RequestError. reply: returns the Reply to a request, given the model's name.
    too_long: returns the error for a prompt that does not fit. media: the media type of a stream.
    """

    parse: Callable[[dict[str, Any], Served], ParsedRequest]
    reply: Callable[[str, PreparedRequest], Reply]
    too_long: Callable[[TooLong], RequestError] = TooLong.error
    media: str = "text/event-stream"
