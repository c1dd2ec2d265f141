"""The public surface: what is exported, that it is typed, and that the documents agree with it."""

import dataclasses
import inspect
import os
import pydoc
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import pyllama_kvflash

ROOT = Path(__file__).parent.parent

USER_CODE = """
import numpy as np
import numpy.typing as npt

from pyllama_kvflash import Done, KVFlash, Reselect, Sampling, Scorer, Stats, Token, View, Warn

class Newest:
    name = "newest"
    summary: str | None = None
    query = "last"

    def score(self, view: View) -> npt.NDArray[np.float64]:
        return np.arange(len(view.candidates), dtype=np.float64)

scorer: Scorer = Newest()
with KVFlash.from_file("model.gguf", n_ctx=65536, pool=2048, policy=scorer) as kv:
    stats: Stats | None = None
    for event in kv.generate("text", max_tokens=4, sampling=Sampling(temperature=0), stop=["x"]):
        match event:
            case Token():
                print(event.text, event.id)
            case Reselect():
                best: list[float] = [s for s in event.scores if s is not None]
            case Warn():
                print(event.text)
            case Done():
                stats = event.stats
    rate: float = stats.decode_rate if stats else 0.0
    n: int = int(kv.residency().resident.sum()) + kv.n_tokens
    kv.pin(0, 64)
    again: Reselect | None = kv.reselect()
    for event in kv.chat([{"role": "user", "content": "Hello"}], max_tokens=4):
        print(event)
"""


def test_all_is_pinned():
    assert pyllama_kvflash.__all__ == [
        "Done",
        "Event",
        "KVFlash",
        "KVFlashError",
        "KVSequence",
        "Options",
        "Paged",
        "Prefill",
        "Reselect",
        "Residency",
        "Rope",
        "Sampling",
        "Scorer",
        "Stats",
        "Token",
        "View",
        "Warn",
        "__version__",
        "as_dict",
    ]


@pytest.mark.native
def test_every_public_name_can_be_imported():
    assert all(getattr(pyllama_kvflash, name) is not None for name in pyllama_kvflash.__all__)
    with pytest.raises(AttributeError, match="no attribute 'KVFlush'"):
        _ = pyllama_kvflash.KVFlush
    assert dir(pyllama_kvflash) == sorted(pyllama_kvflash.__all__)


@pytest.mark.native
def test_an_option_of_no_name_is_told_the_nearest():
    for name, says in (("n_ctxx", "did you mean 'n_ctx'?"), ("colour", "Options lists them")):
        with pytest.raises(TypeError, match=rf"from_file\(\) has no option '{name}': {re.escape(says)}"):
            pyllama_kvflash.KVFlash.from_file("model.gguf", **{name: 1})


@pytest.mark.native
def test_help_shows_the_options():
    """help() and editors, by the signature; type checkers, by keywords that are the fields of Options."""
    from pyllama_kvflash.keywords import Keywords  # noqa: PLC0415 (needs the compiled extension)

    signature = inspect.signature(pyllama_kvflash.KVFlash.from_file)
    options = {field.name: field for field in dataclasses.fields(pyllama_kvflash.Options)}
    assert list(signature.parameters) == ["path", "progress", *options]
    for name, field in options.items():
        assert signature.parameters[name].default == field.default
        assert signature.parameters[name].annotation == field.type
    assert typing.get_type_hints(Keywords) == {name: field.type for name, field in options.items()}
    assert list(Keywords.__annotations__) == list(options)
    assert "n_ctx: int = 0, pool: int | str = 'auto'" in pydoc.plain(
        pydoc.render_doc(pyllama_kvflash.KVFlash.from_file)
    )


@pytest.mark.native
@pytest.mark.parametrize(
    ("cores", "env", "spins"),
    [
        (2, {}, "1000"),
        (8, {}, "1000"),
        (9, {}, "None"),
        (2, {"GOMP_SPINCOUNT": "7"}, "7"),
        (2, {"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_threads_spin_briefly_on_few_cores(cores, env, spins):
    """What a user sets is kept."""
    code = f"import os; os.cpu_count = lambda: {cores}; import pyllama_kvflash.native; print(os.environ.get('GOMP_SPINCOUNT'))"
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spins


def test_user_code_type_checks(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(USER_CODE)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    wrong = "kv.pin('a', 64)", "KVFlash.from_file('m', n_ctx='4K')", "KVFlash.from_file('m', n_ctxx=4)"
    file.write_text(USER_CODE + "\n".join(wrong) + "\n")  # and mistakes are found
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout.count("error:") == len(wrong), done.stdout


@pytest.mark.native
@pytest.mark.parametrize("script", ["cli", "api", "environment", "refusals"])
def test_pages_made_from_the_code_are_up_to_date(script):
    command = [sys.executable, ROOT / f"docs/{script}.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_in_the_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_record_document_agrees_with_the_header():
    """The table of docs/RECORD_FORMAT.md names every field of struct kvf_record, in order, at its offset."""
    header = (ROOT / "pyllama_kvflash/native/src/kvflash.h").read_text()
    struct = re.search(r"struct kvf_record \{(.*?)\};", header, re.DOTALL)
    assert struct is not None
    fields, offset = [], 0
    for kind, name in re.findall(r"^\s*(\w+)_t +(\w+);", struct[1], re.MULTILINE):
        size = int(re.sub(r"\D", "", kind)) // 8
        fields.append((offset, size, name))
        offset += size
    table = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)`", (ROOT / "docs/RECORD_FORMAT.md").read_text(), re.MULTILINE)
    assert [(int(o), int(s), n) for o, s, n in table] == fields
    assert offset == 64
