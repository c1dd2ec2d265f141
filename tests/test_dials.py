"""The options of all commands: their environment variables, and those that were removed."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.commands import USAGE, check_error, invoke

from pyllama_kvflash import removed
from pyllama_kvflash.cli import main

pytestmark = pytest.mark.native

environment = commands.environment
ROOT = Path(__file__).resolve().parent.parent
COMMANDS = dict(commands.leaves(main))


def options(*names: str) -> list[click.Option]:
    return [param for param in COMMANDS[names].params if isinstance(param, click.Option)]


def parsed(command: str, *args: str) -> dict[str, Any]:
    """What a command's options mean, without running it."""
    return main.commands[command].make_context(command, list(args)).params


#
# environment variables
#


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_an_option_has_one_variable_or_none(names: tuple[str, ...]) -> None:
    for option in options(*names):
        assert option.envvar is None or re.fullmatch(r"(LLAMA|KVFLASH)_[A-Z_]+", str(option.envvar)), option.name


def test_no_two_options_share_a_variable() -> None:
    """Nor does an option have another one in another command."""
    spellings, variables = defaultdict(set), defaultdict(set)
    for names in COMMANDS:
        own = [option.envvar for option in options(*names) if option.envvar]
        assert sorted(map(str, own)) == sorted(map(str, set(own))), names
        for option in options(*names):
            if option.envvar:
                spellings[option.envvar].add(option.opts[-1])
                variables[option.opts[-1]].add(option.envvar)
    assert {name: found for name, found in spellings.items() if len(found) > 1} == {}
    assert {name: found for name, found in variables.items() if len(found) > 1} == {}


def test_the_address_of_the_server_is_not_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_HOST", "2G")
    found = parsed("serve")
    assert (found["host"], found["host_limit"]) == ("127.0.0.1", 2 << 30)
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")
    found = parsed("serve")
    assert (found["host"], found["host_limit"]) == ("0.0.0.0", 2 << 30)


@pytest.mark.parametrize("name", removed.VARIABLES)
def test_a_former_variable_is_told_by_its_new_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An option is not left at its default in silence, least of all the API key."""
    now = removed.VARIABLES[name]
    mine = [names for names in COMMANDS if any(option.envvar == now for option in options(*names))]
    assert mine
    monkeypatch.setenv(name, "1")
    sentence = check_error(invoke(*mine[-1]), USAGE)
    assert sentence == f"kvflash: error: the environment variable {name} was renamed: set {now} instead"
    monkeypatch.setenv(name, "")
    assert "was renamed" not in invoke(*mine[-1], "--help").stderr


def test_a_former_variable_of_another_command_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_API_KEY", "secret")
    assert "KVFLASH_API_KEY" not in invoke("run", "-p", "Hello", "-n", "-5").stderr


def test_the_page_of_variables_is_up_to_date() -> None:
    script = [sys.executable, ROOT / "docs/environment.py", "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_variable_that_the_package_reads() -> None:
    page = (ROOT / "docs/ENVIRONMENT.md").read_text()
    for source in (ROOT / "pyllama_kvflash").rglob("*.py"):
        for name in re.findall(r"""environ(?:\.get\(|\[)["'](\w+)""", source.read_text()):
            assert f"`{name}`" in page, f"{source.name} reads {name}"
