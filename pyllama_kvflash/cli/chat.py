"""`kvflash chat`: a conversation in a terminal."""

import io
import json
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyllama_kvflash import native
from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.read import read_text
from pyllama_kvflash.cli.report import Reporter, banner, closing_line, stats_table
from pyllama_kvflash.cli.roles import Command, Reads
from pyllama_kvflash.cli.run import model_path
from pyllama_kvflash.cli.serve import TEMPLATE, read_template
from pyllama_kvflash.engine.answer import check_max_tokens
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import KVFlashError, NativeError, OutputError, UsageError
from pyllama_kvflash.events import Done, Prefill, Stats, Token, Warn
from pyllama_kvflash.native import Sampling, Tokens
from pyllama_kvflash.text import n_common

if TYPE_CHECKING:
    from pyllama_kvflash.chat import ChatTemplate

_COMMANDS = """\
  /file FILE     put a text file before the next message
  /regen         answer the last message again
  /undo          take back the last message and its answer
  /system TEXT   replace the system prompt; without TEXT, remove it
  /context       show how full the context is
  /save FILE     write the conversation as JSON
  /clear         begin a new conversation
  /stats         show the figures of the last answer
  /exit          quit"""

HELP = f"""Talk with a model.

The conversation stays in the context, and only what is new is read. A message of several lines begins and ends with
\"\"\", or is pasted. Ctrl-C stops an answer, Ctrl-D quits. If stdin is a file or a pipe, each line is a message, and
stdout carries only the answers.

\b
{_COMMANDS}

When the context is full, the oldest turns are left out, and a warning says how many.

\b
  kvflash chat model.gguf
  kvflash chat model.gguf -f book.txt
  kvflash chat model.gguf -c 128K --kvflash 8K -sys "You are terse."
  cat questions.txt | kvflash chat model.gguf --temp 0 > answers.txt

The chat template is the model's own.
"""

_QUOTES = '"""'
_PASTE_SECONDS = 0.03  # within this time the next line of a paste is there
_ROOM = 8  # one part of so many of the context is left to an answer, before old turns are left out


