"""A plot of a run: what was resident when, and what each chunk was worth. It needs matplotlib, which is loaded on
use.
"""

import io
import warnings
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvflash_bench.trace import Trace
from pyllama_kvflash.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")

_SIZE, _DPI = (14, 9), 100
_COLUMNS, _ROWS = 2000, 1000  # at most, in the picture: about two to a pixel
_MIN_SHARE = 0.22  # least share of the width for the prompt and for the decoded tokens, however few
_MIN_LABELLED = 0.4  # of the width: a narrower prompt has only its end labelled
_MAX_NAME = 60  # characters of the model's name
_OUT, _KEPT, _FLAT, _IN, _DROP, _INK = "#e4e4e4", "#8fb4d3", "#e0702a", "#0b7a4b", "#9a9a9a", "#333333"

Floats = npt.NDArray[np.float64]


def render(trace: Trace, kind: str) -> bytes:
    """Return the picture as a file of one of FORMATS. Raises UsageError if there is no matplotlib."""
    fig = residency_figure(trace)
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a model's name may have characters that the font lacks
        fig.savefig(data, format=kind, dpi=_DPI)
    return data.getvalue()


def figure(width: float, height: float, *, constrained: bool = True) -> "Figure":
    """Return an empty figure, width by height in inches. Raises UsageError if there is no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (an optional extra)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        msg = "plots need matplotlib: pip install matplotlib"
        raise UsageError(msg) from None
    fig = Figure(figsize=(width, height), dpi=_DPI, layout="constrained" if constrained else None)
    FigureCanvasAgg(fig)
    return fig


def png(fig: "Figure") -> bytes:
    """Return a figure as a PNG."""
    data = io.BytesIO()
    fig.savefig(data, format="png", dpi=130)
    return data.getvalue()


def residency_figure(trace: Trace) -> "Figure":
    """Plot residency over the run, page traffic below it, and the last scores beside it. Raises UsageError (no
    matplotlib).
    """
    fig = figure(*_SIZE, constrained=False)
    scored = bool(np.isfinite(trace.scores).any())
    grid = fig.add_gridspec(
        2, 2, width_ratios=(5, 1), height_ratios=(5, 1), left=0.07, right=0.97, top=0.83, bottom=0.07, wspace=0.04, hspace=0.07
    )  # fmt: skip
    columns = slice(0, 1 if scored else 2)
    main = fig.add_subplot(grid[0, columns])
    below = fig.add_subplot(grid[1, columns], sharex=main)
    width = _Width.of(trace)
    raster = _Raster.of(trace, width)
    colours = _colours(raster)
    marks = _residency(main, trace, raster, colours)
    _traffic(below, trace, width)
    _agreement(below, trace, width)
    _phases(main, below, width)
    if scored:
        _scores(fig.add_subplot(grid[0, 1], sharey=main), trace, colours)
        corner = fig.add_subplot(grid[1, 1])
        corner.set_axis_off()
        bar = fig.colorbar(colours, cax=corner.inset_axes((0, 0.3, 1, 0.16)), orientation="horizontal", extend="both")
        bar.ax.set_title("score of a resident chunk", fontsize=9, color=_INK)
        bar.ax.tick_params(labelsize=8)
    _heading(fig, trace)
    _legend(fig, trace, colours, scored=scored, marks=marks)
    return fig


#
# what is where
#


@dataclass(frozen=True, slots=True)
class _Width:
    """Horizontal scale: the prompt lies in [0, split], the decoded tokens in [split, 1]. Neither is drawn too narrow.

    To scale, a prompt of 30,000 tokens would leave ten pixels for the 300 tokens decoded after it.
    """

    split: float
    n_prompt: int  # computed positions of the prompt
    n_decoded: int
    complete: bool  # the whole prompt was computed

    @classmethod
    def of(cls, trace: Trace) -> "_Width":
        n = int(trace.positions[-1])
        n_prompt = min(trace.n_prompt, n) or n
        n_decoded = n - n_prompt
        share = n_prompt / n
        if n_decoded:
            share = min(max(share, _MIN_SHARE), 1 - _MIN_SHARE)
        return cls(share, n_prompt, n_decoded, n_prompt == trace.n_prompt)

    def __call__(self, positions: Any) -> Floats:
        n = self.n_prompt + self.n_decoded
        res: Floats = np.interp(positions, (0, self.n_prompt, n), (0, self.split, 1))
        return res

    def position(self, x: Floats) -> Floats:
        """Return the positions at x, the inverse of calling it."""
        res: Floats = np.interp(x, (0, self.split, 1), (0, self.n_prompt, self.n_prompt + self.n_decoded))
        return res

    @property
    def stretch(self) -> float:
        """Drawn width of a decoded token, relative to a token of the prompt."""
        return (1 - self.split) / self.n_decoded / (self.split / self.n_prompt) if self.n_decoded else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Raster:
    """The large panel as a grid of at most _ROWS by _COLUMNS. Of chunks that share a row, the hottest resident one
    shows.
    """

    state: npt.NDArray[np.float32]  # (rows, columns) as in Trace.residency
    score: npt.NDArray[np.float32]  # (rows, columns) NaN: not resident, or no score
    back: npt.NDArray[np.bool_]  # (rows, columns) a chunk of the row was brought back, into all layers

    @classmethod
    def of(cls, trace: Trace, width: _Width) -> "_Raster":
        n_chunks = trace.residency.shape[1]
        starts = np.arange(0, n_chunks, -(-n_chunks // _ROWS))
        at = width.position((np.arange(_COLUMNS) + 0.5) / _COLUMNS)
        # draw a batch as the moment after it, which is what it could see
        moments = np.minimum(np.searchsorted(trace.positions, at, side="right"), len(trace.positions) - 1)
        state = np.empty((len(starts), _COLUMNS), np.float32)
        score = np.full(state.shape, np.nan, np.float32)
        back = np.zeros(state.shape, np.bool_)
        shown = -1
        for x, i in enumerate(moments):
            if i == shown:
                state[:, x], score[:, x] = state[:, x - 1], score[:, x - 1]
                continue
            now = trace.residency[i]
            state[:, x] = np.maximum.reduceat(now, starts)
            if trace.last_reselect[i] >= 0:
                scores = np.where(now == 1, trace.scores[trace.last_reselect[i]], np.float32(np.nan))
                score[:, x] = np.fmax.reduceat(scores, starts)
            if shown >= 0:
                before = trace.residency[shown]
                back[:, x] = np.logical_or.reduceat((before >= 0) & (before < 1) & (now == 1), starts)
            shown = int(i)
        return cls(state, score, back)


def _colours(raster: _Raster) -> "ScalarMappable":
    """Return the colour scale of the scores: light is cold, dark is hot. 2 % of the resident chunks may lie outside
    it.
    """
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415
    from matplotlib.colors import LinearSegmentedColormap, Normalize  # noqa: PLC0415

    found = raster.score[np.isfinite(raster.score)]
    low, high = np.percentile(found, (1, 99)) if found.size else (0.0, 1.0)
    steps = colormaps["inferno_r"](np.linspace(0.18, 0.9, 256))  # its ends look like the background and the ink
    scale = Normalize(float(low), float(high) if high > low else float(low) + 1.0)
    return ScalarMappable(scale, LinearSegmentedColormap.from_list("score", steps))


def _residency(ax: "Axes", trace: Trace, raster: _Raster, colours: "ScalarMappable") -> bool:
    """Draw the large panel. Return whether it marks chunks that were brought back."""
    n = trace.residency.shape[1] * trace.chunk
    image = np.ones((*raster.state.shape, 3))
    written = raster.state >= 0
    image[written] = _shade(trace, raster.state[written])
    scored = np.isfinite(raster.score)
    image[scored] = colours.to_rgba(raster.score[scored])[:, :3]
    repeat = max(1, _ROWS // len(image))  # enough rows that the image is not enlarged, which would blur it
    image = (255 * np.repeat(image, repeat, axis=0)).astype(np.uint8)
    ax.imshow(image, extent=(0, 1, 0, n), origin="lower", aspect="auto")
    row, column = np.nonzero(raster.back)
    if len(row):
        y = (row + 0.5) * (n / len(raster.back))
        size = min(9.0, max(1.5, 9 * 800 / len(row)))  # thousands of large marks would hide what they mark
        ax.scatter(column / _COLUMNS, y, s=size, marker=">", color=_IN, linewidths=0)
    ax.set_ylim(0, n)
    ax.set_xlim(0, 1)
    ax.set_ylabel("a chunk's place in the sequence, tokens")
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.tick_params(labelbottom=False)
    ax.spines[["top", "right"]].set_visible(False)
    return len(row) > 0


def _shade(trace: Trace, share: Any) -> Floats:
    """Return the colour of chunks without a score, (..., 3): grey where they are out, full where all layers hold them.

    share: of the layers that do, (...). Most chunks are in few layers, if each chooses, so few show well.
    """
    from matplotlib.colors import to_rgb  # noqa: PLC0415

    out, full = np.array(to_rgb(_OUT)), np.array(to_rgb(_KEPT if len(trace.reselect_pos) else _FLAT))
    weight = np.sqrt(np.asarray(share, np.float64))[..., None]
    colours: Floats = (1 - weight) * out + weight * full
    return colours


def _by_layer(trace: Trace) -> bool:
    """Return whether each layer chose its own chunks."""
    return bool(((trace.residency > 0) & (trace.residency < 1)).any())


def _traffic(ax: "Axes", trace: Trace, width: _Width) -> None:
    """Draw the chunks brought back (up) and dropped (down) between each moment and the one before."""
    edges = width(np.concatenate([[0], trace.positions]))
    for moved, colour in ((trace.n_in, _IN), (-trace.n_out, _DROP)):
        y = np.concatenate([moved[:1], moved])
        ax.fill_between(edges, y, step="pre", color=colour, linewidth=0.6)
    most = max(int(trace.n_in.max()), int(trace.n_out.max()), 1)
    ax.set_ylim(-1.5 * most, 1.5 * most)  # leaves room for the words where no bar reaches
    ax.axhline(0, color=_INK, linewidth=0.6)
    ax.set_yticks([-most, 0, most], [f"{most:,}", "0", f"{most:,}"])
    ax.set_ylabel("chunks moved")
    ax.set_xlabel("position, tokens")
    ax.text(0.006, 0.94, "brought back", transform=ax.transAxes, va="top", color=_IN, fontsize=9)
    ax.text(0.006, 0.06, "dropped", transform=ax.transAxes, color="#6b6b6b", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)


def _agreement(ax: "Axes", trace: Trace, width: _Width) -> None:
    """Draw how many of the tokens that were compared are the full cache's, over the moves."""
    if not len(trace.checks):
        return
    scale = ax.twinx()
    shares = 100 * trace.checks[:, 1] / trace.checks[:, 0]
    scale.plot(width(trace.check_pos), shares, color=_FLAT, linewidth=1, marker="o", markersize=3, clip_on=False)
    scale.set_ylim(0, 100)
    scale.set_yticks([0, 50, 100], ["0", "50", "100 %"])
    scale.tick_params(colors=_FLAT, labelsize=8)
    scale.text(
        0.994, 0.06, "agrees with the full cache", transform=scale.transAxes, ha="right", color=_FLAT, fontsize=9
    )
    scale.spines[["top", "left"]].set_visible(False)


