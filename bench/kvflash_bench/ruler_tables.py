"""Tables of RULER's tasks and of long answers: points for each task, and the gap to the full cache on the same texts."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev

from kvflash_bench.control import CONTROL_NOTE
from kvflash_bench.grid import Result, Results, short
from kvflash_bench.long_texts import IN_ORDER
from kvflash_bench.ruler import Cell, Ruler
from kvflash_bench.ruler_texts import GROUPS
from kvflash_bench.tables import command, markdown, write_files

Found = dict[tuple[str, int], Result]
"""Results by task and seed."""


@dataclass(frozen=True, slots=True)
class Row:
    """A variant at one context and pool, over all measured texts of a group of tasks. Scores are points, 100 at most.

    group: "ruler" or "long", see GROUPS.
    in_order: second scores, of the tasks that have one (IN_ORDER).
    mean: mean of the tasks, without second scores.
    gap: points less the full cache's at this context, over the texts that both have, mean of the tasks; None: this is
        the full cache, or it was not measured.
    gap_se: standard error of the gap; None with fewer than two texts.
    """

    group: str
    variant: str
    n_ctx: int
    pool: int | None
    texts: int
    scores: dict[str, float]
    in_order: dict[str, float]
    mean: float
    gap: float | None
    gap_se: float | None
    prefill_s: float
    decode_rate: float
    machine: str

    @property
    def label(self) -> str:
        """Name of its line in a plot."""
        return f"{self.variant}, {short(self.pool)}" if self.pool else self.variant

    @property
    def points(self) -> dict[str, float]:
        """Both scores by column, see columns()."""
        return self.scores | {_second(task): points for task, points in self.in_order.items()}


def columns(tasks: Sequence[str]) -> list[str]:
    """Return the names of the columns of tasks: behind a task that has two scores, that of the second one."""
    return [name for task in tasks for name in (task, *([_second(task)] if task in IN_ORDER else ()))]


def _second(task: str) -> str:
    """Return the name of the column of a task's second score."""
    return f"{task} in order"


def summarise(ruler: Ruler, results: Results) -> list[Row]:
    """Return one row for each group and cell that have results."""
    return [row for group, part in groups(ruler).items() for row in _rows(group, part, results)]


def groups(ruler: Ruler) -> dict[str, Ruler]:
    """Return the plan of each group of tasks, by the group's name."""
    tasks = {group: tuple(task for task in ruler.tasks if task in names) for group, names in GROUPS.items()}
    return {group: replace(ruler, tasks=found) for group, found in tasks.items() if found}


def _rows(group: str, ruler: Ruler, results: Results) -> list[Row]:
    found = [(cell, _found(ruler, results, cell)) for cell in ruler.cells()]
    full = {cell.n_ctx: texts for cell, texts in found if cell.variant.label == "full"}
    return [_row(group, ruler, cell, texts, full.get(cell.n_ctx, {})) for cell, texts in found if texts]


def _found(ruler: Ruler, results: Results, cell: Cell) -> Found:
    all_of_them = ((text, results.get(ruler.key(cell, *text))) for text in ruler.texts())
    return {text: result for text, result in all_of_them if result is not None}


def _row(group: str, ruler: Ruler, cell: Cell, found: Found, full: Found) -> Row:
    scores = by_task(ruler.tasks, {text: 100 * r["score"] for text, r in found.items()})
    gap, gap_se = None, None
    if found is not full and (both := found.keys() & full.keys()):
        gaps = {text: 100 * (found[text]["score"] - full[text]["score"]) for text in both}
        gap = fmean(by_task(ruler.tasks, gaps).values())
        gap_se = stdev(gaps.values()) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    decode_s = sum(r["decode_s"] for r in found.values())
    return Row(
        group=group,
        variant=cell.variant.label,
        n_ctx=cell.n_ctx,
        pool=cell.pool,
        texts=len(found),
        scores=scores,
        in_order=by_task(
            ruler.tasks, {text: 100 * _in_order(text[0], r) for text, r in found.items() if text[0] in IN_ORDER}
        ),
        mean=fmean(scores.values()),
        gap=gap,
        gap_se=gap_se,
        prefill_s=fmean(r["prefill_s"] for r in found.values()),
        decode_rate=sum(r["n_decoded"] for r in found.values()) / decode_s if decode_s else 0.0,
        machine=next(iter(found.values()))["machine"],
    )


def _in_order(task: str, result: Result) -> float:
    """Return the second score of a text, 0 to 1. It is made of the answers, which results from before it have, too."""
    said = zip(result["answers"], result["expected"], strict=True)
    return fmean(IN_ORDER[task](answer, expected) for answer, expected in said)


def by_task(tasks: Sequence[str], values: dict[tuple[str, int], float]) -> dict[str, float]:
    """Return the mean of each task that has values. `values` is by task and seed."""
    each = {task: [v for (of, _), v in values.items() if of == task] for task in tasks}
    return {task: fmean(found) for task, found in each.items() if found}


#
# files
#


def as_markdown(ruler: Ruler, rows: Sequence[Row]) -> str:
    """Return a table for each context and group, and what the numbers mean."""
    tables = (
        f"{_heading(n, group)}\n\n{_table(part, [r for r in rows if (r.n_ctx, r.group) == (n, group)])}\n"
        for n in sorted(ruler.contexts)
        for group, part in groups(ruler).items()
    )
    return "".join(tables) + _notes(ruler, rows)


def _heading(n_ctx: int, group: str) -> str:
    """Return the title of a table."""
    return f"Context {short(n_ctx)}" + (", long answers" if group == "long" else "")


def _table(ruler: Ruler, rows: Sequence[Row]) -> str:
    names = columns(ruler.tasks)
    head = ["variant", "pool", *names, "mean", "gap to full", "s.e.", "texts"]
    lines = [
        [
            r.variant,
            short(r.pool) if r.pool else "-",
            *(f"{r.points[name]:.1f}" if name in r.points else "-" for name in names),
            f"{r.mean:.1f}",
            "-" if r.gap is None else f"{r.gap:+.1f}",
            "-" if r.gap_se is None else f"{r.gap_se:.1f}",
            r.texts,
        ]
        for r in rows
    ]
    return markdown(head, lines)


def _notes(ruler: Ruler, rows: Sequence[Row]) -> str:
    n = len(ruler.seeds)
    notes = (
        "Points: the share of what is expected that an answer has, times 100. mean: of the tasks. gap: to the full cache"
        " of this run on the same texts, in points; s.e.: its standard error, paired over the texts. Where there are few"
        " texts, differences of some points are noise."
    )
    if second := [_second(task) for task in ruler.tasks if task in IN_ORDER]:
        notes += f" {', '.join(second)}: the share of whole records in their order, whatever their numbers; not in mean and gap."
    if any(v.control for v in ruler.variants):
        notes += f" {CONTROL_NOTE}"
    texts = f"{n} text{'s' if n > 1 else ''} of each task, numbers {ruler.seeds[0]} to {ruler.seeds[-1]}."
    return f"{notes}\n\n{texts} {command(rows)}\n"


def write(ruler: Ruler, results: Results) -> str:
    """Write results.md, .csv and .json. Return the Markdown."""
    rows = summarise(ruler, results)
    plain = [asdict(r) for r in rows]
    lines = [cells | r.points for cells, r in zip(plain, rows, strict=True)]
    return write_files(results, as_markdown(ruler, rows), lines, {"kind": "ruler", "rows": plain})
