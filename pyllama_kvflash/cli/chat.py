"""`kvflash chat`: a conversation in a terminal."""

import io
import json
import random
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyllama_kvflash import native
from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.figures import stats_table
from pyllama_kvflash.cli.read import check_given, piped_lines, read_text
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Reads
from pyllama_kvflash.cli.run import model_path
from pyllama_kvflash.cli.serve import TEMPLATE, read_template
from pyllama_kvflash.cli.streams import check_stdout
from pyllama_kvflash.cli.turns import Conversation, File, Turn, left_out
from pyllama_kvflash.engine.answer import check_max_tokens
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import DeviceLostError, KVFlashError, NativeError, OutputError, UsageError, counted
from pyllama_kvflash.events import Done, Prefill, Stats, Token, Warn
from pyllama_kvflash.native import Sampling, Tokens

if TYPE_CHECKING:
    from pyllama_kvflash.chat import ChatTemplate

_COMMANDS = """\
  /file FILE     put a text file before the next message
  /regen         answer the last message again
  /undo          take back the last message and its answer, or the last /file after it
  /system TEXT   replace the system prompt; without TEXT, remove it
  /context       show how full the context is
  /save FILE     write the conversation as JSON
  /clear         begin a new conversation, with the files of -f
  /stats         show the figures of the last answer
  /exit          quit"""

