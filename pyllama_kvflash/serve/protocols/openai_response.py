"""Answers in the form of the OpenAI protocol: whole objects, or events of a stream."""

import codecs
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pyllama_kvflash.native import Delta
from pyllama_kvflash.serve.job import Finished, Reading, Text, Timing, TokenLogprob
from pyllama_kvflash.serve.protocols.answer_parser import AnswerParser, call_objects
from pyllama_kvflash.serve.protocols.protocol import PreparedRequest
from pyllama_kvflash.serve.protocols.reply import REASONS, Reply, event, progress, timings
from pyllama_kvflash.serve.protocols.request_error import RequestError

DONE = b"data: [DONE]\n\n"


class OpenAIReply(Reply):
    """A Reply of the OpenAI protocol: to a chat or, if the prompt was not rendered, to a completion."""

    def __init__(self, model: str, found: PreparedRequest) -> None:
        """model: the model's name. found: the request."""
        super().__init__(model, found)
        self._chat = found.rendered is not None
        self._same = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._choices: list[dict[str, Any]] = []
        self._ends: list[Finished] = []
        self._begin()

    def _begin(self) -> None:
        """Begin an answer."""
        self._parser = AnswerParser(self._found.rendered, self._found.parsed.stop)
        self._logprobs: list[TokenLogprob] = []  # of the answer's tokens
        self._offsets = _Offsets()  # of the tokens that were sent
        self._opened = False

    def first(self) -> bytes:
        """Begin the stream."""
        return self._opening()

    def text(self, text: Text) -> bytes:
        """Add text to the answer."""
        found = self._parser.push(text.text)
        deltas: list[dict[str, Any] | str] = [_delta(delta) for delta in found] if self._chat else [text.text]
        each = text.timing if self._found.parsed.timings_per_token else None
        if text.logprobs and not deltas:
            deltas = [{"content": ""}]  # the parser holds the text back, but its tokens are sent
        res = self._opening() + b"".join(
            self._chunk(d, logprobs=() if i else text.logprobs, timing=each) for i, d in enumerate(deltas)
        )
        self._logprobs += text.logprobs
        return res

    def end(self, done: Finished) -> bytes:
        """End the answer; another answer may follow."""
        res = self._opening()
        if self._chat:
            res += b"".join(self._chunk(_delta(delta)) for delta in self._parser.end(done))
        reason = "tool_calls" if self._parser.called(done) else REASONS[done.reason]
        res += self._chunk({} if self._chat else "", reason, timing=done.timing)
        self._choices.append(self._choice(reason))
        self._ends.append(done)
        self._begin()
        kind = "chat.completion" if self._chat else "text_completion"
        times = timings(self._ends[0].timing, self._n_prompt)  # of the first answer, which read the prompt
        usage = self._usage()
        self._whole = {**self._same, "object": kind, "choices": self._choices, "usage": usage, "timings": times}
        return res

    def last(self) -> bytes:
        """End the stream."""
        usage = {**self._same, "object": self._kind, "choices": [], "usage": self._usage()}
        return (event(usage) if self._found.parsed.include_usage else b"") + DONE

    def failed(self, err: RequestError) -> bytes:
        """End the stream after an error."""
        return event(err.body()) + DONE

    def reading(self, reading: Reading) -> bytes:
        """Report how much of the prompt is read: in an event if the request asks for it, else in a comment, which clients ignore."""
        if self._found.parsed.return_progress:
            delta: dict[str, Any] | str = {"role": "assistant", "content": None} if self._chat else ""
            return self._chunk(delta, more={"prompt_progress": progress(reading)})
        return super().reading(reading)

    def _choice(self, reason: str) -> dict[str, Any]:
        answer = self._parser
        content: dict[str, Any] = {"text": answer.content}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
            if answer.calls:
                message |= {"content": answer.content or None, "tool_calls": call_objects(answer.calls)}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            content = {"message": message}
        shown = self._probs(self._logprobs, _Offsets())
        return {"index": len(self._choices), **content, "logprobs": shown, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        n_prompt = self._ends[0].n_prompt
        n_answer = sum(done.n_answer for done in self._ends)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
            "prompt_tokens_details": {"cached_tokens": self._ends[0].n_cached},
        }

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _opening(self) -> bytes:
        """Return the event that begins an answer, once."""
        if self._opened:
            return b""
        self._opened = True
        return self._chunk({"role": "assistant", "content": ""} if self._chat else "")

    def _chunk(
        self,
        delta: dict[str, Any] | str,
        reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        *,
        timing: Timing | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return an event. timing: the times to show, if any. more: further fields."""
        shown = self._probs(logprobs, self._offsets) if logprobs else None
        key, index = "delta" if self._chat else "text", len(self._choices)
        choice = {"index": index, key: delta, "logprobs": shown, "finish_reason": reason}
        timed = {} if timing is None else {"timings": timings(timing, self._n_prompt)}
        return event({**self._same, "object": self._kind, "choices": [choice], **timed, **(more or {})})

    def _probs(self, logprobs: Sequence[TokenLogprob], offsets: "_Offsets") -> dict[str, Any] | None:
        """Return the log probabilities in the protocol's form; None if they were not requested. offsets: where tokens begin."""
        if self._found.parsed.sampling.n_probs is None:
            return None
        return chat_logprobs(logprobs) if self._chat else _text_logprobs(logprobs, offsets)


def _delta(delta: Delta) -> dict[str, Any]:
    if call := delta.call:
        function = {"name": call.name, "arguments": call.arguments} if call.name else {"arguments": call.arguments}
        return {"tool_calls": [{"index": call.index, **_named(call.id), "function": function}]}
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}


def _named(call_id: str) -> dict[str, str]:
    return {"id": call_id, "type": "function"} if call_id else {}


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log probabilities in the form that a chat has."""

    def shown(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}

    return {"content": [{**shown(t), "top_logprobs": [shown(top) for top in t.top]} for t in logprobs], "refusal": None}


class _Offsets:
    """Counts where the tokens of an answer begin in its text. A token that has part of a character begins where the character does."""

    def __init__(self) -> None:
        self._decoder, self._n = codecs.getincrementaldecoder("utf-8")("replace"), 0

    def add(self, data: bytes) -> int:
        """Return where in the answer's text the next token begins. data: the token's bytes."""
        start = self._n
        self._n += len(self._decoder.decode(data))
        return start


def _text_logprobs(logprobs: Sequence[TokenLogprob], offsets: _Offsets) -> dict[str, Any]:
    """Return log probabilities in the form that a completion has."""
    return {
        "tokens": [_named_by_bytes(t) for t in logprobs],
        "token_logprobs": [t.logprob for t in logprobs],
        "top_logprobs": [{_named_by_bytes(top): top.logprob for top in t.top} for t in logprobs],
        "text_offset": [offsets.add(t.data) for t in logprobs],
    }


def _named_by_bytes(token: TokenLogprob) -> str:
    """Return a token's text or, if the token cuts a character, the token's bytes, as OpenAI does."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
