"""Texts that commands are given are read in one way, wherever they come from: what is decoded, and what is refused."""

import codecs
import io
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.commands import USAGE, check_error, in_process

from pyllama_kvflash.cli.read import decoded, piped_lines
from pyllama_kvflash.errors import UsageError

pytestmark = pytest.mark.native

environment = commands.environment

TEXT = "Zoë said: 日本\n\nand left.\n"
WINDOWS = TEXT.replace("\n", "\r\n")


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        TEXT.encode("utf-8-sig"),
        WINDOWS.encode(),
        WINDOWS.encode("utf-8-sig"),
        TEXT.replace("\n", "\r").encode(),
        codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + WINDOWS.encode("utf-16-be"),
    ],
)
def test_texts_that_are_decoded(data: bytes) -> None:
    assert decoded(data, "it") == TEXT


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"caf\xe9 au lait", r"^it is not UTF-8 text: byte 0xe9 at offset 3; convert it, .*iconv -f LATIN1 -t UTF-8$"),
        (b"abc\xe2\x82", r"not UTF-8 text: byte 0xe2 at offset 3"),  # cut within a character
        (b"abc\0def", r"^it is binary: a zero byte at offset 3; give a text file$"),
        ("Who is it?\n".encode("utf-16-le"), r"looks like UTF-16 without .*iconv -f UTF-16LE -t UTF-8$"),
        ("Who is it?\n".encode("utf-16-be"), r"looks like UTF-16 without .*iconv -f UTF-16BE -t UTF-8$"),
        (codecs.BOM_UTF16_LE + b"a\0\x00\xd8", r"not UTF-16 text, .*offset 4"),  # half a surrogate pair
        (codecs.BOM_UTF16_LE + b"a\0b", r"not UTF-16 text, .*offset 4"),  # cut within a character
        (
            codecs.BOM_UTF16_LE + "Zoë\0".encode("utf-16-le"),
            r"^it is binary: a zero byte at offset 8; give a text file$",
        ),
        (
            codecs.BOM_UTF32_LE + "a".encode("utf-32-le"),
            r"^it is UTF-32 text: convert it with iconv -f UTF-32 -t UTF-8$",
        ),
        (codecs.BOM_UTF32_BE + "a".encode("utf-32-be"), r"^it is UTF-32 text: "),
        (b"a\0b", r"^it is binary: a zero byte at offset 1; give a text file$"),
        (bytes(8), r"^it is binary: a zero byte at offset 0; give a text file$"),
    ],
)
def test_texts_that_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        decoded(data, "it")


GIVEN = ("-p", "x", "-n", "1", "-c", "256")
READERS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "prompt": lambda path: ("run", "-f", path),
    "stdin": lambda _: ("run",),
    "schema": lambda path: ("run", "-jf", path, *GIVEN),
    "grammar": lambda path: ("run", "--grammar", path, *GIVEN),
    "template": lambda path: ("chat", "--chat-template-file", path),
    "chat": lambda path: ("chat", "-f", path),
    "bench": lambda path: ("bench", "kld", "-f", path),
}
"""Options that name a text, each by a command that has it."""


@pytest.mark.parametrize("reader", READERS)
def test_readers_refuse_what_is_not_text(reader: str, tmp_path: Path) -> None:
    """All of them use decoded(): what it refuses, they refuse."""
    path = tmp_path / "odd.txt"
    path.write_bytes(b"caf\xe9")
    res, name = in_process(*READERS[reader](str(path)), stdin=b"caf\xe9"), "stdin" if reader == "stdin" else str(path)
    check_error(res, USAGE, name, "0xe9 at offset 3", "iconv")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_readers_take_the_texts_of_windows(encoding: str, tmp_path: Path) -> None:
    """The same answers to a schema, a grammar, a prompt and a template, however they are encoded."""

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
        return path

    code = "Note: the code is 481.\nQuestion: what is the code? Answer:\n"
    short = ("-n", "3", "-c", "256", "-t", "1", "--temp", "0", "-q")
    plain = in_process("run", *short, stdin=code.encode())
    assert in_process("run", *short, "-f", written("prompt.txt", code)).out == plain.out
    assert in_process("run", *short, stdin=code.replace("\n", "\r\n").encode(encoding)).out == plain.out
    grammar = written("g.gbnf", 'root ::= "yes" |\n  "no"\n# a comment\n')
    assert in_process("run", *short, "-p", "Is it?", "--grammar", grammar).out.strip() in {"yes", "no"}
    schema = written("s.json", '{"type":\n "boolean"}\n')
    assert in_process("run", *short, "-p", "Is it?", "-jf", schema).out.strip() in {"true", "false"}
    template = written("t.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    asked = [*("chat", "-c", "256", "-n", "3", "-t", "1", "--temp", "0", "-q", "--chat-template-file"), template]
    answers = {in_process(*asked, stdin=data).out for data in (b"Hi\n", "Hi\r\n".encode(encoding))}
    assert len(answers) == 1
    assert answers != {""}


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    return list(piped_lines())


@pytest.mark.parametrize(
    "data",
    [
        b"Hi\n\nHo\n",
        b"Hi\r\n\r\nHo",
        b"\xef\xbb\xbfHi\r\rHo\r",  # of an old Mac: each line is a message
        "Hi\r\n\r\nHo\r\n".encode("utf-16"),
    ],
)
def test_piped_lines(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(monkeypatch, data) == ["Hi", "", "Ho"]


def test_only_the_first_piped_line_says_how_all_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one that begins as UTF-16 does would be another text, without an error."""
    with pytest.raises(UsageError, match="line 2 of stdin is not UTF-8 text: byte 0xff at offset 0"):
        piped(monkeypatch, b"Hi\n\xff\xfea\n")
    with pytest.raises(UsageError, match="line 1 of stdin looks like UTF-16 without"):
        piped(monkeypatch, "Hello\n".encode("utf-16-le"))
