"""Every family with every cache type: exact, or refused in words. docs/FAMILIES.md is the table of the verdicts.

A cell is small, and its logits few. So noise is told by the step in the middle: a key that rounds to its other neighbour,
or a tie of two experts that goes the other way, moves a few steps far.
"""

import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from support import families, tiny
from support.changes import LIBRARY

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.oracles import TOKENS, Cache, Case, Logits, Run, Step, difference, rows
from support.rounding import n_flips

from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.native import CACHE_TYPES, Model, Record
from pyllama_kvflash.native.lib import lib

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]

DOCS = Path(__file__).parent.parent / "docs"

HYBRID, WINDOW = "llama_memory_hybrid", "llama_kv_cache_iswa"
MEMORY = dict.fromkeys(("qwen3", "qwen35", "gemma4", *families.MODELS), "llama_kv_cache")
MEMORY |= dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), HYBRID)
MEMORY |= dict.fromkeys(("gemma4", "gemma3", "gpt-oss", "laguna-swa"), WINDOW)
FAMILIES = tuple(MEMORY)

MIXED = {f"{k}/{v}": Cache(k, type_v=v) for k, v in (("q8_0", "q4_0"), ("f16", "q8_0"))}
CACHES = {name: Cache(name) for name in CACHE_TYPES} | MIXED
CACHES |= {f"{name}, no FA": Cache(name, "off") for name in ("f16", "q8_0")}
NOT_ROTATED = "q4_0, not rotated"
CACHES[NOT_ROTATED] = Cache("q4_0")


class Refusal(NamedTuple):
    """Why llama.cpp refuses a cache: in short, and what its sentence must match."""

    reason: str
    sentence: str


ONE_TYPE = Refusal("K and V are one", r"model does not support different K \(\w+\) and V \(\w+\) cache types")
NEEDS_FA = Refusal("quantised V needs FA", "quantized V cache requires flash_attn to be enabled")

REFUSED = {("deepseek2", cache): ONE_TYPE for cache in MIXED} | {(name, "q8_0, no FA"): NEEDS_FA for name in FAMILIES}

N_PROMPT, N_STEPS = 300, 32  # steps twice: in the same blocks, then in others
N_POOL_SMALL, N_BATCH_SMALL = 512, 128
N_LONG, N_LONG_STEPS = 900, 40
NO_NOISE = 1e-3  # relative RMS: so little may be nothing in one run and something in the next. A lost chunk makes 0.05


def check_cell(model: Model, cache: str) -> str:
    """The verdict on a family and a cache type: exact, or refused and why. Raises AssertionError if an oracle fails."""
    name = model.path.stem
    n_ctx_min = families.LONG_CTX if name == "phi3" else 0
    case = Case(model, CACHES[cache], n_prompt=N_PROMPT, n_steps=2 * N_STEPS, n_ctx_min=n_ctx_min)
    refusal = REFUSED.get((name, cache))
    if refusal is not None:
        for make in (case.stock, case.pool):
            with pytest.raises(UnsupportedError, match=refusal.sentence):
                make()
        return f"refused: {refusal.reason}"
    with patch.dict(os.environ, {"LLAMA_ATTN_ROT_DISABLE": str(int(cache == NOT_ROTATED))}):
        check_rotation(case, rotated=cache != NOT_ROTATED)
        check_paging(case)
        check_evictions(case)
    return "exact"


def check_rotation(case: Case, *, rotated: bool) -> None:
    """A quantised cache is rotated, if the environment does not say otherwise, and its records say so."""
    with case.pool() as run:
        flags = run.ctx.pool_info().flags & (lib.KVF_FLAG_ROT_K | lib.KVF_FLAG_ROT_V)
    quantised = {case.cache.type, case.cache.type_v or case.cache.type} - {"f32", "f16", "bf16"}
    assert bool(flags) == (rotated and bool(quantised))


