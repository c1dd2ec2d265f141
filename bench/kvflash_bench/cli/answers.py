"""`kvflash bench`: does a pool give the full cache's answers?"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvflash_bench import kld as kld_bench
from kvflash_bench import ruler as ruler_bench
from kvflash_bench import ruler_tables
from kvflash_bench import sweep as recall_bench
from kvflash_bench.figures import heat_map, kld_figure, ruler_figure
from kvflash_bench.grid import FILES, Results, Variant, refuse_controls
from kvflash_bench.ruler_texts import GROUPS, SAMPLE
from pyllama_kvflash import native
from pyllama_kvflash.cli import kinds, params
from pyllama_kvflash.cli.fetch import model_path, named_model
from pyllama_kvflash.cli.read import read_text
from pyllama_kvflash.cli.report import CellBar, Reporter
from pyllama_kvflash.cli.roles import Command, Declared, Reads, reads, reads_scorer_model, writes
from pyllama_kvflash.errors import Interrupted, UsageError, counted
from pyllama_kvflash.loading.load import check_file
from pyllama_kvflash.loading.planning import look
from pyllama_kvflash.options import Options
from pyllama_kvflash.text import printable

HELP = """Compare the answers of pools with the full cache's.

Each bench runs the full cache and the pools on the same text, and writes results.md, .csv, .json and a picture into a
folder. It can be stopped at any time: results.jsonl there keeps what was measured, and a new run continues from it.

A variant is a policy, with options of its own after slashes: full, lru, fresh, qk, qk-cos, oracle (forces in the chunk
that holds the answer), qk/replay=0, fresh/coarse=2, full/type_k=q8_0/type_v=q8_0, oracle/replay=0 ... kld and ruler also
take qk/answer=full, a control: the prompt is read through the pool, then all of it is brought back for the answer.
Answers are decoded through the pool from their first token on; qk/opening=32 begins losslessly, as `kvflash run` does.
fresh sees what is outside the pool by codes, of as many bits as fit; the others see nothing of it, unless as in lru/coarse=4.
Where there are no codes, fresh is left out of the default variants.
"""

NIAH_HELP = """Ask for codes hidden at even depths of long texts, one by one.

Without MODEL.gguf, the bundled needle-7m runs, which finds them all with the full cache. Other models get the same
texts, or yours with -f. An answer counts if the code is in it.

\b
  kvflash bench niah --contexts 8K --pools 1K --docs 1              a first look, half a minute
  kvflash bench niah                                                8K to 64K, pools of 1K and 2K, 3 texts: an hour
  kvflash bench niah model.gguf -f book.txt --variants full,lru,fresh
"""

FACTS_HELP = """Ask for facts at random depths, each among decoys that share its words, one by one.

Then ask for some of them one after the other, without going back: are their chunks still there as answers pile up?

\b
  kvflash bench facts --contexts 16K --pools 1K
"""

KLD_HELP = """Measure how far the next-token distributions on a text are from the full cache's.

The end of the text is given token by token, as in decoding. Pools are compared with full caches quantised to q8_0 and
q4_0, which take 53 % and 28 % of the memory. Without -f, the text has codes, and ends in questions and answers.

With --task, the text is one of `kvflash bench ruler` (its tasks of long answers, see there), hidden in the prose of -f, and
its right answer is given token by token: for turns, with the questions between the answers. No grammar is applied to json.

Columns: device memory, the mean divergence (KLD), what 99 and 99.9 % of the tokens stay below (of fewer than 1,000 tokens the
latter is nearly the largest), the share with the same most likely next token, and perplexity.

\b
  kvflash bench kld model.gguf -f book.txt --contexts 16K
  kvflash bench kld model.gguf --task json --contexts 16K
"""


RULER_HELP = f"""Run the tasks of RULER: codes, variables and words in long texts, answered greedily.

The model gets each text as a user's message in its chat template, and its answer begins as RULER prescribes. Points are
the share of the expected strings that are in the answer, times 100.

\b
  kvflash bench ruler model.gguf --quick                            a first look: 4 minutes for 135M weights, two cores
  kvflash bench ruler model.gguf                                    8K and 16K, pools of 1K and 2K, 5 texts each: hours
  kvflash bench ruler model.gguf --tasks multikey_2,vt,cwe --docs 20
  kvflash bench ruler model.gguf --tasks ruler,long                 long answers, too
  kvflash bench ruler model.gguf --variants full,qk,qk/answer=full  what reading and answering through the pool cost

