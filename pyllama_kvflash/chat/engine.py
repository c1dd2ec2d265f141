"""Conversations as prompts: a model's own chat template, rendered by llama.cpp."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from pyllama_kvflash.chat.calls import Calls
from pyllama_kvflash.chat.tools import WARNING as TOOLS_AS_TEXT
from pyllama_kvflash.chat.tools import TextTools, as_text
from pyllama_kvflash.errors import UnsupportedError, UsageError, encoded
from pyllama_kvflash.json_schema import SchemaError
from pyllama_kvflash.native import TEMPLATE_SECONDS, ChatEngine, Model, Rendered, Tokens

Message = Mapping[str, Any]
"""A message of a conversation, in the form of the OpenAI protocol: role and content, and perhaps tool calls."""

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The template for a model that has none."""

NO_TEMPLATE = (
    'the model has no chat template: each message is given to it as a line "role: text", which a model that was trained'
    " for chat does not expect"
)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise UsageError unless there is at least one message, and each has a role and either a text or tool calls."""
    wanted = 'give a list such as [{"role": "user", "content": "Hello"}]'
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        what = "None" if messages is None else f"a {type(messages).__name__}"
        raise UsageError(f"`messages` is {what}: {wanted}")
    if not messages:
        raise UsageError(f"`messages` is empty: {wanted}")
    for i, message in enumerate(messages):
        fields = message if isinstance(message, Mapping) else {}
        if not isinstance(fields.get("role"), str) or not (
            isinstance(fields.get("content"), str) or fields.get("tool_calls")
        ):
            raise UsageError(f"`messages[{i}]` is {str(message)[:100]!r}, without a role and a content: {wanted}")


class ChatTemplate:
    """Renders conversations.

    warning: a warning for the user about the template; "": none.
    stop: strings that end an answer, beside the model's own end of text.

    The template is part of the model file, and not trusted: llama.cpp limits its time, its depth and the size of its texts.
    """

    def __init__(
        self,
        model: Model,
        source: str | None = None,
        *,
        seconds: float = TEMPLATE_SECONDS,
        fix: str = "give another one as `template`",
    ) -> None:
        """source: a template in place of the model's own. seconds: time limit for each rendering.

        Raises UsageError if llama.cpp cannot read the template. fix: the end of that error's message: what the user can do.
        """
        given = source if source is not None else model.meta("tokenizer.chat_template")
        self.warning = "" if given else NO_TEMPLATE
        self.stop = () if given else ("\nuser:", "\nsystem:")
        self._model, self._seconds = model, seconds
        try:
            self._calls = Calls(ChatEngine(model, source if given else PLAIN, seconds=seconds))
        except (UnsupportedError, UsageError) as err:
            raise UsageError(f"llama.cpp cannot read the chat template: {_reason(err)}: {fix}") from None

    @property
    def caps(self) -> dict[str, bool]:
        """Whether the template supports each feature. The keys are llama.cpp's names of the features."""
        return self._calls.engine.caps

    @property
    def takes_tools(self) -> bool:
        """Whether the template supports tools and calls. If not, they are put into the messages' text."""
        return self.caps.get("supports_tool_calls", False)

    @property
    def calls_at_once(self) -> bool:
        """Whether an answer may call several tools."""
        return self.caps.get("supports_parallel_tool_calls", False)

    def rendered(
        self, messages: Sequence[Message], *, answer: bool = True, continues: bool | None = None, **asked: Any
    ) -> Rendered:
        """Return a conversation as a prompt, with the grammar and the parser of its answer.

        answer: whether to add the beginning of the answer. An empty last message of the assistant is then left out.
        continues: whether the answer continues the last message; None: only if that is the assistant's and has no calls.
        asked: tools, tool_choice (or {"type": "function", "function": {"name": ...}}), parallel_tool_calls, json_schema
        (checked or not), enable_thinking and chat_template_kwargs, as for ChatEngine.apply().

        Raises UsageError if the template fails or does not take these messages or tools, if the schema cannot be used, and if
        there is no message to continue.
        """
        messages, continued = _ending(messages, continues) if answer else (messages, False)
        if continued and asked.get("tools") and asked.get("tool_choice", "auto") not in ("auto", "none"):
            raise UsageError(_CALL_LATE)
        if not self.takes_tools and _with_tools(messages, asked):
            return self._with_text_tools(messages, answer, continued, asked)
        request = {"messages": [dict(m) for m in messages], "add_generation_prompt": answer, **asked}
        request["continue_final_message"] = continued
        try:
            res = self._calls.applied(request)
            return replace(res, prompt=_up_to_end(self._calls, request) or res.prompt) if continued else res
        except SchemaError:
            raise
        except (UnsupportedError, UsageError) as err:
            raise UsageError(f"the chat template cannot render this conversation: {_reason(err)}") from None

    def _with_text_tools(
        self, messages: Sequence[Message], answer: bool, continued: bool, asked: Mapping[str, Any]  # noqa: FBT001
    ) -> Rendered:  # fmt: skip
        """Return a conversation whose tools and calls are text. Raises UsageError."""
        plain = {k: v for k, v in asked.items() if k not in {"tools", "tool_choice", "parallel_tool_calls"}}
        choice = asked.get("tool_choice", "auto")
        if not asked.get("tools") or choice == "none":
            return self.rendered(as_text(messages, (), must=False), answer=answer, continues=continued, **plain)
        form = self._text_tools.answered(asked)
        plain.pop("json_schema", None)
        texts = as_text(messages, asked["tools"], must=choice != "auto")
        prompt = self.rendered(texts, answer=answer, continues=continued, **plain).prompt
        return replace(form, prompt=prompt, warnings=(TOOLS_AS_TEXT, *form.warnings))

    @cached_property
    def _text_tools(self) -> TextTools:
        return TextTools(self._model, seconds=self._seconds)

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """Return the text of a conversation. Raises UsageError as rendered() does."""
        return self.rendered(messages, answer=answer).prompt

    def begins(self, tokens: Tokens) -> tuple[int, ...]:
        """Return the indices at which messages begin in a conversation's tokens, and last the index at which the answer begins.

        tokens: (n,) int32. Every message begins with the same special token; (): the template has no such token.
        """
        return () if self._opener is None else tuple(np.flatnonzero(tokens == self._opener).tolist())

    def next_turn(self, message: Message) -> str:
        """Return the text between an answer and the next one: `message`, as the template writes it.

        Raises UsageError as rendered() does, and if the template does not show earlier answers unchanged.
        """
        text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}, message])
        if _MARK not in text:
            msg = "the chat template does not show earlier answers: give the whole conversation as a new prompt"
            raise UsageError(msg)
        return text.partition(_MARK)[2]  # the message may contain the mark, too

    @cached_property
    def _opener(self) -> int | None:
        """The special token that begins a message; None: there is none."""
        asked: list[Message] = [{"role": "user", "content": "?"}]
        try:
            text, without = self.render(asked), self.render(asked, answer=False)
        except UsageError:  # the template demands other messages
            return None
        if not text.startswith(without):
            return None
        ids = self._model.tokenize(text.removeprefix(without), add_special=False, parse_special=True).tolist()
        return ids[0] if ids and not self._model.piece(ids[0]) else None

    def tokens(self, model: Model, messages: Sequence[Message], *, answer: bool = True) -> Tokens:
        """Return a conversation's token ids, (n,) int32, with special tokens, and with one BOS if the model wants it.

        Raises UsageError as rendered() does, and if a message is not UTF-8 text.
        """
        return tokenize_chat(model, self.render(messages, answer=answer))


