"""The exact pass: a paned context computes what a stock cache does, whatever lies in its panes. Equal means equal bits."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import numpy as np
import pytest
from support import families, tiny
from support.changes import LIBRARY

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.oracles import N_THREADS, ON_GPU, TOKENS, Cache, Logits, Run, assert_equal, head, rows

from pyllama_kvflash.errors import Interrupted, NativeError, PoolError, UnsupportedError, UsageError
from pyllama_kvflash.native import LAST, NONE, Context, ExactContext, Layer, Model, PaneParams, Record
from pyllama_kvflash.native.lib import check, ffi, lib

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]

TABLE = Path(__file__).parent.parent / "docs" / "FAMILIES.md"

NO_FA, NOT_ROTATED = ", no FA", ", not rotated"
CHUNK, N_UBATCH, N_CTX = 64, 128, 1024
SIZES = (128, 100, 1, 37, 20)  # batches that begin and end at a chunk's border, and such that do not
N_ALL = sum(SIZES)  # ends within a chunk, and is wider than 256 cells
ALL_LAYERS = 99
GPU_PAD = 2 << 10  # bytes that a GPU adds to the last row of K, and of V


def cells() -> list[Any]:
    """The families and caches that docs/FAMILIES.md calls exact."""
    lines = [line.strip("|").split("|") for line in TABLE.read_text().splitlines() if line[:1] == "|"]
    (_, *caches), _, *found = [[cell.strip(" `") for cell in line] for line in lines]
    return [
        pytest.param(name, cache, id=f"{name}-{cache}")
        for name, *verdicts in found
        for cache, verdict in zip(caches, verdicts, strict=True)
        if verdict == "exact"
    ]


def cache_of(name: str) -> Cache:
    """A cache by its name in that table: the type of K, and of V if it is another one."""
    k, _, v = name.removesuffix(NO_FA).removesuffix(NOT_ROTATED).partition("/")
    return Cache(k, "off" if name.endswith(NO_FA) else "on", v or None)


class Pass:
    """A paned context, the records that it reads and writes, and a pool that tells their form. A context manager."""

    def __init__(self, model: Model, cache: Cache, n_pane: int = 1, **panes: int) -> None:
        self._parts = ExitStack()
        self.pool = self._parts.enter_context(Run(model, cache, pool=512, n_ctx=N_CTX, n_batch=N_UBATCH))
        self.ctx = self._parts.enter_context(
            ExactContext(
                model,
                PaneParams(n_pane=n_pane, **panes),
                n_ctx=N_CTX,
                n_batch=N_UBATCH,
                n_ubatch=N_UBATCH,
                n_threads=N_THREADS,
                type_k=cache.type,
                type_v=cache.type_v or cache.type,
                flash_attn=cache.flash_attn,
            )
        )
        self.info = self.pool.ctx.pool_info()
        self.layers = self.pool.ctx.layers()
        self.transposed = cache.flash_attn == "off"
        self.records: list[Record] = []
        # where records are to lie, the next one last; in memory of their own beyond these
        self.places: list[Record] = []
        self.pos = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._parts.close()

    @property
    def n_rows(self) -> float:
        """Positions copied so far, in both directions: rows of all layers."""
        return self.ctx.pane_info().n_bytes * CHUNK / (self.info.record_bytes - self.info.meta_bytes)

    def decode(self, n: int, outputs: int = LAST) -> Logits:
        """One batch, whose rows go to the records; its logits."""
        while len(self.records) * CHUNK < self.pos + n:
            self.records.append(self.places.pop() if self.places else np.empty(self.info.record_bytes, np.uint8))
            self.records[-1][:] = 0xEE
        logits = self.again(n, self.pos, self.records, outputs)
        self.pos += n
        return logits

    def again(self, n: int, pos: int, records: Sequence[Record], outputs: int = LAST) -> Logits:
        """A batch at some position, with these records."""
        try:
            self.ctx.decode_into(self.pool.ctx, TOKENS[pos : pos + n], pos, records, outputs)
        except UnsupportedError:
            if not ON_GPU:
                raise
            pytest.skip("the GPU has no kernel for this attention")
        if not outputs:
            return np.empty(0, np.float32)
        self.ctx.wait_whole()
        return self.pool.ctx.logits()

    def parts(self, record: Record, position: int) -> Iterator[Any]:
        """The bytes of a position in a record, to read or write: K and V of each layer."""
        for layer in self.layers:
            yield rows(record, layer, "k")[position]
            if layer.size_v and self.transposed:
                yield values(record, layer)[:, position]
            elif layer.size_v:
                yield rows(record, layer, "v")[position]


def values(record: Record, layer: Layer) -> Any:
    """V of a layer in a record where it is transposed, a view: a row for each channel."""
    channels = rows(record, layer, "v", transposed=True)
    return channels.reshape(len(channels), CHUNK, -1)


#
# every family, every cache
#


def check_cell(model: Model, cache: Cache, n_pane: int) -> Pass:
    """Logits of each batch are a stock cache's, and records a pool's in which everything is resident."""
    with (
        Run(model, cache, n_ctx=N_CTX, n_batch=N_UBATCH) as stock,
        Run(model, cache, pool=512, n_ctx=N_CTX, n_batch=N_UBATCH) as pool,
        Pass(model, cache, n_pane) as run,
    ):
        for n in SIZES:
            pool.decode(n)
            want, got = stock.feed(n), run.decode(n)
            assert_equal(got[None], want)
        assert ON_GPU or np.array_equal(got, pool.ctx.logits())  # of another width: a GPU sums in another order
        # on GPUs, rows beyond the first layer hang on sums over another width; what is read from them is a stock cache's
        n_same = run.layers[0].offs_k + run.layers[0].size_k if ON_GPU else run.info.record_bytes
        for chunk, record in enumerate(run.records[: N_ALL // CHUNK]):
            assert np.array_equal(record[:n_same], pool.read(chunk)[:n_same]), f"record {chunk} differs"
        begun, there = run.records[-1], pool.read(N_ALL // CHUNK)
        assert head(begun)["mask"] == (1 << N_ALL % CHUNK) - 1
        assert np.array_equal(begun[: run.info.meta_bytes], there[: run.info.meta_bytes])
        for i in range(N_ALL % CHUNK):
            parts = zip(run.parts(begun, i), run.parts(there, i), strict=True)
            for got_row, want_row in islice(parts, 1 if ON_GPU else None):
                assert np.array_equal(got_row, want_row), f"row {i} of the chunk that is being written differs"
        check_bytes(run, stock.ctx, n_pane)
    return run


def panes_of(layers: Sequence[Layer], n_pane: int) -> list[tuple[int, int]]:
    """Where each layer is: its device, and its pane there. Each device has n_pane panes, or one for each of its layers. If it has
    more layers, they take turns in its last two panes, but for the first ones, which have the other panes.
    """
    found, n_of, n_seen = [], Counter(layer.device for layer in layers), Counter[int]()
    for layer in layers:
        i, n_own = n_seen[layer.device], n_pane - min(n_pane, 2)
        alone = n_of[layer.device] <= n_pane or i < n_own
        found.append((layer.device, i if alone else n_own + (i - n_own) % min(n_pane, 2)))
        n_seen[layer.device] += 1
    return found


def check_bytes(run: Pass, stock: Context, n_pane: int) -> None:
    """Of each layer that shares its pane, all earlier rows were copied for each batch; new rows always go out."""
    info, panes = run.ctx.pane_info(), panes_of(run.layers, n_pane)
    assert info.n_pane == max(Counter(device for device, _ in set(panes)).values())
    n_all = len(set(panes))
    rows = stock.kv_bytes().attn * n_all // len(panes)
    assert rows <= info.bytes == run.ctx.kv_bytes().attn <= rows + ON_GPU * n_all * GPU_PAD
    # a layer that the graph leaves out has zeros; one that is read twice may be copied twice
    read = [i for i, layer in enumerate(run.layers) if np.any(rows_of(run.records[0], layer))]
    takers = Counter(panes[i] for i in read)
    each = [np.cumsum(SIZES).sum() if takers[panes[i]] > 1 else N_ALL for i in read]
    want = sum(n * (run.layers[i].size_k + run.layers[i].size_v) for i, n in zip(read, each, strict=True))
    assert info.n_bytes * CHUNK >= want
    if info.n_layer == len(read) or max(takers.values()) == 1:
        assert info.n_bytes * CHUNK == want


def rows_of(record: Record, layer: Layer) -> Record:
    """The bytes of a layer's K in a record."""
    return record[layer.offs_k : layer.offs_k + layer.size_k]


