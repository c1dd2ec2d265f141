"""A request of any protocol: the server that it is checked against, the checked request, and the prepared one."""

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
    """The engine and the settings that a request is checked against.

    name: the model's name for clients. defaults: the sampling settings, which a request may override.
    unknown: collects warnings about the request. responses: the stored responses, which a request may continue.
    """

    kv: KVFlash
    name: str
    defaults: Sampling
    unknown: Unknown
    responses: ResponseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A checked request: messages (of a chat), or a prompt (text or token ids).

    special: whether special tokens are recognized in the text of the prompt, as in a rendered conversation.
    continues: whether the answer continues the last message; None: it does if the last message is an assistant's and has text.
    tools, tool_choice, chat_template_kwargs: for a chat. parallel_tool_calls: likewise; None: true if the template supports them.
    schema: the checked JSON schema of the answer. max_tokens: None if not given. n: number of answers.
    pin_seconds: how long the prompt must stay in the cache on disk; 0: as long as there is room.
    id_slot: the sequence to use; -1: any. cache_prompt: whether cached tokens of the prompt may be reused.
    timings_per_token, return_progress: whether a stream reports the times so far, and how much of the prompt is read.
    extra: data that only the Reply of the request's protocol reads.
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
    """A request that is ready to be served.

    tokens: the prompt, (n,) int32. sampling, stop: include the grammar and the stop strings that the chat template adds.
    rendered: the prompt of a chat; None: the request is a completion.
    warnings: a sentence for each part of the request that has no effect, such as a schema constraint that is not enforced.
    begins: where in `tokens` each message of a chat begins and, as the last value, where the answer begins; (): not known.
    """

    parsed: ParsedRequest
    tokens: Tokens
    sampling: Sampling
    stop: tuple[str, ...]
    rendered: Rendered | None
    warnings: tuple[str, ...] = ()
    begins: tuple[int, ...] = ()


class TooLong(Exception):  # noqa: N818 (the request is refused: it is an answer)
    """A prompt does not fit the context. n: tokens of the prompt; None: not counted. n_ctx: length of the context, in tokens."""

    def __init__(self, n: int | None, n_ctx: int) -> None:
        super().__init__()
        self.n, self.n_ctx = n, n_ctx

    def error(self) -> RequestError:
        """Return the error to send, with the code that clients of the OpenAI protocol look for."""
        length = f"more than {self.n_ctx:,}" if self.n is None else f"{self.n:,}"
        msg = f"the prompt has {length} tokens, and the context {self.n_ctx:,}: shorten it, or start the server with a larger -c"
        return invalid(msg, code="context_length_exceeded")
