"""What is said of memory, against what the process takes as the system sees it."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.changes import CLI, ENGINE
from support.oracles import N_GPU

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli.memory import memory_line, records_lines
from pyllama_kvflash.loading import memory, placement
from pyllama_kvflash.loading import need as needs_module
from pyllama_kvflash.loading.need import DRIVER
from pyllama_kvflash.loading.planning import planned
from pyllama_kvflash.native import Model, choice_bytes, codes_bytes
from pyllama_kvflash.native.device import Device
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL
from pyllama_kvflash.options import Options, Spec
from pyllama_kvflash.policy import Geometry
from pyllama_kvflash.policy.device import DeviceBytes
from pyllama_kvflash.policy.fresh import Heads

pytestmark = pytest.mark.native

AT_END = 64 << 20  # what CUDA takes of RAM after the last line, as the process ends: 53 MiB, on one H200
LINE = re.compile(r"memory with a full context: RAM up to ([\d.]+) MiB = (.*)")


def peak_of(command: list[str]) -> tuple[int, str, str]:
    """Run a command. Return the most RAM that it had, in bytes, as /usr/bin/time says it, and what it wrote."""
    # a small parent: what a process has before exec counts, too
    small = (
        "import os, resource, subprocess, sys; r = subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", small, *command], capture_output=True, text=True, check=True)
    *said, peak = run.stderr.splitlines()
    return int(peak), run.stdout, "\n".join(said)


@pytest.mark.sampled(ENGINE, CLI)
@pytest.mark.parametrize(("n_words", "pool"), [(10, "auto"), (3000, "1K"), (3000, "off")])
def test_the_peak_that_is_said_is_the_one_outside(tmp_path: Path, pool: str, n_words: int) -> None:
    """Within 5 %, and no more than was said at the start."""
    text = tmp_path / "text.txt"
    text.write_text("a " * n_words)
    command = [sys.executable, "-m", "pyllama_kvflash", "run", str(BUNDLED_MODEL), "-f", str(text)]
    command += ["-c", "8K", "-n", "8", "--kvflash", pool, "--json", "-no-cnv", "--temp", "0", "-t", "1", "-v"]
    peak, out, err = peak_of(command)
    stats = json.loads(out)["stats"]
    at_end = N_GPU * AT_END if stats["gpu_bytes"] else 0
    assert 0.95 * (peak - at_end) <= stats["peak_bytes"] <= 1.05 * peak
    if stats["gpu_bytes"] == 0:
        found = LINE.search(err)
        assert found
        assert stats["peak_bytes"] <= 1.05 * float(found[1]) * 2**20
        last = re.search(r"([\d.]+) MiB of RAM at its peak", err)
        assert last
        assert stats["peak_bytes"] - 2**20 <= float(last[1]) * 2**20 <= 1.05 * peak, "with what comes after the JSON"
        assert "device KV" not in err.splitlines()[-1]


def test_all_that_is_said_adds_up() -> None:
    need = DeviceBytes("CPU", gpu=False, weights=100 << 20, kv=10 << 20, records=40 << 20, program=50 << 20)
    assert need.total == 200 << 20
    assert memory_line([need]).endswith(
        "RAM up to 200.0 MiB = 100.0 MiB weights + 10.0 MiB KV + 40.0 MiB records + 50.0 MiB program"
    )


def test_records_take_more_than_the_full_cache_from_some_length_on() -> None:
    """Where half of their growth makes the pool and its records as large; a pool that holds no record has nothing to warn of."""
    options = Options(n_ctx=8192)
    (line,) = records_lines(options, [DeviceBytes("CPU", gpu=False, kv=100, records=200)], full=200)
    assert "beyond 4,096 tokens of text" in line
    assert records_lines(options, [DeviceBytes("CPU", gpu=False, kv=100, records=200)], full=300) == []
    assert records_lines(options, [DeviceBytes("CPU", gpu=False, kv=100)], full=50) == []


def test_a_gpu_has_its_own_name_and_its_driver() -> None:
    need = DeviceBytes("CUDA0", gpu=True, weights=1 << 30, program=DRIVER)
    assert (
        "CUDA0 up to 1684.0 MiB = 1024.0 MiB weights + 660.0 MiB driver; while it loads, RAM also maps the file, 1024.0 MiB"
        in memory_line([need])
    )


@pytest.mark.parametrize("n_host", range(5))
def test_codes_of_layers_on_the_host_count_beside_a_gpus(monkeypatch: pytest.MonkeyPatch, n_host: int) -> None:
    """Each where the layer is; and what attending to them takes, on the GPU alone."""
    gpu, host = (Device(name, name, is_gpu, 1 << 30, 1 << 30) for name, is_gpu in (("GPU", True), ("CPU", False)))
    monkeypatch.setattr(memory, "devices", lambda: [gpu, host])
    options, heads = Options(n_ctx=4096, pool=1024, coarse="4,2"), (Heads(8, 2, 64, 64),) * 4
    each, its = (codes_bytes(heads[0], (4, 2), 4096, on_gpu=gpu) for gpu in (False, True))
    choice = choice_bytes(heads, 4096, 1, 1024, 64)
    places = (1,) * n_host + (0,) * (4 - n_host)
    want = {1: n_host * each, 0: (4 - n_host) * its + choice}
    assert memory.coarse_bytes(Geometry(((128, 128),) * 4, places, heads), options) == {i: want[i] for i in set(places)}


def test_a_drafter_is_counted_as_it_is_and_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned without weights is what is held then."""
    spec = Spec(kind="draft", model=str(BUNDLED_DRAFTER))
    options: dict[str, Any] = {
        "n_ctx": 4096,
        "pool": 1024,
        "policy": "qk",
        "coarse": "off",
        "n_parallel": 2,
        "n_threads": 1,
        "spec": spec,
    }
    loaded, load = list[Path](), Model.load
    with monkeypatch.context() as patch:
        patch.setattr(Model, "load", lambda path, **how: (loaded.append(Path(path)), load(path, **how))[1])
        with KVFlash.from_file(BUNDLED_MODEL, **options) as kv:
            held = kv.memory
    assert loaded == [BUNDLED_MODEL, BUNDLED_DRAFTER]
    assert sum(need.drafter for need in held) > 0.9 * BUNDLED_DRAFTER.stat().st_size
    assert held == planned(BUNDLED_MODEL, Options(**options)).memory


def test_a_peak_is_in_bytes_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs_module, "_STATUS", Path("/nowhere"))
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=4096))
    for platform, peak in (("linux", 4096 << 10), ("darwin", 4096)):
        monkeypatch.setattr(needs_module.sys, "platform", platform)
        assert needs_module.peak_bytes() == peak


def test_experts_are_placed_by_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(placement, "Context", lambda _, **params: given.append(params))
    for kept in (True, False):
        placement._context(None, Options(pool="off", kv_offload=kept), 512, 64)  # type: ignore[arg-type]
    assert [params["offload_kqv"] for params in given] == [True, False]


def test_ram_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs_module, "_STATM", Path("/nowhere"))
    monkeypatch.setattr(needs_module, "_STATUS", Path("/nowhere"))
    assert needs_module.resident_bytes() == needs_module.peak_bytes() > 1 << 20
