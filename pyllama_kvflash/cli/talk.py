"""A conversation in a terminal: its commands, its answers, and the text that is read while a person types."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from pyllama_kvflash import native
from pyllama_kvflash.cli.ahead import Ahead
from pyllama_kvflash.cli.figures import stats_table
from pyllama_kvflash.cli.kept import Kept
from pyllama_kvflash.cli.read import read_text
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.turns import Conversation, File, Turn, left_out
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import (
    DeviceLostError,
    Interrupted,
    KVFlashError,
    NativeError,
    OutputError,
    UsageError,
    counted,
    unwritten,
)
from pyllama_kvflash.events import Done, Prefill, Stats, Token, Warn
from pyllama_kvflash.native import Sampling, Tokens
from pyllama_kvflash.text import n_common

if TYPE_CHECKING:
    from pyllama_kvflash.chat.engine import ChatTemplate

COMMANDS = """\
  /file FILE     put a text file, PDF or DOCX before the next message
  /regen         answer the last message again
  /undo          take back the last message and its answer, or the last /file after it
  /system TEXT   replace the system prompt; without TEXT, remove it
  /context       show how full the context is
  /save FILE     write the conversation as JSON
  /clear         begin a new conversation, with the files it began with
  /stats         show the figures of the last answer
  /exit          quit"""

_ROOM = 8  # 1/8 of the context is kept free for an answer: old turns are left out for it
_WORTH = 256  # fewest tokens that are read while a message is typed
_LOOKING = {"/help", "/context", "/save", "/stats"}  # commands that change nothing
_QUESTIONS = ("What?", "who", "1.", "é", "(")
"""Messages with different beginnings: the text that their prompts share is the same for any message."""
_MERGED = 4  # last tokens of a text that may change once more text follows


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation as a command line describes it.

    lines: the messages. typed: whether a person types them, which takes a while. asks_once: whether they are questions from
    the command line; a question without an answer is then a failure.
    """

    files: tuple[File, ...]
    system: str | None
    n_predict: int
    sampling: Sampling
    template: str | None
    kept: Kept
    lines: Iterator[str]
    typed: bool
    asks_once: bool


