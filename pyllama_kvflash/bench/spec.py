"""Speculative decoding against plain, with its gate and without, full cache and pool: measuring, resuming, tables."""

import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pyllama_kvflash.bench.grid import (
    Key,
    Result,
    Results,
    comma_separated,
    command,
    digest,
    markdown,
    model_mark,
    setting,
    short,
)
from pyllama_kvflash.bench.steps import hardware
from pyllama_kvflash.drafting import KINDS, Spec
from pyllama_kvflash.engine import KVFlash
from pyllama_kvflash.errors import Interrupted, UnsupportedError, UsageError
from pyllama_kvflash.events import Done, Token, Warn
from pyllama_kvflash.native import ALL, Sampling
from pyllama_kvflash.needle import Needle, make_prompt
from pyllama_kvflash.plot import figure

TEXTS = ("copy", "entropy", "needles")
PLAIN = "plain"
REPEATED = 8  # times that the line is there which a copy-heavy text goes on with
ANSWER = 16  # tokens of an answer to a question

_SEED = 2  # of documents, and of the sampler: needle-7m goes on copying, and draws no end of text
_REPEATED_ROOM = 64 * REPEATED
_QUESTION_ROOM = 64
_DOCUMENT = 4  # pools that the questions' document fills; half of one is what the other texts begin with
_TRIES = 9  # batches timed for what one costs, of each width
_COUNTS = ("drafted", "accepted", "draft_steps", "plain_steps", "gated_steps")

OnRun = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured in one go, in turns. n: tokens to produce, or questions. pool None: the full cache."""

    text: str
    n: int
    pool: int | None

    @property
    def label(self) -> str:
        """As progress shows it."""
        return f"{self.text} {self.n:,}, {self.cache}"

    @property
    def cache(self) -> str:
        """As tables show it."""
        return f"pool {short(self.pool)}" if self.pool else "full"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode. kind: as in drafting.KINDS, or "plain". gate: whether it may decode plainly where drafts do not pay."""

    kind: str = PLAIN
    n_max: int = 0
    gate: bool = False

    @property
    def label(self) -> str:
        """As progress shows it."""
        return self.kind if self.kind == PLAIN else f"{self.kind} of {self.n_max}, gate {_switch(self.gate)}"