Tasks, as a group ruler: {", ".join(GROUPS["ruler"])}. The first eight hide needles in noise (single_1), in prose, or among other needles
(multikey_2, with uuids multikey_3), and ask for one, for all values of one (multivalue) or for four (multiquery).
in_turn is not RULER's: two questions about one text, the second after the answer to the first. vt: the variables that
have a value. cwe, fwe: the most frequent words. RULER's qa_1 and qa_2 need data sets, and are not here.

Tasks of long answers, which are not RULER's, as a group long: {", ".join(GROUPS["long"])}. They have a table and a mean of
their own.
list: 16 numbers, each with its name, in the order of the text. Points: the longest common subsequence with the right list.
turns: eight questions about one text, each after the answer to the last. Nothing is read again.
copy: 200 tokens of the text, word for word, from the words that the answer begins with. Points: the share of their runs of
four words that the answer has, too.
json: 24 records, to be given as a JSON array, which a grammar enforces. Points: the share of right values, by record number.
One wrong number shifts all records behind it. So a second column, "json in order", has the longest common subsequence of whole
records with the right ones, whatever their numbers. The mean and the gap leave it out.

With answer=full, the prompt is read through the pool, then all of it is brought back, and its last tokens are read
again (unless a recurrent state cannot go back). What such a row loses against full was lost in reading. It can score
below the pool's own row, because a question that was read among few chunks is then answered among all.

Columns: points of each task, their mean, the gap to the full cache of the same run on the same texts, the standard
error of that gap, and the number of texts. With few texts, differences of some points are noise.
"""


class Numbers(click.ParamType[tuple[int, ...]]):
    """Numbers of tokens, separated by commas."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse the value, or fail with what is allowed."""
        if isinstance(value, tuple):
            return value
        found = (int(kinds.TokenCount().convert(part, param, ctx)) for part in str(value).split(","))
        res = tuple(dict.fromkeys(found))
        if min(res) < 1:
            self.fail(f"{value!r} has a number below 1", param, ctx)
        return res


class Shares(click.ParamType[tuple[float, ...]]):
    """Percentages, separated by commas."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Parse the value, or fail with what is allowed."""
        if isinstance(value, tuple):
            return value
        try:
            found = (float(part.strip().removesuffix("%")) / 100 for part in str(value).split(","))
            res = tuple(dict.fromkeys(found))
        except ValueError:
            self.fail(f"{value!r} is not a list of percentages: give one such as 50,25,12.5", param, ctx)
        if not all(0 < x < 1 for x in res):
            self.fail(f"{value!r} must be above 0 and below 100", param, ctx)
        return res


def _variants(text: str) -> tuple[Variant, ...]:
    parts = re.split(r",(?=\D)", text)  # a number after a comma belongs to a value: coarse=4,2
    return tuple({part: Variant.parse(part) for part in parts}.values())


COMMON = params.options(
    params.MODEL,
    click.option("-o", "--output", metavar="FOLDER", type=Declared(), default=None,
                 help="Folder for the results.  [default: kvflash-NAME]"),
    click.option("-ctk", "--cache-type-k", "type_k", type=click.Choice(list(native.CACHE_TYPES)), default="f16",
                 show_default=True, help="KV cache data type for K, for variants that set none."),
    click.option("-ctv", "--cache-type-v", "type_v", type=click.Choice(list(native.CACHE_TYPES)), default="f16",
                 show_default=True, help="KV cache data type for V, for variants that set none."),
    click.option("-b", "--batch-size", "n_batch", type=kinds.TokenCount(), default=0, show_default=True,
                 help="Logical batch size: prompt tokens per decode call, 0: as many as the pool can hold."),
    click.option("--scorer-model", "--draft-scorer", "scorer_model", metavar="FILE", type=Reads(), default=None,
                 help="Scorer model for variants of policy drafter."),
    click.option("-t", "--threads", "n_threads", type=int, default=None, help="CPU threads.  [default: all cores]"),
    click.option("-ngl", "--n-gpu-layers", "n_gpu_layers", metavar="N|all", type=kinds.ALL_LAYERS, default="all",
                 show_default=True, help="Layers to offload to the GPU."),
    click.option("-ncmoe", "--n-cpu-moe", "n_cpu_moe", metavar="N|auto", type=kinds.HOST_LAYERS, default=0,
                 show_default=True, help="Keep the experts, or feed-forward weights, of the first N layers in host memory; auto: of as few"
                 " layers as leave room for the pool."),
)  # fmt: skip

