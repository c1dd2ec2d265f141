"""Chunks on their way: the one owner of every move between the pool and the host store.

On a GPU a plan is spread over steps, so that no step waits for a copy. A chunk sets out during one step (`go_on`) into
a masked block. It lands before the next step (`land`), which sees it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.native import Context
from pyllama_kvflash.policy import Ledger, Plan, State
from pyllama_kvflash.pool.host_store import HostStore
from pyllama_kvflash.pool.residency import held, n_landing, resident

# Most bytes that set out in one step: half a ms of a PCIe 5 bus, where the next step's inputs queue behind them.
FLIGHT_BYTES = 24 << 20


class OnTheWay(NamedTuple):
    """The flights that a snapshot keeps.

    landing: {chunk: block} of the copies that have begun.
    drops, page_ins: chunks of the plan that have yet to move.
    """

    landing: dict[int, int]
    drops: tuple[int, ...]
    page_ins: tuple[int, ...]


class Flights:
    """Moves the chunks of one sequence. The ledger changes first, because it checks the rules; the pool follows.

    n_out and n_in count moves since the last forget().
    """

    def __init__(self, ctx: Context, ledger: Ledger, records: HostStore) -> None:
        self.n_out = self.n_in = 0
        self._ctx = ctx
        self._ledger = ledger
        self._records = records
        self._landing: dict[int, int] = {}  # chunks that have set out, and their blocks
        self._drops: deque[int] = deque()  # the rest of a plan that is spread over steps
        self._page_ins: deque[int] = deque()
        self._filling: int | None = None  # a chunk being copied in that the ledger already calls resident

    @property
    def in_motion(self) -> bool:
        """Whether the next steps will change what is resident."""
        return bool(self._landing or self._page_ins)

    #
    # at once
    #

    def drop(self, chunk: int) -> None:
        """Take a chunk out of the pool."""
        self._ledger.drop(chunk)
        self._ctx.drop(chunk)
        self.n_out += 1

    def bring(self, chunks: Iterable[int]) -> None:
        """Bring chunks in; the next batch sees them."""
        for chunk in chunks:
            self._set_out(chunk)
        self.land()

    def land(self) -> None:
        """Make every chunk in flight resident; the next batch waits for its bytes."""
        for chunk in list(self._landing):
            self._ctx.commit(chunk)
            self._ledger.commit_page_in(chunk)
            del self._landing[chunk]
            self.n_in += 1

    def _set_out(self, chunk: int) -> None:
        record = self._records.get(chunk)  # first, because it raises if a lent record is damaged: nothing has moved yet
        self._ledger.begin_page_in(chunk)
        self._landing[chunk] = -1  # noted before it sets out, because mend() looks for it here
        self._landing[chunk] = self._ctx.begin_page_in(chunk, record)

    #
    # over several steps
    #

    def begin(self, plan: Plan) -> None:
        """Begin a plan that is spread over steps."""
        self._drops.extend(plan.drops)
        self._page_ins.extend(plan.page_ins)
        self.go_on()

    def go_on(self, n_tokens: int = 0) -> None:
        """During a step of n_tokens, begin to copy in the next chunks of the plan, and free blocks for later ones.

        A copy into a block that the step does not use need not wait for the step.
        """
        drops, page_ins = self._drops, self._page_ins
        if not page_ins:
            return
        n_taken = self._ledger.new_chunks(n_tokens)  # free blocks that the step itself takes
        n = max(1, FLIGHT_BYTES // self._records.record_bytes)
        n_kept = 1 if drops else 0  # for the chunk that begins next
        for _ in range(min(n, len(page_ins), self._ledger.n_free - n_taken - n_kept)):
            self._set_out(page_ins.popleft())
        evictable, n_free = self._ledger.evictable(), self._ledger.n_free - n_taken
        while drops and n_free <= min(n, len(page_ins)):
            chunk = drops.popleft()
            if evictable[chunk]:
                self.drop(chunk)
                n_free += 1
        if n_free == 0:
            page_ins.clear()  # a new chunk took the block: the coldest of the plan stays out

    def finish(self) -> None:
        """Bring in the rest of the plan now."""
        while self.in_motion:
            self.land()
            self.go_on()
        self._drops.clear()

    def cut_short(self) -> None:
        """Give up the rest of the plan. Chunks in flight land."""
        self.land()
        self._drops.clear()
        self._page_ins.clear()

    #
    # make the pool follow the ledger: after an exact pass, and after a step that was cut off
    #

    def shed(self) -> None:
        """Evict chunks from the pool that the ledger does not call resident."""
        for chunk in held(self._ctx).keys() - resident(self._ledger):
            self._ctx.drop(chunk)

    def refill(self, chunks: Iterable[int]) -> None:
        """Copy these chunks into the pool anew, as fill() does; a chunk in the pool leaves its block first."""
        wanted, there = list(chunks), held(self._ctx)
        for chunk in wanted:
            if chunk in there:
                self._ctx.drop(chunk)
        self.fill(wanted)

    def fill(self, chunks: Iterable[int]) -> None:
        """Copy these chunks from their records into the pool. The ledger already calls them resident."""
        filled = sorted(chunks)
        for chunk in filled:
            self._filling = chunk
            self._ctx.page_in(chunk, self._records.get(chunk))
            self._filling = None
        if filled:
            self._ctx.attn_seq_rm(self._ledger.n_tokens, -1)  # rejected tokens of a batch

    def abandon(self) -> None:
        """Free the block of a chunk whose fill() was cut off."""
        if self._filling is not None:
            with suppress(PoolError):  # it never began, or it is there
                self._ctx.cancel(self._filling)
            self._filling = None

    #
    # after a step that was cut off
    #

    def mend(self) -> None:
        """After a step was cut off, make the ledger agree with the pool about the flights.

        At most one chunk was cut off while its copy began or landed.
        """
        there = held(self._ctx)
        for chunk in [c for c in self._landing if c in there]:
            if self._ledger.state_of(chunk) == State.IN_FLIGHT:
                self._ledger.commit_page_in(chunk)
            del self._landing[chunk]
        while len(self._landing) > n_landing(self._ctx):
            self._landing.popitem()  # the one that was cut off
        for flying in np.flatnonzero(self._ledger.state == State.IN_FLIGHT):
            if int(flying) not in self._landing:
                self._ledger.abort_page_in(int(flying))

    def cancel(self) -> None:
        """Cancel all flights."""
        for flying in self._landing:
            with suppress(PoolError):  # it has landed already, or never began
                self._ctx.cancel(flying)
        self._abort()

    def forget(self) -> None:
        """Forget all flights and counts, because the sequence was cleared."""
        self._abort()
        self.n_out = self.n_in = 0

    def _abort(self) -> None:
        self._filling = None
        self._landing.clear()
        self._drops.clear()
        self._page_ins.clear()
        for flying in np.flatnonzero(self._ledger.state == State.IN_FLIGHT):
            self._ledger.abort_page_in(int(flying))

    #
    # snapshots
    #

    def saved(self) -> OnTheWay:
        """Return the current flights, without changing them."""
        return OnTheWay(dict(self._landing), tuple(self._drops), tuple(self._page_ins))

    def resume(self, resident: Mapping[int, int], saved: OnTheWay) -> None:
        """Restore chunks into an empty pool: resident ones ({chunk: block}), and the saved flights.

        The caller loads the ledger. Raises the errors of a page-in.
        """
        for chunk, block in sorted({**resident, **saved.landing}.items()):
            self._ctx.begin_page_in(chunk, self._records.get(chunk), block)
            if chunk in resident:
                self._ctx.commit(chunk)
            else:
                self._landing[chunk] = block
        self._drops.extend(saved.drops)
        self._page_ins.extend(saved.page_ins)
