"""The selector: runs the scorer, during decoding or at once, and makes the best chunks resident."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from pyllama_kvflash.errors import Interrupted, KVFlashError, ScorerError, SnapshotError
from pyllama_kvflash.events import Reselect
from pyllama_kvflash.native import Context, Tokens, split_queries
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Qk, Queries, Schedule, Scorer, Scores, Scoring, View, room_for_candidates
from pyllama_kvflash.policy.scorers import Floats, faded, shares
from pyllama_kvflash.pool.pager import Pager

COPIED = 32e9
"""Approximate bytes per second to a device: PCIe 4."""
_LAYER_THREADS = 8  # more threads would only wait for memory
_N_FREE = 1  # blocks that a choice leaves free, for the next token

Scored = tuple[Scores, float]


class Selector:
    """Runs the scorer when the schedule says so. One scoring runs at a time, and nothing else touches the scorer.

    `ask` begins to copy the last token's queries, during the next computation. `begin` takes a view of the sequence and
    starts to score it, in a thread if the caller need not wait. `finish` waits for the scores and applies the plan. Call
    `cancel` before removing or replacing positions.
    """

    def __init__(self, ctx: Context, pager: Pager, scorer: Scorer, options: Options, *, goes_back: bool = True) -> None:
        """goes_back: whether the last token can be removed and decoded again."""
        self.scorer: Scorer = scorer
        self._on_cpu = not ctx.pinned  # scoring then competes with decoding
        self._again = (
            options.again if goes_back and options.spec is None else 0.0
        )  # off with a drafter, which has read the token already
        self._at_once = True  # whether the last scoring ended within its token
        self.schedule = Schedule(options.interval, options.share, within=self._within(scorer), free=not self._on_cpu)
        self._n_most = options.n_swaps
        self._scales: list[float] = []
        self.warnings: list[str] = []
        self.n_done = 0
        self.seconds = 0.0
        self._ctx = ctx
        self._pager = pager
        self._worker = ThreadPoolExecutor(1, "kvflash-score")
        self._layers = ThreadPoolExecutor(min(_LAYER_THREADS, options.n_threads or 1), "kvflash-layer")
        self._job: Future[Scored] | None = None
        self._view: View | None = None
        self._shapes = [(layer.n_head, layer.n_embd_head_k) for layer in ctx.tapped()]
        self._into = ctx.host_buffer(4 * sum(n * m for n, m in self._shapes)).view(np.float32)
        self._ticket: int | None = None
        self._ticked: float | None = None
        self._orphaned = False  # whether a cut-off step began the scoring: the next token then discards it

    def close(self) -> None:
        """End the threads."""
        self.cancel()
        self._worker.shutdown()
        self._layers.shutdown()
        if close := getattr(self.scorer, "close", None):
            close()

    def use(self, scorer: Scorer) -> None:
        """Replace the scorer. Raises UnsupportedError and HostMemoryError."""
        self.cancel()
        self.schedule.within = self._within(scorer)
        self._pager.summarise(scorer.summary)
        self.scorer = scorer

    def _within(self, scorer: Scorer) -> bool:
        """Return whether a scoring may end within its token.

        That needs a scorer that works on summaries. On a GPU it also needs a token that can be decoded again.
        """
        return scorer.summary is not None and (self._on_cpu or (bool(self._again) and shares(scorer)))

    @property
    def repeats(self) -> bool:
        """Whether a token may have to be decoded again."""
        return bool(self._again) and shares(self.scorer)

    def missed(self, event: Reselect) -> bool:
        """Return whether the last token must be decoded again: chunks paged in after it hold too much of its attention."""
        return self.repeats and event.missed > self._again and self._at_once

    @property
    def needed(self) -> bool:
        """Whether there is something to choose: a chunk is out, or would be if other sequences took their share of the pool."""
        ledger = self._pager.ledger
        return ledger.n_resident < ledger.n_chunks or ledger.n_chunks > ledger.n_share

    def queries(self, back: int = 0) -> Queries:
        """Return, at once, the queries of the last decoded token, or of the token that is `back` tokens before it in the batch.

        They are one array (n_head, n_embd_head_k) for each pooled layer. A copy begun by ask() is not affected.
        """
        return self._ctx.queries(back)

    def ask(self) -> None:
        """Begin to copy the queries of the last decoded token."""
        self._ticket = self._ctx.begin_queries(self._into)

    def _answer(self) -> Queries:
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            msg = "no queries were asked for"
            raise AssertionError(msg)
        self._ctx.wait(ticket)
        return split_queries(self._into.copy(), self._shapes)

    def tick(self, tokens: Callable[[], Tokens], n_tokens: int, n_new: int) -> Reselect | None:
        """While the last n_new of n_tokens tokens are being decoded, apply scores that are due, or begin to score.

        tokens: returns all n_tokens tokens, (n_tokens,) int32. Returns the change, or None.
        """
        if self._orphaned:
            self.cancel()
        self._orphaned = True
        now = time.perf_counter()
        self.schedule.step(n_new, None if self._ticked is None else now - self._ticked)
        self._ticked = now
        asked = self._ticket is not None
        if self._job is None and not asked and self.schedule.begin():
            if self.needed:
                self.ask()
            else:
                self.schedule.restart()
        if self._ticket is not None and (asked or not self.schedule.beside):
            self.begin(tokens(), [self._answer()])
        event = None
        if self._job is not None and self.schedule.apply():
            event = self.finish("decode", n_tokens, self._n_most)
        self._orphaned = False
        return event

    def rest(self) -> None:
        """Exclude the time until the next token from the schedule's measurements."""
        self._ticked = None

    def saved(self) -> Scoring:
        """Return the state of scoring, for a snapshot. Waits for a scoring under way.

        If the scoring failed, the state has no scores, and a later step scores anew.
        """
        if self._orphaned:  # the next token cancels it
            return Scoring()
        queries, scores, schedule = None, None, self.schedule
        if self._job is not None and self._job.exception() is None:
            scores = self._job.result()[0]
        elif self._ticket is not None:
            self._ctx.wait(self._ticket)
            queries = self._into.copy()
        return Scoring(schedule.n_since, queries, scores, schedule.cost_s, schedule.step_s or 0.0)

    def resume(self, saved: Scoring) -> None:
        """Continue from a saved state, with the sequence that it was saved with."""
        self.cancel()
        self.schedule.resume(saved)
        if saved.scores is not None:
            self._job = Future()
            self._job.set_result((saved.scores, 0.0))
        elif saved.queries is not None and len(saved.queries) == len(
            self._into
        ):  # otherwise another policy tapped other layers
            self._into[:] = saved.queries
            self._ticket = 0  # a wait for this ticket waits for all copies

    @property
    def n_steady(self) -> int:
        """Tokens that may be decoded in one batch before the selector has to act."""
        if self._ticket is not None:
            return 1
        return self.schedule.n_until(due=self._job is not None)

    def now(
        self,
        reason: str,
        tokens: Tokens,
        queries: Sequence[Queries],
        n_most: int | None = None,
        mass: Floats | None = None,
    ) -> Reselect:
        """Score and change the pool at once. n_most: the most chunks to page in; None: no limit. mass: the queries' attention,
        see policy.View.
        """
        ticked = self._ticked if reason == "decode" else None  # a token decoded again counts in the measurements
        self.cancel()
        self._ticked = ticked
        self._orphaned = True
        self._pager.wait_stored()
        self.begin(tokens, queries, close=reason == "question", mass=mass)
        event = self.finish(reason, len(tokens), n_most)
        self.schedule.restart()
        self._orphaned = False
        return event

    def begin(
        self,
        tokens: Tokens,
        queries: Sequence[Queries],
        *,
        close: bool = False,
        mass: Floats | None = None,
    ) -> None:
        """Start to score the sequence as it is now. close: also give the scorer all keys, because there is time to read them."""
        self._scales = self._scales or self._ctx.query_scales().tolist()  # fixed once a graph was built
        ledger = self._pager.ledger
        candidates = ledger.candidates()
        candidates[self._pager.n_whole :] = False
        self._view = View(
            tokens=tokens,
            chunk=ledger.chunk,
            touched=ledger.touched,
            candidates=candidates,
            queries=queries,
            scales=self._scales,
            n_whole=self._pager.n_whole,
            summaries=self._pager.summaries,
            room=max(0, room_for_candidates(ledger, _N_FREE)),
            keys=self._pager.keys if close else None,
            each=self._each,
            mass=mass,
        )
        self._at_once = close or not self.schedule.beside
        self._job = self._start(self._view, self._pager.summarising)

    def finish(self, reason: str, pos: int, n_most: int | None = None) -> Reselect:
        """Wait for the scores, and make the best chunks resident.

        pos: positions written, for the event.
        n_most: the most chunks to page in; None: no limit.
        """
        job, view = self._job, self._view
        if job is None:
            msg = "no scoring was begun"
            raise AssertionError(msg)
        try:
            scores, score_s = job.result()
        except ScorerError as err:
            if view is None:
                raise
            scores, score_s = self._fall_back(err, view)
        self._job = self._view = None
        begin, now = time.perf_counter(), scores
        if reason == "decode" and shares(self.scorer):
            scores = faded(scores, self._pager.ledger.score[: len(scores)])
        plan = self._pager.reselect(scores, _N_FREE, n_most)
        apply_s = time.perf_counter() - begin
        if reason == "decode":
            copied = 0 if self._on_cpu else len(plan.page_ins) * self._pager.records.record_bytes
            self.schedule.scored(score_s, apply_s, copied / COPIED)
        self.n_done += 1
        self.seconds += score_s + apply_s
        shown: list[float | None] = scores.tolist()
        for i in np.flatnonzero(np.isnan(scores)):
            shown[i] = None
        known = [c for c in plan.page_ins if c < len(now)]  # the others were written after scoring began
        missed = float(np.nansum(now[known])) if shares(self.scorer) else 0.0
        return Reselect(pos, reason, tuple(shown), plan.drops, plan.page_ins, score_s, apply_s, missed)

    def cancel(self) -> None:
        """Wait for a scoring under way, and discard its scores."""
        if self._job is not None:
            self._job.exception()
        self._job = self._view = self._ticket = self._ticked = None
        self._orphaned = False
        self.schedule.restart()

    def _fall_back(self, err: ScorerError, view: View) -> Scored:
        """Replace a failed scorer by qk, with summaries made from the stored records, and score."""
        self.warnings.append(f"{self.scorer.name} cannot score: {err}; using qk")
        if close := getattr(self.scorer, "close", None):
            close()
        self._pager.summarise(Qk().summary)
        self.scorer = Qk()
        self.schedule.within = self._within(self.scorer)
        return _timed(self.scorer, replace(view, summaries=self._pager.summaries), ())

    def _start(self, view: View, after: Sequence[Future[None]]) -> Future[Scored]:
        """Score in another thread. If the caller waits anyway and the scorer reads summaries, score in this thread."""
        if not self._at_once or self.scorer.summary is None:
            with suppress(RuntimeError):  # no memory for a thread
                return self._worker.submit(_timed, self.scorer, view, after)
        res: Future[Scored] = Future()
        try:
            res.set_result(_timed(self.scorer, view, after))
        except KVFlashError as err:
            res.set_exception(err)
        return res

    def _each(self, f: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        items = list(items)
        try:
            return self._layers.map(f, items)
        except RuntimeError:  # no memory for a thread
            return map(f, items)


def _timed(scorer: Scorer, view: View, after: Sequence[Future[None]]) -> Scored:
    """Return the scores (NaN for chunks that are not candidates) and the seconds they took.

    after: summaries to wait for first; the wait is not counted. Raises ScorerError, SnapshotError and Interrupted.
    """
    for summary in after:
        summary.result()
    begin = time.perf_counter()
    try:
        scores = np.asarray(scorer.score(view), np.float64)
    except (Interrupted, ScorerError, SnapshotError):
        raise
    except KVFlashError as err:
        raise ScorerError(str(err)) from err
    except Exception as err:
        msg = f"it failed with {type(err).__name__}: {err}"
        raise ScorerError(msg) from err
    n = len(view.candidates)
    if scores.shape != (n,) or np.any(np.isnan(scores[view.candidates])):
        msg = f"it gave scores of shape {scores.shape}, or not a number, for {n} chunks"
        raise ScorerError(msg)
    return np.where(view.candidates, scores, np.nan), time.perf_counter() - begin
