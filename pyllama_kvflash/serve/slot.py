"""A sequence of the pool, and the request that it serves."""

import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from pyllama_kvflash.engine.answer import Answer
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import HostMemoryError
from pyllama_kvflash.events import Event, Prefill
from pyllama_kvflash.native import Sampler, Tokens
from pyllama_kvflash.serve.job import Finished, Job, Reading, Text
from pyllama_kvflash.text import n_common

_AHEAD = 4096  # tokens of an answer for which host memory is taken before there is any


class Slot:
    """One of these reads a prompt, answers, or is idle. What its sequence has stays in it for the next request.

    kept: positions, from the first, that the cache on disk has. used: when it last had something to do.
    """

    def __init__(self, seq: KVFlash) -> None:
        self.seq = seq
        self.job: Job | None = None
        self.kept = 0
        self.used = 0.0
        self._n_cached = 0
        self._text = np.empty(0, np.int32)  # that is to be read
        self._reader: Iterator[Event] | None = None
        self._answer: Answer | None = None
        self._sampler: Sampler | None = None

    @property
    def reading(self) -> bool:
        """Whether a part of its prompt is to be read."""
        return self._reader is not None

    @property
    def answering(self) -> bool:
        """Whether its prompt is read, and its answer goes on."""
        return self._reader is None and self._answer is not None

    @property
    def token(self) -> int:
        """The last one of its answer, which is to be decoded next."""
        if self._answer is None or self._answer.token is None:
            msg = "there is no answer, or it has ended"
            raise AssertionError(msg)
        return self._answer.token

    def common(self, tokens: Tokens) -> int:
        """Tokens at the beginning of a prompt that its sequence has, too; never all of the prompt: one gets logits."""
        return n_common(self.seq.tokens, tokens[:-1])

    def begin(self, job: Job) -> None:
        """Serve a request, whose first tokens the sequence has, and no others."""
        self.job, self._text = job, job.tokens
        self._n_cached = self.seq.n_tokens
        self._answer = Answer(self.seq.model, job.max_tokens, self.seq.options.n_ctx, job.stop)
        self._sampler = Sampler(job.sampling, self.seq.model.n_vocab)
        n_answer = min(job.max_tokens, _AHEAD) if job.max_tokens >= 0 else _AHEAD
        with suppress(HostMemoryError):  # the answer may be shorter; reading asks for the prompt itself
            self.seq.expect(min(len(job.tokens) + n_answer, self.seq.options.n_ctx) - self.seq.n_tokens)
        self.read_on()

    def again(self) -> None:
        """Serve its request from the beginning: the sequence was cleared."""
        if self.job is not None:
            self.begin(self.job)

    def resume(self, text: Tokens) -> None:
        """The sequence was cleared: read the prompt and what was decoded of the answer, which then goes on."""
        self._text = text
        self.read_on()

    def read_on(self) -> None:
        """Read what is missing of the text, from wherever the sequence is."""
        self._reader = self.seq.prefill(self._text[self.seq.n_tokens :])

    def read(self) -> int:
        """One batch of the prompt, and the first token of the answer after the last one. How many were read.

        Raises what the engine does.
        """
        reader, job, start = self._reader, self.job, self.seq.n_tokens
        if reader is None or job is None:
            msg = "there is nothing to read"
            raise AssertionError(msg)
        event = next(e for e in reader if isinstance(e, Prefill))
        job.notify(Reading(self.seq.n_tokens, len(self._text)))
        if event.done == event.total:
            self._reader = None
            if self._answer is None or self._answer.token is None:
                self.take()
        return self.seq.n_tokens - start

    def take(self) -> None:
        """The next token of the answer, by the logits of the last one. Right after it was decoded: they do not stay."""
        answer, sampler, job = self._answer, self._sampler, self.job
        if answer is None or sampler is None or job is None:
            msg = "there is nothing to answer"
            raise AssertionError(msg)
        answer.take(sampler.sample(self.seq.ctx), self.seq.n_tokens)
        if text := "".join(token.text for token in answer.shown()):
            job.notify(Text(text))

    @property
    def reason(self) -> str | None:
        """Why the answer ended, None: it goes on, or there is none."""
        return self._answer.reason if self._answer else None

    def finish(self, reason: str) -> Finished:
        """The answer is whole: tell the rest of its text, and be idle. What is to be told last."""
        job, answer = self.job, self._answer
        if job is None or answer is None:
            msg = "there is nothing to finish"
            raise AssertionError(msg)
        if text := answer.flush():
            job.notify(Text(text))
        seconds = time.perf_counter() - job.began
        done = Finished(reason, len(job.tokens), self._n_cached, answer.n_tokens, seconds)
        self.leave()
        return done

    def leave(self) -> None:
        """Be idle; the sequence stays as it is."""
        self.job = self._reader = self._answer = self._sampler = None
        self.used = time.monotonic()
