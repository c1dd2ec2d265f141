"""From the body of a request to the prompt of a job."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from pyllama_kvflash.chat import ChatTemplate, check_text, tokenize_chat
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.native import Rendered, Sampling, Tokens
from pyllama_kvflash.serve import anthropic, schema
from pyllama_kvflash.serve.conversation import no_tools
from pyllama_kvflash.serve.fault import Fault, invalid
from pyllama_kvflash.serve.fields import parse_json
from pyllama_kvflash.serve.schema import Ask

_PIECE = 1 << 18  # characters that are tokenized at once to see whether a prompt is far too long
_SLACK = 1.1, 64  # by how much, and by how many tokens a piece, the sum over pieces may differ from the whole


class Kind(Enum):
    """What is asked: a chat or a completion of the OpenAI protocol, or a message of the Anthropic protocol."""

    CHAT = "messages"
    COMPLETION = "prompt"
    MESSAGE = "anthropic messages"
    COUNT = "anthropic token count"


@dataclass(frozen=True, slots=True)
class Understood:
    """A request that can be served.

    tokens: (n,) int32, of the prompt. sampling, stop: with what the prompt asks for, too. rendered: the prompt of a chat.
    """

    ask: Ask
    tokens: Tokens
    sampling: Sampling
    stop: tuple[str, ...]
    rendered: Rendered | None


class Understanding:
    """Makes prompts of bodies. Several threads may use one."""

    def __init__(self, defaults: Sampling, template: str | None) -> None:
        """defaults: for what a request leaves open. template: in place of the model's own."""
        self._defaults, self._source = defaults, template
        self._template: ChatTemplate | None = None

    def of(self, kv: KVFlash, body: bytes, kind: Kind) -> Understood:
        """Return what a body asks for. Raises Fault."""
        given, n_vocab = parse_json(body), kv.model.n_vocab
        if kind in {Kind.MESSAGE, Kind.COUNT}:
            ask = anthropic.parse(given, defaults=self._defaults, n_vocab=n_vocab, counting=kind == Kind.COUNT)
        else:
            ask = schema.parse(given, chat=kind == Kind.CHAT, defaults=self._defaults, n_vocab=n_vocab)
        try:
            found = _completion(kv, ask) if kind == Kind.COMPLETION else self._chat(kv, ask)
        except KVFlashError as err:
            raise invalid(str(err), "prompt" if kind == Kind.COMPLETION else "messages") from None
        _check_length(len(found.tokens), kv.options.n_ctx)
        return found

    def caps(self, kv: KVFlash) -> dict[str, bool]:
        """Return what the chat template can do, by llama.cpp's names; {} if it does not know it."""
        try:
            return self._of(kv).caps
        except KVFlashError:
            return {}

    def _of(self, kv: KVFlash) -> ChatTemplate:
        self._template = self._template or ChatTemplate.of(kv.model, self._source)
        return self._template

    def _chat(self, kv: KVFlash, ask: Ask) -> Understood:
        template = self._of(kv)
        asked: dict[str, Any] = {"chat_template_kwargs": ask.chat_template_kwargs}
        if ask.tools:
            if not template.takes_tools and ask.tool_choice != "none":
                raise no_tools()
            asked |= {"tools": list(ask.tools), "tool_choice": ask.tool_choice}
            asked["parallel_tool_calls"] = (
                template.calls_at_once if ask.parallel_tool_calls is None else ask.parallel_tool_calls
            )
        if ask.schema is not None:
            asked["json_schema"] = ask.schema
        if "enable_thinking" in ask.chat_template_kwargs:
            asked["enable_thinking"] = bool(ask.chat_template_kwargs["enable_thinking"])
        rendered = template.rendered(ask.messages, **asked)
        check_room(kv, rendered.prompt, "the conversation")
        tokens = tokenize_chat(kv.model, rendered.prompt)
        sampling = ask.sampling if rendered.grammar is None else replace(ask.sampling, grammar=rendered.grammar)
        return Understood(ask, tokens, sampling, (*ask.stop, *template.stop, *rendered.stop), rendered)


def _completion(kv: KVFlash, ask: Ask) -> Understood:
    if isinstance(ask.prompt, str):
        check_room(kv, ask.prompt, "the prompt")
        tokens = kv.tokenize(ask.prompt)
    else:
        tokens = np.array(ask.prompt, np.int32)
    return Understood(ask, tokens, ask.sampling, ask.stop, None)


def check_room(kv: KVFlash, text: str, what: str) -> None:
    """Raise Fault for a text that is far too long, before all of it is tokenized: that takes 75 bytes a character."""
    check_text(text, what)
    n_ctx, (factor, each) = kv.options.n_ctx, _SLACK
    n = 0.0
    for start in range(0, len(text), _PIECE):
        if len(text) <= _PIECE:
            return
        n += len(kv.tokenize(text[start : start + _PIECE], add_special=False, parse_special=True)) / factor - each
        if n > n_ctx:
            raise _too_long(f"more than {n_ctx}", n_ctx)


def _check_length(n: int, n_ctx: int) -> None:
    if n == 0:
        raise invalid("the prompt is empty: give at least one character")
    if n > n_ctx:
        raise _too_long(str(n), n_ctx)


def _too_long(n: str, n_ctx: int) -> Fault:
    msg = f"the prompt is {n} tokens, and the context {n_ctx}: shorten it, or start the server with a larger -c"
    return invalid(msg, code="context_length_exceeded")
