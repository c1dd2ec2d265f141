"""`kvflash chat`: a conversation in a terminal."""

import io
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from pyllama_kvflash import native
from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.report import Reporter, banner, closing_line, stats_table
from pyllama_kvflash.cli.roles import Command
from pyllama_kvflash.cli.run import model_path
from pyllama_kvflash.cli.serve import TEMPLATE, read_template
from pyllama_kvflash.engine.answer import check_max_tokens
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import KVFlashError, NativeError, UsageError
from pyllama_kvflash.events import Done, Prefill, Stats, Token, Warn
from pyllama_kvflash.native import Sampling, Tokens
from pyllama_kvflash.text import n_common

if TYPE_CHECKING:
    from pyllama_kvflash.chat import ChatTemplate

HELP = """Talk with a model.

The conversation stays in the context, and only what is new is read. A message of several lines begins and ends with
\"\"\", or is pasted. Ctrl-C stops an answer, Ctrl-D quits. If stdin is a file or a pipe, each line is a message, and
stdout carries only the answers.

\b
  /clear    begin a new conversation
  /stats    show the figures of the last answer
  /exit     quit

\b
  kvflash chat model.gguf
  kvflash chat model.gguf -c 128K --kvflash 8K -sys "You are terse."
  cat questions.txt | kvflash chat model.gguf --temp 0 > answers.txt

The chat template is the model's own.
"""

_QUOTES = '"""'
_PASTE_SECONDS = 0.03  # within this time the next line of a paste is there
_COMMANDS = ("/clear", "/stats", "/exit")


@click.command(cls=Command, help=HELP, short_help="Talk with a model.")
@params.MODEL
@click.option(
    "-sys", "--system-prompt", "system", metavar="TEXT", default=None, help="System prompt to use with the model."
)
@click.option(
    "-n",
    "--predict",
    "--n-predict",
    "n_predict",
    type=int,
    default=-1,
    show_default=True,
    envvar=params.env("N_PREDICT"),
    help="Most tokens to predict in an answer, -1: until the context is full.",
)
@TEMPLATE
@params.POOL
@params.SPEC
@params.CONTEXT
@params.COMPUTE
@params.SAMPLING
@params.VERBOSITY
def chat(
    model_arg: str | None,
    model: str | None,
    system: str | None,
    n_predict: int,
    template_file: str | None,
    *,
    quiet: bool | None,
    **options: Any,
) -> None:
    """Talk with a model in a terminal."""
    from pyllama_kvflash.chat import ChatTemplate  # noqa: PLC0415 (slow)

    check_max_tokens(n_predict, least=1)
    if sys.stdin is None:
        msg = "stdin is closed: there is nobody to talk with"
        raise UsageError(msg)
    sampling = params.sampling(options, None)
    options["spec"] = params.spec(options)
    options = params.resolve(options)
    reporter = Reporter(quiet=quiet is True)
    path = model_path(model_arg, model, reporter)
    source = read_template(template_file)
    if quiet is False:
        native.show_log()
    with native.interruptible(), reporter.loading(path.name) as bar:
        kv = KVFlash.from_file(path, progress=bar, **options)
    with kv:
        template = ChatTemplate.of(kv.model, source)
        for warning in filter(None, (*kv.warnings, template.warning)):
            reporter.warn(warning)
        for line in banner(kv):
            reporter.note(line)
        Talk(kv, template, sampling, n_predict, system, reporter).run(messages(reporter))


