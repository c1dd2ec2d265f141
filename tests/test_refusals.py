"""Each refusal is produced, and its sentence names the reason and what to do instead, as in pyllama_kvflash/refusals.py.

Not produced: llama_kv_cache_dsa_iswa, and the draft heads dflash and gemma4-assistant (the former's models have many kinds
of layers; the latter need the context of another model as soon as they are loaded). They take the way of their likes.
seq_cp() from stream to stream is not reached, since no pool has two. What Python cannot ask for is asked of the library.
"""

import ctypes
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support import refused

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import crossed
from support.oracles import ON_GPU, TOKENS, Run, assert_equal

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli import main
from pyllama_kvflash.cli.flags import spelled
from pyllama_kvflash.cli.run import run
from pyllama_kvflash.errors import KVFlashError, NativeError, UnsupportedError, UsageError
from pyllama_kvflash.loading import load as loading
from pyllama_kvflash.loading import refusals
from pyllama_kvflash.loading.refusals import CALLS, CODES, MEMORIES, MODELS, ON_DISK, SHIFT, WINDOWS
from pyllama_kvflash.native import Context, Model, PoolParams, devices
from pyllama_kvflash.native.lib import _kvflash, check, ffi, lib

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parent.parent

SMALL: dict[str, Any] = {"n_ctx": 1024, "pool": 512, "n_batch": 64, "n_threads": 1}

KINDS = {
    "bert": "encoder",
    "t5encoder": "encoder",
    "llama": "encoder",  # with attention in both directions
    "t5": "encoder-decoder",
    "llada": "diffusion",
    "dream": "diffusion",
    "eagle3": "draft head",
}
CLASSES = {
    "deepseek32": "llama_kv_cache_dsa",
    "minimax-m3": "llama_kv_cache_msa",
    "deepseek4": "llama_kv_cache_dsv4",
    "qwen4exp": "llama_memory_hybrid_idx",
    "mamba": "llama_memory_recurrent",
}
WINDOWED = {"gemma2": "llama_kv_cache_iswa", "lfm2": "llama_memory_hybrid_iswa"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory, tiny_path: Callable[[str], Path]) -> Callable[[str], Path]:
    """The file of a model that is refused."""
    directory = tmp_path_factory.mktemp("refused")

    def path(name: str) -> Path:
        if name not in refused.MODELS:
            return tiny_path(name)
        res = directory / f"{name}.gguf"
        if not res.exists():
            refused.write(name, res)
        return res

    return path


