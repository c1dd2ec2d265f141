"""Read what `kvflash run --trace` wrote into arrays: where every chunk was, what it was worth, and what moved.

A trace is one JSON object a line: "start" with the run's settings, then the engine's events in order. It may end
anywhere, even in the middle of a line. `read_trace` keeps a bounded number of moments, however long the run was.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import UsageError

MAX_MOMENTS = 1000  # for the prompt, and as many for the decoded tokens: a picture has no room for more
_MAX_CELLS = 1 << 24  # most cells of an array of moments by chunks
_MAX_START = 1 << 16  # most bytes of the first line: a file that is not a trace may be one line of many GB
_RECORD = "record one with kvflash run --trace FILE"

Ints = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A run. At moment i, positions[i] positions are written, and all that had to move for that has moved."""

    meta: dict[str, Any]  # the first line: model, policy, n_ctx, n_pool, chunk, tau
    n_prompt: int  # tokens of the prompt, computed or not
    reason: str | None  # why it ended; None: the trace was cut off
    positions: Ints  # (n_moments,) never decreasing
    residency: (
        Shares  # (n_moments, n_chunks) -1: not written yet, 0: out, 1: resident, between: in this share of the layers
    )
    n_in: Ints  # (n_moments,) chunks brought back since the moment before
    n_out: Ints  # (n_moments,) chunks dropped since the moment before
    reselect_pos: Ints  # (n_reselects,)
    scores: Scores  # (n_reselects, n_chunks) NaN: no candidate, or not written yet
    check_pos: Ints  # (n_checks,) positions up to which tokens were compared with the full cache
    checks: Ints  # (n_checks, 2) how many, and how many of them agreed
    last_reselect: Ints  # (n_moments,) index of the reselect whose choice the moment shows; -1: none

    @property
    def chunk(self) -> int:
        """Positions in a chunk."""
        return int(self.meta["chunk"])


