"""Plots of speed and paging."""

from collections.abc import Sequence
from typing import Any

from kvflash_bench.grid import short
from kvflash_bench.paging import Copies, Measured, Stream
from kvflash_bench.plot import figure, png
from kvflash_bench.speed import Row

_FULL, _PLAIN = "#555555", "#999999"
_OUT, _IN, _STEP = "#4477aa", "#e0702a", "#4477aa"
_BAR = 0.38  # width


def speed_figure(rows: Sequence[Row], title: str) -> bytes:
    """Plot decode and prefill speed against the context, a line for each cache: a PNG."""
    fig = figure(11, 4.4)
    panels = fig.subplots(1, 2)
    shown = [r for r in rows if r.error is None]
    contexts = sorted({r.context for r in rows})
    names = list(dict.fromkeys(r.cache for r in rows))  # a cache that failed everywhere keeps its place in the legend
    pools = {r.cache for r in rows if r.pool is not None}
    colours = {name: f"C{i}" if name in pools else _FULL for i, name in enumerate(names)}
    for axis, what, label in zip(
        panels,
        ("decode_rate", "prefill_all"),
        ("decode, tokens/s (median step)", "prefill, tokens/s so far"),
        strict=True,
    ):
        for name in names:
            mine = [r for r in shown if r.cache == name]
            style = "o-" if name in pools else "s--"
            axis.plot(
                [r.context for r in mine], [getattr(r, what) for r in mine], style, color=colours[name], label=name
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [short(c) for c in contexts])
        axis.set_xticks([], minor=True)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("context, tokens")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if names:
        panels[0].legend(fontsize=9)
    fig.suptitle(title, fontsize=11)
    return png(fig)


def paging_figure(found: Measured, title: str) -> bytes:
    """Plot the bandwidth beside that of a plain copy, and each step of the token streams with its reselects: a PNG."""
    fig = figure(11, 7)
    left, right = fig.subplots(2, 1)
    _bandwidth(left, found.copies)
    _steps(right, found.streams)
    fig.suptitle(title, fontsize=11)
    return png(fig)


def _bandwidth(axis: Any, copies: Sequence[Copies]) -> None:
    at_once = sorted({c.chunks for c in copies})
    for way, colour, side in (("out", _OUT, -0.5), ("in", _IN, 0.5)):
        mine = [c for c in copies if c.direction == way]
        x = [at_once.index(c.chunks) + side * _BAR for c in mine]
        axis.bar(x, [c.rate / 1e9 for c in mine], _BAR, color=colour, label=f"page {way}")
        axis.axhline(mine[0].plain_rate / 1e9, color=colour, ls="--", lw=1, label=f"plain copy {way}")
    axis.set_xticks(range(len(at_once)), [f"{k} chunk{'s' if k > 1 else ''} at once" for k in at_once])
    axis.set_ylabel("GB/s")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def _steps(axis: Any, streams: Sequence[Stream]) -> None:
    for stream, colour in zip(streams, (_STEP, _PLAIN), strict=False):
        axis.plot(stream.steps_ms, color=colour, lw=0.8, label=stream.name)
        for i, at in enumerate(stream.reselected):
            axis.axvline(at, color=_IN, lw=0.8, alpha=0.6, label="reselect" if i == 0 else None)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("decoded token")
    axis.set_ylabel("ms a step")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
