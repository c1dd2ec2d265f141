"""`kvflash convert-draft`: convert a DFlash drafter's safetensors to GGUF."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pyllama_kvflash.cli.memory import mib
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Declared, Reads, Replaces, reads
from pyllama_kvflash.convert import OUTTYPES, Plan, find_source, resolve, write
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.loading.load import check_file

HELP = """Convert a DFlash drafter (DFlash, DFlash2, DSpark) from safetensors to a GGUF that llama.cpp can draft with.

SRC is the drafter's folder, or hf:owner/repo[@revision]. Every parameter is read from its config.json and compared with
the shapes of the weights and with the target. The tokenizer is the target's. docs/CONVERT.md lists the parameters.

\b
  kvflash convert-draft drafter/ --dry-run
  kvflash convert-draft drafter/ --target model.gguf -o draft.gguf
  kvflash convert-draft hf:owner/repo --target model.gguf -o draft.gguf --outtype q8_0

The file is written under another name, and renamed at the end.
"""


@click.command("convert-draft", cls=Command, help=HELP, short_help="Convert a DFlash drafter to GGUF.")
@click.argument("source", metavar="SRC", type=Declared())
@click.option("-o", "--output", metavar="FILE", type=Replaces(), default=None, help="GGUF file to write.")
@click.option(
    "--target", metavar="FILE", type=Reads(), default=None, help="GGUF of the model that the drafter was made for."
)
@click.option(
    "--outtype",
    type=click.Choice(OUTTYPES, case_sensitive=False),
    default="auto",
    show_default=True,
    metavar="TYPE",
    help=f"Type of the matrices: {', '.join(OUTTYPES)}. auto: as they are stored, bf16 or f16.",
)
@click.option("--dry-run", is_flag=True, help="Show what was read, and write nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr.")
def convert_draft(
    source: str, output: str | None, target: str | None, outtype: str, *, dry_run: bool, quiet: bool
) -> None:
    """Convert a drafter."""
    if not dry_run and not output:
        msg = "there is nowhere to write to: give a file with -o/--output, or --dry-run"
        raise UsageError(msg)
    if not dry_run and not target:
        msg = "a drafter needs its target's tokenizer: give the target's GGUF with --target"
        raise UsageError(msg)
    path = Path(target) if target else None
    if path and not path.is_dir():
        check_file(path)
    reporter = Reporter(quiet=quiet)
    found = find_source(source)
    reads("SRC", *found.files)
    plan = resolve(found, path)
    if dry_run or not output:
        Console(highlight=False).print(_table(plan))
        return
    with reporter.loading(output, "write") as bar:
        write(plan, Path(output), outtype, bar)
    size = mib(Path(output).stat().st_size)
    reporter.note(f"{output}: {plan.drafter.architecture}, {len(plan.tensors)} tensors, {size}")


def _table(plan: Plan) -> Table:
    drafter, target = plan.drafter, plan.target
    made_for = f"{target.path}: {target.architecture}, {target.n_vocab:,} tokens" if target else "not given (--target)"
    rows: list[tuple[str, Any]] = [
        ("source", plan.source.folder),
        ("architecture", f"{drafter.architecture}, dflash in llama.cpp"),
        ("target", made_for),
        ("weights", f"{len(plan.tensors)} tensors, {plan.n_params:,} parameters, {plan.stored}"),
        ("vocabulary", f"{drafter.size('vocab'):,} tokens, mask {drafter.mask_token}"),
        *((key, value) for key, value in drafter.keys.items()),
    ]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, str(value))
    return table
