"""Pictures of benchmark results."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyllama_kvflash.bench.sweep import Row
from pyllama_kvflash.plot import figure

if TYPE_CHECKING:
    from pyllama_kvflash.bench.kld import KldRow


def heat_map(rows: Sequence[Row], title: str) -> bytes:
    """Share of codes found, depth in the text (down) by context and pool (across), a panel for each variant: a PNG."""
    variants = list(dict.fromkeys(r.variant for r in rows))
    pooled = any(r.pool is not None for r in rows)
    columns = list(dict.fromkeys((r.n_ctx, r.pool) for r in rows if r.pool is not None or not pooled))
    n = max(len(r.by_place) for r in rows)
    fig = figure(width=2.2 + 0.42 * max(4, len(columns)) * len(variants), height=5.4)
    axes = fig.subplots(1, len(variants), sharey=True, squeeze=False)[0]
    image: Any = None
    for axis, variant in zip(axes, variants, strict=True):
        by = {(r.n_ctx, r.pool): r.by_place for r in rows if r.variant == variant}
        cells = [by.get(c) or by.get((c[0], None)) or [float("nan")] * n for c in columns]
        grid = [[cell[i] if i < len(cell) else float("nan") for cell in cells] for i in range(n)]
        image = axis.imshow(grid, aspect="auto", cmap="RdYlGn", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(variant, fontsize=9)
        axis.set_xticks(range(len(columns)), [_label(c) for c in columns], rotation=90, fontsize=7)
        axis.set_xticks([x + 0.5 for x in range(len(columns) - 1)], minor=True)
        axis.set_yticks([0, (n - 1) / 2, n - 1], ["start", "middle", "end"])
        axis.grid(which="minor", color="white", linewidth=0.8)
        axis.tick_params(which="both", length=0)
    axes[0].set_ylabel("where in the text the code is")
    fig.supxlabel("context / pool, tokens", fontsize=9)
    fig.suptitle(title, fontsize=11)
    bar = fig.colorbar(image, ax=list(axes), fraction=0.025, pad=0.01)
    bar.set_label("share found")
    return _png(fig)


def kld_figure(rows: Sequence["KldRow"], title: str) -> bytes:
    """Mean KLD by device memory, a line for each kind of row: a PNG."""
    fig = figure(width=7.5, height=5)
    axis = fig.subplots()
    for kind in dict.fromkeys(r.kind for r in rows):
        mine = sorted((r for r in rows if r.kind == kind and r.kld > 0), key=lambda r: r.share)
        axis.plot([100 * r.share for r in mine], [r.kld for r in mine], "o-" if len(mine) > 1 else "s", label=kind)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = sorted({round(100 * r.share, 1) for r in rows})
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=8, rotation=45)
    axis.set_xticks([], minor=True)
    axis.set_xlabel("device KV, % of the full f16 cache")
    axis.set_ylabel("mean KLD to the full cache, nats (less is better)")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    return _png(fig)


def _label(column: tuple[int, int | None]) -> str:
    return " / ".join(f"{n >> 10}K" for n in column if n is not None)


def _png(fig: Any) -> bytes:
    out = io.BytesIO()
    fig.savefig(out, format="png", dpi=130)
    return out.getvalue()
