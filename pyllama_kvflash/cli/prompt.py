"""The prompt of `kvflash run`: texts and files as one text, in the model's chat template if it has one."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.read import check_given, read_text
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Reads
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Tokens

if TYPE_CHECKING:
    from pyllama_kvflash.chat.engine import ChatTemplate

PROMPT = params.options(
    click.option("-p", "--prompt", help="Prompt, or a question about the files of -f, which come first."),
    click.option("-f", "--file", "--prompt-file", "prompt_files", metavar="FILE", type=Reads(), multiple=True,
                 help="Text file with the prompt, - for stdin; one newline at its end is removed. Several files are joined by"
                 " empty lines. Windows line ends become Unix line ends."),
    params.SYSTEM,
    click.option("-cnv/-no-cnv", "--conversation/--no-conversation", " /--no-chat-template", "conversation",
                 default=None, help="Make the prompt a message in the model's chat template, or complete it as it is. With"
                 " --append, the message is the next turn.  [default: -cnv if the model has a template and, with --append, the"
                 " saved text is a conversation]"),
)  # fmt: skip


class Prompt:
    """A prompt, and the form in which the model gets it."""

    def __init__(self, options: dict[str, Any], reporter: Reporter, *, appends: bool) -> None:
        """Take the values of PROMPT out of options, and read the files. Raises UsageError, and warns if all files are empty.

        appends: whether the prompt comes after a saved text; if that is a conversation, the prompt is its next turn.
        """
        self.text = _read(options.pop("prompt"), options.pop("prompt_files"), reporter)
        if not self.text and not appends:
            msg = "the prompt is empty: give at least one character"
            raise UsageError(msg)
        self._system, self._conversation = options.pop("system"), options.pop("conversation")
        check_given(self._system, "-sys/--system-prompt")
        self._appends = appends
        self.stop: tuple[str, ...] = ()
        self.templated = False

    def tokens(self, kv: KVFlash, reporter: Reporter) -> Tokens:
        """Return the prompt's token ids, (n,) int32. If the prompt comes after a saved text, the context must hold that text.

        Raises UsageError if a template cannot be used.
        """
        if self._conversation or (
            self._conversation is None and self.text and kv.model.meta("tokenizer.chat_template")
        ):
            from pyllama_kvflash.chat.engine import ChatTemplate  # noqa: PLC0415 (slow)

            template = ChatTemplate(kv.model, fix="add --no-chat-template, which completes the prompt as it is")
            if not self._appends:
                return self._message(kv, template, reporter)
            if self._conversation or template.begins(kv.tokens):
                return self._next_turn(kv, template, reporter)
        if self._system is not None:
            msg = "-sys is given, and the prompt is completed as it is, without a chat template: put it into the prompt, or add -cnv"
            raise UsageError(msg)
        return kv.tokenize(self.text, add_special=not self._appends) if self.text else np.zeros(0, np.int32)

    def _message(self, kv: KVFlash, template: "ChatTemplate", reporter: Reporter) -> Tokens:
        self._uses(template, reporter, "the prompt is a message in the model's chat template", reporter.detail)
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        return template.tokens(kv.model, [*system, {"role": "user", "content": self.text}])

    def _next_turn(self, kv: KVFlash, template: "ChatTemplate", reporter: Reporter) -> Tokens:
        if self._system is not None:
            msg = "-sys is given, and the saved conversation has begun already: leave it out, or put it into the prompt"
            raise UsageError(msg)
        self._uses(template, reporter, "the prompt is the next turn of the saved conversation", reporter.note)
        text = template.next_turn({"role": "user", "content": self.text})
        return kv.tokenize(text, add_special=False, parse_special=True)

    def _uses(self, template: "ChatTemplate", reporter: Reporter, how: str, say: Callable[[str], None]) -> None:
        if template.warning:
            reporter.warn(template.warning)
        else:
            say(f"{how} (--no-chat-template: completed as it is)")
        self.stop, self.templated = template.stop, True

    def hint(self) -> str:
        """Return what to try after an empty answer."""
        if self.templated:
            return "ask in other words, or try --no-chat-template"
        if self._appends:
            return "give a prompt with -p, or with -cnv as the next turn of a conversation"
        return "a model that was trained for chat wants its template: -cnv"


def _read(prompt: str | None, files: tuple[str, ...], reporter: Reporter) -> str:
    """Return the texts of the files and the prompt, in this order, with an empty line between two."""
    check_given(prompt, "-p/--prompt")
    if files.count("-") > 1:
        msg = "-f - is given several times: stdin can be read once"
        raise UsageError(msg)
    if not files and prompt is None:
        if sys.stdin is not None and sys.stdin.isatty():
            msg = 'there is no prompt: give one with -p "text", -f file.txt, or on stdin'
            raise UsageError(msg)
        files = ("-",)
    texts = [read_text(file, "prompt").removesuffix("\n") for file in files]
    if prompt and files and not any(texts):
        reporter.warn(
            f"{' and '.join(files)} {'is' if len(files) == 1 else 'are'} empty: the prompt is the text of -p alone"
        )
    return "\n\n".join([*texts, *([] if prompt is None else [prompt])])
