"""Speculative decoding against plain, with and without its gate, full cache and pool: measure, resume, tabulate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvflash_bench.answers import COUNTS, TEXTS, OnPrefill, batch_costs, context, difference, in_turns
from kvflash_bench.grid import (
    Key,
    Result,
    Results,
    model_mark,
    setting,
    short,
)
from kvflash_bench.plot import figure, png
from kvflash_bench.steps import hardware
from kvflash_bench.tables import command, markdown, write_files
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.options import SPEC_KINDS, Options, Spec
from pyllama_kvflash.policy.sizing import whole_cells

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Cell:
    """A measurement that is made in one go, in turns. n: tokens to produce, or questions. pool None: the full cache."""

    text: str
    n: int
    pool: int | None

    @property
    def label(self) -> str:
        """Name in progress."""
        return f"{self.text} {self.n:,}, {self.cache}"

    @property
    def cache(self) -> str:
        """Name of the cache in tables."""
        return f"pool {short(self.pool)}" if self.pool else "full"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode. kind: one of options.SPEC_KINDS, or "plain". gate: it may decode plainly where drafts do not
    pay.
    """

    kind: str = PLAIN
    n_max: int = 0
    gate: bool = False

    @property
    def label(self) -> str:
        """Name in progress."""
        return self.kind if self.kind == PLAIN else f"{self.kind} of {self.n_max}, gate {_switch(self.gate)}"


@dataclass(frozen=True, slots=True)
class SpecBench:
    """The plan of a measurement: plain decoding and all ways to draft, on each of TEXTS, with the full cache and a
    pool.

    drafter: its file, for the kinds that take one.
    lengths: tokens to produce of "copy" and "entropy".
    questions: questions of "needles".
    common: options of all runs.

    Raises UsageError.
    """

    model: Path
    drafter: str | None
    kinds: tuple[str, ...] = ("draft", "ngram")
    n_max: tuple[int, ...] = (8,)
    texts: tuple[str, ...] = TEXTS
    lengths: tuple[int, ...] = (300, 2000)
    questions: int = 16
    pool: int = 512
    chunk: int = 32
    rounds: int = 5
    common: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what the engine cannot check."""
        for name, given, known in (("kind", self.kinds, SPEC_KINDS), ("text", self.texts, TEXTS)):
            for word in given:
                if word not in known:
                    msg = f"there is no {name} {word!r}: give some of {','.join(known)}"
                    raise UsageError(msg)
        if self.drafter is None and (wanting := [k for k in self.kinds if k not in ("ngram", "mtp")]):
            msg = f"kind {wanting[0]} needs a drafter: give its file with `drafter`, or leave it out of `kinds`"
            raise UsageError(msg)
        for way in self.ways():
            self.spec(way)
        floor = Options(chunk=self.chunk).shape.floor(self.common.get("n_batch") or 0)
        if self.n_pool < floor:
            msg = f"a pool of {self.pool} (`pool`) is too small for chunks of {self.chunk}: give at least {floor}"
            raise UsageError(msg)
        if set(self.texts) - {"needles"} and min(self.lengths) <= self.n_pool - self.n_pool // 2:
            msg = (
                f"{min(self.lengths)} tokens (-n) after a text of {self.n_pool // 2} do not fill a pool of {self.n_pool}:"
                f" give more than {self.n_pool - self.n_pool // 2}, or a smaller `pool`"
            )
            raise UsageError(msg)

    @property
    def n_pool(self) -> int:
        """The pool in tokens, rounded up to whole steps."""
        return whole_cells(self.pool)

    def cells(self) -> Iterator[Cell]:
        """Yield all cells, the full cache before the pool."""
        for text in self.texts:
            for n in (self.questions,) if text == "needles" else self.lengths:
                for pool in (None, self.n_pool):
                    yield Cell(text, n, pool)

    def ways(self) -> list[Way]:
        """Return all ways to draft: one round of a cell."""
        return [Way(k, n, gate) for k in self.kinds for n in self.n_max for gate in (True, False)]

    def spec(self, way: Way) -> Spec | None:
        """Return the engine's option for a way, None for plain decoding. Raises UsageError."""
        if way.kind == PLAIN:
            return None
        model = None if way.kind == "ngram" else self.drafter
        return Spec(kind=way.kind, model=model, n_max=way.n_max, **({} if way.gate else {"gate": 0}))

    def key(self, cell: Cell) -> Key:
        """Return the key under which a result is filed. The machine and its threads count, because this measures
        speed.
        """
        drafter = Path(self.drafter) if self.drafter else None
        return {
            "bench": "spec",
            "model": model_mark(self.model),
            "drafter": model_mark(drafter) if drafter and drafter.is_file() else self.drafter,
            "ways": [asdict(way) for way in self.ways()],
            "cell": asdict(cell),
            "size": self.n_pool,
            "chunk": self.chunk,
            "rounds": self.rounds,
            "common": {**setting(self.common), "n_threads": self.common.get("n_threads")},
            "machine": hardware(),
        }


