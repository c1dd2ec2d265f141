"""How many bits codes have where it is not said: the most for which there is memory beside all else, however one asks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import ENGINE
from support.commands import good, invoke
from support.runs import HOST

from kvflash_bench.shapes import SHAPES, write_outline
from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.loading import load as loading
from pyllama_kvflash.loading import planning
from pyllama_kvflash.loading.bits import LEAST, SMALL_BATCH
from pyllama_kvflash.loading.planning import planned
from pyllama_kvflash.native import pretending
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL
from pyllama_kvflash.options import Options, Spec
from pyllama_kvflash.policy.coarse import FORMS
from pyllama_kvflash.policy.device import RESERVE, DeviceBytes

pytestmark = pytest.mark.native
environment = commands.environment

SMALL: dict[str, Any] = {"n_ctx": 16_384, "pool": 1024, "n_threads": 1}
DRAFTER = Spec(kind="draft", model=str(BUNDLED_DRAFTER))
WAYS: dict[str, dict[str, Any]] = {
    "exactly": {},
    "large batches": {"n_ubatch": 2048},
    "through the pool": {"prefill": "pool"},
    "fresh": {"policy": "fresh"},
    "a drafter": {"spec": DRAFTER},
    "two sequences": {"n_parallel": 2, "pool": 2048},
}


def needed(coarse: str, options: dict[str, Any]) -> dict[str, int]:
    """What each device has to have free for such codes."""
    found = planned(BUNDLED_MODEL, Options(**{**options, "coarse": coarse}))
    return {need.name: need.total - need.program + RESERVE for need in found.memory}


@pytest.mark.sampled(ENGINE)
@pytest.mark.parametrize("way", WAYS)
def test_the_most_bits_for_which_there_is_memory(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A byte less, and there are fewer; loading says what a look at the file does."""
    options = {**SMALL, **WAYS[way]}
    wanted = (*FORMS, FORMS[-1] if options.get("policy") == "fresh" else "off")
    for coarse, fewer in zip(FORMS, wanted[1:], strict=True):
        free = needed(coarse, options)
        for less, want in ((0, coarse), (1, fewer)):
            there = {name: n - less for name, n in free.items()}
            for module in (loading, planning):
                monkeypatch.setattr(module, "free_bytes", lambda there=there: there)
            found = planned(BUNDLED_MODEL, Options(**options)).options
            assert (found.coarse, found.policy) == (want, "qk" if want == "off" else "fresh")
            with KVFlash.from_file(BUNDLED_MODEL, **options) as kv:
                assert (kv.options.coarse, kv.options.policy) == (want, found.policy)
                said = "policy qk, not fresh: there is no memory for codes of all positions"
                assert (said in kv.notes) == (want == "off")


def test_what_else_is_held_takes_of_it() -> None:
    """Panes, the buffers of large batches, a drafter, and all weights."""
    plain = needed("2", {**SMALL, "prefill": "pool"})
    for more in ({"prefill": "exact"}, {"spec": DRAFTER, "prefill": "pool"}, {"n_ubatch": 2048, "prefill": "exact"}):
        assert sum(needed("2", {**SMALL, **more}).values()) > sum(plain.values())
    assert sum(plain.values()) > BUNDLED_MODEL.stat().st_size


def test_codes_that_cannot_be_made_are_made_of_fewer_bits(
    monkeypatch: pytest.MonkeyPatch, tiny_path: Callable[[str], Path]
) -> None:
    """The device may have less than it says. With bits that were asked for that is an error."""
    open_context, tried = loading.open_context, list[str]()

    def full(model: Any, options: Options, plan: Any, lodges: Any) -> Any:
        tried.append(options.coarse)
        if options.coarse != "2":
            msg = "there is no memory"
            raise NativeError(msg)
        return open_context(model, options, plan, lodges)

    monkeypatch.setattr(loading, "open_context", full)
    with KVFlash.from_file(tiny_path("qwen3"), **SMALL) as kv:
        assert kv.options.coarse == "2"
    assert tried == ["4", "4,2", "2"]
    with pytest.raises(NativeError, match="there is no memory"):
        KVFlash.from_file(tiny_path("qwen3"), **SMALL, coarse="4")


