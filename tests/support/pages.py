"""The documents, for the tests of what they name and what they claim. No native code."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def fences(text: str) -> Iterator[str]:
    """The code blocks."""
    for block in re.finditer(r"^ *```[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield block[1]
