"""`kvflash bench spec`: does speculative decoding pay, and does it change the answers?"""

from typing import Any

import click

from kvflash_bench import speculation as spec_bench
from kvflash_bench.answers import TEXTS
from kvflash_bench.cli.answers import Numbers, measuring, picture, results_folder
from kvflash_bench.grid import Results
from pyllama_kvflash import native
from pyllama_kvflash.cli import kinds, params
from pyllama_kvflash.cli.fetch import model_path
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Declared, Reads, reads
from pyllama_kvflash.loading.load import check_file
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL
from pyllama_kvflash.options import CHUNKS, FLASH_ATTN
from pyllama_kvflash.text import printable

SPEC_HELP = """Compare speculative with plain decoding in one run, with and without the gate, full cache and pool.

There are three texts. copy: a line that repeats itself, continued greedily. entropy: prose, continued at temperature 2
with nothing cut off. needles: questions about codes in a document of four pools, answered greedily, one by one. Each
way to draft runs beside plain decoding, some tokens of each in turn, and both open their model anew for every round.
Results are medians over the rounds. The pool is that of policy qk without codes, whose answers are the same whatever
batch checks them; the default's may differ.

Without MODEL.gguf, the bundled needle-7m runs with its drafter.

\b
  kvflash bench spec -n 300 --rounds 2 -t 1                                   a first look, a minute
  kvflash bench spec --texts copy --kinds ngram --draft-max 4,8,16            how many tokens to guess
  kvflash bench spec model.gguf -md draft.gguf --kinds dflash,ngram --pool 4K -n 5000

It writes results.md, .csv, .json and a picture into a folder. What was measured on this machine is not measured again.
"""


class Words(click.ParamType[tuple[str, ...]]):
    """Words, separated by commas."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:  # noqa: ARG002
        """Split the value; SpecBench checks each word."""
        return value if isinstance(value, tuple) else tuple(dict.fromkeys(p.strip() for p in str(value).split(",")))


OPTIONS = params.options(
    params.MODEL,
    click.option("-md", "--model-draft", "--spec-draft-model", "drafter", metavar="FILE", type=Reads(), default=None,
                 envvar=params.env("SPEC_DRAFT_MODEL"),
                 help="Draft model, a .gguf file.  [default: for needle-7m, its own]"),
    click.option("--kinds", type=Words(), default="draft,ngram", show_default=True,
                 help="Ways to draft, as in --spec of kvflash run."),
    click.option("--draft-max", "n_max", type=Numbers(), default="8", show_default=True,
                 help="Most tokens to draft; several with commas."),
    click.option("--texts", type=Words(), default=",".join(TEXTS), show_default=True, help="Texts, see above."),
    click.option("-n", "--predict", "--n-predict", "lengths", type=Numbers(), default="300,2000", show_default=True,
                 help="Tokens to predict in the texts copy and entropy; several with commas."),
    click.option("--questions", type=click.IntRange(1, 1000), default=16, show_default=True,
                 help="Questions in needles."),
    click.option("--pool", type=kinds.TokenCount(), default="512", show_default=True, help="Pool size in tokens."),
    click.option("--chunk", "chunk", type=click.Choice([str(c) for c in CHUNKS]), default="32",
                 show_default=True, help="Tokens that are paged together; with 64, the smallest pool is 768."),
    click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds, whose median counts."),
    click.option("-o", "--output", metavar="FOLDER", type=Declared(), default=None,
                 help="Folder for the results.  [default: kvflash-spec]"),
    click.option("-ctk", "--cache-type-k", "type_k", type=click.Choice(list(native.CACHE_TYPES)), default="f16",
                 show_default=True, help="KV cache data type for K."),
    click.option("-ctv", "--cache-type-v", "type_v", type=click.Choice(list(native.CACHE_TYPES)), default="f16",
                 show_default=True, help="KV cache data type for V; a quantised type needs -fa."),
    click.option("-fa", "--flash-attn", "flash_attn", type=click.Choice(FLASH_ATTN), default="auto", show_default=True,
                 help="Flash attention."),
    params.COMPUTE,
)  # fmt: skip

_OWN = ("kinds", "n_max", "texts", "lengths", "questions", "pool", "rounds")
_ENGINE = (
    *("type_k", "type_v", "flash_attn", "n_batch", "n_ubatch", "n_threads"),
    *("n_gpu_layers", "tensor_split", "n_cpu_moe", "rpc"),
)


@click.command(cls=Command, help=SPEC_HELP, short_help="Speculative decoding beside plain decoding.")
@OPTIONS
def spec(
    model_arg: str | None, model: str | None, drafter: str | None, output: str | None, chunk: str, **options: Any
) -> None:
    """Run the spec bench."""
    reporter = Reporter()
    path = model_path(model_arg, model, reporter)
    check_file(path)
    folder = results_folder("spec", output)
    if drafter is None and path == BUNDLED_MODEL:
        drafter = str(BUNDLED_DRAFTER)
        reads("the bundled drafter", drafter)
    common = {name: options[name] for name in _ENGINE}
    bench = spec_bench.SpecBench(
        path, drafter, **{name: options[name] for name in _OWN}, chunk=int(chunk), common=common
    )
    results = Results(folder)
    cells = list(bench.cells())
    missing = [cell for cell in cells if results.get(bench.key(cell)) is None]
    with measuring("spec", len(cells), results, reporter) as bar:
        bar.skip(len(cells) - len(missing))
        for cell in missing:
            result = spec_bench.measure(bench, cell, bar.prefill)
            results.add(bench.key(cell), result)
            bar.done()
            for warning in result["warnings"]:
                reporter.warn(f"{cell.label}: {warning}")
            spec_bench.write(bench, results)
    click.echo(spec_bench.write(bench, results), nl=False)
    rows = spec_bench.summarise(bench, results)
    picture(
        results,
        reporter,
        lambda: spec_bench.spec_figure(rows, f"{printable(path.stem)}, pool of {bench.n_pool:,} tokens"),
    )
