"""llama.cpp's chat templates and its parsers of what a model answers to them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyllama_kvflash import errors
from pyllama_kvflash.native.grammar import Grammar
from pyllama_kvflash.native.lib import check, ffi, lib, owned
from pyllama_kvflash.native.model import Model

TEMPLATE_SECONDS = 10.0  # that a template may take: it comes with a model file, and is not trusted


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a tool call. index: which one of the answer. id and name are whole where they are given, else ""."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """More of what an answer says: of its content, of its reasoning, or of a call."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as a prompt, and what is to be known of its answer.

    grammar: what the answer keeps to; None: to nothing. warnings: what schemas of the request ask for and is not enforced,
    a sentence each. preserved: special tokens that are text of the answer. stop: strings
    that end it. format, parser, generation_prompt: how to parse it.
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
    """A chat template, as llama.cpp reads it. Several threads may use one."""

    def __init__(self, model: Model, source: str | None = None, *, seconds: float = TEMPLATE_SECONDS) -> None:
        """source: a template; None: the model's own. seconds: that it may take, each time.

        Raises UsageError (it is not a template that llama.cpp knows), and UnsupportedError if it takes more than it may.
        """
        self._seconds = seconds
        out = ffi.new("struct kvf_chat **")
        handle = model.handle
        check(lib.kvf_chat_new(handle, _bytes(source or "", "the template"), seconds, out))
        self._handle = owned(out[0], lib.kvf_chat_free, handle)

    @property
    def caps(self) -> dict[str, bool]:
        """What the template can do, by llama.cpp's names, such as supports_tools."""
        found: dict[str, bool] = _given(lambda out: lib.kvf_chat_caps(self._handle, out))
        return found

    def apply(self, request: dict[str, Any]) -> Rendered:
        """Return a conversation as a prompt.

        request: messages, tools, tool_choice ("auto", "none", "required"), parallel_tool_calls, json_schema (of the answer),
        enable_thinking, chat_template_kwargs, add_generation_prompt, continue_final_message, in the form of the OpenAI protocol.

        Raises UsageError, and UnsupportedError if the template takes more time, text or depth than it may.
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
        """Return what more text adds. partial: whether the answer may continue.

        Raises UsageError if the answer is not of the template's form. Its text is kept all the same.
        """
        data = text.replace("\0", "\ufffd").encode("utf-8", "replace")
        found = _given(lambda out: lib.kvf_reply_push(self._handle, data, partial, out))
        return [_delta(d) for d in found]


def _delta(found: dict[str, Any]) -> Delta:
    if "call" in found:
        return Delta(call=CallDelta(found["call"], found["id"], found["name"], found["arguments"]))
    return Delta(found.get("content", ""), found.get("reasoning", ""))


_TALK = re.compile(r"^(root ::= .*?)\buntil-\d+\? (?=.*\btool-calls\b)", re.MULTILINE)
"""Where llama.cpp's grammars let an answer talk before it calls a tool."""


_SEVERAL = re.compile(r"^(tool-calls ::= )\((.*)\)\+$", re.MULTILINE)
"""Where they let it call one tool after the other, whether or not it may."""


def _grammar(found: dict[str, Any], request: dict[str, Any]) -> Grammar:
    """Return the grammar of an answer. Where a call is required, it comes at once: a small model would talk for ever."""
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
    """Return the JSON that a call gives out."""
    out = ffi.new("char **")
    check(call(out))
    try:
        return json.loads(ffi.string(out[0]))
    finally:
        lib.kvf_text_free(out[0])


def _bytes(text: str, what: str) -> bytes:
    """Return a text in UTF-8. Raises UsageError if it has none, or a zero byte, which ends it for C."""
    data = errors.encoded(text, what)
    if b"\0" in data:
        msg = f"{what} has a zero byte"
        raise errors.UsageError(msg)
    return data
