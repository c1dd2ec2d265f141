"""Draw docs/figures/choices.png from the tables of docs/results/choices.md: answers and speed against device memory.

python bench/choices.py
"""

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
ANSWERS, SPEED = "| | of the f16 cache's memory |", "| | prompt 32K |"  # where the tables begin
MEMORY = "KV on the device, % of the f16 cache's"


def table(start: str) -> dict[str, list[float | None]]:
    """Return the rows of a table by name; None: an empty cell."""
    text = (DOCS / "results" / "choices.md").read_text("utf-8")
    lines = text[text.index(start) :].split("\n\n")[0].splitlines()[2:]
    rows = ([cell.strip(" *`") for cell in line.replace("`", "").strip("|").split("|")] for line in lines)
    return {name: [number(cell) for cell in cells] for name, *cells in rows}


def number(cell: str) -> float | None:
    """Return the number of a cell."""
    found = re.match(r"[\d.,]+", cell)
    return float(found[0].replace(",", "")) if found else None


def main() -> None:
    """Draw three panels."""
    answers, speed = table(ANSWERS), table(SPEED)
    figure, axes = plt.subplots(1, 3, figsize=(15, 5))
    panels = (
        ("RULER at 16K, points of 100", MEMORY, {name: (row[0], row[1]) for name, row in answers.items()}),
        ("long answers at 16K, points of 100", MEMORY, {name: (row[0], row[-1]) for name, row in answers.items()}),
        (
            "answer behind 128K, 8B shape, tokens a second",
            "GiB of the device in use, weights included",
            {name: ((row[4] or 0) / 1024, row[3]) for name, row in speed.items()},
        ),
    )
    for axis, (title, what, points) in zip(axes, panels, strict=True):
        for name, (x, y) in points.items():
            if x is not None and y is not None:
                axis.scatter(x, y, s=80, label=name, zorder=3)
        axis.set(title=title, xlabel=what, xlim=(0, None), ylim=(-4, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="best")
    figure.tight_layout()
    figure.savefig(DOCS / "figures" / "choices.png", dpi=110)


if __name__ == "__main__":
    main()
