"""Codes in the memory of an exact pass: what comes between is read back, to the last bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import kernels
from support.changes import ENGINE
from support.kernels import host_kernels
from support.oracles import ON_GPU, Logits
from support.runs import Open, logits_of, read

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.loading import bits, panes
from pyllama_kvflash.loading import load as loading
from pyllama_kvflash.native import Device
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.coarse import FORMS

pytestmark = pytest.mark.native

library = kernels.library
SMALL: dict[str, Any] = {
    "n_ctx": 8192, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "pool": 768, "policy": "fresh", "coarse": "4", "again": 0.0,
}  # fmt: skip
ENOUGH = 1 << 20  # bytes, of all codes of a tiny model


@pytest.fixture
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU's kernels, on the CPU unless there is a GPU, whose codes may be in the memory of an exact pass."""
    if ON_GPU:
        yield
        return
    monkeypatch.setattr(loading, "may_lodge", lambda *_: True)
    monkeypatch.setattr(panes, "lodging_bytes", lambda _, options: {0: ENOUGH} if options.codes_in_panes else {})
    with host_kernels(request.getfixturevalue("library")):
        yield


def talk(kv: KVFlash, tmp_path: Path, *, goes_back: bool) -> list[Logits]:
    """Logits of a text that is read in parts, written to, cut, saved and restored."""
    res = []
    read(kv, 2400)
    res.append(logits_of(kv, 2410, 1))
    read(kv, 3100)  # codes go, and come back with more
    res.append(logits_of(kv, 3110, 1))
    kv.save(tmp_path / "talk.kvsnap")
    if goes_back:
        kv.rollback(2048)
        read(kv, 2900)
        res.append(logits_of(kv, 2910, 1))
    kv.clear()
    kv.restore(tmp_path / "talk.kvsnap")
    res.append(logits_of(kv, 3120, 1))
    kv.check_integrity()
    return res


@pytest.mark.nightly(ENGINE, r"tests/native/cuda/.*|tests/support/kernels\.py")
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_answers_are_those_of_codes_that_stay(opened: Open, tmp_path: Path, name: str) -> None:
    goes_back = name == "qwen3"  # the window of the other is gone
    at_home, lodged = (opened(name, codes_in_panes=there, snapshots=True) for there in (False, True))
    (tmp_path / "a").mkdir()
    for want, got in zip(
        talk(at_home, tmp_path / "a", goes_back=goes_back), talk(lodged, tmp_path, goes_back=goes_back), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert 0 < lodged.stats().coarse_bytes < at_home.stats().coarse_bytes
    assert lodged.stats().pane_bytes == at_home.stats().pane_bytes, "they are large enough here"


@pytest.mark.nightly(ENGINE, r"tests/native/cuda/.*|tests/support/kernels\.py")
@pytest.mark.usefixtures("by_kernels")
def test_a_state_goes_with_them(opened: Open) -> None:
    logits = []
    for there in (False, True):
        kv = opened("qwen35", codes_in_panes=there)
        read(kv, 2400)
        logits.append(logits_of(kv, 2410, 1))
        read(kv, 2800)
        logits.append(logits_of(kv, 2810, 1))
    for want, got in zip(logits[:2], logits[2:], strict=True):
        np.testing.assert_array_equal(got, want)


def test_which_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single GPU has the memory of both, whatever the CPU has."""
    there = [Device("CUDA0", "", True, 1, 1), Device("CUDA1", "", True, 1, 1), Device("CPU", "", False, 1, 1)]
    monkeypatch.setattr(bits, "devices", lambda: there)
    rows = ((64, 64),) * 2
    options = Options(pool=1024, coarse="2")
    found = {at: bits.may_lodge(options, Geometry(rows, at)) for at in ((0, 0), (0, 1), (0, 2), (2, 2))}
    assert found == {(0, 0): True, (0, 1): False, (0, 2): True, (2, 2): False}
    for more in (
        {"mode": "lossless"},
        {"opening": 32},
        {"meter": 0.05},
        {"prefill": "pool"},
        {"pool": "off"},
        {"n_parallel": 2},
    ):
        given = {"pool": 1024, "coarse": "2", "policy": "fresh"} | more
        assert not bits.may_lodge(Options(**given), Geometry(rows, (0, 0)))


def test_which_are_tried() -> None:
    """The closest first, and with memory of their own before those that have to move."""

    def tried(**options: Any) -> list[tuple[str, bool | None, int]]:
        found = bits.choices(Options(pool=1024, **options), possible=True, lodged=True)
        return [(o.coarse, o.codes_in_panes, o.n_opening) for o in found]

    with_codes = [(form, there, 0 if there or form == "4" else 32) for form in FORMS for there in (False, True)]
    assert tried(policy="fresh") == with_codes
    assert tried()[-1] == ("off", False, 32)
    assert tried(coarse="2") == [("2", False, 32), ("2", True, 0)]
    assert tried(coarse="2", codes_in_panes=False) == [("2", False, 32)]
    with pytest.raises(UsageError, match="`codes_in_panes` is True, and answers need exact passes"):
        Options(codes_in_panes=True, mode="lossless")
