"""Draw figures of the documents from the tables beside them: docs/figures/choices.png and kld-bytes.png.

python bench/draw.py
"""

import re
from collections.abc import Iterator
from pathlib import Path

from kvflash_bench.figures import kld_figure
from kvflash_bench.kld import KldRow
from kvflash_bench.plot import figure, png

DOCS = Path(__file__).parent.parent / "docs"
MEMORY = "KV on the device, % of the f16 cache's"
CLOSE = (("Qwen2.5-Coder-1.5B", 16_384, 448 << 20), ("SmolLM2-135M", 7168, 315 << 19))
"""Models of the tables of "Answers on a GPU", in the page's order; tokens, and bytes of the full f16 cache."""
TEXTS = ("prose", "code")


def tables(page: str, start: str, word: str = "") -> Iterator[dict[str, list[str]]]:
    """Yield the tables of a page that begin so and have a word: the cells of each row, without marks, by its name."""
    for part in (DOCS / "results" / page).read_text("utf-8").split("\n\n"):
        if (at := part.find(start)) >= 0 and word in part:
            lines = re.sub(r"[`*%]", "", part[at:]).splitlines()[2:]
            rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
            yield {name: cells for name, *cells in rows}


def number(cell: str) -> float | None:
    """Return the number that a cell begins with."""
    found = re.match(r"[\d.,]+", cell)
    return float(found[0].replace(",", "")) if found else None


def choices() -> bytes:
    """Draw answers and speed against device memory, in three panels."""
    answers, speed = (
        {name: [number(cell) for cell in cells] for name, cells in next(tables("choices.md", start)).items()}
        for start in ("| | of the f16 cache's memory |", "| | prompt 32K |")
    )
    panels = (
        ("RULER at 16K, points of 100", MEMORY, {name: (row[0], row[1]) for name, row in answers.items()}),
        ("long answers at 16K, points of 100", MEMORY, {name: (row[0], row[-1]) for name, row in answers.items()}),
        (
            "answer behind 128K, 8B shape, tokens a second",
            "GiB of the device in use, weights included",
            {name: ((row[4] or 0) / 1024, row[3]) for name, row in speed.items()},
        ),
    )
    fig = figure(15, 5)
    for axis, (title, what, points) in zip(fig.subplots(1, 3), panels, strict=True):
        for name, (x, y) in points.items():
            if x is not None and y is not None:
                axis.scatter(x, y, s=80, label=name, zorder=3)
        axis.set(title=title, xlabel=what, xlim=(0, None), ylim=(-4, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="best")
    return png(fig)


def close() -> bytes:
    """Draw the KL divergence against device memory, a panel for each model and text."""
    panels = []
    for table, (model, n_ctx, full) in zip(
        tables("coarse.md", "| | pool | device KV | prose", "same top"), CLOSE, strict=False
    ):
        panels += [
            (
                [row(name, cells, i, n_ctx, full) for name, cells in table.items()],
                f"{model}, one H200, 256 tokens of {text}",
            )
            for i, text in enumerate(TEXTS)
        ]
    return kld_figure(*panels)


def row(name: str, cells: list[str], text: int, n_ctx: int, full: int) -> KldRow:
    """Return a row of the table. text: which of TEXTS. full: bytes of the full f16 cache."""
    pool, share, *found = cells
    cached = re.fullmatch(r"full cache, (\w+)", name)
    return KldRow(
        variant=f"full/type_k={cached[1]}" if cached else name,
        kind="full cache, quantised" if cached else name,
        n_ctx=n_ctx,
        pool=None if pool == "-" else int(pool.replace(",", "")),
        kv_device_bytes=round(float(share) / 100 * full),
        share=float(share) / 100,
        kld=float(found[text].split(";")[0]),
        kld_99=0,
        kld_999=0,
        same_top=0,
        ppl=0,
        prefill_s=0,
        decode_s=0,
        machine="",
        n_score=256,
    )


if __name__ == "__main__":
    for name, draw in (("choices", choices), ("kld-bytes", close)):
        (DOCS / "figures" / f"{name}.png").write_bytes(draw())
