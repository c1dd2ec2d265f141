"""Which files have changed since a commit, and which tests are left out: those that are nightly, where theirs have not. No native code."""

import itertools
import operator
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SERVE = (
    r"pyllama_kvflash/(chat|serve|snapshot)/.*"
    r"|tests/support/(browser|processes|serving)\.py|tests/data/tools\.jinja"
)
"""The server's own files, and what its tests are made with."""
BENCHES = r"bench/kvflash_bench/.*|bench/tests/(benches|speeds)\.py|pyllama_kvflash/cli/(demo|needles)\.py"
SNAPSHOT = r"pyllama_kvflash/snapshot/.*|pyllama_kvflash/pool/(disk|host_memory|host_store)\.py|pyllama_kvflash/cli/(cache|warm)\.py"
SCORERS = r"pyllama_kvflash/scorers/.*|pyllama_kvflash/pool/selector\.py|pyllama_kvflash/policy/scorers\.py"
CLI = r"pyllama_kvflash/(cli/.*|__main__\.py)"
EXAMPLES = r"examples/.*|pyllama_kvflash/(needle/.*|[a-z_]+\.py)"
HUB = r"pyllama_kvflash/(files|hub)\.py|pyllama_kvflash/cli/(fetch|params|run)\.py"
POLICY = r"pyllama_kvflash/policy/.*|tests/support/paging\.py"
CONVERT = r"pyllama_kvflash/convert/.*|pyllama_kvflash/files\.py|tests/support/(conversions|drafters)\.py"
SCORING = (
    SCORERS
    + r"|pyllama_kvflash/policy/.*|pyllama_kvflash/engine/(decoder|generation|steps)\.py|pyllama_kvflash/native/.*"
)
GRAMMARS = r"pyllama_kvflash/json_schema/.*|pyllama_kvflash/native/.*|pyllama_kvflash/engine/(steps|writer)\.py"
DRAFTS = r"pyllama_kvflash/engine/(steps|writer)\.py|pyllama_kvflash/pool/speculation\.py|pyllama_kvflash/native/.*|patches/.*"
ENGINE = r"pyllama_kvflash/(engine|loading|native|policy|pool|scorers|snapshot)/.*|pyllama_kvflash/options\.py|patches/.*|vendor/.*"
LIBRARY = (
    r"pyllama_kvflash/native/.*|patches/.*|vendor/.*|CMakeLists\.txt|cffi_build\.py|tests/native/.*"
    r"|tests/support/(coarse_runs|families|models|oracles|tiny|transfers)\.py"
)
"""Files by what they do, each for the tests that show the same as long as these are as they were."""


def git(root: Path, *args: str) -> str | None:
    """What git says of a repository. None: it does not know, or there is no git."""
    try:
        return subprocess.run(["git", "-C", root, *args], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def base_commit(root: Path) -> str | None:
    """The commit whose tests count as passed: where this branch left the main branch; on the main branch, the commit before.

    None where that is not known: in a shallow clone, which may lack the commit, and without git, as in an unpacked sdist.
    """
    if git(root, "rev-parse", "--show-toplevel", "--is-shallow-repository") != f"{root}\nfalse":
        return None
    fork = git(root, "merge-base", "HEAD", "origin/HEAD")
    if fork and fork != git(root, "rev-parse", "HEAD"):
        return fork
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD~1")


@dataclass(frozen=True)
class Changes:
    """The files that differ between a commit and the work tree, those included that git was not told of."""

    base: str
    names: frozenset[str]

    @classmethod
    def find(cls, root: Path, wanted: str | None = None) -> "Changes | None":
        """Since a commit, or else since base_commit(). None: not known, or "all" is wanted."""
        base = wanted or base_commit(root)
        if base is None or base == "all":
            return None
        lists = git(root, "diff", "--name-only", base), git(root, "ls-files", "--others", "--exclude-standard")
        if None in lists:
            return None
        return cls(base, frozenset(name for text in lists if text for name in text.splitlines()))

    def touch(self, *patterns: str) -> bool:
        """Whether a file has changed whose whole name, from the root on, matches a regular expression."""
        return any(re.fullmatch(pattern, name) for pattern in patterns for name in self.names)


def crossed(*values: Iterable[Any]) -> list[Any]:
    """All combinations of values, for pytest.mark.parametrize. Those that differ from the first ones in more than one are nightly:
    each value is tried, and the parts that it reaches are those of the first combination.
    """
    first, *others = itertools.product(*values)
    return [
        pytest.param(*found, marks=[pytest.mark.nightly] if sum(map(operator.ne, found, first)) > 1 else [])
        for found in (first, *others)
    ]


def leave_out_nightly(items: list[pytest.Item], since: Changes) -> None:
    """Skip tests that are marked nightly, but for those whose own file has changed, or one that their mark names. Where the mark is
    `sampled`, the first combination of a test's values is run in any case.
    """
    skipped = pytest.mark.skip(reason=f"nightly; its files are as at {since.base[:10]}: `make test-all` runs it")
    seen = set()
    for item in items:
        own, test = re.escape(item.path.relative_to(ROOT).as_posix()), item.nodeid.partition("[")[0]
        marks = [*item.iter_markers("nightly"), *(item.iter_markers("sampled") if test in seen else ())]
        seen.add(test)
        if marks and not since.touch(own, *(pattern for mark in marks for pattern in mark.args)):
            item.add_marker(skipped)
