"""Schemas that nobody here wrote, with values that are valid and values that are not. Only their data is used.

JSON-Schema-Test-Suite is in the sdist of jsonschema, which is downloaded once and checked. MaskBench (11,305 schemas of files and
tools that people use, 139 MB) is a folder of github.com/guidance-ai/jsonschemabench: `maskbench/data`, named by KVFLASH_MASKBENCH.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SDIST = "jsonschema==4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
MASKBENCH = "KVFLASH_MASKBENCH"


@dataclass(frozen=True)
class Group:
    """A schema with its values, each with whether it is valid."""

    name: str
    schema: Any
    values: tuple[tuple[Any, bool], ...]


def _group(name: str, given: dict[str, Any]) -> Group:
    return Group(name, given["schema"], tuple((test["data"], test["valid"]) for test in given["tests"]))


def _is_whole(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def test_suite(scratch: Path) -> Iterator[Group]:
    """Skips the test where the sdist cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvflash"
    path = cache / "jsonschema-4.26.0.tar.gz"
    if not _is_whole(path):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary=:all:",
            "-d",
            scratch,
            SDIST,
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            cache.mkdir(parents=True, exist_ok=True)
            (scratch / path.name).replace(path)
        except (OSError, subprocess.SubprocessError) as err:
            pytest.skip(f"{SDIST} cannot be had: {err}")
    assert _is_whole(path), f"{path} is not what it should be"
    with tarfile.open(path) as archive:
        for member in archive:
            _, *parts = Path(member.name).parts
            if parts[:2] == ["json", "tests"] and parts[2] in DRAFTS and member.name.endswith(".json"):
                name = "/".join(parts[2:])
                file = archive.extractfile(member)
                assert file is not None
                yield from (_group(f"{name}: {group['description']}", group) for group in json.load(file))


def maskbench(step: int) -> Iterator[Group]:
    """Every so many files. Skips the test where they cannot be had."""
    folder = os.environ.get(MASKBENCH)
    if not folder:
        pytest.skip(f"{MASKBENCH} names no folder: `maskbench/data` of github.com/guidance-ai/jsonschemabench")
    paths = sorted(Path(folder).glob("*.json"))
    assert len(paths) > 10_000, f"{folder} is not maskbench/data"
    for path in paths[::step]:
        yield _group(path.name, json.loads(path.read_text("utf-8")))
