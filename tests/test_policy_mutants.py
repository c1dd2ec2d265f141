"""The machine of support/paging.py can fail: one rule of the policy is broken at a time."""

import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.changes import POLICY
from support.paging import FULL, RESELECT, Exact, Geometry, Paging

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.policy import Ledger, Plan, Scores
from pyllama_kvflash.policy import plan as planning
from pyllama_kvflash.policy.sizing import SPARE_BLOCKS

pytestmark = pytest.mark.nightly(POLICY)

# as many examples as it takes: the first that fails ends the search. Which one that is hangs on what else this process has
# imported (Hypothesis tries the constants of its files), so `why` names each check that may see the rule first
QUICK = settings(FULL, max_examples=5000, phases=(Phase.generate,), report_multiple_bugs=False, print_blob=False)
UNPROTECTED = "protected chunk . is dropped|does not stay|protected chunks {.*} were evicted"


def ignore_protection(self: Ledger) -> npt.NDArray[np.bool_]:
    """make_room that takes any resident chunk with a record."""
    mask: npt.NDArray[np.bool_] = self._resident & self._stored
    return mask


def protect_nothing(self: Ledger) -> npt.NDArray[np.bool_]:
    """A ledger that knows no protection at all."""
    return np.zeros(self.n_chunks, np.bool_)


def protect_no_pins(self: Ledger) -> npt.NDArray[np.bool_]:
    mask = np.arange(self.n_chunks) >= min(self.n_sealed, self.n_chunks - self.n_tail)
    mask[: self.n_sinks] = True
    return mask


def ignore_records(self: Ledger) -> npt.NDArray[np.bool_]:
    """make_room that takes chunks whose record was never written."""
    mask: npt.NDArray[np.bool_] = self._resident & ~self.protected()
    return mask


def drop_forgets_stored(self: Ledger, chunk: int) -> None:
    self._resident[chunk] = False
    self._stored[chunk] = False


def drop_keeps_the_block(self: Ledger, chunk: int) -> None:
    """The chunk is gone from the pool, the ledger says that it is there."""


def count_whole_chunks(self: Ledger, n_tokens: int) -> int:
    """A write that overlooks the chunk that is only begun."""
    return (self.n_tokens + n_tokens) // self.chunk - self.n_chunks


def count_one_too_many(self: Ledger, n_tokens: int) -> int:
    return n_tokens // self.chunk + 1


