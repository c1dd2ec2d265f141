"""Traces read back, and the pictures made of them. The runs are played, without a model."""

import json
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.changes import BENCHES

from kvflash_bench.plot import render, residency_figure
from kvflash_bench.trace import MAX_MOMENTS, read_trace
from pyllama_kvflash.errors import OutputError, UsageError

CHUNK = 64
Lines = list[dict[str, Any]]


class Run:
    """Plays a run as the engine does: select, make room, write, tell. What is true is kept beside what is told."""

    def __init__(self, n_pool: int | None = 1024, n_ctx: int = 65536, *, scored: bool = True, model: Any = "m") -> None:
        self.n_blocks = None if n_pool is None else n_pool // CHUNK
        self.scored = scored and n_pool is not None
        self.resident: list[int] = []  # the longest there first
        self.n_tokens = 0
        self.rng = np.random.default_rng(1)
        self.truth: list[tuple[int, list[int]]] = []
        policy = "qk" if scored else "lru"
        meta = {"model": model, "policy": policy, "n_ctx": n_ctx, "n_pool": n_pool, "chunk": CHUNK, "tau": 64}
        self.lines: Lines = [{"event": "start", **meta}]

    @property
    def n_chunks(self) -> int:
        return -(-self.n_tokens // CHUNK)

    def evictable(self) -> list[int]:
        return [c for c in self.resident if 0 < c < self.n_chunks - 4]

    def write(self, n: int) -> None:
        new = range(self.n_chunks, -(-(self.n_tokens + n) // CHUNK))
        short = 0 if self.n_blocks is None else len(self.resident) + len(new) - self.n_blocks
        if short > 0:
            drops = self.evictable()[:short]
            assert len(drops) == short
            self.resident = [c for c in self.resident if c not in drops]
            self.lines.append({"event": "paged", "pos": self.n_tokens, "drops": drops, "page_ins": []})
        self.resident += new
        self.n_tokens += n

    def remember(self) -> None:
        there = set(self.resident)
        self.truth.append((self.n_tokens, [int(c in there) for c in range(self.n_chunks)]))

    def reselect(self, reason: str) -> None:
        """Three chunks that are out, for three that are not."""
        evictable = self.evictable()
        out = sorted(set(range(self.n_chunks)) - set(self.resident))
        n = min(3, len(out), len(evictable))
        drops = [int(c) for c in self.rng.choice(evictable, n, replace=False)] if n else []
        page_ins = [int(c) for c in self.rng.choice(out, n, replace=False)] if n else []
        candidates = set(evictable) | set(out)
        scores = [float(self.rng.normal()) if c in candidates else None for c in range(self.n_chunks)]
        self.resident = [c for c in self.resident if c not in drops] + page_ins
        event = {"event": "reselect", "pos": self.n_tokens, "reason": reason, "scores": scores, "drops": drops}
        self.lines.append({**event, "page_ins": page_ins, "score_s": 0.001, "apply_s": 0.0004})

    def prefill(self, total: int, batch: int = 256) -> "Run":
        for begin in range(0, total, batch):
            done = min(begin + batch, total)
            self.write(done - begin)
            self.lines.append({"event": "prefill", "done": done, "total": total, "seconds": 0.1})
            self.remember()
        if self.scored:
            self.reselect("question")
        return self

    def decode(self, n: int, tau: int = 64) -> "Run":
        """N tokens, the last of which is not decoded."""
        for i in range(n):
            self.lines.append({"event": "token", "id": 17, "text": " the"})
            if i < n - 1:
                if self.scored and i % tau == tau - 1:
                    self.reselect("decode")
                self.write(1)
                self.remember()
        self.lines.append({"event": "done", "reason": "length", "text": "", "stats": {}})
        return self

    def sum(self, name: str) -> int:
        return sum(len(line.get(name, ())) for line in self.lines)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Lines], Path]:
    def write(lines: Lines, name: str = "run.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    return write


#
# reading
#


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("batch", [256, 100])
def test_residency_is_what_it_was(save: Callable[[Lines], Path], batch: int, *, scored: bool) -> None:
    run = Run(scored=scored).prefill(4000, batch).decode(200)
    trace = read_trace(save(run.lines))
    assert trace.positions.tolist() == [pos for pos, _ in run.truth]
    assert trace.residency.shape[1] == run.n_chunks
    for row, (_, state) in zip(trace.residency.tolist(), run.truth, strict=True):
        assert row == state + [-1] * (len(row) - len(state))
    assert (trace.n_prompt, trace.chunk, trace.reason) == (4000, CHUNK, "length")
    assert (int(trace.n_in.sum()), int(trace.n_out.sum())) == (run.sum("page_ins"), run.sum("drops"))
    assert trace.n_out.sum() > 0
    assert (trace.n_in.sum() > 0) == scored


def test_traffic_belongs_to_the_moment_that_it_was_for(save: Callable[[Lines], Path]) -> None:
    trace = read_trace(save(Run(scored=False).prefill(2048).lines))
    assert trace.n_out.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    trace = read_trace(save(Run().prefill(2048).lines))
    came = ((trace.residency[1:] == 1) & (trace.residency[:-1] == 0)).sum(axis=1)
    assert (came <= trace.n_in[1:]).all()
    assert came.sum() > 0


def test_scores_and_the_choice_that_a_moment_shows(save: Callable[[Lines], Path]) -> None:
    run = Run().prefill(4000).decode(200)
    trace = read_trace(save(run.lines))
    told = [line for line in run.lines if line["event"] == "reselect"]
    assert trace.reselect_pos.tolist() == [line["pos"] for line in told]
    for row, line in zip(trace.scores, told, strict=True):
        want = np.array(line["scores"], np.float32)
        np.testing.assert_array_equal(row[: len(want)], want)
        assert np.isnan(row[len(want) :]).all()
    assert trace.last_reselect[0] == -1
    for pos, last in zip(trace.positions[1:], trace.last_reselect[1:], strict=True):
        assert last == np.searchsorted(trace.reselect_pos, pos) - 1  # the latest that was before it


@pytest.mark.parametrize("n_lines", range(2, 60, 3))
def test_a_cut_off_trace_is_read_as_far_as_it_goes(save: Callable[[Lines], Path], n_lines: int) -> None:
    run = Run().prefill(4000).decode(70)
    path = save(run.lines[:n_lines])
    whole = read_trace(path)
    assert whole.reason is None
    with path.open("ab") as file:
        file.write(json.dumps({"event": "token", "id": 1, "text": "é"}, ensure_ascii=False).encode()[:-3])
    cut = read_trace(path)
    np.testing.assert_array_equal(cut.residency, whole.residency)
    np.testing.assert_array_equal(cut.positions, whole.positions)


def test_what_moved_last_is_shown_though_nothing_was_computed_after_it(save: Callable[[Lines], Path]) -> None:
    run = Run().prefill(4000)
    run.remember()
    trace = read_trace(save(run.lines))
    assert (int(trace.positions[-1]), trace.residency[-1].tolist()) == run.truth[-1]
    assert trace.n_in[-1] == 3


def test_a_full_cache(save: Callable[[Lines], Path]) -> None:
    trace = read_trace(save(Run(None).prefill(1000).decode(30).lines))
    assert trace.residency[-1].tolist() == [1] * 17
    assert set(np.unique(trace.residency)) == {-1, 1}
    assert trace.scores.shape == (0, 17)
    assert render(trace, "png")


def test_a_long_run_is_thinned_and_keeps_its_ends(save: Callable[[Lines], Path]) -> None:
    run = Run(scored=False).prefill(70_000, 32).decode(3 * MAX_MOMENTS + 7)
    run.lines[0]["n_ctx"] = 131_072
    trace = read_trace(save(run.lines))
    assert MAX_MOMENTS < len(trace.positions) <= 2 * MAX_MOMENTS + 2
    truth = dict(run.truth)
    assert {run.truth[0][0], 70_000, run.truth[-1][0]} <= set(trace.positions.tolist())
    for pos, row in zip(trace.positions.tolist(), trace.residency, strict=True):
        assert row[row >= 0].tolist() == truth[pos]
    assert int(trace.n_out.sum()) == run.sum("drops")


@pytest.mark.nightly(BENCHES)
def test_a_context_of_256k_in_time(save: Callable[[Lines], Path]) -> None:
    run = Run(16_384, 262_144).prefill(250_000, 1024).decode(2000)
    path = save(run.lines)
    begin = time.perf_counter()
    trace = read_trace(path)
    assert trace.residency.shape[1] > 3900
    assert render(trace, "png")
    assert time.perf_counter() - begin < 20  # two, on an idle machine


def test_events_that_are_not_drawn_are_passed_over(save: Callable[[Lines], Path]) -> None:
    run = Run().prefill(1000)
    want = read_trace(save(run.lines))
    found = read_trace(save([*run.lines[:3], {"event": "speculated", "n": 3}, *run.lines[3:]]))
    np.testing.assert_array_equal(found.residency, want.residency)


def test_a_score_that_is_no_number_is_none(save: Callable[[Lines], Path]) -> None:
    run = Run(4096).prefill(1000)
    scores = [None, float("nan"), float("inf"), 1e300, -2.5]
    run.lines.append({"event": "reselect", "pos": 1000, "scores": scores, "drops": [], "page_ins": []})
    trace = read_trace(save(run.lines))
    np.testing.assert_array_equal(trace.scores[-1][:5], [np.nan] * 4 + [-2.5])
    assert render(trace, "png")


START = {"event": "start", "model": "m", "policy": "qk", "n_ctx": 4096, "n_pool": 1024, "chunk": 64, "tau": 64}
PREFILL = {"event": "prefill", "done": 512, "total": 1000, "seconds": 0.2}
CHECKED = {"event": "checked", "pos": 512, "n": 16, "agreed": 16, "kld": 0.1, "seconds": 0.2}
MOVE = {"event": "paged", "pos": 512, "drops": [], "page_ins": []}
LAYERS: dict[str, Any] = {"event": "layers", "pos": 512, "n_layer": 4, "layers": [4, 0, 0.25, 0, 0, 3, 4, 4]}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("nonsense", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", "is not an event"),
        ('{"pos": 3}', "is not an event"),
        (json.dumps(START), "starts another run"),
        (json.dumps({**PREFILL, "done": 4097}), '4097 for "done"'),
        (json.dumps({**PREFILL, "total": "many"}), '"many" for "total"'),
        (json.dumps({**PREFILL, "done": True}), 'true for "done"'),
        (json.dumps({**MOVE, "pos": None}), 'null for "pos"'),
        (json.dumps({**MOVE, "drops": [8]}), '[8] for "drops", not chunks below 8'),
        (json.dumps({**MOVE, "drops": [-1]}), '[-1] for "drops"'),
        (json.dumps({**MOVE, "page_ins": 3}), '3 for "page_ins"'),
        (json.dumps({**CHECKED, "n": 0}), '0 for "n"'),
        (json.dumps({**CHECKED, "agreed": 17}), '17 for "agreed"'),
        (json.dumps({**CHECKED, "pos": 5000}), '5000 for "pos"'),
        (json.dumps({**LAYERS, "pos": 4097}), '4097 for "pos"'),
        (json.dumps({**LAYERS, "n_layer": 0}), '0 for "n_layer"'),
        (json.dumps({**LAYERS, "layers": [4] * 7}), 'no list of 8 numbers from 0 to 4 for "layers"'),
        (json.dumps({**LAYERS, "layers": [4.25] * 8}), 'no list of 8 numbers from 0 to 4 for "layers"'),
        (json.dumps({**LAYERS, "layers": [None] * 8}), 'no list of 8 numbers from 0 to 4 for "layers"'),
        (json.dumps({**LAYERS, "layers": "all"}), 'no list of numbers for "layers"'),
        (json.dumps({**MOVE, "event": "reselect"}), '"scores"'),
        (json.dumps({**MOVE, "event": "reselect", "scores": [[1.0]]}), '"scores"'),
        (json.dumps({**MOVE, "event": "reselect", "scores": [10**400]}), '"scores"'),
        (json.dumps({**MOVE, "event": "reselect", "scores": [0.0] * 65}), '"scores"'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, says: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([json.dumps(START), json.dumps(PREFILL), bad, json.dumps(PREFILL)]) + "\n")
    with pytest.raises(UsageError) as err:
        read_trace(path)
    assert f"line 3 of {path}" in str(err.value)
    assert says in str(err.value)
    assert "kvflash run --trace" in str(err.value)
    assert "\n" not in str(err.value)


def test_a_last_line_that_is_json_and_no_event_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(f"{json.dumps(START)}\n{json.dumps(PREFILL)}\n7\n")
    with pytest.raises(UsageError, match=r"line 3 of .* is not an event"):
        read_trace(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"GGUF\x03\x00\x00\x00\xff\xfe" * 20_000, "is not a trace, its first line is not JSON"),
        (json.dumps(PREFILL).encode(), 'begins with "prefill"'),
        (json.dumps({**START, "chunk": 0}).encode(), '0 for "chunk"'),
        (json.dumps({**START, "n_pool": "big"}).encode(), '"big" for "n_pool"'),
        (json.dumps(START).encode(), "ends before the first batch"),
        ((json.dumps(START) + "\n" + json.dumps({"event": "token", "id": 1, "text": ""})).encode(), "ends before"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError) as err:
        read_trace(path)
    assert says in str(err.value)
    assert str(path) in str(err.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"there is no trace .*missing\.jsonl: record one with kvflash run --trace FILE"
    ):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match="is a directory"):
        read_trace(tmp_path)


#
# pictures
#


@pytest.fixture
def real(save: Callable[[Lines], Path]) -> Path:
    return save(Run(2048, model="Qwen3-4B-Q4_K_M.gguf").prefill(30_000, 512).decode(300).lines)


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def words(path: Path) -> list[str]:
    """Everything that is written in the figure, apart from ticks."""
    fig = residency_figure(read_trace(path))
    texts = [*fig.texts, *(t for legend in fig.legends for t in legend.get_texts())]
    for ax in fig.axes:
        texts += [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label]
    return [t.get_text() for t in texts]


def test_the_figure_says_what_was_run(real: Path) -> None:
    found = words(real)
    trace = read_trace(real)
    assert "Qwen3-4B-Q4_K_M, policy qk, pool of 2,048 tokens" in found
    resident, chunks = (trace.residency[-1] == 1).sum(), trace.residency.shape[1]
    assert any(f"{resident} of {chunks} chunks resident ({100 * resident / chunks:.1f} %)" in t for t in found)
    assert "prompt: 30,000 tokens" in found
    assert "299 decoded, drawn 28 times wider" in found
    assert "brought back" in found
    assert not any("cut off" in t for t in found)


def test_without_scores_there_is_nothing_beside_it(save: Callable[[Lines], Path], real: Path) -> None:
    lru_run = save(Run(scored=False).prefill(4000).lines, "lru.jsonl")
    assert len(residency_figure(read_trace(lru_run)).axes) == 2
    assert len(residency_figure(read_trace(real)).axes) > 2
    assert any("cut off" in t for t in words(lru_run))


@pytest.mark.nightly(BENCHES)
def test_agreement_is_drawn_where_it_was_measured(save: Callable[[Lines], Path]) -> None:
    run = Run().prefill(4000).decode(120)
    plain_axes = len(residency_figure(read_trace(save(run.lines))).axes)
    for pos, agreed in ((4016, 16), (4060, 12), (4100, 13)):
        run.lines.insert(-1, {**CHECKED, "pos": pos, "agreed": agreed})
    path = save(run.lines)
    trace = read_trace(path)
    assert trace.check_pos.tolist() == [4016, 4060, 4100]
    assert trace.checks.tolist() == [[16, 16], [16, 12], [16, 13]]
    fig = residency_figure(trace)
    assert len(fig.axes) == plain_axes + 1
    lines = [line for ax in fig.axes for line in ax.get_lines() if line.get_marker() == "o"]
    assert [line.get_ydata().tolist() for line in lines] == [[100.0, 75.0, 81.25]]
    assert any("85.4 % of 48 tokens checked are the full cache's" in t for t in words(path))
    assert render(trace, "png")


def test_colours_are_those_of_the_state(save: Callable[[Lines], Path]) -> None:
    trace = read_trace(save(Run(scored=False).prefill(4096).lines))
    image = np.asarray(residency_figure(trace).axes[0].images[0].get_array())
    last = image[:, -1][:: len(image) // 64][:64]  # a row for each chunk
    assert [tuple(c) == (228, 228, 228) for c in last] == [s == 0 for s in trace.residency[-1]]
    assert (image[-1, 0] == 255).all()  # the last chunk at the beginning: not written


def by_layer() -> Run:
    """A run of which each of 24 layers chose its own chunks, as is known before the last token."""
    run = Run(1024, scored=False, model="a-very-long-name-of-a-model-" * 5).prefill(4096).decode(40)
    layers = [24, 6, 0, 0.25, *[0] * 56, *[24] * 5]
    run.lines.insert(-2, {"event": "layers", "pos": 4134, "n_layer": 24, "layers": layers})
    return run


def test_layers_that_chose_are_shares(save: Callable[[Lines], Path]) -> None:
    """They replace what the moves before told, and count from the moment that they are for."""
    trace = read_trace(save(by_layer().lines))
    share = [1, 0.25, 0, np.float32(0.25 / 24), *[0] * 56, *[1] * 5]
    assert trace.residency[-1].tolist() == share
    assert set(np.unique(trace.residency[:-1])) == {-1, 0, 1}
    assert trace.positions[-1] == 4135
    run = Run(scored=False).prefill(512)
    run.lines += [LAYERS, {**MOVE, "drops": [0], "page_ins": [1]}]
    assert read_trace(save(run.lines)).residency[-1].tolist() == [0, 1, 0.0625, 0, 0, 0.75, 1, 1]


def test_chunks_are_shaded_by_the_layers_that_hold_them(save: Callable[[Lines], Path]) -> None:
    """By the root of the share: a quarter of the layers is half of the way from grey."""
    path = save(by_layer().lines)
    fig = residency_figure(read_trace(path))
    image = np.asarray(fig.axes[0].images[0].get_array()).astype(int)
    rows = image[:, -1][:: len(image) // 65][:65]
    grey, full = np.array([228, 228, 228]), np.array([224, 112, 42])
    assert (rows[2] == grey).all()
    assert np.abs(rows[0] - full).max() <= 1  # colours are cut off to bytes
    assert np.abs(rows[1] - (grey + full) / 2).max() <= 1
    assert np.abs(rows[3] - (grey + np.sqrt(0.25 / 24) * (full - grey))).max() <= 1
    found = words(path)
    assert any("in the end 6 of 65 chunks in all layers; each layer holds 9.6 % of the text; " in t for t in found)
    assert {"in all layers", "in a quarter of them", "out, in host memory"} <= set(found)
    assert "resident" not in found
    assert boxes_overlap(fig) == []


def boxes_overlap(fig: Any) -> list[tuple[str, str]]:
    """Texts that lie over each other, all ticks included."""
    fig.draw_without_rendering()
    renderer = fig.canvas.get_renderer()
    texts = [*fig.texts, *fig.legends[0].get_texts()]
    for ax in fig.axes:
        texts += [*ax.texts, ax.title]
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [t.label1 for t in axis.get_major_ticks() if t.label1.get_visible() and low <= t.get_loc() <= high]
            texts.append(axis.label)
    shown = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text() and t.get_visible()]
    for text, box in shown:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= fig.bbox.x1, text
        assert box.y1 <= fig.bbox.y1, text
    return [(a, b) for i, (a, x) in enumerate(shown) for b, y in shown[i + 1 :] if x.overlaps(y)]


@pytest.mark.nightly(BENCHES)
@pytest.mark.parametrize(
    ("n_prompt", "n_decode", "n_pool"),
    [(30_000, 300, 2048), (250_000, 5000, 16384), (100, 5000, 2048), (4000, 4000, 1024), (700, 1, 1024), (1, 2, 1024)],
)
@pytest.mark.parametrize("scored", [True, False])
def test_nothing_is_written_over_something_else(
    save: Callable[[Lines], Path], n_prompt: int, n_decode: int, n_pool: int, *, scored: bool
) -> None:
    model = "a-very-long-name-of-a-model-" * 5
    run = Run(n_pool, 262_144, scored=scored, model=model).prefill(n_prompt, 512).decode(n_decode)
    assert boxes_overlap(residency_figure(read_trace(save(run.lines)))) == []


@pytest.mark.sampled(BENCHES)
@pytest.mark.parametrize("name", ["$x_{", "\\frac{$$}", "模型", "two\nlines\x00", "", None, ["x"]])
def test_any_model_name_can_be_shown(save: Callable[[Lines], Path], name: Any) -> None:
    run = Run(model=name).prefill(1000)
    assert png_size(render(read_trace(save(run.lines)), "png")) == (1400, 900)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, save: Callable[[Lines], Path]) -> None:
    trace = read_trace(save(Run().prefill(1000).lines))
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"plots need matplotlib: pip install matplotlib"):
        residency_figure(trace)


#
# the command
#


@pytest.fixture
def invoke() -> Callable[..., Result]:
    pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
    from pyllama_kvflash.cli import main  # noqa: PLC0415 (needs the compiled part)

    def call(*args: str | Path) -> Result:
        res = CliRunner().invoke(main, ["plot", *map(str, args)])
        assert res.exception is None or isinstance(res.exception, SystemExit), repr(res.exception)
        return res

    return call


@pytest.mark.native
def test_plot_writes_beside_the_trace(invoke: Callable[..., Result], real: Path) -> None:
    res = invoke(real)
    target = real.with_suffix(".png")
    assert (res.exit_code, res.stdout) == (0, "")
    assert res.stderr.replace("\n", "") == f"kvflash: wrote {target}"
    assert png_size(target.read_bytes()) == (1400, 900)


@pytest.mark.sampled(BENCHES)
@pytest.mark.native
@pytest.mark.parametrize(("name", "magic"), [("x.svg", b"<?xml"), ("x.pdf", b"%PDF"), ("x.PNG", b"\x89PNG")])
def test_plot_writes_where_it_is_told(invoke: Callable[..., Result], real: Path, name: str, magic: bytes) -> None:
    target = real.parent / name
    assert invoke(real, "-o", target).exit_code == 0
    assert target.read_bytes().startswith(magic)
    assert not real.with_suffix(".png").exists()


@pytest.mark.native
@pytest.mark.parametrize("name", ["x.jpg", "x", "x.png.txt", "run.jsonl"])
def test_plot_names_the_formats(invoke: Callable[..., Result], real: Path, name: str) -> None:
    before = real.read_bytes()
    res = invoke(real, "-o", real.parent / name)
    assert res.exit_code == 2
    assert ".png, .svg, .pdf" in res.stderr
    assert real.read_bytes() == before


@pytest.mark.native
def test_plot_does_not_write_over_the_trace(invoke: Callable[..., Result], save: Callable[[Lines], Path]) -> None:
    path = save(Run().prefill(1000).lines, "trace.png")
    link = path.with_name("link.png")
    link.symlink_to(path)
    before = path.read_bytes()
    for args in ((path,), (path, "-o", path), (path, "-o", link)):
        res = invoke(*args)
        assert res.exit_code == 2
        assert "would overwrite the file of TRACE.jsonl" in res.stderr
    assert path.read_bytes() == before


@pytest.mark.native
def test_plot_that_cannot_be_written(invoke: Callable[..., Result], real: Path) -> None:
    res = invoke(real, "-o", real.parent / "no" / "such" / "x.png")
    assert res.exit_code == OutputError.exit_code
    assert "cannot be written: No such file or directory" in res.stderr


@pytest.mark.native
def test_plot_of_nothing(invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("missing.jsonl", ".", "..", tmp_path, ""):
        res = invoke(source)
        assert res.exit_code == 2
        assert res.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


#
# writing
#


@pytest.mark.native
def test_what_is_written_is_read_back(invoke: Callable[..., Result], tmp_path: Path) -> None:
    from pyllama_kvflash.cli.trace import TraceWriter  # noqa: PLC0415 (needs the compiled part)

    del invoke
    run = Run().prefill(2000).decode(30)
    path = tmp_path / "run.jsonl"
    with TraceWriter(str(path)) as out:
        out.start(**{k: v for k, v in run.lines[0].items() if k != "event"})
        for n, line in enumerate(run.lines[1:], 2):
            scores = line.get("scores")
            as_array = {"scores": np.array(scores, np.float64)} if scores is not None else {}
            out.event({**line, **as_array})
            assert path.read_text().count("\n") == n  # each line is seen at once
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in found] == [line["event"] for line in run.lines]
    for line, want in zip(found, run.lines, strict=True):
        got, given = (np.array(x.pop("scores", []), np.float64) for x in (line, want))
        np.testing.assert_allclose(got, given, rtol=1e-5)
        assert line == want
    assert "NaN" not in path.read_text()
    assert read_trace(path).positions.tolist() == [pos for pos, _ in run.truth]


@pytest.mark.native
def test_a_trace_that_cannot_be_written(invoke: Callable[..., Result], tmp_path: Path) -> None:
    from pyllama_kvflash.cli.trace import TraceWriter  # noqa: PLC0415 (needs the compiled part)

    del invoke
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        TraceWriter(str(tmp_path))
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        TraceWriter(str(tmp_path / "no" / "x.jsonl"))
    with pytest.raises(OutputError, match="/dev/full cannot be written: No space"), TraceWriter("/dev/full") as out:
        out.start(model="m")