HELP = f"""Talk with a model.

The conversation stays in the context, and only what is new is read. A message of several lines begins and ends with
\"\"\", or is pasted. Ctrl-C stops an answer, Ctrl-D quits. If stdin is a file or a pipe, each line is a message, and
stdout carries only the answers.

\b
{_COMMANDS}

When the context is full, the oldest turns are left out, and a warning says which. Turns with a file stay.

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
    help="Text file that is put before the first message, and stays. It can be given several times.",
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
) -> int:
    """Talk with a model in a terminal. Returns the exit code."""
    from pyllama_kvflash.chat import ChatTemplate  # noqa: PLC0415 (slow)

    check_max_tokens(n_predict, least=1)
    if sys.stdin is None:
        msg = "stdin is closed: there is nobody to talk with"
        raise UsageError(msg)
    check_stdout()
    check_given(system, "-sys/--system-prompt")
    files = [File(file, _text_of(file), stays=True) for file in prompt_files]
    sampling = params.sampling(options, None)
    options["spec"] = params.spec(options)
    options = params.resolve(options)
    reporter = Reporter(quiet=quiet)
    path = model_path(model_arg, model, reporter)
    source = read_template(template_file)
    if reporter.verbose:
        native.show_log()
    with native.interruptible(), reporter.loading(path.name) as bar:
        kv = KVFlash.from_file(path, progress=bar, **options)
    with kv:
        template = ChatTemplate.of(kv.model, source)
        reporter.opened(kv, template.warning)
        talk = Talk(kv, template, sampling, n_predict, system, reporter)
        talk.add(*files)
        code = talk.run(messages(reporter))
    return 0 if _asks() else code


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
        self._said = Conversation(system)
        self._stats: Stats | None = None  # of the last answer
        self._answered = ""  # of the last answer, so far
        self._code = 0  # of the last thing that failed
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/file": lambda name: self.add(File(name, _text_of(name), stays=False)),
            "/regen": self._regenerate,
            "/undo": lambda _: reporter.note(self._said.undo()),
            "/system": self._replace_system,
            "/context": self._show_context,
            "/save": self._save,
            "/clear": self._clear,
            "/stats": lambda _: reporter.console.print(stats_table(self._stats or kv.stats())),
        }

    def add(self, *files: File) -> None:
        """Put files before the next message."""
        self._said.waiting += files
        for file in files:
            self._reporter.note(f"before the next message: {file.name}, {counted(len(file.text), 'character')}")

    def run(self, lines: Iterator[str]) -> int:
        """Answer messages and obey commands until there are no more, or /exit. Return the exit code of the last failure, 0 if
        there was an answer or no failure.
        """
        for line in lines:
            name, _, rest = line.partition(" ")
            if line == "/exit":
                break
            if name in self._commands:
                try:
                    self._commands[name](rest.strip())
                except KVFlashError as err:
                    self._failed(err, str(err))
            elif name.startswith("/") and name[1:].isalpha():
                self._reporter.warn(f"there is no {name}: there are {', '.join(self._commands)} and /exit")
            elif self._turn(self._said.turns, Turn(tuple(self._said.waiting), line)):
                self._said.waiting.clear()
        return 0 if self._stats else self._code

    def _failed(self, err: KVFlashError, what: str) -> None:
        self._code = err.exit_code
        self._reporter.warn(what)

    def _help(self, _: str) -> None:
        self._reporter.note("commands:")
        self._reporter.console.print(_COMMANDS, markup=False)

    def _clear(self, _: str) -> None:
        self._reporter.note(self._said.clear())
        if not self._said.waiting:  # else the context has what they begin with
            self._kv.clear()

    def _regenerate(self, _: str) -> None:
        self._turn(self._said.turns[:-1], replace(self._said.last(), answer=None))

    def _replace_system(self, text: str) -> None:
        self._said.system = text or None
        self._reporter.note("the system prompt is replaced" if text else "the system prompt is removed")

    def _show_context(self, _: str) -> None:
        kv, said = self._kv, self._said
        pool = f", a pool of {kv.n_pool:,}" if kv.n_pool else ""
        files = f"; files: {', '.join(file.name for file in said.files)}" if said.files else ""
        self._reporter.note(f"{kv.n_tokens:,} of {kv.options.n_ctx:,} tokens{pool}; turns: {len(said.turns)}{files}")

    def _save(self, name: str) -> None:
        if not name:
            msg = "/save needs the name of a file: /save talk.json"
            raise UsageError(msg)
        messages = self._said.messages(self._said.turns)
        try:
            with Path(name).open("x", encoding="utf-8") as file:
                json.dump(messages, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            msg = f"{name} is there already: give another name"
            raise UsageError(msg) from None
        except OSError as err:
            with suppress(OSError):
                Path(name).unlink()  # a part of it may be there
            msg = f"{name} cannot be written: {err.strerror}"
            raise OutputError(msg) from None
        self._reporter.note(f"messages saved to {name}: {len(messages)}")

    def _turn(self, before: list[Turn], turn: Turn) -> bool:
        """Answer a message after some turns, and return whether it has an answer. One without leaves the conversation as it
        was.
        """
        answer = self._answered = ""
        try:
            with native.interruptible():
                turns, tokens = self._fitting(before, turn)
                answer, done = self._answer(tokens)
        except DeviceLostError as err:
            self._failed(err, f"{err}; /save FILE keeps the conversation so far")
            if self._answered:
                self._said.turns = [*before, replace(turn, answer=self._answered.strip())]
            return self._answered != ""
        except NativeError as err:
            self._kv.clear()  # the state of the context is unknown
            self._failed(err, str(err))
            return False
        except KVFlashError as err:
            self._failed(err, f"{err}; /clear begins a new conversation{self._said.outcome()}")
            return False
        self._reporter.answered(done.stats, done.reason)
        if not answer and done.reason == "interrupted":
            return False
        self._stats = done.stats
        self._said.turns = [*turns, replace(turn, answer=answer.strip())]
        return True

    def _fitting(self, turns: list[Turn], turn: Turn) -> tuple[list[Turn], Tokens]:
        """Return the turns before a new one without so many of the oldest that all fit the context, with room for an answer,
        and the token ids (n,) int32 of all. Turns with files stay. Raises UsageError if the template refuses them.
        """
        n_ctx, turns, without = self._kv.options.n_ctx, list(turns), []
        while True:
            tokens = self._template.tokens(self._kv.model, self._said.messages([*turns, turn]))
            oldest = next((i for i, old in enumerate(turns) if not old.files), None)
            if oldest is None or len(tokens) <= n_ctx - n_ctx // _ROOM:
                break
            without.append(turns.pop(oldest))
        if without:
            self._reporter.warn(f"the context of {n_ctx:,} tokens is full: {left_out(without, [*turns, turn])}")
        return turns, tokens

    def _answer(self, tokens: Tokens) -> tuple[str, Done]:
        """Read what the context does not have of a conversation, and show the answer as it comes. Return the answer and the
        last event.
        """
        kv, n, sampling = self._kv, self._keep(tokens), self._sampling
        if sampling.seed is None:  # drawn here, so that /stats can show it
            sampling = replace(sampling, seed=random.getrandbits(31))
        events = kv.generate(
            tokens[n:], max_tokens=self._n_predict, sampling=sampling, stop=self._template.stop, append=True
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
                    text = self._answered = text + shown
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
        return self._kv.keep_common(tokens)


def _text_of(file: str) -> str:
    """Return the text of a file that goes before a message. Raises UsageError."""
    if file in {"", "-"}:
        msg = "a file is wanted: /file FILE, or -f FILE; stdin has the messages"
        raise UsageError(msg)
    return read_text(file).removesuffix("\n")


def _asks() -> bool:
    """Return whether a person types, and sees the answers."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def messages(reporter: Reporter) -> Iterator[str]:
    """Yield what a person types, or the lines of a file: messages and commands, without empty ones. Raises UsageError for a
    file without any, and at a line that is not text.
    """
    if asks := _asks():
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415 (keys that edit a line)
    read = _reader()
    any_yet = False
    while True:
        try:
            text = _message(read, asks=asks).strip()
        except KeyboardInterrupt:
            if not asks:
                raise
            click.echo()
            reporter.note("/exit or Ctrl-D leaves")
            continue
        except EOFError:
            if asks:
                click.echo()
            elif not any_yet:
                msg = "stdin has no message: give one a line"
                raise UsageError(msg) from None
            return
        if text:
            any_yet = True
            yield text


def _message(read: Callable[[str], str], *, asks: bool) -> str:
    """Return one message, of several lines if it is quoted or pasted. Raises EOFError and KeyboardInterrupt."""
    text = read("> " if asks else "")
    if not text.lstrip().startswith(_QUOTES):
        while asks and select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
            try:
                text += "\n" + read("")
            except EOFError:
                break
        return text
    text = text.lstrip().removeprefix(_QUOTES)
    with suppress(EOFError):  # a file may end without the quotes
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + read("... " if asks else "")
    return text.rstrip().removesuffix(_QUOTES)


def _reader() -> Callable[[str], str]:
    """Return what reads a line of stdin, after a prompt. It raises EOFError, and UsageError for a line that is not text."""
    if sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is not text fails as a message
        return input
    lines = piped_lines()

    def read(_prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    return read
