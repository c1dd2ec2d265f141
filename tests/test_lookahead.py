"""How many tokens to draft: the rate of what is chosen is nearly the best there is."""

import numpy as np
import pytest

from pyllama_kvflash.policy.doubt import Doubt
from pyllama_kvflash.policy.draft_length import DraftLength
from pyllama_kvflash.policy.gate import Gate
from pyllama_kvflash.policy.lookahead import Length, Lookahead

N_MOST = 16


def rate(n: int, a: float, draft_s: float, base_s: float, each_s: float) -> float:
    """Tokens per second of rounds of n drafted tokens, summed up token by token."""
    return sum(a**i for i in range(n + 1)) / (n * draft_s + base_s + (n + 1) * each_s)


def play(
    look: Lookahead,
    n_rounds: int,
    a: float,
    times: tuple[float, float, float],
    *,
    jitter: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Rounds with these costs (of a drafted token, of a check, of each token of a check); what was drafted in each."""
    draft_s, base_s, each_s = times
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(n_rounds):
        n = look.n
        chosen.append(n)
        wrong = np.flatnonzero(rng.random(n) >= a)
        late = rng.exponential(jitter, 2) if jitter else (0.0, 0.0)
        check_s = base_s + (n + 1) * each_s
        look.checked(n, int(wrong[0]) if len(wrong) else n, n * draft_s * (1 + late[0]), check_s * (1 + late[1]))
    return chosen


CASES = {  # acceptance; seconds of a drafted token, of a check, of each of its tokens
    "streaming": (0.95, (0.004, 0.1, 0.0005)),
    "doubtful": (0.6, (0.004, 0.1, 0.0005)),
    "resident": (0.9, (0.004, 0.02, 0.0002)),
    "two cores": (0.85, (0.030, 0.060, 0.025)),
    "does not pay": (0.3, (0.020, 0.025, 0.010)),
    "always right": (1.0, (0.004, 0.1, 0.0005)),
    "never right": (0.0, (0.004, 0.02, 0.001)),
}


@pytest.mark.parametrize("jitter", [0.0, 0.2])
@pytest.mark.parametrize("case", CASES)
def test_it_finds_nearly_the_best(case: str, jitter: float) -> None:
    a, times = CASES[case]
    best = max(rate(n, a, *times) for n in range(N_MOST + 1))
    for seed in range(5):
        look = Lookahead(range(N_MOST + 1))
        chosen = play(look, 200, a, times, jitter=jitter, seed=seed)
        reached = np.mean([rate(n, a, *times) for n in chosen[20:]])
        assert reached > 0.88 * best, chosen


def test_it_follows_the_text() -> None:
    """Where drafts stop being right it stops drafting, looks from time to time, and begins again."""
    times = CASES["resident"][1]
    look = Lookahead(range(N_MOST + 1))
    good = play(look, 100, 0.95, times)
    bad = play(look, 300, 0.0, times)
    again = play(look, 1000, 0.95, times)
    assert np.median(good[20:]) >= 6
    assert np.median(bad[60:]) == 0
    assert max(bad[60:]) > 0
    assert np.median(again[-200:]) >= 6


def test_it_takes_only_what_there_is() -> None:
    """One of few numbers, the nearest to the best in speed."""
    choices = (1, 2, 4, 8)
    for case in ("streaming", "two cores", "never right"):
        a, times = CASES[case]
        chosen = play(Lookahead(choices), 200, a, times)
        assert set(chosen) <= set(choices)
        best = max(choices, key=lambda n: rate(n, a, *times))
        assert np.median(chosen[20:]) == pytest.approx(best, rel=0.5)


def test_acceptance_is_that_of_tokens_whose_predecessors_were_right() -> None:
    """Of 10 drafted, 4 right: 5 were tried."""
    look = Lookahead(range(N_MOST + 1))
    for _ in range(200):
        look.checked(10, 4, 1.0, 1.0)
    assert look.acceptance == pytest.approx(0.8, abs=0.01)
    for _ in range(200):
        look.checked(10, 10, 1.0, 1.0)
    assert look.acceptance == pytest.approx(1.0, abs=0.01)


#
# with a gate: one choice
#


def steps(length: DraftLength, n: int, a: float, plain_s: float = 1.0) -> list[int]:
    """The lengths of n steps. Each drafted token takes 0.1 s, and so does each token that is checked; it is right with probability a."""
    rng, chosen = np.random.default_rng(0), []
    for _ in range(n):
        chosen.append(length.n)
        if not chosen[-1]:
            length.plain(plain_s)
            continue
        wrong = np.flatnonzero(rng.random(chosen[-1]) >= a)
        n_right = int(wrong[0]) if len(wrong) else chosen[-1]
        length.checked(chosen[-1], n_right, 0.1 * chosen[-1], plain_s + 0.1 * chosen[-1])
    return chosen


def test_drafts_that_are_never_right_end_in_plain_steps() -> None:
    chosen = steps(DraftLength([1, 2, 4, 8], Gate()), 500, 0.0)
    assert chosen[:3] == [0, 0, 0], "a plain step is measured first"
    assert any(chosen)
    assert sum(n > 0 for n in chosen) < 0.05 * len(chosen)


def test_a_plain_step_that_only_the_gate_caused_is_counted() -> None:
    length = DraftLength([4], Gate())
    steps(length, 20, 0.0)
    assert length.n == 0
    assert length.plain(1.0)
    assert not DraftLength([4]).plain(1.0), "there is no gate"


#
# drafts beside checks
#


def simulated(n: int, a: float, draft_s: float, check_s: float, k: int, n_tokens: int = 20_000) -> float:
    """Tokens per second where each draft has n tokens before its check, and k are drafted beside that."""
    rng, done, seconds, ahead = np.random.default_rng(0), 0, 0.0, 0
    while done < n_tokens:
        size = max(n, ahead)
        seconds += (size - ahead) * draft_s + check_s
        right = int(rng.geometric(1 - a)) - 1
        done += min(right, size) + 1
        # the first token drafted beside it is the check's own next one
        ahead = k - 1 if right > size else 0
    return done / seconds


@pytest.mark.parametrize(("a", "check_s"), [(0.9, 0.13), (0.97, 0.13), (0.99, 0.13), (0.97, 0.25), (0.99, 0.02)])
def test_with_drafts_beside_checks_it_finds_nearly_the_best(a: float, check_s: float) -> None:
    draft_s, k = 0.005, int(check_s / 0.008)
    look, rng, ahead = Lookahead(range(65)), np.random.default_rng(1), 0
    for _ in range(300):
        size = max(look.n, ahead)
        right = min(int(rng.geometric(1 - a)) - 1, size)
        look.beside(k)
        look.checked(size, right, draft_s * size if size > ahead else 0.0, check_s)
        ahead = k - 1 if right == size and rng.random() < a else 0
    rates = [simulated(n, a, draft_s, check_s, k) for n in range(65)]
    assert look.draft_s == pytest.approx(draft_s)
    assert rates[look.n] > 0.93 * max(rates)
    assert max(rates) > 1.03 * max(rate(n, a, draft_s, check_s, 0) for n in range(65)), "it is worth it"


#
# drafts that end early
#

SURE, UNSURE = 0.995, 0.3  # what a drafter gave its first choice
RIGHT = {SURE: 0.993, UNSURE: 0.69}  # how often that is right
N_TOKENS = 12_000


def text() -> tuple[list[float], list[bool]]:
    """What a drafter would give each token, and whether it is right: every eighth is unsure, on average."""
    rng = np.random.default_rng(3)
    tops = [UNSURE if u < 0.13 else SURE for u in rng.random(2 * N_TOKENS)]
    return tops, [bool(u < RIGHT[top]) for u, top in zip(rng.random(2 * N_TOKENS), tops, strict=True)]


def seconds(look: Lookahead | None, n_fixed: int, times: tuple[float, float, float]) -> float:
    """How long N_TOKENS of that text take. look: None: each draft has n_fixed tokens."""
    (draft_s, base_s, each_s), (tops, right) = times, text()
    at, res = 0, 0.0
    while at < N_TOKENS:
        length, n = look.next if look else Length(n_fixed), 0
        while n < length.n and not (look and look.all_right(tops[at : at + n]) <= length.least):
            n += 1
        n_right = next((i for i in range(n) if not right[at + i]), n)
        check_s = base_s + (n + 1) * each_s
        if look:
            look.checked(n, n_right, n * draft_s, check_s, tops=tops[at : at + n])
        res += n * draft_s + check_s
        at += n_right + 1
    return res


@pytest.mark.parametrize("times", [(0.0055, 0.11, 0.0003), (0.0065, 0.21, 0.0004), (0.0055, 0.012, 0.0001)])
def test_drafts_end_where_the_drafter_is_unsure(times: tuple[float, float, float]) -> None:
    best = min(seconds(None, n, times) for n in (*range(4, 40, 2), 48, 64))
    assert seconds(Lookahead(range(65)), 0, times) < 0.985 * best


def test_an_easy_text_is_forgotten_where_a_hard_one_begins() -> None:
    """Whatever its drafts were: a check of the hard one has a token or two."""
    doubt, look = Doubt(), Lookahead(range(65))
    for _ in range(200):
        doubt.checked([0.99] * 64, 64)
        look.checked(64, 64, 0.3, 0.1, tops=[0.99] * 64)
    assert doubt.all_right([0.99], 1.0) > 0.999
    for _ in range(100):
        doubt.checked([0.99] * 64, 1)
        look.checked(64, 1, 0.3, 0.1, tops=[0.99] * 64)
    assert doubt.all_right([0.99], 0.5) < 0.65
    assert look.next.n < 10


def test_nothing_ends_a_draft_whose_length_is_fixed_or_tried() -> None:
    assert DraftLength([5]).next == Length(5)
    assert DraftLength([5]).all_right([0.1] * 5) == 1
    look = Lookahead(range(N_MOST + 1))
    assert look.next == Length(look.n), "a line takes two lengths"
    for _ in range(64):
        look.checked(2, 1, 0.01, 0.1, tops=[0.5, 0.5])
    assert look.next == Length(look.n), "another one is tried"


def test_what_follows_a_wrong_token_says_nothing() -> None:
    doubt = Doubt()
    for _ in range(50):
        doubt.checked([0.999, 0.6, 0.1, 0.1], 1)
    assert doubt.all_right([0.999], 0.5) > 0.9
    assert doubt.all_right([0.6], 0.5) < 0.1
    assert doubt.all_right([0.1], 0.5) == 0.5
    assert doubt.all_right([0.999, 0.6], 0.5) == doubt.all_right([0.999], 0.5) * doubt.all_right([0.6], 0.5)
    assert doubt.all_right([], 0.5) == 1
