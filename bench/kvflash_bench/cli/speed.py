"""`kvflash bench speed` and `kvflash bench paging`: measure what a pool costs, and what it saves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvflash_bench import paging as paging_bench
from kvflash_bench import shapes
from kvflash_bench import speed as speed_bench
from kvflash_bench.cli.answers import Numbers, feasible, measuring, picture, reads_scorer_models, results_folder
from kvflash_bench.curves import paging_figure, speed_figure
from kvflash_bench.grid import Results, model_mark
from pyllama_kvflash import native
from pyllama_kvflash.cli import kinds, params
from pyllama_kvflash.cli.fetch import located, named_model
from pyllama_kvflash.cli.memory import mib
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Declared, Reads, reads, writes
from pyllama_kvflash.errors import NativeError, UsageError
from pyllama_kvflash.loading.load import check_file
from pyllama_kvflash.options import FLASH_ATTN
from pyllama_kvflash.text import printable

SPEED_HELP = """Measure decode and prefill speed against the context, for the full cache and for pools in one run.

Every cache is filled with random tokens from context to context, and decodes some at each. Give a model, or a shape: a
model of that geometry with random weights is then written for the run, which takes seconds. 8b: 36 layers, 8 KV heads
of 128; 70b: 80 such layers, 37 GiB; 27b-hybrid: 64 layers, 16 of them attention with 4 KV heads of 256; 27b-mtp: the same
with a head that drafts; 35b-a3b: experts, and 40 layers, 10 of them attention with 2 KV heads of 256; 26b-a4b: Gemma 4, 30
layers, 25 of them with a window of 1,024; laguna: 40 layers, 30 of them with a window of 512; tiny and tiny-...: for a first
try on a CPU.

\b
  kvflash bench speed --shape tiny --contexts 1K,2K,4K --pools 1K --steps 128 -t 1    a first look, half a minute
  kvflash bench speed --shape 8b                                                      8K to 256K, on a GPU
  kvflash bench speed model.gguf --pools 4K,16K --variants full,lru,fresh             with the default policy, and codes
  kvflash bench speed --shape 8b --contexts 256K --variants lru,lru/write_back=0      what writing records costs

A variant is a policy, with options of its own after slashes: full, lru, qk/share=0/tau=64 (a schedule that does not
look at the clock), full/type_k=f16 ... fresh has codes of what is outside the pool, of as many bits as fit; the others have
none, unless as in lru/coarse=4. The variant lru/write_back=0 writes no records and so loses what leaves the
pool: it shows what prefill could reach. Where layers cannot choose their chunks, fresh is left out of the default variants.

It writes results.md, .csv, .json and a picture into a folder. What was measured on this machine is not measured again.
"""

PAGING_HELP = """Measure the bandwidth out of and into the pool beside a plain copy, and the token stream during swaps.

Chunks leave and come back in turns with plain copies between the same memories. Then tokens are decoded, while a fixed
number of chunks is swapped at every reselect, and without swaps.

\b
  kvflash bench paging --shape tiny --pool 1K --repeat 5 --reselect 4 --steps 256 -t 1    a first look, seconds
  kvflash bench paging --shape 8b --pool 4K --reselect 16                                 on a GPU
  kvflash bench paging model.gguf --pool 8K --tau 32                                      on your model

It writes results.md, .csv, .json and a picture into a folder.
"""

COMMON = params.options(
    params.MODEL,
    click.option("--shape", type=click.Choice(list(shapes.SHAPES)), default=None,
                 help="Use a model of this geometry with random weights, instead of MODEL.gguf."),
    click.option("--shape-dir", metavar="FOLDER", type=Declared(), default=None,
                 help="Folder that keeps the shape's model for the next run.  [default: it is removed at the end]"),
    click.option("-o", "--output", metavar="FOLDER", type=Declared(), default=None,
                 help="Folder for the results.  [default: kvflash-NAME]"),
    click.option("-ctk", "--cache-type-k", "type_k", type=click.Choice(list(native.CACHE_TYPES)), default="q8_0",
                 show_default=True, help="KV cache data type for K."),
    click.option("-ctv", "--cache-type-v", "type_v", type=click.Choice(list(native.CACHE_TYPES)), default="q8_0",
                 show_default=True, help="KV cache data type for V; a quantised type needs -fa."),
    click.option("-fa", "--fa", "--flash-attn", "flash_attn", type=click.Choice(FLASH_ATTN), default="on",
                 show_default=True, help="Flash attention."),
    params.COMPUTE,
)  # fmt: skip

_ENGINE = (
    *("type_k", "type_v", "flash_attn", "n_batch", "n_ubatch", "n_threads"),
    *("n_gpu_layers", "tensor_split", "n_cpu_moe", "rpc"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """A source of the model: a file, or a shape to write one from."""

    path: Path | None
    shape: str
    folder: Path | None

    @property
    def name(self) -> str:
        """Name in titles."""
        return printable(self.path.stem) if self.path else f"shape {self.shape}"

    @property
    def mark(self) -> str:
        """Mark in keys. A shape's mark needs no file, because its bytes are known before they are written."""
        return model_mark(self.path) if self.path else f"shape {self.shape} v{shapes.VERSION}"

    @contextmanager
    def file(self, reporter: Reporter) -> Iterator[Path]:
        """Yield the model's file."""
        if self.path:
            yield self.path
            return
        size = mib(shapes.shape_named(self.shape).n_bytes)
        reporter.note(
            f"a model of shape {self.shape} with random weights, {size}: for speed, what it says means nothing"
        )
        with shapes.shape_file(self.shape, self.folder) as path:
            yield path


