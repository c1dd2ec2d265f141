"""Dockerfile and workflows name targets, files, stages, options and extras that exist. Nothing here builds an image."""

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from pyllama_kvflash.cli import main
from pyllama_kvflash.serve import app

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
WORKFLOWS = {path.stem: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").iterdir()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def jobs(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(WORKFLOWS[name])["jobs"])


def commands() -> list[str]:
    """What the workflows run, and the Dockerfile."""
    steps = [step for name in WORKFLOWS for job in jobs(name).values() for step in job["steps"]]
    joined = DOCKERFILE.replace("\\\n", " ")
    return [s["run"] for s in steps if "run" in s] + re.findall(r"^RUN (.*)$", joined, re.MULTILINE)


def test_targets_and_scripts_exist() -> None:
    words = [shlex.split(part) for command in commands() for part in command.split("&&")]
    made = {word for first, *rest in words if first == "make" for word in rest}
    assert {"wheel", "wheel-cuda", "wheel-test"} <= made <= targets()
    scripts = {first for first, *_ in words if "/" in first and not first.startswith(("/", "-"))}
    assert scripts == {".ci/run"}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_stages_are_there_before_they_are_used() -> None:
    seen: set[str] = set()
    for line in DOCKERFILE.splitlines():
        if found := re.match(r"FROM (\S+)(?: AS (\S+))?$", line):
            base, name = found.groups()
            for variant in ("cpu", "cuda"):
                image = base.replace("${VARIANT}", variant)
                assert image in seen or re.fullmatch(r"[\w/]+:[\w.-]+", image), line
            seen.add(name)
        elif found := re.search(r"from=([\w-]+)", line):
            assert found[1] in seen, line
    assert re.search(r"^ARG VARIANT=cpu\n", DOCKERFILE, re.MULTILINE)


def options(command: str) -> dict[str, click.Option]:
    """The options of a command by their variable in the environment."""
    params = [p for p in main.commands[command].params if isinstance(p, click.Option)]
    return {str(p.envvar): p for p in params if p.envvar}


def test_benches_are_released_with_the_package() -> None:
    """They use more of it than its public names: so one version goes with one."""
    benches = tomllib.loads((ROOT / "bench" / "pyproject.toml").read_text("utf-8"))["project"]
    version = PROJECT["project"]["version"]
    assert benches["version"] == version
    assert f"pyllama-kvflash=={version}" in benches["dependencies"]
    assert PROJECT["project"]["optional-dependencies"]["bench"] == [benches["name"]]


def test_the_container_serves_where_it_says() -> None:
    serve = options("serve")
    assert set(re.findall(r"LLAMA_ARG_\w+", DOCKERFILE)) <= serve.keys()
    port = serve["LLAMA_ARG_PORT"].default
    assert f"\nEXPOSE {port}\n" in DOCKERFILE
    assert f"'LLAMA_ARG_PORT', {port}" in DOCKERFILE
    assert "/health" in DOCKERFILE
    assert '"/health"' in Path(app.__file__).read_text("utf-8")


def test_nothing_that_is_built_gets_into_the_container() -> None:
    """And all that a wheel is built of does."""
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    kept = (ROOT / ".gitignore").read_text("utf-8")
    assert {".venv", "build", "dist", "vendor/llama.cpp", "vendor/cache"} <= set(ignored)
    assert all(f"/{name}/" in kept for name in (".venv", "build", "dist", "vendor/llama.cpp", "vendor/cache"))
    needed = {"pyproject.toml", "CMakeLists.txt", "cffi_build.py", "Makefile", "README.md", "LICENSE", "patches"}
    assert not needed & set(ignored)
    assert all((ROOT / name).exists() for name in needed)


def test_files_of_a_release_come_from_jobs_before_it() -> None:
    found = jobs("release")
    for job in ("release", "pypi"):
        assert set(found[job]["needs"]) == {"sdist", "wheel"}
    for job, path in (("sdist", "dist/*"), ("wheel", "dist/*.whl")):
        [upload] = [s for s in found[job]["steps"] if s.get("uses", "").startswith("actions/upload-artifact@")]
        assert upload["with"]["path"] == path
    assert yaml.safe_load(WORKFLOWS["release"])[True] == {"push": {"tags": ["v*"]}}, "YAML reads `on` as true"


def test_an_sdist_has_none_of_llama_cpp() -> None:
    assert {"vendor/llama.cpp/", "vendor/cache/"} <= set(PROJECT["tool"]["scikit-build"]["sdist"]["exclude"])