RECALL = params.options(
    click.option("--contexts", type=Numbers(), default="8K,16K,32K,64K", show_default=True,
                 help="Text lengths in tokens."),
    click.option("--pools", type=Numbers(), default="1K,2K", show_default=True, help="Pool sizes in tokens."),
    click.option("--docs", type=click.IntRange(1), default=3, show_default=True, help="Texts per length."),
    click.option("-s", "--seed", type=click.IntRange(0), default=11, show_default=True,
                 help="Number of the first text."),
)  # fmt: skip


@click.group(help=HELP)
def bench() -> None:
    """`kvflash bench`."""


@bench.command(cls=Command, help=NIAH_HELP, short_help="Codes at even depths of long texts.")
@COMMON
@RECALL
@click.option("--needles", type=click.IntRange(1, 1000), default=16, show_default=True, help="Codes per text.")
@click.option(
    "--variants",
    default="full,lru,qk-cos,qk,fresh,oracle,oracle/replay=0",
    show_default=True,
    help="Rows of the table, see above.",
)
@click.option("-f", "--file", "text_file", metavar="FILE", type=Reads(), help="Text to hide the codes in.")
def niah(needles: int, text_file: str | None, **options: Any) -> None:
    """Run the niah bench."""
    haystack = _text(text_file)
    _recall("niah", options, n_needles=needles, haystack=haystack)


@bench.command(cls=Command, help=FACTS_HELP, short_help="Facts among decoys that share their words.")
@COMMON
@RECALL
@click.option("--facts", "n_facts", type=click.IntRange(1, 64), default=8, show_default=True, help="Facts per text.")
@click.option("--decoys", type=click.IntRange(0, 8), default=2, show_default=True, help="Decoys per fact.")
@click.option("--session", type=click.IntRange(0), default=7, show_default=True, help="Facts to ask for in one go.")
@click.option("--variants", default="full,lru,qk,fresh", show_default=True, help="Rows of the table, see above.")
def facts(n_facts: int, decoys: int, session: int, **options: Any) -> None:
    """Run the facts bench."""
    _recall("facts", options, n_needles=n_facts, n_decoys=decoys, session=session)


@bench.command(cls=Command, help=KLD_HELP, short_help="Distance from the full cache's distributions.")
@COMMON
@click.option(
    "-f", "--file", "text_file", metavar="FILE", type=Reads(), help="The text to read; with --task, its prose."
)
@click.option(
    "--contexts", type=Numbers(), default="16K", show_default=True, help="Context sizes: tokens of the text to use."
)
@click.option(
    "--score", "n_score", type=click.IntRange(1), default=256, show_default=True, help="Tokens at the end to compare."
)
@click.option(
    "--task",
    type=click.Choice(GROUPS["long"]),
    default=None,
    help="Read a text of this task, and compare all tokens of its right answer.",
)
@click.option("-s", "--seed", type=click.IntRange(0), default=11, show_default=True, help="Number of the task's text.")
@click.option(
    "--shares",
    type=Shares(),
    default="50,28.1,25,12.5,6.25",
    show_default=True,
    help="Pool sizes in percent of the context.",
)
@click.option(
    "--variants",
    default="full/type_k=q8_0/type_v=q8_0,full/type_k=q4_0/type_v=q4_0,lru,qk-cos,qk,fresh",
    show_default=True,
    help="Rows of the table, see above.",
)
def kld(text_file: str | None, n_score: int, task: str | None, seed: int, **options: Any) -> None:
    """Run the kld bench."""
    model, folder, common, variants, reporter = _common("kld", options)
    contexts = options["contexts"]
    if task is not None and not _untyped("n_score"):
        msg = f"--score is {n_score:,}, and --task compares all tokens of the right answer: give one of them"
        raise UsageError(msg)
    if task is None and n_score >= min(contexts):
        msg = f"--score is {n_score:,}, and must be less than the shortest context of {min(contexts):,}"
        raise UsageError(msg)
    long_task = None if task is None else kld_bench.LongTask(task, seed, _haystack(text_file))
    text = None if task is not None else _text(text_file)
    sweep = kld_bench.KldSweep(model, text, contexts, options["shares"], variants, n_score, common, long_task)
    results = Results(folder)
    with measuring("kld", len(list(sweep.cells())), results, reporter) as bar:
        bar.skip(sum(results.get(sweep.key(c)) is not None for c in sweep.cells()))
        for cell in kld_bench.measure(sweep, results, bar.prefill):
            bar.done()
            for warning in (results.get(sweep.key(cell)) or {})["warnings"]:
                reporter.warn(f"{cell.variant.label} {cell.n_ctx:,}/{cell.pool or 'full'}: {warning}")
            kld_bench.write(sweep, results)
    click.echo(kld_bench.write(sweep, results), nl=False)
    rows = kld_bench.rows(sweep, results)
    title = f"{printable(model.stem)}, {f'{n_score} tokens' if task is None else task}"
    picture(results, reporter, lambda: kld_figure((rows, title)))