class Talk:
    """A conversation: its turns, and an engine whose context holds them."""

    def __init__(self, kv: KVFlash, template: "ChatTemplate", asked: Asked, reporter: Reporter) -> None:
        self._kv, self._template, self._asked, self._reporter = kv, template, asked, reporter
        self._unread: list[File] = []  # read only with the message: they do not fit, or Ctrl-C stopped the reading
        self._ahead = Ahead(kv, reporter, self._has_read, asked.kept.took)
        self._said = Conversation(asked.system)
        self._stats: Stats | None = None  # of the last answer
        self._answered = ""  # the last answer's text so far
        self.code = 0  # exit code of the last failure
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/file": lambda name: self.add(File(name, text_of(name), stays=False)),
            "/regen": self._regenerate,
            "/undo": lambda _: reporter.note(self._said.undo()),
            "/system": self._replace_system,
            "/context": self._show_context,
            "/save": self._save,
            "/clear": self._clear,
            "/stats": self._show_stats,
        }

    def add(self, *files: File) -> None:
        """Put files before the next message."""
        self._said.waiting += files
        for file in files:
            say = self._reporter.detail if file.stays else self._reporter.note
            say(f"before the next message: {file.name}, {counted(len(file.text), 'character')}")

    def _has_read(self, seconds: float) -> None:
        self._asked.kept.took(seconds)
        self._asked.kept.save(self._kv)

    def run(self) -> int:
        """Answer messages and obey commands until /exit or the end of the messages. Returns 0 if there was an answer or no failure, else
        the exit code of the last failure. If no person types the messages, Ctrl-C ends the conversation with exit code 130.
        """
        self.add(*self._asked.files)
        try:
            while True:
                if self._asked.typed:
                    self._read_ahead()
                if (line := next(self._asked.lines, "/exit")) == "/exit":
                    return 0 if self._stats else self.code
                self._take(line)
                if self.code == Interrupted.exit_code and not self._asked.typed:
                    return self.code
        finally:
            self._ahead.stop()
            self._asked.kept.save(self._kv)
            self._asked.kept.say()

    def _take(self, line: str) -> None:
        """Answer a message, or obey a command."""
        name, _, rest = line.partition(" ")
        if name in self._commands:
            if name not in _LOOKING:
                self._ahead.stop()
            try:
                self._commands[name](rest.strip())
            except KVFlashError as err:
                self._failed(err)
            except KeyboardInterrupt:
                self._failed(Interrupted(f"{name} was interrupted"))
        elif name.startswith("/") and name[1:].isalpha():
            self._reporter.warn(f"there is no command {name}: there are {', '.join(self._commands)} and /exit")
        elif self._turn(self._said.turns, Turn(tuple(self._said.waiting), line)):
            self._said.waiting.clear()
        elif self.code == Interrupted.exit_code:
            self._unread = list(self._said.waiting)

    def _read_ahead(self) -> None:
        """Start reading the text that will come before the next message, whatever the message is."""
        if self._ahead.reads or self._said.waiting in ([], self._unread):
            return
        try:
            with native.interruptible():
                tokens = self._sure()
                self._kv.decoder.check_fits(len(tokens), 0)
                n = self._begin_with(tokens)
        except KVFlashError as err:
            self._unread = list(self._said.waiting)
            self._reporter.warn(str(err))
            return
        if len(tokens) - n >= _WORTH:
            self._reporter.note(f"reading {counted(len(tokens) - n, 'token')} while you type")
            self._ahead.begin(tokens[n:])

    def _sure(self) -> Tokens:
        """Return the tokens, (n,) int32, with which the next prompt begins whatever the message is. Raises UsageError."""
        from pyllama_kvflash.chat.engine import tokenize_chat  # noqa: PLC0415 (slow)

        said, waiting = self._said, tuple(self._said.waiting)
        texts = [
            self._template.render(said.messages([*said.turns, Turn(waiting, question)])) for question in _QUESTIONS
        ]
        first, *others = (np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4") for text in texts)
        same = texts[0][: min(n_common(first, other) for other in others)]
        return tokenize_chat(self._kv.model, same)[:-_MERGED]

    def _begin_with(self, tokens: Tokens) -> int:
        """Restore more of the tokens if the prefix cache has more, then keep only what the context shares with tokens[:-1].

        Returns the number of tokens kept.
        """
        start = time.perf_counter()
        if n := self._asked.kept.restore(self._kv, tokens):
            self._reporter.note(
                f"restored {counted(n, 'token')} in {time.perf_counter() - start:.2f} s from the prefix cache"
            )
        return self._kv.keep_common(tokens)

    def _failed(self, err: KVFlashError, hint: str = "") -> None:
        self.code = err.exit_code
        self._reporter.warn(f"{err}{'' if self._asked.asks_once else hint}")

    def _help(self, _: str) -> None:
        self._reporter.note("commands:")
        self._reporter.console.print(COMMANDS, markup=False)

    def _clear(self, _: str) -> None:
        self._reporter.note(self._said.clear())
        if not self._said.waiting:  # else the context has their beginning
            self._kv.clear()

    def _regenerate(self, _: str) -> None:
        self._turn(self._said.turns[:-1], replace(self._said.last(), answer=None))

    def _replace_system(self, text: str) -> None:
        self._said.system = text or None
        self._reporter.note("the system prompt is replaced" if text else "the system prompt is removed")

    def _show_stats(self, _: str) -> None:
        if self._stats is None:
            msg = "there is no answer yet"
            raise UsageError(msg)
        self._reporter.console.print(stats_table(self._stats))

    def _show_context(self, _: str) -> None:
        kv, said, read = self._kv, self._said, self._ahead.progress
        pool = f", a pool of {kv.n_pool:,}" if kv.n_pool else ""
        files = f"; files: {', '.join(file.name for file in said.files)}" if said.files else ""
        yet = f"; reading: {read.done:,} of {read.total:,} tokens" if self._ahead.reads and read else ""
        self._reporter.note(
            f"{kv.n_tokens:,} of {kv.options.n_ctx:,} tokens{pool}; turns: {len(said.turns)}{files}{yet}"
        )

    def _save(self, name: str) -> None:
        if not name:
            msg = "/save needs the name of a file: /save talk.json"
            raise UsageError(msg)
        messages = self._said.messages(self._said.turns)
        try:
            with Path(name).open("x", encoding="utf-8") as file:
                json.dump(messages, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            msg = f"{name} exists already: give another name"
            raise UsageError(msg) from None
        except OSError as err:
            with suppress(OSError):
                Path(name).unlink()  # a part may have been written
            raise OutputError(unwritten(name, err)) from None
        self._reporter.note(f"messages saved to {name}: {len(messages)}")

    def _turn(self, before: list[Turn], turn: Turn) -> bool:
        """Answer a message after some turns. Returns whether there is an answer; otherwise the conversation stays as it was."""
        answer = self._answered = ""
        try:
            with native.interruptible():
                self._ahead.settle()
                turns, tokens = self._fitting(before, turn)
                answer, done = self._answer(tokens)
        except DeviceLostError as err:
            self._failed(err, "; /save FILE keeps the conversation so far")
            if self._answered:
                self._said.turns = [*before, replace(turn, answer=self._answered.strip())]
            return self._answered != ""
        except NativeError as err:
            self._kv.clear()  # the state of the context is unknown
            self._failed(err)
            return False
        except KVFlashError as err:
            self._failed(err, f"; /clear begins a new conversation{self._said.outcome()}")
            return False
        self._reporter.answered(done.stats, done.reason)
        self._has_read(done.stats.prefill_s)
        self._asked.kept.say()
        if done.reason == "interrupted":
            self.code = Interrupted.exit_code
            if not answer:
                return False
        self._stats = done.stats
        self._said.turns = [*turns, replace(turn, answer=answer.strip())]
        return True

    def _fitting(self, turns: list[Turn], turn: Turn) -> tuple[list[Turn], Tokens]:
        """Leave out the oldest turns until the rest and a new turn fit the context, with room for an answer.

        Returns the turns that stay, and the whole prompt's token ids, (n,) int32. Turns with files always stay. Raises
        UsageError if the template refuses the messages.
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
        """Read the tokens that the context does not have, and show the answer as it comes. Returns the answer and the last event."""
        kv, n, sampling = self._kv, self._begin_with(tokens), self._asked.sampling
        if sampling.seed is None:  # drawn here, so that /stats can show it
            sampling = replace(sampling, seed=random.getrandbits(31))
        events = kv.generate(
            tokens[n:], max_tokens=self._asked.n_predict, sampling=sampling, stop=self._template.stop, append=True
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
                    click.echo(nl=not text.endswith("\n") and (text != "" or event.reason != "interrupted"))
                    return text, event
        msg = "the engine stopped without a last event"
        raise AssertionError(msg)


def text_of(file: str) -> str:
    """Return the text of a file that goes before a message. Raises UsageError."""
    if file in {"", "-"}:
        msg = "give the name of a file: /file FILE, or -f FILE; stdin has the messages"
        raise UsageError(msg)
    return read_text(file).removesuffix("\n")
