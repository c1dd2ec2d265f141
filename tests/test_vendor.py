"""vendor/vendor.py on tiny fake sdists; the network is never used."""

import hashlib
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from support import vendoring
from support.vendoring import PATCH_A, PATCH_C, PREFIX, TEN_LINES, UPSTREAM, Repository, refused, vendor

repo = vendoring.repo


def test_fill(repo: Repository) -> None:
    assert repo.fill() == f"{repo.tree} is now llama-cpp-python 1.2 + 2 patches"
    names = {path.relative_to(repo.tree).as_posix() for path in repo.tree.rglob("*") if path.is_file()}
    assert names == {*UPSTREAM, ".kvflash-vendor.json"}
    assert repo.read("src/a.cpp") == TEN_LINES.replace("line 5", "line FIVE")
    assert repo.read("src/b.cpp") == TEN_LINES
    assert repo.read("ggml/src/c.c") == "// first\nint c;\n"
    assert repo.staging() == []


def test_fill_from_the_cache(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFLASH_LLAMA_SDIST")
    cache = repo.tree.parent / "cache"
    cache.mkdir()
    shutil.copy(repo.sdist, cache / "llama_cpp_python-1.2.tar.gz")
    repo.fill()
    assert repo.read("LICENSE") == "MIT\n"


def test_changed_patches_are_applied(repo: Repository) -> None:
    repo.fill()
    repo.patch("0001-a.patch", PATCH_A.replace("FIVE", "5.0"))
    repo.fill()
    assert "line 5.0\n" in repo.read("src/a.cpp")
    (repo.patches / "0001-a.patch").unlink()
    repo.fill()
    assert repo.read("src/a.cpp") == TEN_LINES
    repo.patch("0001-a.patch", PATCH_A)
    repo.fill()
    assert "line FIVE\n" in repo.read("src/a.cpp")


@pytest.mark.parametrize("command", ["fill", "check"])
def test_wrong_hash(repo: Repository, capsys: pytest.CaptureFixture[str], command: str) -> None:
    repo.fill()
    repo.patch("0003-b.patch", "Files: src/b.cpp\n")
    repo.sdist.write_bytes(b"garbage")
    sentence = refused(capsys, repo, command)
    actual = hashlib.sha256(b"garbage").hexdigest()
    assert re.search(rf"wrong sha256 \(expected [0-9a-f]{{64}}, actual {actual}\)", sentence)


def test_sdist_without_llama_cpp(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(repo.sdist, "w:gz"):
        pass
    repo.pin(repo.sdist)
    assert f"has no llama.cpp source in {PREFIX}/" in refused(capsys, repo)


@pytest.mark.parametrize("command", ["fill", "check", "patches"])
@pytest.mark.parametrize("stamp", [None, "", "[]", "{}", '{"pin": ""'])
def test_foreign_tree(repo: Repository, capsys: pytest.CaptureFixture[str], stamp: str | None, command: str) -> None:
    (repo.tree / "src").mkdir(parents=True)
    (repo.tree / "src" / "a.cpp").write_text("mine\n")
    if stamp is not None:
        (repo.tree / ".kvflash-vendor.json").write_text(stamp)
    sentence = refused(capsys, repo, command)
    assert f"{repo.tree} lacks a valid .kvflash-vendor.json: delete it and run `make vendor`" in sentence


def test_local_edits_survive(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repo.fill()
    for name in ("src/a.cpp", "src/b.cpp", "CMakeLists.txt"):
        (repo.tree / name).write_text("mine\n")
    (repo.tree / "src" / "new.cpp").write_text("mine\n")
    assert "is up to date" in repo.fill()  # edits alone are no reason to do anything
    repo.patch("0001-a.patch", PATCH_A.replace("FIVE", "5.0"))
    sentence = refused(capsys, repo)
    assert "has local edits (CMakeLists.txt, src/a.cpp, src/b.cpp and 1 more)" in sentence
    assert f"`make patches` keeps them, deleting {repo.tree} drops them" in sentence
    assert repo.read("src/new.cpp") == "mine\n"


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (PATCH_A.replace("line 4", "line four"), "hunk no.1 doesn't match source file at line 4"),
        (PATCH_A.replace("-4,3 +4,3", "-3,3 +3,3"), "hunk no.1 doesn't match"),  # no offset
        (PATCH_A.replace("-line 5", "-line FIVE").replace("line 4", "line 3"), "src/a.cpp"),
        (PATCH_A.replace("-4,3 +4,3", "-40,3 +40,3"), "premature end of source file src/a.cpp at hunk 1"),
        (PATCH_A.replace("src/a.cpp", "src/none.cpp"), "source/target file does not exist: --- src/none.cpp"),
    ],
)
def test_patch_does_not_apply(repo: Repository, capsys: pytest.CaptureFixture[str], patch: str, reason: str) -> None:
    repo.fill()
    repo.patch("0001-a.patch", patch)
    for command in ("fill", "check"):
        sentence = refused(capsys, repo, command)
        assert "patches/0001-a.patch does not apply: " in sentence
        assert reason in sentence
    assert "line FIVE\n" in repo.read("src/a.cpp")
    assert Path.cwd().exists()


def test_patch_already_applied(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    """patch_ng takes such a patch for a success."""
    reverse = PATCH_A.replace("-line 5\n+line FIVE", "-line FIVE\n+line 5")
    repo.patch("0001-a.patch", reverse)
    assert "patches/0001-a.patch does not apply: " in refused(capsys, repo)


HUNK = "@@ -4,3 +4,3 @@\n line 4\n-line 5\n+line FIVE\n line 6\n"


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("words\n", "holds neither a `--- a/...` diff nor a `Files:` line"),
        ("", "holds neither"),
        (PATCH_A.replace("+4,3", "+4,2"), "is malformed"),
        (PATCH_A.replace("-4,3 +4,3", "-4,2 +4,2"), "lines that belong to no hunk"),
        (PATCH_A + "-- \n2.39\n", "is malformed"),
        (PATCH_A + "diff --git a/src/b.cpp b/src/b.cpp\n" + PATCH_C, "lines that belong to no hunk"),
        ("--- a/src/a.cpp\n+++ b/src/a.cpp\n", "is malformed"),
        ("--- a/src/a.cpp\n", "is malformed"),
        (PATCH_A.replace("+++ b/src/a.cpp", "+++ b/src/b.cpp"), "does more than change files"),
        (PATCH_A.replace("+++ b/src/a.cpp", "+++ /dev/null"), "does more than change files"),
        (PATCH_A.replace("/src/a.cpp", "/../../../x"), "is malformed"),
        (PATCH_A + HUNK, "does not apply: "),
    ],
)
def test_malformed_patch(repo: Repository, capsys: pytest.CaptureFixture[str], patch: str, reason: str) -> None:
    (repo.patches / "0002-c.patch").unlink()
    repo.patch("0001-a.patch", patch)
    sentence = refused(capsys, repo)
    assert "patches/0001-a.patch " in sentence
    assert reason in sentence


