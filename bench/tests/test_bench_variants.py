"""Variants that a bench runs when none are asked for: fresh only where layers can choose."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import benches
from benches import good, invoke
from support.changes import BENCHES

from kvflash_bench import ruler as ruler_bench
from kvflash_bench import ruler_tables
from kvflash_bench.cli.answers import bench
from kvflash_bench.ruler import Ruler
from pyllama_kvflash.cli.flags import spelled
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.loading import load as loading
from pyllama_kvflash.loading.refusals import CODES
from pyllama_kvflash.native import Context, PoolParams
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.nightly(BENCHES)]

environment = benches.environment

WHY = CODES["a KV cache on a device that is neither the CPU nor CUDA's"]
SAID = f"kvflash: variant fresh is left out: {WHY.reason}"
SHAPE = ("speed", "--shape", "tiny", "--contexts", "512,1K", "--pools", "512", "--steps", "24", "-t", "1")
FACTS = ("facts", "--contexts", "2K", "--pools", "1K", "--docs", "1", "--facts", "1", "--session", "0", "-t", "1")
KLD = ("kld", "--contexts", "1K", "--shares", "75", "--score", "4", "-t", "1")


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without kernels for it."""

    def refuse(*_: object, pool: PoolParams | None = None, **more: object) -> Context:
        if pool and pool.coarse_k:
            raise UnsupportedError(WHY.reason)
        return Context(*_, pool=pool, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "Context", refuse)


def variants(folder: str) -> list[str]:
    lines = Path(folder, "results.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)["key"]["variant"] for line in lines))


@pytest.mark.usefixtures("no_choice")
@pytest.mark.parametrize(
    ("args", "want"),
    [
        (SHAPE, ["full", "lru", "qk"]),
        (FACTS, ["full", "lru", "qk"]),
        (KLD, ["full/type_k=q8_0/type_v=q8_0", "full/type_k=q4_0/type_v=q4_0", "lru", "qk-cos", "qk"]),
    ],
    ids=lambda x: x[0],
)
def test_what_cannot_run_is_left_out(args: tuple[str, ...], want: list[str]) -> None:
    """With a line that says why; what was measured before stays as it is."""
    res = good(*args, "-o", "out")
    assert res.stderr.count(SAID) == 1
    assert variants("out") == want
    assert "fresh" not in res.stdout
    assert good(*args, "-o", "out").stdout == res.stdout


@pytest.mark.usefixtures("no_choice")
@pytest.mark.parametrize("args", [SHAPE, FACTS, KLD], ids=lambda x: x[0])
def test_what_is_asked_for_is_refused(args: tuple[str, ...]) -> None:
    res = invoke(*args, "--variants", "fresh", "-o", "out")
    assert res.exit_code == 1
    assert res.stderr.splitlines()[-1].endswith(spelled(f" run with policy fresh: {WHY}", bench.commands[args[0]]))
    assert "left out" not in res.stderr


@pytest.mark.parametrize("able", [True, False])
def test_ruler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, *, able: bool) -> None:
    if not able:
        request.getfixturevalue("no_choice")
    seen: list[Ruler] = []
    monkeypatch.setattr(ruler_bench, "measure", lambda ruler, *_: seen.append(ruler) or iter(()))
    monkeypatch.setattr(ruler_tables, "summarise", lambda *_: [])
    monkeypatch.setattr(importlib.import_module("kvflash_bench.cli.answers"), "picture", lambda *_: None)
    stderr = good("ruler", str(BUNDLED_MODEL)).stderr
    stderr += good("ruler", str(BUNDLED_MODEL), "--variants", "full,fresh").stderr
    first, second = ([v.label for v in ruler.variants] for ruler in seen)
    assert first == ["full", "lru", "qk", *["fresh"] * able]
    assert second == ["full", "fresh"]
    assert stderr.count(SAID) == (not able)


def test_a_model_that_cannot_be_pooled_is_refused_for_that(tiny_path: Callable[[str], Path]) -> None:
    """And not for one of its variants."""
    res = invoke("speed", str(tiny_path("mamba")), *SHAPE[3:], "-o", "out")
    assert res.exit_code == 1
    assert " cannot be run with a pool: " in res.stderr.splitlines()[-1]
    assert "left out" not in res.stderr
