"""Draw docs/figures/kld-bytes.png from the table of docs/results/coarse.md, "Answers on a GPU": KL divergence against device memory.

python bench/closeness.py
"""

import re
from pathlib import Path

from kvflash_bench.figures import kld_figure
from kvflash_bench.kld import KldRow

DOCS = Path(__file__).parent.parent / "docs"
START = "| | pool | device KV | prose"  # where the table begins
TABLES = (("Qwen2.5-Coder-1.5B", 16_384, 448 << 20), ("SmolLM2-135M", 7168, 315 << 19))
"""Models of the tables that begin so, in the page's order; tokens, and bytes of the full f16 cache."""
TEXTS = ("prose", "code")


def rows(table: int, text: int) -> list[KldRow]:
    """Return the rows of a table. table, text: which of TABLES and TEXTS."""
    page = (DOCS / "results" / "coarse.md").read_text("utf-8")
    tables = [part for part in page.split("\n\n") if part.startswith(START) and "same top" in part]
    lines = tables[table].splitlines()[2:]
    _, n_ctx, full = TABLES[table]
    found = []
    for line in lines:
        name, pool, share, *cells = (
            cell.strip(" *`%") for cell in line.replace("`", "").replace("*", "").strip("|").split("|")
        )
        part, n_pool = float(share) / 100, None if pool == "-" else int(pool.replace(",", ""))
        cached = re.fullmatch(r"full cache, (\w+)", name)
        found.append(
            KldRow(
                variant=f"full/type_k={cached[1]}" if cached else name,
                kind="full cache, quantised" if cached else name,
                n_ctx=n_ctx,
                pool=n_pool,
                kv_device_bytes=round(part * full),
                share=part,
                kld=float(cells[text].split(";")[0]),
                kld_99=0,
                kld_999=None,
                same_top=0,
                ppl=0,
                prefill_s=0,
                decode_s=0,
                machine="",
                n_score=256,
            )
        )
    return found


def main() -> None:
    """Draw a panel for each model and text."""
    panels = (
        (rows(i, j), f"{model}, one H200, 256 tokens of {text}")
        for i, (model, *_) in enumerate(TABLES)
        for j, text in enumerate(TEXTS)
    )
    (DOCS / "figures" / "kld-bytes.png").write_bytes(kld_figure(*panels))


if __name__ == "__main__":
    main()
