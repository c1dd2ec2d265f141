"""Write docs/FAMILIES.md by running the oracles of tests/test_families.py (about two minutes). They keep the page
true.
"""

import sys
import tempfile
from pathlib import Path

from pyllama_kvflash.native import Model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import test_families as cells
from support import tiny

TARGET = Path(__file__).with_name("FAMILIES.md")

INTRO = """\
# Families and cache types

Made by `python docs/families.py`; `tests/test_families.py` runs the same checks, and compares each verdict with its cell here.
A row is a tiny random model of an architecture of llama.cpp ([tests/support/tiny.py](../tests/support/tiny.py),
[tests/support/families.py](../tests/support/families.py)). A column is the type of K and V, or K/V; "no FA" is without flash attention, "not rotated"
without the Hadamard rotation of quantised caches.

**exact**: on the CPU, a pool and a stock cache of the same library give the same logits, bit for bit, (a) after all chunks
went out and came back to where they were, and (b) through evictions, where the stock cache loses the same positions at the
same times. And (c) after chunks came back elsewhere, the pool is within twice the noise (relative RMS, the median of the steps):
what the order of sums makes of a stock cache at other batch sizes, 0.1 % at least; a chunk that is lost makes 5 to 50 %.
**refused**: llama.cpp makes no such context, stock or pooled, and its sentence says why.
"""


def render(verdicts: dict[tuple[str, str], str]) -> str:
    """Return the page."""
    rows = [["", *(f"`{cache}`" for cache in cells.CACHES)], ["---"] * (1 + len(cells.CACHES))]
    rows += [[f"`{name}`", *(verdicts[name, cache] for cache in cells.CACHES)] for name in cells.FAMILIES]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = "\n".join(f"- `{name}`: {str(tiny.MODELS[name].__doc__).partition('.')[0]}." for name in cells.FAMILIES)
    return f"{INTRO}\n{table}\n\n{notes}\n"


def run() -> dict[tuple[str, str], str]:
    """Return the verdicts, by family and cache type. Raises AssertionError if an oracle fails."""
    res = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in cells.FAMILIES:
            path = Path(folder) / f"{name}.gguf"
            tiny.write(name, path)
            with Model.load(path) as model:
                res |= {(name, cache): cells.check_cell(model, cache) for cache in cells.CACHES}
    return res


if __name__ == "__main__":
    TARGET.write_text(render(run()))
