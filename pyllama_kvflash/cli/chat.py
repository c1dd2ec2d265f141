"""`kvflash chat`: a conversation in a terminal."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pyllama_kvflash import native
from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.fetch import model_path
from pyllama_kvflash.cli.kept import PREFIX_CACHE, Kept
from pyllama_kvflash.cli.messages import is_typed, messages
from pyllama_kvflash.cli.read import check_given
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Reads
from pyllama_kvflash.cli.serve import TEMPLATE, read_template
from pyllama_kvflash.cli.streams import check_stdout
from pyllama_kvflash.cli.talk import COMMANDS, Asked, Talk, text_of
from pyllama_kvflash.cli.turns import File
from pyllama_kvflash.engine.answer import check_max_tokens
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError

HELP = f"""Talk with a model.

The conversation stays in the context, so only new text is read. A message of several lines begins and ends with
\"\"\", or is pasted. Files are read while you type. Ctrl-C stops an answer, Ctrl-D quits. If stdin is a file or a pipe, each line is
a message, and stdout carries only the answers.

\b
{COMMANDS}

When the context is full, the oldest turns are left out, and a warning says which. Turns with a file stay.

\b
  kvflash chat model.gguf
  kvflash chat model.gguf -f book.txt
  kvflash chat model.gguf -c 128K --kvflash 8K -sys "You are terse."
  cat questions.txt | kvflash chat model.gguf --temp 0 > answers.txt

The chat template is the model's own, unless --chat-template-file gives another one.
"""


TALK = params.options(
    params.ANSWER_LENGTH,
    TEMPLATE,
    params.POOL,
    params.SPEC,
    params.CONTEXT,
    params.COMPUTE,
    params.SAMPLING,
    PREFIX_CACHE,
    params.VERBOSITY,
)
"""Options of every conversation, beside params.SYSTEM. asked_of() takes their values."""


@click.command(cls=Command, help=HELP, short_help="Talk with a model.")
@params.MODEL
@params.SYSTEM
@click.option(
    "-f",
    "--file",
    "prompt_files",
    metavar="FILE",
    type=Reads(),
    multiple=True,
    help="Text file, PDF or DOCX that is put before the first message, and stays. It can be given several times.",
)
@TALK
def chat(model_arg: str | None, model: str | None, *, quiet: bool | None, **options: Any) -> int:
    """Talk with a model in a terminal. Returns the exit code."""
    reporter = Reporter(quiet=quiet)
    asked = asked_of(options, options.pop("prompt_files"), reporter)
    return converse(model_path(model_arg, model, reporter), asked, options, reporter)


def asked_of(options: dict[str, Any], files: Sequence[str], reporter: Reporter, questions: Sequence[str] = ()) -> Asked:
    """Return the conversation that a command's options describe, and read its files. Raises UsageError.

    options: changed in place; only fields of Options remain. questions: the messages, if they do not come from stdin.
    """
    n_predict, system = options.pop("n_predict"), options.pop("system")
    check_max_tokens(n_predict, least=1)
    check_given(system, "-sys/--system-prompt")
    for question in questions:
        check_given(question, "-p/--prompt")
        if not question.strip():
            msg = 'the question is empty: give one with -p "text"'
            raise UsageError(msg)
    if sys.stdin is None and not questions:
        msg = "stdin is closed: there is nobody to talk with"
        raise UsageError(msg)
    check_stdout()
    kept = Kept(options.pop("prefix_cache"), params.cache_size(), reporter)
    texts = tuple(File(file, text_of(file), stays=True) for file in files)
    sampling = params.sampling(options, None)
    options["spec"] = params.spec(options)
    source = read_template(options.pop("template_file"))
    resolved = params.resolve(options)
    options.clear()
    options.update(resolved)
    if options["pool"] != "off":
        options["snapshots"] = kept.expect(sum(len(file.text) for file in texts), options["n_ctx"])
    lines = iter(questions) if questions else messages(reporter)
    return Asked(texts, system, n_predict, sampling, source, kept, lines, not questions and is_typed(), bool(questions))


def converse(path: Path, asked: Asked, options: dict[str, Any], reporter: Reporter) -> int:
    """Load a model, and hold the conversation. options: fields of Options. Returns the exit code."""
    from pyllama_kvflash.chat.engine import ChatTemplate  # noqa: PLC0415 (slow)

    if reporter.verbose:
        native.show_log()
    with native.interruptible(), reporter.loading(path.name) as bar:
        kv = KVFlash.from_file(path, progress=bar, **options)
    with kv:
        template = ChatTemplate(kv.model, asked.template)
        reporter.opened(kv, template.warning)
        talk = Talk(kv, template, asked, reporter)
        code = talk.run()
    if asked.asks_once:
        return talk.code
    return 0 if asked.typed else code
