"""An engine that nobody closed: it is closed once nothing refers to it, and so freed in order, also as a part of garbage."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE
from support.runs import GREEDY, SCORED, TOKENS, Open, feed, spell

from pyllama_kvflash import KVFlash
from pyllama_kvflash.native import lib as library
from pyllama_kvflash.native.lib import ffi, owned
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SECONDS = 120
SMALL: dict[str, Any] = {**SCORED, "n_parallel": 2, "pool": 1536}
FRESH: dict[str, Any] = {"n_ctx": 4096, "pool": 1024, "n_batch": 64, "n_threads": 1, "policy": "fresh", "n_parallel": 2}


@pytest.fixture(autouse=True)
def ignored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What Python would only print. Garbage is collected when a test asks for it."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    gc.collect()
    gc.disable()
    try:
        yield found
    finally:
        gc.enable()


@pytest.fixture
def opened(tiny_path: Callable[[str], Path]) -> Open:
    return lambda **options: KVFlash.from_file(tiny_path("qwen3"), **options)


def answered(kv: KVFlash) -> object:
    return list(kv.generate(TOKENS[:1800], max_tokens=5, sampling=GREEDY))


def half_answered(kv: KVFlash) -> object:
    events = kv.generate(TOKENS[:1800], max_tokens=50, sampling=GREEDY)
    return [next(events) for _ in range(40)], events


def half_read(kv: KVFlash) -> object:
    events = kv.sequences[1].prefill(TOKENS[:1800])
    return next(events), events


def by_steps(kv: KVFlash) -> object:
    run = kv.generation(TOKENS[:1800], sampling=GREEDY)
    return list(run.read()), run


USES = [answered, half_answered, half_read, by_steps]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "options", [SMALL, FRESH, {**SMALL, "pool": "off", "policy": "auto"}], ids=["qk", "fresh", "full"]
)
def test_it_is_closed_at_once(
    opened: Open, options: dict[str, Any], use: Callable[[KVFlash], object], ignored: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Without a search for garbage: nothing in it refers to the engine, nor does what it was asked for."""
    spell(monkeypatch)
    before = len(library._owned)
    kv = opened(**options)
    ctx, held = kv.ctx, use(kv)
    del kv
    assert held
    del held
    assert ctx._shared.native is None
    assert len(library._owned) == before
    assert not ignored


@pytest.mark.parametrize("use", USES)
def test_it_is_closed_as_part_of_a_circle(
    opened: Open, use: Callable[[KVFlash], object], ignored: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, with what it was asked for and an engine of another kind in the same garbage."""
    spell(monkeypatch)
    before = len(library._owned)
    for _ in range(2):
        circle: list[Any] = [opened(**SMALL), opened(**FRESH)]
        circle += [use(circle[0]), use(circle[1]), circle]
        del circle
        assert len(library._owned) > before
        gc.collect()
        assert len(library._owned) == before
    assert not ignored


def test_one_of_its_sequences_keeps_it(opened: Open, ignored: list[Any]) -> None:
    kv = opened(**SMALL)
    other, ctx = kv.sequences[1], kv.ctx
    del kv
    gc.collect()
    feed(other, 100, 50)  # type: ignore[arg-type]
    assert ctx.handle
    del other
    assert ctx._shared.native is None
    assert not ignored


@pytest.mark.parametrize("backwards", [False, True])
def test_native_objects_of_a_circle_are_freed_before_their_parts(*, backwards: bool, ignored: list[Any]) -> None:
    """In whichever order they were made and held."""
    freed: list[str] = []
    part = owned(ffi.new("int *", 1), lambda _: freed.append("part"))
    whole = owned(ffi.new("int *", 2), lambda _: freed.append("whole"), part)
    circle: list[Any] = [whole, part] if backwards else [part, whole]
    circle.append(circle)
    del part, whole, circle
    assert not freed
    gc.collect()
    assert freed == ["whole", "part"]
    assert not ignored


LEFT = """
import gc, os, sys
from pyllama_kvflash import KVFlash, Sampling

def opened():
    kv = KVFlash.from_file(sys.argv[1], n_ctx=4096, pool=1024, n_threads=1, n_parallel=2, policy="fresh")
    events = kv.generate("The sea is wide. " * 230, max_tokens=50, sampling=Sampling(temperature=0))
    for _ in range(8):
        next(events)
    return [kv, events]

gc.disable()
for _ in range(3):
    circle = opened()
    circle.append(circle)
kv, events = opened()
pid = os.fork()
if pid == 0:
    del kv, events, circle
    gc.collect()
    sys.exit(7)  # all of it is the parent's
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
next(events)
sys.kept = opened()
print("ends")
"""


def test_python_ends_with_engines_that_nobody_closed() -> None:
    """Garbage that was not collected, engines of a module, and some that are held until the end; a forked process frees none.

    On the CPU: a process that forks once CUDA has begun ends in CUDA's own exit handlers.
    """
    res = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore::DeprecationWarning", "-c", LEFT, str(BUNDLED_MODEL)],  # of fork()
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (res.returncode, res.stdout, res.stderr) == (0, "7\nends\n", "")
