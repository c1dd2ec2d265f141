"""llama.cpp's chat templates, and its parsers of a model's answers."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyllama_kvflash import errors
from pyllama_kvflash.native.grammar import Grammar
from pyllama_kvflash.native.lib import check, ffi, lib, owned
from pyllama_kvflash.native.model import Model

TEMPLATE_SECONDS = 10.0  # time limit of a template, which comes with a model file, and is not trusted


@dataclass(frozen=True, slots=True)
class CallDelta:
    """An addition to a tool call. index: the number of the call. id, name: complete in one of the deltas, "" in the others."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to an answer: to its content, its reasoning, or a call."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as a prompt, and the properties of its answer.

    grammar: constrains the answer; None: nothing does. warnings: a sentence for each constraint of the request's schemas that is not
    enforced. preserved: special tokens that are shown as text. stop: strings that end the answer. format, parser, generation_prompt:
    what Reply needs to parse the answer.
    """

    prompt: str
    grammar: Grammar | None = None
    preserved: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    format: int = 0
    parser: str = ""
    generation_prompt: str = ""
    warnings: tuple[str, ...] = ()


class ChatEngine:
    """A chat template, rendered by llama.cpp. Several threads may use it."""

    def __init__(self, model: Model, source: str | None = None, *, seconds: float = TEMPLATE_SECONDS) -> None:
        """source: a template; None: the model's own. seconds: the template's time limit, for each call.

        Raises UsageError (llama.cpp cannot parse the template), and UnsupportedError if it exceeds a limit.
        """
        self._seconds = seconds
        out = ffi.new("struct kvf_chat **")
        handle = model.handle
        check(lib.kvf_chat_new(handle, _bytes(source or "", "the template"), seconds, out))
        self._handle = owned(out[0], lib.kvf_chat_free, handle)

    @property
    def caps(self) -> dict[str, bool]:
        """The template's capabilities, by llama.cpp's names, such as supports_tools."""
        found: dict[str, bool] = _given(lambda out: lib.kvf_chat_caps(self._handle, out))
        return found

    def apply(self, request: dict[str, Any]) -> Rendered:
        """Render a conversation as a prompt.

        request: in the form of the OpenAI protocol, with messages, tools, tool_choice ("auto", "none", "required"), parallel_tool_calls,
        json_schema (the answer's), enable_thinking, chat_template_kwargs, add_generation_prompt, continue_final_message.

        Raises UsageError, and UnsupportedError if the template exceeds its limits of time, text or depth.
        """
        text = _bytes(json.dumps(request, ensure_ascii=False), "the conversation")
        found = _given(lambda out: lib.kvf_chat_apply(self._handle, text, self._seconds, out))
        return Rendered(
            prompt=found["prompt"],
            grammar=_grammar(found, request) if found["grammar"] else None,
            preserved=frozenset(found["preserved"]),
            stop=tuple(found["stop"]),
            format=found["format"],
            parser=found["parser"],
            generation_prompt=found["generation_prompt"],
        )


class Reply:
    """An answer to a rendered conversation, parsed as it grows."""

    def __init__(self, rendered: Rendered) -> None:
        out = ffi.new("struct kvf_reply **")
        parser, before = rendered.parser.encode(), rendered.generation_prompt.encode()
        check(lib.kvf_reply_new(rendered.format, parser, before, out))
        self._handle = ffi.gc(out[0], lib.kvf_reply_free)

    def push(self, text: str, *, partial: bool = True) -> list[Delta]:
        """Append text to the answer, and return the additions. partial: whether the answer may continue.

        Raises UsageError if the answer does not have the template's form. The text is kept anyway.
        """
        data = text.replace("\0", "\ufffd").encode("utf-8", "replace")
        found = _given(lambda out: lib.kvf_reply_push(self._handle, data, partial, out))
        return [_delta(d) for d in found]


def _delta(found: dict[str, Any]) -> Delta:
    if "call" in found:
        return Delta(call=CallDelta(found["call"], found["id"], found["name"], found["arguments"]))
    return Delta(found.get("content", ""), found.get("reasoning", ""))


_TALK = re.compile(r"^(root ::= .*?)\buntil-\d+\? (?=.*\btool-calls\b)", re.MULTILINE)
"""The part of llama.cpp's grammars that allows text before a tool call."""


_SEVERAL = re.compile(r"^(tool-calls ::= )\((.*)\)\+$", re.MULTILINE)
"""The part that allows several tool calls, whether or not the request does."""


def _grammar(found: dict[str, Any], request: dict[str, Any]) -> Grammar:
    """Return the grammar of an answer. A required call must come first, or a small model might talk without end."""
    triggers, text = found["triggers"], found["grammar"]
    if request.get("tool_choice") == "required":
        text = _TALK.sub(r"\1", text)
    if not request.get("parallel_tool_calls"):
        text = _SEVERAL.sub(r"\1\2", text)
    return Grammar(
        text,
        after=found["generation_prompt"],
        lazy=found["lazy"],
        patterns=tuple(t["pattern"] for t in triggers if "pattern" in t),
        tokens=tuple(t["token"] for t in triggers if "token" in t),
        thinking=found["thinking_start"],
        thought=tuple(found["thinking_end"]),
    )


def _given(call: Callable[[Any], int]) -> Any:
    """Return the parsed JSON output of a call."""
    out = ffi.new("char **")
    check(call(out))
    try:
        return json.loads(ffi.string(out[0]))
    finally:
        lib.kvf_text_free(out[0])


def _bytes(text: str, what: str) -> bytes:
    """Return a text in UTF-8. Raises UsageError if the text is not Unicode, or has a zero byte, which would end it in C."""
    data = errors.encoded(text, what)
    if b"\0" in data:
        msg = f"{what} has a zero byte"
        raise errors.UsageError(msg)
    return data
