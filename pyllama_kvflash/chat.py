"""Conversations as prompts: a model's own chat template, rendered in a sandbox. Needs jinja2, from the extra
`serve`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self

import jinja2
import jinja2.ext
import numpy as np
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Model, Tokens

Message = Mapping[str, str]
"""A message of a conversation: role and content."""

MAX_TEXT = 64 << 20  # characters of a rendered conversation, and of any text that a template makes on its way
_MAX_POWER = 4096  # bits of a power that a template computes

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The template for a model that has none."""

NO_TEMPLATE = (
    'the model has no chat template: each message is given to it as a line "role: text", which a model that was trained'
    " for chat does not expect"
)


class ChatTemplate:
    """Renders conversations.

    warning: what the user should know of the template; "" if nothing.
    stop: strings that end an answer, beside the model's own end of text.

    The template is part of the model file, and not trusted. It runs in jinja2's sandbox: it can reach no attribute of
    Python and change nothing, ranges have at most 100,000 items, and its output is limited to MAX_TEXT. Its time is not
    limited.
    """

    def __init__(self, source: str | None, *, bos: str = "", eos: str = "") -> None:
        """source: None: a plain template. bos, eos: texts of these tokens. Raises UsageError if the source is no
        template.
        """
        self.warning = NO_TEMPLATE if source is None else ""
        self.stop = ("\nuser:", "\nsystem:") if source is None else ()
        self._names = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        try:
            self._template = _environment().from_string(PLAIN if source is None else source)
        except Exception as err:  # noqa: BLE001 (jinja2 raises Python's own, too)
            raise _failure(err) from None

    @classmethod
    def of(cls, model: Model, source: str | None = None) -> Self:
        """Return the template of a model, or `source` as its template. Raises UsageError if it is no template."""
        texts = {name: _special(model, name) for name in ("bos", "eos")}
        return cls(source if source is not None else model.meta("tokenizer.chat_template"), **texts)

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """Return the text of a conversation. answer: add the beginning of the assistant's next message.

        Raises UsageError if the template does not take these messages, or fails.
        """
        parts, size = [], 0
        try:
            given = [dict(m) for m in messages]
            for part in self._template.generate(messages=given, add_generation_prompt=answer, **self._names):
                size += len(part)
                if size > MAX_TEXT:
                    msg = f"it writes more than {MAX_TEXT} characters"
                    raise ValueError(msg)
                parts.append(part)
        except Exception as err:  # noqa: BLE001 (a template can raise whatever Python can)
            raise _failure(err) from None
        return "".join(parts)

    def tokens(self, model: Model, messages: Sequence[Message], *, answer: bool = True) -> Tokens:
        """Return the token ids (n,) int32 of a conversation, with special tokens, and with BOS as the model wants it,
        but only once.

        Raises UsageError as render() does, and if a message is no UTF-8 text.
        """
        return tokenize_chat(model, self.render(messages, answer=answer))


def tokenize_chat(model: Model, text: str) -> Tokens:
    """Return the token ids (n,) int32 of a rendered conversation. Raises UsageError if it is no UTF-8 text."""
    check_text(text, "the conversation")
    ids = model.tokenize(text, add_special=False, parse_special=True)
    bos = model.tokenize("")[:1]  # none, if the model's prompts do not begin with it
    if len(bos) and str(bos[0]) == model.meta("tokenizer.ggml.eos_token_id") != _id(model, "bos"):
        bos = bos[:0]  # such a BOS ends prompts, and a conversation goes on
    if len(bos) == 0 or (len(ids) and ids[0] == bos[0]):
        return ids
    return np.concatenate([bos, ids]).astype(np.int32)


def check_text(text: str, what: str) -> None:
    """Raise UsageError for a text without a UTF-8 form: JSON allows half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as err:
        msg = f"{what} is not Unicode text: half of a surrogate pair at character {err.start}"
        raise UsageError(msg) from None


def _id(model: Model, name: str) -> str | None:
    return model.meta(f"tokenizer.ggml.{name}_token_id")


def _special(model: Model, name: str) -> str:
    """Return the text of BOS or EOS, "" if the model has none."""
    token = _id(model, name)
    if token is None or not token.isdecimal() or not int(token) < model.n_vocab:
        return ""
    return model.piece(int(token), special=True).decode("utf-8", "replace")


def _failure(err: Exception) -> UsageError:
    """Return one sentence for any exception that a template raised."""
    what = (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
    if isinstance(err, RecursionError | MemoryError):
        what = "it needs too much memory"
    where = f" (line {line})" if (line := getattr(err, "lineno", None)) else ""
    return UsageError(f"the chat template cannot render this conversation: {what}{where}")


#
# the environment of templates, as the transformers library has it
#


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training. Here only its content is kept."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the content of the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses operators that make gigabytes out of a few characters."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result before computing it. Raises SecurityError."""
        large = _too_high(left, right) if operator == "**" else _too_long(left, right) or _too_long(right, left)
        if large:
            msg = f"the result of {operator} is too large"
            raise SecurityError(msg)
        return super().call_binop(context, operator, left, right)


def _too_long(some: Any, times: Any) -> bool:
    return isinstance(some, str | bytes | list | tuple) and isinstance(times, int) and len(some) * times > MAX_TEXT


def _too_high(some: Any, power: Any) -> bool:
    return isinstance(some, int) and isinstance(power, int) and some.bit_length() * power > _MAX_POWER


def _environment() -> jinja2.Environment:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return env


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (templates call it so)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON without escaping HTML, as jinja2's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
