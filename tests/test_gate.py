"""The gate under a simulated clock: what it costs on any text, when it closes and opens again, and what it counts.

Seconds are those of a plain step unless said otherwise.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import CHECK

from pyllama_kvflash.policy.gate import Gate

N_MAX = 8
N_LONG = 20_000
COSTS = [1.5, 2.5, 5, 8]  # of a drafted step
PLAIN, DRAFTED = "plain", "drafted"

Clock = Callable[[], float]
Draft = Callable[[int], tuple[float, int]]


@dataclass
class Log:
    """What became of a text."""

    seconds: float = 0.0
    tokens: int = 0
    switches: list[tuple[int, bool]] = field(default_factory=list)  # (tokens before, whether it closed)
    steps: list[str] = field(default_factory=list)
    dearest: float = 0.0  # seconds a token, at any length from 300

    def closings(self) -> list[int]:
        return [at for at, closed in self.switches if closed]

    def openings(self) -> list[int]:
        return [at for at, closed in self.switches if not closed]

    def runs(self) -> list[tuple[str, int]]:
        """Steps of one kind in a row."""
        res: list[tuple[str, int]] = []
        for step in self.steps:
            n = res.pop()[1] if res and res[-1][0] == step else 0
            res.append((step, n + 1))
        return res


def steady() -> float:
    return 1.0


def noise(seed: int, sd: float = 0.1, spikes: float = 0.0) -> Clock:
    """A factor of what the clock shows: one in so many takes 20 times as long."""
    rng = random.Random(seed)
    return lambda: max(0.3, rng.gauss(1, sd)) * (20 if rng.random() < spikes else 1)


def spike_at(step: int, factor: float = 20) -> Clock:
    steps = iter(range(1 << 30))
    return lambda: factor if next(steps) == step else 1.0


def guessed(cost: float, p: float, seed: int = 0) -> Draft:
    """Drafts of which each token is right with this probability, until one is wrong."""
    rng = random.Random(seed)

    def draft(_: int) -> tuple[float, int]:
        n = 0
        while n < N_MAX and rng.random() < p:
            n += 1
        return cost, n + 1

    return draft


def changing(cost: float, ends: Sequence[int]) -> Draft:
    """All right up to the first end, none up to the second, and so on."""
    return lambda at: (cost, 1 if sum(at >= end for end in ends) % 2 else N_MAX + 1)


def run(n: int, draft: Draft, clock: Clock = steady, gate: Gate | None = None) -> Log:
    """A text of n tokens. The clock errs: what the gate is told is not what is summed."""
    gate, log, closed = gate or Gate(), Log(), False
    while log.tokens < n:
        kind, seconds, committed = PLAIN, 1.0, 1
        if gate.open:
            kind, (seconds, committed) = DRAFTED, draft(log.tokens)
            gate.drafted(seconds * clock(), committed)
        else:
            gate.plain(seconds * clock())
        log.steps.append(kind)
        log.seconds += seconds
        if gate.closed != closed:
            closed = gate.closed
            log.switches.append((log.tokens, closed))
        log.tokens += committed
        if log.tokens >= 300:
            log.dearest = max(log.dearest, log.seconds / log.tokens)
    return log


def opened(margin: float = 1.0, cost: float = 2.5) -> Gate:
    """A gate that a text opened of which everything is guessed right."""
    gate = Gate(margin)
    run(300, guessed(cost, 1), gate=gate)
    assert gate.open
    assert not gate.closed
    return gate


#
# a text that cannot be guessed
#


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [0, 0.03])
@pytest.mark.parametrize("spikes", [0, 0.01])
def test_what_cannot_be_guessed_is_hardly_slower(cost: float, p: float, spikes: float) -> None:
    for seed in range(3):
        clock = noise(seed, spikes=spikes) if seed else steady
        assert run(N_LONG, guessed(cost, p, seed), clock).seconds <= N_LONG / 0.97


@given(cost=st.floats(1.5, 8), p=st.floats(0, 0.05), sd=st.floats(0, 0.15), seed=st.integers(0, 1000))
@settings(CHECK, max_examples=40)
def test_whatever_a_draft_costs(cost: float, p: float, sd: float, seed: int) -> None:
    log = run(N_LONG, guessed(cost, p, seed), noise(seed, sd))
    assert log.seconds <= N_LONG / 0.97
    assert log.dearest <= 1 / 0.87


@pytest.mark.parametrize(
    ("cost", "n_try", "waits"),
    [
        (1.5, 4, [128, 128, 256, 512, 1024, 1024]),  # loses two steps
        (2.5, 4, [384, 384, 384, 512, 1024, 1024]),
        (5, 2, [512, 512, 512, 512, 1024, 1024]),  # is seen to be hopeless after two
        (8, 2, [896, 896, 896, 896, 1024, 1024]),
        (26, 2, [3200, 3200, 3200]),
        (1000, 2, [8192, 8192]),
    ],
)
def test_waits_make_up_for_a_try_and_double(cost: float, n_try: int, waits: list[int]) -> None:
    gate = Gate()
    runs = run(3 + sum(waits) + n_try * len(waits), guessed(cost, 0), gate=gate).runs()
    assert runs == [(PLAIN, 3), *(pair for n in waits for pair in ((DRAFTED, n_try), (PLAIN, n)))]
    assert gate.n_gated == sum(waits)


def test_waits_make_up_for_catching_up() -> None:
    """The first draft of a try takes 30 steps, which no verdict on what a draft is worth counts."""
    first = [True]

    def draft(_: int) -> tuple[float, int]:
        return (30.0 if first.pop() else 2.0) if first else 2.0, 1

    assert run(3 + 4 + 64 * 32, draft).runs() == [(PLAIN, 3), (DRAFTED, 4), (PLAIN, 64 * 32)]


#
# a text that can
#


@pytest.mark.parametrize("n", [300, 2000, N_LONG])
@pytest.mark.parametrize("spikes", [None, 0, 0.01])
def test_what_can_be_guessed_is_as_fast_as_always_drafting(n: int, spikes: float | None) -> None:
    always = run(n, guessed(2.5, 1), gate=Gate(0)).seconds
    assert always == 2.5 * -(-n // (N_MAX + 1))
    for seed in range(5):
        clock = steady if spikes is None else noise(seed, spikes=spikes)
        assert always >= 0.95 * run(n, guessed(2.5, 1), clock).seconds


#
# one that changes
#


@pytest.mark.parametrize("cost", [1.5, 2.5, 5, 7.5])
@pytest.mark.parametrize("seed", range(3))
def test_closes_when_the_text_changes_and_opens_when_it_changes_back(cost: float, seed: int) -> None:
    ends = [5000, 10_000, 15_000, 20_000]
    log = run(25_000, changing(cost, ends), noise(seed) if seed else steady)
    assert len(log.closings()) == len(log.openings()) == 2
    assert all(0 <= at - end <= 40 for at, end in zip(log.closings(), ends[::2], strict=True))
    assert all(0 <= at - end <= 1024 + 4 * (N_MAX + 1) for at, end in zip(log.openings(), ends[1::2], strict=True))


@pytest.mark.parametrize("n", [100, 200, 400, 800, 1600])
def test_opens_the_sooner_the_shorter_it_was_closed(n: int) -> None:
    log = run(6000, changing(2.5, [2000, 2000 + n]))
    (at,) = log.openings()
    assert at - (2000 + n) <= n + 64 * 4 * 1.5 + 4 * (N_MAX + 1)


def test_a_try_that_is_worth_it_makes_the_wait_short_again() -> None:
    log = run(40_000, changing(2, [1000, 11_000, 12_500, 22_500]))
    at = [i for i, pair in enumerate(log.runs()) if pair == (PLAIN, 1024)]
    assert len(at) >= 4
    waits = [n for kind, n in log.runs() if kind == PLAIN and n > 3]
    rising = [64, 256, 256, 256, 512]  # a try in vain loses four
    assert [waits[i : i + 5] for i, n in enumerate(waits) if n == 64] == [rising, rising]


def test_what_catching_up_takes_is_not_held_against_the_drafts() -> None:
    """After a long pause a drafter reads what it missed."""
    gate, n_plain = Gate(), 0
    text = changing(2.5, [1000, 4000])

    def draft(at: int) -> tuple[float, int]:
        nonlocal n_plain
        n_before, n_plain = n_plain, gate._n_plain
        seconds, committed = text(at)
        return seconds + (30 if n_plain - n_before > 1 else 0), committed

    log = run(8000, draft, gate=gate)
    assert len(log.switches) == 2
    assert log.openings()[0] <= 4000 + 64 * (30 + 4 * 1.5) + 4 * (N_MAX + 1)


def test_a_try_forgets_what_drafts_took() -> None:
    """Worth a quarter, then 1.2."""
    log = run(8000, lambda at: (12.0 if at < 3000 else 2.5, 3))
    assert log.switches[-1][1] is False
    assert len(log.openings()) == 1
    assert log.openings()[0] <= 3000 + 1024 + 4 * 3


#
# a tie
#


@pytest.mark.parametrize("worth", [0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2])
@pytest.mark.parametrize("spikes", [0, 0.01])
def test_a_tie_costs_little_and_does_not_flap(worth: float, spikes: float) -> None:
    """Against the better of the two; a switch takes 125 tokens on average."""
    p = 0.65
    cost = sum(p**i for i in range(N_MAX + 1)) / worth
    for seed in range(3):
        log = run(N_LONG, guessed(cost, p, seed), noise(seed, spikes=spikes))
        assert log.seconds <= N_LONG / max(1, worth) / (0.92 if worth < 1.2 else 0.88)
        assert worth > 1 or log.seconds <= N_LONG / 0.97
        assert len(log.switches) <= N_LONG / 125


def test_worth_no_less_than_the_margin_is_worth_it() -> None:
    assert run(N_LONG, lambda _: (2.0, 2)).switches == []
    assert run(N_LONG, lambda _: (2.0 + 1e-9, 2)).openings() == []


#
# a bad clock
#


@pytest.mark.parametrize("factor", [4, 20, 1000])
def test_no_step_that_takes_long_by_chance_does_harm(factor: float) -> None:
    """Whichever it is: to a text that can be guessed, and to one that cannot."""
    for step in range(0, 150, 3):
        assert run(2000, guessed(2.5, 1), spike_at(step, factor)).switches == [], step
        assert run(2000, guessed(1.6, 0), spike_at(step, factor)).seconds <= 2000 / 0.97, step
        assert run(2000, guessed(8, 0), spike_at(step, factor)).dearest <= 1 / 0.91, step


#
# what the words say
#


def test_worth_is_not_known_until_both_kinds_were_measured() -> None:
    gate = Gate()
    assert gate.worth is None
    for seconds in (2.0, 1.0, 3.0):
        assert not gate.open
        gate.plain(seconds)
        assert gate.worth is None
    assert gate.plain_s == 1, "the least of the first three"
    assert gate.open
    gate.drafted(100, 9)
    assert gate.worth is None, "the first is not measured"
    gate.drafted(4, 3)
    assert gate.worth == 3 / 4
    gate.drafted(2, 6)
    assert gate.worth == 4.5 / 2
    drafts_first = Gate(0)
    drafts_first.drafted(1, 1)
    drafts_first.drafted(1, 1)
    assert drafts_first.worth is None
    drafts_first.plain(2)
    assert drafts_first.worth == 2


def test_averages_move() -> None:
    gate = opened(cost=2.0)
    gate.plain(1.0)  # after a draft: does not count
    gate.plain(2.0)
    gate.drafted(3.0, 4)
    assert gate.plain_s == pytest.approx(0.8 * 1 + 0.2 * 2)
    assert gate.drafted_s == pytest.approx(0.8 * 2 + 0.2 * 3)
    assert gate.committed == pytest.approx(0.9 * 9 + 0.1 * 4)
    gate.plain(1)
    gate.plain(1000)
    assert gate.plain_s == pytest.approx(1.2 * (0.8 + 0.2 * 3)), "by chance"


steps = st.tuples(st.booleans(), st.sampled_from([0.0, 1e-9, 0.5, 1.0, 2.0, 5.0, 50.0]), st.integers(1, N_MAX + 1))
margins = st.sampled_from([0.5, 1.0, 1.5, 3.0])


@given(text=st.lists(steps, max_size=60))
@CHECK
def test_margin_0_never_closes(text: list[tuple[bool, float, int]]) -> None:
    gate = Gate(0)
    for is_plain, seconds, committed in text * 3:
        if is_plain:
            gate.plain(seconds)
        else:
            gate.drafted(seconds, committed)
        assert gate.open
        assert not gate.closed
        assert gate.n_gated == 0


def test_margins_hold_for_tries_too() -> None:
    """Worth 1.8."""
    for margin in (0.5, 1.0, 1.75):
        assert run(2000, guessed(5, 1), gate=Gate(margin)).switches == []
    assert run(N_LONG, guessed(5, 1), gate=Gate(1.85)).openings() == []


@given(margin=margins, text=st.lists(steps, max_size=60))
@settings(CHECK)
def test_it_closes_after_four_poor_steps(margin: float, text: list[tuple[bool, float, int]]) -> None:
    """At the last of four drafted steps in a row at which they are worth less, and at no other."""
    gate, below = opened(margin, cost=9 / margin / 1.1), 0
    for is_plain, seconds, committed in text:
        if is_plain:
            gate.plain(seconds)
            assert not gate.closed
            continue
        gate.drafted(seconds, committed)
        worth = gate.worth
        assert worth is not None
        below = below + 1 if worth < margin else 0
        assert gate.closed == (below == 4)
        if gate.closed:
            break


@given(margin=margins, text=st.lists(steps, max_size=60))
@settings(CHECK)
def test_gated_steps_are_the_plain_ones_of_a_closed_gate(margin: float, text: list[tuple[bool, float, int]]) -> None:
    """Not those of an open one whose drafter has no guess."""
    gate, n_gated = Gate(margin), 0
    for is_plain, seconds, committed in text * 3:
        if gate.open and not is_plain:
            gate.drafted(seconds, committed)
        else:
            n_gated += gate.closed and not gate.open
            gate.plain(seconds)
        assert gate.n_gated == n_gated
        assert gate.closed or gate.open or gate._n_plain < 3 or gate._since_plain == 128


def test_a_drafter_without_a_guess_does_not_end_a_try() -> None:
    gate = Gate()
    run(3 + 4 + 128, guessed(1.5, 0), gate=gate)
    assert (gate.closed, gate.open, gate.n_gated) == (True, True, 128)
    for _ in range(1000):
        gate.plain(1)
        assert gate.open
    assert gate.n_gated == 128
    for i in range(4):
        assert gate.closed, i
        gate.drafted(1.5, 9)
    assert not gate.closed


def test_plain_steps_are_measured_while_it_is_open() -> None:
    assert run(9 * 1000, guessed(2.5, 1)).runs()[:5] == [(PLAIN, 3), *2 * [(DRAFTED, 128), (PLAIN, 2)]]
    gate = opened()
    for _ in range(2):
        gate.drafted(1, 1)
        gate.plain(1)
        gate.plain(1)
    for _ in range(128):
        assert gate.open
        gate.drafted(1, 2)
    for _ in range(2):
        assert not gate.open
        assert not gate.closed
        gate.plain(1)
    assert gate.open


def test_what_a_switch_takes_is_put_down_to_the_drafts() -> None:
    """A step in two has no draft, and takes twice as long as plain ones in a row: four tokens in 4.5 steps."""
    gate = opened()
    for _ in range(200):
        if gate.closed:
            break
        gate.drafted(2.5, 3)
        gate.plain(2)
    assert gate.closed
    assert gate.plain_s == 1
    well = opened()
    for _ in range(200):
        assert not well.closed
        well.drafted(2.5, 5)
        well.plain(2)


@pytest.mark.parametrize("faster", [2, 10])
def test_closes_when_plain_steps_become_fast(faster: float) -> None:
    gate = opened(cost=6)
    n = 0
    while not gate.closed:
        if gate.open:
            gate.drafted(6, 9)
        else:
            gate.plain(1 / faster)
        n += 1
        assert n < 6 * 128


#
# steps that take no time
#


@given(text=st.lists(steps, max_size=60), zeros=st.booleans())
@settings(CHECK, max_examples=60)
def test_a_clock_that_stands_does_no_harm(text: list[tuple[bool, float, int]], *, zeros: bool) -> None:
    """Whatever came before, the gate then finds out what a text is: after its longest wait, if a plain step took no time."""
    gate = Gate()
    for is_plain, seconds, committed in text:
        if gate.open and not is_plain:
            gate.drafted(0 if zeros else seconds, committed)
        else:
            gate.plain(0 if zeros else seconds)
        assert gate.worth is None or gate.worth >= 0
    bad = run(5000, guessed(4, 0), gate=gate)
    assert gate.closed
    assert bad.steps.count(DRAFTED) <= 2500
    good = run(N_LONG, guessed(2.5, 1), gate=gate)
    assert not gate.closed
    assert good.steps.count(PLAIN) <= 8192 + 200
