"""`kvflash ask`: questions about files, which are read while they are typed; and what files may be."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.commands import USAGE, good
from support.documents import docx, pdf
from support.terminal import Terminal

from pyllama_kvflash import native
from pyllama_kvflash.cli import documents
from pyllama_kvflash.cli.ahead import Ahead
from pyllama_kvflash.cli.read import read_text
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.errors import Interrupted, UsageError
from pyllama_kvflash.events import Prefill
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt

if TYPE_CHECKING:
    from pyllama_kvflash.engine.engine import KVFlash

pytestmark = pytest.mark.native

environment = commands.environment
SMALL = ("-c", "4K", "--kvflash", "1K", "-b", "128", "-t", "1", "--temp", "0", "-n", "5")
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'assistant' }}{% endfor %}"


@pytest.fixture(scope="module")
def document() -> Any:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(2400, lambda s: len(model.tokenize(s, add_special=False)), n_needles=4, seed=3)


@pytest.fixture
def folder(document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two halves of a text with codes, and a template that shows them as they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    middle = document.text.index("\n", len(document.text) // 2)
    (tmp_path / "first.txt").write_text(document.text[:middle])
    (tmp_path / "second.txt").write_text(document.text[middle:])
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return tmp_path


def ask(folder: Path, *args: str, text: str | None = None) -> Any:
    files = (str(folder / name) for name in ("first.txt", "second.txt"))
    template = ("--chat-template-file", str(folder / "t.jinja"))
    return good("ask", str(BUNDLED_MODEL), *files, *template, *SMALL, *args, text=text)


def test_questions_of_the_command_line(document: Any, folder: Path) -> None:
    a, b = document.needles[0], document.needles[-1]
    res = ask(folder, "-p", a.question, "-p", b.question)
    assert res.stdout.splitlines() == [f"{a.answer}.", f"{b.answer}."]
    read = [int(n.replace(",", "")) for n in re.findall(r"read ([\d,]+) tokens", res.stderr)]
    assert read[0] > 2000
    assert read[1] < 100
    assert len(res.stderr.splitlines()) == 4, "what runs, and what each answer took"


def test_a_file_is_read_while_a_question_is_typed(document: Any, folder: Path) -> None:
    """Ctrl-C at the prompt does not stop that."""
    one = document.needles[2]
    terminal = Terminal("ask", str(BUNDLED_MODEL), str(folder / "first.txt"), str(folder / "second.txt"), *SMALL)
    try:
        terminal.until(r"reading 2,\d\d\d tokens while you type(.|\n)*> ")
        terminal.press("\x03", "/exit or Ctrl-D leaves(.|\n)*> ")
        terminal.type("/context\r")
        terminal.until("files: .*first.txt, .*second.txt(.|\n)*> ")
        terminal.type("/stats\r")
        terminal.until("there is no answer yet(.|\n)*> ")
        terminal.type(f"{one.question}\r")
        terminal.until(rf"{one.answer}(.|\n)*kvflash: read \d\d tokens(.|\n)*> ")
        terminal.type("/exit\r")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("command", ["/exit", "/clear", "What?"])
def test_a_command_comes_while_a_file_is_read(folder: Path, command: str) -> None:
    """It is stopped, begins anew, or is waited for, until Ctrl-C."""
    (folder / "long.txt").write_text("Word " * 30_000)
    terminal = Terminal("ask", str(BUNDLED_MODEL), str(folder / "long.txt"), *SMALL, "-c", "64K")
    try:
        terminal.until(r"reading [\d,]+ tokens while you type(.|\n)*> ")
        terminal.type(f"{command}\r")
        if command == "/clear":
            terminal.until(r"a new conversation with .*long.txt(.|\n)*reading [\d,]+ tokens while you type(.|\n)*> ")
        if command == "What?":
            terminal.until("reading")
            terminal.type("\x03")
            terminal.until("interrupted\r?\n")
            terminal.type("/context\r")
            terminal.until("long.txt\r?\n")  # what was stopped does not begin again
            assert "while you type" not in terminal.seen
        if command != "/exit":
            terminal.type("/exit\r")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()


def test_ctrl_c_twice_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is for what is read, and the second one ends the wait for it."""
    began, stop, took = threading.Event(), threading.Event(), []

    class Slow:
        def prefill(self, _: Any) -> Iterator[Prefill]:
            began.set()
            stop.wait()
            yield Prefill(1, 2, 0.1, 0, 0)
            raise Interrupted("stopped")

    def pressed(_: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "interrupt", lambda on: stop.set() if on else stop.clear())
    ahead = Ahead(cast("KVFlash", Slow()), Reporter(), lambda _: None, took.append)
    ahead.begin(np.zeros(2, np.int32))
    assert began.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(ahead._ended, "wait", pressed)
        with pytest.raises(KeyboardInterrupt):
            ahead.settle()
    assert ahead.reads
    assert took == []
    ahead.stop()
    assert len(took) == 1
    assert not ahead.reads
    assert not stop.is_set()