#
# measuring
#


def measure(bench: SpecBench, cell: Cell, on_prefill: Callable[[str], OnPrefill]) -> Result:
    """Decode in each way beside plain decoding, some tokens of each in turn, round by round. Returns plain JSON values.

    Both models are opened anew for every round, so that a gate knows nothing of earlier ones. Raises what
    KVFlash.from_file does.
    """
    ways = bench.ways()
    runs: list[list[Result]] = [[] for _ in ways]
    costs: list[dict[int, float]] = []
    first: list[list[int]] = []
    n_pool, at, warnings = None, 0, dict[str, None]()
    for i in range(bench.rounds):
        for way, found in zip(ways, runs, strict=True):
            with _open(bench, cell, Way()) as kv, _open(bench, cell, way) as drafting:
                name = f"{cell.label}, {way.label}, round {i + 1}"
                both = in_turns((kv, drafting), cell.text, bench.n_pool, cell.n, on_prefill(name))
                (plain, plain_answers), (texts, answers) = both
                warnings.update(dict.fromkeys((*kv.warnings, *drafting.warnings)))
                first = first or plain
                _compare(plain_answers, plain, first)
                _compare(answers, texts, plain)
                found.append({"answers": answers, "plain": plain_answers})
                n_pool, at = kv.n_pool, kv.n_tokens
                costs.append(batch_costs(kv, [n + 1 for n in bench.n_max]))
    return {
        "n_pool": n_pool,
        "at": at,
        "ways": [{**asdict(way), "runs": found} for way, found in zip(ways, runs, strict=True)],
        "costs": {str(n): median(c[n] for c in costs) for n in costs[0]},
        "warnings": list(warnings),
        "machine": hardware(),
    }


def _compare(answers: list[Result], texts: list[list[int]], right: list[list[int]]) -> None:
    for answer, text, expected in zip(answers, texts, right, strict=True):
        answer["differs"] = difference(text, expected)


def _open(bench: SpecBench, cell: Cell, way: Way) -> KVFlash:
    n_ctx = context(cell.text, bench.n_pool, cell.n) + max(bench.n_max) + 1
    options = {
        "policy": "qk",
        "coarse": "off",
        **bench.common,
        "n_ctx": n_ctx,
        "pool": cell.pool or "off",
        "chunk": bench.chunk,
        "spec": bench.spec(way),
        "opening": 0,
    }
    return KVFlash.from_file(bench.model, **options)


#
# tables
#