@pytest.mark.parametrize(("name", "cache"), cells())
def test_cell(tiny_model: Callable[[str], Model], name: str, cache: str) -> None:
    with patch.dict(os.environ, {"LLAMA_ATTN_ROT_DISABLE": str(int(cache.endswith(NOT_ROTATED)))}):
        check_cell(tiny_model(name), cache_of(cache), n_pane=1)


def test_cells_are_all_of_the_table() -> None:
    assert len(cells()) > 150
    assert {param.values[0] for param in cells()} >= {"qwen3", "qwen35", "gemma4", *families.MODELS}


@pytest.mark.parametrize("cache", ["f16", "q8_0", "f16, no FA"])
@pytest.mark.parametrize("n_pane", [2, 3, ALL_LAYERS])
def test_more_panes(tiny_model: Callable[[str], Model], n_pane: int, cache: str) -> None:
    """Of three layers of a device, two take turns in two panes; with three, nothing is read back."""
    check_cell(tiny_model("qwen3"), cache_of(cache), n_pane)


def test_panes_beyond_two_keep_their_layers(tmp_path: Path) -> None:
    """Of eight layers of a device, two have panes of their own, and six are streamed: taking turns in four, all would be."""
    path = tmp_path / "model.gguf"
    writer = tiny.Writer(path, "qwen3")
    tiny.qwen3(writer, n_layer=8)
    writer.close()
    with (
        Model.load(path) as model,
        Run(model, cache_of("f16"), n_ctx=N_CTX, n_batch=N_UBATCH) as stock,
        Pass(model, cache_of("f16"), n_pane=4) as run,
    ):
        for n in SIZES:
            assert_equal(run.decode(n)[None], stock.feed(n))
        check_bytes(run, stock.ctx, 4)
        if len({layer.device for layer in run.layers}) == 1:
            before = np.cumsum(SIZES)[:-1]
            assert run.n_rows == N_ALL + before.sum() * 6 / 8