_QUICK = {"contexts": (4096,), "pools": (768,), "docs": 1, "tasks": "single_2,multikey_1,in_turn,fwe"}
_QUICK_HELP = f"--contexts 4K --pools 768 --docs 1 --tasks {_QUICK['tasks']}, except for options that are given."


def _untyped(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) == ParameterSource.DEFAULT


@bench.command(cls=Command, help=RULER_HELP, short_help="RULER's tasks: codes, variables and words in long texts.")
@COMMON
@click.option(
    "-f", "--file", "text_file", metavar="FILE", type=Reads(), help="Prose to hide things in.  [default: Moby-Dick]"
)
@click.option(
    "--contexts", type=Numbers(), default="8K,16K", show_default=True, help="Text lengths in tokens, answers included."
)
@click.option("--pools", type=Numbers(), default="1K,2K", show_default=True, help="Pool sizes in tokens.")
@click.option("--docs", type=click.IntRange(1), default=5, show_default=True, help="Texts per task and length.")
@click.option("-s", "--seed", type=click.IntRange(0), default=11, show_default=True, help="Number of the first text.")
@click.option("--tasks", default="ruler", show_default=True, metavar="NAMES", help="Tasks or groups, see above.")
@click.option("--variants", default="full,lru,qk,fresh", show_default=True, help="Rows of the tables, see above.")
@click.option("--quick", is_flag=True, help=_QUICK_HELP)
def ruler(text_file: str | None, *, quick: bool, **options: Any) -> None:
    """Run the ruler bench."""
    if named_model(options["model_arg"], options["model"]) is None:
        msg = "bench ruler needs a model that answers questions: give its .gguf file, or -hf user/model"
        raise UsageError(msg)
    if quick:
        options |= {name: value for name, value in _QUICK.items() if _untyped(name)}
    model, folder, common, variants, reporter = _common("ruler", options)
    seeds = tuple(range(options["seed"], options["seed"] + options["docs"]))
    tasks = ruler_bench.parse_tasks(options["tasks"])
    haystack = _haystack(text_file)
    plan = ruler_bench.Ruler(model, options["contexts"], options["pools"], variants, tasks, seeds, haystack, common)
    results = Results(folder)
    n = len(list(plan.cells())) * len(plan.texts())
    n_missing = sum(len(plan.missing(results, cell)) for cell in plan.cells())
    told: set[tuple[str, str]] = set()
    with measuring("ruler", n, results, reporter) as bar:
        bar.skip(n - n_missing)
        for cell, result in ruler_bench.measure(plan, results, bar.prefill):
            bar.done()
            for warning in result["warnings"]:
                if (cell.label, warning) not in told:
                    told.add((cell.label, warning))
                    reporter.warn(f"{cell.label}: {warning}")
            ruler_tables.write(plan, results)
    click.echo(ruler_tables.write(plan, results), nl=False)
    rows = ruler_tables.summarise(plan, results)
    title = f"{printable(model.stem)}: {len(seeds)} text{'s' if len(seeds) > 1 else ''} of each task"
    picture(results, reporter, lambda: ruler_figure(rows, tasks, title))


def _text(file: str | None) -> str | None:
    if file is None:
        return None
    text = read_text(file)
    if not text.strip():
        msg = f"the text file {file} is empty: give one with words"
        raise UsageError(msg)
    return text


def _haystack(file: str | None) -> str:
    """Return the prose to hide things in, the bundled one if no file is given."""
    if file is None:
        reads("the bundled text", SAMPLE)
    return _text(file) or SAMPLE.read_text("utf-8")