def _with_tools(messages: Sequence[Message], asked: Mapping[str, Any]) -> bool:
    """Return whether a conversation has tools, calls or results of calls."""
    return bool(asked.get("tools")) or any(m.get("tool_calls") or m["role"] == "tool" for m in messages)


_MARK = "8675309020406080"
"""Marks the end of a text in a rendered conversation. It consists of digits, which no template changes."""

_CALL_LATE = (
    "the answer must call a tool, but it continues the text of the last message, which no call can follow: leave out that"
    " message, or set tool_choice to auto"
)


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return messages with a mark at the end of the last one's text."""
    *before, last = messages
    return [*before, {**last, "content": f"{last.get('content') or ''}{_MARK}"}]


def _up_to_end(calls: Calls, request: Mapping[str, Any]) -> str:
    """Return a conversation as the template itself writes it, up to the end of the last message's text.

    By itself, llama.cpp would put that text after the header of an answer, with reasoning in llama.cpp's own form. "": the last message
    has no text, or the template does not show the text.
    """
    if not request["messages"][-1].get("content"):
        return ""
    ended = {"add_generation_prompt": False, "continue_final_message": False}
    marked = {**request, **ended, "messages": _marked(request["messages"])}
    return calls.applied(marked).prompt.rpartition(_MARK)[0]


def _ending(messages: Sequence[Message], continues: bool | None) -> tuple[Sequence[Message], bool]:  # noqa: FBT001
    """Return the messages before an answer, and whether the answer continues the last one.

    An empty last message of the assistant, such as agents send after an answer without text, is left out. Raises UsageError if
    there is no message to continue.
    """
    said = False
    while messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        last = messages[-1]
        said = any(str(last.get(key) or "").strip() for key in ("content", "reasoning_content"))
        if said:
            break
        messages = messages[:-1]
    if continues and not said:
        msg = (
            "continue_final_message is true, and the last message is not an assistant's text: add one, or leave it out"
        )
        raise UsageError(msg)
    if not messages:
        msg = "the conversation has only an empty message of the assistant: add a message of the user"
        raise UsageError(msg)
    return messages, said and continues is not False


def tokenize_chat(model: Model, text: str) -> Tokens:
    """Return a rendered conversation's token ids, (n,) int32. Raises UsageError if the conversation is not UTF-8 text."""
    encoded(text, "the conversation")
    ids = model.tokenize(text, add_special=False, parse_special=True)
    bos = model.tokenize("")[:1]  # empty if the model's prompts have no BOS
    if len(bos) and str(bos[0]) == model.meta("tokenizer.ggml.eos_token_id") != _id(model, "bos"):
        bos = bos[:0]  # it is the EOS at the end of such a model's prompts, and a conversation continues
    if len(bos) == 0 or (len(ids) and ids[0] == bos[0]):
        return ids
    return np.concatenate([bos, ids]).astype(np.int32)


def _id(model: Model, name: str) -> str | None:
    return model.meta(f"tokenizer.ggml.{name}_token_id")


def _reason(err: Exception) -> str:
    """Return the first line of llama.cpp's message, without the caret that points into the source."""
    return (str(err).splitlines() or [""])[0].rstrip(" ^")[:300]
