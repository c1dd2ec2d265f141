"""What `kvflash run` is asked: messages in a model's chat template, files with a question, and text as it is."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.rewritten import with_template

from pyllama_kvflash.cli import kept, main
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt

pytestmark = pytest.mark.native

USAGE = 2
SMALL = ("-c", "2K", "--kvflash", "1K", "-b", "128", "-t", "1", "--temp", "0", "-n", "5")
MESSAGES = "{% for m in messages %}{{ m.role == 'system' and '' or m.content }}{% endfor %}"
MARKED = (
    "{% for m in messages %}<|pad|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def document() -> Any:
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(900, lambda s: len(model.tokenize(s, add_special=False)), n_needles=4, seed=3)


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("models") / "instruct.gguf", MESSAGES)


def run(*args: Any, text: str | bytes = "") -> Result:
    res = CliRunner().invoke(main, ["run", *map(str, args)], input=text)
    assert res.exception is None or isinstance(res.exception, SystemExit), repr(res.exception)
    return res


def n_read(res: Result) -> int:
    """Tokens of the prompt, as the closing line says."""
    return int(res.stderr.rsplit(": read ", 1)[1].split(" token")[0].replace(",", ""))


def test_a_question_about_a_file(document: Any, instruct: Path, tmp_path: Path) -> None:
    """The file comes first, then the question; a model with a template is given both as a message."""
    (tmp_path / "book.txt").write_text(document.text + "\n")
    needle = document.needles[1]
    for model in (instruct, BUNDLED_MODEL):
        res = run(model, "-f", tmp_path / "book.txt", "-p", needle.question, *SMALL, "-v")
        assert (res.exit_code, res.stdout.strip()) == (0, f"{needle.answer}."), res.output
        assert ("is a message in the model's chat template" in res.stderr) == (model == instruct)


def test_several_files(document: Any, tmp_path: Path) -> None:
    """They are joined in the order given, and one may be stdin."""
    half = document.text.index(" ", len(document.text) // 2)
    (tmp_path / "b.txt").write_text(document.text[half:])
    needle = document.needles[1]
    res = run(
        BUNDLED_MODEL, "-f", "-", "-f", tmp_path / "b.txt", "-p", needle.question, *SMALL, text=document.text[:half]
    )
    assert res.stdout.strip() == f"{needle.answer}.", res.output
    res = run(BUNDLED_MODEL, "-f", "-", "-f", "-", *SMALL, text="a")
    assert (res.exit_code, "stdin can be read once" in res.stderr) == (USAGE, True)


def test_a_saved_text_goes_on_as_it_is(document: Any, instruct: Path, tmp_path: Path) -> None:
    saved, needle = tmp_path / "book.kvsnap", document.needles[2]
    assert run(instruct, "-p", document.text, "-no-cnv", "--save-snapshot", saved, *SMALL[:-1], "0").exit_code == 0
    res = run(instruct, "--restore", saved, "--append", "-p", needle.question, *SMALL)
    assert res.stdout.strip() == f"{needle.answer}.", res.output
    res = run(instruct, "--restore", saved, "--append", "-sys", "be terse", "-p", "x", *SMALL)
    assert (res.exit_code, "-sys is given" in res.stderr) == (USAGE, True)
    res = run(instruct, "--restore", saved, "--append", "-cnv", "-p", "x", *SMALL)
    assert "the prompt is the next turn of the saved conversation" in res.stderr


def test_a_saved_conversation_goes_on_with_its_next_turn(tmp_path: Path) -> None:
    """What is read is what the template puts between two answers; without the template it is the prompt alone."""
    saved, marked = tmp_path / "talk.kvsnap", with_template(tmp_path / "marked.gguf", MARKED)
    first = run(marked, "-p", "hello", "--save-snapshot", saved, *SMALL[:-1], "3")
    assert first.exit_code == 0, first.output
    again = ("--restore", saved, "--append", "-p", "And then?")
    turn, plain = run(marked, *again, *SMALL), run(marked, *again, "-no-cnv", *SMALL)
    assert "the prompt is the next turn of the saved conversation" in turn.stderr
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        between = model.tokenize("\n<|pad|>user: And then?\n<|pad|>assistant: ", add_special=False, parse_special=True)
        alone = model.tokenize("And then?", add_special=False)
    assert n_read(turn) - n_read(plain) == len(between) - len(alone)
    refused = run(marked, *again, "-sys", "be terse", *SMALL)
    assert (refused.exit_code, "the saved conversation has begun already" in refused.stderr) == (USAGE, True)


def test_words_that_are_not_where_they_belong() -> None:
    res = run(BUNDLED_MODEL, "Why is the sky blue?", *SMALL)
    assert (res.exit_code, res.stdout) == (USAGE, "")
    assert (
        """'Why is the sky blue?' comes after the model: give a prompt with -p "text", or a file with -f FILE"""
        in res.stderr
    )
    res = CliRunner().invoke(main, ["model.gguf", "-p", "x"])
    assert res.exit_code == USAGE
    assert 'model.gguf is not a command: kvflash run model.gguf -p "text"' in res.stderr


def test_an_empty_file_beside_a_question_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("\n")
    res = run(BUNDLED_MODEL, "-f", tmp_path / "none.txt", "-p", "one", "-n", "1")
    assert res.exit_code == 0
    assert f"warning: {tmp_path / 'none.txt'} is empty: the prompt is the text of -p alone" in res.stderr


def test_a_text_that_took_long_to_read_is_kept(document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another question about it begins where it ends; unless that is turned off, or there is no pool."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    book, needles = tmp_path / "book.txt", document.needles
    book.write_text(document.text + "\n" * 2)
    says = f"the text is kept in {tmp_path / 'kvflash' / 'prefix'}, "

    def ask(i: int, *more: str) -> Result:
        res = run(BUNDLED_MODEL, "-f", book, "-p", needles[i].question, *SMALL, "-n", "5", *more)
        assert (res.exit_code, res.stdout.strip()) == (0, f"{needles[i].answer}."), res.output
        return res

    assert says not in ask(0).stderr, "it is short"
    monkeypatch.setattr(kept, "_LONG", 1000)
    monkeypatch.setattr(kept, "_WORTH", 500)
    assert says not in ask(0).stderr, "it is soon read"
    monkeypatch.setattr(kept, "_SLOW", 0.0)
    for off in (("--prefix-cache", "off"), ("--kvflash", "off")):
        assert says not in ask(0, *off).stderr
    assert not list((tmp_path / "kvflash").rglob("*.kvsnap"))
    assert says in ask(0).stderr
    res = ask(1)
    assert n_read(res) < 150
    assert "from the prefix cache" in res.stderr
    (tmp_path / "kvflash" / "prefix").rename(tmp_path / "moved")
    (tmp_path / "kvflash" / "prefix").touch()
    assert "the text is not kept (--prefix-cache DIR or off)" in ask(2, "-v").stderr