def sentence(call: Callable[[], object], kind: type[KVFlashError] = UnsupportedError) -> str:
    """The sentence of an error that must come."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def inspect(path: Path, *args: str) -> dict[str, Any]:
    """What `kvflash inspect` says."""
    res = CliRunner().invoke(main, ["inspect", str(path), "--json", *args])
    assert res.exit_code == 0, res.output
    found: dict[str, Any] = json.loads(res.stdout)
    return found


#
# models and memories
#


def test_every_refusal_is_produced() -> None:
    assert set(MODELS) == set(KINDS.values())
    assert set(MEMORIES) - {"llama_kv_cache_dsa_iswa"} == set(CLASSES.values())
    assert set(CALLS) == set(PRODUCE)


@pytest.mark.parametrize("pool", [512, "off"])
@pytest.mark.parametrize("name", KINDS)
def test_model_that_is_not_run(model_path: Callable[[str], Path], name: str, pool: int | str) -> None:
    path, refusal = model_path(name), MODELS[KINDS[name]]
    text = sentence(lambda: KVFlash.from_file(path, **SMALL | {"pool": pool}))
    assert text == f"{path} cannot be run: {refusal.reason}; {refusal.alternative}"


@pytest.mark.parametrize("name", [*CLASSES, *WINDOWED])
def test_memory_that_is_not_pooled(model_path: Callable[[str], Path], name: str) -> None:
    memory, refusal = CLASSES.get(name, WINDOWED.get(name)), MEMORIES.get(CLASSES.get(name, ""), WINDOWS)
    path = model_path(name)
    text = sentence(lambda: KVFlash.from_file(path, **SMALL))
    why = f"its memory ({memory}) cannot be pooled, because {refusal.reason}; {refusal.alternative}"
    assert text == f"{path} cannot be run with a pool: {why}"
    found = inspect(path)
    assert (found["memory_class"], found["poolable"], found["refusal"]) == (memory, False, why)

    with KVFlash.from_file(path, **SMALL | {"pool": "off"}) as kv:  # what the sentence says
        for _ in kv.prefill(TOKENS[:200]):
            pass
        assert np.isfinite(kv.logits()).all()


@pytest.mark.parametrize("args", [(), ("-ncmoe", "auto"), ("-ncmoe", "1")])
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_inspect_says_that_it_is_not_run(model_path: Callable[[str], Path], name: str, args: tuple[str, ...]) -> None:
    found = inspect(model_path(name), *args)
    assert (found["poolable"], found["refusal"]) == (False, str(MODELS[KINDS[name]]))


def test_memory_that_is_not_in_the_table() -> None:
    for n_layer in (0, 2):
        text = refusals.of_memory("llama_kv_cache_new", n_layer, "no pool of this kind")
        assert text == "no pool of this kind; run it with the full cache: `pool` off"


#
# calls
#


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


LLAMA = ctypes.CDLL(str(next(Path(_kvflash.__file__).parent.glob("*llama.*"))))
LLAMA.llama_decode.argtypes = [ctypes.c_void_p, Batch]
LLAMA.llama_get_memory.argtypes = [ctypes.c_void_p]
LLAMA.llama_get_memory.restype = ctypes.c_void_p
LLAMA.llama_memory_can_shift.argtypes = [ctypes.c_void_p]
LLAMA.llama_memory_can_shift.restype = ctypes.c_bool
LLAMA.llama_memory_seq_add.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 4]


def pointer(ctx: Context) -> int:
    """The native context, for LLAMA."""
    return int(ffi.cast("intptr_t", ctx.handle))


def decode(ctx: Context, pos: Sequence[Sequence[int]], n_seq: int = 1, *, embd: bool = False) -> int:
    """llama_decode() of a batch of which pos[j] are the positions in dimension j; each token belongs to n_seq sequences."""
    n = len(pos[0])
    positions = np.array(pos, np.int32)
    token, values = TOKENS[:n].copy(), np.ones((n, 256), np.float32)
    n_seqs, seqs = np.full(n, n_seq, np.int32), np.arange(n_seq, dtype=np.int32)
    pointers, outputs = np.full(n, seqs.ctypes.data, np.uint64), np.zeros(n, np.int8)
    token_at, embd_at = (None, values.ctypes.data) if embd else (token.ctypes.data, None)
    at = [a.ctypes.data for a in (positions, n_seqs, pointers, outputs)]
    return int(LLAMA.llama_decode(pointer(ctx), Batch(n, token_at, embd_at, *at)))


IMAGE = [[500] * 4, [500, 500, 501, 501], [500, 501, 500, 501], [0] * 4]
"""Two by two patches of an image behind 500 tokens."""


class Logged:
    """What the library logs, and Python does not see."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, call: Callable[[], int], want: int) -> str:
        """The first line of a call that must give this."""
        self._capfd.readouterr()
        lib.kvf_log_level(lib.GGML_LOG_LEVEL_ERROR)
        try:
            got = call()
        finally:
            lib.kvf_log_level(lib.GGML_LOG_LEVEL_NONE)
        assert got == want
        return self._capfd.readouterr().err.splitlines()[0]


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str]) -> Logged:
    return Logged(capfd)


def recurrent_rollback(run: Run, logged: Logged) -> str:
    return sentence(lambda: run.ctx.seq_rm(400))


def window_rollback(run: Run, logged: Logged) -> str:
    run.feed(1500)
    return sentence(lambda: run.ctx.seq_rm(400))


def whole_state(run: Run, logged: Logged) -> str:
    size = lib.llama_state_get_size(run.ctx.handle)
    state = ffi.new("uint8_t[]", size)
    assert lib.llama_state_get_data(run.ctx.handle, state, size) == size > 0
    return logged(lambda: lib.llama_state_set_data(run.ctx.handle, state, size), 0)


def image(run: Run, logged: Logged) -> str:
    with Run(run.ctx.model, n_ctx=1024) as stock:
        stock.feed(500)
        assert decode(stock.ctx, IMAGE, embd=True) == 0
    return logged(lambda: decode(run.ctx, IMAGE, embd=True), 1)


