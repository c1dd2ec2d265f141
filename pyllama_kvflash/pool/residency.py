"""Residency: where the chunks are, and whether ledger, host store and native pool agree about it."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native import Context
from pyllama_kvflash.policy import Ledger, LedgerError
from pyllama_kvflash.pool.guests import GuestRoom
from pyllama_kvflash.pool.host_store import HostStore


@dataclass(frozen=True, slots=True)
class Residency:
    """The place of every chunk, as arrays (n_chunks,).

    resident, sealed, stored, protected: bool.
    block: int32; -1 if not resident.
    score: float64, from the last scoring, higher is hotter; NaN: not scored.
    layers: float32; how many pooled layers hold the chunk: all of them if it is resident; otherwise, with policy fresh, the layers
        that chose it. A layer that chose a quarter of the chunk counts 0.25.
    coded: bool; whether the chunk has codes, so that layers can attend to it while it is not resident.
    """

    resident: npt.NDArray[np.bool_]
    block: npt.NDArray[np.int32]
    sealed: npt.NDArray[np.bool_]
    stored: npt.NDArray[np.bool_]
    protected: npt.NDArray[np.bool_]
    score: npt.NDArray[np.float64]
    layers: npt.NDArray[np.float32]
    coded: npt.NDArray[np.bool_]

    def to_dict(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the chunk numbers and the arrays by name, all (n_chunks,), for pandas.DataFrame."""
        return {"chunk": np.arange(len(self.resident))} | {
            field.name: getattr(self, field.name) for field in fields(self)
        }


def look(ledger: Ledger, ctx: Context, guests: GuestRoom | None) -> Residency:
    """Return where every chunk is now. guests: None without codes."""
    block = np.full(ledger.n_chunks, -1, np.int32)
    chunks, _ = ctx.blocks()
    used = chunks >= 0
    block[chunks[used]] = np.flatnonzero(used)
    sealed = np.arange(ledger.n_chunks) < ledger.n_sealed
    chosen = guests.layers() if guests else np.zeros(ledger.n_chunks, np.float32)
    layers = np.where(ledger.resident, np.float32(ctx.pool_info().n_layer), chosen)
    coded = np.arange(ledger.n_chunks) < (guests.n_coded if guests else 0)
    return Residency(ledger.resident, block, sealed, ledger.stored, ledger.protected(), ledger.score, layers, coded)


def compare(ledger: Ledger, store: HostStore, ctx: Context) -> None:
    """Raise LedgerError unless ledger, host store and native pool agree."""
    ledger.check_integrity()
    there = held(ctx)
    if there.keys() != resident(ledger):
        msg = f"ledger and pool differ about chunks {sorted(there.keys() ^ resident(ledger))[:8]}"
        raise LedgerError(msg)
    for chunk, n in there.items():
        want = min(ledger.chunk, ledger.n_tokens - chunk * ledger.chunk)
        if n != want:
            msg = f"chunk {chunk} has {n} cells in the pool, and {want} positions"
            raise LedgerError(msg)
    missing = [int(c) for c in np.flatnonzero(ledger.stored) if int(c) not in store]
    if missing:
        msg = f"no record in the store for chunks {missing[:8]}"
        raise LedgerError(msg)


def held(ctx: Context) -> dict[int, int]:
    """Return the chunks of a sequence in the native pool: {chunk: cells in use}."""
    chunks, n_used = ctx.blocks()
    return {int(c): int(n) for c, n in zip(chunks, n_used, strict=True) if c >= 0}


def resident(ledger: Ledger) -> set[int]:
    """Return the chunks that are in the pool according to the ledger."""
    return {int(c) for c in np.flatnonzero(ledger.resident)}
