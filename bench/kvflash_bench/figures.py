"""Plots of benchmark results."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvflash_bench.grid import short
from kvflash_bench.plot import figure, png
from kvflash_bench.ruler_tables import columns
from kvflash_bench.sweep import Row

if TYPE_CHECKING:
    from kvflash_bench.kld import KldRow
    from kvflash_bench.ruler_tables import Row as RulerRow

MIB = 1 << 20

_PANELS = 4  # in a row
_APART = 1.12  # marks on an axis of memory, each beside the next


def heat_map(rows: Sequence[Row], title: str) -> bytes:
    """Plot the share of codes found, by depth in the text (down) and by context and pool (across), a panel for each
    variant: a PNG.
    """
    variants = list(dict.fromkeys(r.variant for r in rows))
    pooled = any(r.pool is not None for r in rows)
    columns = list(dict.fromkeys((r.n_ctx, r.pool) for r in rows if r.pool is not None or not pooled))
    n = max(len(r.by_place) for r in rows)
    across = min(_PANELS, len(variants))
    down = -(-len(variants) // across)
    fig = figure(1.6 + across * (0.8 + 0.34 * max(4, len(columns))), 0.8 + 3.6 * down)
    panels = fig.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    image: Any = None
    for axis, variant in zip(panels.flat, variants, strict=False):
        by = {(r.n_ctx, r.pool): r.by_place for r in rows if r.variant == variant}
        cells = [by.get(c) or by.get((c[0], None)) or [float("nan")] * n for c in columns]
        grid = [[cell[i] if i < len(cell) else float("nan") for cell in cells] for i in range(n)]
        image = axis.imshow(grid, aspect="auto", cmap="RdYlGn", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(variant, fontsize=10)
        axis.set_xticks(range(len(columns)), [_label(c) for c in columns], rotation=90, fontsize=8)
        axis.set_xticks([x + 0.5 for x in range(len(columns) - 1)], minor=True)
        axis.set_yticks([0, (n - 1) / 2, n - 1], ["start", "middle", "end"])
        axis.grid(which="minor", color="white", linewidth=0.8)
        axis.tick_params(which="both", length=0)
    for axis in panels.flat[len(variants) :]:
        axis.set_axis_off()
    fig.supylabel("where in the text the code is", fontsize=10)
    fig.supxlabel("context / pool, tokens", fontsize=10)
    fig.suptitle(title, fontsize=12)
    bar = fig.colorbar(image, ax=panels, fraction=0.02, pad=0.01)
    bar.set_label("share found")
    return png(fig)


def kld_figure(*panels: tuple[Sequence["KldRow"], str]) -> bytes:
    """Plot the mean KLD against device memory: a PNG. panels: rows, and the title above them; a panel has a line for each kind
    of row, and full caches of fewer bits say their types.
    """
    n_column = min(2, len(panels))
    n_row = -(-len(panels) // n_column)
    fig = figure(width=7.5 * n_column, height=5 * n_row)
    axes = fig.subplots(n_row, n_column, sharey=True, squeeze=False)
    for axis, (rows, title) in zip(axes.flat, panels, strict=True):
        _kld_panel(axis, rows)
        axis.set_title(title, fontsize=10)
    for row in axes:
        row[0].set_ylabel("mean KLD to the full cache, nats (less is better)")
    return png(fig)


def _kld_panel(axis: Any, rows: Sequence["KldRow"]) -> None:
    contexts = sorted({r.n_ctx for r in rows})
    colours = {kind: f"C{i}" for i, kind in enumerate(dict.fromkeys(r.kind for r in rows))}
    for n_ctx, style in zip(contexts, ("o-", "s--", "^:", "v-.") * len(contexts), strict=False):
        for kind, colour in colours.items():
            mine = sorted((r for r in rows if (r.kind, r.n_ctx) == (kind, n_ctx) and r.kld > 0), key=lambda r: r.share)
            at = [100 * r.share for r in mine]
            axis.plot(at, [r.kld for r in mine], style, color=colour, label=f"{kind}, {short(n_ctx)}", markersize=5)
            for x, r in zip(at, mine, strict=True):
                if r.pool is None:
                    axis.annotate(_types(r.variant), (x, r.kld), (5, 4), textcoords="offset points", fontsize=8)
    axis.set_xscale("log")
    if any(r.kld > 0 for r in rows):
        axis.set_yscale("log")
    _memory_ticks(axis, rows)
    axis.set_xlabel("device memory for KV, panes and codes, of the full f16 cache")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=8)


def _types(variant: str) -> str:
    """Return the cache types that a variant's label names."""
    return "/".join(dict.fromkeys(part.partition("=")[2] for part in variant.split("/") if part.startswith("type_")))


