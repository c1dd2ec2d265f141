"""Experts on the host, from options to a loaded model: the same logits, the right tensors, and what auto is told of them.

Nothing here has a GPU: where one is needed, the memory of the CPU is taken for one.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_drafters
from support.changes import ENGINE

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.oracles import ON_GPU
from support.runs import HOST, LRU, Open, feed

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import KVFlashError, UnsupportedError, UsageError
from pyllama_kvflash.loading import placement
from pyllama_kvflash.loading.load import Loaded, load, probe
from pyllama_kvflash.loading.panes import exact_bytes
from pyllama_kvflash.loading.placement import holdings, on_host
from pyllama_kvflash.loading.refusals import MODELS
from pyllama_kvflash.native import Context, Device, Model, PoolParams
from pyllama_kvflash.native.model import Weight
from pyllama_kvflash.options import Options, Spec
from pyllama_kvflash.policy.device import RESERVE
from pyllama_kvflash.policy.experts import Placement

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {**LRU, "n_ctx": 4096, "coarse": "off"}
MOE = "qwen3moe"
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.")
NO_GPU = "experts: all are in host memory already, because there is no GPU"
COMMON_H = Path(__file__).parent.parent / "vendor" / "llama.cpp" / "common" / "common.h"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every Model.load from now on."""
    res: list[dict[str, Any]] = []
    real = Model.load.__func__  # type: ignore[attr-defined]

    def note(cls: type[Model], path: Path, **options: Any) -> Model:
        res.append(options)
        model: Model = real(cls, path, **options)
        return model

    monkeypatch.setattr(Model, "load", classmethod(note))
    return res


