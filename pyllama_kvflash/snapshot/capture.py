"""Capture a sequence for a snapshot, while it continues; and restore it, in the same pool or another."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.files import check_outputs
from pyllama_kvflash.native import Context, Record, StateBytes, Tokens
from pyllama_kvflash.native.checksum import checksum
from pyllama_kvflash.native.lib import mapped
from pyllama_kvflash.policy import Scoring
from pyllama_kvflash.pool.host_store import HostStore, Stored
from pyllama_kvflash.pool.pager import Pager
from pyllama_kvflash.snapshot import layout
from pyllama_kvflash.snapshot.file import Filling, Outline, SnapshotFile
from pyllama_kvflash.snapshot.layout import Chunks, Contents, Identity, Source
from pyllama_kvflash.snapshot.saved_guests import SavedGuests
from pyllama_kvflash.snapshot.saved_pool import SavedPool
from pyllama_kvflash.text import n_common

States = Sequence[tuple[int, StateBytes]]
"""States outside chunks (recurrent, sliding window): (position, bytes), in ascending order."""

T = TypeVar("T")

_HASHERS = 8  # threads

OnRecord = Callable[[int, int], None]
"""Called with the number of records written, and the number to write in all."""

Choose = Callable[[Chunks], Sequence[Source]]
"""Returns the files that already have records of the first chunks, found by checksum."""


def identity_of(ctx: Context, *, exact: bool) -> Identity:
    """Return the identity of a context, which its snapshots must match. exact: whether prompts are read exactly."""
    info, layers = ctx.pool_info(), ctx.layers()
    head = np.zeros((), layout.IDENTITY)
    for name in ("record_bytes", "meta_bytes", "n_layer", "flags"):
        head[name] = getattr(info, name)
    long = layout.LONG if ctx.model.takes_long_rope(ctx.n_ctx) else 0
    head["flags"] |= np.uint32((layout.EXACT if exact else 0) | long)
    head["fingerprint"], head["chunk"] = ctx.model.fingerprint, info.n_chunk
    head["memory"] = ctx.memory_class.encode()
    rows = np.array(
        [tuple(getattr(layer, name) for name in layout.LAYER.names or ()) for layer in layers], layout.LAYER
    )
    return Identity(head.tobytes() + rows.tobytes())


@dataclass(frozen=True, slots=True)
class Capture:
    """The state of a sequence at one moment; the sequence itself continues.

    The capture holds its records until release() is called. write() calls that at its end, whether it succeeds or fails; the garbage
    collector does so, too.
    """

    contents: Contents
    full: tuple[Stored, ...]  # the records of all full chunks
    last: Record | None  # the record of a partly filled last chunk
    store: HostStore
    holder: object  # from store.hold()
    codes: Sequence[Record] = ()  # a copy of each layer's codes; empty: there are none
    inputs: tuple[tuple[str, Path], ...] = ()  # files that must not be overwritten, each with its purpose

    def release(self) -> None:
        """Release the records. Harmless when called again."""
        self.store.release(self.holder)

    def __del__(self) -> None:
        """Release the records of a capture that was never written."""
        self.release()

    def write(self, path: Path, on_record: OnRecord | None = None, choose: Choose | None = None) -> int:
        """Write the file. Returns its size in bytes. Raises SnapshotError, and UsageError if `path` is one of `inputs`.

        choose: returns files in the same folder that already have some of the records; these are not written again.
        on_record: called with (records written, records in all).
        """
        chunks = self.contents.chunks
        try:
            check_outputs([("the snapshot", path)], self.inputs)
            with ThreadPoolExecutor(_HASHERS, "kvflash-hash") as workers:
                found = mapped(workers, lambda stored: stored.summed(checksum), self.full)
                chunks["checksum"][: len(self.full)] = [np.void(each) for each in found]
                if self.last is not None:
                    chunks["checksum"][-1] = np.void(checksum(self.last))
                guests = self.contents.guests
                if guests is not None:
                    guests = replace(guests, checksums=tuple(mapped(workers, checksum, self.codes)))
                contents = replace(self.contents, sources=tuple(choose(chunks) if choose else ()), guests=guests)
                for _ in mapped(workers, Stored.see, self.full[contents.n_lent :]):
                    pass
            own = self.records[contents.n_lent :]
            report = (lambda i: on_record(i, len(own))) if on_record else None
            return layout.write(path, contents, own, report, self.codes)
        finally:
            self.release()

    @property
    def records(self) -> tuple[Record, ...]:
        """The places of all records, in order."""
        return (*(stored.record for stored in self.full), *(() if self.last is None else (self.last,)))

    def begin(self, path: Path) -> Future[int]:
        """Write the file in a new thread. Raises SnapshotError if no thread can start."""
        worker = ThreadPoolExecutor(1, "kvflash-save")
        try:
            return self.submit(worker, path, partial(self.write, path))
        finally:
            worker.shutdown(wait=False)

    def submit(self, worker: ThreadPoolExecutor, path: Path, write: Callable[[], T]) -> Future[T]:
        """Have a worker write the file. Raises SnapshotError if no thread can start; the records are then released."""
        try:
            return worker.submit(write)
        except RuntimeError as err:  # no memory for a thread, or the worker was shut down
            self.release()
            msg = f"{path} cannot be written: {err}"
            raise SnapshotError(msg) from None


def capture(
    pager: Pager,
    identity: Identity,
    tokens: Tokens,
    states: States,
    *,
    n_ctx: int,
    pending: int | None,
    opens_until: int,
    scoring: Scoring,
    inputs: tuple[tuple[str, Path], ...],
) -> Capture:
    """Capture the first len(tokens) positions: either all of the sequence's, or those up to the end of a chunk.

    states: at some of these positions, the states that are not in chunks. pending: the token that follows, not decoded yet.
    opens_until: see PooledSequence. scoring: the scoring under way. inputs: see Capture.

    Raises UsageError.
    """
    chunk, n = pager.ledger.chunk, len(tokens)
    if n == 0:
        msg = "there is nothing to save: the context is empty"
        raise UsageError(msg)
    pager.wait_stored()
    saved = SavedPool.of(pager).first(n, chunk)
    full = tuple(pager.records.stored(c) for c in range(n // chunk))
    last = np.empty(pager.records.record_bytes, np.uint8) if n % chunk else None
    if last is not None:
        pager.ctx.read(n // chunk, last)
    sequence = np.zeros((), layout.SEQUENCE)
    sequence["n_tokens"], sequence["n_ctx"], sequence["n_pool"] = n, n_ctx, saved.n_pool
    sequence["n_kv"], sequence["tick"] = saved.n_kv, saved.tick
    sequence["pending"], sequence["opens_until"] = -1 if pending is None else pending, opens_until
    chunks = np.zeros(-(-n // chunk), layout.CHUNK)
    chunks["chain"] = [np.void(link) for link in layout.chain(identity, tokens, chunk)]
    chunks["pinned"][[c for c in saved.pins if c < len(chunks)]] = 1
    for name in ("resident", "block", "touched", "score"):
        chunks[name] = getattr(saved, name)
    guests, codes = SavedGuests.of(pager, n)
    contents = Contents(identity, sequence, tokens, chunks, tuple(states), scoring, guests=guests)
    return Capture(contents, full, last, pager.records, pager.records.hold(), codes, inputs)


def usable(snapshot: Outline, identity: Identity, prompt: Tokens | None) -> int:
    """Return how many positions of a snapshot can be restored here.

    prompt: restore only the prefix that the snapshot and this prompt share, without the prompt's last token, which must be decoded;
    None: restore all. Raises SnapshotError, with the reason, if no position can be restored.
    """
    if (why := snapshot.identity.difference(identity)) is not None:
        msg = f"{snapshot.path} cannot be used: {why}"
        raise SnapshotError(msg)
    n_all = len(snapshot.tokens)
    if prompt is None:
        return n_all
    n_same = n_common(prompt, snapshot.tokens)
    fit = [n for n in snapshot.stops if n <= n_same and n < len(prompt)]
    if not fit:
        msg = f"{snapshot.path} cannot be used: of its {n_all:,} tokens the first {n_same:,} are those of this text"
        raise SnapshotError(msg)
    return fit[-1]


def put_back(snapshot: SnapshotFile, pager: Pager, n: int) -> StateBytes:
    """Restore the first n positions into an empty sequence. n: from usable().

    Returns the state outside chunks, which the caller restores next; b"" if there is none. Raises PoolError,
    HostMemoryError, and SnapshotError if the codes, or a record that is paged in at once, are damaged.
    """
    contents = snapshot.contents
    sequence, chunks = contents.sequence, contents.chunks
    saved = SavedPool(
        n_tokens=len(contents.tokens),
        n_pool=int(sequence["n_pool"]),
        n_kv=int(sequence["n_kv"]),
        tick=int(sequence["tick"]),
        resident=chunks["resident"].copy(),
        block=chunks["block"].copy(),
        touched=chunks["touched"].copy(),
        score=chunks["score"].copy(),
        pins=frozenset(np.flatnonzero(chunks["pinned"]).tolist()),
        guests=contents.guests,
    )

    def lend(chunk: int) -> None:
        found = chunks["checksum"][chunk].tobytes()
        pager.records.lend(chunk, found, Filling(snapshot, chunk))

    fits = pager.guests and contents.guests and contents.guests.fits(pager.guests)
    saved = saved.first(n, pager.ledger.chunk)
    pager.records.memory.expect(len(saved.resident))  # first, because it may raise
    saved.put_back(pager, lend, snapshot.codes if fits else None)
    pager.loaded()
    return next((blob for pos, blob in contents.states if pos == n), b"")