class Talk:
    """A conversation: what was said, and a context that holds it."""

    def __init__(
        self,
        kv: KVFlash,
        template: "ChatTemplate",
        sampling: Sampling,
        n_predict: int,
        system: str | None,
        reporter: Reporter,
    ) -> None:
        self._kv, self._template, self._sampling, self._n_predict = kv, template, sampling, n_predict
        self._reporter = reporter
        self._first = [{"role": "system", "content": system}] if system else []
        self._said = list(self._first)
        self._stats: Stats | None = None

    def run(self, lines: Iterator[str]) -> None:
        """Answer messages and obey commands until there are no more, or /exit."""
        for line in lines:
            if line == "/exit":
                return
            if line == "/clear":
                self._said = list(self._first)
                self._kv.clear()
                self._reporter.note("a new conversation")
            elif line == "/stats":
                self._reporter.console.print(stats_table(self._stats or self._kv.stats()))
            elif line.startswith("/") and line[1:].isalpha():
                self._reporter.warn(f"there is no {line}: there are {', '.join(_COMMANDS)}")
            else:
                self._turn(line)

    def _turn(self, text: str) -> None:
        """Answer a message. A turn that fails, or has no answer, is left out of the conversation."""
        said = [*self._said, {"role": "user", "content": text}]
        answer = ""
        try:
            with native.interruptible():
                answer, done = self._answer(said)
        except NativeError as err:
            self._kv.clear()  # the state of the context is unknown
            self._reporter.warn(str(err))
            return
        except KVFlashError as err:
            self._reporter.warn(f"{err}; /clear begins a new conversation")
            return
        self._stats = done.stats
        self._reporter.note(closing_line(done.stats, done.reason))
        if answer or done.reason != "interrupted":
            self._said = [*said, {"role": "assistant", "content": answer.strip()}]

    def _answer(self, said: list[dict[str, str]]) -> tuple[str, Done]:
        """Read what the context does not have, and show the answer as it comes. Return the answer and the last
        event.
        """
        kv = self._kv
        tokens = self._template.tokens(kv.model, said)
        n = self._keep(tokens)
        events = kv.generate(
            tokens[n:], max_tokens=self._n_predict, sampling=self._sampling, stop=self._template.stop, append=True
        )
        text = ""
        with self._reporter.prefilling() as bar:
            for event in events:
                if isinstance(event, Prefill):
                    bar(event)
                elif isinstance(event, Warn):
                    self._reporter.warn(event.text)
                elif isinstance(event, Token | Done):
                    bar.finish()
                    shown = event.text if text else event.text.lstrip()  # a template may end without a space
                    text += shown
                    click.echo(shown, nl=False)
                if isinstance(event, Done):
                    click.echo(nl=not text.endswith("\n"))
                    return text, event
        msg = "the engine stopped without a last event"
        raise AssertionError(msg)

    def _keep(self, tokens: Tokens) -> int:
        """Leave in the context only what it has in common with tokens, without the last one. Return the number of
        tokens kept.
        """
        try:
            self._kv.rollback(n_common(self._kv.tokens, tokens[:-1]))
        except KVFlashError:  # a recurrent state, say, cannot go back
            self._kv.clear()
        return self._kv.n_tokens


def messages(reporter: Reporter) -> Iterator[str]:
    """Yield what a person types, or the lines of a file: messages and commands, without empty ones."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # whatever the locale: what is not text fails as a message
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415 (keys that edit a line)
    while True:
        try:
            text = _message(asks=asks).strip()
        except KeyboardInterrupt:
            if not asks:
                raise
            click.echo()
            reporter.note("/exit or Ctrl-D leaves")
            continue
        except EOFError:
            if asks:
                click.echo()
            return
        if text:
            yield text


def _message(*, asks: bool) -> str:
    """Return one message, of several lines if it is quoted or pasted. Raises EOFError and KeyboardInterrupt."""
    text = _line("> " if asks else "")
    if not text.lstrip().startswith(_QUOTES):
        while asks and select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
            try:
                text += "\n" + _line("")
            except EOFError:
                break
        return text
    text = text.lstrip().removeprefix(_QUOTES)
    with suppress(EOFError):  # a file may end without the quotes
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + _line("... " if asks else "")
    return text.rstrip().removesuffix(_QUOTES)


def _line(prompt: str) -> str:
    if prompt or sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    if "\0" in line:
        msg = "stdin is binary: a zero byte; give text"
        raise UsageError(msg)
    return line.removesuffix("\n")
