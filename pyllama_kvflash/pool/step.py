"""The batch step: make room, decode, keep accepted tokens, write back full chunks.

The order of these lines makes a step safe. Wherever Ctrl-C, a full pool or an error cuts it off, every token is either
in the history or pending, and the next step first removes the leftovers (`PooledSequence.recover`).

A draft is decoded whole. Its logits then determine how many tokens are accepted, and `keep` keeps these:

    advance([part], native.ALL)
    try:
        ...  # part.accepted = (number of accepted tokens, the next token)
    finally:
        keep(part)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pyllama_kvflash import native
from pyllama_kvflash.events import Paged
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.policy import Plan
from pyllama_kvflash.pool.exact import Beside
from pyllama_kvflash.pool.sequence import PooledSequence


@dataclass(slots=True)
class Part:
    """The tokens of a sequence in a batch, (n,) int32.

    draft: whether tokens after the first may be rejected. Rejected tokens leave no trace: they are not in the ledger, and no
    chunk is sealed for them.
    accepted: the number of accepted tokens, and the token that follows them (None: the text ends, or the token is unknown).
    Always replaced as one tuple, because a step can be cut off anywhere. None: not known yet.
    """

    sequence: PooledSequence
    tokens: Tokens
    draft: bool = False
    accepted: tuple[int, int | None] | None = None


def advance(parts: Sequence[Part], outputs: int = native.LAST) -> list[Paged | None]:
    """Decode one batch of one or several sequences, and keep all tokens except drafts. Returns the moves of each sequence.

    outputs: which tokens of a single sequence get logits; with several sequences, all tokens get logits.

    Raises PoolError, HostMemoryError, Interrupted and NativeError. The next step undoes a draft that was not kept; the draft's
    first token is still pending.
    """
    first = parts[0].sequence
    first.recover()  # ends the trials of all sequences, too: a batch may need their blocks
    places = [part.sequence.n_tokens for part in parts]
    plans = _make_room(parts)
    if len(parts) == 1:
        first.ctx.decode(parts[0].tokens, places[0], outputs)
    else:
        first.ctx.decode_each([part.sequence.seq for part in parts], places, [part.tokens for part in parts])
    # a GPU is computing by now, so the rest costs it no time
    for part in parts:
        sequence, tokens = part.sequence, part.tokens
        if not part.draft:
            sequence.extend(tokens)  # first, because a recurrent state cannot go back
            if sequence.pager:
                sequence.pager.written(len(tokens))
        sequence.consistent = not part.draft
    return [Paged(pos, plan.drops, plan.page_ins) if plan else None for pos, plan in zip(places, plans, strict=True)]


def _make_room(parts: Sequence[Part]) -> list[Plan | None]:
    """Make room in the pool for the batch. Returns the moves of each part; None without a pool."""
    plans: list[Plan | None] = []
    n_blocks = n_records = 0  # taken by the parts before
    for part in parts:
        sequence, tokens = part.sequence, part.tokens
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


def keep(part: Part) -> None:
    """Keep the accepted tokens of a decoded draft. While `accepted` is None, do nothing."""
    if part.accepted is None:
        return
    sequence, (n, following) = part.sequence, part.accepted
    sequence.ctx.keep(n)
    sequence.extend(part.tokens[:n])
    sequence.pending = following
    if sequence.pager:
        sequence.pager.written(n)
    sequence.consistent = True


def advance_exactly(
    part: Part, outputs: int = native.LAST, *, more: bool = False, beside: Beside | None = None
) -> Paged | None:
    """Decode a part, at most ExactReader.n_batch tokens, against all positions before it. Returns the moves.

    Keeps all tokens except drafts, which keep_exactly() keeps. The pool then holds the chunk being written; settle_in() pages in
    other chunks.

    outputs: as for advance(). more: another batch follows at once. Only the last batch of a pass waits for the devices and changes
    the pool; any other call ends the pass first (PooledSequence.recover). beside: see ExactReader.decode().

    Raises PoolError, HostMemoryError, Interrupted and NativeError.
    """
    sequence, tokens = part.sequence, part.tokens
    passing = _go_on(sequence)
    start, exact, pager = sequence.n_tokens, sequence.reads_exactly, sequence.paged
    plan, records = pager.prepare(len(tokens), passing=passing)
    if not sequence.trying:
        beside = None  # the recovery of another sequence has ended the trial
    try:
        sequence.checking = beside is not None
        exact.decode(sequence.ctx, tokens, start, records, outputs, more=more, beside=beside)
    finally:
        sequence.checking = False
    if not part.draft:
        part.accepted = len(tokens), None
        keep_exactly(part, more=more)
    return Paged(start, plan.drops, plan.page_ins) if plan else None


def _go_on(sequence: PooledSequence) -> bool:
    """Begin an exact batch. Returns whether it continues the pass of the previous one."""
    alone = all(s.steady for s in sequence.peers if s is not sequence)
    whole = alone and (sequence.whole or not sequence.trying)
    passing = sequence.passing and not sequence.consistent and whole
    if not passing and not (sequence.trying and whole):
        sequence.recover(others=False)
    sequence.consistent = sequence.passing = sequence.whole = False
    return passing


def keep_exactly(part: Part, *, more: bool = False) -> None:
    """After advance_exactly(), keep the accepted tokens of a part, as keep() does. more: the pass or a trial continues, and the pool
    is brought up to date later.
    """
    if part.accepted is None:
        return
    sequence, (n, following), start = part.sequence, part.accepted, part.sequence.n_tokens
    sequence.reads_exactly.keep(sequence.ctx, start, n, len(part.tokens))
    sequence.append(n)
    sequence.extend(part.tokens[:n])
    sequence.pending = following
    if sequence.n_exact == start:
        sequence.n_exact = start + n
    if more:
        sequence.paged.passed(
            min(sequence.reads_exactly.n_whole, sequence.n_tokens)
        )  # later rows may be rejected drafts
        sequence.passing, sequence.whole = True, sequence.trying
    else:
        sequence.arrive()
        sequence.consistent = True
