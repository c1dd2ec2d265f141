"""The size of the house, as Markdown: options, environment variables, lines, files, tests, and the Python calls of a step.

    python bench/house.py
    python bench/house.py --tests --json
    python bench/house.py --root ../old-checkout     what cannot be counted there is "-"

A checkout with a .venv of its own is run by it. Another one is run by this Python, with the native library installed here.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvflash_bench.tables import markdown

HERE = Path(__file__).resolve().parents[1]
PARTS: dict[str, tuple[str, ...]] = {
    "product, Python": ("pyllama_kvflash/**/*.py", "cffi_build.py"),
    "native/src": ("pyllama_kvflash/native/src/**/*",),
    "product, web page": ("pyllama_kvflash/serve/static/*",),
    "benches": ("bench/*.py", "bench/*.sh", "bench/kvflash_bench/**/*.py"),
    "tests, Python": ("tests/**/*.py",),
    "tests of benches": ("bench/tests/*.py",),
    "tests, C++": ("tests/native/**/*",),
    "documents": ("*.md", "docs/**/*.md"),
}
CODE = ("product, Python", "native/src", "benches")
"""The parts whose long files and functions are counted."""
LONG_FILE, LONG_FUNCTION = 400, 60

# The beginning of each child process. The editable install of this checkout would be found first, whatever the path
CHILD = """
import importlib.util, json, sys
root, native = sys.argv[1:3]
sys.meta_path[:] = [f for f in sys.meta_path if "Editable" not in type(f).__name__ and "ScikitBuild" not in type(f).__name__]
sys.path[:0] = [root, f"{root}/bench"]
if native:
    name = "pyllama_kvflash.native._kvflash"
    spec = importlib.util.spec_from_file_location(name, native)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
"""

HELP = """
from pyllama_kvflash.cli import main
main(["run", "--help"])
"""

FIELDS = """
from pyllama_kvflash.cli import main, settings
print(len(list(settings.settable(main.commands["run"]))))
"""

VARIABLES = """
import click
from pyllama_kvflash.cli import main

def leaves(group):
    context = click.Context(group)
    for command in (group.get_command(context, name) for name in group.list_commands(context)):
        yield from leaves(command) if isinstance(command, click.Group) else [command]

def names(command):
    for param in command.params:
        found = getattr(param, "envvar", None) if not getattr(param, "hidden", False) else None
        yield from [found] if isinstance(found, str) else found or []

print(len({name for command in leaves(main) for name in names(command)}))
"""

STEP = """
import statistics, threading
from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.needle import BUNDLED_MODEL

def opened(**options):
    try:
        return KVFlash.from_file(BUNDLED_MODEL, opening=0, **options)
    except TypeError:  # before there were openings
        return KVFlash.from_file(BUNDLED_MODEL, **options)

def calls_of_a_step(**options):
    kv = opened(n_ctx=2048, pool=768, n_threads=1, **options)
    calls, steps = 0, []

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"
        if event == "c_call" and getattr(arg, "__name__", "") in ("kvf_sample", "llama_sampler_sample"):
            steps.append(calls)
            calls = 0

    answer = kv.generate("One day the cat saw the dog. " * 150, max_tokens=100, sampling=Sampling(temperature=0))
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        for _ in answer:
            pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return statistics.median_low(steps[-64:])

print(json.dumps([calls_of_a_step(policy="lru"), calls_of_a_step()]))
"""


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE, help="the checkout to count")
    parser.add_argument(
        "--tests", action="store_true", help="count test cases, too: pytest collects them, which is slow"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    root = args.root.resolve()
    counts: dict[str, int | None] = {}
    counts |= tried(lambda: [options(root)], "options of `kvflash run`")
    counts |= tried(lambda: [int(child(root, FIELDS))], "`--set` fields")
    counts |= tried(lambda: [int(child(root, VARIABLES))], "environment variables of options")
    for part, patterns in PARTS.items():
        found = files(root, patterns)
        counts[f"{part}: files"] = len(found)
        counts[f"{part}: lines"] = sum(map(n_lines, found))
    code = [path for part in CODE for path in files(root, PARTS[part])]
    counts["patches: changed lines"] = sum(map(changed_lines, files(root, ("patches/*.patch",))))
    counts[f"files over {LONG_FILE} lines"] = sum(n_lines(path) > LONG_FILE for path in code)
    counts[f"functions over {LONG_FUNCTION} lines, Python"] = sum(map(long_functions, code))
    if args.tests:
        counts |= tried(lambda: [test_cases(root)], "test cases")
    counts |= tried(
        lambda: json.loads(child(root, STEP)), "Python calls a step, `lru`", "Python calls a step, default policy"
    )
    if args.json:
        print(json.dumps(counts, indent=2))
        return
    print(markdown(["", ""], [[name, "-" if n is None else f"{n:,}"] for name, n in counts.items()]), end="")


def tried(count: Callable[[], list[int]], *names: str) -> dict[str, int | None]:
    """Return the counts by their names; None for each if the checkout is too old or is not built."""
    try:
        return dict(zip(names, count(), strict=True))
    except (subprocess.CalledProcessError, ValueError) as err:
        reason = (getattr(err, "stderr", "") or str(err)).strip().splitlines()
        print(f"{', '.join(names)}: {reason[-1] if reason else 'failed'}", file=sys.stderr)
        return dict.fromkeys(names)


def files(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of the repository that match."""
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=False)
    known = {root / name for name in listed.stdout.splitlines()}
    found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return sorted(found & known if known else found)


def n_lines(path: Path) -> int:
    """Return the lines of a file."""
    return path.read_bytes().count(b"\n")


def changed_lines(patch: Path) -> int:
    """Return how many lines a patch adds and removes."""
    return len(re.findall(r"^(?:\+(?!\+\+ )|-(?!-- ))", patch.read_text("utf-8"), re.MULTILINE))


def long_functions(path: Path) -> int:
    """Return how many functions of a Python file are longer than LONG_FUNCTION lines."""
    if path.suffix != ".py":
        return 0
    found = (
        n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return sum((n.end_lineno or 0) - n.lineno + 1 > LONG_FUNCTION for n in found)


def python_of(root: Path) -> tuple[str, str]:
    """Return the Python that runs a checkout, and the native library to lend it: "" if it has its own."""
    own = root / ".venv/bin/python"
    python = str(own if own.exists() else sys.executable)
    code = "from pyllama_kvflash.native import _kvflash; print(_kvflash.__file__)"
    built = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, check=False)
    return python, built.stdout.strip()


def child(root: Path, code: str) -> str:
    """Run code in the checkout and return what it prints. Raises CalledProcessError."""
    python, native = python_of(root)
    command = [python, "-c", CHILD + code, str(root), native]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def options(root: Path) -> int:
    """Return how many options the help of `kvflash run` lists, --help left out."""
    listed = re.findall(r"^  -[^\n]*", child(root, HELP), re.MULTILINE)
    return sum("--help" not in line for line in listed)


def test_cases(root: Path) -> int:
    """Return how many cases pytest collects."""
    command = [python_of(root)[0], "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+)(?:/\d+)? tests? collected|(\d+)(?:/\d+)? tests? \(", done.stdout)
    if not found:
        raise ValueError("pytest did not say how many tests it collected")
    return int(found[1] or found[2])


if __name__ == "__main__":
    main()
