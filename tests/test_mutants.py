"""Which mutants and nightly tests are run (tests/support/changes.py), in clones of a small repository. No native code."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fcntl")  # support.asan locks with it

from support.changes import ROOT, SERVE, Changes, base_commit, crossed, leave_out_nightly
from support.mutants import MUTANTS

POOL, MOVE = (next(mutant for mutant in MUTANTS if mutant.file == name) for name in ("pool/pool", "pool/move"))


def git(root: Path, *args: str) -> str:
    name = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "protocol.file.allow=always")
    return subprocess.run(["git", "-C", root, *name, *args], capture_output=True, text=True, check=True).stdout.strip()


def edit(root: Path, name: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("more\n")


def commit(root: Path, *names: str) -> str:
    """A commit that changes files; its name."""
    for name in names:
        edit(root, name)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x")
    return git(root, "rev-parse", "HEAD")


def tried(root: Path, wanted: str | None = None) -> list[bool]:
    """Whether POOL is tried, and whether MOVE is."""
    changes = Changes.find(root, wanted)
    return [mutant.is_hidden_by(changes) for mutant in (POOL, MOVE)]


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """Three commits: all sources, one of them, and a document."""
    root = tmp_path / "origin"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch", "main")
    commit(root, POOL.source, MOVE.source, "README.md")
    commit(root, POOL.source)
    commit(root, "README.md")
    return root


@pytest.fixture
def clone(origin: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "--quiet", str(origin), "clone")
    return tmp_path / "clone"


def test_the_main_branch_is_compared_with_the_commit_before(origin: Path, clone: Path) -> None:
    for root in (origin, clone):
        assert base_commit(root) == git(root, "rev-parse", "HEAD~1")
        assert tried(root) == [False, False]
    commit(origin, MOVE.source)
    git(clone, "pull", "--quiet")
    for root in (origin, clone):
        assert tried(root) == [False, True]


def test_a_branch_is_compared_with_where_it_left_the_main_branch(origin: Path, clone: Path) -> None:
    fork = git(clone, "rev-parse", "HEAD")
    git(clone, "switch", "--quiet", "--create", "branch")
    commit(clone, MOVE.source)
    commit(clone, "README.md")
    commit(origin, POOL.source)  # on the main branch meanwhile
    git(clone, "fetch", "--quiet")
    assert base_commit(clone) == fork
    assert tried(clone) == [False, True]


def test_what_is_not_committed_counts(clone: Path) -> None:
    edit(clone, POOL.source)
    assert tried(clone) == [True, False]
    git(clone, "add", "--all")
    assert tried(clone) == [True, False]
    git(clone, "rm", "--quiet", "--force", POOL.source)
    git(clone, "commit", "--quiet", "--message", "x")
    commit(clone, "README.md")
    edit(clone, POOL.source)  # new to git
    assert tried(clone) == [True, False]


@pytest.mark.parametrize(
    "name",
    [
        "tests/native/fuzz.cpp",
        "tests/support/mutants.py",
        "tests/test_fuzz.py",
        "patches/0001-kv-pool.patch",
        "pyllama_kvflash/native/src/kvflash.h",
    ],
)
def test_what_concerns_all_mutants(clone: Path, name: str) -> None:
    assert (Path(__file__).parent.parent / name).is_file()
    commit(clone, name)
    assert tried(clone) == [True, True]
    commit(clone, "tests/native/plain.cpp", "tests/test_needle.py")
    assert tried(clone, "HEAD~1") == [False, False]


def test_all_where_it_is_not_known_what_changed(origin: Path, clone: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "2", f"file://{origin}", "shallow")
    git(tmp_path, "clone", "--quiet", f"file://{origin}", "first")
    git(tmp_path / "first", "checkout", "--quiet", "HEAD~2")
    git(tmp_path / "first", "remote", "remove", "origin")
    (tmp_path / "unpacked").mkdir()
    (clone / "inside").mkdir()
    for root in ("shallow", "first", "unpacked", "clone/inside"):
        assert base_commit(tmp_path / root) is None
        assert tried(tmp_path / root) == [True, True]


def test_every_mutant_changes_its_file() -> None:
    """Also those whose file has not changed, and which are not tried today."""
    for mutant in MUTANTS:
        assert mutant.changed() != (ROOT / mutant.source).read_text(), mutant.breaks
    assert len({mutant.breaks for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ([], False),
        (["README.md", "pyllama_kvflash/engine/serve.py"], False),
        (["README.md", "pyllama_kvflash/serve/app.py"], True),
        (["tests/test_mutants.py"], True),
        (["tests/test_clients.py"], False),
    ],
)
def test_nightly_tests_are_run_where_their_files_have_changed(
    request: pytest.FixtureRequest, changed: list[str], runs: bool
) -> None:
    server, daily = (
        pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None) for name in ("a", "b")
    )
    server.add_marker(pytest.mark.nightly("pyllama_kvflash/serve/.*"))
    leave_out_nightly([server, daily], Changes("0123456789abcdef", frozenset(changed)))
    assert (server.get_closest_marker("skip") is None) == runs
    assert daily.get_closest_marker("skip") is None


@pytest.mark.parametrize(("changed", "n_run"), [([], 2), (["pyllama_kvflash/native/lib.py"], 4)])
def test_of_a_sampled_test_the_first_values_are_run(
    request: pytest.FixtureRequest, changed: list[str], n_run: int
) -> None:
    names = ("a[1]", "a[2]", "a[3]", "b")
    items = [pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None) for name in names]
    for item in items:
        item.add_marker(pytest.mark.sampled("pyllama_kvflash/native/.*"))
    leave_out_nightly(items, Changes("0123456789abcdef", frozenset(changed)))
    ran = [item.name for item in items if item.get_closest_marker("skip") is None]
    assert len(ran) == n_run
    assert {"a[1]", "b"} <= set(ran)


def test_of_crossed_values_those_are_daily_that_differ_in_one() -> None:
    params = crossed("ab", [1, 2], {"x": 1, "y": 2})
    assert len(params) == 8
    assert [param.values for param in params if not param.marks] == [
        ("a", 1, "x"),
        ("a", 1, "y"),
        ("a", 2, "x"),
        ("b", 1, "x"),
    ]


def test_patterns_of_nightly_tests_match_files() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "pyllama_kvflash").rglob("*.py")]
    assert sum(bool(re.fullmatch(SERVE, name)) for name in names) > 20
