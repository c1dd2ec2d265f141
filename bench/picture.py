"""One picture of several runs of `kvflash bench kld`: distance from the full cache against device memory, a panel for each text.

python bench/picture.py docs/figures/kld.png prose=RUN/prose-12.5,RUN/prose-28.1 code=RUN/code

A panel has the rows of all folders that are named for it: their results.json. A row that several have is of the last one.
"""

import argparse
import json
from pathlib import Path

from pyllama_kvflash.bench.figures import kld_figure
from pyllama_kvflash.bench.kld import KldRow


def rows(folders: str) -> list[KldRow]:
    """Return the rows of folders, a list with commas."""
    found = {}
    for folder in folders.split(","):
        for values in json.loads((Path(folder) / "results.json").read_text())["rows"]:
            row = KldRow(**values)
            found[row.variant, row.n_ctx, row.pool] = row
    return list(found.values())


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("panels", nargs="+", metavar="TITLE=FOLDER,...")
    args = parser.parse_args()
    panels = [(title, rows(folders)) for title, _, folders in (panel.partition("=") for panel in args.panels)]
    args.picture.write_bytes(kld_figure(*((found, title) for title, found in panels)))


if __name__ == "__main__":
    main()