def check_paging(case: Case) -> None:
    """All chunks go out and come back in: to where they were bit for bit, then elsewhere within the noise."""
    with case.pool() as run:
        assert run.ctx.memory_class == MEMORY[case.model.path.stem]
        prompt = run.feed(N_PROMPT)
        page(run, [run.ctx.block_of(c) for c in run.resident()])
        same = np.concatenate([prompt, run.feed(N_STEPS, 1)])
        n_block = run.ctx.pool_info().n_block
        page(run, np.random.default_rng(1).permutation(n_block)[: len(run.resident())].tolist())
        other = run.feed(N_STEPS, 1)
    want = case.stock_logits
    case.assert_equal(same, want[:-N_STEPS])
    assert_alike(other, want[-N_STEPS:], case.noisy_logits, want[-2 * N_STEPS :])


def page(run: Run, blocks: Sequence[int]) -> None:
    """Take all chunks out, put them into blocks, and see that they are what they were."""
    chunks = run.resident()
    records = run.out(chunks)
    for c, block in zip(chunks, blocks, strict=True):
        assert run.ctx.page_in(c, records[c], block) == block
    for c in chunks:
        assert np.array_equal(run.read(c), records[c]), f"chunk {c} differs"


def check_evictions(case: Case) -> None:
    """A pool too small says what a stock cache says that loses the same positions at the same times."""
    with case.pool(N_POOL_SMALL, N_BATCH_SMALL) as run:
        logits, schedule, infos = run.feed_through(N_LONG, N_LONG_STEPS)
    n_drops = sum(len(step.drops) for step in schedule)
    assert n_drops >= 7, f"{n_drops} drops"
    assert {info.n_kv for info in infos[N_POOL_SMALL // N_BATCH_SMALL :]} == {N_POOL_SMALL}
    case.assert_replayed(logits, schedule, N_POOL_SMALL, N_BATCH_SMALL)


def distances(got: Logits, want: Logits) -> Any:
    """Of each step, the relative RMS."""
    return np.sqrt(np.mean((got.astype(np.float64) - want) ** 2, 1) / np.mean(want.astype(np.float64) ** 2, 1))


def assert_alike(got: Logits, want: Logits, noisy: Logits, noiseless: Logits) -> None:
    """The step in the middle is within twice the noise of its like, and few tokens differ that are no near tie by it."""
    middle, floor = np.median(distances(got, want)), np.median(distances(noisy, noiseless))
    text = f"the step in the middle differs by {middle:.3g}, noise floor {floor:.3g}; {difference(got, want)}"
    assert middle <= 2 * max(floor, NO_NOISE), text
    assert n_flips(got, want, tie=4 * difference(noisy, noiseless).largest) <= 2, text


def read_table() -> dict[tuple[str, str], str]:
    """The verdicts in docs/FAMILIES.md, by family and cache."""
    lines = [line.strip("|").split("|") for line in (DOCS / "FAMILIES.md").read_text().splitlines() if line[:1] == "|"]
    (_, *caches), _, *rows = [[cell.strip(" `") for cell in line] for line in lines]
    return {(row[0], cache): cell for row in rows for cache, cell in zip(caches, row[1:], strict=True)}


#
# the table
#


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_cell(tiny_model: Callable[[str], Model], name: str, cache: str) -> None:
    assert check_cell(tiny_model(name), cache) == read_table()[name, cache]


def test_document() -> None:
    """It has these cells and no others, and its words are the script's."""
    verdicts = read_table()
    assert list(verdicts) == [(name, cache) for name in FAMILIES for cache in CACHES]
    script = runpy.run_path(str(DOCS / "families.py"))
    assert (DOCS / "FAMILIES.md").read_text() == script["render"](verdicts), "run docs/families.py"


@pytest.mark.parametrize("name", ["laguna-swa", "qwen3next", "deepseek2"])
@pytest.mark.parametrize(
    ("sabotaged", "message"),
    [("same blocks", "relative RMS"), ("other blocks", "in the middle"), ("eviction", "relative RMS")],
)
def test_cell_can_fail(
    tiny_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch, name: str, sabotaged: str, message: str
) -> None:
    out, replay, calls = Run.out, Run.replay, []

    def forged_out(run: Run, chunks: Sequence[int]) -> dict[int, Record]:
        """In one layer, a chunk has the K of another."""
        calls.append(run)
        records = out(run, chunks)
        if sabotaged == ("same blocks", "other blocks")[len(calls) - 1]:
            layer = run.ctx.layers()[0]
            rows(records[2], layer, "k")[:] = rows(records[1], layer, "k")
        return records

    def other_replay(run: Run, schedule: Sequence[Step]) -> Logits:
        """Two chunks leave in each other's place: as many as ever, since a cache that is as wide as the pool has no room for more."""
        (i, first), (j, second) = [(i, step) for i, step in enumerate(schedule) if step.drops][:2]
        (a, *rest), (b, *others) = first.drops, second.drops
        forged = {i: first._replace(drops=(b, *rest)), j: second._replace(drops=(a, *others))}
        return replay(run, [forged.get(k, step) for k, step in enumerate(schedule)])

    monkeypatch.setattr(Run, "out", forged_out)
    if sabotaged == "eviction":
        monkeypatch.setattr(Run, "replay", other_replay)
    with pytest.raises(AssertionError, match=message):
        check_cell(tiny_model(name), "q4_0")


#
# the models say something
#


@pytest.mark.parametrize("name", FAMILIES)
def test_model_is_alive(tiny_model: Callable[[str], Model], name: str) -> None:
    """Its tokens differ, and depend on those long before, through full attention too."""
    model, others = tiny_model(name), TOKENS.copy()
    others[:64] = (others[:64] + 1) % tiny.N_VOCAB
    with Run(model, n_ctx=1024) as run, Run(model, n_ctx=1024, tokens=others) as other:
        logits = run.feed_at_once(300)
        far = distances(other.feed_at_once(300)[264:], logits[264:])
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1, f"standard deviation {logits.std():.3g}"
    assert len(set(logits.argmax(1))) > 50
    assert far[0] > 1e-3, f"the first 64 tokens move the one 200 on by {far[0]:.3g}"
    with Run(model, pool=1024) as run, Run(model, pool=1024) as without:
        run.feed(300)
        without.feed(300)
        without.ctx.drop(0)
        lost = distances(without.feed(1), run.feed(1))[0]
    assert lost > 20 * NO_NOISE, f"a chunk that is lost moves the next token by {lost:.3g}"


def test_latent_cache_has_no_values(tiny_model: Callable[[str], Model]) -> None:
    with Run(tiny_model("deepseek2"), pool=1024) as run:
        run.feed(64)
        layers, info = run.ctx.layers(), run.ctx.pool_info()
    assert [(layer.type_v, layer.n_embd_v, layer.size_v) for layer in layers] == [(-1, 0, 0)] * 2
    assert info.record_bytes == info.meta_bytes + sum(layer.size_k for layer in layers)


class Without(tiny.Writer):
    """A writer that zeroes what one expert of the last layer says."""

    def __init__(self, path: Path, name: str, expert: int, n_layer: int) -> None:
        super().__init__(path, families.ARCHS.get(name, name))
        self.expert, self.last = expert, f"blk.{n_layer - 1}.ffn_down_exps.weight"

    def tensor(self, name: str, value: Any) -> None:
        if name == self.last:
            value[self.expert] = 0
        super().tensor(name, value)


ROUTED = ("qwen3moe", "gpt-oss", "laguna", "laguna-swa", "qwen35moe", "qwen3next", "deepseek2")


@pytest.mark.parametrize("name", ROUTED)
def test_tokens_take_different_experts(tiny_model: Callable[[str], Model], tmp_path: Path, name: str) -> None:
    """Each token goes through so many, and every expert has some: without one, the others' tokens stay as they are."""

    def logits(model: Model) -> Logits:
        with Run(model, n_ctx=512) as run:
            return run.feed_at_once(100)

    whole, taken = logits(tiny_model(name)), []
    for expert in range(families.N_EXPERT):
        writer = Without(tmp_path / "without.gguf", name, expert, tiny_model(name).n_layer)
        tiny.MODELS[name](writer)
        writer.close()
        with Model.load(tmp_path / "without.gguf") as model:
            taken.append(np.any(logits(model) != whole, axis=1))
    assert np.sum(taken, 0).tolist() == [families.N_USED] * 100
    assert min(np.sum(taken, 1)) > 5, f"tokens of each expert: {np.sum(taken, 1)}"


def test_same_name_same_bytes(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    for name in FAMILIES:
        tiny.write(name, tmp_path / "again.gguf")
        assert (tmp_path / "again.gguf").read_bytes() == tiny_path(name).read_bytes(), name