@click.command(cls=Command, help=HELP, short_help="Talk with a model.")
@params.MODEL
@click.option(
    "-sys", "--system-prompt", "system", metavar="TEXT", default=None, help="System prompt to use with the model."
)
@click.option(
    "-f",
    "--file",
    "prompt_files",
    metavar="FILE",
    type=Reads(),
    multiple=True,
    help="UTF-8 file that is put before the first message. It can be given several times.",
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
    prompt_files: tuple[str, ...],
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
    texts = [_text_of(file) for file in prompt_files]
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
        talk = Talk(kv, template, sampling, n_predict, system, reporter)
        talk.add(*texts)
        talk.run(messages(reporter))


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
        self._first = _system(system)
        self._said = list(self._first)
        self._before: list[str] = []  # texts that go before the next message
        self._stats: Stats | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/file": lambda name: self.add(_text_of(name)),
            "/regen": self._regenerate,
            "/undo": self._undo,
            "/system": self._replace_system,
            "/context": self._show_context,
            "/save": self._save,
            "/clear": self._clear,
            "/stats": lambda _: reporter.console.print(stats_table(self._stats or kv.stats())),
        }

    def add(self, *texts: str) -> None:
        """Put texts before the next message."""
        self._before += texts
        for text in texts:
            self._reporter.note(f"{len(text):,} characters go before the next message")

    def run(self, lines: Iterator[str]) -> None:
        """Answer messages and obey commands until there are no more, or /exit."""
        for line in lines:
            name, _, rest = line.partition(" ")
            if line == "/exit":
                return
            if name in self._commands:
                try:
                    self._commands[name](rest.strip())
                except KVFlashError as err:
                    self._reporter.warn(str(err))
            elif name.startswith("/") and name[1:].isalpha():
                self._reporter.warn(f"there is no {name}: there are {', '.join(self._commands)} and /exit")
            else:
                self._turn("\n\n".join([*self._before, line]))

    def _help(self, _: str) -> None:
        self._reporter.note(f"commands:\n{_COMMANDS}")

    def _clear(self, _: str) -> None:
        self._said, self._before = list(self._first), []
        self._kv.clear()
        self._reporter.note("a new conversation")

    def _take_back(self) -> str:
        """Forget the last message and its answer. Return the message. Raises UsageError."""
        n = len(self._said) - 1
        if n < len(self._first) + 1:
            msg = "there is no message yet"
            raise UsageError(msg)
        text = self._said[n - 1]["content"]
        del self._said[n - 1 :]
        return text

    def _undo(self, _: str) -> None:
        self._take_back()
        self._reporter.note("the last message and its answer are taken back")

    def _regenerate(self, _: str) -> None:
        before = list(self._said)
        if not self._turn(self._take_back()):
            self._said = before

    def _replace_system(self, text: str) -> None:
        said, self._first = self._said[len(self._first) :], _system(text or None)
        self._said = [*self._first, *said]
        self._reporter.note("the system prompt is replaced" if text else "the system prompt is removed")

    def _show_context(self, _: str) -> None:
        kv, n = self._kv, len(self._said) - len(self._first)
        pool = f", a pool of {kv.n_pool:,}" if kv.n_pool else ""
        self._reporter.note(f"{kv.n_tokens:,} of {kv.options.n_ctx:,} tokens{pool}; turns: {n // 2}")

    def _save(self, name: str) -> None:
        if not name:
            msg = "/save needs the name of a file: /save talk.json"
            raise UsageError(msg)
        try:
            with Path(name).open("x", encoding="utf-8") as file:
                json.dump(self._said, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            msg = f"{name} is there already: give another name"
            raise UsageError(msg) from None
        except OSError as err:
            with suppress(OSError):
                Path(name).unlink()  # a part of it may be there
            msg = f"{name} cannot be written: {err.strerror}"
            raise OutputError(msg) from None
        self._reporter.note(f"saved {len(self._said)} messages to {name}")

    def _turn(self, text: str) -> bool:
        """Answer a message, and return whether it has an answer. A turn without one is left out of the conversation."""
        answer = ""
        try:
            with native.interruptible():
                said, tokens = self._fitting([*self._said, {"role": "user", "content": text}])
                answer, done = self._answer(tokens)
        except NativeError as err:
            self._kv.clear()  # the state of the context is unknown
            self._reporter.warn(str(err))
            return False
        except KVFlashError as err:
            self._reporter.warn(f"{err}; /clear begins a new conversation")
            return False
        self._stats = done.stats
        self._reporter.note(closing_line(done.stats, done.reason))
        if not answer and done.reason == "interrupted":
            return False
        self._said, self._before = [*said, {"role": "assistant", "content": answer.strip()}], []
        return True

    def _fitting(self, said: list[dict[str, str]]) -> tuple[list[dict[str, str]], Tokens]:
        """Return a conversation without so many of its oldest turns that it fits the context, with room for an answer, and
        its token ids (n,) int32. Raises UsageError if the template refuses it.
        """
        n_ctx, first = self._kv.options.n_ctx, len(self._first)
        tokens, n = self._template.tokens(self._kv.model, said), 0
        while len(said) > first + 1 and len(tokens) > n_ctx - n_ctx // _ROOM:
            said, n = [*said[:first], *said[first + 2 :]], n + 1
            tokens = self._template.tokens(self._kv.model, said)
        if n:
            oldest = "oldest turn is" if n == 1 else f"oldest {n} turns are"
            self._reporter.warn(f"the context of {n_ctx:,} tokens is full: the {oldest} left out from now on")
        return said, tokens

    def _answer(self, tokens: Tokens) -> tuple[str, Done]:
        """Read what the context does not have of a conversation, and show the answer as it comes. Return the answer and the
        last event.
        """
        kv, n = self._kv, self._keep(tokens)
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


def _system(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _text_of(file: str) -> str:
    """Return the text of a file that goes before a message. Raises UsageError."""
    if file in {"", "-"}:
        msg = "a file is wanted: /file FILE, or -f FILE; stdin has the messages"
        raise UsageError(msg)
    return read_text(file).removesuffix("\n")


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
