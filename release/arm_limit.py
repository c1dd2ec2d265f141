"""A plugin of pytest, for an emulated processor: what takes longer than $KVFLASH_ARM_LIMIT seconds is skipped, and says so."""

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

LIMIT = int(os.environ.get("KVFLASH_ARM_LIMIT", "0"))


def _end(_signal: int, _frame: FrameType | None) -> None:
    signal.alarm(5)  # again, for an exception handler that goes on
    pytest.skip(f"takes longer than {LIMIT} s here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Fixtures count, too."""
    return (yield from _limited())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """The test itself."""
    return (yield from _limited())


def _limited() -> Iterator[None]:
    old = signal.signal(signal.SIGALRM, _end)
    signal.alarm(LIMIT)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
