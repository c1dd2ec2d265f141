"""The moves of a sequence's chunks between the pool and the host store.

A move takes effect at once: the next batch sees it. A GPU copies asynchronously, and the batch waits for the copy there.
"""

from collections.abc import Iterable

from pyllama_kvflash.native import Context
from pyllama_kvflash.policy import Ledger
from pyllama_kvflash.pool.host_store import HostStore
from pyllama_kvflash.pool.residency import held, resident


class Moves:
    """Moves the chunks of one sequence. After an interrupted move, pool and ledger may differ by one chunk until shed() and fill() run.

    n_out and n_in count moves since the last clear().
    """

    def __init__(self, ctx: Context, ledger: Ledger, records: HostStore) -> None:
        self.n_out = self.n_in = 0
        self._ctx = ctx
        self._ledger = ledger
        self._records = records

    def clear(self) -> None:
        """Restart the counts."""
        self.n_out = self.n_in = 0

    def drop(self, chunk: int) -> None:
        """Take a chunk out of the pool."""
        self._ledger.drop(chunk)  # first, because it checks the rules
        self._ctx.drop(chunk)
        self.n_out += 1

    def bring(self, chunks: Iterable[int]) -> None:
        """Bring chunks in. Raises PoolError, and the errors of a damaged record; that chunk stays out."""
        for chunk in chunks:
            self._ctx.page_in(chunk, self._records.get(chunk))
            self._ledger.page_in(chunk)
            self.n_in += 1

    #
    # make the pool agree with the ledger: after an exact pass, and after a step that was cut off
    #

    def shed(self) -> None:
        """Drop the chunks in the pool that the ledger does not call resident."""
        for chunk in held(self._ctx).keys() - resident(self._ledger):
            self._ctx.drop(chunk)

    def refill(self, chunks: Iterable[int]) -> None:
        """Copy these chunks into the pool anew, as fill() does. A chunk that is there already leaves its block first."""
        wanted, there = list(chunks), held(self._ctx)
        for chunk in wanted:
            if chunk in there:
                self._ctx.drop(chunk)
        self.fill(wanted)

    def fill(self, chunks: Iterable[int]) -> None:
        """Copy these chunks from their records into the pool. The ledger already calls them resident."""
        filled = sorted(chunks)
        for chunk in filled:
            self._ctx.page_in(chunk, self._records.get(chunk))
        if filled:
            self._ctx.attn_seq_rm(self._ledger.n_tokens, -1)  # rejected tokens of a batch
            self._ctx.wait()  # the record of a partly filled chunk may be freed next
