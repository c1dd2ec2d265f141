"""Chat templates, and `kvflash chat`: what is read, what is said, and what a template cannot do."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from click.testing import CliRunner, Result
from support.commands import forget_settings
from support.rewritten import with_template
from support.terminal import Terminal

from pyllama_kvflash.chat import engine as chat
from pyllama_kvflash.chat.engine import ChatTemplate
from pyllama_kvflash.cli import main
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt

pytestmark = pytest.mark.native

SMALL = ("-c", "2K", "--kvflash", "1K", "-b", "128", "-t", "1", "--temp", "0")
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'assistant' }}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
CHATML = """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's settings."""
    forget_settings(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        yield model


#
# templates
#


def test_a_usual_template(model: Model) -> None:
    template = ChatTemplate(model, CHATML)
    bos = model.piece(int(model.tokenize("")[0]), special=True).decode()
    said = [{"role": "system", "content": " terse "}, {"role": "user", "content": "1 < 2"}]
    want = "<|im_start|>system\nterse<|im_end|>\n<|im_start|>user\n1 < 2<|im_end|>\n"
    shown = template.render(said, answer=False).removeprefix(bos)
    assert shown == want, "blocks are trimmed, and nothing is escaped"
    assert template.render(said).removeprefix(bos) == want + "<|im_start|>assistant\n"
    with pytest.raises(UsageError, match=r"cannot render this conversation: Jinja Exception: no such role"):
        template.render([{"role": "robot", "content": ""}])
    assert template.stop == ()
    assert template.warning == ""


def test_a_model_without_one(model: Model) -> None:
    template = ChatTemplate(model)
    assert "no chat template" in template.warning
    said = [*HELLO, {"role": "assistant", "content": " hi\n"}]
    assert template.render([*said, *HELLO]) == "user: hello\nassistant: hi\nuser: hello\nassistant:"
    assert template.render(said) == "user: hello\nassistant: hi\n", "it is gone on with"
    assert template.render(said, answer=False) == "user: hello\nassistant: hi\n"
    assert "\nuser:" in template.stop


def test_bos_once(model: Model) -> None:
    bos = int(model.tokenize("")[0])
    text = model.piece(bos, special=True).decode()
    for source in (CHATML, CHATML.removeprefix("{{ bos_token }}")):
        ids = ChatTemplate(model, source).tokens(model, HELLO)
        assert ids.dtype == np.int32
        assert ids.tolist().count(bos) == 1
        assert ids[0] == bos
    ids = chat.tokenize_chat(model, f"a{text}b")
    assert ids.tolist() == [bos, *model.tokenize("a", add_special=False), bos, *model.tokenize("b", add_special=False)]
    with pytest.raises(UsageError, match="half of a surrogate pair at character 1"):
        chat.tokenize_chat(model, "a\udc80")


def test_the_template_of_a_model(tmp_path: Path) -> None:
    """It is read from the file, whatever its length."""
    path = with_template(tmp_path / "chat.gguf", CHATML + "{# " + "x" * 5000 + " #}")
    with Model.load(path, no_alloc=True) as model:
        template = ChatTemplate(model)
        assert template.warning == ""
        bos = model.piece(int(model.tokenize("")[0]), special=True).decode()
        assert template.render(HELLO, answer=False) == "<|im_start|>user\nhello<|im_end|>\n"
        assert model.piece(int(template.tokens(model, HELLO)[0]), special=True).decode() == bos


def test_a_model_whose_template_cannot_be_read(tmp_path: Path) -> None:
    path = with_template(tmp_path / "bad.gguf", "{% for %}")
    res = CliRunner().invoke(main, ["run", str(path), "-p", "hi", *SMALL, "-n", "2"])
    assert res.exit_code == 2
    assert "cannot read the chat template: Unexpected token: %} of type 9: " in res.stderr
    assert res.stderr.endswith(": add --no-chat-template, which completes the prompt as it is\n")
    assert (
        CliRunner().invoke(main, ["run", str(path), "-p", "hi", *SMALL, "-n", "2", "--no-chat-template"]).exit_code == 0
    )


#
# the command
#


def talk(text: str, *args: str) -> Result:
    res = CliRunner().invoke(main, ["chat", *SMALL, "-n", "12", *args], input=text)
    assert res.exception is None or isinstance(res.exception, SystemExit), repr(res.exception)
    return res


@pytest.fixture(scope="module")
def document(model: Model) -> Any:
    return make_prompt(900, lambda s: len(model.tokenize(s, add_special=False)), n_needles=4, seed=3)


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return str(tmp_path / "t.jinja")


def test_a_conversation_in_a_pipe(document: Any, template: str) -> None:
    """Each question is answered, what was read is not read again, and stdout has the answers alone."""
    a, b = document.needles[1], document.needles[3]
    text = f'"""{document.text}{a.question}"""\n\n{b.question}\n/stats\n'
    res = talk(text, "--chat-template-file", template, "-n", "5")
    assert res.exit_code == 0, res.output
    assert res.stdout == f"{a.answer}.\n{b.answer}.\n"
    read = [int(n.replace(",", "")) for n in re.findall(r"read ([\d,]+) tokens? in", res.stderr)]
    assert read[0] > 900
    assert read[1] < 50
    assert "reselects" in res.stderr


def test_commands(document: Any, template: str) -> None:
    res = talk("hello\n/clear\n/nothing\n/exit\nnever\n", "-q", "-sys", "Be brief.")
    assert res.exit_code == 0, res.output
    lines = res.stderr.splitlines()
    assert lines[0].startswith("kvflash: warning: the model has no chat template")
    assert lines[1].startswith("kvflash: warning: there is no command /nothing: there are /help, ")
    assert len(lines) == 2
    again = talk("hello\n/clear\nhello\n", "-sys", "Be brief.")
    assert again.stdout == res.stdout * 2
    assert again.stderr.count("a new conversation") == 1
    assert talk("/usr/bin is a path\n").stdout


def test_the_oldest_turns_are_left_out_of_a_full_context(template: str) -> None:
    """The system prompt and the last message stay; a message that does not fit alone is refused."""
    said = "\n".join(f"{i} " + "word " * 40 for i in range(4))
    args = ("-c", "256", "--kvflash", "off", "-n", "8", "-sys", "Be brief.", "--chat-template-file", template)
    res = talk(f"{said}\n/context\n", *args)
    assert res.exit_code == 0, res.output
    warned = r"warning: .* the oldest (?:turn is|([2-9]) turns are) left out from now on"
    left_out = re.findall(warned, res.stderr)
    n = sum(int(count or 1) for count in left_out)
    assert 0 < n < 4
    assert f"of 256 tokens; turns: {4 - n}" in res.stderr
    assert len(re.findall(": read ", res.stderr)) == 4, "all were answered"
    assert "left out from now on ('0 word word word word wo…" in res.stderr
    assert re.findall(warned, talk(f"{said}\n", *args, "-q").stderr) == left_out


def test_a_file_stays_in_a_full_context(template: str, tmp_path: Path) -> None:
    """Turns without a file make room, and one that still does not fit is refused."""
    book, notes, saved = tmp_path / "book.txt", tmp_path / "notes.txt", tmp_path / "talk.json"
    book.write_text("book " * 30)
    notes.write_text("notes " * 30)
    many = "word " * 20
    text = f"0\n1 {many}\n/file {notes}\n2\n3 {many}\n4 {many}\n5 {many}\n/save {saved}\n/context\n{'long ' * 300}\n"
    args = ("-c", "256", "--kvflash", "off", "-n", "8", "--chat-template-file", template)
    res = talk(text, *args, "-f", str(book))
    assert res.exit_code == 0, res.output
    messages = [m["content"] for m in json.loads(saved.read_text()) if m["role"] == "user"]
    assert messages[0] == "File book.txt:\n\n" + "book " * 30 + "\n\n0"
    assert messages[1] == "File notes.txt:\n\n" + "notes " * 30 + "\n\n2", "1 made room"
    assert messages[-1] == f"5 {many}".strip()
    assert len(messages) < 6
    assert f"; {book} and {notes} stay\n" in res.stderr
    assert f"; files: {book}, {notes}\n" in res.stderr
    assert f"; /clear begins a new conversation with {book}, without {notes}\n" in res.stderr


def test_a_file_is_not_lost_with_its_turn(template: str, tmp_path: Path) -> None:
    """/undo gives it to the next message, and a second one takes it back; /clear keeps that of -f."""
    book, notes = tmp_path / "book.txt", tmp_path / "notes.txt"
    book.write_text("the book")
    notes.write_text("the notes")
    one, two, three = (tmp_path / f"{i}.json" for i in range(3))
    res = talk(
        f"/undo\nhello\n/undo\nhello\n/save {one}\n/file {notes}\n/regen\nfirst\n/undo\nsecond\n/save {two}\n"
        f"/undo\n/undo\n/clear\nthird\n/save {three}\n/file {notes}\n/clear\n",
        "-f", str(book), "--chat-template-file", template,
    )  # fmt: skip
    assert res.exit_code == 0, res.output

    def asked(path: Path) -> list[str]:
        return [m["content"] for m in json.loads(path.read_text()) if m["role"] == "user"]

    assert asked(one) == ["File book.txt:\n\nthe book\n\nhello"]
    assert asked(two) == ["File book.txt:\n\nthe book\n\nhello", "File notes.txt:\n\nthe notes\n\nsecond"], (
        "/regen left it to the next message"
    )
    assert asked(three) == ["File book.txt:\n\nthe book\n\nthird"]
    lines = [line.removeprefix("kvflash: ") for line in res.stderr.splitlines()]
    said = [line for line in lines if "taken back" in line or "new conv" in line or "no longer" in line]
    assert said == [
        f"the last message and its answer are taken back; before the next message: {book}",
        *[f"the last message and its answer are taken back; before the next message: {notes}"] * 2,
        f"{notes} no longer goes before the next message",
        f"a new conversation with {book}",
        f"a new conversation with {book}, without {notes}",
    ]
    assert "there is no message yet" in res.stderr, "a file of -f is not taken back"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", 2, "stdin has no message: give one on each line"),
        ("\n\n", 2, "stdin has no message"),
        ("word " * 3000 + "\n", 2, "do not fit the context"),
        ("/exit\n", 0, ""),
        ("/context\n", 0, "of 2,048 tokens"),
    ],
)
def test_a_pipe_without_an_answer(text: str, code: int, words: str) -> None:
    res = talk(text)
    assert (res.exit_code, res.stdout) == (code, ""), res.stderr
    assert words in res.stderr


