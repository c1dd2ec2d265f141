"""The exact pass: batches of a prompt are decoded against all positions before them, whatever the pool holds.

A paned context computes them, layer by layer. It takes earlier rows from the host store, and adds new rows there.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.native import ALL, Context, ExactContext, Record, StateBytes, Tokens
from pyllama_kvflash.policy.scorers import EDGE

_MOST_AHEAD = 3  # see ExactContext.wait_whole()

Beside = Callable[[Callable[[], bool]], None]
"""Work to do while a batch is computed. Its argument is a function that returns whether the batch is done."""


class ExactReader:
    """Decodes exact batches for all sequences of a pool, one sequence at a time.

    Recurrent states and sliding windows belong to the pooled context. They are copied into the paned context before a batch,
    unless the last batch left them there, and copied back after it.
    """

    def __init__(self, ctx: ExactContext) -> None:
        self.ctx = ctx
        self._seq: int | None = None  # the sequence whose rows and state the panes hold
        self._end = -1  # the number of positions before that state; -1: no state
        self._ahead = False  # batches are under way
        self.n_whole = 0  # how many positions of the last batch's sequence are already in its records
        self._computing: Future[None] | None = None  # a batch that a thread computes
        self._thread = ThreadPoolExecutor(1, "kvflash-check")

    def close(self) -> None:
        """Free the panes. Harmless when called again."""
        self.finish()
        self._thread.shutdown()
        self.ctx.close()

    def finish(self) -> None:
        """Wait for the batches under way, so that all records are complete. Harmless when repeated."""
        if self._computing:
            wait([self._computing])
            self._computing = None
        if self._ahead:
            self.n_whole = self.ctx.wait_whole()
        self._ahead = False

    @property
    def n_batch(self) -> int:
        """The largest batch, in tokens."""
        return self.ctx.n_ubatch

    @property
    def streams(self) -> bool:
        """Whether layers are streamed, in which case a batch mostly waits for the bus. Not known before the first batch."""
        info = self.ctx.pane_info()
        return info.n_stream > 0 and info.n_pane < info.n_layer

    @property
    def n_bytes(self) -> int:
        """Device bytes of the panes."""
        return self.ctx.pane_info().bytes

    def take_over(self, pool: Context, n_tokens: int) -> None:
        """Copy the state of the pool's sequence, which has n_tokens positions, into the paned context. Harmless when repeated."""
        own = self._own(pool.seq)
        if self._end != n_tokens:
            own.take_partial(pool, n_tokens)
            self._end = n_tokens

    def decode(
        self,
        pool: Context,
        tokens: Tokens,
        start: int,
        records: Sequence[Record],
        outputs: int,
        *,
        more: bool = False,
        beside: Beside | None = None,
    ) -> None:
        """Decode tokens of the pool's sequence. This sequence then has the logits and queries of the last token.

        tokens: (n,) int32, at positions start, start + 1, ... records: see ExactContext.decode_into().
        more: another batch follows. One batch more than there are devices is then under way: each device computes one, and none
        waits for the host (the pipeline of GPipe, arXiv 1811.06965, as in llama.cpp).
        beside: work for the pool to do meanwhile. Raises the errors of that work, Interrupted and NativeError.
        """
        self.take_over(pool, start)
        own = self._own(pool.seq)
        self._end = -1  # until the batch is complete
        self._ahead = True
        place = pool, tokens, start, records, outputs
        if beside:
            self._compute_beside(own, beside, *place)
            pool.computed(own.handle, len(tokens))
        else:
            own.decode_into(*place)
        self._end = start + len(tokens)
        if more and not beside:
            self.n_whole = self.ctx.wait_whole(min(_MOST_AHEAD, self.ctx.pane_info().n_stream))
        else:
            self.finish()

    def _compute_beside(self, own: ExactContext, beside: Beside, *place: Any) -> None:
        """Compute a batch in a thread, and run `beside` meanwhile. The thread is needed because launching the batch's transfers takes
        nearly as long as the transfers.
        """

        def whole() -> None:
            own.pace(paced=True)
            try:
                own.compute(*place)
            finally:
                own.pace(paced=False)
            own.wait_whole()

        self._computing = computing = self._thread.submit(whole)
        try:
            beside(computing.done)
        finally:
            computing.result()

    def look(
        self, pool: Context, tokens: Tokens, start: int, records: Sequence[Record], state: StateBytes
    ) -> npt.NDArray[np.float32]:
        """Decode tokens of the pool's sequence once more. Returns the tokens' logits, (n, n_vocab) float32. The sequence keeps
        its own logits and queries.

        tokens, records: as for decode(); the records from `start` on are overwritten. state: from save_partial() at `start`.
        Raises Interrupted and NativeError.
        """
        own = self._own(pool.seq)
        self._end = -1
        own.restore_partial(state, start)
        try:
            with pool.same_output():
                own.decode_into(pool, tokens, start, records, ALL)
                own.wait_whole()
                return np.array([pool.checked_logits(i) for i in range(len(tokens))])
        finally:
            own.attn_seq_rm(start, -1)

    def _own(self, seq: int) -> ExactContext:
        """Give the paned context to a sequence, and return that sequence's view of it."""
        if self._computing and not self._computing.done():
            self.finish()  # an earlier wait for it was cut off
        if self._seq not in (None, seq):
            self.ctx.sequence(self._seq).clear()
            self._end = -1
        self._seq = seq
        return self.ctx.sequence(seq)

    def keep(self, pool: Context, start: int, n: int, n_batch: int) -> None:
        """Keep only the first n of the n_batch tokens that decode() computed at `start`.

        The tap has the queries of the batch's last tokens only, because tapping more would double the cost of attention. If the tap
        lacks the last kept token, the first tapped token stands in. Raises UnsupportedError (a state cannot be rolled back).
        """
        own = self.ctx.sequence(pool.seq)
        if n < n_batch:
            self._end = -1
            own.seq_rm(start + n)
            self._end = start + n
        pool.computed(own.handle, n, min(n_batch, n + max(0, own.q_tap - 1)))

    def attended(self, pool: Context, n_query: int, n_chunks: int) -> npt.NDArray[np.float32]:
        """Return the attention of the last n_query kept tokens to the first n_chunks chunks. See policy.View.mass."""
        own, last = self.ctx.sequence(pool.seq), pool.output.last
        return np.stack([own.mass(last + back, n_chunks * EDGE) for back in reversed(range(n_query))])

    def hand_over(self, pool: Context, n_tokens: int) -> None:
        """Give the state after n_tokens positions to the pool's sequence. Harmless when repeated."""
        own = self.ctx.sequence(pool.seq)
        if own.n_partial():
            pool.take_partial(own, n_tokens)

    def forget(self, seq: int, n_tokens: int) -> None:
        """Record that a sequence was cut to its first n_tokens positions, so that rows after them are invalid.

        Waits for the batches under way; the caller may then free the records.
        """
        self.finish()
        if seq == self._seq:
            self.ctx.sequence(seq).attn_seq_rm(n_tokens, -1)
            if self._end > n_tokens:
                self._end = -1
