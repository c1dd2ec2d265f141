"""When chunks are scored: as often as the share of the time allows that scoring may take."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.properties import CHECK

from pyllama_kvflash.policy import Schedule, Scoring
from pyllama_kvflash.policy.schedule import SELDOM


def run(schedule: Schedule, n: int, step_s: float, score_s: float, apply_s: float = 0.0) -> tuple[list[int], list[int]]:
    """n tokens, one a step, as the selector does it: the steps at which a scoring began, and was applied."""
    begun: list[int] = []
    applied: list[int] = []
    for i in range(1, n + 1):
        schedule.step(1, step_s)
        if len(begun) == len(applied) and schedule.begin():
            begun.append(i)
        if len(begun) > len(applied) and schedule.apply():
            schedule.scored(score_s, apply_s)
            applied.append(i)
    return begun, applied


def measured(schedule: Schedule, step_s: float, score_s: float, apply_s: float = 0.0) -> Schedule:
    """One that knows what things take."""
    schedule.step(1, step_s)
    schedule.scored(score_s, apply_s)
    return schedule


def left(schedule: Schedule) -> int:
    """Tokens until the next scoring begins."""
    return schedule.interval - schedule.n_since


MODES = {
    "within, on a CPU": {"within": True, "free": False},
    "within, with a device": {"within": True, "free": True},
    "beside, on a CPU": {"within": False, "free": False},
    "beside a device": {"within": False, "free": True},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def test_who_says_nothing_scores_beside_a_device_every_second_token() -> None:
    schedule = Schedule()
    assert (schedule.tau, schedule.share, schedule.within, schedule.free) == (2, 0.03, False, True)
    assert (schedule.beside, schedule.interval, schedule.lag) == (True, 2, 1)
    assert (schedule.cost_s, schedule.step_s, schedule.n_since) == (0.0, None, 0)


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("tau", [1, 2, 8, 64])
def test_what_is_within_the_token_is_applied_at_once(tau: int, free: bool) -> None:
    """At the same step, and the next one begins tau steps later."""
    schedule, happened = Schedule(tau, 0.05, within=True, free=free), []
    schedule.scored(0.0, 0.0)
    for i in range(1, 4 * tau + 1):
        schedule.step(1, 1.0)
        assert not schedule.apply()
        assert schedule.n_until(due=False) == max(1, tau - schedule.n_since)
        if schedule.begin():
            assert not schedule.begin()
            assert schedule.apply()
            assert not schedule.apply()
            schedule.scored(0.0, 0.0)
            happened.append(i)
        assert not schedule.beside
        assert schedule.lag == 0
    assert happened == [tau, 2 * tau, 3 * tau, 4 * tau]


def test_what_a_device_copies_counts_within_the_token_alone() -> None:
    """Beside decode nothing waits for it; so it is beside that much is copied."""
    few, many = (Schedule(2, 0.05, within=True, free=True) for _ in range(2))
    for schedule, copy_s in ((few, 0.0), (many, 1.0)):
        schedule.step(1, 1.0)
        schedule.scored(0.1, 0.0, copy_s)
    assert (few.beside, few.interval, few.lag) == (False, 2, 0)
    assert (many.beside, many.interval, many.lag) == (True, 2, 1)
    assert many.cost_s == 1.1


def test_a_token_that_is_decoded_again_is_a_part_of_what_scoring_costs() -> None:
    """Where every scoring has one, they become seldom; where some have, it is the least that counts."""
    schedule = Schedule(2, 0.05, within=True, free=False)
    schedule.repeated()
    assert schedule.cost_s == 0
    schedule.step(1, 1.0)
    for _ in range(5):
        schedule.scored(0.1, 0.0)
        schedule.repeated()
    assert (schedule.cost_s, schedule.interval) == (1.1, 32)
    schedule.scored(0.1, 0.0)
    assert (schedule.cost_s, schedule.interval) == (0.1, 2)


def test_it_comes_back_within_the_token_when_that_costs_less() -> None:
    """After five scorings that took longer, which is as many as are remembered, and the other way round."""
    schedule = measured(Schedule(within=True), 1.0, 0.1)
    assert not schedule.beside
    for n, beside in enumerate([False, False, False, False, True, True]):
        schedule.scored(2.0, 0.0)
        assert schedule.beside == beside, n
    schedule.scored(0.1, 0.0)
    assert not schedule.beside


def test_beside_a_device_each_cost_is_the_least_of_its_own() -> None:
    """Of the last five: the one that was scored fastest need not have been the one that was applied fastest."""
    schedule = Schedule(2, 0.03)
    schedule.step(1, 1.0)
    for score_s, apply_s in [(1.4, 0.5), (5.0, 0.05), (3.0, 0.4)]:
        schedule.scored(score_s, apply_s)
    assert schedule.cost_s == pytest.approx(1.9)
    assert (schedule.lag, schedule.interval) == (2, 4)  # 1.4 seconds, and 0.05


def test_scoring_begins_every_tau_tokens_and_is_applied_some_steps_later() -> None:
    begun, applied = run(Schedule(64, 0.05, free=False), 300, 1.0, 1.0)
    assert begun == [64, 128, 192, 256]
    assert applied == [80, 144, 208, 272]  # a quarter of 64 later
    begun, applied = run(Schedule(64, 0.05), 300, 1.0, 2.5)
    assert begun == [64, 128, 192, 256]
    assert applied == [65, 132, 196, 260]  # once it is known how long it takes
    begun, applied = run(Schedule(2, 0.05), 20, 1.0, 2.5)
    assert begun == [2, 10, 18]
    assert applied == [3, 14]


@modes
def test_a_share_of_zero_never_stretches(mode: dict[str, bool]) -> None:
    """Nor is anything beside that may be within the token."""
    lag = 0 if mode["within"] else 1 if mode["free"] else 4
    begun, applied = run(Schedule(16, 0, **mode), 100, 1e-6, 1e6, 1e6)
    assert begun == [16, 32, 48, 64, 80, 96]
    assert applied == [i + lag for i in begun]


@modes
def test_before_anything_is_measured_scoring_costs_nothing(mode: dict[str, bool]) -> None:
    """Neither without a clock for the tokens, nor without a scoring. Before one was measured, none holds up a device."""
    for known in ("nothing", "the scoring", "the token"):
        within = mode["within"] and (known == "the scoring" or not mode["free"])
        lag = 0 if within else 1 if mode["free"] else 4
        schedule = Schedule(16, 0.03, **mode)
        schedule.step(1, 1.0 if known == "the token" else None)
        if known == "the scoring":
            schedule.scored(1e6, 1e6)
        assert (schedule.interval, schedule.lag, left(schedule)) == (16, lag, 15)


def test_the_cost_is_the_least_of_the_last_five() -> None:
    schedule = Schedule()
    assert schedule.cost_s == 0
    for cost, least in [(5, 5), (7, 5), (3, 3), (9, 3), (9, 3), (9, 3), (9, 3), (9, 9), (4, 4)]:
        schedule.scored(cost - 1, 1)
        assert schedule.cost_s == least


def test_a_slow_step_counts_little_and_a_batch_by_its_tokens() -> None:
    schedule = Schedule(10, 0.1, within=True, free=False)
    schedule.step(1, 1.0)
    schedule.scored(1.9, 0.0)  # 19 tokens
    assert schedule.interval == 20
    schedule.step(5, 5.0)
    assert left(schedule) == 14
    schedule.step(1, 2.0)  # the mean is 1.1: 17.3 tokens
    assert schedule.interval == 20
    assert schedule.step_s == pytest.approx(1.1)
    schedule.step(1, 100.0)
    assert schedule.interval == 10
    schedule.step(1, None)  # nobody knows
    assert schedule.step_s == pytest.approx(10.99)


@pytest.mark.parametrize(("mode", "lag"), [("beside, on a CPU", 2), ("beside a device", 1)])
def test_a_pool_that_was_just_chosen_is_left_alone_for_an_interval(mode: str, lag: int) -> None:
    schedule = Schedule(8, 0.5, **MODES[mode])
    for steps in (7, 8 + lag - 1, 10):  # before a scoring begins, while it is under way, and after it
        for _ in range(steps):
            schedule.step(1, 1.0)
            schedule.apply()
            schedule.begin()
        schedule.restart()
        assert left(schedule) == 8
        assert not schedule.apply()
        assert not schedule.begin()
    begun, applied = run(schedule, 12, 1.0, 0.0)
    assert begun == [8]
    assert applied == [8 + lag]


def test_clocks_that_show_nothing_do_no_harm() -> None:
    schedule = measured(Schedule(4, 0.05, free=False), 0.0, 1.0)
    assert schedule.interval == 4
    assert run(schedule, 8, 0.0, 0.0) == ([3, 7], [4, 8])


@modes
def test_a_schedule_goes_on_where_another_was(mode: dict[str, bool]) -> None:
    """With what that one had measured, unless it has measured itself."""
    one = measured(Schedule(4, 0.03, **mode), 1.0, 0.1)
    for _ in range(2):
        one.step(1, 1.0)
    saved = Scoring(one.n_since, cost_s=one.cost_s, step_s=one.step_s or 0.0)
    other = Schedule(4, 0.03, **mode)
    other.resume(saved)
    assert (other.n_since, other.cost_s, other.step_s) == (3, 0.1, 1.0)
    assert (other.beside, other.interval, other.lag) == (one.beside, one.interval, one.lag)
    assert run(other, 20, 1.0, 0.1) == run(one, 20, 1.0, 0.1)
    known = measured(Schedule(4, 0.03, **mode), 2.0, 0.2)
    known.resume(saved)
    assert (known.n_since, known.cost_s, known.step_s) == (3, 0.2, 2.0)
    known.resume(Scoring())
    assert (known.n_since, known.cost_s, known.step_s) == (0, 0.2, 2.0)


@modes
@pytest.mark.parametrize("what", ["queries", "scores"])
def test_what_was_begun_is_applied_after_it_was_put_back(mode: dict[str, bool], what: str) -> None:
    schedule = Schedule(16, 0, **mode)
    found = {"queries": np.zeros(4, np.float32), "scores": np.zeros(4)}[what]
    schedule.resume(Scoring(0, **{what: found}))
    lag = 0 if mode["within"] else 1 if mode["free"] else 4
    assert schedule.n_until(due=True) == max(1, lag)
    for i in range(lag):
        assert not schedule.begin(), i
        assert not schedule.apply(), i
        schedule.step(1, 1.0)
    assert not schedule.begin(), "it was begun already"
    assert schedule.apply()
    assert not schedule.apply()


seconds = st.floats(1e-6, 10, allow_nan=False)
taus = st.integers(1, 128)
shares = st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5, 1.0]) | st.floats(0.01, 1)
any_mode = st.sampled_from(list(MODES.values()))


def doubled(first: int, enough: float) -> int:
    """The first of first, 2*first, 4*first ... that is enough."""
    while first < enough:
        first *= 2
    return first


def sure(first: int, enough: float) -> bool:
    """Whether rounding cannot say another one."""
    return all(abs(enough / (first << k) - 1) > 1e-9 for k in range(64))


@given(tau=taus, share=shares, step_s=seconds, score_s=seconds, apply_s=seconds, mode=any_mode)
@CHECK
def test_modes_and_their_numbers_are_what_they_say(
    tau: int, share: float, step_s: float, score_s: float, apply_s: float, mode: dict[str, bool]
) -> None:
    """By the words of the docstrings."""
    both, one, behind = (score_s + apply_s) / share / step_s, apply_s / share / step_s, score_s / step_s + 0.5
    assume(sure(tau, both) and sure(tau, one) and sure(1, behind))
    schedule = measured(Schedule(tau, share, **mode), step_s, score_s, apply_s)
    would_be = doubled(tau, both)
    beside = not mode["within"] or (mode["free"] and would_be > SELDOM * tau)
    assert schedule.beside == beside
    if not beside:
        assert (schedule.interval, schedule.lag) == (would_be, 0)
    elif mode["free"]:
        lag = doubled(1, behind)
        assert (schedule.interval, schedule.lag) == (max(doubled(tau, one), 2 * lag), lag)
    else:
        assert (schedule.interval, schedule.lag) == (would_be, max(1, would_be // 4))
    assert schedule.interval >= tau
    assert schedule.n_until(due=False) == max(1, schedule.interval - 1)
    assert schedule.n_until(due=True) == max(1, schedule.lag - 1)


@given(tau=taus, share=shares, step_s=seconds, score_s=seconds, apply_s=seconds, mode=any_mode)
@CHECK
def test_scoring_takes_at_most_its_share_of_the_time(
    tau: int, share: float, step_s: float, score_s: float, apply_s: float, mode: dict[str, bool]
) -> None:
    """From the second scoring on: at first nothing is measured. Steps of several tokens, until ten scorings. Beside a device, what is
    to be paid is to change the pool alone; and the scores are there when they are due.
    """
    schedule = Schedule(tau, share, **mode)
    n_scored, now, start, begun = 0, 0.0, 0.0, -1.0
    while n_scored < 10:
        size = max(1, (schedule.lag if begun >= 0 else left(schedule)) // 4)  # in four steps or so, however long it is
        schedule.step(size, size * step_s)
        now += size * step_s
        if begun < 0 and schedule.begin():
            begun = now
        if begun >= 0 and schedule.apply():
            if schedule.beside and schedule.free and n_scored:
                assert now - begun >= (score_s + step_s / 2) * (1 - 1e-6)
            schedule.scored(score_s, apply_s)
            begun = -1.0
            n_scored += 1
            if n_scored == 1:
                start = now
        assert schedule.interval >= tau
    paid = apply_s if schedule.beside and schedule.free else score_s + apply_s
    assert 9 * paid <= share * (now - start) * (1 + 1e-6)


@given(
    tau=taus,
    share=shares,
    steps=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    costs=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    scale=st.floats(-2.5, 2.5),
    within=st.booleans(),
)
@CHECK
def test_noise_that_crosses_no_step_changes_nothing(
    tau: int, share: float, steps: list[float], costs: list[float], scale: float, within: bool
) -> None:
    """The same steps begin and apply as without noise: a tenth in the cost, and in the time of a token."""
    cost = 2.0**scale * tau * share
    margin = scale - math.floor(scale)
    assume(scale < -0.4 or 0.35 < margin < 0.65)
    assert happened(tau, share, steps, [cost * c for c in costs], within=within, free=False) == happened(
        tau, share, [1.0], [cost], within=within, free=False
    )


@given(
    tau=taus,
    steps=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    costs=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=20),
    tokens=st.sampled_from([0.1, 0.9, 2.2, 5.0, 10.0]),
)
@CHECK
def test_noise_that_crosses_no_step_changes_nothing_beside_a_device(
    tau: int, steps: list[float], costs: list[float], tokens: float
) -> None:
    """The same, where it takes so many tokens to score them: the lag is measured, too."""
    noisy = happened(tau, 0.03, steps, [tokens * c for c in costs], within=False, free=True)
    assert noisy == happened(tau, 0.03, [1.0], [tokens], within=False, free=True)


def happened(
    tau: int, share: float, steps: list[float], costs: list[float], *, within: bool, free: bool
) -> list[tuple[str, int]]:
    """What begins and is applied, and where, with these times in turn."""
    schedule, res, under_way = Schedule(tau, share, within=within, free=free), [], False
    for i in range(12 * tau):
        schedule.step(1, steps[i % len(steps)])
        if not under_way and schedule.begin():
            under_way = True
            res.append(("begin", i))
        if under_way and schedule.apply():
            schedule.scored(costs[i % len(costs)], 0.0)
            under_way = False
            res.append(("apply", i))
    return res
