"""Drafts beside checks, as on a GPU that streams layers: the text is the full cache's, of one sequence and of several in turns."""

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import lossless, snapshots, tiny
from support.changes import ENGINE
from support.cuts import cut_off_at_every_line
from support.lossless import CHUNK, FULL, N_POOL, chosen_alike, rows_apart, width_apart
from support.oracles import ON_GPU
from support.rounding import Chosen, held
from support.runs import GREEDY, TOKENS, Open, check_residency, turn

from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.engine.generation import Generation
from pyllama_kvflash.engine.lossless import Lossless
from pyllama_kvflash.errors import HostMemoryError
from pyllama_kvflash.policy.lookahead import Length, Lookahead
from pyllama_kvflash.pool.exact import ExactReader

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order"),
    pytest.mark.sampled(ENGINE),
]

SMALL = lossless.SMALL
known = lossless.known
wordless = snapshots.wordless


@pytest.fixture
def went_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has 3 tokens drafted before a check and 5 beside it, whatever the clock says. Says after which checks drafting went on."""
    found: list[bool] = []
    beside, ahead, accepted = Lossless.beside, Lossless.ahead, Lossless.accepted

    def five(lossless: Lossless, left: int, other: Any = None) -> Any:
        draft, calls = beside(lossless, left, other), itertools.count()
        return draft and (lambda done: draft(done if other else lambda: next(calls) >= 5))

    def seen(lossless: Lossless, n: int, following: int | None) -> bool:
        found.append(accepted(lossless, n, following))
        return found[-1]

    monkeypatch.setattr(ExactReader, "streams", True)
    monkeypatch.setattr(Lookahead, "next", Length(3))

    def ahead_by_five(lossless: Lossless, *args: Any) -> Any:
        draft, calls = ahead(lossless, *args), itertools.count()
        return draft and (lambda _done: draft(lambda: next(calls) >= 5))

    monkeypatch.setattr(Lossless, "beside", five)
    monkeypatch.setattr(Lossless, "ahead", ahead_by_five)
    monkeypatch.setattr(Lossless, "accepted", seen)
    return found


def drafts_of(text: list[int], wrong: set[int], start: int) -> Callable[..., int]:
    """Samples drafts from a text whose first token is at position start, but a wrong token at some positions."""

    def sample(lossless: Lossless, _sampler: Any, _i: int) -> int:
        at = lossless._at[0] + 1 + len(lossless._drafted)
        token = text[at - start] if at - start < len(text) else 0
        return (token + 1) % tiny.N_VOCAB if at in wrong else token

    return sample


def begun(kv: KVFlash, texts: Sequence[Any], chosen: Sequence[Chosen], n: int) -> list[Generation]:
    """An answer of n tokens to each text, none of which is read."""
    runs = []
    for s, c, text in zip(kv.sequences, chosen, texts, strict=True):
        with held(c):
            runs.append(s.generation(text, max_tokens=n, sampling=GREEDY))
    return runs


def take_turns(runs: Sequence[Generation], *, ahead: bool = True) -> list[list[int]]:
    """Have all answers end. Returns the tokens of each. ahead: each is told whose turn is the next one."""
    got: list[list[int]] = [[] for _ in runs]
    while left := [i for i, run in enumerate(runs) if not run.ended]:
        for i, following in zip(left, [*left[1:], left[0]], strict=True):
            got[i] += turn(runs[i], runs[following] if ahead else None)
    return got


@pytest.mark.parametrize(
    "wrong", [set(), {710, 711, 730, 765}, set(range(701, 800, 2))], ids=["never", "some", "each other"]
)
def test_drafting_goes_on_beside_a_check(
    opened: Open,
    known: Callable[..., Chosen],
    wordless: None,
    monkeypatch: pytest.MonkeyPatch,
    went_on: list[bool],
    wrong: set[int],
) -> None:
    """The text is the full cache's, and so are the rows; the pool has them, once drafting ends."""
    chosen = known()
    kv, full, plain = opened(), opened(**FULL), opened(mode="fast")
    want = chosen_alike(chosen, full, TOKENS[:700], 90)
    monkeypatch.setattr(Lossless, "_sample", drafts_of(want, wrong, 700))
    assert chosen_alike(chosen, kv, TOKENS[:700], 90) == want
    check_residency(kv, CHUNK)
    assert any(went_on) == (len(wrong) < 40)
    assert not all(went_on)
    assert rows_apart(kv, plain, 700 // CHUNK) <= width_apart(opened, "qwen3")
    chosen.rows.clear()
    more = [chosen_alike(chosen, one, TOKENS[:5], 20, append=True) for one in (full, kv)]
    assert more[0] == more[1]
    check_residency(kv, CHUNK)


@pytest.mark.nightly(ENGINE)
def test_what_is_said_of_a_token_is_the_full_caches(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, went_on: list[bool]
) -> None:
    """Its probability, and the most likely ones, also where drafting went on."""
    chosen, sampling = known(), Sampling(temperature=0.8, seed=3, n_probs=4)

    def told(kv: KVFlash) -> list[Token]:
        return [e for e in kv.generate(TOKENS[:700], max_tokens=60, sampling=sampling) if isinstance(e, Token)]

    with held(chosen):
        want = told(opened(**FULL))
    with held(chosen), monkeypatch.context() as patch:
        patch.setattr(Lossless, "_sample", drafts_of([e.id for e in want], {710, 730}, 700))
        got = told(opened())
    assert any(went_on)
    assert [(e.id, e.probs) for e in got] == [(e.id, e.probs) for e in want]
    assert len({e.probs for e in want}) == 60, "one of another row would be seen"


@pytest.mark.parametrize(
    ("n", "ahead", "pool"),
    [
        (2, True, 3 * N_POOL),
        pytest.param(2, False, 3 * N_POOL, marks=pytest.mark.nightly(ENGINE)),
        pytest.param(3, True, 5 * N_POOL, marks=pytest.mark.nightly(ENGINE)),
        # blocks for one trial at a time
        pytest.param(3, True, 2 * N_POOL, marks=pytest.mark.nightly(ENGINE)),
    ],
)
def test_sequences_take_turns_beside_checks(
    opened: Open,
    known: Callable[..., Chosen],
    wordless: None,
    monkeypatch: pytest.MonkeyPatch,
    went_on: list[bool],
    n: int,
    ahead: bool,
    pool: int,
) -> None:
    """Trials stay while others are checked. While one is checked the next one drafts, if it is told which that is."""
    drafted, ahead_of = [0], Lossless.ahead

    def counted(lossless: Lossless, *args: Any) -> Any:
        draft = ahead_of(lossless, *args)

        def also(done: Callable[[], bool]) -> None:
            before = len(lossless._drafted)
            draft(done)
            drafted[0] += max(0, len(lossless._drafted) - before)
            assert lossless._sequence.steady

        return draft and also

    monkeypatch.setattr(Lossless, "ahead", counted)
    kv, texts = opened(n_parallel=n, pool=pool), (TOKENS[:700], TOKENS[700:1300], TOKENS[200:870])[:n]
    chosen = [known() for _ in texts]
    want = [chosen_alike(c, opened(**FULL), text, 60) for c, text in zip(chosen, texts, strict=True)]
    runs = begun(kv, texts, chosen, 60)
    assert take_turns(runs, ahead=ahead) == want
    assert any(went_on)
    assert (drafted[0] > 20) == (ahead and pool > 2 * N_POOL)
    kv.check_integrity()
    assert [s.sequence.pager.ledger.n_tried for s in kv.sequences] == [0] * n


@pytest.mark.nightly(ENGINE)
def test_one_answers_while_another_reads(
    opened: Open, known: Callable[..., Chosen], wordless: None, went_on: list[bool]
) -> None:
    """A batch of the other's prompt, read exactly, ends the trial."""
    kv, texts, chosen = opened(n_parallel=2, pool=4 * N_POOL), (TOKENS[:700], TOKENS[200:1900]), [known(), known()]
    want = [chosen_alike(c, opened(**FULL), text, 60) for c, text in zip(chosen, texts, strict=True)]
    runs = begun(kv, texts, chosen, 60)
    first: list[int] = []
    while runs[0].reading:
        first += turn(runs[0])
    got = take_turns(runs, ahead=False)
    assert [first + got[0], got[1]] == want
    kv.check_integrity()


def test_an_error_of_the_one_that_drafts_ahead_is_its_own(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, went_on: list[bool]
) -> None:
    """The other answer goes on, though the one that failed takes no further step."""
    kv, texts, chosen = opened(n_parallel=2, pool=4 * N_POOL), (TOKENS[:700], TOKENS[700:1300]), [known(), known()]
    want = chosen_alike(chosen[0], opened(**FULL), texts[0], 60)
    sample = Lossless._sample

    def fails(lossless: Lossless, *args: Any) -> int:
        if lossless._sequence.seq == 1:
            raise HostMemoryError
        return sample(lossless, *args)

    runs, got = begun(kv, texts, chosen, 60), []
    for run in runs:
        while run.reading:
            got += turn(run) if run is runs[0] else turn(run) and []
    monkeypatch.setattr(Lossless, "_sample", fails)
    got += turn(runs[0], runs[1])
    assert not kv.sequences[1].sequence.steady
    while not runs[0].ended:
        got += turn(runs[0])
    assert got == want
    kv.sequences[1].clear()
    kv.check_integrity()


@pytest.mark.nightly(ENGINE)
def test_cut_off_while_another_is_checked(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, went_on: list[bool]
) -> None:
    """Ctrl-C in a turn of two sequences, wherever it is: both answers go on as they would have."""
    texts, chosen = (TOKENS[:500], TOKENS[700:1200]), [known(), known()]
    want = [chosen_alike(c, opened(**FULL), text, 40) for c, text in zip(chosen, texts, strict=True)]

    def read_through(kv: KVFlash) -> list[Generation]:
        runs = begun(kv, texts, chosen, 40)
        for run in runs:
            while run.reading:
                turn(run)
        return runs

    state: dict[int, list[Generation]] = {}

    def fresh() -> KVFlash:
        kv = opened(n_parallel=2, pool=3 * N_POOL)
        state[id(kv)] = read_through(kv)
        return kv

    def act(kv: KVFlash) -> None:
        runs = state[id(kv)]
        for _ in range(3):
            turn(runs[0], runs[1])
            turn(runs[1], runs[0])

    def check(kv: KVFlash) -> None:
        runs, further = [], []
        for s, c, text, to_come in zip(kv.sequences, chosen, texts, want, strict=True):
            all_of_it, pending = [*text.tolist(), *to_come], s.sequence.pending
            left = [*s.tokens.tolist(), *([] if pending is None else [pending])]
            n = len(left)
            assert left == all_of_it[:n]
            prompt = all_of_it[n : n + 1] if pending is None else []
            n += len(prompt)
            further.append(all_of_it[n : n + 6])
            with held(c, n - len(text)):
                runs.append(s.generation(np.array(prompt, np.int32), max_tokens=6, sampling=GREEDY))
        assert take_turns(runs) == further
        kv.check_integrity()
        for s in kv.sequences:
            s.clear()
        state[id(kv)] = read_through(kv)

    # not within the sampler: what this test knows is counted there
    files = ("exact.py", "ledger.py", "lossless.py", "pager.py", "sequence.py", "step.py", "steps.py")
    step = int(os.environ.get("KVFLASH_CUT_STEP", "23"))
    _, places = cut_off_at_every_line(fresh, act, check, files=files, step=step)
    assert {place.partition(":")[0] for place in places} >= {"lossless.py", "sequence.py"}
    assert any(went_on)