@dataclass(frozen=True, slots=True)
class Row:
    """A way to decode a text. gate None: plain decoding. Counts are of all rounds.

    tokens: produced in a round.
    rate: tokens a second, in the median round.
    x, x_low, x_high: rate over that of plain decoding beside it: median, least and most.
    committed: tokens a drafted step.
    gated: share of the steps that were plain because of the gate.
    cost: of a batch of n_max + 1 after the text, in single tokens; at: positions then.
    equal: how many of `answers` answers equal those of plain decoding beside it, token for token (for plain decoding:
        those of the first time).
    differs: the first token that differs.
    found: codes answered right.
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
    """Return a row for each measured way and cell, plain decoding first."""
    found: list[Row] = []
    for cell in bench.cells():
        if (result := results.get(bench.key(cell))) is not None:
            plain = [run["plain"] for way in result["ways"] for run in way["runs"]]
            found.append(_row(cell, result, asdict(Way()), plain, plain))
            for way in result["ways"]:
                answers, beside = ([run[name] for run in way["runs"]] for name in ("answers", "plain"))
                found.append(_row(cell, result, way, answers, beside))
    return found


def _rate(answers: list[Result]) -> float:
    seconds = sum(a["decode_s"] for a in answers)
    return sum(max(a["n"] - 1, 0) for a in answers) / seconds if seconds else 0.0


def _row(cell: Cell, result: Result, way: Result, runs: list[list[Result]], plain: list[list[Result]]) -> Row:
    rates = [_rate(run) for run in runs]
    xs = [rate / (_rate(beside) or 1) for rate, beside in zip(rates, plain, strict=True)]
    answers = [a for run in runs for a in run]
    n = {name: sum(a[name] for a in answers) for name in COUNTS}
    differs = [a["differs"] for a in answers if a["differs"] is not None]
    return Row(
        text=cell.text,
        cache=cell.cache,
        pool=result["n_pool"],
        kind=way["kind"],
        n_max=way["n_max"],
        gate=None if way["kind"] == PLAIN else way["gate"],
        tokens=sum(a["n"] for a in runs[0]),
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
    """Return, for each way to draft, how many of the answers to questions are the same through the pool and with the
    full cache, and the share of right guesses in those, as "full" and "pool".
    """
    cells = [cell for cell in bench.cells() if cell.text == "needles"]
    both = [r for cell in cells if (r := results.get(bench.key(cell))) is not None]
    res = []
    for full, pool in zip(*(r["ways"] for r in both), strict=True) if len(both) == len(cells) else ():
        of = [[a for run in way["runs"] for a in run["answers"]] for way in (full, pool)]
        same = [(a, b) for a, b in zip(*of, strict=True) if a["mark"] == b["mark"]]
        shares = [sum(a["accepted"] for a in s) / max(sum(a["drafted"] for a in s), 1) for s in zip(*same, strict=True)]
        right = dict(zip(("full", "pool"), shares or (None, None), strict=True))
        res.append(
            {name: full[name] for name in ("kind", "n_max", "gate")} | {"asked": len(of[0]), "same": len(same)} | right
        )
    return res


_HEAD = (
    "text", "cache", "drafts", "gate", "tok/s", "x plain", "(least, most)", "right", "committed", "gated", "batch costs",
    "as plain",
)  # fmt: skip


def as_markdown(bench: SpecBench, results: Results) -> str:
    """Return the table, what the pool changed in the answers, the machine and the command."""
    rows = summarise(bench, results)
    text = markdown(_HEAD, [_cells(row) for row in rows])
    questions = [r for r in rows if r.found is not None and r.kind == PLAIN]
    notes = [f"Codes answered right, {r.cache}: {r.found} of {r.answers}." for r in questions]
    notes += [
        f"{Way(a['kind'], a['n_max'], a['gate']).label}: {a['same']} of {a['asked']} answers are the same through the pool;"
        f" of the guesses in those {_percent(a['full'])} were right with the full cache, {_percent(a['pool'])} through it."
        for a in agreements(bench, results)
    ]
    notes.append(
        f"Each way beside plain decoding, some tokens of each in turn, {bench.rounds} times: medians, and the least and the"
        " most. Right: of the guesses. Committed: tokens a drafted step. Gated: of the steps. Batch costs: of a batch of the"
        " draft and one more, in single tokens, at the end of the text. As plain: answers that are those of plain decoding"
        " beside it, token for token; of plain decoding, those of the first time."
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
    """Write results.md, .csv and .json. Return the Markdown."""
    rows = summarise(bench, results)
    plain = [asdict(r) for r in rows]
    whole = {
        "kind": "spec",
        "rounds": bench.rounds,
        "rows": plain,
        "agreements": agreements(bench, results),
    }
    return write_files(results, as_markdown(bench, results), plain, whole)


def spec_figure(rows: Sequence[Row], title: str) -> bytes:
    """Plot how many times as fast as plain decoding each way is, a group of bars for each text and cache: a PNG."""
    groups = list(dict.fromkeys((r.text, r.tokens if r.found is None else 0, r.cache) for r in rows))
    ways = list(dict.fromkeys((r.kind, r.n_max, r.gate) for r in rows if r.gate is not None))
    fig = figure(2 + 0.25 * (len(ways) + 1) * len(groups), 4.6)
    axis, width = fig.subplots(), 0.8 / max(len(ways), 1)
    for i, way in enumerate(ways):
        mine = [r for r in rows if (r.kind, r.n_max, r.gate) == way]
        at = [
            groups.index((r.text, r.tokens if r.found is None else 0, r.cache)) + (i + 0.5) * width - 0.4 for r in mine
        ]
        reach = [[r.x - r.x_low for r in mine], [r.x_high - r.x for r in mine]]
        label = Way(way[0], way[1], bool(way[2])).label
        axis.bar(at, [r.x for r in mine], 0.9 * width, yerr=reach, error_kw={"lw": 0.8}, color=f"C{i}", label=label)
    axis.axhline(1, color="#555555", lw=1, ls="--", label="plain decoding")
    axis.set_xticks(range(len(groups)), [f"{t}{f' {n:,}' if n else ''}\n{cache}" for t, n, cache in groups], fontsize=8)
    axis.set_ylabel("x plain, median round (least, most)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=10)
    return png(fig)