def test_a_run_without_a_prompt_is_a_conversation(tmp_path: Path) -> None:
    terminal = Terminal("run", str(BUNDLED_MODEL), *SMALL, "-cnv")
    try:
        terminal.until("context of 4,096 tokens(.|\n)*> ")
        terminal.type("hello\r")
        terminal.until("hello(.|\n)*kvflash: read (.|\n)*> ")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()
    terminal = Terminal("run", str(BUNDLED_MODEL), *SMALL, "-o", str(tmp_path / "out.txt"))
    try:
        terminal.until("there is no prompt: give one with")
        assert terminal.process.wait(20) == USAGE
    finally:
        terminal.close()


#
# documents
#


def test_documents_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(b"From a mail\r\n" + pdf("The heir is Ada.", "She lives in Oldbury."))
    assert read_text(str(tmp_path / "a.pdf")) == "The heir is Ada.\n\nShe lives in Oldbury."
    (tmp_path / "a.docx").write_bytes(docx("First.", [["name", "age"], ["Ada", "36"]], "Last."))
    assert read_text(str(tmp_path / "a.docx")) == "First.\n\nname | age\nAda | 36\n\nLast."


def test_all_text_of_a_docx_is_read(tmp_path: Path) -> None:
    """In content controls, insertions and tables in tables, and merged cells once; what was deleted is not."""
    docx = pytest.importorskip("docx")
    document, w = docx.Document(), "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    table = document.add_table(1, 3)
    table.cell(0, 0).merge(table.cell(0, 1)).text = "merged"
    table.cell(0, 2).add_table(1, 1).cell(0, 0).text = "nested"
    for inside in (
        "<w:sdt><w:sdtContent><w:p><w:r><w:t>control</w:t></w:r></w:p></w:sdtContent></w:sdt>",
        "<w:p><w:ins w:id='1'><w:r><w:t>in</w:t><w:tab/><w:t>serted</w:t></w:r></w:ins></w:p>",
        "<w:p><w:del w:id='2'><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>",
    ):
        document.element.body.insert(-1, docx.oxml.parse_xml(inside.replace(">", f" xmlns:w='{w}'>", 1)))
    document.save(tmp_path / "a.docx")
    assert read_text(str(tmp_path / "a.docx")) == "merged | nested\n\ncontrol\n\nin\tserted"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pdf(""), "is a PDF without text, perhaps of images"),
        (pdf("x")[:90], "is a PDF that cannot be read.*give its text, such as from pdftotext"),
        (b"PK\x03\x04" + bytes(100), "is not UTF-8 text|is binary"),
    ],
    ids=["images", "cut off", "another zip"],
)
def test_documents_that_cannot_be_read(tmp_path: Path, data: bytes, says: str) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(UsageError, match=says):
        read_text(str(tmp_path / "a"))


def test_without_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    (tmp_path / "a.pdf").write_bytes(pdf("x"))
    monkeypatch.setattr(documents, "import_module", missing)
    with pytest.raises(
        UsageError, match=r"is a PDF: install its reader with pip install 'pyllama-kvflash\[documents\]'"
    ):
        read_text(str(tmp_path / "a.pdf"))
