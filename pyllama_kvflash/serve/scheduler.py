"""The scheduler: the one thread that owns the model, and lets requests take turns on the sequences of its pool.

A turn is one batch of one prompt, and one step of each answer: a token, or a draft to check. So a long prompt delays
other requests by a batch at most, and a cancelled request ends before the next turn.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.engine.generation import step_together
from pyllama_kvflash.errors import HostMemoryError, Interrupted, PoolError, SnapshotError
from pyllama_kvflash.events import Event
from pyllama_kvflash.serve.job import STOPPING, Failed, Job, NotReady, Phase, QueueFull, broken, failure
from pyllama_kvflash.serve.metrics import Metrics
from pyllama_kvflash.serve.pool_queries import PoolQueries, Query, T
from pyllama_kvflash.serve.prefixes import Prefixes
from pyllama_kvflash.serve.slot import Serving, Slot
from pyllama_kvflash.snapshot.cache import PrefixCache

Open = Callable[[Callable[[float], None]], KVFlash]
"""Loads the model. It calls the given function with its progress, 0.0 to 1.0."""

_LOOK_SECONDS = 0.5  # between two updates of the gauges while there is work
_LEAVE_SECONDS = 5.0  # how long the end waits for requests that were admitted just before it

log = logging.getLogger("kvflash.serve")


class Scheduler:
    """Loads a model and serves requests with it, in a thread of its own.

    Any thread may call admit(), leave(), submit(), cancel(), query(), stop() and end(). Admit a request before tokenizing it:
    the model stays loaded until the last admitted request has left.
    """

    def __init__(
        self,
        open_: Open,
        *,
        n_queue: int,
        cache: PrefixCache | None = None,
        cache_min: int = 1024,
    ) -> None:
        """n_queue: limit for the requests that wait. cache: the prefix cache on disk, if any.

        cache_min: a sequence is written to the cache once it has this many new tokens.
        """
        self.metrics = Metrics()
        self.phase = Phase.LOADING
        self.error: BaseException | None = None
        self.kv: KVFlash | None = None
        self._open, self._n_queue = open_, n_queue
        self._prefixes = Prefixes(self.metrics, cache, cache_min)
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._queries = PoolQueries()
        self._n_admitted = 0  # requests between admit() and their last update
        self._ending = False
        self._slots: list[Slot] = []
        self._last_read = -1
        self._looked = 0.0
        self._mean_seconds = 1.0  # of a request
        self._thread = threading.Thread(target=self._run, name="kvflash-serve", daemon=True)

    #
    # for other threads
    #

    def start(self) -> None:
        """Start the thread, which loads the model."""
        self._thread.start()

    def admit(self) -> None:
        """Take a place for a request. Raises NotReady or QueueFull."""
        with self._changed:
            if self.phase != Phase.READY:
                raise NotReady(self.phase)
            n_waiting = self._n_admitted - len(self._slots)
            if n_waiting >= self._n_queue:
                estimate = self._mean_seconds * (n_waiting + 1) / len(self._slots)
                raise QueueFull(min(max(round(estimate), 1), 60))
            self._n_admitted += 1

    def leave(self) -> None:
        """Give up a place that admit() took, if no job will follow."""
        with self._changed:
            self._n_admitted -= 1
            self._changed.notify_all()

    def submit(self, job: Job) -> None:
        """Serve an admitted request. When the request ends, its place is given up."""
        with self._changed:
            if self.phase not in {Phase.CLOSED, Phase.FAILED}:
                self._waiting.append(job)
                self._changed.notify_all()
                return
        job.notify(broken(self.error))
        self.leave()

    def cancel(self, job: Job) -> None:
        """End a job before the next turn, without a last update. A job that has ended is not affected."""
        with self._changed:
            job.cancelled = True
            self._changed.notify_all()

    def query(self, query: Query[T]) -> Future[T]:
        """Call a function with the slots between two turns, in the scheduler's thread.

        The future gets the function's result or error, or NotReady if the scheduler ends first. Raises NotReady.
        """
        with self._changed:
            if self.phase != Phase.READY:
                raise NotReady(self.phase)
            self._changed.notify_all()
            return self._queries.put(query)

    def stop(self) -> None:
        """Admit no more requests. Admitted ones continue."""
        with self._changed:
            if self.phase in {Phase.LOADING, Phase.READY}:
                self.phase = Phase.STOPPING
            self._changed.notify_all()

    def end(self) -> None:
        """End all answers where they are, then end the thread. Waiting requests fail."""
        self.stop()
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread, for `timeout` seconds at most. Returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def n_admitted(self) -> int:
        """The number of requests that wait or are served."""
        return self._n_admitted

    @property
    def n_busy(self) -> int:
        """The number of sequences with a request."""
        return sum(self.busy)

    @property
    def busy(self) -> list[bool]:
        """For each sequence, whether it has a request."""
        return [slot.job is not None for slot in self._slots]

    #
    # the thread
    #

    def _run(self) -> None:
        try:
            self.kv = kv = self._open(self._loading)
            self._slots = [Slot(seq) for seq in kv.sequences]
            self._prefixes.check(kv.n_pool is not None)
            self._look()
            with self._changed:
                if self.phase == Phase.LOADING:
                    self.phase = Phase.READY
            while self._wait():
                self._turn()
            if self._end_all():
                kv.close()
            with self._changed:
                self.phase = Phase.CLOSED
            self._refuse_all(STOPPING)
        except BaseException as err:  # noqa: BLE001 (waiting clients get an error)
            self._die(err)

    def _loading(self, _done: float) -> None:
        if self._ending:
            msg = "stopped while the model was loading"
            raise Interrupted(msg)

    def _wait(self) -> bool:
        """Wait for work. Returns False once the scheduler is to end."""
        while True:
            self._queries.answer(self._slots)
            with self._changed:
                if self._ending:
                    return False
                if self._waiting or self.n_busy:
                    return True
            self._prefixes.save_all(self._slots)
            self._look()
            with self._changed:
                if not (self._waiting or self._queries or self._ending):
                    self._changed.wait()

    def _turn(self) -> None:
        self._queries.answer(self._slots)
        self._sweep()
        self._seat()
        self._read()
        if answering := [(s, s.serving) for s in self._slots if s.serving and not s.reading]:
            self._decode(answering)
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()

    def _look(self) -> None:
        self._looked = time.monotonic()
        self.metrics.look([slot.seq for slot in self._slots], self.n_busy, len(self._waiting))

    def _sweep(self) -> None:
        """Remove the cancelled requests."""
        with self._changed:
            gone = [job for job in self._waiting if job.cancelled]
            for job in gone:
                self._waiting.remove(job)
        for slot in self._slots:
            if slot.job is not None and slot.job.cancelled:
                gone.append(slot.job)
                slot.leave()
        for _ in gone:
            self._left("cancelled")

    def _left(self, outcome: str) -> None:
        self.metrics.request(outcome)
        self.leave()

    #
    # a turn
    #

    def _seat(self) -> None:
        """Give free sequences to waiting requests, first come, first served."""
        while free := [slot for slot in self._slots if slot.serving is None]:
            job = self._next_job({slot.seq.seq for slot in free})
            if job is None:
                return
            wanted = [slot for slot in free if job.slot in {-1, slot.seq.seq}]
            slot = self._prefixes.choose(wanted, job.tokens, job.begins)
            try:
                self._prefixes.prepare(slot, job.tokens, reuse=job.reuse)
                slot.begin(job)
            except Exception as err:  # noqa: BLE001 (only this request fails)
                self._fail(slot, job, err)

    def _next_job(self, free: Collection[int]) -> Job | None:
        """Take the first waiting request that may use a free sequence; None if there is none. free: the free sequences' indices."""
        with self._changed:
            job = next((job for job in self._waiting if job.slot == -1 or job.slot in free), None)
            if job is not None:
                self._waiting.remove(job)
        return job

    def _read(self) -> None:
        """Read one batch of one prompt; prompts take turns."""
        n = len(self._slots)
        order = [self._slots[(self._last_read + 1 + i) % n] for i in range(n)]
        slot = next((s for s in order if s.reading), None)
        if slot is None or slot.serving is None:
            return
        serving, self._last_read = slot.serving, slot.seq.seq
        begin = time.perf_counter()
        try:
            n_read = slot.read(serving)
        except SnapshotError as err:
            self._recover(slot, serving, err)
        except (HostMemoryError, PoolError) as err:
            if self._free_idle():
                serving.generation.read_on()
            else:
                self._fail(slot, serving.job, err)
        except Exception as err:  # noqa: BLE001 (as in _seat)
            self._fail(slot, serving.job, err)
        else:
            self.metrics.add(prefill_tokens=n_read, prefill_seconds=time.perf_counter() - begin)
            if slot.reading:
                self._prefixes.save_some(slot)
            else:
                self._prefixes.save(slot, serving.job.pin_seconds)
            self._finish(slot, serving)

    def _decode(self, answering: list[tuple[Slot, Serving]]) -> None:
        """Take one step in each answer. Answers share one batch, unless Generation.draft() says that a step needs its own."""
        begin = time.perf_counter()
        n_before = sum(serving.generation.answer.n_tokens for _, serving in answering)
        together, alone = self._drafted(answering)
        try:
            happened = step_together([serving.generation for _, serving in together]) if together else []
        except Exception:  # noqa: BLE001 (each is tried alone, so that only the failing ones end)
            alone = together + alone
        else:
            for (slot, serving), events in zip(together, happened, strict=True):
                self._send(slot, serving, [*events, *serving.generation.answer.shown()])
        for (slot, serving), (_, following) in zip(alone, [*alone[1:], *alone[:1]], strict=True):
            self._step(slot, serving, following)
        n = sum(serving.generation.answer.n_tokens for _, serving in answering) - n_before
        self.metrics.add(decode_tokens=n, decode_seconds=time.perf_counter() - begin)

    def _drafted(self, answering: list[tuple[Slot, Serving]]) -> tuple[list[tuple[Slot, Serving]], ...]:
        """Guess the next tokens of each answer. Returns the answers that can share a batch, and those that cannot."""
        shares: tuple[list[tuple[Slot, Serving]], ...] = [], []
        for slot, serving in answering:
            try:
                shares[serving.generation.draft()].append((slot, serving))
            except Exception as err:  # noqa: BLE001 (as in _seat)
                self._fail(slot, serving.job, err)
        return shares

    def _step(self, slot: Slot, serving: Serving, following: Serving) -> None:
        """Take a step in one answer, in its own batch. following: the answer whose step is next."""
        try:
            events = serving.generation.step(following.generation)
        except SnapshotError as err:
            self._recover(slot, serving, err)
        except (HostMemoryError, PoolError) as err:
            if not self._free_idle():  # with more room, the next turn tries again
                self._fail(slot, serving.job, err)
        except Exception as err:  # noqa: BLE001 (as in _seat)
            self._fail(slot, serving.job, err)
        else:
            self._send(slot, serving, events)

    def _send(self, slot: Slot, serving: Serving, events: Sequence[Event]) -> None:
        slot.note(events)
        try:
            serving.send(events)
        except Exception as err:  # noqa: BLE001 (as in _seat)
            self._fail(slot, serving.job, err)
        else:
            self._finish(slot, serving)

    def _recover(self, slot: Slot, serving: Serving, err: SnapshotError) -> None:
        """Let a sequence that was restored from a damaged snapshot read its text again."""
        log.warning("%s; the text is read again", err)
        self._prefixes.forget(slot)
        serving.generation.recover()

    def _finish(self, slot: Slot, serving: Serving) -> None:
        """End the answer if it is complete."""
        if serving.generation.ended:
            seconds = time.perf_counter() - serving.job.began
            self._mean_seconds += (seconds - self._mean_seconds) / 8
            self._ended(slot, serving, serving.generation.answer.reason or "length")

    def _ended(self, slot: Slot, serving: Serving, reason: str) -> None:
        if (stats := serving.generation.draft_stats) is not None:
            self.metrics.add(drafted_tokens=stats.drafted, accepted_tokens=stats.accepted)
        if meter := serving.generation.decoder.meter:
            found = meter.stats
            self.metrics.add(checked_tokens=found.checked, agreed_tokens=found.agreed, check_seconds=found.check_s)
        done = slot.finish(serving, reason)
        job = serving.job
        if job.others and reason != "interrupted":
            job.sampling = job.others.pop(0)
            with self._changed:
                self._waiting.appendleft(job)  # ahead of other requests: its prompt is still in the sequence
        else:
            self._left("ok")  # first, because the client may send the next request at once
        job.notify(done)
        self._prefixes.save(slot)  # last, because it takes a second at 128K tokens

    def _fail(self, slot: Slot, job: Job, err: Exception) -> None:
        """End a request that failed, and clear its sequence. Raises DeviceLostError if that was the error."""
        answer = failure(err)
        self._prefixes.clear(slot)
        slot.leave()
        self._left("error")
        job.notify(answer)

    def _free_idle(self) -> bool:
        """Free the memory of idle sequences and of running writes. Returns whether anything was freed."""
        idle = [slot for slot in self._slots if slot.job is None and slot.seq.n_tokens]
        for slot in idle:
            self._prefixes.save(slot, stays=0)
            self._prefixes.clear(slot)
        return self._prefixes.finish() or bool(idle)

    #
    # the end
    #

    def _end_all(self) -> bool:
        """End all answers. Returns whether all requests have left, so that the model can be closed."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        for slot in self._slots:
            if slot.serving is not None:
                self._ended(slot, slot.serving, "interrupted")
        self._prefixes.save_all(self._slots, stays=0)
        self._prefixes.finish()
        while True:
            self._refuse_all(STOPPING)
            with self._changed:
                if not self._n_admitted or time.monotonic() > deadline:
                    return not self._n_admitted
                if not self._waiting:
                    self._changed.wait(0.1)

    def _refuse_all(self, answer: Failed) -> None:
        """Fail all waiting requests and queries."""
        with self._changed:
            jobs = list(self._waiting)
            self._waiting.clear()
        self._queries.refuse(NotReady(self.phase))
        for job in jobs:
            self._left("error")
            job.notify(answer)

    def _die(self, err: BaseException) -> None:
        """Fail all requests, present and future, after an error that stops the thread."""
        with self._changed:
            self.error = None if isinstance(err, Interrupted) else err
            self.phase = Phase.CLOSED if self.error is None else Phase.FAILED
        for slot in self._slots:
            if job := slot.job:
                slot.leave()
                self._left("error")
                job.notify(broken(err))
        self._refuse_all(broken(err))
