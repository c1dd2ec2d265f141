"""A request of any protocol: what it is checked against, as it was checked, and ready to be served."""

from dataclasses import dataclass, field
from typing import Any

from pyllama_kvflash.chat.engine import Message
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.json_schema import Checked
from pyllama_kvflash.native import Rendered, Sampling, Tokens
from pyllama_kvflash.serve.protocols.fields import Unknown
from pyllama_kvflash.serve.protocols.request_error import RequestError, invalid
from pyllama_kvflash.serve.protocols.responses_store import ResponseStore


@dataclass(frozen=True, slots=True)
class Served:
    """What a request is checked against.

    name: the model's, for clients. defaults: for the fields that a request leaves out. unknown: collects the request's fields
    that this server does not know. responses: earlier ones, which a request may continue.
    """

    kv: KVFlash
    name: str
    defaults: Sampling
    unknown: Unknown
    responses: ResponseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A checked request: messages (of a chat), or a prompt (text or token ids).

    special: whether the text may have special tokens, as that of a rendered conversation.
    continues: whether the answer continues the last message; None: if that is one of the assistant with a text.
    tools, tool_choice, parallel_tool_calls (None: if the template supports it), chat_template_kwargs: of a chat.
    schema: JSON schema of the answer, checked. max_tokens: None if not given. n: answers wanted.
    pin_seconds: how long the prompt must stay in the cache on disk; 0: as long as there is room.
    id_slot: the sequence to use, -1: any. cache_prompt: whether what a sequence has of the prompt is kept, not read again.
    timings_per_token, return_progress: whether a stream has the times so far, and how much of the prompt is read.
    extra: what only the Reply of its protocol reads.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | list[int] = ""
    special: bool = False
    continues: bool | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "none"
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    schema: Checked | None = None
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    pin_seconds: float = 0.0
    id_slot: int = -1
    cache_prompt: bool = True
    timings_per_token: bool = False
    return_progress: bool = False
    extra: Any = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be served.

    tokens: (n,) int32, of the prompt. sampling, stop: with the grammar and stop strings of the chat template.
    rendered: the prompt of a chat; None: it is a completion.
    warnings: a sentence for each part of the request that has no effect, such as what of its schemas is not enforced.
    begins: where the messages of a chat begin in the tokens.
    """

    parsed: ParsedRequest
    tokens: Tokens
    sampling: Sampling
    stop: tuple[str, ...]
    rendered: Rendered | None
    warnings: tuple[str, ...] = ()
    begins: tuple[int, ...] = ()


class TooLong(Exception):  # noqa: N818 (the request is refused: it is an answer)
    """A prompt does not fit the context. n: its tokens; None: not counted. n_ctx: tokens of the context."""

    def __init__(self, n: int | None, n_ctx: int) -> None:
        super().__init__()
        self.n, self.n_ctx = n, n_ctx

    def error(self) -> RequestError:
        """Return the error to send, with the code that clients of the OpenAI protocol search for."""
        length = f"more than {self.n_ctx:,}" if self.n is None else f"{self.n:,}"
        msg = f"the prompt has {length} tokens, and the context {self.n_ctx:,}: shorten it, or start the server with a larger -c"
        return invalid(msg, code="context_length_exceeded")
