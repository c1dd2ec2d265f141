"""The conversation of `kvflash chat`: the system prompt, the turns, and the files that come before some of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.text import printable

_QUOTED = 24  # characters of a message that a warning quotes to name its turn


class File(NamedTuple):
    """A text that goes before a message. stays: whether /clear and /undo keep the text, as they keep files of -f."""

    name: str
    text: str
    stays: bool

    @property
    def title(self) -> str:
        """The file's name without its folder. The model reads this name, so moving the file does not change the prompt."""
        return printable(Path(self.name).name)


@dataclass(frozen=True)
class Turn:
    """A message, the files before it, and its answer, or None if there is none yet."""

    files: tuple[File, ...]
    text: str
    answer: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the turn as messages of a conversation."""
        files = (f"File {file.title}:\n\n{file.text}" for file in self.files)
        said = [{"role": "user", "content": "\n\n".join([*files, self.text])}]
        return said if self.answer is None else [*said, {"role": "assistant", "content": self.answer}]


@dataclass
class Conversation:
    """The system prompt, the turns from the oldest on, and the files that go before the next message.

    No text of a file is lost unless the user says so: a turn with files is never left out, and the files of a turn that is
    taken back go before the next message.
    """

    system: str | None
    turns: list[Turn] = field(default_factory=list)
    waiting: list[File] = field(default_factory=list)

    @property
    def files(self) -> list[File]:
        """All files, in their order."""
        return [*(file for turn in self.turns for file in turn.files), *self.waiting]

    def messages(self, turns: Iterable[Turn]) -> list[dict[str, str]]:
        """Return the system prompt and some turns as messages."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *(message for turn in turns for message in turn.messages())]

    def last(self) -> Turn:
        """Return the last turn. Raises UsageError if there is none."""
        if not self.turns:
            msg = "there is no message yet"
            raise UsageError(msg)
        return self.turns[-1]

    def undo(self) -> str:
        """Take back the last file of /file, or the last message and its answer. Returns a sentence for the user. Raises UsageError."""
        if self.waiting and not self.waiting[-1].stays:
            return f"{self.waiting.pop().name} no longer goes before the next message"
        files = self.last().files
        self.turns.pop()
        self.waiting = [*files, *self.waiting]
        again = f"; before the next message: {_names(self.waiting)}" if files else ""
        return f"the last message and its answer are taken back{again}"

    def outcome(self) -> str:
        """Return words about the files that /clear keeps and those that it leaves out."""
        kept, gone = (_names(file for file in self.files if file.stays == stays) for stays in (True, False))
        return ",".join([f" with {kept}"] * bool(kept) + [f" without {gone}"] * bool(gone))

    def clear(self) -> str:
        """Begin a new conversation with the files that stay. Returns a sentence for the user."""
        said = f"a new conversation{self.outcome()}"
        self.turns, self.waiting = [], [file for file in self.files if file.stays]
        return said


def left_out(turns: list[Turn], others: list[Turn]) -> str:
    """Return a sentence that quotes the turns that are left out. others: the turns that stay; their files are named."""
    files = [file for turn in others for file in turn.files]
    stays = f"; {_names(files)} {'stays' if len(files) == 1 else 'stay'}" if files else ""
    first, last = (turn.text[:_QUOTED] + "…" * (len(turn.text) > _QUOTED) for turn in (turns[0], turns[-1]))
    if len(turns) == 1:
        return f"the oldest turn is left out from now on ({first!r}){stays}"
    return f"the oldest {len(turns)} turns are left out from now on ({first!r} to {last!r}){stays}"


def _names(files: Iterable[File]) -> str:
    return " and ".join(file.name for file in files)