def _phases(main: "Axes", below: "Axes", width: _Width) -> None:
    """Draw the end of the prompt, the labels to its left and right, and the ticks."""
    n = width.n_prompt
    ticks = [float(t) for t in _whole(6).tick_values(0, n) if 0 <= t < 0.9 * n]
    labels = [f"{t:,.0f}" for t in ticks]
    ticks, labels = [*ticks, float(n)], [*labels, f"{n:,}"]
    if width.split < _MIN_LABELLED:
        ticks, labels = ticks[-1:], labels[-1:]
    if width.n_decoded:
        last = width.n_decoded
        after = [t for t in _whole(3).tick_values(0, last) if 0.2 * last < t <= last]
        ticks += [n + t for t in after]
        labels += [f"+{t:,.0f}" for t in after]
    below.set_xticks(width(ticks), labels)
    prompt = f"prompt: {n:,} tokens" if width.complete else f"{n:,} tokens of the prompt"
    texts = [(0.0, "left", prompt)]
    if width.n_decoded:
        text = f"{width.n_decoded:,} decoded"
        factor = max(width.stretch, 1 / width.stretch)
        if round(factor) > 1:
            text += f", drawn {factor:,.0f} times {'wider' if width.stretch > 1 else 'narrower'}"
        texts.append((1.0, "right", text))
    for x, side, text in texts:
        main.text(x, 1.01, text, transform=main.transAxes, ha=side, fontsize=9, color=_INK)
    if width.complete:
        for ax in (main, below):
            ax.axvline(width.split, color=_INK, linewidth=1.2, linestyle=(0, (4, 2)))


