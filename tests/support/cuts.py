"""Cut an operation off, as Ctrl-C does, at a step or at any line; or take its memory away."""

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

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


Line = tuple[str, int]  # of a file of the package


class CutAtLine:
    """A trace function that raises KeyboardInterrupt at a line of the package, or of these files of it, if it is wanted there.

    It counts how often each line was run.
    """

    def __init__(self, wanted: Callable[[Line, int], bool], files: tuple[str, ...] = ()) -> None:
        """wanted: told a line, and how often it was run, this time included. files: what their names end with."""
        self.wanted = wanted
        self.files = files or ("",)
        self.counts = Counter[Line]()
        self.where: str | None = None

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or not file.endswith(self.files):
            return None
        if event == "line":
            line = file, frame.f_lineno
            self.counts[line] += 1
            if self.wanted(line, self.counts[line]):
                self.where = f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self


@contextlib.contextmanager
def traced(cut: CutAtLine) -> Iterator[None]:
    """Collects no garbage meanwhile: finalisers would be run at any line, and Python ignores what is raised in one."""
    gc.disable()
    sys.settrace(cut)
    try:
        yield
    finally:
        sys.settrace(None)
        gc.enable()


def cut_off_at_every_line(
    fresh: Callable[[], KVFlash],
    act: Callable[[KVFlash], object],
    check: Callable[[KVFlash], object],
    *,
    prepare: Callable[[KVFlash], object] = lambda _: None,
    files: tuple[str, ...] = (),
    step: int = 1,
) -> tuple[KVFlash, list[str]]:
    """Cut `act` off where it first comes to a line, for each line that it comes to; then where it last comes to one that it
    runs several times. Check each time what is left. The visits between make loops take as long as the square of their rounds.

    What fails a check is told at the end, and a fresh run goes on. Returns the last run, and where it was cut off.
    files: cut off in these alone. step: cut off at every step-th line.
    """
    kv, met, places, lost = fresh(), set[Line](), list[str](), list[str]()

    def is_next(line: Line) -> bool:
        """Whether it is a line not met before, and such a line's turn."""
        is_new = line not in met
        met.add(line)
        return is_new and len(met) % step == 0

    def run(last: tuple[Line, int] | None = None) -> CutAtLine:
        nonlocal kv
        prepare(kv)
        cut = CutAtLine(lambda line, n: is_next(line) or (line, n) == last, files)
        with contextlib.suppress(KeyboardInterrupt), traced(cut):
            act(kv)
        if cut.where is None:
            kv = fresh()
            return cut
        places.append(cut.where)
        try:
            check(kv)
        except Exception as err:  # noqa: BLE001 (all of them are counted)
            lost.append(f"{cut.where}: {err!r}")
            kv = fresh()
        return cut

    while (cut := run()).where:
        pass
    for last in [(line, n) for line, n in cut.counts.items() if n > 1][::step]:
        run(last)
    assert lost == []
    return kv, places


def no_memory(_size: int) -> Any:
    raise MemoryError
