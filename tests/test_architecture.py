"""Who may import whom, read from the source: native owns bytes, policy owns decisions, and they meet in the engine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pyllama_kvflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
IO = {
    "os",
    "io",
    "pathlib",
    "shutil",
    "tempfile",
    "subprocess",
    "socket",
    "mmap",
    "ctypes",
    "logging",
    "threading",
    "time",
}
MAX_LINES = 450
WORD_LISTS = {"needle/words.py"}  # data; its logic is 60 lines


def imports(source: str, module: str, *, package: bool = False) -> set[str]:
    """Absolute dotted names that a module's source imports: `from a import b` gives a.b."""
    base = module.split(".") if package else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = base[: len(base) - node.level + 1] if node.level else []
            origin += node.module.split(".") if node.module else []
            found |= {".".join([*origin, alias.name]) for alias in node.names}
    return found


def imports_of(path: Path) -> set[str]:
    parts = [PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]
    package = parts[-1] == "__init__"
    return imports(path.read_text("utf-8"), ".".join(parts[:-1] if package else parts), package=package)


def from_package(names: set[str]) -> set[str]:
    """What is imported of this package: "policy", "native", "errors" ..."""
    return {name.partition(".")[2].partition(".")[0] for name in names if name.split(".")[0] == PACKAGE.name}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def each(*parts: str) -> pytest.MarkDecorator:
    found = [path for path in MODULES if not parts or part(path) in parts]
    return pytest.mark.parametrize("path", found, ids=[str(path.relative_to(PACKAGE)) for path in found])


@each("policy")
def test_policy_decides_and_touches_nothing(path: Path) -> None:
    names = imports_of(path)
    assert from_package(names) <= {"policy", "errors"}
    assert not {name.split(".")[0] for name in names} & IO
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input"}


@each("native")
def test_native_decides_nothing(path: Path) -> None:
    assert from_package(imports_of(path)) <= {"native", "errors"}


@each("needle")
def test_needle_stands_alone(path: Path) -> None:
    assert from_package(imports_of(path)) <= {"needle"}


@each()
def test_only_native_imports_the_compiled_module(path: Path) -> None:
    compiled = {name for name in imports_of(path) if {"_kvflash", "cffi", "_cffi_backend"} & set(name.split("."))}
    assert part(path) == "native" or not compiled


@each()
def test_a_module_is_read_in_one_sitting(path: Path) -> None:
    n = len(path.read_text("utf-8").splitlines())
    assert n <= MAX_LINES or str(path.relative_to(PACKAGE)) in WORD_LISTS


@pytest.mark.parametrize(
    "module",
    [
        "policy",
        "needle",
        "text",
        "errors",
        "events",
        "fingerprint",
        "registry",
        "bench.trace",
        "bench.plot",
        "scorers.crosstok",
    ],
)
def test_runs_without_a_compiler(module: str) -> None:
    """In a fresh interpreter in which nothing of `native` can be imported."""
    blocked = "import sys; sys.modules['pyllama_kvflash.native'] = sys.modules['cffi'] = None; "
    command = [sys.executable, "-c", f"{blocked}import pyllama_kvflash.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os.path", {"os.path"}),
        ("from pyllama_kvflash import native", {"pyllama_kvflash.native"}),
        ("from pyllama_kvflash.native import lib as x", {"pyllama_kvflash.native.lib"}),
        ("from . import plan", {"pyllama_kvflash.policy.plan"}),
        ("from .. import native", {"pyllama_kvflash.native"}),
        ("from ..native.lib import ffi", {"pyllama_kvflash.native.lib.ffi"}),
        ("def f():\n    if 1:\n        import subprocess", {"subprocess"}),
    ],
)
def test_imports_are_seen(source: str, found: set[str]) -> None:
    assert imports(source, "pyllama_kvflash.policy.ledger") == found
    assert found == {"os.path"} or imports(source, "pyllama_kvflash.policy", package=True) == found
