"""Cut an operation off, as Ctrl-C does, at a step or at any line; or take its memory away."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pyllama_kvflash
from pyllama_kvflash import KVFlash

PACKAGE = str(Path(pyllama_kvflash.__file__).parent)


def place(kv: KVFlash, step: str) -> tuple[Any, str]:
    owner, name = step.split(".")
    return {"ctx": kv.ctx, "ledger": kv.pager.ledger, "store": kv.pager.records, "memory": kv.pager.records.memory}[
        owner
    ], name


def cut_off(target: Any, name: str, when: str, monkeypatch: pytest.MonkeyPatch, at: int = 1) -> None:
    """The at-th call of a method raises KeyboardInterrupt, before or after it did its work."""
    method = getattr(target, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and when == "before":
            raise KeyboardInterrupt
        res = method(*args, **kwargs)
        if calls == at and when == "after":
            raise KeyboardInterrupt
        return res

    monkeypatch.setattr(target, name, call)


class CutAtLine:
    """A trace function that raises KeyboardInterrupt at the n-th line of the package that is run, or of these files of it."""

    def __init__(self, n: int, files: tuple[str, ...] = ()) -> None:
        self.n = n
        self.files = files or ("",)  # what all names end with
        self.where: str | None = None

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or not file.endswith(self.files):
            return None
        if event == "line":
            self.n -= 1
            if self.n == 0:
                self.where = f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self


def cut_off_at_every_line(
    fresh: Callable[[], KVFlash],
    act: Callable[[KVFlash], object],
    check: Callable[[KVFlash], object],
    *,
    prepare: Callable[[KVFlash], object] = lambda _: None,
    files: tuple[str, ...] = (),
    step: int = 1,
) -> tuple[KVFlash, list[str]]:
    """Cut `act` off at its first line, then at its second, and so on to its end, and check each time what is left.

    What fails a check is told at the end, and a fresh run goes on. Returns the last run, and where it was cut off.
    files: cut off in these alone. step: cut off at every step-th line.
    """
    kv, places, lost = fresh(), list[str](), list[str]()
    for n in range(1, 4000, step):
        prepare(kv)
        cut = CutAtLine(n, files)
        sys.settrace(cut)
        try:
            act(kv)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if cut.where is None:
            break
        places.append(cut.where)
        try:
            check(kv)
        except Exception as err:  # noqa: BLE001 (all of them are counted)
            lost.append(f"{cut.where}: {err!r}")
            kv = fresh()
    assert lost == []
    return kv, places


class NoMemory:
    """numpy, without any for new arrays."""

    def __getattr__(self, name: str) -> Any:
        if name in {"full", "empty", "zeros", "ones"}:
            raise MemoryError
        return getattr(np, name)


def no_memory(_size: int) -> Any:
    raise MemoryError