@click.command(cls=Command, help=SPEED_HELP, short_help="Decode and prefill speed against the context.")
@COMMON
@click.option(
    "--contexts", type=Numbers(), default="8K,64K,128K,256K", show_default=True, help="Contexts at which to decode."
)
@click.option("--pools", type=Numbers(), default="4K", show_default=True, help="Pool sizes in tokens.")
@click.option("--variants", default="full,lru,qk,fresh", show_default=True, help="Lines of the table, see above.")
@click.option(
    "--steps", type=click.IntRange(8), default=256, show_default=True, help="Tokens to decode at each context."
)
@click.option(
    "--scorer-model",
    "--draft-scorer",
    "scorer_model",
    metavar="FILE",
    type=Reads(),
    default=None,
    help="Scorer model for variants of policy drafter.",
)
def speed(**options: Any) -> None:
    """Run the speed bench."""
    reporter, source = Reporter(), _source(options)
    common = {name: options[name] for name in (*_ENGINE, "scorer_model")}
    variants = tuple({part: speed_bench.speed_variant(part) for part in options["variants"].split(",")}.values())
    folder = results_folder("speed", options["output"])
    if source.path:
        reads_scorer_models(variants, options["scorer_model"], source.path)
    contexts = tuple(sorted(options["contexts"]))
    plan = speed_bench.Speed(source.mark, contexts, options["pools"], variants, options["steps"], common, source.path)
    results = Results(folder)
    if plan.missing(results):
        with source.file(reporter) as path:
            plan = replace(plan, variants=feasible(variants, path, common, reporter))
            _measure(plan, results, path, reporter)
    rows = speed_bench.summarise(plan, results)
    if all(row.error for row in rows):
        raise NativeError(str(rows[0].error))
    click.echo(speed_bench.write(plan, results), nl=False)
    title = f"{source.name}, {common['type_k']}/{common['type_v']} cache"
    picture(results, reporter, lambda: speed_figure(rows, title))


def _measure(plan: speed_bench.Speed, results: Results, path: Path, reporter: Reporter) -> None:
    """Measure what is missing, and write what is known after each cache."""
    missing, n = plan.missing(results), len(plan.caches())
    with measuring("speed", n, results, reporter) as bar:
        bar.skip(n - len(missing))
        for cache in missing:
            result = speed_bench.measure(plan, cache, path, bar.prefill(cache.label))
            results.add(plan.key(cache), result)
            bar.done()
            for warning in dict.fromkeys(result["warnings"]):
                reporter.warn(f"{cache.label}: {warning}")
            speed_bench.write(plan, results)


@click.command(
    cls=Command, help=PAGING_HELP, short_help="Bandwidth of paging, and what swapping does to the token stream."
)
@COMMON
@click.option("--pool", type=kinds.TokenCount(), default="4K", show_default=True, help="Pool size in tokens.")
@click.option("--repeat", type=click.IntRange(1), default=20, show_default=True, help="Rounds, whose median counts.")
@click.option("--reselect", "n_swap", type=click.IntRange(1), default=16, show_default=True, help="Chunks in a swap.")
@click.option("--tau", type=click.IntRange(1), default=64, show_default=True, help="Tokens from one swap to the next.")
@click.option("--steps", type=click.IntRange(8), default=512, show_default=True, help="Tokens to decode.")
def paging(pool: int, repeat: int, n_swap: int, tau: int, steps: int, **options: Any) -> None:
    """Run the paging bench."""
    reporter, source = Reporter(), _source(options)
    folder = results_folder("paging", options["output"])
    plan = paging_bench.Paging(pool, repeat, n_swap, tau, steps, {name: options[name] for name in _ENGINE})
    results = Results(folder)
    with source.file(reporter) as path, native.interruptible(), reporter.counting("paging", repeat + 2) as bar:
        found = paging_bench.measure(plan, path, bar.prefill, bar.done)
    for warning in dict.fromkeys(found.warnings):
        reporter.warn(warning)
    click.echo(paging_bench.write(plan, found, results), nl=False)
    title = f"{source.name}, {options['type_k']}/{options['type_v']} cache, pool of {plan.n_pool:,} tokens"
    picture(results, reporter, lambda: paging_figure(found, title))


def _source(options: dict[str, Any]) -> Source:
    """Return the model or the shape. Raises UsageError unless exactly one of them is given."""
    argument, option, shape, folder = (options[n] for n in ("model_arg", "model", "shape", "shape_dir"))
    given = named_model(
        argument, option, environment=not shape
    )  # a shape takes precedence over the environment's model
    if given and shape:
        msg = f"both {given} and --shape {shape} are given: give one"
        raise UsageError(msg)
    if not given and not shape:
        msg = f"there is nothing to measure: give a model, or --shape with one of {', '.join(shapes.SHAPES)}"
        raise UsageError(msg)
    if given:
        path = located(given, Reporter())
        check_file(path)
        return Source(path, "", None)
    if folder:
        kept = shapes.kept_file(shape, Path(folder))
        (reads if kept.exists() else writes)("--shape-dir", kept)
    return Source(None, shape, Path(folder) if folder else None)
