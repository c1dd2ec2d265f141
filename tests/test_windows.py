"""Sliding windows beside a pool: the ring of an SWA layer keeps its size and its rows, whatever leaves the pool.

A ring has room for the window and a ubatch, in whole 256 cells, and wraps all that often. The models are so small that a
run passes 16K positions in a second, and their windows are multiples of neither 256 nor a chunk. The stock cache is the
judge: it loses the same positions of full attention at the same times, and its SWA part is nobody's business.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from support import families, tiny
from support.changes import ENGINE

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.oracles import CACHES, N_CTX, Case, Logits, Run, Step, assert_equal

from pyllama_kvflash.errors import PoolError, UnsupportedError
from pyllama_kvflash.native import Model

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

FAR = 16384
NAN = 0xFF  # as every byte of an F16


def windowed(w: tiny.Writer, n_swa: int) -> None:
    """A gemma4 of two layers, the first with a sliding window."""
    n_embd, n_ff, n_layer, n_head, n_head_kv, n_head_dim = 128, 128, 2, 2, 1, 64
    w.geometry(
        n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=n_head_kv, n_head_dim=n_head_dim, rope=1e6
    )
    w.keys(
        attention__sliding_window=n_swa,
        attention__sliding_window_pattern=[True, False],
        attention__shared_kv_layers=0,
        attention__key_length_swa=n_head_dim,
        attention__value_length_swa=n_head_dim,
        rope__freq_base_swa=1e4,
        rope__dimension_count=n_head_dim,
        rope__dimension_count_swa=n_head_dim,
        embedding_length_per_layer_input=0,
    )
    w.head(n_embd, embd_scale=0.1)
    w.tensor("rope_freqs.weight", np.ones(n_head_dim // 2, np.float32))
    for i in range(n_layer):
        blk = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            w.norm(f"{blk}{name}.weight", n_embd)
        w.attention(blk, n_embd, n_head, n_head_kv, n_head_dim, q_norm=0.5)
        w.ffn(blk, n_embd, n_ff)


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Model]]:
    """The model with some window, the same weights for each."""
    directory = tmp_path_factory.mktemp("windows")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def model(n_swa: int) -> Model:
            path = directory / f"{n_swa}.gguf"
            writer = tiny.Writer(path, "gemma4")
            windowed(writer, n_swa)
            writer.close()
            return stack.enter_context(Model.load(path))

        yield model


class Setting(NamedTuple):
    """A window, or the name of a tiny model that has one, with a pool and batches."""

    window: int | str
    pool: int
    n_batch: int
    chunk: int = 64
    cache: str = "f16"


SETTINGS = {
    "batch_above_window": Setting(200, 1024, 512),
    "batch_above_window-q8_0": Setting(200, 1024, 512, 32, "q8_0"),
    "ubatch_above_window": Setting(77, 768, 384),
    "pool_below_window": Setting(700, 512, 128),
    "pool_below_window-nofa": Setting(700, 512, 128, 16, "f16-nofa"),
    "gpt-oss": Setting("gpt-oss", 1024, 512),
    "laguna-swa": Setting("laguna-swa", 768, 320),
}


class Windowed(Case):
    """A case with a ring."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__(model, CACHES[setting.cache])
        self.setting = setting
        self.ring = -(-(model.n_swa + min(setting.n_batch, 256)) // 256) * 256

    def run(self) -> Run:
        """A pooled context."""
        return self.pool(self.setting.pool, self.setting.n_batch, chunk=self.setting.chunk)

    def stock(self, n_ctx: int = 8192, n_batch: int = 0, n_seq: int = 1) -> Run:
        """A stock context."""
        n_batch = n_batch or self.setting.n_batch
        return Run(self.model, self.cache, n_ctx=n_ctx, n_batch=n_batch, n_seq=n_seq, chunk=self.setting.chunk)

    def groups(self) -> list[list[int]]:
        """Batches past FAR: the ring wraps between single tokens, then within a batch of 33, then with large batches."""
        wrap = -(-FAR // self.ring) * self.ring
        groups = [
            *self.large(wrap - 64),
            *[[1] * 64] * 2,
            *self.large(self.ring - 128),
            [33, 33, 33, 33, 60],
            *self.large(self.ring),
            [1] * 10,
        ]
        sizes = np.concatenate(groups)
        starts = np.cumsum(sizes) - sizes
        across = {int(n) for n, pos in zip(sizes, starts, strict=True) if pos >= FAR - 64 and -pos % self.ring < n}
        assert {1, 33} < across, f"the ring wraps in batches of {across}"
        return groups

    def large(self, n: int) -> list[list[int]]:
        """n tokens in the largest batches."""
        size = self.setting.n_batch
        return [*[[size]] * (n // size), *[[n % size]] * (n % size > 0)]


def feed(run: Run, groups: Sequence[Sequence[int]]) -> tuple[Logits, list[Step]]:
    """Batches through a pool too small for them; with what was dropped, and when.

    There is room for a group before it begins. Groups begin with a chunk, so that the stock cache, which knows none,
    fills the cells in the same order: with a drop amidst a chunk, it may put the rest of that one elsewhere.
    """
    logits, schedule = [], []
    for group in groups:
        drops = run.make_room(sum(group))
        for n in group:
            schedule.append(Step(n, drops))
            logits.append(run.feed(n))
            drops = ()
    return np.concatenate(logits), schedule


@pytest.fixture(params=SETTINGS)
def case(
    request: pytest.FixtureRequest, windowed_model: Callable[[int], Model], tiny_model: Callable[[str], Model]
) -> Windowed:
    """Every setting."""
    setting = SETTINGS[request.param]
    model = windowed_model(setting.window) if isinstance(setting.window, int) else tiny_model(setting.window)
    assert model.n_swa == (families.N_SWA if isinstance(setting.window, str) else setting.window)
    return Windowed(model, setting)


@pytest.fixture(scope="session")
def make(windowed_model: Callable[[int], Model]) -> Callable[[str], Windowed]:
    """One of the settings by name, for those tests that one or two are enough for."""

    def case(name: str) -> Windowed:
        setting = SETTINGS[name]
        assert isinstance(setting.window, int)
        return Windowed(windowed_model(setting.window), setting)

    return case


#
# the ring wraps
#


@pytest.mark.nightly(ENGINE)
def test_across_the_wrap(case: Windowed) -> None:
    with case.run() as run:
        logits, schedule = feed(run, case.groups())
        assert run.pos > FAR + 2 * case.ring
    n_drops = sum(len(step.drops) for step in schedule)
    assert n_drops >= (run.pos - case.setting.pool) // case.setting.chunk, f"{n_drops} drops"
    case.assert_replayed(logits, schedule, case.setting.pool, case.setting.n_batch, case.setting.chunk)


def test_size_of_the_ring(case: Windowed) -> None:
    """It follows from the window, a ubatch and the logical context, never from the pool."""
    with case.run() as run, case.stock(N_CTX) as stock:
        pooled, whole = run.ctx.kv_bytes(), stock.ctx.kv_bytes()
        assert pooled.swa == whole.swa, f"{pooled}, stock {whole}"
        assert pooled.attn * N_CTX == whole.attn * case.setting.pool
    with case.stock(case.ring) as small:
        assert small.ctx.kv_bytes().swa == whole.swa
        assert small.ctx.kv_bytes().attn * N_CTX == whole.attn * case.ring


@pytest.mark.parametrize("name", ["batch_above_window", "pool_below_window"])
def test_guesses_across_the_wrap(make: Callable[[str], Windowed], name: str) -> None:
    """Tokens that are tried and taken back overwrite the oldest of the ring, and nothing that is needed."""
    case = make(name)

    def run_with_guesses(run: Run) -> Logits:
        run.pos = FAR
        logits = [run.feed(case.ring - 40)]
        for _ in range(40):
            pos = run.pos
            run.ctx.decode((run.tokens[pos : pos + 8] + 3) % tiny.N_VOCAB, pos)
            run.ctx.seq_rm(pos)
            logits.append(run.feed(2))
        assert run.pos > FAR + case.ring
        return np.concatenate(logits)

    with case.pool(2048, case.setting.n_batch) as pool, case.stock() as stock:
        assert_equal(run_with_guesses(pool), run_with_guesses(stock))


@pytest.mark.parametrize("name", ["batch_above_window", "pool_below_window"])
def test_as_far_back_as_the_ring_goes(make: Callable[[str], Windowed], name: str) -> None:
    """Its oldest row is that of ring positions ago; a window that begins before it is gone."""
    case = make(name)

    def run_back(run: Run) -> Logits:
        run.pos = FAR
        logits = [run.feed(case.ring + 100)]
        first = run.pos - case.ring + case.model.n_swa - 1
        for pos in (FAR + 1, first - 1):
            with pytest.raises(UnsupportedError, match=f"sliding window before position {pos} is gone"):
                run.ctx.seq_rm(pos)
        run.ctx.seq_rm(first)
        run.pos = first
        logits += [run.feed(20, 1), run.feed(200), run.feed(20, 1)]
        return np.concatenate(logits)

    with case.pool(2048, case.setting.n_batch) as pool, case.stock() as stock:
        assert_equal(run_back(pool), run_back(stock))


#
# clear
#


@pytest.mark.parametrize("n", [150, 1500], ids=["shorter", "longer"])
def test_after_clear(case: Windowed, n: int) -> None:
    """A second run equals a fresh one, be it shorter than a ring or wrap it again."""
    groups = [*case.large(n), [1] * 60]
    with case.run() as run, case.run() as fresh:
        feed(run, [*case.large(2 * case.ring + 300), [1] * 30])
        run.ctx.clear()
        run.pos = 0
        logits, schedule = feed(run, groups)
        want, same = feed(fresh, groups)
        assert run.ctx.pool_info() == fresh.ctx.pool_info()
        assert [a.tolist() for a in run.ctx.blocks()] == [a.tolist() for a in fresh.ctx.blocks()]
        assert run.ctx.save_partial() == fresh.ctx.save_partial()
    assert schedule == same
    assert_equal(logits, want)


@pytest.mark.parametrize("where", ["pool", "ring"])
def test_whole_buffers_are_cleared(make: Callable[[str], Windowed], where: str) -> None:
    """All cells at once, used or not. Without flash attention what was left behind would be seen."""
    case = make("pool_below_window-nofa")
    groups = [*case.large(600), [1] * 30]

    def dirty() -> Run:
        run = case.run()
        feed(run, groups)
        if where == "pool":
            for c in run.resident():
                run.ctx.drop(c)
            run.ctx.scribble(NAN)
        else:
            state = bytearray(run.ctx.save_partial())
            state[-256:] = bytes([NAN]) * 256
            run.ctx.restore_partial(bytes(state), run.pos)
        return run

    with dirty() as run:
        assert np.isnan(run.feed(1)).all(), "the poison does not work"
    with dirty() as run, case.run() as fresh:
        run.ctx.clear()
        run.pos = 0
        logits, _ = feed(run, groups)
        want, _ = feed(fresh, groups)
    assert_equal(logits, want)


#
# the checks can fail
#


@pytest.fixture(scope="module")
def narrow(make: Callable[[str], Windowed]) -> tuple[Windowed, Logits, list[Step]]:
    """A pool smaller than the window, run past FAR."""
    case = make("pool_below_window")
    with case.run() as run:
        return case, *feed(run, case.groups())


Narrow = tuple[Windowed, Logits, list[Step]]


def assert_differs(logits: Logits, want: Logits) -> None:
    """Not equal bit for bit, though both are what a model says."""
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_equal(logits, want)


@pytest.mark.parametrize("n_swa", [699, 701])
def test_another_window_shows(narrow: Narrow, windowed_model: Callable[[int], Model], n_swa: int) -> None:
    case, logits, schedule = narrow
    with Windowed(windowed_model(n_swa), case.setting).stock() as stock:
        assert_differs(logits, stock.replay(schedule))


def test_rows_lost_from_the_window_show(narrow: Narrow) -> None:
    """What would come of a ring that shares its residency with the pool."""
    case, logits, schedule = narrow
    with case.stock() as stock:
        stock.ctx.attn_seq_rm = stock.ctx.seq_rm  # type: ignore[method-assign]
        assert_differs(logits, stock.replay(schedule))


def test_a_late_drop_shows(narrow: Narrow) -> None:
    case, logits, schedule = narrow
    last = max(i for i, step in enumerate(schedule) if step.drops)
    step, after = schedule[last : last + 2]
    late = [*schedule[:last], Step(step.n), Step(after.n, step.drops), *schedule[last + 2 :]]
    with case.stock() as stock:
        assert_differs(logits, stock.replay(late))


@pytest.mark.parametrize("n_ctx", [512, 768], ids=["window", "window_and_batch"])
def test_a_ring_clipped_by_the_pool_shows(narrow: Narrow, n_ctx: int) -> None:
    """With fewer cells than the window, or the window and a batch, it has no cell to overwrite."""
    case, _, schedule = narrow
    with case.stock(n_ctx) as stock:
        assert stock.ctx.kv_bytes().swa < case.ring * 256
        with pytest.raises(PoolError, match="no room in the KV cache"):
            stock.replay(schedule)
