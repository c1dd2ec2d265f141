"""A resumable sweep of recall cells, contexts x pools x variants x documents, and its tables."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvflash_bench.grid import (
    Key,
    Result,
    Results,
    Variant,
    digest,
    model_mark,
    setting,
    short,
)
from kvflash_bench.recall import open_variant, run_cell
from kvflash_bench.tables import command, markdown, write_files
from pyllama_kvflash.cli.needles import QUESTION_ROOM
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.events import Prefill
from pyllama_kvflash.needle import NeedlePrompt, make_facts, make_prompt


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. pool None: any, since the full cache has none."""

    n_ctx: int
    pool: int | None
    variant: Variant
    seed: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """The plan of a measurement. kind: "niah" (codes at even depths) or "facts" (codes at random depths, among
    decoys).
    """

    kind: str
    model: Path
    contexts: tuple[int, ...]
    pools: tuple[int, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    n_needles: int
    n_decoys: int = 0
    session: int = 0
    haystack: str | None = None
    common: dict[str, Any] = field(default_factory=dict)

    def cells(self) -> Iterator[Cell]:
        """Yield all cells, the full cache once for each context and document."""
        for n_ctx in self.contexts:
            for variant in self.variants:
                for pool in (None,) if variant.full else self.pools:
                    if pool is None or pool < n_ctx:
                        yield from (Cell(n_ctx, pool, variant, seed) for seed in self.seeds)

    def key(self, cell: Cell) -> Key:
        """Return the key under which a result is filed: all that it depends on."""
        return {
            "bench": self.kind,
            "model": model_mark(self.model),
            "n_ctx": cell.n_ctx,
            "pool": cell.pool,
            "variant": cell.variant.label,
            "seed": cell.seed,
            "needles": self.n_needles,
            "decoys": self.n_decoys,
            "session": self.session,
            "haystack": digest(self.haystack),
            "common": setting(self.common, cell.variant, self.model),
        }

    def measure(self, cell: Cell, on_prefill: Callable[[Prefill], None]) -> Result:
        """Run a cell. Raises UsageError and all that the engine raises."""
        room = QUESTION_ROOM * (self.session + 1)
        with open_variant(self.model, cell.variant, cell.n_ctx + room, cell.pool or 0, self.common) as kv:
            return run_cell(kv, self._prompt(kv, cell), on_prefill, self.session)

    def _prompt(self, kv: KVFlash, cell: Cell) -> NeedlePrompt:
        def count(text: str) -> int:
            return len(kv.tokenize(text, add_special=False))

        if self.kind == "facts":
            return make_facts(cell.n_ctx, count, n_facts=self.n_needles, n_decoys=self.n_decoys, seed=cell.seed)
        return make_prompt(cell.n_ctx, count, n_needles=self.n_needles, seed=cell.seed, haystack=self.haystack)


#
# tables
#


@dataclass(frozen=True, slots=True)
class Row:
    """A variant at one context and pool, over all measured documents."""

    variant: str
    n_ctx: int
    pool: int | None
    docs: int
    asked: int
    found: int
    resident: int
    lost: dict[str, int]
    session: dict[str, int]
    by_place: list[float]
    kv_device_bytes: int
    kv_full_bytes: int
    summary_bytes: int
    prefill_s: float
    answer_s: float
    score_ms: float
    machine: str


def summarise(sweep: Sweep, results: Results) -> list[Row]:
    """Return one row for each variant, context and pool that has results."""
    groups: dict[tuple[str, int, int | None], list[Result]] = {}
    for cell in sweep.cells():
        if (result := results.get(sweep.key(cell))) is not None:
            groups.setdefault((cell.variant.label, cell.n_ctx, cell.pool), []).append(result)
    return [_row(*group, found) for group, found in groups.items()]


def _row(variant: str, n_ctx: int, pool: int | None, rs: list[Result]) -> Row:
    def mean(name: str) -> float:
        return float(sum(r[name] for r in rs) / len(rs))

    places = [[r["found"][i] for r in rs] for i in range(min(len(r["found"]) for r in rs))]
    return Row(
        variant=variant,
        n_ctx=n_ctx,
        pool=pool,
        docs=len(rs),
        asked=sum(len(r["found"]) for r in rs),
        found=sum(sum(r["found"]) for r in rs),
        resident=sum(sum(r["resident"]) for r in rs),
        lost=dict(Counter(blame for r in rs for blame in r["lost"].values())),
        session=dict(sum((Counter(r["session"]) for r in rs), Counter())),
        by_place=[sum(p) / len(p) for p in places],
        kv_device_bytes=rs[0]["kv_device_bytes"],
        kv_full_bytes=rs[0]["kv_full_bytes"],
        summary_bytes=rs[0]["summary_bytes"],
        prefill_s=mean("prefill_s"),
        answer_s=mean("answer_s"),
        score_ms=mean("score_ms"),
        machine=rs[0]["machine"],
    )


def as_markdown(sweep: Sweep, rows: list[Row]) -> str:
    """Return the codes found of those asked, a line for each variant, a column for each context and pool, and what lost
    the others.
    """
    columns: list[tuple[int, int | None]] = []
    for n_ctx in sweep.contexts:
        columns += [(n_ctx, pool) for pool in sweep.pools if pool < n_ctx] or [(n_ctx, None)]
    by = {(r.variant, r.n_ctx, r.pool): r for r in rows}
    head = ["found, context / pool", *(f"{short(c)} / {short(p) if p else '-'}" for c, p in columns), "all"]
    lines = []
    for variant in sweep.variants:
        mine = [by.get((variant.label, c, None if variant.full else p)) for c, p in columns]
        cells = [f"{r.found}/{r.asked}" if r else "-" for r in mine]
        each = {(r.n_ctx, r.pool): r for r in mine if r}.values()
        total = f"{sum(r.found for r in each)}/{sum(r.asked for r in each)}"
        lines.append([variant.label, *cells, total])
    shares = ["pool / context", *(f"{100 * p / c:.1f} %" if p else "" for c, p in columns), ""]
    text = markdown(head, [shares, *lines])
    text += "".join(f"\n{note}\n" for note in _notes(sweep, rows))
    texts = "1 text" if len(sweep.seeds) == 1 else f"{len(sweep.seeds)} texts"
    return text + f"\n{texts}, {sweep.n_needles} codes each. {command(rows)}\n"


def _notes(sweep: Sweep, rows: list[Row]) -> Iterator[str]:
    for variant in sweep.variants:
        lost: Counter[str] = Counter()
        session: Counter[str] = Counter()
        for row in rows:
            if row.variant == variant.label:
                lost += Counter(row.lost)
                session += Counter(row.session)
        if lost:
            what = ", ".join(f"{n} by the {blame}" for blame, n in lost.most_common())
            yield f"{variant.label} lost {lost.total()}: {what}."
        if session:
            yield (
                f"{variant.label}, asked one after the other: {session['found']} of {session['asked']} found, gold chunks"
                f" resident for {session['resident']} of {session['asked']}."
            )


def write(sweep: Sweep, results: Results) -> str:
    """Write results.md, .csv and .json. Return the Markdown."""
    rows = summarise(sweep, results)
    plain = [asdict(r) for r in rows]
    return write_files(results, as_markdown(sweep, rows), plain, {"kind": sweep.kind, "rows": plain})
