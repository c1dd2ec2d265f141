"""A sequence of the pool, and the request that it serves."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from pyllama_kvflash.engine.generation import Generation
from pyllama_kvflash.engine.sequence import KVSequence
from pyllama_kvflash.events import Event, Probs, Reselect, Token, Warn
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.serve.job import Finished, Job, Reading, Text, Timing, TokenLogprob
from pyllama_kvflash.text import n_common

log = logging.getLogger("kvflash.serve")

_IMPOSSIBLE = -9999.0
"""Replaces a log probability of -infinity, which JSON lacks. OpenAI's API uses this value for unlikely tokens, too."""


@dataclass(slots=True)
class Serving:
    """A request that is being served. n_cached: tokens of its prompt that were in the sequence before.

    began, was_read: time.perf_counter() when the request got its sequence, and when its prompt was read (None: not yet).
    """

    job: Job
    generation: Generation
    n_cached: int
    began: float = field(default_factory=time.perf_counter)
    was_read: float | None = None

    def send(self, events: Iterable[Event]) -> None:
        """Send the text and the log probabilities of the tokens among these events."""
        tokens = tuple(event for event in events if isinstance(event, Token))
        text = "".join(token.text for token in tokens)
        logprobs = tuple(self._logprob(token.id, token.probs) for token in tokens if token.probs)
        if text or logprobs:
            self.job.notify(Text(text, logprobs, self.timing))

    @property
    def timing(self) -> Timing:
        """The times of the answer so far."""
        now = time.perf_counter()
        read = now if self.was_read is None else self.was_read
        stats = self.generation.draft_stats
        drafts = (0, 0) if stats is None else (stats.drafted, stats.accepted)
        n_read = len(self.job.tokens) - self.n_cached
        return Timing(n_read, read - self.began, self.generation.answer.n_tokens, now - read, *drafts)

    def _logprob(self, token: int, probs: Probs) -> TokenLogprob:
        """Return a token's log probability, with its bytes, since the model may be closed later."""
        piece = partial(self.generation.decoder.sequence.ctx.model.piece, special=True)
        top = tuple(TokenLogprob(piece(t), max(p, _IMPOSSIBLE), id=t) for t, p in probs.top)
        return TokenLogprob(piece(token), max(probs.logprob, _IMPOSSIBLE), top, token)


class Slot:
    """A sequence that reads a prompt, answers, or is idle. An idle sequence keeps its text for the next request.

    serving: the request that is being served; None while the slot is idle.
    kept: number of positions, from the first on, that are in the cache on disk.
    used: time.monotonic() when the slot last became idle.
    pins: chunks pinned by pin(), until their text is replaced.
    n_texts: how often text was replaced. The page learns of a replacement when this number changes.
    reselect: the last choice of chunks for the present text; None: there is none yet.
    """

    def __init__(self, seq: KVSequence) -> None:
        self.seq = seq
        self.serving: Serving | None = None
        self.kept = 0
        self.used = 0.0
        self.pins: set[int] = set()
        self.n_texts = 0
        self.reselect: Reselect | None = None

    @property
    def job(self) -> Job | None:
        """The request being served; None while the slot is idle."""
        return self.serving.job if self.serving else None

    @property
    def reading(self) -> bool:
        """Whether the prompt is still being read."""
        return self.serving is not None and self.serving.generation.reading

    def common(self, tokens: Tokens) -> int:
        """Return the length of the common prefix with a prompt (n,) int32: at most n - 1, as the last token must give logits."""
        return n_common(self.seq.tokens, tokens[:-1])

    def reach(self, common: int) -> int:
        """Return how many of the first `common` tokens surely stay when the rest is dropped.

        A recurrent state can only go back to a checkpoint.
        """
        return self.seq.decoder.checkpoints.reach(common)

    def begin(self, job: Job) -> None:
        """Serve a request. The sequence must hold a beginning of the job's prompt, and nothing else."""
        n = self.seq.n_tokens
        generation = self.seq.generation(
            job.tokens[n:], max_tokens=job.max_tokens, sampling=job.sampling, stop=job.stop, preserved=job.preserved,
            marks=job.begins,
        )  # fmt: skip
        self.serving = Serving(job, generation, n)

    def read(self, serving: Serving) -> int:
        """Read one batch of the prompt. Returns the number of tokens read. Raises the engine's errors."""
        start = self.seq.n_tokens
        events = list(serving.generation.read())
        self.note(events)
        seconds = time.perf_counter() - serving.began
        serving.job.notify(Reading(self.seq.n_tokens, serving.generation.n_text, serving.n_cached, seconds))
        if not serving.generation.reading:
            serving.was_read = time.perf_counter()
        serving.send(events)
        return self.seq.n_tokens - start

    def finish(self, serving: Serving, reason: str) -> Finished:
        """End the answer, send the rest of its text, and become idle. Returns the last update to send."""
        job, answer = serving.job, serving.generation.answer
        serving.send(answer.shown())
        if text := answer.flush():
            job.notify(Text(text, timing=serving.timing))
        now = time.perf_counter()
        done = Finished(
            reason,
            len(job.tokens),
            serving.n_cached,
            answer.n_tokens,
            now - job.began,
            answer.stop,
            first_s=(serving.was_read or now) - job.began,
            timing=serving.timing,
        )
        self.leave()
        return done

    def note(self, events: Iterable[Event]) -> None:
        """Remember the last choice of chunks, which the page shows, and log warnings."""
        for event in events:
            if isinstance(event, Reselect):
                self.reselect = event
            elif isinstance(event, Warn):
                log.warning("%s", event.text)

    def pin(self, chunk: int) -> None:
        """Keep a chunk on the device until its text is replaced. Raises as KVSequence.pin() does."""
        self.seq.pin(*self._span(chunk))
        self.pins.add(chunk)

    def unpin(self, chunk: int) -> None:
        """Let a pinned chunk be evicted again."""
        self.pins.discard(chunk)
        self.seq.unpin(*self._span(chunk))

    def replaced(self, n_tokens: int) -> None:
        """Unpin the chunks with positions from n_tokens on. Call it before the text from there on is replaced."""
        if n_tokens >= self.seq.n_tokens:
            return
        for chunk in [c for c in self.pins if self._span(c)[1] > n_tokens]:
            self.unpin(chunk)
        self.n_texts += 1
        self.reselect = None

    def _span(self, chunk: int) -> tuple[int, int]:
        n = self.seq.options.chunk
        return chunk * n, min((chunk + 1) * n, self.seq.options.n_ctx)

    def leave(self) -> None:
        """Become idle. The sequence stays as it is."""
        self.serving = None
        self.used = time.monotonic()
