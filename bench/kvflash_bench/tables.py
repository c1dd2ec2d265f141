"""Tables of results: in Markdown, as CSV, and a bench's files results.md, .csv and .json."""

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvflash_bench.grid import Results


def line(cells: Iterable[Any]) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(map(str, cells)) + " |\n"


def head(names: Sequence[str]) -> str:
    """Return what a table in Markdown begins with: the first column is aligned to the left, the others to the right."""
    return line(names) + line(["---", *["---:"] * (len(names) - 1)])


def markdown(names: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown."""
    return head(names) + "".join(map(line, rows))


class Live:
    """A table in Markdown on stdout, whose rows are printed as they come."""

    def __init__(self, *names: str) -> None:
        """Print its head."""
        self._write(head(names))

    def row(self, *cells: Any) -> None:
        """Print a row."""
        self._write(line(cells))

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, without lists and dictionaries. A row may lack columns that others have."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list | dict))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*names], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def command(rows: Iterable[Any]) -> str:
    """Return the machines that rows were measured on and this command, for the foot of a table."""
    machines = "; ".join(dict.fromkeys(row.machine for row in rows))
    return f"{machines}: `kvflash {' '.join(sys.argv[1:])}`"


def write_files(results: Results, text: str, rows: Sequence[Mapping[str, Any]], whole: Mapping[str, Any]) -> str:
    """Write results.md, rows as results.csv, and everything as results.json. Return the Markdown.

    Raises OutputError.
    """
    results.write("results.md", text)
    results.write("results.csv", comma_separated(rows))
    results.write_json(whole)
    return text