def _memory_ticks(axis: Any, rows: Sequence["KldRow"]) -> None:
    """Mark the memory of rows, but for what would lie upon another mark: its share, and bytes where all are of one context."""
    ticks = dict[float, str]()
    last = 0.0
    for r in sorted(rows, key=lambda r: r.share):
        if r.share > _APART * last:
            last = r.share
            size = f"\n{r.kv_device_bytes / MIB:,.3g} MiB" if len({r.n_ctx for r in rows}) == 1 else ""
            ticks[100 * r.share] = f"{100 * r.share:.3g} %{size}"
    axis.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axis.set_xticks([], minor=True)


def ruler_figure(rows: Sequence["RulerRow"], tasks: Sequence[str], title: str) -> bytes:
    """Plot the points by task (across) and by variant with its pool (down), with the gap to the full cache, a panel for
    each context and group of tasks: a PNG.
    """
    of = dict.fromkeys((r.n_ctx, r.group) for r in sorted(rows, key=lambda r: r.n_ctx))
    panels = [[r for r in rows if (r.n_ctx, r.group) == both] for both in of]
    shown = [[name for name in columns(tasks) if any(name in r.points for r in mine)] for mine in panels]
    widest = 1 + max(len(names) for names in shown)
    fig = figure(4.2 + 0.62 * widest, 1.2 + sum(1.2 + 0.36 * len(mine) for mine in panels))
    axes = fig.subplots(len(panels), 1, squeeze=False, height_ratios=[2 + len(mine) for mine in panels])
    image: Any = None
    for axis, (n_ctx, group), mine, own in zip(axes.flat, of, panels, shown, strict=True):
        names = [*own, "mean"]
        grid = [[r.points.get(name, float("nan")) for name in own] + [r.mean] for r in mine]
        image = axis.imshow(grid, aspect="auto", cmap="RdYlGn", vmin=0, vmax=100, interpolation="nearest", alpha=0.75)
        for y, (row, values) in enumerate(zip(mine, grid, strict=True)):
            for x, value in enumerate(values):
                if value == value:  # noqa: PLR0124 (not measured)
                    axis.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=9)
            axis.annotate(
                _gap(row), (1, y), (6, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=9
            )
        axis.annotate("gap to full", (1, 1), (6, 6), "axes fraction", "offset points", va="center", fontsize=10)
        axis.set_title(f"context {short(n_ctx)}{', long answers' if group == 'long' else ''}", fontsize=10)
        axis.set_yticks(range(len(mine)), [r.label for r in mine], fontsize=9)
        axis.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=9)
        axis.set_xticks([x + 0.5 for x in range(len(names) - 1)], minor=True)
        axis.set_yticks([y + 0.5 for y in range(len(mine) - 1)], minor=True)
        axis.grid(which="minor", color="white", linewidth=1)
        axis.axvline(len(own) - 0.5, color="white", linewidth=5)
        axis.tick_params(which="both", length=0)
    fig.suptitle(title, fontsize=12)
    bar = fig.colorbar(image, ax=axes, fraction=0.02, pad=0.01)
    bar.set_label("points")
    return png(fig)


def _gap(row: "RulerRow") -> str:
    if row.gap is None:
        return "the reference" if row.variant == "full" else ""
    return f"{row.gap:+.1f}" + ("" if row.gap_se is None else f" ± {row.gap_se:.1f}")


def _label(column: tuple[int, int | None]) -> str:
    return " / ".join(short(n) for n in column if n is not None)
