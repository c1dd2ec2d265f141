"""A sequence as a snapshot has it: taken while it goes on, put back where it was or elsewhere."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TypeVar

import numpy as np

from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.native import Context, Record, Tokens
from pyllama_kvflash.policy import Scoring
from pyllama_kvflash.pool.host_store import HostStore
from pyllama_kvflash.pool.pager import Pager
from pyllama_kvflash.snapshot import layout
from pyllama_kvflash.snapshot.file import Outline, SnapshotFile
from pyllama_kvflash.snapshot.layout import Chunks, Contents, Identity, Source
from pyllama_kvflash.snapshot.saved_pool import SavedPool
from pyllama_kvflash.text import n_common

States = Sequence[tuple[int, bytes]]
"""Of what no chunk holds, (position, bytes), in ascending order."""

T = TypeVar("T")

_HASHERS = 8  # threads, each of which hashes a GB a second

OnRecord = Callable[[int, int], None]
"""Called with how many records are written, of how many."""

Choose = Callable[[Chunks], Sequence[Source]]
"""Which files have the records of the first of these chunks already, by their digests."""


def identity_of(ctx: Context, fingerprint: int) -> Identity:
    """What a record of this context can be used with. fingerprint: of the model's file."""
    info, layers = ctx.pool_info(), ctx.layers()
    head = np.zeros((), layout.IDENTITY)
    for name in ("record_bytes", "meta_bytes", "n_layer", "flags"):
        head[name] = getattr(info, name)
    head["fingerprint"], head["chunk"], head["memory"] = fingerprint, info.n_chunk, ctx.memory_class.encode()
    rows = np.array(
        [tuple(getattr(layer, name) for name in layout.LAYER.names or ()) for layer in layers], layout.LAYER
    )
    return Identity(head.tobytes() + rows.tobytes())


@dataclass(frozen=True, slots=True)
class Capture:
    """A sequence as it was at one moment, which goes on meanwhile.

    It holds its records until release(): after it was written, or could not be, or is garbage.
    """

    contents: Contents
    records: tuple[Record, ...]
    checks: tuple[Callable[[], None], ...]  # of the full ones, before they are used
    store: HostStore
    holder: object  # of the store

    def release(self) -> None:
        """Let go of the records. Harmless when called again."""
        self.store.release(self.holder)

    def __del__(self) -> None:
        """Let go of the records of a capture that nobody wrote."""
        self.release()

    def write(self, path: Path, on_record: OnRecord | None = None, choose: Choose | None = None) -> int:
        """The bytes of the file, which has no records of its own that files in the same folder have, which `choose` names.
        Raises SnapshotError.
        """
        n = len(self.records)
        n_full = len(self.contents.tokens) // int(self.contents.identity.fields["chunk"])
        try:
            with ThreadPoolExecutor(_HASHERS, "kvflash-hash") as workers:
                for i, found in enumerate(workers.map(self._digest, range(n), repeat(n_full))):
                    self.contents.chunks["digest"][i] = np.void(found)
                sources = choose(self.contents.chunks) if choose else ()
                contents = replace(self.contents, sources=tuple(sources))
                for _ in workers.map(lambda check: check(), self.checks[contents.n_lent :]):
                    pass
            own = self.records[contents.n_lent :]
            return layout.write(path, contents, own, (lambda i: on_record(i, len(own))) if on_record else None)
        finally:
            self.release()

    def _digest(self, i: int, n_full: int) -> bytes:
        return self.store.digest(i, self.records[i], layout.digest) if i < n_full else layout.digest(self.records[i])

    def begin(self, path: Path) -> Future[int]:
        """Write it in a thread. Raises SnapshotError."""
        worker = ThreadPoolExecutor(1, "kvflash-save")
        try:
            return self.submit(worker, path, partial(self.write, path))
        finally:
            worker.shutdown(wait=False)

    def submit(self, worker: ThreadPoolExecutor, path: Path, write: Callable[[], T]) -> Future[T]:
        """Have a thread write it to a path. Raises SnapshotError if none can start; the records are let go then."""
        try:
            return worker.submit(write)
        except RuntimeError as err:  # no memory for a thread, or it was closed
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
    scoring: Scoring,
) -> Capture:
    """The first len(tokens) positions: all, or those up to a chunk's end. states: at some of them; pending: a token that comes
    after them; scoring: what is under way. Raises UsageError.
    """
    chunk, n = pager.ledger.chunk, len(tokens)
    if n == 0:
        msg = "there is nothing to save: the context is empty"
        raise UsageError(msg)
    pager.wait_stored()
    saved = SavedPool.of(pager).first(n, chunk)
    full = [pager.records.unchecked(c) for c in range(n // chunk)]
    records = [record for record, _ in full]
    if n % chunk:
        last = np.empty(pager.records.record_bytes, np.uint8)
        pager.ctx.read(n // chunk, last)
        records.append(last)
    sequence = np.zeros((), layout.SEQUENCE)
    sequence["n_tokens"], sequence["n_ctx"], sequence["n_pool"] = n, n_ctx, saved.n_pool
    sequence["n_kv"], sequence["tick"] = saved.n_kv, saved.tick
    sequence["pending"] = -1 if pending is None else pending
    chunks = np.zeros(len(records), layout.CHUNK)
    chunks["chain"] = [np.void(link) for link in layout.chain(identity, tokens, chunk)]
    chunks["pinned"][[c for c in saved.pins if c < len(chunks)]] = 1
    for name in ("state", "block", "touched", "score"):
        chunks[name] = getattr(saved, name)
    contents = Contents(identity, sequence, tokens, chunks, (saved.drops, saved.page_ins), tuple(states), scoring)
    return Capture(contents, tuple(records), tuple(check for _, check in full), pager.records, pager.records.hold())


def usable(snapshot: Outline, identity: Identity, prompt: Tokens | None) -> int:
    """How many positions of a snapshot can be put back here, for a prompt that begins with their tokens (None: all of them).

    Fewer than the prompt has: its last token is to be decoded. Raises SnapshotError, with the reason, if there are none.
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
        msg = f"{snapshot.path} cannot be used: of its {n_all} tokens the first {n_same} are those of this text"
        raise SnapshotError(msg)
    return fit[-1]


def put_back(snapshot: SnapshotFile, pager: Pager, n: int) -> bytes:
    """The first n positions, as usable() gave them, into an empty sequence. The state that no chunk holds, to be put back
    next; empty: there is none. Raises SnapshotError (damage of what comes back at once) and PoolError.
    """
    contents = snapshot.contents
    sequence, chunks = contents.sequence, contents.chunks
    saved = SavedPool(
        n_tokens=len(contents.tokens),
        n_pool=int(sequence["n_pool"]),
        n_kv=int(sequence["n_kv"]),
        tick=int(sequence["tick"]),
        state=chunks["state"].copy(),
        block=chunks["block"].copy(),
        touched=chunks["touched"].copy(),
        score=chunks["score"].copy(),
        pins=frozenset(np.flatnonzero(chunks["pinned"]).tolist()),
        drops=contents.plan[0],
        page_ins=contents.plan[1],
    )

    def lend(chunk: int) -> None:
        digest = chunks["digest"][chunk].tobytes()
        pager.records.lend(chunk, snapshot.record(chunk), digest, partial(snapshot.check, chunk))

    saved.first(n, pager.ledger.chunk).put_back(pager, lend)
    pager.loaded()
    return next((blob for pos, blob in contents.states if pos == n), b"")