@dataclass(frozen=True, slots=True)
class SpecBench:
    """What is to be measured: on each of TEXTS, with the full cache and a pool, plain decoding and all ways to draft.

    lengths: tokens to produce, of "copy" and "entropy"; questions: of "needles". drafter: its file, for the kinds that take
    one. common: options of all runs. Raises UsageError.
    """

    model: Path
    drafter: str | None
    kinds: tuple[str, ...] = ("draft", "ngram")
    n_max: tuple[int, ...] = (8,)
    texts: tuple[str, ...] = TEXTS
    lengths: tuple[int, ...] = (300, 2000)
    questions: int = 16
    pool: int = 512
    rounds: int = 5
    common: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what the engine cannot."""
        for name, given, known in (("kind", self.kinds, KINDS), ("text", self.texts, TEXTS)):
            for word in given:
                if word not in known:
                    msg = f"there is no {name} {word!r}: give some of {','.join(known)}"
                    raise UsageError(msg)
        if self.drafter is None and (wanting := [k for k in self.kinds if k not in ("ngram", "mtp")]):
            msg = f"kind {wanting[0]} needs a drafter: give its file with -md/--model-draft, or leave it out of --kinds"
            raise UsageError(msg)
        if min(self.lengths) < 2:
            msg = f"-n is {min(self.lengths)}: give 2 tokens or more, since the first comes out of the prompt"
            raise UsageError(msg)
        for way in self.ways():
            self.spec(way)
        for cell in self.cells():
            if cell.text in TEXTS[:2] and cell.pool and cell.pool // 2 + cell.n <= cell.pool:
                msg = (
                    f"{cell.n} tokens (-n) after a text of {cell.pool // 2} do not fill a pool of {cell.pool}: give more"
                    f" than {cell.pool - cell.pool // 2}, or a smaller --pool"
                )
                raise UsageError(msg)

    def cells(self) -> Iterator[Cell]:
        """All cells, the full cache before the pool."""
        for text in self.texts:
            for n in (self.questions,) if text == "needles" else self.lengths:
                for pool in (None, self.pool):
                    yield Cell(text, n, pool)

    def ways(self) -> list[Way]:
        """Plain decoding, then all ways to draft: a round of a cell."""
        return [Way(), *(Way(k, n, gate) for k in self.kinds for n in self.n_max for gate in (True, False))]

    def spec(self, way: Way) -> Spec | None:
        """What the engine takes for a way. Raises UsageError."""
        if way.kind == PLAIN:
            return None
        model = None if way.kind == "ngram" else self.drafter
        return Spec(kind=way.kind, model=model, n_max=way.n_max, **({} if way.gate else {"gate": 0}))

    def key(self, cell: Cell) -> Key:
        """What a result is filed under. The machine and its threads count: this is about speed."""
        drafter = Path(self.drafter) if self.drafter else None
        return {
            "bench": "spec",
            "model": model_mark(self.model),
            "drafter": model_mark(drafter) if drafter and drafter.is_file() else self.drafter,
            "ways": [asdict(way) for way in self.ways()],
            "cell": asdict(cell),
            "size": self.pool,
            "rounds": self.rounds,
            "common": {**setting(self.common), "n_threads": self.common.get("n_threads")},
            "machine": hardware(),
        }


#
# measuring
#


def measure(bench: SpecBench, cell: Cell, on_run: OnRun) -> Result:
    """Decode in all ways, round by round, each time with a model that was just opened. Plain JSON values.

    Raises what KVFlash.from_file does.
    """
    ways = bench.ways()
    runs: list[list[Result]] = [[] for _ in ways]
    costs: list[dict[int, float]] = []
    first: list[list[int]] = []
    place: Result = {}
    warnings: list[str] = []
    for i in range(bench.rounds):
        plain: list[list[int]] = []
        for way, found in zip(ways, runs, strict=True):
            on_run(f"{cell.label}  {way.label}  round {i + 1}/{bench.rounds}")
            with _open(bench, cell, way) as kv:
                warnings += kv.warnings
                texts, answers = _answers(kv, bench, cell, warnings)
                first, plain = first or texts, plain or texts
                against = plain if way.kind != PLAIN else first
                for answer, text, right in zip(answers, texts, against, strict=True):
                    answer["differs"] = difference(text, right)
                found.append({"answers": answers})
                if way.kind == PLAIN:
                    place = {"n_pool": kv.n_pool, "n_prompt": answers[0].pop("start"), "at": kv.n_tokens}
                    if found_costs := batch_costs(kv, [n + 1 for n in bench.n_max]):
                        costs.append(found_costs)
    return {
        **place,
        "ways": [{**asdict(way), "runs": found} for way, found in zip(ways, runs, strict=True)],
        "costs": {str(n + 1): median(c[n + 1] for c in costs) for n in bench.n_max} if costs else {},
        "warnings": list(dict.fromkeys(warnings)),
        "machine": hardware(),
    }


def _open(bench: SpecBench, cell: Cell, way: Way) -> KVFlash:
    width = max(bench.n_max) + 1
    if cell.text == "needles":
        n_ctx = _DOCUMENT * bench.pool + _QUESTION_ROOM + ANSWER + width
    else:
        n_ctx = bench.pool // 2 + _REPEATED_ROOM + cell.n + width
    pool = cell.pool or "off"
    kv = KVFlash.from_file(bench.model, **{**bench.common, "n_ctx": n_ctx, "pool": pool, "spec": bench.spec(way)})
    if cell.pool and (kv.n_pool is None or kv.n_pool > cell.pool):
        why = "; ".join((*kv.warnings, *kv.notes))
        kv.close()
        msg = f"{cell.label} cannot be measured with that pool: {why}"
        raise UsageError(msg)
    return kv


#
# tables
#


@dataclass(frozen=True, slots=True)
class Row:
    """A way to decode a text. gate None: plain. Counts are of all rounds.

    tokens: produced in a round. rate: tokens a second, the median round; x: over plain in the same round, the median, and
    the least and the most. committed: tokens a drafted step. gated: share of the steps that were plain because of the gate.
    cost: of a batch of n_max + 1 after the text, in single tokens; at: positions then. equal: how many of `answers` answers
    are plain's of the same round, token for token (of plain's own: the first round's); differs: the first token that is
    not. found: codes told right.
    """

    text: str
    cache: str
    pool: int | None
    kind: str
    n_max: int
    gate: bool | None
    tokens: int
    rate: float
    x: float
    x_low: float
    x_high: float
    acceptance: float | None
    committed: float | None
    gated: float
    cost: float | None
    at: int
    equal: int
    answers: int
    differs: int | None
    found: int | None
    machine: str


def summarise(bench: SpecBench, results: Results) -> list[Row]:
    """A row for each way and cell that was measured."""
    found: list[Row] = []
    for cell in bench.cells():
        if (result := results.get(bench.key(cell))) is not None:
            rates = [_rate(run) for run in result["ways"][0]["runs"]]
            found += [_row(cell, result, way, rates) for way in result["ways"]]
    return found


def _rate(run: Result) -> float:
    seconds = sum(a["decode_s"] for a in run["answers"])
    return sum(max(a["n"] - 1, 0) for a in run["answers"]) / seconds if seconds else 0.0


def _row(cell: Cell, result: Result, way: Result, plain: Sequence[float]) -> Row:
    rates = [_rate(run) for run in way["runs"]]
    xs = [rate / base if base else 0.0 for rate, base in zip(rates, plain, strict=True)]
    answers = [a for run in way["runs"] for a in run["answers"]]
    n = {name: sum(a[name] for a in answers) for name in _COUNTS}
    differs = [a["differs"] for a in answers if a["differs"] is not None]
    is_plain = way["kind"] == PLAIN
    return Row(
        text=cell.text,
        cache=cell.cache,
        pool=result["n_pool"],
        kind=way["kind"],
        n_max=way["n_max"],
        gate=None if is_plain else way["gate"],
        tokens=sum(a["n"] for a in way["runs"][0]["answers"]),
        rate=median(rates),
        x=median(xs),
        x_low=min(xs),
        x_high=max(xs),
        acceptance=n["accepted"] / n["drafted"] if n["drafted"] else None,
        committed=1 + n["accepted"] / n["draft_steps"] if n["draft_steps"] else None,
        gated=n["gated_steps"] / max(n["draft_steps"] + n["plain_steps"], 1),
        cost=result["costs"].get(str(way["n_max"] + 1)),
        at=result["at"],
        equal=len(answers) - len(differs),
        answers=len(answers),
        differs=min(differs, default=None),
        found=sum(a["found"] for a in answers) if cell.text == "needles" else None,
        machine=result["machine"],
    )


def agreements(bench: SpecBench, results: Results) -> list[Result]:
    """Of each way to draft, how many of the answers asked for are the same through the pool as with the full cache, and the
    share of guesses that were right in those, "full" and "pool".
    """
    cells = [cell for cell in bench.cells() if cell.text == "needles"]
    both = [r for cell in cells if (r := results.get(bench.key(cell))) is not None]
    if len(both) < 2:
        return []
    res = []
    for full, pool in zip(*(r["ways"] for r in both), strict=True):
        if full["kind"] == PLAIN:
            continue
        of = [[a for run in way["runs"] for a in run["answers"]] for way in (full, pool)]
        same = [(a, b) for a, b in zip(*of, strict=True) if a["mark"] == b["mark"]]
        shares = [sum(a["accepted"] for a in s) / max(sum(a["drafted"] for a in s), 1) for s in zip(*same, strict=True)]
        right = dict(zip(("full", "pool"), shares or (None, None), strict=True))
        res.append({name: full[name] for name in ("kind", "n_max", "gate")} | {"asked": len(of[0]), "same": len(same)} | right)
    return res


_HEAD = (
    "text", "cache", "drafts", "gate", "tok/s", "x plain", "(least, most)", "right", "committed", "gated", "batch costs",
    "as plain",
)  # fmt: skip


def as_markdown(bench: SpecBench, results: Results) -> str:
    """The table, what the pool changed of the answers, the machine and the command."""
    rows = summarise(bench, results)
    text = markdown(_HEAD, [_cells(row) for row in rows])
    questions = [r for r in rows if r.found is not None and r.kind == PLAIN]
    notes = [f"Codes told right, {r.cache}: {r.found} of {r.answers}." for r in questions]
    notes += [
        f"{Way(a['kind'], a['n_max'], a['gate']).label}: {a['same']} of {a['asked']} answers are the same through the pool;"
        f" of the guesses in those {_percent(a['full'])} were right with the full cache, {_percent(a['pool'])} through it."
        for a in agreements(bench, results)
    ]
    notes.append(
        f"Medians of {bench.rounds} rounds in turns; x plain: over plain in the same round. Batch costs: of a batch of the"
        " draft and one more, in single tokens, at the end of the text. Committed: tokens a drafted step. As plain: answers"
        " that are plain's of the round, token for token; of plain's own, the first round's."
    )
    text += "".join(f"\n{note}\n" for note in notes)
    return text + (f"\n{command(rows)}\n" if rows else "")


def _cells(r: Row) -> list[str]:
    return [
        f"{r.text}, {r.tokens:,} tokens",
        r.cache,
        r.kind if r.kind == PLAIN else f"{r.kind} of {r.n_max}",
        "-" if r.gate is None else _switch(r.gate),
        f"{r.rate:,.0f}",
        f"{r.x:.2f}",
        f"({r.x_low:.2f}, {r.x_high:.2f})",
        _percent(r.acceptance),
        "-" if r.committed is None else f"{r.committed:.2f}",
        "-" if r.gate is None else _percent(r.gated),
        "-" if r.cost is None else f"{r.cost:.1f} at {r.at:,}",
        f"{r.equal}/{r.answers}" + (f", differs at {r.differs:,}" if r.differs is not None else ""),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _switch(on: bool) -> str:  # noqa: FBT001 (a word for it)
    return "on" if on else "off"


def write(bench: SpecBench, results: Results) -> str:
    """Write results.md, .csv and .json; the Markdown."""
    rows = summarise(bench, results)
    text = as_markdown(bench, results)
    names = [f.name for f in fields(Row)]
    whole = {
        "kind": "spec",
        "rounds": bench.rounds,
        "rows": [asdict(r) for r in rows],
        "agreements": agreements(bench, results),
    }
    results.write("results.md", text)
    results.write("results.csv", comma_separated(names, [[getattr(r, n) for n in names] for r in rows]))
    results.write("results.json", json.dumps(whole, indent=1) + "\n")
    return text


def spec_figure(rows: Sequence[Row], title: str) -> bytes:
    """How many times as fast as plain decoding each way is, a group of bars for each text and cache: a PNG."""
    groups = list(dict.fromkeys((r.text, r.tokens if r.found is None else 0, r.cache) for r in rows))
    ways = list(dict.fromkeys((r.kind, r.n_max, r.gate) for r in rows if r.gate is not None))
    fig = figure(2 + 0.25 * (len(ways) + 1) * len(groups), 4.6)
    axis, width = fig.subplots(), 0.8 / max(len(ways), 1)
    for i, way in enumerate(ways):
        mine = [r for r in rows if (r.kind, r.n_max, r.gate) == way]
        at = [groups.index((r.text, r.tokens if r.found is None else 0, r.cache)) + (i + 0.5) * width - 0.4 for r in mine]
        reach = [[r.x - r.x_low for r in mine], [r.x_high - r.x for r in mine]]
        label = Way(way[0], way[1], bool(way[2])).label
        axis.bar(at, [r.x for r in mine], 0.9 * width, yerr=reach, error_kw={"lw": 0.8}, color=f"C{i}", label=label)
    axis.axhline(1, color="#555555", lw=1, ls="--", label="plain decoding")
    axis.set_xticks(range(len(groups)), [f"{t}{f' {n:,}' if n else ''}\n{cache}" for t, n, cache in groups], fontsize=8)
    axis.set_ylabel("x plain, median round (least, most)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=10)
    out = io.BytesIO()
    fig.savefig(out, format="png", dpi=130)
    return out.getvalue()