class Sizes:
    """Bytes of a tiny model, added up from its tensors. fixed: all but the experts, and its states."""

    def __init__(self, path: Path, n_seq: int = 1, **options: Any) -> None:
        with Model.load(path, no_alloc=True) as model:
            weights = model.weights()
            self.n_layer = model.n_layer
            self.tokens = probe(model, Options()).geometry.token_bytes(lambda _, n: 2 * n, 1, 1)
        found = [w for w in weights if EXPERTS.match(w.name)]
        self.layers = [sum(w.size for w in found if w.name.startswith(f"blk.{i}.")) for i in range(self.n_layer)]
        self.copy = max(w.size for w in found)
        with KVFlash.from_file(path, **{**SMALL, **options}) as kv:
            held = kv.ctx.kv_bytes()
        self.state = held.swa + held.recurrent
        self.fixed = sum(w.size for w in weights) - sum(self.layers) + self.state
        with Model.load(path) as model:
            least = n_seq * (4096 if not self.tokens else model.n_swa + 64 + 256)
            base, full = (computed(model, n // n_seq, 64, n_seq=n_seq) for n in (least, n_seq * 4096))
        self.slope = -(-(full - base) // max(1, n_seq * 4096 - least))
        self.compute = base - least * self.slope

    def need(self, n_host: int, tokens: int) -> int:
        """As the policy's docstring has it."""
        copy = self.copy if n_host else 0
        compute = self.compute + tokens * self.slope
        return RESERVE + self.fixed + sum(self.layers[n_host:]) + tokens * self.tokens + copy + compute


def computed(model: Model, n_ctx: int, n_batch: int, **options: Any) -> int:
    """Bytes of the buffers of the computation, of a context that has them."""
    with Context(model, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch, n_threads=1, **options) as ctx:
        return ctx.compute_bytes(0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Take the CPU for GPUs with so much free memory. Where there is a GPU, the model is on that, and not on those."""
    if ON_GPU:
        pytest.skip("the CPU stands for GPUs here")

    def pretend(*free: int) -> None:
        monkeypatch.setattr(
            placement,
            "devices",
            lambda: [Device(f"CUDA{i}", "", gpu=True, free=n, total=n) for i, n in enumerate(free)],
        )

    return pretend


@contextmanager
def loaded(path: Path, **options: Any) -> Iterator[Loaded]:
    """What a KVFlash is made of."""
    res = load(path, Options(**{**SMALL, **options}), KVFlash.open)
    try:
        yield res
    finally:
        res.close()


#
# a number
#


@pytest.mark.skipif(not COMMON_H.exists(), reason="there is no vendored tree, as where libraries were built elsewhere")
def test_the_patterns_are_llama_cpps() -> None:
    regex = re.search(r'LLM_FFN_EXPS_REGEX = "(.*)";', COMMON_H.read_text("utf-8"))
    assert regex
    assert on_host(Placement(2, "off")) == [rf"blk\.{i}" + regex[1].replace("\\\\", "\\") for i in (0, 1)]
    assert on_host(Placement(0, "off")) == []


@HOST
@pytest.mark.parametrize("name", [MOE, "qwen35moe"])
def test_experts_on_the_host_give_the_same_logits(opened: Open, loads: list[dict[str, Any]], name: str) -> None:
    """Of a pool that drops chunks; and it is the right tensors that are kept there."""
    want, n_layer = None, 0
    for n in (0, 1, 99):
        loads.clear()
        kv = opened(name, n_cpu_moe=n)
        feed(kv, 1500, 64)
        n_layer = kv.model.n_layer
        patterns = loads[-1]["on_host"]
        here = [w.name for w in kv.model.weights() if any(re.search(p, w.name) for p in patterns)]
        assert len(patterns) == kv.options.n_cpu_moe == min(n, n_layer)
        assert len(here) == 3 * min(n, n_layer)
        assert all(int(match[1]) < n for at in here if (match := EXPERTS.match(at)))
        assert [options.get("no_alloc", False) for options in loads] == [True] * (n > 0) + [False]
        assert kv.notes == ((NO_GPU,) if n else ())
        want = kv.logits() if want is None else want
        assert np.array_equal(kv.logits(), want)


@HOST
@pytest.mark.parametrize(("asked", "n"), [(1, 1), ("auto", 0)])
def test_a_model_without_experts(opened: Open, loads: list[dict[str, Any]], asked: int | str, n: int) -> None:
    """Its feed-forward weights stay."""
    kv = opened("qwen3", n_cpu_moe=asked)
    assert kv.notes[0].startswith("feed-forward weights: all are in host memory already")
    assert [re.sub(pattern, "", f"blk.{i}.ffn_up.weight") for i, pattern in enumerate(loads[-1]["on_host"])] == [""] * n
    assert (kv.n_pool, kv.options.n_cpu_moe, kv.warnings) == (768, n, ())


#
# auto
#


@pytest.mark.parametrize("name", [MOE, "qwen35moe", "gpt-oss", "deepseek2"])
def test_auto_finds_the_number_for_the_pool(
    opened: Open, gpu: Callable[..., None], loads: list[dict[str, Any]], tiny_path: Callable[[str], Path], name: str
) -> None:
    """A pool of the cap, by number, whatever half of the memory would be. Layers without experts count."""
    size = Sizes(tiny_path(name))
    first = next(i for i, n in enumerate(size.layers) if n)
    for left in range(first + 1, size.n_layer + 1):
        gpu(size.need(left, 1024))
        kv = opened(name, n_cpu_moe="auto", pool="auto", auto_cap=1024)
        assert (kv.options.n_cpu_moe, kv.n_pool, len(loads[-1]["on_host"])) == (left, 1024, left)
        assert kv.notes[0].startswith("experts: ")
        assert f"{size.need(left, 1024) / 2**20:.0f} MiB free on CUDA0" in kv.notes[0]
        gpu(size.need(left, 1024) - 1)
        less = opened(name, n_cpu_moe="auto", pool=1024)
        assert less.options.n_cpu_moe == min(left + 1, size.n_layer)
        assert len(less.warnings) == (left == size.n_layer)


def test_auto_on_two_gpus(
    opened: Open, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tiny_path: Callable[[str], Path]
) -> None:
    """The second has the last layer's experts, and is the one that is short."""
    size = Sizes(tiny_path(MOE))
    real, last = Model.weights, f"blk.{size.n_layer - 1}."

    def weights(self: Model) -> list[Weight]:
        return [w._replace(device=int(w.name.startswith(last) and bool(EXPERTS.match(w.name)))) for w in real(self)]

    monkeypatch.setattr(Model, "weights", weights)
    gpu(1 << 40, RESERVE + size.layers[-1])
    assert opened(MOE, n_cpu_moe="auto", pool=1024).options.n_cpu_moe == 0
    gpu(1 << 40, RESERVE + size.layers[-1] - 1)
    kv = opened(MOE, n_cpu_moe="auto", pool=1024)
    assert kv.options.n_cpu_moe == size.n_layer
    assert "free on CUDA1, the tightest of 2 devices" in kv.notes[0]


#
# what a device has to hold
#


@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("name", ["qwen35moe", "gpt-oss", MOE])
def test_states_count(tiny_path: Callable[[str], Path], gpu: Callable[..., None], name: str, n_parallel: int) -> None:
    """Windows and recurrent states, as large as those of the context that is made then."""
    gpu(1 << 40)
    options = Options(**{**SMALL, "n_batch": 0, "n_parallel": n_parallel})
    with Model.load(tiny_path(name), no_alloc=True) as model:
        options = options.resolved(model.n_ctx_train)
        (found,) = holdings(model, probe(model, options).geometry, options)
        weights = sum(w.size for w in model.weights() if not EXPERTS.match(w.name))
        assert found.token_bytes == probe(model, options).geometry.token_bytes(lambda _, n: 2 * n, 1, 1)
    with loaded(tiny_path(name), pool="off", n_batch=0, n_parallel=n_parallel) as its:
        held = its.ctx.kv_bytes()
    assert (found.weights, found.states) == (weights, held.swa + held.recurrent)
    assert (found.states > 0) == (name != MOE)
    assert found.copy == 4 * 256 * 128 * 2, "of 4 experts, 256 x 128 numbers of 2 bytes"


def test_an_exact_pass_counts(tiny_path: Callable[[str], Path], gpu: Callable[..., None]) -> None:
    """Its panes, and the buffers of its computation."""
    gpu(1 << 40)
    held = {}
    with Model.load(tiny_path(MOE), no_alloc=True) as model:
        for prefill in ("pool", "exact"):
            options = Options(**{**SMALL, "prefill": prefill}).resolved(model.n_ctx_train)
            geometry = probe(model, options).geometry
            held[prefill] = holdings(model, geometry, options)[0]
        exact = exact_bytes(model, geometry, options)[0]
    assert exact.panes >= 2 * options.n_ctx * 1024 // 2
    assert exact.parts.keys() == {"panes", "buffers"}
    assert held["exact"] == held["pool"] + exact


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
@pytest.mark.parametrize("name", [MOE, "qwen35moe"])
def test_speculative_decoding_counts(
    tiny_path: Callable[[str], Path], gpu: Callable[..., None], tmp_path: Path, name: str, kind: str
) -> None:
    """The drafter's weights, window and buffers, and the recurrent states that go back over a draft."""
    gpu(1 << 40)
    tiny_drafters.eagle3(tmp_path / "eagle3.gguf", n_embd_target=256)
    spec = Spec(kind=kind, model=str(tmp_path / "eagle3.gguf") if kind == "eagle3" else None, window=512)
    with Model.load(tiny_path(name), no_alloc=True) as model:
        options = Options(**SMALL, spec=spec).resolved(model.n_ctx_train)
        (found,) = holdings(model, probe(model, options).geometry, options)
        weights = sum(w.size for w in model.weights() if not EXPERTS.match(w.name))
    with loaded(tiny_path(name), spec=spec) as its:
        held = its.ctx.kv_bytes()
        assert (found.weights, found.states) == (weights, held.recurrent)
        assert its.drafts
        if drafter := its.drafts[0]._drafter:
            kv = drafter.kv_bytes()
            size = sum(w.size for w in drafter.model.weights()) + kv.attn + drafter.compute_bytes(0)
            assert found.drafter == pytest.approx(size, rel=0.02)
        else:
            assert found.drafter == 0
    assert found.need(0, 0) - found.drafter == replace(found, drafter=0).need(0, 0)


def test_a_drafter_that_cannot_draft_says_so_before_the_model_is_read(
    tiny_path: Callable[[str], Path], gpu: Callable[..., None], loads: list[dict[str, Any]], tmp_path: Path
) -> None:
    gpu(1 << 40)
    with pytest.raises(UsageError, match=r"none\.gguf does not exist"):
        load(tiny_path(MOE), Options(**SMALL, spec=Spec(kind="draft", model=str(tmp_path / "none.gguf"))), KVFlash.open)
    assert loads == []
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(KVFlashError, match=r"bad\.gguf"):
        load(tiny_path(MOE), Options(**SMALL, n_cpu_moe="auto", spec=Spec(kind="draft", model=str(bad))), KVFlash.open)
    assert all(options["no_alloc"] for options in loads)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("name", [MOE, "gpt-oss"])
def test_what_is_computed_counts(
    tiny_path: Callable[[str], Path], gpu: Callable[..., None], name: str, flash_attn: str
) -> None:
    """Its buffers, of a pool and of the full cache, are no larger than was said, and not much smaller."""
    gpu(1 << 40)
    options = Options(coarse="off", n_ctx=16384, n_batch=512, n_ubatch=512, flash_attn=flash_attn, prefill="pool")
    with Model.load(tiny_path(name), no_alloc=True) as model:
        options = options.resolved(model.n_ctx_train)
        (found,) = holdings(model, probe(model, options).geometry, options)
    assert found.token_compute > 0
    with Model.load(tiny_path(name)) as model:
        for tokens in (1024, 4096, 16384):
            pool = PoolParams(n_pool=tokens) if tokens < options.n_ctx else None
            real = computed(model, options.n_ctx, 512, flash_attn=flash_attn, pool=pool)
            assert real <= found.buffers + tokens * found.token_compute <= 1.1 * real + (4 << 20)


def test_experts_that_are_on_the_host_anyway(
    tiny_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, gpu: Callable[..., None]
) -> None:
    """Of the first layer: a prompt takes a copy of them as it is."""
    monkeypatch.setattr(
        placement,
        "devices",
        lambda: [Device("CUDA0", "", gpu=True, free=1, total=2), Device("CPU", "", gpu=False, free=3, total=4)],
    )
    real = Model.weights
    monkeypatch.setattr(
        Model, "weights", lambda self: [w._replace(device=int(w.name.startswith("blk.0."))) for w in real(self)]
    )
    size = Sizes(tiny_path(MOE))
    with Model.load(tiny_path(MOE), no_alloc=True) as model:
        options = Options(coarse="off", prefill="pool").resolved(model.n_ctx_train)
        on_gpu, on_cpu = holdings(model, probe(model, options).geometry, options)
        first = sum(w.size for w in real(model) if w.name.startswith("blk.0.") and not EXPERTS.match(w.name))
    assert on_gpu.experts == (0, *size.layers[1:])
    assert on_cpu.experts == (size.layers[0], *(0 for _ in size.layers[1:]))
    assert (on_gpu.name, on_gpu.free, on_gpu.gpu, on_cpu.name, on_cpu.free, on_cpu.gpu) == (
        "CUDA0",
        1,
        True,
        "CPU",
        3,
        False,
    )
    assert on_gpu.weights == size.fixed - size.state - first + size.copy
    assert (on_gpu.copy, on_cpu.weights, on_cpu.token_bytes) == (0, first + size.copy, 0)


#
# models that cannot be run
#


@pytest.mark.parametrize("n", [1, "auto"])
def test_refusals_stay_what_they_are(
    tiny_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    loads: list[dict[str, Any]],
    gpu: Callable[..., None],
    n: int | str,
) -> None:
    """Neither is turned into a run without a pool, nor are its weights read first."""

    def refused(name: str, n_cpu_moe: int | str) -> str:
        loads.clear()
        with pytest.raises(UnsupportedError) as err:
            load(tiny_path(name), Options(**{**SMALL, "pool": "auto"}, n_cpu_moe=n_cpu_moe), KVFlash.open)
        assert [options.get("no_alloc", False) for options in loads] == [n_cpu_moe != 0]
        return str(err.value)

    gpu(1 << 40)
    assert "cannot be run with a pool" in refused("qwen4exp", n)
    assert refused("qwen4exp", n) == refused("qwen4exp", 0)
    monkeypatch.setattr(Model, "refusal", property(lambda _: next(iter(MODELS))))
    assert refused(MOE, n) == refused(MOE, 0)
