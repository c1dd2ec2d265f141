"""Runs of which some chunks are out of the pool, and are attended to by their codes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pyllama_kvflash.native import Record
from pyllama_kvflash.native.guests import Guests
from support.oracles import SCRIBBLE, Case, Logits, Run

N_READ, N_STEPS = 1000, 40  # tokens before chunks leave; then, half of them one by one
EXACT = (32, 32)


class Coarse(NamedTuple):
    """A run of which some chunks are out."""

    run: Run
    guests: Guests
    records: list[Record]


def coarse_run(
    case: Case,
    *,
    bits: tuple[int, int] = EXACT,
    out: Sequence[int] = range(1, 10),
    n_blocks: int = 0,
    n_exchange: int = 4,
    n_cover: int = N_READ // 64,
    forged: Sequence[Record] | None = None,
    **more: Any,
) -> Coarse:
    """Chunks `out` leave the pool; the first n_cover have codes, of their records or of forged ones."""
    run = case.pool(1280, coarse=bits, n_exchange=n_exchange, **more)
    run.feed(N_READ)
    records = [run.read(c) for c in range(N_READ // 64)]
    for c in out:
        run.ctx.drop(c)
    guests = Guests(run.ctx)
    coded = list(forged or records)[:n_cover]
    guests.put(range(len(guests.layers)), 0, coded)
    guests.cover(0, coded)
    if n_blocks:
        guests.resize(n_blocks)
    run.ctx.scribble(SCRIBBLE)
    return Coarse(run, guests, records)


def rows_instead(case: Case, forged: Sequence[Record], out: Sequence[int] = range(1, 10)) -> Run:
    """A pool that has these chunks, with the rows of other records."""
    run = case.pool(1280)
    run.feed(N_READ)
    for c in out:
        run.ctx.drop(c)
        run.ctx.page_in(c, forged[c])
    return run


def steps(run: Run) -> Logits:
    """Half of the tokens one by one, half at once."""
    return np.concatenate([run.feed(N_STEPS // 2, 1), run.feed_at_once(N_STEPS // 2)])


def apart(got: Logits, want: Logits) -> float:
    """The relative RMS of the step in the middle: where an expert or a window flips, a step is far off."""
    d = got.astype(np.float64) - want
    return float(np.median(np.sqrt(np.mean(d**2, 1) / np.mean(want.astype(np.float64) ** 2, 1))))
