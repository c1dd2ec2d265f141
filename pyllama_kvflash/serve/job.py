"""Messages between an HTTP handler and the scheduler."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from pyllama_kvflash.errors import DeviceLostError, HostMemoryError, InUseError, KVFlashError, PoolError, UsageError
from pyllama_kvflash.native import Sampling, Tokens
from pyllama_kvflash.serve.protocols.request_error import RequestError

log = logging.getLogger("kvflash.serve")


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress in a prompt: `done` of its `total` tokens are in the context, including the cached ones.

    cached: tokens that were in the sequence before. seconds: the time since the request got its sequence.
    """

    done: int
    total: int
    cached: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability.

    data: the token's bytes; for a special token, its text. top: the likeliest tokens at this place. id: the token's id.
    """

    data: bytes
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()
    id: int = -1

    @property
    def text(self) -> str:
        """The token's text, with bytes that are not UTF-8 replaced."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long an answer has taken so far, in seconds.

    n_read: tokens of the prompt that were not cached. read_s: the time to read them, without the time in the queue.
    n_answer: tokens of the answer. answer_s: the time to decode them.
    n_drafted, n_accepted: guessed tokens, and how many of them were accepted.
    """

    n_read: int = 0
    read_s: float = 0.0
    n_answer: int = 0
    answer_s: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """Further text of the answer. logprobs: its tokens' log probabilities, if requested. timing: the times up to its last token."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer.

    reason: as in events.Done.
    stop: the stop string that ended the answer; None: no stop string did.
    n_cached: tokens of the prompt that were in the sequence before.
    seconds: the time from the creation of the job to the end of this answer.
    first_s: the time from the creation of the job until its prompt was read, including the time in the queue.
    """

    reason: str
    n_prompt: int
    n_cached: int
    n_answer: int
    seconds: float
    stop: str | None = None
    first_s: float = 0.0
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that failed, perhaps after part of an answer. status: the HTTP status. message: a sentence."""

    status: int
    message: str


Update = Reading | Text | Finished | Failed


STOPPING = Failed(503, "the server is stopping: try again after its restart")


def broken(err: BaseException | None) -> Failed:
    """Return the update that ends every request after an error has stopped the scheduler. err: the error, if known."""
    if isinstance(err, DeviceLostError):
        return Failed(503, str(err))
    return Failed(500, "the server has stopped after an error: its log says why")


def failure(err: Exception) -> Failed:
    """Return the update that ends a request that failed. A DeviceLostError is raised again: it ends all other requests, too."""
    if isinstance(err, DeviceLostError):
        raise err
    if isinstance(err, UsageError) and not isinstance(err, InUseError):
        return Failed(400, str(err))
    if isinstance(err, HostMemoryError | PoolError):
        return Failed(503, f"{err}; other requests take memory, too: try again, or send a shorter prompt")
    if isinstance(err, KVFlashError):
        return Failed(500, str(err))
    log.error("a request failed", exc_info=err)
    return Failed(500, "an error in the server ended this request: its log has the details")


class Phase(Enum):
    """Phase of the scheduler. In FAILED, Scheduler.error says why."""

    LOADING = "loading"
    READY = "ok"
    STOPPING = "stopping"
    CLOSED = "closed"
    FAILED = "failed"


class NotReady(RequestError):  # noqa: N818 (the request is not wrong)
    """The scheduler admits no requests."""

    def __init__(self, phase: Phase) -> None:
        """phase: the scheduler's phase, which says why."""
        if phase == Phase.FAILED:
            super().__init__(503, broken(None).message, code="unavailable")
        else:
            what = "the model is loading" if phase == Phase.LOADING else "the server is stopping"
            msg = f"{what}: try again in a few seconds"
            super().__init__(503, msg, code="unavailable", headers={"Retry-After": "5"})


class QueueFull(RequestError):  # noqa: N818 (as above)
    """The queue is full."""

    def __init__(self, seconds: int) -> None:
        """seconds: the estimated time until there is room."""
        msg = f"the queue is full: try again in {seconds} s"
        super().__init__(429, msg, code="queue_full", headers={"Retry-After": str(seconds)})


@dataclass(eq=False, slots=True)
class Job:
    """A request, as the scheduler serves it.

    tokens: the prompt, (n,) int32, at least one token.
    max_tokens: limit for the tokens of an answer; -1: until the context is full.
    notify: called by the scheduler's thread with each Update; it must return at once. The last update of each answer is Finished
    or Failed; no update follows Failed. A cancelled job may end without either.
    preserved: special tokens whose text belongs to the answer.
    pin_seconds: how long the prompt must stay in the cache on disk; 0: as long as there is room.
    others: the sampling settings of each further answer to the same prompt. The answers are served one after another.
    begins: where in `tokens` each message of a conversation begins and, as the last value, where its answer begins; (): not known.
    slot: index of the sequence to use; -1: any. reuse: whether cached tokens of the prompt may be reused.
    """

    tokens: Tokens
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    notify: Callable[[Update], None]
    preserved: Collection[int] = ()
    pin_seconds: float = 0.0
    others: list[Sampling] = field(default_factory=list)
    begins: tuple[int, ...] = ()
    slot: int = -1
    reuse: bool = True
    cancelled: bool = False  # Scheduler.cancel() sets it
    began: float = field(default_factory=time.perf_counter)
