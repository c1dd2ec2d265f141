"""Where the sanitizers' build is kept (tests/support/asan.py): equal to this clone, and one process's at a time. No native code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fcntl")

from support import asan


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_becomes_equal_and_what_is_equal_is_not_touched(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    for name in (
        "kept",
        "edited",
        "removed",
        "folder/kept",
        "folder/removed",
        "gone/removed",
        "turned/removed",
        "grown",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    asan.mirror(source, copy)
    assert tree(copy) == tree(source)

    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    for name in ("removed", "folder/removed", "gone/removed", "turned/removed", "grown"):
        (source / name).unlink()
    (source / "gone").rmdir()
    (source / "turned").rmdir()
    (source / "turned").write_text("a file")
    (source / "grown").mkdir()
    (source / "grown" / "into a folder").write_text("new")
    (source / "edited").write_text("EDITED")  # of the same size
    asan.mirror(source, copy)
    assert tree(copy) == tree(source)
    assert not (copy / "gone").exists()
    old = {name for name in tree(copy) if (copy / name).stat().st_mtime == 1}
    assert old == {"kept", "folder/kept"}


def test_a_folder_is_one_process_s(tmp_path: Path) -> None:
    with asan.alone(tmp_path / "asan") as (first, _), asan.alone(tmp_path / "asan") as (second, _):
        assert (first.name, second.name) == ("asan-0", "asan-1")
    with asan.alone(tmp_path / "asan") as (again, _):
        assert again == first


def test_a_compiler_that_outlives_its_test_keeps_the_folder(tmp_path: Path) -> None:
    with asan.alone(tmp_path / "asan") as (folder, lock):
        compiler = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    with asan.alone(tmp_path / "asan") as (other, _):
        assert other != folder
    compiler.communicate(b"\n")
    with asan.alone(tmp_path / "asan") as (other, _):
        assert other == folder
