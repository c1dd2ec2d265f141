"""Time decoded tokens one by one: how long each takes, at which of them chunks moved, and what the Python loop adds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvflash_bench.grid import cpu_name, machine
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.events import Paged, Reselect, Warn
from pyllama_kvflash.native import Sampler, Sampling, devices

WARM_UP = 8  # steps at a context that are not timed, because the first ones build graphs
AFTER = 3  # steps after chunks moved in which their copies still run
ROUNDS = 9  # rounds of the Python loop's measurement


@dataclass(slots=True)
class Steps:
    """Decoded tokens.

    seconds: time of each.
    moved: steps at which chunks moved.
    reselected: steps after which all chunks were scored, with the number that was then to come back.
    pages_in: chunks that did come back.
    """

    seconds: list[float]
    moved: list[int]
    reselected: dict[int, int]
    pages_in: int


def decode_steps(kv: KVFlash, n: int, warnings: list[str]) -> Steps:
    """Decode greedily after what is there, and time each of n steps, sampling included."""
    sampler = Sampler(Sampling(temperature=0), kv.model)
    steps = Steps([], [], {}, 0)
    n_in = 0
    kv.expect(WARM_UP + n)
    token = sampler.sample(kv.ctx)
    for i in range(-WARM_UP, n):
        if i == 0:
            n_in = kv.stats().pages_in
        begin = time.perf_counter()
        events = kv.decode([token])
        token = sampler.sample(kv.ctx)
        seconds = time.perf_counter() - begin
        warnings += [e.text for e in events if isinstance(e, Warn)]
        if i < 0:
            continue
        steps.seconds.append(seconds)
        if any(isinstance(e, Paged | Reselect) for e in events):
            steps.moved.append(i)
        for event in events:
            if isinstance(event, Reselect):
                steps.reselected[i] = len(event.page_ins)
    steps.pages_in = kv.stats().pages_in - n_in
    return steps


def python_loop(kv: KVFlash, rounds: int = ROUNDS) -> dict[str, float] | None:
    """Return seconds a token of the engine's loop, and of a bare loop over the native calls, on the same tokens in
    turns.

    Both stay within a chunk, so nothing moves. Returns None for a recurrent state, which cannot go back.
    """
    chunk = kv.options.chunk
    n = chunk // 2
    while not 0 < kv.n_tokens % chunk <= chunk - n:
        kv.decode([0])
    start = kv.n_tokens
    tokens = [np.array([i % kv.model.n_vocab], np.int32) for i in range(n)]
    sampler = Sampler(Sampling(temperature=0), kv.model)
    engine, bare = [], []
    try:
        for _ in range(rounds):
            kv.rollback(start)  # this also forgets what is being scored
            begin = time.perf_counter()
            for i, token in enumerate(tokens):
                kv.ctx.decode(token, start + i)
                sampler.sample(kv.ctx)
            bare.append((time.perf_counter() - begin) / n)
            kv.ctx.seq_rm(start)
            begin = time.perf_counter()
            for token in tokens:
                kv.decode(token)
                sampler.sample(kv.ctx)
            engine.append((time.perf_counter() - begin) / n)
    except UnsupportedError:
        return None
    return {"engine_s": median(engine), "bare_s": median(bare)}


def near(moved: Sequence[int], n: int, after: int = AFTER) -> list[int]:
    """Return, of n steps, those at which something moved and the `after` next ones."""
    return sorted({i for at in moved for i in range(at, min(at + after + 1, n))})


def hardware() -> str:
    """Return a description of this machine: its GPUs and its processor."""
    return machine() + (f", {cpu_name()}" if any(d.gpu for d in devices()) else "")
