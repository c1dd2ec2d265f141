"""`kvflash plot`: draw a run."""

from pathlib import Path

import click

from kvflash_bench.plot import FORMATS, render
from kvflash_bench.trace import read_trace
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Declared, Reads, writes
from pyllama_kvflash.errors import OutputError, UsageError, unwritten
from pyllama_kvflash.files import is_stream, write

HELP = """Draw a run: which chunks were in the pool at every position, and what they were worth.

TRACE.jsonl is what kvflash run --trace wrote, even if the run was cut off or is still going. Each row of the picture is
a chunk, each column a position of the run. The panel below shows how many chunks moved, the one to the right each
chunk's last score: a chunk that you know to matter, but that is grey there, was forgotten. With --kvflash-policy fresh
each layer chooses its own chunks: the more layers hold a chunk, the stronger its colour.

\b
  kvflash run model.gguf -f long.txt --trace run.jsonl
  kvflash plot run.jsonl                    writes run.png
  kvflash plot run.jsonl -o run.svg         or .pdf: sharp at any size
"""


@click.command(cls=Command, help=HELP, short_help="Draw what was resident during a run.")
@click.argument("trace", metavar="TRACE.jsonl", type=Reads())
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=Declared(),
    help="Write to this file, a .png, .svg or .pdf.  [default: TRACE.png]",
)
def plot(trace: str, output: str | None) -> None:
    """Draw a trace."""
    source = Path(trace)
    if output is None and not source.name:
        msg = f"{trace} is a directory: give a trace, as kvflash run --trace FILE writes it"
        raise UsageError(msg)
    target = Path(output) if output is not None else source.with_suffix(".png")
    kind = target.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        msg = f"{target} is not a picture that can be written: give a name that ends in one of {allowed}"
        raise UsageError(msg)
    if not is_stream(target):
        writes("-o/--output", target)
    data = render(read_trace(source), kind)
    try:
        write(target, data)
    except OSError as err:
        raise OutputError(unwritten(target, err)) from None
    Reporter().note(f"wrote {target}")
