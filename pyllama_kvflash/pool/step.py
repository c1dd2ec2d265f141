"""The batch step: make room, decode, keep what stands, write back what is full.

The order of these lines makes a step safe. Wherever Ctrl-C, a full pool or an error cuts it off, every token is either
in the history or pending, and the next step first removes what this one left behind (`PooledSequence.recover`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyllama_kvflash import native
from pyllama_kvflash.events import Paged
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.policy import Plan
from pyllama_kvflash.pool.sequence import PooledSequence

Accept = Callable[[int], tuple[int | None, bool]]
"""Called once token i of a batch stands, while its logits are at hand. Returns the token that follows it (None: the
text ends), and whether that is token i + 1 of the batch, which then stands, too.
"""


class Part(NamedTuple):
    """The tokens of a sequence in a batch, (n,) int32.

    accept: decides how many of them stand; None: all do. The others leave no trace: the ledger does not hear of them, and no
    chunk is sealed for them.
    """

    sequence: PooledSequence
    tokens: Tokens
    accept: Accept | None = None


def advance(parts: Sequence[Part], outputs: int = native.LAST) -> list[Paged | None]:
    """Decode one batch of one sequence or of several. Returns each one's moves.

    outputs: which tokens of a single sequence get logits; all of several do.

    Raises PoolError, HostMemoryError, Interrupted and NativeError. A sequence whose tokens were not asked about until then has
    none of them, and its last token is still pending.
    """
    first = parts[0].sequence
    first.recover()
    places = [part.sequence.n_tokens for part in parts]
    plans = _make_room(parts)
    if len(parts) == 1:
        first.ctx.decode(parts[0].tokens, places[0], outputs)
    else:
        first.ctx.decode_each([part.sequence.seq for part in parts], places, [part.tokens for part in parts])
    # a GPU is computing by now, so the rest costs it no time
    for sequence, tokens, accept in parts:
        if accept is None:
            sequence.stand(tokens)  # first, because a recurrent state cannot go back
            if pager := sequence.pager:
                pager.flights.go_on(len(tokens))
                pager.written(len(tokens))
            sequence.consistent = True
    for sequence, tokens, accept in parts:
        if accept is not None:
            _keep(sequence, tokens, accept)
    return [Paged(pos, plan.drops, plan.page_ins) if plan else None for pos, plan in zip(places, plans, strict=True)]


def _make_room(parts: Sequence[Part]) -> list[Plan | None]:
    """Make room in the pool for the batch. Returns the moves of each part, None without a pool."""
    plans: list[Plan | None] = []
    n_blocks = n_records = 0  # taken by the parts before
    for sequence, tokens, _ in parts:
        sequence.consistent = False
        pager = sequence.pager
        if pager is None:
            plans.append(None)
            continue
        plans.append(pager.make_room(len(tokens), (n_blocks, n_records)))
        if len(parts) > 1:
            n_blocks += pager.ledger.new_chunks(len(tokens))
            n_records += pager.ledger.seals(len(tokens))
    return plans


def _ask(accept: Accept, keep: Callable[[int, int | None], None]) -> None:
    """Ask `accept` about the tokens of a decoded batch, one after the other, as far as it comes.

    keep: called at the end, whatever ends it, with how many stand and what follows them.
    """
    stands: tuple[int, int | None] = 1, None  # always replaced whole
    try:
        while True:
            following, goes_on = accept(stands[0] - 1)
            stands = stands[0], following
            if not goes_on:
                break
            stands = stands[0] + 1, None
    finally:
        keep(*stands)


def _keep(sequence: PooledSequence, tokens: Tokens, accept: Accept) -> None:
    """Keep those tokens of a decoded batch that `accept` takes."""
    if sequence.pager:
        sequence.pager.flights.go_on(len(tokens))

    def keep(n: int, following: int | None) -> None:
        sequence.ctx.keep(n)
        sequence.stand(tokens[:n])
        sequence.pending = following
        if sequence.pager:
            sequence.pager.written(n)
        sequence.consistent = True

    _ask(accept, keep)


def advance_exactly(
    sequence: PooledSequence, tokens: Tokens, outputs: int = native.LAST, accept: Accept | None = None
) -> Paged | None:
    """Decode tokens (n,) int32, at most a batch of `exact`, against everything before them. Returns what moved.

    accept: as for a Part. outputs: as for advance(). The pool then holds the chunk that is being written; settle_in() brings in others.

    Raises PoolError, HostMemoryError, Interrupted and NativeError.
    """
    sequence.recover()
    start, exact, pager = sequence.n_tokens, sequence.reads_exactly, sequence.paged
    sequence.consistent = False
    plan, records = pager.prepare(len(tokens))
    exact.decode(sequence.ctx, tokens, start, records, outputs)

    def keep(n: int, following: int | None) -> None:
        exact.keep(sequence.ctx, start, n, len(tokens))
        sequence.append(n)
        sequence.stand(tokens[:n])
        sequence.pending = following
        if sequence.n_exact == start:
            sequence.n_exact = start + n
        sequence.arrive()
        sequence.consistent = True

    if accept is None:
        keep(len(tokens), None)
    else:
        _ask(accept, keep)
    return Paged(start, plan.drops, plan.page_ins) if plan else None
