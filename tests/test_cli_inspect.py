"""`kvflash inspect`: what it says of a model, its cache and the devices."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, models
from support.commands import NEEDLE_TOKEN_BYTES, good, rows, summary
from support.models import Geometry, model_file

from pyllama_kvflash.fingerprint import fingerprint
from pyllama_kvflash.loading import bits, memory
from pyllama_kvflash.native import Context, Device, Layer

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_gpu")]

environment = commands.environment

MEMORY = {"needle": "llama_kv_cache", **models.MEMORY}


@pytest.mark.parametrize("name", MEMORY)
def test_inspect_json(name: str, tiny_path: Callable[[str], Path]) -> None:
    path = model_file(name, tiny_path)
    found = json.loads(good("inspect", str(path), "--json", "-c", "8K").stdout)
    want = Geometry.read(path)
    assert found["model"] == str(path)
    assert found["architecture"] == name.replace("needle", "qwen3")
    assert found["memory_class"] == MEMORY[name]
    assert (found["poolable"], found["refusal"]) == (True, None)
    assert (found["n_layer"], found["pooled_layers"]) == (want.n_layer, want.layers)
    assert found["n_swa"] == want.n_swa
    assert (int(found["fingerprint"], 16), found["n_files"]) == (fingerprint(path), 1)
    assert found["n_ctx"] == 8192
    sizes = found["token_bytes"]
    assert sizes["f16"] == sizes["bf16"] == sizes["f32"] // 2 == want.token_bytes(64)
    assert sizes["q8_0"] == want.token_bytes(34)
    assert sizes["q4_0"] == want.token_bytes(18)
    assert found["pane_bytes"] == 8192 * min(2, len(want.layers)) * 2 * want.n_row // 32 * 64
    assert found["exact_compute_bytes"] > 0
    assert found["auto_pool"] is None
    assert found["auto_note"].startswith("auto: the full cache of 8,192 tokens fits, with ")


@pytest.mark.parametrize("name", ["needle", "gemma4"])
def test_inspect_text(name: str, tiny_path: Callable[[str], Path]) -> None:
    path = model_file(name, tiny_path)
    table = rows(good("inspect", str(path), "-c", "8K").stdout)
    want = Geometry.read(path)
    assert table["memory"] == MEMORY[name]
    assert table["fingerprint"] == f"{fingerprint(path):016x}, of 1 file"
    assert table["pool"] == "yes"
    assert table["pooled layers"].startswith(f"{len(want.layers)} of {want.n_layer}: ")
    assert table["sliding window"].startswith(f"{want.n_swa} tokens" if want.n_swa else "none")
    assert table["f16 cache"].startswith(f"{want.token_bytes(64):,} bytes a token")
    assert table["context"].startswith("8,192")
    assert table["auto pool"].startswith("auto: the full cache of 8,192 tokens fits, with ")
    panes = 8192 * min(2, len(want.layers)) * 2 * want.n_row // 32 * 64 / 2**20
    assert re.fullmatch(rf"{panes:.1f} MiB of KV, [\d.]+ MiB of buffers for the context", table["exact pass"]), table[
        "exact pass"
    ]


@pytest.mark.parametrize("n_ctx", ["4K", "5000", "20K"])
def test_inspect_says_what_a_run_takes_to_read_a_prompt(n_ctx: str) -> None:
    """With the two panes that it takes unless it is told otherwise."""
    found = json.loads(good("inspect", "-c", n_ctx, "--json").stdout)
    stats = summary("-p", "Hello", "-n", "1", "-c", n_ctx, "--kvflash", "1K", "--set", "panes=2")["stats"]
    assert stats["pane_bytes"] == found["pane_bytes"] > 0
    assert stats["compute_bytes"] > 0


GIB = 1 << 30


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a model are on the first and the third by turns; the second is full, and has none."""
    frees = {"CUDA0": 24 * GIB, "CUDA1": 0, "CUDA2": GIB, "CPU": 64 * GIB}
    found = [Device(name, "a device", name != "CPU", free, free) for name, free in frees.items()]
    layers = Context.layers

    def spread(self: Context) -> list[Layer]:
        return [replace(layer, device=i % 2 * 2) for i, layer in enumerate(layers(self))]

    for module in (memory, bits):
        monkeypatch.setattr(module, "devices", lambda: found)
    monkeypatch.setattr(Context, "layers", spread)


@pytest.mark.usefixtures("three_gpus")
def test_inspect_several_devices() -> None:
    args = ("inspect", "-c", "64K", "--kvflash-coarse", "4")
    table = rows(good(*args).stdout)
    half = NEEDLE_TOKEN_BYTES // 2
    assert table["KV on CUDA0"] == f"{half:,} of the f16 cache's bytes a token, 24.00 GiB free"
    assert table["KV on CUDA2"] == f"{half:,} of the f16 cache's bytes a token, 1024.0 MiB free"
    assert "KV on CUDA1" not in table
    assert "KV on CPU" not in table
    assert table["auto pool"].startswith("auto: the full cache of 65,536 tokens would fit, with ")

    found = json.loads(good(*args, "--json").stdout)
    codes = found["coarse_bytes"] // 2  # each has half of the layers, and as much to attend to them
    assert codes > 0
    assert found["devices"] == [
        {"name": "CUDA0", "gpu": True, "remote": False, "free": 24 * GIB, "token_bytes": half, "coarse": codes},
        {"name": "CUDA2", "gpu": True, "remote": False, "free": GIB, "token_bytes": half, "coarse": codes},
    ]
    assert found["token_bytes"]["f16"] == NEEDLE_TOKEN_BYTES
    assert found["auto_pool"] == 16_384
    assert "; auto: half of (1024 MiB free on CUDA2, the tightest of 2 devices - 512 MiB" in found["auto_note"]