def _recall(kind: str, options: dict[str, Any], **own: Any) -> None:
    model, folder, common, variants, reporter = _common(kind, options)
    refuse_controls(kind, variants)
    seeds = tuple(range(options["seed"], options["seed"] + options["docs"]))
    sweep = recall_bench.Sweep(
        kind, model, options["contexts"], options["pools"], variants, seeds, common=common, **own
    )
    results = Results(folder)
    cells = list(sweep.cells())
    if not cells:
        msg = "there is nothing to measure: no pool of --pools is smaller than a context of --contexts"
        raise UsageError(msg)
    missing = [cell for cell in cells if results.get(sweep.key(cell)) is None]
    with measuring(kind, len(cells), results, reporter) as bar:
        bar.skip(len(cells) - len(missing))
        for cell in missing:
            name = f"{cell.variant.label} {cell.n_ctx:,}/{cell.pool or 'full'} text {cell.seed}"
            try:
                result = sweep.measure(cell, bar.prefill(name))
            except ValueError as err:  # a text that cannot be made
                raise UsageError(str(err)) from None
            results.add(sweep.key(cell), result)
            bar.done()
            for warning in result["warnings"]:
                reporter.warn(f"{name}: {warning}")
            recall_bench.write(sweep, results)
    click.echo(recall_bench.write(sweep, results), nl=False)
    rows = recall_bench.summarise(sweep, results)
    title = f"{printable(model.stem)}: codes found, {counted(len(seeds), 'text')}"
    picture(results, reporter, lambda: heat_map(rows, title))


def _common(kind: str, options: dict[str, Any]) -> tuple[Path, Path, dict[str, Any], tuple[Variant, ...], Reporter]:
    reporter = Reporter()
    model = model_path(options["model_arg"], options["model"], reporter)
    check_file(model)
    folder = results_folder(kind, options["output"])
    variants = _variants(options["variants"])
    reads_scorer_models(variants, options["scorer_model"], model)
    names = ("type_k", "type_v", "n_batch", "scorer_model", "n_threads", "n_gpu_layers", "n_cpu_moe")
    common = {n: options[n] for n in names}
    return model, folder, common, feasible(variants, model, common, reporter), reporter


def feasible(
    variants: tuple[Variant, ...], model: Path, common: dict[str, Any], reporter: Reporter
) -> tuple[Variant, ...]:
    """Return the variants that run, and say which do not: of the default ones, fresh where layers cannot choose. Variants
    that were asked for are all returned: what cannot run ends with its refusal.

    common: options of all variants. Raises as loading the model.
    """
    if not _untyped("variants") or not any(v.policy == "fresh" for v in variants):
        return variants
    with look(model, Options(**common)) as found:
        why = found.seen.uncoded
    if why is None or found.seen.refusal is not None:
        return variants
    reporter.note(f"variant fresh is left out: {why}")
    return tuple(v for v in variants if v.policy != "fresh")


def results_folder(kind: str, given: str | None) -> Path:
    """Return the folder for the results of a bench, whose files are declared to be written. Raises UsageError."""
    folder = Path(given or f"kvflash-{kind}")
    writes("-o/--output", *(folder / name for name in FILES))
    return folder


@contextmanager
def measuring(kind: str, n: int, results: Results, reporter: Reporter) -> Iterator[CellBar]:
    """Show the bar of a bench of n runs. If Ctrl-C stops it, a line says what is kept."""
    bar: CellBar | None = None
    try:
        with native.interruptible(), reporter.counting(kind, n) as bar:
            yield bar
    except (Interrupted, KeyboardInterrupt):
        if bar is not None and bar.n_done:
            runs = f"{bar.n_done} of {n} runs {'is' if bar.n_done == 1 else 'are'} measured"
            reporter.note(f"{runs} and kept in {results.folder}: the same command measures the rest")
        raise


def reads_scorer_models(variants: Iterable[Variant], given: str | None, model: Path) -> None:
    """Declare the scorer models that variants read, named or found. Raises UsageError."""
    for variant in variants:
        named = variant.options.get("scorer_model")
        if named:
            reads(f"variant {variant.label}", named)
        reads_scorer_model(variant.policy, named or given, model)


def picture(results: Results, reporter: Reporter, draw: Callable[[], bytes]) -> None:
    """Write results.png, and report which files were written."""
    try:
        path = results.write("results.png", draw())
    except UsageError as err:  # no matplotlib: the tables are what counts
        reporter.warn(str(err))
        return
    reporter.note(f"wrote {path.with_suffix('.md')}, .csv, .json and .png")