def read_trace(path: str | Path) -> Trace:
    """Read a trace, cut off or not. Raises UsageError: no such file, no trace, a bad line, or nothing happened in
    it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            replay = _Replay(_start(path, file))
            cut: UsageError | None = None
            for number, line in enumerate(file, 2):
                if cut is not None:
                    raise cut
                try:
                    replay.event(_object(line))
                except _BadEventError as err:
                    bad = UsageError(f"line {number} of {path} {err}: the trace is damaged, {_RECORD}")
                    if not isinstance(err, _NotJSONError):
                        raise bad from None
                    cut = bad  # if it is the last line, the run was cut off there
    except FileNotFoundError:
        msg = f"there is no trace {path}: {_RECORD}"
        raise UsageError(msg) from None
    except IsADirectoryError:
        msg = f"{path} is a directory: give a trace, or {_RECORD}"
        raise UsageError(msg) from None
    except OSError as err:
        msg = f"the trace {path} cannot be read: {err.strerror}"
        raise UsageError(msg) from None
    trace = replay.trace()
    if not len(trace.positions):
        msg = f"the trace {path} ends before the first batch of the prompt: let the run get further"
        raise UsageError(msg)
    return trace


#
# lines
#


class _BadEventError(Exception):
    """A line that no run writes. Its message says in a clause what is wrong."""


class _NotJSONError(_BadEventError):
    """A line that is not JSON, such as the last one of a run that was cut off."""


def _start(path: Path, file: BinaryIO) -> dict[str, Any]:
    """Return the run's settings. Raises UsageError."""
    line = file.readline(_MAX_START)
    if not line:
        msg = f"{path} is empty: {_RECORD}"
        raise UsageError(msg)
    try:
        meta = _object(line)
        if meta["event"] != "start":
            raise _BadEventError(f'begins with "{meta["event"]}", not with "start"')
        chunk = _integer(meta, "chunk", low=1)
        _integer(meta, "n_ctx", low=1)
        if meta.get("n_pool") is not None:
            _integer(meta, "n_pool", low=chunk)
    except _BadEventError as err:
        msg = f"{path} is not a trace, its first line {err}: {_RECORD}"
        raise UsageError(msg) from None
    return {name: value for name, value in meta.items() if name != "event"}


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # no UTF-8 and no JSON are ValueErrors
        raise _NotJSONError("is not JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        raise _BadEventError("is not an event")
    return found


def _integer(event: dict[str, Any], name: str, *, low: int = 0, high: int = 1 << 31) -> int:
    value = event.get(name)
    if type(value) is not int or not low <= value <= high:
        raise _BadEventError(f'has {json.dumps(value)[:40]} for "{name}", not a number from {low} to {high}')
    return value


def _chunks(event: dict[str, Any], name: str, n_max: int) -> list[int]:
    value = event.get(name)
    if not isinstance(value, list) or not all(type(c) is int and 0 <= c < n_max for c in value):
        raise _BadEventError(f'has {json.dumps(value)[:40]} for "{name}", not chunks below {n_max}')
    return value


#
# replay
#


class _Thinned:
    """A sample of at most `limit` of many things, evenly spaced, always with the first and the last one."""

    def __init__(self, limit: int) -> None:
        self._limit, self._stride, self._seen = limit, 1, 0
        self._kept: list[Any] = []
        self._last: Any = None

    def add(self, thing: Any) -> None:
        if self._seen % self._stride == 0:
            self._kept.append(thing)
        if len(self._kept) >= self._limit:
            del self._kept[1::2]
            self._stride *= 2
        self._seen += 1
        self._last = thing

    def __iter__(self) -> Iterator[Any]:
        yield from self._kept
        if self._last is not None and self._kept[-1] is not self._last:
            yield self._last


@dataclass(frozen=True, slots=True, eq=False)
class _Moment:
    pos: int
    state: Shares
    n_in: int  # since the beginning
    n_out: int
    reselects: int


class _Replay:
    """Follows a run event by event, and takes notes."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self._meta = meta
        self._chunk: int = meta["chunk"]
        self._n_ctx: int = meta["n_ctx"]
        self._n_max = -(-self._n_ctx // self._chunk)
        limit = max(4, min(MAX_MOMENTS, _MAX_CELLS // self._n_max))
        self._prefill, self._decode, self._reselects = _Thinned(limit), _Thinned(limit), _Thinned(2 * limit)
        self._checks = _Thinned(MAX_MOMENTS)
        self._state: Shares = np.zeros(0, np.float32)
        self._written = 0
        self._n_prompt = 0
        self._first: int | None = None  # position of the first produced token
        self._n_tokens = 0
        self._n_in = self._n_out = self._n_reselects = 0
        self._moved = False  # something moved since the last moment
        self._n_read = 0  # tokens of the prompt
        self._came: set[int] = set()  # chunks brought back since the last batch of the prompt
        self._reason: str | None = None

    def event(self, event: dict[str, Any]) -> None:
        """Take in a line after the first. Raises _BadEventError."""
        match event["event"]:
            case "prefill":
                n, done = _integer(event, "total", high=self._n_ctx), _integer(event, "done", low=1, high=self._n_ctx)
                if self._first is None:
                    self._n_prompt, before, self._n_read = n, self._n_read, done
                    self._write(done)
                    if event.get("exact") is True:  # full ones went by the pool, unless they have come in since
                        full = slice(before // self._chunk, done // self._chunk)
                        self._state[full] = np.isin(np.arange(full.start, full.stop), list(self._came))
                    self._came.clear()
                    self._moment(self._prefill)
                else:  # an answer is read again
                    self._moment(self._decode)
            case "paged":
                self._move(event)
            case "reselect":
                self._move(event)
                self._n_reselects += 1
                scores = self._scores(event)
                self._reselects.add((self._n_reselects, event["pos"], scores))
            case "layers":
                self._layers(event)
            case "checked":
                n = _integer(event, "n", low=1, high=self._n_ctx)
                at = _integer(event, "pos", low=1, high=self._n_ctx)
                self._checks.add((at, n, _integer(event, "agreed", high=n)))
            case "token":
                self._token()
            case "done":
                reason = event.get("reason")
                self._reason = reason if isinstance(reason, str) else "done"
            case "start":
                raise _BadEventError("starts another run")
            case _:  # one that is not drawn
                pass

    def _token(self) -> None:
        """Count a produced token: the tokens before it are written, and it will be with the next one."""
        if self._first is None:
            self._first = self._written
        else:
            self._n_tokens += 1
            if self._first + self._n_tokens > self._n_ctx:
                raise _BadEventError(f"is a token beyond the context of {self._n_ctx}")
            self._write(self._first + self._n_tokens)
            self._moment(self._decode)

    def _write(self, n_tokens: int) -> None:
        """Note that n_tokens positions are written: new chunks are resident."""
        self._written = max(self._written, n_tokens)
        n_new = -(-self._written // self._chunk) - len(self._state)
        if n_new > 0:
            self._state = np.concatenate([self._state, np.ones(n_new, np.float32)])

    def _move(self, event: dict[str, Any]) -> None:
        self._write(_integer(event, "pos", high=self._n_ctx))
        n = len(self._state)
        drops, page_ins = _chunks(event, "drops", n), _chunks(event, "page_ins", n)
        self._state[drops] = 0
        self._state[page_ins] = 1
        self._n_out += len(drops)
        self._n_in += len(page_ins)
        self._came.update(page_ins)
        self._came.difference_update(drops)
        self._moved = self._moved or bool(drops or page_ins)

    def _layers(self, event: dict[str, Any]) -> None:
        """Take in how many layers hold each chunk, which is all that there is to know of where it is."""
        self._write(_integer(event, "pos", high=self._n_ctx))
        n_layer, found = _integer(event, "n_layer", low=1), self._numbers(event, "layers")
        if len(found) != len(self._state) or not np.all((found >= 0) & (found <= n_layer)):
            msg = f'has no list of {len(self._state)} numbers from 0 to {n_layer} for "layers"'
            raise _BadEventError(msg)
        self._state = (found / n_layer).astype(np.float32)
        self._moved = True

    def _numbers(self, event: dict[str, Any], name: str) -> npt.NDArray[np.float64]:
        """Return a list of numbers; None becomes NaN. Raises _BadEventError."""
        try:
            found = np.array(event.get(name), np.float64)
        except (TypeError, ValueError, OverflowError):
            found = np.zeros(())
        if found.ndim != 1 or len(found) > self._n_max:
            msg = f'has no list of numbers for "{name}"'
            raise _BadEventError(msg)
        return found

    def _scores(self, event: dict[str, Any]) -> Scores:
        found = self._numbers(event, "scores")
        with np.errstate(over="ignore"):
            scores = found.astype(np.float32)
        scores[~np.isfinite(scores)] = np.nan
        return scores

    def _moment(self, moments: _Thinned) -> None:
        moments.add(_Moment(self._written, self._state.copy(), self._n_in, self._n_out, self._n_reselects))
        self._moved = False

    def trace(self) -> Trace:
        """Return what was noted."""
        if self._moved and self._written:  # the last move has no moment yet
            self._moment(self._prefill if self._first is None else self._decode)
        moments: list[_Moment] = [*self._prefill, *self._decode]
        numbers, pos, scores = zip(*self._reselects, strict=True) if self._n_reselects else ((), (), ())
        checks = np.array([*self._checks], np.int64).reshape(-1, 3)
        return Trace(
            meta=self._meta,
            n_prompt=self._n_prompt,
            reason=self._reason,
            positions=np.array([m.pos for m in moments], np.int64),
            residency=_padded([m.state for m in moments], len(self._state), np.float32(-1)),
            n_in=np.diff([m.n_in for m in moments], prepend=0),
            n_out=np.diff([m.n_out for m in moments], prepend=0),
            reselect_pos=np.array(pos, np.int64),
            scores=_padded(scores, len(self._state), np.float32(np.nan)),
            check_pos=checks[:, 0],
            checks=checks[:, 1:],
            last_reselect=np.searchsorted(numbers, [m.reselects for m in moments], side="right") - 1,
        )


def _padded(rows: Any, width: int, fill: Any) -> npt.NDArray[Any]:
    res = np.full((len(rows), width), fill)
    for i, row in enumerate(rows):
        res[i, : len(row)] = row[:width]
    return res