def two_sequences(run: Run, logged: Logged) -> str:
    with Context(run.ctx.model, n_ctx=1024, n_batch=64, n_seq=2, pool=PoolParams(n_pool=512)) as ctx:
        return logged(lambda: decode(ctx, [range(8)], n_seq=2), 1)


def streams(run: Run, logged: Logged) -> str:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.kv_unified = 2048, 64, 64, 2, False
    p_params, pool = ffi.new("struct llama_context_params *", params), ffi.new("struct kvf_pool_params *", [512, 64])
    out = ffi.new("struct llama_context **")
    return sentence(lambda: check(lib.kvf_context_new(run.ctx.model.handle, p_params, pool, ffi.NULL, out)))


PRODUCE: dict[str, tuple[str, Callable[[Run, Logged], str], str]] = {
    "going back in a recurrent state": ("qwen35", recurrent_rollback, "cannot go back to position 400"),
    "going back in a sliding window": ("gemma4", window_rollback, "sliding window before position 400 is gone"),
    "restoring a whole-context state": ("qwen3", whole_state, "a whole-context state cannot be restored into a pool"),
    "tokens that share a position (images of M-RoPE models)": (
        "qwen35",
        image,
        "position 500 of sequence 0 is already in the pool",
    ),
    "tokens of several sequences": ("qwen3", two_sequences, "a token of a pool belongs to one sequence, not to 2"),
    "sequences in streams of their own, and seq_cp() from one to another": (
        "qwen3",
        streams,
        "the sequences of a pool share its cells",
    ),
}
"""For each of CALLS: a model, what asks for it in a run that has read 500 tokens, and what the sentence begins with."""


def produce(tiny_model: Callable[[str], Model], logged: Logged, name: str) -> str:
    """The sentence of a call that is refused. Afterwards the sequence goes on as if nothing had been asked for."""
    model, ask, begin = PRODUCE[name]
    with Run(tiny_model(model), pool=2048, n_ctx=8192) as run, Run(tiny_model(model), pool=2048, n_ctx=8192) as twin:
        run.feed(500)
        text = ask(run, logged)
        twin.feed(500)
        if run.pos > 500:
            twin.feed(run.pos - 500)
        assert_equal(run.feed(20, 1), twin.feed(20, 1))
    assert begin in text
    return text


@pytest.mark.parametrize("name", CALLS)
def test_sentence_of_a_call(tiny_model: Callable[[str], Model], logged: Logged, name: str) -> None:
    """The library's own sentence is the table's."""
    pattern = re.escape(str(CALLS[name])).replace(r"\{\}", r"\d+")
    text = produce(tiny_model, logged, name)
    assert re.search(rf"{pattern}$", text), text


#
# context shift
#


def test_context_is_not_shifted(opened: Callable[..., KVFlash]) -> None:
    kv = opened()
    for _ in kv.prefill(TOKENS[:1000]):
        pass
    text = sentence(lambda: list(kv.prefill(TOKENS[:100])), UsageError)
    assert "do not fit the context of 1,024: use a larger `n_ctx`" in text
    assert kv.n_tokens == 1000


def test_pool_is_not_shifted(tiny_model: Callable[[str], Model]) -> None:
    model = tiny_model("qwen3")
    with Run(model, pool=1024) as run, Run(model, n_ctx=1024) as stock:
        can_shift = [LLAMA.llama_memory_can_shift(LLAMA.llama_get_memory(pointer(r.ctx))) for r in (run, stock)]
        assert can_shift == [False, True]
        run.feed(500)
        LLAMA.llama_memory_seq_add(LLAMA.llama_get_memory(pointer(run.ctx)), 0, 100, -1, -50)
        run.pos -= 50
        assert "does not support K-shift" in sentence(lambda: run.decode(1), NativeError)


#
# documentation
#