@pytest.mark.parametrize("name", ["qwen35", "gemma4", "deepseek2"])
def test_nothing_is_streamed(tiny_model: Callable[[str], Model], name: str) -> None:
    check_cell(tiny_model(name), cache_of("f16"), ALL_LAYERS)


def test_batch_without_logits(tiny_model: Callable[[str], Model]) -> None:
    """It writes the same records; the next one's logits are the same."""
    cache = cache_of("f16")
    with Pass(tiny_model("qwen3"), cache) as run, Pass(tiny_model("qwen3"), cache) as silent:
        run.decode(100)
        silent.decode(100, NONE)
        with pytest.raises(UsageError, match="no logits"):
            silent.pool.ctx.logits()
        assert np.array_equal(run.decode(50), silent.decode(50))
        assert np.array_equal(run.records[0], silent.records[0])


@pytest.mark.parametrize("order", ["0123abcd", "3210dcba", "a0b1c2d3", "0a1b2c3d", "01ab23cd", "0ab12c3d", "02ac13bd"])
def test_records_in_two_places(tiny_model: Callable[[str], Model], order: str) -> None:
    """Runs of records are copied as one, but none spans memory that was pinned at different times: CUDA refuses that."""
    model = tiny_model("qwen3")
    with Run(model, n_ctx=N_CTX, n_batch=N_UBATCH) as stock, Pass(model, cache_of("f16")) as run:
        size = run.info.record_bytes
        lower, upper = sorted(
            (run.pool.ctx.host_buffer(4 * size) for _ in range(2)), key=lambda place: place.ctypes.data
        )
        named = dict(zip("0123abcd", [*lower.reshape(4, size), *upper.reshape(4, size)], strict=True))
        run.places = [named[c] for c in reversed(order)]
        for n in (128, 100, 128, 128):
            assert_equal(run.decode(n)[None], stock.feed(n))
        assert not run.places


