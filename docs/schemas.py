"""Write the table of JSON Schema's keywords in docs/SERVER.md; with --check, fail if it is out of date."""

import sys
from pathlib import Path

from pyllama_kvflash.json_schema.keywords import ANNOTATIONS, KEYWORDS

TARGET = Path(__file__).with_name("SERVER.md")
BEGIN, END = (f"<!-- docs/schemas.py: {where} -->\n" for where in ("begin", "end"))


def table() -> str:
    """Return the table."""
    rows = [f"| `{name}` | {keyword.verdict} | {keyword.note} |" for name, keyword in KEYWORDS.items()]
    names = ", ".join(f"`{name}`" for name in sorted(ANNOTATIONS, key=lambda name: name.strip("$").lower()))
    return "\n".join(
        [
            "| Keyword | | |",
            "|---|---|---|",
            *rows,
            f"| {names}, `x-...` | annotation | says nothing of which values are allowed |",
            "| any other | not enforced | it is not known, and named as such |\n",
        ]
    )


def render(page: str) -> str:
    """Return a page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    text = TARGET.read_text()
    if "--check" in sys.argv:
        sys.exit("docs/SERVER.md is out of date: run `make docs`" if render(text) != text else 0)
    TARGET.write_text(render(text))