@pytest.mark.parametrize("name", CODES)
def test_a_pool_that_fresh_does_not_take(
    opened: Callable[..., KVFlash], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The library says why, in words that are in its code, and loading adds what to use instead; other errors stay."""
    reason = CODES[name].reason.replace("{}", "3")
    native = Path(refusals.__file__).parents[1] / "native" / "src"
    source = "".join(path.read_text("utf-8") for path in native.rglob("*.cpp"))
    assert CODES[name].reason.replace("{}", "%d") in source

    def refuse(*_: object, pool: PoolParams | None = None, **more: object) -> Context:
        if pool and pool.n_pool > 256:
            raise (UnsupportedError if pool.coarse_k else NativeError)(reason)
        return Context(*_, pool=pool, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "Context", refuse)
    with pytest.raises(UnsupportedError) as err:
        opened("qwen3", n_ctx=4096, pool=1024, policy="fresh")
    assert str(err.value).endswith(f" can be made: {str(CODES[name]).replace('{}', '3')}")
    assert "`policy` qk" in str(err.value)
    with pytest.raises(NativeError) as other:
        opened("qwen3", n_ctx=4096, pool=1024, policy="lru")
    assert str(other.value).endswith(f" can be made: {reason}")


@pytest.mark.parametrize(("name", "options"), crossed(CODES, [{}, {"n_parallel": 2, "n_batch": 64}]))
def test_the_default_where_no_layer_can_choose(
    opened: Callable[..., KVFlash], monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """It is qk in all that follows from a policy, and a note says why; what has no pool says nothing of it."""
    reason = CODES[name].reason.replace("{}", "3")

    def refuse(*_: object, pool: PoolParams | None = None, **more: object) -> Context:
        if pool and pool.coarse_k:
            raise UnsupportedError(reason)
        return Context(*_, pool=pool, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "Context", refuse)
    kv = opened("qwen3", n_ctx=4096, pool=1024, **options)
    assert (kv.policy, kv.options.policy, kv.options.coarse) == ("qk", "qk", "off")
    assert (kv.options.n_opening, kv.options.n_swaps, kv.pager.guests) == (32, 4, None)
    assert kv.notes.count(f"policy qk, not fresh: {reason}") == 1
    assert not [warning for warning in kv.warnings if "policy" in warning]
    for pool in ("off", 8192):
        assert not [note for note in opened("qwen3", n_ctx=4096, pool=pool).notes if "policy" in note]
    assert not [note for note in opened("qwen3", n_ctx=4096, pool=1024, policy="qk").notes if "policy" in note]


@pytest.mark.parametrize("gpu", [False, True])
def test_no_layer_of_a_gpu_chooses_from_what_is_on_disk(
    opened: Callable[..., KVFlash], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool
) -> None:
    """The default is qk then, and says why; fresh is refused before anything is made. On the CPU a record may be anywhere."""
    seen = [replace(device, gpu=gpu) for device in devices()]
    monkeypatch.setattr(loading, "devices", lambda: seen)
    disk: dict[str, Any] = {"n_ctx": 4096, "pool": 1024, "disk": str(tmp_path)}
    if not gpu:
        if not ON_GPU:
            assert opened("qwen3", **disk, policy="fresh").policy == opened("qwen3", **disk).policy == "fresh"
        return
    kv = opened("qwen3", **disk)
    assert (kv.policy, kv.notes.count(f"policy qk, not fresh: {ON_DISK.reason}")) == ("qk", 1)
    assert sentence(lambda: opened("qwen3", **disk, policy="fresh")).endswith(f"run with policy fresh: {ON_DISK}")
    assert opened("qwen3", **disk | {"pool": "off"}, policy="fresh").policy == "full"


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4", "deepseek2"])
def test_the_default_where_each_layer_chooses(opened: Callable[..., KVFlash], name: str) -> None:
    """On the CPU, whatever the attention; the least pool is that of other policies."""
    kv, other = (opened(name, n_ctx=4096, pool=1, n_batch=16, chunk=16, **more) for more in ({}, {"policy": "lru"}))
    assert (kv.policy, kv.options.policy, kv.options.coarse, kv.options.n_opening) == ("fresh", "fresh", "4", 0)
    assert kv.n_pool == other.n_pool == 256
    assert not [note for note in kv.notes if "policy" in note]


def test_the_page_has_every_refusal() -> None:
    text = (ROOT / "docs" / "REFUSALS.md").read_text()
    for refusal in (*MODELS.values(), *MEMORIES.values(), WINDOWS, *CALLS.values(), *CODES.values(), SHIFT):
        assert refusal.reason.replace("{}", "N") in text
        assert spelled(refusal.alternative, run) in text
