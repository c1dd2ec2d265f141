"""`kvflash ask`: questions about files."""

from typing import Any

import click

from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.chat import TALK, asked_of, converse
from pyllama_kvflash.cli.fetch import located, named_model
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Declared, reads
from pyllama_kvflash.errors import UsageError

HELP = """Ask questions about files: texts, PDF and DOCX (pip install 'pyllama-kvflash[documents]').

The files are read while you type the first question; an answer to a further question takes seconds. The model knows the files' names. A text
that took 10 s to read is kept on disk, and need not be read again another day. It is a conversation as in `kvflash chat`, with its commands.

\b
  kvflash ask model.gguf book.txt
  kvflash ask model.gguf report.txt minutes.txt -p "Who was there?"
  kvflash ask -hf Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M book.txt
  cat questions.txt | kvflash ask model.gguf book.txt --temp 0 > answers.txt

A text may be as long as the context (-c): 32K tokens are some 90 pages.
"""


@click.command(cls=Command, help=HELP, short_help="Ask questions about files.")
@params.MODEL
@click.argument("files", metavar="FILE...", type=Declared(), nargs=-1)
@click.option(
    "-p",
    "--prompt",
    "questions",
    metavar="TEXT",
    multiple=True,
    help="Answer this question, and end. It can be given several times.",
)
@params.SYSTEM
@TALK
def ask(
    model_arg: str | None,
    model: str | None,
    files: tuple[str, ...],
    questions: tuple[str, ...],
    *,
    quiet: bool | None,
    **options: Any,
) -> int:
    """Answer questions about files. Returns the exit code."""
    reporter = Reporter(quiet=quiet)
    if model_arg and not model_arg.endswith(".gguf") and named_model(None, model):  # all names are files
        files, model_arg = (model_arg, *files), None
    named = named_model(model_arg, model)
    if named is None or (model_arg and not model_arg.endswith(".gguf") and not files):
        first = model_arg or "book.txt"
        msg = f"there is no model to ask about {first}: kvflash ask model.gguf {first}, or -hf user/model"
        raise UsageError(msg)
    if not files:
        msg = (
            "there is no file to ask about: kvflash ask model.gguf book.txt; kvflash chat is a conversation without one"
        )
        raise UsageError(msg)
    reads("FILE", *files)
    asked = asked_of(options, files, reporter, questions)
    return converse(located(named, reporter), asked, options, reporter)
