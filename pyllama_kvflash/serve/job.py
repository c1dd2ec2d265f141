"""What goes from a handler of HTTP to the scheduler, and what comes back."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.native import Sampling, Tokens


@dataclass(frozen=True, slots=True)
class Reading:
    """`done` of `total` tokens of the prompt are in the context, those among them that were there before."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer. reason: as of events.Done. cached: tokens of the prompt that did not have to be read."""

    reason: str
    n_prompt: int
    n_cached: int
    n_answer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The end without an answer, or with a part of it. status: of HTTP. message: a sentence."""

    status: int
    message: str


Update = Reading | Text | Finished | Failed


@dataclass(eq=False, slots=True)
class Job:
    """A request. tokens: (n,) int32, one at least. max_tokens: -1: until the context is full. notify: is called by the
    scheduler's thread with each Update, and must return at once; Finished or Failed is the last one, and there is one
    unless the job is cancelled.
    """

    tokens: Tokens
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    notify: Callable[[Update], None]
    cancelled: bool = False  # Scheduler.cancel() sets it
    began: float = field(default_factory=time.perf_counter)


class Cache(Protocol):
    """Prefixes that were read before, on disk. snapshot.cache has one."""

    def match(self, sequence: KVFlash, tokens: Tokens, /) -> int:
        """Tokens of the longest prefix that it knows for this sequence, 0: none."""

    def restore(self, sequence: KVFlash, tokens: Tokens, /) -> int:
        """Fill a sequence with the longest known prefix of tokens (n,). Positions that it has then; 0: none, it is clear."""

    def begin(self, sequence: KVFlash, /) -> Future[Any] | None:
        """Keep what a sequence has now: write it while it goes on. None: there is nothing to write."""
