"""Who may import whom, read from the source: native owns bytes, policy owns decisions, and they meet in the engine.

What tests share is in tests/support: no test file imports another.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pyllama_kvflash"
BENCHES = PACKAGE.parent / "bench" / "kvflash_bench"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).resolve().parent
TEST_MODULES = sorted(TESTS.rglob("*.py"))
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
MAX_TEST_LINES = 650


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


@functools.cache
def imports_of(path: Path) -> set[str]:
    home = BENCHES if path.is_relative_to(BENCHES) else PACKAGE
    parts = path.relative_to(home.parent).with_suffix("").parts
    package = parts[-1] == "__init__"
    return imports(path.read_text("utf-8"), ".".join(parts[:-1] if package else parts), package=package)


def from_package(names: set[str]) -> set[str]:
    """What is imported of this package: "policy", "native", "errors" ..."""
    return {name.partition(".")[2].partition(".")[0] for name in names if name.split(".")[0] == PACKAGE.name}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def modules(*parts: str) -> list[Path]:
    """Those of some parts of the package; of all of them, if none is given."""
    return [path for path in MODULES if not parts or part(path) in parts]


def test_policy_decides_and_touches_nothing() -> None:
    for path in modules("policy"):
        names = imports_of(path)
        assert from_package(names) <= {"policy", "errors"}, path
        assert not {name.split(".")[0] for name in names} & IO, path
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"open", "print", "input"}, path


def test_native_decides_nothing() -> None:
    for path in modules("native"):
        assert from_package(imports_of(path)) <= {"native", "errors", "gguf_header", "fingerprint"}, path


def test_needle_stands_alone() -> None:
    for path in modules("needle"):
        assert from_package(imports_of(path)) <= {"needle"}, path


ORDER = [
    "errors",
    "events",
    "text",
    "gguf_header",
    "fingerprint",
    "needle",
    "policy",
    "registry",
    "json_schema",
    "native",
    "hub",
    "files",
    "chat",
    "options",
    "keywords",
    "pool",
    "snapshot",
    "scorers",
    "loading",
    "engine",
    "convert",
    "serve",
    "cli",
    "__main__",
]
"""Each part may import those before it. `__init__` gives names of all of them, when they are used."""
ANYWHERE = {"", "__version__"}  # of the package itself


def test_parts_import_those_below_them() -> None:
    """Imports within a function count, too."""
    for path in modules():
        here = part(path).removesuffix(".py")
        if here != "__init__":
            below = ORDER[: ORDER.index(here)]
            assert from_package(imports_of(path)) <= {here, *below, *ANYWHERE}, path


def circles(uses: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, directly or through others: those that reach themselves."""
    reach = {module: set(used) for module, used in uses.items()}
    for via in uses:
        for module in uses:
            if via in reach[module]:
                reach[module] |= reach[via]
    return [module for module in uses if module in reach[module]]


@pytest.mark.parametrize("package", [PACKAGE, BENCHES], ids=lambda p: p.name)
def test_no_modules_import_each_other_in_a_circle(package: Path) -> None:
    def name(path: Path) -> str:
        return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")

    modules = {name(path): path for path in sorted(package.rglob("*.py"))}
    uses = {
        module: {
            found if found in modules else found.rpartition(".")[0]
            for found in imports_of(path)
            if found in modules or found.rpartition(".")[0] in modules
        }
        - {package.name, module}
        for module, path in modules.items()
        if module != package.name
    }
    assert circles(uses) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_benches_are_a_stranger() -> None:
    """They import no private name of the product, which imports them in one place, by name."""
    for path in BENCHES.rglob("*.py"):
        private = {name for name in imports_of(path) if re.search(r"\._(?!_version__$)", name)}
        assert private == set(), path
    for path in modules():
        assert BENCHES.name not in {name.split(".")[0] for name in imports_of(path)}, path


def test_only_native_imports_the_compiled_module() -> None:
    for path in modules():
        compiled = {name for name in imports_of(path) if {"_kvflash", "cffi", "_cffi_backend"} & set(name.split("."))}
        assert part(path) == "native" or not compiled, path


def n_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_a_module_is_read_in_one_sitting() -> None:
    paths = [*modules(), *BENCHES.rglob("*.py")]
    long = {str(path.relative_to(PACKAGE.parent)) for path in paths if n_lines(path) > MAX_LINES}
    assert not long


def test_a_test_is_read_in_one_sitting() -> None:
    assert [path.name for path in TEST_MODULES if n_lines(path) > MAX_TEST_LINES] == []


def test_no_test_imports_another() -> None:
    files = {path.stem for path in TEST_MODULES if path.stem.startswith("test_")}
    for path in TEST_MODULES:
        names = imports(path.read_text("utf-8"), f"tests.{path.stem}")
        assert not {part for name in names for part in name.split(".")} & files, path


@pytest.mark.parametrize(
    "module",
    [
        "policy",
        "json_schema",
        "needle",
        "text",
        "errors",
        "events",
        "gguf_header",
        "fingerprint",
        "registry",
        "scorers.crosstok",
    ],
)
def test_runs_without_a_compiler(module: str) -> None:
    assert_imports_without_native(f"pyllama_kvflash.{module}")


@pytest.mark.parametrize("module", ["trace", "plot"])
def test_plots_without_a_compiler(module: str) -> None:
    assert_imports_without_native(f"kvflash_bench.{module}")


def assert_imports_without_native(module: str) -> None:
    """In a fresh interpreter in which nothing of `native` can be imported."""
    blocked = "import sys; sys.modules['pyllama_kvflash.native'] = sys.modules['cffi'] = None; "
    command = [sys.executable, "-c", f"{blocked}import {module}"]
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


def flags(path: Path) -> list[str]:
    """Texts of a module, its docstrings left out, that name an option of the command line."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
    return [
        t for t in texts if isinstance(t, str) and re.search(r"(?<![\w-])(--[a-z]|-(c|ctk|ctv|ngl|md|ub|np|fa)\b)", t)
    ]


def test_only_the_command_line_names_its_options() -> None:
    """A message of the library says `n_ctx`; cli/flags.py puts -c/--ctx-size there. The server is a command, too."""
    benches = [path for path in BENCHES.rglob("*.py") if path.parent.name != "cli"]
    others = [path for path in modules() if part(path) not in ("cli", "serve")] + benches
    found = [(path.name, text) for path in others for text in flags(path) if "kvflash run --" not in text]
    found = [(name, text) for name, text in found if "convert_hf_to_gguf.py" not in text]  # llama.cpp's
    assert found == []
    assert flags(PACKAGE / "cli" / "params.py")


WALKED = re.compile(r"`([\w/-]+\.(?:py|cpp))` ((?:`\w+`(?:, | or )?)+)")


def test_walks_lead_through_functions_that_are_there() -> None:
    """Each is a file, and the definitions in it."""
    text = (PACKAGE.parent / "docs" / "ARCHITECTURE.md").read_text("utf-8")
    walks = text[text.index("## Two walks") : text.index("## Who may use")]
    found = [
        (name, word) for name, words in WALKED.findall(walks) for word in re.findall(r"\w+", words) if word != "or"
    ]
    assert len(found) > 25
    for name, word in found:
        source = (PACKAGE / name).read_text("utf-8")
        defines = rf"(?:def|class) {word}\b" if name.endswith(".py") else rf"^[^ \n/].*\b{word}\("
        assert re.search(defines, source, re.MULTILINE), f"{name} has no {word}"