def test_round_trip(repo: Repository) -> None:
    repo.fill()
    repo.edit("src/a.cpp", "line 1\n", "line 0\nline 1\n")
    repo.edit("src/a.cpp", "line 10\n", "line 9.5\nline 10\n")
    repo.edit("src/b.cpp", "line 3\n", "-- a/x\n++ b/x\n\n\f\n")
    repo.edit("ggml/src/c.c", "// first\n", "// first\n\n// é\n")
    repo.patch("0003-b.patch", "A new one.\nFiles: src/b.cpp")
    edited = repo.state()
    assert vendor.regenerate(repo.layout) == "3 of 3 patches rewritten"
    assert "is up to date" in repo.fill()
    assert "equals llama-cpp-python 1.2 + 3 patches" in vendor.check(repo.layout)
    stamp = str(repo.tree / ".kvflash-vendor.json")
    assert {**repo.state(), stamp: None} == {**edited, stamp: None}
    assert (repo.patches / "0001-a.patch").read_text() == (
        "Why a.cpp changes.\n\n"
        "--- a/src/a.cpp\n+++ b/src/a.cpp\n"
        "@@ -1 +1,2 @@\n+line 0\n line 1\n"
        "@@ -4,3 +5,3 @@\n line 4\n-line 5\n+line FIVE\n line 6\n"
        "@@ -9,2 +10,3 @@\n line 9\n+line 9.5\n line 10\n"
    )
    assert (repo.patches / "0003-b.patch").read_text() == (
        "A new one.\nFiles: src/b.cpp\n"
        "--- a/src/b.cpp\n+++ b/src/b.cpp\n"
        "@@ -2,3 +2,6 @@\n line 2\n-line 3\n+-- a/x\n+++ b/x\n+\n+\f\n line 4\n"
    )
    assert vendor.regenerate(repo.layout) == "0 of 3 patches rewritten"
    shutil.rmtree(repo.tree)
    repo.fill()
    assert {name: text for name, (text, _) in repo.state().items() if name != stamp} == {
        name: text for name, (text, _) in edited.items() if name != stamp
    }