def test_messages_are_taken_back_and_answered_again(document: Any, template: str, tmp_path: Path) -> None:
    """A file comes before one message alone; what was taken back was not said."""
    a, b = document.needles[1], document.needles[3]
    (tmp_path / "book.txt").write_text(document.text)
    saved = tmp_path / "talk.json"
    text = f"{a.question}\n/undo\n{a.question}\n/regen\n{b.question}\n/save {saved}\n/save {saved}\n"
    res = talk(text, "-f", str(tmp_path / "book.txt"), "--chat-template-file", template, "-n", "5")
    assert res.exit_code == 0, res.output
    assert res.stdout.splitlines() == [f"{a.answer}."] * 3 + [f"{b.answer}."]
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == "File book.txt:\n\n" + document.text.removesuffix("\n") + "\n\n" + a.question
    assert messages[2:] == [{"role": "user", "content": b.question}, {"role": "assistant", "content": f"{b.answer}."}]
    assert f"{saved} exists already: give another name" in res.stderr


def test_the_system_prompt_is_replaced(template: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    res = talk(
        f"hello\n/system Be long.\nhello\n/save {saved}\n/system\n/context\n",
        "-sys",
        "Be brief.",
        "--chat-template-file",
        template,
    )
    assert res.exit_code == 0, res.output
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "Be long."
    assert "the system prompt is removed" in res.stderr
    assert "; turns: 2" in res.stderr


def test_refusals(tmp_path: Path) -> None:
    assert "-n/--predict is 0" in talk("", "-n", "0").stderr
    (tmp_path / "bad.jinja").write_text("{% for %}")
    res = talk("hello\n", "--chat-template-file", str(tmp_path / "bad.jinja"))
    assert res.exit_code == 2
    assert (
        "cannot read the chat template: Unexpected token: %} of type 9: give another one as --chat-template-file"
        in res.stderr
    )
    res = talk("a\0b\n")
    assert (res.exit_code, "zero byte" in res.stderr) == (2, True)


def test_a_terminal() -> None:
    """A prompt, Ctrl-C in an answer and at the prompt, several lines, Ctrl-D."""
    terminal = Terminal("chat", *SMALL, "-n", "1500")
    try:
        terminal.until(r"pool of[^\n]*\n(.|\n)*> ")
        terminal.type("hello\r")
        terminal.until("hello[^>]*The secret")
        terminal.type("\x03")
        terminal.until("interrupted\r?\n(.|\n)*> ")
        terminal.press("\x03", "/exit or Ctrl-D leaves(.|\n)*> ")
        terminal.type('"""one\r')
        terminal.until(r"\.\.\. ")
        terminal.type('two"""\r')
        terminal.until("The ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("interrupted\r?\n(.|\n)*> ")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()
