"""The ledger: where every chunk of a sequence is."""

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float64]


class LedgerError(AssertionError):
    """A step that violates the ledger's rules: always a bug in the caller, never the user's fault."""


_CHUNK = np.dtype([("resident", np.bool_), ("stored", np.bool_), ("touched", np.int64), ("score", np.float64)])


class Blocks:
    """The blocks of a pool, and the ledgers of the sequences that share them."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.ledgers: list[Ledger] = []

    @property
    def n_free(self) -> int:
        """Blocks that nothing uses."""
        return self.n - sum(ledger.n_held for ledger in self.ledgers)

    @property
    def n_room(self) -> int:
        """Blocks that are free, or that evictable chunks and guests can give up."""
        return self.n_free + sum(int(np.count_nonzero(each.evictable())) + each.n_guests for each in self.ledgers)

    @property
    def n_spare(self) -> int:
        """Blocks available to new trials. Not available are the blocks of trials under way, the blocks of each sequence's protected
        chunks (present and future), and one block for each sequence's next chunk.
        """
        kept = (max(int(np.count_nonzero(each.protected())), each.n_sinks + each.n_tail) for each in self.ledgers)
        return self.n - sum(kept) - sum(each.n_tried + 1 for each in self.ledgers)


class Ledger:
    """The chunks of one sequence, and the blocks they fill. A ledger owns no bytes: the engine moves the bytes, and reports here.

    Positions 0 .. n_tokens - 1 are written, in chunks of `chunk` positions; the last chunk may be partly filled. A
    chunk is *sealed* when all its positions are written. Every step checks these rules (LedgerError):

    - only a sealed chunk with a stored record is evicted, and never a protected one;
    - the chunk being written is resident;
    - the blocks that are free, resident, guests' or a trial's always add up to blocks.n, over all sequences that share them.

    The first `n_sinks` chunks, the last `n_tail`, pinned chunks and unsealed ones are protected.
    """

    def __init__(self, blocks: int | Blocks, chunk: int = 64, *, n_sinks: int = 1, n_tail: int = 4) -> None:
        """blocks: the number of blocks of this sequence alone, or the Blocks shared with other sequences."""
        self.blocks = blocks if isinstance(blocks, Blocks) else Blocks(blocks)
        self.blocks.ledgers.append(self)
        self.chunk = chunk
        self.n_sinks = n_sinks
        self.n_tail = n_tail
        self.pins: set[int] = set()  # chunks, written or not
        self.n_guests = 0  # blocks in which each layer holds chunks of its own choice
        self._tried = (0, 0)  # chunks of a trial, first and end: unwritten ones take blocks, too
        self._tick = 0
        # one attribute, replaced as a whole, so that both parts agree wherever a step is interrupted
        self._now = (0, np.zeros(0, _CHUNK))  # positions written, chunks

    #
    # state
    #

    @property
    def n_tokens(self) -> int:
        """Positions written."""
        return self._now[0]

    @property
    def n_chunks(self) -> int:
        """Chunks that hold at least one position."""
        return len(self._now[1])

    @property
    def _resident(self) -> Mask:
        return self._now[1]["resident"]

    @property
    def _stored(self) -> Mask:
        return self._now[1]["stored"]

    @property
    def _touched(self) -> npt.NDArray[np.int64]:
        return self._now[1]["touched"]

    @property
    def n_sealed(self) -> int:
        """Chunks that are full: 0 .. n_sealed - 1."""
        return self.n_tokens // self.chunk

    @property
    def n_resident(self) -> int:
        """Chunks in the pool."""
        return int(np.count_nonzero(self._resident))

    @property
    def n_held(self) -> int:
        """Blocks that hold this sequence's chunks, guests or trial."""
        return self.n_resident + self.n_guests + self.n_tried

    @property
    def n_tried(self) -> int:
        """Blocks that a trial takes, not counting the blocks of resident chunks."""
        first, end = self._tried
        return end - first - int(np.count_nonzero(self._resident[first:end])) if end else 0

    @property
    def n_free(self) -> int:
        """Blocks of the pool that no sequence uses."""
        return self.blocks.n_free

    @property
    def n_share(self) -> int:
        """Blocks guaranteed to this sequence: an equal part of the pool."""
        return self.blocks.n // len(self.blocks.ledgers)

    @property
    def n_block(self) -> int:
        """Blocks that this sequence holds, and free blocks. If the sequence is alone, these are the whole pool."""
        return self.n_held + self.n_free

    @property
    def resident(self) -> Mask:
        """A copy of the mask of chunks in the pool, (n_chunks,) bool. Other chunks are in the host store only."""
        return self._resident.copy()

    @property
    def stored(self) -> Mask:
        """A copy of the mask of chunks whose record is in the host store, or is being copied there, (n_chunks,) bool."""
        return self._stored.copy()

    @property
    def touched(self) -> npt.NDArray[np.int64]:
        """A copy of the step at which each chunk was last written or paged in, (n_chunks,) int64; larger is later."""
        return self._touched.copy()

    @property
    def score(self) -> Scores:
        """A copy of each chunk's score from the last scoring, (n_chunks,) float64; NaN: not scored."""
        return self._now[1]["score"].copy()

    def heat(self) -> Scores:
        """Return each chunk's heat, (n_chunks,) float64; the coldest is evicted first. Scored chunks rank by score; unscored
        ones rank above them, by recency.
        """
        score, touched = self._now[1]["score"], self._touched
        rated = ~np.isnan(score)
        heat = touched + np.float64(np.count_nonzero(rated))
        heat[rated] = np.argsort(np.argsort(score[rated], kind="stable"), kind="stable")
        return heat

    def candidates(self) -> Mask:
        """Return the mask (n_chunks,) bool of chunks, resident or out, that compete for the blocks that protected chunks leave."""
        mask: Mask = self._stored & ~self.protected()
        return mask

    def holds(self, chunk: int) -> bool:
        """Return whether a chunk is in the pool. Raises LedgerError if the chunk does not exist."""
        if not 0 <= chunk < self.n_chunks:
            raise LedgerError(f"chunk {chunk} does not exist")
        return bool(self._resident[chunk])

    def protected(self) -> Mask:
        """Return the mask of chunks that may not be evicted, (n_chunks,) bool."""
        mask = np.zeros(self.n_chunks, np.bool_)
        mask[: self.n_sinks] = True
        mask[max(0, self.n_chunks - self.n_tail) :] = True
        mask[self.n_sealed :] = True
        mask[[c for c in self.pins if c < self.n_chunks]] = True
        return mask

    @property
    def lacks_protected(self) -> bool:
        """Whether a protected chunk is out. This happens when positions are computed outside the pool."""
        return not np.all(self._resident[self.protected()])

    def evictable(self) -> Mask:
        """Return the mask of chunks that can be evicted now, (n_chunks,) bool."""
        mask: Mask = self._resident & self._stored & ~self.protected()
        return mask

    def new_chunks(self, n_tokens: int) -> int:
        """Return the number of chunks that n_tokens more positions begin."""
        return -(-(self.n_tokens + n_tokens) // self.chunk) - self.n_chunks

    @property
    def needs_block(self) -> bool:
        """Whether the next token begins a chunk that needs a block, because no trial holds one for it."""
        first, end = self._tried
        return not self.n_tokens % self.chunk and not first <= self.n_chunks < end

    def seals(self, n_tokens: int) -> int:
        """Return the number of chunks that n_tokens more positions fill."""
        return (self.n_tokens + n_tokens) // self.chunk - self.n_sealed

    #
    # changes
    #

    def try_out(self, n_tokens: int) -> None:
        """Reserve blocks for a trial of n_tokens after the last position; 0: release them."""
        if n_tokens and self.new_chunks(n_tokens) > self.n_free:
            raise LedgerError(f"{self.new_chunks(n_tokens)} new chunks, {self.n_free} free blocks")
        self._tried = (self.n_sealed, -(-(self.n_tokens + n_tokens) // self.chunk)) if n_tokens else (0, 0)

    def write(self, n_tokens: int) -> None:
        """Record that n_tokens more positions were decoded, into resident chunks and free blocks."""
        if n_tokens <= 0:
            raise LedgerError("nothing to write")
        before, chunks = self._now
        last = before % self.chunk  # positions of the chunk that is being written
        if last and last + n_tokens < self.chunk and chunks["resident"][-1]:
            # most tokens neither begin nor fill a chunk
            self._tick += 1
            chunks["touched"][-1] = self._tick
            chunks["score"][-1] = np.nan
            self._now = (before + n_tokens, chunks)
            return
        n_new = self.new_chunks(n_tokens)
        if n_new and n_new > self.n_free:
            raise LedgerError(f"{n_new} new chunks, {self.n_free} free blocks")
        if self.n_tokens % self.chunk and not self._resident[-1]:
            raise LedgerError(f"chunk {self.n_chunks - 1} is written to but not resident")
        if n_new:
            chunks = np.concatenate([chunks, np.array([(True, False, 0, np.nan)] * n_new, _CHUNK)])
        self._tick += 1
        chunks["touched"][self.n_sealed :] = self._tick
        chunks["score"][self.n_sealed :] = np.nan
        self._now = (self.n_tokens + n_tokens, chunks)

    def append(self, n_tokens: int) -> None:
        """Record that n_tokens more positions were computed outside the pool.

        Full chunks are out from now on, and have records. A partly filled last chunk is resident. It takes the block of the chunk
        that was being written before, or a free block.
        """
        end, first = self.n_tokens + n_tokens, self.n_sealed
        n_full = end // self.chunk
        if n_tokens <= 0:
            raise LedgerError("nothing to append")
        if end % self.chunk and self.needs_block and self.n_free <= 0:
            raise LedgerError("no free block for the chunk that is being written")
        new = np.array([(False, True, 0, np.nan)] * (-(-end // self.chunk) - first), _CHUNK)
        chunks = np.concatenate([self._now[1][:first], new])
        chunks["resident"][n_full:], chunks["stored"][n_full:] = True, False
        self._tick += 1
        chunks["touched"][first:] = self._tick
        self._now = (end, chunks)

    def rate(self, scores: Scores) -> None:
        """Set the scores of the first n chunks, (n,) float64; NaN: not scored."""
        if len(scores) > self.n_chunks:
            raise LedgerError(f"{len(scores)} scores for {self.n_chunks} chunks")
        self._now[1]["score"][: len(scores)] = scores

    def unrate(self, chunk: int) -> None:
        """Forget a chunk's score: it counts as just used until the next scoring."""
        self.holds(chunk)  # raises if there is no such chunk
        self._now[1]["score"][chunk] = np.nan

    def to_store(self) -> list[int]:
        """Return the sealed chunks without a record. The store must take them before they can be evicted."""
        return [int(c) for c in np.flatnonzero(~self._stored[: self.n_sealed])]

    def mark_stored(self, chunk: int) -> None:
        """Record that a sealed, resident chunk has a record in the host store, or that the copy has begun."""
        if chunk >= self.n_sealed:
            raise LedgerError(f"chunk {chunk} is not sealed")
        if not self.holds(chunk):
            raise LedgerError(f"chunk {chunk} is not resident")
        self._stored[chunk] = True

    def drop(self, chunk: int) -> None:
        """Record that a chunk left the pool."""
        if not self.holds(chunk):
            raise LedgerError(f"chunk {chunk} is not resident")
        if not self._stored[chunk]:
            raise LedgerError(f"chunk {chunk} has no record: it would be lost")
        if self.protected()[chunk]:
            raise LedgerError(f"chunk {chunk} is protected")
        self._resident[chunk] = False

    def page_in(self, chunk: int) -> None:
        """Record that a chunk was copied into a free block."""
        if self.holds(chunk):
            raise LedgerError(f"chunk {chunk} is resident")
        if self.n_free <= 0:
            raise LedgerError(f"no free block for chunk {chunk}")
        self._tick += 1
        self._touched[chunk] = self._tick
        self._resident[chunk] = True

    def rollback(self, n_tokens: int) -> None:
        """Keep the first n_tokens positions. If n_tokens is within a chunk, that chunk must be resident, and its record becomes
        invalid.
        """
        if not 0 <= n_tokens <= self.n_tokens:
            raise LedgerError(f"cannot roll back from {self.n_tokens} to {n_tokens} positions")
        keep = -(-n_tokens // self.chunk)
        chunks = self._now[1][:keep].copy()
        if n_tokens % self.chunk:
            if not chunks["resident"][-1]:
                raise LedgerError(f"chunk {keep - 1} is cut through but not resident")
            chunks["stored"][-1] = False
        self._now = (n_tokens, chunks)

    @property
    def tick(self) -> int:
        """The number of the last step that touched a chunk."""
        return self._tick

    def load(self, n_tokens: int, resident: Mask, touched: npt.NDArray[np.int64], score: Scores, tick: int) -> None:
        """Restore a saved ledger from arrays (n_chunks,). All sealed chunks must have records."""
        chunks = np.zeros(-(-n_tokens // self.chunk), _CHUNK)
        if not len(chunks) == len(resident) == len(touched) == len(score):
            raise LedgerError(f"{len(resident)} chunks for {n_tokens} positions")
        chunks["resident"], chunks["touched"], chunks["score"] = resident, touched, score
        chunks["stored"][: n_tokens // self.chunk] = True
        self._now = (n_tokens, chunks)
        self._tick = max(tick, int(touched.max(initial=0)))

    def clear(self) -> None:
        """Forget every position; the pins stay."""
        self.rollback(0)
        self._tick = self.n_guests = 0
        self._tried = (0, 0)

    def check_integrity(self) -> None:
        """Raise LedgerError if the ledger is inconsistent. Meant for tests and idle moments."""
        n = self.n_chunks
        if n != -(-self.n_tokens // self.chunk):
            raise LedgerError(f"{n} chunks for {self.n_tokens} positions")
        if self.n_free < 0:
            raise LedgerError(f"{self.n_resident} resident, {self.n_guests} guests: more than the pool")
        if not np.all(self._stored[~self._resident]):
            raise LedgerError("a chunk is neither resident nor stored")
        if np.any(self._stored[self.n_sealed :]):
            raise LedgerError("a record of a chunk that is not sealed")
        if not np.all(self._resident[self.n_sealed :]):
            raise LedgerError("a chunk being written is not resident")
