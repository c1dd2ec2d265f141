"""The examples run as they are, and their answers are right."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import ENGINE, EXAMPLES, SERVE
from support.rewritten import rewritten

pytestmark = pytest.mark.native

FOLDER = Path(__file__).parent.parent / "examples"
NOTEBOOK = FOLDER / "questions.ipynb"
NEEDS = {"openai_server": "openai", "residency": "matplotlib"}
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
MAX_LINES = 60
DOCUMENT = needles.document(4000, seed=1)  # what all of them ask about
LINES = [f"{needle.question} {needle.answer}." for needle in DOCUMENT.needles]


def run(name: str, folder: Path, *args: str | Path) -> str:
    """What a script prints."""
    pytest.importorskip(NEEDS.get(name, "numpy"))
    # a server keeps in the first one what it has read; matplotlib its fonts in the other, where it says nothing on stderr
    env = os.environ | {"XDG_CACHE_HOME": str(folder), "MPLCONFIGDIR": str(folder / "matplotlib")}
    if NEEDS.get(name) == "matplotlib":  # looking for fonts may take long, and then it says so
        subprocess.run(
            [sys.executable, "-c", "import matplotlib.font_manager"], env=env, capture_output=True, check=True
        )
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *args],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.replace("Answer:  ", "Answer: ")  # some print a space of their own


def codes() -> list[str]:
    """The cells of the notebook that are code."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.sampled(ENGINE, SERVE, EXAMPLES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_answers(name: str, tmp_path: Path) -> None:
    printed = run(name, tmp_path)
    for line in LINES:
        assert line in printed
    if name == "own_scorer":
        lru, own = printed.split("policy words:")
        assert sum(line in lru for line in LINES) < 2, "the newest chunks have one code"
        assert all(line in own for line in LINES)
    if "tokens read" in printed:
        read = [int(line.rpartition("(")[2].split()[0].replace(",", "")) for line in printed.splitlines()]
        assert read[0] > 3000
        assert max(read[1:]) < 50
    if name == "residency":
        assert (tmp_path / "residency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly(ENGINE, SERVE, EXAMPLES)
def test_a_file_and_questions_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(DOCUMENT.text)
    model = rewritten(tmp_path / "model.gguf")
    asked = [DOCUMENT.needles[i].question for i in (2, 1)]
    printed = run("long_file", tmp_path, model, "text.txt", *asked)
    assert [line.partition("    (")[0] for line in printed.splitlines()] == [LINES[2], LINES[1]]


@pytest.mark.nightly(ENGINE, SERVE, EXAMPLES)
@pytest.mark.parametrize("name", ["warm_turns", "openai_server"])
def test_another_model(name: str, tmp_path: Path) -> None:
    """It is the bundled one with a template."""
    template = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'assistant' }}{% endfor %}"
    printed = run(name, tmp_path, rewritten(tmp_path / "model.gguf", template=template))
    for line in LINES:
        assert line in printed


@pytest.mark.nightly(ENGINE, SERVE, EXAMPLES)
def test_the_notebook_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells, one after the other."""
    names: dict[str, Any] = {}
    for code in codes():
        exec(compile(code, NOTEBOOK.name, "exec"), names)
    printed = capsys.readouterr().out.replace("Answer:  ", "Answer: ")
    for line in LINES:
        assert line in printed
    assert printed.count(" tokens read") == 5
    assert names["stats"].n_prompt > 4000, "all is read again after clear()"


def test_they_are_short_and_listed() -> None:
    listed = (FOLDER / "README.md").read_text()
    assert SCRIPTS
    for path in FOLDER.iterdir():
        if path.suffix in {".py", ".ipynb"}:
            assert f"]({path.name})" in listed
        if path.suffix == ".py":
            assert len(path.read_text().splitlines()) < MAX_LINES, path.name
    notebook = json.loads(NOTEBOOK.read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "clear the outputs before a commit"
    for code in codes():
        ast.parse(code)