@pytest.mark.nightly(ENGINE, r"bench/kvflash_bench/shapes\.py")
@HOST
def test_a_card_that_is_pretended_decides(tmp_path: Path) -> None:
    """Only the memory where codes are: fewer bits do not help RAM. A file without weights is enough."""
    path, options = tmp_path / "8b.gguf", Options(n_ctx=65_536, pool=1024, n_threads=1)
    write_outline(SHAPES["8b"], path)

    def on_gpu(free: int, **more: Any) -> tuple[str, bool | None, int, DeviceBytes]:
        with pretending(free, 1 << 20):
            found = planned(path, replace(options, **more))
        need = next(need for need in found.memory if need.gpu)
        return found.options.coarse, found.options.codes_in_panes, found.options.n_ubatch, need

    tried = [(coarse, there) for coarse in FORMS for there in (False, True)]
    for (coarse, there), fewer in zip(tried, (*tried[1:], (FORMS[-1], True)), strict=True):
        *_, need = on_gpu(64 << 30, coarse=coarse, codes_in_panes=there)
        assert need.coarse > 0
        least = need.total - need.program + RESERVE
        assert [on_gpu(least - less)[:2] for less in (0, 1)] == [(coarse, there), fewer]
    *_, need = on_gpu(64 << 30, coarse=FORMS[-1], codes_in_panes=True, n_ubatch=SMALL_BATCH)
    least = need.total - need.program + LEAST
    assert [on_gpu(least - less)[:3] for less in (0, 1)] == [(FORMS[-1], True, SMALL_BATCH), ("off", False, 512)]
    assert on_gpu(least, coarse=FORMS[-1])[2] == 512, "what is given is kept"


@pytest.mark.nightly(ENGINE, r"bench/kvflash_bench/shapes\.py")
@HOST
def test_experts_go_to_the_host_before_bits_do(tmp_path: Path) -> None:
    """A file without weights is enough."""
    path = tmp_path / "moe.gguf"
    write_outline(SHAPES["35b-a3b"], path)
    options = Options(n_ctx=131_072, pool=4096, n_threads=1, n_cpu_moe="auto")

    def on_gpu(memory: int, **more: Any) -> tuple[int | str, str, int]:
        with pretending(memory, 64 << 30):
            found = planned(path, replace(options, **more))
        least = next(need.total - need.program for need in found.memory if need.gpu)
        return found.options.n_cpu_moe, found.options.coarse, least

    assert on_gpu(24 << 30)[:2] == (0, "4")
    *_, least = on_gpu(24 << 30, n_cpu_moe=40, coarse="4", codes_in_panes=True)
    n, coarse, _ = on_gpu(least + 2 * RESERVE)
    assert (0 < int(n) <= 40, coarse) == (True, "4")
    assert on_gpu(least + RESERVE - 1)[:2] == (40, "4,2")


@HOST
@pytest.mark.parametrize("args", [("--kvflash-policy", "fresh"), ("--kvflash-coarse", "4")])
def test_what_cannot_be_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch, args: tuple[str, str]) -> None:
    """As by a run. Without asking for them, `kvflash inspect` says that there are none."""
    probe = loading.probe
    why = "ALiBi needs the position of each cell, which guests do not have"
    for module in (loading, planning):
        monkeypatch.setattr(module, "probe", lambda *given: replace(probe(*given), uncoded=why))
    what = "policy fresh" if "fresh" in args else "--kvflash-coarse 4"
    said = f"cannot be run with {what}: {why}; give --kvflash-policy qk and --kvflash-coarse off"
    for command in (("inspect",), ("run", "-p", "Hello", "-n", "1", "--kvflash", "1K", "-c", "8K")):
        res = invoke(*command, *args)
        assert res.exit_code != 0
        assert said in res.stderr, res.stderr
    found = json.loads(good("inspect", "--json").stdout)
    assert (found["coarse"], found["coarse_bytes"]) == ("off", 0)
    assert json.loads(good("inspect", "--kvflash", "off", *args, "--json").stdout)["coarse"] == "off"
    assert f"none: {why}" in " ".join(good("inspect").stdout.split())