def rollback_keeps_the_record(self: Ledger, n_tokens: int) -> None:
    """A chunk that is cut through keeps a record of positions that are gone."""
    self._now = (n_tokens, self._now[1][: -(-n_tokens // self.chunk)])


def store_says_nothing(self: Ledger, chunk: int) -> None:
    """Records that nobody knows of: nothing can ever be dropped."""


def floor_without_pins(self: Geometry, n_pins: int) -> int:
    """Pins that no floor holds back."""
    return self.n_sinks + self.n_tail + -(-self.n_batch // self.chunk) + 1 + SPARE_BLOCKS


def hottest(ledger: Ledger, n: int, keep: Sequence[int] = ()) -> Plan:
    mask = ledger.evictable()
    mask[list(keep)] = False
    candidates = np.flatnonzero(mask)
    return Plan(tuple(int(c) for c in candidates[np.argsort(-ledger.heat()[candidates])][: max(0, n)]))


def too_few(ledger: Ledger, n: int, keep: Sequence[int] = ()) -> Plan:
    return GIVEN_UP(ledger, n - 1, keep)


def keep_nothing(ledger: Ledger, n: int, keep: Sequence[int] = ()) -> Plan:
    """Dropping what was to be brought in."""
    return GIVEN_UP(ledger, n)


def page_in_too_much(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    """A choice that leaves a block too few."""
    return RESELECT(ledger, n_free - 1, n_most)


def drop_too_few(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    plan = RESELECT(ledger, n_free, n_most)
    return Plan(plan.drops[1:], plan.page_ins)


def coldest_first(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    plan = RESELECT(ledger, n_free, n_most)
    return Plan(plan.drops, plan.page_ins[::-1])


def choose_by_recency(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    """A choice that knows no scores."""
    blind = Ledger(ledger.n_block, ledger.chunk, n_sinks=ledger.n_sinks, n_tail=ledger.n_tail)
    blind.pins, blind._now = ledger.pins, (ledger.n_tokens, ledger._now[1].copy())
    blind.rate(np.full(blind.n_chunks, np.nan))
    return RESELECT(blind, n_free, n_most)


def swap_too_many(ledger: Ledger, n_free: int, n_most: int | None = None) -> Plan:
    """A choice that brings in one more than it was told to."""
    return RESELECT(ledger, n_free, None if n_most is None else n_most + 1)


def scores_are_kept(self: Ledger, n_tokens: int) -> None:
    """A chunk that is written to again keeps the score of what it held."""
    scores = self.score[: -(-self.n_tokens // self.chunk)]
    WRITE(self, n_tokens)
    self.rate(scores)


def begun_chunk_stays(self: Ledger, n_tokens: int) -> None:
    """A chunk that was begun is full now, and its block is still counted."""
    begun = self.n_tokens % self.chunk > 0
    APPEND(self, n_tokens)
    if begun:
        self._resident[(self.n_tokens - n_tokens) // self.chunk] = True


def read_without_records(self: Ledger, n_tokens: int) -> None:
    first = self.n_sealed
    APPEND(self, n_tokens)
    self._stored[first:] = False


def read_earlier(self: Ledger, n_tokens: int) -> None:
    """What was computed elsewhere is as old as what was there before."""
    first = self.n_sealed
    APPEND(self, n_tokens)
    self._touched[first:] = 0


def read_scores_are_kept(self: Ledger, n_tokens: int) -> None:
    """A chunk that was begun, and is full now, keeps the score of what it held."""
    scores = self.score
    APPEND(self, n_tokens)
    self.rate(scores)


def scored_is_hotter(self: Ledger) -> Scores:
    """What was never scored counts as cold."""
    return np.where(np.isnan(self.score), self.touched - 1e9, self.score)


GIVEN_UP = planning._given_up
WRITE = Ledger.write
APPEND = Ledger.append

BROKEN: list[tuple[object, str, Callable[..., object], type[Paging], str]] = [
    (Ledger, "evictable", ignore_protection, Paging, UNPROTECTED),
    (Ledger, "evictable", ignore_records, Paging, "chunk . has no record: it would be lost"),
    (Ledger, "protected", protect_nothing, Paging, UNPROTECTED),
    (Ledger, "protected", protect_no_pins, Paging, UNPROTECTED),
    (Ledger, "drop", drop_forgets_stored, Paging, "neither resident nor stored"),
    (Ledger, "drop", drop_keeps_the_block, Paging, "ledger and pool differ"),
    (Ledger, "new_chunks", count_whole_chunks, Paging, "chunks for . positions"),
    (Ledger, "new_chunks", count_one_too_many, Paging, "chunks for . positions"),
    (Ledger, "rollback", rollback_keeps_the_record, Paging, "a record of a chunk that is not sealed"),
    (
        Ledger,
        "mark_stored",
        store_says_nothing,
        Paging,
        "neither resident nor stored|more blocks of the pool are needed and 0 can be freed",
    ),
    (Geometry, "blocks", floor_without_pins, Paging, "the next batch would find no room|can be freed"),
    (planning, "_given_up", too_few, Paging, "chunks in a pool of . blocks|no free block"),
    (planning, "_given_up", keep_nothing, Paging, "were not brought in|no room, and yet a plan"),
    (planning, "_given_up", hottest, Exact, "not the coldest|no room, and yet a plan"),
    (
        planning,
        "reselect",
        page_in_too_much,
        Exact,
        "too few blocks are free|not the hottest|not the coldest|more is dropped|no room",
    ),
    (planning, "reselect", drop_too_few, Paging, "no free block for chunk ."),
    (planning, "reselect", coldest_first, Exact, "not the hottest first"),
    (planning, "reselect", choose_by_recency, Exact, "not the hottest|not the coldest"),
    (planning, "reselect", swap_too_many, Exact, "not the hottest first"),
    (Ledger, "write", scores_are_kept, Exact, "array_equal"),
    (
        Ledger,
        "append",
        begun_chunk_stays,
        Paging,
        "ledger and pool differ|were not brought in|more than the pool",
    ),
    (Ledger, "append", read_without_records, Paging, "neither resident nor stored|not there to be stored"),
    (Ledger, "append", read_earlier, Exact, "touched"),
    (Ledger, "append", read_scores_are_kept, Exact, "array_equal"),
    (Ledger, "heat", scored_is_hotter, Exact, "not the coldest|not the hottest"),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "machine", "why"), BROKEN, ids=[broken.__name__ for _, _, broken, _, _ in BROKEN]
)
def test_the_machine_sees_a_broken_rule(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    broken: Callable[..., object],
    machine: type[Paging],
    why: str,
) -> None:
    """An invariant, or the ledger itself, fires, and for the reason that is expected."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, PoolError), match=re.sub(r"\.(?!\*)", "[0-9]+", why)):  # LedgerError is one
        run_state_machine_as_test(machine, settings=QUICK)