def _scores(ax: "Axes", trace: Trace, colours: "ScalarMappable") -> None:
    """Draw the last scores: in colour for resident chunks, in grey for the others."""
    scores, resident = trace.scores[-1].astype(np.float64), trace.residency[-1] == 1
    y = (np.arange(len(scores)) + 0.5) * trace.chunk
    found = np.isfinite(scores)
    if found.any():
        low, high = float(scores[found].min()), float(scores[found].max())
        room = 0.05 * (high - low) or 1.0
        ax.set_xlim(low - room, high + room)
        out, kept = found & ~resident, found & resident
        ax.hlines(y[out], low - room, scores[out], color="#bdbdbd", linewidth=1.3)
        ax.hlines(y[kept], low - room, scores[kept], color=colours.to_rgba(scores[kept]), linewidth=1.3)
    ax.set_title(f"scores at {trace.reselect_pos[-1]:,}", fontsize=9, color=_INK)
    ax.xaxis.set_major_locator(_whole(4, integer=False))
    ax.tick_params(labelleft=False, labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _whole(n: int, *, integer: bool = True) -> Any:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    return MaxNLocator(n, integer=integer, min_n_ticks=1, steps=[1, 2, 5, 10])


def _heading(fig: "Figure", trace: Trace) -> None:
    """Write what was run, and which share of it is on the device."""
    meta, last = trace.meta, trace.residency[-1]
    pool = "full cache" if meta.get("n_pool") is None else f"pool of {meta['n_pool']:,} tokens"
    chunks, resident = int((last >= 0).sum()), int((last == 1).sum())
    head = f"{_name(meta.get('model'))}, policy {_name(meta.get('policy'))}, {pool}"
    if _by_layer(trace):
        share = 100 * float(last[last >= 0].mean())
        line = f"in the end {resident:,} of {chunks:,} chunks in all layers; each layer holds {share:.1f} % of the text"
    else:
        line = f"in the end {resident:,} of {chunks:,} chunks resident ({100 * resident / max(chunks, 1):.1f} %)"
    line += f"; {int(trace.n_out.sum()):,} were dropped, {int(trace.n_in.sum()):,} brought back"
    if len(trace.checks):
        n, agreed = (int(x) for x in trace.checks.sum(axis=0))
        line += f"; {100 * agreed / n:.1f} % of {n:,} tokens checked are the full cache's"
    if trace.reason is None:
        line += "; the trace was cut off here"
    fig.text(0.07, 0.955, head, fontsize=14, fontweight="bold", color=_INK, parse_math=False)
    fig.text(0.07, 0.925, line, fontsize=11, color=_INK)


def _name(value: Any) -> str:
    """Return a model's or policy's name in one short line."""
    name = "".join(c if c.isprintable() else " " for c in str(value))
    if name.endswith(".gguf"):
        name = PurePath(name).stem
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 2]}…{name[-_MAX_NAME // 2 :]}"


def _legend(fig: "Figure", trace: Trace, colours: "ScalarMappable", *, scored: bool, marks: bool) -> None:
    """Draw the meaning of the colours, in one line above the picture."""
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    handles: list[Any] = []
    if scored:
        handles.append(Patch(color=colours.get_cmap()(0.5), label="resident, by score"))
        handles.append(Patch(color=_KEPT, label="resident, not scored: first, last, pinned, new"))
    elif _by_layer(trace):
        handles.append(Patch(color=tuple(_shade(trace, 1)), label="in all layers"))
        handles.append(Patch(color=tuple(_shade(trace, 0.25)), label="in a quarter of them"))
    else:
        handles.append(Patch(color=tuple(_shade(trace, 1)), label="resident"))
    if (trace.residency == 0).any():
        handles.append(Patch(color=_OUT, label="out, in host memory"))
    if marks:
        handles.append(Line2D([], [], color=_IN, marker=">", linestyle="", label="brought back"))
    fig.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.07, 0.875),
        ncols=len(handles),
        frameon=False,
        fontsize=10,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.8,
    )