@pytest.mark.parametrize("n_pane", [1, ALL_LAYERS])
def test_going_back(tiny_model: Callable[[str], Model], n_pane: int) -> None:
    """A batch may begin before the end of the last one: what came after is forgotten, in the panes, too."""
    model, tokens = tiny_model("qwen3"), TOKENS[::-1].copy()
    with Run(model, n_ctx=N_CTX, n_batch=N_UBATCH) as stock, Pass(model, cache_of("f16"), n_pane) as run:
        for n in (128, 100):
            assert_equal(run.decode(n)[None], stock.feed(n))
        stock.ctx.seq_rm(60)
        stock.pos, stock.tokens = 60, tokens
        for n in (50, 100):
            pos = stock.pos
            want = stock.feed(n)
            records = run.records[: -(-(pos + n) // CHUNK)]
            run.ctx.decode_into(run.pool.ctx, tokens[pos : pos + n], pos, records)
            run.ctx.wait_whole()
            assert_equal(run.pool.ctx.logits()[None], want)


@pytest.mark.parametrize("n_pane", [1, 2, ALL_LAYERS])
def test_batches_that_nobody_waits_for(tiny_model: Callable[[str], Model], n_pane: int) -> None:
    """On GPUs several are under way at once: their rows, and the last one's logits, are those of one after the other."""
    n, n_batch = 64, 9
    with (
        Pass(tiny_model("qwen3"), cache_of("f16"), n_pane) as one,
        Pass(tiny_model("qwen3"), cache_of("f16"), n_pane) as run,
    ):
        run.places = [run.pool.ctx.host_buffer(run.info.record_bytes) for _ in range(n * n_batch // CHUNK)]
        for i in range(n_batch):
            want, got = one.decode(n), run.decode(n, LAST if i == n_batch - 1 else NONE)
        assert run.ctx.wait_whole() == n * n_batch
        assert_equal(got[None], want[None])
        for chunk, (mine, other) in enumerate(zip(run.records, one.records, strict=True)):
            np.testing.assert_array_equal(mine, other, err_msg=f"record {chunk}")


#
# shown able to fail
#

ABLE = pytest.mark.parametrize(
    ("name", "cache"),
    [("qwen3", "f16"), ("qwen3", "f16, no FA"), ("qwen3", "q8_0"), ("gemma4", "f16"), ("deepseek2", "f16")],
)
N_READ, N_NEXT = 300, 40  # ends within a chunk


def read(run: Pass, n: int = N_READ) -> None:
    while run.pos < n:
        run.decode(min(100, n - run.pos))


class Next(NamedTuple):
    """The batch after what was read, with the records as they are or changed: always the same tokens at the same place."""

    run: Pass
    state: bytes  # before that batch

    @classmethod
    def of(cls, run: Pass) -> Self:
        read(run)
        return cls(run, run.ctx.save_partial())

    def logits(self, change: Callable[[list[Record]], object] = lambda _: None) -> Logits:
        """Of its last token; the change is made to copies."""
        records = [record.copy() for record in self.run.records]
        while len(records) * CHUNK < N_READ + N_NEXT:
            records.append(np.zeros(self.run.info.record_bytes, np.uint8))
        change(records)
        if self.state:
            self.run.ctx.restore_partial(self.state, N_READ)
        return self.run.again(N_NEXT, N_READ, records)


def assert_seen(run: Pass, change: Callable[[list[Record]], None]) -> None:
    """Changed records make other logits, and the records as they were the same ones again."""
    following = Next.of(run)
    want = following.logits()
    for changed in (change, None):
        if len({layer.device for layer in run.layers}) > 1:  # one that is alone on its device has a pane of its own
            run.ctx.attn_seq_rm(0, -1)
        got = following.logits(changed) if changed else following.logits()
        assert np.array_equal(got, want) == (changed is None)


@ABLE
def test_swapped_layers_are_seen(tiny_model: Callable[[str], Model], name: str, cache: str) -> None:
    """The rows of two layers, in one chunk."""

    def swap(records: list[Record]) -> None:
        a, b = (slice(layer.offs_k, layer.offs_k + layer.size_k) for layer in run.layers[:2])
        records[1][a], records[1][b] = records[1][b].copy(), records[1][a].copy()

    with Pass(tiny_model(name), cache_of(cache)) as run:
        assert_seen(run, swap)


@ABLE
@pytest.mark.parametrize("position", [0, 63, 150, N_READ - 1])
def test_a_row_too_few_is_seen(tiny_model: Callable[[str], Model], name: str, cache: str, position: int) -> None:
    def zero(records: list[Record]) -> None:
        for row in run.parts(records[position // CHUNK], position % CHUNK):
            row[:] = 0

    with Pass(tiny_model(name), cache_of(cache)) as run:
        assert_seen(run, zero)


@ABLE
def test_stale_pane(tiny_model: Callable[[str], Model], name: str, cache: str) -> None:
    """A pane of a layer's own is not read again. What changes must be announced, from its position on."""
    position = 150

    def change(records: list[Record]) -> None:
        for row in run.parts(records[position // CHUNK], position % CHUNK):
            row[:] = 0

    with Pass(tiny_model(name), cache_of(cache), ALL_LAYERS) as run:
        following = Next.of(run)
        want = following.logits()
        assert np.array_equal(following.logits(change), want)
        run.ctx.attn_seq_rm(position + 1, -1)
        assert np.array_equal(following.logits(change), want)
        run.ctx.attn_seq_rm(position, -1)
        assert not np.array_equal(following.logits(change), want)
        run.ctx.attn_seq_rm(position, -1)
        assert np.array_equal(following.logits(), want)


def test_rows_of_later_positions_are_not_read(tiny_model: Callable[[str], Model]) -> None:
    """Nor what a record has before its rows are written."""

    def scribble(records: list[Record]) -> None:
        records[-1][run.info.meta_bytes :] = 0x3C
        for i in range(N_READ % CHUNK, CHUNK):
            for row in run.parts(records[N_READ // CHUNK], i):
                row[:] = 0x3C

    with Pass(tiny_model("qwen3"), cache_of("f16")) as run:
        following = Next.of(run)
        assert np.array_equal(following.logits(scribble), following.logits())


#
# several sequences
#


def test_another_sequence_takes_the_panes(tiny_model: Callable[[str], Model]) -> None:
    """The panes are of one sequence; the rows of the next one are read from its records."""
    model, tokens = tiny_model("qwen3"), TOKENS[::-1].copy()
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH, "n_threads": N_THREADS}
    with (
        Run(model, n_ctx=N_CTX, n_batch=N_UBATCH) as one,
        Run(model, n_ctx=N_CTX, n_batch=N_UBATCH, tokens=tokens) as other,
        Run(model, pool=512, n_ctx=N_CTX, n_batch=N_UBATCH, n_seq=2) as pool,
        ExactContext(model, PaneParams(n_pane=ALL_LAYERS), n_seq=2, flash_attn="on", **options) as ctx,
    ):
        size = pool.ctx.pool_info().record_bytes
        kept: list[list[Record]] = [[np.zeros(size, np.uint8) for _ in range(8)] for _ in range(2)]
        for pos in (0, 100, 200, 300):
            for seq, run in enumerate((one, other)):
                own, n_record = pool.ctx.sequence(seq), -(-(pos + 100) // CHUNK)
                ctx.decode_into(own, run.tokens[pos : pos + 100], pos, kept[seq][:n_record])
                assert_equal(own.logits()[None], run.feed(100))
        assert ctx.pane_info().n_bytes * CHUNK // (size - pool.ctx.pool_info().meta_bytes) == 2 * (
            100 + 200 + 300 + 400
        )


#
# what goes wrong
#


def test_only_exact_batches(tiny_model: Callable[[str], Model]) -> None:
    with Pass(tiny_model("qwen3"), cache_of("f16")) as run:
        with pytest.raises(UsageError):
            run.ctx.decode(TOKENS[:10], 0)
        with pytest.raises(UsageError):
            run.ctx.drop(0)
        with pytest.raises(UsageError):
            run.ctx.pool_info()
        run.decode(10)


RECORDS, FITS = "a record of this pool for each chunk", "does not fit the context"


def test_batches_that_are_refused(tiny_model: Callable[[str], Model]) -> None:
    """In words, and the next one is as if nothing had been asked."""
    with (
        Pass(tiny_model("qwen3"), cache_of("f16"), ALL_LAYERS) as run,
        Run(tiny_model("qwen3"), n_ctx=N_CTX) as stock,
    ):
        run.decode(100)
        for pos, n_record, message in (
            *((pos, n, RECORDS) for pos, n in ((0, 0), (0, 2), (64, 1), (200, 3))),
            *((pos, 17, FITS) for pos in (-1, N_CTX, 1 << 30, (1 << 31) - 1)),
        ):
            records = [np.zeros(run.info.record_bytes, np.uint8) for _ in range(n_record)]
            for n in (1, 5):
                with pytest.raises(UsageError, match=message):
                    run.ctx.decode_into(run.pool.ctx, TOKENS[:n], pos, records)
        with pytest.raises(UsageError, match=RECORDS):
            run.ctx.decode_into(run.pool.ctx, TOKENS[:10], 100, [run.records[0], run.records[1][:-1]])
        place = run.ctx.handle, run.pool.ctx.handle, 0, 100, ffi.from_buffer("int32_t[]", TOKENS), 10, LAST
        missing = ffi.new("void *[]", [ffi.from_buffer(run.records[0]), ffi.NULL])
        with pytest.raises(UsageError, match=RECORDS):
            check(lib.kvf_decode_exact(*place, missing, 2, len(run.records[0])))
        for n in (0, N_UBATCH + 1):
            with pytest.raises(UsageError, match="1 to n_ubatch tokens"):
                run.ctx.decode_into(run.pool.ctx, TOKENS[:n], 0, run.records)
        with pytest.raises(UsageError, match="pool must be a pooled context"):
            run.ctx.decode_into(stock.ctx, TOKENS[:10], 0, run.records)
        got = run.decode(30)
    with Pass(tiny_model("qwen3"), cache_of("f16")) as run:
        run.decode(100)
        assert np.array_equal(run.decode(30), got)


@pytest.mark.parametrize(("name", "cache"), [("qwen3", "q8_0"), ("qwen35", "f16"), ("gemma4", "f16")])
def test_pool_of_another_form(tiny_model: Callable[[str], Model], name: str, cache: str) -> None:
    """Its records have other rows."""
    with (
        Pass(tiny_model("qwen3"), cache_of("f16")) as run,
        Run(tiny_model(name), cache_of(cache), pool=512, n_ctx=N_CTX, n_batch=N_UBATCH) as other,
    ):
        records = [np.zeros(other.ctx.pool_info().record_bytes, np.uint8)]
        with pytest.raises((UsageError, NativeError), match="another model's, or has other cache types"):
            run.ctx.decode_into(other.ctx, TOKENS[:10], 0, records)
        run.decode(10)


def test_mass_that_is_not_kept(tiny_model: Callable[[str], Model]) -> None:
    with Pass(tiny_model("qwen3"), cache_of("f16")) as run:
        run.decode(10)
        with pytest.raises(PoolError, match="no attention: nothing was decoded, or mass_piece is 0"):
            run.ctx.mass(0, 4)
    with Pass(tiny_model("qwen3"), cache_of("f16"), q_tap=4, mass_piece=16) as run:
        run.decode(10)
        mass = run.ctx.mass(3, 4)
        assert np.allclose(mass.sum(1), [layer.n_head for layer in run.layers], atol=1e-3)
        with pytest.raises(UsageError, match="back or n_piece is too large"):
            run.ctx.mass(4, 4)
        with pytest.raises(UsageError, match="back or n_piece is too large"):
            run.ctx.mass(0, 1 << 20)


@pytest.fixture
def stop() -> Iterator[Callable[[], None]]:
    """What Ctrl-C calls within interruptible(); undone after the test."""
    yield lambda: lib.kvf_interrupt(True)
    lib.kvf_interrupt(False)


@pytest.mark.parametrize("n_pane", [1, ALL_LAYERS])
def test_interrupted_batch(tiny_model: Callable[[str], Model], stop: Callable[[], None], n_pane: int) -> None:
    with Pass(tiny_model("qwen3"), cache_of("f16"), n_pane) as run:
        following = Next.of(run)
        want = following.logits()
        stop()
        with pytest.raises(Interrupted):
            following.logits()
        lib.kvf_interrupt(False)
        assert np.array_equal(following.logits(), want)
