"""When tokens are compared with the full cache: soon, and then within a share of the time."""

import pytest

from pyllama_kvflash.policy.checks import Checks


def run(checks: Checks, n_tokens: int, token_s: float, check_s: float) -> tuple[float, float, int]:
    """Decode tokens, and check when that is due; seconds in all, seconds of checks, tokens checked."""
    elapsed = spent = 0.0
    n_checked, left = 0, None
    for _ in range(n_tokens):
        if left is None and checks.due:
            left = checks.n
        elapsed += token_s
        checks.passed(token_s)
        if left is not None:
            left -= 1
            if not left:
                left = None
                elapsed, spent, n_checked = elapsed + check_s, spent + check_s, n_checked + checks.n
                checks.checked(check_s, checks.n - 1)
    return elapsed, spent, n_checked


@pytest.mark.parametrize("check_s", [0.001, 0.05, 2.0])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_checks_take_their_share_and_no_more(share: float, check_s: float) -> None:
    elapsed, spent, n_checked = run(Checks(share, 16), 20_000, 0.005, check_s)
    assert spent <= max(share * elapsed, check_s)
    most = 20_000 if check_s / 16 < 0.005 * share else share * 20_000 * 0.005 / check_s * 16
    assert n_checked >= 0.5 * min(most, 20_000 - 16)


def test_what_it_takes_to_begin_counts() -> None:
    checks = Checks(0.5, 4)
    checks.passed(1.0)
    checks.began(0.6)
    assert not checks.due


def test_the_first_check_comes_at_once() -> None:
    checks = Checks(0.01, 16)
    assert checks.due
    assert run(checks, 16, 0.005, 1.0) == (pytest.approx(1.08), 1.0, 16)
    assert not checks.due


def test_a_share_of_one_checks_every_token() -> None:
    assert run(Checks(1.0, 8), 80, 0.01, 0.01)[2] == 80


def test_agreement_is_that_of_the_last_checks() -> None:
    checks = Checks(0.5, 10)
    assert checks.agreement is None
    for n in (0, 0, 10, 10, 10, 9):
        checks.checked(0.1, n)
    assert checks.agreement == pytest.approx(0.975)
    checks.forget()
    assert checks.agreement is None