def test_edit_in_no_patch(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repo.fill()
    repo.edit("src/b.cpp", "line 3\n", "mine\n")
    repo.edit("src/a.cpp", "line 3\n", "mine\n")
    sentence = refused(capsys, repo, "patches")
    assert "no patch names src/b.cpp: create patches/NNNN-name.patch whose header has" in sentence
    assert "the line `Files: src/b.cpp`, then run `make patches` again" in sentence
    assert (repo.patches / "0001-a.patch").read_text() == PATCH_A


def test_patch_names_no_upstream_file(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repo.fill()
    repo.patch("0003-x.patch", "Files: src/x.cpp\n")
    sentence = refused(capsys, repo, "patches")
    assert "patches/0003-x.patch names src/x.cpp, which is not upstream's" in sentence


def test_check(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repo.fill()
    assert vendor.check(repo.layout) == f"{repo.tree} equals llama-cpp-python 1.2 + 2 patches"
    repo.edit("src/a.cpp", "line 1\n", "mine\n")
    (repo.tree / "src" / "new.cpp").write_text("mine\n")
    assert "differs from the pin + patches in src/a.cpp, src/new.cpp\n" in refused(capsys, repo, "check")


def fake_modules(directory: Path, monkeypatch: pytest.MonkeyPatch, pip: str | None) -> None:
    """Put a fake pip and scikit_build_core first on the path."""
    directory.mkdir()
    if pip is not None:
        (directory / "pip.py").write_text(pip)
    (directory / "scikit_build_core.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.delenv("KVFLASH_LLAMA_SDIST")


def test_download(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    target = "sys.argv[sys.argv.index('-d') + 1] + '/any-name.tar.gz'"
    monkeypatch.setenv("_PYPROJECT_HOOKS_BACKEND_PATH", "/nonexistent")  # as in a build with its own backend
    pip = "import os; assert '_PYPROJECT_HOOKS_BACKEND_PATH' not in os.environ\n"
    pip += f"import shutil, sys; shutil.copy({str(repo.sdist)!r}, {target})\n"
    fake_modules(repo.root / "modules", monkeypatch, pip)
    done = repo.run("fill")
    assert done.stderr == "downloading llama-cpp-python 1.2 (77 MB) ...\n"
    assert done.returncode == 0
    cache = repo.tree.parent / "cache"
    assert [path.name for path in cache.iterdir()] == ["llama_cpp_python-1.2.tar.gz"]
    assert "+ 2 patches" in done.stdout


def test_command_line(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    done = repo.run("fill")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"vendor: {repo.tree} is now llama-cpp-python 1.2 + 2 patches\n"
    repo.edit("src/b.cpp", "line 3\n", "mine\n")
    for command, words in (
        ("patches", "no patch names src/b.cpp"),
        ("check", "differs from the pin + patches in src/b.cpp"),
    ):
        done = repo.run(command)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("vendor: error: ")
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    shutil.rmtree(repo.tree)
    monkeypatch.setenv("KVFLASH_LLAMA_SDIST", "/nonexistent/x")
    done = repo.run("fill")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "vendor: error: KVFLASH_LLAMA_SDIST=/nonexistent/x cannot be read: No such file or directory\n"
    )
    for arguments in ((), ("empty",)):
        done = repo.run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
