"""Answers in the form of llama-server's /completion and /infill."""

from collections.abc import Sequence
from typing import Any

from pyllama_kvflash.serve.job import Finished, Reading, Text, Timing, TokenLogprob
from pyllama_kvflash.serve.protocols.protocol import PreparedRequest
from pyllama_kvflash.serve.protocols.reply import Reply, event, progress, timings

_STOPS = {"eos": "eos", "stop": "word", "length": "limit", "context": "limit", "interrupted": "none"}


class LlamaReply(Reply):
    """A Reply in llama-server's form: a request has one answer."""

    def __init__(self, model: str, found: PreparedRequest) -> None:
        """model: the model's name. found: the request."""
        super().__init__(model, found)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def reading(self, reading: Reading) -> bytes:
        """Report how much of the prompt is read."""
        if not self._found.parsed.return_progress:
            return super().reading(reading)
        return event({**self._part("", Timing()), "prompt_progress": progress(reading)})

    def text(self, text: Text) -> bytes:
        """Add text to the answer."""
        self._text.append(text.text)
        self._logprobs += text.logprobs
        part = self._part(text.text, text.timing)
        if text.logprobs:
            part["completion_probabilities"] = [_shown(t) for t in text.logprobs]
        if self._found.parsed.timings_per_token:
            part["timings"] = timings(text.timing, self._n_prompt)
        return event(part)

    def end(self, done: Finished) -> bytes:
        """End the answer."""
        content, parsed = "".join(self._text), self._found.parsed
        self._whole = {
            **self._part("" if parsed.stream else content, done.timing),
            "model": self._model,
            "stop": True,
            "stop_type": _STOPS[done.reason],
            "stopping_word": done.stop or "",
            "truncated": False,
            "has_new_line": "\n" in content,
            "tokens_cached": done.n_prompt + done.n_answer,
            "timings": timings(done.timing, self._n_prompt),
        }
        if self._logprobs and not parsed.stream:
            self._whole["completion_probabilities"] = [_shown(t) for t in self._logprobs]
        return event(self._whole)

    def whole(self) -> dict[str, Any]:
        """Return the answer as an object."""
        wanted = self._found.parsed.extra
        return _picked(self._whole, wanted) if wanted else self._whole

    def _part(self, content: str, timing: Timing) -> dict[str, Any]:
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": self._found.parsed.id_slot,
            "stop": False,
            "tokens_predicted": timing.n_answer,
            "tokens_evaluated": self._n_prompt,
        }


def _shown(token: TokenLogprob) -> dict[str, Any]:
    """Return the log probabilities of a token and of the likeliest tokens at its place."""

    def one(t: TokenLogprob) -> dict[str, Any]:
        return {"id": t.id, "token": t.text, "bytes": list(t.data), "logprob": t.logprob}

    return {**one(token), "top_logprobs": [one(t) for t in token.top]}


def _picked(value: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Return the wanted fields, each under the last part of its path, as llama-server does. Missing fields are left out."""
    res = {}
    for path in wanted:
        found: Any = value
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            res[path.rpartition("/")[2]] = found
    return res
