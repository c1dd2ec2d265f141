"""Turns the body of a request into the prompt of a job."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pyllama_kvflash.chat.engine import ChatTemplate, tokenize_chat
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import KVFlashError, encoded
from pyllama_kvflash.native import Rendered, Sampling, check_ends, check_grammar
from pyllama_kvflash.serve.protocols import anthropic_request, openai_request
from pyllama_kvflash.serve.protocols.fields import Unknown, parse_json
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, PreparedRequest, Served, TooLong
from pyllama_kvflash.serve.protocols.reply import AnswerProtocol
from pyllama_kvflash.serve.protocols.request_error import invalid
from pyllama_kvflash.serve.protocols.responses_store import ResponseStore
from pyllama_kvflash.serve.settings import Settings

_PIECE = 1 << 18  # characters of a piece: longer texts are counted piece by piece
_SLACK = 1.1, 64  # factor, and tokens per piece, by which the sum over the pieces may differ from the whole


class PromptBuilder:
    """Turns the bodies of requests into prompts. Several threads may share one."""

    def __init__(self, settings: Settings, responses: ResponseStore) -> None:
        """responses: the stored responses, which a request may continue."""
        self._settings, self._responses = settings, responses
        self._template: ChatTemplate | None = None

    def prepare(self, kv: KVFlash, body: bytes, protocol: AnswerProtocol) -> PreparedRequest:
        """Check a body, then render and tokenize its prompt. Raises RequestError."""
        served = self._served(kv)
        parsed = protocol.parse(parse_json(body), served)
        try:
            found = self._chat(kv, parsed) if parsed.messages else _completion(kv, parsed)
            _check_length(len(found.tokens), kv.options.n_ctx)
        except KVFlashError as err:
            raise invalid(str(err), "messages" if parsed.messages else "prompt") from None
        except TooLong as err:
            raise protocol.too_long(err) from None
        _compile(kv, found.sampling, _grammar_field(parsed))
        return replace(found, warnings=(*found.warnings, *served.unknown.warnings))

    def apply_template(self, kv: KVFlash, given: dict[str, Any]) -> dict[str, Any]:
        """Answer POST /apply-template: the prompt of a chat, as text. Raises RequestError."""
        return {"prompt": self._rendered(kv, openai_request.chat(given, self._served(kv))).prompt}

    def count(self, kv: KVFlash, given: dict[str, Any]) -> dict[str, int]:
        """Answer POST /v1/messages/count_tokens: a prompt's number of tokens, even if it exceeds the context. Raises RequestError."""
        parsed = anthropic_request.parse(given, self._served(kv), counting=True)
        prompt = self._rendered(kv, parsed).prompt
        encoded(prompt, "the conversation")
        short = len(prompt) <= _PIECE  # tokenizing all at once takes 75 bytes of memory per character
        return {"input_tokens": len(tokenize_chat(kv.model, prompt)) if short else sum(_lengths(kv, prompt))}

    def _served(self, kv: KVFlash) -> Served:
        s = self._settings
        return Served(kv, s.name, s.sampling, Unknown(strict=s.strict), self._responses)

    def caps(self, kv: KVFlash) -> dict[str, bool]:
        """Return what the chat template supports, by llama.cpp's names; {} if llama.cpp cannot read the template."""
        try:
            return self._chat_template(kv).caps
        except KVFlashError:
            return {}

    def _chat_template(self, kv: KVFlash) -> ChatTemplate:
        self._template = self._template or ChatTemplate(kv.model, self._settings.template)
        return self._template

    def _rendered(self, kv: KVFlash, parsed: ParsedRequest) -> Rendered:
        template = self._chat_template(kv)
        asked: dict[str, Any] = {"chat_template_kwargs": parsed.chat_template_kwargs}
        if parsed.tools:
            asked |= {"tools": list(parsed.tools), "tool_choice": parsed.tool_choice}
            asked["parallel_tool_calls"] = (
                template.calls_at_once if parsed.parallel_tool_calls is None else parsed.parallel_tool_calls
            )
        if parsed.schema is not None:
            asked["json_schema"] = parsed.schema
        if "enable_thinking" in parsed.chat_template_kwargs:
            asked["enable_thinking"] = bool(parsed.chat_template_kwargs["enable_thinking"])
        return template.rendered(parsed.messages, continues=parsed.continues, **asked)

    def _chat(self, kv: KVFlash, parsed: ParsedRequest) -> PreparedRequest:
        template, rendered = self._chat_template(kv), self._rendered(kv, parsed)
        check_room(kv, rendered.prompt, "the conversation")
        tokens = tokenize_chat(kv.model, rendered.prompt)
        sampling = parsed.sampling if rendered.grammar is None else replace(parsed.sampling, grammar=rendered.grammar)
        return PreparedRequest(
            parsed, tokens, sampling, (*parsed.stop, *template.stop, *rendered.stop), rendered, rendered.warnings,
            template.begins(tokens),
        )  # fmt: skip


def _completion(kv: KVFlash, parsed: ParsedRequest) -> PreparedRequest:
    if isinstance(parsed.prompt, str):
        check_room(kv, parsed.prompt, "the prompt")
        tokens = tokenize_chat(kv.model, parsed.prompt) if parsed.special else kv.tokenize(parsed.prompt)
    else:
        tokens = np.array(parsed.prompt, np.int32)
    if parsed.schema is None:
        return PreparedRequest(parsed, tokens, parsed.sampling, parsed.stop, None)
    sampling = replace(parsed.sampling, grammar=parsed.schema.grammar())
    return PreparedRequest(parsed, tokens, sampling, parsed.stop, None, tuple(map(str, parsed.schema.loosened)))


def _compile(kv: KVFlash, sampling: Sampling, field: str) -> None:
    """Compile a request's grammar in the reader thread, before a sequence is prepared. field: the request's field that holds the grammar.

    Raises RequestError if the grammar cannot be used.
    """
    try:
        check_ends(sampling)
        if sampling.grammar:
            check_grammar(sampling.grammar, kv.model)
    except KVFlashError as err:
        raise invalid(str(err), field, "invalid_value") from None


def _grammar_field(parsed: ParsedRequest) -> str:
    """Return the field from which a request's grammar comes."""
    return "grammar" if parsed.sampling.grammar else "response_format" if parsed.schema is not None else "tools"


def check_room(kv: KVFlash, text: str, what: str) -> None:
    """Raise TooLong for a text that is far too long. It is tokenized in pieces, because tokenizing takes 75 bytes of memory per character.

    what: the text's name in messages. Raises UsageError if the text is not valid Unicode.
    """
    encoded(text, what)
    if len(text) <= _PIECE:
        return
    (factor, each), n = _SLACK, 0.0
    for more in _lengths(kv, text):
        n += more / factor - each
        if n > kv.options.n_ctx:
            raise TooLong(None, kv.options.n_ctx)


def _lengths(kv: KVFlash, text: str) -> Iterator[int]:
    """Yield the number of tokens of each piece of a text."""
    for start in range(0, len(text), _PIECE):
        yield len(kv.tokenize(text[start : start + _PIECE], add_special=False, parse_special=True))


def _check_length(n: int, n_ctx: int) -> None:
    if n == 0:
        raise invalid("the prompt is empty: give at least one character")
    if n > n_ctx:
        raise TooLong(n, n_ctx)
